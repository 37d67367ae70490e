"""The keys and values of one layer, with the position and the score of each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompress.formats.base import Packs, unit
from kvcompress.kernels.layout import Range
from kvcompress.stores import holes
from kvcompress.stores.growing import Growing
from kvcompress.stores.ragged import Ragged
from kvcompress.stores.segment import Segment, joined
from kvcompress.stores.slots import Slots, ends_mask, first_change, kept_index

MEMORY: tuple[str, ...] = ("keys", "values", "scales", "residual", "positions", "scores", "holes", "spare", "shared")
"""What `memory()` tells apart."""

LEAST_SHARED = 256  # slots that a fork shares rather than copies
FEWEST_OF_PAST = 8  # and no less than this part of what it shares already, so that segments stay few


class Store(Slots):
    """What a layer holds under a method. `packs` says how tokens are packed; None: all stay in full precision.

    The slots are those of the segments in `past`, which no longer change and may belong to other stores too, and those
    of the `open` one, where tokens are appended. What a fork or its original appends first leaves what both share
    behind as past; whatever needs all tokens in one place, such as an eviction, joins the segments again. Where an
    eviction leaves KV heads with different numbers of tokens, these are the first segment, in flat memory.

    Evicting a packed token leaves a hole (position -1) that is masked; bytes come back when every head of a row has a
    `unit` of nothing but holes. Tokens in full precision move together at once.
    """

    def __init__(self, rows: int, packs: Packs | None = None, front: int = 0, with_scores: bool = False) -> None:
        super().__init__(rows, with_scores)
        self.packs = packs
        self.unit = unit(packs) if packs else 1
        self.front_size = front
        self.ragged: Ragged | None = None
        self.past: list[Segment] = []
        self.open = Segment(rows, packs, front)
        self.floor = self.open.floor
        self._first: list[int] | None = [0] * rows  # the position of each row's first token, where the host knows it
        self._may_free = False  # whether something was evicted since units were last freed

    @property
    def lengths(self) -> list[int]:
        """Slots in use of each row."""
        if not self.past and self.ragged is None:
            return self.open.lengths
        before = sum(segment.length for segment in self.segments[:-1])
        return [before + length for length in self.open.lengths]

    @property
    def segments(self) -> list[Ragged | Segment]:
        """All segments, oldest first."""
        return [*([] if self.ragged is None else [self.ragged]), *self.past, self.open]

    @property
    def rows(self) -> int:
        return len(self.open.lengths)

    @property
    def empty(self) -> bool:
        """Whether no token was ever stored."""
        return self.open.tail is None

    @property
    def device(self) -> torch.device:
        return self.open.filled[0].buffer.device

    @property
    def filled(self) -> tuple[Growing, Growing]:
        """Keys and values in full precision behind what is packed."""
        return self.open.filled

    @property
    def keys(self) -> Tensor:
        """All keys [B, H, S, D] of a store that packs nothing."""
        return self._full[0]

    @property
    def values(self) -> Tensor:
        """All values [B, H, S, D] of a store that packs nothing."""
        return self._full[1]

    @property
    def _full(self) -> tuple[Tensor, Tensor]:
        if any(self.packed_rows):
            raise ValueError("keys and values are packed here; whole(0) and whole(1) decode them")
        return self.whole(0), self.whole(1)

    @property
    def packed_rows(self) -> list[bool]:
        """Whether a token of each row is packed."""
        packed = zip(*(segment.packed_rows for segment in self.segments), strict=True)
        return [any(row) for row in packed]

    @property
    def in_full(self) -> int:
        """How many tokens of a row stay in full precision at most, whatever is packed."""
        return 0 if self.packs is None else self.front_size + self.packs.residual

    def set_floor(self, tokens: int) -> None:
        """Lets so many tokens' room lie unused however little is stored, instead of 64."""
        super().set_floor(tokens)
        self.open.set_floor(tokens)

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Stores the last `counts[b]` columns of `keys` and `values` [B, H, T, D] behind row b, in full precision."""
        if not self.empty and self.open.is_shared:
            self._leave_behind()
        self.grow(keys, counts)
        self.open.append(keys, values, counts)

    def _leave_behind(self) -> None:
        """Makes what is shared with another store part of the past, where that is worth a segment of its own."""
        slots = self.open.splits_at(self.unit)
        enough = slots >= max(LEAST_SHARED, sum(segment.length for segment in self.past) // FEWEST_OF_PAST)
        if enough and not self.has_holes:
            before, self.open = self.open.split(self.unit)
            self.past.append(before)

    def join(self) -> None:
        """Makes one open segment of all in which KV heads are alike, with memory of its own."""
        if self.past:
            self.open, self.past = joined([*self.past, self.open]), []

    def logits(self, query: Tensor, front_query: Tensor | None = None) -> Tensor:
        """`query` fp32 [B, H, M, D] times all keys: fp32 [B, H, M, S]; holes and row ends get values to be masked.

        `front_query`, if given, stands for it before the front of a segment.
        """
        each = [segment.logits(query, front_query) for segment in self.segments]
        return each[0] if len(each) == 1 else torch.cat(each, -1)

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times all values: fp32 [B, H, M, D]."""
        if not self.past and self.ragged is None:
            return self.open.mix(weights)
        parts = weights.split([segment.length for segment in self.segments], -1)
        each = [segment.mix(part) for segment, part in zip(self.segments, parts, strict=True)]
        return torch.stack(each).sum(0)

    def ranges(self) -> list[Range] | None:
        """All tensors as the kernels read them; None where something is in a format that they do not know."""
        found = [segment.range() for segment in self.segments if segment.length]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def plain(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, S, D] as long as all of them lie in full precision in one tensor, else None."""
        return None if self.past or self.ragged else self.open.plain

    def whole(self, which: Literal[0, 1]) -> Tensor:
        """All keys (0) or values (1) [B, H, S, D] in full precision; holes and row ends hold anything finite.

        A copy, as long as the context, where something is packed or shared: to decide from, not to attend to.
        """
        each = [segment.plain[which] if segment.plain else segment.decoded(which) for segment in self.segments]
        return each[0] if len(each) == 1 else torch.cat(each, 2)

    def with_keys(self, keys: Tensor) -> Store:
        """The same tokens with other keys [B, H, S, D], to be attended to and no more."""
        other = Store(self.rows)
        other.open.tail = Growing(keys), Growing(self.whole(1))
        other.open.lengths = self.lengths
        return other

    def turn(self, rotary: Any, delta: Tensor) -> None:
        """Rotates the keys by `delta` [B, H or 1, S] positions; packed ones cannot be."""
        self.join()
        for segment, part in zip(self.segments, delta.split([each.length for each in self.segments], -1), strict=True):
            if segment.length:
                segment.turn(rotary, part)

    def pack(self) -> None:
        """Packs what is due, then frees the units that an eviction left empty, those just packed among them."""
        if self.packs is None:
            return
        if self.ragged is not None:
            self.ragged.pack(self.unit)
        alive = self.alive(self.device) if self.has_holes else None
        self.open.pack(None if alive is None else alive[..., self.length - self.open.length :])
        if self._may_free:
            self.free_units()

    def evict(self, keep: Tensor, counts: list[int] | None = None) -> None:
        """Keeps the slots in the mask `keep` [B, H or 1, S]: `counts[b]`, if it is known, in each head of row b.

        Packed tokens become holes, the others move together; heads may keep different numbers of tokens. Units of
        nothing but holes give their bytes back when `pack` or `free_units` is called next.
        """
        self._first = None
        self._evict(keep, counts)

    def _evict(self, keep: Tensor, counts: list[int] | None) -> None:
        self.join()
        keep = keep & ends_mask(self.lengths, self.lengths, [0] * self.rows, keep.device)
        if self.packs is not None and (any(self.packed_rows) or self.has_holes or any(self.open.fronts)):
            if self.ragged is None:
                self._may_free |= holes.evict(self, keep)
            else:  # nothing moves in flat memory
                self.position_table(keep.shape[1], keep.device).writable().masked_fill_(~keep, -1)
                self.has_holes = True
            return
        if counts is None:
            if self.has_gaps:
                keep = keep & (self.current_positions(keep.device) >= 0)
            per_head = keep.sum(-1).tolist()
            counts = [row[0] for row in per_head]
            if any(row.count(row[0]) != len(row) for row in per_head):
                self._evict_by_head(keep)
                return
        if self.ragged is not None or any(self.open.fronts):
            self._even_out()
        elif counts == self.lengths:
            return
        first, index = first_change(keep), kept_index(keep, counts)
        self.position_table(keep.shape[1], keep.device)
        for column in self.columns().values():
            column.gather(index if column.buffer.shape[1] > 1 else index[:, :1], first)
        self.open.lengths = counts

    def _evict_by_head(self, keep: Tensor) -> None:
        """Keeps the slots in the mask `keep` [B, H, S], different numbers in the heads."""
        keys, values = self.whole(0), self.whole(1)
        self.ragged = Ragged.of(keys, values, keep, self.packs)
        index = kept_index(keep, [self.ragged.length])
        empty = ~keep.gather(-1, index)
        self.position_table(keep.shape[1], keep.device)
        for part in self.per_slot().values():
            part.gather(index, ascending=False)
            part.writable().masked_fill_(empty, -1 if part.buffer.dtype == torch.int32 else 0)
        self.open = Segment(self.rows, self.packs)
        self.open.set_floor(self.floor)
        self.open.start(keys, values)
        self.is_ragged = True

    def _even_out(self) -> None:
        """Puts all tokens into one tail, where KV heads are about to be alike again, or rows no longer have a front."""
        keys, values, lengths = self.whole(0), self.whole(1), self.lengths
        self.open = Segment(self.rows, self.packs, self.front_size)
        self.open.set_floor(self.floor)
        self.open.append(keys, values, [keys.shape[2]] * len(lengths))
        self.open.lengths = lengths
        self.ragged, self.is_ragged = None, False

    def evict_middle(self, first: list[int], last: list[int]) -> None:
        """Keeps the first `first[b]` and the last `last[b]` slots of each row; moves the first ones only, if it can."""
        if all(front + back >= length for length, front, back in zip(self.lengths, first, last, strict=True)):
            return
        self.join()
        if self.packs is not None or self.has_gaps:
            self.evict(ends_mask(self.lengths, first, last, self.device) & (self.current_positions(self.device) >= 0))
            return
        rows = zip(self.lengths, first, last, strict=True)
        gone = [max(0, length - front - back) for length, front, back in rows]
        left = [length - count for length, count in zip(self.lengths, gone, strict=True)]
        origins = self._first_after(first, left)
        if not (self.uniform and len(set(gone)) == 1 and len(set(first)) == 1):
            self._evict(ends_mask(self.lengths, first, last, self.device), left)
            self._first = origins
            return
        if self.front_size and first[0] == self.front_size:
            if not any(self.open.fronts):
                if self._first is None:
                    self._first = self.current_positions(self.device)[:, 0, 0].tolist()
                self.open.origins = self._first
            self.open.split_front(self.front_size)
        elif any(self.open.fronts):
            self._even_out()
        self.position_table(1, self.device)
        for part in self.per_slot().values():
            part.drop_middle(first[0], gone[0])
        for part in self.open.filled:
            part.drop_middle(first[0] - self.open.fronts[0], gone[0])
        self.open.lengths, self._first = left, origins

    def _first_after(self, first: list[int], left: list[int]) -> list[int] | None:
        """The position of each row's first token once `left[b]` stay, `first[b]` of them the first ones; None: ask."""
        if self._first is None:
            return None
        found = []
        for own, front, seen, length, kept in zip(self._first, first, self.seen, self.lengths, left, strict=True):
            if front or kept == length:
                found.append(own)
            elif own == seen - length or kept <= length - self.front_size:  # tokens that follow each other
                found.append(seen - kept)
            else:
                return None
        return found

    def free_units(self) -> None:
        """Frees units of nothing but holes: as many of each row as every head has."""
        holes.free_units(self)
        self._may_free = False

    def units_beyond(self, room: int) -> list[int] | None:
        """How many units each row would have to give up to take no more than `room` slots; None where none has to."""
        units = [-(-max(0, length - room) // self.unit) for length in self.lengths]
        return units if any(units) else None

    def columns(self) -> dict[str, Growing]:
        """All that is stored, by name."""
        if self.empty:
            return {}
        before = {
            f"{number}.{name}": part
            for number, segment in enumerate(self.segments[:-1])
            for name, part in segment.columns().items()
        }
        return before | self.open.columns() | self.per_slot()

    def memory(self) -> dict[str, int]:
        """Bytes by what they are, as `MEMORY` names them.

        `shared` is what is used by another store too. Of the rest, `residual` is what a store that packs holds in full
        precision; `holes` what is held for nothing, the unused slots of shorter rows in a store that does not pack
        among them. `spare` is room to grow.
        """
        sizes = dict.fromkeys(MEMORY, 0)
        if self.empty:
            return sizes
        for segment in self.segments:
            for name, part in segment.columns().items():
                _count(sizes, segment.category(name), part, partial(self._unused, segment, name))
        for name, part in self.per_slot().items():
            _count(sizes, name, part, partial(unfilled, self.lengths if self.packs is None else []))
        return sizes

    def _unused(self, segment: Segment | Ragged, name: str, used: int) -> int:
        """How many of the `used` bytes of a segment's column are held for nothing."""
        if segment is self.ragged:
            return 0
        for codes in (segment.keys, segment.values):
            if name.startswith(f"{codes.kind}."):
                return holes.empty_bytes(self, codes, used)
        return unfilled(segment.lengths if self.packs is None else [], used)

    def row_numbers(self) -> list[list[int]]:
        """Every number that the host keeps of each row."""
        numbers = [self.seen, self._first or []]
        if self.ragged is not None:
            numbers += self.ragged.row_numbers()
        for segment in (*self.past, self.open):
            numbers += [segment.lengths, segment.fronts, segment.origins, segment.keys.counts, segment.values.counts]
        return numbers

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order; `on_device` is the same on the store's device."""
        self.seen = [self.seen[row] for row in index]
        self._first = None if self._first is None else [self._first[row] for row in index]
        if self.ragged is not None:
            before, self.ragged = self.ragged.length, self.ragged.select_rows(index, on_device)
            left = self.ragged.length
            for part in self.per_slot().values():  # the slots that only a row that is gone needed go with it
                slots = torch.arange(part.used - before + left, device=on_device.device)
                slots = torch.where(slots < left, slots, slots + before - left)
                part.gather(slots.expand(part.buffer.shape[0], 1, -1))
        for segment in (*self.past, self.open):
            segment.select_rows(index, on_device)
        for part in self.per_slot().values():
            part.select_rows(on_device, self.length)

    def fork(self, copies: int = 1) -> Store:
        """The same for another continuation, every row `copies` times; memory is shared until it is written."""
        other = Store(0, self.packs, self.front_size)
        other.ragged = self.ragged.fork(copies) if self.ragged else None
        other.past = [segment.fork(copies) for segment in self.past]
        other.open = self.open.fork(copies)
        other.copy_state(self, copies)
        other._may_free = self._may_free
        other._first = None if self._first is None else [each for each in self._first for _ in range(copies)]
        return other

    def in_one(self) -> Store:
        """The same tokens in one segment, behind one where KV heads differ: this store, or a copy."""
        if not self.past:
            return self
        other = self.fork()
        other.join()
        return other

    def take_over(self, dense: Store) -> None:
        """Starts from the tokens of `dense`, of which none is packed, sharing its memory."""
        dense = dense.in_one()
        self.copy_state(dense, 1)
        self._first = dense._first
        keys, values = dense.filled
        self.open.keys.prepare(keys.buffer.shape[-1])
        self.open.values.prepare(values.buffer.shape[-1])
        self.open.lengths, self.open.fronts = list(dense.lengths), [0] * dense.rows
        self.open.tail = keys.fork(), values.fork()
        self.floor = self.open.floor
        for part in self.open.tail:
            part.floor = self.floor

    def tensors(self) -> dict[str, Tensor]:
        """The used part of every tensor, for `save`; all segments as one."""
        if self.empty:
            return {}
        whole = self.in_one()
        entries = whole.open.entries() | {"positions": whole.length, "scores": whole.length}
        columns = whole.open.columns() | whole.per_slot()
        found = {name: part.view[:, :, : entries[name]] for name, part in columns.items()}
        if whole.ragged is None:
            return found
        ragged = whole.ragged.fork()
        ragged.compact()
        return found | {f"heads.{name}": part.view for name, part in ragged.columns().items() if name != "lines"}

    def state(self) -> dict[str, Any]:
        """What `save` writes beside the tensors."""
        numbers = {"seen": self.seen, "with_scores": self.with_scores, "holes": self.has_holes}
        heads = {"heads": None, "heads_packed": None} if self.ragged is None else self.ragged.state()
        return numbers | self.in_one().open.state() | heads

    def load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what `state()` and `tensors()` described."""
        self.seen, self.with_scores, self.has_holes = list(state["seen"]), state["with_scores"], state["holes"]
        slots = {name: Growing(each, self.floor) for name, each in tensors.items() if name in ("positions", "scores")}
        self.positions, self.scores = slots.get("positions"), slots.get("scores")
        self._first = None if self.positions is not None else [0] * len(self.seen)
        if state["heads"] is not None:
            own = {name.removeprefix("heads."): each for name, each in tensors.items() if name.startswith("heads.")}
            self.ragged, self.is_ragged = Ragged.load(state, own, self.packs), True
            self.open = Segment(self.rows, self.packs)
            self.open.set_floor(self.floor)
        self.open.load(state, tensors)


def _count(sizes: dict[str, int], category: str, part: Growing, unused_of: Callable[[int], int]) -> None:
    """Adds the bytes of one column to `sizes`."""
    used = part.bytes_per_slot * part.used
    sizes["spare"] += part.buffer.untyped_storage().nbytes() - used
    if part.is_shared:
        sizes["shared"] += used
        return
    unused = unused_of(used)
    sizes[category] += used - unused
    sizes["holes"] += unused


def unfilled(lengths: list[int], used: int) -> int:
    """How many of `used` bytes lie behind the ends of rows shorter than the longest."""
    slots = len(lengths) * max(lengths, default=0)
    return used - used * sum(lengths) // slots if slots else 0
