"""A decoding step asks an accelerator for nothing: every answer, and every plain copy to it, would stop its stream.

The `meta` device stands in for one. It computes shapes only, so whatever reads a value on it fails: `item`, `tolist`,
`bool`, `nonzero`, a copy to the host.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompress as kvc
from kvcompress import inputs
from kvcompress.methods.view import RecentQueries
from tests.bugs.common import left_padding, text
from tests.families import tiny

METHODS = {
    "exact": "exact",
    "streaming_llm": "streaming_llm(sinks=2, window=9)",
    "streaming_llm that keeps positions": "streaming_llm(sinks=2, window=9, positions='original')",
    "h2o": "h2o(heavy=6, recent=6)",
    "h2o that turns": "h2o(heavy=6, recent=6, positions='cache')",
    "snapkv": "snapkv(budget=12, window=4)",
    "kivi": "kivi(bits=2, group_size=8, residual=8)",
}
ACCELERATOR = torch.device("meta")


class NoWaitingCopies(TorchDispatchMode):
    """Fails on a copy between devices that waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, Tensor) and each.dim()]
        waits = not (kwargs or {}).get("non_blocking", False)
        if waits and isinstance(result, Tensor) and any(each.device != result.device for each in given):
            raise AssertionError(f"{func} copied from {given[0].device} to {result.device} and waited")
        return result


class NoWaitingLists(TorchFunctionMode):
    """Fails on a tensor that is made on an accelerator from numbers of the host, which is such a copy too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device == ACCELERATOR:
            raise AssertionError(f"{func.__name__} copied {args[0]} to {ACCELERATOR} and waited")
        return result


@contextmanager
def on_accelerator(wrapped: kvc.Wrapped, cache: kvc.CompressedCache) -> Iterator[None]:
    """The model and what the cache holds on an accelerator, where a host that waits fails."""
    wrapped.model.to(ACCELERATOR)
    for layer in cache.layers:
        for column in layer.store.columns().values():
            column.buffer = column.buffer.to(ACCELERATOR)
        if layer.recent is not None:
            layer.recent = RecentQueries(layer.recent.queries.to(ACCELERATOR), layer.recent.real, layer.recent.softmax)
    if cache.rotaries is not None:
        for rotary in filter(None, cache.rotaries):
            object.__setattr__(rotary, "_turns", rotary._turns.to(ACCELERATOR))
    with NoWaitingCopies(), NoWaitingLists():
        yield


def ids(rows: int, columns: int = 1) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.int64, device=ACCELERATOR)


@torch.no_grad()
def step(wrapped: kvc.Wrapped, **inputs: Any) -> None:
    """One call of the model itself; `wrapped(...)` looks at the weights first, and these hold no values."""
    wrapped.model(**inputs, use_cache=True)


CASES = [
    (family, method) for family in ("llama", "gemma2") for method in METHODS if family == "llama" or "llm" in method
]


@pytest.mark.parametrize("padding", [(0, 0), (0, 17)], ids=["even", "padded"])
@pytest.mark.parametrize(("family", "method"), CASES)
def test_no_decoding_step_asks_an_accelerator(family: str, method: str, padding: tuple[int, ...]) -> None:
    with kvc.wrap(copy.deepcopy(tiny(family)), METHODS[method]) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(text(2, 22), left_padding(22, *padding), cache)
        wrapped(text(2, 1), cache=cache)
        before = list(cache.seen_tokens)
        with on_accelerator(wrapped, cache):
            for columns in (1, 1, 3):  # the first fills kivi's residual
                step(wrapped, input_ids=ids(2, columns), **{wrapped.cache_name: cache})
        assert cache.seen_tokens == [seen + 5 for seen in before]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_nor_does_a_step_of_generate_or_of_its_beams(method: str) -> None:
    with kvc.wrap(copy.deepcopy(tiny("llama")), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(text(3, 23), cache=cache)
        with on_accelerator(wrapped, cache):
            for columns in (24, 25):
                cache.reorder_cache(torch.empty(3, dtype=torch.int64, device=ACCELERATOR))
                given = wrapped.model.prepare_inputs_for_generation(
                    ids(3),
                    attention_mask=torch.ones(3, columns, dtype=torch.int64, device=ACCELERATOR),
                    position_ids=torch.full((3, 1), columns - 1, device=ACCELERATOR),
                    **{wrapped.cache_name: cache},
                )
                step(wrapped, **given)
        assert cache.seen_tokens == [25] * 3


@pytest.mark.parametrize("by_model", [False, True])
def test_nan_that_comes_up_while_decoding_is_found_when_generate_ends(
    monkeypatch: pytest.MonkeyPatch, by_model: bool
) -> None:
    monkeypatch.setattr(inputs, "_may_wait", lambda cache, given: cache.prefill_until is not None)  # as on a GPU
    with kvc.wrap(tiny("llama"), "exact") as wrapped:

        def spoil(ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] == 12:
                wrapped.cache.layers[1].store.values[0, 0, 3] = torch.nan
            return scores

        run = wrapped.model.generate if by_model else wrapped.generate
        options = {"max_new_tokens": 5, "do_sample": False}
        with pytest.raises(kvc.CacheError, match="output is NaN, and so is the KV of layer 1"):
            run(text(1, 10), logits_processor=[spoil], **options)
        assert run(text(1, 10), **options).shape == (1, 15)
