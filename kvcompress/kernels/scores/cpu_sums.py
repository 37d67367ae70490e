"""Column sums of the attention of many queries: every lane is a query, keys come one after the other.

The M = T·G queries of one KV head, all heads of a column before the next column, are taken in blocks of `LANES`. A
block holds its logits over all keys that it may see, O(S), so that each weight is computed once and whole when its
column is summed. A task is every `parts`-th block of one KV head, which has column sums of its own: what is added in
which order does not depend on the threads.

Scratch of one thread: queries as [D, LANES], a few keys as fp32, a few vectors, logits.
"""

from dataclasses import dataclass

from kvcompress.kernels.attention.cpu_softmax import LOWEST, MASKED
from kvcompress.kernels.jit.call import stored_names
from kvcompress.kernels.jit.compile import Parameters
from kvcompress.kernels.jit.math import exp, tanh
from kvcompress.kernels.jit.rows import ITEM, MOST_DIM, load_stored, totals, zeros
from kvcompress.kernels.jit.values import FLOAT, INT32, INT64, INTS, WIDTH, Value

LANES = 2 * WIDTH
LINE = 4 * LANES  # bytes of one number for each query
TOGETHER = WIDTH // 2  # tokens that share what is loaded
STEP = 16  # tokens; what a block may see is rounded up to it

QUERIES, WIDENED = 0, MOST_DIM * LINE
LIMITS = WIDENED + TOGETHER * MOST_DIM * 4
SINKS, SHARES = LIMITS + LINE, LIMITS + 2 * LINE
LOGITS = LIMITS + 3 * LINE

PARAMETERS = [
    "next_task",  # address of two numbers: the next task and the next thread
    "tasks",
    "scratch",
    "scratch_bytes",  # of one thread
    "query",  # fp32 [B, H, G, T, D]
    "sums",  # fp32 [B, H, parts, S rounded up], zeros at first
    "sums_line",  # bytes of S rounded up
    "sinks",  # fp32 [H, G]
    "limits",  # int64 [B, T]: how many slots a column sees
    "heads",
    "groups",
    "columns",
    "dim",
    "blocks",
    "parts",
    "last",  # S - 1
    "scaling",
    "softcap",  # or 0
    *stored_names("keys"),
]


@dataclass
class Block:
    """One block of queries while it runs."""

    p: Parameters
    row: Value
    head: Value
    first: Value  # query
    scratch: Value
    dtype: str

    def source(self, lane: Value) -> Value:
        """Where in [B, H, G, T] the query of a lane is; of the last query for lanes beyond it."""
        p = self.p
        query = (self.first + lane).at_most(p.columns * p.groups - 1)
        group = (self.row * p.heads + self.head) * p.groups + query % p.groups
        return group * p.columns + query // p.groups


def prepare(block: Block) -> Value:
    """Turns the block's queries, scaled, to [D, LANES]; returns how many slots its last query sees."""
    p, code, scratch = block.p, block.p.code, block.scratch
    scaling, count = p.float("scaling"), p.columns * p.groups
    with code.loop(0, LANES, carried=[code.int(0)]) as lane:
        query = block.first + lane.index
        source = p.query + block.source(lane.index) * p.dim * 4
        with code.loop(0, p.dim) as d:
            number = code.load(source + d.index * 4, FLOAT) * scaling
            code.store(scratch + d.index * LINE + lane.index * 4 + QUERIES, number)
        column = block.row * p.columns + query.at_most(count - 1) // p.groups
        limit = code.load(p.limits + column * 8, INT64).where(query < count, 0)
        code.store(scratch + lane.index * 4 + LIMITS, limit.cut(INT32))
        sink = p.sinks + (block.head * p.groups + query % p.groups) * 4
        code.store(scratch + lane.index * 4 + SINKS, code.load(sink, FLOAT))
        lane.carried = [limit.at_least(lane.carried[0])]
    return lane.carried[0]


def widened(block: Block, token: Value, count: int) -> tuple[Value, Value]:
    """Address and stride of fp32 rows of `count` keys from `token` on, the last slot repeated beyond it."""
    p, code = block.p, block.p.code
    place, stride = p.place("keys", block.row, block.head), p.keys_third
    if block.dtype == "float32":
        return place, stride
    with code.loop(0, count) as each, code.loop(0, p.dim, WIDTH) as d:
        source = place + (token + each.index).at_most(p.last) * stride + d.index * ITEM[block.dtype]
        code.store(block.scratch + each.index * p.dim * 4 + d.index * 4 + WIDENED, load_stored(source, block.dtype))
    return block.scratch + WIDENED, p.dim * 4


