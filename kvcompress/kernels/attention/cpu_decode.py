"""Decode attention over one range of slots, split over rows, KV heads, blocks of queries and parts of the slots.

A task is one part of one row's slots, for one KV head and up to `ROWS` of its queries. What it leaves is a line
[D sums, largest logit, sum of weights] for each query; `cpu_merge.py` makes the output of them.

Scratch of one thread, in rows of `ROW` bytes: queries, sums and logits (`ROWS` each), what the packed products fold,
scales and minima of a tile's values, and last the largest logit and the sum of weights of each query.
"""

from dataclasses import dataclass

from kvcompress.kernels.attention.cpu_dense import dense_logits, dense_mix
from kvcompress.kernels.attention.cpu_packed import MOST_VALUE_GROUPS, packed_logits, packed_mix, unpack_scales
from kvcompress.kernels.attention.cpu_softmax import LOWEST, cap_logits, mask_logits, pad_logits, weigh
from kvcompress.kernels.jit.call import stored_names
from kvcompress.kernels.jit.compile import Parameters
from kvcompress.kernels.jit.rows import ROW, TILE, TOGETHER, in_fours
from kvcompress.kernels.jit.values import FLOAT, INT64, WIDTH, Value

ROWS = 32  # of queries in one task
SUMS, LOGITS, FOLDED = ROWS * ROW, 2 * ROWS * ROW, 3 * ROWS * ROW
SCALES = FOLDED + (TOGETHER + 1) * ROW
TOPS = SCALES + 2 * MOST_VALUE_GROUPS * ROW
TOTALS = TOPS + 4 * ROWS
SCRATCH_BYTES = TOPS + ROW

PARAMETERS = [
    "next_task",  # address of two numbers: the next task and the next thread
    "tasks",
    "scratch",
    "query",  # fp32 [B, H, M, D]
    "front_query",  # the same for the tokens of the front, or 0
    "left",  # fp32 [B, H, blocks, all parts, lines, D + 2]
    "out",  # fp32 [B, H, M, D]
    "sinks",  # fp32 [H, M / T]
    "logits",  # fp32 [B, H, M, line], kept for the column sums, or 0
    "logits_line",  # bytes
    "ends",  # fp32 [B, H, M, 2]: largest logit and the share of each weight, if logits are kept
    "sums",  # fp32 [B, H, line]
    "counts",  # int64 tables as `layout.TABLES` names them, and the bytes from one table, row and head to the next
    "counts_table",
    "counts_row",
    "counts_head",
    "batch",
    "heads",
    "queries",  # M, the rows of queries of one KV head
    "columns",  # T
    "dim",
    "blocks",  # of ROWS queries
    "lines",  # the most queries of a task
    "parts",  # of this range
    "all_parts",  # of all ranges
    "part_offset",
    "key_group",
    "value_group",
    "scaling",
    "softcap",  # or 0
    *stored_names("allowed", "front_keys", "front_values", "tail_keys", "tail_values"),
    *stored_names("key_words", "key_scale", "key_minimum", "value_words", "value_scale", "value_minimum"),
]


@dataclass
class Task:
    """One task while it runs: its row, KV head and queries, and the scratch of its thread."""

    p: Parameters
    row: Value
    head: Value
    first: Value  # query
    rows: Value  # of queries
    scratch: Value
    dtype: str
    bits: tuple[int, int] | None  # of packed keys and values

    def place(self, name: str) -> Value:
        return self.p.place(name, self.row, self.head)

    def count(self, which: int) -> Value:
        p = self.p
        at = p.counts + p.counts_table * which + self.row * p.counts_row + self.head * p.counts_head
        return p.code.load(at, INT64)


