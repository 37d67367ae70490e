"""The second half of decode attention: the output of what the parts left, by their log-sum-exp, and column sums."""

from kvcompress.kernels.attention.cpu_decode import ROWS
from kvcompress.kernels.attention.cpu_softmax import LOWEST
from kvcompress.kernels.jit.compile import Parameters
from kvcompress.kernels.jit.math import exp
from kvcompress.kernels.jit.values import FLOAT, INT32, INT64, WIDTH


def merge(p: Parameters) -> None:
    """The kernel of every thread that makes the output; a task is one query of one KV head."""
    code, line = p.code, (p.dim + 2) * 4
    with code.tasks(p.next_task, p.tasks) as number:
        query = number % p.queries
        head = number // p.queries % p.heads
        task = (number // p.queries * p.blocks + query // ROWS) * p.all_parts
        source, step = p.left + (task * p.lines + query % ROWS) * line, p.lines * line
        with code.loop(0, p.all_parts, carried=[code.float(LOWEST)]) as part:
            part.carried = [code.load(source + part.index * step + p.dim * 4, FLOAT).at_least(part.carried[0])]
        sink = code.load(p.sinks + (head * (p.queries // p.columns) + query // p.columns) * 4, FLOAT)
        top = part.carried[0].at_least(sink)
        with code.loop(0, p.all_parts, carried=[exp((sink - top).splat()).first()]) as part:
            at = source + part.index * step + p.dim * 4
            factor = exp((code.load(at, FLOAT) - top).splat()).first()
            code.store(at, factor)
            part.carried = [code.load(at + 4, FLOAT).times_plus(factor, part.carried[0])]
        total = part.carried[0]
        share = code.float(0.0).where(total.equals(0.0), 1.0 / total).splat()
        with code.loop(0, p.dim, WIDTH) as d:
            with code.loop(0, p.all_parts, carried=[code.floats(0.0)]) as part:
                at = source + part.index * step
                factor = code.load(at + p.dim * 4, FLOAT).splat()
                part.carried = [code.load(at + d.index * 4).times_plus(factor, part.carried[0])]
            code.store(p.out + (number * p.dim + d.index) * 4, part.carried[0] * share)
        with code.when(p.logits > 0):
            code.store(p.ends + number * 8, top)
            code.store(p.ends + number * 8 + 4, share.first())


def add_columns(p: Parameters) -> None:
    """The kernel of every thread that adds up a range's columns of kept logits; a task is one KV head of one row."""
    code = p.code
    with code.tasks(p.next_task, p.tasks) as number:
        at = p.counts + p.counts_table * 3 + number // p.heads * p.counts_row + number % p.heads * p.counts_head
        length = code.load(at, INT64)
        average = code.float(1.0) / (p.queries // p.columns).convert(FLOAT)
        with code.loop(0, length, WIDTH) as slot:
            with code.loop(0, p.queries, carried=[code.floats(0.0)]) as each:
                query = number * p.queries + each.index
                top, share = (code.load(p.ends + query * 8 + at, FLOAT).splat() for at in (0, 4))
                logit = code.load(p.logits + query * p.logits_line + slot.index * 4)
                each.carried = [exp(logit - top).times_plus(share, each.carried[0])]
            inside = code.ints(range(WIDTH)) < (length - slot.index).cut(INT32).splat()
            place = p.sums + number * p.logits_line + slot.index * 4
            code.store(place, (each.carried[0] * average.splat()).where(inside, 0.0))
