import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

import datasets
import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as evaluate_tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml

from kvcompress.evals import LOCAL_TASKS, TASKS_FOLDER, MissingData, find_tasks
from kvcompress.evals.loading import load_tasks
from kvcompress.evals.model import CompressedLM
from tests.evals import lm
from tests.evals.reader import Reader
from tests.evals.tiny import byte_level, chatting, trained

SHARED_TASKS = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"
needs_shared_data = pytest.mark.skipif(not SHARED_TASKS.is_dir(), reason="../shared/data/tasks is not on this machine")
GENERATED = sorted(
    path.stem for folder in TASKS_FOLDER.iterdir() if folder.name != "local" for path in folder.glob("*.yaml")
)


def evaluate(names: list[str], model: LM, limit: int | None = None, shots: int = 0, **metadata: Any) -> Any:
    """lm-eval's results for tasks whose length is measured by the trained tokenizer."""
    manager, tasks = find_tasks(names, trained(), **metadata)
    results = simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, limit=limit, num_fewshot=shots, bootstrap_iters=0
    )
    assert results is not None
    return results


def test_there_are_all_families_in_both_forms() -> None:
    forms = {"needle", "needle_multikey", "needle_multivalue", "needle_multiquery", "kv_retrieval"}
    forms |= {"variable_tracking", "common_words", "passkey", "two_turn"}
    forms |= {"needle_2k", "needle_4k", "needle_multikey_2k"}
    assert forms | {f"{name}_agnostic" for name in forms} <= set(GENERATED)


def test_every_generated_task_runs_and_a_reader_of_its_prompts_scores_full(haystack_file: str) -> None:
    reader = Reader()
    names = [*GENERATED, "needle_1500", "kv_retrieval_3k_agnostic"]
    results = evaluate(names, reader, shots=3, samples=1, length=1800, haystack=haystack_file)
    assert set(results["results"]) == set(names)
    for name, scores in results["results"].items():
        assert scores["string_match_all,none"] == 1, name
        other = "string_match_part,none" if "string_match_part,none" in scores else "exact_match,none"
        assert scores[other] == 1, name
        assert results["versions"][name] == 2
        assert results["n-shot"][name] == 0
        kilo = [part for part in name.split("_") if part[0].isdigit()]
        target = int(kilo[0].replace("k", "")) * (1024 if "k" in kilo[0] else 1) if kilo else 1800
        for sample in results["samples"][name]:
            doc, (prompt, options) = sample["doc"], sample["arguments"][0]
            assert prompt == doc["context"] + doc["question"] + doc["answer_prefix"]
            assert doc["length"] == len(trained()(prompt).input_ids)
            assert 0 <= target - doc["length"] - options["max_gen_toks"] < 100
            assert doc["query_aware"] is not name.endswith("_agnostic")
    json.dumps(results["samples"]["needle"])


def test_a_wrong_answer_scores_nothing(haystack_file: str) -> None:
    class Wrong(Reader):
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [" no idea"] * len(requests)

    results = evaluate(["needle", "two_turn_agnostic"], Wrong(), samples=2, haystack=haystack_file)
    assert results["results"]["needle"]["string_match_all,none"] == 0
    assert results["results"]["two_turn_agnostic"]["string_match_all,none"] == 0