def load_queries(task: Task, queries: Value) -> None:
    """Copies the task's queries, scaled."""
    p, code = task.p, task.p.code
    scaling = p.float("scaling").splat()
    source = queries + ((task.row * p.heads + task.head) * p.queries + task.first) * p.dim * 4
    with code.loop(0, task.rows) as row, code.loop(0, p.dim, WIDTH) as d:
        place = source + (row.index * p.dim + d.index) * 4
        code.store(task.scratch + row.index * ROW + d.index * 4, code.load(place) * scaling)


def prepare(task: Task) -> None:
    """Nothing is summed yet."""
    p, code, scratch = task.p, task.p.code, task.scratch
    load_queries(task, p.query.where(p.front_query.equals(0), p.front_query))
    with code.loop(0, task.rows) as row:
        with code.loop(0, p.dim, WIDTH) as d:
            code.store(scratch + row.index * ROW + d.index * 4 + SUMS, code.floats(0.0))
        code.store(scratch + row.index * 4 + TOPS, code.float(LOWEST))
        code.store(scratch + row.index * 4 + TOTALS, code.float(0.0))


def finish_logits(task: Task, slot: Value, tokens: Value) -> None:
    """What models put around the logits of `tokens` slots from `slot` on, and the tile's softmax."""
    p, code, logits = task.p, task.p.code, task.scratch + LOGITS
    softcap = p.float("softcap")
    with code.when(softcap > 0.0):
        cap_logits(logits, softcap, task.rows, tokens)
    with code.when(p.allowed > 0), code.loop(0, task.rows) as row:
        column = (task.first + row.index) % p.columns
        mask_logits(logits + row.index * ROW, task.place("allowed") + column * p.allowed_third + slot, tokens)
    pad_logits(logits, task.rows, tokens)
    with code.when(p.logits > 0), code.loop(0, task.rows) as row:
        query = (task.row * p.heads + task.head) * p.queries + task.first + row.index
        with code.loop(0, tokens, WIDTH) as token:
            kept = code.load(logits + row.index * ROW + token.index * 4)
            code.store(p.logits + query * p.logits_line + (slot + token.index) * 4, kept)
    weigh(logits, task.scratch + SUMS, task.scratch + TOPS, task.scratch + TOTALS, p.dim, task.rows, tokens)


def dense_product(task: Task, kind: str, in_front: Value, token: Value, tokens: Value, offset: Value) -> None:
    """Logits (keys) or weighted sums (values) of `tokens` tokens from `token` of the front, or of the tail, on.

    Their logits begin at `offset` in the tile.
    """
    p, scratch = task.p, task.scratch
    stride = getattr(p, f"front_{kind}_third").where(in_front, getattr(p, f"tail_{kind}_third"))
    rows_of_slots = task.place(f"front_{kind}").where(in_front, task.place(f"tail_{kind}")) + token * stride
    logits = scratch + LOGITS + offset * 4

    def step(row: Value, rows: int) -> None:
        at = row * ROW
        if kind == "keys":
            dense_logits(rows_of_slots, stride, tokens, p.dim, scratch + at, logits + at, rows, task.dtype)
        else:
            dense_mix(rows_of_slots, stride, tokens, p.dim, logits + at, scratch + SUMS + at, rows, task.dtype)

    with p.code.when(tokens > 0):
        in_fours(p.code, task.rows, step)


def packed_keys(task: Task, bits: int, token: Value, tokens: Value) -> None:
    """Logits of `tokens` packed keys from `token` on."""
    p, scratch = task.p, task.scratch
    words, scale, minimum = (task.place(f"key_{part}") for part in ("words", "scale", "minimum"))

    def step(row: Value, rows: int) -> None:
        to = scratch + LOGITS + row * ROW
        query, folded = scratch + row * ROW, scratch + FOLDED
        packed_logits(words, scale, minimum, p.key_group, token, tokens, p.dim, query, to, folded, rows, bits)

    in_fours(p.code, task.rows, step)