def write_logits(block: Block, visible: Value) -> list[Value]:
    """Writes the logits [tokens, LANES] of all keys up to `visible`; returns the largest of each query."""
    p, code, scratch = block.p, block.p.code, block.scratch
    limits = [code.load(scratch + (LIMITS + half * 4 * WIDTH), INTS) for half in range(2)]
    with code.loop(0, visible, TOGETHER, carried=[code.floats(LOWEST)] * 2) as token:
        keys, stride = widened(block, token.index, TOGETHER)
        if block.dtype == "float32":
            each = [keys + (token.index + at).at_most(p.last) * stride for at in range(TOGETHER)]
        else:
            each = [keys + stride * at for at in range(TOGETHER)]
        with code.loop(0, p.dim, carried=zeros(code, 2 * TOGETHER)) as d:
            at = scratch + d.index * LINE + QUERIES
            pair = [code.load(at), code.load(at + 4 * WIDTH)]
            d.carried = [
                code.load(key + d.index * 4, FLOAT).splat().times_plus(queries, d.carried[2 * number + half])
                for number, key in enumerate(each)
                for half, queries in enumerate(pair)
            ]
        place = scratch + token.index * LINE + LOGITS
        tops = token.carried
        for number, logit in enumerate(d.carried):
            index = (token.index + number // 2).cut(INT32).splat()
            masked = logit.where(index < limits[number % 2], MASKED)
            code.store(place + 4 * WIDTH * number, masked)
            tops[number % 2] = masked.at_least(tops[number % 2])
    return token.carried


def cap_logits(block: Block, visible: Value) -> list[Value]:
    """Gemma 2's softcap over logits that are there; returns the largest of each query."""
    code, cap = block.p.code, block.p.float("softcap").splat()
    with code.loop(0, visible, carried=[code.floats(LOWEST)] * 2) as token:
        for half in range(2):
            place = block.scratch + token.index * LINE + (LOGITS + half * 4 * WIDTH)
            old = code.load(place)
            new = old.where(old < LOWEST, tanh(old / cap) * cap)
            code.store(place, new)
            token.carried[half] = new.at_least(token.carried[half])
    return token.carried


def weigh(block: Block, visible: Value, tops: list[Value]) -> list[Value]:
    """Turns logits into weights relative to each query's largest logit; returns what makes their sum 1."""
    code, scratch = block.p.code, block.scratch
    sinks = [code.load(scratch + (SINKS + half * 4 * WIDTH)) for half in range(2)]
    tops = [top.at_least(sink) for top, sink in zip(tops, sinks, strict=True)]
    start = [exp(sink - top) for top, sink in zip(tops, sinks, strict=True)]
    with code.loop(0, visible, carried=start) as token:
        for half in range(2):
            place = scratch + token.index * LINE + (LOGITS + half * 4 * WIDTH)
            weight = exp(code.load(place) - tops[half])
            code.store(place, weight)
            token.carried[half] = token.carried[half] + weight
    return [code.floats(0.0).where(total.equals(0.0), 1.0 / total) for total in token.carried]


def add_columns(block: Block, sums: Value, visible: Value, shares: list[Value]) -> None:
    """Adds each token's weights, averaged over the heads of a group, to the column sums."""
    p, code = block.p, block.p.code
    average = (1.0 / p.groups.convert(FLOAT)).splat()
    shares = [share * average for share in shares]
    with code.loop(0, visible, WIDTH) as token:
        columns = []
        for number in range(WIDTH):
            place = block.scratch + (token.index + number) * LINE + LOGITS
            first = code.load(place) * shares[0]
            columns.append(code.load(place + 4 * WIDTH).times_plus(shares[1], first))
        at = sums + token.index * 4
        code.store(at, code.load(at) + totals(columns))


def add_block(block: Block, sums: Value) -> None:
    """All of one block."""
    p, code, scratch = block.p, block.p.code, block.scratch
    visible = (prepare(block) + (STEP - 1)) // STEP * STEP
    tops = write_logits(block, visible)
    softcap = p.float("softcap")
    places = [scratch + (SHARES + half * 4 * WIDTH) for half in range(2)]
    for place, top in zip(places, tops, strict=True):
        code.store(place, top)
    with code.when(softcap > 0.0):
        for place, top in zip(places, cap_logits(block, visible), strict=True):
            code.store(place, top)
    shares = weigh(block, visible, [code.load(place) for place in places])
    add_columns(block, sums, visible, shares)


def add_up(p: Parameters, dtype: str) -> None:
    """The kernel of every thread, for keys stored as `dtype`."""
    code = p.code
    scratch = p.scratch + code.take_number(p.next_task + 8) * p.scratch_bytes
    with code.tasks(p.next_task, p.tasks) as task:
        part, head, row = task % p.parts, task // p.parts % p.heads, task // p.parts // p.heads
        with code.loop(part, p.blocks, p.parts) as each:
            block = Block(p, row, head, each.index * LANES, scratch, dtype)
            add_block(block, p.sums + task * p.sums_line)


def scratch_bytes(slots: int) -> int:
    """Of one thread, for so many slots."""
    return LOGITS + (slots + STEP) * LINE
