"""What a saved layer must look like to be loaded: every number, shape and dtype, before anything is built of it.

B rows, H KV heads, S slots, D head dim.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvcompress.formats.base import KINDS, unit
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.stores.codes import Codes
from kvcompress.stores.segment import Segment

Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """JSON with these keys and no others, nothing converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StoreState(Strict):
    """What a store's `state()` writes."""

    lengths: list[Count]
    seen: list[Count]
    with_scores: bool
    holes: bool
    fronts: list[Count]
    origins: list[Count]
    packed_keys: list[Count]
    packed_values: list[Count]
    heads: list[list[Count]] | None
    heads_packed: list[list[Count]] | None


class SavedLayer(Strict):
    """One layer: the window of a sliding one, and its store."""

    window: int | None
    store: StoreState


class Mismatch(ValueError):
    """A saved layer contradicts itself or the method."""


def check_layer(layer: SavedLayer, tensors: Mapping[str, Tensor], method: Method, seen: list[int]) -> None:
    """Raises Mismatch unless the layer's numbers and tensors fit together, the method, and the tokens seen [B]."""
    state = layer.store
    evicting = method.evicting
    _require("with_scores", state.with_scores, layer.window is None and evicting is not None and evicting.needs_scores)
    _require("seen", state.seen, seen)
    _require("number of lengths", len(state.lengths), len(seen))
    least = 1 if state.heads is None else 0
    for row, (length, fed) in enumerate(zip(state.lengths, seen, strict=True)):
        if not least <= length <= fed:
            raise Mismatch(f"row {row} stores {length} slots, expected {least} to {fed}, the tokens seen")
    for name in ("lengths", "fronts", "origins", "packed_keys", "packed_values"):
        _require(f"number of {name}", len(getattr(state, name)), len(seen))
    segment = (method if layer.window is None else Exact()).new_store(0).open
    if state.heads is not None:
        segment = Segment(0, segment.packs)
    _check_counts(state, segment)
    names = _check_side(state, tensors, segment, segment.keys, state.packed_keys, None)
    names |= _check_side(state, tensors, segment, segment.values, state.packed_values, tensors["keys"].shape[1])
    names |= _check_heads(state, tensors, segment)
    _check_slots(state, tensors, tensors["keys"].shape[1])
    _require("tensors", sorted(tensors), sorted(names | ({"positions"} & tensors.keys()) | _scores(state)))


