"""Peak memory of a piece of work, and what it is the peak of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """`nbytes` above what was held before the work began; None where it cannot be measured."""

    nbytes: int | None = None
    of: str | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the peak inside the block: of the CUDA allocator on a GPU, of the process's resident set on a CPU."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.nbytes, peak.of = torch.cuda.max_memory_allocated(device) - before, "cuda allocator"
        return
    before = _resident("VmRSS") if _reset_peak() else None
    yield peak
    after = _resident("VmHWM")
    if before is not None and after is not None:
        peak.nbytes, peak.of = max(0, after - before), "process resident set"


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
