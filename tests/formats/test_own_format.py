"""A format and a method that packs into it, defined as a user would, through all that a built-in one goes through."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.formats.base import Format, Kind, Part
from kvcompress.methods import Packing
from kvcompress.methods.base import registry
from kvcompress.prefix.sizes import MethodSize, kv_size
from tests.methods.one_layer import OneLayer
from tests.reachable import reachable_bytes
from tests.tiny import tiny_llama

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
HEADS, DIM, LAYERS, ITEM = 2, 16, 2, 4
IDS = torch.randint(3, 256, (2, 60), generator=torch.Generator().manual_seed(3))
LATER = torch.randint(3, 256, (1, 9), generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True)
class Signs(Format):
    """The sign of every number, eight to a byte, and one scale a token: the mean of what they stand for."""

    def parts(self, kind: Kind, dim: int) -> dict[str, Part]:
        return {"signs": Part((dim // 8,), torch.uint8), "size": Part((), torch.float16, is_scale=True)}

    def write(self, kind: Kind, into: Mapping[str, Tensor], offset: int, x: Tensor, alive: Tensor | None) -> None:
        place = slice(offset, offset + x.shape[2])
        bits = (x > 0).unflatten(-1, (-1, 8)).int() << torch.arange(8)
        into["signs"][:, :, place] = bits.sum(-1).to(torch.uint8)
        into["size"][:, :, place] = x.float().abs().mean(-1).half()

    def read(self, kind: Kind, held: Mapping[str, Tensor], start: int, stop: int, dim: int) -> Tensor:
        bits = (held["signs"][:, :, start:stop, :, None].int() >> torch.arange(8)) & 1
        return (bits.flatten(-2) * 2 - 1) * held["size"][:, :, start:stop, None].float()


@dataclass(frozen=True)
class OneBit(Packing):
    """Signs of all but the newest tokens."""

    residual: int = 4

    name: ClassVar[str] = "one_bit"

    def format(self, kind: Kind) -> Signs:
        return Signs()

    def due(self, kind: Kind, waiting: int) -> int:
        return max(0, waiting - self.residual)


del registry["one_bit"]


@pytest.fixture(autouse=True, scope="module")
def known_here_alone() -> Iterator[None]:
    registry["one_bit"] = OneBit
    yield
    del registry["one_bit"]


def as_signs(x: Tensor) -> Tensor:
    """What the format makes of [..., D], by its definition."""
    return torch.where(x > 0, 1.0, -1.0) * x.abs().mean(-1, keepdim=True).half().float()


def bytes_of(tokens: int, rows: int = 1, residual: int = 4) -> int:
    packed = max(0, tokens - residual)
    return rows * LAYERS * HEADS * 2 * (packed * (DIM // 8 + 2) + (tokens - packed) * DIM * ITEM)


def test_attention_is_that_over_what_the_signs_stand_for() -> None:
    generator = torch.Generator().manual_seed(1)
    layer = OneLayer(OneBit())
    keys, values, query = torch.randn(3, 1, 1, 30, DIM, generator=generator)
    layer.call(query, keys, values)
    new = torch.randn(3, 1, 1, 1, DIM, generator=generator)
    output = layer.call(*new, scaling=0.3)
    held = [
        torch.cat([as_signs(each[:, :, :26]), each[:, :, 26:], own], 2)
        for each, own in ((keys, new[1]), (values, new[2]))
    ]
    weights = torch.softmax((new[0] @ held[0].transpose(-1, -2)).double() * 0.3, -1)
    torch.testing.assert_close(output, (weights @ held[1].double()).float().transpose(1, 2), rtol=0, atol=1e-6)
    assert layer.cache.memory()["keys"] == 27 * DIM // 8  # the new token pushed one more out of the residual


@pytest.mark.parametrize("method", ["one_bit", "snapkv(budget=20, window=4) | one_bit(residual=3)"])
def test_text_form_and_bytes(method: str) -> None:
    parsed = kvc.parse(method)
    assert kvc.parse(str(parsed)) == parsed
    with kvc.wrap(tiny_llama(), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(IDS[:1], cache=cache)
        kept = 60 if method == "one_bit" else 20
        positions = 0 if method == "one_bit" else LAYERS * HEADS * kept * 4
        assert cache.nbytes - cache.memory()["spare"] == bytes_of(kept, residual=parsed.packing.residual) + positions
        assert cache.nbytes == reachable_bytes(cache, tiny_llama()) == sum(cache.memory().values())
        size = MethodSize(kv_size(tiny_llama().config, torch.float32), method)
        assert size.bytes_at(60) == cache.nbytes - cache.memory()["spare"]


def test_evicting_first_chooses_as_alone() -> None:
    kept = {}
    for method in ("h2o(heavy=8, recent=8)", "h2o(heavy=8, recent=8) | one_bit"):
        with kvc.wrap(tiny_llama(), method) as wrapped:
            cache = wrapped.new_cache()
            wrapped.prefill(IDS[:1], cache=cache)
            kept[method] = cache.kept(0)
    assert torch.equal(*kept.values())


@pytest.mark.parametrize(
    "method", ["one_bit", "h2o(heavy=8, recent=8) | one_bit", "streaming_llm(sinks=2, window=20) | one_bit"]
)
def test_padded_rows_turns_forks_and_files(method: str, tmp_path: Path) -> None:
    """Each gives what one row alone gives that is never forked or saved."""
    model, padding = tiny_llama(), [0, 23]
    mask = torch.ones_like(IDS)
    mask[1, :23] = 0
    with kvc.wrap(model, method) as wrapped:
        both = wrapped.generate(IDS, attention_mask=mask, **GREEDY)
        for row, before in enumerate(padding):
            cache = wrapped.new_cache()
            alone = wrapped.generate(IDS[row : row + 1, before:], cache=cache, **GREEDY)
            assert torch.equal(alone[0, -8:], both[row, -8:])
            fork, path = cache.fork(), tmp_path / f"{row}"
            cache.save(path)
            loaded = kvc.load_cache(path, model)
            expected = wrapped.generate(LATER, cache=cache, **GREEDY)
            for other in (fork, loaded):
                again = wrapped.generate(LATER, cache=other, **GREEDY)
                assert torch.equal(again, expected)


def test_a_config_names_it(tmp_path: Path) -> None:
    records = kvc.evaluate(tiny_llama(), IDS[:1], methods=["one_bit(residual=8)"], prefix=40, scored=10)
    (record,) = [record for record in records if record.method == "one_bit(residual=8)"]
    assert record.kv_bytes == bytes_of(40, residual=8)
    assert record.error is None
