"""A growing tensor against plain tensors that are rebuilt at every step: appends, drops, forks, spare."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcompress.stores.growing import Growing

HEADS, DIM = 2, 3


@dataclass
class Twin:
    """A growing tensor, and for each row what must lie in it: [H, length, D]."""

    real: Growing
    rows: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [row.shape[1] for row in self.rows]

    def check(self) -> None:
        for row, expected in enumerate(self.rows):
            assert torch.equal(self.real.view[row, :, : expected.shape[1]], expected)
        assert self.real.view.isfinite().all()
        used = max(self.lengths)
        assert self.real.used == used
        assert self.real.spare <= max(self.real.floor, used // 8)

    def fork(self, copies: int) -> "Twin":
        return Twin(self.real.fork(copies), [row for row in self.rows for _ in range(copies)])


def append(twin: Twin, data: st.DataObject, generator: torch.Generator) -> None:
    columns = data.draw(st.integers(1, 20))
    same = data.draw(st.booleans())
    counts = [columns if same else data.draw(st.integers(0, columns)) for _ in twin.rows]
    new = torch.randn(len(twin.rows), HEADS, columns, DIM, generator=generator)
    twin.real.append(new, twin.lengths, counts)
    twin.rows = [
        torch.cat([row, new[index, :, columns - count :]], 1)
        for index, (row, count) in enumerate(zip(twin.rows, counts, strict=True))
    ]


def drop_middle(twin: Twin, data: st.DataObject, generator: torch.Generator) -> None:
    shortest = min(twin.lengths)
    first = data.draw(st.integers(0, shortest))
    count = data.draw(st.integers(0, shortest - first))
    twin.real.drop_middle(first, count)
    twin.rows = [torch.cat([row[:, :first], row[:, first + count :]], 1) for row in twin.rows]


def gather(twin: Twin, data: st.DataObject, generator: torch.Generator) -> None:
    shortest = min(twin.lengths)
    kept = data.draw(st.integers(0, shortest))
    index = torch.rand(len(twin.rows), HEADS, shortest, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    same = (index == torch.arange(kept)).all(1).all(0).long().cumprod(0).sum()
    twin.real.gather(index, first=data.draw(st.integers(0, int(same))))
    twin.rows = [row.gather(1, index[number][..., None].expand(-1, -1, DIM)) for number, row in enumerate(twin.rows)]


def overwrite(twin: Twin, data: st.DataObject, generator: torch.Generator) -> None:
    twin.real.writable().mul_(2)
    twin.rows = [row * 2 for row in twin.rows]


def select_rows(twin: Twin, data: st.DataObject, generator: torch.Generator) -> None:
    index = data.draw(st.lists(st.integers(0, len(twin.rows) - 1), min_size=1, max_size=3))
    rows = [twin.rows[row] for row in index]
    twin.real.select_rows(torch.tensor(index), max(row.shape[1] for row in rows))
    twin.rows = rows


@given(st.data(), st.integers(1, 3), st.integers(0, 2**31), st.sampled_from([4, 64]))
def test_every_fork_holds_what_was_put_into_it(data: st.DataObject, rows: int, seed: int, floor: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    like = torch.randn(rows, HEADS, 1, DIM, generator=generator)
    twins = [Twin(Growing.like(like, floor), [like[row, :, :0] for row in range(rows)])]
    for _ in range(data.draw(st.integers(1, 12))):
        twin = data.draw(st.sampled_from(twins))
        step = data.draw(st.sampled_from([append, append, drop_middle, gather, overwrite, select_rows, "fork"]))
        if isinstance(step, str):
            twins.append(twin.fork(data.draw(st.integers(1, 3))))
        else:
            step(twin, data, generator)
        if len(twins) > 1 and data.draw(st.booleans()):
            twins.pop(data.draw(st.integers(0, len(twins) - 1)))
        for each in twins:
            each.check()


def test_appending_copies_what_is_stored_a_logarithmic_number_of_times() -> None:
    token = torch.ones(1, 1, 1, 8)
    growing = Growing.like(token)
    moves, places = 0, growing.buffer.data_ptr()
    for length in range(4096):
        growing.append(token, [length], [1])
        moves += growing.buffer.data_ptr() != places
        places = growing.buffer.data_ptr()
    assert moves < 90  # 32 slots at first, then a sixteenth of the length: log(4096 / 512) / log(17 / 16) + 512 / 32


def test_a_fork_shares_memory_until_one_side_writes() -> None:
    growing = Growing(torch.randn(1, 2, 10, 4))
    fork, batch = growing.fork(), growing.fork(3)
    places = {part.buffer.untyped_storage().data_ptr() for part in (growing, fork, batch)}
    assert len(places) == 1
    assert batch.buffer.shape[0] == 3
    before = growing.view.clone()
    batch.writable()[1] = 0
    fork.append(torch.ones(1, 2, 1, 4), [10], [1])
    assert torch.equal(growing.view, before)
    assert torch.equal(batch.view[0], before[0])
    del fork, batch
    place = growing.buffer.data_ptr()
    growing.writable()
    assert growing.buffer.data_ptr() == place  # alone again: written where it lies
