"""The plain model over a whole text in one forward, each query limited to the keys that a cache had kept for it.

It shares no code with the stores, kernels and methods: what was kept, and which keys were packed together, is recorded
from the cache before every call; everything else is computed again here, in float64 attention.

B rows, H KV heads, G query heads per KV head, N columns of the whole text, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvcompress import Wrapped
from kvcompress.cache_layer import CacheLayer
from kvcompress.formats.affine import Affine
from kvcompress.rope import Rotary
from kvcompress.stores.store import Store

NAME = "kvcompress_oracle"


@dataclass(frozen=True)
class Packed:
    """What one layer has packed so far, evicted tokens included."""

    bits: int
    group_size: int
    key_groups: list[tuple[int, int, tuple[int, ...]]]  # row, KV head, positions of the tokens of one group
    values: list[tuple[int, int, int]]  # row, KV head, position


@dataclass
class Call:
    """One forward over a cache: what went in, what the layers stored before it, and the logits that came out."""

    ids: Tensor  # [B, T]
    counts: list[int]  # of row b the last so many columns are tokens
    kept: list[Tensor]  # [B, H, S] positions, of each layer
    packed: list[Packed | None]
    keys: list[Tensor] = field(default_factory=list)  # [B, H, T, D] of each layer, as they came into the cache
    values: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [B, T or 1, V]


@contextmanager
def recording(wrapped: Wrapped) -> Iterator[list[Call]]:
    """Collects every forward of the wrapped model over one compressed cache."""
    calls: list[Call] = []
    packings: dict[int, Packing] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs[wrapped.cache_name]
        layers = range(len(cache.layers))
        packed = [packings.setdefault(layer, Packing()).update(cache.layers[layer].store) for layer in layers]
        ids, mask = args[0] if args else kwargs["input_ids"], kwargs.get("attention_mask")
        columns = ids.shape[1]
        counts = [columns] * len(ids) if mask is None else mask[:, mask.shape[1] - columns :].sum(-1).tolist()
        calls.append(Call(ids, counts, [cache.kept(layer) for layer in layers], packed))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[-1].logits = output.logits

    update = CacheLayer.update

    def recorded_update(self: CacheLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[-1].keys.append(key_states.clone())
        calls[-1].values.append(value_states.clone())
        return update(self, key_states, value_states, *args, **kwargs)

    CacheLayer.update = recorded_update
    hooks = [
        wrapped.model.register_forward_pre_hook(before, with_kwargs=True),
        wrapped.model.register_forward_hook(after),
    ]
    try:
        yield calls
    finally:
        CacheLayer.update = update
        for hook in hooks:
            hook.remove()


class Packing:
    """Follows what one store packs: a group is noted when it is first seen, before any of its tokens can be evicted."""

    def __init__(self) -> None:
        self.key_groups: list[tuple[int, int, tuple[int, ...]]] = []
        self.values: list[tuple[int, int, int]] = []
        self._known: set[tuple[str, int, int, int]] = set()

    def update(self, store: Store) -> Packed | None:
        """All that was packed until now; None for a store that does not pack."""
        if store.packs is None or store.empty:
            return None
        form = store.packs.format("keys")
        assert isinstance(form, Affine)
        positions = store.current_positions(torch.device("cpu"))
        heads = store.filled[0].buffer.shape[1]
        begin = 0
        for segment in store.segments:
            for row, rows in enumerate(positions.expand(-1, heads, -1).tolist()):
                for head, slots in enumerate(rows):
                    first, keys, values = begin, 0, 0
                    if segment is store.ragged:
                        keys = values = segment.packed[row][head]
                    else:
                        first += segment.fronts[row]
                        keys, values = segment.keys.counts[row], segment.values.counts[row]
                    for start in range(first, first + keys, form.group_size):
                        self._note("keys", row, head, slots[start : start + form.group_size])
                    for position in slots[first : first + values]:
                        self._note("values", row, head, [position])
            begin += segment.length
        return Packed(form.bits, form.group_size, list(self.key_groups), list(self.values))

    def copy_row(self, other: "Packing", old: int, new: int) -> None:
        """Takes over what was packed in row `old` of another store for row `new` of this one."""
        self.key_groups += [(new, head, group) for row, head, group in other.key_groups if row == old]
        self.values += [(new, head, position) for row, head, position in other.values if row == old]
        self._known |= {(kind, new, head, position) for kind, row, head, position in other._known if row == old}

    def _note(self, kind: str, row: int, head: int, slots: list[int]) -> None:
        group = tuple(position for position in slots if position >= 0)
        if not group or (kind, row, head, group[0]) in self._known:
            return
        self._known |= {(kind, row, head, position) for position in group}
        if kind == "keys":
            self.key_groups.append((row, head, group))
        else:
            self.values.append((row, head, group[0]))


@dataclass
class Oracle:
    """The plain model's answer: logits [B, N, V] and each layer's softmax [B, H, G, N, N] in float64.

    `spans[c][b]` are the positions at which call c begins and ends in row b, which has `padding[b]` columns of padding.
    """

    logits: Tensor
    probabilities: list[Tensor]
    spans: list[list[tuple[int, int]]]
    padding: list[int]

    def error(self, calls: list[Call]) -> float:
        """The largest difference to the calls' logits, as a share of the largest logit; padding apart."""
        worst = 0.0
        for call, spans in zip(calls, self.spans, strict=True):
            width = call.logits.shape[1]
            for row, ((start, stop), padding) in enumerate(zip(spans, self.padding, strict=True)):
                real = min(width, stop - start)
                ours = call.logits[row, width - real :].double()
                expected = self.logits[row, padding + stop - real : padding + stop]
                worst = max(worst, float((ours - expected).abs().max()) if real else 0.0)
        return worst / float(self.logits.abs().max())


