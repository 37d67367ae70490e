"""Answers on disk: one JSON line each, written through as soon as it is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcompress.measure.record import JsonLine
from kvcompress.runs.records import LineFile


@dataclass
class Answer(JsonLine):
    """What one request got, a log-likelihood in nats or a text, and the stored bytes of its row.

    `request` is the digest of all that the answer depends on; `repeat` tells sampled texts of one request apart.
    """

    request: str
    repeat: int
    log_probability: float | None
    greedy: bool | None
    text: str | None
    kv_bytes: int
    kv_bytes_exact: int
    kv_bytes_exact_16bit: int
    compressed: bool

    @property
    def key(self) -> tuple[str, int]:
        """What a later answer to the same request has in common with it."""
        return self.request, self.repeat


class AnswerFile(LineFile[Answer]):
    """`answers.jsonl` of a results folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "answers.jsonl", Answer)
