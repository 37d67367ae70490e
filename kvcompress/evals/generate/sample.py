"""A finished sample of a long-context task, and where its prompt is cut for compression."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One prompt with its answers: ``context + question + answer_prefix``, in this order.

    ``length`` counts the prompt's tokens, those included that the tokenizer or its chat template adds; with the tokens
    kept for the answer it never exceeds ``target_length``. ``depth`` is the place of the (first) answer, 0 at the
    beginning and 1 at the end of the haystack, or ``None`` where the answer has no single place. ``first_question`` is
    empty but in tasks of two turns, where ``question`` starts with it. ``haystack_sha256`` names the exact text.
    """

    family: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: list[str]
    depth: float | None
    length: int
    target_length: int
    query_aware: bool
    first_question: str
    seed: int
    haystack: str
    haystack_sha256: str

    @property
    def prompt(self) -> str:
        """All that the model gets."""
        return self.context + self.question + self.answer_prefix

    def to_doc(self) -> dict[str, Any]:
        """The fields as a plain dictionary, as an lm-eval document."""
        return asdict(self)


def split_prompt(prompt: str, doc: Mapping[str, Any]) -> tuple[str, str]:
    """Cut a prompt into the text that is compressed and the text that is fed after compression.

    Query-aware: the cut is behind the question, so that a method sees it (in two-turn tasks behind the first
    question). Query-agnostic: before it. The beginning of the answer is always fed after compression, so no
    scored token was predicted from an uncompressed cache. ``prompt`` may be wrapped in a chat template; a
    document without the fields ``question`` and ``query_aware`` gives ``(prompt, "")``. Raises ``ValueError``
    if the question does not stand in the prompt.
    """
    if "question" not in doc or "query_aware" not in doc:
        return prompt, ""
    # A chat template may strip what surrounds the message.
    question = doc["question"].strip()
    start = prompt.rfind(question)
    if start < 0:
        raise ValueError(f"the question {question!r} does not stand in the prompt that ends with {prompt[-80:]!r}")
    if not doc["query_aware"]:
        return prompt[:start], prompt[start:]
    end = start + len((doc.get("first_question") or doc["question"]).strip())
    end += len(prompt[end:]) - len(prompt[end:].lstrip())
    return prompt[:end], prompt[end:]
