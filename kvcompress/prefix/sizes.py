"""How many bytes of KV a model keeps, worked out from its configuration alone.

What is counted is what transformers' own cache holds between two calls in the given dtype, without spare room.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from kvcompress.budget import MANY, Budget, LayerShape, largest_fitting, method_bytes, period_of, resolve, tokens_within
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.prefix.layer_sizes import LayerSize, layer_sizes
from kvcompress.text_form import parse


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
        if self.bytes_at(MANY, batch) <= budget:
            return None
        return largest_fitting(lambda tokens: self.bytes_at(tokens, batch) <= budget)


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


class MethodSize:
    """The same of a model under a method, given in its text form.

    Raises `MethodError` for a wrong method, `ValueError` for a model whose layers keep something else than plain keys
    and values.
    """

    def __init__(self, size: KVSize, method: str) -> None:
        self.size, self.method = size, parse(method)
        self.shapes = None if isinstance(self.method, Exact) else plain_shapes(size, self.method)

    def kept_at(self, context: int, batch: int = 1) -> int:
        """Tokens kept of `context`, in each of `batch` sequences."""
        evicting = self.method.evicting
        if evicting is None or self.shapes is None:
            return context
        shapes = self.shapes

        def tokens(share: Budget) -> int:
            return resolve(
                share, [context], lambda limit: tokens_within(limit // batch, self.method, shapes, [context])
            )[0]

        return min(context, evicting.kept_tokens(tokens))

    def bytes_at(self, context: int, batch: int = 1) -> int:
        """Bytes of `batch` sequences of `context` tokens each right after prefill: what a real cache has, no spare."""
        if self.shapes is None:
            return self.size.bytes_at(context, batch)
        return batch * method_bytes(self.method, self.shapes, [self.kept_at(context, batch)], [context])

    def tokens_within(self, limit: int, batch: int = 1) -> int | None:
        """The longest prompt that `batch` sequences can each have in `limit` bytes; None if there is no limit.

        0 if not even one token fits. A shorter prompt may take more, as long as nothing of it is packed.
        """
        if self.shapes is None:
            return self.size.tokens_within(limit, batch)
        if self.bytes_at(MANY, batch) <= limit:
            return None
        period = period_of(self.method)
        if self.method.byte_budget is not None:
            # What fits into a larger budget of its own only because tokens were evicted does not count.
            return largest_fitting(
                lambda n: self.kept_at(n, batch) == n and self.bytes_at(n, batch) <= limit, MANY, period
            )
        prompts = range(1, MANY + 1)

        def shortest(kept: int) -> int:
            return prompts[bisect_left(prompts, kept, key=self.kept_at)]

        most = largest_fitting(lambda kept: self.bytes_at(shortest(kept), batch) <= limit, self.kept_at(MANY), period)
        if not most:
            return 0
        first = shortest(most)
        alike = prompts[first - 1 : bisect_right(prompts, self.kept_at(first), key=self.kept_at)]
        return alike[bisect_right(alike, limit, key=lambda prompt: self.bytes_at(prompt, batch)) - 1]

    def users_within(self, limit: int, context: int) -> int | None:
        """How many sequences of `context` tokens fit into `limit` bytes; None if they take no bytes."""
        if self.method.byte_budget is None:
            each = self.bytes_at(context)
            return limit // each if each else None

        def fits(users: int) -> bool:
            try:
                return self.bytes_at(context, users) <= limit
            except ValueError:  # less than a token for each
                return False

        return largest_fitting(fits)


def plain_shapes(size: KVSize, method: Method) -> Counter[LayerShape]:
    """How many layers there are of each shape. Raises ValueError where `method` cannot store one of them."""
    shapes: Counter[LayerShape] = Counter()
    for index, layer in enumerate(size.layers):
        if layer.kind not in ("full", "sliding", "chunked") or layer.attention == "MLA" or layer.indexer_dim:
            kind = layer.attention or layer.kind
            raise ValueError(
                f"{method} cannot run on layer {index} of {size.model_type} ({kind}): only 'exact' has a size"
            )
        shape = LayerShape(layer.heads, layer.key_dim, layer.value_dim, size.itemsize, layer.window)
        if shape.window is None:
            method.check_layer(shape)
        shapes[shape] += 1
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
