"""How much to keep: tokens, a ratio of the prompt, or bytes for the whole cache."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcompress.kernels.layout import LANES

if TYPE_CHECKING:
    from kvcompress.methods.base import Method

Budget = int | float | str
"""`1024` tokens, `0.25` of the prompt, or `"64MiB"` for the whole cache.

Bytes are an upper limit: at every step under a method that acts on every call; when prefill ends under one that acts
then, whose cache grows with every token that is decoded. Tokens and ratios limit tokens, not what holes take.
"""

MANY = 2**50
"""What fits at this many tokens has no limit."""

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


def method_bytes(method: Method, shapes: Counter[LayerShape], kept: list[int], seen: list[int]) -> int:
    """Bytes that `method` stores right after one prefill that kept `kept[b]` of row b's `seen[b]` tokens, spare apart.

    `shapes`: how many layers there are of each shape.
    """

    def of_layer(shape: LayerShape) -> int:
        if shape.window is None:
            return method.stored_bytes(shape, kept, seen)
        return len(seen) * sliding_bytes(shape, max(seen))

    return sum(number * of_layer(shape) for shape, number in shapes.items())


def most_bytes(method: Method, shapes: Counter[LayerShape], rows: int, kept: int) -> int:
    """The most that `method` ever stores after a call that leaves at most `kept` tokens of a row, holes counted."""

    def of_layer(shape: LayerShape) -> int:
        return method.most_bytes(shape, kept) if shape.window is None else sliding_bytes(shape, shape.window + 1)

    return rows * sum(number * of_layer(shape) for shape, number in shapes.items())


def sliding_bytes(shape: LayerShape, seen: int) -> int:
    """Bytes that one row of a sliding layer stores after `seen` tokens: its window, and positions once it is full."""
    assert shape.window is not None
    return shape.exact_bytes(seen) + (4 * shape.window if seen > shape.window else 0)


def tokens_within(
    limit: int, method: Method, shapes: Counter[LayerShape], prompts: list[int], first: bool = True
) -> int:
    """The most tokens that a row may keep while the cache of all rows stays within `limit` bytes.

    Under a method that acts on every call: at every step, at every length, whatever holes packing leaves. Under one
    that acts when prefill ends: right after it, for rows of `prompts[b]` tokens; `first` says that the cache was
    empty before. Raises ValueError if not one token fits.
    """
    longest = max(prompts)
    if method.grows and first:
        most = longest

        def bytes_of(tokens: int) -> int:
            return method_bytes(method, shapes, [min(tokens, prompt) for prompt in prompts], prompts)
    else:
        most = MANY

        def bytes_of(tokens: int) -> int:
            return most_bytes(method, shapes, len(prompts), tokens)

    found = largest_fitting(lambda tokens: bytes_of(tokens) <= limit, most, period_of(method))
    if not found:
        each = f" in each of {len(prompts)} rows" if len(prompts) > 1 else ""
        raise ValueError(
            f"a budget of {limit:,} bytes does not hold one token{each} ({bytes_of(1):,} bytes); give more"
        )
    return found


def period_of(method: Method) -> int:
    """Tokens after which the bytes of a method repeat, but for what each token adds: they fall where packing begins."""
    return 1 if method.packing is None else math.lcm(method.packing.residual, LANES)


def largest_fitting(fits: Callable[[int], bool], most: int = MANY, period: int = 1) -> int:
    """The largest number in [1, most] that fits; 0 if none does.

    Where a number fits, so must the one `period` below it; in between it may be otherwise.
    """
    if fits(most):
        return most

    def last_in(block: int) -> int:
        numbers = range(min(most, (block + 1) * period), block * period, -1)
        return next((number for number in numbers if fits(number)), 0)

    blocks, beyond = -(-most // period), 1
    while beyond < blocks and last_in(beyond):
        beyond *= 2
    candidates = range(beyond // 2, min(beyond, blocks))
    fitting = bisect_left(candidates, True, key=lambda block: not last_in(block))
    return last_in(candidates[fitting - 1]) if fitting else 0
