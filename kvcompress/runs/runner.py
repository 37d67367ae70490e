"""Runs a config: every method on every sample, skipping what an earlier run finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.measure.quality import Details, evaluate_sample
from kvcompress.measure.record import Record, digest
from kvcompress.methods.base import Method
from kvcompress.models import load_model, load_tokenizer, weights_fingerprint
from kvcompress.prefix.prefix_cache import PrefixCache
from kvcompress.runs.config import ConfigError, Experiment, RunConfig
from kvcompress.runs.details import write_details
from kvcompress.runs.records import RecordFile, write_whole
from kvcompress.texts import load_text


@dataclass
class Loaded:
    """What an experiment runs on, and what tells it apart from others."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    fingerprint: str
    text_hash: str

    def key(self, method: object, options: dict[str, Any]) -> str:
        """The config hash of what `method` measures under `options`."""
        return digest([str(method), self.fingerprint, self.text_hash, str(self.model.device), options])


def load(config: Experiment) -> Loaded:
    """The model, its tokenizer and the text's ids [N]."""
    torch.manual_seed(config.seed)
    model = load_model(config.model, config.dtype, config.device, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    text, text_hash = load_text(config.data)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    return Loaded(model, tokenizer, ids, weights_fingerprint(model), text_hash)


Progress = Callable[[str, int, int], None]
"""Told of what is being done, how many records are finished, and how many there will be."""


def run(config: RunConfig, folder: Path, progress: Progress = lambda text, done, total: None) -> list[Record]:
    """Measures all of `config` into `folder/records.jsonl` and returns its records, earlier ones included.

    `folder/details/` gets the KL of every scored token, and of the first sample the kept positions.

    A failed method becomes a record with status "failed" and the run goes on; the next run tries it again. Raises
    ConfigError for a text that is too short, ModelNotFound, and RecordsError where the folder cannot be written.
    """
    methods = config.grid()
    total = len(methods) * config.samples
    with RecordFile(folder).opened() as file:
        write_whole(folder / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False))
        progress("loading the model", 0, total)
        loaded = load(config)
        question = None
        if config.question is not None:
            question = loaded.tokenizer(config.question, add_special_tokens=False, return_tensors="pt").input_ids[0]

        def key(method: Method) -> str:
            names = ("prefix", "scored", "start", "stride", "question", "chunk", "share_prefill", "seed", "dtype")
            return loaded.key(method, config.model_dump(include={*names, "prefix_cache"}))

        def is_done(method: Method, sample: int) -> bool:
            record = file.records.get((key(method), sample))
            return record is not None and record.status == "ok"

        def report(text: str) -> None:
            done = sum(is_done(method, sample) for method in methods for sample in range(config.samples))
            progress(text, done, total)

        store = None if config.prefix_cache is None else PrefixCache(loaded.model, config.prefix_cache)
        for sample in range(config.samples):
            left = [method for method in methods if not is_done(method, sample)]
            if not left:
                continue
            report(f"sample {sample + 1}: exact prefix")
            hashes = {str(method): key(method) for method in left}
            write = partial(_write_details, folder, hashes)
            for record in evaluate_sample(
                loaded.model,
                sample_ids(loaded.ids, config, sample),
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
                on_details=write,
                prefix_cache=store,
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


def _write_details(folder: Path, hashes: dict[str, str], record: Record, details: Details) -> None:
    write_details(folder, hashes[record.method], record.sample, details)


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
