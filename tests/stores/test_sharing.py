"""What forks share is held once, and freed when the last of them is dropped."""

import pytest
import torch

from kvcompress.methods.kivi import KIVI
from kvcompress.stores.store import Store

TOKENS, HEADS, DIM = 4096, 2, 16


def held(stores: list[Store]) -> int:
    """Bytes in use of all stores together, each storage counted once."""
    used = {}
    for store in stores:
        for part in store.columns().values():
            used[part.buffer.untyped_storage().data_ptr()] = part.bytes_per_slot * part.used
    return sum(used.values())


@pytest.mark.parametrize("packs", [None, KIVI(bits=2, group_size=32, residual=64)])
def test_continuations_hold_their_prompt_once(packs: KIVI | None) -> None:
    first = Store(1, packs)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator)
    first.append(keys, values, [TOKENS])
    first.pack()
    alone = held([first])
    forks = [first.fork() for _ in range(8)]
    for fork in forks:
        fork.append(keys[:, :, :1], values[:, :, :1], [1])
        fork.pack()
    # What is not packed of the prompt, at most a residual and a unit, is each fork's own.
    own = 0 if packs is None else 2 * HEADS * (64 + 32) * DIM * 4
    assert held([first, *forks]) <= alone + 8 * (2 * HEADS * DIM * 4 + own)
    shared = forks[0].memory()["shared"]
    assert shared >= (alone if packs is None else alone - own)
    del first, fork, forks[1:]
    assert forks[0].memory()["shared"] == 0