@torch.no_grad()
def oracle(model: PreTrainedModel, calls: list[Call], rotaries: list[Rotary | None] | None = None) -> Oracle:
    """Runs the unwrapped `model` over the tokens of all `calls`, each row's own at the right of one left-padded batch.

    With `rotaries` (positions="cache") every key is turned to its slot in what its call attended to.
    """
    rows = range(len(calls[0].ids))
    texts = [torch.cat([call.ids[row, call.ids.shape[1] - call.counts[row] :] for call in calls]) for row in rows]
    total = max(map(len, texts))
    padding = [total - len(text) for text in texts]
    ids = torch.stack([nn.functional.pad(text, (before, 0)) for text, before in zip(texts, padding, strict=True)])
    mask = (torch.arange(total) >= torch.tensor(padding)[:, None]).long()
    run = _Run(calls, padding, rotaries)
    before = {id(config): (config, config._attn_implementation_internal) for config in _configs(model)}
    AttentionInterface.register(NAME, run.attention)
    AttentionMaskInterface.register(NAME, _full_mask)
    for config, _ in before.values():
        config._attn_implementation_internal = NAME
    try:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation
    return Oracle(logits.double(), run.probabilities, run.spans, padding)


def _configs(model: PreTrainedModel) -> list[Any]:
    return [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]


def _full_mask(**arguments: Any) -> Tensor | None:
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


