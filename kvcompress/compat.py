"""What differs between the supported transformers versions (5.17 up to the newest)."""

import inspect
from collections.abc import Callable


def cache_argument(forward: Callable) -> str:
    """The name under which `forward` takes its cache: `cache`, or `past_key_values` before the renaming."""
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
