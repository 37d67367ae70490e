"""What `evaluate` reports, against the plain model and against runs of each method alone."""

import copy
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import kvcompress as kvc
from kvcompress.evals.likelihood import Continuation, score
from kvcompress.measure.quality import Details, evaluate, evaluate_sample
from kvcompress.measure.record import Record
from kvcompress.measure.streaming import stream
from tests.families import OPTIONS, VOCABULARY, build, tiny
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


def by_hand(method: str, given: torch.Tensor, question: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probabilities [SCORED, V] of token-by-token decoding behind a prompt of PREFIX tokens."""
    between = torch.empty(0, dtype=torch.int64) if question is None else question
    with kvc.wrap(tiny_llama(), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(given[None, :PREFIX], cache=cache)
        fed = torch.cat([between, given[PREFIX : PREFIX + SCORED]])
        steps = [wrapped(token[None, None], cache=cache).logits[0] for token in fed]
    return torch.cat(steps)[-SCORED:].log_softmax(-1)


def nll_by_hand(method: str, given: torch.Tensor, question: torch.Tensor | None = None) -> float:
    log_probabilities = by_hand(method, given, question)
    return -log_probabilities.gather(-1, given[PREFIX + 1 : PREFIX + SCORED + 1, None]).mean().item()


@pytest.mark.parametrize("method", METHODS)
def test_a_question_is_decoded_as_generation_and_tasks_do(method: str, ids: torch.Tensor) -> None:
    """A method that acts on every call acts on every token of a question, too."""
    question = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(4))
    record = evaluate(tiny_llama(), ids[:1], [method], PREFIX, SCORED, question=question)[0]
    assert record.nll == pytest.approx(nll_by_hand(method, ids[0], question), abs=1e-5)
    row = ids[0].tolist()
    with kvc.wrap(tiny_llama(), method) as wrapped:
        fed = (*question.tolist(), *row[PREFIX : PREFIX + SCORED])
        continuation = Continuation(tuple(row[:PREFIX]), fed, tuple(row[PREFIX + 1 :]))
        (task,) = score(wrapped, [continuation])
    assert record.nll == pytest.approx(-task.log_probability / SCORED, abs=1e-5)


def test_each_sample_has_its_own_question(ids: torch.Tensor) -> None:
    method = "streaming_llm(sinks=2, window=20)"
    questions = torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(5))
    together = evaluate(tiny_llama(), ids, [method], PREFIX, SCORED, question=questions)
    for record, given, question in zip(together, ids, questions, strict=True):
        assert record.nll == pytest.approx(nll_by_hand(method, given, question), abs=1e-5)
    ragged = evaluate(tiny_llama(), ids, [method], PREFIX, SCORED, question=[questions[0], questions[1, :2]])
    assert ragged[0].nll == together[0].nll
    assert ragged[1].nll == pytest.approx(nll_by_hand(method, ids[1], questions[1, :2]), abs=1e-5)
    same = evaluate(tiny_llama(), ids, [method], PREFIX, SCORED, question=questions[0])
    assert same[1].nll == pytest.approx(nll_by_hand(method, ids[1], questions[0]), abs=1e-5)
    with pytest.raises(ValueError, match="3 questions for 2 samples"):
        evaluate(tiny_llama(), ids, [method], PREFIX, SCORED, question=torch.zeros(3, 5, dtype=torch.int64))


def test_what_changes_a_number_changes_the_config_hash(ids: torch.Tensor) -> None:
    torch.manual_seed(1)  # the tiny one is drawn after manual_seed(0), and another test may have left that
    other = tiny_llama().__class__(tiny_llama().config).eval()
    question = torch.arange(5)
    calls = [
        (tiny_llama(), {}),
        (other, {}),
        (tiny_llama(), {"question": question}),
        (tiny_llama(), {"question": question.flip(0)}),
        (tiny_llama(), {"chunk": 16}),
        (tiny_llama(), {"share_prefill": False}),
    ]
    hashes = [evaluate(model, ids[:1], "exact", PREFIX, SCORED, **options)[0].config_hash for model, options in calls]
    assert len(set(hashes)) == len(calls)
    assert evaluate(tiny_llama(), ids[:1], "exact", PREFIX, SCORED)[0].config_hash == hashes[0]


def test_rounding_shows_in_kl(ids: torch.Tensor) -> None:
    """Nothing is evicted here, so that what differs from exact is rounding, below 0 as often as above."""
    found: dict[int, float] = {}
    method = kvc.parse("h2o(heavy=100, recent=100)")
    many = torch.randint(0, 256, (8, PREFIX + SCORED + 1), generator=torch.Generator().manual_seed(6))
    for sample, row in enumerate(many):

        def note(record: Record, details: Details, sample: int = sample) -> None:
            found[sample] = float(details.kl.mean())

        (record,) = evaluate_sample(tiny_llama(), row, [method], PREFIX, SCORED, sample=sample, on_details=note)
        assert record.kl == found[sample]


def test_kept_tokens_are_those_of_the_layers_that_the_method_acts_on() -> None:
    """The sliding layers keep 8 or 9 of their own, fewer or more than the method, whatever it is."""
    model = tiny("gemma3_text")
    given = torch.randint(0, VOCABULARY, (1, 41), generator=torch.Generator().manual_seed(0))
    records = evaluate(model, given, ["exact", "h2o(heavy=2, recent=2)", "snapkv(budget=12, window=4)"], 32, 8)
    assert [record.kept_tokens for record in records] == [32, 4, 12]
    with kvc.wrap(model, "h2o(heavy=2, recent=2)") as wrapped:
        (bucket,) = [bucket for bucket, _ in stream(wrapped, given, [40], prefix=4)]
    assert bucket.kept_tokens == 4


def test_a_model_in_train_mode_is_measured_without_dropout(ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=128)  # drops out 10 %
    model = GPT2LMHeadModel(config)
    expected = [record.nll for record in evaluate(model.eval(), ids, METHODS[2:], PREFIX, SCORED)]
    model.train()
    model.transformer.h[0].eval()
    with pytest.warns(UserWarning, match="train mode"):
        measured = evaluate(model, ids, METHODS[2:], PREFIX, SCORED)
    assert [record.nll for record in measured] == expected
    assert model.training and model.transformer.h[1].mlp.training and not model.transformer.h[0].mlp.training


def test_a_text_longer_than_the_model_was_trained_for_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    """The last position that is fed counts, a question's tokens too."""
    model = build("llama", **OPTIONS["llama"] | {"max_position_embeddings": PREFIX + SCORED})
    given = torch.randint(0, VOCABULARY, (2, PREFIX + SCORED + 1), generator=torch.Generator().manual_seed(5))
    evaluate(model, given, ["snapkv(budget=20, window=8)"], PREFIX, SCORED)
    assert not [str(each.message) for each in recwarn]
    evaluate(model, given, ["snapkv(budget=20, window=8)"], PREFIX, SCORED, [torch.tensor([3]), torch.tensor([3, 4])])
    (told,) = [str(each.message) for each in recwarn]
    assert "74 tokens (prefix 60 + question 2 + scored 12) are more than the 72 that" in told


def test_one_method_is_a_list_of_one(ids: torch.Tensor) -> None:
    for method in ("snapkv(budget=20, window=8)", kvc.SnapKV(budget=20, window=8)):
        (record,) = evaluate(tiny_llama(), ids[:1], method, PREFIX, SCORED)
        assert record.method == "snapkv(budget=20, window=8)"
    with pytest.raises(ValueError, match="no method"):
        evaluate(tiny_llama(), ids[:1], [], PREFIX, SCORED)


@pytest.mark.parametrize("column", [0, PREFIX, PREFIX + SCORED])
def test_ids_outside_the_vocabulary(ids: torch.Tensor, column: int) -> None:
    """The last one is only predicted, never fed."""
    wrong = ids.clone()
    wrong[1, column] = 256
    with pytest.raises(ValueError, match="id 256 is outside the model's vocabulary of 256 tokens"):
        evaluate(tiny_llama(), wrong, ["exact"], PREFIX, SCORED)
    with pytest.raises(ValueError, match="id -1 is outside"):
        evaluate(tiny_llama(), ids, ["exact"], PREFIX, SCORED, question=torch.tensor([3, -1]))


def test_without_its_baseline_every_method_failed(ids: torch.Tensor) -> None:
    model = copy.deepcopy(tiny_llama())
    model.model.layers[1].mlp.register_forward_hook(refuse)
    records = evaluate(model, ids, METHODS[:2], PREFIX, SCORED, on_error="record")
    assert [record.status for record in records] == ["failed"] * 4
    assert {record.error for record in records} == {"exact baseline: RuntimeError: no memory left"}
    with pytest.raises(RuntimeError, match="no memory left"):
        evaluate(model, ids, METHODS[:2], PREFIX, SCORED)


def refuse(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
    if output.shape[1] > 2:  # more than the two tokens that wrapping tries a model with
        raise RuntimeError("no memory left")


def test_a_method_that_the_model_cannot_have_fails_alone(ids: torch.Tensor) -> None:
    """GPT-2's learned positions cannot be moved, which is known as soon as the model is wrapped."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=128)).eval()
    methods = ["streaming_llm(sinks=2, window=20)", "exact"]
    for share in (True, False):
        records = evaluate(model, ids[:1], methods, PREFIX, SCORED, share_prefill=share, on_error="record")
        assert [record.status for record in records] == ["failed", "ok"]
        assert "RotaryError" in (records[0].error or "")


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
