import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.fingerprint.tensors import TensorDigests, digest_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]


def test_two_blocks_and_a_tail_are_reduced_as_nh_does() -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(-(2**31), 2**31 - 1, (2 * 4096 + 5,), dtype=torch.int32, generator=generator)
    keys = np.frombuffer(hashlib.shake_256(b"kvcompress fingerprint").digest(4 * 4096), "<u4").astype(object)
    words = np.concatenate([tensor.numpy().astype(np.uint32), np.zeros(4091, np.uint32)]).astype(object)
    sums = []
    for block in words.reshape(3, 4096):
        added = [(int(word) + int(key)) % 2**32 for word, key in zip(block, keys, strict=True)]
        signed = [value - 2**32 if value >= 2**31 else value for value in added]
        total = sum(a * b for a, b in zip(signed[:2048], signed[2048:], strict=True)) % 2**64
        sums.append(total.to_bytes(8, "little"))
    expected = hashlib.sha256(b"torch.int32 (8197,) " + b"".join(sums)).digest()
    assert digest_of(tensor) == expected


@given(
    size=st.integers(1, 40_000), place=st.integers(0, 10**9), bit=st.integers(0, 7), dtype=st.sampled_from(DTYPES[:5])
)
def test_one_changed_bit_anywhere_shows(size: int, place: int, bit: int, dtype: torch.dtype) -> None:
    data = torch.arange(size * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    before = digest_of(data.view(dtype))
    data[place % len(data)] ^= 1 << bit
    assert digest_of(data.view(dtype)) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_in_memory_does_not_matter_but_shape_and_dtype_do(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = tensor.T.contiguous().T
    padded = torch.zeros(64, dtype=dtype)
    padded[1:] = tensor.flatten()
    assert digest_of(turned) == digest_of(padded[1:].view(7, 9)) == digest_of(tensor)
    assert digest_of(tensor.view(9, 7)) != digest_of(tensor)
    assert digest_of(tensor.view(torch.uint8)) != digest_of(tensor)


def test_rows_that_change_places_show() -> None:
    tensor = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
    for first, second in [(0, 1), (0, 256), (1024, 2048), (0, 4999)]:
        order = torch.arange(5000)
        order[[first, second]] = order[[second, first]]
        assert digest_of(tensor[order]) != digest_of(tensor)


def test_a_digest_is_kept_until_the_tensor_is_written() -> None:
    digests = TensorDigests()
    tensor = torch.zeros(10)
    before = digests.of([tensor], [None])
    tensor.data.add_(1)  # past the version counter
    assert digests.of([tensor], [None]) == before
    assert digests.of([tensor], ["merged"]) == digests.of([torch.ones(10)], [None])
    tensor.data.add_(1)
    assert digests.of([tensor], ["merged"], fresh=True) == digests.of([torch.full((10,), 2.0)], [None])
    assert digests.uncounted_writes == 1
    tensor.add_(1)
    assert digests.of([tensor], ["merged"]) == digests.of([torch.full((10,), 3.0)], [None])
