"""What a trace holds once it is read: requests, their blocks, and the places where a cache entry may end."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvcompress.prefix.blocks import BlockTable

OnError = Literal["stop", "skip"]


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


@dataclass
class Trace:
    """The requests of one trace in their order.

    `block`: tokens in a full block. `labelled`: the positions are named segments, not blocks. `caps`: the capacities
    in blocks that the trace itself asks for. `skipped`: one message for every bad line that was left out.
    """

    name: str
    block: int
    blocks: BlockTable = field(default_factory=BlockTable)
    positions: BlockTable = field(default_factory=BlockTable)
    requests: list[Request] = field(default_factory=list)
    labelled: bool = False
    caps: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.tokens for request in self.requests)

    @property
    def names_streams(self) -> bool:
        """Whether every request says which stream it belongs to."""
        return all(request.stream is not None for request in self.requests)

    def add(self, request: Request) -> None:
        """Appends a request. Raises `ValueError` if it came before the one above it."""
        above = self.requests[-1].seconds if self.requests else None
        if above is not None and request.seconds is not None and request.seconds < above:
            raise ValueError(
                f"timestamp {1000 * request.seconds:g} lies before {1000 * above:g} of the request above it; "
                "sort the trace by time"
            )
        self.requests.append(request)


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
