"""Decode attention of one layer against torch SDPA with the query heads folded into the query axis."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompress.attention import over
from kvcompress.kernels.softmax import Softmax
from kvcompress.measure.bench.case import Line, case
from kvcompress.measure.bench.limits import multiply_add_seconds, read_seconds
from kvcompress.measure.speed import Paired, paired
from kvcompress.methods.kivi import KIVI
from kvcompress.stores.store import Store
from kvcompress.visibility import EVERYTHING

LARGE = (16384, 8, 4, 128)  # S, KV heads, G, D
SMALL = (8192, 3, 3, 64)


def decode_attention(query: Tensor, store: Store, scaling: float) -> Tensor:
    """`query` [B, H, G, 1, D] over all of `store`, as a decode step attends."""
    return over(query, store, EVERYTHING, Softmax(scaling))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def folded_sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`query` [1, H, G, D] over dense `keys`, `values` [1, H, S, D]."""
    return F.scaled_dot_product_attention(query, keys, values)


def tensors(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Random query [1, H, G, D], keys and values [1, H, S, D], fp32."""
    length, heads, groups, dim = shape
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, groups, dim, generator=generator)
    keys, values = (torch.randn(1, heads, length, dim, generator=generator) for _ in range(2))
    return query.to(device()), keys.to(device()), values.to(device())


def packed_store(keys: Tensor, values: Tensor, bits: int) -> Store:
    store = KIVI(bits=bits).new_store(1)
    store.append(keys, values, [keys.shape[2]])
    store.pack()
    return store


def dense_store(keys: Tensor, values: Tensor) -> Store:
    store = Store(1)
    store.append(keys, values, [keys.shape[2]])
    return store


def line(name: str, against: str, result: Paired, limit: float | None, **detail: float) -> Line:
    """A ratio of times as a line."""
    times = {"own_ms": result.own_ms, "other_ms": result.other_ms, "rounds": result.rounds}
    return Line(name, against, result.ratio, limit, low=result.low, high=result.high, detail=times | detail)


@case
def packed_attention() -> list[Line]:
    """2- and 4-bit decode attention against SDPA over the dense tensors."""
    lines = []
    query, keys, values = tensors(LARGE)
    rival = partial(folded_sdpa, query, keys, values)
    rival_bf16 = partial(folded_sdpa, *(tensor.bfloat16() for tensor in (query, keys, values)))
    for bits, limit, limit_bf16 in ((2, 0.25, 0.4), (4, 0.4, None)):
        store = packed_store(keys, values, bits)
        own = partial(decode_attention, query[:, :, :, None], store, scaling=query.shape[-1] ** -0.5)
        bound_ms = _bound_ms(store, LARGE, unpacking=2)
        where = "S=16384 H=8 G=4 D=128"
        name = f"packed {bits}-bit decode attention, {where}"
        lines.append(line(name, "SDPA fp32", paired(own, rival, device()), limit, bound_ms=bound_ms))
        lines.append(line(name, "SDPA bf16", paired(own, rival_bf16, device()), limit_bf16))
        lines.append(_error(store, query, keys, values, bits))
    return lines


def _error(store: Store, query: Tensor, keys: Tensor, values: Tensor, bits: int) -> Line:
    """Relative error of the packed output against float64 over the same dequantised values."""
    eye_logits = torch.eye(keys.shape[-1], device=keys.device)[None, None].expand(1, keys.shape[1], -1, -1)
    dense_keys = store.logits(eye_logits).transpose(-1, -2).double()
    weights = (query.double() @ dense_keys.transpose(-1, -2) * keys.shape[-1] ** -0.5).softmax(-1)
    exact = torch.zeros_like(query, dtype=torch.float64)
    for start in range(0, keys.shape[2], 4096):
        stop = min(start + 4096, keys.shape[2])
        pick = torch.zeros(1, keys.shape[1], stop - start, keys.shape[2], device=keys.device)
        pick[:, :, range(stop - start), range(start, stop)] = 1
        exact += weights[..., start:stop] @ store.mix(pick).double()
    own = decode_attention(query[:, :, :, None], store, scaling=query.shape[-1] ** -0.5)[:, :, :, 0].double()
    error = float((own - exact).norm() / exact.norm())
    return Line(f"packed {bits}-bit decode attention, relative error", "float64", error, 1e-6)


@case
def dense_attention() -> list[Line]:
    """Dense fp32 decode attention with grouped queries against SDPA."""
    lines = []
    for shape, limit in ((LARGE, 0.75), (SMALL, 0.5)):
        query, keys, values = tensors(shape)
        store = dense_store(keys, values)
        own = partial(decode_attention, query[:, :, :, None], store, scaling=shape[3] ** -0.5)
        length, heads, groups, dim = shape
        result = paired(own, partial(folded_sdpa, query, keys, values), device())
        name = f"dense fp32 decode attention, S={length} H={heads} G={groups} D={dim}"
        lines.append(line(name, "SDPA fp32", result, limit, bound_ms=_bound_ms(store, shape)))
    return lines


def _bound_ms(store: Store, shape: tuple[int, int, int, int], unpacking: int = 0) -> float:
    """What this machine needs at least: to read what `store` holds, or to calculate with it, whichever takes longer.

    A number costs one multiply-add for each query head and, packed, `unpacking` operations, each at the rate at which
    a matrix product runs its multiply-adds.
    """
    length, heads, groups, dim = shape
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in store.tensors().values())
    operations = 2 * length * heads * dim * (groups + unpacking)
    return 1000 * max(read_seconds(device(), nbytes), operations * multiply_add_seconds(device()))


@case
def attention_by_context() -> list[Line]:
    """Decode attention against context length, for the figure."""
    lines = []
    for length in (1024, 2048, 4096, 8192, 16384, 32768):
        query, keys, values = tensors((length, *LARGE[1:]))
        rival = partial(folded_sdpa, query, keys, values)
        for name, store in (
            ("dense fp32", dense_store(keys, values)),
            ("packed 4-bit", packed_store(keys, values, 4)),
            ("packed 2-bit", packed_store(keys, values, 2)),
        ):
            own = partial(decode_attention, query[:, :, :, None], store, scaling=LARGE[3] ** -0.5)
            result = paired(own, rival, device(), rounds=7)
            lines.append(line(f"{name} decode attention at {length}", "SDPA fp32", result, None, context=length))
    return lines
