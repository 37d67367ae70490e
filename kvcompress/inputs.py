"""What a wrapped model's decoder is called with: checked, and given the positions and mask that the cache knows.

B rows, T columns of this call; padding may stand before the tokens of a row, never behind or between them.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from transformers import PreTrainedConfig

from kvcompress.cache import CompressedCache
from kvcompress.errors import CacheError, WrapError
from kvcompress.stores.slots import column


def call_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `module` by name."""
    if not args:
        return dict(kwargs)
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def cache_in(arguments: dict[str, Any]) -> Any:
    """The cache among the decoder's arguments, under its new or its old name; None if there is none."""
    cache = arguments.get("cache")
    return cache if cache is not None else arguments.get("past_key_values")


def under_torch_compile() -> bool:
    """Whether torch.compile runs this call.

    Its tracer hands code that it cannot trace back to Python, where `is_compiling` is false; the tracer stays set.
    """
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def check_ids(ids: Any, vocabulary: int | None) -> None:
    """Raises WrapError unless `ids` is an integer tensor [batch, columns] of tokens that the model knows.

    Without a `vocabulary` their values are not asked for, which would stop a GPU's stream.
    """
    if not isinstance(ids, Tensor):
        raise WrapError(
            f"ids are a {type(ids).__name__}, expected an integer tensor [batch, columns]; "
            'a tokenizer gives it as tokenizer(text, return_tensors="pt").input_ids'
        )
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise WrapError(
            f"ids are {list(ids.shape)} of {ids.dtype}, expected an integer tensor [batch, columns]"
            + ("; for one sequence pass ids[None]" if ids.dim() == 1 else "")
        )
    if not ids.numel():
        raise WrapError(f"ids are {list(ids.shape)}, so they hold no token; feed at least one row and one column")
    if vocabulary is None:
        return
    rows = ids.tolist()
    low, high = min(map(min, rows)), max(map(max, rows))
    if low < 0 or high >= vocabulary:
        raise WrapError(f"id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens")


def asked_of_each_token(config: PreTrainedConfig, options: dict[str, Any]) -> str | None:
    """The option of a call, or of the model's configuration, that asks for something of every token of a prompt."""
    for name in ("output_hidden_states", "output_router_logits"):
        if options.get(name) or getattr(config, name, False) or getattr(config.get_text_config(), name, False):
            return name
    return None


def refuse_parts(asked: str | None) -> None:
    """Raises WrapError if something was asked for of every token of a prompt that is fed in parts."""
    if asked is not None:
        raise WrapError(
            f"{asked}=True asks for something of every token, but this prompt is fed in parts, of which only the last "
            "one's is given; feed it without a chunk size, no longer than the model was trained for, or leave it out"
        )


def new_columns(mask: Tensor | None, rows: int, columns: int) -> list[int]:
    """How many of the last `columns` columns of a 2-D padding mask are tokens, per row.

    Raises WrapError for a mask of another kind, one that is too narrow, and for padding behind a token.
    """
    if mask is None:
        return [columns] * rows
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"a {mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
        raise WrapError(f"attention_mask is {kind}; a compressed cache takes the 2-D padding mask [batch, columns]")
    if mask.shape[0] != rows or mask.shape[1] < columns:
        raise WrapError(f"attention_mask is {list(mask.shape)}, expected [{rows}, at least {columns}] for these ids")
    recent = mask[:, mask.shape[1] - columns :].bool()
    if columns > 1:
        behind = (recent[:, :-1] & ~recent[:, 1:]).any(-1)
        if bool(behind.any()):
            row = int(behind.nonzero()[0])
            raise WrapError(
                f"row {row} of attention_mask has padding behind a token; pad on the left (tokenizer.padding_side = "
                "'left'), or, where generate took the pad token in a text for padding, pass a mask of ones"
            )
    return recent.sum(-1).tolist()


def check_past(mask: Tensor | None, cache: CompressedCache, columns: int) -> None:
    """Raises WrapError unless `mask` covers the call's `columns` columns alone, or says of the past what was fed.

    What was fed cannot be masked out again, and a mask that is too wide belongs to other ids.
    """
    if mask is None or mask.shape[1] == columns:
        return
    past = mask[:, : mask.shape[1] - columns].bool()
    if past.shape[1] != cache.columns:
        raise WrapError(
            f"attention_mask is {list(mask.shape)}, expected {columns} columns for these ids"
            + (f", or {cache.columns + columns} with those that the cache has seen" if cache.columns else "")
        )
    for row, (said, seen) in enumerate(zip(past.sum(-1).tolist(), cache.seen_tokens, strict=False)):
        if said != seen:
            raise WrapError(
                f"row {row} of attention_mask has {said} tokens before the new ones, but the cache was fed {seen}; "
                "pass the mask that it was filled with, or only the mask of the new ids"
            )


