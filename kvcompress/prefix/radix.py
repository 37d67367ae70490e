"""A radix tree of prompt blocks under a byte cap that is never exceeded, not even for a moment.

The tree knows keys, payloads and their bytes, and nothing of what a payload is. Keys are chained (`blocks.block_keys`):
a block's key names all of the prompt up to the block's end. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that says how many bytes of memory it keeps."""

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Sized)


@dataclass(eq=False)
class Entry(Generic[P]):
    """One stored block: its payload, and what was attached to the prefix that ends with it, if anything."""

    key: bytes
    payload: P
    attached: Sized | None = None

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + (0 if self.attached is None else self.attached.nbytes)


@dataclass(eq=False)
class Node(Generic[P]):
    """A run of blocks that prompts enter at the first and use together. `used`: when the last one did.

    `pins`: uses going on. A pinned node's parents are pinned too, as often at least. `queued`: it waits to be evicted.
    """

    parent: Node[P] | None
    entries: list[Entry[P]] = field(default_factory=list)
    children: dict[bytes, Node[P]] = field(default_factory=dict)
    pins: int = 0
    used: int = 0
    queued: bool = False

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(eq=False)
class Pinned(Generic[P]):
    """The blocks of a stored prefix, in order. None of them is evicted before `RadixTree.release`."""

    entries: list[Entry[P]]
    node: Node[P] | None


