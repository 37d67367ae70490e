"""Column sums of causal attention on a GPU, in Triton: first each query's log-sum-exp, then the sums of the columns.

A program of the second kernel owns a block of keys and walks over the queries that see it, so nothing is added by two
programs and the sums are the same every time. Queries and keys of 16 bits are multiplied in 16 bits, with sums in
fp32. DIM, a power of two, holds the head dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompress.kernels.attention.triton import MASKED
from kvcompress.kernels.softmax import Softmax

SMALL_BLOCK, LARGE_BLOCK = 32, 64  # queries, and keys; what a program holds must fit into its multiprocessor


@triton.jit
def block_logits(q, k, column, slot, past, columns, scaling, softcap, CAPPED: tl.constexpr):
    """fp32 [QUERIES, KEYS], and what is seen of it."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if CAPPED:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    seen = (slot[None, :] <= past + column[:, None]) & (column[:, None] < columns)
    return tl.where(seen, logits, MASKED), seen


@triton.jit
def load_rows(place, number, stride, stop, dim, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Rows [numbers, DIM] of queries or keys; zeros from `stop` on and beyond the head dim."""
    channel = tl.arange(0, DIM)[None, :]
    rows = tl.load(
        place + number[:, None] * stride + channel, mask=(number < stop)[:, None] & (channel < dim), other=0.0
    )
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def log_sums(
    query,  # [B, H, G, T, D]
    keys,
    sinks,  # fp32 [H, G]
    out,  # fp32 [B, H, G, T]
    scaling,
    softcap,
    heads,
    groups,
    columns,
    dim,
    past,
    key_strides,  # in numbers: row, head, slot
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The logarithm of the sum of exp(logit) of one block of queries of one head."""
    of = tl.program_id(0).to(tl.int64)
    row, head = of // groups // heads, of // groups % heads
    column = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    q = load_rows(query + of * columns * dim, column, dim, columns, dim, DIM, WIDE)
    base = keys + row * key_strides[0] + head * key_strides[1]
    sink = tl.load(sinks + of % (heads * groups))
    top = tl.full((QUERIES,), MASKED, tl.float32)
    top = tl.maximum(top, sink)
    total = tl.exp(sink - top)
    visible = past + tl.minimum((tl.program_id(1) + 1) * QUERIES, columns)
    for start in range(0, visible, KEYS):
        slot = start + tl.arange(0, KEYS)
        k = load_rows(base, slot, key_strides[2], visible, dim, DIM, WIDE)
        logits, seen = block_logits(q, k, column, slot, past, columns, scaling, softcap, CAPPED)
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - new_top) + tl.sum(tl.where(seen, tl.exp(logits - new_top[:, None]), 0.0), 1)
        top = new_top
    tl.store(out + of * columns + column, top + tl.log(total), mask=column < columns)


@triton.jit
def add_columns(
    query,
    keys,
    log_totals,  # fp32 [B, H, G, T]
    out,  # fp32 [B, H, S]
    scaling,
    softcap,
    heads,
    groups,
    columns,
    dim,
    past,
    slots,
    key_strides,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The column sums of one block of keys of one KV head, averaged over its query heads."""
    of = tl.program_id(0).to(tl.int64)
    row, head = of // heads, of % heads
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    k = load_rows(keys + row * key_strides[0] + head * key_strides[1], slot, key_strides[2], slots, dim, DIM, WIDE)
    sums = tl.zeros((KEYS,), tl.float32)
    first = tl.maximum(tl.program_id(1) * KEYS - past, 0) // QUERIES * QUERIES  # no query before sees the block
    for group in range(0, groups):
        of_group = of * groups + group
        for start in range(first, columns, QUERIES):
            column = start + tl.arange(0, QUERIES)
            q = load_rows(query + of_group * columns * dim, column, dim, columns, dim, DIM, WIDE)
            logits, seen = block_logits(q, k, column, slot, past, columns, scaling, softcap, CAPPED)
            total = tl.load(log_totals + of_group * columns + column, mask=column < columns, other=0.0)
            sums += tl.sum(tl.where(seen, tl.exp(logits - total[:, None]), 0.0), 0)
    tl.store(out + of * slots + slot, sums / groups, mask=slot < slots)


def column_sums(
    query: Tensor,
    keys: Tensor,
    past: int,
    softmax: Softmax,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.column_sums`."""
    batch, heads, groups, columns, dim = query.shape
    known, slots = (torch.float32, torch.bfloat16, torch.float16), keys.shape[2]
    if query.dtype != keys.dtype or query.dtype not in known or keys.stride(-1) != 1 or keys.shape[-1] != dim:
        return None
    flat, device = query.contiguous(), query.device
    extra = softmax.extra_logits(heads, groups, device)
    log_totals = torch.empty(batch, heads, groups, columns, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, slots, dtype=torch.float32, device=device)
    width = max(16, triton.next_power_of_2(dim))
    block = LARGE_BLOCK if query.element_size() == 2 and width <= 128 else SMALL_BLOCK
    sizes = {"QUERIES": block, "KEYS": block, "DIM": width}
    modes = {"CAPPED": softmax.softcap is not None, "WIDE": device.type != "cuda"}
    numbers = softmax.scaling, softmax.softcap or 0.0, heads, groups, columns, dim, past
    launch: Any = log_sums[(batch * heads * groups, triton.cdiv(columns, block))]
    launch(flat, keys, extra, log_totals, *numbers, keys.stride()[:3], **sizes, **modes)
    launch = add_columns[(batch * heads, triton.cdiv(slots, block))]
    launch(flat, keys, log_totals, out, *numbers, slots, keys.stride()[:3], **sizes, **modes)
    return out
