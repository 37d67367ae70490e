"""What is finished is kept, answer by answer: whoever is killed loses what was being computed."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from kvcompress.evals.answer_file import Answer, AnswerFile
from kvcompress.evals.answers import Answers
from kvcompress.evals.evaluation import Settings, evaluate_all
from kvcompress.evals.results import EvalResult, ResultsFolder
from tests.evals import lm
from tests.evals.lm import ASK, flat
from tests.evals.tiny import trained

SNAPKV = "snapkv(budget=24, window=4)"

KILLED = """
import os, signal
from kvcompress.evals.model import CompressedLM
write, batches = CompressedLM._write, []
def write_or_die(self, batch):
    batches.append(batch)
    if len(batches) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, batch)
CompressedLM._write = write_or_die
from kvcompress.cli import main
main()
"""


@contextmanager
def interrupted_after(calls: int | None) -> Iterator[list[int]]:
    """Ctrl-C in a call of the model; the tokens of each call so far."""
    sizes: list[int] = []

    def forward(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if len(sizes) == calls:
            raise KeyboardInterrupt
        sizes.append((arguments[0] if arguments else options["input_ids"]).numel())

    hook = lm.model().register_forward_pre_hook(forward, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


def comparable(result: EvalResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in ("seconds", "reused")}


def test_a_killed_evaluation_goes_on_at_the_document_it_was_at(
    tmp_path: Path, haystack_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.model().save_pretrained(tmp_path / "model")
    trained().save_pretrained(tmp_path / "model")
    arguments = ["eval", "--model", str(tmp_path / "model"), "--tasks", "passkey", "--limit", "6", "--methods", SNAPKV]
    arguments += ["--metadata", json.dumps({"length": 250, "haystack": haystack_file}), "--batch_size", "1"]
    command = [sys.executable, "-c", KILLED, *arguments, "--out", str(tmp_path / "out")]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    path = tmp_path / "out" / "answers.jsonl"
    assert len(path.read_text().splitlines()) == 3
    with path.open("a") as file:
        file.write('{"request": "half a li')

    from kvcompress.cli import main
    from kvcompress.evals.model import CompressedLM

    write, written = CompressedLM._write, []
    monkeypatch.setattr(CompressedLM, "_write", lambda self, batch: written.append(batch) or write(self, batch))
    for folder, batches in (("out", 3), ("whole", 6), ("out", 0)):
        written.clear()
        monkeypatch.setattr(sys, "argv", ["kvcompress", *arguments, "--out", str(tmp_path / folder)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        assert len(written) == batches
    results = [next((tmp_path / name / "results").glob("*.json")).read_text() for name in ("out", "whole")]
    resumed, whole = map(EvalResult.from_json, results)
    assert comparable(resumed) == comparable(whole)
    assert (resumed.reused, resumed.seconds, whole.reused) == (3, None, 0)
    assert len({sample.kv_bytes_exact for sample in whole.samples}) > 1


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("ask", ASK)
def test_only_what_was_being_computed_is_computed_again(
    ask: Callable[[Any], Any], batch_size: int, tmp_path: Path
) -> None:
    plain = lm.compressed(SNAPKV, batch_size=batch_size)
    with interrupted_after(None) as whole:
        expected = flat(ask(plain))
    file = AnswerFile(tmp_path)
    done: list[list[int]] = []
    for calls in (len(whole) // 2, len(whole) // 3, None):
        with file.opened(), interrupted_after(calls) as sizes:
            model = lm.compressed(SNAPKV, batch_size=batch_size)
            model.answers = Answers(file, "x")
            kept = len(file.records)
            if calls is None:
                assert flat(ask(model)) == pytest.approx(expected, abs=1e-5)
                assert model.uses == plain.uses
            else:
                with pytest.raises(KeyboardInterrupt):
                    ask(model)
            assert model.answers.found == kept
        done.append(sizes)
    # A batch of any request is lost with each interruption, and no more.
    largest = max(sum(whole[start : start + 7]) for start in range(len(whole)))
    assert sum(map(sum, done)) <= sum(whole) + 2 * largest
    with file.opened(), interrupted_after(0):
        model = lm.compressed(SNAPKV, batch_size=batch_size)
        model.answers = Answers(file, "x")
        assert flat(ask(model)) == pytest.approx(expected, abs=1e-5)
        other = lm.compressed(SNAPKV, batch_size=batch_size)
        other.answers = Answers(file, "y")
        with pytest.raises(KeyboardInterrupt):
            ask(other)


def test_more_documents_begin_with_those_that_are_known(tmp_path: Path) -> None:
    task, exact, snapkv = lm.multiple_choice(4), lm.compressed("exact"), lm.compressed(SNAPKV)
    with ResultsFolder(tmp_path).opened() as folder:
        for models, limit, seed, reused in (
            ([exact], 2, 0, 0),
            ([exact, snapkv], 4, 0, 6),
            ([exact], 4, 1, 0),
        ):
            results = evaluate_all(models, {"made": task}, Settings(limit=limit, seed=seed), folder, "tiny")
            assert [result.reused for result in results] == [reused, *[0] * (len(models) - 1)]
            for model, result in zip(models, results, strict=True):
                fresh = lm.scores(model, task, limit=limit)["results"]["made"]
                assert (result.score, result.scores["acc_norm,none"]) == (fresh["acc,none"], fresh["acc_norm,none"])


def test_sampled_texts_of_one_request_are_kept_apart(tmp_path: Path) -> None:
    asked = [(lm.text(100), {"until": [], "do_sample": True, "temperature": 2.0, "max_gen_toks": 8})] * 3
    found = []
    file = AnswerFile(tmp_path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        with file.opened():
            model = lm.compressed("exact")
            model.answers = Answers(file, "x")
            found.append(model.generate_until(lm.requests("generate_until", asked), True))
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_a_damaged_line_is_said_and_computed_again(tmp_path: Path) -> None:
    task = lm.multiple_choice(2)
    with ResultsFolder(tmp_path).opened() as folder:
        evaluate_all([lm.compressed("exact")], {"made": task}, Settings(), folder, "tiny")
    path = tmp_path / "answers.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('"greedy"', '"gredy"'), *lines[1:]]) + "\n")
    next((tmp_path / "results").glob("*.json")).unlink()
    with ResultsFolder(tmp_path).opened() as folder:
        assert folder.refused == ["answers.jsonl: no whole answers in line 1; computed again"]
        (result,) = evaluate_all([lm.compressed("exact")], {"made": task}, Settings(), folder, "tiny")
    assert result.reused == len(lines) - 1


def test_a_likelihood_of_nothing_is_no_whole_answer(tmp_path: Path) -> None:
    # JSON has no infinity, so it is not kept, and null is not taken for one.
    assert Answer.from_json(Answer("a", 0, float("-inf"), False, None, 1, 2, 3, True).to_json()).log_probability is None
