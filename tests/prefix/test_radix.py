"""The radix tree against a flat table of blocks that knows nothing of nodes."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvcompress.prefix.blocks import block_keys
from kvcompress.prefix.radix import Node, Pinned, RadixTree

BLOCK = 2  # tokens
SIZE, ATTACHED_SIZE = 10, 7  # bytes

prompts = st.lists(st.integers(0, 2), max_size=12)


class Memory:
    """Bytes of the payloads that are alive."""

    def __init__(self, cap: int) -> None:
        self.cap, self.live = cap, 0


class Piece:
    """A payload that is counted from the moment that it is made until its memory is free."""

    def __init__(self, memory: Memory, size: int = SIZE) -> None:
        self.memory, self.nbytes = memory, size
        memory.live += size
        assert memory.live <= memory.cap, "more is alive than the cap allows"

    def __del__(self) -> None:
        self.memory.live -= self.nbytes


class Row:
    """What the table knows of one block."""

    def __init__(self, keys: list[bytes], used: int) -> None:
        self.path, self.depth, self.used, self.pins, self.attached = keys, len(keys), used, 0, False

    @property
    def size(self) -> int:
        return SIZE + (ATTACHED_SIZE if self.attached else 0)


def nodes_of(tree: RadixTree) -> list[Node]:
    found, waiting = [], [tree.root]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += node.children.values()
    return found


class TreeAgainstTable(RuleBasedStateMachine):
    uses = Bundle("uses")

    @initialize(capacity=st.integers(0, 100))
    def start(self, capacity: int) -> None:
        self.memory = Memory(capacity)
        self.tree: RadixTree[Piece] = RadixTree(capacity)
        self.table: dict[bytes, Row] = {}
        self.clock = 0

    def held(self, keys: list[bytes]) -> int:
        return next((count for count, key in enumerate(keys) if key not in self.table), len(keys))

    def touch(self, keys: list[bytes]) -> list[Row]:
        self.clock += 1
        rows = [self.table[key] for key in keys]
        for row in rows:
            row.used = self.clock
        return rows

    def total(self, pinned: bool | None = None) -> int:
        return sum(row.size for row in self.table.values() if pinned is None or bool(row.pins) == pinned)

    def make_room(self, size: int) -> bool:
        if self.total(pinned=True) + size > self.tree.capacity:
            return False
        while self.total() + size > self.tree.capacity:
            # A prompt's last block counts as used before the one that it follows.
            free = [(row.used, -row.depth, key) for key, row in self.table.items() if not row.pins]
            del self.table[min(free)[2]]
        return True

    @rule(prompt=prompts)
    def insert(self, prompt: list[int]) -> None:
        keys = block_keys(prompt, BLOCK)
        made: list[int] = []

        def make(index: int) -> Piece:
            made.append(index)
            return Piece(self.memory)

        count = self.tree.insert(keys, SIZE, make)
        before = self.held(keys)
        path = self.touch(keys[:before])
        for row in path:
            row.pins += 1
        after = before
        while after < len(keys) and self.make_room(SIZE):
            self.table[keys[after]] = row = Row(keys[: after + 1], self.clock)
            row.pins += 1
            path.append(row)
            after += 1
        for row in path:
            row.pins -= 1
        assert (count, made) == (after, list(range(before, after)))

    @rule(target=uses, prompt=prompts)
    def match(self, prompt: list[int]) -> tuple[Pinned, list[bytes], list[Piece]]:
        keys = block_keys(prompt, BLOCK)
        peeked = [entry.key for entry in self.tree.peek(keys)]
        pinned = self.tree.match(keys)
        held = keys[: self.held(keys)]
        assert [entry.key for entry in pinned.entries] == peeked == held
        for row in self.touch(held):
            row.pins += 1
        return pinned, held, [entry.payload for entry in pinned.entries]

    @rule(use=consumes(uses))
    def release(self, use: tuple[Pinned, list[bytes], list[Piece]]) -> None:
        pinned, keys, payloads = use
        # However often the path was split and others evicted meanwhile, it is what it was.
        assert [entry.payload for entry in self.tree.peek(keys)] == payloads
        payloads.clear()
        self.tree.release(pinned)
        for key in keys:
            self.table[key].pins -= 1
        self.tree.release(pinned)

    @rule(prompt=prompts)
    def attach(self, prompt: list[int]) -> None:
        keys = block_keys(prompt, BLOCK)
        done = self.tree.attach(keys, ATTACHED_SIZE, lambda: Piece(self.memory, ATTACHED_SIZE))
        path = self.touch(keys[: self.held(keys)])
        for row in path:
            row.pins += 1
        expected = bool(keys) and len(path) == len(keys)
        if expected and not path[-1].attached:
            expected = self.make_room(ATTACHED_SIZE)
            path[-1].attached = expected
        for row in path:
            row.pins -= 1
        assert done == expected

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.table = {key: row for key, row in self.table.items() if row.pins}

    @invariant()
    def bytes_add_up(self) -> None:
        tree = self.tree
        assert tree.nbytes == self.total() == self.memory.live <= tree.capacity
        assert tree.pinned_bytes == self.total(pinned=True)
        assert tree.evictable_bytes == self.total(pinned=False)

    @invariant()
    def nodes_are_sound(self) -> None:
        nodes = nodes_of(self.tree)
        stored = [entry.key for node in nodes for entry in node.entries]
        assert sorted(stored) == sorted(self.table), "a block is stored twice or missing"
        for node in nodes:
            assert bool(node.entries) == (node is not self.tree.root)
            for first, child in node.children.items():
                assert child.parent is node and child.entries[0].key == first and child.pins <= node.pins
            for entry in node.entries:
                row = self.table[entry.key]
                assert (node.used, node.pins, entry.attached is not None) == (row.used, row.pins, row.attached)
        queued = [node for _, _, node in self.tree._queue]
        assert len(set(queued)) == len(queued), "a node waits twice to be evicted"
        assert {node for node in nodes[1:] if not node.children and not node.pins} <= set(queued)


TestTreeAgainstTable = TreeAgainstTable.TestCase
TestTreeAgainstTable.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_node_is_split_at_the_block_with_the_first_differing_token() -> None:
    memory = Memory(1000)
    tree: RadixTree[Piece] = RadixTree(1000)
    tree.insert(block_keys([1, 1, 2, 2, 3, 3, 4, 4], BLOCK), SIZE, lambda _: Piece(memory))
    tree.insert(block_keys([1, 1, 2, 2, 3, 9, 4, 4], BLOCK), SIZE, lambda _: Piece(memory))
    (shared,) = tree.root.children.values()
    assert [len(shared.entries), *sorted(len(child.entries) for child in shared.children.values())] == [2, 2, 2]
    assert tree.nbytes == 6 * SIZE


def test_a_payload_larger_than_the_room_made_for_it_is_refused() -> None:
    memory = Memory(1000)
    tree: RadixTree[Piece] = RadixTree(1000)
    with pytest.raises(ValueError, match="block 0 has 11 bytes, expected the 10 that room was made for"):
        tree.insert(block_keys([1, 1], BLOCK), SIZE, lambda _: Piece(memory, 11))
    assert (tree.nbytes, tree.pinned_bytes, tree.root.pins) == (0, 0, 0)


def test_eviction_does_not_look_at_every_leaf_for_every_block() -> None:
    """Calls of Python functions, not time: some for every block, whatever the number of leaves."""

    def calls(leaves: int) -> int:
        tree: RadixTree[Piece] = RadixTree(leaves * SIZE)
        memory = Memory(leaves * SIZE)
        for leaf in range(leaves):
            tree.insert(block_keys([1, leaf], BLOCK), SIZE, lambda _: Piece(memory))
        for leaf in range(leaves):  # used again, so that what waits to be evicted is out of date
            tree.release(tree.match(block_keys([1, leaf], BLOCK)))
        keys, counted = block_keys([2] * 64, BLOCK), 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            assert tree.insert(keys, SIZE, lambda _: Piece(memory)) == 32
        finally:
            sys.setprofile(None)
        assert tree.evicted == 32
        return counted

    few, many = calls(200), calls(2000)
    assert many <= few + 2 * 2000
