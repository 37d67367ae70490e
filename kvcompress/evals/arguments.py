"""What a user writes for the lm-eval model and the eval command: lists, methods with options, names of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvcompress.built_in import BUILT_INS, cache_folder
from kvcompress.methods.base import Evicting, Method, PositionMode
from kvcompress.methods.composed import Composed
from kvcompress.models import load_config
from kvcompress.text_form import MethodError


def split_list(text: str) -> list[str]:
    """The entries of a list written with commas; those inside brackets or quotes do not separate.

    `"exact,h2o(heavy=64, recent=64)"` has two. Empty entries are left out.
    """
    entries, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth <= 0:
            entries.append("")
            continue
        entries[-1] += character
    return [entry.strip() for entry in entries if entry.strip()]


def with_positions(method: Method, positions: PositionMode | None) -> Method:
    """The method with its `positions` replaced; None leaves it as it is. Raises MethodError where it has none."""
    if positions is None or positions == method.position_mode:
        return method
    evicting = method.evicting
    if evicting is None:
        raise MethodError(
            f"positions={positions!r}: {method} evicts nothing, so kept tokens stay where they are; leave positions out"
        )
    try:
        moved: Evicting = replace(evicting, positions=positions)
        return replace(method, first=moved) if isinstance(method, Composed) else moved
    except ValueError as error:
        raise MethodError(str(error)) from None


def model_folder(name: str) -> str:
    """A built-in model's folder; any other name as it is.

    Raises ModelNotFound for a built-in model that was not fetched, and for what is neither a folder nor a Hub id.
    """
    if Path(name).expanduser().is_dir() or "/" in name:
        return name
    load_config(name)
    return str(cache_folder() / name) if name in BUILT_INS else name
