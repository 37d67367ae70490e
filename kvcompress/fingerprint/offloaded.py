"""Weights that accelerate holds elsewhere, in main memory or on the disk, until a layer needs them."""

from __future__ import annotations

from torch import Tensor, nn


def offloaded(model: nn.Module, name: str) -> Tensor:
    """The data of the parameter or buffer `name`, which is on the meta device.

    Raises ValueError where nothing holds it.
    """
    owner, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        weights = getattr(each, "weights_map", None)
        if weights is not None and leaf in weights:
            return weights[leaf]
    raise ValueError(f"parameter {name!r} holds no data here: load the model with its weights")
