"""What a model must be to run over a compressed cache: its decoder, what each layer of it keeps, no dropout."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvcompress.compat import cache_argument
from kvcompress.errors import WrapError


def decoder_of(model: nn.Module) -> nn.Module:
    """The innermost module that takes ids, positions and the cache: a base model, or opt's decoder inside it."""
    found = None
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters
        if {"input_ids", "position_ids", cache_argument(module.forward)} <= set(parameters):
            found = module
    if found is None:
        raise WrapError(
            f"{type(model).__name__} has no module that takes input_ids, position_ids and a cache; "
            "only decoder-only language models of transformers can be wrapped"
        )
    return found


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """For each layer the number of tokens that its sliding or chunked window keeps, None for full attention.

    Raises WrapError for a model whose attention does not go through transformers' attention interface, or with
    layers that keep something else than keys and values of their own.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise WrapError(f"wrap takes a transformers model, uncompiled and without an adapter's wrapper; got {name}")
    if model.config.is_encoder_decoder or not model.can_generate():
        raise WrapError(f"{name} is no decoder-only language model; load it with AutoModelForCausalLM")
    config = model.config.get_text_config(decoder=True)
    if not _calls_the_interface(model):
        raise WrapError(
            f"{name} ({config.model_type}) never calls transformers' attention interface, so its attention cannot run "
            "over a compressed cache"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise WrapError(
            f"{name} ({config.model_type}) keeps latent keys and values (MLA), which compressed caches do not support"
        )
    layers = DynamicCache(config=config).layers
    if not layers:
        return [None] * config.num_hidden_layers
    if len(layers) != config.num_hidden_layers:
        raise WrapError(
            f"only {len(layers)} of the {config.num_hidden_layers} layers of {name} keep keys and values of their own; "
            "layers that share them are not supported"
        )
    windows: list[int | None] = []
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(max(1, layer.sliding_window - 1))
        else:
            raise WrapError(
                f"layer {index} of {name} keeps {type(layer).__name__}, not plain keys and values; "
                "linear-attention, shared and state-space layers are not supported"
            )
    return windows


def _calls_the_interface(model: PreTrainedModel) -> bool:
    """Whether the file of any of the model's classes, those it derives from included, takes attention from there."""
    classes = {parent for module in model.modules() for parent in type(module).__mro__}
    files = {each.__module__ for each in classes} - {PreTrainedModel.__module__}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off, and gives every module its own training flag back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
