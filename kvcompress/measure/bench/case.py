"""One line of the bench: a measured ratio and, where there is one, the limit that it must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class NotHere(RuntimeError):
    """A case needs a package, a model or a device that this machine does not have; the message says which."""


@dataclass
class Line:
    """What a case printed. `value` is compared with `limit`: at most it, or at least it where `more_is_better`."""

    name: str
    against: str
    value: float | None
    limit: float | None = None
    more_is_better: bool = False
    low: float | None = None
    high: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def passed(self) -> bool | None:
        """None where there is nothing to compare."""
        if self.value is None or self.limit is None:
            return None
        return self.value >= self.limit if self.more_is_better else self.value <= self.limit


Case = Callable[[], list[Line]]
cases: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Adds a function to the bench under its own name."""
    cases[function.__name__] = function
    return function
