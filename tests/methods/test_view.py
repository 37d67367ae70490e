"""What a method sees where a packing partner has left holes: tokens, not slots."""

import pytest
import torch
from torch import Tensor

from kvcompress.methods.kivi import KIVI
from kvcompress.methods.view import LayerView
from kvcompress.stores.store import Store

KEPT = [[0, 1, 9, 10, 14, 15, 20, 21], [0, 3, 4, 5, 6, 19, 20, 21]]  # of 22 tokens, by KV head


def view() -> LayerView:
    store = Store(1, KIVI(bits=2, group_size=8, residual=8))
    tokens = torch.randn(1, 2, 22, 16, generator=torch.Generator().manual_seed(0))
    store.append(tokens, tokens, [22])
    store.pack()  # the first 16 keys
    keep = torch.zeros(1, 2, 22, dtype=torch.bool)
    for head, kept in enumerate(KEPT):
        keep[0, head, kept] = True
    store.evict(keep)
    assert store.has_holes
    return LayerView(store, [22], lambda size: size)


def tokens_in(layer: LayerView, mask: Tensor) -> list[list[int]]:
    """Positions of the slots in a mask [1, H, S], by KV head."""
    positions = layer.store.current_positions(layer.device)[0]
    return [positions[head][mask[0, head]].tolist() for head in range(2)]


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_last_counts_tokens(count: int) -> None:
    layer = view()
    assert tokens_in(layer, layer.last([count])) == [kept[-count:] for kept in KEPT]


def test_top_never_takes_a_hole() -> None:
    layer = view()
    positions = layer.store.current_positions(layer.device)
    votes = torch.where(positions < 0, 100.0, -positions.float())  # the older the better, holes best of all
    assert tokens_in(layer, layer.top(votes, [5], layer.last([2]))) == [kept[:3] + kept[-2:] for kept in KEPT]
    assert tokens_in(layer, layer.top(votes, [50], layer.last([2]))) == KEPT


def test_neighbours_are_the_next_tokens() -> None:
    layer = view()
    positions = layer.store.current_positions(layer.device)
    shifted = layer.over_neighbours(positions.float(), lambda near: near.roll(-1, -1))
    for head, kept in enumerate(KEPT):
        alive = positions[0, head] >= 0
        assert shifted[0, head][alive].tolist()[:-1] == kept[1:]
