import copy
import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

import datasets.config
import lm_eval.tasks
from filelock import FileLock
from lm_eval.evaluator import simple_evaluate

from kvcompress.cli import main
from kvcompress.evals import evaluation, loading
from kvcompress.evals.arguments import split_list
from kvcompress.evals.comparison import compare_to_exact
from kvcompress.evals.evaluation import Settings, evaluate_all
from kvcompress.evals.loading import DataUnreachable, load_tasks
from kvcompress.evals.results import EvalResult, ResultsFolder, SampleResult
from kvcompress.evals.table import cell, difference_rows, score_rows
from kvcompress.kernels.choose import library
from kvcompress.measure.statistics import PairedDifference, paired_difference
from kvcompress.runs.records import RecordsError
from tests.breaking import BREAKING, breaking
from tests.evals import lm
from tests.evals.tiny import chatting, trained

__all__ = ["breaking"]  # a fixture
SNAPKV = "snapkv(budget=0.25, window=4)"
FAILS = BREAKING

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    lm.model().save_pretrained(folder)
    trained().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIQA's file with made-up items."""
    (tmp_path / "data").mkdir()
    lines = [json.dumps({**item, "query": f"Question: {item['query']}\n"}) for item in lm.items(10)]
    (tmp_path / "data" / "piqa.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path / "data"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_folder: str, tmp_path: Path) -> Run:
    """`kvcompress eval` with the tiny model: the exit code, and all that was printed."""

    def run_(*arguments: str, model: str = model_folder) -> tuple[int, str]:
        folder = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["kvcompress", "eval", "--model", model, *folder, *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    return run_


def read_results(folder: Path) -> dict[tuple[str, str], EvalResult]:
    found = [EvalResult.from_json(path.read_text()) for path in (folder / "results").glob("*.json")]
    return {(result.task, result.method): result for result in found}


def test_a_whole_evaluation(
    run: Run, data: None, breaking: str, haystack_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = json.dumps({"length": 250, "haystack": haystack_file})
    arguments = ["--tasks", "piqa,passkey_agnostic", "--methods", f"exact,{SNAPKV},{FAILS}", "--limit", "8"]
    arguments += ["--num_fewshot", "1", "--metadata", metadata, "--batch_size", "3"]
    code, printed = run(*arguments)
    assert code == 1  # one method failed
    assert f"failed: piqa_local, {FAILS}: ValueError: this method breaks" in printed.replace("\n", "")
    out = tmp_path / "out"
    results = read_results(out)
    assert set(results) == {
        (task, method) for task in ("piqa_local", "passkey_agnostic") for method in ("exact", SNAPKV, FAILS)
    }
    assert {key[1] for key, result in results.items() if result.status == "failed"} == {FAILS}
    assert {result.kernels for result in results.values()} == {library("cpu")}

    # The numbers are those of lm-eval's own model, and of the compressed one asked directly.
    task = load_tasks(["piqa"], None, {})["piqa_local"]
    expected: dict[str, list[float]] = {}
    for method, model in (("exact", lm.hf()), (SNAPKV, lm.compressed(SNAPKV))):
        task.set_config("num_fewshot", 1)
        task.set_fewshot_seed(0)
        found: Any = evaluation.evaluate(model, {"tasks": {"piqa_local": task}, "groups": {}}, limit=8)
        result = results["piqa_local", method]
        assert (result.metric, result.num_fewshot, len(result.samples)) == ("acc", 1, 8)
        assert result.score == found["results"]["piqa_local"]["acc,none"]
        assert result.stderr == pytest.approx(found["results"]["piqa_local"]["acc_stderr,none"])
        expected[method] = [float(sample["acc"]) for sample in found["samples"]["piqa_local"]]
        assert [sample.score for sample in result.samples] == expected[method]
    exact, snapkv = results["piqa_local", "exact"], results["piqa_local", SNAPKV]
    assert (exact.compressed, snapkv.compressed) == (0, 8)
    assert (exact.memory_ratio, exact.memory_ratio_16bit) == (1, 0.5)
    assert exact.kv_bytes == snapkv.kv_bytes_exact
    assert snapkv.kv_bytes == fmean(sample.kv_bytes or 0 for sample in snapkv.samples)
    assert snapkv.memory_ratio == pytest.approx((snapkv.kv_bytes_exact or 0) / (snapkv.kv_bytes or 1))
    agnostic = results["passkey_agnostic", SNAPKV]
    assert (agnostic.query_aware, agnostic.num_fewshot, agnostic.metric) == (False, 0, "string_match_all")
    beside = next((out / "lm_eval").glob(f"piqa_local-*-{snapkv.key}.json"))
    assert json.loads(beside.read_text())["results"]["piqa_local"]["acc,none"] == snapkv.score

    differences = {(each["task"], each["method"]): each for each in json.loads((out / "differences.json").read_text())}
    paired = paired_difference(expected[SNAPKV], expected["exact"])
    assert isinstance(paired, PairedDifference)
    found = differences["piqa_local", SNAPKV]
    assert (found["mean"], found["low"], found["high"], found["n"]) == (paired.mean, paired.low, paired.high, 8)
    assert (found["wins"], found["ties"], found["losses"]) == (paired.wins, paired.ties, paired.losses)
    assert f"{FAILS} failed" in differences["piqa_local", FAILS]["refused"]
    summary = (out / "summary.md").read_text()
    assert f"{snapkv.score:.3f} ± {snapkv.stderr:.3f}<br>" in summary
    smaller = f"{snapkv.memory_ratio:.2f}x smaller ({snapkv.memory_ratio_16bit:.2f}x at 16 bit)"
    assert f"{smaller}<br>8 of 8 compressed" in summary
    assert "question after" in summary

    # The same command again measures only what failed, was edited, or is half.
    paths = {key: next((out / "results").glob(f"*-{result.key}.json")) for key, result in results.items()}
    texts = {key: path.read_text() for key, path in paths.items()}
    edited, half = paths["piqa_local", SNAPKV], paths["passkey_agnostic", "exact"]
    edited.write_text(edited.read_text().replace(f'"score": {snapkv.score}', '"score": 0.987', 1))
    half.write_text(half.read_text()[:300])
    real = evaluation.evaluate
    measured: list[tuple[str, str]] = []

    def noted(model: Any, tasks: Any, **options: Any) -> Any:
        measured.append((next(iter(tasks["tasks"])), str(model.method)))
        return real(model, tasks, **options)

    monkeypatch.setattr(evaluation, "evaluate", noted)
    code, printed = run(*arguments)
    assert code == 1
    again = [("piqa_local", SNAPKV), ("piqa_local", FAILS), ("passkey_agnostic", "exact"), ("passkey_agnostic", FAILS)]
    assert measured == again
    assert printed.replace("\n", "").count("measured again") == 2
    after = read_results(out)
    for key, path in paths.items():
        if key not in again:
            assert path.read_text() == texts[key]
        assert after[key].score == results[key].score


def test_what_a_score_depends_on_is_measured_again(tmp_path: Path, haystack_file: str) -> None:
    task = lm.multiple_choice(3)
    folder = ResultsFolder(tmp_path)
    exact, snapkv = lm.compressed("exact"), lm.compressed(SNAPKV)
    chunked = lm.compressed("exact", prefill_chunk=32)
    base = Settings(limit=2)
    with folder.opened():
        first = evaluate_all([exact, snapkv], {"made": task}, base, folder, "tiny")
        others = [
            ([exact], Settings(limit=1)),
            ([exact], Settings(limit=2, num_fewshot=1)),
            ([exact], Settings(limit=2, seed=1)),
            ([chunked], Settings(limit=2, prefill_chunk=32)),
        ]
        found = [
            result
            for models, settings in others
            for result in evaluate_all(models, {"made": task}, settings, folder, "tiny")
        ]
        other_data = evaluate_all([exact], {"made": lm.multiple_choice(1)}, base, folder, "tiny")
        keys = [result.key for result in [*first, *found, *other_data]]
        assert len(set(keys)) == len(keys)
        assert [len(result.samples) for result in found] == [1, 2, 2, 2]
        seen: list[Any] = []
        evaluate_all([exact, snapkv], {"made": task}, base, folder, "tiny", lambda *event: seen.append(event))
        assert [(method, result is not None) for _, method, result in seen] == [("exact", True), (SNAPKV, True)]
        trained = lm.compressed("exact", pretrained=copy.deepcopy(lm.model()))
        (before,) = evaluate_all([trained], {"made": task}, base, folder, "tiny")
        trained.model.lm_head.weight.data.mul_(-1)  # past every counter
        (after,) = evaluate_all([trained], {"made": task}, base, folder, "tiny")
        assert before.key == first[0].key != after.key
        assert before.samples != after.samples
    assert folder.refused == []


def test_few_shot_examples_are_turns_of_a_chat_as_in_lm_eval(
    run: Run, data: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chatting")
    lm.model().save_pretrained(folder)
    chatting().save_pretrained(folder)
    arguments = ["--tasks", "piqa", "--num_fewshot", "2", "--limit", "2", "--apply_chat_template"]
    assert run(*arguments, model=str(folder))[0] == 0
    assert run(*arguments, "--no_fewshot_as_multiturn", model=str(folder))[0] == 0
    own = {}
    for path in (tmp_path / "out" / "lm_eval").glob("*.json"):
        found = json.loads(path.read_text())
        prompts = [[pair[0] for pair in sample["arguments"]] for sample in found["samples"]["piqa_local"]]
        own[found["config"]["fewshot_as_multiturn"]] = prompts
    default = inspect.signature(simple_evaluate).parameters["fewshot_as_multiturn"].default
    assert default is True
    theirs = lm.hf(tokenizer=chatting())
    for turns in (True, False):
        task = load_tasks(["piqa"], None, {})["piqa_local"]
        task.set_config("num_fewshot", 2)
        task.set_fewshot_seed(0)
        tasks: Any = {"tasks": {"piqa_local": task}, "groups": {}}
        found: Any = evaluation.evaluate(
            theirs, tasks, limit=2, apply_chat_template=True, fewshot_as_multiturn=turns, bootstrap_iters=0
        )
        samples = found["samples"]["piqa_local"]
        assert own[turns] == [[pair[0] for pair in sample["arguments"]] for sample in samples]
        assert own[turns][0][0].count("<user>") == (3 if turns else 1)


def test_two_runs_into_one_folder_are_refused(run: Run, data: None, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lock = FileLock(tmp_path / "out" / ".lock")
    with lock:
        code, printed = run("--tasks", "piqa", "--limit", "1")
    assert code == 2
    assert "another run is writing here; wait for it, or choose another --out" in printed
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="cannot be written"), ResultsFolder(tmp_path / "file").opened():
        pass


def test_nothing_but_failures_exits_with_1(run: Run, data: None, breaking: str) -> None:
    code, _ = run("--tasks", "piqa", "--methods", FAILS, "--limit", "1")
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "exact,snapk(budget=4)"], "unknown method 'snapk'; did you mean 'snapkv'"),
        (["--methods", "snapkv(budgt=4)"], "snapkv has no option 'budgt'; did you mean 'budget'"),
        (["--methods", " , "], "--methods is empty"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "needel_2k"], "unknown task 'needel_2k'"),
        (["--tasks", "needel_2k"], "did you mean 'needle_2k'?"),
        (["--tasks", "arc_easy_local"], "data file arc_easy.jsonl is not in"),
        (["--limit", "0"], "--limit must be a number of documents, or a part of them below 1, got 0"),
        (["--batch_size", "none"], "--batch_size must be a number of at least 1 or \"auto\", got 'none'"),
        (["--metadata", "{length}"], "--metadata is not JSON"),
        (["--metadata", "[1]"], "--metadata must be a JSON object"),
        (["--apply_chat_template"], "has no chat template; leave the option out"),
        (["--fewshot_as_multiturn"], "turns need a chat template; add apply_chat_template"),
        (["--dtype", "float23"], "did you mean 'float32'"),
        (["--methods", "exact,kivi(group_size=5, residual=5)"], "--methods: kivi(bits=2, group_size=5, residual=5): "),
        (["--methods", "kivi(group_size=5, residual=5)"], "group_size 5 does not divide the model's head dim 16"),
        (["--methods", "streaming_llm(budget='1KiB')"], "1,024 bytes does not hold one token in each of 4 rows"),
        (["--methods", "streaming_llm(budget='500B')", "--limit", "1"], "500 bytes does not hold one token ("),
        (["--methods", "snapkv(budget=4, window=2, positions='slots')"], 'positions must be "original" or "cache"'),
    ],
)
def test_mistakes_exit_with_2_and_one_message(
    arguments: list[str], message: str, run: Run, data: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lm_eval.tasks.TaskManager
    # In place of lm-eval's own tasks, which take long to index.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: real(**{**options, "include_defaults": False}))
    code, printed = run(*(["--tasks", "piqa"] if "--tasks" not in arguments else []), *arguments)
    assert code == 2
    assert message in " ".join(printed.split())
    assert "Traceback" not in printed


def test_what_does_not_fit_is_told_before_the_model_is_loaded(
    run: Run, data: None, model_folder: str, tmp_path: Path
) -> None:
    """This folder has no weights: whatever needs them would fail first."""
    model = tmp_path / "model"
    shutil.copytree(model_folder, model, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((model / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(settings))
    methods = "exact,snapkv(budget=8, window=4, positions='cache'),kivi(group_size=5, residual=5)"
    code, printed = run("--tasks", "piqa", "--methods", methods, model=str(model))
    assert code == 2 and not (tmp_path / "out").exists()
    told = " ".join(printed.split())
    assert "--methods: snapkv(positions='cache', budget=8, window=4): keys of LlamaForCausalLM cannot be moved" in told
    assert "--methods: kivi(bits=2, group_size=5, residual=5): the group_size 5 does not divide" in told


def test_a_missing_model_is_named(run: Run, data: None) -> None:
    code, printed = run("--tasks", "piqa", model="no/such-model")
    assert code == 2
    assert "'no/such-model'" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("name", "choice"),
    [("far_away", "choose a task made in code (needle_2k, kv_retrieval"), ("piqa", "set KVCOMPRESS_DATA to a folder")],
)
def test_data_out_of_reach_is_said_at_once(
    name: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.yaml").write_text(
        f"task: {name}\ndataset_path: nobody/nothing\noutput_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{x}}"\ndoc_to_target: "{{y}}"\n'
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(loading, "find_tasks", lambda names, *_, **__: (manager, list(names)))
    monkeypatch.setattr(loading, "data_folders", lambda: [tmp_path / "nowhere"])
    # As on a machine that is not told to stay offline, and has no network: the tests' sockets are blocked.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataUnreachable) as error:
        load_tasks([name], None, {})
    assert f"task '{name}': its data set cannot be loaded" in str(error.value)
    assert choice in str(error.value)
    assert datasets.config.HF_HUB_OFFLINE is False


def test_hub_names_mean_local_files_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path))
    assert [loading.local_name(name) for name in ("piqa", "copa", "gsm8k")] == ["piqa_local", "copa_local", "gsm8k"]
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path / "nowhere"))
    assert loading.local_name("piqa") == "piqa"


