"""`"snapkv(budget=0.25) | kivi(bits=2)"` to method objects. `str(method)` is the way back."""

import ast
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from kvcompress.methods import methods
from kvcompress.methods.base import Method

LONGEST = 1000


class MethodError(ValueError):
    """A method's text cannot be understood, or its options are wrong."""


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` where something known is close, and the known ones."""
    if not known:
        return "; it has none"
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"


def parse(text: str | Method) -> Method:
    """The method that `text` describes; a method object is returned as it is.

    Raises MethodError naming the unknown method or option and the nearest valid one.
    """
    if isinstance(text, Method):
        return text
    if not isinstance(text, str):
        raise MethodError(f"a method is a text such as 'snapkv(budget=0.25)' or a method object, got {text!r}")
    if len(text) > LONGEST:
        raise MethodError(f"a method's text has at most {LONGEST} characters, got {len(text)}: {text[:40]!r}…")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _build(tree, text)
    except MethodError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text) from None


def _unreadable(text: str) -> MethodError:
    return MethodError(f"cannot read the method {text!r}; write it like 'snapkv(budget=0.25) | kivi(bits=2)'")


def _build(node: ast.expr, text: str) -> Method:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        try:
            return _build(node.left, text) | _build(node.right, text)
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, MethodError) else MethodError(f"{text!r}: {error}") from None
    if isinstance(node, ast.Name):
        return _create(node.id, {}, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.args:
            raise MethodError(
                f"{text!r}: options are given by name, such as {node.func.id}({_first_option(node.func.id)}=…)"
            )
        options: dict[str, Any] = {}
        for word in node.keywords:
            if word.arg in options:
                raise MethodError(f"{text!r}: {word.arg} is given twice; give it once")
            options[_key(word, text)] = _value(word, text)
        return _create(node.func.id, options, text)
    raise _unreadable(text)


def _first_option(name: str) -> str:
    options = [option.name for option in fields(methods()[name]) if not option.kw_only] if name in methods() else []
    return options[0] if options else "option"


def _key(word: ast.keyword, text: str) -> str:
    if word.arg is None:
        raise MethodError(f"{text!r}: ** is not allowed; give options by name")
    return word.arg


def _value(word: ast.keyword, text: str) -> Any:
    try:
        return ast.literal_eval(word.value)
    except (ValueError, TypeError):
        raise MethodError(
            f"{text!r}: {word.arg} must be a number or a quoted text, got {ast.unparse(word.value)}"
        ) from None


def _create(name: str, options: dict[str, Any], text: str) -> Method:
    known = methods()
    if name not in known:
        raise MethodError(f"unknown method {name!r}{nearest(name, list(known))}")
    allowed = [option.name for option in fields(known[name])]
    for option in options:
        if option not in allowed:
            raise MethodError(f"{name} has no option {option!r}{nearest(option, allowed)}")
    try:
        return known[name](**options)
    except (TypeError, ValueError) as error:
        raise MethodError(f"{text!r}: {error}") from None
