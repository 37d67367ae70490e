"""The lm-eval tasks of this package: YAML files, and lengths for which there is no file.

A generated task is named ``FAMILY`` or ``FAMILY_LENGTH`` (``needle_2k``: 2048 tokens), with ``_agnostic`` behind it for
the query-agnostic form. Without a length in its name it has the metadata's ``length``, or 2048 tokens.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.evals.generate import nearest

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

TASKS_FOLDER = Path(__file__).parent

OF_THE_TASK = ("family", "query_aware", "fixed_length", "answer_tokens", "version", "file", "fields")
"""What a task's own file says in its metadata, and no user."""


def find_tasks(
    names: Sequence[str],
    tokenizer: Any = None,
    /,
    *,
    include_path: str | Path | Sequence[str | Path] = (),
    **metadata: Any,
) -> tuple["TaskManager", list["str | dict[str, Any] | Task"]]:
    """An lm-eval task manager that knows these tasks, and what to give it or ``simple_evaluate`` for the names.

    ``tokenizer`` (of transformers, or a folder or name of one) measures the length of generated tasks, unless
    ``metadata`` has another; it also sets ``length``, ``samples``, ``seed``, ``haystack`` or ``depths`` for all of them
    that have no length in their name. lm-eval's own thousands of task files are read only if a name is not found
    without them, which takes many seconds. Raises ``ValueError`` for a name that nobody knows and for metadata that is
    the task's own.
    """
    from lm_eval.tasks import TaskManager

    own = [name for name in OF_THE_TASK if name in metadata]
    if own:
        raise ValueError(f"metadata {own[0]!r} belongs to the task and is not to be set: choose another task")
    settings = metadata if tokenizer is None else {"tokenizer": tokenizer, **metadata}
    folders = [TASKS_FOLDER, *([include_path] if isinstance(include_path, str | Path) else include_path)]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=settings)
    found = [task_config(name, manager) for name in names]
    if None in found:
        manager = TaskManager(include_path=folders, metadata=settings)
        found = [task_config(name, manager) for name in names]
    unknown = [name for name, config in zip(names, found, strict=True) if config is None]
    if unknown:
        known = sorted(name for name, entry in manager.task_index.items() if is_own(entry.yaml_path))
        near = nearest(unknown[0], manager.task_index)
        raise ValueError(f"unknown task {unknown[0]!r}: expected a task of lm-eval or one of {', '.join(known)}{near}")
    return manager, [config for config in found if config is not None]


def task_config(name: str, manager: "TaskManager") -> str | dict[str, Any] | None:
    """The name itself if the manager knows it; for a generated task of another length its configuration; else None.

    ``variable_tracking_16k_agnostic`` is ``variable_tracking_agnostic`` with 16,384 tokens; ``_1500`` means 1,500.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    if name in manager.task_index:
        return name
    match = re.fullmatch(r"([a-z_]+)_([1-9]\d*)(k?)((?:_agnostic)?)", name)
    entry = manager.task_index.get(match[1] + match[4]) if match else None
    if match is None or entry is None or entry.yaml_path is None or not is_own(entry.yaml_path):
        return None
    config = load_yaml(entry.yaml_path)
    if "family" not in config["metadata"]:
        return None
    length = int(match[2]) * (1024 if match[3] else 1)
    return {**config, "task": name, "metadata": {**config["metadata"], "fixed_length": length}}


def is_own(yaml_path: Path | None) -> bool:
    """Whether a task's YAML file is one of this package's."""
    return yaml_path is not None and TASKS_FOLDER in yaml_path.parents
