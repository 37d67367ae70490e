"""Budgets: the three forms, how ratios round, and that a byte budget is the largest that fits."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress as kvc
from kvcompress.budget import LayerShape, check_budget, largest_fitting, parse_bytes, ratio_of, resolve
from tests.families import OPTIONS, VOCABULARY, build, tiny


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("4096B", 4096),
        ("2 KiB", 2048),
        (" 3kb ", 3000),
        ("0.5GiB", 2**29),
    ],
)
def test_sizes_in_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "64", "64 M", "MiB", "-3MB", "1e3B", "3TB", "nan B"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_bytes(text)


@given(st.integers(1, 100), st.integers(1, 10_000))
def test_a_percentage_is_rounded_down_and_at_least_one(percent: int, tokens: int) -> None:
    assert ratio_of(percent / 100, tokens) == max(1, math.floor(Fraction(percent, 100) * tokens))


@pytest.mark.parametrize("length", range(1, 17))
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_no_prompt_is_emptied(length: int, ratio: float) -> None:
    ids = torch.arange(3, 3 + length)[None]
    expected = max(1, math.floor(Fraction(str(ratio)) * length))
    for text in (
        f"snapkv(budget={ratio}, window=4, kernel=3)",
        f"streaming_llm(sinks=2, budget={ratio})",
        f"h2o(budget={ratio})",
    ):
        with kvc.wrap(tiny("llama"), text) as wrapped:
            wrapped.prefill(ids)
            kept = wrapped.cache.kept(0)
        assert kept.shape[2] == expected, text
        assert kept.min() >= 0, text
        assert (kept[..., -1] == length - 1).all(), text


def test_rows_of_a_batch_have_their_own_ratio() -> None:
    assert resolve(0.3, [10, 7, 1], lambda size: size) == [3, 2, 1]
    assert resolve(5, [10, 7, 1], lambda size: size) == [5, 5, 5]
    assert resolve("1kB", [10, 7], lambda size: size // 100) == [10, 10]


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.1, 1.1, float("nan"), float("inf"), "0B", "lots"])
def test_impossible_budgets_are_named(budget: float | str) -> None:
    with pytest.raises(ValueError, match="budget"):
        check_budget(budget)


@pytest.mark.parametrize("budget", [None, True, [1], 3 + 0j])
def test_other_types_are_named(budget: object) -> None:
    with pytest.raises(TypeError, match="must be tokens"):
        check_budget(budget)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 60))
def test_largest_fitting_is_found_where_bytes_fall_inside_a_period(period: int, steps: list[int], limit: int) -> None:
    sizes: list[int] = []
    for index, step in enumerate(steps):
        sizes.append(step + (sizes[index - period] if index >= period else 5))
    fitting = [tokens for tokens, size in enumerate(sizes, start=1) if size <= limit]

    def bytes_of(tokens: int) -> int:
        return sizes[tokens - 1]

    if sizes[0] > limit:
        with pytest.raises(ValueError, match="does not hold one token"):
            largest_fitting(bytes_of, limit, len(sizes), period)
    else:
        assert largest_fitting(bytes_of, limit, len(sizes), period) == max(fitting)


PACKED = "kivi(bits=2, group_size=8, residual=16)"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("part", [0.7, 0.9])
@pytest.mark.parametrize(
    "text",
    [
        "snapkv(budget={!r}, window=4)",
        "h2o(budget={!r})",
        "streaming_llm(budget={!r}, positions='original')",
        f"snapkv(budget={{!r}}, window=4) | {PACKED}",
        f"streaming_llm(budget={{!r}}) | {PACKED}",
    ],
)
def test_a_byte_budget_is_the_largest_that_fits(text: str, part: float, family: str) -> None:
    model, length = tiny(family), 90
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))

    def stored(budget: int | str) -> tuple[int, int]:
        with kvc.wrap(model, text.format(budget)) as wrapped:
            wrapped.prefill(ids)
            cache = wrapped.cache
        full = next(layer.index for layer in cache.layers if layer.compresses)
        return cache.kept(full).shape[2], cache.nbytes - cache.memory()["spare"]

    limit = int(part * stored(length)[1])
    kept, size = stored(f"{limit}B")
    assert size <= limit
    assert 20 < kept < length
    residual = 16 if "kivi" in text else 1
    more = [stored(tokens) for tokens in range(kept + 1, min(kept + residual + 2, length + 1))]
    assert all(tokens > kept and larger > limit for tokens, larger in more)


def test_a_byte_budget_that_holds_no_token_is_named() -> None:
    refused = pytest.raises(ValueError, match=r"100 bytes does not hold one token \(\d+ bytes\)")
    with kvc.wrap(tiny("llama"), "snapkv(budget='100B')") as wrapped, refused:
        wrapped.prefill(torch.arange(3, 50)[None])


@pytest.mark.parametrize(
    "text", ["streaming_llm(sinks=1, budget={!r})", "h2o(budget={!r})", f"h2o(budget={{!r}}) | {PACKED}"]
)
def test_a_prompt_shorter_than_a_byte_budget_leaves_room_to_decode(text: str) -> None:
    limit, model = 20_000, tiny("llama")
    generator = torch.Generator().manual_seed(0)
    with kvc.wrap(model, text.format(f"{limit}B")) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(torch.randint(3, VOCABULARY, (1, 9), generator=generator), cache=cache)
        held: list[tuple[int, int]] = []
        for _ in range(200):
            wrapped(torch.randint(3, VOCABULARY, (1, 1), generator=generator), cache=cache)
            held.append((cache.kept(0).shape[2], cache.nbytes - cache.memory()["spare"]))
    most = max(kept for kept, _ in held)
    assert held[-1][0] == most < 200
    with kvc.wrap(model, text.format(most + 1)) as wrapped:
        wrapped.prefill(torch.randint(3, VOCABULARY, (1, 209), generator=generator))
        one_more = wrapped.cache
    assert one_more.nbytes - one_more.memory()["spare"] > limit
    if "kivi" not in text:
        assert all(size <= limit for _, size in held)


def test_a_sliding_layer_counts_its_window() -> None:
    shape = LayerShape(heads=2, key_dim=16, value_dim=8, itemsize=2, window=8)
    assert shape.exact_bytes(5) == 5 * 2 * 24 * 2
    assert shape.exact_bytes(500) == 8 * 2 * 24 * 2


def test_layers_of_other_head_dims_count_what_they_store() -> None:
    model = build("llama", **OPTIONS["llama"] | {"head_dim": 32})
    with kvc.wrap(model, "streaming_llm(budget='40kB')") as wrapped:
        wrapped.prefill(torch.randint(3, VOCABULARY, (1, 100)))
        cache = wrapped.cache
    one = 2 * (2 * 2 * 32 * 4 + 4)  # layers, keys and values of two heads, a position
    assert cache.kept(1).shape[2] == 40_000 // one
