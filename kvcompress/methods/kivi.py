"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from dataclasses import dataclass
from typing import ClassVar

from kvcompress.formats.affine import Affine
from kvcompress.formats.base import Kind
from kvcompress.methods.options import check_count
from kvcompress.methods.packing import Packing


@dataclass(frozen=True)
class KIVI(Packing):
    """Quantise keys per channel in groups of tokens and values per token in groups of channels (arXiv 2402.02750).

    Keys, rotary applied, are packed in steps of `residual` tokens in groups of `group_size` tokens (algorithm 1);
    values in groups of `min(group_size, D)` channels, all but the last `residual`. Codes are asymmetric and come
    from the fp32 minimum and scale, which are stored in fp16. A token attends in full precision before it is packed;
    nothing is quantised twice. Acts on every call, each chunk of a chunked prefill included.

    The paper has 2 and 4 bits. Codes of 3, 5, 6 and 7 bits leave bits of their 16-bit words unused, and like those of
    1 bit have no fast kernels.
    """

    bits: int = 2
    group_size: int = 32
    residual: int = 128

    name: ClassVar[str] = "kivi"
    always_shown: ClassVar[tuple[str, ...]] = ("bits",)

    def check(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be 1 to 8, got {self.bits!r}; the paper has 2 and 4")
        check_count("group_size", self.group_size)
        check_count("residual", self.residual)
        if self.residual % self.group_size:
            raise ValueError(
                f"residual must be a multiple of group_size: {self.residual} is not one of {self.group_size}; "
                f"give {max(1, self.residual // self.group_size) * self.group_size}"
            )

    def format(self, kind: Kind) -> Affine:
        return Affine(self.bits, self.group_size)
