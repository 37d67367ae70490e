"""A record: what one method did on one sample, as one line of JSON."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError


def versions() -> dict[str, str]:
    """The versions that a number depends on."""
    names = ("kvcompress", "torch", "transformers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of `value` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class JsonLine:
    """What is written as one line of a file."""

    def to_json(self) -> str:
        """One line without NaN or Infinity: such a number becomes null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record in `line`; unknown keys are passed over. Raises ValueError for what is not one."""
        try:
            return _reader(cls).validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"not a whole record: {f'{place}: ' if place else ''}{first['msg']}") from None


@dataclass
class Record(JsonLine):
    """One (sample, method) pair. Bytes are of the stored KV without spare, times in seconds or milliseconds.

    `kl` is the mean over scored tokens of KL(exact || method) in nats; `kv_bytes` is read after prefill and
    compression, `kv_bytes_end` after scoring; `memory_ratio` is `kv_bytes_exact / kv_bytes`, `memory_ratio_16bit`
    takes the exact cache at 16 bits a value. `peak_bytes` is null where a prefill was shared; `peak_of` says what it
    measures. `query_aware` is false where a question followed the compressed part, null where there was none.
    `tokens_reused` of the prefix came from a prefix cache; `prefill_s` is the time of the rest.

    `settings` is what else the numbers depend on, `kernels` what they were computed with: "numba", "triton", or
    "torch" without either. `evicted` and `packed` say what had happened to the cache when the last scored token was
    fed. `decode_ratios` are the times of single-token calls over those of the exact cache, taken in turns; the two
    `decode_ms` are medians of the same calls.
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
    evicted: bool | None = None
    packed: bool | None = None
    peak_bytes: int | None = None
    peak_of: str | None = None
    prefill_s: float | None = None
    prefill_shared: bool | None = None
    tokens_reused: int | None = None
    compress_s: float | None = None
    decode_ms_per_token: float | None = None
    decode_ms_per_token_exact: float | None = None
    decode_ratios: list[float] | None = None
    kernels: str | None = None
    settings: dict[str, Any] | None = None
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=versions)
    status: str = "ok"
    error: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What a later record of the same measurement has in common with it."""
        return self.config_hash, self.sample


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
