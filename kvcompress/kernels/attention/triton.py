"""Decode attention on a GPU, in Triton: split over the slots, merged by their log-sum-exp.

A program takes one part of one row's slots for one KV head with all its M = G·T rows of queries. It dequantises one
tile of tokens at a time, in registers. What it leaves, [D sums, largest logit, sum of weights] for each query, a
second kernel merges. Arithmetic is in fp32; queries of 16 bits are multiplied in 16 bits, with sums in fp32 (but in
fp32 where Triton's interpreter runs the kernels on a CPU, which has no such product).

Shapes in the kernels are powers of two: DIM holds the head dim, ROWS the queries, WORDS the words of a token's key.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompress.kernels.host import on_device
from kvcompress.kernels.layout import KERNEL_BITS, TABLES, Range, codes_per_word, gapless
from kvcompress.kernels.softmax import Softmax

SMALL_TILE, LARGE_TILE = 32, 64  # tokens; what a program holds must fit into its multiprocessor
LANES = tl.constexpr(32)
MASKED = tl.constexpr(-1e30)  # a logit that gets no weight
LOWEST = tl.constexpr(-1e29)  # no real logit is below
PROGRAMS = 4  # for each multiprocessor
MOST_ROWS = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def packed_keys(
    words, scale, minimum, start, stop, dim, group, BITS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr
):
    """Keys fp32 [DIM, TILE] from token `start` on, a multiple of 32; zeros from `stop` on and beyond the head dim."""
    PER_WORD: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = DIM // PER_WORD
    BLOCKS: tl.constexpr = TILE // LANES
    word = tl.arange(0, WORDS)[:, None, None]
    block = start // LANES + tl.arange(0, BLOCKS)
    lane = tl.arange(0, LANES)[None, None, :]
    alive = (block * LANES < stop)[None, :, None]
    words_of_token = dim // PER_WORD
    place = (block[None, :, None] * words_of_token + word) * LANES + lane
    packed = tl.load(words + place, mask=alive & (word < words_of_token), other=0).to(tl.int32)
    shift = BITS * tl.arange(0, PER_WORD)[None, :, None, None]
    codes = (packed[:, None] >> shift) & (2**BITS - 1)
    channel = tl.arange(0, DIM)[:, None]
    place = (block * LANES // group)[None, :] * dim + channel
    known = (block * LANES < stop)[None, :] & (channel < dim)
    step = tl.load(scale + place, mask=known, other=0.0).to(tl.float32)
    low = tl.load(minimum + place, mask=known, other=0.0).to(tl.float32)
    keys = tl.reshape(codes, (DIM, BLOCKS, LANES)).to(tl.float32) * step[:, :, None] + low[:, :, None]
    return tl.reshape(keys, (DIM, TILE))


@triton.jit
def packed_values(
    words,
    scale,
    minimum,
    start,
    stop,
    dim,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Values fp32 [TILE, DIM] from token `start` on, the first of a word; zeros from `stop` on.

    GROUPS groups of GROUP channels make DIM; what is beyond the head dim means nothing.
    """
    PER_WORD: tl.constexpr = 16 // BITS
    word = start // PER_WORD + tl.arange(0, TILE // PER_WORD)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    alive = (word * PER_WORD < stop) & (channel < dim)
    packed = tl.load(words + word * dim + channel, mask=alive, other=0).to(tl.int32)
    shift = BITS * tl.arange(0, PER_WORD)[None, :, None]
    codes = tl.reshape((packed[:, None] >> shift) & (2**BITS - 1), (TILE, GROUPS, GROUP)).to(tl.float32)
    token = start + tl.arange(0, TILE)[:, None]
    group = tl.arange(0, GROUPS)[None, :]
    groups = tl.cdiv(dim, GROUP)
    known = (token < stop) & (group < groups)
    step = tl.load(scale + token * groups + group, mask=known, other=0.0).to(tl.float32)
    low = tl.load(minimum + token * groups + group, mask=known, other=0.0).to(tl.float32)
    return tl.reshape(codes * step[:, :, None] + low[:, :, None], (TILE, DIM))


