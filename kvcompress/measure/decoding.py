"""How tokens are decoded behind a compressed prompt: one rule for questions, scored tokens and tasks."""

from __future__ import annotations

from kvcompress.cache import CompressedCache

LOGITS_AT_ONCE = 512
"""Rows times columns of the logits of one call: bounds the memory that a large vocabulary takes."""


def columns_per_call(cache: CompressedCache) -> int:
    """How many columns of a filled `cache` one call feeds.

    One under a method that acts on every call, as `generate` feeds it: it evicts and packs after each token. Other
    methods leave the cache as prefill ended, so that more columns at once give the same numbers sooner.
    """
    return 1 if cache.method.every_call else max(1, LOGITS_AT_ONCE // cache.rows)
