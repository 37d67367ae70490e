"""Models that pass for decoders until they are run: refused when they are wrapped, by what two tokens do in them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import kvcompress as kvc
from kvcompress import WrapError
from tests.families import OPTIONS, VOCABULARY, build

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

COMPUTING = {
    "diffllama": GROUPED,
    "doge": GROUPED,
    "jetmoe": SMALL | EXPERTS | {"num_key_value_heads": 2, "kv_channels": 16},
}
ENCODERS = ["bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"]
ENCODERS += ["roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"]
FROM_PADDING = ["camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"]


def text(columns: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, columns), generator=torch.Generator().manual_seed(5))


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def check_refused(model: PreTrainedModel, reason: str) -> None:
    """Refused with `reason`, and left as it was."""
    before = logits(model, text())
    for _ in range(2):
        with pytest.raises(WrapError, match=reason) as error:
            kvc.wrap(model, "exact")
        assert type(model).__name__ in str(error.value)
    assert torch.equal(logits(model, text()), before)


@pytest.mark.parametrize("family", COMPUTING)
def test_a_model_that_computes_on_cached_keys_itself_is_refused(family: str) -> None:
    check_refused(build(family, **COMPUTING[family]), "computes on the cached keys or values itself, before")


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="this transformers does not have dory")
def test_a_model_that_loops_over_its_layers_is_refused() -> None:
    check_refused(build("dory", **GROUPED), r"layer 0 did not hand its keys to the cache once \(it got \[4\] of \[2\]")


@pytest.mark.parametrize("family", ENCODERS)
def test_bidirectional_attention_is_refused(family: str) -> None:
    model = build(family, **SMALL)
    ids = text()
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % VOCABULARY], 1)
    assert not torch.allclose(logits(model, ids)[:, 0], logits(model, changed)[:, 0])  # the first sees the last
    check_refused(model, "the attention of layer 0 is bidirectional")


@pytest.mark.parametrize("family", ENCODERS)
def test_the_same_as_decoders_run_or_say_why_not(family: str) -> None:
    model = build(family, **SMALL, is_decoder=True)
    if family in FROM_PADDING:
        check_refused(model, "its positions do not begin at 0")
        return
    ids = text()
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        fed = torch.cat([wrapped(part, cache=cache).logits for part in ids.split([7, 4, 1], 1)], 1)
    plain = logits(model, ids)
    assert (fed - plain).abs().max() < 1e-5 * plain.abs().max()


def test_a_model_that_sees_ahead_by_an_option_of_its_own_is_refused() -> None:
    options = OPTIONS["gemma3_text"] | {"use_bidirectional_attention": True}
    check_refused(build("gemma3_text", **options), "overlays its causal mask with a rule of its own")


def gemma3() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=OPTIONS["gemma3_text"],
        vision_config=vision | {"image_size": 32, "patch_size": 16},
        mm_tokens_per_image=4,
        image_token_id=VOCABULARY - 1,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def test_a_model_that_makes_its_decoders_mask_is_refused() -> None:
    check_refused(gemma3(), "it makes the attention mask of its decoder itself, as a dict, where the cache knows 2-D")


def test_a_model_that_keeps_images_in_layers_of_its_own_is_refused() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(
        "mllama",
        text_config=heads
        | {"hidden_size": 64, "num_hidden_layers": 2, "cross_attention_layers": [1], "pad_token_id": 0},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
        | {"intermediate_size": 32, "vision_output_dim": 64, "image_size": 32, "patch_size": 16}
        | {"intermediate_layers_indices": [0]},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    check_refused(model, r"MllamaForConditionalGeneration \(mllama\) cannot run over a compressed cache: ")


def test_a_model_is_tried_once_and_in_eval_mode() -> None:
    model, calls = build("llama", **OPTIONS["llama"]).train(), []
    model.register_forward_hook(lambda module, *_: calls.append(module.training))
    state = torch.get_rng_state()
    for _ in range(3):
        kvc.wrap(model, "exact")
    assert calls == [False, False]  # a prompt, and a token after it
    assert model.training and all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_positions_of_several_axes_run_on_text_and_are_refused_where_they_differ() -> None:
    """Qwen-VL counts time, height and width beside the text; on text alone they are the same."""
    text_config = OPTIONS["qwen3"] | {"num_hidden_layers": 2, "use_sliding_window": False}
    text_config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_vl", text_config=text_config, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    ids, options = text(), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportCallIssue]
    with kvc.wrap(model, "exact") as wrapped:
        assert torch.equal(wrapped.generate(ids, attention_mask=torch.ones_like(ids), **options), plain)
        axes = torch.arange(12).expand(3, 1, 12) * torch.tensor([1, 2, 2])[:, None, None]
        with pytest.raises(WrapError, match="several axes that differ, as images have them"):
            wrapped(ids, position_ids=axes)
