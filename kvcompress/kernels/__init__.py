"""The kernels, and the one place that chooses among them.

Each function here answers None (or False) where no fast kernel takes the case: another device, a library that is not
installed, a dtype, width or group size without code of its own. Then `reference` does the work.

B batch, H KV heads, G query heads per KV head, T new tokens, S slots, D head dim.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from kvcompress.kernels.layout import DenseLayer, PackedKeys, PackedLayer, PackedValues

# Bytes of dense keys below which torch's own attention is left to do it. `kvcompress bench` shows where they cross: on
# two cores between 8 and 16 MB for 8 KV heads of 128; with 3 KV heads of 64 the kernels are ahead at 6 MB.
SMALL = 5 << 20


@cache
def _fast(device: str, on_cpu: str, on_cuda: str | None) -> ModuleType | None:
    """The module of kernels for a kind of device, imported when first asked for; None where they cannot run."""
    try:
        if device == "cpu" and import_module("kvcompress.kernels.cpu_values").RUNS_HERE:
            return import_module(f"kvcompress.kernels.{on_cpu}")
        if device == "cuda" and on_cuda is not None:
            return import_module(f"kvcompress.kernels.{on_cuda}")
    except (ImportError, OSError) as error:  # Numba or Triton is not installed, or cannot be loaded
        if isinstance(error, ImportError) and (error.name or "").startswith("kvcompress"):
            raise
    return None


def attend_decode(
    query: Tensor,
    layer: DenseLayer | PackedLayer,
    allowed: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Attention of a few queries [B, H, G, T, D] over all that a layer holds: [B, H, G, T, D] in the query's dtype.

    `allowed`, bool and broadcastable to [B, H, T, S], says which slots each column may see; None: all of its row.
    `softcap` bounds the logits as in Gemma 2, `sinks` [H, G] are gpt-oss's extra logits. A column that may see
    nothing becomes zeros. Arithmetic is in fp32; packed keys and values are never dequantised as a whole.
    """
    fast = _fast(query.device.type, "cpu", "cuda_decode")
    return fast and fast.attend_decode(query, layer, allowed, scaling=scaling, softcap=softcap, sinks=sinks)


def most_columns(query: Tensor) -> int:
    """How many columns of `query` [B, H, G, T, D] `attend_decode` takes at one time; 0 where it has no code."""
    fast = _fast(query.device.type, "cpu", "cuda_decode")
    return 0 if fast is None else fast.most_columns(query.shape[2])


def decode_pays(query: Tensor, keys: Tensor) -> bool:
    """Whether `attend_decode` is faster than torch's own attention of `query` over dense `keys` [B, H, S, D]."""
    if keys.nbytes < SMALL:
        return False
    fast = _fast(query.device.type, "cpu", None)
    return fast is not None and fast.pays(query)


def attend_decode_with_sums(
    query: Tensor,
    layer: DenseLayer | PackedLayer,
    allowed: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """As `attend_decode`, with the sum over the queries of each key's softmax column.

    The sums are fp32 [B, H, S], averaged over the G query heads, and 0 behind the end of a shorter row.
    """
    fast = _fast(query.device.type, "cpu", None)
    return fast and fast.attend_decode_with_sums(query, layer, allowed, scaling=scaling, softcap=softcap, sinks=sinks)


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
    """Causal attention of many queries [B, H, G, T, D] and how much of it each key drew, from one pass.

    `keys` and `values` [B, H, S, D] with S = past + T: column t sees the first past + t + 1 slots. Returns the output
    [B, H, G, T, D] in the query's dtype and the sum over queries of each key's softmax column, averaged over the G
    query heads: fp32 [B, H, S]. Beside these it needs O(T + S) memory.
    """
    fast = _fast(query.device.type, "cpu_scores", None)
    return fast and fast.attend_with_sums(query, keys, values, past, scaling=scaling, softcap=softcap, sinks=sinks)


def column_sums(
    query: Tensor,
    keys: Tensor,
    past: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """The second result of `attend_with_sums` alone: fp32 [B, H, S]."""
    fast = _fast(query.device.type, "cpu_scores", "cuda_sums")
    return fast and fast.column_sums(query, keys, past, scaling=scaling, softcap=softcap, sinks=sinks)


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
    """Softmax of the last queries [B, H, G, W, D] over `keys` [B, H, S, D], summed over them: fp32 [B, H, S].

    Averaged over the G query heads. Row b has `lengths[b]` slots; of the W columns the last `real[b]` count, and see
    all slots but those of the tokens after their own.
    """
    fast = _fast(query.device.type, "cpu_scores", None)
    return fast and fast.window_votes(query, keys, lengths, real, scaling=scaling, softcap=softcap, sinks=sinks)


def quantise_and_pack(x: Tensor, into: PackedKeys | PackedValues, offset: int) -> bool:
    """Quantises keys or values `x` [B, H, T, D] and writes them to the packed tokens `offset` to `offset + T`.

    The codes, scales and minima are `reference.quantise`'s, to the bit. Codes before `offset` stay; what a last
    incomplete word of values has behind them becomes zeros. False: nothing was written.
    """
    fast = _fast(x.device.type, "cpu_pack", "cuda_pack")
    return fast is not None and fast.quantise_and_pack(x, into, offset)


def evict_in_place(slots: Tensor, index: Tensor, first: int) -> bool:
    """Moves slots `index` [B, H or 1, K] of `slots` [B, H, S, ...] to the places 0 to K - 1; no copy is made.

    `index` ascends, and its first `first` slots are known to stay where they are. Where a row's end of `index` does
    not ascend, what lands there means nothing. False: nothing was moved.
    """
    fast = _fast(slots.device.type, "cpu_evict", None)
    return fast is not None and fast.evict_in_place(slots, index, first)
