"""One readable line out of pydantic's report on a bad line or file."""

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError


def first_problem(error: ValidationError, names: Iterable[str]) -> str:
    """The first thing wrong, as `where: what`; an unknown key comes with the nearest one of `names`."""
    # of a union's alternatives the one that got furthest
    problem = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    path = [part for part in problem["loc"] if part != "str" and not str(part).startswith("dict[")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key{nearest(str(problem['loc'][-1]), names)}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    value = repr(problem["input"])
    message = problem["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where}: {message}, not {value if len(value) <= 60 else value[:57] + '...'}"


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest valid name, case aside, or the first few names where none is near."""
    folded = {each.casefold(): each for each in names}
    close = get_close_matches(name.casefold(), folded, n=1)
    if close:
        return f"; did you mean {folded[close[0]]!r}?"
    shown = ", ".join(repr(each) for each in list(folded.values())[:8])
    return f"; expected one of {shown}{', …' if len(folded) > 8 else ''}"
