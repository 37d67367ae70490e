"""The adapters of PEFT inside a model: which of them act, and what of the model is theirs.

PEFT itself is not needed: its layers are known by the attributes that all of them have.
"""

from __future__ import annotations

from typing import Any

from torch import nn

ACTING: tuple[str, ...] = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""The attributes of a layer that say which adapters act."""

Container = nn.ModuleDict | nn.ParameterDict


def tuner_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of `model` that hold adapters, by name."""
    return {name: module for name, module in model.named_modules() if is_tuner_layer(module)}


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether `module` is a layer of PEFT that adapters, by name, were put into."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "merged_adapters")


def acting(layer: Any) -> list[str]:
    """The adapters whose weights act in `layer`: none when disabled, or when merged into the base weights."""
    return [] if layer.disable_adapters or layer.merged_adapters else list(layer.active_adapters)


def state(layer: Any) -> dict[str, Any]:
    """Which adapters act, are merged, or would act if they were not disabled."""
    merged = list(layer.merged_adapters)
    return {"disabled": bool(layer.disable_adapters), "merged": merged, "acting": acting(layer)}


def idle(name: str, layer: Any) -> list[str]:
    """Beginnings, with a dot at their end, of the names of what belongs to adapters that do not act in `layer`."""
    unused = _known(layer) - set(acting(layer))
    groups = (group for group, held in layer.named_children() if isinstance(held, Container))
    return [f"{name}.{group}.{adapter}." for group in groups for adapter in sorted(unused)]


def without_idle(layer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of `layer` (scales, ranks, …) less those of adapters that do not act."""
    unused = _known(layer) - set(acting(layer))
    return {
        setting: {key: each for key, each in value.items() if key not in unused} if isinstance(value, dict) else value
        for setting, value in settings.items()
    }


def _known(layer: Any) -> set[str]:
    """The names of all adapters in `layer`."""
    return {adapter for group in layer.adapter_layer_names for adapter in getattr(layer, group, ())}
