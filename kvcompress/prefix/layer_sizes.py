"""What each layer of a model stores, read off its configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig

from kvcompress.prefix.states import linear_state

Kind = Literal["full", "sliding", "chunked", "linear", "hybrid", "shared", "none"]

_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid",
    "moe": "none",
    "mlp": "none",
}
_OTHER_CACHES = {
    "cpmant": "its prompts begin with tokens of its own",
    "dory": "it runs through its layers in loops and stores each loop's KV",
    "mimo_v2_flash": "its sliding layers have other KV heads than the configuration says",
    "mllama_text_model": "its cross-attention layers hold the KV of images",
    "openai-gpt": "it keeps no KV between calls",
    "reformer": "it attends by buckets",
    "rwkv": "it keeps a recurrent state of its own form",
    "xlm": "it keeps no KV between calls",
    "xlnet": "it keeps no KV between calls",
    "xlstm": "it keeps a recurrent state of its own form",
}
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


class UnknownLayer(ValueError):
    """The configuration has a layer whose cache is not known here. The message names the layer and its type."""


@dataclass(frozen=True)
class LayerSize:
    """What one layer stores.

    `attention`: `"MHA"`, `"GQA"`, `"MQA"`, `"MLA"`, or empty. `heads`, `key_dim`, `value_dim`: of its keys and values;
    for MLA one head with the latent and the rotary key. `indexer_dim`: of a sparse attention's index key, one a token.
    `window`: tokens held at most between calls, None for all. `state`, `state_float32`: values kept per sequence
    whatever its length, in the model's dtype and in float32.
    """

    kind: Kind
    attention: str = ""
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    indexer_dim: int = 0
    window: int | None = None
    state: int = 0
    state_float32: int = 0

    @property
    def values(self) -> int:
        """Values stored for every token held."""
        return self.heads * (self.key_dim + self.value_dim) + self.indexer_dim

    def held(self, context: int) -> int:
        """Tokens held after `context` tokens."""
        return context if self.window is None else min(context, self.window)


def layer_sizes(config: PreTrainedConfig) -> tuple[LayerSize, ...]:
    """Every layer of a decoder-only model, or of the text part of a larger one, in order.

    MHA, MQA and GQA store keys and values per KV head; MLA the latent and the rotary key, and the indexer's key where
    the attention is sparse. Sliding and chunked layers hold `window - 1` tokens between calls. Layers that reuse
    another's KV store nothing. Falcon's new decoder stores its KV once per query head, as transformers does.

    Raises `UnknownLayer` for an encoder and for a layer whose size is not known here.
    """
    text = config.get_text_config(decoder=True)
    _check_known(config, text)
    types = _layer_types(text)
    configs = getattr(text, "per_layer_config", None) or [text] * len(types)
    try:
        return tuple(_layer(text, own, i, kind) for i, (own, kind) in enumerate(zip(configs, types, strict=True)))
    except (AttributeError, TypeError) as error:
        raise UnknownLayer(f"{text.model_type}: the size of its layers is not known ({error})") from error


def _check_known(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    name, reason = text.model_type, _OTHER_CACHES.get(text.model_type)
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder model"
    elif getattr(text, "is_decoder", None) is False and not name.startswith("gpt_neox"):
        reason = "an encoder"
    elif reason is None and not _generates(config, text):
        reason = "transformers has no model of it that generates text, so it keeps no KV between calls"
    elif missing := [field for field in ("num_hidden_layers", "hidden_size") if not hasattr(text, field)]:
        reason = f"the configuration has no {missing[0]}"
    if reason:
        raise UnknownLayer(f"{name}: {reason}; give a decoder-only model with an ordinary KV cache")


def _generates(config: PreTrainedConfig, text: PreTrainedConfig) -> bool:
    """Whether there is a causal language model for `config` or its text part, or one that `text` is the text part of.

    Code of its own that comes with a model says so in its `auto_map`.
    """
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    if any(type(each) in mapping for mapping in mappings for each in (config, text)):
        return True
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return True
    owners = (owner for mapping in mappings for owner in mapping)
    # PreTrainedConfig makes sub_configs a property of the class, which a type checker takes for one of instances.
    sub_configs: Iterator[dict[str, type]] = (getattr(owner, "sub_configs") for owner in owners)  # noqa: B009
    return any(type(text) is part for parts in sub_configs for key, part in parts.items() if "text" in key)


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of every layer, with `shared` for those that reuse another layer's KV."""
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if types is None:
        if getattr(config, "sliding_window", None) is not None:
            kind = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        else:
            kind = "full_attention"
        types = [kind] * count
    if len(types) != count:
        raise UnknownLayer(
            f"{config.model_type}: {len(types)} layer types for {count} layers; correct the configuration"
        )
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        owners = count - (getattr(config, "num_kv_shared_layers", None) or 0)
        modes = [None if i < owners else "reuse" for i in range(count)]
    return ["shared" if mode == "reuse" else kind for kind, mode in zip(types, modes, strict=True)]


def _layer(text: PreTrainedConfig, config: PreTrainedConfig, index: int, layer_type: str) -> LayerSize:
    if layer_type == "shared":
        return LayerSize("shared")
    kind = _KINDS.get(layer_type)
    where = f"{text.model_type}, layer {index} ({layer_type!r})"
    if kind is None:
        raise UnknownLayer(f"{where}: the size of this layer's cache is not known; known are {', '.join(_KINDS)}")
    if kind == "none":
        return LayerSize("none")
    window, state, float32 = None, 0, 0
    if kind in ("linear", "hybrid"):
        found = linear_state(config, layer_type)
        if found is None:
            raise UnknownLayer(f"{where}: the size of this layer's state is not known")
        state = found.convolution + (found.recurrent if found.recurrent_in_model_dtype else 0)
        float32 = 0 if found.recurrent_in_model_dtype else found.recurrent
        if kind == "linear":
            return LayerSize(kind, state=state, state_float32=float32)
    if layer_type in ("sliding_attention", "hybrid_sliding", "chunked_attention"):
        name = "attention_chunk_size" if kind == "chunked" else "sliding_window"
        width = getattr(config, name, None)
        if width is None:
            raise UnknownLayer(f"{where}: the configuration has no {name}")
        window = max(width - 1, 0)
    indexer = 0
    if layer_type in _INDEXED and (getattr(text, "indexer_types", None) or {index: ""})[index] != "shared":
        indexer = config.index_head_dim
    return LayerSize(kind, *_attention(config), indexer, window, state, float32)


def _attention(config: PreTrainedConfig) -> tuple[str, int, int, int]:
    """Name, heads, key dim and value dim of a layer's attention."""
    if getattr(config, "kv_lora_rank", None):
        return "MLA", 1, config.kv_lora_rank, config.qk_rope_head_dim
    heads = _kv_heads(config)
    name = "MQA" if heads == 1 else "MHA" if heads == config.num_attention_heads else "GQA"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return name, heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _kv_heads(config: PreTrainedConfig) -> int:
    if getattr(config, "new_decoder_architecture", False):
        return config.num_attention_heads
    if getattr(config, "multi_query", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
