"""Budgets: the three forms, how ratios round, and that a byte budget is the largest that fits."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from kvcompress import CacheError
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

    found = largest_fitting(lambda tokens: sizes[tokens - 1] <= limit, len(sizes), period)
    assert found == max(fitting, default=0)


PACKED = "kivi(bits=2, group_size=8, residual=16)"
AT_PREFILL = ["snapkv(budget={!r}, window=4)", f"snapkv(budget={{!r}}, window=4) | {PACKED}"]
EVERY_CALL = [
    "h2o(budget={!r})",
    "streaming_llm(sinks=2, budget={!r}, positions='original')",
    "streaming_llm(sinks=2, budget={!r})",
    f"h2o(budget={{!r}}) | {PACKED}",
    f"streaming_llm(sinks=2, budget={{!r}}) | {PACKED}",
]


def some_ids(rows: int, columns: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))


def stored(cache: kvc.CompressedCache) -> int:
    return cache.nbytes - cache.memory()["spare"]


def kept_tokens(cache: kvc.CompressedCache) -> int:
    return cache.kept(next(layer.index for layer in cache.layers if layer.compresses)).shape[2]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("text", AT_PREFILL)
def test_a_byte_budget_is_the_most_that_fits_into_a_prompt(text: str, family: str) -> None:
    """Every prompt, below the residual too, where nothing is packed; one more token would be too much."""
    model, limit = tiny(family), 30_000
    for length in range(1, 90, 7):
        with kvc.wrap(model, text.format(f"{limit}B")) as wrapped:
            wrapped.prefill(some_ids(2, length))
            cache = wrapped.cache
        kept = kept_tokens(cache)
        assert stored(cache) <= limit
        for more in range(kept + 1, min(kept + 18, length + 1)):
            with kvc.wrap(model, text.format(more)) as wrapped:
                wrapped.prefill(some_ids(2, length))
                assert stored(wrapped.cache) > limit


@pytest.mark.parametrize("text", AT_PREFILL)
@given(limit=st.integers(13_000, 25_000), lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3))
@settings(max_examples=8)
def test_a_byte_budget_holds_for_rows_of_any_lengths(text: str, limit: int, lengths: list[int]) -> None:
    """Where one row's keys are packed while another's wait, and after a second prompt, with the holes that it makes."""
    columns, limit = max(lengths), limit * len(lengths)
    mask = (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]).long()
    with kvc.wrap(tiny("llama"), text.format(f"{limit}B")) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(some_ids(len(lengths), columns), mask, cache)
        assert stored(cache) <= limit
        for turn in range(3, 60, 19):
            wrapped.prefill(some_ids(len(lengths), turn), cache=cache)
            assert stored(cache) <= limit


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("text", EVERY_CALL)
def test_a_byte_budget_holds_at_every_step_with_holes_and_spare(text: str, family: str) -> None:
    """From a short prompt on, past the budget and through many rounds of packing; a call of many tokens among them."""
    # Two times two rows must still hold what stays unpacked; gemma2's sliding layers take their own share.
    limit = 40_000 if "kivi" not in text else 60_000 if family == "llama" else 80_000
    with kvc.wrap(tiny(family), text.format(f"{limit}B")) as wrapped:
        cache = wrapped.new_cache()
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, :5] = 0
        wrapped.prefill(some_ids(2, 9), mask, cache)
        ids, most = some_ids(2, 400), 0
        for start in [*range(250), 250, 300, *range(330, 400)]:
            columns = {250: 50, 300: 30}.get(start, 1)
            wrapped(ids[:, start : start + columns], cache=cache)
            assert stored(cache) <= limit
            assert cache.nbytes <= 1.125 * limit
            most = max(most, stored(cache))
        assert most > 0.7 * limit
        fork = cache.fork(2)
        for start in range(3):
            wrapped(ids[:, start : start + 1].repeat_interleave(2, 0), cache=fork)
            assert stored(fork) <= limit
        if "kivi" in text:
            with pytest.raises(CacheError, match=r"in each of 16 rows, fewer than the 1[68] that"):
                wrapped(ids[:1, :1].expand(16, -1), cache=cache.fork(8))


@pytest.mark.parametrize("text", ["h2o(budget={!r})", "streaming_llm(sinks=2, budget={!r})"])
def test_one_more_token_would_be_too_much_while_decoding(text: str) -> None:
    limit, model = 40_000, tiny("llama")
    held = []
    for budget in (f"{limit}B", None):
        with kvc.wrap(model, text.format(budget or held[0][0] + 1)) as wrapped:
            cache = wrapped.new_cache()
            wrapped.prefill(some_ids(1, 9), cache=cache)
            wrapped(some_ids(1, 200), cache=cache)
        held.append((kept_tokens(cache), stored(cache)))
    assert held[0][1] <= limit < held[1][1]


@pytest.mark.parametrize("limit", [20_000, 30_000])
def test_where_holes_take_the_room_the_best_tokens_and_the_newest_stay(limit: int) -> None:
    """H2O's budget in bytes is half recent; whatever units go, no head loses its best token or one of the newest."""
    method = kvc.parse(f"h2o(budget='{limit}B') | {PACKED}")
    given_up = 0
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(some_ids(1, 60), cache=cache)
        for step in range(200):
            before = [layer.store.fork() for layer in cache.layers]
            wrapped(some_ids(1, 200)[:, step : step + 1], cache=cache)
            assert method.byte_budget is not None
            total = cache.tokens_within(method.byte_budget)
            for layer, old in zip(cache.layers, before, strict=True):
                kept = cache.kept(layer.index)[0]
                for head in range(kept.shape[0]):
                    mine = kept[head][kept[head] >= 0].tolist()
                    given_up += len(mine) < min(total, cache.seen_tokens[0])
                    newest = min(total - total // 2, cache.seen_tokens[0])
                    assert mine[-newest:] == list(range(cache.seen_tokens[0] - newest, cache.seen_tokens[0]))
                    positions = old.current_positions(kept.device).expand(-1, kept.shape[0], -1)[0, head]
                    assert old.scores is not None
                    best = old.scores.view[0, head].masked_fill(positions < 0, -1).argmax()
                    assert int(positions[best]) in mine
    assert given_up


def test_a_byte_budget_that_holds_no_token_is_named() -> None:
    refused = pytest.raises(ValueError, match=r"100 bytes does not hold one token \(\d+ bytes\)")
    with kvc.wrap(tiny("llama"), "snapkv(budget='100B')") as wrapped, refused:
        wrapped.prefill(torch.arange(3, 50)[None])


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
