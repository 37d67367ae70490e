"""Decode attention on a CPU: which cases its kernels take, and what they are called with.

B batch, H KV heads, G query heads per KV head, T query columns, M = G·T rows of queries, S slots, D head dim.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kvcompress.kernels.attention import cpu_decode, cpu_merge
from kvcompress.kernels.attention.cpu_decode import MOST_VALUE_GROUPS, PARAMETERS, ROWS, SCRATCH_BYTES
from kvcompress.kernels.jit.call import DTYPES, Call, float_bits, stored
from kvcompress.kernels.jit.compile import compile_kernel
from kvcompress.kernels.jit.rows import DIM_STEP, MOST_DIM, TILE
from kvcompress.kernels.jit.threads import Kernel, thread_count
from kvcompress.kernels.layout import LANES, DenseLayer, PackedKeys, PackedLayer, PackedValues, gapless
from kvcompress.kernels.softmax import Softmax

COLUMNS = 256  # whose mask is to exist at one time
TASKS = 32  # at least, where there are tiles enough: a thread that is held up leaves little for the end
MANY_QUERIES = 64  # from here on torch's matrix products are faster where nothing is packed
LITTLE = 1 << 16  # numbers to merge that one thread has added up before another has woken


@cache
def decode_kernel(bits: int | None, dtype: torch.dtype) -> Kernel:
    """The kernel for layers packed in `bits` bits, or not at all, with full precision in `dtype`."""
    write = partial(cpu_decode.decode, bits=bits, dtype=DTYPES[dtype])
    return compile_kernel(f"decode {bits} {DTYPES[dtype]}", write, PARAMETERS)


@cache
def merge_kernel() -> Kernel:
    """The kernel that makes the output of what the parts left."""
    return compile_kernel("merge", cpu_merge.merge, PARAMETERS)


@cache
def columns_kernel() -> Kernel:
    """The kernel that adds up the columns of the weights."""
    return compile_kernel("columns", cpu_merge.add_columns, PARAMETERS)


def most_columns(groups: int) -> int:
    """See `kvcompress.kernels.choose.most_columns`."""
    return COLUMNS


def attend_decode(
    query: Tensor,
    layer: DenseLayer | PackedLayer,
    allowed: Tensor | None,
    softmax: Softmax,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.attend_decode`."""
    layer = as_packed(layer)
    if not takes(query, layer):
        return None
    return run(query, layer, allowed, softmax)[0]


def attend_decode_with_sums(
    query: Tensor,
    layer: DenseLayer | PackedLayer,
    allowed: Tensor | None,
    softmax: Softmax,
) -> tuple[Tensor, Tensor] | None:
    """See `kvcompress.kernels.choose.attend_decode_with_sums`."""
    layer = as_packed(layer)
    if not takes(query, layer):
        return None
    return run(query, layer, allowed, softmax, sum_columns=True)


