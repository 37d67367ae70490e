"""Column sums and window votes of the fast kernels against float64."""

import pytest
import torch

from kvcompress.kernels import choose
from kvcompress.kernels.scores import naive
from kvcompress.kernels.softmax import Softmax
from kvcompress.stores.store import Store
from tests.kernels.layers import Case, dense, error, weights64

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from kvcompress.kernels.jit.values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")


def check(case: Case, past: int, softcap: float | None = None, sinks: torch.Tensor | None = None) -> None:
    columns, dim = case.query.shape[-2:]
    softmax = Softmax(dim**-0.5, softcap, sinks)
    keys = case.layer.tail_keys
    seen = torch.ones(columns, past + columns, dtype=torch.bool).tril(past)[None, None]
    right = weights64(case.query, case.keys, seen, softmax).sum(3).mean(2)
    got = choose.column_sums(case.query, keys, past, softmax)
    assert got is not None
    assert error(got, right) < 1e-6


@pytest.mark.parametrize(
    ("past", "columns", "groups", "dim"),
    [(0, 17, 1, 64), (0, 63, 3, 80), (1, 40, 7, 96), (700, 17, 4, 128), (63, 9, 8, 256), (0, 513, 3, 64)],
)
def test_causal_sums(past: int, columns: int, groups: int, dim: int) -> None:
    torch.manual_seed(past + columns)
    check(dense([past + columns], 2, groups, columns, dim), past)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal_sums_of_each_dtype_with_softcap_and_sinks(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    check(dense([90, 90], 2, 4, 50, 64, dtype), 40, softcap=5.0, sinks=torch.randn(2, 4))


def test_every_query_gives_its_column_sums_one_in_all() -> None:
    torch.manual_seed(6)
    case = dense([400], 2, 3, 400, 64)
    sums = choose.column_sums(case.query, case.layer.tail_keys, 0, Softmax(0.125))
    assert sums is not None
    assert torch.allclose(sums.sum(-1), torch.full((1, 2), 400.0), rtol=1e-5)


def test_sums_in_two_calls_are_the_sums_of_one() -> None:
    torch.manual_seed(7)
    case = dense([300], 1, 3, 300, 64)
    keys = case.layer.tail_keys
    whole = choose.column_sums(case.query, keys, 0, Softmax(0.125))
    first = choose.column_sums(case.query[..., :130, :], keys[:, :, :130], 0, Softmax(0.125))
    second = choose.column_sums(case.query[..., 130:, :], keys, 130, Softmax(0.125))
    assert whole is not None and first is not None and second is not None
    second[..., :130] += first
    assert torch.allclose(second, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_votes_of_rows_of_any_length(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    lengths, real, window = [500, 130, 3, 40], [32, 32, 3, 7], 32
    case = dense(lengths, 2, 3, window, 64, dtype)
    back = torch.arange(window - 1, -1, -1)[:, None]
    rows = list(zip(lengths, real, strict=True))
    seen = torch.stack([(torch.arange(500) < length - back) & (back < count) for length, count in rows])[:, None]
    softmax = Softmax(0.125, 30.0, torch.randn(2, 3))
    votes = choose.window_votes(case.query, case.layer.tail_keys, lengths, real, softmax)
    assert votes is not None
    assert error(votes, weights64(case.query, case.keys, seen, softmax).sum(3).mean(2)) < 1e-6


def test_as_the_reference_over_a_store() -> None:
    torch.manual_seed(9)
    store = Store(1)
    store.append(*torch.randn(2, 1, 2, 200, 64), [200])
    query = torch.randn(1, 2, 3, 60, 64)
    seen = torch.ones(60, 200, dtype=torch.bool).tril(140)[None, None]
    right = naive.column_sums(query, store, lambda start, stop: seen[:, :, start:stop], Softmax(0.125))
    got = choose.column_sums(query, store.keys, 140, Softmax(0.125))
    assert got is not None
    assert error(got, right.double()) < 1e-6


def test_a_few_queries_are_left_to_the_reference() -> None:
    case = dense([40], 1, 2, 1, 64)
    assert choose.column_sums(case.query, case.layer.tail_keys, 39, Softmax(0.125)) is None
