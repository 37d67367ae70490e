"""What differs between the supported transformers versions (5.17 up to the newest)."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def cache_argument(forward: Callable) -> str:
    """The name under which `forward` takes its cache: `cache`, or `past_key_values` before the renaming."""
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def mask_width(mask: Tensor | None, generation_config: Any) -> int | None:
    """Columns of the mask that `generate` was given or made; newer versions drop one of ones and note its width."""
    return mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)