def run(
    query: Tensor,
    layer: PackedLayer,
    allowed: Tensor | None,
    softmax: Softmax,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, G, T, D] and, where asked for, column sums fp32 [B, H, S]; else nothing that means anything."""
    batch, heads, groups, columns, dim = query.shape
    rows, threads, slots = groups * columns, torch.get_num_threads(), max(layer.lengths)
    blocks, lines = -(-rows // ROWS), min(rows, ROWS)
    wanted = max(TASKS, 2 * threads) // (batch * heads * blocks)
    parts = max(1, min(wanted, -(-slots // TILE)))
    tasks = batch * heads * blocks * parts
    wide = query.to(torch.float32).contiguous()
    out = torch.empty_like(wide)
    left = wide.new_empty(tasks * lines * (dim + 2))
    scratch = wide.new_empty(thread_count(tasks) * SCRATCH_BYTES // 4)
    extra = softmax.extra_logits(heads, groups, query.device)
    seen = None if allowed is None else mask(allowed, (batch, heads, columns, slots))
    numbers = {
        "tasks": tasks,
        "scratch": scratch.data_ptr(),
        "query": wide.data_ptr(),
        "left": left.data_ptr(),
        "out": out.data_ptr(),
        "sinks": extra.data_ptr(),
        "batch": batch,
        "heads": heads,
        "queries": rows,
        "columns": columns,
        "dim": dim,
        "blocks": blocks,
        "lines": lines,
        "parts": parts,
        "key_group": layer.keys.group_size if layer.keys else 1,
        "value_group": layer.values.group_size if layer.values else dim,
        "scaling": float_bits(softmax.scaling),
        "softcap": float_bits(softmax.softcap or 0.0),
        **stored("allowed", seen),
        **stored("front_keys", layer.front_keys),
        **stored("front_values", layer.front_values),
        **stored("tail_keys", layer.tail_keys),
        **stored("tail_values", layer.tail_values),
    }
    for kind, codes in (("key", layer.keys), ("value", layer.values)):
        if codes is not None:
            numbers |= stored(f"{kind}_words", codes.words)
            numbers |= stored(f"{kind}_scale", codes.scale)
            numbers |= stored(f"{kind}_minimum", codes.minimum)
    line = slots + DIM_STEP  # logits are written in whole vectors
    sums = wide.new_zeros((batch, heads, line) if sum_columns else 0)
    if sum_columns:
        kept, ends = wide.new_empty(batch, heads, rows, line), wide.new_empty(batch, heads, rows, 2)
        numbers |= {"logits": kept.data_ptr(), "logits_line": 4 * line}
        numbers |= {"ends": ends.data_ptr(), "sums": sums.data_ptr()}
    counts = [*layer.fronts, *layer.key_counts, *layer.value_counts, *layer.lengths]
    call = Call(PARAMETERS, numbers, counts=counts, next_task=[0, 0])
    bits = layer.keys.bits if layer.keys else layer.values.bits if layer.values else None
    decode_kernel(bits, layer.tail_keys.dtype).run(call.address, tasks)
    tasks = batch * heads * rows
    call.again(tasks=tasks, next_task=0)
    merge_kernel().run(call.address, 1 if left.numel() < LITTLE else tasks)
    if sum_columns:
        call.again(tasks=batch * heads, next_task=0)
        columns_kernel().run(call.address, 1 if rows * sums.numel() < LITTLE else batch * heads)
    return out.to(query.dtype), sums[..., :slots]


def as_packed(layer: DenseLayer | PackedLayer) -> PackedLayer:
    """A layer in full precision as one of which nothing is packed yet."""
    if isinstance(layer, PackedLayer):
        return layer
    none = [0] * len(layer.lengths)
    return PackedLayer(None, None, none, None, none, None, none, layer.keys, layer.values, layer.lengths)


def takes(query: Tensor, layer: PackedLayer) -> bool:
    """Whether the kernels have code for this layer."""
    dim, dtype = query.shape[-1], layer.tail_keys.dtype
    if query.dtype not in DTYPES or dtype not in DTYPES or dim % DIM_STEP or dim > MOST_DIM or not max(layer.lengths):
        return False
    full = (layer.tail_keys, layer.tail_values, layer.front_keys, layer.front_values)
    return all(
        each is None or (each.dtype == dtype and each.shape[-1] == dim and each.stride(-1) == 1) for each in full
    ) and (takes_keys(layer.keys, layer.key_counts) and takes_values(layer.values, dim))


def pays(query: Tensor) -> bool:
    """Whether the kernels are faster than torch's attention over more than a few keys in full precision."""
    return query.shape[2] * query.shape[3] <= MANY_QUERIES


def takes_keys(keys: PackedKeys | None, counts: list[int]) -> bool:
    """Whether whole blocks of words share one scale, and lie as `layout.py` says."""
    if keys is None:
        return True
    whole = keys.group_size % LANES == 0 and not any(count % LANES for count in counts)
    return whole and all(gapless(tensor) for tensor in keys[:3])


def takes_values(values: PackedValues | None, dim: int) -> bool:
    """Whether whole vectors of channels share one scale, and lie as `layout.py` says."""
    if values is None:
        return True
    whole = values.group_size % DIM_STEP == 0 and dim // values.group_size <= MOST_VALUE_GROUPS
    return whole and all(gapless(tensor) for tensor in values[:3])


def mask(allowed: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A mask broadcastable to [B, H, T, S] as [B, H, T, S] with its slots side by side."""
    if allowed.shape[-1] > shape[-1]:
        allowed = allowed[..., : shape[-1]]
    whole = allowed.expand(shape)
    return whole if whole.stride(-1) == 1 else whole.contiguous()
