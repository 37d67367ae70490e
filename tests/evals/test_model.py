import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import kvcompress as kvc
from kvcompress.built_in import ModelNotFound
from kvcompress.evals import find_tasks, make_samples, split_prompt
from kvcompress.evals.model import CompressedLM
from tests.evals import lm
from tests.evals.tiny import small_haystack, trained
from tests.oracle import oracle, recording

SHARED_TASKS = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"

METHODS = [
    "snapkv(budget=0.25, window=4)",
    "snapkv(budget=24, window=4, positions='cache')",
    "h2o(heavy=6, recent=6)",
    "streaming_llm(sinks=2, window=12)",
    "kivi(bits=2, group_size=8, residual=8)",
    "snapkv(budget=24, window=4) | kivi(bits=4, group_size=8, residual=8)",
]
each_method = pytest.mark.parametrize("method", METHODS)


def pairs() -> list[tuple[str, str]]:
    """Contexts of one to many tokens, most of them with several continuations."""
    contexts = [lm.text(length, 500) for length in (120, 300)]
    found = [(context, word) for context in contexts for word in (" ba", " gilo funa", "x")]
    return [*found, ("a", " kilo"), ("", " kilo bare"), ("a", "b")]


def log_probability(logits: Tensor, ids: list[int]) -> tuple[float, bool]:
    """Of ids [S] whose predictions are the last S of `logits` [N, V]."""
    found = logits[-len(ids) :].double().log_softmax(-1)
    return float(found[range(len(ids)), ids].sum()), found.argmax(-1).tolist() == ids


@torch.no_grad()
def by_hand(method: str, prompt: list[int], fed: list[int]) -> Tensor:
    """Logits [N, V] of the plain model with all masked (or coded) that was not stored: fed one token at a time."""
    with kvc.wrap(lm.model(), method) as wrapped:
        cache = wrapped.new_cache()
        with recording(wrapped) as calls:
            wrapped.prefill(torch.tensor([prompt]), cache=cache)
            for token in fed:
                wrapped(torch.tensor([[token]]), cache=cache)
        rotaries = cache.rotaries
    return oracle(lm.model(), calls, rotaries=rotaries).logits[0]


def test_exact_scores_items_as_hf_does() -> None:
    task = lm.multiple_choice()
    for size in (1, 5):
        theirs = lm.scores(lm.hf(batch_size=size), task, shots=1)
        ours = lm.scores(lm.compressed("exact", batch_size=size), task, shots=1)
        assert 0 < theirs["results"]["made"]["acc,none"] < 1
        for metric in ("acc,none", "acc_norm,none"):
            assert ours["results"]["made"][metric] == theirs["results"]["made"][metric]
        for mine, other in zip(ours["samples"]["made"], theirs["samples"]["made"], strict=True):
            for (got, got_greedy), (expected, greedy) in zip(
                mine["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert got == pytest.approx(expected, abs=1e-3)
                assert got_greedy == greedy


def test_exact_takes_the_contexts_of_hf_short_empty_and_too_long() -> None:
    greedy = [("", trained().decode([int(lm.model()(torch.tensor([[0]])).logits[0, -1].argmax())]))]
    long = [(small_haystack()[:1500], " bada kilo"), (small_haystack()[:1300], "x")]
    found = lm.requests("loglikelihood", [*pairs(), *long, *greedy])
    theirs = lm.hf(batch_size=3).loglikelihood(found, disable_tqdm=True)
    for size in (1, 3):
        ours = lm.compressed("exact", batch_size=size, prefill_chunk=50)
        with pytest.warns(UserWarning, match="2 of 12 contexts are longer than the model's 300 tokens"):
            answers = ours.loglikelihood(found, disable_tqdm=True)
        assert ours.truncated == 2
        for (got, got_greedy), (expected, is_greedy) in zip(answers, theirs, strict=True):
            assert got == pytest.approx(expected, abs=1e-3)
            assert got_greedy == is_greedy


def test_a_tokenizer_without_special_tokens_scores_and_generates() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=trained().backend_tokenizer)
    assert bare.bos_token_id is None and bare.eos_token_id is None
    plain = lm.compressed("exact", batch_size=2)
    # Batches are padded, and the padding token that lm-eval adds lies outside the model's vocabulary.
    ours = CompressedLM(lm.model(), "exact", tokenizer=bare, batch_size=2)
    found = lm.requests("loglikelihood", [("a", " kilo"), (lm.text(120), "x"), (lm.text(90), " ba")])
    for mine, other in zip(ours.loglikelihood(found, True), plain.loglikelihood(found, True), strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-6), other[1])
    # A newline stands for an empty context.
    answer = ours.loglikelihood(lm.requests("loglikelihood", [("", "kilo")]), True)[0]
    newline, after = bare.encode("\n"), bare.encode("kilo")
    value, greedy = log_probability(by_hand("exact", newline, after[:-1]), after)
    assert answer == (pytest.approx(value, abs=1e-4), greedy)
    until = lm.requests("generate_until", [(lm.text(n), {"until": ["."], "max_gen_toks": 12}) for n in (120, 80)])
    assert ours.generate_until(until, True) == plain.generate_until(until, True)


