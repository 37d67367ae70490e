"""Models that cannot run over a compressed cache, and ways of running one that cannot be: refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import kvcompress as kvc
from kvcompress import WrapError
from tests.families import OPTIONS, VOCABULARY, build


def text() -> Tensor:
    return torch.randint(2, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(5))


def test_gradients_are_refused() -> None:
    model = build("llama", **OPTIONS["llama"])
    model.get_output_embeddings().weight.requires_grad_(True)
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        with torch.enable_grad(), pytest.raises(WrapError, match=r"gradients do not flow .* under torch.no_grad"):
            model(text(), **{wrapped.cache_name: cache})
        assert not wrapped(text(), cache=cache).logits.requires_grad


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_models_are_refused() -> None:
    model = build("llama", **OPTIONS["llama"])
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(WrapError, match=r"wrap takes a transformers model, uncompiled .* got OptimizedModule"):
        kvc.wrap(compiled, "exact")  # pyright: ignore[reportArgumentType]
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        with torch.no_grad(), pytest.raises(WrapError, match=r"torch\.compile of a wrapped model"):
            compiled(text(), **{wrapped.cache_name: cache})
        assert wrapped.prefill(text(), cache=cache).logits.shape == (1, 1, VOCABULARY)
    model.compile(backend="eager")
    with pytest.raises(WrapError, match=r"compiled by model.compile\(\)"), kvc.wrap(model, "exact"):
        pass


_COMMON = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_BART = {
    f"{part}_{what}": 4 if what == "attention_heads" else 64 if what == "ffn_dim" else 1
    for part in ("encoder", "decoder")
    for what in ("layers", "attention_heads", "ffn_dim")
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)),
        r"BloomForCausalLM \(bloom\) never calls transformers' attention interface",
    ),
    "falcon": (
        lambda: FalconForCausalLM(FalconConfig(**_COMMON)),
        r"\(falcon\) never calls transformers' attention int",
    ),
    "mpt": (
        lambda: MptForCausalLM(MptConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=4)),
        r"\(mpt\) never calls transformers' attention interface",
    ),
    "mamba": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=4)),
        r"\(mamba\) never calls transformers' attention interface",
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
        ),
        "T5ForConditionalGeneration is no decoder-only language model",
    ),
    "bart": (
        lambda: BartForConditionalGeneration(BartConfig(vocab_size=97, d_model=64, **_BART)),
        "BartForConditionalGeneration is no decoder-only language model",
    ),
    "a base model": (
        lambda: LlamaModel(LlamaConfig(**_COMMON, intermediate_size=64)),
        "LlamaModel is no decoder-only language model; load it with AutoModelForCausalLM",
    ),
    "linear attention": (
        lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **_COMMON | {"num_hidden_layers": 4},
                **_LINEAR,
                **_EXPERTS,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=64,
                shared_expert_intermediate_size=32,
            )
        ),
        "layer 0 of Qwen3NextForCausalLM keeps LinearAttentionLayer, not plain keys and values",
    ),
    "latent keys and values": (
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **_COMMON,
                intermediate_size=64,
                moe_intermediate_size=32,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                kv_lora_rank=16,
                q_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
                first_k_dense_replace=1,
            )
        ),
        r"DeepseekV3ForCausalLM \(deepseek_v3\) keeps latent keys and values \(MLA\)",
    ),
    "layers that share keys and values": (
        lambda: Gemma3nForCausalLM(
            Gemma3nTextConfig(
                **_COMMON | {"num_hidden_layers": 10},
                vocab_size_per_layer_input=97,
                hidden_size_per_layer_input=16,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=64,
                num_kv_shared_layers=5,
                laurel_rank=8,
                pad_token_id=0,
                activation_sparsity_pattern=[0.0] * 10,
            )
        ),
        "not plain keys and values; .*shared|only 5 of the 10 layers of Gemma3nForCausalLM keep keys",
    ),
    "a name": (lambda: "llama", "wrap takes a transformers model, .* got str"),
    "a torch module": (lambda: torch.nn.Linear(2, 2), "wrap takes a transformers model, .* got Linear"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_cannot_be_wrapped_says_why(name: str) -> None:
    make, reason = UNSUPPORTED[name]
    with pytest.raises(WrapError, match=reason):
        kvc.wrap(make(), "exact")
