"""Random layers as the kernels read them, with the keys and values that they stand for, and float64 attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompress.kernels.layout import PackedKeys, PackedValues, Range, dense_range
from kvcompress.kernels.pack import naive
from kvcompress.kernels.softmax import Softmax
from kvcompress.methods.kivi import KIVI
from kvcompress.stores.ragged import Ragged


def pack_keys(keys: Tensor, bits: int, group_size: int) -> PackedKeys:
    """Keys [B, H, S, D], S a multiple of the group size, packed by the naive."""
    codes, scale, minimum = naive.quantise(keys.unflatten(2, (-1, group_size)).transpose(-1, -2), bits)
    words = naive.key_words(codes.transpose(-1, -2).flatten(2, 3), bits).contiguous()
    return PackedKeys(words, scale.squeeze(-1).contiguous(), minimum.squeeze(-1).contiguous(), bits, group_size)


def pack_values(values: Tensor, bits: int, group_size: int) -> PackedValues:
    """Values [B, H, S, D] packed by the naive."""
    codes, scale, minimum = naive.quantise(values.unflatten(-1, (-1, group_size)), bits)
    words = naive.pack_words(codes.flatten(-2), bits, 2).contiguous()
    return PackedValues(words, scale.squeeze(-1).contiguous(), minimum.squeeze(-1).contiguous(), bits, group_size)


@dataclass
class Case:
    """A layer, queries for it, and what the layer stands for: float64 keys and values [B, H, S, D]."""

    query: Tensor  # [B, H, G, T, D]
    layer: Range
    keys: Tensor
    values: Tensor

    @property
    def inside(self) -> Tensor:
        """Which slots are used: bool [B, 1, 1, S]."""
        lengths = torch.tensor(self.layer.lengths)
        return (torch.arange(self.keys.shape[2]) < lengths[:, None])[:, None, None]


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape) + offset).to(dtype)


def dense(
    lengths: list[int], heads: int, groups: int, columns: int, dim: int, dtype: torch.dtype = torch.float32
) -> Case:
    """Rows of the given lengths inside a larger buffer, as a store holds them."""
    shape = len(lengths), heads, max(lengths) + 5, dim
    keys, values = (random_rows(shape, dtype, offset)[:, :, 3 : 3 + max(lengths)] for offset in (0.0, 1.0))
    query = random_rows((len(lengths), heads, groups, columns, dim), dtype)
    return Case(query, dense_range(keys, values, lengths), keys.double(), values.double())


def packed(
    counts: list[tuple[int, int, int, int]],  # for each row: front, packed keys, packed values, all slots
    heads: int,
    groups: int,
    columns: int,
    dim: int,
    bits: int,
    group_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Rows of a packed layer; what lies behind a row's own end in any tensor is there, and means nothing."""
    fronts, key_counts, value_counts, lengths = (list(each) for each in zip(*counts, strict=True))
    batch, slots = len(counts), max(lengths)

    def rows(length: int, kind: torch.dtype = torch.float32) -> Tensor:
        return random_rows((batch, heads, max(1, length), dim), kind, 0.5)

    packed_keys = pack_keys(rows(max(group_size, *key_counts)), bits, group_size)
    packed_values = pack_values(rows(max(value_counts) + 3), bits, min(group_size, dim))
    front = [rows(max(fronts), dtype) if any(fronts) else None for _ in range(2)]
    tails = []
    for held in (key_counts, value_counts):
        rest = (length - first - count for length, first, count in zip(lengths, fronts, held, strict=True))
        tails.append(rows(max(rest), dtype))
    whole = [torch.zeros(batch, heads, slots, dim, dtype=torch.float64) for _ in range(2)]
    unpacked = (
        naive.dequantise_keys(packed_keys, 0, packed_keys.scale.shape[2] * group_size, dim),
        naive.dequantise_values(packed_values, 0, packed_values.scale.shape[2]),
    )
    for which, held in enumerate((key_counts, value_counts)):
        for row, (first, count, length) in enumerate(zip(fronts, held, lengths, strict=True)):
            parts = [unpacked[which][row, :, :count], tails[which][row, :, : length - first - count]]
            if front[which] is not None:
                parts.insert(0, front[which][row, :, :first])
            whole[which][row, :, :length] = torch.cat([part.double() for part in parts], 1)
    layer = Range(
        *front,
        packed_keys if any(key_counts) else None,
        packed_values if any(value_counts) else None,
        *tails,
        fronts,
        key_counts,
        value_counts,
        lengths,
    )
    query = random_rows((batch, heads, groups, columns, dim), dtype)
    return Case(query, layer, *whole)


