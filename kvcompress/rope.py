"""Rotary position embeddings: move a key from one position to another, and find out how a model rotates its keys.

Shapes: B batch, H KV heads, S stored tokens, D head dim, R <= D rotary dims, N probed positions.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvcompress.compat import cache_argument
from kvcompress.decoder import evaluating


class RotaryError(ValueError):
    """The keys of this model cannot be moved to other positions; the message says why."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one layer (RoFormer, arXiv 2104.09864, equation 15).

    Pair `i` of a key turns by `inv_freq[i]` radians a position. Only the first R dims turn; the rest pass through.
    Attention factors (yarn) are already in the keys, so turning them never scales.
    """

    inv_freq: Tensor  # [R/2] radians per position, negative where a model turns the other way (nanochat)
    interleaved: bool = False  # pairs are dims (2i, 2i+1), or (i, i + R/2) when half-split
    _turns: Tensor = field(init=False, repr=False)  # [R/2] int64, in 2^-64 of a full turn per position
    # Cosines and sines of the last whole distance: the layers of a call turn by the same one.
    _last: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        # In this unit an integer product overflows exactly where the circle closes, so the angle stays exact at every
        # distance. Made on the CPU, since not every device has fp64.
        turns = self.inv_freq.detach().to("cpu", torch.float64) / (2 * math.pi)
        turns = ((turns - turns.round()) * 2.0**63).to(torch.int64) * 2
        object.__setattr__(self, "_turns", turns.to(self.inv_freq.device))

    def rotate(self, keys: Tensor, delta: Tensor | int) -> Tensor:
        """Return `keys` as they would be `delta` positions later, in a new tensor of the same dtype.

        keys: [B, H, S, D], any float dtype, rotated for some position p; the result is rotated for p + delta.
        delta: an int, or an integer tensor broadcastable to [B, H, S]. A delta of 0 gives the same bits.

        Computed in fp32 (fp64 for fp64 keys), the angles exact to 1e-6 up to 1e9 positions.
        Raises TypeError for a delta that is not whole, ValueError for shapes that do not fit.
        """
        if keys.shape[-1] < 2 * len(self.inv_freq):
            raise ValueError(
                f"keys of shape {tuple(keys.shape)} have {keys.shape[-1]} dims a head, but this rotary turns "
                f"{2 * len(self.inv_freq)}; pass the keys of the layer it belongs to"
            )
        _check_delta(delta, keys)
        turns = self._turns.to(keys.device)
        if isinstance(delta, Tensor):
            delta = delta.to(keys.device, torch.int64)[..., None]
        elif delta == 0:
            return keys.clone()
        precision = torch.float64 if keys.dtype == torch.float64 else torch.float32
        cos, sin = self._turn_by(delta, turns, precision)
        first, second = (half.to(precision) for half in self._pairs(keys))
        rotated = keys.clone()
        rotated_first, rotated_second = self._pairs(rotated)
        rotated_first.copy_(first * cos - second * sin)
        rotated_second.copy_(second * cos + first * sin)
        return torch.where(delta == 0, keys, rotated) if isinstance(delta, Tensor) else rotated

    def _turn_by(self, delta: Tensor | int, turns: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., R/2] of the angles of `delta` positions."""
        if isinstance(delta, int) and (found := self._last.get((delta, precision))) is not None:
            return found
        angles = (delta * turns).to(precision) * (2 * math.pi / 2.0**64)
        both = angles.cos(), angles.sin()
        if isinstance(delta, int):
            self._last.clear()
            self._last[delta, precision] = both
        return both

    def to(self, device: torch.device) -> "Rotary":
        """The same rotary with its frequencies on `device`."""
        return Rotary(self.inv_freq.to(device), self.interleaved)

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both members of every pair, each [B, H, S, R/2]."""
        pairs = len(self.inv_freq)
        if self.interleaved:
            return keys[..., : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
        return keys[..., :pairs], keys[..., pairs : 2 * pairs]


def rotaries(model: PreTrainedModel) -> list[Rotary | None]:
    """How each decoder layer of `model` rotates its keys; None for a layer that does not (smollm3, llama4).

    The model itself is asked, by one forward of one token at several positions: the key of a layer then differs by its
    rotary alone. Of the frequencies its modules hold and the ways to pair dims, those that reproduce every key are
    taken. Works with the model's own attention function, so call it before that is replaced. The model's training
    flags, buffers and the random state are left as they were.

    Raises RotaryError where no rotation by a distance exists or none is found: frequencies that depend on the length
    (dynamic NTK, longrope), several position axes (M-RoPE), learned positions, ALiBi, latent attention (MLA).
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    tables = check_movable(model)
    positions = _positions(config).to(tables[0].device)
    keys, values = _probe(model, config, positions)
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in keys]
    if missing:
        raise _error(name, f"layers {missing} store no keys of their own (KV shared between layers?)")

    candidates = [Rotary(torch.empty(0))]  # turns nothing
    candidates += [
        Rotary(sign * table, interleaved)
        for table, interleaved, sign in itertools.product(tables, (False, True), (1, -1))
    ]
    found: list[Rotary | None] = []
    moved: dict[tuple[int, torch.device], Rotary] = {}  # one for all layers that rotate alike on a device
    for layer in range(config.num_hidden_layers):
        if not (keys[layer].isfinite().all() and values[layer].isfinite().all()):
            raise RotaryError(
                f"keys or values of layer {layer} of {name} are NaN or infinite; check the weights and the dtype "
                "(float16 overflows in some models; bfloat16 or float32 do not)"
            )
        if _spread(values[layer]) > torch.finfo(values[layer].dtype).eps ** 0.5:
            raise _error(name, f"the values of layer {layer} change with the position (learned absolute positions?)")
        if not keys[layer].any():
            raise _error(name, f"the keys of layer {layer} are all zero, which fits any rotary")
        best = _choose(candidates, keys[layer], positions)
        if best is None:
            raise _error(name, f"the keys of layer {layer} are reproduced by no rotary frequencies of the model")
        place = id(best), keys[layer].device
        if len(best.inv_freq) and place not in moved:
            moved[place] = best.to(keys[layer].device)
        found.append(moved.get(place))
    if not any(found):
        raise _error(name, "no key changes with `position_ids`, so how it rotates them cannot be checked")
    return found


