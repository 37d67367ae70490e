"""What a trace holds once it is read: requests, their blocks, and the places where a cache entry may end."""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Literal, NamedTuple

import numpy as np

from kvcompress.prefix.blocks import BlockTable

OnError = Literal["stop", "skip"]
Run = tuple[Sequence[Hashable], int]
"""What neighbouring blocks of a prompt hold, and the tokens in each of them."""


class TraceError(ValueError):
    """A trace, or one line of it, cannot be read. The message names the file and the line."""


class Request(NamedTuple):
    """One prompt.

    `blocks`: its blocks in order, as integers of `Trace.blocks`. `positions`: the places where a provider's cache
    entry may end, in order, as integers of `Trace.positions`. `tokens`: the prompt's length, a tail that fills no
    block included. `stream`: who sent it, or None. `seconds`: when it came, or None if the trace does not say.
    `token_ids`: the tokens themselves, where the trace has them and they were asked for.
    """

    blocks: list[int]
    positions: list[int]
    tokens: int
    stream: str | None = None
    seconds: float | None = None
    token_ids: list[int] | None = None


class Requests:
    """The requests of one trace in their order: 4 bytes a block and some 40 a request; made anew for whoever asks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._blocks, self._positions = _Paths(), _Paths()
        self._tokens, self._seconds = array("q"), array("d")
        self._streams: dict[str | None, int] = {}
        self._stream = array("i")
        self._token_ids: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Request:
        return next(self._from(range(len(self))[index]))

    def __iter__(self) -> Iterator[Request]:
        return self._from(0)

    def _from(self, start: int) -> Iterator[Request]:
        streams = list(self._streams)
        for i in range(start, len(self)):
            blocks, tokens, seconds = self._blocks.of(i), self._tokens[i], self._seconds[i]
            positions = self._positions.of(i) if len(self._positions) else blocks[: tokens // self._block]
            when = None if isnan(seconds) else seconds
            yield Request(blocks, positions, tokens, streams[self._stream[i]], when, self._token_ids.get(i))

    def append(self, request: Request, labelled: bool) -> None:
        """Adds a request; `labelled`: its positions are segments, not the full ones of its blocks."""
        if request.token_ids is not None:
            self._token_ids[len(self)] = request.token_ids
        self._blocks.append(request.blocks)
        if labelled:
            self._positions.append(request.positions)
        self._tokens.append(request.tokens)
        self._seconds.append(nan if request.seconds is None else request.seconds)
        self._stream.append(self._streams.setdefault(request.stream, len(self._streams)))

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(self._tokens)

    @property
    def last_seconds(self) -> float | None:
        """When the last request came; None if there is none or it does not say."""
        return None if not self._seconds or isnan(self._seconds[-1]) else self._seconds[-1]

    @property
    def names_streams(self) -> bool:
        """Whether every request says which stream it belongs to."""
        return None not in self._streams


class _Paths:
    """Lists of block integers, one behind the other in one array."""

    def __init__(self) -> None:
        self._all, self._ends = array("i"), array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def of(self, index: int) -> list[int]:
        return self._all[self._ends[index] : self._ends[index + 1]].tolist()

    def append(self, path: list[int]) -> None:
        self._all.extend(path)
        self._ends.append(len(self._all))


@dataclass
class Trace:
    """The requests of one trace in their order.

    `block`: tokens in a full block. `labelled`: the positions are named segments, not full blocks. `caps`: the
    capacities in blocks that the trace itself asks for. `skipped`: one message for every bad line that was left out.
    """

    name: str
    block: int
    blocks: BlockTable = field(default_factory=BlockTable)
    labelled: bool = False
    caps: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = Requests(self.block)
        self.positions = BlockTable() if self.labelled else self.blocks

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return self.requests.tokens

    @property
    def names_streams(self) -> bool:
        """Whether every request says which stream it belongs to."""
        return self.requests.names_streams

    def add(
        self,
        runs: Iterable[Run],
        tokens: int,
        *,
        stream: str | None = None,
        seconds: float | None = None,
        token_ids: list[int] | None = None,
        segments: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Appends the prompt of `tokens` tokens whose blocks hold `runs`; in a labelled trace it is made of `segments`.

        Raises `ValueError` if it came before the one above it; nothing of it is part of the trace then.
        """
        above = self.requests.last_seconds
        if above is not None and seconds is not None and seconds < above:
            raise ValueError(
                f"timestamp {1000 * seconds:g} lies before {1000 * above:g} of the request above it; "
                "sort the trace by time"
            )
        blocks: list[int] = []
        for contents, size in runs:
            blocks += self.blocks.add_all(blocks[-1] if blocks else -1, contents, size)
        positions: list[int] = []
        for label, size in segments:
            positions.append(self.positions.add(positions[-1] if positions else -1, label, size, label))
        self.requests.append(Request(blocks, positions, tokens, stream, seconds, token_ids), self.labelled)


def prompt_tokens(trace: Trace, request: Request, vocabulary: int) -> list[int]:
    """Token ids for a request, `request.tokens` of them, each below `vocabulary`.

    The request's own ids if the trace kept them. Otherwise ids drawn from a generator seeded with each segment's
    (or block's) integer: prompts that share a prefix in the trace share it here.

    Raises `ValueError` if the request's own ids do not fit the vocabulary.
    """
    if request.token_ids is not None:
        if max(request.token_ids) >= vocabulary:
            raise ValueError(f"token id {max(request.token_ids)}: the vocabulary has only {vocabulary} tokens")
        return list(request.token_ids)
    table, path = (trace.positions, request.positions) if trace.labelled else (trace.blocks, request.blocks)
    tokens: list[int] = []
    for piece in path:
        draw = np.random.default_rng(piece).integers(vocabulary, size=table.end[piece] - len(tokens))
        tokens += draw.tolist()
    return tokens
