"""What `evaluate` reports, against the plain model and against runs of each method alone."""

import math

import pytest
import torch

import kvcompress as kvc
from kvcompress.measure.quality import evaluate
from tests.tiny import tiny_llama

PREFIX, SCORED = 60, 12
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=20)",
    "h2o(heavy=10, recent=10)",
    "snapkv(budget=20, window=8)",
    "kivi(group_size=8, residual=16)",
    "snapkv(budget=0.5, window=8) | kivi(bits=4, group_size=8, residual=8)",
]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, PREFIX + SCORED + 1), generator=torch.Generator().manual_seed(3))


def test_exact_scores_are_the_plain_models(ids: torch.Tensor) -> None:
    model = tiny_llama()
    records = evaluate(model, ids, ["exact"], PREFIX, SCORED)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[:, PREFIX:].log_softmax(-1)
    for record, row, given in zip(records, logits, ids, strict=True):
        nll = -row.gather(-1, given[PREFIX + 1 :, None]).mean().item()
        assert record.nll == pytest.approx(nll, abs=1e-5)
        assert record.ppl == pytest.approx(math.exp(nll), rel=1e-5)
        assert record.kl == pytest.approx(0, abs=1e-9)
        assert record.top1_agreement == 1
        assert record.memory_ratio == 1


def test_the_prediction_right_after_prefill_is_not_scored(ids: torch.Tensor) -> None:
    """It saw the whole prompt; changing its target must change no number."""
    first = evaluate(tiny_llama(), ids[:1], ["snapkv(budget=20, window=8)"], PREFIX, SCORED)[0]
    model = tiny_llama()
    with torch.no_grad(), kvc.wrap(model, "snapkv(budget=20, window=8)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:1, :PREFIX], cache=cache)
        logits = wrapped(ids[:1, PREFIX:-1], cache=cache).logits[0].log_softmax(-1)
    by_hand = -logits.gather(-1, ids[0, PREFIX + 1 :, None]).mean().item()
    assert first.nll == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_shared_prefill_equals_a_run_of_its_own(method: str, ids: torch.Tensor) -> None:
    records = evaluate(tiny_llama(), ids, METHODS, PREFIX, SCORED)
    together = [record for record in records if record.method == str(kvc.parse(method))]
    alone = evaluate(tiny_llama(), ids, [method], PREFIX, SCORED, share_prefill=False)
    assert len(together) == len(alone) == 2
    for shared, own in zip(together, alone, strict=True):
        assert shared.prefill_shared and not own.prefill_shared
        assert shared.peak_bytes is None
        for name in ("nll", "kl", "top1_agreement", "kv_bytes", "kv_bytes_end", "kept_tokens", "bits_per_value"):
            assert getattr(shared, name) == getattr(own, name), name


def test_prefill_methods_score_the_same_token_by_token(ids: torch.Tensor) -> None:
    method = "snapkv(budget=20, window=8)"
    record = evaluate(tiny_llama(), ids[:1], [method], PREFIX, SCORED)[0]
    with kvc.wrap(tiny_llama(), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:1, :PREFIX], cache=cache)
        steps = [wrapped(ids[:1, column : column + 1], cache=cache).logits for column in range(PREFIX, PREFIX + SCORED)]
    logits = torch.cat(steps, 1)[0].log_softmax(-1)
    assert record.nll == pytest.approx(-logits.gather(-1, ids[0, PREFIX + 1 :, None]).mean().item(), abs=1e-5)


def test_kl_is_the_definition(ids: torch.Tensor) -> None:
    method = "streaming_llm(sinks=2, window=20)"
    record = evaluate(tiny_llama(), ids[:1], [method], PREFIX, SCORED)[0]
    with torch.no_grad():
        exact = tiny_llama()(ids[:1, :-1]).logits[0, PREFIX:].double().softmax(-1)
    with kvc.wrap(tiny_llama(), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:1, :PREFIX], cache=cache)
        steps = [wrapped(ids[:1, column : column + 1], cache=cache).logits for column in range(PREFIX, PREFIX + SCORED)]
    lossy = torch.cat(steps, 1)[0].double().softmax(-1)
    assert record.kl == pytest.approx((exact * (exact / lossy).log()).sum(-1).mean().item(), rel=1e-4)
    assert record.kl > 0


