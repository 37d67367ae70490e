"""What methods score tokens by, on a CPU: column sums of attention.

B batch, H KV heads, G query heads per KV head, T query columns, S slots, D head dim.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kvcompress.kernels.jit.call import DTYPES, Call, float_bits, stored
from kvcompress.kernels.jit.compile import compile_kernel
from kvcompress.kernels.jit.rows import DIM_STEP, MOST_DIM
from kvcompress.kernels.jit.threads import Kernel, thread_count
from kvcompress.kernels.scores import cpu_sums
from kvcompress.kernels.scores.cpu_sums import LANES, PARAMETERS, STEP, scratch_bytes
from kvcompress.kernels.softmax import Softmax

TASKS = 32  # at least, where there are blocks enough


@cache
def sums_kernel(dtype: torch.dtype) -> Kernel:
    """The kernel for keys of one dtype."""
    write = partial(cpu_sums.add_up, dtype=DTYPES[dtype])
    return compile_kernel(f"sums {DTYPES[dtype]}", write, PARAMETERS)


def column_sums(
    query: Tensor,
    keys: Tensor,
    past: int,
    softmax: Softmax,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.column_sums`."""
    if not takes(query, keys):
        return None
    return run(query, keys, causal_limits(query, past), softmax)


def window_votes(
    query: Tensor,
    keys: Tensor,
    lengths: list[int],
    real: list[int],
    softmax: Softmax,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.window_votes`."""
    if not takes(query, keys):
        return None
    columns = query.shape[3]
    limits = [
        length - back if back < count else 0
        for length, count in zip(lengths, real, strict=True)
        for back in range(columns - 1, -1, -1)
    ]
    return run(query, keys, limits, softmax)


def takes(query: Tensor, stored_rows: Tensor) -> bool:
    """Whether the kernels have code for this case, and the queries fill more than half of the lanes."""
    dim = query.shape[-1]
    fits = dim == stored_rows.shape[-1] and dim % DIM_STEP == 0 and dim <= MOST_DIM
    known = query.dtype in DTYPES and stored_rows.dtype in DTYPES
    fills = 2 * query.shape[2] * query.shape[3] > LANES
    return fits and known and fills and stored_rows.stride(-1) == 1


def causal_limits(query: Tensor, past: int) -> list[int]:
    """How many slots each column of each row sees."""
    return list(range(past + 1, past + query.shape[3] + 1)) * query.shape[0]


def run(
    query: Tensor,
    keys: Tensor,
    limits: list[int],
    softmax: Softmax,
) -> Tensor:
    """Column sums fp32 [B, H, S] over what each column may see: `limits[b * T + t]` slots."""
    batch, heads, groups, columns, dim = query.shape
    slots = keys.shape[2]
    blocks = -(-columns * groups // LANES)
    parts = max(1, min(blocks, max(TASKS, 2 * torch.get_num_threads()) // (batch * heads)))
    tasks, line = batch * heads * parts, (slots + STEP - 1) // STEP * STEP
    wide = query.to(torch.float32).contiguous()
    extra = softmax.extra_logits(heads, groups, query.device)
    sums = wide.new_zeros(batch, heads, parts, line)
    scratch = wide.new_empty(thread_count(tasks) * scratch_bytes(slots) // 4)
    numbers = {
        "tasks": tasks,
        "scratch": scratch.data_ptr(),
        "scratch_bytes": scratch_bytes(slots),
        "query": wide.data_ptr(),
        "sums": sums.data_ptr(),
        "sums_line": 4 * line,
        "sinks": extra.data_ptr(),
        "heads": heads,
        "groups": groups,
        "columns": columns,
        "dim": dim,
        "blocks": blocks,
        "parts": parts,
        "last": slots - 1,
        "scaling": float_bits(softmax.scaling),
        "softcap": float_bits(softmax.softcap or 0.0),
        **stored("keys", keys),
    }
    call = Call(PARAMETERS, numbers, limits=limits, next_task=[0, 0])
    sums_kernel(keys.dtype).run(call.address, tasks)
    return sums.sum(2)[..., :slots]
