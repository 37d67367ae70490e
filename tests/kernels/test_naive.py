"""The layout's round trips, and how far a dequantised number may be from what was quantised."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels.pack import naive
from tests.kernels.layers import pack_keys, pack_values

SEEDS = st.integers(0, 2**31)
BITS = st.sampled_from([2, 4])


@given(seed=SEEDS, bits=BITS, count=st.integers(1, 40), dim=st.sampled_from([0, 1, 2, -1]))
def test_words_give_their_codes_back(seed: int, bits: int, count: int, dim: int) -> None:
    shape = [3, 2, 5]
    shape[dim] = count
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = naive.pack_words(codes, bits, dim)
    assert words.shape[dim] == -(-count * bits // 16)
    assert torch.equal(naive.unpack_words(words, bits, dim, count), codes)


@given(seed=SEEDS, bits=BITS, dim=st.sampled_from([16, 80, 128]), blocks=st.integers(1, 3))
def test_key_words_hold_channel_after_channel_of_each_token(seed: int, bits: int, dim: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (1, 2, 32 * blocks, dim), generator=generator, dtype=torch.uint8)
    words = naive.key_words(codes, bits)
    per_word = 16 // bits
    token, channel = seed % (32 * blocks), seed % dim
    word = int(words[0, 1, token // 32, channel // per_word, token % 32]) & 0xFFFF
    assert word >> (bits * (channel % per_word)) & (2**bits - 1) == int(codes[0, 1, token, channel])


@given(seed=SEEDS, bits=BITS, spread=st.sampled_from([1e-3, 1.0, 50.0]), offset=st.sampled_from([0.0, -7.0]))
def test_dequantised_numbers_are_within_half_a_step(seed: int, bits: int, spread: float, offset: float) -> None:
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) * spread + offset
    keys, values = pack_keys(x, bits, 32), pack_values(x, bits, 32)
    of_keys = (naive.dequantise_keys(keys, 0, 64, 64) - x).abs()
    of_values = (naive.dequantise_values(values, 0, 64) - x).abs()
    # Beside half a step, scale and minimum are off by their rounding to fp16: 2^-11 of what they are, at most.
    lows = (keys.minimum.float().repeat_interleave(32, 2), values.minimum.float().repeat_interleave(32, 3))
    steps = (keys.scale.float().repeat_interleave(32, 2), values.scale.float().repeat_interleave(32, 3))
    for off, low, step in zip((of_keys, of_values), lows, steps, strict=True):
        assert bool((off <= step * (0.5 + (2**bits - 1) * 2**-11) + low.abs() * 2**-11 + 1e-6).all())
