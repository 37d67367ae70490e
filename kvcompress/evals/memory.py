"""How many rows are computed at once: fewer where memory runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

R = TypeVar("R")
TOKENS_ON_CPU = 8192
"""As many at once keep a processor busy; more only take memory, of which the system has no error but the end."""


class OutOfMemory(RuntimeError):
    """A single row does not fit into memory."""


def first_rows(batch_size: int | str, most: int, longest: int, device: torch.device) -> int:
    """How many rows to begin with: `batch_size`, or for "auto" at most `most` rows of `longest` tokens."""
    if batch_size != "auto":
        return int(batch_size)
    return most if device.type != "cpu" else max(1, min(most, TOKENS_ON_CPU // longest))


class Rows:
    """The number of rows to compute at once, `count`; half as many after each attempt that memory was too small for."""

    def __init__(self, count: int, longest: int) -> None:
        """`longest` is the number of tokens of the longest row."""
        self.count, self.longest = count, longest

    def attempt(self, work: Callable[[], R]) -> R | None:
        """What `work()` returns, or None where memory ran out and fewer rows are to be tried.

        Raises OutOfMemory where there was one row.
        """
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if self.count == 1:
                raise OutOfMemory(
                    f"a sequence of {self.longest} tokens does not fit into memory even alone ({reason}); what is "
                    "finished is kept. Take shorter documents, a smaller prefill_chunk or a smaller dtype"
                ) from None
        # Behind the handler, which keeps the failed batch alive.
        self.count //= 2
        clear_device_cache(garbage_collection=True)
        warnings.warn(f"out of memory, going on with {self.count} rows at once ({reason})", stacklevel=2)
        return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether fewer rows may help."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError) or should_reduce_batch_size(error)
    return known or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
