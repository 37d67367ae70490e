"""NVIDIA/kvpress #80: a method found its window by the BOS token, which the tokenizers of some models do not have.

The kind: windows, sinks and prompts are counted in tokens, whichever they are; no special token is looked for.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress as kvc
from tests.bugs.common import GREEDY, METHODS, text
from tests.families import OPTIONS, build
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token is None and tokenizer.eos_token is None and tokenizer.pad_token is None
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model, tokenizer


@pytest.mark.parametrize("method", METHODS)
def test_a_tokenizer_without_special_tokens_will_do(
    method: str, loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = loaded
    inputs = tokenizer("A window is counted in tokens.", return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 30)
    with kvc.wrap(model, method) as wrapped:
        out = wrapped.generate(**inputs, **GREEDY)
        assert torch.equal(out, model.generate(**inputs, **GREEDY))
        for kept in (wrapped.cache.kept(0)[0, 0].tolist(), wrapped.cache.kept(1)[0, 1].tolist()):
            assert kept[-4:] == [31, 32, 33, 34]
            if method.startswith("streaming"):
                assert kept == [0, 1, 2, *range(26, 35)]


@pytest.mark.parametrize("method", METHODS)
def test_which_tokens_the_configuration_calls_special_changes_nothing(method: str) -> None:
    """Nor do such tokens in the text: an end, a beginning or padding between others."""
    found = []
    ids = text(1, 30)
    ids[0, [0, 7, 15, 29]] = 5
    for special in (None, 5):
        options = {"bos_token_id": special, "pad_token_id": special, "eos_token_id": None}
        model = build("llama", **OPTIONS["llama"] | options)
        with kvc.wrap(model, method) as wrapped:
            cache = wrapped.new_cache()
            logits = wrapped.prefill(ids, cache=cache).logits
            found.append((logits, wrapped(ids[:, :9], cache=cache).logits, cache.kept(0), cache.kept(1)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
