"""What a user may get wrong, or ask for although it cannot be: one error that names it, or the right result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvcompress as kvc
from kvcompress import CacheError, CompressedCache, WrapError, Wrapped
from tests.families import OPTIONS, VOCABULARY, build, tiny

SNAPKV = "snapkv(budget=12, window=4)"
KIVI = "kivi(bits=2, group_size=8, residual=8)"
METHODS = ["exact", "streaming_llm(sinks=2, window=10)", "h2o(heavy=6, recent=6)", SNAPKV, KIVI, f"{SNAPKV} | {KIVI}"]
NEW = {"max_new_tokens": 3, "do_sample": False}


def text(rows: int = 1, columns: int = 20) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(5))


def right_padded() -> Tensor:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    return mask


def row_of_padding() -> Tensor:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1] = 0
    return mask


Feed = Callable[[Wrapped, CompressedCache], Any]

REFUSED: dict[str, tuple[Feed, str]] = {
    "ids of one dimension": (
        lambda w, c: w.prefill(text()[0], cache=c),
        r"ids are \[20\].*for one sequence pass ids\[None\]",
    ),
    "ids as a list": (lambda w, c: w.prefill(text().tolist(), cache=c), "ids are a list, expected an integer tensor"),  # pyright: ignore[reportArgumentType]
    "ids as a list, to generate": (lambda w, c: w.generate([[5, 6]], cache=c, **NEW), "ids are a list"),  # pyright: ignore[reportArgumentType]
    "no ids to generate from": (lambda w, c: w.generate(cache=c, **NEW), "generate needs input ids"),
    "ids that are no integers": (lambda w, c: w(text().float(), cache=c), "torch.float32, expected an integer tensor"),
    "no columns": (lambda w, c: w.prefill(text()[:, :0], cache=c), r"ids are \[1, 0\], so they hold no token"),
    "no columns, in a call": (lambda w, c: w(text()[:, :0], cache=c), r"ids are \[1, 0\]"),
    "no columns, to generate": (lambda w, c: w.generate(text()[:, :0], cache=c, **NEW), r"ids are \[1, 0\]"),
    "no rows": (lambda w, c: w.prefill(text()[:0], cache=c), r"ids are \[0, 20\]"),
    "a negative id": (lambda w, c: w.prefill(text() - 9, cache=c), r"id -\d+ is outside the model's vocabulary of 61"),
    "an id too large": (
        lambda w, c: w.prefill(text() + 55, cache=c),
        r"id \d+ is outside the model's vocabulary of 61",
    ),
    "an id too large, in a call": (lambda w, c: w(text() + 55, cache=c), "outside the model's vocabulary"),
    "an id too large, to generate": (lambda w, c: w.generate(text() + 55, cache=c, **NEW), "outside the model's vocab"),
    "an id too large, in the second chunk": (
        lambda w, c: w.prefill(torch.cat([text(), text() + 55], 1), cache=c, chunk=20),
        "outside the model's vocabulary",
    ),
    "a row of padding": (lambda w, c: w.prefill(text(2), row_of_padding(), c), "row 1 of the batch is all padding"),
    "a row of padding, in a call": (lambda w, c: w(text(2), c, row_of_padding()), "row 1 of the batch is all padding"),
    "a row of padding, to generate": (
        lambda w, c: w.generate(text(2), cache=c, attention_mask=row_of_padding(), **NEW),
        "row 1 of the batch is all padding; give each row at least one token",
    ),
    "padding at the right": (
        lambda w, c: w.prefill(text(2), right_padded(), c),
        r"row 1 of attention_mask has padding behind a token; pad on the left \(tokenizer.padding_side = 'left'\)",
    ),
    "padding at the right, to generate": (
        lambda w, c: w.generate(text(2), cache=c, attention_mask=right_padded(), **NEW),
        "row 1 of attention_mask has padding behind a token",
    ),
    "a 3-D mask": (lambda w, c: w(text(), c, torch.ones(1, 20, 20)), "attention_mask is a 3-D tensor"),
    "a 4-D mask": (lambda w, c: w.prefill(text(), torch.ones(1, 1, 20, 20), c), "attention_mask is a 4-D tensor"),
    "a mask by name of the layer": (
        lambda w, c: w(text(), c, {"full_attention": None}),  # pyright: ignore[reportArgumentType]
        "attention_mask is dict; a compressed cache takes the 2-D",
    ),
    "a mask too narrow": (
        lambda w, c: w.prefill(text(), torch.ones(1, 9), c),
        r"is \[1, 9\], expected \[1, at least 20",
    ),
    "a mask too wide": (lambda w, c: w.prefill(text(), torch.ones(1, 29), c), r"is \[1, 29\], expected 20 columns"),
    "a mask too wide, to generate": (
        lambda w, c: w.generate(text(), c, attention_mask=torch.ones(1, 29, dtype=torch.long), **NEW),
        r"attention_mask is \[1, 29\], expected 20 columns",
    ),
    "a mask too narrow, to generate": (
        lambda w, c: w.generate(text(), c, attention_mask=torch.ones(1, 9, dtype=torch.long), **NEW),
        r"attention_mask is \[1, 9\], expected 20 columns",
    ),
    "a list of ids in the model's generate": (
        lambda w, c: w.model.generate(text().tolist(), **NEW),
        "ids are a list, expected an integer tensor",
    ),
    "ids of numpy in the model's generate": (
        lambda w, c: w.model.generate(input_ids=text().numpy(), **NEW),
        "ids are a ndarray, expected an integer tensor",
    ),
    "ids of numpy": (lambda w, c: w.prefill(text().numpy(), cache=c), "ids are a ndarray, expected an integer tensor"),  # pyright: ignore[reportArgumentType]
    "embeddings as a list": (
        lambda w, c: w.model(inputs_embeds=[[0.0]], **{w.cache_name: c}),
        r"inputs_embeds are a list, expected a tensor \[batch",
    ),
    "a mask of other rows": (lambda w, c: w.prefill(text(), torch.ones(2, 20), c), r"is \[2, 20\], expected \[1, at"),
    "positions that count down": (
        lambda w, c: w(text(), c, position_ids=torch.arange(20).flip(0)[None]),
        r"position_ids of row 0 are \[19, 18, 17, 16\]…; .* from 0 here: leave position_ids out",
    ),
    "positions with a gap": (
        lambda w, c: w(text(2), c, position_ids=torch.arange(20).repeat(2, 1) + torch.tensor([[0], [5]])),
        "position_ids of row 1 are",
    ),
    "positions of other columns": (
        lambda w, c: w(text(), c, position_ids=torch.arange(9)[None]),
        r"position_ids are \[1, 9\], expected \[batch, 20\]",
    ),
    "positions on several axes": (
        lambda w, c: w(text(), c, position_ids=torch.arange(3)[:, None, None] * torch.arange(20)),
        r"position_ids are \[3, 1, 20\]",
    ),
    "chunks of nothing": (
        lambda w, c: w.prefill(text(), cache=c, chunk=0),
        "chunk must be an integer of at least 1, got 0",
    ),
    "chunks in part": (lambda w, c: w.prefill(text(), cache=c, chunk=0.5), "chunk must be an integer .* got 0.5"),  # pyright: ignore[reportArgumentType]
    "no cache wanted": (
        lambda w, c: w.generate(text(), use_cache=False, **NEW),
        "use_cache=False: .* leave use_cache out",
    ),
    "no cache wanted, in a call": (lambda w, c: w.model(text(), use_cache=False), "use_cache=False"),
    **{
        f"a {kind} cache asked for": (
            lambda w, c, kind=kind: w.generate(text(), cache_implementation=kind, **NEW),
            f"cache_implementation='{kind}' was asked for while the model is wrapped; leave it out",
        )
        for kind in ("static", "offloaded_static", "quantized", "offloaded", "dynamic")
    },
    "a static cache": (
        lambda w, c: w.generate(text(), StaticCache(config=w.model.config, max_cache_len=64), **NEW),  # pyright: ignore[reportArgumentType]
        "the call was given a StaticCache; while wrapped, use wrapped.new_cache",
    ),
    "a foreign cache": (lambda w, c: w(text(), DynamicCache()), "the call was given a DynamicCache"),  # pyright: ignore[reportArgumentType]
    "a foreign cache, to prefill": (lambda w, c: w.prefill(text(), cache=DynamicCache()), "given a DynamicCache"),  # pyright: ignore[reportArgumentType]
    "a foreign filled cache": (
        lambda w, c: w.generate(text(), filled_dynamic(w.model), **NEW),  # pyright: ignore[reportArgumentType]
        "the call was given a DynamicCache",
    ),
    "assisted decoding": (
        lambda w, c: w.generate(text(), c, assistant_model=tiny("llama"), **NEW),
        "assisted decoding",
    ),
    "prompt lookup": (lambda w, c: w.generate(text(), c, prompt_lookup_num_tokens=3, **NEW), "assisted decoding"),
    "attention weights": (lambda w, c: w(text(), c, output_attentions=True), "output_attentions=True: .* leave it out"),
    "attention weights of generate": (
        lambda w, c: w.generate(text(), c, output_attentions=True, return_dict_in_generate=True, **NEW),
        "output_attentions=True",
    ),
}


def filled_dynamic(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    shape = (1, 2, 4, 16)
    for layer in range(2):
        cache.update(torch.zeros(shape), torch.zeros(shape), layer)
    return cache


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_is_refused_and_leaves_the_cache_as_it_was(name: str) -> None:
    feed, reason = REFUSED[name]
    ids = text(1, 18)  # fewer than were refused, so that the end of that prompt would be missed
    with kvc.wrap(tiny("llama"), SNAPKV) as wrapped:
        cache = wrapped.new_cache()
        with pytest.raises(WrapError, match=reason):
            feed(wrapped, cache)
        logits = wrapped(ids, cache=cache).logits
        fresh = wrapped.new_cache()
        assert torch.equal(logits, wrapped(ids, cache=fresh).logits)
        assert torch.equal(cache.kept(1), fresh.kept(1))
        assert cache.kept(1).shape[2] == 12


AGAIN: dict[str, tuple[Feed, str]] = {
    "an id too large": (lambda w, c: w.prefill(text() + 55, cache=c), "outside the model's vocabulary"),
    "other rows": (lambda w, c: w.prefill(text(3), cache=c), "holds 2 rows, but the call has 3; give one row of ids"),
    "rows for every answer": (lambda w, c: w(text(4), c), r"holds 2 rows, but the call has 4; use cache.fork\(2\)"),
    "other rows, in a call": (lambda w, c: w(text(1), c), "holds 2 rows, but the call has 1"),
    "other rows, to generate": (lambda w, c: w.generate(text(3), c, **NEW), "holds 2 rows, but the call has 3"),
    "a mask of the past that hides a token": (
        lambda w, c: w(text(2, 3), c, torch.tensor([[0] + [1] * 22, [0] * 8 + [1] * 15])),
        "row 0 of attention_mask has 19 tokens before the new ones, but the cache was fed 20",
    ),
    "a mask of the past that shows padding": (
        lambda w, c: w.generate(text(2, 3), c, attention_mask=torch.ones(2, 23, dtype=torch.long), **NEW),
        "row 1 of attention_mask has 20 tokens before the new ones, but the cache was fed 12",
    ),
    "a mask too wide, to the model's generate": (
        lambda w, c: w.model.generate(
            text(2, 3), attention_mask=torch.ones(2, 29, dtype=torch.long), **{w.cache_name: c}, **NEW
        ),
        r"attention_mask is \[2, 29\], expected 23 columns: one for each of these 3 and of the 20 that the cache has",
    ),
    "embeddings of what is new alone": (
        lambda w, c: w.generate(inputs_embeds=w.model.get_input_embeddings()(text(2, 3)), cache=c, **NEW),
        "has seen 20 columns already, but inputs_embeds are 3: generate takes those of all",
    ),
    "embeddings beside ids": (
        lambda w, c: w.generate(text(2, 3), c, inputs_embeds=w.model.get_input_embeddings()(text(2, 3)), **NEW),
        "inputs_embeds beside ids on a cache that has seen 20 columns; give the new ids",
    ),
    "a mask of neither": (
        lambda w, c: w(text(2, 3), c, torch.ones(2, 9)),
        r"is \[2, 9\], expected 3 columns for these ids, or 23 with those that the cache has seen",
    ),
    "positions from the start": (
        lambda w, c: w(text(2, 3), c, position_ids=torch.arange(3).repeat(2, 1)),
        r"position_ids of row 0 are \[0, 1, 2\]…; a compressed cache counts positions itself, from 20 here",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_filled_cache_is_left_as_it_was_too(name: str) -> None:
    feed, reason = AGAIN[name]
    ids, mask = text(2), torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    with kvc.wrap(tiny("llama"), SNAPKV) as wrapped:
        cache, other = wrapped.new_cache(), wrapped.new_cache()
        for each in (cache, other):
            wrapped.prefill(ids, mask, each)
        with pytest.raises((WrapError, CacheError), match=reason):
            feed(wrapped, cache)
        for each in (1, 5):
            found, expected = (wrapped(text(2, each), cache=one).logits for one in (cache, other))
            assert torch.equal(found, expected)
        assert torch.equal(cache.kept(0), other.kept(0))
        assert cache.kept(0).shape[2] == 12 + 6  # none of it was taken for a prompt


@pytest.mark.parametrize("name", ["crop", "activate_past_recording", "reset"])
def test_what_would_take_a_cache_back_is_refused_by_name(name: str) -> None:
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(text(), cache=cache)
        with pytest.raises(CacheError, match={"reset": "make a new one"}.get(name, "assisted decoding")):
            getattr(cache, name)(*([3] if name == "crop" else []))
        assert cache.kept(0).shape[2] == 20


@pytest.mark.parametrize("method", ["exact", "streaming_llm(sinks=2, window=10)"])
def test_wrapping_twice_is_refused_and_the_first_goes_on(method: str) -> None:
    ids = text()
    with kvc.wrap(tiny("llama"), SNAPKV) as wrapped:
        expected = wrapped(ids).logits
        with (
            pytest.raises(WrapError, match=r"wrapped already; leave the first `with wrap"),
            kvc.wrap(wrapped.model, method),
        ):
            pass
        with pytest.raises(WrapError, match="wrapped already"), wrapped:
            pass
        assert torch.equal(wrapped(ids).logits, expected)
        assert wrapped.cache.kept(0).shape[2] == 12


def test_outside_of_the_block_nothing_runs() -> None:
    ids = text()
    wrapped = kvc.wrap(tiny("llama"), SNAPKV)
    with wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
    for call in (wrapped, wrapped.prefill, wrapped.generate):
        with pytest.raises(WrapError, match=r"the model is not wrapped here; use `with wrap\(model, method\)"):
            call(ids)
    over_it = {wrapped.cache_name: cache}
    reason = "used outside of a wrapped model's forward pass; pass it"
    with torch.no_grad(), pytest.raises(CacheError, match=reason):
        wrapped.model(ids, **over_it)
    with pytest.raises(CacheError, match=reason):
        wrapped.model.generate(ids, **over_it, **NEW)
    with wrapped:
        assert wrapped(ids, cache=cache).logits.shape == (1, 20, VOCABULARY)


def test_a_cache_of_another_model_is_refused() -> None:
    ids = text()
    model, other = tiny("llama"), build("llama", **OPTIONS["llama"])
    other.get_input_embeddings().weight.data[7] += 1
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
    with kvc.wrap(other, "exact") as wrapped:
        for call in (wrapped, wrapped.prefill, lambda ids, cache: wrapped.generate(ids, cache, **NEW)):
            with pytest.raises(CacheError, match=r"this cache was made for another model .* make one with"):
                call(ids, cache=cache)


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_the_weights_is_named(method: str) -> None:
    model = build("llama", **OPTIONS["llama"])
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.nan
    caches = []
    reason = r"NaN.*[Cc]heck .* dtype \(float16 overflows"
    with pytest.raises(ValueError, match=reason), kvc.wrap(model, method) as wrapped:
        caches.append(wrapped.new_cache())
        wrapped.prefill(text(), cache=caches[0])
    if kvc.parse(method).position_mode == "cache":
        assert not caches  # its rotary could not even be checked
        return
    with kvc.wrap(model, method) as wrapped, pytest.raises(CacheError, match="failed midway"):
        wrapped(text(), cache=caches[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_that_fails_midway_spoils_its_cache_and_no_other(method: str) -> None:
    ids = text()
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        fork = cache.fork()
        hook = wrapped.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrapped(ids[:, :1], cache=cache)
        hook.remove()
        for call in (wrapped, wrapped.prefill):
            with pytest.raises(
                CacheError, match="failed midway, so its layers disagree; go on from a fork made before it"
            ):
                call(ids[:, :1], cache=cache)
        with pytest.raises(CacheError, match="middle of a forward pass"):
            cache.fork()
        fresh = wrapped.new_cache()
        wrapped.prefill(ids, cache=fresh)
        assert torch.equal(wrapped(ids[:, :1], cache=fork).logits, wrapped(ids[:, :1], cache=fresh).logits)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_a_number_of_forks_that_means_nothing_is_named(n: Any) -> None:
    with kvc.wrap(tiny("llama"), "exact") as wrapped, pytest.raises(CacheError, match=f"n at least 1; got {n!r}"):
        wrapped.new_cache().fork(n)


def test_a_byte_budget_that_holds_no_token_is_named() -> None:
    reason = r"a budget of 10 bytes does not hold one token \(\d+ bytes\); give more"
    with kvc.wrap(tiny("llama"), "snapkv(budget='10B', window=4)") as wrapped, pytest.raises(ValueError, match=reason):
        wrapped.prefill(text())


def test_a_group_size_that_does_not_divide_the_head_is_named() -> None:
    reason = "group_size 12 does not divide the model's head dim 16; choose a divisor"
    with (
        kvc.wrap(tiny("llama"), "kivi(group_size=12, residual=24)") as wrapped,
        pytest.raises(ValueError, match=reason),
    ):
        wrapped.prefill(text())