def test_a_tokenizer_without_a_newline_has_another_stand_in_for_an_empty_context() -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "kilo": 1, ".": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    bare = PreTrainedTokenizerFast(tokenizer_object=words)
    assert bare.encode("\n") == [] and CompressedLM(lm.model(), "exact", tokenizer=bare).prefix_token_id == 2


@each_method
def test_a_method_scores_as_the_masked_model_fed_token_by_token(method: str) -> None:
    found = lm.requests("loglikelihood", pairs())
    expected = []
    for context, continuation in pairs():
        before = trained().encode(context) or [int(trained().bos_token_id)]
        after = trained().encode(context + continuation)[len(trained().encode(context)) :]
        fed = [*before, *after][max(1, len(before) - 1) : -1]
        expected.append(log_probability(by_hand(method, before[: max(1, len(before) - 1)], fed), after))
    exact = lm.compressed("exact").loglikelihood(found, disable_tqdm=True)
    for size in (1, 5):
        ours = lm.compressed(method, batch_size=size)
        answers = ours.loglikelihood(found, disable_tqdm=True)
        for answer, (value, greedy) in zip(answers, expected, strict=True):
            assert answer[0] == pytest.approx(value, rel=1e-4, abs=1e-3)
            assert answer[1] == greedy
        changed = [abs(mine - other) > 2e-3 for (mine, _), (other, _) in zip(answers, exact, strict=True)]
        # Even the answers of one token, the first and the last of each context, meet the compressed cache.
        assert changed[:6] == [True] * 6
        assert [use.compressed for use in ours.uses] == [True] * 6 + [False] * 3


