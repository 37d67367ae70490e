"""One layer of a compressed cache: append, then (after attention) observe and compress."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcompress.budget import LayerShape
from kvcompress.errors import CacheError, WrapError
from kvcompress.kernels.softmax import Softmax
from kvcompress.methods.base import Ends, Evicting, Kept
from kvcompress.methods.view import LayerView, RecentQueries
from kvcompress.stores import holes
from kvcompress.stores.slots import column
from kvcompress.stores.store import Store

if TYPE_CHECKING:
    from kvcompress.cache import CompressedCache
    from kvcompress.rope import Rotary


def refuse_gradients(*tensors: Tensor) -> None:
    """Raises WrapError if a gradient would flow through any of them: what a cache stores or evicts gives none back."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise WrapError("gradients do not flow through a compressed cache; call the model under torch.no_grad()")


class CacheLayer(CacheLayerMixin):
    """Stores one layer's KV under the cache's method. A sliding or chunked layer keeps its own last window, exact."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: CompressedCache, index: int, window: int | None) -> None:
        super().__init__()
        self.belong_to(cache)
        self.index, self.window = index, window
        self.store: Store = Store(0)
        self.recent: RecentQueries | None = None
        self.shape: LayerShape | None = None

    def belong_to(self, cache: CompressedCache) -> None:
        """Makes this a layer of `cache`."""
        # Weak, so that a dropped fork is gone at once and its memory is not copied for nothing.
        self._cache = ref(cache)

    @property
    def cache(self) -> CompressedCache:
        """The cache that this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise CacheError("the cache of this layer is gone; keep a reference to it while its layers are used")
        return cache

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    @property
    def compresses(self) -> bool:
        """Whether the method acts here; sliding layers are left as they are."""
        return self.window is None

    @property
    def wants_scores(self) -> bool:
        return self.compresses and self.store.with_scores

    def start(self, rows: int) -> None:
        """Makes the empty store for a batch of `rows`."""
        self.store = self.cache.method.new_store(rows) if self.compresses else Store(rows)
        self.store.with_scores = self.compresses and self.cache.gathers_scores
        self.bound_spare()

    def bound_spare(self) -> None:
        """Under a budget in bytes, no more room to grow than an eighth of what is stored, however little that is."""
        if self.cache.method.byte_budget is not None:
            self.store.set_floor(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Appends keys and values [B, H, T, D] of the call that the cache has begun; padding is dropped."""
        refuse_gradients(key_states, value_states)
        if self.shape is None:
            _, heads, _, dim = key_states.shape
            self.shape = LayerShape(heads, dim, value_states.shape[-1], key_states.element_size(), self.window)
        self.store.append(key_states, value_states, self.cache.call.counts)
        self.is_initialized = True
        return self, self

    def observe(self, query: Tensor, sums: Tensor | None, softmax: Softmax) -> None:
        """Remembers what the method will decide from: column sums [B, H, S] and the prompt's last queries."""
        if sums is not None:
            assert self.store.scores is not None
            self.store.scores.writable().add_(sums)
        window = self.cache.query_window if self.compresses and self.cache.call.prefill else 0
        if not window:
            return
        new = RecentQueries(query[..., -window:, :].clone(), self.cache.call.counts, softmax)
        self.recent = new.behind(self.recent, window)

    def compress(self) -> None:
        """Evicts and packs what the method lets go of after this call."""
        call, method = self.cache.call, self.cache.method
        if self.window is not None:
            if self.cache.recorder is not None:
                self.cache.recorder.before_eviction(self)
            last = [min(self.window, length) for length in self.store.lengths]
            self.store.evict_middle([0] * len(last), last)
            return
        evicting, packing = method.evicting, method.packing
        if evicting is not None and (evicting.acts == "every_call" or call.ends_prefill):
            self._evict(evicting)
        waits = evicting is not None and evicting.acts == "prefill" and call.prefill and not call.ends_prefill
        if packing is not None and not waits:
            self.store.pack()
            if evicting is not None and (evicting.acts == "every_call" or call.ends_prefill):
                self._hold_bytes(evicting, self.store)
        if call.ends_prefill and not self.cache.gathers:
            self.recent = None

    def _hold_bytes(self, method: Evicting, store: Store) -> None:
        """Gives up whole units where holes take more than a budget in bytes has room for."""
        if method.byte_budget is None:
            return
        tokens = self.cache.tokens_within(method.byte_budget)
        apart = store.in_full
        if method.acts == "every_call" and tokens < apart and any(store.packed_rows):
            raise CacheError(
                f"the budget of {method.byte_budget:,} bytes holds {tokens} tokens in each of {self.cache.rows} rows, "
                f"fewer than the {apart} that stay in full precision beside what is packed already; "
                "give a larger budget, a smaller residual or fewer rows"
            )
        room = self.cache.method.most_slots(tokens)
        if units := store.units_beyond(room):
            self._evict(method, give_up=units)
            store.free_units()
        if units := store.units_beyond(room):  # the method did not choose by `top`
            age = store.current_positions(store.device).float()
            store.evict((age >= 0) & ~holes.weakest_units(store, age, units))
            store.free_units()

    def _evict(self, method: Evicting, give_up: list[int] | None = None) -> None:
        decoding = not self.cache.call.prefill
        view = LayerView(
            self.store, self.cache.prompt_lengths, self.cache.tokens_within, self.recent, give_up, decoding
        )
        decision = method.keep(view)
        if isinstance(decision, Ends):
            self.store.evict_middle(decision.first, decision.last)
            return
        keep, counts = (decision.mask, decision.counts) if isinstance(decision, Kept) else (decision, None)
        if method.position_mode == "cache" and method.acts == "prefill":
            self._evict_and_rotate(keep)
        else:
            self.store.evict(keep, counts)

    def _evict_and_rotate(self, keep: Tensor) -> None:
        """Evicts once, and rotates what stays so that rotary distances are distances between slots."""
        evicted = ~keep & (self.store.current_positions(keep.device) >= 0)
        if not bool(evicted.any()):
            return
        rotary = self.rotary
        if rotary is not None:
            evicted_after = evicted.flip(-1).long().cumsum(-1).flip(-1)
            self.store.turn(rotary, evicted_after)
        self.store.evict(keep)

    @property
    def rotary(self) -> Rotary | None:
        return self.cache.rotaries[self.index] if self.cache.rotaries else None

    def turn_back(self, by: list[int]) -> None:
        """Rotates every key of row b by `-by[b]` positions."""
        rotary = self.rotary
        if rotary is not None and not self.store.empty:
            delta = -column(by, self.store.device)[:, None]
            self.store.turn(rotary, delta.expand(-1, 1, self.store.length))

    def take_over(self, other: CacheLayer) -> None:
        """Continues from the exact KV and the observations that `other` gathered, sharing its memory."""
        self.shape, self.recent, self.is_initialized = other.shape, other.recent, True
        self.store.take_over(other.store)
        self.store.with_scores = self.compresses and self.cache.gathers_scores
        if not self.store.with_scores:
            self.store.scores = None
        self.bound_spare()

    def memory(self) -> dict[str, int]:
        sizes = self.store.memory()
        if self.recent is not None:
            sizes["scores"] += self.recent.queries.untyped_storage().nbytes()
        return sizes

    def fork(self, cache: CompressedCache, copies: int) -> CacheLayer:
        other = CacheLayer(cache, self.index, self.window)
        other.store, other.shape, other.is_initialized = self.store.fork(copies), self.shape, self.is_initialized
        if self.recent is not None:
            recent = self.recent
            queries = recent.queries if copies == 1 else recent.queries.repeat_interleave(copies, 0)
            real = [count for count in recent.real for _ in range(copies)]
            other.recent = RecentQueries(queries, real, recent.softmax)
        return other

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        if not self.store.empty:
            self.store.select_rows(index, on_device.to(self.store.device))
        if self.recent is not None:
            recent = self.recent
            queries = recent.queries.index_select(0, on_device.to(recent.queries.device))
            self.recent = RecentQueries(queries, [recent.real[row] for row in index], recent.softmax)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is made when a call begins."""

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def exact_bytes(layer: CacheLayer, seen: list[int]) -> int:
    """Bytes of the exact KV of `seen[b]` tokens a row in this layer."""
    return 0 if layer.shape is None else sum(layer.shape.exact_bytes(tokens) for tokens in seen)


def shapes_of(layers: list[CacheLayer]) -> Counter[LayerShape]:
    """How many layers there are of each shape; one that was not fed yet is taken to be like the first of its kind."""
    known = {layer.is_sliding: layer.shape for layer in reversed(layers) if layer.shape is not None}
    shapes: Counter[LayerShape] = Counter()
    for layer in layers:
        shape = layer.shape or known.get(layer.is_sliding) or next(iter(known.values()))
        shapes[replace(shape, window=layer.window)] += 1
    return shapes
