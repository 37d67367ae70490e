"""KV and answers of a model that was changed afterwards are never taken for those of what it is now."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.errors import CacheError
from tests.fingerprint.models import activate, own, with_adapters

IDS = torch.arange(40)[None] % 61
NEXT = torch.tensor([[7, 8]])
METHODS = ["exact", "streaming_llm(sinks=4, window=12)", "h2o(heavy=8, recent=8)", "snapkv(budget=16, window=4)"]


def _weight(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight[3, 4] += 1


def _embedding(model: Any) -> None:
    model.model.embed_tokens.weight[13] += 1


def _rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def _setting(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


CHANGES = [_weight, _embedding, _rotary, _setting]


def prefilled(wrapped: Any) -> tuple[Any, Tensor]:
    cache = wrapped.new_cache()
    return cache, wrapped.prefill(IDS, cache=cache).logits


def assert_refused(wrapped: Any, cache: Any) -> None:
    for use in (
        lambda: wrapped(NEXT, cache=cache),
        lambda: wrapped.prefill(NEXT, cache=cache),
        lambda: wrapped.generate(NEXT, cache=cache, max_new_tokens=2),
    ):
        with pytest.raises(CacheError, match="may have changed since"):
            use()


@pytest.mark.parametrize("method", [*METHODS, "kivi(bits=2, group_size=8, residual=16)"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_cache_from_before_is_refused_in_the_block_and_later(
    change: Callable[[Any], None], method: str, tmp_path: Path
) -> None:
    model = own()
    wrapped = kvc.wrap(model, method)
    with wrapped:
        cache, before = prefilled(wrapped)
        cache.save(tmp_path / "cache")
        change(model)
        assert_refused(wrapped, cache)
        new, after = prefilled(wrapped)
        answer = wrapped(NEXT, cache=new).logits
    with wrapped:
        assert_refused(wrapped, cache)
    with pytest.raises(CacheError, match="saved for a model with fingerprint"):
        kvc.load_cache(tmp_path / "cache", model)
    with kvc.wrap(model, method) as fresh:
        other, expected = prefilled(fresh)
        assert torch.equal(after, expected) and not torch.equal(after, before)
        assert torch.equal(answer, fresh(NEXT, cache=other).logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_prefix_from_before_is_not_found(change: Callable[[Any], None], method: str) -> None:
    model = own()
    store = kvc.PrefixCache(model, checkpoint=16)
    wrapped = kvc.wrap(model, method, prefix_cache=store)
    with wrapped:
        cache, _ = prefilled(wrapped)
        change(model)
        again, after = prefilled(wrapped)
        assert (cache.reused_tokens, again.reused_tokens) == ([0], [0])
    if method != METHODS[3]:  # which is never stored
        with pytest.raises(CacheError, match=r"an exact cache of the same model|made for another model"):
            (store.insert if method == "exact" else store.insert_compressed)(IDS[0], cache)
    with wrapped:
        assert prefilled(wrapped)[0].reused_tokens[0] > 0
    with kvc.wrap(model, method) as plain:
        torch.testing.assert_close(after, prefilled(plain)[1], rtol=0, atol=1e-5 * float(after.abs().max()))


def test_each_adapter_finds_its_own_prefixes() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    model = with_adapters("first", "second")
    chosen = [("first",), ("second",), (), ("first", "second")]
    alone, caches = [], []
    for names in chosen:
        activate(model, *names)
        with kvc.wrap(model, "exact") as wrapped:
            cache, logits = prefilled(wrapped)
            alone.append(logits)
            caches.append(cache)
    assert all(not torch.allclose(alone[0], other, atol=0.1) for other in alone[1:])
    store = kvc.PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        for reused in (0, 32):
            for names, expected in zip(chosen, alone, strict=True):
                activate(model, *names)
                cache, logits = prefilled(wrapped)
                assert cache.reused_tokens == [reused]
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        for names in chosen:
            activate(model, *names)
            for other, cache in zip(chosen, caches, strict=True):
                if other == names:
                    wrapped(NEXT, cache=cache.fork())
                else:
                    assert_refused(wrapped, cache)
