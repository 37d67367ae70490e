"""Evaluation through a real compressed cache: long-context tasks made in code, and tasks out of local files.

Importing this package makes the model `kvcompress` known to lm-eval, where that is installed.
"""

from importlib.util import find_spec

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

if find_spec("lm_eval") is not None:
    import lm_eval.models  # noqa: F401  # lm-eval adds its own only while it knows none
    from lm_eval.api.registry import model_registry

    model_registry.register("kvcompress", target="kvcompress.evals.model:CompressedLM")
