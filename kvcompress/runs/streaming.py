"""Runs a streaming config: every method along the same text, going on where an earlier run stopped."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvcompress.budget import parse_bytes
from kvcompress.cache import CompressedCache
from kvcompress.errors import CacheError
from kvcompress.kernels.choose import library
from kvcompress.measure.streaming import Bucket, StreamRecord, recompute, recomputed, stream
from kvcompress.measure.trained import warn_past_trained
from kvcompress.methods.base import Method
from kvcompress.prompt import stays_in_range
from kvcompress.runs.config import ConfigError, Recompute, StreamingConfig
from kvcompress.runs.folder import check_folder, write_config
from kvcompress.runs.records import LineFile
from kvcompress.runs.runner import Loaded, Progress, check_methods, load, load_ids
from kvcompress.saving import load_cache
from kvcompress.wrapping import wrap

LARGEST_STATE = 64 * 2**20
"""Bytes. A larger cache is not written at every bucket; its method begins anew after a kill."""


class StreamFile(LineFile[StreamRecord]):
    """`streaming.jsonl` of a results folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "streaming.jsonl", StreamRecord)


def run_streaming(
    config: StreamingConfig, folder: Path, progress: Progress = lambda text, done, total: None
) -> list[StreamRecord]:
    """Measures all of `config` into `folder/streaming.jsonl`, a record as each bucket ends, and returns its records.

    A method that was cut short goes on from the cache of its last finished bucket, or begins anew where that was too
    large to keep. A failed method becomes a record with status "failed" and is tried again by the next run. Raises
    what `runner.run` does, before the model is loaded, and warns as it does.
    """
    text = load_ids(config)
    ids = segment_ids(text.ids, config)
    check_methods(config, text, [config.prefix] * config.segments)
    with StreamFile(folder).opened() as file:
        check_folder(config, folder)
        if not all(stays_in_range(method) for method in config.grid()):
            warn_past_trained(text.config, config.tokens, "of one segment")
        progress("loading the model", 0, 0)
        run = _Streaming(config, file, load(config, text), ids, progress)
        write_config(config, folder)
        for method in run.methods:
            run.measure(method)
        run.report("done")
        return [record for method in run.methods for record in run.finished(method)]


def segment_ids(ids: Tensor, config: StreamingConfig) -> Tensor:
    """The ids [segments, tokens + 1]. Raises ConfigError if the text ends before they do."""
    needed = config.tokens + 1
    starts = [config.start + segment * (config.stride or needed) for segment in range(config.segments)]
    if starts[-1] + needed > len(ids):
        raise ConfigError(
            f"data {config.data!r} has {len(ids)} tokens, but segment {config.segments} of {config.segments} needs "
            f"tokens {starts[-1]} to {starts[-1] + needed}; lower tokens, segments or start, or give a longer text"
        )
    return torch.stack([ids[start : start + needed] for start in starts])


class _Streaming:
    """One run: the methods (recomputation last), and what is on the disk of each."""

    def __init__(
        self,
        config: StreamingConfig,
        file: LineFile[StreamRecord],
        loaded: Loaded,
        ids: Tensor,
        progress: Progress,
    ) -> None:
        self.config, self.file, self.loaded, self.ids, self.progress = config, file, loaded, ids, progress
        self.data_hash = hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]
        self.ends = config.ends()
        depends = {"tokens", "prefix", "start", "stride", "segments", "bucket", "tokens_per_call", "memory_limit"}
        self.options = config.model_dump(include=depends)
        self.methods: list[Method | Recompute] = [*config.grid()]
        if config.recompute is not None:
            self.methods.append(config.recompute)

    def key(self, method: Method | Recompute) -> str:
        return self.loaded.key(method, {**self.options, "seed": self.config.seed, "dtype": self.config.dtype})

    def indices(self, method: Method | Recompute) -> list[int]:
        """The buckets in which `method` predicts something."""
        if isinstance(method, Method):
            return list(range(len(self.ends)))
        begins = [self.config.prefix, *self.ends[:-1]]
        return [i for i, begin in enumerate(begins) if recomputed(begin, self.ends[i], method.every)]

    def finished(self, method: Method | Recompute) -> list[StreamRecord]:
        """The records of `method` on the disk, by bucket."""
        found = [self.file.records.get((self.key(method), index)) for index in self.indices(method)]
        return [record for record in found if record is not None]

    def is_done(self, method: Method | Recompute) -> bool:
        records = self.finished(method)
        stopped = any(record.status == "stopped" for record in records)
        complete = stopped or len(records) == len(self.indices(method))
        return complete and all(record.status != "failed" for record in records)

    def report(self, text: str) -> None:
        done = sum(len(self.indices(method)) if self.is_done(method) else 0 for method in self.methods)
        self.progress(text, done, sum(len(self.indices(method)) for method in self.methods))

    def measure(self, method: Method | Recompute) -> None:
        if self.is_done(method):
            return
        state = self.file.folder / f"stream-{self.key(method)}.safetensors"
        buckets = self._stream(method, state) if isinstance(method, Method) else self._recompute(method)
        index = min(len(self.finished(method)), len(self.ends) - 1)
        try:
            for bucket in buckets:
                record = self._record(method, bucket.index)
                bucket.fill(record)
                self.file.append(record)
                self.report(f"{method}: {record.end} tokens, ppl {record.ppl:.2f}")
                index = min(bucket.index + 1, len(self.ends) - 1)
        except (RuntimeError, ValueError, MemoryError) as error:
            record = self._record(method, index)
            record.status, record.error = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:500]
            self.file.append(record)
        state.unlink(missing_ok=True)
        gc.collect()

    def _stream(self, method: Method, state: Path) -> Iterator[Bucket]:
        saved = self._saved(state)
        limit = parse_bytes(self.config.memory_limit) if self.config.memory_limit else None
        with wrap(self.loaded.model, method) as wrapped:
            for bucket, cache in stream(
                wrapped,
                self.ids,
                self.ends,
                prefix=self.config.prefix,
                tokens_per_call=self.config.tokens_per_call,
                cache=saved,
            ):
                yield bucket
                if bucket.index + 1 == len(self.ends):
                    return
                if limit is not None and bucket.kv_bytes > limit:
                    record = self._record(method, bucket.index + 1)
                    record.status = "stopped"
                    record.error = f"{bucket.kv_bytes:,} stored bytes exceed memory_limit {self.config.memory_limit}"
                    self.file.append(record)
                    return
                if cache.nbytes <= LARGEST_STATE:
                    cache.save(state)

    def _saved(self, state: Path) -> CompressedCache | None:
        """The cache that a killed run left, unless it is damaged."""
        if not state.exists():
            return None
        try:
            return load_cache(state, self.loaded.model)
        except CacheError:
            return None

    def _recompute(self, method: Recompute) -> Iterator[Bucket]:
        return recompute(self.loaded.model, self.ids, self.ends, method.window, method.every, prefix=self.config.prefix)

    def _record(self, method: Method | Recompute, index: int) -> StreamRecord:
        return StreamRecord(
            method=str(method),
            model=self.config.model,
            dtype=self.config.dtype,
            device=str(self.loaded.model.device),
            data_hash=self.data_hash,
            config_hash=self.key(method),
            bucket=index,
            begin=self.ends[index - 1] if index else self.config.prefix,
            end=self.ends[index],
            segments=self.config.segments,
            tokens_per_call=self.config.tokens_per_call if isinstance(method, Method) else None,
            kernels=library(self.loaded.model.device.type),
            settings=self.loaded.settings({"data": self.config.data, **self.options}),
            seed=self.config.seed,
        )
