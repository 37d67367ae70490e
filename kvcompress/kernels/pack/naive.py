"""Quantising and packing in plain torch: the truth that the fast kernels are tested against (see `layout.py`)."""

import torch
from torch import Tensor

from kvcompress.kernels.layout import LANES, PackedKeys, PackedValues, codes_per_word


def quantise(x: Tensor, bits: int, alive: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric codes of groups that lie along the last dimension (KIVI, arXiv 2402.02750, section 3.1).

    `x` [..., g]; `alive` (same shape, bool) leaves elements out of the group's range: their codes mean nothing.
    Returns codes uint8 [..., g], scale and minimum fp16 [..., 1]. Codes come from the fp32 scale and minimum, which
    are rounded to fp16 only afterwards. A constant group gets scale 0 and codes 0.
    """
    x = x.float()
    if alive is None:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    else:
        low = x.masked_fill(~alive, torch.inf).amin(-1, keepdim=True)
        high = x.masked_fill(~alive, -torch.inf).amax(-1, keepdim=True)
        empty = low > high
        low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
        x = torch.where(alive, x, low)
    top = 2**bits - 1
    scale = (high - low) / top
    codes = ((x - low) / scale.masked_fill(scale == 0, 1)).clamp_(0, top).round_().to(torch.uint8)
    return codes, scale.half(), low.half()


def pack_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Puts `16 // bits` neighbouring codes along `dim` into one int16 word; a last incomplete word ends in zeros."""
    per_word = codes_per_word(bits)
    codes = codes.movedim(dim, -1)
    missing = -codes.shape[-1] % per_word
    codes = torch.nn.functional.pad(codes, (0, missing)).to(torch.int32)
    shifts = torch.arange(per_word, device=codes.device, dtype=torch.int32) * bits
    words = (codes.unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)
    return words.to(torch.int16).movedim(-1, dim)


def unpack_words(words: Tensor, bits: int, dim: int, count: int) -> Tensor:
    """The inverse of `pack_words`: the first `count` codes along `dim`, uint8."""
    per_word = codes_per_word(bits)
    words = words.movedim(dim, -1).to(torch.int32)
    shifts = torch.arange(per_word, device=words.device, dtype=torch.int32) * bits
    codes = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8).movedim(-1, dim)


def key_words(codes: Tensor, bits: int) -> Tensor:
    """Key codes uint8 [B, H, T, D], T a multiple of 32, as words [B, H, T/32, ceil(D/c), 32]."""
    return pack_words(codes.unflatten(2, (-1, LANES)), bits, dim=-1).transpose(-1, -2)


def dequantise_keys(packed: PackedKeys, start: int, stop: int, head_dim: int) -> Tensor:
    """Tokens [start, stop) as fp32 [B, H, stop - start, D]; `start` a multiple of 32."""
    blocks = packed.words[:, :, start // LANES : -(-stop // LANES)]
    codes = unpack_words(blocks, packed.bits, 3, head_dim).transpose(-1, -2).flatten(2, 3)[:, :, : stop - start]
    group = torch.arange(start, stop, device=codes.device) // packed.group_size
    return codes * packed.scale[:, :, group].float() + packed.minimum[:, :, group].float()


def dequantise_values(packed: PackedValues, start: int, stop: int) -> Tensor:
    """Tokens [start, stop) as fp32 [B, H, stop - start, D]; `start` a multiple of 8."""
    per_word = codes_per_word(packed.bits)
    words = packed.words[:, :, start // per_word : -(-stop // per_word)]
    codes = unpack_words(words, packed.bits, 2, stop - start).unflatten(-1, (-1, packed.group_size))
    scale, minimum = packed.scale[:, :, start:stop, :, None].float(), packed.minimum[:, :, start:stop, :, None].float()
    return (codes * scale + minimum).flatten(-2)
