"""The contract of `wrap`: calls, prefill, generate, turns and forks agree with the plain model and each other, and the
model is afterwards what it was."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import kvcompress as kvc
from kvcompress import CacheError, WrapError, Wrapped
from tests.families import OPTIONS, build, tiny

SNAPKV = "snapkv(budget=12, window=4)"
KIVI = "kivi(bits=2, group_size=8, residual=8)"
METHODS = ["exact", "streaming_llm(sinks=2, window=10)", "h2o(heavy=6, recent=6)", SNAPKV, KIVI, f"{SNAPKV} | {KIVI}"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def text(rows: int, columns: int, seed: int = 5) -> Tensor:
    return torch.randint(2, 61, (rows, columns), generator=torch.Generator().manual_seed(seed))


def padded(ids: Tensor, *padding: int) -> Tensor:
    """The mask that leaves out so many columns at the left of each row."""
    return (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()


def plain_greedy(model: PreTrainedModel, ids: Tensor, count: int = 6) -> list[int]:
    """Greedy tokens of the unwrapped model without any cache, one row [T]."""
    tokens = ids[None]
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(ids) :].tolist()


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All of a model that wrapping might leave changed."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            shown = list(value) if isinstance(value, dict) else id(value)
            found[f"{name}.{key}"] = shown
        if hasattr(module, "config"):
            found[f"{name} config"] = copy.deepcopy(vars(module.config))
    found["generation"] = model.generation_config.to_dict()
    found |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name


def fail(wrapped: Wrapped) -> None:
    raise KeyboardInterrupt


def fail_in_the_model(wrapped: Wrapped) -> None:
    hook = wrapped.model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        wrapped.prefill(text(1, 9))
    finally:
        hook.remove()


def refuse_a_call(wrapped: Wrapped) -> None:
    wrapped.generate(text(1, 9), use_cache=False, **GREEDY)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
@pytest.mark.parametrize("end", [None, fail, fail_in_the_model, refuse_a_call])
def test_leaving_restores_the_model(family: str, end: Callable[[Wrapped], None] | None) -> None:
    model = build(family, **OPTIONS[family])
    ids = text(2, 20)
    outputs: Callable[[], list[Tensor]] = lambda: [  # noqa: E731
        model(ids, attention_mask=padded(ids, 0, 7)).logits,
        model.generate(ids, attention_mask=padded(ids, 0, 7), **GREEDY),
    ]
    with torch.no_grad():
        expected = outputs()
    before = snapshot(model)

    def use() -> None:
        with kvc.wrap(model, "snapkv(budget=12, window=4)") as wrapped:
            wrapped.generate(ids, **GREEDY)
            if end is not None:
                end(wrapped)

    if end is None:
        use()
    else:
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError, WrapError)):
            use()
    assert_unchanged(before, snapshot(model))
    with torch.no_grad():
        for one, other in zip(outputs(), expected, strict=True):
            assert torch.equal(one, other)


def test_keys_moved_to_slots_leave_the_model_as_it_was_too() -> None:
    model = build("llama", **OPTIONS["llama"]).train()
    before = snapshot(model)
    with kvc.wrap(model, "streaming_llm(sinks=2, window=10)") as wrapped:
        wrapped.generate(text(1, 20), **GREEDY)
    assert_unchanged(before, snapshot(model))


def test_a_model_saved_while_wrapped_is_an_ordinary_one(tmp_path: Path) -> None:
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        wrapped.model.save_pretrained(tmp_path)
        ids = text(1, 9)
        logits = wrapped(ids).logits
    assert "kvcompress" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    with torch.no_grad():
        again = LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_models_own_generate_is_the_wrapped_one(method: str) -> None:
    ids = text(2, 24)
    inputs = {"input_ids": ids, "attention_mask": padded(ids, 0, 9)}
    model = tiny("llama")
    with kvc.wrap(model, method) as wrapped:
        one = wrapped.generate(**inputs, **GREEDY)
        first = wrapped.cache
        other = model.generate(**inputs, **GREEDY)  # pyright: ignore[reportCallIssue]
        assert torch.equal(one, other)
        assert wrapped.cache is not first
        for layer in range(2):
            assert torch.equal(first.kept(layer), wrapped.cache.kept(layer))
        assert wrapped.cache.seen.tolist() == [29, 20]  # the last token generated was never fed
        by_hand = wrapped.new_cache()
        token = wrapped.prefill(ids, inputs["attention_mask"], by_hand).logits.argmax(-1)
        for column in range(24, 30):
            assert torch.equal(token, one[:, column : column + 1])
            token = wrapped(token, cache=by_hand).logits.argmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_exact_is_the_plain_model(family: str) -> None:
    model, ids = tiny(family), text(2, 30)
    with torch.no_grad():
        expected = model(ids).logits
        tokens = model.generate(ids, attention_mask=padded(ids, 0, 11), **GREEDY)
        beams = model.generate(ids, attention_mask=padded(ids, 0, 11), num_beams=3, **GREEDY)
    largest = expected.abs().max()
    with kvc.wrap(model, "exact") as wrapped:
        assert (wrapped(ids).logits - expected).abs().max() <= 1e-5 * largest
        assert (wrapped.prefill(ids).logits - expected[:, -1:]).abs().max() <= 1e-5 * largest
        assert (wrapped.prefill(ids, chunk=7).logits - expected[:, -1:]).abs().max() <= 1e-5 * largest
        assert torch.equal(wrapped.generate(ids, attention_mask=padded(ids, 0, 11), **GREEDY), tokens)
        assert torch.equal(wrapped.generate(ids, attention_mask=padded(ids, 0, 11), num_beams=3, **GREEDY), beams)
        assert wrapped.cache.nbytes >= wrapped.cache.exact_nbytes > 0


@pytest.mark.parametrize("second_padding", [(0, 0), (0, 3), (2, 0)])
@pytest.mark.parametrize("first_padding", [(0, 0), (0, 9)])
def test_turns_give_only_what_is_new(first_padding: tuple[int, int], second_padding: tuple[int, int]) -> None:
    """Each row continues as the plain model does from that row's real tokens alone."""
    model, first, second = tiny("llama"), text(2, 20), text(2, 7, seed=6)
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        begun = wrapped.generate(first, cache=cache, attention_mask=padded(first, *first_padding), **GREEDY)
        turn = torch.cat([begun[:, -1:], second], 1)  # the last token generated was never fed
        mask = padded(turn, *second_padding)
        answer = wrapped.generate(turn, cache=cache, attention_mask=mask, **GREEDY)
        assert answer.shape == (2, 8 + 6)
    for row in range(2):
        fed = torch.cat([begun[row, first_padding[row] : -1], turn[row, second_padding[row] :]])
        assert cache.seen[row] == len(fed) + 5
        assert answer[row, 8:].tolist() == plain_greedy(model, fed)


