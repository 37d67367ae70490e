"""KIVI against worked values: codes, what is packed when, and attention over codes."""

import math

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.budget import LayerShape
from kvcompress.kernels.pack import naive
from tests.methods.one_layer import OneLayer, golden

GOLDEN = golden("kivi")
DIM = 4
PROMPT = GOLDEN["prompt"]
METHOD = kvc.KIVI(bits=GOLDEN["bits"], group_size=GOLDEN["group_size"], residual=GOLDEN["residual"])


def key(tokens: range) -> Tensor:
    t, d = torch.tensor(list(tokens), dtype=torch.float64)[:, None], torch.arange(DIM, dtype=torch.float64)
    return (0.7 * t + 1.3 * d).sin().float()[None, None]


def value(tokens: range) -> Tensor:
    t, d = torch.tensor(list(tokens), dtype=torch.float64)[:, None], torch.arange(DIM, dtype=torch.float64)
    return (0.4 * t - 0.8 * d).cos().float()[None, None]


def golden_prompt(method: kvc.KIVI | kvc.Exact) -> OneLayer:
    layer = OneLayer(method)
    layer.call(torch.zeros(1, 1, PROMPT, DIM), key(range(PROMPT)), value(range(PROMPT)))
    return layer


def test_golden_codes() -> None:
    store = golden_prompt(METHOD).layer.store
    codes = naive.unpack_words(store.open.keys.parts["words"].view, 2, 3, DIM)[0, 0, 0].T  # [tokens, channels]
    assert codes[:8].unflatten(0, (2, 4)).tolist() == GOLDEN["key_codes"]
    codes = naive.unpack_words(store.open.values.parts["words"].view, 2, 2, PROMPT - 8)[0, 0]
    assert codes.tolist() == GOLDEN["value_codes"]
    assert (store.open.keys.counts, store.open.values.counts) == ([8], [2])


def test_golden_attention() -> None:
    query = torch.tensor([1, -0.5, 0.25, 2])[None, None, None]
    new = range(PROMPT, PROMPT + 1)
    for method, expected in ((METHOD, "attention_out"), (kvc.Exact(), "attention_exact")):
        output = golden_prompt(method).call(query, key(new), value(new), scaling=1 / math.sqrt(DIM))
        torch.testing.assert_close(output.flatten(), torch.tensor(GOLDEN[expected]), rtol=0, atol=2e-6)


def test_golden_groups() -> None:
    case = GOLDEN["key_channel_case"]
    for given, expected in (("tokens", "codes"), ("other_tokens", "other_codes")):
        codes, scale, low = naive.quantise(torch.tensor(case[given]), 2)
        assert codes.tolist() == case[expected]
    assert (codes * scale.float() + low.float()).tolist() == case["other_dequantised"]
    groups = GOLDEN["value_token_case"]
    codes, _, _ = naive.quantise(torch.tensor(groups["groups"]), 2)
    assert codes.tolist() == groups["codes"]


def test_a_constant_group_comes_back_as_its_minimum() -> None:
    codes, scale, low = naive.quantise(torch.full((3, 8), 1.5), 4)
    assert not codes.any()
    assert not scale.any()
    assert low.tolist() == [[1.5]] * 3


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("split", GOLDEN["splits_R128"], ids=lambda split: f"{split['T']} tokens")
def test_golden_splits(split: dict[str, int], one_by_one: bool) -> None:
    layer = OneLayer("kivi(residual=128)")
    tokens = torch.randn(1, 1, split["T"], 32, generator=torch.Generator().manual_seed(0))
    first = 90 if one_by_one else split["T"]
    for part in tokens.split([first, *[1] * (split["T"] - first)], 2):
        layer.call(part, part)
    store = layer.layer.store
    assert (store.open.keys.counts, store.open.values.counts) == ([split["keys_packed"]], [split["values_packed"]])
    assert store.open.tail_lengths(store.open.keys) == [split["keys_residual"]]
    assert store.open.tail_lengths(store.open.values) == [split["values_residual"]]


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (2, 64), (4, 32)])
def test_golden_bits_per_element(bits: int, group_size: int) -> None:
    method = kvc.KIVI(bits=bits, group_size=group_size)  # pyright: ignore[reportArgumentType]
    shape = LayerShape(heads=1, key_dim=128, value_dim=128, itemsize=2)
    more = method.stored_bytes(shape, [128 * 40], [128 * 40]) - method.stored_bytes(shape, [128 * 8], [128 * 8])
    assert more * 8 / (128 * 32 * 256) == GOLDEN["bits_per_element"][f"{bits}bit_G{group_size}"]


def test_golden_average_bits_of_4096_tokens() -> None:
    shape = LayerShape(heads=1, key_dim=128, value_dim=128, itemsize=2)
    stored = kvc.KIVI(bits=2).stored_bytes(shape, [4096], [4096])
    assert stored * 8 / (4096 * 256) == GOLDEN["average_bits_T4096_R128_2bit_G32"]


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_take_the_bits_they_say(bits: int) -> None:
    layer = OneLayer(kvc.KIVI(bits=bits))  # pyright: ignore[reportArgumentType]
    tokens = torch.randn(1, 2, 1024, 64, generator=torch.Generator().manual_seed(0))
    layer.call(tokens, tokens)
    memory = layer.cache.memory()
    assert memory["keys"] == 1024 * 2 * 64 * bits // 8
    assert memory["values"] == (1024 - 128) * 2 * 64 * bits // 8
    assert memory["residual"] == 128 * 2 * 64 * 4


def test_a_packed_token_is_never_quantised_again() -> None:
    layer = OneLayer("kivi(bits=2, group_size=8, residual=16)")
    generator = torch.Generator().manual_seed(0)
    held: list[Tensor] = []
    for _ in range(80):
        token = torch.randn(1, 1, 1, 16, generator=generator)
        layer.call(token, token)
        keys, values = layer.layer.store.open.keys, layer.layer.store.open.values
        if keys.counts[0]:
            now = keys.decoded(slice(None), keys.counts[0])
            assert not held or torch.equal(now[:, :, : held[0].shape[2]], held[0])
            held = [now]
    assert (keys.counts, values.counts) == ([80], [64])


def test_a_group_size_that_does_not_divide_the_head_dim_is_refused() -> None:
    layer = OneLayer("kivi(group_size=32, residual=32)")
    with pytest.raises(ValueError, match="32 does not divide the model's head dim 48"):
        layer.call(torch.zeros(1, 1, 4, 48), torch.zeros(1, 1, 4, 48))


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 9},
        {"bits": "2"},
        {"group_size": 0},
        {"group_size": 2.0},
        {"residual": 0},
        {"residual": 100},
        {"group_size": 32, "residual": 16},
    ],
)
def test_wrong_options_name_the_value(options: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:
        kvc.KIVI(**options)  # pyright: ignore[reportArgumentType]
    assert repr(list(options.values())[-1]) in str(error.value)
