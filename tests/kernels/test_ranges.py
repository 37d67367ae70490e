"""Attention over ranges of slots, each alone and merged, equals one softmax over all of them."""

import pytest
import torch

from kvcompress.kernels import choose
from kvcompress.kernels.softmax import Softmax
from tests.kernels.layers import error, ranges

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from kvcompress.kernels.jit.values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("groups", "columns"), [(1, 1), (3, 1), (4, 5)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_as_one_softmax_over_all(dtype: torch.dtype, groups: int, columns: int, bits: int) -> None:
    torch.manual_seed(bits + groups)
    cases = ranges(2, 3, groups, columns, 64, bits, dtype)
    mask = torch.rand(2, 3, columns, cases.keys.shape[2]) < 0.6
    for allowed, softmax in ((None, Softmax(0.125)), (mask, Softmax(0.125, softcap=8.0))):
        seen = cases.inside if allowed is None else cases.inside & allowed
        right = cases.right(seen, softmax)
        got = choose.attend_decode(cases.query, cases.ranges, allowed, softmax, cases.front_query)
        both = choose.attend_decode_with_sums(cases.query, cases.ranges, allowed, softmax, cases.front_query)
        assert got is not None and both is not None
        assert error(got, right) < ROUNDING[dtype]
        assert torch.equal(both[0], got)


def test_column_sums_of_every_range() -> None:
    torch.manual_seed(0)
    cases = ranges(2, 3, 2, 4, 64, 2)
    both = choose.attend_decode_with_sums(cases.query, cases.ranges, None, Softmax(0.125), cases.front_query)
    assert both is not None
    logits = [torch.einsum("bhgtd,bhsd->bhgts", q.double(), cases.keys) for q in (cases.query, cases.front_query)]
    chosen = torch.where(cases.in_front[:, :, None], logits[1], logits[0]) * 0.125
    weights = torch.softmax(chosen.masked_fill(~cases.inside[:, :, None], -torch.inf), -1)
    torch.testing.assert_close(both[1].double(), weights.sum(3).mean(2), rtol=1e-5, atol=1e-6)


def test_the_order_of_ranges_does_not_matter() -> None:
    torch.manual_seed(1)
    cases = ranges(2, 2, 2, 1, 64, 4)
    right = choose.attend_decode(cases.query, cases.ranges, None, Softmax(0.125), cases.front_query)
    got = choose.attend_decode(cases.query, cases.ranges[::-1], None, Softmax(0.125), cases.front_query)
    assert right is not None and got is not None
    torch.testing.assert_close(got, right, rtol=0, atol=1e-6)