def test_a_question_is_fed_after_compression(ids: torch.Tensor) -> None:
    """What is kept must not depend on it, what is predicted must."""
    method = "snapkv(budget=20, window=8)"
    plain = evaluate(tiny_llama(), ids[:1], [method], PREFIX, SCORED)[0]
    asked = evaluate(tiny_llama(), ids[:1], [method], PREFIX, SCORED, question=torch.arange(5))[0]
    assert plain.query_aware is None
    assert asked.query_aware is False
    assert asked.kv_bytes == plain.kv_bytes
    assert asked.nll != plain.nll


def test_a_failed_method_becomes_a_record(ids: torch.Tensor) -> None:
    """KIVI cannot group 16 channels by 12; the others must still be measured."""
    records = evaluate(
        tiny_llama(), ids[:1], ["kivi(group_size=12, residual=24)", "exact"], PREFIX, SCORED, on_error="record"
    )
    assert [record.status for record in records] == ["failed", "ok"]
    assert "12 does not divide" in (records[0].error or "")
    with pytest.raises(ValueError, match="does not divide the model's head dim 16"):
        evaluate(tiny_llama(), ids[:1], ["kivi(group_size=12, residual=24)"], PREFIX, SCORED)


def test_too_few_ids_say_how_many_are_needed(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"73 ids are too few: prefix 60 \+ scored 13 \+ 1 = 74"):
        evaluate(tiny_llama(), ids, ["exact"], PREFIX, SCORED + 1)


@pytest.mark.model
def test_reference_points(smollm2: tuple) -> None:
    """Independent simulation of the same text: perplexity, KL and top-1 agreement at prefix 2,048."""
    from kvcompress.texts import load_text

    model, tokenizer = smollm2
    text = tokenizer(load_text("python-docs")[0], add_special_tokens=False, return_tensors="pt").input_ids
    expected = {"exact": (10.875, 0, 1), "snapkv(budget=512)": (10.883, 0.0252, 0.867)}
    for record in evaluate(model, text[:, 5000 : 5000 + 2048 + 129], list(expected), 2048, 128):
        ppl, kl, agreement = expected[record.method]
        assert record.ppl == pytest.approx(ppl, abs=0.02)
        assert record.kl == pytest.approx(kl, rel=0.05, abs=1e-6)
        assert record.top1_agreement == pytest.approx(agreement, abs=0.01)


@pytest.mark.model
def test_kivi_bytes_are_the_arithmetic(smollm2: tuple) -> None:
    """Codes, scales, minima and residual of 2,048 tokens; at 4,096 at least 4.3 times less than fp16 KV."""
    model, _ = smollm2
    for tokens in (2048, 4096):
        keys, values = tokens, tokens - 128
        per_head = keys * 64 * 2 // 8 + keys // 32 * 64 * 4 + values * 64 * 2 // 8 + values * 2 * 4 + 128 * 64 * 4
        cache = kvc.wrap(model, "kivi(bits=2)").new_cache()
        cache.check_rows(1)
        cache.expect_prefill([tokens], tokens)
        cache.begin_call(tokens, [tokens])
        for index in range(30):
            cache.update(torch.randn(1, 3, tokens, 64), torch.randn(1, 3, tokens, 64), index)
            cache.layers[index].compress()
        cache.end_call()
        stored = cache.nbytes - cache.memory()["spare"]
        assert stored == pytest.approx(30 * 3 * per_head, rel=0.03)
    assert tokens * 30 * 3 * 64 * 2 * 2 / stored > 4.3
