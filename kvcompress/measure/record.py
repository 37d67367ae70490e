"""A record: what one method did on one sample, as one line of JSON."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any


def versions() -> dict[str, str]:
    """The versions that a number depends on."""
    names = ("kvcompress", "torch", "transformers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of `value` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class Record:
    """One (sample, method) pair. Bytes are of the stored KV without spare, times in seconds or milliseconds.

    `kl` is the mean over scored tokens of KL(exact || method) in nats; `kv_bytes` is read after prefill and
    compression, `kv_bytes_end` after scoring; `memory_ratio` is `kv_bytes_exact / kv_bytes`, `memory_ratio_16bit`
    takes the exact cache at 16 bits a value. `peak_bytes` is null where a prefill was shared; `peak_of` says what it
    measures. `query_aware` is false where a question followed the compressed part, null where there was none.
    """

    method: str
    model: str
    dtype: str
    device: str
    sample: int
    data_hash: str
    tokens_prefix: int
    tokens_scored: int
    config_hash: str
    query_aware: bool | None = None
    nll: float | None = None
    ppl: float | None = None
    nll_exact: float | None = None
    ppl_exact: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    kv_bytes: int | None = None
    kv_bytes_end: int | None = None
    kv_bytes_exact: int | None = None
    memory_ratio: float | None = None
    memory_ratio_16bit: float | None = None
    bits_per_value: float | None = None
    kept_tokens: int | None = None
    peak_bytes: int | None = None
    peak_of: str | None = None
    prefill_s: float | None = None
    prefill_shared: bool | None = None
    compress_s: float | None = None
    decode_ms_per_token: float | None = None
    decode_ms_per_token_exact: float | None = None
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=versions)
    status: str = "ok"
    error: str | None = None

    def to_json(self) -> str:
        """One line without NaN or Infinity: such a number becomes null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record in `line`. Raises ValueError for what is not one."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"a record is a JSON object, got {type(values).__name__}")
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in values.items() if name in known})
        except TypeError as error:
            raise ValueError(f"not a whole record: {error}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
