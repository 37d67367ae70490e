"""What must not grow with length: StreamingLLM's step and memory, and the time to replay a long trace."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from kvcompress.measure.bench.attention_cases import line
from kvcompress.measure.bench.case import Line, case
from kvcompress.measure.bench.filled import random_model
from kvcompress.measure.bench.peak import RANDOM, peak_of_prefill
from kvcompress.measure.speed import paired, timed
from kvcompress.wrapping import wrap

EARLY, LATE, PER_CALL = 2_000, 200_000, 100
PROMPT, CHUNK = 32_768, 1_024
REQUESTS = 1_000_000
SECONDS = 60


@case
def streaming_length() -> list[Line]:
    """One StreamingLLM step and its memory after 200,000 tokens against after 2,000, in a tiny model."""
    model = random_model(positions=2048)
    ids = torch.randint(0, 256, (1, LATE), generator=torch.Generator().manual_seed(0))
    with wrap(model, "streaming_llm(sinks=4, window=508)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :EARLY], cache=cache)
        early = cache.fork()
        for start in range(EARLY, LATE, PER_CALL):
            wrapped(ids[:, start : start + PER_CALL], cache=cache)
        # A first token makes both stores their own and as they are while decoding.
        for each in (early, cache):
            wrapped(ids[:, :1], cache=each)
        memory = cache.nbytes / early.nbytes
        own, other = (partial(wrapped, ids[:, :1], cache=each) for each in (cache, early))
        result = paired(own, other, model.device, rounds=301, warm=20)
    return [
        line(f"StreamingLLM step after {LATE} tokens", f"after {EARLY}", result, 1.1),
        Line(f"StreamingLLM stored bytes after {LATE} tokens", f"after {EARLY}", memory, 1.01),
    ]


@case
def chunked_prefill() -> list[Line]:
    """Peak memory of 32,768 tokens prefilled in chunks of 1,024, each method in a fresh process."""
    plain = peak_of_prefill(RANDOM, "plain", PROMPT, CHUNK)
    lines = []
    for method in ("exact", "streaming_llm(sinks=4, window=1020)", "h2o(heavy=512, recent=512)", "snapkv(budget=1024)"):
        lines.append(_peak_line(method, plain))
    return [*lines, _peak_line("kivi(bits=4)", plain), _peak_line("kivi(bits=2)", plain)]


def _peak_line(method: str, plain: int) -> Line:
    peak = peak_of_prefill(RANDOM, method, PROMPT, CHUNK)
    detail = {"peak_bytes": peak, "peak_bytes_plain": plain}
    return Line(f"peak of {PROMPT} tokens in chunks of {CHUNK}, {method}", "DynamicCache", peak / plain, detail=detail)


def write_trace(path: Path, requests: int) -> None:
    """A Mooncake trace: 500 conversations at a time behind 20 system prompts, each growing turn by turn."""
    chance = random.Random(0)
    systems = [[number * 1000 + block for block in range(chance.randint(1, 8))] for number in range(20)]
    turns: list[list[int]] = []
    fresh = 1_000_000
    with path.open("w") as file:
        for number in range(requests):
            place = chance.randrange(500)
            if place >= len(turns):
                turns.append([])
                place = len(turns) - 1
            blocks = turns[place]
            if not blocks or len(blocks) > 60 or chance.random() < 0.3:
                blocks = list(chance.choice(systems))
            new = chance.randint(1, 3)
            blocks = blocks + list(range(fresh, fresh + new))
            fresh += new
            turns[place] = blocks
            length = 512 * len(blocks) - chance.randrange(512)
            request = {"timestamp": 10 * number, "input_length": length, "output_length": 100, "hash_ids": blocks}
            file.write(json.dumps(request) + "\n")


@case
def replay() -> list[Line]:
    """Seconds that `kvcompress replay` takes for a trace of a million requests, start to end, in one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, REQUESTS)
        with timed(torch.device("cpu")) as elapsed:
            command = [sys.executable, "-m", "kvcompress.cli", "replay", str(path), "--json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [Line(f"replay of {REQUESTS} requests (s)", "a clock", elapsed.seconds, SECONDS)]
