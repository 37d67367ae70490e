"""Codes of every width come back as the quantised numbers that they stand for, written in any pieces."""

import pytest
import torch
from torch import Tensor

from kvcompress.formats.affine import Affine
from kvcompress.formats.base import Kind

GROUP, DIM = 8, 16


def rounded(x: Tensor, along: int, bits: int) -> Tensor:
    """Each group of `x` [B, H, T, D] rounded to 2^bits steps between its ends, which are held in fp16."""
    grouped = x.unflatten(along, (-1, GROUP))
    low, high = grouped.amin(along + 1, keepdim=True), grouped.amax(along + 1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    steps = ((grouped - low) / scale).round()
    return (steps * scale.half().float() + low.half().float()).flatten(along, along + 1)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("kind", "pieces"), [("keys", (8, 24, 8)), ("values", (1, 7, 2, 30))])
def test_every_width(kind: Kind, pieces: tuple[int, ...], bits: int) -> None:
    form, total = Affine(bits, GROUP), sum(pieces)
    x = torch.randn(2, 2, total, DIM, generator=torch.Generator().manual_seed(bits))
    held = {
        name: torch.zeros(2, 2, -(-total // part.tokens), *part.shape, dtype=part.dtype)
        for name, part in form.parts(kind, DIM).items()
    }
    assert sum(each[0, 0].nbytes for each in held.values()) == form.nbytes(kind, DIM, total)
    start = 0
    for count in pieces:
        form.write(kind, held, start, x[:, :, start : start + count], None)
        start += count
    found = form.read(kind, held, 0, total, DIM)
    torch.testing.assert_close(found, rounded(x, 2 if kind == "keys" else 3, bits), rtol=0, atol=1e-5)
    query = torch.randn(2, 2, 3, DIM)
    if kind == "keys":
        torch.testing.assert_close(form.logits(query, held, total), query @ found.transpose(-1, -2))
