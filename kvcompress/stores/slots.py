"""What every store knows of its slots: how many are used, which token lies in each, and its running score."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvcompress.kernels.host import on_device
from kvcompress.stores.growing import Growing


class Slots(ABC):
    """Positions and scores of `[B, H, S]` slots. Rows are left-aligned; each has its own length.

    `lengths[b]` slots of row b are in use and `seen[b]` real tokens were fed to it. Positions (int32, one head when
    all heads keep the same) exist only once they are no longer a plain range; -1 marks a hole.
    """

    has_holes: bool = False  # whether a slot may hold nothing, where something was evicted
    is_ragged: bool = False  # whether KV heads hold different numbers of tokens, so that some end in empty slots

    def __init__(self, rows: int, with_scores: bool = False) -> None:
        self.seen = [0] * rows
        self.positions: Growing | None = None
        self.scores: Growing | None = None
        self.with_scores = with_scores
        self.floor = 64

    def set_floor(self, tokens: int) -> None:
        """Lets so many tokens' room lie unused however little is stored, instead of 64."""
        self.floor = tokens
        for column in self.per_slot().values():
            column.floor = min(column.floor, tokens)

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Slots in use of each row."""

    @property
    def length(self) -> int:
        """S: the longest row, in slots."""
        return max(self.lengths)

    @property
    def has_gaps(self) -> bool:
        """Whether a slot inside a row's length may hold nothing."""
        return self.has_holes or self.is_ragged

    @property
    def uniform(self) -> bool:
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def grow(self, new: Tensor, counts: list[int]) -> None:
        """Notes positions and scores of the last `counts[b]` of the T columns of `new` [B, H, T, D], not yet stored."""
        batch, heads, columns = new.shape[:3]
        if self.positions is not None:
            ends = column([seen + count for seen, count in zip(self.seen, counts, strict=True)], new.device)
            positions = (ends - torch.arange(columns, 0, -1, device=new.device)).to(torch.int32)
            held = self.positions.buffer.shape[1]
            self.positions.append(positions[:, None].expand(batch, held, columns), self.lengths, counts)
        if self.with_scores:
            zeros = new.new_zeros(batch, heads, columns, dtype=torch.float32)
            if self.scores is None:
                self.scores = Growing.like(zeros, self.floor)
            self.scores.append(zeros, self.lengths, counts)
        self.seen = [seen + count for seen, count in zip(self.seen, counts, strict=True)]

    def position_table(self, heads: int, device: torch.device) -> Growing:
        """The stored positions, made from the plain range if this is the first time that they are needed."""
        if self.positions is None:
            lengths = column(self.lengths, device)
            table = torch.arange(self.length, device=device).expand(len(self.lengths), -1)
            table = table.masked_fill(table >= lengths, -1).to(torch.int32)
            self.positions = Growing(table[:, None].repeat(1, heads, 1), self.floor)
        elif self.positions.buffer.shape[1] < heads:
            self.positions = Growing(self.positions.view.repeat(1, heads, 1), self.floor)
        return self.positions

    def current_positions(self, device: torch.device) -> Tensor:
        """True position of the token in every slot: int64 [B, H or 1, S], -1 for a hole or behind a row's end."""
        slots = torch.arange(self.length, device=device)
        beyond = slots >= column(self.lengths, device)
        if self.positions is None:
            return slots.expand(len(self.lengths), -1).masked_fill(beyond, -1)[:, None]
        return self.positions.view.long().masked_fill(beyond[:, None], -1)

    def alive(self, device: torch.device) -> Tensor | None:
        """Which slots hold a token: bool [B, H or 1, S]; None where all do."""
        if self.uniform and not self.has_gaps:
            return None
        return self.current_positions(device) >= 0

    def per_slot(self) -> dict[str, Growing]:
        """Positions and scores, as far as they are stored, by their name in `memory()`."""
        found = {"positions": self.positions, "scores": self.scores}
        return {name: column for name, column in found.items() if column is not None}

    def copy_state(self, other: "Slots", copies: int) -> None:
        """Makes this a fork of `other`, every row `copies` times."""
        self.seen = [seen for seen in other.seen for _ in range(copies)]
        self.with_scores, self.floor, self.has_holes = other.with_scores, other.floor, other.has_holes
        self.is_ragged = other.is_ragged
        self.positions = other.positions.fork(copies) if other.positions else None
        self.scores = other.scores.fork(copies) if other.scores else None


def column(numbers: list[int], device: torch.device) -> Tensor:
    """One number a row: int64 [B, 1]."""
    return on_device(numbers, device)[:, None]


def kept_index(keep: Tensor, counts: list[int]) -> Tensor:
    """From a mask `keep` [B, H or 1, S] with `counts[b]` slots in each head to ascending indices [B, H or 1, K].

    Rows that keep fewer than K end in indices that mean nothing.
    """
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)
    return order[..., : max(counts)]


def ends_mask(lengths: list[int], first: list[int], last: list[int], device: torch.device) -> Tensor:
    """The first `first[b]` and the last `last[b]` of the `lengths[b]` slots of each row: bool [B, 1, S]."""
    slots = torch.arange(max(lengths), device=device)
    front, stop = column(first, device), column(lengths, device)
    start = stop - column(last, device)
    return ((slots < torch.minimum(front, stop)) | ((slots >= start) & (slots < stop)))[:, None]


def first_change(keep: Tensor) -> int:
    """The first slot that any row or head does not keep (0 on a GPU, where asking would stop the stream)."""
    if keep.device.type != "cpu":
        return 0
    gone = ~keep
    return int(torch.where(gone.any(-1), gone.to(torch.uint8).argmax(-1), keep.shape[-1]).min())
