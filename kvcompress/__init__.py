"""Lossy KV-cache compression on Hugging Face models, measured against the exact prefix."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompress.cache import CompressedCache
    from kvcompress.errors import CacheError, WrapError
    from kvcompress.measure.quality import evaluate
    from kvcompress.methods import methods
    from kvcompress.methods.exact import Exact
    from kvcompress.methods.h2o import H2O
    from kvcompress.methods.kivi import KIVI
    from kvcompress.methods.snapkv import SnapKV
    from kvcompress.methods.streaming_llm import StreamingLLM
    from kvcompress.prefix.prefix_cache import PrefixCache
    from kvcompress.saving import load_cache
    from kvcompress.text_form import MethodError, parse
    from kvcompress.wrapping import Wrapped, wrap

# Where each name lives. They are imported when first used, so that a command which needs no torch starts at once.
_HOMES = {
    "CacheError": "errors",
    "CompressedCache": "cache",
    "Exact": "methods.exact",
    "H2O": "methods.h2o",
    "KIVI": "methods.kivi",
    "MethodError": "text_form",
    "PrefixCache": "prefix.prefix_cache",
    "SnapKV": "methods.snapkv",
    "StreamingLLM": "methods.streaming_llm",
    "WrapError": "errors",
    "Wrapped": "wrapping",
    "evaluate": "measure.quality",
    "load_cache": "saving",
    "methods": "methods",
    "parse": "text_form",
    "wrap": "wrapping",
}

__all__ = [
    "H2O",
    "KIVI",
    "CacheError",
    "CompressedCache",
    "Exact",
    "MethodError",
    "PrefixCache",
    "SnapKV",
    "StreamingLLM",
    "WrapError",
    "Wrapped",
    "evaluate",
    "load_cache",
    "methods",
    "parse",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
    return getattr(import_module(f"kvcompress.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
