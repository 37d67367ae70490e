"""A prompt's compressed cache, kept whole under a key of its own, so that lossy state never meets the exact blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def check_compressed(cache: CompressedCache, tokens: Sequence[int], identity: str) -> None:
    """Raises CacheError unless `cache` is what a prefill of `tokens` left under a method that needs no suffix."""
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
    if cache.rows != 1 or cache.seen_tokens[0] != len(tokens) or cache.columns != len(tokens):
        raise CacheError(
            f"expected a cache of one row that was fed these {len(tokens)} tokens and nothing else; "
            f"this one has seen {cache.seen_tokens}"
        )