def check_movable(model: PreTrainedModel) -> list[Tensor]:
    """The model's `frequencies`. Raises RotaryError where keys cannot be moved, as far as shows without running it.

    Only buffers are read; parameters may be on the meta device.
    """
    tables = frequencies(model)
    reason = _refusal(model, model.config.get_text_config(decoder=True), tables)
    if reason:
        raise _error(type(model).__name__, reason)
    return tables


def _error(name: str, reason: str) -> RotaryError:
    return RotaryError(f'keys of {name} cannot be moved to other positions: {reason}; use positions="original"')


def _check_delta(delta: Tensor | int, keys: Tensor) -> None:
    if not isinstance(delta, Tensor):
        if not isinstance(delta, int):
            raise TypeError(f"delta is {delta!r}, expected whole positions; pass an int or an integer tensor")
        return
    if delta.is_floating_point() or delta.is_complex():
        raise TypeError(f"delta has dtype {delta.dtype}, expected whole positions; pass an integer tensor")
    try:
        delta.expand(keys.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"delta of shape {tuple(delta.shape)} does not broadcast to {tuple(keys.shape[:-1])}, "
            "the batch, heads and tokens of the keys"
        ) from None


def frequencies(model: nn.Module) -> list[Tensor]:
    """The different frequencies in the model's rotary modules, each [R/2]; gemma3 has one for each kind of layer."""
    tables: list[Tensor] = []
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if not leaf.endswith("inv_freq") or "original" in leaf or buffer.dim() != 1:
            continue
        if not any(torch.equal(buffer.cpu(), table.cpu()) for table in tables):
            tables.append(buffer.detach().clone())
    return tables


