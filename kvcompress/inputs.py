"""What a wrapped model's decoder is called with: checked, and given the positions and mask that the cache knows.

B rows, T columns of this call; padding may stand before the tokens of a row, never behind or between them.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kvcompress.cache import CompressedCache
from kvcompress.compat import cache_argument
from kvcompress.errors import CacheError, WrapError


def decoder_of(model: nn.Module) -> nn.Module:
    """The innermost module that takes ids, positions and the cache: a base model, or opt's decoder inside it."""
    found = None
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters
        if {"input_ids", "position_ids", cache_argument(module.forward)} <= set(parameters):
            found = module
    if found is None:
        raise WrapError(
            f"{type(model).__name__} has no module that takes input_ids, position_ids and a cache; "
            "only decoder-only language models of transformers can be wrapped"
        )
    return found


def call_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `module` by name."""
    if not args:
        return dict(kwargs)
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def new_columns(mask: Tensor | None, rows: int, columns: int) -> list[int]:
    """How many of the last `columns` columns of a 2-D padding mask are tokens, per row.

    Raises WrapError for a mask of another kind or width, and for padding behind a token.
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
                f"row {row} of attention_mask has padding behind a token; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
    return recent.sum(-1).tolist()


def check_positions(given: Tensor | None, cache: CompressedCache, columns: int, counts: list[int]) -> None:
    """Raises WrapError if position ids were given that do not count up with the tokens of each row."""
    if given is None:
        return
    if given.dim() != 2 or given.shape[-1] != columns:
        raise WrapError(f"position_ids are {list(given.shape)}, expected [batch, {columns}] for these ids")
    for row, count in enumerate(counts):
        ids = given[row if given.shape[0] > 1 else 0, columns - count :].tolist()
        starts = {cache.seen_tokens[row], cache.columns + columns - count}
        if ids and (ids != list(range(ids[0], ids[0] + count)) or ids[0] not in starts):
            raise WrapError(
                f"position_ids of row {row} are {ids[:4]}…; a compressed cache counts positions itself, "
                f"from {cache.seen_tokens[row]} here: leave position_ids out"
            )


def prepare(cache: CompressedCache, arguments: dict[str, Any], vocabulary: int | None) -> dict[str, Any]:
    """Begins a call on `cache` and returns the decoder's arguments with its own positions and padding mask."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    source = ids if ids is not None else embeds
    if source is None:
        raise WrapError("neither input_ids nor inputs_embeds was given")
    rows, columns = source.shape[:2]
    if columns == 0:
        raise WrapError("the input has no columns; feed at least one token")
    if ids is not None and vocabulary is not None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise WrapError(f"id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens")
    counts = new_columns(arguments.get("attention_mask"), rows, columns)
    if cache.prefill_until is None and not all(counts):
        raise WrapError(f"row {counts.index(0)} of the batch is all padding; give each row at least one token")
    cache.check_rows(rows)
    check_positions(arguments.get("position_ids"), cache, columns, counts)
    cache.begin_call(columns, counts)
    device = source.device
    starts = torch.tensor(
        [first - (columns - count) for first, count in zip(cache.first_position(), counts, strict=True)], device=device
    )
    positions = (torch.arange(columns, device=device) + starts[:, None]).clamp(min=0)
    arguments = {**arguments, "position_ids": positions, "attention_mask": _padding_mask(cache, device)}
    return arguments


def _padding_mask(cache: CompressedCache, device: torch.device) -> Tensor | None:
    """All padding so far at the left of each row: [B, columns fed and to be fed]; None without padding."""
    total = cache.columns + cache.call.columns
    padding = [
        total - seen - count for seen, count in zip(cache.seen_tokens, cache.call.counts, strict=True)
    ]
    if not any(padding):
        return None
    return (torch.arange(total, device=device) >= torch.tensor(padding, device=device)[:, None]).long()


def finish(cache: CompressedCache, hidden: Tensor) -> None:
    """Ends the call. Raises WrapError for a layer that never asked the cache, CacheError for NaN."""
    expected = [seen + new for seen, new in zip(cache.seen_tokens, cache.call.counts, strict=True)]
    for layer in cache.layers:
        if layer.store.seen != expected:
            raise WrapError(
                f"layer {layer.index} did not hand its keys to the cache (it got {layer.store.seen} of {expected} tokens); "
                "this model's attention cannot run over a compressed cache"
            )
    if bool(hidden[:, -1].isnan().any()):
        raise CacheError(
            f"the model's output is NaN{_first_nan(cache)}; check the weights and the dtype "
            "(float16 overflows in some models; bfloat16 or float32 do not)"
        )
    cache.end_call()


def _first_nan(cache: CompressedCache) -> str:
    for layer in cache.layers:
        for column in layer.store.filled:
            if bool(column.view.isnan().any()):
                return f", and so is the KV of layer {layer.index}"
    return ""