def test_a_turn_without_a_mask_and_one_with_the_whole_text() -> None:
    model, first, second = tiny("llama"), text(1, 20), text(1, 7, seed=6)
    whole = torch.cat([first, second], 1)
    expected = plain_greedy(model, whole[0])
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(first, cache=cache)
        other = cache.fork()
        assert wrapped.generate(second, cache=cache, **GREEDY)[0, 7:].tolist() == expected
        out = model.generate(whole, **{wrapped.cache_name: other}, **GREEDY)
        assert out[0, 27:].tolist() == expected
        assert other.seen.tolist() == [32]
        with pytest.raises(WrapError, match="the cache has seen 32 columns already; give generate at least one new"):
            model.generate(whole, **{wrapped.cache_name: other}, **GREEDY)


def test_a_second_prompt_is_compressed_to_the_same_total() -> None:
    ids = text(1, 60)
    with kvc.wrap(tiny("llama"), SNAPKV) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :30], cache=cache)
        assert cache.kept(0).shape[2] == 12
        wrapped(ids[:, 30:35], cache=cache)
        assert cache.kept(0).shape[2] == 17  # decoding only appends
        wrapped.prefill(ids[:, 35:], cache=cache, chunk=4)
        assert cache.kept(0).shape[2] == 12
        assert cache.kept(1)[0, :, -4:].tolist() == [[56, 57, 58, 59]] * 2
    with kvc.wrap(tiny("llama"), "snapkv(budget=0.25, window=4)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :30], cache=cache)
        wrapped.prefill(ids[:, 30:], cache=cache)
        assert cache.kept(0).shape[2] == 15  # a ratio counts all tokens seen


@pytest.mark.parametrize("method", METHODS)
def test_generates_chunks_are_one_prompt(method: str) -> None:
    ids = text(1, 40)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        wrapped.generate(ids, prefill_chunk_size=16, **GREEDY)
        by_generate = wrapped.cache
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache, chunk=16)
        assert by_generate.seen.tolist() == [45]
        tokens = wrapped.generate(ids, prefill_chunk_size=16, **GREEDY)[:, 40:45]
        for column in range(5):
            wrapped(tokens[:, column : column + 1], cache=cache)
        for layer in range(2):
            assert torch.equal(by_generate.kept(layer), cache.kept(layer))


@pytest.mark.parametrize("method", METHODS)
def test_forks_go_their_own_ways(method: str) -> None:
    ids, other = text(1, 30), text(3, 9, seed=8)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        alone, cache = wrapped.new_cache(), wrapped.new_cache()
        wrapped.prefill(ids, cache=alone)
        expected = [wrapped(other[:1], cache=alone).logits, wrapped(other[1:2], cache=alone).logits]
        wrapped.prefill(ids, cache=cache)
        fork, batch = cache.fork(), cache.fork(3)
        rows = wrapped(other, cache=batch).logits
        wrapped(other[2:], cache=fork)
        assert torch.equal(wrapped(other[:1], cache=cache).logits, expected[0])
        assert torch.equal(wrapped(other[1:2], cache=cache).logits, expected[1])
        for row in range(3):
            single = wrapped.new_cache()
            wrapped.prefill(ids, cache=single)
            torch.testing.assert_close(rows[row], wrapped(other[row : row + 1], cache=single).logits[0])
        assert batch.seen.tolist() == [39] * 3