def made(method: str, scores: list[float | None], **options: Any) -> EvalResult:
    samples = [SampleResult(index, score, 100.0, 400.0, 200.0, True) for index, score in enumerate(scores)]
    values = {"key": method, "model": "m", "fingerprint": "f", "task": "t", "task_version": "1", "method": method}
    values |= {"num_fewshot": 0, "limit": None, "seed": 0, "data_hash": "d", "settings": {}, "metric": "acc"}
    return EvalResult(**{**values, "score": 0.5, "samples": samples, **options})


def test_differences_are_paired_and_refused_where_they_must_be() -> None:
    base: list[float | None] = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    worse: list[float | None] = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, None]
    cases = {
        "a": compare_to_exact([made("exact", base), made("a", worse)])[0],
        "few": compare_to_exact([made("exact", base[:3]), made("few", worse[:3])])[0],
        "none": compare_to_exact([made("exact", [None] * 9), made("none", [None] * 9)])[0],
        # Log-likelihoods are better when higher though perplexity is not; accuracies that count errors are not.
        "likelihood": compare_to_exact(
            [made("exact", base), made("l", worse, sample_score="log-likelihood", higher_is_better=False)]
        )[0],
        "errors": compare_to_exact([made("exact", base), made("e", worse, higher_is_better=False)])[0],
    }
    found = cases["a"].difference
    assert isinstance(found, PairedDifference)
    # The ninth document has no score on one side, and so counts for neither.
    assert (found.n, found.mean, found.wins, found.ties, found.losses) == (8, -0.25, 0, 6, 2)
    assert cases["a"].left_out == [8]
    assert difference_rows([cases["few"]])[0][2:] == ["–", "–", "n=3 is too few to rank, needs at least 8"]
    assert cases["none"].to_dict()["refused"] == "the metric gives no number for a single document"
    for name, losses in (("likelihood", 2), ("errors", 0)):
        other = cases[name].difference
        assert isinstance(other, PairedDifference)
        assert other.losses == losses
    assert compare_to_exact([made("a", worse)]) == []


