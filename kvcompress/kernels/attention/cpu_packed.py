"""Decode attention's two products with packed keys and values, for `rows` rows of queries at a time.

Nothing is dequantised: a group's scales go into the query (keys) or the weights (values), and its middle, the minimum
and half the range, gives one number for each row. What is left of a code is its distance from the middle code, so that
no large sums cancel. Codes are used where they lie: code i of a word comes out 2^(bits·i + 1) times too large, and its
weight carries the inverse. Addresses and strides are in bytes, D is the head dim.
"""

from llvmlite import ir

from kvcompress.kernels.jit.code import Code
from kvcompress.kernels.jit.rows import (
    ROW,
    accumulate,
    add_to_rows,
    load_rows,
    load_stored,
    pairs,
    splat_rows,
    store_totals,
    zeros,
)
from kvcompress.kernels.jit.values import FLOATS, HALF, HALVES, INT16, INTS, SHORTS, WIDTH, Value
from kvcompress.kernels.layout import LANES, codes_per_word

EXPONENT = 0x4B000000  # the bits of 2^23 as fp32; an integer in the lowest bits is added to it
AHEAD = 8192  # bytes of words that are asked for before they are needed
SCALES_AHEAD = 2048
VALUE_GROUPS = (1, 2, 3, 4, 8)  # of a head dim that have code of their own
MOST_VALUE_GROUPS = 8


def contract(
    codes: Value, stride: Value | int, upper: Value | int, words: Value, weights: Value, rows: int, bits: int
) -> list[Value]:
    """The sum of the codes of `words` words, each times its weight: two vectors of lanes for each row.

    The words of the first lanes lie at `codes`, of the second ones at `codes + upper`, the next ones `stride` further;
    row r's weights at `weights + r * ROW`.
    """
    code, per_word = codes.code, codes_per_word(bits)
    with code.loop(0, words, carried=zeros(code, 2 * rows)) as word:
        at = codes + word.index * stride
        code.prefetch(at + AHEAD)
        pair = [(code.load(each, SHORTS).convert(INTS) << 1) | EXPONENT for each in (at, at + upper)]
        for i in range(per_word):
            top = (2**bits - 1) << (bits * i)  # twice the middle code, where code i lies
            lanes = [(each & (EXPONENT | 2 * top)).bits_as(FLOATS) - (2.0**23 + top) for each in pair]
            word.carried = accumulate(word.carried, weights + (word.index * (4 * per_word) + 4 * i), lanes)
    return word.carried


def powers(code: Code, bits: int) -> Value:
    """The factor 2^-(bits·i + 1) of each of `WIDTH` codes."""
    return code.vector([2.0 ** -(bits * (lane % codes_per_word(bits)) + 1) for lane in range(WIDTH)])


def fold(source: Value, scale: Value, minimum: Value, to: Value, bases: list[Value], bits: int) -> list[Value]:
    """Writes one vector of each row times the scale, and adds its product with the middle to `bases`."""
    code, new = source.code, []
    factor, middle = scale * powers(code, bits), scale.times_plus((2**bits - 1) / 2, minimum)
    for row, (each, base) in enumerate(zip(load_rows(code, source, len(bases)), bases, strict=True)):
        code.store(to + row * ROW, each * factor)
        new.append(each.times_plus(middle, base))
    return new


