"""Every kernel in plain torch: the truth that the fast ones are tested against.

B batch, H KV heads, G query heads per KV head, M rows of queries, T new tokens, S stored tokens, D head dim.
All arithmetic is in fp32 whatever the dtype of what is stored.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from kvcompress.kernels.layout import LANES, PackedKeys, PackedValues, codes_per_word

QUERY_BLOCK = 256  # queries whose logits exist at one time
TOKEN_TILE = 1024  # packed tokens that are dequantised at one time


class Stored(Protocol):
    """Keys and values that can be attended to, in whatever form they are stored."""

    @property
    def length(self) -> int: ...

    def logits(self, query: Tensor) -> Tensor:
        """`query` fp32 [B, H, M, D] times the keys: fp32 [B, H, M, S]."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times the values: fp32 [B, H, M, D]."""
        ...


Allowed = Callable[[int, int], Tensor | None]
"""From a range of query columns to a mask broadcastable to [B, H, T, S]; None where everything may be seen."""


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


def packed_logits(query: Tensor, packed: PackedKeys, count: int) -> Tensor:
    """fp32 [B, H, M, D] times the first `count` packed keys: fp32 [B, H, M, count], a tile dequantised at a time."""
    out = query.new_empty(*query.shape[:3], count)
    for start in range(0, count, TOKEN_TILE):
        stop = min(start + TOKEN_TILE, count)
        keys = dequantise_keys(packed, start, stop, query.shape[-1])
        out[..., start:stop] = query @ keys.transpose(-1, -2)
    return out


def packed_mix(weights: Tensor, packed: PackedValues, count: int) -> Tensor:
    """fp32 [B, H, M, count] times the first `count` packed values: fp32 [B, H, M, D], a tile at a time."""
    out = weights.new_zeros(*weights.shape[:3], packed.words.shape[-1])
    for start in range(0, count, TOKEN_TILE):
        stop = min(start + TOKEN_TILE, count)
        out += weights[..., start:stop] @ dequantise_values(packed, start, stop)
    return out


def softmax(logits: Tensor, allowed: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Row-wise softmax in place of fp32 `logits` [B, H, G, T, S], with what models put around it.

    `softcap` bounds the logits as in Gemma 2; `sinks` [H, G] are gpt-oss's extra logits that take weight and give
    nothing. A row that may see nothing (a padding query) becomes zeros, not NaN.
    """
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if allowed is not None:
        logits.masked_fill_(~allowed, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    extra = None if sinks is None else sinks.float()[None, :, :, None, None]
    if extra is not None:
        top = torch.maximum(top, extra)
    top.masked_fill_(top == -torch.inf, 0)
    logits.sub_(top).exp_()
    total = logits.sum(-1, keepdim=True)
    if extra is not None:
        total = total + (extra - top).exp()
    return logits.div_(total.masked_fill_(total == 0, 1))


def attend(
    query: Tensor,
    stored: Stored,
    allowed: Allowed,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` [B, H, G, T, D] over everything stored, a block of queries at a time.

    Returns the output [B, H, G, T, D] in the query's dtype and, where asked for, the column sums (see below). Beside
    these it holds the logits of one block.
    """
    outputs, sums = [], None
    for weights in _weights(query, stored, allowed, scaling, softcap, sinks):
        outputs.append(stored.mix(weights.flatten(2, 3)).view(*weights.shape[:-1], -1).to(query.dtype))
        if sum_columns:
            sums = _add_columns(sums, weights)
    return torch.cat(outputs, 3), sums


def column_sums(
    query: Tensor,
    stored: Stored,
    allowed: Allowed,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The sum over queries of each key's softmax column, averaged over the G query heads: fp32 [B, H, S]."""
    sums = None
    for weights in _weights(query, stored, allowed, scaling, softcap, sinks):
        sums = _add_columns(sums, weights)
    assert sums is not None
    return sums


def _weights(
    query: Tensor, stored: Stored, allowed: Allowed, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Iterator[Tensor]:
    """Softmax weights fp32 [B, H, G, T, S] of one block of queries after the other."""
    batch, heads, groups, columns, _ = query.shape
    for start in range(0, columns, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, columns)
        block = query[..., start:stop, :].float() * scaling
        logits = stored.logits(block.flatten(2, 3)).view(batch, heads, groups, stop - start, stored.length)
        mask = allowed(start, stop)
        yield softmax(logits, None if mask is None else mask.unsqueeze(2), softcap, sinks)


def _add_columns(sums: Tensor | None, weights: Tensor) -> Tensor:
    columns = weights.sum(3).mean(2)
    return columns if sums is None else sums.add_(columns)
