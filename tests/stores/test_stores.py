"""Dense and packed stores against plain lists: random appends, evictions, packings, forks and reordered rows.

Forks share their past from the first few tokens on, so that short ones have several segments too.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.methods.kivi import KIVI
from kvcompress.stores import store as store_module
from kvcompress.stores.store import Store
from tests.stores.twin import DIM, HEADS, drive

seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True, scope="module")
def few_tokens_are_shared() -> Iterator[None]:
    before = store_module.LEAST_SHARED
    store_module.LEAST_SHARED = 6
    yield
    store_module.LEAST_SHARED = before


@given(st.data(), st.integers(1, 3), seeds, st.booleans())
@settings(max_examples=40)
def test_a_dense_store_holds_what_was_not_evicted(data: st.DataObject, rows: int, seed: int, scores: bool) -> None:
    drive(
        data, Store(rows, with_scores=scores), rows, seed, ["append", "append", "evict", "evict_middle", "select_rows"]
    )


@given(
    st.data(), st.integers(1, 3), seeds, st.sampled_from([2, 4]), st.sampled_from([(4, 8), (8, 8), (32, 32), (16, 48)])
)
@settings(max_examples=60)
def test_a_packed_store_holds_the_codes_of_what_was_not_evicted(
    data: st.DataObject, rows: int, seed: int, bits: int, sizes: tuple[int, int]
) -> None:
    front = data.draw(st.sampled_from([0, 0, 2, 4]))
    store = Store(rows, KIVI(bits, *sizes), front)
    drive(
        data,
        store,
        rows,
        seed,
        ["append", "append", "pack", "pack", "evict", "evict_by_head", "evict_middle", "select_rows"],
    )


def test_units_of_holes_are_freed_and_their_bytes_come_back() -> None:
    store = Store(1, KIVI(2, 8, 16))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, HEADS, 160, DIM, generator=generator)
    store.append(tokens, tokens, [160])
    store.pack()
    before = store.memory()
    keep = torch.ones(1, HEADS, 160, dtype=torch.bool)
    keep[:, 0, 32:64] = keep[:, 1, 64:96] = False
    store.evict(keep)
    store.pack()
    assert store.lengths == [128]  # one unit of 32 in each head, though not the same one
    after = store.memory()
    assert after["keys"] == before["keys"] * 128 // 160
    assert after["holes"] == 0
    keep = torch.ones(1, HEADS, 128, dtype=torch.bool)
    keep[:, :, 1:20] = False
    store.evict(keep)
    store.pack()
    assert store.lengths == [128]
    holes = store.memory()
    assert holes["holes"] == HEADS * 19 * (2 * DIM * 2 // 8 + 2 * 4 + DIM * 4 // 8)  # values have two groups
    assert sum(holes.values()) == sum(after.values())