def count_columns(model: PreTrainedModel, run: Callable[[], Any]) -> list[tuple[int, int]]:
    """Rows and columns of every forward pass of `run`."""
    shapes: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        shapes.append((ids.shape[0], ids.shape[1]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    return shapes


def test_choices_of_one_context_share_its_prefill() -> None:
    context = lm.text(300)
    length = len(trained().encode(context))
    found = lm.requests("loglikelihood", [(context, choice) for choice in ("x", "y", "z", " kilo")])
    after = len(trained().encode(context + " kilo")) - length
    once = lm.compressed(METHODS[0], batch_size=4)
    # The three of one token are told apart by the same prediction.
    assert count_columns(lm.model(), lambda: once.loglikelihood(found, True)) == [(1, length - 1), (2, after)]
    alone = lm.compressed(METHODS[0], batch_size=1)
    shapes = count_columns(lm.model(), lambda: alone.loglikelihood(found, True))
    assert sorted(shapes) == sorted([(1, length - 1), (1, after), (1, 1)])
    step_by_step = lm.compressed(METHODS[4], batch_size=4)
    shapes = count_columns(lm.model(), lambda: step_by_step.loglikelihood(found, True))
    assert shapes == [(1, length - 1), *[(2, 1)] * after]


def greedy_by_hand(method: str, prompt: list[int], fed: list[int], count: int) -> list[int]:
    """The next `count` tokens of one row, a call a token."""
    with kvc.wrap(lm.model(), method) as wrapped:
        cache = wrapped.new_cache()
        output = wrapped.prefill(torch.tensor([prompt]), cache=cache)
        ids: list[int] = []
        for token in fed:
            output = wrapped(torch.tensor([[token]]), cache=cache)
        while len(ids) < count:
            ids.append(int(output.logits[0, -1].argmax()))
            output = wrapped(torch.tensor([ids[-1:]]), cache=cache)
    return ids


def written(ids: list[int]) -> str:
    """The text of generated ids up to the end of sequence."""
    eos = trained().eos_token_id
    return str(trained().decode(ids[: ids.index(eos)] if eos in ids else ids, skip_special_tokens=True))


def test_exact_writes_what_hf_writes() -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (lm.text(40 + 90 * index), {"until": [until], "max_gen_toks": 6 + 4 * (index % 2)})
        for index, until in enumerate((".", "a", "\n\n", " ", "lo"))
    ]
    asked += [
        (lm.text(150, 700), {"do_sample": True, "temperature": 0.8, "max_gen_toks": 12, "until": []}),
        (lm.text(150, 900), {"num_beams": 3, "max_gen_toks": 8, "until": ["."]}),
        (lm.text(150, 300), {"repetition_penalty": 1.5, "max_gen_toks": 8, "until": ["."]}),
        (small_haystack()[:1500], {"max_gen_toks": 8, "until": ["."]}),
    ]
    found = lm.requests("generate_until", asked)
    for size in (1, 4):
        torch.manual_seed(3)
        expected = lm.hf(batch_size=size).generate_until(found, disable_tqdm=True)
        torch.manual_seed(3)
        ours = lm.compressed("exact", batch_size=size)
        with pytest.warns(UserWarning, match="1 of 9 contexts"):
            answers = ours.generate_until(found, disable_tqdm=True)
        assert answers == expected
        assert len(set(answers)) > 5


@each_method
def test_a_batch_is_written_as_each_row_by_hand(method: str) -> None:
    contexts = [lm.text(length, 50 * length) for length in (30, 110, 260, 290, 300)]
    found = lm.requests("generate_until", [(context, {"until": [], "max_gen_toks": 9}) for context in contexts])
    ours = lm.compressed(method, batch_size=3)
    answers = ours.generate_until(found, disable_tqdm=True)
    for context, answer in zip(contexts, answers, strict=True):
        ids = trained().encode(context)
        assert answer == written(greedy_by_hand(method, ids[:-1], ids[-1:], 9))
    assert all(use.compressed for use in ours.uses[1:])
    assert [use.doc_id for use in ours.uses].count(0) == 1


@pytest.mark.parametrize("method", [METHODS[0], METHODS[4]])
@pytest.mark.parametrize("aware", [True, False])
def test_a_context_is_cut_at_its_question(method: str, aware: bool, haystack_file: str) -> None:
    samples = make_samples(
        "needle", trained(), length=250, samples=2, haystack=haystack_file, query_aware=aware, depths=[0.1, 0.8]
    )
    asked = [(sample.prompt, {"until": [], "max_gen_toks": 4}) for sample in samples]
    # A doc of no such task is cut before its last token, even with the same prompt.
    asked.append(asked[0])
    docs = [*(sample.to_doc() for sample in samples), {}]
    ours = lm.compressed(method, batch_size=3)
    answers = ours.generate_until(lm.requests("generate_until", asked, docs), disable_tqdm=True)
    for (prompt, _), doc, answer in zip(asked, docs, answers, strict=True):
        before, after = split_prompt(prompt, doc)
        whole, cut = trained().encode(prompt), trained().encode(before)
        if doc:
            assert after.startswith(doc["answer_prefix"] if aware else doc["question"])
            while whole[: len(cut)] != cut:
                cut = cut[:-1]
        else:
            cut = whole[:-1]
        assert answer == written(greedy_by_hand(method, cut, whole[len(cut) :], 4))
    # Each question has its own length in tokens, and its documents their own bytes.
    exact = {use.doc_id: use.stored.exact_nbytes for use in ours.uses}
    assert len(set(exact.values())) > 1
    with pytest.raises(ValueError, match="the question 'no such' does not stand in the prompt"):
        wrong = [{"question": "no such", "query_aware": False}]
        ours.generate_until(lm.requests("generate_until", asked[:1], wrong), disable_tqdm=True)


def test_stop_strings_and_contexts_without_a_token() -> None:
    context = lm.text(200)
    first = lm.compressed("exact").generate_until(
        lm.requests("generate_until", [(context, {"until": [], "max_gen_toks": 6})]), disable_tqdm=True
    )[0]
    token = trained().decode(greedy_by_hand("exact", trained().encode(context), [], 1))
    asked = [
        (context, {"until": [token[-1]], "max_gen_toks": 6}),  # inside the first token
        (context, {"until": [""], "max_gen_toks": 6}),
        ("", {"until": [], "max_gen_toks": 4}),
        ("a", {"until": [], "max_gen_toks": 4}),
    ]
    for method in ("exact", METHODS[0], METHODS[4]):
        answers = lm.compressed(method, batch_size=2).generate_until(lm.requests("generate_until", asked), True)
        if method == "exact":
            assert answers[0] == token[:-1].partition(token[-1])[0]
            assert answers[1] == first
        prefix = [int(trained().bos_token_id)]
        for ids, answer in ((prefix, answers[2]), (trained().encode("a"), answers[3])):
            assert answer == written(greedy_by_hand(method, ids, [], 4))


def test_texts_flow_through_the_exact_cache_as_through_hf() -> None:
    found = lm.requests("loglikelihood_rolling", [(lm.text(200),), (small_haystack()[:1800],), ("",), ("a",)])
    theirs = lm.hf().loglikelihood_rolling(found, disable_tqdm=True)
    for method in ("exact", "snapkv(budget=8, window=4)"):
        ours = lm.compressed(method, batch_size=2)
        # SnapKV acts at the end of a prompt, which here is one token.
        assert ours.loglikelihood_rolling(found, disable_tqdm=True) == pytest.approx(theirs, abs=2e-3)
        assert not any(use.compressed for use in ours.uses)


@pytest.mark.parametrize("method", METHODS[2:5])
def test_a_text_flows_call_by_call(method: str) -> None:
    short, long = lm.text(150), lm.text(480)
    ours = lm.compressed(method, batch_size=2, max_length=100)
    found = ours.loglikelihood_rolling(lm.requests("loglikelihood_rolling", [(short,), (long,)]), disable_tqdm=True)
    prefix = int(trained().bos_token_id)
    ids = trained().encode(short)
    assert found[0] == pytest.approx(log_probability(by_hand(method, [prefix], ids[:-1]), ids)[0], rel=1e-4)
    assert all(use.compressed for use in ours.uses)
    windows = len([use for use in ours.uses if use.doc_id == 1])
    ids = trained().encode(long)
    assert 100 < len(ids) < 200
    if "streaming" in method:
        # Positions within the cache stay in range, so there is nothing to cut into windows.
        assert windows == 1
        with kvc.wrap(lm.model(), method) as wrapped:
            cache = wrapped.new_cache()
            logits = [wrapped(torch.tensor([[token]]), cache=cache).logits[0, -1] for token in [prefix, *ids[:-1]]]
        assert found[1] == pytest.approx(log_probability(torch.stack(logits), ids)[0], rel=1e-4)
    else:
        assert windows == 2


def test_what_is_stored_is_that_of_each_row_alone() -> None:
    contexts = [lm.text(length) for length in (60, 200, 330)]
    found = lm.requests("loglikelihood", [(context, " ba") for context in contexts])
    lengths = [len(trained().encode(context)) - 1 for context in contexts]
    for method in ("exact", METHODS[0], METHODS[4], METHODS[5]):
        batch = lm.compressed(method, batch_size=3)
        batch.loglikelihood(found, disable_tqdm=True)
        for request, length, use in zip(found, lengths, batch.uses, strict=True):
            with kvc.wrap(lm.model(), method) as wrapped:
                cache = wrapped.new_cache()
                wrapped.prefill(torch.tensor([trained().encode(request.args[0])[:-1]]), cache=cache)
            assert use.stored.nbytes == cache.nbytes - cache.memory()["spare"]
            # 2 layers, keys and values of 2 heads and 16 channels.
            assert use.stored.exact_nbytes == length * 2 * 2 * 2 * 16 * 4
            assert use.stored.exact_nbytes_16bit == use.stored.exact_nbytes // 2


def test_a_budget_that_no_prompt_reaches_compresses_nothing() -> None:
    found = lm.requests("loglikelihood", [(lm.text(100), " ba"), (lm.text(330), " ba")])
    lengths = [len(trained().encode(request.args[0])) for request in found]
    for method, expected in {
        f"snapkv(budget={lengths[1] - 1}, window=4)": [False, False],
        f"snapkv(budget={lengths[1] - 2}, window=4)": [False, True],
        f"kivi(bits=2, group_size=8, residual={(lengths[0] + 8) // 8 * 8})": [False, True],
        "exact": [False, False],
    }.items():
        ours = lm.compressed(method, batch_size=2)
        ours.loglikelihood(found, disable_tqdm=True)
        assert [use.compressed for use in ours.uses] == expected


def test_answers_of_another_method_or_form_are_never_returned(
    tmp_path: Path, haystack_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["passkey", "passkey_agnostic"]
    manager, specs = find_tasks(names, trained(), length=250, samples=2, haystack=haystack_file)
    tasks = [lm.multiple_choice(2), *manager.load(specs)["tasks"].values()]

    def run(model: Any, answers: str | None) -> Any:
        results = lm.scores(CachingLM(model, answers) if answers else model, *tasks)
        return {name: [sample["filtered_resps"] for sample in results["samples"][name]] for name in ["made", *names]}

    methods = ("exact", METHODS[0])
    fresh = {method: run(lm.compressed(method), None) for method in methods}
    assert len({str(answers["made"]) for answers in fresh.values()}) == 2
    assert fresh[METHODS[0]]["passkey"] != fresh[METHODS[0]]["passkey_agnostic"]
    kept = str(tmp_path / "answers.db")
    for _ in range(2):
        for method in methods:
            assert run(lm.compressed(method), kept) == fresh[method]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this answer was to come from the cache")

    monkeypatch.setattr(CompressedLM, "_score", refuse)
    assert run(lm.compressed(METHODS[0]), kept) == fresh[METHODS[0]]
    with pytest.raises(AssertionError, match="was to come from the cache"):
        run(lm.compressed(METHODS[0], prefill_chunk=64), kept)


def test_answers_from_before_a_training_step_are_never_returned(tmp_path: Path) -> None:
    asked = lm.requests("loglikelihood", [(lm.text(40), " ba"), (lm.text(40), " du")])
    ours = lm.compressed("exact", pretrained=copy.deepcopy(lm.model()))
    answers: Any = CachingLM(ours, str(tmp_path / "answers.db"))
    before = answers.loglikelihood(asked)
    assert answers.loglikelihood(asked) == before
    with torch.no_grad():
        ours.model.lm_head.weight.mul_(-1)
    after = answers.loglikelihood(asked)
    assert after == lm.compressed("exact", pretrained=ours.model).loglikelihood(asked) != before


def test_it_is_made_from_text_arguments_by_name(tmp_path: Path) -> None:
    lm.model().save_pretrained(tmp_path)
    trained().save_pretrained(tmp_path)
    text = f"pretrained={tmp_path},method=snapkv(budget=0.25, window=4),positions=cache,prefill_chunk=64,max_length=200"
    ours = get_model("kvcompress").create_from_arg_string(text, {"batch_size": 2, "device": None})
    assert isinstance(ours, CompressedLM)
    assert ours.method == kvc.SnapKV(budget=0.25, window=4, positions="cache")
    assert (ours.prefill_chunk, ours.max_length, ours.batch_size) == (64, 200, 2)
    found = lm.requests("loglikelihood", [(lm.text(250), " ba")])
    same = lm.compressed("snapkv(budget=0.25, window=4, positions='cache')")
    assert ours.loglikelihood(found, True)[0][0] == pytest.approx(same.loglikelihood(found, True)[0][0], abs=1e-4)
    streaming = "streaming_llm(sinks=2, window=16)"
    composed = lm.compressed(f"{streaming} | kivi(group_size=8, residual=8)", positions="original")
    assert composed.method == kvc.parse(f"{streaming[:-1]}, positions='original') | kivi(group_size=8, residual=8)")
    assert lm.compressed("exact", positions="original").method == kvc.Exact()


def test_what_cannot_be_used_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    with pytest.raises(kvc.MethodError, match="did you mean 'snapkv'"):
        lm.compressed("snapk(budget=4)")
    with pytest.raises(kvc.MethodError, match=r"kivi\(bits=2\) evicts nothing"):
        lm.compressed("kivi", positions="cache")
    with pytest.raises(kvc.MethodError, match='positions must be "original" or "cache"'):
        lm.compressed("h2o(heavy=4, recent=4)", positions="slots")
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        CompressedLM("smollm2-135")
    with pytest.raises(ModelNotFound, match="kvcompress fetch smollm2-135m"):
        CompressedLM("smollm2-135m")
    long = " ".join(["kilo"] * 400)
    for continuation, message in (("", "document 0: the continuation '' adds no token"), (long, "the model's 300")):
        for context in ("a kilo", ""):
            with pytest.raises(ValueError, match=message):
                found = lm.requests("loglikelihood", [(context, continuation)])
                lm.compressed("exact").loglikelihood(found, disable_tqdm=True)


@pytest.mark.skipif(not SHARED_TASKS.is_dir(), reason="../shared/data/tasks is not on this machine")
def test_exact_scores_piqa_as_hf_does(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCOMPRESS_DATA", raising=False)
    model, tokenizer = smollm2
    manager, specs = find_tasks(["piqa_local"])
    task = manager.load(specs)["tasks"]["piqa_local"]
    settings: dict[str, Any] = {"pretrained": model, "tokenizer": tokenizer}
    theirs = lm.scores(HFLM(**settings), task, shots=1, limit=3)
    ours = lm.scores(CompressedLM(model, "exact", tokenizer=tokenizer, batch_size=4), task, shots=1, limit=3)
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["piqa_local"][metric] == theirs["results"]["piqa_local"][metric]
    for mine, other in zip(ours["samples"]["piqa_local"], theirs["samples"]["piqa_local"], strict=True):
        assert mine["arguments"] == other["arguments"]
        for (got, _), (expected, _) in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
            assert got == pytest.approx(expected, abs=1e-3)
