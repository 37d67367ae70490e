"""An lm-eval model that reads the prompt and answers by rule: it needs no weights and no tokenizer."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from lm_eval.api.model import LM


class Reader(LM):
    """Answers every generated task from its prompt alone, so a perfect score shows that the prompt tells all."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        return [answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise AssertionError("a generated task asked for a likelihood, where its answer is to be generated")

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise AssertionError("a generated task asked for a likelihood, where its answer is to be generated")


def answer(prompt: str) -> str:
    """What stands in the prompt for the question it ends with."""
    question = prompt[prompt.rindex("Question:") :]
    rules: dict[str, Callable[[str, str], str]] = {
        "secret number": secret_numbers,
        "JSON": value,
        "hold": variables,
        "most often": common,
        "pass key": pass_key,
    }
    rule = next(rule for word, rule in rules.items() if word in question)
    return " " + rule(prompt, question) + "."


def secret_numbers(prompt: str, question: str) -> str:
    found = re.findall(r"secret number of (\S+) is (\d+)\.", prompt)
    return ", ".join(number for key, number in found if key in question)


def value(prompt: str, question: str) -> str:
    return json.loads(prompt.split("\n\n")[1])[question.split('"')[1]]


def variables(prompt: str, question: str) -> str:
    state: dict[str, str] = {}
    assignments: list[tuple[str, str]] = re.findall(r"SET (\w+) = (\w+)\.", prompt)
    for name, source in assignments:
        state[name] = state.get(source, source)
    return " ".join(name for name in state if state[name] in question)


def common(prompt: str, question: str) -> str:
    count = int(re.findall(r"Which (\d+) words", question)[0])
    return ", ".join(word for word, _ in Counter(prompt.split("\n\n")[1].split(", ")).most_common(count))


def pass_key(prompt: str, question: str) -> str:
    return re.findall(r"pass key is (\d+)\.", prompt)[0]
