"""Prefill, compression, decoding and append of each method beside what transformers does without it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvcompress.cache import CompressedCache
from kvcompress.measure.bench.attention_cases import LARGE, dense_store, line, packed_store, tensors
from kvcompress.measure.bench.case import Line, case
from kvcompress.measure.bench.model_cases import compression_share, model, plain_prefill, prompt
from kvcompress.measure.speed import paired
from kvcompress.methods.base import Method
from kvcompress.stores.store import Store
from kvcompress.text_form import parse
from kvcompress.wrapping import wrap

METHODS = [
    parse(text)
    for text in (
        "exact",
        "streaming_llm(sinks=4, window=508)",
        "h2o(heavy=256, recent=256)",
        "snapkv(budget=512)",
        "kivi(bits=4)",
        "kivi(bits=2)",
        "snapkv(budget=512) | kivi(bits=4)",
    )
]
APPENDED = 256  # tokens, one by one


@case
def prefill_by_method() -> list[Line]:
    """Prefill and compression of 1,024 tokens under each method against the plain model's prefill."""
    ids, lines = prompt(1024), []
    for method in METHODS:
        wrapper = wrap(model(), method)
        own, other = partial(wrapper.prefill, ids), partial(plain_prefill, ids)
        result = paired(own, other, model().device, rounds=5, warm=1, around_own=wrapper)
        lines.append(line(f"prefill of 1024, {method}", "plain SDPA prefill", result, None))
    return lines


@case
def compression_by_method() -> list[Line]:
    """Compression of 1,024 tokens, once they are prefilled, as a share of the prefill."""
    ids, lines = prompt(1024), []
    for method in METHODS[1:]:
        low, middle, high = compression_share(method, ids, rounds=5)
        lines.append(Line(f"compression of 1024, {method}", "its prefill", middle, None, low=low, high=high))
    return lines


@case
def decode_by_method() -> list[Line]:
    """One decode step of each method against DynamicCache, by context, batch and dtype."""
    lines = []
    for tokens, batch, dtype in (
        (1024, 1, "float32"),
        (4096, 1, "float32"),
        (1024, 4, "float32"),
        (1024, 1, "bfloat16"),
    ):
        lines += _decode_at(tokens, batch, dtype)
    return lines


def _decode_at(tokens: int, batch: int, dtype: str) -> list[Line]:
    plain, ids = model(dtype), prompt(tokens).repeat(batch, 1)
    next_ids, lines = ids[:, :1], []
    with torch.no_grad():
        prefilled = plain(ids, use_cache=True, logits_to_keep=1).past_key_values
    with wrap(plain, "exact") as wrapped:
        gathered = wrapped.new_cache(gather_for=METHODS)
        wrapped.prefill(ids, cache=gathered)
        rotaries = wrapped.rotaries()

    def step(cache: Cache) -> object:
        with torch.no_grad():
            return plain(next_ids, past_key_values=cache, use_cache=True)

    for method in METHODS:
        cache = _compressed(gathered, method, rotaries)
        wrapper, rival = wrap(plain, method), deepcopy(prefilled)  # both grow while they are timed
        result = paired(
            partial(wrapper, next_ids, cache=cache), partial(step, rival), plain.device, rounds=9, around_own=wrapper
        )
        name = f"decode step at {tokens}, batch {batch}, {dtype}, {method}"
        lines.append(line(name, "DynamicCache", result, None, tokens=tokens, batch=batch))
    return lines


def _compressed(gathered: CompressedCache, method: Method, rotaries: list) -> CompressedCache:
    return gathered.compress_as(method, rotaries if method.position_mode == "cache" else None)


@case
def append() -> list[Line]:
    """Appending tokens one by one to a layer of 16,384, packing as they come, against DynamicCache."""
    query, keys, values = tensors(LARGE)
    token = query[:, :, :1]  # [1, H, 1, D]
    lines = []
    for name, store in (
        ("dense", dense_store(keys, values)),
        ("packed 4-bit", packed_store(keys, values, 4)),
        ("packed 2-bit", packed_store(keys, values, 2)),
    ):
        rival = DynamicCache()
        rival.update(keys, values, 0)
        own, other = partial(_append_own, store, token), partial(_append_plain, rival, token)
        result = paired(own, other, token.device, rounds=3, warm=1)
        lines.append(line(f"{APPENDED} tokens appended to {LARGE[0]}, {name}", "DynamicCache", result, None))
    return lines


def _append_own(store: Store, token: Tensor) -> None:
    for _ in range(APPENDED):
        store.append(token, token, [1])
        store.pack()


def _append_plain(cache: DynamicCache, token: Tensor) -> None:
    for _ in range(APPENDED):
        cache.update(token, token, 0)
