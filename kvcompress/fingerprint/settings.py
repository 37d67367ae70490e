"""The plain values that a model computes with beside its tensors: of its configuration and of every module.

What changes no key, value or logit in evaluation mode is left out: special tokens, generation settings, labels,
dropout, shapes (the tensors have them), the choice of kernels, and what saving and loading add.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

# A router's top_k is no generation setting.
GENERATION = frozenset(vars(GenerationConfig())) - {"top_k"}
IN_CONFIG = GENERATION | {
    *("architectures", "dtype", "model_type", "name_or_path", "torch_dtype", "transformers_version"),
    *("bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("gradient_checkpointing", "initializer_range", "output_router_logits", "return_dict", "router_aux_loss_coef"),
}
IN_MODULES = frozenset(
    {
        *("all_tied_weights_keys", "gradient_checkpointing", "kernel_config", "loss_type", "name_or_path"),
        *("padding_idx", "training", "vocab_size", "warnings_issued"),
        *("in_features", "out_features", "num_embeddings", "embedding_dim"),
        *("scale_grad_by_freq", "sparse"),
        *("hf_device_map", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method"),
    }
)


def module_settings(module: nn.Module) -> dict[str, Any]:
    """The plain values of one module, its children and configuration apart."""
    if isinstance(module, nn.Dropout) or changes_itself(module):
        return {}
    return {name: value for name, value in vars(module).items() if name not in IN_MODULES and _counts(name, value)}


def config_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The plain values of one configuration, those inside it apart."""
    return {name: value for name, value in vars(config).items() if name not in IN_CONFIG and _counts(name, value)}


def configs(model: nn.Module) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Every configuration of the model's modules, and inside these, once, by the name of the module and its own."""
    waiting = [(name, module.config) for name, module in model.named_modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while waiting:
        name, config = waiting.pop(0)
        if id(config) in seen or not isinstance(config, PreTrainedConfig):
            continue
        seen.add(id(config))
        yield name, config
        waiting += [(f"{name}.{inner}", value) for inner, value in vars(config).items()]


def changes_itself(module: nn.Module) -> bool:
    """Whether the module's frequencies follow the length of what it is fed; the configuration says how."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(map(follows_length, kinds))


def follows_length(rope_type: Any) -> bool:
    """Whether frequencies of this rope type, and so every token's KV, depend on the length of the whole prompt."""
    return rope_type in ("longrope", "su") or "dynamic" in str(rope_type)


def _counts(name: str, value: Any) -> bool:
    return not name.startswith("_") and "dropout" not in name and "pdrop" not in name and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