class _Run:
    def __init__(self, calls: list[Call], padding: list[int], rotaries: list[Rotary | None] | None) -> None:
        self.calls, self.padding, self.rotaries = calls, padding, rotaries
        ends = np.cumsum([call.counts for call in calls], axis=0).tolist()
        starts = [[0] * len(padding), *ends[:-1]]
        self.spans = [list(zip(*pair, strict=True)) for pair in zip(starts, ends, strict=True)]
        self.probabilities: list[Tensor] = []

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer, heads = module.layer_idx, key.shape[1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        dtype = query.dtype
        query = query.double().unflatten(1, (heads, -1))
        key, value = key.double(), value.double()
        stored = _Stored(key, value, self.calls, layer, self.padding)
        weights = query.new_zeros(*query.shape[:4], key.shape[2])
        output = query.new_zeros(*query.shape[:4], value.shape[-1])
        for call, spans in zip(self.calls, self.spans, strict=True):
            allowed, slots = self._allowed(call.kept[layer], heads, spans, key.shape[2])
            stored.pack(call.packed[layer])
            keys, values = stored.keys, stored.values
            if self.rotaries is not None:
                keys = self._at_slots(keys, slots, self.rotaries[layer])
            for row, ((first, last), padding) in enumerate(zip(spans, self.padding, strict=True)):
                start, stop = first + padding, last + padding
                logits = query[row, ..., start:stop, :] @ keys[row, :, None].mT * scaling
                if softcap is not None:
                    logits = softcap * (logits / softcap).tanh()
                seen = (
                    allowed[row, :, None, None]
                    & attention_mask[row if len(attention_mask) > 1 else 0, :, None, start:stop]
                )
                logits = logits.masked_fill(~seen, -torch.inf)
                if s_aux is not None:
                    extra = s_aux.double().view(heads, -1, 1, 1).expand(*logits.shape[:3], 1)
                    logits = torch.cat([logits, extra], -1)
                probabilities = logits.softmax(-1).nan_to_num(0)[..., : key.shape[2]]
                weights[row, ..., start:stop, :] = probabilities
                output[row, ..., start:stop, :] = probabilities @ values[row, :, None]
        self.probabilities.append(weights)
        return output.flatten(1, 2).transpose(1, 2).to(dtype).contiguous(), None

    def _allowed(self, kept: Tensor, heads: int, spans: list[tuple[int, int]], total: int) -> tuple[Tensor, Tensor]:
        """Which columns may be looked at in this call [B, H, N] (causality apart), and each one's slot."""
        allowed = torch.zeros(len(self.padding), heads, total, dtype=torch.bool)
        for row, padding in enumerate(self.padding):
            for head in range(heads if kept.numel() else 0):
                columns = kept[row, head][kept[row, head] >= 0] + padding
                allowed[row, head, columns] = True
            start, stop = spans[row]
            allowed[row, :, start + padding : stop + padding] = True
        return allowed, allowed.long().cumsum(-1) - 1

    def _at_slots(self, keys: Tensor, slots: Tensor, rotary: Rotary | None) -> Tensor:
        """Turns each key so that its distance to the call's queries is the distance of their slots."""
        if rotary is None:
            return keys
        columns = torch.arange(keys.shape[2])
        newest = slots.argmax(-1, keepdim=True)
        delta = (newest - columns) - (slots.amax(-1, keepdim=True) - slots)
        return _turn(keys, delta, rotary)


class _Stored:
    """Keys and values of one layer [B, H, N, D]; those that are packed become what their codes stand for.

    Codes are made of the keys and values that really came into the cache: the smallest difference would flip some.
    """

    def __init__(self, keys: Tensor, values: Tensor, calls: list[Call], layer: int, padding: list[int]) -> None:
        self.keys, self.values, self.padding = keys.clone(), values.clone(), padding
        self.fed_keys = self._fed([(call.keys[layer], call.counts) for call in calls])
        self.fed_values = self._fed([(call.values[layer], call.counts) for call in calls])
        self._groups = self._tokens = 0

    def _fed(self, calls: list[tuple[Tensor, list[int]]]) -> list[Tensor]:
        """Of each row [H, N, D] fp32 by position."""
        rows = range(len(self.padding))
        return [torch.cat([x[row, :, x.shape[2] - counts[row] :] for x, counts in calls], 1).float() for row in rows]

    def pack(self, packed: Packed | None) -> None:
        if packed is None:
            return
        for row, head, positions in packed.key_groups[self._groups :]:
            own = torch.tensor(positions)
            self.keys[row, head, own + self.padding[row]] = coded(self.fed_keys[row][head, own].T, packed.bits).T
        size = min(packed.group_size, self.values.shape[-1])
        for row, head, position in packed.values[self._tokens :]:
            groups = self.fed_values[row][head, position].unflatten(-1, (-1, size))
            self.values[row, head, position + self.padding[row]] = coded(groups, packed.bits).flatten()
        self._groups, self._tokens = len(packed.key_groups), len(packed.values)


def coded(x: Tensor, bits: int) -> Tensor:
    """Groups [..., g] fp32 through codes and back, scale and minimum rounded to fp16; float64."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((x - low) / scale.clamp_min(1e-30)).round()
    return codes.double() * scale.half().double() + low.half().double()


def _turn(keys: Tensor, delta: Tensor, rotary: Rotary) -> Tensor:
    """Each pair of `keys` [B, H, N, D] as a complex number times exp(i delta f)."""
    frequency = rotary.inv_freq.double().numpy()
    pairs = len(frequency)
    first = np.arange(pairs) * 2 if rotary.interleaved else np.arange(pairs)
    second = first + (1 if rotary.interleaved else pairs)
    result = keys.numpy().copy()
    turned = (result[..., first] + 1j * result[..., second]) * np.exp(1j * delta.numpy()[..., None] * frequency)
    result[..., first], result[..., second] = turned.real, turned.imag
    return torch.from_numpy(result)
