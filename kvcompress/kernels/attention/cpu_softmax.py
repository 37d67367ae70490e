"""Softcap, mask and online softmax of one tile of logits, rows of `ROW` bytes."""

from kvcompress.kernels.jit.math import exp, tanh
from kvcompress.kernels.jit.rows import ROW
from kvcompress.kernels.jit.values import BYTE, BYTES, FLOAT, INT32, WIDTH, Value

MASKED = -1e30  # a logit that gets no weight
LOWEST = -1e29  # no real logit is below


def cap_logits(logits: Value, softcap: Value, rows: Value, tokens: Value) -> None:
    """softcap · tanh(logit / softcap), as in Gemma 2."""
    code, cap = logits.code, softcap.splat()
    with code.loop(0, rows) as row, code.loop(0, tokens, WIDTH) as token:
        at = logits + row.index * ROW + token.index * 4
        code.store(at, tanh(code.load(at) / cap) * cap)


def mask_logits(logits: Value, allowed: Value, tokens: Value) -> None:
    """Masks the logits of one row where the bools at `allowed` are false."""
    code = logits.code
    whole = tokens // WIDTH * WIDTH
    with code.loop(0, whole, WIDTH) as token:
        at = logits + token.index * 4
        code.store(at, code.floats(MASKED).where(code.load(allowed + token.index, BYTES).equals(0), code.load(at)))
    with code.loop(whole, tokens) as token, code.when(code.load(allowed + token.index, BYTE).equals(0)):
        code.store(logits + token.index * 4, code.float(MASKED))


def pad_logits(logits: Value, rows: Value, tokens: Value) -> None:
    """Masks what lies behind `tokens`, up to a whole vector."""
    code, left = logits.code, tokens % WIDTH
    inside = code.ints(range(WIDTH)) < left.cut(INT32).splat()
    with code.when(left > 0), code.loop(0, rows) as row:
        at = logits + row.index * ROW + (tokens - left) * 4
        code.store(at, code.load(at).where(inside, MASKED))


def weigh(logits: Value, sums: Value, tops: Value, totals: Value, dim: Value, rows: Value, tokens: Value) -> None:
    """Turns logits into weights relative to the largest logit so far, and scales what was summed before."""
    code = logits.code
    with code.loop(0, rows) as row:
        line = logits + row.index * ROW
        with code.loop(0, tokens, WIDTH, carried=[code.floats(MASKED)]) as token:
            token.carried = [code.load(line + token.index * 4).at_least(token.carried[0])]
        before = code.load(tops + row.index * 4, FLOAT)
        top = token.carried[0].largest().at_least(before)
        with code.loop(0, tokens, WIDTH, carried=[code.floats(0.0)]) as token:
            weight = exp(code.load(line + token.index * 4) - top.splat())
            code.store(line + token.index * 4, weight)
            token.carried = [token.carried[0] + weight]
        total = totals + row.index * 4
        with code.when(top > before):
            factor = exp((before - top).splat())
            with code.loop(0, dim, WIDTH) as d:
                at = sums + row.index * ROW + d.index * 4
                code.store(at, code.load(at) * factor)
            code.store(tops + row.index * 4, top)
            code.store(total, code.load(total, FLOAT) * factor.first())
        code.store(total, code.load(total, FLOAT) + token.carried[0].total())
