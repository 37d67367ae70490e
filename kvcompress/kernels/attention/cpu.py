"""Decode attention on a CPU: which cases its kernels take, and what they are called with.

B batch, H KV heads, G query heads per KV head, T query columns, M = G·T rows of queries, S slots, D head dim.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from kvcompress.kernels.attention import cpu_decode, cpu_merge
from kvcompress.kernels.attention.cpu_decode import MOST_VALUE_GROUPS, PARAMETERS, ROWS, SCRATCH_BYTES
from kvcompress.kernels.jit.call import DTYPES, Call, float_bits, stored
from kvcompress.kernels.jit.compile import compile_kernel
from kvcompress.kernels.jit.rows import DIM_STEP, MOST_DIM, TILE
from kvcompress.kernels.jit.threads import Kernel, thread_count
from kvcompress.kernels.layout import KERNEL_BITS, LANES, PackedKeys, PackedValues, Range, gapless
from kvcompress.kernels.softmax import Softmax

COLUMNS = 256  # whose mask is to exist at one time
TASKS = 32  # at least, where there are tiles enough: a thread that is held up leaves little for the end
MANY_QUERIES = 64  # from here on torch's matrix products are faster where nothing is packed
LITTLE = 1 << 16  # numbers to merge that one thread has added up before another has woken


@cache
def decode_kernel(bits: tuple[int, int] | None, dtype: torch.dtype) -> Kernel:
    """The kernel for keys and values packed in so many bits, or not at all, with full precision in `dtype`."""
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
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.attend_decode`."""
    if not takes(query, ranges):
        return None
    return run(query, ranges, allowed, softmax, front_query)[0]


