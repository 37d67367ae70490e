"""Evaluation through a real compressed cache: long-context tasks made in code, and tasks out of local files."""

from kvcompress.evals.generate import FAMILIES, Sample, make_samples, split_prompt
from kvcompress.evals.local_data import LOCAL_TASKS, MissingData
from kvcompress.evals.tasks import TASKS_FOLDER, find_tasks

__all__ = [
    "FAMILIES",
    "LOCAL_TASKS",
    "TASKS_FOLDER",
    "MissingData",
    "Sample",
    "find_tasks",
    "make_samples",
    "split_prompt",
]
