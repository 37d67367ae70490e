"""NVIDIA/kvpress #221: sums and buffers of one sequence were still there when the next, shorter one came.

The kind: nothing of a sequence outlives its cache, whatever came before it in the same wrapper.
"""

from collections.abc import Callable

import pytest
import torch

import kvcompress as kvc
from kvcompress import CacheError, Wrapped
from tests.bugs.common import METHODS, left_padding, text
from tests.families import tiny


def long_prompt(wrapped: Wrapped) -> None:
    wrapped.prefill(text(1, 90, seed=1))


def long_generation(wrapped: Wrapped) -> None:
    wrapped.generate(text(1, 12, seed=2), max_new_tokens=15, do_sample=False)


def a_wider_batch(wrapped: Wrapped) -> None:
    wrapped.generate(text(4, 30, seed=3), attention_mask=left_padding(30, 0, 3, 9, 20), num_beams=2, max_new_tokens=2)


def a_prompt_cut_off(wrapped: Wrapped) -> None:
    cache = wrapped.new_cache()
    hook = wrapped.model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapped.prefill(text(1, 50, seed=4), cache=cache, chunk=20)
    hook.remove()
    with pytest.raises(CacheError, match="the last prompt fed to this cache failed midway, after 20 columns"):
        wrapped(text(1, 1), cache=cache)


@pytest.mark.parametrize("method", METHODS)
def test_a_short_sequence_after_others_is_as_if_it_were_the_first(method: str) -> None:
    ids, mask = text(2, 19), left_padding(19, 0, 6)

    def run(wrapped: Wrapped) -> list[torch.Tensor]:
        out = wrapped.generate(
            ids,
            attention_mask=mask,
            output_logits=True,
            return_dict_in_generate=True,
            max_new_tokens=4,
            do_sample=False,
        )
        cache = wrapped.cache
        return [out.sequences, *out.logits, cache.kept(0), cache.kept(1), torch.tensor(list(cache.memory().values()))]

    model = tiny("llama")
    with kvc.wrap(model, method) as wrapped:
        expected = run(wrapped)
    before: list[Callable[[Wrapped], None]] = [long_prompt, long_generation, a_wider_batch, a_prompt_cut_off]
    with kvc.wrap(model, method) as wrapped:
        for other in before:
            other(wrapped)
            for index, (found, wanted) in enumerate(zip(run(wrapped), expected, strict=True)):
                assert torch.equal(found, wanted), (other.__name__, index)