def weights64(
    query: Tensor,
    keys: Tensor,
    seen: Tensor,  # bool, broadcastable to [B, H, T, S]
    softmax: Softmax,
) -> Tensor:
    """Softmax weights [B, H, G, T, S] in float64; a row that sees nothing gives zeros."""
    logits = torch.einsum("bhgtd,bhsd->bhgts", query.double(), keys.double()) * softmax.scaling
    if softmax.softcap is not None:
        logits = torch.tanh(logits / softmax.softcap) * softmax.softcap
    logits = logits.masked_fill(~seen.unsqueeze(-3), -torch.inf)
    if softmax.sinks is not None:
        logits = torch.cat([logits, softmax.sinks.double()[None, :, :, None, None].expand(*logits.shape[:-1], 1)], -1)
    return torch.softmax(logits, -1).nan_to_num(0)[..., : keys.shape[2]]


def error(got: Tensor, right: Tensor) -> float:
    """The distance relative to the norm of what is right."""
    assert got.shape == right.shape
    return float((got.double() - right).norm() / right.norm().clamp(min=1e-12))


@dataclass
class Cases:
    """Ranges that follow each other, and what they stand for; tokens of a front are looked at by `front_query`."""

    query: Tensor  # [B, H, G, T, D]
    front_query: Tensor
    ranges: list[Range]
    keys: Tensor  # float64 [B, H, S, D], as are the values
    values: Tensor
    inside: Tensor  # bool [B, H, 1, S]: which slots hold a token
    in_front: Tensor  # which of them are in a front

    def right(self, seen: Tensor, softmax: Softmax) -> Tensor:
        """Attention in float64, of columns that see `seen` [B, H, T, S]."""
        logits = [torch.einsum("bhgtd,bhsd->bhgts", q.double(), self.keys) for q in (self.query, self.front_query)]
        both = torch.where(self.in_front[:, :, None], logits[1], logits[0]) * softmax.scaling
        if softmax.softcap is not None:
            both = torch.tanh(both / softmax.softcap) * softmax.softcap
        weights = torch.softmax(both.masked_fill(~seen[:, :, None], -torch.inf), -1).nan_to_num(0)
        return weights @ self.values[:, :, None]


def ranges(
    batch: int, heads: int, groups: int, columns: int, dim: int, bits: int, dtype: torch.dtype = torch.float32
) -> Cases:
    """A range in which heads differ (0 to 200 tokens each, some packed), a packed one with a front, and a dense one."""
    counts = torch.randint(0, 200, (batch, heads))
    counts[0, 0] = 0
    whole = [random_rows((batch, heads, 200, dim), dtype, 0.5) for _ in range(2)]
    ragged = Ragged.of(*whole, torch.arange(200) < counts[..., None], KIVI(bits, 32, 32))
    ragged.pack(32)
    own = ragged.range()
    assert own is not None
    rows = [(4, 64, 40, 80), (4, 32, 66, 75)][:batch]
    cases = [
        packed(rows, heads, groups, columns, dim, bits, dtype=dtype),
        dense([30, 3][:batch], heads, groups, columns, dim, dtype),
    ]
    keys = torch.cat([ragged.decoded(0).double(), *(case.keys for case in cases)], 2)
    values = torch.cat([ragged.decoded(1).double(), *(case.values for case in cases)], 2)
    inside = torch.cat(
        [
            (torch.arange(ragged.length) < counts[..., None])[:, :, None],
            *(case.inside.expand(-1, heads, -1, -1) for case in cases),
        ],
        3,
    )
    slot = torch.arange(keys.shape[2]) - ragged.length
    in_front = ((slot >= 0) & (slot < 4)).expand_as(inside)
    queries = [random_rows((batch, heads, groups, columns, dim), dtype) for _ in range(2)]
    return Cases(queries[0], queries[1], [own, *(case.layer for case in cases)], keys, values, inside, in_front)
