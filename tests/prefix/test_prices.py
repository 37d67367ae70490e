"""A provider's rules and costs against worked values."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.prefix.prices import (
    Breakpoint,
    PriceError,
    check_breakpoints,
    find_hit,
    load_prices,
    seconds,
    usage,
)

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "prices.json").read_text())
SIZES = json.loads((ROOT / "tests" / "golden" / "sizes.json").read_text())
FILE = ROOT / "configs" / "prices" / "anthropic-2026-07.yaml"
PRICES = load_prices(FILE)


def test_the_file_holds_the_worked_rules() -> None:
    held = PRICES.model_dump()
    for key in ("write", "read", "max_breakpoints", "lookback_positions", "default_ttl", "minimum_tokens"):
        assert held[key] == GOLDEN[key], key


@pytest.mark.parametrize("case", GOLDEN["lookup_cases"])
def test_lookup_is_the_worked_one(case: dict) -> None:
    assert find_hit(case["breakpoints"], case["entries"].__contains__, GOLDEN["lookback_positions"]) == case["hit"]


@pytest.mark.parametrize("case", GOLDEN["cost_cases"])
def test_cost_is_the_worked_one(case: dict) -> None:
    used = usage(case["total"], case["hit"], [(case["breakpoint_at"], case["ttl"])])
    assert used.cost(PRICES) == pytest.approx(case["cost"])


def test_share_of_a_cached_prompt_is_the_worked_one() -> None:
    worked = SIZES["prompt_caching_cost"]
    cost = usage(worked["sent"], worked["cached"], []).cost(PRICES)
    assert cost == pytest.approx(worked["cost_at_0.1"])
    assert cost / worked["sent"] == pytest.approx(worked["share"], abs=5e-5)


def test_break_even_is_the_worked_one() -> None:
    def cost_of(ttl: str, reads: int) -> float:
        write, read = usage(1000, 0, [(1000, ttl)]), usage(1000, 1000, [(1000, ttl)])
        return (write.cost(PRICES) + reads * read.cost(PRICES)) / 1000

    worked = GOLDEN["break_even"]
    assert cost_of("5m", 1) == pytest.approx(worked["5m write + 1 read"])
    assert cost_of("1h", 2) == pytest.approx(worked["1h write + 2 reads"])
    assert cost_of("5m", 1) < worked["two plain"] and cost_of("1h", 2) < worked["three plain"]


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.integers(0, 4))
def test_cost_follows_the_published_formula(numbers: list[int], hours: int) -> None:
    """read*A + 2*(B-A) + 1.25*(C-B) + (total-C), B the last 1h breakpoint after A, or A."""
    *marks, total = sorted(numbers)
    hit = numbers[0] if numbers[0] <= total else 0
    breakpoints = [(tokens, "1h" if i < hours else "5m") for i, tokens in enumerate(marks)]
    b = max([tokens for tokens, ttl in breakpoints if ttl == "1h" and tokens > hit], default=hit)
    c = max([tokens for tokens, _ in breakpoints if tokens > b], default=b)
    expected = 0.1 * hit + 2 * (b - hit) + 1.25 * (c - b) + (total - c)
    used = usage(total, hit, breakpoints)
    assert used.cost(PRICES) == pytest.approx(expected)
    assert used.read + sum(used.written.values()) + used.plain == total


def test_a_hit_past_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="do not all lie within 10 tokens"):
        usage(10, 11, [])
    with pytest.raises(ValueError, match="do not all lie within 10 tokens"):
        usage(10, 0, [(12, "5m")])


def test_durations() -> None:
    assert [seconds(text) for text in ("90s", "5m", "1h", "2d")] == [90, 300, 3600, 172_800]
    for bad in ("5", "m", "0m", "1.5h", "-1m", "5 m"):
        with pytest.raises(ValueError, match="duration"):
            seconds(bad)


def test_what_the_provider_refuses() -> None:
    five = [Breakpoint(position, 100 * position, "5m") for position in range(1, 6)]
    check_breakpoints(five[:4], PRICES)
    check_breakpoints([five[0]._replace(ttl="1h"), five[1]], PRICES)
    with pytest.raises(PriceError, match="5 breakpoints: at most 4"):
        check_breakpoints(five, PRICES)
    with pytest.raises(PriceError, match="a longer ttl comes first"):
        check_breakpoints([five[0], five[1]._replace(ttl="1h")], PRICES)
    with pytest.raises(PriceError, match="ttl '2h' has no price"):
        check_breakpoints([five[0]._replace(ttl="2h")], PRICES)
    with pytest.raises(PriceError, match="ascending"):
        check_breakpoints([five[1], five[0]], PRICES)
    with pytest.raises(PriceError, match=r"model 'sonet-5' .*did you mean 'sonnet-5'\?"):
        PRICES.minimum("sonet-5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raed": 0.1}, r"raed: unknown key; did you mean 'read'\?"),
        ({"read": -1}, "read: .*not -1"),
        ({"write": {"5 minutes": 1.25}}, "write: duration '5 minutes'"),
        ({"default_ttl": "2h"}, "default_ttl: '2h' has no price"),
        ({"default_model": "opus"}, "model 'opus' has no minimum_tokens"),
        ({"as_of": "July 2026"}, "as_of: "),
        ({"max_breakpoints": 0}, "max_breakpoints: .*not 0"),
    ],
)
def test_a_bad_price_file_names_file_and_key(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(FILE.read_text()), **change}))
    with pytest.raises(PriceError, match=rf"prices\.yaml: .*{message}"):
        load_prices(path)


def test_an_unreadable_price_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match=r"none\.yaml: No such file"):
        load_prices(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_text("a: [")
    with pytest.raises(PriceError, match=r"odd\.yaml: not valid YAML"):
        load_prices(tmp_path / "odd.yaml")
