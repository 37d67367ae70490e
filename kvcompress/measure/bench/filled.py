"""Random models, and caches of any length without a prefill: keys and values put in as a forward pass would."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvcompress.cache import CompressedCache
from kvcompress.wrapping import Wrapped


def random_model(positions: int) -> PreTrainedModel:
    """A random Llama trained on `positions`, whose KV outweighs it soon: 2 layers, 4 KV heads, D = 64, 4 kB a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).eval()


def shape_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, KV heads and head dim of a model with plain attention layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, dim


def random_kv(model: PreTrainedModel, tokens: int, batch: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [batch, H, tokens, D] of every layer, the same for the same seed."""
    layers, heads, dim = shape_of(model)
    generator = torch.Generator().manual_seed(0)

    def one() -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=generator).to(model.device, model.dtype)

    return [(one(), one()) for _ in range(layers)]


def fill_compressed(wrapped: Wrapped, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> CompressedCache:
    """A cache under the wrapper's method that has seen `kv` as one prompt. For methods that need no scores."""
    batch, _, tokens, _ = kv[0][0].shape
    cache = wrapped.new_cache()
    cache.check_rows(batch)
    cache.expect_prefill([tokens] * batch, tokens)
    cache.begin_call(tokens, [tokens] * batch)
    for index, (keys, values) in enumerate(kv):
        cache.update(keys, values, index)
        cache.layers[index].compress()
    cache.end_call()
    return cache


def fill_plain(cache: Cache, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> Cache:
    """One of transformers' own caches with the same content."""
    for index, (keys, values) in enumerate(kv):
        cache.update(keys, values, index)
    return cache


def dynamic(model: PreTrainedModel, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> Cache:
    """A DynamicCache with the same content."""
    return fill_plain(DynamicCache(config=model.config), kv)