@triton.jit
def attend_tile(query, keys, values, seen, scaling, softcap, sums, top, total, CAPPED: tl.constexpr):
    """One step of online softmax: query [ROWS, DIM], keys [DIM, TILE], values [TILE, DIM], seen [ROWS, TILE]."""
    logits = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * scaling
    if CAPPED:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    logits = tl.where(seen, logits, MASKED)
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.where(seen, tl.exp(logits - new_top[:, None]), 0.0)
    factor = tl.exp(top - new_top)
    mixed = tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision="ieee")
    return sums * factor[:, None] + mixed, new_top, total * factor + tl.sum(weights, 1)


@triton.jit
def full_rows(place, slot, start, stop, dim, DIM: tl.constexpr, TILE: tl.constexpr):
    """Rows in full precision, fp32 [TILE, DIM], of the tokens `start` to `stop`; zeros elsewhere."""
    token = start + tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    alive = (token >= 0) & (token < stop) & (channel < dim)
    return tl.load(place + token * slot + channel, mask=alive, other=0.0).to(tl.float32)


@triton.jit
def decode(
    query,  # [B, H, M, D]
    front_query,  # the same for the tokens of the front
    left,  # fp32 [B, H, all parts, ROWS, DIM + 2]
    counts,  # int64 tables as `layout.TABLES` names them
    allowed,
    front_keys,
    front_values,
    tail_keys,
    tail_values,
    key_words,
    key_scale,
    key_minimum,
    value_words,
    value_scale,
    value_minimum,
    scaling,
    softcap,
    heads,
    queries,
    columns,
    dim,
    parts,
    all_parts,
    part_offset,
    key_group,
    count_strides,
    allowed_strides,
    front_key_strides,
    front_value_strides,
    tail_key_strides,
    tail_value_strides,
    key_word_strides,
    key_scale_strides,
    value_word_strides,
    value_scale_strides,
    PACKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED_SLOTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One part of one row and KV head. Strides are tuples, in numbers: row, head, slot (a mask's third is column).

    Of the counts they are those of table, row and head.
    """
    part = tl.program_id(1)
    head, row = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    place = counts + row * count_strides[1] + head * count_strides[2]
    front, keys_held = tl.load(place), tl.load(place + count_strides[0])
    values_held, length = tl.load(place + 2 * count_strides[0]), tl.load(place + 3 * count_strides[0])
    first_packed, first_of_tail = tl.load(place + 4 * count_strides[0]), tl.load(place + 5 * count_strides[0])
    number, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    place = ((row * heads + head) * queries + number) * dim + channel
    q = tl.load(query + place, mask=(number < queries) & (channel < dim), other=0.0)
    turned = tl.load(front_query + place, mask=(number < queries) & (channel < dim), other=0.0)
    if WIDE:
        q, turned = q.to(tl.float32), turned.to(tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    top, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    column = (number % columns).to(tl.int64)
    mask_place = allowed + row * allowed_strides[0] + head * allowed_strides[1] + column * allowed_strides[2]
    ahead = tl.where(part == 0, tl.cdiv(front, TILE), 0)
    tiles = tl.cdiv(length - front, TILE)
    share = tl.cdiv(tiles, parts)
    first, last = part * share, tl.minimum((part + 1) * share, tiles)
    for tile in range(first - ahead, last):
        in_front = tile < first
        # Tokens count from 0 in the front, and again from 0 behind it.
        start = tl.where(in_front, (tile - first + ahead) * TILE, tile * TILE)
        end = tl.where(in_front, front, length - front)
        slot = tl.where(in_front, 0, front) + start + tl.arange(0, TILE)[None, :]
        seen = (start + tl.arange(0, TILE)[None, :] < end) & (number < queries)
        if MASKED_SLOTS:
            seen = seen & (tl.load(mask_place + slot, mask=seen, other=0) != 0)
        if in_front:
            base = front_keys + row * front_key_strides[0] + head * front_key_strides[1]
            keys = tl.trans(full_rows(base, front_key_strides[2], start, end, dim, DIM, TILE))
            base = front_values + row * front_value_strides[0] + head * front_value_strides[1]
            values = full_rows(base, front_value_strides[2], start, end, dim, DIM, TILE)
        else:
            keys, values = tl.zeros((DIM, TILE), tl.float32), tl.zeros((TILE, DIM), tl.float32)
            if PACKED:
                if start < keys_held:
                    base = row * key_scale_strides[0] + head * key_scale_strides[1]
                    words = key_words + row * key_word_strides[0] + head * key_word_strides[1]
                    held = packed_keys(
                        words,
                        key_scale + base,
                        key_minimum + base,
                        first_packed + start,
                        first_packed + keys_held,
                        dim,
                        key_group,
                        KEY_BITS,
                        DIM,
                        TILE,
                    )
                    keys += held
                if start < values_held:
                    base = row * value_scale_strides[0] + head * value_scale_strides[1]
                    words = value_words + row * value_word_strides[0] + head * value_word_strides[1]
                    values += packed_values(
                        words,
                        value_scale + base,
                        value_minimum + base,
                        first_packed + start,
                        first_packed + values_held,
                        dim,
                        VALUE_BITS,
                        GROUP,
                        GROUPS,
                        DIM,
                        TILE,
                    )
            if start + TILE > keys_held:
                base = tail_keys + row * tail_key_strides[0] + head * tail_key_strides[1]
                base += first_of_tail * tail_key_strides[2]
                keys += tl.trans(
                    full_rows(base, tail_key_strides[2], start - keys_held, end - keys_held, dim, DIM, TILE)
                )
            if start + TILE > values_held:
                base = tail_values + row * tail_value_strides[0] + head * tail_value_strides[1]
                base += first_of_tail * tail_value_strides[2]
                values += full_rows(base, tail_value_strides[2], start - values_held, end - values_held, dim, DIM, TILE)
        sums, top, total = attend_tile(
            tl.where(in_front, turned, q), keys, values, seen, scaling, softcap, sums, top, total, CAPPED
        )
    line = left + ((tl.program_id(0).to(tl.int64) * all_parts + part_offset + part) * ROWS + tl.arange(0, ROWS)) * (
        DIM + 2
    )
    tl.store(line[:, None] + channel, sums)
    tl.store(line + DIM, top)
    tl.store(line + DIM + 1, total)


@triton.jit
def merge(
    left,  # fp32 [B, H, parts, ROWS, DIM + 2]
    out,  # [B, H, M, D]
    sinks,  # fp32 [H, M / T]
    heads,
    queries,
    columns,
    dim,
    parts,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One query of one row and KV head; PARTS is a power of two that holds the parts."""
    number, of = tl.program_id(1), tl.program_id(0).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, DIM)
    line = left + ((of * parts + part) * ROWS + number) * (DIM + 2)
    tops = tl.load(line + DIM, mask=part < parts, other=LOWEST)
    totals = tl.load(line + DIM + 1, mask=part < parts, other=0.0)
    sums = tl.load(line[:, None] + channel[None, :], mask=(part < parts)[:, None], other=0.0)
    sink = tl.load(sinks + of % heads * (queries // columns) + number // columns)
    top = tl.maximum(tl.max(tops, 0), sink)
    factors = tl.exp(tops - top)
    total = tl.sum(totals * factors, 0) + tl.exp(sink - top)
    mixed = tl.sum(sums * factors[:, None], 0) / tl.where(total == 0, 1.0, total)
    place = out + (of * queries + number) * dim + channel
    tl.store(place, mixed.to(out.dtype.element_ty), mask=channel < dim)


def most_columns(groups: int) -> int:
    """See `kvcompress.kernels.choose.most_columns`."""
    return max(1, MOST_ROWS // groups)


def attend_decode(
    query: Tensor,
    ranges: Sequence[Range],
    allowed: Tensor | None,
    softmax: Softmax,
    front_query: Tensor | None = None,
) -> Tensor | None:
    """See `kvcompress.kernels.choose.attend_decode`."""
    if not takes(query, ranges):
        return None
    batch, heads, groups, columns, dim = query.shape
    rows, width = (1 << (number - 1).bit_length() for number in (max(16, groups * columns), dim))
    tile = LARGE_TILE if query.element_size() == 2 and width <= 128 else SMALL_TILE
    parts = [part_count(query.device, batch * heads, -(-each.width // tile)) for each in ranges]
    flat, device = query.contiguous(), query.device
    turned = flat if front_query is None else front_query.contiguous()
    out = torch.empty_like(flat)
    left = torch.empty(batch, heads, sum(parts), rows, width + 2, dtype=torch.float32, device=device)
    offset = 0
    for number, each in enumerate(ranges):
        counts = each.lines
        if counts is None:
            counts = on_device(each.tables, device).view(len(TABLES), -1, 1).expand(-1, -1, heads)
        seen = None if allowed is None else allowed[..., offset : offset + each.width]
        seen = None if seen is None else seen.expand(batch, heads, columns, -1)
        if seen is not None and seen.stride(-1) != 1:
            seen = seen.contiguous()
        launch: Any = decode[(batch * heads, parts[number])]
        launch(
            flat,
            turned,
            left,
            counts,
            counts if seen is None else seen.view(torch.int8),
            *operands(each),
            softmax.scaling,
            softmax.softcap or 0.0,
            heads,
            groups * columns,
            columns,
            dim,
            parts[number],
            sum(parts),
            sum(parts[:number]),
            each.keys.group_size if each.keys else 32,
            counts.stride(),
            (0, 0, 0) if seen is None else seen.stride()[:3],
            *strides(each),
            **constants(each, dim, width),
            ROWS=rows,
            DIM=width,
            TILE=tile,
            MASKED_SLOTS=seen is not None,
            CAPPED=softmax.softcap is not None,
            WIDE=query.device.type != "cuda",
        )
        offset += each.width
    launch = merge[(batch * heads, groups * columns)]
    launch(
        left,
        out,
        softmax.extra_logits(heads, groups, device),
        heads,
        groups * columns,
        columns,
        dim,
        sum(parts),
        ROWS=rows,
        DIM=width,
        PARTS=triton.next_power_of_2(sum(parts)),
    )
    return out


def full_parts(each: Range) -> list[Tensor]:
    """What is in full precision; the tail's keys stand in for a front that is not there, and are never read as one."""
    front = [each.tail_keys if part is None else part for part in (each.front_keys, each.front_values)]
    return [*front, each.tail_keys, each.tail_values]


def packed_parts(each: Range) -> list[Tensor]:
    """What is packed; the other ones, or else the tail's keys, stand in for what is not there yet and is never read."""
    some = each.keys or each.values
    found = []
    for codes in (each.keys or some, each.values or some):
        found += [each.tail_keys] * 3 if codes is None else [codes.words, codes.scale, codes.minimum]
    return found


def operands(each: Range) -> list[Tensor]:
    """The tensors of a range, as the kernel takes them."""
    return full_parts(each) + packed_parts(each)


def strides(each: Range) -> list[tuple[int, ...]]:
    """Their strides; the lines of KV heads that differ all begin at the same address."""
    packed = packed_parts(each)
    full = [part.stride()[:3] for part in full_parts(each)]
    pairs = [part.stride()[:2] for part in (packed[0], packed[1], packed[3], packed[4])]
    if each.lines is not None:
        full, pairs = [(0, 0, slot) for _, _, slot in full], [(0, 0) for _ in pairs]
    return [*full, *pairs]


def constants(each: Range, dim: int, width: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    keys, values = each.keys or each.values, each.values or each.keys
    group = width if each.values is None or each.values.group_size >= dim else each.values.group_size
    return {
        "PACKED": keys is not None,
        "KEY_BITS": keys.bits if keys else 2,
        "VALUE_BITS": values.bits if values else 2,
        "GROUP": group,
        "GROUPS": width // group,
    }


def takes(query: Tensor, ranges: Sequence[Range]) -> bool:
    """Whether the kernels have code for this case."""
    known = query.dtype in DTYPES and query.shape[-1] <= 256 and query.shape[2] * query.shape[3] <= MOST_ROWS
    return known and all(takes_range(each, query.shape[-1]) for each in ranges)


def takes_range(each: Range, dim: int) -> bool:
    """Whether the kernels have code for this range."""
    keys, values = each.keys, each.values
    full = [part for part in (each.tail_keys, each.tail_values, each.front_keys, each.front_values) if part is not None]
    if not each.width or any(part.dtype not in DTYPES for part in full):
        return False
    if any(part.shape[-1] != dim or part.stride(-1) != 1 for part in full):
        return False
    packed = [codes for codes in (keys, values) if codes is not None]
    if any(codes.bits not in KERNEL_BITS or dim % codes_per_word(codes.bits) for codes in packed):
        return False
    if keys is not None and (keys.group_size % 32 or any(count % 32 for count in each.key_counts)):
        return False
    groups_fit = values is None or values.group_size >= dim or values.group_size & (values.group_size - 1) == 0
    return groups_fit and all(gapless(tensor) for codes in packed for tensor in codes[:3])


def part_count(device: torch.device, programs: int, tiles: int) -> int:
    """Into how many parts a row is split, so that all multiprocessors have work."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(tiles, PROGRAMS * processors // programs))
