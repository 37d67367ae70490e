"""Cache policies against the worked day, and against slow stores that hold whole prefixes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.prefix.capacity import capacities
from kvcompress.prefix.policies import LeastRecentlyUsed, NoReuse, Outcome, Unlimited, replay
from kvcompress.prefix.requests import Trace
from kvcompress.prefix.trace import read_trace

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "radix_lab.json").read_text())
DAY = read_trace(ROOT / "configs" / "traces" / "coding_day.yaml")

Prefix = tuple[int, ...]
# streams and prompts of a few symbols, so that they share, fork and repeat
PROMPTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=9)), min_size=1, max_size=25
).filter(lambda prompts: any(tokens for _, tokens in prompts))


def trace_of(prompts: list[tuple[str, list[int]]], block: int) -> Trace:
    trace = Trace("made", block)
    for stream, tokens in prompts:
        pieces = [tuple(tokens[start : start + block]) for start in range(0, len(tokens), block)]
        trace.add([([piece], len(piece)) for piece in pieces], len(tokens), stream=stream)
    return trace


def prefixes(tokens: list[int], block: int) -> list[Prefix]:
    return [tuple(tokens[: start + block]) for start in range(0, len(tokens), block)]


def slow_lru(prompts: list[tuple[str, list[int]]], block: int, cap: int, leaves_only: bool) -> int:
    """Recomputed tokens; the store maps whole prefixes to their last use, and eviction looks at every one of them."""
    store: dict[Prefix, tuple[int, int]] = {}
    recomputed = 0
    for now, (_, tokens) in enumerate(prompts):
        hit = 0
        for prefix in prefixes(tokens, block):
            if prefix not in store:
                break
            hit = len(prefix)
        recomputed += len(tokens) - hit
        for depth, prefix in enumerate(prefixes(tokens, block)):
            store[prefix] = (now, depth)
        while len(store) > cap:
            candidates = store
            if leaves_only:
                inner = {p for q in store for p in prefixes(list(q), block)[:-1]}
                candidates = [p for p in store if p not in inner]
            # of leaf-LRU's candidates no two were last used at once, as one prompt has one leaf
            del store[min(candidates, key=store.__getitem__)]
    return recomputed


def test_the_day_is_the_worked_one() -> None:
    assert len(DAY.requests) == len(GOLDEN["requests"])
    for request, worked in zip(DAY.requests, GOLDEN["requests"], strict=True):
        labels = [DAY.positions.label[name] for name in request.positions]
        assert labels == [label for label, _ in worked["segments"]]
        assert request.stream == worked["stream"]
        assert request.tokens == sum(tokens for _, tokens in worked["segments"])
    assert DAY.tokens == GOLDEN["total"]
    assert DAY.block == GOLDEN["block"]


def test_the_day_recomputes_what_was_worked_out() -> None:
    assert replay(DAY, NoReuse()).recomputed == GOLDEN["none"] == 220_200
    assert replay(DAY, Unlimited(per_stream=True)).recomputed == GOLDEN["per_stream"] == 42_700
    assert replay(DAY, Unlimited()).recomputed == GOLDEN["global"] == 26_300
    assert [str(cap) for cap in DAY.caps] == list(GOLDEN["global_lru"])


@pytest.mark.parametrize("cap", DAY.caps)
def test_the_day_under_a_cap(cap: int) -> None:
    assert replay(DAY, LeastRecentlyUsed(cap)).recomputed == GOLDEN["global_lru"][str(cap)]
    assert replay(DAY, LeastRecentlyUsed(cap, leaf_first=True)).recomputed == GOLDEN["global_leaf_lru"][str(cap)]


@given(PROMPTS, st.integers(1, 3), st.integers(0, 12))
def test_lru_and_leaf_lru_equal_the_slow_stores(prompts: list, block: int, cap: int) -> None:
    trace = trace_of(prompts, block)
    assert replay(trace, LeastRecentlyUsed(cap)).recomputed == slow_lru(prompts, block, cap, leaves_only=False)
    leaf = replay(trace, LeastRecentlyUsed(cap, leaf_first=True))
    assert leaf.recomputed == slow_lru(prompts, block, cap, leaves_only=True)
    assert leaf.orphaned_blocks == leaf.orphaned_tokens == 0


@given(PROMPTS, st.integers(1, 3), st.integers(0, 12))
def test_leaf_lru_holds_parents_and_no_more_than_the_cap(prompts: list, block: int, cap: int) -> None:
    trace, policy = trace_of(prompts, block), LeastRecentlyUsed(cap, leaf_first=True)
    for request in trace.requests:
        policy.store(request)
        assert len(policy.held) <= cap
        assert all(trace.blocks.parent[block] in (-1, *policy.held) for block in policy.held)


@given(PROMPTS, st.integers(1, 3))
def test_unlimited_caches_recompute_what_was_never_seen(prompts: list, block: int) -> None:
    everywhere, by_stream = set(), {"a": set(), "b": set()}
    expected = [0, 0]
    for stream, tokens in prompts:
        for i, seen in enumerate((everywhere, by_stream[stream])):
            hit = max((len(prefix) for prefix in prefixes(tokens, block) if prefix in seen), default=0)
            expected[i] += len(tokens) - hit
            seen.update(prefixes(tokens, block))
    trace = trace_of(prompts, block)
    assert [replay(trace, Unlimited()).recomputed, replay(trace, Unlimited(True)).recomputed] == expected


@given(PROMPTS, st.integers(1, 3), st.integers(0, 3))
def test_one_pass_counts_every_capacity(prompts: list, block: int, reserve: int) -> None:
    trace = trace_of(prompts, block)
    counts = capacities(trace, reserve)
    for cap in range(len(trace.blocks) + 3):
        for leaf_first in (False, True):
            direct = replay(trace, LeastRecentlyUsed(cap, leaf_first), reserve)
            assert counts.outcome(cap, leaf_first) == direct
    unlimited = replay(trace, Unlimited(), reserve).recomputed
    assert counts.outcome(counts.enough(), True).recomputed == unlimited
    assert counts.outcome(counts.enough(), False).recomputed == unlimited


def test_one_pass_counts_the_day_at_every_capacity() -> None:
    counts = capacities(DAY)
    for cap in range(0, len(DAY.blocks) + 2, 7):
        for leaf_first in (False, True):
            assert counts.outcome(cap, leaf_first) == replay(DAY, LeastRecentlyUsed(cap, leaf_first))


def test_an_orphan_is_a_held_block_behind_an_evicted_parent() -> None:
    """Of three blocks the first is evicted; the second time around the other two are held but out of reach."""
    trace = trace_of([("a", [1, 2, 3]), ("a", [1, 2, 3])], block=1)
    assert replay(trace, LeastRecentlyUsed(2)) == Outcome("LRU", 2, 6, 6, orphaned_blocks=2, orphaned_tokens=2)
    assert replay(trace, LeastRecentlyUsed(2, leaf_first=True)) == Outcome("leaf-LRU", 2, 6, 4)


def test_reserved_tokens_are_computed_whatever_is_held() -> None:
    trace = trace_of([("a", [1, 2, 3, 4]), ("a", [1, 2, 3, 4])], block=2)
    assert [replay(trace, Unlimited(), reserve).recomputed for reserve in (0, 1, 2, 3)] == [4, 6, 6, 8]


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="cap=-1"):
        LeastRecentlyUsed(-1)
    with pytest.raises(ValueError, match="cap=-1"):
        capacities(DAY).outcome(-1, False)
    with pytest.raises(ValueError, match="reserve=-2"):
        replay(DAY, Unlimited(), reserve=-2)
