"""A provider's rules for cached prompts, and what one request costs under them.

Costs are in base input tokens: 1.0 is one uncached input token. Output tokens are not part of it. Positions are a
prompt's content blocks, counted from 1.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcompress.prefix.problems import first_problem, nearest

Multiplier = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class PriceError(ValueError):
    """A price file, or a request for it, breaks the rules. The message says which and what to do."""


class Breakpoint(NamedTuple):
    """A mark in a prompt: the prefix up to here may be written and read. `tokens`: the prefix's length."""

    position: int
    tokens: int
    ttl: str


class Prices(BaseModel):
    """One provider's rules at one date.

    `write`: price of a token written, by time to live (`"5m"`, `"1h"`). `read`: price of a token read.
    `lookback_positions`: a read looks at a breakpoint and the positions before it, this many in all.
    `minimum_tokens`: by model, the shortest prefix that is cached.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    as_of: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    write: dict[str, Multiplier] = Field(min_length=1)
    read: Multiplier
    default_ttl: str
    max_breakpoints: Count
    lookback_positions: Count
    default_model: str
    minimum_tokens: dict[str, Annotated[int, Field(strict=True, ge=0)]] = Field(min_length=1)

    @field_validator("write")
    @classmethod
    def _durations(cls, write: dict[str, float]) -> dict[str, float]:
        for ttl in write:
            seconds(ttl)
        return write

    @model_validator(mode="after")
    def _defaults(self) -> "Prices":
        if self.default_ttl not in self.write:
            raise ValueError(f"default_ttl: {self.default_ttl!r} has no price{nearest(self.default_ttl, self.write)}")
        self.minimum(self.default_model)
        return self

    def minimum(self, model: str) -> int:
        """The shortest prefix, in tokens, that `model` caches. Raises `PriceError` for an unknown model."""
        if model not in self.minimum_tokens:
            raise PriceError(f"model {model!r} has no minimum_tokens{nearest(model, self.minimum_tokens)}")
        return self.minimum_tokens[model]


def load_prices(path: str | Path) -> Prices:
    """Reads a price file. Raises `PriceError` naming the file, the key and the nearest valid one."""
    try:
        return Prices.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except ValidationError as error:
        raise PriceError(f"{path}: {first_problem(error, Prices.model_fields)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PriceError(f"{path}: not valid YAML: {error}") from None
    except OSError as error:
        raise PriceError(f"{path}: {error.strerror or error}") from None


def seconds(duration: str) -> int:
    """`"5m"`, `"1h"`, `"90s"`, `"1d"` in seconds. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"([1-9]\d*)([smhd])", duration)
    if not match:
        raise ValueError(f"duration {duration!r}: expected a whole number and s, m, h or d, such as '5m'")
    return int(match[1]) * _UNITS[match[2]]


def check_breakpoints(breakpoints: Sequence[Breakpoint], prices: Prices) -> None:
    """Raises `PriceError` where the provider would refuse: too many, an unknown TTL, a shorter TTL before a longer."""
    if len(breakpoints) > prices.max_breakpoints:
        raise PriceError(f"{len(breakpoints)} breakpoints: at most {prices.max_breakpoints} are allowed in one request")
    for mark in breakpoints:
        if mark.ttl not in prices.write:
            raise PriceError(f"ttl {mark.ttl!r} has no price{nearest(mark.ttl, prices.write)}")
    for before, after in pairwise(breakpoints):
        if before.position >= after.position:
            raise PriceError(f"breakpoint at position {after.position}: expected in ascending order")
        if seconds(before.ttl) < seconds(after.ttl):
            raise PriceError(
                f"breakpoint with ttl {before.ttl} at position {before.position} stands before one with {after.ttl} "
                f"at {after.position}; a longer ttl comes first"
            )


def find_hit(breakpoints: Sequence[int], is_entry: Callable[[int], bool], lookback: int = 20) -> int | None:
    """The position a request is read from, or None.

    Looks at the last breakpoint and the positions before it, `lookback` in all, the latest first; then goes on at the
    next earlier breakpoint. `is_entry(position)` says whether a readable entry ends there.
    """
    for breakpoint in sorted(breakpoints, reverse=True):
        for position in range(breakpoint, max(breakpoint - lookback, 0), -1):
            if is_entry(position):
                return position
    return None


class Usage(NamedTuple):
    """A prompt's tokens by what is paid for them: `read` from the cache, `written` by TTL, `plain` the rest."""

    read: int
    written: dict[str, int]
    plain: int

    def cost(self, prices: Prices) -> float:
        """In base input tokens."""
        writes = sum(tokens * prices.write[ttl] for ttl, tokens in self.written.items())
        return self.read * prices.read + writes + self.plain


def usage(total: int, hit: int, breakpoints: Sequence[tuple[int, str]]) -> Usage:
    """Splits the `total` tokens of a prompt of which the first `hit` are read.

    `breakpoints`: (tokens up to it, TTL) in ascending order, those too short to be cached left out. What follows the
    hit is written up to the last breakpoint, every token with the TTL of the first breakpoint at or after it. For the
    TTLs 1h and 5m the cost is `read*A + 2*(B-A) + 1.25*(C-B) + (total-C)`: A the hit, B the last 1h breakpoint after
    it (A if none), C the last breakpoint.

    Raises `ValueError` if the hit or a breakpoint lies past the prompt's end.
    """
    if not 0 <= hit <= total or any(tokens > total for tokens, _ in breakpoints):
        raise ValueError(f"hit {hit} and breakpoints {list(breakpoints)} do not all lie within {total} tokens")
    written: dict[str, int] = {}
    reached = hit
    for tokens, ttl in breakpoints:
        if tokens > reached:
            written[ttl] = written.get(ttl, 0) + tokens - reached
            reached = tokens
    return Usage(hit, written, total - reached)
