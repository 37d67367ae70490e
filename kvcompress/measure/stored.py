"""What a cache stores: bytes, tokens, and whether anything of a row was evicted or packed."""

from __future__ import annotations

from kvcompress.cache import CompressedCache


def stored_bytes(cache: CompressedCache) -> int:
    """Bytes stored, spare apart."""
    return cache.nbytes - cache.memory()["spare"]


def kept_tokens(cache: CompressedCache) -> int:
    """The most tokens that a KV head keeps in the layers that the method acts on; without any, in all layers."""
    layers = [layer for layer in cache.layers if layer.compresses] or cache.layers
    return max(cache.kept(layer.index).shape[-1] for layer in layers)


def compressed_rows(cache: CompressedCache) -> list[bool]:
    """Whether a token of each row was evicted or packed. Windows that are the model's own do not count."""
    return [any(row) for row in zip(evicted_rows(cache), packed_rows(cache), strict=True)]


def evicted_rows(cache: CompressedCache) -> list[bool]:
    """Whether a token of each row was evicted."""
    layer = next((layer for layer in cache.layers if layer.compresses and not layer.store.empty), None)
    if layer is None:
        return [False] * cache.rows
    kept = (cache.kept(layer.index) >= 0).sum(-1).amin(-1).tolist()
    return [count < seen for count, seen in zip(kept, cache.seen_tokens, strict=True)]


def packed_rows(cache: CompressedCache) -> list[bool]:
    """Whether a token of each row is packed."""
    store = next((layer.store for layer in cache.layers if layer.compresses), None)
    return [False] * cache.rows if store is None else store.packed_rows
