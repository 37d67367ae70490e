"""LRU and leaf-LRU at every capacity at once, from one pass over a trace.

Least-recently-used caches of growing capacity hold each other (Mattson et al., "Evaluation techniques for storage
hierarchies", 1970): a block is held at capacity c exactly if its rank in the order of last use is at most c. Prompts
make this cheap. Whoever reads a block reads all blocks before it, so the blocks last used by one request are a run at
the end of its prompt, and a prompt's blocks fall into a few such runs, the most recent first. Only the length of each
request's run is kept, in a Fenwick tree.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from kvcompress.prefix.policies import Outcome, usable_blocks
from kvcompress.prefix.requests import Trace


@dataclass(frozen=True)
class Capacities:
    """Counts for every capacity 0 … N; a larger one does what N does. All arrays: `[N + 1]`, int64.

    `lru_hits`, `leaf_hits`: tokens served from an LRU and from a leaf-LRU cache. `orphaned_blocks`,
    `orphaned_tokens`: what prompts asked for and the LRU cache held behind an evicted parent.
    """

    tokens: int
    lru_hits: np.ndarray
    leaf_hits: np.ndarray
    orphaned_blocks: np.ndarray
    orphaned_tokens: np.ndarray

    def outcome(self, cap: int, leaf_first: bool) -> Outcome:
        """What `policies.replay` counts for `LeastRecentlyUsed(cap, leaf_first)`."""
        if cap < 0:
            raise ValueError(f"cap={cap}: expected a number of blocks, 0 or more")
        at = min(cap, len(self.lru_hits) - 1)
        if leaf_first:
            return Outcome("leaf-LRU", cap, self.tokens, self.tokens - int(self.leaf_hits[at]))
        orphans = int(self.orphaned_blocks[at]), int(self.orphaned_tokens[at])
        return Outcome("LRU", cap, self.tokens, self.tokens - int(self.lru_hits[at]), *orphans)

    def enough(self) -> int:
        """The smallest capacity from which on a larger one serves no more, under either policy."""
        return max(int(np.searchsorted(hits, hits[-1])) for hits in (self.lru_hits, self.leaf_hits))


def capacities(trace: Trace, reserve: int = 0) -> Capacities:
    """Replays `trace` through LRU and leaf-LRU of every capacity.

    `reserve`: the last tokens of every prompt that are computed in any case. Time is O(blocks of all prompts +
    runs * log(requests)), memory O(distinct blocks) at most, less where what is reused is found near the front.
    """
    table, requests, end, full = trace.blocks, trace.requests, trace.blocks.end, trace.block
    # By capacity, as steps from the one below. A run of blocks of equal size raises `leaf` over a range of ranks, so
    # that and `held` keep steps of steps.
    lru, lru_blocks, leaf, held, held_blocks = steps = [array("q", [0, 0]) for _ in range(5)]
    last = array("i", [-1]) * len(table)  # the request that used each block last
    run = array("i", [0]) * len(requests)  # how many blocks each request was the last to use
    runs = _Fenwick(len(requests))
    for now, request in enumerate(requests):
        blocks, used = request.blocks, 0
        usable = usable_blocks(request, table, reserve)
        while used < len(blocks) and (then := last[blocks[used]]) >= 0:
            start, ahead = used, used + runs.after(then)  # blocks used more recently than this run
            chain = ahead + run[then]
            for block in blocks[start:]:
                if last[block] != then:
                    break
                last[block] = now
                used += 1
            run[then] -= used - start
            runs.add(then, start - used)
            stop = min(used, usable)
            if stop <= start:
                continue
            if chain + 2 > len(lru):
                for each in steps:
                    each.extend(array("q", [0]) * (chain + 2 - len(each) + len(each) // 8))
            # of this run's blocks LRU holds the last ones first, leaf-LRU the first ones; LRU can reach none before
            # it holds them all
            tokens = end[blocks[stop - 1]] - (end[blocks[start - 1]] if start else 0)
            lru[chain] += tokens
            lru_blocks[chain] += stop - start
            held_blocks[chain - (stop - start) + 1] += 1
            held_blocks[chain + 1] -= 1
            if tokens == full * (stop - start):
                leaf[ahead + 1] += full
                leaf[ahead + 1 + stop - start] -= full
                held[chain - (stop - start) + 1] += full
                held[chain + 1] -= full
                continue
            for i in range(start, stop):
                tokens = end[blocks[i]] - (end[blocks[i - 1]] if i else 0)
                leaf[ahead + 1 + i - start] += tokens
                leaf[ahead + 2 + i - start] -= tokens
                held[chain - i + start] += tokens
                held[chain - i + start + 1] -= tokens
        for block in blocks[used:]:
            last[block] = now
        run[now] = len(blocks)
        runs.add(now, len(blocks))
    return Capacities(
        trace.tokens,
        orphaned_blocks=_summed(_summed(held_blocks) - np.frombuffer(lru_blocks, np.int64))[:-1],
        orphaned_tokens=_summed(_summed(held) - np.frombuffer(lru, np.int64))[:-1],
        lru_hits=_summed(lru)[:-1],
        leaf_hits=_summed(_summed(leaf))[:-1],
    )


def _summed(steps: array | np.ndarray) -> np.ndarray:
    """Sums of steps up to each, in the same memory."""
    sums = np.frombuffer(steps, np.int64)
    return np.cumsum(sums, out=sums)


class _Fenwick:
    """Numbers of which one changes at a time, and the sum of those after an index, both in O(log n)."""

    def __init__(self, size: int) -> None:
        self._tree = array("q", [0]) * (size + 1)
        self._total = 0

    def add(self, index: int, amount: int) -> None:
        """Adds `amount` to the number at `index`."""
        tree, i = self._tree, index + 1
        self._total += amount
        while i < len(tree):
            tree[i] += amount
            i += i & -i

    def after(self, index: int) -> int:
        """The sum of the numbers after `index`."""
        tree, i, rest = self._tree, index + 1, self._total
        while i:
            rest -= tree[i]
            i &= i - 1
        return rest