def test_cells_say_what_was_not_compressed_or_was_cut() -> None:
    ratios = {"memory_ratio": 7.812, "memory_ratio_16bit": 3.906}
    result = made("a", [1.0, 0.0], stderr=0.25, kv_bytes=1.5e6, **ratios, compressed=1, truncated=2)
    assert cell(result).split("\n") == [
        "0.500 ± 0.250",
        "1.50 MB, 7.81x smaller (3.91x at 16 bit)",
        "1 of 2 compressed",
        "2 cut on the left",
    ]
    assert cell(made("a", [1.0])) == "0.500\n0 of 1 compressed"
    failed = made("b", [], status="failed", error="OutOfMemoryError: too big")
    assert cell(failed) == "failed\nOutOfMemoryError: too big"
    head, rows = score_rows([result, made("b", [], task="u", status="failed", error="no")])
    assert head == ["task", "a", "b"]
    assert [row[0] for row in rows] == ["t\nacc", "u\nacc"]
    assert rows[0][2] == "" and rows[1][1] == ""


def test_results_of_another_version_or_with_numbers_that_json_lacks(tmp_path: Path) -> None:
    result = made("a", [float("nan"), 1.0], score=float("inf"))
    text = result.to_json()
    assert "NaN" not in text and "Infinity" not in text
    back = EvalResult.from_json(text)
    assert (back.score, back.samples[0].score, back.samples[1]) == (None, None, result.samples[1])
    for broken, reason in ((text[:50], "."), ("[]", "checksum"), (text.replace('"acc"', '"acd"'), "checksum")):
        with pytest.raises(ValueError, match=reason):
            EvalResult.from_json(broken)


def test_lists_are_split_outside_brackets_and_quotes() -> None:
    assert split_list("exact, snapkv(budget=0.25, window=16) | kivi(bits=2),a") == [
        "exact",
        "snapkv(budget=0.25, window=16) | kivi(bits=2)",
        "a",
    ]
    assert split_list("h2o(positions='a,b'),[1,2],,") == ["h2o(positions='a,b')", "[1,2]"]
