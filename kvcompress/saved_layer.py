"""What a saved layer must look like to be loaded: every number, shape and dtype, before anything is built of it.

B rows, H KV heads, S slots, D head dim.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvcompress.kernels.layout import LANES, codes_per_word
from kvcompress.methods.base import Method
from kvcompress.stores.packed import PackedStore

Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """JSON with these keys and no others, nothing converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PackedOptions(Strict):
    bits: int
    group_size: int
    residual: int
    front: int


class StoreState(Strict):
    """What a store's `state()` writes; the second half is there for packed stores alone."""

    lengths: list[Count]
    seen: list[Count]
    with_scores: bool
    options: PackedOptions | None = None
    packed_keys: list[Count] | None = None
    packed_values: list[Count] | None = None
    holes: bool | None = None
    fronts: list[Count] | None = None


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
    for row, (length, fed) in enumerate(zip(state.lengths, seen, strict=True)):
        if not 1 <= length <= fed:
            raise Mismatch(f"row {row} stores {length} slots, expected 1 to {fed}, the tokens seen")
    if layer.window is None and method.packing is not None:
        keys, names = _check_packed(state, tensors, method)
    else:
        _require("options of a packed store", state.options, None)
        keys, names = _check_dense(state, tensors)
    _check_slots(state, tensors, keys.shape[1])
    _require("tensors", sorted(tensors), sorted(names | ({"positions"} & tensors.keys()) | _scores(state)))


def _check_dense(state: StoreState, tensors: Mapping[str, Tensor]) -> tuple[Tensor, set[str]]:
    rows, slots = len(state.lengths), max(state.lengths)
    keys = _tensor(tensors, "keys", (rows, None, slots, None))
    _tensor(tensors, "values", (rows, keys.shape[1], slots, None))
    return keys, {"keys", "values"}


def _check_packed(state: StoreState, tensors: Mapping[str, Tensor], method: Method) -> tuple[Tensor, set[str]]:
    new = method.new_store(0)
    assert isinstance(new, PackedStore)
    options = PackedOptions(**new.state()["options"])
    _require("options", state.options, options)
    if state.packed_keys is None or state.packed_values is None or state.fronts is None or state.holes is None:
        raise Mismatch("the state of a packed store lacks packed_keys, packed_values, fronts or holes")
    rows = len(state.lengths)
    for name in ("packed_keys", "packed_values", "fronts"):
        _require(f"number of {name}", len(getattr(state, name)), rows)
    for row, (length, front, key_count, value_count) in enumerate(
        zip(state.lengths, state.fronts, state.packed_keys, state.packed_values, strict=True)
    ):
        packed = max(key_count, value_count)
        if front not in (0, options.front) or (packed and front != options.front):
            raise Mismatch(f"row {row} has {front} first tokens apart, expected {options.front}")
        if key_count % options.group_size:
            raise Mismatch(f"row {row} has {key_count} packed keys, no multiple of the group size {options.group_size}")
        if front + packed > length:
            raise Mismatch(f"row {row} has {front} + {packed} tokens packed or apart, more than its {length} slots")
    names: set[str] = set()
    for name, counts in (("keys", state.packed_keys), ("values", state.packed_values)):
        stored = zip(state.lengths, state.fronts, counts, strict=True)
        left = max(length - front - count for length, front, count in stored)  # 0 where a residual has just been packed
        tail = _tensor(tensors, f"tail.{name}", (rows, None, left, None))
        names |= {f"tail.{name}"}
        heads, dim = tail.shape[1], tail.shape[3]
        if any(state.fronts) or f"front.{name}" in tensors:
            _tensor(tensors, f"front.{name}", (rows, heads, options.front, dim))
            names |= {f"front.{name}"}
        if any(counts) or f"{name}.words" in tensors:
            _check_codes(tensors, name, (rows, heads, max(counts), dim), options)
            names |= {f"{name}.{part}" for part in ("words", "scale", "minimum")}
    _require("heads of the values", tensors["tail.values"].shape[1], tensors["tail.keys"].shape[1])
    return tensors["tail.keys"], names


def _check_codes(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int, int, int], options: PackedOptions
) -> None:
    rows, heads, count, dim = shape
    per_word = codes_per_word(options.bits)
    if name == "keys":
        word_shape = (-(-count // LANES), -(-dim // per_word), LANES)
        scale_shape = (-(-count // options.group_size), dim)
    else:
        word_shape = (-(-count // per_word), dim)
        scale_shape = (count, dim // min(options.group_size, dim))
    _tensor(tensors, f"{name}.words", (rows, heads, *word_shape), torch.int16)
    for part in ("scale", "minimum"):
        _tensor(tensors, f"{name}.{part}", (rows, heads, *scale_shape), torch.float16)


def _check_slots(state: StoreState, tensors: Mapping[str, Tensor], heads: int) -> None:
    rows, slots = len(state.lengths), max(state.lengths)
    inside = torch.arange(slots) < torch.tensor(state.lengths)[:, None, None]
    if state.with_scores:
        scores = _tensor(tensors, "scores", (rows, heads, slots), torch.float32)
        if not bool((scores.isfinite() & (scores >= 0)).masked_fill(~inside, True).all()):
            raise Mismatch("a score is negative or not finite")
    if "positions" not in tensors:
        _require("lengths without stored positions", state.lengths, state.seen)
        return
    positions = _tensor(tensors, "positions", (rows, None, slots), torch.int32)
    if positions.shape[1] not in (1, heads):
        raise Mismatch(f"positions are stored for {positions.shape[1]} heads, expected 1 or {heads}")
    held = (positions >= 0) & inside
    if not state.holes and bool((inside & ~held).any()):
        raise Mismatch("a slot holds no token, but the layer says that it has no holes")
    known = positions.masked_fill(~held, -1)
    before = torch.cat([known.new_full((*known.shape[:2], 1), -1), known.cummax(-1).values[..., :-1]], -1)
    if bool((held & ((positions <= before) | (positions >= torch.tensor(state.seen)[:, None, None]))).any()):
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
