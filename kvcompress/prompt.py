"""A prompt in parts: every row of a batch is cut by its own tokens, as if it were alone.

B rows, C columns of the prompt, T columns of one call; padding may stand before the tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvcompress.budget import resolve
from kvcompress.cache import CompressedCache
from kvcompress.errors import WrapError
from kvcompress.methods.base import Method
from kvcompress.stores.slots import column

MOST_AT_ONCE = 1024  # tokens of a prompt that is cut by itself


@dataclass(frozen=True)
class Part:
    """One call's share of a prompt: of row b `counts[b]` columns from `starts[b]` on, padded at the left to T."""

    starts: list[int]
    counts: list[int]

    def take(self, x: Tensor) -> Tensor:
        """The columns of this part [B, T, ...] out of all of the prompt's `x` [B, C, ...]."""
        columns, first = max(self.counts), self.starts[0]
        if self.starts.count(first) == self.counts.count(columns) == len(x):
            return x[:, first : first + columns]
        ends = column([start + count for start, count in zip(self.starts, self.counts, strict=True)], x.device)
        index = (ends - torch.arange(columns, 0, -1, device=x.device)).clamp(min=0)
        return x[torch.arange(len(x), device=x.device)[:, None], index]

    def mask(self, device: torch.device) -> Tensor | None:
        """The padding mask [B, T] of this part; None where every column is a token."""
        columns = max(self.counts)
        if self.counts.count(columns) == len(self.counts):
            return None
        return (torch.arange(columns, 0, -1, device=device) <= column(self.counts, device)).long()


def parts(counts: list[int], columns: int, sizes: Callable[[], list[int]]) -> Iterator[Part]:
    """Cuts a prompt of `columns` columns, `counts[b]` of them tokens of row b at its end, into calls.

    `sizes()` says before each call how many tokens of each row it may take. A row that needs fewer calls than others
    begins later: all of them end in the last one.
    """
    left = list(counts)
    while any(left):
        each = sizes()
        calls = [-(-rest // size) for rest, size in zip(left, each, strict=True)]
        now = [min(rest, size) if need == max(calls) else 0 for rest, size, need in zip(left, each, calls, strict=True)]
        yield Part([columns - rest for rest in left], now)
        left = [rest - taken for rest, taken in zip(left, now, strict=True)]


def trained_length(config: PreTrainedConfig) -> int | None:
    """How many positions a model was trained on, if its configuration says."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_chunk(chunk: int | None) -> None:
    """Raises WrapError unless `chunk` is a number of tokens or None."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise WrapError(f"chunk must be an integer of at least 1, got {chunk!r}")


def stays_in_range(method: Method) -> bool:
    """Whether a text of any length stays within the positions that the model was trained on, if it is cut."""
    return method.evicting is not None and method.evicting.acts == "every_call" and method.position_mode == "cache"


def chunk_sizes(cache: CompressedCache, counts: list[int], trained: int | None) -> list[int]:
    """How many tokens of each row to feed at a time to a cache that expects a prompt of `counts[b]` of them.

    All at once, but where `stays_in_range` so many that with what is stored they are no more than the `trained` ones.
    """
    if trained is None or not stays_in_range(cache.method):
        return counts
    return [
        _size(cache, length - count, length, count, trained)
        for length, count in zip(cache.prompt_lengths, counts, strict=True)
    ]


def _size(cache: CompressedCache, before: int, length: int, count: int, trained: int) -> int:
    kept = _kept(cache, length)
    if min(before, kept) + count <= trained:
        return count
    most = max(1, min(MOST_AT_ONCE, trained // 4))
    return min(most, trained - kept) if kept < trained else most


def _kept(cache: CompressedCache, length: int) -> int:
    """How many tokens stay of a row whose prompt ends at `length`; 0 before a byte budget can be known to hold any."""
    evicting = cache.method.evicting
    assert evicting is not None
    fed = any(layer.shape is not None for layer in cache.layers)
    within: Callable[[int], int] = cache.tokens_within if fed else lambda limit: 0
    return evicting.kept_tokens(lambda budget: resolve(budget, [length], within)[0])
