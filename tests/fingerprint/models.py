"""Tiny models of one's own, to change."""

import copy

import torch
from transformers import PreTrainedModel

from tests.families import tiny


def own(family: str = "llama") -> PreTrainedModel:
    """A tiny random model that no other test has."""
    return copy.deepcopy(tiny(family))


def with_adapters(*names: str) -> PreTrainedModel:
    """A tiny llama with random LoRA adapters; the last of them is active."""
    from peft import LoraConfig, inject_adapter_in_model

    model = own()
    for name in names:
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]), model, name)
    activate(model, names[-1])
    draw_adapters(model)
    return model.eval().requires_grad_(False)


def activate(model: torch.nn.Module, *names: str) -> None:
    """Makes these adapters act, as transformers' and PEFT's own `set_adapter` do; none without a name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(bool(names))
            if names:
                layer.set_adapter(list(names))


def draw_adapters(model: torch.nn.Module) -> None:
    """Gives every adapter random weights, the same in every model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