@pytest.mark.parametrize("method", METHODS)
def test_a_row_selected_from_a_batch_goes_on_as_if_it_had_been_alone(method: str) -> None:
    ids = text(2, 30)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache, alone = wrapped.new_cache(), wrapped.new_cache()
        wrapped.prefill(ids, padded(ids, 0, 16), cache)
        cache.batch_select_indices(torch.tensor([1]))
        wrapped.prefill(ids[1:, 16:], cache=alone)
        for start, stop in ((0, 1), (1, 6), (6, 8)):
            found, expected = (wrapped(ids[:1, start:stop], cache=each).logits for each in (cache, alone))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(cache.kept(1), alone.kept(1))


def test_one_wrapper_may_be_entered_again_and_a_cache_outlives_it() -> None:
    model, ids = tiny("llama"), text(1, 20)
    wrapped = kvc.wrap(model, SNAPKV)
    with pytest.raises(CacheError, match="no cache has been used yet"):
        _ = wrapped.cache
    with wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        fork = cache.fork()
        expected = wrapped(ids[:, :3], cache=cache).logits
        assert wrapped.cache is cache
    with wrapped:
        assert torch.equal(wrapped(ids[:, :3], cache=fork.fork()).logits, expected)
    with kvc.wrap(model, "exact") as another:  # the cache keeps its own method
        assert torch.equal(another(ids[:, :3], cache=fork).logits, expected)
        assert str(fork.method) == SNAPKV


def test_what_was_cached_under_inference_mode_goes_on_without_it() -> None:
    ids = text(1, 20)
    for method in METHODS:
        with kvc.wrap(tiny("llama"), method) as wrapped:
            expected = wrapped.new_cache()
            wrapped.prefill(ids, cache=expected)
            with torch.inference_mode():
                cache = wrapped.new_cache()
                wrapped.prefill(ids, cache=cache)
            assert torch.equal(wrapped(ids[:, :3], cache=cache).logits, wrapped(ids[:, :3], cache=expected).logits)


def test_a_class_derived_elsewhere_and_the_base_model_run_too() -> None:
    class Derived(LlamaForCausalLM):
        """What a user's own script may define."""

    ids = text(1, 20)
    with kvc.wrap(tiny("llama"), SNAPKV) as wrapped:
        expected = wrapped(ids).logits
    derived = Derived(tiny("llama").config).eval().requires_grad_(False)
    derived.load_state_dict(tiny("llama").state_dict())
    with kvc.wrap(derived, SNAPKV) as wrapped:
        assert torch.equal(wrapped(ids).logits, expected)
        for name in {"past_key_values", wrapped.cache_name}:
            cache = wrapped.new_cache()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                hidden = derived.model(ids, **{name: cache})[0]
            assert torch.equal(derived.lm_head(hidden), expected)
            assert cache.kept(0).shape[2] == 12


@pytest.mark.parametrize("kind", ["static", "hybrid", "offloaded", "dynamic"])
def test_the_models_default_kind_of_cache_is_ignored(kind: str) -> None:
    ids, model = text(1, 20), build("gemma2", **OPTIONS["gemma2"])
    with kvc.wrap(model, "h2o(heavy=6, recent=6)") as wrapped:
        expected = wrapped.generate(ids, **GREEDY)
        model.generation_config.cache_implementation = kind
        assert torch.equal(wrapped.generate(ids, **GREEDY), expected)
        assert wrapped.cache.kept(1).shape[2] == 12
    assert model.generation_config.cache_implementation == kind


def test_a_call_without_a_cache_warns_and_is_the_plain_model() -> None:
    model, ids = tiny("gemma3_text"), text(2, 30)
    mask = padded(ids, 0, 8)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    with kvc.wrap(model, SNAPKV) as wrapped:
        with pytest.warns(UserWarning, match="so nothing was compressed; pass cache="), torch.no_grad():
            found = model(ids, attention_mask=mask).logits
        with pytest.raises(CacheError, match="no cache has been used yet"):
            _ = wrapped.cache
    real = mask.bool()
    assert (found - expected)[real].abs().max() <= 1e-5 * expected.abs().max()


def test_a_model_of_sliding_layers_alone_warns_that_nothing_changes() -> None:
    model = build("mistral", **OPTIONS["mistral"] | {"sliding_window": 9})
    ids = text(1, 30)
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.warns(UserWarning, match=r"every layer of MistralForCausalLM .* changes nothing"):
        wrapper = kvc.wrap(model, SNAPKV)
    with wrapper as wrapped:
        assert (wrapped(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert wrapped.cache.kept(0).tolist() == [[list(range(22, 30))] * 2]
