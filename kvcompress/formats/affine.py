"""Codes of a few bits with a scale and a minimum a group, as KIVI packs them (arXiv 2402.02750)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from kvcompress.formats.base import Format, Kind, Part
from kvcompress.kernels import choose
from kvcompress.kernels.layout import LANES, PackedKeys, PackedValues, codes_per_word
from kvcompress.kernels.pack import naive


@dataclass(frozen=True)
class Affine(Format):
    """code · scale + minimum: keys per channel in groups of tokens, values per token in groups of channels.

    `bits` is 1 to 8, in words of 16 bits that hold `16 // bits` codes; see `kernels/layout.py`. Values take groups of
    `min(group_size, D)` channels, which must divide D. Codes come from the fp32 minimum and scale, which are then
    stored, and read, in fp16. Tokens that are not alive leave their group's range alone.
    """

    bits: int
    group_size: int

    def parts(self, kind: Kind, dim: int) -> dict[str, Part]:
        per_word = codes_per_word(self.bits)
        if kind == "keys":
            words = Part((-(-dim // per_word), LANES), torch.int16, LANES)
            scale = Part((dim,), torch.float16, self.group_size, is_scale=True)
        else:
            words = Part((dim,), torch.int16, per_word)
            scale = Part((dim // self._channels(dim),), torch.float16, is_scale=True)
        return {"words": words, "scale": scale, "minimum": scale}

    def check(self, kind: Kind, dim: int) -> None:
        if kind == "values" and dim % self._channels(dim):
            raise ValueError(
                f"the group_size {self.group_size} does not divide the model's head dim {dim}; "
                f"choose a divisor of {dim}"
            )

    def group(self, kind: Kind) -> int:
        return self.group_size if kind == "keys" else 1

    def grain(self, kind: Kind) -> int:
        return lcm(self.group_size, LANES) if kind == "keys" else codes_per_word(self.bits)

    def operand(self, kind: Kind, held: Mapping[str, Tensor]) -> PackedKeys | PackedValues:
        if kind == "keys":
            return PackedKeys(held["words"], held["scale"], held["minimum"], self.bits, self.group_size)
        words = held["words"]
        return PackedValues(words, held["scale"], held["minimum"], self.bits, self._channels(words.shape[-1]))

    def write(self, kind: Kind, into: Mapping[str, Tensor], offset: int, x: Tensor, alive: Tensor | None) -> None:
        if alive is None and choose.quantise_and_pack(x, self.operand(kind, into), offset):
            return
        along = 2 if kind == "keys" else 3
        group = self.group_size if kind == "keys" else self._channels(x.shape[-1])
        mask = None if alive is None else _grouped(alive, along, group)
        codes, scale, minimum = naive.quantise(_grouped(x, along, group), self.bits, mask)
        codes = codes.movedim(-1, along + 1).flatten(along, along + 1)
        tokens = self.group(kind)
        place = slice(offset // tokens, (offset + x.shape[2]) // tokens)
        into["scale"][:, :, place] = scale.squeeze(-1)
        into["minimum"][:, :, place] = minimum.squeeze(-1)
        (self._write_keys if kind == "keys" else self._write_values)(into["words"], offset, codes)

    def read(self, kind: Kind, held: Mapping[str, Tensor], start: int, stop: int, dim: int) -> Tensor:
        codes = self.operand(kind, held)
        if isinstance(codes, PackedKeys):
            return naive.dequantise_keys(codes, start, stop, dim)
        return naive.dequantise_values(codes, start, stop)

    def _channels(self, dim: int) -> int:
        return min(self.group_size, dim)

    def _write_keys(self, words: Tensor, offset: int, codes: Tensor) -> None:
        count = codes.shape[2]
        if offset % LANES == 0 and count % LANES == 0:
            words[:, :, offset // LANES : (offset + count) // LANES] = naive.key_words(codes, self.bits)
            return
        token = torch.arange(offset, offset + count, device=codes.device)
        packed = naive.pack_words(codes, self.bits, -1)
        words[:, :, token // LANES, :, token % LANES] = packed.permute(2, 0, 1, 3)

    def _write_values(self, words: Tensor, offset: int, codes: Tensor) -> None:
        per_word = codes_per_word(self.bits)
        word, lead = offset // per_word, offset % per_word
        if lead:
            before = naive.unpack_words(words[:, :, word : word + 1], self.bits, 2, lead)
            codes = torch.cat([before, codes], 2)
        packed = naive.pack_words(codes, self.bits, 2)
        words[:, :, word : word + packed.shape[2]] = packed


def _grouped(x: Tensor, along: int, size: int) -> Tensor:
    """`x` [B, H, T, D] with each group of dimension `along` as the last dimension."""
    return x.unflatten(along, (-1, size)).movedim(along + 1, -1)
