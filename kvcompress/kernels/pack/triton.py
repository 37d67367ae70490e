"""Quantises keys or values and writes their codes, scales and minima on a GPU, in one pass, in Triton.

The codes are those of `naive.quantise`: the same divisions, rounded as IEEE says, in the same order. Shapes in the
kernels are powers of two: DIM holds the head dim.
"""

# Triton's annotations do not say which of its results are tuples.
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompress.kernels.attention.triton import LANES
from kvcompress.kernels.layout import KERNEL_BITS, PackedKeys, PackedValues, codes_per_word, gapless

TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away again, it rounds half to even


@triton.jit
def quantised(x, low, high, BITS: tl.constexpr):
    """Codes of `x` as int32, and their scale; `low` and `high` are as wide as `x` where it counts."""
    top: tl.constexpr = 2**BITS - 1
    scale = tl.div_rn(high - low, tl.full(low.shape, top, tl.float32))
    divisor = tl.where(scale == 0, 1.0, scale)
    steps = tl.div_rn(x - low, tl.broadcast_to(divisor, x.shape))
    steps = tl.minimum(tl.maximum(steps, 0.0), top)
    return ((steps + TO_INTEGER) - TO_INTEGER).to(tl.int32), scale


@triton.jit
def pack_keys(
    x,
    words,
    scale,
    minimum,
    first,
    heads,
    dim,
    x_strides,  # in numbers: row, head, token
    word_strides,  # row, head
    scale_strides,  # row, head
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    """One group of GROUP tokens of one KV head, from token `first` of the packed ones on."""
    PER_WORD: tl.constexpr = 16 // BITS
    head, row = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    number, channel = tl.arange(0, GROUP)[:, None], tl.arange(0, DIM)[None, :]
    place = x + row * x_strides[0] + head * x_strides[1] + (group * GROUP + number) * x_strides[2] + channel
    data = tl.load(place, mask=channel < dim, other=0.0).to(tl.float32)
    low, high = tl.min(data, 0, keep_dims=True), tl.max(data, 0, keep_dims=True)
    codes, steps = quantised(data, low, high, BITS)
    place = row * scale_strides[0] + head * scale_strides[1] + (first // GROUP + group) * dim + channel
    tl.store(scale + place, steps.to(tl.float16), mask=channel < dim)
    tl.store(minimum + place, low.to(tl.float16), mask=channel < dim)
    shift = BITS * tl.arange(0, PER_WORD)[None, None, :]
    packed = tl.sum(tl.reshape(codes, (GROUP, DIM // PER_WORD, PER_WORD)) << shift, 2)
    token, word = first + group * GROUP + number, tl.arange(0, DIM // PER_WORD)[None, :]
    place = (token // LANES * (dim // PER_WORD) + word) * LANES + token % LANES
    words += row * word_strides[0] + head * word_strides[1]
    tl.store(words + place, packed.to(tl.int16), mask=word < dim // PER_WORD)


@triton.jit
def pack_values(
    x,
    words,
    scale,
    minimum,
    first,
    stop,
    heads,
    dim,
    x_strides,
    word_strides,
    scale_strides,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One line of words of one KV head: `16 // BITS` tokens; `first` to `stop` are new. GROUPS · GROUP = DIM."""
    PER_WORD: tl.constexpr = 16 // BITS
    head, row = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    word = first // PER_WORD + tl.program_id(1).to(tl.int64)
    number = tl.arange(0, PER_WORD)[:, None]
    token, channel = word * PER_WORD + number, tl.arange(0, DIM)[None, :]
    new = (token >= first) & (token < stop)
    place = x + row * x_strides[0] + head * x_strides[1] + (token - first) * x_strides[2] + channel
    data = tl.load(place, mask=new & (channel < dim), other=0.0).to(tl.float32)
    grouped = tl.reshape(data, (PER_WORD, GROUPS, GROUP))
    inside = tl.reshape(tl.broadcast_to(channel < dim, (PER_WORD, DIM)), (PER_WORD, GROUPS, GROUP))
    low = tl.min(tl.where(inside, grouped, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(inside, grouped, float("-inf")), 2, keep_dims=True)
    low, high = tl.where(low > high, 0.0, low), tl.where(low > high, 0.0, high)
    codes, steps = quantised(grouped, low, high, BITS)
    groups = tl.cdiv(dim, GROUP)
    group = tl.arange(0, GROUPS)[None, :]
    place = row * scale_strides[0] + head * scale_strides[1] + token * groups + group
    known = new & (group < groups)
    tl.store(scale + place, tl.reshape(steps, (PER_WORD, GROUPS)).to(tl.float16), mask=known)
    tl.store(minimum + place, tl.reshape(low, (PER_WORD, GROUPS)).to(tl.float16), mask=known)
    fresh = tl.sum(tl.where(new, tl.reshape(codes, (PER_WORD, DIM)) << (BITS * number), 0), 0)
    line = words + row * word_strides[0] + head * word_strides[1] + word * dim + tl.arange(0, DIM)
    known = tl.arange(0, DIM) < dim
    kept = tl.maximum(first - word * PER_WORD, 0)  # codes that were there before
    old = tl.load(line, mask=known, other=0).to(tl.int32) & ((1 << (BITS * kept)) - 1)
    tl.store(line, (old | fresh).to(tl.int16), mask=known)


def quantise_and_pack(x: Tensor, into: PackedKeys | PackedValues, offset: int) -> bool:
    """See `kvcompress.kernels.choose.quantise_and_pack`."""
    batch, heads, tokens, dim = x.shape
    group, bits, known = into.group_size, into.bits, (torch.float32, torch.bfloat16, torch.float16)
    whole_words = bits in KERNEL_BITS and x.dtype in known and x.stride(-1) == 1 and dim % codes_per_word(bits) == 0
    if not whole_words or not all(gapless(tensor) for tensor in into[:3]):
        return False
    power = group & (group - 1) == 0
    width = triton.next_power_of_2(dim)
    strides = x.stride()[:3], into.words.stride()[:2], into.scale.stride()[:2]
    if isinstance(into, PackedKeys):
        if not power or group % 32 or offset % group or tokens % group:
            return False
        grid = (batch * heads, tokens // group)
        launch: Any = pack_keys[grid]
        launch(x, *into[:3], offset, heads, dim, *strides, BITS=bits, GROUP=group, DIM=width)
        return True
    if not power and group != dim:
        return False
    per_word, stop = codes_per_word(bits), offset + tokens
    grid = (batch * heads, -(-stop // per_word) - offset // per_word)
    group = width if group == dim else group
    sizes = {"BITS": bits, "GROUP": group, "GROUPS": width // group, "DIM": width}
    launch = pack_values[grid]
    launch(x, *into[:3], offset, stop, heads, dim, *strides, **sizes)
    return True
