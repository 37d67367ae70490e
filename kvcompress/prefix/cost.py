"""What a replayed day costs under a provider's cache rules."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcompress.prefix.blocks import BlockTable
from kvcompress.prefix.prices import (
    Breakpoint,
    PriceError,
    Prices,
    check_breakpoints,
    find_hit,
    seconds,
    usage,
)
from kvcompress.prefix.problems import nearest
from kvcompress.prefix.requests import Request, Trace

END = "end"  # the breakpoint at the end of every request


@dataclass(frozen=True)
class Mark:
    """Where breakpoints go: after the segment called `label`, or at the end of every request (`"end"`)."""

    label: str
    ttl: str


@dataclass
class DayCost:
    """A day's input, in tokens and in base input tokens (`cost`, `cost_uncached`).

    `read`, `written` (by TTL) and `plain` add up to `tokens`. `hits`: requests that read something.
    """

    model: str
    requests: int = 0
    tokens: int = 0
    hits: int = 0
    read: int = 0
    written: dict[str, int] = field(default_factory=dict)
    plain: int = 0
    cost: float = 0.0

    @property
    def cost_uncached(self) -> float:
        """The same prompts without a breakpoint."""
        return float(self.tokens)

    @property
    def share(self) -> float:
        """Cost with the cache, as a share of the cost without it."""
        return self.cost / self.cost_uncached


@dataclass
class _Entry:
    ttl: str
    readable: float  # seconds, from when on
    expires: float


def parse_mark(text: str, prices: Prices) -> Mark:
    """`"end"`, a segment's label, or either with a TTL: `"system+tools=1h"`."""
    label, separator, ttl = text.rpartition("=")
    if separator and ttl in prices.write:
        return Mark(label, ttl)
    return Mark(text, prices.default_ttl)


def day_cost(
    trace: Trace,
    prices: Prices,
    *,
    marks: Sequence[Mark] = (),
    model: str | None = None,
    gap: float = 60.0,
    first_token: float = 1.0,
) -> DayCost:
    """Replays a trace under a provider's cache rules.

    `marks`: the breakpoints of every request, by default one at its end. In a trace without labels every full block
    is a content block, and `"end"` is the last of them. `model`: whose minimum length holds. `gap`: seconds from one
    request to the next where the trace has no times. `first_token`: seconds until a response begins; what it wrote
    can be read from then on. A breakpoint below the minimum is ignored. An entry's clock starts with the request that
    writes it and again with every request that reads it; entries the hit lies behind are left as they are.

    Raises `PriceError` where the provider would refuse a request, and for a label that is not in the trace.
    """
    marks = tuple(marks) or (Mark(END, prices.default_ttl),)
    if gap < 0 or first_token < 0:
        raise PriceError(f"gap={gap}, first_token={first_token}: expected seconds, 0 or more")
    known = dict.fromkeys([END, *trace.positions.label.values()] if trace.labelled else [END])
    for mark in marks:
        if mark.label not in known:
            raise PriceError(f"breakpoint {mark.label!r}: no such segment in {trace.name}{nearest(mark.label, known)}")
    day = DayCost(model or prices.default_model)
    minimum = prices.minimum(day.model)
    entries: dict[int, _Entry] = {}
    now = 0.0
    for number, request in enumerate(trace.requests):
        now = request.seconds if request.seconds is not None else now + (gap if number else 0)
        breakpoints = _breakpoints(trace, request, marks, prices, minimum)
        _serve(day, request, trace.positions, breakpoints, entries, prices, now, first_token)
    return day


def _breakpoints(
    trace: Trace, request: Request, marks: Sequence[Mark], prices: Prices, minimum: int
) -> list[Breakpoint]:
    """The request's breakpoints; two marks at one position are one breakpoint, the first mark's."""
    path, found = request.positions, {}
    for mark in marks:
        for position, name in enumerate(path, 1):
            at_end = mark.label == END and position == len(path)
            if at_end or trace.positions.label.get(name) == mark.label:
                found.setdefault(position, Breakpoint(position, trace.positions.end[name], mark.ttl))
    breakpoints = [found[position] for position in sorted(found)]
    check_breakpoints(breakpoints, prices)
    return [mark for mark in breakpoints if mark.tokens >= minimum]


def _serve(
    day: DayCost,
    request: Request,
    table: BlockTable,
    breakpoints: list[Breakpoint],
    entries: dict[int, _Entry],
    prices: Prices,
    now: float,
    first_token: float,
) -> None:
    path = request.positions

    def readable(position: int) -> bool:
        entry = entries.get(path[position - 1])
        return entry is not None and entry.readable <= now < entry.expires

    position = find_hit([mark.position for mark in breakpoints], readable, prices.lookback_positions) or 0
    if position:
        entry = entries[path[position - 1]]
        entry.expires = now + seconds(entry.ttl)
    hit = table.end[path[position - 1]] if position else 0
    for mark in breakpoints:
        if mark.position > position:
            _write(entries, path[mark.position - 1], mark.ttl, now, first_token)
    used = usage(request.tokens, hit, [(mark.tokens, mark.ttl) for mark in breakpoints])
    day.requests += 1
    day.tokens += request.tokens
    day.hits += position > 0
    day.read += used.read
    day.plain += used.plain
    for ttl, tokens in used.written.items():
        day.written[ttl] = day.written.get(ttl, 0) + tokens
    day.cost += used.cost(prices)


def _write(entries: dict[int, _Entry], name: int, ttl: str, now: float, first_token: float) -> None:
    readable, expires = now + first_token, now + seconds(ttl)
    old = entries.get(name)
    if old is not None and now < old.expires:
        # a second request wrote the same before the first one's could be read
        ttl = max(old.ttl, ttl, key=seconds)
        readable, expires = min(old.readable, readable), max(old.expires, expires)
    entries[name] = _Entry(ttl, readable, expires)
