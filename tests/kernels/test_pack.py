"""Packing in one pass gives the reference's codes to the bit, and eviction in place what a gather gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels import choose
from kvcompress.kernels.layout import PackedKeys, PackedValues
from kvcompress.kernels.pack import naive
from tests.kernels.layers import pack_keys, pack_values

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from kvcompress.kernels.jit.values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")

SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def numbers(seed: int, tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Channels of very different size, one of them constant, inside a larger tensor."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, tokens + 2, dim, generator=generator) * torch.logspace(-4, 3, dim)
    x[..., 5] = 1.25
    return x.to(dtype)[:, :, 1:-1]


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


@given(
    seed=SEEDS,
    bits=st.sampled_from([2, 4, 8]),
    dim=st.sampled_from([64, 80, 128]),
    group_size=st.sampled_from([32, 64, 96]),
    groups=st.integers(1, 3),
    before=st.integers(0, 2),
    dtype=DTYPES,
)
def test_keys(seed: int, bits: int, dim: int, group_size: int, groups: int, before: int, dtype: torch.dtype) -> None:
    tokens, offset = groups * group_size, before * group_size
    x = numbers(seed, tokens, dim, dtype)
    capacity = offset + tokens + 96
    into = PackedKeys(
        untouched((2, 3, capacity // 32, dim * bits // 16, 32), torch.int16),
        untouched((2, 3, capacity // group_size, dim), torch.float16),
        untouched((2, 3, capacity // group_size, dim), torch.float16),
        bits,
        group_size,
    )
    assert choose.quantise_and_pack(x, into, offset)
    right = pack_keys(x, bits, group_size)
    for got, want, unit in zip(into[:3], right[:3], (32, group_size, group_size), strict=True):
        start, stop = offset // unit, (offset + tokens) // unit
        assert torch.equal(got[:, :, start:stop], want)
        assert bool((got[:, :, :start] == 77).all()) and bool((got[:, :, stop:] == 77).all())


@given(
    seed=SEEDS,
    bits=st.sampled_from([2, 4, 8]),
    dim_and_group=st.sampled_from([(64, 32), (80, 80), (128, 32), (128, 128)]),
    tokens=st.integers(1, 40),
    offset=st.integers(0, 20),
    dtype=DTYPES,
)
def test_values(
    seed: int, bits: int, dim_and_group: tuple[int, int], tokens: int, offset: int, dtype: torch.dtype
) -> None:
    dim, group_size = dim_and_group
    x = numbers(seed, offset + tokens, dim, dtype)
    right = pack_values(x, bits, group_size)
    words = untouched((2, 3, right.words.shape[2] + 1, dim), torch.int16)
    before = pack_values(x[:, :, :offset], bits, group_size)
    words[:, :, : before.words.shape[2]] = before.words
    scales = (2, 3, offset + tokens + 1, dim // group_size)
    into = PackedValues(words, untouched(scales, torch.float16), untouched(scales, torch.float16), bits, group_size)
    assert choose.quantise_and_pack(x[:, :, offset:], into, offset)
    assert torch.equal(words[:, :, :-1], right.words) and bool((words[:, :, -1] == 77).all())
    for got, want in zip(into[1:3], right[1:3], strict=True):
        assert torch.equal(got[:, :, offset:-1], want[:, :, offset:])
        assert bool((got[:, :, :offset] == 77).all()) and bool((got[:, :, -1] == 77).all())


def test_ties_round_to_the_even_code() -> None:
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]).repeat(13)[:64].view(1, 1, 1, 64)
    into = pack_values(torch.zeros(1, 1, 1, 64), 2, 64)
    assert choose.quantise_and_pack(x, into, 0)
    codes = naive.unpack_words(into.words, 2, 2, 1)[0, 0, 0, :5]
    assert codes.tolist() == [0, 0, 2, 2, 3]


def test_what_has_no_kernel_is_left_alone() -> None:
    into = pack_keys(torch.zeros(1, 1, 64, 64), 2, 16)
    before = [tensor.clone() for tensor in into[:3]]
    assert not choose.quantise_and_pack(torch.randn(1, 1, 64, 64), into, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, into[:3], strict=True))


@given(
    seed=SEEDS,
    slots=st.integers(1, 80),
    inside=st.sampled_from([(), (64,), (5,), (16, 32)]),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.bfloat16, torch.int16]),
    per_head=st.booleans(),
    fixed=st.integers(0, 3),
)
def test_evicting_in_place_is_a_gather(
    seed: int, slots: int, inside: tuple[int, ...], dtype: torch.dtype, per_head: bool, fixed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(-999, 999, (2, 3, slots + 2, *inside), generator=generator).to(dtype)
    view = buffer[:, :, 1:-1]
    kept = int(torch.randint(1, slots + 1, (1,), generator=generator))
    first = min(fixed, kept)
    order = torch.rand(2, 3 if per_head else 1, slots, generator=generator)
    order[..., :first] = -1
    index = order.argsort(-1)[..., :kept].sort(-1).values
    every = index.expand(2, 3, kept).reshape(2, 3, kept, *[1] * len(inside)).expand(2, 3, kept, *inside)
    right, ends = view.gather(2, every), buffer[:, :, [0, -1]].clone()
    assert choose.evict_in_place(view, index, first)
    assert torch.equal(view[:, :, :kept], right)
    assert torch.equal(buffer[:, :, [0, -1]], ends)