def attend_decode_with_sums(
    query: Tensor,
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `kvcompress.kernels.choose.attend_decode_with_sums`."""
    if not takes(query, ranges):
        return None
    return run(query, ranges, allowed, softmax, front_query, sum_columns=True)


def run(
    query: Tensor,
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, G, T, D] and, where asked for, column sums fp32 [B, H, S]; else nothing that means anything."""
    batch, heads, groups, columns, dim = query.shape
    rows, lines_of = groups * columns, batch * heads
    slots = sum(each.width for each in ranges)
    blocks, lines = -(-rows // ROWS), min(rows, ROWS)
    parts = parts_of([each.width for each in ranges], max(TASKS, 2 * torch.get_num_threads()) // (lines_of * blocks))
    tasks = [lines_of * blocks * count for count in parts]
    wide = query.to(torch.float32).contiguous()
    turned = None if front_query is None else front_query.to(torch.float32).contiguous()
    out = torch.empty_like(wide)
    left = wide.new_empty(sum(tasks) * lines * (dim + 2))
    scratch = wide.new_empty(thread_count(max(tasks)) * SCRATCH_BYTES // 4)
    extra = softmax.extra_logits(heads, groups, query.device)
    line = slots + DIM_STEP  # logits are written in whole vectors
    sums = wide.new_zeros((batch, heads, line) if sum_columns else 0)
    numbers = {
        "scratch": scratch.data_ptr(),
        "query": wide.data_ptr(),
        "front_query": 0 if turned is None else turned.data_ptr(),
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
        "all_parts": sum(parts),
        "scaling": float_bits(softmax.scaling),
        "softcap": float_bits(softmax.softcap or 0.0),
    }
    kept = ends = wide.new_empty(0)
    if sum_columns:
        kept, ends = wide.new_empty(batch, heads, rows, line), wide.new_empty(batch, heads, rows, 2)
        numbers |= {"logits_line": 4 * line, "ends": ends.data_ptr()}
    calls, offset = [], 0
    for number, (each, count) in enumerate(zip(ranges, parts, strict=True)):
        seen = None
        if allowed is not None:
            seen = mask(allowed[..., offset : offset + each.width], (batch, heads, columns, each.width))
        own = {"tasks": tasks[number], "parts": count, "part_offset": sum(parts[:number])}
        if sum_columns:
            own |= {"logits": kept.data_ptr() + 4 * offset, "sums": sums.data_ptr() + 4 * offset}
        call = call_for(each, numbers | own | stored("allowed", seen))
        decode_kernel(bits_of(each), each.tail_keys.dtype).run(call.address, tasks[number])
        calls.append(call)
        offset += each.width
    call = calls[0]
    merging = lines_of * rows
    call.again(tasks=merging, next_task=0)
    merge_kernel().run(call.address, 1 if left.numel() < LITTLE else merging)
    for call in calls if sum_columns else ():
        call.again(tasks=lines_of, next_task=0)
        columns_kernel().run(call.address, 1 if rows * sums.numel() < LITTLE else lines_of)
    return out.to(query.dtype), sums[..., :slots]


def parts_of(widths: list[int], wanted: int) -> list[int]:
    """Into how many parts each range is split, so that there are about `wanted`, none smaller than a tile."""
    slots = max(1, sum(widths))
    return [max(1, min(wanted * width // slots, -(-width // TILE))) for width in widths]


def call_for(each: Range, numbers: dict[str, int]) -> Call:
    """What the kernels are called with for one range."""
    dim = numbers["dim"]
    numbers |= {
        "key_group": each.keys.group_size if each.keys else 1,
        "value_group": each.values.group_size if each.values else dim,
        **stored("front_keys", each.front_keys),
        **stored("front_values", each.front_values),
        **stored("tail_keys", each.tail_keys, shared=each.lines is not None),
        **stored("tail_values", each.tail_values, shared=each.lines is not None),
    }
    for kind, codes in (("key", each.keys), ("value", each.values)):
        if codes is not None:
            for part, tensor in (("words", codes.words), ("scale", codes.scale), ("minimum", codes.minimum)):
                numbers |= stored(f"{kind}_{part}", tensor, shared=each.lines is not None)
    if each.lines is not None:
        table, row, head = (8 * stride for stride in each.lines.stride())
        numbers |= {"counts": each.lines.data_ptr(), "counts_table": table, "counts_row": row, "counts_head": head}
        return Call(PARAMETERS, numbers, next_task=[0, 0])
    numbers |= {"counts_table": 8 * len(each.lengths), "counts_row": 8}
    return Call(PARAMETERS, numbers, counts=each.tables, next_task=[0, 0])


def bits_of(each: Range) -> tuple[int, int] | None:
    """Bits of packed keys and values; of what is not packed yet, those of the other."""
    keys, values = each.keys or each.values, each.values or each.keys
    return None if keys is None or values is None else (keys.bits, values.bits)


def takes(query: Tensor, ranges: Sequence[Range]) -> bool:
    """Whether the kernels have code for this layer."""
    return query.dtype in DTYPES and all(takes_range(each, query.shape[-1]) for each in ranges)


def takes_range(each: Range, dim: int) -> bool:
    """Whether the kernels have code for this range."""
    dtype = each.tail_keys.dtype
    if dtype not in DTYPES or dim % DIM_STEP or dim > MOST_DIM or not each.width:
        return False
    full = (each.tail_keys, each.tail_values, each.front_keys, each.front_values)
    return all(
        part is None or (part.dtype == dtype and part.shape[-1] == dim and part.stride(-1) == 1) for part in full
    ) and (takes_keys(each.keys, each.key_counts) and takes_values(each.values, dim))


def pays(query: Tensor) -> bool:
    """Whether the kernels are faster than torch's attention over more than a few keys in full precision."""
    return query.shape[2] * query.shape[3] <= MANY_QUERIES


def takes_keys(keys: PackedKeys | None, counts: list[int]) -> bool:
    """Whether whole blocks of words share one scale, and lie as `layout.py` says."""
    if keys is None:
        return True
    whole = keys.group_size % LANES == 0 and not any(count % LANES for count in counts)
    return keys.bits in KERNEL_BITS and whole and all(gapless(tensor) for tensor in keys[:3])


def takes_values(values: PackedValues | None, dim: int) -> bool:
    """Whether whole vectors of channels share one scale, and lie as `layout.py` says."""
    if values is None:
        return True
    whole = values.group_size % DIM_STEP == 0 and dim // values.group_size <= MOST_VALUE_GROUPS
    return values.bits in KERNEL_BITS and whole and all(gapless(tensor) for tensor in values[:3])


def mask(allowed: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A mask broadcastable to [B, H, T, S] as [B, H, T, S] with its slots side by side."""
    if allowed.shape[-1] > shape[-1]:
        allowed = allowed[..., : shape[-1]]
    whole = allowed.expand(shape)
    return whole if whole.stride(-1) == 1 else whole.contiguous()
