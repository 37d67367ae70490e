"""Log-likelihoods over a compressed cache: a prompt is prefilled and compressed, what follows it is decoded.

R rows are fed at once, T tokens a call; V is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompress.cache import CompressedCache
from kvcompress.evals.stored import StoredKV, stored_kv, take_rows
from kvcompress.measure.decoding import columns_per_call
from kvcompress.measure.stored import compressed_rows
from kvcompress.wrapping import Wrapped


@dataclass(frozen=True)
class Continuation:
    """`fed` is decoded behind the compressed `prompt`; the last `len(scored)` predictions are those of `scored`.

    `fed` is one token shorter than `scored` where the first of them is predicted by the prompt's last token.
    """

    prompt: tuple[int, ...]
    fed: tuple[int, ...]
    scored: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.scored) <= len(self.fed) + 1:
            raise ValueError(
                f"{len(self.scored)} scored tokens: expected 1 to {len(self.fed) + 1}, what a prompt and "
                f"{len(self.fed)} fed tokens predict"
            )


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of the scored ids in nats, and whether each is the likeliest.

    `stored` is read after compression, or at the end where `score` was asked to. `compressed` says whether any of
    the tokens was fed to a cache that had evicted or packed something of its row.
    """

    log_probability: float
    greedy: bool
    stored: StoredKV
    compressed: bool


def behind_context(context: Sequence[int], continuation: Sequence[int], tail: int = 1) -> Continuation:
    """A continuation of which the last `tail` tokens of the context are decoded, too.

    Without at least one of them the first prediction would come from the uncompressed prefill. A context of one
    token is all prompt.
    """
    cut = max(1, len(context) - tail)
    ids = (*context, *continuation)
    return Continuation(ids[:cut], ids[cut:-1], tuple(continuation))


def score(
    wrapped: Wrapped,
    items: Sequence[Continuation],
    *,
    rows: int = 1,
    longest: int | None = None,
    chunk: int | None = None,
    padding_id: int = 0,
    softmax_dtype: torch.dtype | None = None,
    measure_at_end: bool = False,
    on_result: Callable[[int, Likelihood], None] = lambda index, result: None,
) -> list[Likelihood]:
    """The likelihood of each item. Items with the same prompt share its prefill and go on from forks of it.

    Those that feed the same tokens behind it share them, too, however many of them each scores.
    At most `rows` rows are decoded at once, none of them longer than `longest` tokens with what fills it up. Methods
    that act on every call are fed token by token, others in larger calls with equal results. `on_result(index,
    result)` is told of every result as soon as it is known.
    """
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for index, item in enumerate(items):
        by_prompt.setdefault(item.prompt, {}).setdefault(item.fed, []).append(index)
    results: dict[int, Likelihood] = {}
    for prompts in _batches(by_prompt, rows):
        ids, mask = left_padded(prompts, padding_id, wrapped.model.device)
        cache: CompressedCache | None = wrapped.new_cache()
        first = wrapped.prefill(ids, mask, cache, chunk).logits[:, -1:]
        lines = [
            Line(row, prompt, fed, {index: items[index].scored for index in indices})
            for row, prompt in enumerate(prompts)
            for fed, indices in by_prompt[prompt].items()
        ]
        stored = stored_kv(cache)
        parts = list(_parts(lines, rows, longest))
        for number, part in enumerate(parts, start=1):
            assert cache is not None
            fork = take_rows(cache, [line.row for line in part])
            if number == len(parts):
                cache = None  # nobody else reads its memory, so that the fork need not copy it
            tallies = _feed(wrapped, fork, part, first[[line.row for line in part]], softmax_dtype)
            at_end = stored_kv(fork) if measure_at_end else None
            for place, (line, tally) in enumerate(zip(part, tallies, strict=True)):
                kept = at_end[place] if at_end else stored[line.row]
                for index in line.scored:
                    results[index] = Likelihood(tally.sums[index], tally.greedy[index], kept, tally.compressed)
                    on_result(index, results[index])
    return [results[index] for index in range(len(items))]


@dataclass(frozen=True)
class Line:
    """One row to be fed: the row of the prefilled batch it starts from, and by item the ids that it scores."""

    row: int
    prompt: tuple[int, ...]
    fed: tuple[int, ...]
    scored: dict[int, tuple[int, ...]]


class Tally:
    """What is known of one row so far. Prediction j is made by its fed token j, -1 by the prompt's last."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.sums = dict.fromkeys(line.scored, 0.0)
        self.greedy = dict.fromkeys(line.scored, True)
        self.compressed = False

    def add(self, log_probabilities: Tensor, begin: int) -> None:
        """Counts predictions `begin` and on, [T, V], for each item as far as it scores them."""
        end = len(self.line.fed)
        likeliest = log_probabilities.argmax(-1)
        for index, ids in self.line.scored.items():
            offset = end - len(ids)
            start, stop = max(begin, offset), min(begin + len(log_probabilities), end)
            if start >= stop:
                continue
            targets = torch.tensor(ids[start - offset : stop - offset], device=likeliest.device)
            rows = slice(start - begin, stop - begin)
            self.sums[index] += float(log_probabilities[rows].gather(-1, targets[:, None]).sum())
            self.greedy[index] &= bool((likeliest[rows] == targets).all())


def _feed(
    wrapped: Wrapped, cache: CompressedCache, part: list[Line], first: Tensor, softmax_dtype: torch.dtype | None
) -> list[Tally]:
    """Feeds each line to its row; shorter ones are filled up behind their end, which nothing before it can see.

    `first` [R, 1, V] are the logits that the prompt ended with.
    """
    tallies = [Tally(line) for line in part]
    columns = max(len(line.fed) for line in part)
    ids = torch.tensor([[*line.fed, *[line.prompt[-1]] * (columns - len(line.fed))] for line in part])
    ids = ids.to(first.device)
    step = columns_per_call(cache)
    _count(tallies, first, -1, softmax_dtype)
    for begin in range(0, columns, step):
        for tally, compressed in zip(tallies, compressed_rows(cache), strict=True):
            tally.compressed |= compressed and begin < len(tally.line.fed)
        logits = wrapped(ids[:, begin : begin + step], cache=cache).logits
        _count(tallies, logits, begin, softmax_dtype)
    return tallies


def _count(tallies: list[Tally], logits: Tensor, begin: int, softmax_dtype: torch.dtype | None) -> None:
    for row, tally in enumerate(tallies):
        tally.add(F.log_softmax(logits[row], dim=-1, dtype=softmax_dtype), begin)


def left_padded(rows: Sequence[Sequence[int]], padding_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [R, longest row], padding on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*[padding_id] * (width - len(row)), *row] for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _batches(
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]], rows: int
) -> Iterator[list[tuple[int, ...]]]:
    """Prompts to prefill together, the longest first: at least one, and as many as feed no more than `rows` rows."""
    batch: list[tuple[int, ...]] = []
    size = 0
    for prompt in sorted(by_prompt, key=len, reverse=True):
        needed = len(by_prompt[prompt])
        if batch and size + needed > rows:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += needed
    if batch:
        yield batch


def _parts(lines: list[Line], rows: int, longest: int | None) -> Iterator[list[Line]]:
    """Lines to decode together: at most `rows`, and none filled up past `longest` tokens."""
    part: list[Line] = []
    for line in sorted(lines, key=lambda line: len(line.fed), reverse=True):
        widest = max(len(each.prompt) for each in [*part, line]) + len(part[0].fed if part else line.fed)
        if part and (len(part) == rows or (longest is not None and widest > longest)):
            yield part
            part = []
        part.append(line)
    if part:
        yield part
