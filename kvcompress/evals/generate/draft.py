"""A task's sample while it is made: what was drawn, and how long its context may still grow."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from kvcompress.evals.haystack import Haystack


class Tokenizer(Protocol):
    """Anything that encodes a text into tokens: of transformers or of the tokenizers library."""

    def encode(self, text: str, /) -> Sized: ...


@dataclass(frozen=True)
class Setting:
    """What all samples of a task share: the haystack, the tokenizer, and the tokens of a prompt with its answer.

    Prompts are counted within a chat where `chat` is a tokenizer's `apply_chat_template`.
    """

    haystack: Haystack
    tokenizer: Tokenizer
    length: int
    answer_tokens: int = 0
    chat: Callable[..., Any] | None = None

    @property
    def longest_prompt(self) -> int:
        """Tokens that are left for a prompt."""
        return self.length - self.answer_tokens

    def count(self, text: str) -> int:
        """Tokens of a text, with the special tokens the tokenizer adds by itself."""
        return len(self.tokenizer.encode(text))

    def count_prompt(self, draft: Draft, units: int) -> int:
        """Tokens of a draft's prompt with so many units. In a chat the answer that it begins is a turn of its own."""
        if self.chat is None:
            return self.count(draft.prompt(units))
        asked = {"role": "user", "content": draft.context(units) + draft.question}
        begun = {"role": "assistant", "content": draft.answer_prefix}
        return self.count(self.chat([asked, begun], tokenize=False, continue_final_message=True))


@dataclass(frozen=True)
class Draft:
    """All that was drawn for one sample; only the size of its context is open.

    ``context(n)`` builds the context with ``n`` units: haystack sentences, key-value pairs or list entries.
    It must not draw anything, so that the sample is the same however often it is built. ``question`` starts
    with ``first_question`` where a task has two turns.
    """

    context: Callable[[int], str]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float | None
    first_question: str = ""

    def prompt(self, units: int) -> str:
        """Context, question and the beginning of the answer, as the model gets them."""
        return self.context(units) + self.question + self.answer_prefix


def largest_fitting(draft: Draft, setting: Setting) -> tuple[int, int]:
    """The units with which the prompt has at most ``setting.longest_prompt`` tokens, while one more is too long.

    Returns that number and the prompt's tokens. Raises ``ValueError`` if a single unit is already too long.
    """
    counts: dict[int, int] = {}

    def count(units: int) -> int:
        if units not in counts:
            counts[units] = setting.count_prompt(draft, units)
        return counts[units]

    longest = setting.longest_prompt
    if count(1) > longest:
        answer = f", of which {setting.answer_tokens} are kept for the answer" if setting.answer_tokens else ""
        raise ValueError(
            f"length={setting.length} tokens{answer} is too short: the shortest prompt of this task has {count(1)}; "
            f"give at least {count(1) + setting.answer_tokens}"
        )
    # Counting a long prompt is slow, so first jump to where the room left should be used up.
    units, step = 1, 16
    for _ in range(4):
        per_unit = max((count(units + step) - count(units)) / step, 1)
        units += step
        step = max(int((longest - count(units)) / per_unit), 1 - units)
        if abs(step) <= 2:
            break
    fits = units + step
    step = 1
    while count(fits) > longest:
        fits, step = max(1, fits - step), step * 2
    step = 1
    while count(fits + step) <= longest:
        fits, step = fits + step, step * 2
    too_many = fits + step
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if count(middle) <= longest else (fits, middle)
    return fits, count(fits)


def unused(draw: Callable[[], str], haystack: Haystack, taken: set[str]) -> str:
    """Draw until the value is new: neither in ``taken``, to which it is added, nor in the haystack's text.

    Raises ``ValueError`` if ten thousand draws give nothing new.
    """
    for _ in range(10_000):
        value = draw()
        if value not in taken and value.lower() not in haystack.lowered:
            taken.add(value)
            return value
    raise ValueError(f"haystack {haystack.name!r} already holds every value that could be hidden; use another text")


def digits(rng: Random, count: int) -> str:
    """A number of ``count`` digits that does not start with 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))
