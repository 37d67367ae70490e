"""How much to keep: tokens, a ratio of the prompt, or bytes for the whole cache."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcompress.kernels.layout import LANES

if TYPE_CHECKING:
    from kvcompress.methods.base import Method

Budget = int | float | str
"""`1024` tokens, `0.25` of the prompt, or `"64MiB"` for the whole cache."""

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores a token in: KV heads, head dims and bytes of a value, and its window if it slides."""

    heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    window: int | None = None

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of the exact KV of one row of `tokens` tokens; a sliding layer holds no more than its window."""
        held = tokens if self.window is None else min(tokens, self.window)
        return held * self.heads * (self.key_dim + self.value_dim) * self.itemsize


def parse_bytes(text: str) -> int:
    """`"64MiB"`, `"1.5GB"` or `"4096B"` as bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f'budget {text!r} is not a size in bytes; write it like "64MiB" or "1.5GB"')
    return int(float(found[1]) * _UNITS[found[2].lower()])


def check_budget(budget: Budget, name: str = "budget", at_least: int = 1, reason: str = "one token") -> None:
    """Raises ValueError or TypeError unless `budget` is one of the three forms and an absolute one >= `at_least`."""
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise TypeError(f'{name} must be tokens (256), a ratio (0.25) or bytes ("64MiB"), got {budget!r}')
    if isinstance(budget, str):
        if parse_bytes(budget) <= 0:
            raise ValueError(f"{name} {budget!r} leaves no room for a token; give a positive size")
    elif isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(
                f"{name} {budget!r} as a ratio must lie in (0, 1]; write whole tokens as an integer, such as 256"
            )
    elif budget < at_least:
        raise ValueError(f"{name} {budget!r} tokens is less than {reason} ({at_least}); give at least {at_least}")


def ratio_of(ratio: float, tokens: int) -> int:
    """`ratio` of `tokens`, rounded down but never below 1; 1e-9 guards against 0.3 * 10 = 2.9999…"""
    return max(1, math.floor(ratio * tokens + 1e-9))


def resolve(budget: Budget, prompt_lengths: list[int], tokens_within: Callable[[int], int]) -> list[int]:
    """Tokens to keep for each row; `tokens_within(bytes)` says how many tokens a row fit into a byte budget."""
    if isinstance(budget, str):
        return [tokens_within(parse_bytes(budget))] * len(prompt_lengths)
    if isinstance(budget, float):
        return [ratio_of(budget, length) for length in prompt_lengths]
    return [budget] * len(prompt_lengths)


def method_bytes(method: Method, shapes: Counter[LayerShape], rows: int, kept: int, seen: int) -> int:
    """Bytes that `method` stores for `kept` of `seen` tokens in each of `rows` rows, spare apart."""

    def of_layer(shape: LayerShape) -> int:
        if shape.window is None:
            return method.stored_bytes(shape, kept, seen)
        positions = 4 * shape.window if seen > shape.window else 0
        return shape.exact_bytes(seen) + positions

    return rows * sum(number * of_layer(shape) for shape, number in shapes.items())


def tokens_within(limit: int, method: Method, shapes: Counter[LayerShape], rows: int, longest: int) -> int:
    """The largest number of tokens a row whose stored bytes fit into `limit`; the longest prompt has `longest`.

    Raises ValueError if not one token fits.
    """
    # Where the whole prompt fits, nothing is evicted and no positions are stored.
    room = longest if method_bytes(method, shapes, rows, longest, longest) <= limit else 0

    def bytes_of(tokens: int) -> int:
        return method_bytes(method, shapes, rows, tokens, max(longest, tokens + 1))

    if room and bytes_of(1) > limit:
        return room
    packing = method.packing
    period = 1 if packing is None else math.lcm(packing.residual, LANES)
    far = 64 * max(period, *(shape.window or 0 for shape in shapes))
    grows = bytes_of(far + period) - bytes_of(far)  # from here on the same for every further period
    return max(room, largest_fitting(bytes_of, limit, far + period * (limit // grows + 1), period))


def largest_fitting(bytes_of: Callable[[int], int], limit: int, most: int, period: int = 1) -> int:
    """The largest number of tokens in [1, most] with `bytes_of(tokens) <= limit`.

    `bytes_of` must not fall from one number to that plus `period`; in between it may, as it does where packing begins.
    Raises ValueError if not one token fits.
    """
    if bytes_of(1) > limit:
        raise ValueError(f"a budget of {limit:,} bytes does not hold one token ({bytes_of(1):,} bytes); give more")
    candidates = (range(offset, most + 1, period) for offset in range(1, min(period, most) + 1))
    fitting = ((tokens, bisect_right(tokens, limit, key=bytes_of)) for tokens in candidates)
    return max(tokens[count - 1] for tokens, count in fitting if count)
