"""A prompt, prefilled and compressed: by each method itself, or by all from one prefill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kvcompress.cache import CompressedCache
from kvcompress.measure.memory import Peak, peak_memory
from kvcompress.measure.speed import timed
from kvcompress.measure.stored import kept_tokens, stored_bytes
from kvcompress.methods.base import Method
from kvcompress.wrapping import Wrapped


@dataclass
class Prefilled:
    """A compressed prefix, what it took, and what it stores (spare apart)."""

    cache: CompressedCache
    prefill_s: float
    compress_s: float | None
    shared: bool
    peak: Peak

    def __post_init__(self) -> None:
        cache = self.cache
        self.kv_bytes = stored_bytes(cache)
        self.kv_bytes_exact = cache.exact_nbytes
        self.kept_tokens = kept_tokens(cache)
        kept = [(layer.shape, cache.kept(layer.index)) for layer in cache.layers if layer.shape is not None]
        self.kept_values = sum(int((held >= 0).sum()) * (shape.key_dim + shape.value_dim) for shape, held in kept)
        self.itemsize = max(shape.itemsize for shape, _ in kept)
        self.kept = [positions[0] for _, positions in kept]


def can_share(wrapped: Wrapped, method: Method, prefix: int, chunk: int | None) -> bool:
    """Whether one prefill in a single call serves this method as its own would."""
    trained = wrapped.trained
    past_trained = method.position_mode == "cache" and trained is not None and prefix > trained
    return chunk is None and not past_trained


def prefill(
    wrapped: Wrapped, prompt: Tensor, chunk: int | None, gather_for: Iterable[Method] = ()
) -> tuple[CompressedCache, float, Peak]:
    """The cache of `prompt` [1, T], the seconds that prefill took, and its peak memory."""
    cache = wrapped.new_cache(tuple(gather_for))
    with peak_memory(prompt.device) as peak, timed(prompt.device) as elapsed:
        wrapped.prefill(prompt, cache=cache, chunk=chunk)
    return cache, elapsed.seconds, peak


def from_shared(wrapped: Wrapped, gathered: CompressedCache, method: Method, prefill_s: float) -> Prefilled:
    """The method's own cache, from what the shared prefill gathered."""
    rotaries = wrapped.rotaries() if method.position_mode == "cache" else None
    with timed(wrapped.model.device) as elapsed:
        cache = gathered.compress_as(method, rotaries)
    return Prefilled(cache, prefill_s, elapsed.seconds, shared=True, peak=Peak())


def alone(wrapped: Wrapped, prompt: Tensor, chunk: int | None) -> Prefilled:
    """A prefill of its own, for methods that cannot start from the shared one."""
    cache, seconds, peak = prefill(wrapped, prompt, chunk)
    return Prefilled(cache, seconds, None, shared=False, peak=peak)
