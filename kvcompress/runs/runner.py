"""Runs a config: every method on every sample, skipping what an earlier run finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from torch import Tensor

from kvcompress.measure.quality import evaluate_sample
from kvcompress.measure.record import Record, digest
from kvcompress.methods.base import Method
from kvcompress.models import load_model, load_tokenizer, weights_fingerprint
from kvcompress.runs.config import ConfigError, RunConfig
from kvcompress.runs.records import RecordFile, write_whole
from kvcompress.texts import load_text

Progress = Callable[[str, int, int], None]
"""Told of what is being done, how many records are finished, and how many there will be."""


def run(config: RunConfig, folder: Path, progress: Progress = lambda text, done, total: None) -> list[Record]:
    """Measures all of `config` into `folder/records.jsonl` and returns its records, earlier ones included.

    A failed method becomes a record with status "failed" and the run goes on; the next run tries it again. Raises
    ConfigError for a text that is too short, ModelNotFound, and RecordsError where the folder cannot be written.
    """
    methods = config.grid()
    total = len(methods) * config.samples
    with RecordFile(folder).opened() as file:
        write_whole(folder / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False))
        progress("loading the model", 0, total)
        torch.manual_seed(config.seed)
        model = load_model(config.model, config.dtype, config.device, trust_remote_code=config.trust_remote_code)
        tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
        fingerprint = weights_fingerprint(model)
        text, text_hash = load_text(config.data)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        question = None
        if config.question is not None:
            question = tokenizer(config.question, add_special_tokens=False, return_tensors="pt").input_ids[0]

        def key(method: Method) -> str:
            names = ("prefix", "scored", "start", "stride", "question", "chunk", "share_prefill", "seed", "dtype")
            options = config.model_dump(include=set(names))
            return digest([str(method), fingerprint, text_hash, str(model.device), options])

        def is_done(method: Method, sample: int) -> bool:
            record = file.records.get((key(method), sample))
            return record is not None and record.status == "ok"

        def report(text: str) -> None:
            done = sum(is_done(method, sample) for method in methods for sample in range(config.samples))
            progress(text, done, total)

        for sample in range(config.samples):
            left = [method for method in methods if not is_done(method, sample)]
            if not left:
                continue
            report(f"sample {sample + 1}: exact prefix")
            hashes = {str(method): key(method) for method in left}
            for record in evaluate_sample(
                model,
                sample_ids(ids, config, sample),
                left,
                config.prefix,
                config.scored,
                question,
                chunk=config.chunk,
                share_prefill=config.share_prefill,
                seed=config.seed,
                name=config.model,
                sample=sample,
                on_error="record",
            ):
                record.config_hash = hashes[record.method]
                file.append(record)
                report(f"sample {sample + 1}: {record.method}")
        report("done")
        return [
            file.records[key(method), sample]
            for method in methods
            for sample in range(config.samples)
            if (key(method), sample) in file.records
        ]


def sample_ids(ids: Tensor, config: RunConfig, sample: int) -> Tensor:
    """The ids of one sample. Raises ConfigError if the text ends before it does."""
    needed = config.prefix + config.scored + 1
    start = config.start + sample * (config.stride or needed)
    if start + needed > len(ids):
        raise ConfigError(
            f"data {config.data!r} has {len(ids)} tokens, but sample {sample + 1} of {config.samples} needs tokens "
            f"{start} to {start + needed}; lower samples, start, prefix or scored, or give a longer text"
        )
    return ids[start : start + needed]
