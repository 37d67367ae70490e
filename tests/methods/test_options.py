"""What every method's options become and what its name must be, whoever wrote it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcompress as kvc
from kvcompress.methods import Budget, Evicting, Method
from kvcompress.methods.base import registry
from kvcompress.prefix.sizes import MethodSize, kv_size
from tests.tiny import tiny_llama

METHODS = [
    kvc.StreamingLLM(sinks=2, window=30),
    kvc.StreamingLLM(budget=0.25),
    kvc.H2O(heavy=16, recent=0.25),
    kvc.H2O(budget="64KiB"),
    kvc.SnapKV(budget=0.25, window=4, kernel=3),
    kvc.SnapKV(budget="64KiB", positions="cache"),
    kvc.KIVI(bits=4, group_size=8, residual=16),
]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Methods that a test defines are forgotten after it."""
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def foreign(value: object) -> list[Any]:
    """`value` as other libraries have it."""
    if isinstance(value, str):
        return [np.str_(value)]
    if isinstance(value, float):
        return [np.float64(value), np.float32(value), np.array(value), torch.tensor(value), Fraction(value)]
    if isinstance(value, int):
        return [np.int64(value), np.uint8(value), np.array(value), torch.tensor(value)]
    return []


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_numbers_and_texts_of_other_libraries_become_pythons_own(method: Method) -> None:
    for option in fields(method):
        value = getattr(method, option.name)
        for other in foreign(value):
            made = replace(method, **{option.name: other})
            assert made == method and hash(made) == hash(method) and str(made) == str(method)
            assert type(getattr(made, option.name)) is type(value)
            assert kvc.parse(str(made)) == method


def test_a_cache_made_with_a_numpy_number_is_saved_and_loads(tmp_path: Path) -> None:
    model, ids = tiny_llama(), torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    window: Any = np.int32(4)
    with kvc.wrap(model, kvc.SnapKV(budget=np.float64(0.25), window=window)) as wrapped:
        wrapped.prefill(ids, cache=(cache := wrapped.new_cache()))
        cache.save(tmp_path / "cache.safetensors")
        loaded = kvc.load_cache(tmp_path / "cache.safetensors", model)
        assert loaded.method == kvc.SnapKV(budget=0.25, window=4)
        assert torch.equal(wrapped(ids[:, :2], cache=loaded).logits, wrapped(ids[:, :2], cache=cache).logits)


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.ones(2), object(), {1, float("nan")}, lambda: 1])
def test_what_no_text_can_hold_is_refused(value: object) -> None:
    @dataclass(frozen=True)
    class Weighted(Evicting):
        budget: Budget
        weights: Any = ()

        name = "weighted"

    assert kvc.parse("weighted(budget=4, weights=[1, (2.5, 'x')])") == Weighted(4, weights=(1, (2.5, "x")))
    with pytest.raises(TypeError, match=r"weights must be a finite number, a text, or a tuple of such, got"):
        Weighted(4, weights=value)


def test_a_class_that_would_share_a_methods_name_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"MySnap needs a name of its own, since 'snapkv' is SnapKV; .* name = \"mysnap\""
    ):

        class MySnap(kvc.SnapKV):  # pyright: ignore[reportUnusedClass]
            pass

    with pytest.raises(TypeError, match=r"'h2o' of Other belongs to kvcompress.methods.h2o.H2O; choose another"):

        class Other(Evicting):  # pyright: ignore[reportUnusedClass]
            name = "h2o"

    assert registry["snapkv"] is kvc.SnapKV and registry["h2o"] is kvc.H2O


def test_a_subclass_with_a_name_of_its_own_is_another_method() -> None:
    class Later(kvc.SnapKV):
        name = "later"

    assert str(Later(budget=64)) == "later(budget=64)"
    assert kvc.parse("later(budget=64)") == Later(budget=64) != kvc.SnapKV(budget=64)


def test_a_notebooks_cell_may_run_twice() -> None:
    def cell() -> type[Method]:
        class Mine(Evicting):
            name = "mine"

        return Mine

    first, second = cell(), cell()
    assert registry["mine"] is second is not first


def test_mistakes_in_the_class_are_named_when_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"the name of Two is 'two words'; it must be a word"):

        class Two(Evicting):  # pyright: ignore[reportUnusedClass]
            name = "two words"

    with pytest.raises(TypeError, match=r"Checking defines __post_init__, .* name it check\(self\)"):

        class Checking(Evicting):  # pyright: ignore[reportUnusedClass]
            name = "checking"

            def __post_init__(self) -> None: ...

    @dataclass(frozen=True)
    class Typed(Evicting):
        budget: Budget = 4
        name: str = "typed"  # pyright: ignore[reportIncompatibleVariableOverride]

    with pytest.raises(TypeError, match=r"name is no option of a method; write `name = 'typed'` in Typed, without a"):
        Typed()


def test_a_method_whose_size_cannot_be_known_says_what_is_missing() -> None:
    class Sized(Evicting):
        name = "sized"

    with pytest.raises(
        ValueError, match=r"the size of sized is not known: define kept_tokens\(self, tokens\) in Sized"
    ):
        MethodSize(kv_size(tiny_llama().config), "sized").bytes_at(64)
