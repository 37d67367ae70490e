"""Random texts of one or two turns, fed to a wrapped model in any number of calls, and what a method keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from kvcompress.budget import parse_bytes, tokens_within
from kvcompress.cache_layer import shapes_of
from kvcompress.methods.base import Method
from tests.choices import check_everything_kept, check_h2o, check_snapkv, check_streaming, share
from tests.families import VOCABULARY
from tests.oracle import Call, Oracle

PACK2 = "kivi(bits=2, group_size=8, residual=16)"
PACK4 = "kivi(bits=4, group_size=4, residual=8)"
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=14)",
    "streaming_llm(sinks=2, window=14, positions='original')",
    "streaming_llm(sinks=0, window=9)",
    "streaming_llm(sinks=3, budget=0.4)",
    "streaming_llm(sinks=1, budget='9kB', positions='original')",
    "h2o(heavy=6, recent=8)",
    "h2o(heavy=0.2, recent=0.3)",
    "h2o(budget=15, positions='cache')",
    "h2o(budget='9kB')",
    "snapkv(budget=20, window=6, kernel=3)",
    "snapkv(budget=0.4, window=8, kernel=5, pooling='avg')",
    "snapkv(budget=0.2, window=8, positions='cache')",
    "snapkv(budget='9kB', window=6, kernel=3, positions='cache')",
    PACK2,
    PACK4,
    f"snapkv(budget=24, window=6, kernel=3) | {PACK2}",
    f"snapkv(budget=0.5, window=6) | {PACK4}",
    f"snapkv(budget='7kB', window=6) | {PACK4}",
    f"h2o(heavy=12, recent=16) | {PACK2}",
    f"h2o(budget=0.5) | {PACK4}",
    f"h2o(budget='7kB') | {PACK2}",
    f"streaming_llm(sinks=2, window=18) | {PACK2}",
    f"streaming_llm(sinks=3, budget=0.5, positions='original') | {PACK4}",
]


@dataclass
class Turn:
    """A prompt of some columns, in chunks if asked for, and the columns of the calls that follow it."""

    prompt: int
    chunk: int | None
    decoding: list[int]

    def calls(self, padding: list[int]) -> list[list[int]]:
        """Tokens of each row in every call, `padding[b]` columns of the prompt being none of row b.

        Every row is cut as it would be alone, and all end together.
        """
        rows = []
        for before in padding:
            tokens = self.prompt - before
            chunk = self.chunk or tokens
            rows.append([min(chunk, tokens - start) for start in range(0, tokens, chunk)])
        most = max(map(len, rows))
        prompt = list(zip(*([0] * (most - len(row)) + row for row in rows), strict=True))
        return [list(counts) for counts in prompt] + [[columns] * len(padding) for columns in self.decoding]


@dataclass
class Script:
    """Ids [B, N] behind `padding[b]` columns of padding, and how they are fed."""

    ids: Tensor
    padding: list[int]
    turns: list[Turn]

    @property
    def mask(self) -> Tensor:
        return (torch.arange(self.ids.shape[1]) >= torch.tensor(self.padding)[:, None]).long()

    @property
    def calls_of_turns(self) -> list[list[list[int]]]:
        """Tokens of each row in every call of every turn; only the first prompt is padded."""
        return [
            turn.calls(self.padding if index == 0 else [0] * len(self.padding)) for index, turn in enumerate(self.turns)
        ]

    @property
    def calls(self) -> list[list[int]]:
        return [counts for turn in self.calls_of_turns for counts in turn]

    @property
    def prompt_lengths(self) -> list[list[int]]:
        """For every call and row the tokens of the text up to the end of the prompt that it belongs to or follows."""
        lengths, fed = [], [-padding for padding in self.padding]
        for turn, calls in zip(self.turns, self.calls_of_turns, strict=True):
            lengths += [[before + turn.prompt for before in fed]] * len(calls)
            fed = [before + turn.prompt + sum(turn.decoding) for before in fed]
        return lengths

    @property
    def prompt_calls(self) -> list[tuple[int, int]]:
        """The first and last call of every prompt."""
        found, first = [], 0
        for turn, calls in zip(self.turns, self.calls_of_turns, strict=True):
            found.append((first, first + len(calls) - len(turn.decoding) - 1))
            first += len(calls)
        return found

    def play(
        self, wrapped: kvc.Wrapped, cache: kvc.CompressedCache, after: Callable[[int], None] = lambda call: None
    ) -> None:
        """Feeds everything; `after(c)` is called when the c-th call or, in chunks, the last of a prompt is done."""
        start = done = 0
        for turn, calls in zip(self.turns, self.calls_of_turns, strict=True):
            prompt = slice(start, start + turn.prompt)
            wrapped.prefill(self.ids[:, prompt], self.mask[:, prompt], cache, turn.chunk)
            start += turn.prompt
            done += len(calls) - len(turn.decoding)
            after(done - 1)
            for columns in turn.decoding:
                wrapped(self.ids[:, start : start + columns], cache=cache)
                start += columns
                done += 1
                after(done - 1)


@st.composite
def scripts(draw: st.DrawFn, rows: int = 3, chunks: bool = True, turns: int = 2, longest: int = 60) -> Script:
    """Any script; every row has a token, and rows may need more or fewer chunks."""
    plan = []
    for _ in range(draw(st.integers(1, turns))):
        prompt = draw(st.integers(1, longest))
        chunk = draw(st.none() | st.integers(max(1, prompt // 6), prompt)) if chunks else None
        plan.append(Turn(prompt, chunk, draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 17]), max_size=5))))
    first = plan[0].prompt
    padding = [draw(st.integers(0, first - 1)) for _ in range(draw(st.integers(1, rows)))]
    total = sum(turn.prompt + sum(turn.decoding) for turn in plan)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return Script(torch.randint(3, VOCABULARY, (len(padding), total), generator=generator), padding, plan)


def tokens(budget: int | float | str, lengths: list[int], cache: kvc.CompressedCache, first: bool = True) -> list[int]:
    """What a budget gives each row of a prompt. A size in bytes is tested by itself; here the cache is asked."""
    if isinstance(budget, str):
        shapes = shapes_of(cache.layers)
        return [tokens_within(parse_bytes(budget), cache.method, shapes, lengths, first)] * len(lengths)
    return [share(budget, length) if isinstance(budget, float) else budget for length in lengths]


def check_kept(method: Method, script: Script, calls: list[Call], cache: kvc.CompressedCache, told: Oracle) -> int:
    """Asserts that what was kept after every call is what the method ought to keep; returns how many it evicted."""
    part = method.evicting
    prompts = script.prompt_lengths
    if isinstance(part, kvc.StreamingLLM):
        if part.window is not None:
            sinks, window = [[part.sinks] * len(row) for row in prompts], [[part.window] * len(row) for row in prompts]
        else:
            assert part.budget is not None
            totals = [tokens(part.budget, lengths, cache) for lengths in prompts]
            sinks = [[part.sinks if total > part.sinks else 0 for total in row] for row in totals]
            window = [
                [total - first for total, first in zip(*rows, strict=True)] for rows in zip(totals, sinks, strict=True)
            ]
        return check_streaming(told, calls, cache, sinks, window)
    if isinstance(part, kvc.H2O):
        if part.budget is not None:
            totals = [tokens(part.budget, lengths, cache) for lengths in prompts]
            heavy, recent = [[n // 2 for n in row] for row in totals], [[n - n // 2 for n in row] for row in totals]
        else:
            assert part.heavy is not None
            assert part.recent is not None
            heavy = [tokens(part.heavy, lengths, cache) for lengths in prompts]
            recent = [tokens(part.recent, lengths, cache) for lengths in prompts]
        return check_h2o(told, calls, cache, heavy, recent)
    if isinstance(part, kvc.SnapKV):
        ends = script.prompt_calls
        budgets = [tokens(part.budget, prompts[last], cache, number == 0) for number, (_, last) in enumerate(ends)]
        return check_snapkv(told, calls, cache, ends, budgets, part.window, part.kernel, part.pooling)
    check_everything_kept(told, calls, cache)
    return 0
