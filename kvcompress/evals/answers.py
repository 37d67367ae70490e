"""The answers of one model and method, kept as they come: a run that was killed goes on behind them."""

from __future__ import annotations

import math
from typing import Any

from kvcompress.evals.answer_file import Answer, AnswerFile
from kvcompress.evals.generation import Prompt, Written
from kvcompress.evals.likelihood import Continuation, Likelihood
from kvcompress.evals.stored import StoredKV
from kvcompress.measure.record import digest


class Answers:
    """Answers in a file; without one nothing is kept. `found` counts those of an earlier run that were used."""

    def __init__(self, file: AnswerFile | None = None, depends_on: str = "") -> None:
        """`depends_on` is a digest of all that answers depend on beside their requests."""
        self.file, self.depends_on = file, depends_on
        self.found = 0

    def likelihood(self, item: Continuation, at_end: bool) -> Likelihood | None:
        """The likelihood of `item` if it is known, its bytes read at the end or after compression."""
        known = self._find(self._request(item, at_end), 0)
        if known is None or known.log_probability is None or known.greedy is None:
            return None
        self.found += 1
        return Likelihood(known.log_probability, known.greedy, _stored(known), known.compressed)

    def keep_likelihood(self, item: Continuation, at_end: bool, result: Likelihood) -> None:
        """Writes a likelihood through to the disk. One that JSON cannot hold is computed again another time."""
        if self.file is not None and math.isfinite(result.log_probability):
            values = result.log_probability, result.greedy, None
            sizes = result.stored.nbytes, result.stored.exact_nbytes, result.stored.exact_nbytes_16bit
            self.file.append(Answer(self._request(item, at_end), 0, *values, *sizes, result.compressed))

    def written(self, prompt: Prompt) -> Written | None:
        """The text that was generated for `prompt` if it is known."""
        known = self._find(self._request(prompt.ids, prompt.tail, prompt.options), prompt.repeat)
        if known is None or known.text is None:
            return None
        self.found += 1
        return Written(known.text, _stored(known), known.compressed)

    def keep_written(self, prompt: Prompt, result: Written) -> None:
        """Writes a generated text through to the disk."""
        if self.file is not None:
            request = self._request(prompt.ids, prompt.tail, prompt.options)
            sizes = result.stored.nbytes, result.stored.exact_nbytes, result.stored.exact_nbytes_16bit
            self.file.append(Answer(request, prompt.repeat, None, None, result.text, *sizes, result.compressed))

    def _request(self, *parts: Any) -> str:
        return digest([self.depends_on, *map(repr, parts)])

    def _find(self, request: str, repeat: int) -> Answer | None:
        return None if self.file is None else self.file.records.get((request, repeat))


def _stored(answer: Answer) -> StoredKV:
    return StoredKV(answer.kv_bytes, answer.kv_bytes_exact, answer.kv_bytes_exact_16bit)
