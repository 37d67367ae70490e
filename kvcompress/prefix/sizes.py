"""How many bytes of KV a model keeps, worked out from its configuration alone.

What is counted is what transformers' own cache holds between two calls in the given dtype, without spare room.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedConfig

from kvcompress import budget
from kvcompress.budget import Budget, LayerShape, largest_fitting, resolve
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.prefix.layer_sizes import LayerSize, layer_sizes
from kvcompress.text_form import parse

LONGEST = 2**50
"""A method whose bytes still fit at this many tokens has no limit."""


@dataclass(frozen=True)
class KVSize:
    """A model's KV. `attention`: `"MHA"`, `"GQA"`, `"MQA"`, `"MLA"`, several joined by `" and "`, or `"none"`.
    `itemsize`: bytes of a value. `longest_context`: tokens the model was made for, None if its configuration does not
    say."""

    model_type: str
    attention: str
    dtype: str
    itemsize: int
    layers: tuple[LayerSize, ...]
    longest_context: int | None = None

    @property
    def values_per_token(self) -> int:
        """Values that one more token adds while no window is full."""
        return sum(layer.values for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds while no window is full."""
        return self.values_per_token * self.itemsize

    @property
    def bytes_per_token_at_length(self) -> int:
        """Bytes that one more token adds once every window is full."""
        return sum(layer.values for layer in self.layers if layer.window is None) * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes kept per sequence whatever its length, by linear-attention layers."""
        return sum(layer.state * self.itemsize + 4 * layer.state_float32 for layer in self.layers)

    def bytes_at(self, context: int, batch: int = 1) -> int:
        """Bytes of the exact KV of `batch` sequences of `context` tokens each."""
        if context < 0 or batch < 1:
            raise ValueError(f"context={context}, batch={batch}: expected tokens, 0 or more, and at least 1 sequence")
        held = sum(layer.values * layer.held(context) for layer in self.layers) * self.itemsize
        return batch * (held + self.state_bytes)

    def tokens_within(self, budget: int, batch: int = 1) -> int | None:
        """The longest context that `batch` sequences can each have in `budget` bytes; None if there is no limit.

        0 if not even one token fits.
        """
        if self.bytes_at(1, batch) > budget:
            return 0
        if not self.bytes_per_token_at_length:
            longest = max((layer.window or 0 for layer in self.layers), default=0)
            if self.bytes_at(longest, batch) <= budget:
                return None
            return largest_fitting(lambda tokens: self.bytes_at(tokens, batch), budget, longest)
        most = budget // (batch * self.bytes_per_token_at_length)
        return largest_fitting(lambda tokens: self.bytes_at(tokens, batch), budget, max(1, most))

    def users_within(self, budget: int, context: int) -> int | None:
        """How many sequences of `context` tokens fit into `budget` bytes; None if they take no bytes."""
        each = self.bytes_at(context)
        return budget // each if each else None


def kv_size(config: PreTrainedConfig, dtype: str | torch.dtype | None = None) -> KVSize:
    """The KV of a model, from its configuration.

    `dtype`: of the cache, such as `"bfloat16"`; by default the configuration's own, float32 if it names none.

    Raises `UnknownLayer` for a model or layer whose size is not known, `ValueError` for a dtype that is none.
    """
    layers = layer_sizes(config)
    text = config.get_text_config(decoder=True)
    chosen = _dtype(dtype if dtype is not None else getattr(text, "dtype", None) or getattr(config, "dtype", None))
    attention = sorted({layer.attention for layer in layers if layer.attention})
    return KVSize(
        model_type=text.model_type,
        attention=" and ".join(attention) or "none",
        dtype=str(chosen).removeprefix("torch."),
        itemsize=chosen.itemsize,
        layers=layers,
        longest_context=getattr(text, "max_position_embeddings", None),
    )


def method_bytes(size: KVSize, method: str, context: int, batch: int = 1) -> int:
    """Bytes that `batch` sequences of `context` tokens take under a method, in its text form, right after prefill.

    What a real cache stores, spare apart. Raises `MethodError` for a wrong method, `ValueError` for a model whose
    layers keep something else than plain keys and values.
    """
    parsed = parse(method)
    if isinstance(parsed, Exact):
        return size.bytes_at(context, batch)
    shapes = _plain_shapes(size, parsed)

    def tokens(share: Budget) -> int:
        within = partial(budget.tokens_within, method=parsed, shapes=shapes, rows=batch, longest=context)
        return resolve(share, [context], within)[0]

    evicting = parsed.evicting
    kept = context if evicting is None else min(context, evicting.kept_tokens(tokens))
    return budget.method_bytes(parsed, shapes, batch, kept, context)


def method_tokens_within(size: KVSize, method: str, limit: int, batch: int = 1) -> int | None:
    """The longest context that `batch` sequences can each have in `limit` bytes; None if there is no limit."""
    if isinstance(parse(method), Exact):
        return size.tokens_within(limit, batch)
    if method_bytes(size, method, 1, batch) > limit:
        return 0
    most = 1
    while method_bytes(size, method, most, batch) <= limit:
        most *= 2
        if most > LONGEST:
            return None
    return largest_fitting(lambda tokens: method_bytes(size, method, tokens, batch), limit, most)


def _plain_shapes(size: KVSize, method: Method) -> Counter[LayerShape]:
    shapes: Counter[LayerShape] = Counter()
    for index, layer in enumerate(size.layers):
        if layer.kind not in ("full", "sliding", "chunked") or layer.attention == "MLA" or layer.indexer_dim:
            kind = layer.attention or layer.kind
            raise ValueError(
                f"{method} cannot run on layer {index} of {size.model_type} ({kind}): only 'exact' has a size"
            )
        shapes[LayerShape(layer.heads, layer.key_dim, layer.value_dim, size.itemsize, layer.window)] += 1
    return shapes


def token_passes(prompt: int, new: int) -> tuple[int, int]:
    """Tokens that go through the model to generate `new` tokens after `prompt`: without a KV cache, and with one."""
    return sum(prompt + i for i in range(new)), prompt + new - 1


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype {dtype!r}: expected one such as 'float16', 'bfloat16' or 'float32'")
        return found
    return dtype
