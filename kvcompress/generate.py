"""`generate` over a compressed cache: what stands in for the model's own parts while it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from kvcompress.cache import CompressedCache
from kvcompress.compat import mask_width
from kvcompress.errors import WrapError
from kvcompress.inputs import asked_of_each_token, check_ids, check_past, new_columns, past_mask, refuse_parts

if TYPE_CHECKING:
    from kvcompress.prefix.reuse import Reuse
    from kvcompress.wrapping import Wrapped


def generate(wrapped: Wrapped, ids: Tensor | None, cache: CompressedCache | None, options: dict[str, Any]) -> Any:
    """`Wrapped.generate`."""
    if cache is not None:
        wrapped.check(cache)
        options[wrapped.cache_name] = cache
    generate: Any = wrapped.model.generate
    if ids is None:
        if options.get("inputs_embeds") is None:
            raise WrapError("generate needs input ids [batch, columns]")
        return generate(**options)
    check_ids(ids, wrapped.vocabulary)
    if cache is not None and cache.columns:
        if options.get("inputs_embeds") is not None:
            raise WrapError(
                f"inputs_embeds beside ids on a cache that has seen {cache.columns} columns; give the new ids"
            )
        cache.check_rows(len(ids))
        mask = options.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask
        new_columns(mask, *ids.shape)
        check_past(mask, cache, ids.shape[1])
        past = past_mask(cache, ids.device).to(mask.dtype)
        options["attention_mask"] = torch.cat([past, mask[:, mask.shape[1] - ids.shape[1] :]], 1)
    return generate(ids, **options)


def run(wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the model's own, after which a prefix cache stores what was generated exactly."""
    of_class: Any = type(wrapped.model)
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if ids is not None:
        check_ids(ids, wrapped.vocabulary)
    replies: list[_Reply] = []
    before = _REPLIES.set(replies)
    sequences: Tensor | None = None
    try:
        result = of_class.generate(wrapped.model, *args, **kwargs)
        wrapped.check_unread()
        sequences = result if isinstance(result, Tensor) else result.sequences
        return result
    finally:
        _REPLIES.reset(before)
        for reply in replies:
            reply.reuse.reply_ended(None if sequences is None else reply.fed(sequences.tolist()))


@dataclass
class _Reply:
    """A prompt of `columns` columns in `generate`, and the tokens that end what is generated after it."""

    reuse: Reuse
    columns: int
    ends: list[int]

    def fed(self, sequences: list[list[int]]) -> list[list[int]] | None:
        """Of each row's answer what the model was fed, without the padding after its end; None if that is not known."""
        answers = []
        steps = self.reuse.cache.columns - self.columns
        for sequence in sequences:
            answer = sequence[self.columns :]
            if len(answer) != steps + 1:
                return None
            end = next((place for place, token in enumerate(answer) if token in self.ends), steps)
            answers.append(answer[: min(steps, end + 1)])
        return answers


_REPLIES: ContextVar[list[_Reply] | None] = ContextVar("replies", default=None)


def prepare_cache(
    wrapped: Wrapped, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *_: Any, **__: Any
) -> None:
    """Stands in for the model's own: gives generate a cache of ours, and refuses what cannot run over one."""
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        raise WrapError("assisted decoding rolls the cache back, which a compressed one cannot; generate without it")
    if generation_config.use_cache is False:
        raise WrapError("use_cache=False: a wrapped model needs its cache; leave use_cache out")
    asked = generation_config.cache_implementation
    if asked is not None and asked != wrapped.model.generation_config.cache_implementation:
        raise WrapError(f"cache_implementation={asked!r} was asked for while the model is wrapped; leave it out")
    cache = model_kwargs.get(wrapped.cache_name)
    if cache is None:
        cache = model_kwargs[wrapped.cache_name] = wrapped.new_cache()
    wrapped.check(cache)
    cache._is_user_defined = True  # pyright: ignore[reportAttributeAccessIssue]


