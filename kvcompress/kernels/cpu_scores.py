"""What methods score tokens by, on a CPU: column sums of attention, with its output or without.

B batch, H KV heads, G query heads per KV head, T query columns, S slots, D head dim.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kvcompress.kernels import cpu_sums
from kvcompress.kernels.cpu_call import DTYPES, Call, float_bits, stored
from kvcompress.kernels.cpu_compile import compile_kernel
from kvcompress.kernels.cpu_rows import DIM_STEP, MOST_DIM
from kvcompress.kernels.cpu_sums import LANES, PARAMETERS, STEP, scratch_bytes
from kvcompress.kernels.cpu_threads import Kernel, thread_count
from kvcompress.kernels.cpu_values import FEATURES

TASKS = 32  # at least, where there are blocks enough
MATRIX_UNITS = bool(FEATURES.get("amx-bf16"))


@cache
def sums_kernel(dtype: torch.dtype, with_output: bool) -> Kernel:
    """The kernel for keys and values of one dtype."""
    write = partial(cpu_sums.attend, dtype=DTYPES[dtype], with_output=with_output)
    return compile_kernel(f"sums {DTYPES[dtype]} {with_output}", write, PARAMETERS)


def attend_with_sums(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `kvcompress.kernels.attend_with_sums`."""
    if not takes(query, keys) or not takes(query, values) or keys.dtype != values.dtype:
        return None
    if MATRIX_UNITS and keys.dtype != torch.float32:
        return None  # torch's attention in 16 bits and the sums alone take no longer
    out = query.new_empty(query.shape, dtype=torch.float32)
    sums = run(query, keys, values, out, causal_limits(query, past), scaling, softcap, sinks)
    return out.to(query.dtype), sums


def column_sums(
    query: Tensor,
    keys: Tensor,
    past: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """See `kvcompress.kernels.column_sums`."""
    if not takes(query, keys):
        return None
    return run(query, keys, None, None, causal_limits(query, past), scaling, softcap, sinks)


def window_votes(
    query: Tensor,
    keys: Tensor,
    lengths: list[int],
    real: list[int],
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """See `kvcompress.kernels.window_votes`."""
    if not takes(query, keys):
        return None
    columns = query.shape[3]
    limits = [
        length - back if back < count else 0
        for length, count in zip(lengths, real, strict=True)
        for back in range(columns - 1, -1, -1)
    ]
    return run(query, keys, None, None, limits, scaling, softcap, sinks)


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
    values: Tensor | None,
    out: Tensor | None,
    limits: list[int],
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Column sums fp32 [B, H, S]; writes the output, if there is a place for it, of what each column may see."""
    batch, heads, groups, columns, dim = query.shape
    slots = keys.shape[2]
    blocks = -(-columns * groups // LANES)
    parts = max(1, min(blocks, max(TASKS, 2 * torch.get_num_threads()) // (batch * heads)))
    tasks, line = batch * heads * parts, (slots + STEP - 1) // STEP * STEP
    wide = query.to(torch.float32).contiguous()
    extra = wide.new_full((heads, groups), -torch.inf) if sinks is None else sinks.to(torch.float32).contiguous()
    sums = wide.new_zeros(batch, heads, parts, line)
    scratch = wide.new_empty(thread_count(tasks) * scratch_bytes(slots) // 4)
    numbers = {
        "tasks": tasks,
        "scratch": scratch.data_ptr(),
        "scratch_bytes": scratch_bytes(slots),
        "query": wide.data_ptr(),
        "out": 0 if out is None else out.data_ptr(),
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
        "scaling": float_bits(scaling),
        "softcap": float_bits(softcap or 0.0),
        **stored("keys", keys),
        **stored("values", values),
    }
    call = Call(PARAMETERS, numbers, limits=limits, next_task=[0, 0])
    sums_kernel(keys.dtype, out is not None).run(call.address, tasks)
    return sums.sum(2)[..., :slots]
