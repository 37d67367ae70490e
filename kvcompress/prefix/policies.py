"""What a block cache would save: a trace replayed through cache policies, counting recomputed prefill tokens.

A request is served from the longest run of its leading blocks that the cache holds; everything after it is recomputed
and all blocks of the prompt are stored. A capped cache takes in the whole prompt and then evicts down to its cap, so
it overshoots for a moment; what it holds afterwards, and so every count, is the same as if it had made room first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcompress.prefix.blocks import BlockTable
from kvcompress.prefix.requests import Request, Trace


@dataclass(frozen=True)
class Outcome:
    """What one policy did over one trace.

    `cap`: capacity in blocks, None if unlimited. `tokens`: all prompts together. `recomputed`: of these, the tokens
    not served from the cache. `orphaned_blocks`, `orphaned_tokens`: what prompts asked for and the cache held, but
    behind an evicted parent, so that it had to be recomputed too; already counted in `recomputed`.
    """

    policy: str
    cap: int | None
    tokens: int
    recomputed: int
    orphaned_blocks: int = 0
    orphaned_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens served from the cache."""
        return 1 - self.recomputed / self.tokens


class Policy(Protocol):
    """A cache of blocks."""

    @property
    def name(self) -> str: ...

    @property
    def cap(self) -> int | None: ...

    @property
    def held(self) -> Container[int]:
        """The blocks that the request opened last may read."""
        ...

    def store(self, request: Request) -> None:
        """Takes in the blocks of a prompt that has been served."""

    def open(self, request: Request) -> None:
        """Turns to a request that is about to be served."""


class NoReuse:
    """No cache: every prompt is computed in full."""

    name, cap, held = "none", None, ()

    def open(self, request: Request) -> None:
        pass

    def store(self, request: Request) -> None:
        pass


class Unlimited:
    """Never evicts. `per_stream`: every stream sees only what it sent itself; otherwise one cache serves all."""

    cap = None

    def __init__(self, per_stream: bool = False) -> None:
        self.name = "per-stream" if per_stream else "global"
        self.held: Container[int] = range(0)
        self._streams: dict[str | None, _StreamBlocks] | None = {} if per_stream else None
        self._owners = array("i")

    def open(self, request: Request) -> None:
        if self._streams is not None:
            number = len(self._streams)
            self.held = self._streams.setdefault(request.stream, _StreamBlocks(number, self._owners))

    def store(self, request: Request) -> None:
        if isinstance(self.held, _StreamBlocks):
            self.held.update(request.blocks)
        elif request.blocks and request.blocks[-1] not in self.held:
            # blocks are numbered in the order of first sight, and a prompt's last one is its newest
            self.held = range(request.blocks[-1] + 1)


class _StreamBlocks(Container[int]):
    """The blocks that one stream has sent. `owners`: of every block, the number of the stream that sent it first."""

    def __init__(self, number: int, owners: array) -> None:
        self._number, self._owners = number, owners
        self._others: set[int] = set()  # blocks that another stream sent before this one

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, int)
        return (block < len(self._owners) and self._owners[block] == self._number) or block in self._others

    def update(self, blocks: list[int]) -> None:
        for block in blocks:
            if block == len(self._owners):  # numbered in the order of first sight
                self._owners.append(self._number)
            elif self._owners[block] != self._number:
                self._others.add(block)


class LeastRecentlyUsed:
    """Evicts the least recently used block, whichever it is.

    `leaf_first=False`: blocks are used in prompt order, so a prompt's first block is evicted before those that follow
    it; these stay and cannot be reached: orphaned children. `leaf_first=True`: of a prompt, the last block counts as
    used first, so a parent is always used after its children and only leaves are evicted. That is leaf-LRU on the
    prefix tree, where a leaf's last use is the time of its last prompt.

    `cap`: blocks held once a request is stored. Raises `ValueError` if it is negative.
    """

    def __init__(self, cap: int, leaf_first: bool = False) -> None:
        if cap < 0:
            raise ValueError(f"cap={cap}: expected a number of blocks, 0 or more")
        self.name = "leaf-LRU" if leaf_first else "LRU"
        self.cap = cap
        self.held: OrderedDict[int, None] = OrderedDict()
        self._leaf_first = leaf_first

    def open(self, request: Request) -> None:
        pass

    def store(self, request: Request) -> None:
        held = self.held
        order: Iterable[int] = reversed(request.blocks) if self._leaf_first else request.blocks
        for block in order:
            held[block] = None
            held.move_to_end(block)
        for _ in range(len(held) - self.cap):
            held.popitem(last=False)


def replay(trace: Trace, policy: Policy, reserve: int = 0) -> Outcome:
    """Serves every request of `trace` in order and counts what is recomputed.

    `reserve`: the last tokens of every prompt that are computed in any case, hit or not (a real cache computes at
    least 1, whose logits give the next token). Raises `ValueError` if it is negative.
    """
    end = trace.blocks.end
    recomputed = orphaned_blocks = orphaned_tokens = 0
    for request in trace.requests:
        blocks = request.blocks
        usable = usable_blocks(request, trace.blocks, reserve)
        policy.open(request)
        held, hits = policy.held, 0
        while hits < usable and blocks[hits] in held:
            hits += 1
        recomputed += request.tokens - (end[blocks[hits - 1]] if hits else 0)
        for i in range(hits + 1, usable):
            if blocks[i] in held:
                orphaned_blocks += 1
                orphaned_tokens += end[blocks[i]] - end[blocks[i - 1]]
        policy.store(request)
    return Outcome(policy.name, policy.cap, trace.tokens, recomputed, orphaned_blocks, orphaned_tokens)


def usable_blocks(request: Request, table: BlockTable, reserve: int) -> int:
    """How many leading blocks of a prompt end before its last `reserve` tokens."""
    if reserve < 0:
        raise ValueError(f"reserve={reserve}: expected a number of tokens, 0 or more")
    usable = len(request.blocks)
    while usable and table.end[request.blocks[usable - 1]] > request.tokens - reserve:
        usable -= 1
    return usable