def _refusal(model: nn.Module, config: Any, tables: list[Tensor]) -> str | None:
    """Why the keys cannot be moved, as far as it shows before the model is run."""
    scalings = [config.rope_parameters] if getattr(config, "rope_parameters", None) else []
    scalings += [inner for outer in scalings for inner in outer.values() if isinstance(inner, dict)]
    for scaling in scalings:
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        if "dynamic" in kind or kind in ("longrope", "su"):
            return f"the frequencies of rope type {kind!r} depend on the length"
        axes = [key for key in scaling if "rope_section" in key]
        if axes:
            return f"its positions have several axes (M-RoPE, {axes[0]}={scaling[axes[0]]})"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its keys are latent, with the rotary part held apart (MLA)"
    builders = ("build_alibi_tensor", "build_mpt_alibi_tensor")
    if getattr(config, "alibi", False) or any(hasattr(module, name) for module in model.modules() for name in builders):
        return "its positions are biases on the scores (ALiBi)"
    other = {kind for kind in getattr(config, "layer_types", None) or () if "linear" in kind or "attention" not in kind}
    if other:
        return f"it has layers without softmax attention ({', '.join(sorted(other))})"
    if tables:
        return None
    learned = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in ("wpe", "embed_positions")
    ]
    if learned:
        return f"its positions are learned embeddings ({learned[0]})"
    return "it has no module with rotary frequencies (an `inv_freq` buffer)"


def _positions(config: Any) -> Tensor:
    """The probed positions [N]: a start, then near, back at 0, far, and past the trained length."""
    # The model's own fp32 angles say nothing any more beyond about 2^20.
    past = min((getattr(config, "max_position_embeddings", None) or 4096) + 1000, 2**20)
    return torch.tensor([7, 8, 0, 1007, past])


class _RecordingCache(DynamicCache):
    """Keeps what each layer stores, and lets the layer attend to keys of zero.

    A query then scores the same at every position, rounding included. With sink logits or routed experts the hidden
    states of the next layer would else drift apart.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.recorded_keys: dict[int, Tensor] = {}
        self.recorded_values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.recorded_keys[layer_idx] = key_states
        self.recorded_values[layer_idx] = value_states
        return super().update(torch.zeros_like(key_states), value_states, layer_idx, *args, **kwargs)


def ordinary_token(config: Any) -> int:
    """A token of the middle of the vocabulary, not the one for padding, which may embed to zero."""
    token = config.vocab_size // 2
    return token - 1 if token == getattr(config, "pad_token_id", None) else token


@torch.no_grad()
def _probe(model: PreTrainedModel, config: Any, positions: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Keys and values [N, H, 1, D] of each layer for one token alone, at each of `positions` [N]."""
    token = ordinary_token(config)
    cache = _RecordingCache(model.config)
    ids = torch.full((len(positions), 1), token, device=positions.device)
    with evaluating(model):
        model(
            input_ids=ids,
            position_ids=positions[:, None],
            use_cache=True,
            **{cache_argument(model.forward): cache},
        )
    return cache.recorded_keys, cache.recorded_values


def _spread(values: Tensor) -> float:
    """Largest difference between the rows of `values`, relative to the largest value."""
    return float((values - values[:1]).abs().max() / values.abs().max().clamp_min(torch.finfo(values.dtype).tiny))


def _choose(candidates: list[Rotary], keys: Tensor, positions: Tensor) -> Rotary | None:
    """The candidate that moves the key of the first position to all others best; None if none is within rounding.

    keys: [N, H, 1, D], one token at each of `positions` [N].
    """
    fitting = [candidate for candidate in candidates if 2 * len(candidate.inv_freq) <= keys.shape[-1]]
    errors = [_error_in_rounding(candidate, keys, positions.to(keys.device)) for candidate in fitting]
    best = min(range(len(fitting)), key=errors.__getitem__)
    return fitting[best] if errors[best] <= 1 else None


def _error_in_rounding(rotary: Rotary, keys: Tensor, positions: Tensor) -> float:
    """Largest error of moving the first key to the other positions, as a share of what rounding explains."""
    start = keys[:1].expand_as(keys).float()  # [N, H, 1, D]
    moved = rotary.rotate(start, (positions - positions[0])[:, None, None])
    error = (moved - keys.float()).abs()
    # Both members of a pair round in proportion to its length, and the layer's own sums in proportion to the head.
    size = start.abs()
    first, second = rotary._pairs(size)
    length = torch.hypot(first, second)
    first.copy_(length)
    second.copy_(length)
    size += start.square().mean(-1, keepdim=True).sqrt() / 4
    # The model computes angles in fp32, so they are off in proportion to the position.
    float32 = torch.finfo(torch.float32)
    rounding = 8 * max(torch.finfo(keys.dtype).eps, float32.eps) + positions[:, None, None, None] * float32.eps
    share = (error / (size * rounding)).max()
    return float(share.nan_to_num(nan=math.inf))
