"""Sends what was measured to an experiment tracker."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from typing import Any

from kvcompress.runs.report.reading import ReportError, Results

SINKS = ("trackio", "wandb")
"""Both have the same interface: init, log, finish."""


def send(results: Results, sink: str, project: str = "kvcompress") -> int:
    """Logs every measured number of `results` as one run of `project` and returns how many rows were sent.

    Raises ReportError for an unknown sink and for one that is not installed.
    """
    if sink not in SINKS:
        raise ReportError(f"unknown sink {sink!r}; known: {', '.join(SINKS)}")
    try:
        tracker: Any = import_module(sink)
    except ImportError:
        raise ReportError(f"{sink} is not installed; install kvcompress[{sink}], or leave --sink out") from None
    rows = [asdict(each) for each in (*results.records, *results.streams)]
    rows += [asdict(task.result) for task in results.tasks]
    tracker.init(
        project=project, config={str(folder): config.model_dump() for folder, config in results.configs.items()}
    )
    for row in rows:
        kinds = (bool, int, float, str)
        tracker.log({name: value for name, value in row.items() if isinstance(value, kinds)})
    tracker.finish()
    return len(rows)
