"""One prefill that begins with stored KV and leaves its own behind."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcompress.cache import CompressedCache
from kvcompress.cache_layer import CacheLayer
from kvcompress.methods.exact import Exact
from kvcompress.prefix.block_kv import ColumnSums, Layout, Source, fill
from kvcompress.stores.dense import DenseStore

if TYPE_CHECKING:
    from kvcompress.prefix.prefix_cache import Match, PrefixCache


class Reuse:
    """A context in which a prompt [B, N] is fed to an empty cache, `parts` of its columns at a time.

    Inside, the cache is an exact one that gathers what its method needs, and begins with what all rows have stored.
    At the end its blocks are stored and the method compresses it. After an error the cache is empty again.
    """

    def __init__(self, owner: PrefixCache, cache: CompressedCache, ids: Tensor, chunk: int | None) -> None:
        self.owner, self.cache, self.chunk = owner, cache, chunk
        self.rows, self.columns = ids.shape
        self.parts: list[slice] = []
        self._keys = [owner.keys(row, chunk, cache.identity) for row in ids.tolist()]
        self._method, self._rotaries = cache.method, cache.rotaries
        self._before = dict(cache.__dict__)
        self._matches: list[Match] = []
        self._windows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._reused = 0

    def __enter__(self) -> Reuse:
        try:
            self._begin()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._restore()
            return
        self._release()
        cache = self.cache
        cache.recorder = None
        if not isinstance(self._method, Exact):
            try:
                cache.become(cache.compress_as(self._method, self._rotaries))
            except BaseException:
                self._restore()
                raise
        self.owner.count(self.rows, self.rows * self.columns, self.rows * self._reused)

    def _begin(self) -> None:
        cache, owner = self.cache, self.owner
        gathering = CompressedCache(Exact(), owner.windows, cache.identity, gather_for=(self._method,))
        if isinstance(self._method, Exact):
            for name in ("gathers", "gathers_scores", "query_window"):
                setattr(gathering, name, getattr(cache, name))
        cache.become(gathering)
        reserve = max(1, cache.query_window)
        usable = max(0, self.columns - reserve) // owner.block
        whole = (self.chunk or owner.block) // owner.block
        self._matches = owner.match_all([keys[:usable] for keys in self._keys], whole, cache.gathers_scores)
        self._reused = cache.reused_tokens = self._matches[0].tokens
        cache.expect_prefill([self.columns] * self.rows, self.columns)
        if self._reused:
            fill(
                cache, [match.blocks for match in self._matches], [match.sums for match in self._matches if match.sums]
            )
        cache.recorder = self
        step = self.chunk or (owner.checkpoint if cache.gathers_scores else self.columns)
        stops = [*range(self._reused - self._reused % step + step, self.columns, step), self.columns]
        self.parts = [slice(start, stop) for start, stop in zip([self._reused, *stops], stops, strict=False)]

    def before_eviction(self, layer: CacheLayer) -> None:
        """Keeps the KV of this call before a sliding layer drops it."""
        columns = layer.cache.call.columns
        keys, values = (column.view[:, :, -columns:].clone() for column in layer.store.filled)
        self._windows.setdefault(layer.index, []).append((keys, values))

    def call_ended(self) -> None:
        """Stores what was computed, at the end of the prompt and at every checkpoint."""
        fed = self.cache.columns
        at_checkpoint = self.cache.gathers_scores and fed % self.owner.checkpoint == 0
        if fed == self.columns or at_checkpoint:
            stored = fed - fed % (self.chunk or self.owner.block)
            self._store(stored // self.owner.block, at_checkpoint)

    def _store(self, blocks: int, with_sums: bool) -> None:
        layout = Layout(self.cache, self.owner.block)
        windows = {
            index: [torch.cat(parts, 2) for parts in zip(*calls, strict=True)] for index, calls in self._windows.items()
        }
        for row, keys in enumerate(self._keys):
            sources, scores = [], {}
            for layer in self.cache.layers:
                store = layer.store
                assert isinstance(store, DenseStore)
                if layer.index in windows:
                    kept, values = windows[layer.index]
                    sources.append(Source(kept[row], values[row], self._reused))
                else:
                    sources.append(Source(store.keys[row], store.values[row]))
                if store.scores is not None:
                    scores[layer.index] = store.scores.view[row]
            self.owner.store(keys[:blocks], layout, sources, ColumnSums(scores) if with_sums else None)

    def _release(self) -> None:
        for match in self._matches:
            match.release()

    def _restore(self) -> None:
        self._release()
        self.cache.__dict__.clear()
        self.cache.__dict__.update(self._before)
