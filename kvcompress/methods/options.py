"""What all methods ask of their options."""

import ast
from numbers import Integral, Real
from typing import Any

_OWN_KINDS: tuple[tuple[Any, Any], ...] = ((bool, bool), (int, Integral), (float, Real), (str, str))


def plain(value: Any) -> Any:
    """`value` with Python's own numbers and texts in place of numpy's, torch's and others'; lists become tuples."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    for own, kind in _OWN_KINDS:
        if isinstance(value, kind):
            return own(value)
    return value


def check_positions(positions: str) -> None:
    """Raises ValueError unless `positions` is one of the two modes."""
    if positions not in ("original", "cache"):
        raise ValueError(f'positions must be "original" or "cache", got {positions!r}')


def check_count(name: str, value: Any, at_least: int = 1, hint: str = "") -> None:
    """Raises ValueError unless the option `name` is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}{hint}")


def check_text_form(name: str, value: Any) -> None:
    """Raises TypeError for a value that the text form of a method cannot hold, so that no record could name it."""
    try:
        readable = ast.literal_eval(repr(value)) == value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        readable = False
    if not readable:
        raise TypeError(f"{name} must be a finite number, a text, or a tuple of such, got {value!r}")