class RadixTree(Generic[P]):
    """Payloads by block, shared prefixes stored once.

    Evicts block by block, from the end of the leaf that was used least recently; a parent always outlives its
    children. `capacity` and all sizes are bytes. `evicted`: blocks evicted so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.root: Node[P] = Node(None)
        self.nbytes = 0
        self.pinned_bytes = 0
        self.evicted = 0
        # Holds every leaf that is not pinned, by when it was last used when it was queued. Some have been used again
        # since, or are no such leaves any more: that is looked at when they are taken out.
        self._queue: list[tuple[int, int, Node[P]]] = []
        self._order = count()  # of two nodes used at one time, the one queued first comes first
        self._clock = 0

    @property
    def evictable_bytes(self) -> int:
        """Bytes of everything that no one is using."""
        return self.nbytes - self.pinned_bytes

    def peek(self, keys: Sequence[bytes]) -> list[Entry[P]]:
        """The longest stored prefix of `keys`, which does not count as a use."""
        node, found = self.root, []
        while len(found) < len(keys) and (child := node.children.get(keys[len(found)])) is not None:
            shared = _shared(child, keys, len(found))
            found += child.entries[:shared]
            if shared < len(child.entries):
                break
            node = child
        return found

    def match(self, keys: Sequence[bytes]) -> Pinned[P]:
        """Pins the longest stored prefix of `keys`, as used now. A node is split where the prefix ends inside it."""
        self._clock += 1
        node, found = self.root, []
        while len(found) < len(keys) and (child := node.children.get(keys[len(found)])) is not None:
            shared = _shared(child, keys, len(found))
            node = child if shared == len(child.entries) else self._split(child, shared)
            found += node.entries
        self._pin(node)
        return Pinned(found, node)

    def release(self, pinned: Pinned[P]) -> None:
        """Ends a use. A second release of the same does nothing."""
        node, pinned.node, pinned.entries = pinned.node, None, []
        while node is not None:
            node.pins -= 1
            if not node.pins:
                self.pinned_bytes -= node.nbytes
                self._enqueue(node)
            node = node.parent

    def insert(self, keys: Sequence[bytes], size: int, make: Callable[[int], P]) -> int:
        """Stores the blocks of a prompt that are not stored yet, evicting others first; returns how many are now held.

        `make(i)` is called for block i once there is room for its `size` bytes. It stops at the first block that does
        not fit beside what is pinned. Raises ValueError for a payload of another size.
        """
        pinned = self.match(keys)
        held, node = len(pinned.entries), pinned.node
        assert node is not None
        added: Node[P] | None = None
        try:
            while held < len(keys) and self._make_room(size):
                payload = make(held)
                if payload.nbytes != size:
                    raise ValueError(
                        f"block {held} has {payload.nbytes} bytes, expected the {size} that room was made for"
                    )
                if added is None:
                    added = self._add_child(node, keys[held])
                added.entries.append(Entry(keys[held], payload))
                self._grow(added, size)
                held += 1
        finally:
            pinned.node = added or node
            self.release(pinned)
        return held

    def attach(self, keys: Sequence[bytes], size: int, make: Callable[[], Sized]) -> bool:
        """Attaches something to the stored prefix `keys`, evicting others first; False if it does not fit.

        Also False if the prefix is not stored. What is attached already stays.
        """
        pinned = self.match(keys)
        try:
            if not keys or len(pinned.entries) < len(keys):
                return False
            entry = pinned.entries[-1]
            if entry.attached is None:
                if not self._make_room(size):
                    return False
                attached = make()
                if attached.nbytes != size:
                    raise ValueError(f"attached {attached.nbytes} bytes, expected the {size} that room was made for")
                entry.attached = attached
                assert pinned.node is not None
                self._grow(pinned.node, size)
            return True
        finally:
            self.release(pinned)

    def clear(self) -> None:
        """Evicts everything that is not pinned."""
        self._evict_down_to(self.pinned_bytes)

    def _make_room(self, size: int) -> bool:
        """Evicts until `size` more bytes fit. Evicts nothing if they cannot."""
        if size > self.capacity - self.pinned_bytes:
            return False
        self._evict_down_to(self.capacity - size)
        return True

    def _evict_down_to(self, limit: int) -> None:
        while self.nbytes > limit:
            leaf = self._least_recent()
            first_key = leaf.entries[0].key
            while leaf.entries and self.nbytes > limit:
                self.nbytes -= leaf.entries.pop().nbytes
                self.evicted += 1
            if leaf.entries:
                self._enqueue(leaf)
            else:
                parent = leaf.parent
                assert parent is not None
                del parent.children[first_key]
                self._enqueue(parent)

    def _enqueue(self, node: Node[P]) -> None:
        """Queues a node if it can be evicted and does not wait already."""
        if not (node.queued or node.pins or node.children or node is self.root):
            node.queued = True
            heappush(self._queue, (node.used, next(self._order), node))

    def _least_recent(self) -> Node[P]:
        """Takes the leaf that was used least recently out of the queue."""
        while True:
            used, _, node = heappop(self._queue)
            node.queued = False
            if used == node.used and not (node.pins or node.children):
                return node
            self._enqueue(node)

    def _add_child(self, node: Node[P], first_key: bytes) -> Node[P]:
        """A new leaf, pinned once by whoever pinned `node`."""
        child: Node[P] = Node(node, pins=1, used=self._clock)
        node.children[first_key] = child
        return child

    def _split(self, node: Node[P], count: int) -> Node[P]:
        """Moves the first `count` blocks of `node` into a new parent and returns that.

        `node` itself keeps the end, so that whoever has pinned it still has pinned all of its path.
        """
        parent = node.parent
        assert parent is not None
        first, second = node.entries[0].key, node.entries[count].key
        upper = Node(parent, node.entries[:count], {second: node}, node.pins, node.used)
        parent.children[first] = upper
        node.parent, node.entries = upper, node.entries[count:]
        return upper

    def _pin(self, node: Node[P] | None) -> None:
        while node is not None:
            node.used = self._clock
            if not node.pins:
                self.pinned_bytes += node.nbytes
            node.pins += 1
            node = node.parent

    def _grow(self, pinned: Node[P], size: int) -> None:
        assert pinned.pins
        self.nbytes += size
        self.pinned_bytes += size


def _shared(node: Node[P], keys: Sequence[bytes], start: int) -> int:
    """How many of the node's first blocks `keys` goes on with from index `start`."""
    count = 0
    for entry, key in zip(node.entries, keys[start : start + len(node.entries)], strict=False):
        if entry.key != key:
            break
        count += 1
    return count