def check_positions(given: Tensor | None, cache: CompressedCache, columns: int, counts: list[int]) -> None:
    """Raises WrapError if position ids were given that do not count up with the tokens of each row."""
    if given is None:
        return
    if given.dim() == 3 and bool((given == given[:1]).all()):  # several axes, which agree on text
        given = given[0]
    if given.dim() == 3:
        raise WrapError(
            f"position_ids are {list(given.shape)}, several axes that differ, as images have them; a compressed cache "
            "counts tokens of text: leave the images out"
        )
    if given.dim() != 2 or given.shape[-1] != columns:
        raise WrapError(f"position_ids are {list(given.shape)}, expected [batch, {columns}] for these ids")
    seen_tokens = cache.seen_tokens or [0] * len(counts)
    for row, count in enumerate(counts):
        ids = given[row if given.shape[0] > 1 else 0, columns - count :].tolist()
        starts = {seen_tokens[row], cache.columns + columns - count}
        if ids and (ids != list(range(ids[0], ids[0] + count)) or ids[0] not in starts):
            raise WrapError(
                f"position_ids of row {row} are {ids[:4]}…; a compressed cache counts positions itself, "
                f"from {seen_tokens[row]} here: leave position_ids out"
            )


def _may_wait(cache: CompressedCache, given: Tensor) -> bool:
    """Whether what is `given` may be read: on a GPU, whose stream that stops, in prompts only."""
    return given.device.type == "cpu" or cache.columns == 0 or cache.prefill_until is not None


def prepare(cache: CompressedCache, arguments: dict[str, Any], vocabulary: int | None) -> dict[str, Any]:
    """Begins a call on `cache` and returns the decoder's arguments with its own positions and padding mask."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    source = ids if ids is not None else embeds
    if source is None:
        raise WrapError("neither input_ids nor inputs_embeds was given")
    if ids is not None:
        check_ids(ids, vocabulary if _may_wait(cache, ids) else None)
    elif not isinstance(source, Tensor) or source.dim() != 3 or not source.numel():
        given = list(source.shape) if isinstance(source, Tensor) else f"a {type(source).__name__}"
        raise WrapError(f"inputs_embeds are {given}, expected a tensor [batch, columns, hidden size], none of them 0")
    rows, columns = source.shape[:2]
    counts = new_columns(arguments.get("attention_mask"), rows, columns)
    if cache.prefill_until is None and not all(counts):
        raise WrapError(f"row {counts.index(0)} of the batch is all padding; give each row at least one token")
    cache.check_rows(rows)
    check_past(arguments.get("attention_mask"), cache, columns)
    check_positions(arguments.get("position_ids"), cache, columns, counts)
    # Whatever else the model is given may change the KV of the same ids.
    others = arguments.keys() - {"input_ids", "attention_mask", "position_ids", "cache_position"}
    alone = not any(isinstance(arguments[name], Tensor) for name in others)
    cache.begin_call(columns, counts, ids if alone else None)
    device = source.device
    starts = [first - (columns - count) for first, count in zip(cache.first_position(), counts, strict=True)]
    if starts.count(starts[0]) == rows and starts[0] >= 0:
        positions = torch.arange(starts[0], starts[0] + columns, device=device).expand(rows, columns)
    else:
        positions = (torch.arange(columns, device=device) + column(starts, device)).clamp(min=0)
    return {**arguments, "position_ids": positions, "attention_mask": _padding_mask(cache, device)}


def past_mask(cache: CompressedCache, device: torch.device) -> Tensor:
    """What was fed, its padding gathered at the left of each row: bool [B, columns fed]."""
    padding = column([cache.columns - seen for seen in cache.seen_tokens], device)
    return torch.arange(cache.columns, device=device) >= padding


def _padding_mask(cache: CompressedCache, device: torch.device) -> Tensor | None:
    """All padding so far at the left of each row: [B, columns fed and to be fed]; None without padding."""
    total = cache.columns + cache.call.columns
    padding = [total - seen - count for seen, count in zip(cache.seen_tokens, cache.call.counts, strict=True)]
    if not any(padding):
        return None
    return (torch.arange(total, device=device) >= column(padding, device)).long()


def check_fed(cache: CompressedCache) -> None:
    """Raises WrapError for a layer that was not given the keys of the call's tokens, once each."""
    expected = [seen + new for seen, new in zip(cache.seen_tokens, cache.call.counts, strict=True)]
    for layer in cache.layers:
        if layer.store.seen != expected:
            raise WrapError(
                f"layer {layer.index} did not hand its keys to the cache once (it got {layer.store.seen} of {expected} "
                "tokens); this model's attention cannot run over a compressed cache"
            )


def finish(cache: CompressedCache, hidden: Tensor, unread: Tensor | None) -> Tensor | None:
    """Ends the call. Raises WrapError for a layer that never asked the cache, CacheError for NaN.

    A GPU is not asked for NaN while decoding. Returns what `check_output` is to look at later: it holds NaN if this
    call's output or what is `unread` of former ones did; None if nothing is left unread.
    """
    check_fed(cache)
    largest = hidden[:, -1].amax()  # one NaN makes the largest NaN
    read = _may_wait(cache, hidden)
    if read:
        check_output(cache, largest)
    cache.end_call()
    return None if read else largest if unread is None else torch.maximum(largest, unread)


def check_output(cache: CompressedCache, largest: Tensor) -> None:
    """Raises CacheError if the `largest` value of the model's output is NaN."""
    if math.isnan(largest):
        raise CacheError(
            f"the model's output is NaN{_first_nan(cache)}; check the weights and the dtype "
            "(float16 overflows in some models; bfloat16 or float32 do not)"
        )


def _first_nan(cache: CompressedCache) -> str:
    for layer in cache.layers:
        for part in layer.store.filled:
            if bool(part.view.isnan().any()):
                return f", and so is the KV of layer {layer.index}"
    return ""
