"""Multiple-choice and LAMBADA data out of JSON-lines files on this machine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOCAL_TASKS = {
    "piqa": "piqa_local",
    "arc_easy": "arc_easy_local",
    "openbookqa": "openbook_qa_local",
    "copa": "copa_local",
    "lambada_openai": "lambada_local",
}
"""For an lm-eval task of the Hub the local task with the same prompts."""

GENERATED = "needle_2k, kv_retrieval, variable_tracking, common_words, passkey, two_turn"


class MissingData(ValueError):
    """A task's data file is not on this machine."""


def data_folders(folder: str | None = None) -> list[Path]:
    """Where data files are looked for, in order: ``folder``, else ``$KVCOMPRESS_DATA``, else beside the project."""
    chosen = folder or os.environ.get("KVCOMPRESS_DATA")
    if chosen:
        return [Path(chosen).expanduser()]
    beside = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"
    return [Path.cwd().parent / "shared" / "data" / "tasks", beside]


def read_items(file: str, fields: Sequence[str], folder: str | None = None) -> list[dict[str, Any]]:
    """The items of a JSON-lines file, one object with all ``fields`` a line; blank lines are skipped.

    Raises ``MissingData`` if no folder has the file, naming what is there, and ``ValueError`` for a line that is
    not such an object, with its number.
    """
    folders = data_folders(folder)
    found = next((place / file for place in folders if (place / file).is_file()), None)
    if found is None:
        places = " and ".join(sorted({str(place) for place in folders}))
        present = {path.name for place in folders if place.is_dir() for path in place.glob("*.jsonl")}
        others = f" (there: {', '.join(sorted(present))})" if present else ""
        raise MissingData(
            f"data file {file} is not in {places}{others}; set KVCOMPRESS_DATA to a folder that has it, one JSON "
            f"object with {', '.join(fields)} a line, or choose a task made in code: {GENERATED}"
        )
    items: list[dict[str, Any]] = []
    for number, line in enumerate(found.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{found}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
        missing = [field for field in fields if not isinstance(item, dict) or field not in item]
        if missing:
            raise ValueError(f"{found}, line {number}: expected an object with {', '.join(fields)}; no {missing[0]!r}")
        items.append({field: item[field] for field in fields})
    if not items:
        raise ValueError(f"{found} has no items; expected one JSON object with {', '.join(fields)} a line")
    return items
