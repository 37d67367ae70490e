"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from dataclasses import dataclass
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

    @property
    def packing(self) -> "KIVI | None":
        return self

    def new_store(self, rows: int, front: int = 0, with_scores: bool = False) -> PackedStore:
        return PackedStore(rows, self.bits, self.group_size, self.residual, front, with_scores)

    def stored_bytes(self, layer: LayerShape, kept: int, seen: int) -> int:
        return self.packed_bytes(layer, kept)

    def packed_bytes(self, layer: LayerShape, tokens: int, front: int = 0) -> int:
        """Bytes of one row's codes, scales, minima and residual right after a prefill that kept `tokens` tokens."""
        if layer.window is not None:
            return layer.exact_bytes(tokens)
        rest = max(0, tokens - front)
        keys, values = rest - rest % self.residual, max(0, rest - self.residual)
        per_word = codes_per_word(self.bits)
        key_words = -(-keys // LANES) * LANES * -(-layer.key_dim // per_word) * 2
        value_words = -(-values // per_word) * layer.value_dim * 2
        key_scales = keys // self.group_size * layer.key_dim * 4
        value_scales = values * (layer.value_dim // min(self.group_size, layer.value_dim)) * 4
        full = (tokens - keys) * layer.key_dim + (tokens - values) * layer.value_dim
        return layer.heads * (key_words + value_words + key_scales + value_scales + full * layer.itemsize)
