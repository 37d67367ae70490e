"""Peak memory of one prefill, alone in its process: `python -m …bench.peak MODEL METHOD TOKENS CHUNK`."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from transformers import DynamicCache

from kvcompress.measure.bench.case import NotHere
from kvcompress.measure.bench.filled import random_model
from kvcompress.measure.memory import peak_memory
from kvcompress.models import load_model
from kvcompress.wrapping import wrap

RANDOM = "random"


def peak_of_prefill(model: str, method: str, tokens: int, chunk: int | None = None) -> int:
    """Peak bytes of a prefill in a fresh process. Raises NotHere where they cannot be read.

    `model` is a built-in name, or "random" for `random_model`; `method` "plain" is transformers' DynamicCache.
    """
    arguments = [model, method, str(tokens), str(chunk or tokens)]
    command = [sys.executable, "-m", "kvcompress.measure.bench.peak", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"{method} at {tokens} tokens: the process ended with {done.returncode}: {done.stderr[-300:]}")
    peak = json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"]
    if peak is None:
        raise NotHere("the peak of a process cannot be read here (no /proc/self/clear_refs)")
    return peak


def main(name: str, method: str, tokens: int, chunk: int) -> None:
    model = random_model(positions=65_536) if name == RANDOM else load_model(name, "float32", "auto")
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    with torch.no_grad():
        model(ids[:, :16])  # what the libraries allocate once is not the prefill's
        if method == "plain":
            with peak_memory(model.device) as peak:
                cache = DynamicCache(config=model.config)
                for part in ids.split(chunk, 1):
                    model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        else:
            with wrap(model, method) as wrapped, peak_memory(model.device) as peak:
                wrapped.prefill(ids, chunk=chunk)
    print(json.dumps({"method": method, "tokens": tokens, "peak_bytes": peak.nbytes, "peak_of": peak.of}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
