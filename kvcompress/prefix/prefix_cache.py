"""The exact prefix's KV, kept for the next prompt that begins with it: a radix tree over a model's real KV."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.budget import parse_bytes
from kvcompress.cache import CompressedCache
from kvcompress.decoder import layer_windows
from kvcompress.errors import CacheError
from kvcompress.fingerprint import Watch
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.prefix.block_kv import BlockKV, ColumnSums, Layout, Source
from kvcompress.prefix.blocks import block_keys, check_block, extra_bytes
from kvcompress.prefix.compressed import CompressedPrefix, check_compressed, compressed_key
from kvcompress.prefix.match import Match
from kvcompress.prefix.radix import Pinned, RadixTree
from kvcompress.prefix.reuse import Reuse
from kvcompress.prefix.rotary_settings import refuse_length_dependent
from kvcompress.text_form import parse


@dataclass(frozen=True)
class Counts:
    """What went through a prefix cache: `prompts`, their `tokens`, and how many of these were `reused`."""

    prompts: int = 0
    tokens: int = 0
    reused: int = 0


@dataclass
class _Shared:
    """What all tenants of one memory have in common. `lock` guards it all."""

    tree: RadixTree[BlockKV | CompressedPrefix]
    blocks: int | None  # the capacity, where it was given in tokens
    counts: Counts = Counts()
    lock: threading.RLock = field(default_factory=threading.RLock)


class PrefixCache:
    """Real KV of prompts, in blocks of `block` tokens, each shared prefix stored once. Safe to use from many threads.

    Give it to `wrap(model, method, prefix_cache=...)`: prefills then begin with what is stored and add to it. They
    find and leave exact KV alone; every method is applied afresh to the exact KV of the whole prompt. A prompt's
    compressed cache is kept only where asked for (`insert_compressed`), whole, in the same memory, under a key that
    names the method and that no prefill looks for.

    `capacity`: bytes ("2GiB") or tokens, never exceeded; the blocks used least recently go first, from the ends of
    prompts. `salt`: whose prompts these are; `tenant` gives another owner's view of the same memory. `checkpoint`:
    every so many tokens of a prompt under H2O its column sums are stored too, and later prompts under H2O begin there.

    A block's key covers all tokens up to its end, the model's fingerprint as it is at that moment, the device and the
    salt: another adapter, or weights changed in place, find nothing of what was stored before, and find it again when
    they are put back.
    Sliding layers are stored whole, so that every block can be begun from.

    Raises WrapError for a model whose layers keep anything but plain keys and values, CacheError where a token's KV
    depends on how long its prompt is (rope types dynamic and longrope), ValueError for options out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: str | int = "2GiB",
        block: int = 16,
        salt: bytes = b"",
        checkpoint: int = 1024,
    ) -> None:
        check_block(block)
        if isinstance(checkpoint, bool) or not isinstance(checkpoint, int) or checkpoint < 1 or checkpoint % block:
            raise ValueError(f"checkpoint={checkpoint!r}: expected tokens, a multiple of block={block}")
        self.windows = layer_windows(model)
        self.block, self.checkpoint = block, checkpoint
        refuse_length_dependent(model)
        self._model, self._watch, self._salt = model, Watch(model), _checked_salt(salt)
        self._watch.fingerprint(thorough=True)
        size, blocks = _capacity(capacity, block)
        self._shared = _Shared(RadixTree(size), blocks)

    @property
    def identity(self) -> str:
        """A fingerprint of the model's configuration, weights and adapters as they are now."""
        return self._watch.fingerprint()

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises CacheError unless this prefix cache serves `model`: its own, or one that equals it now."""
        if model is not self._model and Watch(model).fingerprint() != self.identity:
            raise CacheError("this prefix cache was made for another model (or other weights or dtype); make a new one")

    def tenant(self, salt: bytes) -> PrefixCache:
        """The same memory for another owner's prompts, which never match these."""
        other = object.__new__(PrefixCache)
        other.__dict__.update(self.__dict__)
        other._salt = _checked_salt(salt)
        return other

    @property
    def capacity_bytes(self) -> int:
        """The cap. One given in tokens is 0 until the first prompt tells how large a block is."""
        return self._shared.tree.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors, column sums included."""
        return self._shared.tree.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Of `nbytes`, what is in use at this moment and cannot be evicted."""
        return self._shared.tree.pinned_bytes

    @property
    def evicted_blocks(self) -> int:
        """How many blocks made room for others so far; a whole compressed prompt counts as one."""
        return self._shared.tree.evicted

    @property
    def counts(self) -> Counts:
        """What all tenants' prefills asked for and reused so far; a compressed prompt that was found counts as one."""
        return self._shared.counts

    def clear(self) -> None:
        """Forgets everything that is not in use, of all tenants."""
        with self._shared.lock:
            self._shared.tree.clear()

    def match(self, ids: Sequence[int] | Tensor, reserve: int = 1) -> Match:
        """The longest stored prefix of one prompt [N], in full blocks, without its last `reserve` tokens.

        It cannot be evicted before `release`, or the end of a `with` block.
        """
        tokens = _one_prompt(ids)
        return self.match_all([self.keys(tokens)[: max(0, len(tokens) - reserve) // self.block]])[0]

    def insert(self, ids: Sequence[int] | Tensor, cache: CompressedCache, row: int = 0) -> int:
        """Stores the full blocks of the prompt `ids` [N] out of row `row` of an exact cache that was fed it.

        Returns how many tokens of the prompt are stored now; what did not fit is not. Raises CacheError for ids that
        are not the first ones that it was fed, and for a cache that may have lost something: of another method or
        model, or with sliding layers.
        """
        tokens = _one_prompt(ids)
        if not isinstance(cache.method, Exact) or cache.identity != self.identity:
            raise CacheError(f"only an exact cache of the same model has KV to store; this one is under {cache.method}")
        if not 0 <= row < cache.rows or cache.seen_tokens[row] < len(tokens):
            raise CacheError(f"row {row} holds no {len(tokens)} tokens: the cache has seen {cache.seen_tokens}")
        cache.fed.check(row, tokens)
        sources = []
        for layer in cache.layers:
            if layer.window is not None:
                raise CacheError(
                    f"layer {layer.index} slides and has dropped its oldest KV; prefill under "
                    "wrap(model, method, prefix_cache=...), which stores it in time"
                )
            sources.append(Source(layer.store.keys[row], layer.store.values[row]))
        return self.store(self.keys(tokens, identity=cache.identity), Layout(cache, self.block), sources) * self.block

    def insert_compressed(self, ids: Sequence[int] | Tensor, cache: CompressedCache) -> bool:
        """Keeps what a prefill of the prompt `ids` [N] left in `cache` under a lossy method; False if it doesn't fit.

        It shares the memory of `cache` until that is fed on, and the cap with the exact blocks, which it never meets.
        Raises CacheError for ids that it was not fed, for the exact method, and for one whose choice depends on what
        follows, such as snapkv.
        """
        tokens = _one_prompt(ids)
        check_compressed(cache, tokens, self._model, self.identity)
        kept, layout = CompressedPrefix.of(cache), Layout(cache, self.block)
        with self._shared.lock:
            self._settle_capacity(layout)
            key = compressed_key(tokens, cache.method, self._key_names())
            return self._shared.tree.insert(key, kept.nbytes, lambda block: kept) == 1

    def compressed(self, ids: Sequence[int] | Tensor, method: Method | str) -> CompressedCache | None:
        """A fork of what is kept of the whole prompt `ids` [N] under `method`, to decode from; None if nothing is."""
        tokens = _one_prompt(ids)
        with self._shared.lock:
            tree = self._shared.tree
            pinned = tree.match(compressed_key(tokens, parse(method), self._key_names()))
            try:
                found = [entry.payload for entry in pinned.entries]
                cache = found[0].cache.fork() if found and isinstance(found[0], CompressedPrefix) else None
            finally:
                tree.release(pinned)
            if cache is not None:
                self.count(1, len(tokens), len(tokens))
            return cache

    def keys(self, tokens: Sequence[int], chunk: int | None = None, identity: str | None = None) -> list[bytes]:
        """The keys of a prompt's full blocks. KV computed `chunk` tokens at a time has keys of its own.

        `identity` is the model's, where it was just looked at.
        """
        return block_keys(tokens, self.block, extra_bytes({**self._key_names(identity), "chunk": str(chunk or "")}))

    def _settle_capacity(self, layout: Layout) -> None:
        """Makes bytes of a capacity in tokens, now that a block's size is known."""
        shared = self._shared
        if shared.blocks is not None and not shared.tree.capacity:
            shared.tree.capacity = shared.blocks * layout.block_bytes

    def _key_names(self, identity: str | None = None) -> dict[str, str | bytes]:
        return {"weights": identity or self.identity, "device": str(self._model.device), "salt": self._salt}

    def begin(
        self, cache: CompressedCache, ids: Tensor, counts: list[int], chunk: int | None = None, whole: bool = False
    ) -> Reuse | None:
        """A prefill of `ids` [B, C] into `cache` that reuses what is stored; None where it has to run by itself.

        `counts[b]` of the columns are tokens of row b, behind its padding. `whole`: all of them are computed, and
        stored. It runs by itself on a filled cache, under autocast, and for a model that no longer equals the one that
        this was made for; also in chunks that are no whole blocks, and in any chunks where the method acts after each
        of them or scores are gathered.
        """
        if cache.columns or torch.is_autocast_enabled(ids.device.type) or cache.identity != self.identity:
            return None
        if chunk is not None and (cache.method.every_call or cache.gathers_scores or chunk % self.block):
            return None
        return Reuse(self, cache, ids, counts, chunk, whole)

    def match_all(self, rows: Sequence[Sequence[bytes]], step: int = 1, with_sums: bool = False) -> list[Match]:
        """The longest stored prefix of each row, pinned; a multiple of `step` blocks.

        `with_sums`: the longest that ends with column sums.
        """
        tree = self._shared.tree
        found = []
        with self._shared.lock:
            for keys in rows:
                held = tree.peek(keys)
                stored = len(held) - len(held) % step
                while with_sums and stored and held[stored - 1].attached is None:
                    stored -= 1
                found.append(Match(self, tree.match(keys[:stored])))
        return found

    def store(
        self, keys: Sequence[bytes], layout: Layout, sources: Sequence[Source], sums: ColumnSums | None = None
    ) -> int:
        """Stores a prompt's blocks as far as they fit, and its `sums` if all do; returns how many are held."""
        tree = self._shared.tree
        with self._shared.lock:
            self._settle_capacity(layout)
            held = tree.insert(keys, layout.block_bytes, lambda block: layout.cut(sources, block))
            if sums is not None and held == len(keys):
                size = sum(each.numel() * each.element_size() for each in sums.layers.values())
                tree.attach(
                    keys, size, lambda: ColumnSums({layer: each.clone() for layer, each in sums.layers.items()})
                )
            return held

    def release(self, pinned: Pinned[BlockKV | CompressedPrefix]) -> None:
        """Ends a use."""
        with self._shared.lock:
            self._shared.tree.release(pinned)

    def count(self, prompts: int, tokens: int, reused: int) -> None:
        """Adds to `counts`."""
        with self._shared.lock:
            old = self._shared.counts
            self._shared.counts = replace(
                old, prompts=old.prompts + prompts, tokens=old.tokens + tokens, reused=old.reused + reused
            )


def _capacity(capacity: str | int, block: int) -> tuple[int, int | None]:
    """Bytes and None, or 0 and whole blocks."""
    if isinstance(capacity, str):
        return parse_bytes(capacity), None
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
        raise ValueError(f'capacity={capacity!r}: expected bytes ("2GiB") or a number of tokens, 0 or more')
    return 0, capacity // block


def _checked_salt(salt: bytes) -> bytes:
    if not isinstance(salt, bytes):
        raise TypeError(f"salt={salt!r}: expected bytes, such as b'tenant 7'")
    return salt


def _one_prompt(ids: Sequence[int] | Tensor) -> list[int]:
    if isinstance(ids, Tensor):
        if ids.dim() != 1:
            raise ValueError(f"ids of shape {tuple(ids.shape)}: expected one prompt [N]; pass a row of the batch")
        return ids.tolist()
    return list(ids)
