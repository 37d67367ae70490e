"""The kernels, and the one place that chooses among them.

Each function here answers None (or False) where no fast kernel takes the case: another device, a library that is not
installed, a dtype, width or group size without code of its own. Then `reference` does the work.

B batch, H KV heads, G query heads per KV head, T new tokens, S slots, D head dim.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from kvcompress.kernels.layout import DenseLayer, PackedLayer


@cache
def _fast(device: str, on_cpu: str, on_cuda: str | None) -> ModuleType | None:
    """The module of kernels for a kind of device, imported when first asked for; None where they cannot run."""
    try:
        if device == "cpu" and import_module("kvcompress.kernels.cpu_values").RUNS_HERE:
            return import_module(f"kvcompress.kernels.{on_cpu}")
        if device == "cuda" and on_cuda is not None:
            return import_module(f"kvcompress.kernels.{on_cuda}")
    except ImportError:  # Numba or Triton is not installed
        pass
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
    fast = _fast(query.device.type, "cpu", "cuda")
    return fast and fast.attend_decode(query, layer, allowed, scaling=scaling, softcap=softcap, sinks=sinks)
