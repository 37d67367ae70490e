"""Requests that lm-eval keeps (`cache_requests`) are never those of other documents, examples or templates."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval.caching import cache
from lm_eval.evaluator import evaluate

from kvcompress.evals.loading import load_tasks
from kvcompress.evals.model import CompressedLM
from tests.evals import lm
from tests.evals.reader import Reader
from tests.evals.tiny import chatting, trained


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which lm-eval keeps requests, empty."""
    monkeypatch.setattr(cache, "PATH", str(tmp_path / "kept"))
    return tmp_path / "kept"


def asked(names: list[str], keep: bool, shots: int = 0, fewshot_seed: int = 0, **metadata: Any) -> list[Any]:
    """The arguments of all requests of tasks."""
    tasks = load_tasks(names, trained(), metadata)
    for task in tasks.values():
        if task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(fewshot_seed)
        task.build_all_requests(cache_requests=keep)
    return [request.args for task in tasks.values() for request in task.instances]


def test_generated_tasks_of_another_seed_length_or_text_are_made_anew(kept: Path, haystack_file: str) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"length": 600},
        {"samples": 3},
        {"depths": [0.5]},
        {"haystack": "filler"},
        {"keys": 2},
    ]
    names = ["needle", "needle_700_agnostic"]
    for again in (False, True):
        for change in changes:
            metadata = {"samples": 2, "length": 500, "haystack": haystack_file, **change}
            assert asked(names, True, **metadata) == asked(names, False, **metadata), change
        # Each pair of tasks has two files; what was asked for twice was found. needle_700 has its own length.
        files = len(list(kept.iterdir()))
        assert files == 2 * len(changes) - 1, again


def test_a_reader_scores_full_on_what_was_kept(kept: Path, haystack_file: str) -> None:
    for seed in (0, 1, 0):
        tasks: Any = {
            "tasks": load_tasks(["passkey"], trained(), {"seed": seed, "samples": 2, "length": 300}),
            "groups": {},
        }
        found: Any = evaluate(Reader(), tasks, cache_requests=True, bootstrap_iters=0)
        assert found["results"]["passkey"]["string_match_all,none"] == 1
    assert len(list(kept.iterdir())) == 2


def test_local_tasks_of_other_data_or_examples_are_made_anew(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in (("first", "cup"), ("second", "vase"), ("first", "cup")):
        (tmp_path / name).mkdir(exist_ok=True)
        items = [{"query": f"The {word} {n} fell, because", "choices": ["a", "b"], "gold": 0} for n in range(9)]
        (tmp_path / name / "copa.jsonl").write_text("\n".join(map(json.dumps, items)))
        monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path / name))
        for seed in (0, 1):
            expected = asked(["copa"], False, shots=2, fewshot_seed=seed)
            assert asked(["copa"], True, shots=2, fewshot_seed=seed) == expected
    assert len(list(kept.iterdir())) == 4


def test_a_chat_is_named_by_its_template_and_arguments() -> None:
    names = {
        CompressedLM(lm.model(), tokenizer=tokenizer, chat_template_args=arguments).tokenizer_name
        for tokenizer in (trained(), chatting())
        for arguments in ({}, {"tools": None})
    }
    assert len(names) == 4
