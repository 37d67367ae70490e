"""A results folder belongs to one config: what differs from it in more than methods and samples goes elsewhere."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvcompress.runs.config import ConfigError, RunConfig, StreamingConfig, read_config
from kvcompress.runs.records import write_whole

ADDING = ("methods", "samples", "recompute")
"""Keys that add records beside those that are there, and change none."""


def check_folder(config: RunConfig | StreamingConfig, folder: Path) -> None:
    """Raises ConfigError if `folder` holds results of another config, naming the keys that differ."""
    path = folder / "config.yaml"
    if not path.exists() or not any(_has_lines(folder / name) for name in ("records.jsonl", "streaming.jsonl")):
        return
    mine, theirs = config.model_dump(), read_config(path).model_dump()
    differ = [key for key in {**theirs, **mine} if key not in ADDING and mine.get(key) != theirs.get(key)]
    if differ:
        shown = ", ".join(f"{key} {mine.get(key)!r} instead of {theirs.get(key)!r}" for key in differ)
        raise ConfigError(
            f"{folder} holds results of another config ({shown}); give another --out, or remove the folder if they are "
            "not needed any more"
        )


def write_config(config: RunConfig | StreamingConfig, folder: Path) -> None:
    """Writes config.yaml. Raises RecordsError if the disk refuses."""
    write_whole(folder / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False))


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
