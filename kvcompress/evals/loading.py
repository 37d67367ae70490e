"""lm-eval tasks with their data, local files before the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcompress.evals.local_data import GENERATED, LOCAL_TASKS, data_folders
from kvcompress.evals.tasks import find_tasks, is_own

if TYPE_CHECKING:
    from lm_eval.api.task import Task

HUB_TIMEOUT = 5.0
"""Seconds that the Hub is given to answer at all."""


class DataUnreachable(ValueError):
    """A task's data set cannot be had."""


def load_tasks(names: Sequence[str], tokenizer: Any, metadata: dict[str, Any]) -> dict[str, Task]:
    """Every task that the names stand for, groups and tags resolved, with its documents.

    A task of the Hub is read from a local file where there is one for it (`LOCAL_TASKS`). Raises ValueError for an
    unknown name, MissingData, and DataUnreachable at once for a data set of the Hub that cannot be reached.
    """
    manager, found = find_tasks([local_name(name) for name in names], tokenizer, **metadata)
    tasks: dict[str, Task] = {}
    for name, task in zip(names, found, strict=True):
        entry = manager.task_index.get(task) if isinstance(task, str) else None
        with _hub_answers_or_fails(name, entry is not None and not is_own(entry.yaml_path)):
            tasks.update(manager.load([task])["tasks"])
    return tasks


def local_name(name: str) -> str:
    """The local task for `name` if there is one and a folder of local data, else the name itself."""
    has_data = any(folder.is_dir() for folder in data_folders())
    return LOCAL_TASKS[name] if name in LOCAL_TASKS and has_data else name


@contextmanager
def _hub_answers_or_fails(name: str, from_hub: bool) -> Iterator[None]:
    """While a task's data is loaded: without an answer of the Hub only what was downloaded before is looked for.

    The libraries would try for half a minute otherwise.
    """
    if not from_hub:
        yield
        return
    import datasets.config

    before = datasets.config.HF_HUB_OFFLINE
    reached = before or _hub_answers()
    datasets.config.HF_HUB_OFFLINE = before or not reached
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataUnreachable(f"task {name!r}: its data set cannot be loaded ({reason}); {_choices(name)}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _choices(name: str) -> str:
    local = ", ".join(LOCAL_TASKS)
    if name in LOCAL_TASKS:
        return f"set KVCOMPRESS_DATA to a folder with its local file ({LOCAL_TASKS[name]}), or choose {GENERATED}"
    return f"choose a task made in code ({GENERATED}), or one with a local file in $KVCOMPRESS_DATA ({local})"


def _hub_answers() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception:  # its HTTP library differs between versions, and so do its errors
        return False
    return True
