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
from kvcompress.prompt import Part, parts

if TYPE_CHECKING:
    from kvcompress.prefix.match import Match
    from kvcompress.prefix.prefix_cache import PrefixCache


class Reuse:
    """A context in which a prompt [B, C] is fed to an empty cache in `parts`; `counts[b]` columns are tokens of row b.

    Inside, the cache is an exact one that gathers what its method needs, and begins with what is stored of each row; of
    a prompt that is wanted `whole` with nothing. At the end its blocks are stored and the method compresses it. After
    an error the cache is empty again.
    """

    def __init__(
        self,
        owner: PrefixCache,
        cache: CompressedCache,
        ids: Tensor,
        counts: list[int],
        chunk: int | None = None,
        whole: bool = False,
    ) -> None:
        self.owner, self.cache, self.chunk, self.whole = owner, cache, chunk, whole
        self.ids, self.counts, self.columns = ids, counts, ids.shape[1]
        self.parts: list[Part] = []
        self._prompts = [row[len(row) - count :] for row, count in zip(ids.tolist(), counts, strict=True)]
        self._keys = [owner.keys(prompt, chunk, cache.identity) for prompt in self._prompts]
        self._method, self._rotaries = cache.method, cache.rotaries
        self._before = dict(cache.__dict__)
        self._matches: list[Match] = []
        self.followed = False
        self._windows: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}

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
        if not self.followed:
            cache.recorder = None
        if not isinstance(self._method, Exact):
            try:
                cache.become(cache.compress_as(self._method, self._rotaries))
            except BaseException:
                self._restore()
                raise
        self.owner.count(len(self.counts), sum(self.counts), sum(cache.reused_tokens))

    def _begin(self) -> None:
        cache, owner, counts = self.cache, self.owner, self.counts
        gathering = CompressedCache(Exact(), owner.windows, cache.identity, gather_for=(self._method,))
        if isinstance(self._method, Exact):
            for name in ("gathers", "gathers_scores", "query_window"):
                setattr(gathering, name, getattr(cache, name))
        cache.become(gathering)
        reserve = max(1, cache.query_window)
        usable = [0 if self.whole else max(0, count - reserve) // owner.block for count in counts]
        step = (self.chunk or owner.block) // owner.block
        keys = [row[:most] for row, most in zip(self._keys, usable, strict=True)]
        self._matches = owner.match_all(keys, step, cache.gathers_scores)
        reused = cache.reused_tokens = [match.tokens for match in self._matches]
        cache.expect_prefill(counts, self.columns)
        if any(reused):
            stored = Part([self.columns - count for count in counts], reused).take(self.ids)
            fill(cache, [match.blocks for match in self._matches], [match.sums for match in self._matches], stored)
        cache.recorder = self
        left = [count - stored for count, stored in zip(counts, reused, strict=True)]
        size = self.chunk or (owner.checkpoint if cache.gathers_scores and not self.whole else self.columns)
        self.parts = list(parts(left, self.columns, lambda: [size] * len(left)))

    def before_eviction(self, layer: CacheLayer) -> None:
        """Keeps the KV of this call before a sliding layer drops it."""
        held = self._windows.setdefault(layer.index, [[] for _ in self.counts])
        keys, values = (column.view for column in layer.store.filled)
        for row, (stop, count) in enumerate(zip(layer.store.lengths, layer.cache.call.counts, strict=True)):
            new = (row, slice(None), slice(stop - count, stop))
            held[row].append((keys[new].clone(), values[new].clone()))

    def call_ended(self, counts: list[int]) -> None:
        """Stores what was computed of each row that the call has taken to its end or to a checkpoint."""
        for row, (seen, count) in enumerate(zip(self.cache.seen_tokens, counts, strict=True)):
            at_checkpoint = self.cache.gathers_scores and seen % self.owner.checkpoint == 0
            if count and (seen == self.counts[row] or (at_checkpoint and seen < self.counts[row])):
                self._store(row, seen, at_checkpoint)

    def follow(self) -> bool:
        """Goes on after the prompt, until `reply_ended`, where what is generated then is exact too."""
        self.followed = isinstance(self._method, Exact) and self.chunk is None
        return self.followed

    def reply_ended(self, answers: list[list[int]] | None) -> None:
        """Stores what was generated: `answers[b]` were fed after the prompt of row b; None after a failure."""
        self.cache.recorder = None
        if answers is None:
            return
        for row, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            text = prompt + answer
            self._keys[row] = self.owner.keys(text, identity=self.cache.identity)
            self._store(row, len(text), with_sums=False)

    def _store(self, row: int, tokens: int, with_sums: bool) -> None:
        """Stores the whole blocks and chunks of the first `tokens` tokens of a row."""
        tokens -= tokens % (self.chunk or self.owner.block)
        sources, sums = [], {}
        for layer in self.cache.layers:
            store = layer.store
            if layer.index in self._windows:
                kept, values = (torch.cat(calls, 1) for calls in zip(*self._windows[layer.index][row], strict=True))
                sources.append(Source(kept, values, self.cache.reused_tokens[row]))
            else:
                sources.append(Source(store.keys[row], store.values[row]))
            if store.scores is not None:
                sums[layer.index] = store.scores.view[row, :, :tokens]
        keys = self._keys[row][: tokens // self.owner.block]
        layout = Layout(self.cache, self.owner.block)
        self.owner.store(keys, layout, sources, ColumnSums(sums) if with_sums else None)

    def _release(self) -> None:
        for match in self._matches:
            match.release()

    def _restore(self) -> None:
        self._release()
        self.cache.__dict__.clear()
        self.cache.__dict__.update(self._before)