def prefill(
    wrapped: Wrapped, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands in for the model's own: feeds the prompt of `generate` to the cache, which knows where it ends."""
    cache = model_kwargs.get(wrapped.cache_name)
    of_class: Any = type(wrapped.model)
    own = partial(of_class._prefill, wrapped.model, input_ids, generation_config, model_kwargs)
    if not isinstance(cache, CompressedCache):
        return own(*args, **kwargs)
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    columns, width = input_ids.shape[1], mask_width(mask, generation_config)
    if embeds is not None:  # those of the whole text, as transformers has it
        columns = embeds.shape[1] - cache.columns
    elif cache.columns and width == columns:
        columns -= cache.columns
    if columns < 1:
        given = (
            "" if embeds is None else f", but inputs_embeds are {embeds.shape[1]}: generate takes those of all of them"
        )
        raise WrapError(
            f"the cache has seen {cache.columns} columns already{given}; give generate at least one new token"
        )
    if width is not None and width != cache.columns + columns:
        raise WrapError(
            f"attention_mask is {[len(input_ids), width]}, expected {cache.columns + columns} columns: one for each of "
            f"these {columns}" + (f" and of the {cache.columns} that the cache has seen" if cache.columns else "")
        )
    if input_ids.numel():
        check_ids(input_ids, wrapped.vocabulary)
    if embeds is None and columns < input_ids.shape[1]:
        _check_past_ids(cache, input_ids[:, :-columns], mask)
    counts, chunk = new_columns(mask, input_ids.shape[0], columns), generation_config.prefill_chunk_size
    generation_config.prefill_chunk_size = None  # chunks are ours: they count each row's own tokens
    # Whatever else the model is given may change the KV of the same ids.
    others = {name: model_kwargs[name] for name in model_kwargs.keys() - {"attention_mask", "position_ids"}}
    alone = not any(isinstance(value, Tensor) for value in others.values())
    source = {"input_ids": input_ids[:, -columns:]} if embeds is None else {"inputs_embeds": embeds[:, -columns:]}
    asked = asked_of_each_token(wrapped.model.config, model_kwargs)
    replies = _REPLIES.get()
    with (
        _repeated(cache, len(counts), generation_config),
        wrapped.prompt(cache, counts, columns, input_ids if alone else None, chunk, asked is not None) as reuse,
    ):
        if reuse is not None and replies is not None and generation_config.num_beams == 1 and reuse.follow():
            ends = generation_config.eos_token_id
            replies.append(_Reply(reuse, columns, ends if isinstance(ends, list) else [ends]))
        output = None
        for part in wrapped.parts(cache, counts, columns, chunk) if reuse is None else reuse.parts:
            if part.counts == counts:
                return own(*args, **kwargs)
            refuse_parts(asked)
            inputs = {
                name: part.take(value)
                if isinstance(value, Tensor) and value.shape[:2] == (len(counts), columns)
                else value
                for name, value in {**others, **source}.items()
            }
            output = wrapped.model(**inputs, attention_mask=part.mask(input_ids.device))
        return output


def without_what_the_cache_knows(wrapped: Wrapped, own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The model's `own` prepare_inputs_for_generation, which leaves mask and positions out of decoding steps.

    They say what the cache knows, and to check them would stop a GPU's stream; the prompt's are checked.
    """

    @wraps(own)
    def prepare_inputs(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = own(*args, **kwargs)
        cache = inputs.get(wrapped.cache_name)
        if isinstance(cache, CompressedCache) and cache.columns and cache.prefill_until is None:
            return {name: value for name, value in inputs.items() if name not in ("attention_mask", "position_ids")}
        return inputs

    return prepare_inputs


def _check_past_ids(cache: CompressedCache, past: Tensor, mask: Tensor | None) -> None:
    """Raises CacheError where a whole text does not begin with the ids that `cache` was fed, as far as it knows them.

    `past` [B, columns fed]: B is a multiple of the cache's rows.
    """
    for row, ids in enumerate(past.tolist()):
        own = row * cache.rows // len(past)
        if mask is not None:
            ids = [token for token, real in zip(ids, mask[row].tolist(), strict=False) if real]
        if len(ids) == cache.seen_tokens[own]:  # else the mask is wrong, which is said elsewhere
            cache.fed.check(own, ids[: len(cache.fed.rows[own])])


@contextmanager
def _repeated(cache: CompressedCache, rows: int, generation_config: Any) -> Iterator[None]:
    """Repeats the rows of a filled cache as generate did those of the ids, for beams and several answers.

    If the prompt fails in its first call, the cache is as it was.
    """
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if not cache.columns or copies == 1 or rows != cache.rows * copies:
        yield
        return
    before, calls = cache.fork(), cache.calls
    cache.become(cache.fork(copies))
    try:
        yield
    except BaseException:
        if cache.calls == calls:
            cache.become(before)
        raise
