"""Decode attention's two products with keys and values in full precision, for `rows` rows of queries at a time.

Addresses and strides are in bytes, D is the head dim.
"""

from kvcompress.kernels.jit.rows import ITEM, accumulate, add_to_rows, load_rows, load_stored, store_totals, zeros
from kvcompress.kernels.jit.values import WIDTH, Value

BLOCK = 16  # tokens whose values stay in the nearest cache
AHEAD = 16384  # bytes that are asked for before they are needed
TOKENS = WIDTH // 4  # that share each load of the queries: as many as the registers hold


def dense_logits(
    keys: Value, stride: Value, tokens: Value, dim: Value, query: Value, logits: Value, rows: int, dtype: str
) -> None:
    """Writes query·key for `tokens` keys from `keys` on; up to `TOKENS - 1` numbers behind are written too."""
    code, last = keys.code, tokens - 1
    with code.loop(0, tokens, TOKENS) as token:
        each = [keys + (token.index + at).at_most(last) * stride for at in range(TOKENS)]
        with code.loop(0, dim, WIDTH, carried=zeros(code, rows * TOKENS)) as d:
            places = [key + d.index * ITEM[dtype] for key in each]
            for place in places:
                code.prefetch(place + AHEAD)
            vectors = [load_stored(place, dtype) for place in places]
            queries = load_rows(code, query + d.index * 4, rows)
            products = [(q, k) for q in queries for k in vectors]
            d.carried = [q.times_plus(k, old) for (q, k), old in zip(products, d.carried, strict=True)]
        store_totals(logits + token.index * 4, d.carried, TOKENS)


def dense_mix(
    values: Value, stride: Value, tokens: Value, dim: Value, weights: Value, sums: Value, rows: int, dtype: str
) -> None:
    """Adds the weighted sum of `tokens` values from `values` on to the rows `sums` [rows, D]."""
    code = values.code
    with code.loop(0, tokens, BLOCK) as block:
        stop = (block.index + BLOCK).at_most(tokens)
        with code.loop(0, dim, 2 * WIDTH) as d:
            both = d.index + WIDTH < dim
            first = values + d.index * ITEM[dtype]
            second = (first + WIDTH * ITEM[dtype]).where(both, first)
            with code.loop(block.index, stop, carried=zeros(code, 2 * rows)) as token:
                places = [each + token.index * stride for each in (first, second)]
                for place in places:
                    code.prefetch(place + AHEAD)
                pair = [load_stored(place, dtype) for place in places]
                token.carried = accumulate(token.carried, weights + token.index * 4, pair)
            add_to_rows(sums + d.index * 4, token.carried, both)
