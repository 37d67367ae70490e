"""Which tokens a method ought to keep, worked out slowly from the oracle's probabilities, one KV head at a time.

Where two scores differ by less than rounding explains, either choice is right; exact ties go to the lowest position.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kvcompress import CompressedCache
from tests.oracle import Call, Oracle

ROUNDING = 1e-5

Vector = np.ndarray[Any, np.dtype[Any]]


def share(ratio: float, tokens: int) -> int:
    """What a ratio gives of a prompt of so many tokens."""
    return max(1, int(np.floor(ratio * tokens + 1e-9)))


def kept_lists(kept: Tensor, row: int, head: int) -> list[int]:
    """The positions that one KV head of a row still holds."""
    return [position for position in kept[row, head].tolist() if position >= 0] if kept.numel() else []


class Decisions:
    """Walks over a recorded run, one KV head of one full-attention layer at a time."""

    def __init__(self, oracle: Oracle, calls: list[Call], cache: CompressedCache) -> None:
        self.oracle, self.calls = oracle, calls
        self.layers = [layer.index for layer in cache.layers if layer.compresses]
        self.after = [call.kept for call in calls[1:]] + [[cache.kept(layer) for layer in range(len(cache.layers))]]
        self.evicted = 0
        method = cache.method
        self.gives_up_units = method.byte_budget is not None and method.packing is not None

    def heads(self) -> list[tuple[int, int, int]]:
        """(layer, row, KV head) of all that is compressed."""
        shapes = {layer: self.oracle.probabilities[layer].shape for layer in self.layers}
        return [
            (layer, row, head)
            for layer in self.layers
            for row in range(shapes[layer][0])
            for head in range(shapes[layer][1])
        ]

    def fed(self, call: int, row: int) -> list[int]:
        """Positions of the tokens of a row that came with a call."""
        return list(range(*self.oracle.spans[call][row]))

    def attention(self, layer: int, row: int, head: int, queries: list[int]) -> Vector:
        """Attention of the tokens at `queries`, averaged over the query heads of the group: [queries, positions]."""
        padding = self.oracle.padding[row]
        columns = [query + padding for query in queries]
        return self.oracle.probabilities[layer][row, head][:, columns, padding:].mean(0).numpy()

    def compare(self, got: list[int], stored: list[int], scores: Vector, total: int, always: list[int]) -> None:
        """Asserts that `got` is `always` and the best scored of the others, `total` in all; scores as in `stored`.

        Under a budget in bytes, whole packed units go where holes take the room: then fewer, whichever these leave.
        """
        assert set(always) <= set(got) <= set(stored), (got, always)
        if self.gives_up_units and len(got) < min(total, len(stored)):
            self.evicted += len(stored) - len(got)
            return
        assert len(got) == min(total, len(stored)), (got, stored, total)
        value = dict(zip(stored, scores.tolist(), strict=True))
        older = [position for position in stored if position not in set(always)]
        best = sorted(older, key=lambda position: (-value[position], position))[: len(got) - len(always)]
        chosen = set(got) - set(always)
        for mine in chosen - set(best):
            for other in set(best) - chosen:
                assert 0 < abs(value[mine] - value[other]) < ROUNDING, (mine, other, value[mine], value[other])
        self.evicted += len(stored) - len(got)


PerCall = Sequence[Sequence[int]]
"""A number of tokens for every call and row."""


def check_h2o(oracle: Oracle, calls: list[Call], cache: CompressedCache, heavy: PerCall, recent: PerCall) -> int:
    """H2O with `heavy[c][b]` and `recent[c][b]` tokens after call c; returns how many tokens were evicted.

    The score of a key is the sum of its softmax column over every query so far; it follows the token.
    """
    run = Decisions(oracle, calls, cache)
    for layer, row, head in run.heads():
        stored: list[int] = []
        scores: dict[int, float] = {}
        for index, after in enumerate(run.after):
            new = run.fed(index, row)
            if not new:
                continue
            stored = stored + new
            attention = run.attention(layer, row, head, new).sum(0)
            scores = {position: scores.get(position, 0.0) + float(attention[position]) for position in stored}
            got = kept_lists(after[layer], row, head)
            values = np.array([scores[position] for position in stored])
            newest = recent[index][row]
            run.compare(got, stored, values, heavy[index][row] + newest, stored[-newest:])
            stored = got
    return run.evicted


def check_snapkv(
    oracle: Oracle,
    calls: list[Call],
    cache: CompressedCache,
    prompts: Sequence[tuple[int, int]],
    budgets: Sequence[Sequence[int]],
    window: int,
    kernel: int,
    pooling: str,
) -> int:
    """SnapKV, whose k-th prompt was calls [first, last] of `prompts[k]` and leaves `budgets[k][b]` tokens of row b."""
    run = Decisions(oracle, calls, cache)
    ends = {last: (first, budget) for (first, last), budget in zip(prompts, budgets, strict=True)}
    for layer, row, head in run.heads():
        stored: list[int] = []
        for index, after in enumerate(run.after):
            stored = stored + run.fed(index, row)
            got = kept_lists(after[layer], row, head)
            if index not in ends:
                assert got == stored
                continue
            first, budget = ends[index]
            prompt = [position for call in range(first, index + 1) for position in run.fed(call, row)]
            votes = run.attention(layer, row, head, prompt[-window:]).sum(0)[stored]
            always = stored[-min(window, budget[row]) :]
            votes[len(stored) - len(always) :] = 0
            run.compare(got, stored, pooled(votes, kernel, pooling), budget[row], always)
            stored = got
    return run.evicted


def pooled(votes: Vector, kernel: int, pooling: str) -> Vector:
    """Each vote with its `kernel // 2` neighbours on either side; an average counts zeros beyond the ends."""
    padded = np.pad(votes, kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)
    return windows.max(-1) if pooling == "max" else windows.sum(-1) / kernel


def check_streaming(oracle: Oracle, calls: list[Call], cache: CompressedCache, sinks: PerCall, window: PerCall) -> int:
    """StreamingLLM with `sinks[c][b]` first and `window[c][b]` last tokens after call c."""
    run = Decisions(oracle, calls, cache)
    for layer, row, head in run.heads():
        stored: list[int] = []
        for index, after in enumerate(run.after):
            stored = stored + run.fed(index, row)
            got = kept_lists(after[layer], row, head)
            first, last = sinks[index][row], window[index][row]
            expected = stored if len(stored) <= first + last else stored[:first] + stored[len(stored) - last :]
            assert got == expected
            run.evicted += len(stored) - len(got)
            stored = got
    return run.evicted


def check_everything_kept(oracle: Oracle, calls: list[Call], cache: CompressedCache) -> None:
    """A method that evicts nothing."""
    run = Decisions(oracle, calls, cache)
    for layer, row, head in run.heads():
        stored: list[int] = []
        for index, after in enumerate(run.after):
            stored = stored + run.fed(index, row)
            assert kept_lists(after[layer], row, head) == stored
