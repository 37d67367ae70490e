"""The exact baseline: every token's KV, as the model made it."""

from dataclasses import dataclass
from typing import ClassVar

from kvcompress.methods.base import Acts, Method


@dataclass(frozen=True)
class Exact(Method):
    """Keeps everything. What all other methods are measured against."""

    name: ClassVar[str] = "exact"
    acts: ClassVar[Acts] = "never"
