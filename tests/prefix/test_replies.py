"""What `generate` produced is stored where it is exact, so that the next turn begins behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

import kvcompress as kvc
from kvcompress import PrefixCache
from tests.families import VOCABULARY, tiny
from tests.prefix.test_padded import padded
from tests.prefix.test_prefix_cache import exact_kv, storage_bytes
from tests.prefix.test_reuse import FIRST, METHODS, SECOND, close, random_ids
from tests.tiny import tiny_llama

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def stored(store: PrefixCache, text: Tensor) -> int:
    """How many tokens of a text are held, after looking that their KV is what the plain prefill computes."""
    with store.match(text, reserve=0) as found:
        for layer, expected in enumerate(exact_kv(text[None]) if found.tokens else []):
            for mine, theirs in zip(found.kv(layer), expected, strict=True):
                assert close(mine, theirs[:, : found.tokens])
        return found.tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "llama4_text", "gpt_oss"])
def test_the_next_turn_begins_behind_the_reply(family: str) -> None:
    """Sliding and chunked layers too, whose KV is gone from the cache by then."""
    model = tiny(family)
    prompt, further = (random_ids(1, length, seed=length, vocabulary=VOCABULARY) for length in (37, 9))
    with kvc.wrap(model, "exact") as wrapped:
        reply = wrapped.generate(prompt, max_new_tokens=30, **GREEDY)
        turn = torch.cat([reply, further], 1)
        expected = wrapped.prefill(turn).logits
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        assert torch.equal(wrapped.generate(prompt, max_new_tokens=30, **GREEDY), reply)
        cache = wrapped.new_cache()
        assert close(wrapped.prefill(turn, cache=cache).logits, expected)
    assert cache.reused_tokens == [64]  # of 37 + 29 tokens fed


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_over_a_compressed_cache_is_not_exact(method: str) -> None:
    model = tiny_llama()
    store = PrefixCache(model, checkpoint=32)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        text = wrapped.generate(FIRST, max_new_tokens=40, **GREEDY)[0]
    assert stored(store, text) == (192 if method == "exact" else 160)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        again = wrapped.generate(torch.cat([text, SECOND[0, :20]])[None], max_new_tokens=20, **GREEDY)[0]
    assert stored(store, again) == (240 if method == "exact" else 224)
    assert store.nbytes == storage_bytes(store) and store.pinned_bytes == 0


def test_rows_are_stored_up_to_their_ends() -> None:
    """Of padded rows, and of two samples each; the padding behind an answer is no part of the text."""
    model = tiny_llama()
    rows = [FIRST[0, :50], SECOND[0, :71]]
    ids, mask = padded(rows)
    with kvc.wrap(model, "exact") as wrapped:
        plain = wrapped.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDY)[:, 71:]
    end = int(plain[0, 19])
    length = plain[0].tolist().index(end) + 1
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        answers = wrapped.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=40,
            eos_token_id=end,
            num_return_sequences=2,
            do_sample=True,
            top_k=1,
            pad_token_id=0,
        )[:, 71:]
    assert torch.equal(answers[0, :length], plain[0, :length]) and torch.equal(answers[0], answers[1])
    assert answers.shape[1] > length and not answers[0, length:].any(), "the other row must be longer"
    assert stored(store, torch.cat([rows[0], answers[0]])) == (50 + length) // 16 * 16
    assert stored(store, torch.cat([rows[1], answers[2]])) == (71 + answers.shape[1] - 1) // 16 * 16


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prefill_chunk_size": 32}])
def test_beams_and_chunks_leave_their_prompt_alone(options: dict[str, Any]) -> None:
    """Which beam a row ends as is not known; what chunks compute is what chunks find, bit for bit."""
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        text = wrapped.generate(FIRST, max_new_tokens=40, **GREEDY, **options)[0]
        assert wrapped.cache.recorder is None
    assert stored(store, text) == (160 if "num_beams" in options else 0)
    assert store.nbytes == 160 * 512


class Fails(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:  # pyright: ignore
        raise RuntimeError("no more")


def test_a_failed_generation_stores_its_prompt_alone() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        with pytest.raises(RuntimeError, match="no more"):
            wrapped.generate(FIRST, max_new_tokens=40, stopping_criteria=StoppingCriteriaList([Fails()]), **GREEDY)
        assert (wrapped.cache.recorder, store.pinned_bytes) == (None, 0)
        with store.match(FIRST[0], reserve=0) as found:
            assert found.tokens == 160
    assert "generate" not in vars(model)
