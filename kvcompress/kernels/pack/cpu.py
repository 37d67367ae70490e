"""Quantises keys or values and writes their codes, scales and minima, in one pass over them (see `layout.py`).

The codes are those of `naive.quantise` to the bit: the same divisions and the same rounding, in the same order.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kvcompress.kernels.jit.call import DTYPES, Call, stored, stored_names
from kvcompress.kernels.jit.compile import Parameters, compile_kernel
from kvcompress.kernels.jit.math import TO_INTEGER
from kvcompress.kernels.jit.rows import DIM_STEP, ITEM, load_stored, totals
from kvcompress.kernels.jit.threads import Kernel
from kvcompress.kernels.jit.values import HALF, HALVES, INTS, SHORTS, WIDTH, Value
from kvcompress.kernels.layout import KERNEL_BITS, LANES, PackedKeys, PackedValues, codes_per_word, gapless

LITTLE = 1 << 14  # numbers that one thread has packed before another has woken

PARAMETERS = [
    "next_task",
    "tasks",
    "heads",
    "dim",
    "group",  # tokens (keys) or channels (values) with one scale
    "first",  # token that is packed
    "stop",
    "units",  # tasks of one KV head: groups of keys, words of values
    *stored_names("source", "words", "scale", "minimum"),
]


def scale_and_divisor(low: Value, high: Value, bits: int) -> tuple[Value, Value]:
    """The fp32 scale of groups, and what their numbers are divided by."""
    scale = (high - low) / (2.0**bits - 1)
    one = low.code.like(1.0, scale.ir.type)
    return scale, one.where(scale.equals(0.0), scale)


def quantised(x: Value, low: Value, divisor: Value, bits: int) -> Value:
    """Codes of one vector as ints."""
    top = 2**bits - 1
    steps = ((x - low) / divisor).at_most(float(top)) + TO_INTEGER  # rounds half to even
    return steps.bits_as(INTS) & top


def pack_keys(p: Parameters, bits: int, dtype: str) -> None:
    """Each task is one group of tokens of one KV head; lanes are channels."""
    code, per_word = p.code, codes_per_word(bits)
    shifts = code.ints([bits * (lane % per_word) for lane in range(WIDTH)])
    with code.tasks(p.next_task, p.tasks) as task:
        unit, head, row = task % p.units, task // p.units % p.heads, task // p.units // p.heads
        token = p.first + unit * p.group
        source = p.place("source", row, head) + unit * p.group * p.source_third
        words = p.place("words", row, head) + token // LANES * p.words_third
        scales, minima = (p.place(name, row, head) + token // p.group * p.dim * 2 for name in ("scale", "minimum"))
        with code.loop(0, p.dim, WIDTH) as d:
            column = source + d.index * ITEM[dtype]
            first = load_stored(column, dtype)
            with code.loop(1, p.group, carried=[first, first]) as each:
                x = load_stored(column + each.index * p.source_third, dtype)
                each.carried = [code.call("minimum", x, each.carried[0]), code.call("maximum", x, each.carried[1])]
            low, high = each.carried
            scale, divisor = scale_and_divisor(low, high, bits)
            code.store(scales + d.index * 2, scale.cut(HALVES))
            code.store(minima + d.index * 2, low.cut(HALVES))
            with code.loop(0, p.group, WIDTH) as block:
                codes = [
                    quantised(load_stored(column + (block.index + at) * p.source_third, dtype), low, divisor, bits)
                    for at in range(WIDTH)
                ]
                packed = totals([each << shifts for each in codes], per_word)
                of_token = WIDTH // per_word
                place = words + block.index // LANES * p.words_third + block.index % LANES * 2
                for word in range(of_token):
                    lanes = packed.lanes(range(word, WIDTH * of_token, of_token)).cut(SHORTS)
                    code.store(place + (d.index // per_word + word) * (2 * LANES), lanes)


def pack_values(p: Parameters, bits: int, dtype: str) -> None:
    """Each task is one line of words, `16 // bits` tokens of one KV head; lanes are channels."""
    code, per_word = p.code, codes_per_word(bits)
    with code.tasks(p.next_task, p.tasks) as task:
        unit, head, row = task % p.units, task // p.units % p.heads, task // p.units // p.heads
        word = p.first // per_word + unit
        line = p.place("words", row, head) + word * p.words_third
        begin = (word * per_word).at_least(p.first)
        end = (word * per_word + per_word).at_most(p.stop)
        kept = ((code.int(1) << (begin - word * per_word) * bits) - 1).cut(INTS.element).splat()
        with code.loop(0, p.dim, WIDTH) as d:
            place = line + d.index * 2
            code.store(place, (code.load(place, SHORTS).convert(INTS) & kept).cut(SHORTS))
        with code.loop(begin, end) as token, code.loop(0, p.dim // p.group) as group:
            at = group.index * p.group
            source = p.place("source", row, head) + (token.index - p.first) * p.source_third + at * ITEM[dtype]
            first = load_stored(source, dtype)
            with code.loop(WIDTH, p.group, WIDTH, carried=[first, first]) as d:
                x = load_stored(source + d.index * ITEM[dtype], dtype)
                d.carried = [code.call("minimum", x, d.carried[0]), code.call("maximum", x, d.carried[1])]
            low, high = d.carried[0].smallest(), d.carried[1].largest()
            scale, divisor = scale_and_divisor(low, high, bits)
            offset = (token.index * (p.dim // p.group) + group.index) * 2
            code.store(p.place("scale", row, head) + offset, scale.cut(HALF))
            code.store(p.place("minimum", row, head) + offset, low.cut(HALF))
            shift = ((token.index - word * per_word) * bits).cut(INTS.element).splat()
            with code.loop(0, p.group, WIDTH) as d:
                place = line + (at + d.index) * 2
                x = load_stored(source + d.index * ITEM[dtype], dtype)
                codes = quantised(x, low.splat(), divisor.splat(), bits) << shift
                code.store(place, (code.load(place, SHORTS).convert(INTS) | codes).cut(SHORTS))


@cache
def pack_kernel(kind: str, bits: int, dtype: torch.dtype) -> Kernel:
    """The kernel for keys or values of one dtype."""
    write = partial(pack_keys if kind == "keys" else pack_values, bits=bits, dtype=DTYPES[dtype])
    return compile_kernel(f"pack {kind} {bits} {DTYPES[dtype]}", write, PARAMETERS)


def quantise_and_pack(x: Tensor, into: PackedKeys | PackedValues, offset: int) -> bool:
    """See `kvcompress.kernels.choose.quantise_and_pack`."""
    batch, heads, tokens, dim = x.shape
    keys = isinstance(into, PackedKeys)
    aligned = (into.group_size % LANES or offset % into.group_size or tokens % into.group_size) == 0
    whole = aligned if keys else into.group_size % DIM_STEP == 0
    if into.bits not in KERNEL_BITS or x.dtype not in DTYPES or x.stride(-1) != 1 or dim % DIM_STEP or not whole:
        return False
    if not all(gapless(tensor) for tensor in into[:3]):
        return False
    per_word, stop = codes_per_word(into.bits), offset + tokens
    units = tokens // into.group_size if keys else -(-stop // per_word) - offset // per_word
    numbers = {
        "tasks": batch * heads * units,
        "heads": heads,
        "dim": dim,
        "group": into.group_size,
        "first": offset,
        "stop": stop,
        "units": units,
        **stored("source", x),
        **stored("words", into.words),
        **stored("scale", into.scale),
        **stored("minimum", into.minimum),
    }
    call = Call(PARAMETERS, numbers, next_task=[0, 0])
    kernel = pack_kernel("keys" if keys else "values", into.bits, x.dtype)
    kernel.run(call.address, 1 if x.numel() < LITTLE else batch * heads * units)
    return True
