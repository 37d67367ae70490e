"""What is asked for of every token of a prompt is the same cold and warm, and refused where parts of it are fed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress import PrefixCache, WrapError, Wrapped
from tests.families import VOCABULARY, tiny
from tests.prefix.test_padded import padded
from tests.prefix.test_reuse import METHODS, random_ids
from tests.tiny import tiny_llama

PROMPT = random_ids(1, 70)
ASKED: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}


def close(found: Any, expected: Any) -> bool:
    """Of tensors and tuples of them: the same shapes, and values that differ by little."""
    if isinstance(expected, Tensor):
        return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())
    return len(found) == len(expected) and all(map(close, found, expected))


@pytest.mark.parametrize("method", METHODS)
def test_generated_hidden_states_are_those_of_all_columns(method: str) -> None:
    model = tiny_llama()
    with kvc.wrap(model, method) as wrapped:
        expected = wrapped.generate(PROMPT, do_sample=False, **ASKED)
    assert expected.hidden_states[0][0].shape[1] == 70
    with kvc.wrap(model, method, prefix_cache=PrefixCache(model, checkpoint=16)) as wrapped:
        for _ in range(2):
            found = wrapped.generate(PROMPT, do_sample=False, **ASKED)
            assert torch.equal(found.sequences, expected.sequences)
            assert close(found.hidden_states, expected.hidden_states)
        wrapped.generate(PROMPT, do_sample=False, max_new_tokens=3)
        assert wrapped.cache.reused_tokens == [48 if "snapkv" in method else 64 if "h2o" not in method else 0]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"output_scores": True, "output_logits": True}])
def test_all_that_generate_returns_is_the_same_warm(options: dict[str, Any]) -> None:
    model = tiny_llama()
    ids, mask = padded([PROMPT[0], PROMPT[0, :40]])
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        cold, warm = (wrapped.generate(ids, attention_mask=mask, do_sample=False, **ASKED, **options) for _ in range(2))
    for name, expected in cold.items():
        if isinstance(expected, Tensor | tuple):
            assert close(warm[name], expected), name
    assert cold.hidden_states[0][0].shape[1] == 70


def prefill(wrapped: Wrapped) -> Any:
    return wrapped.prefill(PROMPT % VOCABULARY)


@pytest.mark.parametrize(
    ("family", "option", "given"),
    [
        ("llama", "output_hidden_states", "hidden_states"),
        ("mixtral", "output_router_logits", "router_logits"),
    ],
)
def test_the_configuration_may_ask_too(family: str, option: str, given: str) -> None:
    model = deepcopy(tiny(family))
    setattr(model.config, option, True)
    with kvc.wrap(model, "exact") as wrapped:
        expected = prefill(wrapped)[given]
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        assert close(prefill(wrapped)[given], expected) and close(prefill(wrapped)[given], expected)
        with pytest.raises(WrapError, match=f"{option}=True asks for something of every token"):
            wrapped.prefill(PROMPT % VOCABULARY, chunk=16)
        assert wrapped.new_cache().columns == 0


@pytest.mark.parametrize("warm", [False, True])
def test_a_prompt_in_parts_gives_no_hidden_states(warm: bool) -> None:
    model = tiny_llama()
    store = PrefixCache(model) if warm else None
    with (
        kvc.wrap(model, "exact", prefix_cache=store) as wrapped,
        pytest.raises(WrapError, match="output_hidden_states=True asks for something of every token"),
    ):
        wrapped.generate(PROMPT, prefill_chunk_size=32, **ASKED)
    with (
        kvc.wrap(model, "streaming_llm(sinks=4, window=60)", prefix_cache=store) as wrapped,
        pytest.raises(WrapError, match="no longer than the model was trained for"),
    ):
        wrapped.generate(random_ids(1, 600), **ASKED)
