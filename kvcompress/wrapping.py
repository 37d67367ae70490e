"""`wrap(model, method)`: one model whose attention runs over compressed caches until it is unwrapped."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress import attention, generate
from kvcompress.cache import CompressedCache
from kvcompress.cache_layer import refuse_gradients
from kvcompress.compat import cache_argument
from kvcompress.decoder import decoder_of, layer_windows
from kvcompress.errors import CacheError, WrapError
from kvcompress.fingerprint import Watch
from kvcompress.inputs import (
    asked_of_each_token,
    cache_in,
    call_arguments,
    check_ids,
    check_output,
    check_past,
    finish,
    new_columns,
    prepare,
    refuse_parts,
    under_torch_compile,
)
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.prompt import Part, check_chunk, chunk_sizes, parts, stays_in_range, trained_length
from kvcompress.rope import Rotary, rotaries
from kvcompress.text_form import parse
from kvcompress.trial import check_runs

if TYPE_CHECKING:
    from kvcompress.prefix.prefix_cache import PrefixCache
    from kvcompress.prefix.reuse import Reuse


def wrap(model: PreTrainedModel, method: Method | str, prefix_cache: PrefixCache | None = None) -> Wrapped:
    """A context manager under which `model` attends over compressed caches; leaving it restores the model.

    `method` is a method object or its text form. With a `prefix_cache`, `prefill` and `generate` compute only what of
    a prompt is not stored there, and store it; see `PrefixCache`. A plain call returns the logits of every column, so
    it computes them all. Raises WrapError for a model that cannot run over a compressed cache, MethodError for a wrong
    method, RotaryError where `positions="cache"` is not possible, CacheError for another model's prefix cache.
    """
    return Wrapped(model, parse(method), prefix_cache)


class Wrapped:
    """A model and a method. Use it as `with wrap(model, method) as wrapped`."""

    def __init__(self, model: PreTrainedModel, method: Method, prefix_cache: PrefixCache | None = None) -> None:
        self.model, self.method, self.prefix_cache = model, method, prefix_cache
        self.windows = layer_windows(model)
        self._refuse_wrapped()
        self.decoder = decoder_of(model)
        check_runs(model, self.decoder, self.windows)
        self.cache_name = cache_argument(model.forward)
        self._rotaries: tuple[str, list[Rotary | None]] | None = None  # with the identity they belong to
        self._watch = Watch(model)
        self._identity: str | None = None  # when it was last looked at
        self._entered_anew = False
        self._cache: CompressedCache | None = None
        self._unread: Tensor | None = None  # see `inputs.finish`
        self._undo: list[Callable[[], None]] = []
        if method.position_mode == "cache":
            self.rotaries()
        if prefix_cache is not None:
            prefix_cache.check_model(model)
        if self.windows and None not in self.windows and not isinstance(method, Exact):
            warnings.warn(
                f"every layer of {type(model).__name__} has a sliding or chunked window of its own, which is kept "
                f"exact: {method} changes nothing",
                stacklevel=3,
            )

    def __enter__(self) -> Wrapped:
        self._refuse_wrapped()
        if self.model._compiled_call_impl is not None:
            raise WrapError(
                "this model was compiled by model.compile(); a wrapped model runs uncompiled: load it again"
            )
        attention.register()
        self._entered_anew = True
        self._set(self.model, "_kvcompress_wrapped", self)
        self._set(self.model, "__deepcopy__", self._copy_of_model)
        for config in attention.configs_of(self.model):
            self._set(config, "_attn_implementation_internal", attention.NAME)
        self._set(self.model, "_prepare_cache_for_generation", partial(generate.prepare_cache, self))
        self._set(self.model, "_prefill", partial(generate.prefill, self))
        self._set(self.model, "generate", partial(generate.run, self))
        if self.model.can_generate():
            own: Any = self.model.prepare_inputs_for_generation
            self._set(self.model, "prepare_inputs_for_generation", generate.without_what_the_cache_knows(self, own))
        before = self.decoder.register_forward_pre_hook(self._before, with_kwargs=True)
        after = self.decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._undo += [before.remove, after.remove]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unwrap()

    def unwrap(self) -> None:
        """Restores the model; what `__exit__` does."""
        while self._undo:
            self._undo.pop()()

    def _copy_of_model(self, memo: dict[int, Any]) -> PreTrainedModel:
        """What copy.deepcopy(model) gives inside the block: the model as it is outside."""
        self.unwrap()
        try:
            return copy.deepcopy(self.model, memo)
        finally:
            self.__enter__()

    def __reduce__(self) -> Any:
        raise WrapError(
            "a part of a wrapped model cannot be copied or pickled; copy.deepcopy(model) gives the whole one as it is "
            "outside, or leave the `with wrap(...)` block first"
        )

    @property
    def cache(self) -> CompressedCache:
        """The last cache used. Raises CacheError before the first call."""
        if self._cache is None:
            raise CacheError("no cache has been used yet; call prefill or generate first")
        return self._cache

    def new_cache(self, gather_for: Sequence[Method | str] | Method | str = ()) -> CompressedCache:
        """An empty cache under this method.

        With the exact method, `gather_for` names the methods (objects or text forms) for which a prefill should also
        gather scores, so that `cache.compress_as(method)` can follow.
        """
        asked = [gather_for] if isinstance(gather_for, Method | str) else gather_for
        if gather_for and not isinstance(self.method, Exact):
            raise CacheError(f"only the exact method gathers for others, this wrapper's is {self.method}")
        turning = self.method.position_mode == "cache"
        return CompressedCache(
            self.method, self.windows, self.identity, self.rotaries() if turning else None, tuple(map(parse, asked))
        )

    @property
    def identity(self) -> str:
        """A fingerprint of the model's configuration, weights and adapters as they are now."""
        self._identity = self._watch.fingerprint(thorough=self._entered_anew)
        self._entered_anew = False
        return self._identity

    def rotaries(self) -> list[Rotary | None]:
        """Every layer's rotary, checked against the model's own. Raises RotaryError where it cannot be done."""
        identity = self.identity
        if self._rotaries is None or self._rotaries[0] != identity:
            entered = bool(self._undo)
            self.unwrap()  # the check runs the plain model
            try:
                self._rotaries = identity, rotaries(self.model)
            finally:
                if entered:
                    self.__enter__()
        return self._rotaries[1]

    @torch.no_grad()
    def __call__(
        self, ids: Tensor, cache: CompressedCache | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Any:
        """One forward pass of `ids` [B, T] over `cache`: the prompt if it is empty, else decoding."""
        self._require_entered()
        cache = cache if cache is not None else self.new_cache()
        self.check(cache)
        return self.model(ids, attention_mask=attention_mask, **{self.cache_name: cache}, use_cache=True, **options)

    @torch.no_grad()
    def prefill(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: CompressedCache | None = None,
        chunk: int | None = None,
    ) -> Any:
        """Feeds a whole prompt [B, T], `chunk` tokens of each row at a time, and lets the method compress when it ends.

        A method that acts on every call evicts or packs after each chunk, so that the peak is a chunk and what the
        method keeps; one that acts when prefill ends keeps the exact KV until then.

        Returns the last chunk's output, with the logits of the last token only. On a filled cache it is a new turn:
        prefill methods choose again, to the same total budget.
        """
        self._require_entered()
        cache = cache if cache is not None else self.new_cache()
        check_ids(ids, self.vocabulary)
        counts = new_columns(attention_mask, *ids.shape)
        check_past(attention_mask, cache, ids.shape[1])
        output, asked = None, asked_of_each_token(self.model.config, {})
        with self.prompt(cache, counts, ids.shape[1], ids, chunk, whole=asked is not None) as reuse:
            for part in self.parts(cache, counts, ids.shape[1], chunk) if reuse is None else reuse.parts:
                if part.counts != counts:
                    refuse_parts(asked)
                output = self(part.take(ids), cache, part.mask(ids.device), **self.last_logits)
        assert output is not None
        output.logits = output.logits[:, -1:]
        return output

    def generate(self, ids: Tensor | None = None, cache: CompressedCache | None = None, **options: Any) -> Any:
        """`model.generate`. With a filled `cache`, `ids` are only what it has not seen, the mask is that of `ids`.

        The last token that a former call generated was never fed: begin the new ids with it where it belongs to the
        text. For beams and several answers (`num_beams`, `num_return_sequences`) the cache's rows are repeated with
        those of the ids.
        """
        self._require_entered()
        ids = options.pop("input_ids", None) if ids is None else ids
        return generate.generate(self, ids, cache, options)

    def _require_entered(self) -> None:
        if not self._undo:
            raise WrapError("the model is not wrapped here; use `with wrap(model, method) as wrapped:`")

    def prompt(
        self,
        cache: CompressedCache,
        counts: list[int],
        columns: int,
        ids: Tensor | None,
        chunk: int | None,
        whole: bool = False,
    ) -> AbstractContextManager[Reuse | None]:
        """While a prompt of `columns` columns is fed, `counts[b]` of them tokens of row b; `ids` if that is all of it.

        Gives what of it a prefix cache serves, if there is one and the prompt can run over it; nothing of one that is
        wanted `whole`.
        """
        self.check(cache)
        check_chunk(chunk)
        if not all(counts):
            raise WrapError(f"row {counts.index(0)} of the batch is all padding; give each row at least one token")
        cache.check_rows(len(counts))
        cut = stays_in_range(cache.method) and self.trained is not None and columns > self.trained
        reuse = None
        if self.prefix_cache is not None and ids is not None and not cut:
            reuse = self.prefix_cache.begin(cache, ids, counts, chunk, whole)
        return cache.prefilling(counts, columns) if reuse is None else reuse

    def parts(self, cache: CompressedCache, counts: list[int], columns: int, chunk: int | None) -> Iterator[Part]:
        """The calls of the prompt that `cache` expects: `chunk` tokens of each row at a time, or as many as can be."""
        asked = None if chunk is None else [chunk] * len(counts)
        return parts(counts, columns, lambda: asked or chunk_sizes(cache, counts, self.trained))

    def _refuse_wrapped(self) -> None:
        if getattr(self.model, "_kvcompress_wrapped", None) is not None:
            raise WrapError("this model is wrapped already; leave the first `with wrap(...)` block before the next")

    @property
    def trained(self) -> int | None:
        """How many positions the model was trained on, if its configuration says."""
        return trained_length(self.model.config)

    @property
    def last_logits(self) -> dict[str, Any]:
        """The option of the model that gives the logits of the last token only, if it has one."""
        return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}

    @property
    def vocabulary(self) -> int | None:
        """How many ids the model can embed."""
        return getattr(self.model.get_input_embeddings(), "num_embeddings", None)

    def check(self, cache: Any, look: bool = True) -> None:
        """Refuses a cache of another kind or model; without `look`, of the model as it was when last looked at."""
        if not isinstance(cache, CompressedCache):
            raise WrapError(
                f"the call was given a {type(cache).__name__}; while wrapped, use wrapped.new_cache() or give none"
            )
        if cache.identity != (self.identity if look or self._identity is None else self._identity):
            raise CacheError(
                "this cache was made for another model (or other weights, adapters, settings or dtype; this one may "
                "have changed since); make one with wrapped.new_cache()"
            )

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = call_arguments(module, args, kwargs)
        cache = cache_in(arguments)
        if arguments.get("output_attentions") or getattr(self.model.config, "output_attentions", False):
            raise WrapError(
                "output_attentions=True: attention weights are not kept over a compressed cache; leave it out"
            )
        if under_torch_compile():
            raise WrapError("torch.compile of a wrapped model is not supported; call it uncompiled")
        if cache is None:
            if arguments.get("use_cache") is False:
                raise WrapError("use_cache=False: a wrapped model needs its cache; leave use_cache out")
            warnings.warn(
                "the wrapped model was called without a compressed cache, so nothing was compressed; "
                "pass cache=wrapped.new_cache(), or use wrapped.prefill and wrapped.generate",
                stacklevel=2,
            )
            return None
        self.check(cache, look=not cache.columns)  # in the steps of generate, once at its start
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        refuse_gradients(*given, *(self.model.parameters() if torch.is_grad_enabled() else ()))
        self._cache = cache
        return (), prepare(cache, arguments, self.vocabulary)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = cache_in(kwargs)
        if not isinstance(cache, CompressedCache):
            return
        if output is None:  # the pass failed
            cache.abandon_call()
        else:
            self._unread = finish(cache, output[0], self._unread)

    def check_unread(self) -> None:
        """Raises CacheError if an output that was not read, so as not to stop a GPU's stream, was NaN."""
        unread, self._unread = self._unread, None
        if unread is not None:
            check_output(self.cache, unread)

    def _set(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute of the instance, to be undone when the model is unwrapped."""
        missing = object()
        old = vars(target).get(name, missing)

        def restore() -> None:
            if old is missing:
                delattr(target, name)
            else:
                setattr(target, name, old)

        setattr(target, name, value)
        self._undo.append(restore)
