"""Keys and values as 2- or 4-bit codes, the newest in full precision (KIVI, arXiv 2402.02750)."""

from math import lcm
from typing import Any

import torch
from torch import Tensor

from kvcompress.kernels import reference
from kvcompress.kernels.layout import LANES, PackedKeys, PackedValues
from kvcompress.stores.codes import PACKED_SPARE, Codes, runs_of_rows
from kvcompress.stores.dense import DenseStore
from kvcompress.stores.growing import Growing
from kvcompress.stores.slots import Slots, ends_mask


class PackedStore(Slots):
    """The slots of a row are, in order: `front` in full precision, packed codes, and the residual.

    Packed keys end before the residual keys and packed values before the residual values; the two ends differ. An
    evicted packed token leaves a hole (position -1) that is masked; bytes come back when every head of a row has a
    unit of nothing but holes (`unit` tokens: a group, and at least the 32 tokens of one block of words).
    """

    def __init__(
        self, rows: int, bits: int, group_size: int, residual: int, front: int = 0, with_scores: bool = False
    ) -> None:
        super().__init__(rows, with_scores)
        self.bits, self.group_size, self.residual, self.front_size = bits, group_size, residual, front
        self.unit = lcm(group_size, LANES)
        self.fronts = [0] * rows  # how many tokens of each row are in `front`: none, or `front_size` once it packs
        self.front: tuple[Growing, Growing] | None = None
        self.tail: tuple[Growing, Growing] | None = None
        self.keys = Codes(rows, "keys", bits, group_size)
        self.values = Codes(rows, "values", bits, group_size)
        self._holes = False

    @property
    def empty(self) -> bool:
        return self.tail is None

    @property
    def has_holes(self) -> bool:
        return self._holes

    @property
    def filled(self) -> tuple[Growing, Growing]:
        """Keys and values that are not packed yet."""
        if self.tail is None:
            raise ValueError("this layer holds no keys yet; feed the model at least one token first")
        return self.tail

    def tail_lengths(self, codes: Codes) -> list[int]:
        rows = zip(self.lengths, self.fronts, codes.counts, strict=True)
        return [length - front - count for length, front, count in rows]

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Stores the last `counts[b]` columns of `keys` and `values` [B, H, T, D] in full precision; `pack` packs."""
        if self.tail is None:
            self._choose_value_groups(values.shape[-1])
            self.tail = Growing.like(keys, PACKED_SPARE), Growing.like(values, PACKED_SPARE)
        self.tail[0].append(keys, self.tail_lengths(self.keys), counts)
        self.tail[1].append(values, self.tail_lengths(self.values), counts)
        self.grow(keys, counts)

    def _choose_value_groups(self, dim: int) -> None:
        self.values.group_size = min(self.group_size, dim)
        if dim % self.values.group_size:
            raise ValueError(
                f"kivi's group_size {self.group_size} does not divide the model's head dim {dim}; "
                f"choose a divisor of {dim}"
            )

    def logits(self, query: Tensor) -> Tensor:
        """`query` fp32 [B, H, M, D] times all keys: fp32 [B, H, M, S]; holes and row ends get values to be masked."""
        out = query.new_zeros(*query.shape[:3], self.length)
        for rows, (front, packed, length) in runs_of_rows(self.fronts, self.keys.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows, ..., :front] = query[rows] @ self.front[0].view[rows].float().transpose(-1, -2)
            if packed:
                codes = self.keys.rows(rows)
                assert isinstance(codes, PackedKeys)
                out[rows, ..., front:tail] = reference.packed_logits(query[rows], codes, packed)
            keys = self.filled[0].view[rows, :, : length - tail].float()
            out[rows, ..., tail:length] = query[rows] @ keys.transpose(-1, -2)
        return out

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times all values: fp32 [B, H, M, D]."""
        out = weights.new_zeros(*weights.shape[:3], self.filled[1].buffer.shape[-1])
        for rows, (front, packed, length) in runs_of_rows(self.fronts, self.values.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows] += weights[rows, ..., :front] @ self.front[1].view[rows].float()
            if packed:
                codes = self.values.rows(rows)
                assert isinstance(codes, PackedValues)
                out[rows] += reference.packed_mix(weights[rows, ..., front:tail], codes, packed)
            values = self.filled[1].view[rows, :, : length - tail].float()
            out[rows] += weights[rows, ..., tail:length] @ values
        return out

    def key_prefix(self, count: int) -> list[tuple[slice, Tensor]]:
        """The first `count` keys as (rows, keys [B, H, count, D]), to be written in place; packed ones cannot be."""
        found = []
        for rows, (front, packed) in runs_of_rows(self.fronts, self.keys.counts):
            keys = self.front[0] if self.front and front else self.filled[0]
            if packed and count > front:
                raise ValueError(f"of the first {count} keys only {front} are in full precision; packed ones do not rotate")
            found.append((rows, keys.writable()[rows, :, :count]))
        return found

    def pack(self) -> None:
        """Packs what is due: keys in steps of `residual`, values up to the last `residual` (KIVI, algorithm 1)."""
        self._split_front()
        due_keys = [length - length % self.residual for length in self.tail_lengths(self.keys)]
        due_values = [max(0, length - self.residual) for length in self.tail_lengths(self.values)]
        alive = self.alive(self.filled[0].buffer.device) if self._holes else None
        for which, (codes, due) in enumerate(((self.keys, due_keys), (self.values, due_values))):
            if any(due):
                present = None if alive is None else self._alive_tail(alive, codes, max(due))
                codes.append(self.filled[which].view, due, present)
                self._take(which, due)

    def _split_front(self) -> None:
        """Sets the first tokens of a row that is about to pack aside, in full precision."""
        rows = zip(self.lengths, self.fronts, strict=True)
        enough = self.front_size + self.residual
        due = [self.front_size if front == 0 and length >= enough else 0 for length, front in rows]
        if not any(due):
            return
        taken = self._take(0, due), self._take(1, due)
        if self.front is None:
            self.front = taken
        else:
            for old, new in zip(self.front, taken, strict=True):
                for row, count in enumerate(due):
                    old.writable()[row, :, :count] = new.view[row, :, :count]
        self.fronts = [front + count for front, count in zip(self.fronts, due, strict=True)]

    def _take(self, which: int, counts: list[int]) -> Growing:
        """Removes the first `counts[b]` tokens of the tail of row b and returns them."""
        tail = self.filled[which]
        taken = Growing(tail.view[:, :, : max(counts)].clone(), floor=0)
        if len(set(counts)) == 1:
            tail.drop_middle(0, counts[0])
        else:
            kept = tail.used - min(counts)
            starts = torch.tensor(counts, device=tail.buffer.device)[:, None, None]
            index = torch.arange(kept, device=tail.buffer.device) + starts
            tail.gather(index.clamp(max=tail.used - 1))
        return taken

    def _alive_tail(self, alive: Tensor, codes: Codes, count: int) -> Tensor:
        starts = self._column(codes.counts, alive)[:, None] + self._column(self.fronts, alive)[:, None]
        index = (torch.arange(count, device=alive.device) + starts).clamp(max=alive.shape[2] - 1)
        heads = self.filled[0].buffer.shape[1]
        return alive.gather(2, index.expand(-1, alive.shape[1], -1)).expand(-1, heads, -1)

    @staticmethod
    def _column(numbers: list[int], like: Tensor) -> Tensor:
        """One number a row as [B, 1]."""
        return torch.tensor(numbers, device=like.device)[:, None]

    def evict(self, keep: Tensor) -> None:
        """Keeps the slots in the mask `keep` [B, H or 1, S]: packed ones become holes, the others move together."""
        if bool(keep.all()):
            return
        heads = self.filled[0].buffer.shape[1]
        table = self.position_table(keep.shape[1] if keep.shape[1] > 1 else self.columns_heads, keep.device)
        table.writable().masked_fill_(~keep, -1)
        self._holes = True
        alive = self.alive(keep.device)
        assert alive is not None
        self._compact_tail(alive, heads)
        self._drop_units()
        self._holes = bool((self.current_positions(keep.device) < 0).sum() > self._beyond_rows())

    @property
    def columns_heads(self) -> int:
        return self.positions.buffer.shape[1] if self.positions else 1

    def _beyond_rows(self) -> int:
        return (self.length * len(self.lengths) - sum(self.lengths)) * self.columns_heads

    def _compact_tail(self, alive: Tensor, heads: int) -> None:
        """Moves the live tokens behind the packed keys together at the end and drops the rest of the slots."""
        starts = [front + count for front, count in zip(self.fronts, self.keys.counts, strict=True)]
        slots = torch.arange(self.length, device=alive.device)
        in_tail = (slots >= self._column(starts, alive))[:, None]
        inside = (slots < self._column(self.lengths, alive))[:, None]
        dead = in_tail & inside & ~alive
        gone = dead.sum(-1).amin(-1).tolist()
        if not bool(dead.any()):
            return
        # Packed slots first, then the dead ones of the tail, then the live ones; each keeps its own order.
        rank = torch.where(in_tail & inside, torch.where(alive, 2, 1), torch.where(in_tail, 3, 0))
        order = rank.to(torch.uint8).argsort(dim=-1, stable=True)
        lengths = [length - count for length, count in zip(self.lengths, gone, strict=True)]
        target = torch.arange(max(lengths), device=alive.device)
        skip = self._column(gone, alive) * (target >= self._column(starts, alive))
        index = order.gather(2, (target + skip).clamp(max=self.length - 1)[:, None].expand(-1, order.shape[1], -1))
        for column in super().columns().values():
            column.gather(index if column.buffer.shape[1] > 1 else index[:, :1])
        for which, codes in ((0, self.keys), (1, self.values)):
            first = [front + count for front, count in zip(self.fronts, codes.counts, strict=True)]
            width = max(length - start for length, start in zip(lengths, first, strict=True))
            offset = self._column(first, alive)[:, None]
            within = (torch.arange(width, device=alive.device) + offset).clamp(max=max(lengths) - 1)
            moved = index.gather(2, within.expand(-1, index.shape[1], -1)) - offset
            self.filled[which].gather(moved.clamp(0, self.filled[which].used - 1))
        self.lengths = lengths

    def _drop_units(self) -> None:
        """Frees units that hold nothing in every head of a row."""
        assert self.positions is not None
        unit = self.unit
        whole = [min(k, v) // unit for k, v in zip(self.keys.counts, self.values.counts, strict=True)]
        if not any(whole):
            return
        table = self.positions.view
        inside = torch.arange(max(whole) * unit, device=table.device) + self._column(self.fronts, table)
        inside = inside.clamp(max=self.length - 1)[:, None].expand(-1, table.shape[1], -1)
        packed = table.gather(2, inside).unflatten(2, (-1, unit))
        mine = (torch.arange(max(whole), device=table.device) < self._column(whole, table))[:, None]
        dead = ~(packed >= 0).any(-1) & mine
        gone = dead.sum(-1).amin(-1).tolist()
        if not any(gone):
            return
        heads = self.filled[0].buffer.shape[1]
        drop = dead & (dead.cumsum(-1) <= self._column(gone, table)[:, None])
        for codes in (self.keys, self.values):
            counts = [count - unit * units for count, units in zip(codes.counts, gone, strict=True)]
            units = -(-max(codes.counts) // unit)
            order = self._order(drop, units)[..., : -(-max(counts) // unit)]
            codes.keep_units(order.expand(-1, heads, -1), unit, counts)
        lengths = [length - unit * units for length, units in zip(self.lengths, gone, strict=True)]
        slots = torch.zeros(*drop.shape[:2], self.length, dtype=torch.bool, device=table.device)
        slots = slots.scatter(2, inside, drop.repeat_interleave(unit, -1))
        order = slots.to(torch.uint8).argsort(dim=-1, stable=True)[..., : max(lengths)]
        for column in super().columns().values():
            column.gather(order if column.buffer.shape[1] > 1 else order[:, :1])
        self.lengths = lengths

    @staticmethod
    def _order(drop: Tensor, units: int) -> Tensor:
        padded = torch.zeros(*drop.shape[:2], units, dtype=torch.uint8, device=drop.device)
        padded[..., : drop.shape[2]] = drop
        return padded.argsort(dim=-1, stable=True)

    def evict_middle(self, first: list[int], last: list[int]) -> None:
        """Keeps the first `first[b]` and the last `last[b]` slots of each row."""
        device = self.filled[0].buffer.device
        self.evict(ends_mask(self.lengths, first, last, device) & (self.current_positions(device) >= 0))

    def memory(self) -> dict[str, int]:
        """Bytes by what they are. `residual` is all that is in full precision, `holes` what is held for nothing."""
        sizes = dict.fromkeys(("keys", "values", "scales", "residual", "positions", "scores", "holes", "spare"), 0)
        for name, codes in (("keys", self.keys), ("values", self.values)):
            for target, parts in ((name, ("words",)), ("scales", ("scale", "minimum"))):
                used, spare = codes.nbytes(parts)
                empty = self._empty_share(codes, used)
                sizes[target] += used - empty
                sizes["holes"] += empty
                sizes["spare"] += spare
        full = [column for pair in (self.front, self.tail) if pair for column in pair]
        for name, column in [("residual", column) for column in full] + list(super().columns().items()):
            used = column.bytes_per_slot * column.used
            sizes[name] += used
            sizes["spare"] += column.buffer.untyped_storage().nbytes() - used
        return sizes

    def _empty_share(self, codes: Codes, used: int) -> int:
        """How many of `used` bytes belong to holes or lie behind the end of a shorter row."""
        slots = max(codes.counts, default=0) * len(codes.counts)
        if not slots or self.tail is None:
            return 0
        live = sum(codes.counts) / slots
        if self._holes and self.positions is not None:
            held = self.current_positions(self.positions.buffer.device)
            slot = torch.arange(held.shape[2], device=held.device) - self._column(self.fronts, held)
            inside = (slot >= 0) & (slot < self._column(codes.counts, held))
            live = int(((held >= 0) & inside[:, None]).sum()) / (slots * held.shape[1])
        return used - round(used * live)

    def _growing(self) -> dict[str, Growing]:
        named = {f"keys.{name}": part for name, part in self.keys.parts.items()}
        named |= {f"values.{name}": part for name, part in self.values.parts.items()}
        for name, pair in (("front", self.front), ("tail", self.tail)):
            if pair:
                named |= {f"{name}.keys": pair[0], f"{name}.values": pair[1]}
        return named | super().columns()

    def columns(self) -> dict[str, Growing]:
        return self._growing()

    def fork(self, copies: int = 1) -> "PackedStore":
        other = PackedStore(0, self.bits, self.group_size, self.residual, self.front_size)
        other.copy_state(self, copies)
        other.keys, other.values = self.keys.fork(copies), self.values.fork(copies)
        other.front = (self.front[0].fork(copies), self.front[1].fork(copies)) if self.front else None
        other.tail = (self.tail[0].fork(copies), self.tail[1].fork(copies)) if self.tail else None
        other._holes = self._holes
        other.fronts = [front for front in self.fronts for _ in range(copies)]
        return other

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order; `on_device` is the same on the store's device."""
        for column in self.columns().values():
            column.select_rows(on_device)
        self.select_counts(index)
        self.keys.counts = [self.keys.counts[row] for row in index]
        self.values.counts = [self.values.counts[row] for row in index]
        self.fronts = [self.fronts[row] for row in index]

    def take_over(self, dense: DenseStore) -> None:
        """Starts from the unpacked tokens of `dense`, sharing its memory."""
        self.copy_state(dense, 1)
        keys, values = dense.filled
        self._choose_value_groups(values.buffer.shape[-1])
        self.tail = keys.fork(), values.fork()
        for column in self.tail:
            column.floor = PACKED_SPARE

    def tensors(self) -> dict[str, Tensor]:
        """The used part of every tensor, for `save`."""
        return {name: column.view for name, column in self.columns().items()}

    def state(self) -> dict[str, Any]:
        options = {"bits": self.bits, "group_size": self.group_size, "residual": self.residual, "front": self.front_size}
        counts = {"packed_keys": self.keys.counts, "packed_values": self.values.counts, "holes": self._holes}
        counts["fronts"] = self.fronts
        return {**super().state(), "options": options, **counts}

    @classmethod
    def load(cls, state: dict[str, Any], tensors: dict[str, Tensor]) -> "PackedStore":
        """The store that `state()` and `tensors()` described."""
        store = cls(len(state["lengths"]), **state["options"], with_scores=state["with_scores"])
        store.lengths, store.seen, store._holes = list(state["lengths"]), list(state["seen"]), state["holes"]
        store.fronts = list(state["fronts"])
        grown = {name: Growing(tensor) for name, tensor in tensors.items()}
        store.positions, store.scores = grown.pop("positions", None), grown.pop("scores", None)
        if "front.keys" in grown:
            store.front = grown["front.keys"], grown["front.values"]
        if "tail.keys" in grown:
            store.tail = grown["tail.keys"], grown["tail.values"]
            store.values.group_size = min(store.group_size, store.tail[1].buffer.shape[-1])
        for codes, counts, prefix in (
            (store.keys, state["packed_keys"], "keys."),
            (store.values, state["packed_values"], "values."),
        ):
            codes.counts = list(counts)
            codes.parts = {name.removeprefix(prefix): part for name, part in grown.items() if name.startswith(prefix)}
        return store
