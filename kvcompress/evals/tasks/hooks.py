"""The functions that the task YAML files name: documents made or read, and answers scored."""

from difflib import get_close_matches
from typing import Any

from datasets import Dataset

from kvcompress.evals.generate import FAMILIES, Tokenizer, make_samples
from kvcompress.evals.local_data import read_items
from kvcompress.evals.scoring import any_contained, exact_match, recall
from kvcompress.models import load_tokenizer

SHARED = ("length", "samples", "seed", "haystack", "depths", "tokenizer", "apply_chat_template")
"""What a user may set for every generated task, by the task manager's metadata."""


def generated_documents(
    *,
    family: str,
    query_aware: bool,
    length: int = 2048,
    fixed_length: int | None = None,
    samples: int = 100,
    seed: int = 0,
    haystack: str | None = None,
    depths: list[float] | None = None,
    answer_tokens: int = 0,
    apply_chat_template: bool = False,
    tokenizer: Tokenizer | str | None = None,
    pretrained: Any = None,
    **others: Any,
) -> dict[str, Dataset]:
    """Make a task's documents from its metadata, in which lm-eval also puts all arguments of the model.

    ``tokenizer`` (an object, a folder or a name), else that of ``pretrained``, measures the length.
    ``fixed_length`` is that of a task with a length in its name; it wins over ``length``, which may be meant for
    other tasks of the same run. ``answer_tokens`` of it are the answer's. Raises ``ValueError`` if there is no
    tokenizer and for a misspelt setting.
    """
    options = {name: others.pop(name) for name in FAMILIES[family].options if name in others}
    for name in others:
        close = get_close_matches(name, [*SHARED, *FAMILIES[family].options], n=1, cutoff=0.8)
        if close:
            raise ValueError(f"the {family} task has no setting {name!r}; did you mean {close[0]!r}?")
    measure = tokenizer or pretrained
    if not isinstance(measure, str) and not hasattr(measure, "encode"):
        raise ValueError(
            f"the {family} task measures its length in tokens and needs a tokenizer, got {measure!r}: pass metadata "
            f"{{'tokenizer': NAME or folder}} or model arguments with pretrained=NAME"
        )
    made = make_samples(
        family,
        load_tokenizer(measure) if isinstance(measure, str) else measure,
        length=fixed_length or length,
        samples=samples,
        seed=seed,
        haystack=haystack,
        depths=depths,
        query_aware=query_aware,
        answer_tokens=answer_tokens,
        apply_chat_template=apply_chat_template,
        **options,
    )
    return {"test": Dataset.from_list([sample.to_doc() for sample in made])}


def local_documents(*, file: str, fields: list[str], data_folder: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Read a local task's documents; see ``kvcompress.evals.local_data.read_items`` for where and what it raises."""
    return {"test": Dataset.from_list(read_items(file, fields, data_folder))}


def context_and_question(doc: dict[str, Any]) -> str:
    """The prompt up to where the answer begins."""
    return doc["context"] + doc["question"]


def score_one_answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """``string_match_all`` (the answer is contained) and ``exact_match`` of a generated answer."""
    return {
        "string_match_all": recall(results[0], doc["answers"]),
        "exact_match": exact_match(results[0], doc["answers"]),
    }


def score_many_answers(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """``string_match_all`` (the part of the answers contained) and ``string_match_part`` (any of them)."""
    return {
        "string_match_all": recall(results[0], doc["answers"]),
        "string_match_part": any_contained(results[0], doc["answers"]),
    }
