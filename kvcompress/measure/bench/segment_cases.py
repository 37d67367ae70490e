"""What a layer's segments are for: forks that share their past, and KV heads that keep different numbers of tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcompress.attention import over
from kvcompress.cache import CompressedCache
from kvcompress.kernels.softmax import Softmax
from kvcompress.measure.bench.attention_cases import line
from kvcompress.measure.bench.case import Line, case
from kvcompress.measure.bench.filled import fill_compressed, random_kv, random_model
from kvcompress.measure.speed import paired
from kvcompress.stores.store import Store
from kvcompress.visibility import EVERYTHING, Visibility
from kvcompress.wrapping import Wrapped, wrap

PROMPT, CONTINUATIONS, STEPS = 8_192, 8, 16
METHODS = ("exact", "kivi(bits=2)")
HEADS, DIM, GROUPS, DECODED = 8, 128, 4, 32


@case
def continuations() -> list[Line]:
    """Bytes and the first step of 8 continuations of one prompt of 8,192 tokens, against one of them alone."""
    model = random_model(positions=2 * PROMPT)
    kv, ids = random_kv(model, PROMPT), torch.randint(0, 256, (1, 1), generator=torch.Generator().manual_seed(0))
    lines = []
    for method in METHODS:
        with wrap(model, method) as wrapped:
            whole = fill_compressed(wrapped, kv)
            alone = whole.fork()
            before = _bytes_of([whole])
            _steps(wrapped, alone, ids)
            tail = _bytes_of([whole, alone]) - before
            del alone
            forks = [whole.fork() for _ in range(CONTINUATIONS)]
            for fork in forks:
                _steps(wrapped, fork, ids)
            share = _bytes_of([whole, *forks]) / (before + CONTINUATIONS * tail)
            name = f"bytes of {CONTINUATIONS} continuations of {PROMPT}, {method}"
            lines.append(Line(name, f"a prompt and {CONTINUATIONS} tails", share, 1.05, detail={"prompt": before}))
            del forks
            own, other = partial(_forked_step, wrapped, whole, ids), partial(_step, wrapped, whole.fork(), ids)
            result = paired(own, other, model.device, rounds=51, warm=5)
            lines.append(line(f"fork and first step at {PROMPT}, {method}", "a step without a fork", result, 1.1))
    return lines


def _steps(wrapped: Wrapped, cache: CompressedCache, ids: Tensor) -> None:
    for _ in range(STEPS):
        _step(wrapped, cache, ids)


def _step(wrapped: Wrapped, cache: CompressedCache, ids: Tensor) -> None:
    wrapped(ids, cache=cache)


def _forked_step(wrapped: Wrapped, cache: CompressedCache, ids: Tensor) -> None:
    wrapped(ids, cache=cache.fork())


def _bytes_of(caches: list[CompressedCache]) -> int:
    """Bytes in use of all that the caches hold, each storage counted once."""
    used: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            for part in layer.store.columns().values():
                place = part.buffer.untyped_storage().data_ptr()
                used[place] = max(used.get(place, 0), part.bytes_per_slot * part.used)
    return sum(used.values())


@case
def uneven_heads() -> list[Line]:
    """Decode attention and bytes of a layer whose KV heads keep 64 to 1,024 tokens, against as many in equal parts."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.linspace(64, 1024, HEADS).round().int()
    equal = int(counts.sum()) // HEADS
    stores = []
    for kept in (counts, torch.full_like(counts, equal)):
        store = Store(1)
        keys, values = torch.randn(2, 1, HEADS, 4096, DIM, generator=generator)
        store.append(keys, values, [4096])
        store.evict((torch.arange(4096) < kept[:, None])[None])
        for _ in range(DECODED):
            store.append(keys[:, :, :1], values[:, :, :1], [1])
        stores.append(store)
    query = torch.randn(1, HEADS, GROUPS, 1, DIM, generator=generator)
    softmax = Softmax(DIM**-0.5)
    own, other = (
        partial(over, query, store, seen, softmax) for store, seen in zip(stores, (ALL_HELD, EVERYTHING), strict=True)
    )
    result = paired(own, other, query.device, rounds=201, warm=20)
    held = [sum(part.buffer.untyped_storage().nbytes() for part in store.columns().values()) for store in stores]
    spare = [store.memory()["spare"] for store in stores]
    return [
        line(f"decode over {HEADS} KV heads of 64 to 1024 tokens", "as many in equal parts", result, 1.15),
        Line("bytes of the same", "as many in equal parts", (held[0] - spare[0]) / (held[1] - spare[1]), 1.03),
    ]


def _hidden(start: int, stop: int) -> Tensor:
    raise RuntimeError("a kernel that knows how many tokens each head holds asks for no mask")


ALL_HELD = Visibility(False, _hidden, all_held=True)
