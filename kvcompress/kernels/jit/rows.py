"""Steps on several rows of vectors that stay in registers: lists of vectors, row after row.

Rows of fp32 scratch lie `ROW` bytes apart unless a stride is given.
"""

from collections.abc import Callable, Sequence

from kvcompress.kernels.jit.code import Code
from kvcompress.kernels.jit.values import FLOAT, FLOATS, HALVES, INTS, SHORTS, WIDTH, Value

TILE = 256  # tokens whose logits exist at one time; no head dim is larger either
ROW = 4 * TILE
MOST_DIM = TILE
DIM_STEP = 16  # head dims are multiples of it, whatever the width of a vector
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a stored number
TOGETHER = 4  # rows that share what is loaded: with two vectors each they and it fit into 16 registers


def in_fours(code: Code, rows: Value, step: Callable[[Value, int], None]) -> None:
    """Writes `step(first row, number of rows)` for four rows at a time, and once for what is left."""
    whole = rows // TOGETHER * TOGETHER
    with code.loop(0, whole, TOGETHER) as each:
        step(each.index, TOGETHER)
    for left in range(1, TOGETHER):
        with code.when((rows - whole).equals(left)):
            step(whole, left)


def load_rows(code: Code, address: Value, rows: int, stride: int = ROW) -> list[Value]:
    """One vector of each row."""
    return [code.load(address + row * stride) for row in range(rows)]


def splat_rows(code: Code, address: Value, rows: int, vectors: int) -> list[Value]:
    """For each row `vectors` times one of the neighbouring numbers at `address`, in every lane."""
    numbers = [code.load(address + 4 * row, FLOAT).splat() for row in range(rows)]
    return [number for number in numbers for _ in range(vectors)]


def zeros(code: Code, count: int) -> list[Value]:
    return [code.floats(0.0) for _ in range(count)]


def accumulate(sums: Sequence[Value], weights: Value, vectors: Sequence[Value], stride: int = ROW) -> list[Value]:
    """Adds the vectors, times the number at `weights`, to every row's own sums; `weights` is for row 0."""
    code, new = weights.code, []
    for row in range(len(sums) // len(vectors)):
        weight = code.load(weights + row * stride, FLOAT).splat()
        old = sums[row * len(vectors) :]
        new += [weight.times_plus(vector, each) for vector, each in zip(vectors, old, strict=False)]
    return new


def add_to_rows(address: Value, sums: Sequence[Value], both: Value) -> None:
    """Adds two vectors to each row in memory, or only the first one unless `both`."""
    code = address.code
    for row, (first, _) in enumerate(pairs(sums)):
        at = address + row * ROW
        code.store(at, code.load(at) + first)
    with code.when(both):
        for row, (_, second) in enumerate(pairs(sums)):
            at = address + (row * ROW + 4 * WIDTH)
            code.store(at, code.load(at) + second)


def pairs(sums: Sequence[Value]) -> list[tuple[Value, Value]]:
    return list(zip(sums[::2], sums[1::2], strict=True))


def store_totals(address: Value, sums: Sequence[Value], per_row: int, stride: int = ROW) -> None:
    """Writes the lane sums of each row's vectors as neighbours."""
    together = totals(sums)
    for row in range(len(sums) // per_row):
        part = together.lanes(range(row * per_row, (row + 1) * per_row))
        address.code.store(address + row * stride, part)


def totals(sums: Sequence[Value], length: int = WIDTH) -> Value:
    """The sums of each `length` neighbouring lanes, of all vectors one after the other."""
    vectors = [*sums, *[sums[-1]] * ((1 << (len(sums) - 1).bit_length()) - len(sums))]
    while length > 1:
        # Each step adds the second halves of what belongs to one sum to the first ones.
        length //= 2
        joined = [vectors[at : at + 2] for at in range(0, len(vectors), 2)]
        lanes = vectors[0].count * len(joined[0])
        lower, upper = (
            [start + lane for start in range(half * length, lanes, 2 * length) for lane in range(length)]
            for half in range(2)
        )
        vectors = [each[0].lanes(lower, each[-1]) + each[0].lanes(upper, each[-1]) for each in joined]
    while len(vectors) > 1:
        every = range(2 * vectors[0].count)
        vectors = [vectors[at].lanes(every, vectors[at + 1]) for at in range(0, len(vectors), 2)]
    return vectors[0]


def load_stored(address: Value, dtype: str) -> Value:
    """A vector of "float32", "bfloat16" or "float16" numbers, widened."""
    code = address.code
    if dtype == "float32":
        return code.load(address)
    if dtype == "float16":
        return code.load(address, HALVES).convert(FLOATS)
    return (code.load(address, SHORTS).convert(INTS) << 16).bits_as(FLOATS)
