"""The compressed cache: what transformers hands from layer to layer and from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvcompress.budget import tokens_within
from kvcompress.cache_layer import CacheLayer, exact_bytes, shapes_of
from kvcompress.errors import CacheError
from kvcompress.fed_ids import FedIds
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.stores.store import MEMORY

if TYPE_CHECKING:
    from kvcompress.prefix.reuse import Reuse
    from kvcompress.rope import Rotary

# Rotary positions under positions="cache" are brought back to slots before fp32 angles lose precision.
REBASE_AFTER = 16384
PER_ROW = ("seen_tokens", "prompt_lengths", "turned_back", "reused_tokens")


@dataclass
class Call:
    """One forward pass: T columns, of which the last `counts[b]` are tokens of row b."""

    columns: int
    counts: list[int]
    prefill: bool
    ends_prefill: bool
    ids: Tensor | None = None  # [B, T]; None if what is fed is not known by its ids


class CompressedCache(Cache):
    """A cache of L layers under one method. Make it with `wrapped.new_cache()`.

    `seen` counts real tokens fed, `kept` says which are still stored, `get_seq_length` counts columns fed, padding
    included. A cache belongs to the model it was made for.
    """

    layers: list[CacheLayer]

    def __init__(
        self,
        method: Method,
        windows: list[int | None],
        identity: str,
        rotaries: list[Rotary | None] | None = None,
        gather_for: tuple[Method, ...] = (),
    ) -> None:
        self.method, self.identity = method, identity
        self.rotaries = rotaries if method.position_mode == "cache" else None
        self.gathers = bool(gather_for)
        evicting = [part for part in (each.evicting for each in (method, *gather_for)) if part is not None]
        self.gathers_scores = any(part.needs_scores for part in evicting)
        self.query_window = max((part.query_window for part in evicting), default=0)
        super().__init__(layers=[CacheLayer(self, index, window) for index, window in enumerate(windows)])
        self.columns = self.calls = 0
        self.seen_tokens: list[int] = []
        self.fed = FedIds([])
        self.prompt_lengths: list[int] = []
        self.turned_back: list[int] = []
        self.prefill_until: int | None = None
        self._call: Call | None = None
        self._cut_off = False  # whether a prompt failed when a part of it was fed
        self.reused_tokens: list[int] = []  # of each row, what a prefix cache served of its first prompt
        self.recorder: Reuse | None = None
        self._fitting: tuple[Any, int] | None = None  # what was last asked of tokens_within, and the answer
        self._first_prompt = True  # whether nothing was fed before the prompt that was fed last

    @property
    def rows(self) -> int:
        return len(self.seen_tokens)

    @property
    def seen(self) -> Tensor:
        """Real tokens fed so far, per row: [B] int64."""
        return torch.tensor(self.seen_tokens, dtype=torch.int64)

    @property
    def one_prefill(self) -> bool:
        """Whether all that was fed was one prompt, and the method acted on it once."""
        return self.calls == 1 and self.prompt_lengths == self.seen_tokens

    @property
    def call(self) -> Call:
        if self._call is None:
            raise CacheError(
                "this cache was used outside of a wrapped model's forward pass; "
                "pass it as `wrapped(ids, cache=cache)`, or to the model while it is wrapped"
            )
        return self._call

    def kept(self, layer: int) -> Tensor:
        """Positions of the tokens whose KV layer `layer` still stores: [B, H, S] int64, ascending, -1 = empty slot."""
        held = self.layers[layer]
        if held.store.empty or held.shape is None:
            return torch.empty(self.rows, 0, 0, dtype=torch.int64)
        positions = held.store.current_positions(held.store.device)
        positions = positions.expand(-1, held.shape.heads, -1)
        far = torch.iinfo(torch.int64).max
        ordered = positions.masked_fill(positions < 0, far).sort(-1).values
        ordered = ordered.masked_fill(ordered == far, -1)
        return ordered[..., : int((ordered >= 0).sum(-1).max())]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that this cache holds, spare included."""
        self.fed.read()  # so that none of these is left on the device
        storages = {}
        for layer in self.layers:
            tensors = [column.buffer for column in layer.store.columns().values()]
            if layer.recent is not None:
                tensors.append(layer.recent.queries)
            for tensor in tensors:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def memory(self) -> dict[str, int]:
        """`nbytes` by what it is: keys, values, scales, residual, positions, scores, holes, spare, shared."""
        total: dict[str, int] = dict.fromkeys(MEMORY, 0)
        for layer in self.layers:
            if not layer.store.empty:
                for name, size in layer.memory().items():
                    total[name] += size
        return total

    @property
    def exact_nbytes(self) -> int:
        """Bytes that the exact baseline stores for the same tokens: no spare, no padding."""
        return sum(exact_bytes(layer, self.seen_tokens) for layer in self.layers)

    def tokens_within(self, limit: int) -> int:
        """How many tokens a row keep the whole cache within `limit` bytes.

        At every step under a method that acts on every call, right after prefill under one that acts then. A fork
        into more rows leaves fewer to each.
        """
        asked = limit, self.rows, sum(layer.shape is not None for layer in self.layers)
        if self._fitting is None or self._fitting[0] != asked:
            shapes = shapes_of(self.layers)
            fitting = tokens_within(limit, self.method, shapes, self.prompt_lengths, self._first_prompt)
            self._fitting = asked, fitting
        return self._fitting[1]

    def expect_prefill(self, counts: list[int], columns: int) -> None:
        """Says that the next `columns` columns, `counts[b]` of them tokens of row b, are one prompt."""
        self.prefill_until = self.columns + columns
        seen = self.seen_tokens or [0] * len(counts)
        self.prompt_lengths = [old + new for old, new in zip(seen, counts, strict=True)]
        self._fitting = None
        self._first_prompt = self.columns == 0
        for layer in self.layers:
            layer.recent = None

    @contextmanager
    def prefilling(self, counts: list[int], columns: int) -> Iterator[None]:
        """The same while a prompt is fed. If that fails, the cache is as it was; with a part fed it goes no further.

        What the method acted on between two parts cannot be put back.
        """
        before = self.prefill_until, self.prompt_lengths, [layer.recent for layer in self.layers]
        calls = self.calls
        self.expect_prefill(counts, columns)
        try:
            yield
        except BaseException:
            if self.calls == calls and self._call is None:
                self.prefill_until, self.prompt_lengths, recent = before
                for layer, queries in zip(self.layers, recent, strict=True):
                    layer.recent = queries
            else:
                self._cut_off = True
            raise

    def check_rows(self, rows: int) -> None:
        """Raises CacheError if a call of `rows` rows does not fit."""
        if self.seen_tokens and rows != self.rows:
            fix = (
                f"use cache.fork({rows // self.rows})"
                if rows % self.rows == 0
                else "give one row of ids for each of them (for beams and several answers generate repeats both itself)"
            )
            raise CacheError(f"this cache holds {self.rows} rows, but the call has {rows}; {fix}, or a new cache")

    def check_whole(self) -> None:
        """Raises CacheError for a cache that a failure has left with a part of a call or of a prompt."""
        if self._call is not None:
            failed = "the last forward pass over this cache failed midway, so its layers disagree"
        elif self._cut_off:
            failed = f"the last prompt fed to this cache failed midway, after {self.columns} columns in all"
        else:
            return
        raise CacheError(f"{failed}; go on from a fork made before it, or from a new cache")

    def begin_call(self, columns: int, counts: list[int], ids: Tensor | None = None) -> None:
        """Begins a forward pass of `columns` columns, the last `counts[b]` of them tokens of row b.

        `ids` [B, columns], if the KV of these tokens follows from them alone.
        """
        self.check_whole()
        self.check_rows(len(counts))
        if not self.seen_tokens:
            self._start(len(counts))
        if self.columns == 0 and self.prefill_until is None:
            self.expect_prefill(counts, columns)
        prefill = self.prefill_until is not None
        after = [seen + new for seen, new in zip(self.seen_tokens, counts, strict=True)]
        ends = prefill and after == self.prompt_lengths
        self._call = Call(columns, counts, prefill, ends, ids)

    def abandon_call(self) -> None:
        """Ends a forward pass that failed. If no layer had stored anything yet, the cache is as it was before it."""
        if self._call is None:
            return
        if any(layer.store.seen != self.seen_tokens for layer in self.layers):
            self._call.ids = None
            return
        self._call = None
        if self.columns == 0:
            self.seen_tokens, self.prefill_until = [], None

    def _start(self, rows: int) -> None:
        self.seen_tokens, self.turned_back = [0] * rows, [0] * rows
        self.fed = FedIds([[]] * rows)
        self.reused_tokens = self.reused_tokens or [0] * rows
        for layer in self.layers:
            layer.start(rows)

    def end_call(self) -> None:
        """Ends the forward pass."""
        call = self.call
        self.columns += call.columns
        self.calls += 1
        self.seen_tokens = [seen + new for seen, new in zip(self.seen_tokens, call.counts, strict=True)]
        self.fed.add(call.ids, call.counts, decoding=not call.prefill)
        if call.ends_prefill:
            assert self.prefill_until is not None
            self.columns, self.prefill_until = self.prefill_until, None
        self._call = None
        if self.rotaries is not None:
            self._rebase()
        if self.recorder is not None:
            self.recorder.call_ended(call.counts)

    def first_position(self) -> list[int]:
        """The rotary position of the next token, per row."""
        return [seen - turned for seen, turned in zip(self.seen_tokens, self.turned_back, strict=True)]

    def _rebase(self) -> None:
        full = [layer for layer in self.layers if layer.compresses]
        if self.method.packing is not None or not full:
            return
        lengths = full[0].store.lengths
        excess = [position - length for position, length in zip(self.first_position(), lengths, strict=True)]
        if max(excess) < REBASE_AFTER:
            return
        for layer in self.layers:
            layer.turn_back(excess)
        self.turned_back = [turned + by for turned, by in zip(self.turned_back, excess, strict=True)]

    def compress_as(self, method: Method, rotaries: list[Rotary | None] | None = None) -> CompressedCache:
        """What a prefill under `method` would have stored, from the exact KV and observations gathered in this one."""
        if not isinstance(self.method, Exact) or self._call is not None:
            raise CacheError(f"only an exact cache between two calls can be compressed afterwards, not {self.method}")
        self._check_gathered(method)
        other = CompressedCache(method, [layer.window for layer in self.layers], self.identity, rotaries)
        other.columns, other.seen_tokens, other.calls = self.columns, list(self.seen_tokens), 1
        other.prompt_lengths, other.turned_back = list(self.prompt_lengths), list(self.turned_back)
        other.reused_tokens = list(self.reused_tokens)
        other.fed = self.fed.select(range(self.rows))
        other._call = Call(0, [0] * self.rows, prefill=True, ends_prefill=True)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.start(self.rows)
            theirs.take_over(mine)
        for layer in other.layers:
            layer.compress()
        other._call = None
        return other

    def become(self, other: CompressedCache) -> None:
        """Takes over all that `other` holds, which is empty then."""
        self.__dict__.update(other.__dict__)
        other.layers = []
        for layer in self.layers:
            layer.belong_to(self)

    def _check_gathered(self, method: Method) -> None:
        evicting = method.evicting
        if evicting is not None and (
            evicting.query_window > self.query_window or (evicting.needs_scores and not self.gathers_scores)
        ):
            raise CacheError(
                f"this cache did not gather what {method} decides from; make it with new_cache(gather_for=[...])"
            )
        if self.seen_tokens != self.prompt_lengths:
            raise CacheError(
                f"this cache has seen {self.seen_tokens} tokens, but its prompt had {self.prompt_lengths}; "
                "compress it right after prefill"
            )

    def fork(self, n: int = 1) -> CompressedCache:
        """The same state for another continuation; `n` > 1 repeats every row. Memory is shared until written."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise CacheError(f"fork(n) makes n copies of every row, n at least 1; got {n!r}")
        if self._call is not None:
            raise CacheError("a cache cannot be forked in the middle of a forward pass")
        other = object.__new__(CompressedCache)
        other.__dict__.update(self.__dict__)
        for name in PER_ROW:
            setattr(other, name, [number for number in getattr(self, name) for _ in range(n)])
        other.fed = self.fed.select([row for row in range(self.rows) for _ in range(n)])
        other.layers = [layer.fork(other, n) for layer in self.layers]
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        return self.fork()

    def save(self, path: Any) -> None:
        """Writes the cache as safetensors, for `kvc.load_cache(path, model)`."""
        from kvcompress.saving import save_cache

        save_cache(self, path)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed, padding included: `generate` slices its inputs by it."""
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues from what row `beam_idx[b]` held."""
        # Where all rows are alike on the host, which ones are taken need not be asked of a GPU.
        index = [0] * len(beam_idx) if self._rows_alike else beam_idx.tolist()
        for name in PER_ROW:
            numbers = getattr(self, name)
            setattr(self, name, [numbers[row] for row in index])
        self.fed.reorder(beam_idx)
        for layer in self.layers:
            layer.select_rows(index, beam_idx)

    @property
    def _rows_alike(self) -> bool:
        """Whether every number that the host keeps of a row is the same for all rows."""
        numbers: list[list[int]] = [getattr(self, name) for name in PER_ROW]
        for layer in self.layers:
            numbers += layer.store.row_numbers()
            if layer.recent is not None:
                numbers.append(layer.recent.real)
        return all(len(set(each)) <= 1 for each in numbers)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`."""
        self.reorder_cache(torch.arange(self.rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    def reset(self) -> None:
        raise CacheError("a compressed cache is not reset; make a new one with wrapped.new_cache()")

    def crop(self, tokens_to_remove: int) -> None:
        raise CacheError(
            f"crop({tokens_to_remove}): evicted and packed tokens cannot be put back, so assisted decoding and "
            "cropping are not supported; use cache.fork() before a continuation that may be dropped"
        )

    def activate_past_recording(self) -> None:
        raise CacheError("assisted decoding needs a cache that can be rolled back; generate without an assistant")
