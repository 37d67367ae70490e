"""Runs a config: every method on every sample, skipping what an earlier run finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.errors import WrapError
from kvcompress.fingerprint import weights_fingerprint
from kvcompress.measure.fits import loaded_misfits, misfits
from kvcompress.measure.quality import Details, evaluate_sample, fed
from kvcompress.measure.record import Record, digest
from kvcompress.measure.trained import warn_past_trained
from kvcompress.methods.base import Method
from kvcompress.models import load_config, load_model, load_tokenizer
from kvcompress.prefix.prefix_cache import PrefixCache
from kvcompress.runs.config import ConfigError, Experiment, RunConfig
from kvcompress.runs.details import write_details
from kvcompress.runs.folder import check_folder, write_config
from kvcompress.runs.records import RecordFile
from kvcompress.texts import load_text


@dataclass
class Text:
    """The text of an experiment in its model's tokens [N], and what else is known before the model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    digest: str
    config: PreTrainedConfig


@dataclass
class Loaded:
    """What an experiment runs on, and what tells it apart from others."""

    model: PreTrainedModel
    text: Text
    fingerprint: str

    def key(self, method: object, options: dict[str, Any]) -> str:
        """The config hash of what `method` measures under `options`."""
        return digest([str(method), self.fingerprint, self.text.digest, str(self.model.device), options])

    def settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """What its records depend on beside what they name, `options` of the config and hashes."""
        return {**options, "tokens_hash": self.text.digest[:16], "weights": self.fingerprint[:16]}


def load_ids(config: Experiment) -> Text:
    """The text's ids. Raises TextNotFound, and ModelNotFound where there is no such tokenizer or configuration."""
    text, _ = load_text(config.data)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    known = load_config(config.model, trust_remote_code=config.trust_remote_code)
    return Text(tokenizer, ids, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), known)


def check_methods(config: Experiment, text: Text, prompts: list[int]) -> None:
    """Raises ConfigError where the model's configuration says that it, or a method on it, cannot run.

    `prompts` are the tokens of each row of a batch.
    """
    _refuse(lambda: misfits(text.config, config.grid(), config.dtype, prompts, config.trust_remote_code))


def load(config: Experiment, text: Text) -> Loaded:
    """The model, beside its text. Raises ConfigError if it, or a method on it, cannot run, before anything is fed."""
    torch.manual_seed(config.seed)
    model = load_model(config.model, config.dtype, config.device, trust_remote_code=config.trust_remote_code)
    loaded = Loaded(model, text, weights_fingerprint(model))
    _refuse(lambda: loaded_misfits(model, config.grid()))
    return loaded


def _refuse(found: Callable[[], list[str]]) -> None:
    try:
        reasons = found()
    except WrapError as error:
        raise ConfigError(f"model: {error}") from error
    if reasons:
        raise ConfigError("\n".join(f"methods: {reason}" for reason in reasons))


Progress = Callable[[str, int, int], None]
"""Told of what is being done, how many records are finished, and how many there will be."""


def run(config: RunConfig, folder: Path, progress: Progress = lambda text, done, total: None) -> list[Record]:
    """Measures all of `config` into `folder/records.jsonl` and returns its records, earlier ones included.

    `folder/details/` gets the KL of every scored token, and of the first sample the kept positions.

    A failed method becomes a record with status "failed" and the run goes on; the next run tries it again. Before the
    model is loaded: TextNotFound, ModelNotFound, ConfigError for a text that is too short for all samples, for a
    method that does not fit the model and for a folder with results of another config, RecordsError where the folder
    cannot be written; a warning for samples longer than the model was trained for. ConfigError before anything is
    prefilled for a method whose misfit only the loaded model shows.
    """
    methods = config.grid()
    total = len(methods) * config.samples
    text = load_ids(config)
    samples = [sample_ids(text.ids, config, sample) for sample in range(config.samples)]
    check_methods(config, text, [config.prefix])
    question = None
    if config.question is not None:
        question = text.tokenizer(config.question, add_special_tokens=False, return_tensors="pt").input_ids[0]
    with RecordFile(folder).opened() as file:
        check_folder(config, folder)
        asked = 0 if question is None else question.numel()
        warn_past_trained(text.config, *fed(config.prefix, asked, config.scored))
        progress("loading the model", 0, total)
        loaded = load(config, text)
        write_config(config, folder)
        depends = {"start", "stride", "question", "chunk", "share_prefill", "prefix_cache"}
        settings = loaded.settings({"data": config.data, **config.model_dump(include=depends)})

        def key(method: Method) -> str:
            return loaded.key(method, config.model_dump(include={*depends, "prefix", "scored", "seed", "dtype"}))

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
            for record in evaluate_sample(
                loaded.model,
                samples[sample],
                left,
                config.prefix,
                config.scored,
                question,
                chunk=config.chunk,
                share_prefill=config.share_prefill,
                seed=config.seed,
                name=config.model,
                settings=settings,
                config_hash=key,
                sample=sample,
                on_error="record",
                on_details=partial(_write_details, folder),
                prefix_cache=store,
            ):
                file.append(record)
                report(f"sample {sample + 1}: {record.method}")
        report("done")
        return [
            file.records[key(method), sample]
            for method in methods
            for sample in range(config.samples)
            if (key(method), sample) in file.records
        ]


def _write_details(folder: Path, record: Record, details: Details) -> None:
    write_details(folder, *record.key, details)


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
