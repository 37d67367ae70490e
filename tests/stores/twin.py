"""A store beside a plain list of what each KV head of each row must hold, driven by random steps."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvcompress.kernels import choose
from kvcompress.kernels.attention import naive
from kvcompress.kernels.softmax import Softmax
from kvcompress.stores.store import Store
from tests.oracle import Packing, coded

HEADS, DIM = 2, 16
Head = list[int]  # positions that a KV head holds


@dataclass
class Twin:
    """`held[row][head]` are the positions stored; `keys[row]`, `values[row]` all that was ever fed: [H, seen, D]."""

    store: Store
    held: list[list[Head]]
    keys: list[Tensor]
    values: list[Tensor]
    packing: Packing = field(default_factory=Packing)

    @property
    def seen(self) -> list[int]:
        return [keys.shape[1] for keys in self.keys]

    def append(self, data: st.DataObject, generator: torch.Generator) -> None:
        columns = data.draw(st.integers(1, 24))
        least = 0 if any(self.seen) and not self.store.empty else 1
        same = data.draw(st.booleans())
        counts = [columns if same else data.draw(st.integers(least, columns)) for _ in self.held]
        keys, values = torch.randn(2, len(self.held), HEADS, columns, DIM, generator=generator)
        self.store.append(keys, values, counts)
        for row, count in enumerate(counts):
            new = list(range(self.seen[row], self.seen[row] + count))
            self.held[row] = [head + new for head in self.held[row]]
            self.keys[row] = torch.cat([self.keys[row], keys[row, :, columns - count :]], 1)
            self.values[row] = torch.cat([self.values[row], values[row, :, columns - count :]], 1)

    def evict(self, data: st.DataObject, generator: torch.Generator) -> None:
        """Evicts any tokens, as many in every head of a row, at least one stays."""
        positions = self.store.current_positions(torch.device("cpu")).expand(-1, HEADS, -1)
        keep = torch.zeros(positions.shape, dtype=torch.bool)
        for row, heads in enumerate(self.held):
            count = data.draw(st.integers(1, max(1, min(map(len, heads)))))
            for head, held in enumerate(heads):
                order = torch.randperm(len(held), generator=generator)[:count].sort().values.tolist()
                self.held[row][head] = [held[index] for index in order]
                keep[row, head] = torch.isin(positions[row, head], torch.tensor(self.held[row][head]))
        self.store.evict(keep)

    def evict_by_head(self, data: st.DataObject, generator: torch.Generator) -> None:
        """Evicts any tokens, any number of each head, as long as something stays."""
        positions = self.store.current_positions(torch.device("cpu")).expand(-1, HEADS, -1)
        keep = torch.zeros(positions.shape, dtype=torch.bool)
        for row, heads in enumerate(self.held):
            for head, held in enumerate(heads):
                count = data.draw(st.integers(0 if head else min(1, len(held)), len(held)))
                order = torch.randperm(len(held), generator=generator)[:count].sort().values.tolist()
                self.held[row][head] = [held[index] for index in order]
                keep[row, head] = torch.isin(positions[row, head], torch.tensor(self.held[row][head]))
        self.store.evict(keep)

    def evict_middle(self, data: st.DataObject, generator: torch.Generator) -> None:
        """Keeps first and last slots; the slots of a packed store are counted with its holes."""
        first = [data.draw(st.integers(0, 6)) for _ in self.held]
        last = [data.draw(st.integers(1, 20)) for _ in self.held]
        if data.draw(st.booleans()):
            first, last = [first[0]] * len(first), [last[0]] * len(last)
        slots = self.store.current_positions(torch.device("cpu")).expand(-1, HEADS, -1).tolist()
        for row, length in enumerate(self.store.lengths):
            for head in range(HEADS):
                inside = slots[row][head][:length]
                cut = (
                    inside if first[row] + last[row] >= length else inside[: first[row]] + inside[length - last[row] :]
                )
                self.held[row][head] = [position for position in cut if position >= 0]
        self.store.evict_middle(first, last)

    def pack(self, data: st.DataObject, generator: torch.Generator) -> None:
        self.store.pack()
        self.packing.update(self.store)

    def select_rows(self, data: st.DataObject, generator: torch.Generator) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.held) - 1), min_size=1, max_size=3))
        self.store.select_rows(index, torch.tensor(index))
        self._take(index)

    def fork(self, copies: int) -> "Twin":
        other = Twin(self.store.fork(copies), self.held, self.keys, self.values, self.packing)
        other._take([row for row in range(len(self.held)) for _ in range(copies)])
        return other

    def _take(self, index: list[int]) -> None:
        self.held = [[list(head) for head in self.held[row]] for row in index]
        self.keys, self.values = [self.keys[row] for row in index], [self.values[row] for row in index]
        packed = self.packing
        self.packing = Packing()
        for new, old in enumerate(index):
            self.packing.copy_row(packed, old, new)

    def check(self, generator: torch.Generator) -> None:
        """Positions, logits, mixing and bytes are those of the plain lists."""
        store = self.store
        positions = store.current_positions(torch.device("cpu")).expand(-1, HEADS, -1)
        query = torch.randn(len(self.held), HEADS, 2, DIM, generator=generator)
        weights = torch.rand(len(self.held), HEADS, 2, store.length, generator=generator)
        weights *= (positions >= 0)[:, :, None]
        logits, mixed = store.logits(query), store.mix(weights)
        assert torch.isfinite(logits).all()
        for row, heads in enumerate(self.held):
            keys, values = self.effective(row)
            assert store.seen[row] == keys.shape[1]
            for head, held in enumerate(heads):
                slots = (positions[row, head] >= 0).nonzero().flatten()
                assert positions[row, head, slots].tolist() == held
                close(logits[row, head][:, slots], query[row, head] @ keys[head, held].T)
                close(mixed[row, head], weights[row, head][:, slots] @ values[head, held])
        self.attend(query)
        sizes = store.memory()
        buffers = {part.buffer.untyped_storage().data_ptr(): part.buffer for part in store.columns().values()}
        if len(self.held) == 1 or all(buffer.is_contiguous() for buffer in buffers.values()):
            assert sum(sizes.values()) == sum(buffer.untyped_storage().nbytes() for buffer in buffers.values())

    def attend(self, query: Tensor) -> None:
        """What the kernels make of it, where they have code for the case, is what the plain operations give."""
        ranges, softmax = self.store.ranges(), Softmax(0.25)
        if ranges is None:
            return
        alive = (self.store.current_positions(query.device) >= 0)[:, :, None].expand(-1, -1, 2, -1)
        grouped = query[:, :, None]
        right, sums = naive.attend(grouped, self.store, lambda start, stop: alive, softmax, sum_columns=True)
        for mask in (alive, None):
            if mask is not None or not self.store.has_holes:
                fast = choose.attend_decode_with_sums(grouped, ranges, mask, softmax)
                if fast is not None:
                    close(fast[0], right)
                    close(fast[1], sums)

    def effective(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row as they are stored now: what was packed through its codes."""
        keys, values = self.keys[row].clone(), self.values[row].clone()
        packed = self.packing.update(self.store)
        if packed is not None:
            for of_row, head, group in packed.key_groups:
                if of_row == row:
                    keys[head, group] = coded(self.keys[row][head, group].T, packed.bits).T.float()
            size = min(packed.group_size, DIM)
            for of_row, head, position in packed.values:
                if of_row == row:
                    groups = self.values[row][head, position].unflatten(-1, (-1, size))
                    values[head, position] = coded(groups, packed.bits).flatten().float()
        return keys, values


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def drive(data: st.DataObject, store: Store, rows: int, seed: int, steps: list[str]) -> None:
    """Runs random steps on forks of `store`, and checks all of them after each."""
    generator = torch.Generator().manual_seed(seed)
    nothing = [torch.empty(HEADS, 0, DIM) for _ in range(rows)]
    twins = [Twin(store, [[[] for _ in range(HEADS)] for _ in range(rows)], list(nothing), list(nothing))]
    twins[0].append(data, generator)
    for _ in range(data.draw(st.integers(1, 9))):
        twin = data.draw(st.sampled_from(twins))
        step = data.draw(st.sampled_from([*steps, "fork"]))
        if step == "fork":
            twins.append(twin.fork(data.draw(st.integers(1, 2))))
        else:
            getattr(twin, step)(data, generator)
        if len(twins) > 1 and data.draw(st.booleans()):
            twins.pop(data.draw(st.integers(0, len(twins) - 1)))
        for each in twins:
            each.check(generator)
