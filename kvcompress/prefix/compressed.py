"""A prompt's compressed cache, kept whole under a key of its own, so that lossy state never meets the exact blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from kvcompress.cache import CompressedCache
from kvcompress.errors import CacheError
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.prefix.blocks import block_keys, extra_bytes


@dataclass(frozen=True)
class CompressedPrefix:
    """What one prompt's prefill left under a lossy method. Never written: whoever uses it gets a fork."""

    cache: CompressedCache
    nbytes: int

    @classmethod
    def of(cls, cache: CompressedCache) -> CompressedPrefix:
        """A fork of `cache`, which goes on by itself."""
        return cls(cache.fork(), cache.nbytes)


def compressed_key(tokens: Sequence[int], method: Method, names: dict[str, str | bytes]) -> list[bytes]:
    """The one key of a whole prompt under `method`; no block of exact KV can have it."""
    if not tokens:
        raise ValueError("the prompt is empty; a compressed prefix has at least one token")
    return block_keys(tokens, len(tokens), extra_bytes({**names, "compressed": str(method)}))


def check_compressed(cache: CompressedCache, tokens: Sequence[int], model: PreTrainedModel, identity: str) -> None:
    """Raises CacheError unless `cache` is what one prefill of `tokens` left under a method that needs no suffix."""
    method = cache.method
    if isinstance(method, Exact):
        raise CacheError("an exact cache belongs among the exact blocks; use insert(ids, cache)")
    if method.evicting is not None and method.evicting.acts == "prefill":
        raise CacheError(
            f"{method} chooses by the end of the whole prompt, so no prefix can be compressed before it is known; "
            "give the prefix cache to wrap(model, method, prefix_cache=...), which keeps the exact KV"
        )
    if cache.identity != identity:
        raise CacheError("this cache was made for another model (or other weights or dtype)")
    if cache.seen_tokens != [len(tokens)] or cache.columns != len(tokens) or not cache.one_prefill:
        raise CacheError(
            f"expected a cache of one row that one prefill, in one piece, has fed these {len(tokens)} tokens and "
            f"nothing else; this one has seen {cache.seen_tokens}"
        )
    cache.fed.check(0, tokens)
    for stored in (column.buffer for column in cache.layers[0].store.filled):
        if stored.device != model.device or stored.dtype != model.dtype:
            raise CacheError(
                f"this cache holds {stored.dtype} on {stored.device}, but the model is {model.dtype} on "
                f"{model.device}; prefill without autocast, on the model's device"
            )