def _check_heads(state: StoreState, tensors: Mapping[str, Tensor], segment: Segment) -> set[str]:
    """Checks the segment in which KV heads differ; the names of its tensors."""
    if state.heads is None or state.heads_packed is None:
        _require("heads_packed", state.heads_packed, state.heads)
        return set()
    _require("number of heads", len(state.heads), len(state.seen))
    heads = tensors["keys"].shape[1]
    whole = 1 if segment.packs is None else unit(segment.packs)
    for row, (counts, packed) in enumerate(zip(state.heads, state.heads_packed, strict=True)):
        _require(f"heads of row {row}", [len(counts), len(packed)], [heads, heads])
        wrong = [each > count or each % whole for each, count in zip(packed, counts, strict=True)]
        if any(wrong) or (any(packed) and segment.packs is None):
            raise Mismatch(f"row {row} has {packed} packed tokens of {counts}, expected whole units of {whole}")
    held = sum(map(sum, state.heads_packed))
    rest, names = sum(map(sum, state.heads)) - held, set()
    for codes in (segment.keys, segment.values):
        dim = tensors[codes.kind].shape[3]
        names.add(f"heads.{codes.kind}")
        _tensor(tensors, f"heads.{codes.kind}", (1, 1, rest, dim))
        for name, part in codes.format.parts(codes.kind, dim).items() if codes.format and held else ():
            names.add(f"heads.{codes.kind}.{name}")
            _tensor(tensors, f"heads.{codes.kind}.{name}", (1, 1, held // part.tokens, *part.shape), part.dtype)
    return names


def _check_counts(state: StoreState, segment: Segment) -> None:
    group = 1 if segment.packs is None else segment.packs.format("keys").group("keys")
    rows = zip(state.lengths, state.fronts, state.packed_keys, state.packed_values, strict=True)
    for row, (length, front, key_count, value_count) in enumerate(rows):
        packed = max(key_count, value_count)
        if packed and segment.packs is None:
            raise Mismatch(f"row {row} has {packed} packed tokens, which the method does not pack")
        if front not in (0, segment.front_size) or (packed and front != segment.front_size):
            raise Mismatch(f"row {row} has {front} first tokens apart, expected {segment.front_size}")
        if key_count % group:
            raise Mismatch(f"row {row} has {key_count} packed keys, no multiple of the group size {group}")
        if front + packed > length:
            raise Mismatch(f"row {row} has {front} + {packed} tokens packed or apart, more than its {length} slots")
        for kind, count in zip(KINDS, (key_count, value_count), strict=True):
            waiting = length - count - segment.front_size
            if segment.packs and waiting > 0 and segment.packs.due(kind, waiting):
                raise Mismatch(f"row {row} has {waiting} {kind} in full precision, of which some were to be packed")


def _check_side(
    state: StoreState,
    tensors: Mapping[str, Tensor],
    segment: Segment,
    codes: Codes,
    counts: list[int],
    heads: int | None,
) -> set[str]:
    """Checks keys or values; the names of their tensors."""
    rows, kind = len(state.lengths), codes.kind
    stored = zip(state.lengths, state.fronts, counts, strict=True)
    left = max(length - front - count for length, front, count in stored)  # 0 where a residual has just been packed
    tail = _tensor(tensors, kind, (rows, heads, left, None))
    heads, dim = tail.shape[1], tail.shape[3]
    names = {kind}
    if any(state.fronts) or f"front.{kind}" in tensors:
        _tensor(tensors, f"front.{kind}", (rows, heads, segment.front_size, dim))
        names |= {f"front.{kind}"}
    if codes.format is None:
        return names
    for name, part in codes.format.parts(codes.kind, dim).items():
        full = f"{kind}.{name}"
        if any(counts) or full in tensors:
            _tensor(tensors, full, (rows, heads, -(-max(counts) // part.tokens), *part.shape), part.dtype)
            names |= {full}
    return names


def _check_slots(state: StoreState, tensors: Mapping[str, Tensor], heads: int) -> None:
    before = 0 if state.heads is None else max(map(max, state.heads))
    rows, slots = len(state.lengths), before + max(state.lengths)
    inside = torch.arange(slots) < before + torch.tensor(state.lengths)[:, None, None]
    if state.heads is not None:
        inside = inside & (
            (torch.arange(slots) >= before) | (torch.arange(slots) < torch.tensor(state.heads)[..., None])
        )
    if state.with_scores:
        scores = _tensor(tensors, "scores", (rows, heads, slots), torch.float32)
        if not bool((scores.isfinite() & (scores >= 0)).masked_fill(~inside, True).all()):
            raise Mismatch("a score is negative or not finite")
    if "positions" not in tensors and state.heads is None:
        _require("lengths without stored positions", state.lengths, state.seen)
        return
    positions = _tensor(tensors, "positions", (rows, None, slots), torch.int32)
    if positions.shape[1] not in (1, heads):
        raise Mismatch(f"positions are stored for {positions.shape[1]} heads, expected 1 or {heads}")
    held = (positions >= 0) & inside
    if state.heads is not None and bool(((positions >= 0) & ~inside).any()):
        raise Mismatch("a slot that no KV head uses has a position")
    if not state.holes and bool((inside & ~held).any()):
        raise Mismatch("a slot holds no token, but the layer says that it has no holes")
    known = positions.masked_fill(~held, -1)
    earlier = torch.cat([known.new_full((*known.shape[:2], 1), -1), known.cummax(-1).values[..., :-1]], -1)
    if bool((held & ((positions <= earlier) | (positions >= torch.tensor(state.seen)[:, None, None]))).any()):
        raise Mismatch("positions do not ascend within the tokens seen")


def _scores(state: StoreState) -> set[str]:
    return {"scores"} if state.with_scores else set()


def _require(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Mismatch(f"{what}: found {found}, expected {expected}")


def _tensor(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor of that name; `None` in `shape` is any size of at least 1, and without `dtype` it must be floating."""
    if name not in tensors:
        raise Mismatch(f"tensor {name} is missing")
    found = tensors[name]
    if found.dtype != dtype and (dtype is not None or not found.is_floating_point()):
        raise Mismatch(f"tensor {name} is {found.dtype}, expected {dtype or 'a floating dtype'}")
    fits = found.dim() == len(shape) and all(
        size == wanted if wanted is not None else size > 0 for size, wanted in zip(found.shape, shape, strict=True)
    )
    if not fits:
        raise Mismatch(f"tensor {name} is {list(found.shape)}, expected {['any' if n is None else n for n in shape]}")
    return found
