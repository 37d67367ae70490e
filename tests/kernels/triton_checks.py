"""What the Triton kernels must give, on any device: natively on a GPU, or on a CPU under TRITON_INTERPRET=1.

Run as a module it makes all checks on the CPU; the variable must be set before Triton is imported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcompress.kernels.attention import triton as attention
from kvcompress.kernels.pack import triton as pack
from kvcompress.kernels.scores import triton as scores
from kvcompress.kernels.softmax import Softmax
from tests.kernels.layers import Case, dense, error, pack_keys, pack_values, packed, ranges, weights64

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def moved(value: Any, device: str) -> Any:
    """The same with all tensors, also those inside tuples, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def decode(device: str, case: Case, share: float | None, softcap: float | None, with_sinks: bool) -> None:
    """Compares decode attention over a packed layer with float64."""
    batch, heads, groups, columns, dim = case.query.shape
    mask = None if share is None else torch.rand(batch, 1, columns, case.keys.shape[2]) < share
    sinks = torch.randn(heads, groups) if with_sinks else None
    query, layer, allowed, extra = (moved(each, device) for each in (case.query, case.layer, mask, sinks))
    got = attention.attend_decode(query, [layer], allowed, Softmax(dim**-0.5, softcap, extra))
    assert got is not None
    seen = case.inside if mask is None else case.inside & mask
    right = weights64(case.query, case.keys, seen, Softmax(dim**-0.5, softcap, sinks)) @ case.values.unsqueeze(2)
    assert got.dtype == case.query.dtype
    assert error(got.cpu(), right) < ROUNDING[case.query.dtype]


def check_decode(device: str) -> None:
    decode(device, packed([(0, 256, 200, 300)], 1, 4, 1, 64, 2), None, None, False)


def check_decode_with_front_mask_softcap_and_sinks(device: str) -> None:
    case = packed([(4, 128, 140, 200), (0, 32, 0, 50), (4, 0, 0, 9)], 2, 3, 2, 96, 4)
    decode(device, case, 0.6, 5.0, True)


def check_decode_with_one_group_of_channels(device: str) -> None:
    decode(device, packed([(0, 96, 5, 130)], 1, 7, 1, 80, 2, group_size=96), 0.5, None, False)


def check_decode_of_16_bits(device: str) -> None:
    decode(device, packed([(0, 96, 50, 130)], 1, 1, 1, 128, 4, dtype=torch.bfloat16), None, None, True)
    decode(device, packed([(0, 96, 50, 130)], 1, 2, 3, 64, 2, dtype=torch.float16), 0.5, None, False)


def check_decode_in_parts(device: str) -> None:
    before = attention.PROGRAMS
    try:
        attention.PROGRAMS = 64
        decode(device, packed([(0, 256, 200, 300), (0, 32, 0, 40)], 1, 2, 1, 64, 2), None, None, True)
    finally:
        attention.PROGRAMS = before


def check_decode_of_ranges_that_follow_each_other(device: str) -> None:
    """Two that grow by row and one in which KV heads differ, with fronts that other queries look at."""
    for share, softcap in ((None, None), (0.6, 5.0)):
        cases = ranges(2, 2, 3, 2, 64, 4)
        mask = None if share is None else torch.rand(2, 2, 2, cases.keys.shape[2]) < share
        query, front, layers, allowed = (
            moved(each, device) for each in (cases.query, cases.front_query, tuple(cases.ranges), mask)
        )
        got = attention.attend_decode(query, layers, allowed, Softmax(0.125, softcap), front)
        assert got is not None
        seen = cases.inside if mask is None else cases.inside & mask
        assert error(got.cpu(), cases.right(seen, Softmax(0.125, softcap))) < ROUNDING[torch.float32]


def numbers(tokens: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(2, 2, tokens + 2, dim) * torch.logspace(-3, 2, dim)
    x[..., 3] = 0.75
    return x.to(dtype)[:, :, 1:-1].to(device)


def check_packing_keys(device: str) -> None:
    for bits, dim, group_size, dtype in ((2, 64, 32, torch.float32), (4, 80, 64, torch.bfloat16)):
        x = numbers(2 * group_size, dim, dtype, device)
        into = moved(pack_keys(torch.zeros(2, 2, 4 * group_size, dim), bits, group_size), device)
        assert pack.quantise_and_pack(x, into, group_size)
        right = pack_keys(x.cpu(), bits, group_size)
        for got, want, unit in zip(into[:3], right[:3], (32, group_size, group_size), strict=True):
            assert torch.equal(got[:, :, group_size // unit : 3 * group_size // unit].cpu(), want)
            assert bool((got[:, :, 3 * group_size // unit :] == 0).all())


def check_packing_values(device: str) -> None:
    for bits, dim, group_size, offset, tokens in ((2, 64, 32, 5, 9), (4, 80, 80, 3, 1), (2, 96, 32, 8, 8)):
        x = numbers(offset + tokens, dim, torch.float32, device)
        right = pack_values(x.cpu(), bits, group_size)
        before = pack_values(x[:, :, :offset].cpu(), bits, group_size)
        words = torch.full_like(right.words, 77)
        words[:, :, : before.words.shape[2]] = before.words
        empty = [torch.zeros_like(part) for part in right[1:3]]
        into = moved(right._replace(words=words, scale=empty[0], minimum=empty[1]), device)
        assert pack.quantise_and_pack(x[:, :, offset:], into, offset)
        assert torch.equal(into[0].cpu(), right.words)
        for got, want in zip(into[1:3], right[1:3], strict=True):
            assert torch.equal(got[:, :, offset:].cpu(), want[:, :, offset:])


def check_column_sums(device: str) -> None:
    for past, columns, groups, dim, softcap in ((0, 70, 2, 64, None), (33, 20, 3, 80, 5.0)):
        case = dense([past + columns], 2, groups, columns, dim)
        sinks = None if softcap is None else torch.randn(2, groups)
        query, keys, extra = (moved(each, device) for each in (case.query, case.layer.tail_keys, sinks))
        got = scores.column_sums(query, keys, past, Softmax(dim**-0.5, softcap, extra))
        assert got is not None
        seen = torch.ones(columns, past + columns, dtype=torch.bool).tril(past)[None, None]
        right = weights64(case.query, case.keys, seen, Softmax(dim**-0.5, softcap, sinks)).sum(3).mean(2)
        assert error(got.cpu(), right) < 2e-6


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}

if __name__ == "__main__":
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        check("cpu")
        print(name, flush=True)
