"""Further turns of `generate` with beams and several answers go on from a cache of one row for each row of ids."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress import CacheError
from tests.bugs.common import METHODS, left_padding, text
from tests.families import tiny

FIRST, NEW = text(2, 22), text(2, 6, seed=3)
MASK = left_padding(22, 0, 7)
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "do_sample": False},
    "answers of beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "sampled answers": {"num_return_sequences": 3, "do_sample": True},
}
BEAMS = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_further_turn_gives_what_the_plain_model_gives_of_the_whole_text(options: dict[str, Any], rows: int) -> None:
    model, first, new, mask = tiny("llama"), FIRST[:rows], NEW[:rows], MASK[:rows]
    whole, whole_mask = torch.cat([first, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    options = {**options, "max_new_tokens": 6, "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(whole, attention_mask=whole_mask, **options)[:, 22:]
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(first, mask, cache)
        by_model = cache.fork()
        torch.manual_seed(0)
        assert torch.equal(wrapped.generate(new, cache=cache, **options), expected)
        assert cache.rows == rows * 3
        torch.manual_seed(0)
        over = {wrapped.cache_name: by_model}
        assert torch.equal(model.generate(whole, attention_mask=whole_mask, **over, **options)[:, 22:], expected)


def score(wrapped: kvc.Wrapped, cache: kvc.CompressedCache, new: Tensor, answer: Tensor) -> Tensor:
    """Mean log-likelihood of an answer that follows `new`, fed by hand."""
    logits = [wrapped.prefill(new[None], cache=cache).logits[0, -1]]
    logits += [wrapped(token[None, None], cache=cache).logits[0, -1] for token in answer[:-1]]
    return torch.stack(logits).log_softmax(-1).gather(-1, answer[:, None]).mean()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", [7, 14, 21])
def test_a_whole_text_that_begins_otherwise_is_refused(place: int, method: str) -> None:
    """Over a cache that was fed another text the answer would be that text's."""
    model, whole_mask = tiny("llama"), torch.cat([MASK, torch.ones_like(NEW)], 1)
    right = torch.cat([FIRST, NEW], 1)
    wrong = right.clone()
    wrong[1, place] = (wrong[1, place] + 1) % 61
    with kvc.wrap(model, method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, MASK, cache)
        expected = wrapped.generate(NEW, cache=cache.fork(), **BEAMS)[:, 6:]
        options = {**BEAMS, wrapped.cache_name: cache, "attention_mask": whole_mask}
        told = rf"row 1 of this cache was fed id {right[1, place]} at position {place - 7}, .* have {wrong[1, place]} "
        with pytest.raises(CacheError, match=told):
            model.generate(wrong, **options)
        assert (cache.rows, cache.seen.tolist()) == (2, [22, 15])
        right[1, :7] = 5  # what padding holds does not matter
        assert torch.equal(model.generate(right, **options)[:, 28:], expected)


@pytest.mark.parametrize("method", METHODS)
def test_each_beam_of_a_further_turn_scores_what_its_own_run_scores(method: str) -> None:
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, MASK, cache)
        forks = [cache.fork() for _ in range(3)]
        out = wrapped.generate(NEW, cache=cache, return_dict_in_generate=True, output_scores=True, **BEAMS)
        for row, sequence in enumerate(out.sequences):
            own = forks[row % 3].fork()
            own.batch_select_indices(torch.tensor([row // 3]))
            expected = score(wrapped, own, NEW[row // 3], sequence[6:])
            assert abs(expected - out.sequences_scores[row]) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_turn_with_beams_that_fails_at_once_leaves_the_cache_as_it_was(method: str) -> None:
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, MASK, cache)
        fork = cache.fork()
        hook = wrapped.model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrapped.generate(NEW, cache=cache, **BEAMS)
        hook.remove()
        assert torch.equal(wrapped(NEW, cache=cache).logits, wrapped(NEW, cache=fork).logits)


def test_a_further_turn_of_embeddings_takes_those_of_the_whole_text() -> None:
    model, whole = tiny("llama"), torch.cat([FIRST, NEW], 1)[:1]
    embeds, options = model.get_input_embeddings()(whole), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(whole, **options)[:, 28:]
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        assert torch.equal(wrapped.generate(inputs_embeds=embeds, **options), expected)
        wrapped.prefill(FIRST[:1], cache=cache)
        assert torch.equal(wrapped.generate(inputs_embeds=embeds, cache=cache, **options), expected)
        assert torch.equal(wrapped.generate(inputs_embeds=embeds, prefill_chunk_size=9, **options), expected)
