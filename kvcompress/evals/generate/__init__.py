"""Long-context tasks made in code from a seed: the same samples on every machine."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random
from typing import Any

from kvcompress.evals.generate.common_words import common_words
from kvcompress.evals.generate.draft import Draft, Setting, Tokenizer, largest_fitting
from kvcompress.evals.generate.kv_retrieval import kv_retrieval
from kvcompress.evals.generate.needle import needle
from kvcompress.evals.generate.passkey import passkey
from kvcompress.evals.generate.sample import Sample, split_prompt
from kvcompress.evals.generate.two_turn import two_turn
from kvcompress.evals.generate.variable_tracking import variable_tracking
from kvcompress.evals.haystack import load_haystack

__all__ = ["FAMILIES", "Family", "Sample", "Tokenizer", "make_samples", "split_prompt"]

EVENLY = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class Family:
    """A kind of task: the function that draws a sample, and what it uses if nothing else is asked for."""

    draw: Callable[..., Draft]
    haystack: str = "python-docs"
    depths: tuple[float, ...] = EVENLY

    @property
    def options(self) -> list[str]:
        """Names of the keyword arguments of ``draw``, such as ``keys``."""
        parameters = inspect.signature(self.draw).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


FAMILIES: dict[str, Family] = {
    "needle": Family(needle),
    "kv_retrieval": Family(kv_retrieval),
    "variable_tracking": Family(variable_tracking, depths=EVENLY[:6]),
    "common_words": Family(common_words),
    "passkey": Family(passkey, haystack="filler"),
    "two_turn": Family(two_turn),
}


def make_samples(
    family: str,
    tokenizer: Tokenizer,
    *,
    length: int,
    samples: int = 100,
    seed: int = 0,
    haystack: str | None = None,
    depths: Sequence[float] | None = None,
    query_aware: bool = True,
    answer_tokens: int = 0,
    apply_chat_template: bool = False,
    **options: Any,
) -> list[Sample]:
    """Make ``samples`` samples of a family whose prompts, with ``answer_tokens`` more, have at most ``length`` tokens.

    As in RULER (arXiv 2404.06654) the answer counts to the length. Tokens are those of ``tokenizer``, and with
    ``apply_chat_template`` those of its chat template too. A prompt misses the length by less than one more haystack
    sentence (key-value pair, list entry) would add.
    Sample ``i`` uses ``depths[i % len(depths)]``, so that the first few already cover all depths, and depends
    only on the seed, the family, its options and ``i``: the query-aware and the query-agnostic form have the
    same prompts, and another length hides the same needles. ``options`` are those of the family, such as
    ``keys=4`` of ``needle``. Raises ``ValueError`` for an unknown family or option, a depth outside 0 to 1,
    less than one sample, a length too short for the task, and a chat without a template.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown task family {family!r}{nearest(family, FAMILIES)}; one of {', '.join(FAMILIES)}")
    kind = FAMILIES[family]
    for option in options:
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise ValueError(f"{family} has no option {option!r}{nearest(option, kind.options)}; its options: {known}")
    depths = kind.depths if depths is None else depths
    listed = list(depths) if isinstance(depths, list | tuple) else []
    if not listed or not all(isinstance(depth, int | float) and 0 <= depth <= 1 for depth in listed):
        shown = listed or depths
        raise ValueError(f"depths={shown!r}: expected at least one, each a fraction from 0 to 1, as [0.5, 1]")
    for name, value in options.items():
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r}: expected a whole number")
    for name, value in (("samples", samples), ("length", length)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
    if not 0 <= answer_tokens < length:
        raise ValueError(
            f"answer_tokens={answer_tokens}: expected 0 or more, and less than length={length} for the prompt's sake"
        )
    if apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError("apply_chat_template: the tokenizer has no chat template; leave it out")
    text = load_haystack(haystack or kind.haystack)
    chat = getattr(tokenizer, "apply_chat_template", None) if apply_chat_template else None
    setting = Setting(text, tokenizer, length, answer_tokens, chat)
    made: list[Sample] = []
    for index in range(samples):
        # A text seed is hashed by random itself (SHA-512), alike on every machine.
        draft = kind.draw(Random(f"{seed}/{family}/{index}"), setting, depths[index % len(depths)], **options)
        units, tokens = largest_fitting(draft, setting)
        made.append(
            Sample(
                family=family,
                index=index,
                context=draft.context(units),
                question=draft.question,
                answer_prefix=draft.answer_prefix,
                answers=list(draft.answers),
                depth=draft.depth,
                length=tokens,
                target_length=length,
                query_aware=query_aware,
                first_question=draft.first_question,
                seed=seed,
                haystack=text.name,
                haystack_sha256=text.sha256,
            )
        )
    return made


def nearest(name: str, known: Any) -> str:
    """``; did you mean 'x'?`` for a misspelt name, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
