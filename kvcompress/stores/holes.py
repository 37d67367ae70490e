"""Evicting from packed codes: packed tokens become holes, and units of nothing but holes are freed.

B rows, H KV heads (1 where all heads keep the same), S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcompress.stores.codes import Codes
from kvcompress.stores.slots import column

if TYPE_CHECKING:
    from kvcompress.stores.store import Store


def evict(store: Store, keep: Tensor) -> bool:
    """Keeps the slots in the mask `keep` [B, H or 1, S]; codes stay where they are. Says whether any slot went."""
    device = keep.device
    if not bool((~keep & (store.current_positions(device) >= 0)).any()):
        return False
    table = store.position_table(keep.shape[1], device)
    table.writable().masked_fill_(~keep, -1)
    store.has_holes = True
    _close_tail(store)
    _look_for_holes(store)
    return True


def _look_for_holes(store: Store) -> None:
    device = store.device
    inside = torch.arange(store.length, device=device) < column(store.lengths, device)
    store.has_holes = bool((inside[:, None] & (store.current_positions(device) < 0)).any())


def _close_tail(store: Store) -> None:
    """Moves what lives behind the packed keys together at the end, and drops as many slots as every head can spare."""
    alive = store.current_positions(store.device) >= 0
    device = alive.device
    starts = [front + count for front, count in zip(store.open.fronts, store.open.keys.counts, strict=True)]
    slots = torch.arange(store.length, device=device)
    in_tail = (slots >= column(starts, device))[:, None]
    inside = (slots < column(store.lengths, device))[:, None]
    dead = in_tail & inside & ~alive
    if not bool(dead.any()):
        return
    gone = dead.sum(-1).amin(-1).tolist()
    # Packed slots first, then the dead ones of the tail, then the live ones; each keeps its own order.
    rank = torch.where(in_tail & inside, torch.where(alive, 2, 1), torch.where(in_tail, 3, 0))
    order = rank.to(torch.uint8).argsort(dim=-1, stable=True)
    lengths = [length - count for length, count in zip(store.lengths, gone, strict=True)]
    target = torch.arange(max(lengths), device=device)
    skip = column(gone, device) * (target >= column(starts, device))
    index = order.gather(2, (target + skip).clamp(max=store.length - 1)[:, None].expand(-1, order.shape[1], -1))
    for part in store.per_slot().values():
        part.gather(index if part.buffer.shape[1] > 1 else index[:, :1], ascending=False)
    for tail, codes in zip(store.filled, (store.open.keys, store.open.values), strict=True):
        first = [front + count for front, count in zip(store.open.fronts, codes.counts, strict=True)]
        width = max(length - start for length, start in zip(lengths, first, strict=True))
        offset = column(first, device)
        within = (torch.arange(width, device=device) + offset).clamp(max=max(lengths) - 1)
        moved = index.gather(2, within[:, None].expand(-1, index.shape[1], -1)) - offset[:, None]
        tail.gather(moved.clamp(0, tail.used - 1), ascending=False)
    store.open.lengths = lengths


def _unit_slots(store: Store) -> tuple[Tensor, Tensor] | None:
    """The slots of every packed unit [B, units * unit], and which units [B, units] a row has; None where none has any.

    The slots of a unit that a row does not have may be anything.
    """
    unit = store.unit
    whole = [
        min(keys, values) // unit for keys, values in zip(store.open.keys.counts, store.open.values.counts, strict=True)
    ]
    if not any(whole):
        return None
    device = store.device
    slots = torch.arange(max(whole) * unit, device=device) + column(store.open.fronts, device)
    return slots.clamp(max=store.length - 1), torch.arange(max(whole), device=device) < column(whole, device)


def weakest_units(store: Store, worth: Tensor, counts: list[int]) -> Tensor:
    """The slots of the `counts[b]` packed units whose best slot is worth least: bool, in the shape of `worth`.

    `worth` [B, H or 1, S]: of each slot, -inf for what is gone. Ties go to the oldest unit.
    """
    found = torch.zeros_like(worth, dtype=torch.bool)
    units = _unit_slots(store)
    if units is None:
        return found
    slots, mine = units
    slots = slots[:, None].expand(-1, worth.shape[1], -1)
    best = worth.gather(2, slots).unflatten(2, (-1, store.unit)).amax(-1)
    order = torch.where(mine[:, None], best, torch.inf).argsort(dim=-1, stable=True)
    chosen = torch.arange(order.shape[2], device=worth.device) < column(counts, worth.device)[:, None]
    weakest = torch.zeros_like(order, dtype=torch.bool).scatter(2, order, chosen.expand_as(order)) & mine[:, None]
    return found.scatter(2, slots, weakest.repeat_interleave(store.unit, -1))


def free_units(store: Store) -> None:
    """Frees units that hold nothing: as many of each row as every head has."""
    units = _unit_slots(store)
    if units is None or store.positions is None:
        return
    slots, mine = units
    unit, table = store.unit, store.positions.view
    device = table.device
    inside = slots[:, None].expand(-1, table.shape[1], -1)
    dead = ~(table.gather(2, inside).unflatten(2, (-1, unit)) >= 0).any(-1) & mine[:, None]
    gone = dead.sum(-1).amin(-1).tolist()
    if not any(gone):
        return
    drop = dead & (dead.cumsum(-1) <= column(gone, device)[:, None])
    heads = store.filled[0].buffer.shape[1]
    for codes in (store.open.keys, store.open.values):
        counts = [count - unit * units for count, units in zip(codes.counts, gone, strict=True)]
        held = torch.zeros(*drop.shape[:2], -(-max(codes.counts) // unit), dtype=torch.uint8, device=device)
        held[..., : drop.shape[2]] = drop
        order = held.argsort(dim=-1, stable=True)[..., : -(-max(counts) // unit)]
        codes.keep_units(order.expand(-1, heads, -1), unit, counts)
    lengths = [length - unit * units for length, units in zip(store.lengths, gone, strict=True)]
    freed = torch.zeros(*drop.shape[:2], store.length, dtype=torch.uint8, device=device)
    freed = freed.scatter_add(2, inside, drop.repeat_interleave(unit, -1).to(torch.uint8))
    order = freed.argsort(dim=-1, stable=True)[..., : max(lengths)]
    for part in store.per_slot().values():
        part.gather(order if part.buffer.shape[1] > 1 else order[:, :1])
    store.open.lengths = lengths
    _look_for_holes(store)


def empty_bytes(store: Store, codes: Codes, used: int) -> int:
    """How many of the `used` bytes of `codes` belong to holes or lie behind the end of a shorter row."""
    slots = max(codes.counts, default=0) * len(codes.counts)
    if not slots or store.empty:
        return 0
    live = sum(codes.counts) / slots
    if store.has_holes:
        device = store.device
        held = store.current_positions(device)
        slot = torch.arange(held.shape[2], device=device) - column(store.open.fronts, device)
        packed = (slot >= 0) & (slot < column(codes.counts, device))
        live = int(((held >= 0) & packed[:, None]).sum()) / (slots * held.shape[1])
    return used - round(used * live)
