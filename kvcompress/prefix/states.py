"""What a linear-attention layer keeps of a sequence of any length: a convolution's tail and a recurrent state."""

from typing import NamedTuple

from transformers import PreTrainedConfig


class State(NamedTuple):
    """Values of one sequence: `convolution` ones in the model's dtype, `recurrent` ones in float32 unless
    `recurrent_in_model_dtype`."""

    convolution: int
    recurrent: int
    recurrent_in_model_dtype: bool = False


def linear_state(config: PreTrainedConfig, kind: str) -> State | None:
    """The state of a layer of type `kind` (`"linear_attention"`, `"conv"`, `"hybrid"`), or None for a kind of linear
    attention that is not known here.

    Known are short convolutions (LFM2), gated delta nets (Qwen3-Next, OLMo hybrid), Kimi delta attention, lightning
    attention (MiniMax), Mamba (1: one state vector a channel) and Mamba-2 (a state matrix a head).
    """
    hidden = config.hidden_size
    if kind == "conv":
        return State(hidden * config.conv_L_cache, 0) if hasattr(config, "conv_L_cache") else None
    if _has(config, "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return State((2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim)
    if _has(config, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        width = config.linear_num_heads * config.linear_head_dim
        return State(3 * width * config.linear_conv_kernel_dim, width * config.linear_head_dim)
    if config.model_type == "minimax":
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        return State(0, config.num_attention_heads * head_dim * head_dim, recurrent_in_model_dtype=True)
    return _mamba(config)


def _mamba(config: PreTrainedConfig) -> State | None:
    size = _first(config, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = _first(config, "mamba_d_conv", "conv_kernel")
    if size is None or kernel is None:
        return None
    heads = _first(config, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    head_dim = _first(config, "mamba_d_head", "mamba_headdim", "mamba_head_dim")
    if config.model_type == "mamba2":
        heads, head_dim = config.num_heads, config.head_dim
    if heads is not None and head_dim is not None:
        groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        return State((heads * head_dim + 2 * groups * size) * kernel, heads * head_dim * size)
    if config.model_type in ("mamba", "falcon_mamba", "jamba"):
        width = config.hidden_size * (_first(config, "mamba_expand", "expand") or 1)
        if config.model_type != "jamba":
            width = config.intermediate_size
        return State(width * kernel, width * size)
    return None


def _has(config: PreTrainedConfig, *names: str) -> bool:
    return all(getattr(config, name, None) is not None for name in names)


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
