"""Days worked out by hand, under the dated price file (5m write 1.25, 1h write 2, read 0.1, minimum 1,024)."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcompress.prefix.cost import DayCost, Mark, day_cost, parse_mark
from kvcompress.prefix.prices import PriceError, load_prices
from kvcompress.prefix.trace import read_trace

ROOT = Path(__file__).parents[2]
PRICES = load_prices(ROOT / "configs" / "prices" / "anthropic-2026-07.yaml")
DAY = read_trace(ROOT / "configs" / "traces" / "coding_day.yaml")


def day(
    folder: Path, prompts: Sequence[tuple[float, str]], sizes: str = "s: 2000, a: 1000, b: 1000, c: 1000", **options
):
    """`prompts`: seconds and segments, such as `(60, "s, a")`."""
    lines = [f"  - {{segments: [{segments}], timestamp: {1000 * at}}}" for at, segments in prompts]
    path = folder / "day.yaml"
    path.write_text(f"segments: {{{sizes}}}\nrequests:\n" + "\n".join(lines))
    return day_cost(read_trace(path), PRICES, **options)


def test_a_growing_prompt_is_read_and_extended(tmp_path: Path) -> None:
    cost = day(tmp_path, [(0, "s"), (60, "s, a"), (120, "s, a, b")])
    assert (cost.hits, cost.read, cost.written, cost.plain) == (2, 5000, {"5m": 4000}, 0)
    assert cost.cost == pytest.approx(0.1 * 5000 + 1.25 * 4000)
    assert cost.cost_uncached == 9000


def test_an_entry_lives_five_minutes_from_its_last_read(tmp_path: Path) -> None:
    assert day(tmp_path, [(0, "s"), (299, "s"), (598, "s"), (897, "s")]).hits == 3
    assert day(tmp_path, [(0, "s"), (300, "s")]).hits == 0
    assert day(tmp_path, [(0, "s"), (3599, "s")], marks=[Mark("end", "1h")]).hits == 1


def test_an_entry_can_be_read_once_its_response_has_begun(tmp_path: Path) -> None:
    assert day(tmp_path, [(0, "s"), (0, "s"), (2, "s")], first_token=2.0).hits == 1
    assert day(tmp_path, [(0, "s"), (1, "s"), (2, "s")], first_token=1.0).hits == 2


def test_a_prompt_below_the_minimum_is_not_cached(tmp_path: Path) -> None:
    short, long = [(0, "a"), (9, "a")], [(0, "s"), (9, "s")]
    assert day(tmp_path, short).cost == 2000
    assert day(tmp_path, long, model="haiku-4.5").cost == 4000
    assert day(tmp_path, long, model="opus-4.8").cost == pytest.approx(2000 * 1.35)


def test_a_fork_finds_the_entry_before_it_only_within_the_lookback(tmp_path: Path) -> None:
    """The first prompt's entry stands at position 1. Position 20 still sees it, position 21 no longer."""
    sizes = "s: 2000, " + ", ".join(f"t{i}: 10" for i in range(30))
    near = "s, " + ", ".join(f"t{i}" for i in range(19))
    far = "s, " + ", ".join(f"t{i}" for i in range(20))
    assert day(tmp_path, [(0, "s"), (9, near)], sizes).hits == 1
    assert day(tmp_path, [(0, "s"), (9, far)], sizes).hits == 0
    marks = [Mark("s", "5m"), Mark("end", "5m")]
    assert day(tmp_path, [(0, "s"), (9, far)], sizes, marks=marks).hits == 1


def test_named_segments_and_two_ttls(tmp_path: Path) -> None:
    """The fork at b reads s, which only a breakpoint of its own has stored."""
    prompts = [(0, "s, a"), (60, "s, b")]
    assert day(tmp_path, prompts).hits == 0
    both = day(tmp_path, prompts, marks=[parse_mark("s=1h", PRICES), parse_mark("end", PRICES)])
    assert (both.hits, both.read, both.written) == (1, 2000, {"1h": 2000, "5m": 2000})
    assert both.cost == pytest.approx(0.1 * 2000 + 2 * 2000 + 1.25 * 2000)


def test_tokens_after_the_last_breakpoint_are_plain(tmp_path: Path) -> None:
    cost = day(tmp_path, [(0, "s, a"), (60, "s, b")], marks=[Mark("s", "5m")])
    assert (cost.read, cost.written, cost.plain) == (2000, {"5m": 2000}, 2000)


def test_a_second_writer_does_not_hide_the_first_ones_entry(tmp_path: Path) -> None:
    """Written at 0, readable from 2 on; the second request, at 1, writes it again and keeps it alive until 301."""
    cost = day(tmp_path, [(0, "s"), (1, "s"), (2, "s")], first_token=2.0)
    assert cost.hits == 1
    assert day(tmp_path, [(0, "s"), (1, "s"), (300.5, "s")], first_token=2.0).hits == 1


def test_the_working_day_by_hand() -> None:
    """Breakpoints at the ends, one request a minute.

    Every prompt reads its stream's last one, except the six that begin a stream or come after a pause: main, three
    subagents, day2, and main again after 12 minutes, where turn 7's entry has expired. They write 5,000, 4,500 three
    times, 4,900 and 11,300 tokens; the others 900 (8 + 2 times), 600 (9 times) and 800 (5 times).
    """
    cost = day_cost(DAY, PRICES)
    written = 5000 + 3 * 4500 + 4900 + 11300 + 10 * 900 + 9 * 600 + 5 * 800
    assert cost == DayCost("sonnet-5", 30, 220_200, 24, 220_200 - written, {"5m": written}, 0, cost.cost)
    assert cost.cost == pytest.approx(0.1 * (220_200 - written) + 1.25 * written)


def test_a_gap_beyond_the_ttl_makes_caching_a_loss() -> None:
    assert day_cost(DAY, PRICES, gap=301).share == pytest.approx(1.25)
    assert day_cost(DAY, PRICES, gap=301, marks=[Mark("end", "1h")]).share < 1


def test_what_is_refused() -> None:
    with pytest.raises(PriceError, match=r"breakpoint 'CLAUDE.dm': no such segment .*did you mean 'CLAUDE.md'\?"):
        day_cost(DAY, PRICES, marks=[Mark("CLAUDE.dm", "5m")])
    with pytest.raises(PriceError, match="a longer ttl comes first"):
        day_cost(DAY, PRICES, marks=[Mark("system+tools", "5m"), Mark("CLAUDE.md", "1h")])
    with pytest.raises(PriceError, match="5 breakpoints: at most 4"):
        day_cost(DAY, PRICES, marks=[Mark(f"main turn {i}", "5m") for i in range(1, 7)])
    with pytest.raises(PriceError, match="gap=-1"):
        day_cost(DAY, PRICES, gap=-1)


def test_mooncake_prompts_are_read_at_full_blocks(tmp_path: Path) -> None:
    """Two turns: the first one's tail is written by neither, as no entry can end there."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 9000, "input_length": 2100, "output_length": 9, "hash_ids": [0, 1, 3, 4, 5]}\n'
    )
    cost = day_cost(read_trace(path), PRICES, model="fable-5")
    assert (cost.read, cost.written, cost.plain) == (1024, {"5m": 1024 + 1024}, 476 + 52)
