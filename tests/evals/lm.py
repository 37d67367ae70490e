"""A tiny random model behind lm-eval's interface, and requests and tasks to put to it."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import datasets
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from kvcompress.evals.model import CompressedLM
from tests.evals.tiny import small_haystack, trained

LENGTH = 300


@cache
def model() -> LlamaForCausalLM:
    """Two layers, GQA, initialised widely enough that every key counts."""
    torch.manual_seed(0)
    special: Any = trained()
    config = LlamaConfig(
        vocab_size=len(trained()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        bos_token_id=special.bos_token_id,
        eos_token_id=special.eos_token_id,
    )
    return LlamaForCausalLM(config).eval()


def hf(**options: Any) -> Any:
    """lm-eval's own model."""
    return HFLM(**{"pretrained": model(), "tokenizer": trained(), **options})


def compressed(method: str, **options: Any) -> CompressedLM:
    return CompressedLM(**{"pretrained": model(), "method": method, "tokenizer": trained(), **options})


def requests(kind: str, arguments: list[tuple[Any, ...]], docs: list[dict[str, Any]] | None = None) -> list[Instance]:
    """One document for each."""
    docs = docs or [{}] * len(arguments)
    kinds: Any = kind
    return [
        Instance(kinds, doc, given, 0, ("made", index, 1))
        for index, (given, doc) in enumerate(zip(arguments, docs, strict=True))
    ]


def text(length: int, start: int = 0) -> str:
    """Words of the haystack, cut at a space."""
    return small_haystack()[start : start + length].rpartition(" ")[0]


def items(count: int = 6) -> list[dict[str, Any]]:
    """Multiple-choice documents with contexts of very different lengths and choices of one to several tokens."""
    rng = Random(0)
    words = small_haystack().replace(".", "").split()
    return [
        {
            "query": text(30 + 130 * (index % 3), 400 * index),
            "choices": [" ".join(rng.sample(words, size)) for size in (1, 1, 3)],
            "gold": rng.randrange(3),
        }
        for index in range(count)
    ]


def multiple_choice(count: int = 6) -> ConfigurableTask:
    """The documents as a task of lm-eval."""
    return ConfigurableTask(
        config={
            "task": "made",
            "output_type": "multiple_choice",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(items(count))},
            "test_split": "test",
            "doc_to_text": "query",
            "doc_to_target": "gold",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            "metadata": {"version": 1},
        }
    )


def scores(model: Any, *tasks: Any, shots: int = 0, limit: int | None = None) -> Any:
    """lm-eval's results of tasks."""
    for task in tasks:
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(1)
    named: Any = {"tasks": {task.task_name: task for task in tasks}, "groups": {}}
    return evaluate(model, named, limit=limit, bootstrap_iters=0)


def likelihoods(model: Any) -> Any:
    """Two choices behind each of five contexts."""
    contexts = [text(length, start) for length, start in ((300, 0), (200, 90), (140, 400), (60, 800), (240, 50))]
    pairs = [(context, choice) for context in contexts for choice in (" ba", " gilo funa")]
    return model.loglikelihood(requests("loglikelihood", pairs), True)


def texts(model: Any) -> Any:
    """Whole texts."""
    # Letters that the tokenizer has no merges of, so that three texts are equally long.
    asked = [*(" ".join([letter] * 30) for letter in "xqz"), text(200), text(90)]
    return model.loglikelihood_rolling(requests("loglikelihood_rolling", [(each,) for each in asked]), True)


def answers(model: Any) -> Any:
    """Generated texts."""
    asked = [(text(length, length), {"until": [], "max_gen_toks": 6}) for length in (300, 200, 140, 60, 240)]
    return model.generate_until(requests("generate_until", asked), True)


ASK: list[Callable[[Any], Any]] = [likelihoods, texts, answers]


def flat(results: Any) -> list[Any]:
    """The values of all results."""
    return [value for result in results for value in (result if isinstance(result, tuple) else (result,))]
