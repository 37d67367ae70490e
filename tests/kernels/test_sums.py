"""Column sums and window votes of the fast kernels against float64."""

import pytest
import torch

from kvcompress import kernels
from kvcompress.kernels import reference
from kvcompress.stores.dense import DenseStore
from tests.kernels.layers import Case, dense, error, weights64

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from kvcompress.kernels import cpu_scores
from kvcompress.kernels.cpu_values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")


@pytest.fixture(autouse=True)
def one_pass_in_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that makes output and sums is tested also where torch's attention would be the faster half."""
    monkeypatch.setattr(cpu_scores, "MATRIX_UNITS", False)


def check(case: Case, past: int, softcap: float | None = None, sinks: torch.Tensor | None = None) -> None:
    columns, dim = case.query.shape[-2:]
    options = {"scaling": dim**-0.5, "softcap": softcap, "sinks": sinks}
    keys, values = case.layer[:2]
    seen = torch.ones(columns, past + columns, dtype=torch.bool).tril(past)[None, None]
    weights = weights64(case.query, case.keys, seen, **options)
    right = weights.sum(3).mean(2)
    both = kernels.attend_with_sums(case.query, keys, values, past, **options)
    assert both is not None
    assert error(both[1], right) < 1e-6
    rounding = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
    assert error(both[0], weights @ case.values.unsqueeze(2)) < rounding[case.query.dtype]
    alone = kernels.column_sums(case.query, keys, past, **options)
    assert alone is not None
    assert torch.equal(alone, both[1])


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
    sums = kernels.column_sums(case.query, case.layer.keys, 0, scaling=0.125)
    assert sums is not None
    assert torch.allclose(sums.sum(-1), torch.full((1, 2), 400.0), rtol=1e-5)


def test_sums_in_two_calls_are_the_sums_of_one() -> None:
    torch.manual_seed(7)
    case = dense([300], 1, 3, 300, 64)
    keys = case.layer.keys
    whole = kernels.column_sums(case.query, keys, 0, scaling=0.125)
    first = kernels.column_sums(case.query[..., :130, :], keys[:, :, :130], 0, scaling=0.125)
    second = kernels.column_sums(case.query[..., 130:, :], keys, 130, scaling=0.125)
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
    options = {"scaling": 0.125, "softcap": 30.0, "sinks": torch.randn(2, 3)}
    votes = kernels.window_votes(case.query, case.layer.keys, lengths, real, **options)
    assert votes is not None
    assert error(votes, weights64(case.query, case.keys, seen, **options).sum(3).mean(2)) < 1e-6


def test_as_the_reference_over_a_store() -> None:
    torch.manual_seed(9)
    store = DenseStore(1)
    store.append(*torch.randn(2, 1, 2, 200, 64), [200])
    query = torch.randn(1, 2, 3, 60, 64)
    seen = torch.ones(60, 200, dtype=torch.bool).tril(140)[None, None]
    right = reference.column_sums(query, store, lambda start, stop: seen[:, :, start:stop], scaling=0.125)
    got = kernels.column_sums(query, store.keys, 140, scaling=0.125)
    assert got is not None
    assert error(got, right.double()) < 1e-6


def test_a_few_queries_are_left_to_the_reference() -> None:
    case = dense([40], 1, 2, 1, 64)
    assert kernels.column_sums(case.query, case.layer.keys, 39, scaling=0.125) is None
