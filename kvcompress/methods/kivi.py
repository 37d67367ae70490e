"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from dataclasses import dataclass
from math import lcm
from typing import ClassVar, Literal

from kvcompress.budget import LayerShape
from kvcompress.kernels.layout import LANES, codes_per_word
from kvcompress.methods.base import Acts, Method
from kvcompress.methods.options import check_count
from kvcompress.stores.packed import PackedStore


@dataclass(frozen=True)
class KIVI(Method):
    """Quantise keys per channel in groups of tokens and values per token in groups of channels (arXiv 2402.02750).

    Keys, rotary applied, are packed in steps of `residual` tokens in groups of `group_size` tokens (algorithm 1);
    values in groups of `min(group_size, D)` channels, all but the last `residual`. Codes are asymmetric and come
    from the fp32 minimum and scale, which are stored in fp16. A token attends in full precision before it is packed;
    nothing is quantised twice. Acts on every call, each chunk of a chunked prefill included.
    """

    bits: Literal[2, 4] = 2
    group_size: int = 32
    residual: int = 128

    name: ClassVar[str] = "kivi"
    acts: ClassVar[Acts] = "every_call"
    always_shown: ClassVar[tuple[str, ...]] = ("bits",)

    def check(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (2, 4):
            raise ValueError(f"bits must be 2 or 4, got {self.bits!r}")
        check_count("group_size", self.group_size)
        check_count("residual", self.residual)
        if self.residual % self.group_size:
            raise ValueError(
                f"residual must be a multiple of group_size: {self.residual} is not one of {self.group_size}; "
                f"give {max(1, self.residual // self.group_size) * self.group_size}"
            )

    def check_layer(self, layer: LayerShape) -> None:
        if layer.value_dim % min(self.group_size, layer.value_dim):
            raise ValueError(
                f"kivi's group_size {self.group_size} does not divide the model's head dim {layer.value_dim}; "
                f"choose a divisor of {layer.value_dim}"
            )

    @property
    def packing(self) -> "KIVI | None":
        return self

    def new_store(self, rows: int, front: int = 0, with_scores: bool = False) -> PackedStore:
        return PackedStore(rows, self.bits, self.group_size, self.residual, front, with_scores)

    @property
    def unit(self) -> int:
        """Packed tokens whose bytes come back together once all of them are evicted."""
        return lcm(self.group_size, LANES)

    def stored_bytes(self, layer: LayerShape, kept: list[int], seen: list[int]) -> int:
        return self.prefilled_bytes(layer, kept)

    def prefilled_bytes(self, layer: LayerShape, tokens: list[int], front: int = 0) -> int:
        """Bytes of all rows' codes, scales, minima and residual right after a prefill that kept `tokens[b]` tokens."""
        packs = [count >= front + self.residual for count in tokens]
        fronts = [front if each else 0 for each in packs]
        rest = [count - apart for count, apart in zip(tokens, fronts, strict=True)]
        keys = [count - count % self.residual if each else 0 for count, each in zip(rest, packs, strict=True)]
        values = [count - self.residual if each else 0 for count, each in zip(rest, packs, strict=True)]
        tails = (max(count - packed for count, packed in zip(rest, part, strict=True)) for part in (keys, values))
        # A part of any row is as long as the longest row's.
        return len(tokens) * self.bytes_of_parts(layer, max(fronts), (max(keys), max(values)), *tails)

    def bytes_of_parts(
        self, layer: LayerShape, front: int, packed: tuple[int, int], key_tail: int, value_tail: int
    ) -> int:
        """Bytes of one row of so many tokens: first ones apart, packed keys and values, and those not packed yet."""
        keys, values = packed
        per_word = codes_per_word(self.bits)
        key_words = -(-keys // LANES) * LANES * -(-layer.key_dim // per_word) * 2
        value_words = -(-values // per_word) * layer.value_dim * 2
        key_scales = -(-keys // self.group_size) * layer.key_dim * 4
        value_scales = values * (layer.value_dim // min(self.group_size, layer.value_dim)) * 4
        full = (front + key_tail) * layer.key_dim + (front + value_tail) * layer.value_dim
        return layer.heads * (key_words + value_words + key_scales + value_scales + full * layer.itemsize)
