"""Lossy KV-cache compression on Hugging Face models, measured against the exact prefix."""

from kvcompress.cache import CompressedCache
from kvcompress.errors import CacheError, WrapError
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
    "load_cache",
    "methods",
    "parse",
    "wrap",
]