def packed_values(task: Task, bits: int, token: Value, tokens: Value) -> None:
    """Weighted sums of `tokens` packed values from `token` on."""
    p, scratch = task.p, task.scratch
    groups = p.dim // p.value_group
    words = task.place("value_words") + token * bits // 16 * p.dim * 2

    def step(row: Value, rows: int) -> None:
        weights, sums, folded = scratch + LOGITS + row * ROW, scratch + SUMS + row * ROW, scratch + FOLDED
        packed_mix(words, tokens, p.value_group, p.dim, scratch + SCALES, weights, sums, folded, rows, bits)

    with p.code.when(tokens > 0):
        with p.code.loop(0, 2) as which:
            source = task.place("value_scale").where(which.index.equals(0), task.place("value_minimum"))
            to = scratch + which.index * groups * ROW + SCALES
            unpack_scales(source + token * groups * 2, tokens, groups, to)
        in_fours(p.code, task.rows, step)


def attend_tiles(task: Task, front: Value, tiles_in_front: Value, start: Value, stop: Value) -> None:
    """First the tiles of the front, then the slots behind it from `start` up to `stop`: packed ones and the tail."""
    p, code = task.p, task.p.code
    first_packed, first_of_tail = task.count(4), task.count(5)
    tiles = tiles_in_front + ((stop - start).at_least(0) + (TILE - 1)) // TILE
    with code.loop(0, tiles) as tile:
        in_front = tile.index < tiles_in_front
        with code.when(p.front_query.differs(0) & tile.index.equals(tiles_in_front)):
            load_queries(task, p.query)
        token = start + (tile.index - tiles_in_front) * TILE
        slot = (tile.index * TILE).where(in_front, front + token)
        tokens = (front - slot).where(in_front, stop - token).at_most(TILE)
        for which, kind in ((1, "keys"), (2, "values")):
            held = task.count(which)
            packed = code.int(0).where(in_front, (held - token).at_most(tokens).at_least(0))
            if task.bits is not None:
                product = packed_keys if kind == "keys" else packed_values
                product(task, task.bits[which - 1], first_packed + token, packed)
            first = slot.where(in_front, (token - held).at_least(0) + first_of_tail)
            dense_product(task, kind, in_front, first, tokens - packed, packed)
            if kind == "keys":
                finish_logits(task, slot, tokens)


def decode(p: Parameters, bits: tuple[int, int] | None, dtype: str) -> None:
    """The kernel of every thread, for keys and values of so many bits or not packed at all, the rest in `dtype`."""
    code = p.code
    scratch = p.scratch + code.take_number(p.next_task + 8) * SCRATCH_BYTES
    with code.tasks(p.next_task, p.tasks) as number:
        part, block = number % p.parts, number // p.parts % p.blocks
        head, row = number // (p.parts * p.blocks) % p.heads, number // (p.parts * p.blocks * p.heads)
        first = block * ROWS
        task = Task(p, row, head, first, (p.queries - first).at_most(ROWS), scratch, dtype, bits)
        prepare(task)
        front = task.count(0)
        body = task.count(3) - front
        share = ((body + (TILE - 1)) // TILE + p.parts - 1) // p.parts * TILE
        tiles_in_front = ((front + (TILE - 1)) // TILE).where(part.equals(0), 0)
        attend_tiles(task, front, tiles_in_front, part * share, ((part + 1) * share).at_most(body))
        with code.loop(0, task.rows) as each:
            place = number // p.parts * p.all_parts + p.part_offset + part
            line = p.left + (place * p.lines + each.index) * (p.dim + 2) * 4
            with code.loop(0, p.dim, WIDTH) as d:
                code.store(line + d.index * 4, code.load(scratch + each.index * ROW + d.index * 4 + SUMS))
            code.store(line + p.dim * 4, code.load(scratch + each.index * 4 + TOPS, FLOAT))
            code.store(line + p.dim * 4 + 4, code.load(scratch + each.index * 4 + TOTALS, FLOAT))