def packed_logits(
    words: Value,
    scale: Value,
    minimum: Value,
    group_size: Value,
    start: Value,
    tokens: Value,
    dim: Value,
    query: Value,
    logits: Value,
    folded: Value,
    rows: int,
    bits: int,
) -> None:
    """Writes query·key for `tokens` packed keys from token `start` on, both multiples of 32."""
    code, base = words.code, folded + rows * ROW
    words_per_token = dim // codes_per_word(bits)
    with code.loop(0, tokens, LANES) as block:
        token = start + block.index
        with code.when(block.index.equals(0) | (token % group_size).equals(0)):
            at = token // group_size * dim
            with code.loop(0, dim, WIDTH, carried=zeros(code, rows)) as d:
                places = [each + (at + d.index) * 2 for each in (scale, minimum)]
                for place in places:
                    code.prefetch(place + SCALES_AHEAD)
                scales, minima = (load_stored(place, "float16") for place in places)
                d.carried = fold(query + d.index * 4, scales, minima, folded + d.index * 4, d.carried, bits)
            store_totals(base, d.carried, per_row=1, stride=4)
        for lane in range(0, LANES, 2 * WIDTH):
            codes = words + token * words_per_token * 2 + 2 * lane
            sums = contract(codes, 2 * LANES, 2 * WIDTH, words_per_token, folded, rows, bits)
            sums = [each + splat for each, splat in zip(sums, splat_rows(code, base, rows, 2), strict=True)]
            for row, pair in enumerate(pairs(sums)):
                for half, vector in enumerate(pair):
                    code.store(logits + (block.index + lane) * 4 + (row * ROW + 4 * WIDTH * half), vector)


def unpack_scales(source: Value, tokens: Value, groups: Value, to: Value) -> None:
    """fp16 [tokens, groups] at `source` as fp32 rows [groups, TILE]; zeros up to a whole vector behind `tokens`."""
    code = source.code
    whole = code.int(0)
    for count in VALUE_GROUPS:
        whole = (tokens // WIDTH * WIDTH).where(groups.equals(count), whole)
    for count in VALUE_GROUPS:
        with code.when(groups.equals(count)), code.loop(0, whole, WIDTH) as token:
            place = source + token.index * (2 * count)
            for line in range(0, 2 * WIDTH * count, 64):
                code.prefetch(place + (SCALES_AHEAD + line))
            mixed = code.load(place, ir.VectorType(INT16, WIDTH * count))
            for group in range(count):
                picked = mixed.lanes(range(group, WIDTH * count, count)).bits_as(HALVES).convert(FLOATS)
                code.store(to + token.index * 4 + group * ROW, picked)
    with code.loop(whole, (tokens + (WIDTH - 1)) // WIDTH * WIDTH) as token, code.loop(0, groups) as group:
        place = to + token.index * 4 + group.index * ROW
        code.store(place, code.float(0.0))
        with code.when(token.index < tokens):
            at = source + (token.index * groups + group.index) * 2
            code.store(place, code.load(at, HALF).convert(FLOATS.element))


def packed_mix(
    words: Value,
    tokens: Value,
    group_size: Value,
    dim: Value,
    scales: Value,
    weights: Value,
    sums: Value,
    folded: Value,
    rows: int,
    bits: int,
) -> None:
    """Adds the weighted sum of `tokens` packed values to the rows `sums` [rows, D].

    `words` is where the words of the first token lie, the first code of a word; `scales` and, behind them, the minima
    are as `unpack_scales` leaves them.
    """
    code, base = words.code, folded + rows * ROW
    count = (tokens + (codes_per_word(bits) - 1)) // codes_per_word(bits)
    with code.loop(0, dim // group_size) as group:
        scale = scales + group.index * ROW
        minimum = scale + dim // group_size * ROW
        with code.loop(0, tokens, WIDTH, carried=zeros(code, rows)) as token:
            at = token.index * 4
            token.carried = fold(
                weights + at, code.load(scale + at), code.load(minimum + at), folded + at, token.carried, bits
            )
        store_totals(base, token.carried, per_row=1, stride=4)
        begin, end = group.index * group_size, group.index * group_size + group_size
        with code.loop(begin, end, 2 * WIDTH) as d:
            both = d.index + WIDTH < end
            upper = code.int(2 * WIDTH).where(both, 0)
            mixed = contract(words + d.index * 2, dim * 2, upper, count, folded, rows, bits)
            mixed = [each + splat for each, splat in zip(mixed, splat_rows(code, base, rows, 2), strict=True)]
            add_to_rows(sums + d.index * 4, mixed, both)
