"""The text form of methods: what it says comes back, and what it cannot mean is named."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcompress as kvc
from kvcompress import H2O, KIVI, Exact, MethodError, SnapKV, StreamingLLM
from kvcompress.methods.base import Evicting, Method

ratios = st.floats(0, 1, exclude_min=True)
sizes = st.builds("{}{}B".format, st.integers(1, 999), st.sampled_from(["", "k", "M", "Gi", "Ki", "Mi"]))
positions = st.sampled_from(["original", "cache"])
snapkv = st.integers(1, 64).flatmap(
    lambda window: st.builds(
        SnapKV,
        budget=st.integers(window, 4096) | ratios | sizes,
        window=st.just(window),
        kernel=st.integers(0, 9).map(lambda half: 2 * half + 1),
        pooling=st.sampled_from(["max", "avg"]),
        positions=positions,
    )
)
streaming = st.builds(StreamingLLM, sinks=st.integers(0, 8), window=st.integers(1, 4096), positions=positions)
streaming_budget = st.builds(StreamingLLM, sinks=st.integers(0, 8), budget=st.integers(9, 4096) | ratios | sizes)
h2o = st.builds(H2O, heavy=st.integers(1, 4096) | ratios, recent=st.integers(1, 4096) | ratios, positions=positions)
h2o_budget = st.builds(H2O, budget=st.integers(2, 4096) | ratios | sizes, positions=positions)
kivi = st.integers(1, 64).flatmap(
    lambda group: st.builds(
        KIVI,
        bits=st.sampled_from([2, 4]),
        group_size=st.just(group),
        residual=st.integers(1, 8).map(lambda groups: group * groups),
    )
)
evicting = snapkv | streaming | streaming_budget | h2o | h2o_budget


@given(st.just(Exact()) | evicting | kivi)
def test_the_text_of_a_method_is_read_back_as_that_method(method: Method) -> None:
    assert kvc.parse(str(method)) == method
    assert kvc.parse(method) is method


@given(evicting, kivi)
def test_a_composition_is_read_back_or_refused_the_same_way(first: Evicting, second: KIVI) -> None:
    try:
        whole = first | second
    except ValueError as reason:
        with pytest.raises(MethodError) as error:
            kvc.parse(f"{first} | {second}")
        assert str(reason) in str(error.value)
    else:
        assert kvc.parse(str(whole)) == whole
        assert (whole.evicting, whole.packing) == (first, second)


@given(st.text(max_size=40) | st.text("exactkiv()|= '\"0.5,", max_size=40))
def test_any_text_is_a_method_or_an_error_of_its_own_kind(text: str) -> None:
    try:
        assert isinstance(kvc.parse(text), Method)
    except MethodError as error:
        assert "\n" not in str(error)


def test_what_the_readme_and_the_design_write() -> None:
    expected = SnapKV(budget=0.25) | KIVI(bits=2)
    for text in ("snapkv(budget=0.25) | kivi(bits=2)", " snapkv(budget = 0.25)|kivi ", "snapkv(budget=.25)|kivi()"):
        assert kvc.parse(text) == expected
    assert kvc.parse("""snapkv(budget="64MiB")""") == kvc.parse("snapkv(budget='64MiB')") == SnapKV(budget="64MiB")
    assert str(SnapKV(budget=0.25) | KIVI()) == "snapkv(budget=0.25) | kivi(bits=2)"
    assert {name: method.__name__ for name, method in kvc.methods().items()} == {
        "exact": "Exact",
        "h2o": "H2O",
        "kivi": "KIVI",
        "snapkv": "SnapKV",
        "streaming_llm": "StreamingLLM",
    }


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("snapvk(budget=64)", ["unknown method 'snapvk'", "did you mean 'snapkv'", "streaming_llm"]),
        ("qwertz", ["unknown method 'qwertz'", "known: exact, h2o"]),
        ("snapkv(budge=64)", ["snapkv has no option 'budge'", "did you mean 'budget'", "pooling"]),
        ("exact(budget=64)", ["exact has no option 'budget'", "it has none"]),
        ("snapkv(64)", ["options are given by name", "snapkv(budget="]),
        ("snapkv(budget=64, budget=32)", ["budget is given twice"]),
        ("snapkv(**{'budget': 64})", ["** is not allowed"]),
        ("snapkv(budget=window)", ["budget must be a number or a quoted text, got window"]),
        ("snapkv(budget=open('secret'))", ["got open('secret')"]),
        ("snapkv(budget={[]: 1})", ["budget must be a number"]),
        ("snapkv(budget=64) & kivi", ["cannot read the method", "write it like"]),
        ("snapkv(budget=64", ["cannot read the method"]),
        ("", ["cannot read the method ''"]),
        ("exact\0", ["cannot read the method"]),
        ("(" * 400 + "exact" + ")" * 400, ["cannot read the method"]),
        ("exact | " * 200 + "exact", ["at most 1000 characters, got 1605"]),
        ("exact | kivi", ["cannot compose exact | kivi(bits=2)", "one evicting method, then one that packs"]),
        ("kivi | snapkv(budget=64)", ["cannot compose kivi(bits=2) | snapkv(budget=64)"]),
        ("snapkv(budget=64) | kivi | kivi", ["cannot compose snapkv(budget=64) | kivi(bits=2) | kivi(bits=2)"]),
    ],
)
def test_what_cannot_be_read_is_named(text: str, reasons: list[str]) -> None:
    with pytest.raises(MethodError) as error:
        kvc.parse(text)
    for reason in reasons:
        assert reason in str(error.value)


@pytest.mark.parametrize("value", [None, 5, 0.25, Exact, ["exact"]])
def test_what_is_no_text_is_named(value: object) -> None:
    with pytest.raises(MethodError, match="a method is a text such as") as error:
        kvc.parse(value)  # pyright: ignore[reportArgumentType]
    assert repr(value) in str(error.value)


BUDGETS = [
    ("0", "less than"),
    ("-5", "less than"),
    ("0.0", "as a ratio must lie in (0, 1]"),
    ("-0.25", "as a ratio must lie in (0, 1]"),
    ("1.5", "as a ratio must lie in (0, 1]; write whole tokens as an integer"),
    ("1e999", "inf as a ratio must lie in (0, 1]"),
    ("True", "must be tokens (256), a ratio (0.25) or bytes"),
    ("[64]", "must be tokens (256), a ratio (0.25) or bytes"),
    ("'64'", "is not a size in bytes"),
    ("'many'", 'is not a size in bytes; write it like "64MiB"'),
    ("'-1MiB'", "is not a size in bytes"),
    ("'0KiB'", "leaves no room for a token"),
]


@pytest.mark.parametrize(
    "method", [name for name, kind in kvc.methods().items() if "budget" in {f.name for f in fields(kind)}]
)
@pytest.mark.parametrize(("budget", "reason"), BUDGETS)
def test_a_budget_that_means_nothing_is_named(method: str, budget: str, reason: str) -> None:
    with pytest.raises(MethodError) as error:
        kvc.parse(f"{method}(budget={budget})")
    assert reason in str(error.value) and "budget" in str(error.value)


@pytest.mark.parametrize("method", [SnapKV, StreamingLLM, H2O])
@pytest.mark.parametrize("budget", [float("nan"), float("inf"), True, 0, -1, 1.0001])
def test_the_classes_refuse_the_same_budgets(method: type[Method], budget: float) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        method(budget=budget)  # pyright: ignore[reportCallIssue]
    assert repr(budget) in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("snapkv(budget=31)", "budget 31 tokens is less than the observation window (32); give at least 32"),
        ("snapkv(budget=64, window=0)", "window must be an integer of at least 1, got 0"),
        ("snapkv(budget=64, window=16.0)", "got 16.0"),
        ("snapkv(budget=64, kernel=4)", "kernel must be an odd integer of at least 1, got 4"),
        ("snapkv(budget=64, pooling='mean')", 'pooling must be "max" or "avg", got \'mean\''),
        ("snapkv(budget=64, positions='slot')", 'positions must be "original" or "cache", got \'slot\''),
        ("streaming_llm(budget=4)", "budget 4 tokens is less than the sinks and one token (5)"),
        ("streaming_llm(window=0)", "window must be an integer of at least 1, got 0"),
        ("streaming_llm(window=0.5)", "got 0.5; a ratio goes into budget"),
        ("streaming_llm(window=8, budget=64)", "give budget or window, not both"),
        ("streaming_llm(sinks=-1)", "sinks must be an integer of at least 0, got -1"),
        ("h2o", "h2o needs heavy and recent, or budget"),
        ("h2o(heavy=0, recent=4)", "heavy 0 tokens is less than one token"),
        ("h2o(heavy=4, recent=1.5)", "recent 1.5 as a ratio"),
        ("h2o(heavy='1MiB', recent=4)", "a size in bytes goes into budget"),
        ("h2o(budget=8, heavy=4)", "not both"),
        ("kivi(bits=9)", "bits must be 1 to 8, got 9"),
        ("kivi(bits=2.0)", "bits must be 1 to 8, got 2.0"),
        ("kivi(group_size=0)", "group_size must be an integer of at least 1, got 0"),
        ("kivi(residual=100)", "residual must be a multiple of group_size: 100 is not one of 32; give 96"),
        ("streaming_llm(window=127) | kivi", "keep at least 128, or lower residual"),
        ("h2o(heavy=64, recent=127) | kivi", "keep at least 128, or lower residual"),
        ("snapkv(budget=64, positions='cache') | kivi", "would rotate packed keys again"),
    ],
)
def test_options_that_do_not_fit_are_named(text: str, reason: str) -> None:
    with pytest.raises(MethodError) as error:
        kvc.parse(text)
    assert reason in str(error.value)