def random_llama() -> Any:
    """A tiny random model behind lm-eval's own interface."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(trained()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    settings: dict[str, Any] = {"pretrained": LlamaForCausalLM(config).eval(), "tokenizer": trained(), "batch_size": 2}
    return HFLM(**settings)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_as_long_as_the_model_leaves_room_to_answer(chat: bool, haystack_file: str) -> None:
    tokenizer = chatting() if chat else trained()
    settings: dict[str, Any] = {"length": lm.LENGTH, "samples": 3, "haystack": haystack_file}
    names = ["passkey", "needle_agnostic"]
    manager, found = find_tasks(names, tokenizer, apply_chat_template=chat, **settings)
    tasks: Any = manager.load(found)
    model = CompressedLM(lm.model(), tokenizer=tokenizer, batch_size=2)
    assert model.max_length == lm.LENGTH
    results: Any = evaluate_tasks(model, tasks, apply_chat_template=chat, fewshot_as_multiturn=chat, bootstrap_iters=0)
    assert model.truncated == 0
    for name in names:
        for sample in results["samples"][name]:
            prompt, options = sample["arguments"][0]
            assert ("<user>" in prompt) is chat
            assert sample["doc"]["length"] == len(tokenizer.encode(prompt))
            assert 0 <= lm.LENGTH - sample["doc"]["length"] - options["max_gen_toks"] < 100


def test_a_random_model_gets_the_length_measured_here(haystack_file: str) -> None:
    model = random_llama()
    results = evaluate(["passkey", "needle_agnostic"], model, samples=2, length=900, haystack=haystack_file)
    for name in ("passkey", "needle_agnostic"):
        assert results["results"][name]["string_match_all,none"] == 0
        for sample in results["samples"][name]:
            assert sample["doc"]["length"] == len(model.tok_encode(sample["arguments"][0][0]))


HUB_FORMS: dict[str, tuple[str, Any]] = {
    "piqa": (
        "piqa/piqa.yaml",
        lambda d: {
            "goal": d["query"][len("Question: ") : -1],
            "sol1": d["choices"][0],
            "sol2": d["choices"][1],
            "label": d["gold"],
        },
    ),
    "arc_easy": (
        "arc/arc_easy.yaml",
        lambda d: {
            "question": d["query"][len("Question: ") :],
            "choices": {"text": d["choices"], "label": list("ABCDE")[: len(d["choices"])]},
            "answerKey": "ABCDE"[d["gold"]],
        },
    ),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        lambda d: {
            "question_stem": d["query"],
            "choices": {"text": d["choices"], "label": list("ABCD")},
            "answerKey": "ABCD"[d["gold"]],
        },
    ),
    "copa": (
        "super_glue/copa/default.yaml",
        lambda d: {
            "premise": d["query"].rpartition(", ")[0] + ".",
            "question": {"because": "cause", "therefore": "effect"}[d["query"].rpartition(", ")[2]],
            "choice1": d["choices"][0][0].upper() + d["choices"][0][1:],
            "choice2": d["choices"][1][0].upper() + d["choices"][1][1:],
            "label": d["gold"],
        },
    ),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        lambda d: {"text": d["context"] + " " + d["continuation"]},
    ),
}


@needs_shared_data
@pytest.mark.parametrize("hub_task", LOCAL_TASKS)
def test_local_prompts_and_their_few_shot_examples_are_those_of_lm_eval_for_the_same_items(hub_task: str) -> None:
    manager, tasks = find_tasks([LOCAL_TASKS[hub_task]])
    local: Any = manager.load(tasks)["tasks"][LOCAL_TASKS[hub_task]]
    path, to_hub = HUB_FORMS[hub_task]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / path)
    docs = datasets.Dataset.from_list([to_hub(doc) for doc in local.eval_docs])
    config |= {
        "custom_dataset": lambda **_: {"test": docs},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
    }
    theirs = ConfigurableTask(config={key: config[key] for key in config if key != "tag"})
    for task in (local, theirs):
        task.set_config("num_fewshot", 3)
        task.set_fewshot_seed(1)
        task.build_all_requests(limit=40)
    assert len(local.instances) >= 8
    for ours, other in zip(local.instances, theirs.instances, strict=True):
        assert ours.args == other.args
        target, gold = local.doc_to_target(ours.doc), theirs.doc_to_target(other.doc)
        assert target == gold or local.doc_to_choice(ours.doc)[target] == gold


@needs_shared_data
def test_local_tasks_read_whole_files_and_report_accuracy() -> None:
    results = evaluate(["piqa_local", "arc_easy_local", "lambada_local"], random_llama(), limit=8, shots=1)
    sizes = {name: counts["original"] for name, counts in results["n-samples"].items()}
    assert sizes == {"piqa_local": 1838, "arc_easy_local": 2376, "lambada_local": 8}
    assert {"acc,none", "acc_norm,none"} <= set(results["results"]["piqa_local"])
    assert {"acc,none", "perplexity,none"} <= set(results["results"]["lambada_local"])


def test_a_folder_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"query": "The cup fell, because", "choices": ["it was pushed.", "it broke."], "gold": 0, "source": "own"}
    (tmp_path / "copa.jsonl").write_text(json.dumps(item) + "\n\n")
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path))
    manager, tasks = find_tasks(["copa_local"])
    task = manager.load(tasks)["tasks"]["copa_local"]
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    expected = [("The cup fell because", "  it was pushed."), ("The cup fell because", "  it broke.")]
    assert [instance.args for instance in task.instances] == expected


def test_a_missing_file_is_named_with_what_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arc_easy.jsonl").write_text("{}")
    monkeypatch.setenv("KVCOMPRESS_DATA", str(tmp_path))
    manager, tasks = find_tasks(["piqa_local"])
    with pytest.raises(MissingData) as error:
        manager.load(tasks)
    assert f"data file piqa.jsonl is not in {tmp_path} (there: arc_easy.jsonl)" in str(error.value)
    assert "set KVCOMPRESS_DATA" in str(error.value) and "needle_2k" in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"piqa\.jsonl, line 2: not JSON \("),
        ('{"query": "x", "gold": 1}', r"line 2: expected an object with query, choices, gold; no 'choices'"),
        ("[1]", r"line 2: expected an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"query": "x", "choices": ["a", "b"], "gold": 1}'
    (tmp_path / "piqa.jsonl").write_text(f"{good}\n{line}\n")
    manager, tasks = find_tasks(["piqa_local"], data_folder=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        manager.load(tasks)


def test_unknown_names_and_settings_are_refused() -> None:
    for name in ("needles_2k", "piqa_local_2k", "needle_0k"):
        with pytest.raises(ValueError, match=f"unknown task '{name}': expected a task of lm-eval or one of"):
            find_tasks_without_defaults([name])
    manager, tasks = find_tasks(["needle"], trained(), lenght=100)
    with pytest.raises(ValueError, match="no setting 'lenght'; did you mean 'length'"):
        manager.load(tasks)
    manager, tasks = find_tasks(["needle"])
    with pytest.raises(ValueError, match="needs a tokenizer, got None: pass metadata"):
        manager.load(tasks)


def test_metadata_of_ones_own_wins_but_not_over_what_the_task_is(tmp_path: Path, haystack_file: str) -> None:
    bytes_alone = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    bytes_alone.save_pretrained(tmp_path)
    metadata = {"tokenizer": str(tmp_path), "length": 900, "samples": 1, "haystack": haystack_file}
    task = load_tasks(["needle"], trained(), metadata)["needle"]
    doc = task.eval_docs[0]
    assert doc["length"] == len((doc["context"] + doc["question"] + doc["answer_prefix"]).encode()) > 700
    for name in ("family", "query_aware", "answer_tokens"):
        with pytest.raises(ValueError, match=f"metadata '{name}' belongs to the task"):
            load_tasks(["needle"], trained(), {name: 1})
    with pytest.raises(ValueError, match="needs a tokenizer, got 5: pass metadata"):
        load_tasks(["needle"], trained(), {"tokenizer": 5})


def find_tasks_without_defaults(names: list[str]) -> None:
    """``find_tasks`` with an empty folder in place of lm-eval's own tasks, which take long to index."""
    real = lm_eval.tasks.TaskManager

    def manager(include_defaults: bool = True, **settings: Any) -> Any:
        return real(include_defaults=False, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", manager)
        find_tasks(names)
