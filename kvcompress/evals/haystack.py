"""The text that hides what a long-context task asks for: the built-in text, a short filler or a file."""

import hashlib
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from kvcompress.texts import load_text

LONGEST_SENTENCE = 400
"""Characters. A longer run without a full stop (a table, a grammar) is cut at its last space before that."""

FILLER = (
    "Rain falls on the hills and runs down to the sea.",
    "A bird sings in the old tree behind the house.",
    "People walk along the road and greet each other.",
    "In the evening the lamps are lit and the doors are closed.",
)
"""The repeated noise of the passkey task; its name as a haystack is ``filler``."""


@dataclass(frozen=True)
class Haystack:
    """A text cut into sentences; ``sha256`` is that of the whole text and goes into every sample."""

    name: str
    sentences: tuple[str, ...]
    sha256: str

    def take(self, start: int, count: int) -> list[str]:
        """``count`` sentences from number ``start`` on; behind the last one the text begins again."""
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(count)]

    @cached_property
    def text(self) -> str:
        """All sentences, one space between them."""
        return " ".join(self.sentences)

    @cached_property
    def lowered(self) -> str:
        """The text in lower case, for a search that ignores case as the scores do."""
        return self.text.lower()

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The different lower-case words of 4 to 9 letters, sorted."""
        return tuple(sorted(set(re.findall(r"(?<![\w-])[a-z]{4,9}(?![\w-])", self.text))))


@lru_cache(maxsize=8)
def load_haystack(name_or_path: str) -> Haystack:
    """Load ``filler``, ``python-docs`` or a UTF-8 text file as a haystack.

    White space is collapsed to single spaces. Raises ``ValueError`` if the text has no sentence in it;
    an unknown name or an unreadable file is refused by ``kvcompress.texts.load_text``.
    """
    if name_or_path == "filler":
        return Haystack(name_or_path, FILLER, hashlib.sha256(" ".join(FILLER).encode()).hexdigest())
    text, sha256 = load_text(name_or_path)
    sentences = split_sentences(text)
    if not sentences:
        raise ValueError(f"haystack {name_or_path!r} has no text in it; give a file with at least one sentence")
    return Haystack(name_or_path, tuple(sentences), sha256)


def split_sentences(text: str) -> list[str]:
    """Cut a text behind ``.``, ``!`` and ``?``, and a sentence longer than ``LONGEST_SENTENCE`` at spaces."""
    flat = " ".join(text.split())
    pieces: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) ", flat):
        while len(sentence) > LONGEST_SENTENCE:
            cut = sentence.rfind(" ", 0, LONGEST_SENTENCE + 1)
            cut = cut if cut > 0 else LONGEST_SENTENCE
            pieces.append(sentence[:cut])
            sentence = sentence[cut:].lstrip()
        if sentence:
            pieces.append(sentence)
    return pieces


def hide(sentences: list[str], needles: list[tuple[float, str]]) -> str:
    """Join sentences by spaces, each needle put at the sentence boundary nearest to its depth.

    ``needles`` holds pairs of depth and text. A depth is a fraction of the haystack's characters, the needles
    themselves not counted: 0 stands before the first sentence, 1 after the last. Needles at one boundary keep
    the order of their depths, then that of the list.
    """
    ends = [0, *accumulate(len(sentence) for sentence in sentences)]
    at_boundary: dict[int, list[str]] = {}
    for depth, needle in sorted(needles, key=lambda pair: pair[0]):
        place = depth * ends[-1]
        after = min(bisect_left(ends, place), len(sentences))
        boundary = after if after == 0 or ends[after] - place < place - ends[after - 1] else after - 1
        at_boundary.setdefault(boundary, []).append(needle)
    parts: list[str] = []
    for i in range(len(ends)):
        parts += at_boundary.get(i, [])
        parts += sentences[i : i + 1]
    return " ".join(parts)
