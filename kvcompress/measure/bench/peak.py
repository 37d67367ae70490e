"""Peak memory of one prefill, alone in its process: `python -m kvcompress.measure.bench.peak MODEL METHOD TOKENS`."""

from __future__ import annotations

import json
import sys

import torch

from kvcompress.measure.memory import peak_memory
from kvcompress.models import load_model
from kvcompress.wrapping import wrap


def main(name: str, method: str, tokens: int) -> None:
    model = load_model(name, "float32", "auto")
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    with torch.no_grad():
        model(ids[:, :16])  # what the libraries allocate once is not the prefill's
        if method == "plain":
            with peak_memory(model.device) as peak:
                model(ids, use_cache=True, logits_to_keep=1)
        else:
            with wrap(model, method) as wrapped, peak_memory(model.device) as peak:
                wrapped.prefill(ids)
    print(json.dumps({"method": method, "tokens": tokens, "peak_bytes": peak.nbytes, "peak_of": peak.of}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
