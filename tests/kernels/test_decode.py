"""Decode attention of the fast kernels against float64, over a sample of all that a layer can be."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompress.attention import over
from kvcompress.kernels import choose
from kvcompress.kernels.attention import naive
from kvcompress.kernels.softmax import Softmax
from kvcompress.methods.kivi import KIVI
from kvcompress.stores.store import Store
from kvcompress.visibility import Visibility
from tests.kernels.layers import Case, dense, error, packed, weights64

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from kvcompress.kernels.attention import cpu
from kvcompress.kernels.jit.values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")

FLOAT_ERROR = 1e-6
ROUNDING = {torch.float32: FLOAT_ERROR, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of the output's own dtype
DTYPES = list(ROUNDING)


def check(
    case: Case,
    allowed: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scaling: float | None = None,
) -> None:
    """Compares with float64 attention over what the layer stands for."""
    scaling = scaling or case.query.shape[-1] ** -0.5
    softmax = Softmax(scaling, softcap, sinks)
    got = choose.attend_decode(case.query, [case.layer], allowed, softmax)
    assert got is not None
    assert got.dtype == case.query.dtype
    seen = case.inside if allowed is None else case.inside & allowed
    weights = weights64(case.query, case.keys, seen, softmax)
    right = weights @ case.values.unsqueeze(2)
    assert error(got, right) < ROUNDING[case.query.dtype]
    both = choose.attend_decode_with_sums(case.query, [case.layer], allowed, softmax)
    assert both is not None
    assert torch.equal(both[0], got)
    wide = case.layer.keys is not None and case.layer.keys.bits == 8  # codes of 8 bits make larger sums, which cancel
    assert error(both[1], weights.sum(3).mean(2)) < (4 * FLOAT_ERROR if wide else FLOAT_ERROR)


def random_mask(case: Case, share: float, heads: int = 1) -> Tensor:
    batch, _, _, columns, _ = case.query.shape
    return torch.rand(batch, heads, columns, case.keys.shape[2]) < share


@pytest.mark.parametrize("slots", [1, 63, 4097])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_dense(slots: int, dim: int) -> None:
    torch.manual_seed(slots + dim)
    groups = Random(slots * dim).choice([1, 3, 4, 7, 8])
    check(dense([slots], 2, groups, 1, dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 17])
def test_dense_of_each_dtype_with_mask_softcap_and_sinks(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    case = dense([300, 41, 1], 2, 3, columns, 64, dtype)
    allowed = random_mask(case, 0.7, heads=2)
    check(case, allowed, softcap=20.0, sinks=torch.randn(2, 3))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("dim", "group_size"), [(64, 64), (80, 96), (96, 32), (128, 32), (128, 128), (256, 32)])
def test_packed(bits: int, dim: int, group_size: int) -> None:
    torch.manual_seed(bits + dim)
    groups = Random(bits * dim + group_size).choice([1, 3, 4, 7, 8])
    keys = 4 * group_size
    check(packed([(0, keys, keys - 37, keys + 91)], 2, groups, 1, dim, bits, group_size))


@pytest.mark.parametrize(("bits", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float16)])
def test_packed_rows_that_differ_in_everything(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(bits)
    rows = [(4, 640, 601, 777), (4, 0, 3, 20), (0, 64, 0, 64), (0, 0, 0, 5), (4, 32, 65, 70)]
    check(packed(rows, 2, 3, 1, 64, bits, dtype=dtype))


@pytest.mark.parametrize("columns", [3, 17])
@pytest.mark.parametrize("groups", [1, 3, 4, 7, 8])
def test_packed_with_holes_softcap_and_sinks(columns: int, groups: int) -> None:
    torch.manual_seed(columns * groups)
    case = packed([(4, 512, 460, 590), (4, 256, 290, 300)], 2, groups, columns, 128, 2)
    allowed = random_mask(case, 0.5, heads=2)
    check(case, allowed, softcap=10.0, sinks=torch.randn(2, groups))
    check(case, allowed)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_long_packed_row(bits: int) -> None:
    torch.manual_seed(bits)
    check(packed([(0, 4096, 3969, 4097)], 2, 4, 1, 128, bits))


def test_all_weight_on_one_token_and_on_none() -> None:
    torch.manual_seed(0)
    case = packed([(0, 256, 200, 300)], 1, 4, 2, 64, 2)
    check(case, scaling=30.0)
    allowed = torch.zeros(1, 1, 2, 300, dtype=torch.bool)
    allowed[0, 0, 1, 150] = True
    got = choose.attend_decode(case.query, [case.layer], allowed, Softmax(1.0))
    assert got is not None
    assert bool((got[..., 0, :] == 0).all())
    assert torch.allclose(got[0, 0, :, 1].double(), case.values[0, 0, 150].expand(4, -1), atol=1e-6)


def test_a_sink_that_takes_everything() -> None:
    case = dense([40], 1, 2, 1, 64)
    got = choose.attend_decode(case.query, [case.layer], None, Softmax(0.1, sinks=torch.full((1, 2), 200.0)))
    assert got is not None
    assert bool((got == 0).all())


def test_nan_in_a_key_is_not_hidden() -> None:
    case = dense([40], 1, 2, 1, 64)

    case.layer.tail_keys[0, 0, 7, 3] = torch.nan
    got = choose.attend_decode(case.query, [case.layer], None, Softmax(0.1))
    assert got is not None
    assert bool(got.isnan().all())


def test_a_row_among_others_is_what_it_is_alone() -> None:
    torch.manual_seed(1)
    rows = [(4, 640, 601, 777), (4, 64, 30, 120)]
    case = packed(rows, 2, 3, 1, 64, 2)
    both = choose.attend_decode(case.query, [case.layer], None, Softmax(0.125))
    assert case.layer.keys and case.layer.values and both is not None
    keys, values = case.layer.keys, case.layer.values
    second = slice(1, 2)
    assert case.layer.front_keys is not None and case.layer.front_values is not None
    alone = case.layer._replace(
        front_keys=case.layer.front_keys[second],
        front_values=case.layer.front_values[second],
        keys=keys._replace(words=keys.words[second], scale=keys.scale[second], minimum=keys.minimum[second]),
        values=values._replace(words=values.words[second], scale=values.scale[second], minimum=values.minimum[second]),
        tail_keys=case.layer.tail_keys[second],
        tail_values=case.layer.tail_values[second],
        fronts=[4],
        key_counts=[64],
        value_counts=[30],
        lengths=[120],
    )
    one = choose.attend_decode(case.query[second], [alone], None, Softmax(0.125))
    assert one is not None
    assert torch.allclose(one, both[second], atol=1e-6)


def test_as_the_reference_over_a_store() -> None:
    torch.manual_seed(2)
    store = Store(2)
    for columns in (70, 1):
        store.append(*torch.randn(2, 2, 3, columns, 64), [columns, columns])
    query = torch.randn(2, 3, 2, 1, 64)
    right, _ = naive.attend(query, store, lambda start, stop: None, Softmax(0.125))
    got = choose.attend_decode(query, store.ranges() or [], None, Softmax(0.125))
    assert got is not None
    assert error(got, right.double()) < FLOAT_ERROR


def test_attention_takes_the_kernels_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows at any number of columns, in blocks with masks of their own; dense ones once they are large."""
    torch.manual_seed(4)
    taken: list[tuple[int, int]] = []
    attend = cpu.attend_decode

    def noted(query: Tensor, ranges: Any, *others: Any) -> Tensor | None:
        taken.append((query.shape[3], sum(each.width for each in ranges)))
        return attend(query, ranges, *others)

    monkeypatch.setattr(cpu, "attend_decode", noted)
    packed_rows, small, large = Store(1, KIVI(2, 32, 64)), Store(1), Store(1)
    packed_rows.append(*torch.randn(2, 1, 2, 400, 64), [400])
    packed_rows.pack()
    small.append(*torch.randn(2, 1, 2, 400, 64), [400])
    large.append(*torch.randn(2, 1, 2, 2048, 64), [2048])
    monkeypatch.setattr(choose, "SMALL", large.keys.nbytes)
    for store, columns, blocks in ((packed_rows, 300, [256, 44]), (small, 1, []), (large, 1, [1]), (large, 9, [])):
        taken.clear()
        past, slots = store.length - columns, torch.arange(store.length)

        def mask(start: int, stop: int, past: int = past, slots: Tensor = slots) -> Tensor:
            return (slots <= past + torch.arange(start, stop)[:, None])[None, None]

        query = torch.randn(1, 2, 2, columns, 64)
        right, _ = naive.attend(query, store, mask, Softmax(0.125))
        got = over(query, store, Visibility(True, mask), Softmax(0.125))
        assert error(got, right.double()) < FLOAT_ERROR
        assert taken == [(each, store.length) for each in blocks]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    torch.manual_seed(3)
    case = packed([(0, 2048, 2000, 2100)], 1, 4, 1, 64, 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        right = choose.attend_decode(case.query, [case.layer], None, Softmax(0.125))
        torch.set_num_threads(threads)
        got = choose.attend_decode(case.query, [case.layer], None, Softmax(0.125))
    finally:
        torch.set_num_threads(before)
    assert right is not None and got is not None
    assert torch.equal(got, right)


def test_what_has_no_kernel_is_left_to_the_reference() -> None:
    softmax = Softmax(1.0)
    odd_width = dense([40], 1, 1, 1, 72)
    assert choose.attend_decode(odd_width.query, [odd_width.layer], None, softmax) is None
    small_groups = packed([(0, 64, 64, 70)], 1, 1, 1, 64, 2, group_size=16)
    assert choose.attend_decode(small_groups.query, [small_groups.layer], None, softmax) is None
    double = dense([40], 1, 1, 1, 64, torch.float64)
    assert choose.attend_decode(double.query, [double.layer], None, softmax) is None


def test_torchs_default_dtype_and_device_do_not_matter() -> None:
    torch.manual_seed(4)
    case = packed([(4, 256, 200, 300)], 2, 3, 1, 64, 2)
    right = choose.attend_decode_with_sums(case.query, [case.layer], None, Softmax(0.125))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            got = choose.attend_decode_with_sums(case.query, [case.layer], None, Softmax(0.125))
    finally:
        torch.set_default_dtype(before)
    assert right is not None and got is not None
    assert all(torch.equal(new, old) for new, old in zip(got, right, strict=True))
