"""The KV of one block of tokens in all layers: cut out of an exact cache, and put back into an empty one.

B rows, H KV heads, T tokens, D head dim of the keys and of the values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompress.cache import CompressedCache

LayerKV = tuple[Tensor, Tensor]
"""Keys [H, T, Dk], rotary applied, and values [H, T, Dv] of one layer and row."""


@dataclass(frozen=True)
class Kind:
    """What layers have in common whose KV lies in one tensor."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Source:
    """One layer's KV of one row to cut blocks from; its first token is token `start` of the prompt."""

    keys: Tensor
    values: Tensor
    start: int = 0

    def cut(self, start: int, stop: int) -> Tensor:
        """A copy of tokens [start, stop): [H, T, D]."""
        part = slice(start - self.start, stop - self.start)
        return torch.cat([self.keys[:, part], self.values[:, part]], -1)


class Layout:
    """Which layers of a model share a tensor, by what they have in common."""

    def __init__(self, cache: CompressedCache, block: int) -> None:
        self.block = block
        self.groups: dict[Kind, list[int]] = {}
        for layer in cache.layers:
            keys, values = (column.buffer for column in layer.store.filled)
            kind = Kind(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
            self.groups.setdefault(kind, []).append(layer.index)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's KV in all layers."""
        return sum(
            len(layers) * kind.heads * self.block * (kind.key_dim + kind.value_dim) * kind.dtype.itemsize
            for kind, layers in self.groups.items()
        )

    def cut(self, sources: Sequence[Source], block: int) -> BlockKV:
        """Block `block` of a prompt, counted from 0, out of every layer's source."""
        start, stop = block * self.block, (block + 1) * self.block
        stacks = [torch.stack([sources[index].cut(start, stop) for index in each]) for each in self.groups.values()]
        return BlockKV(self, tuple(stacks))


@dataclass(frozen=True)
class BlockKV:
    """One block's KV, in memory of its own: a tensor [layers, H, block, D] for each group of the layout."""

    layout: Layout
    stacks: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.untyped_storage().nbytes() for stack in self.stacks)


@dataclass(frozen=True)
class ColumnSums:
    """The sum of every key's softmax column over the queries of a prefix: {layer: fp32 [H, T]}, as H2O needs it."""

    layers: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(sums.untyped_storage().nbytes() for sums in self.layers.values())


def joined(blocks: Sequence[BlockKV], layer: int) -> LayerKV:
    """One layer's KV of consecutive blocks, at least one."""
    for number, (kind, indices) in enumerate(blocks[0].layout.groups.items()):
        if layer in indices:
            row = indices.index(layer)
            both = torch.cat([block.stacks[number][row] for block in blocks], 1)
            return both[..., : kind.key_dim], both[..., kind.key_dim :]
    raise ValueError(f"layer {layer} is not among the {sum(map(len, blocks[0].layout.groups.values()))} stored ones")


def fill(
    cache: CompressedCache, rows: Sequence[Sequence[BlockKV]], sums: Sequence[ColumnSums | None], ids: Tensor
) -> None:
    """Makes stored blocks the beginning of the prompts that `cache` expects, as if their tokens had been fed.

    `rows`: the blocks of every row, as many as are stored of it; `sums`: their column sums, where the cache gathers
    scores; `ids` [B, T]: their tokens, at the end of each row.
    """
    counts = [len(blocks) * blocks[0].layout.block if blocks else 0 for blocks in rows]
    cache.begin_call(max(counts), counts, ids)
    for layer in cache.layers:
        layer.update(*_padded([joined(blocks, layer.index) if blocks else None for blocks in rows], max(counts)))
        if layer.store.scores is not None:
            scores = layer.store.scores.writable()
            for row, (count, each) in enumerate(zip(counts, sums, strict=True)):
                if each is not None:
                    scores[row, :, :count] = each.layers[layer.index]
        layer.compress()
    cache.end_call()


def _padded(rows: Sequence[LayerKV | None], columns: int) -> list[Tensor]:
    """Keys and values [B, H, T, D] with what there is of each row at its end."""
    like = next(row for row in rows if row is not None)
    both = [kv.new_zeros(len(rows), kv.shape[0], columns, kv.shape[2]) for kv in like]
    for place, row in enumerate(rows):
        for padded, kv in zip(both, row or (), strict=False):
            padded[place, :, columns - kv.shape[1] :] = kv
    return both
