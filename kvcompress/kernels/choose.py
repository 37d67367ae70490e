"""The one place that chooses among the kernels.

Each function here answers None (or False) where no fast kernel takes the case: another device, a library that is not
installed (which is said once), a dtype, width or group size without code of its own. Then the plain torch one beside
it, `naive.py` of the same folder, does the work.

B batch, H KV heads, G query heads per KV head, T new tokens, S slots, D head dim.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from kvcompress.kernels.layout import PackedKeys, PackedValues, Range
from kvcompress.kernels.softmax import Softmax

# Bytes of dense keys below which torch's own attention is left to do it. `kvcompress bench` shows where they cross: on
# two cores between 8 and 16 MB for 8 KV heads of 128; with 3 KV heads of 64 the kernels are ahead at 6 MB.
SMALL = 5 << 20
FEW_COLUMNS = 8  # queries at one time that still count as decoding


@cache
def fast(device: str, operation: str, on: tuple[str, ...] = ("cpu", "cuda")) -> ModuleType | None:
    """The module of fast kernels for an operation on a kind of device, imported when first asked for.

    None where they cannot run, and for devices that are not among those that they are written for.
    """
    if device not in on:
        return None
    try:
        if device == "cuda":
            return import_module(f"kvcompress.kernels.{operation}.triton")
        if import_module("kvcompress.kernels.jit.values").RUNS_HERE:
            return import_module(f"kvcompress.kernels.{operation}.cpu")
        _tell_once("this processor has neither AVX2 nor NEON")
    except (ImportError, OSError) as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("kvcompress"):
            raise
        needed = "Numba" if device == "cpu" else "Triton"
        missing = isinstance(error, ModuleNotFoundError)
        state = "is not installed" if missing else f"cannot be loaded ({error})"
        _tell_once(f"{needed} {state}; install kvcompress[{device}]")
    return None


@cache
def _tell_once(reason: str) -> None:
    warnings.warn(f"without fast kernels, plain torch does the work, and slower: {reason}", stacklevel=3)


def library(device: str) -> str:
    """What does the work on a kind of device: code of "numba" or "triton", or "torch" alone where neither can run."""
    return "torch" if fast(device, "attention") is None else {"cpu": "numba", "cuda": "triton"}[device]


def attend_decode(
    query: Tensor,
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
) -> Tensor | None:
    """Attention of a few queries [B, H, G, T, D] over all that a layer holds: [B, H, G, T, D] in the query's dtype.

    The slots of the ranges follow each other; each is attended to alone, and all are merged by their log-sum-exp.
    `front_query`, if given, stands for `query` before the tokens of a front: the same queries, rotated by other angles.

    `allowed`, bool and broadcastable to [B, H, T, S], says which slots each column may see; None: all of its row.
    A column that may see nothing becomes zeros. Arithmetic is in fp32; packed keys and values are never dequantised
    as a whole.
    """
    kernels = fast(query.device.type, "attention")
    return kernels and kernels.attend_decode(query, ranges, allowed, softmax, front_query)


def most_columns(query: Tensor) -> int:
    """How many columns of `query` [B, H, G, T, D] `attend_decode` takes at one time; 0 where it has no code."""
    kernels = fast(query.device.type, "attention")
    return 0 if kernels is None else kernels.most_columns(query.shape[2])


def decode_pays(query: Tensor, keys: Tensor) -> bool:
    """Whether `attend_decode` is faster than torch's own attention of `query` over dense `keys` [B, H, S, D]."""
    if keys.nbytes < SMALL:
        return False
    kernels = fast(query.device.type, "attention", on=("cpu",))
    return kernels is not None and kernels.pays(query)


def attend_decode_with_sums(
    query: Tensor,
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """As `attend_decode`, with the sum over the queries of each key's softmax column.

    The sums are fp32 [B, H, S], averaged over the G query heads, and 0 behind the end of a shorter row.
    """
    kernels = fast(query.device.type, "attention", on=("cpu",))
    return kernels and kernels.attend_decode_with_sums(query, ranges, allowed, softmax, front_query)


def column_sums(query: Tensor, keys: Tensor, past: int, softmax: Softmax) -> Tensor | None:
    """How much of the causal attention of `query` [B, H, G, T, D] each key draws: fp32 [B, H, S].

    `keys` are [B, H, S, D] with S = past + T: column t sees the first past + t + 1 slots. The result is the sum over
    the queries of each key's softmax column, averaged over the G query heads; beside it only O(T + S) memory is used.
    """
    kernels = fast(query.device.type, "scores")
    return kernels and kernels.column_sums(query, keys, past, softmax)


def window_votes(query: Tensor, keys: Tensor, lengths: list[int], real: list[int], softmax: Softmax) -> Tensor | None:
    """Softmax of the last queries [B, H, G, W, D] over `keys` [B, H, S, D], summed over them: fp32 [B, H, S].

    Averaged over the G query heads. Row b has `lengths[b]` slots; of the W columns the last `real[b]` count, and see
    all slots but those of the tokens after their own.
    """
    kernels = fast(query.device.type, "scores", on=("cpu",))
    return kernels and kernels.window_votes(query, keys, lengths, real, softmax)


def quantise_and_pack(x: Tensor, into: PackedKeys | PackedValues, offset: int) -> bool:
    """Quantises keys or values `x` [B, H, T, D] and writes them to the packed tokens `offset` to `offset + T`.

    The codes, scales and minima are those of `pack.naive.quantise`, to the bit. Codes before `offset` stay; what a
    last incomplete word of values has behind them becomes zeros. False: nothing was written.
    """
    kernels = fast(x.device.type, "pack")
    return kernels is not None and kernels.quantise_and_pack(x, into, offset)


def evict_in_place(slots: Tensor, index: Tensor, first: int) -> bool:
    """Moves slots `index` [B, H or 1, K] of `slots` [B, H, S, ...] to the places 0 to K - 1; no copy is made.

    `index` ascends, and its first `first` slots are known to stay where they are. Where a row's end of `index` does
    not ascend, what lands there means nothing. False: nothing was moved.
    """
    kernels = fast(slots.device.type, "move", on=("cpu",))
    return kernels is not None and kernels.evict_in_place(slots, index, first)
