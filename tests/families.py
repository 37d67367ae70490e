"""Random tiny models of every family that is supported, the same weights on every run.

Each has at least one full-attention layer; where the family has sliding or chunked layers, their window is 9 tokens
or their chunk 16. The weights are drawn wide enough that attention is peaked and logits differ clearly.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
WINDOW = 9
CHUNK = 16

_MIXED = ["sliding_attention", "full_attention"] * 2


def _narrow(**changes: Any) -> dict[str, Any]:
    """Two layers, four query heads over two KV heads of 16 dims, more than `hidden_size` in all."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return common | changes


def _wide(**changes: Any) -> dict[str, Any]:
    """The same for families that take the head dim from `hidden_size`, which is 64 then."""
    common = _narrow(hidden_size=64)
    del common["head_dim"]
    return common | changes


def _partial(share: float) -> dict[str, Any]:
    """Rotary on a share of the dims only."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}


_MOE = {"num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}

OPTIONS: dict[str, dict[str, Any]] = {
    "llama": _narrow(),
    # All layers of these slide or none does.
    "mistral": _narrow(sliding_window=None),
    "mixtral": _narrow(sliding_window=None, num_local_experts=4, **_MOE),
    "starcoder2": _wide(sliding_window=None),
    "phi3": _wide(sliding_window=None),
    "qwen2": _wide(num_hidden_layers=4, max_window_layers=2, **_SLIDING),
    "qwen3": _narrow(num_hidden_layers=3, max_window_layers=2, **_SLIDING),
    "qwen3_moe": _narrow(num_experts=4, moe_intermediate_size=24, **_MOE),
    "phi": _wide(rope_parameters=_partial(0.5)),
    "gemma2": _narrow(
        num_hidden_layers=4,
        layer_types=_MIXED,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,  # low enough to matter
    ),
    "gemma3_text": _narrow(num_hidden_layers=4, layer_types=_MIXED, sliding_window=WINDOW),
    "gpt_neox": _wide(rope_parameters=_partial(0.25)),
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "opt": _wide(word_embed_proj_dim=64, ffn_dim=96),
    "olmo2": _wide(),
    "olmoe": _wide(num_experts=4, **_MOE),
    "stablelm": _wide(rope_parameters=_partial(0.5)),
    "granite": _wide(attention_multiplier=0.3),
    "cohere": _wide(logit_scale=1.0),
    "glm4": _narrow(rope_parameters=_partial(0.5)),
    "smollm3": _wide(num_hidden_layers=4, layer_types=_MIXED, no_rope_layers=[1, 0, 1, 1], **_SLIDING),
    "nemotron": _narrow(rope_parameters=_partial(0.5)),
    "gpt_oss": _narrow(
        num_hidden_layers=4,
        layer_types=_MIXED,
        sliding_window=WINDOW,
        num_local_experts=4,
        rope_parameters=_YARN,
        **_MOE,
    ),
    "llama4_text": _narrow(
        num_hidden_layers=4,
        layer_types=["chunked_attention", "full_attention"] * 2,
        attention_chunk_size=CHUNK,
        no_rope_layers=[1, 0, 1, 0],
        num_local_experts=2,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
    ),
}

FAMILIES = list(OPTIONS)
WITHOUT_ROTARY = {"gpt2", "opt"}


def build(model_type: str, **options: Any) -> PreTrainedModel:
    """A model of `model_type` in fp32 and eval mode, its weights drawn from a seed made of the name."""
    config = AutoConfig.for_model(model_type, **options)
    # The oldest transformers lets gemma2 run under sdpa, which leaves its softcap out.
    kernel = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kernel)
    _draw_weights(model, sum(map(ord, model_type)))
    return model.eval().requires_grad_(False)


@cache
def tiny(family: str) -> PreTrainedModel:
    """The tiny model of one of `FAMILIES`, built once; whoever wraps it must unwrap it."""
    return build(family, **OPTIONS[family])


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            noise = torch.randn(weight.shape, generator=generator)
            if isinstance(module, nn.Embedding) or name == "sinks":
                weight.copy_(noise)
            elif weight.dim() >= 2:
                weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)
