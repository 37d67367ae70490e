"""The fingerprint of a model, and a cheap look at whether it is still the same."""

from __future__ import annotations

import hashlib
import json
import threading
from copy import deepcopy
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvcompress.fingerprint.adapters import ACTING, idle, state, tuner_layers, without_idle
from kvcompress.fingerprint.held import HeldTensors
from kvcompress.fingerprint.offloaded import offloaded
from kvcompress.fingerprint.settings import changes_itself, config_settings, configs, module_settings
from kvcompress.fingerprint.tensors import TensorDigests, parts_of

_LOCK = threading.RLock()
_DIGESTS = TensorDigests()
_MISSING = object()


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 that tells apart models whose KV must not be mixed.

    It covers every byte of every weight and buffer, the plain settings that the modules and the configuration compute
    with, and of PEFT's adapters the names, scales and weights of those that act, and whether they are merged. Saving
    and loading, another device, special tokens, generation settings, labels and idle adapters change nothing.

    All is read anew; `kvcompress bench fingerprint` says how long that takes. See `Watch` for one that remembers.

    Raises:
        ValueError: a parameter has no data here (on the meta device, and accelerate does not hold it).
    """
    return _fingerprint(model, fresh=True)


class Watch:
    """One model's fingerprint, made again only if something shows that the model may have changed.

    What shows: a tensor's identity, storage, address and version counter, the settings of modules and configurations,
    which adapters act, and which modules there are. Looking reads nothing from a device: `kvcompress bench
    fingerprint` says how long it takes. Writes that no counter counts go unseen until the whole is read anew
    (`weights_fingerprint`): those through `tensor.data`, a numpy view or a kernel of one's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._fingerprint: str | None = None
        self._changes = 0

    def fingerprint(self, thorough: bool = False) -> str:
        """The fingerprint now. `thorough` looks more closely, and reads what was made in inference mode anew."""
        with _LOCK:
            if self._fingerprint is None or self._may_have_changed(thorough):
                self._fingerprint = _fingerprint(self._model)
                self._remember()
            return self._fingerprint

    def _may_have_changed(self, thorough: bool) -> bool:
        return (
            self._found != _DIGESTS.uncounted_writes
            or list(_values(self._inner)) != self._modules
            or self._tensors.may_have_changed(thorough)
            or (thorough and self._tensors.uncounted)
            or any(values.get(name, _MISSING) != value for values, name, value in self._settings)
        )

    def _remember(self) -> None:
        modules = list(self._model.modules())
        self._found = _DIGESTS.uncounted_writes
        self._inner = [module._modules for module in modules]
        self._modules = list(_values(self._inner))
        self._tensors = HeldTensors([module for module in modules if not changes_itself(module)])
        self._settings = [
            (vars(owner), name, deepcopy(vars(owner).get(name, _MISSING)))
            for owner, names in self._setting_names(modules)
            for name in names
        ]

    def _setting_names(self, modules: list[nn.Module]) -> list[tuple[Any, list[str]]]:
        found: list[tuple[Any, list[str]]] = [(module, list(module_settings(module))) for module in modules]
        found += [(layer, list(ACTING)) for layer in tuner_layers(self._model).values()]
        return found + [(config, list(config_settings(config))) for _, config in configs(self._model)]


def _values(dictionaries: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, dictionaries))


def _fingerprint(model: nn.Module, fresh: bool = False) -> str:
    with _LOCK:
        _count_optimizer_steps()
        layers = tuner_layers(model)
        left_out = tuple(start for name, layer in layers.items() for start in idle(name, layer))
        digest = hashlib.sha256(json.dumps(_settings(model, layers, left_out), sort_keys=True, default=str).encode())
        named = [
            (name, part, _epoch(name, layers))
            for name, tensor in sorted(_tensors(model).items())
            if not f"{name}.".startswith(left_out)
            for part in parts_of(offloaded(model, name) if tensor.is_meta else tensor)
        ]
        found = _DIGESTS.of([part for _, part, _ in named], [epoch for _, _, epoch in named], fresh)
        for (name, _, _), each in zip(named, found, strict=True):
            digest.update(name.encode() + b" " + each)
        return digest.hexdigest()


def _settings(model: nn.Module, layers: dict[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if f"{name}.".startswith(left_out):
            continue
        own = {**module_settings(module), "class": type(module).__name__}
        if name in layers:
            own = {**without_idle(module, own), "adapters": state(module)}
        found[name] = _with_text_keys(own)
    return found | {f"{name}.config": _with_text_keys(config_settings(config)) for name, config in configs(model)}


def _with_text_keys(value: Any) -> Any:
    """What JSON would make of it, so that loading changes nothing."""
    if isinstance(value, dict):
        return {str(name): _with_text_keys(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that the model saves, and the buffers that it does not save, by name."""
    unsteady = tuple(f"{name}." for name, module in model.named_modules() if changes_itself(module))
    found = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict(keep_vars=True)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and not name.startswith(unsteady)}


def _epoch(name: str, layers: dict[str, Any]) -> tuple[str, ...] | None:
    """Which adapters were merged into the weight `name`. Merging writes past the version counter."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return tuple(layers[name].merged_adapters)
    return None


@cache
def _count_optimizer_steps() -> None:
    """From now on every optimizer counts what it writes; fused ones do not by themselves."""

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        increment_version(
            [
                weight
                for group in optimizer.param_groups
                for weight in group["params"]
                if weight.grad is not None and not weight.is_inference()
            ]
        )

    register_optimizer_step_post_hook(count)
