"""How packed codes lie in memory: the one layout that every kernel reads and writes.

Words are 16 bits wide and hold `16 // bits` codes along the axis that attention contracts, lowest bits first:

    key words        int16   [B, H, S/32, ceil(D/c), 32]   code i of word w is channel w*c + i of the lane's token
    value words      int16   [B, H, ceil(S/c), D]          code i of word w is token w*c + i of the lane's channel
    key scale, min   fp16    [B, H, S/g, D]                one per channel and group of g tokens
    value scale, min fp16    [B, H, S, D/gv]               one per token and group of gv = min(g, D) channels

with c = 16 // bits codes a word. S here is the capacity; how many tokens of a row are packed is kept beside it.
"""

from typing import NamedTuple

from torch import Tensor

LANES = 32  # tokens in one block of key words
KERNEL_BITS = (2, 4, 8)  # of codes that fill their words, which the fast kernels take


def codes_per_word(bits: int) -> int:
    return 16 // bits


def gapless(tensor: Tensor) -> bool:
    """Whether all that [B, H, S, ...] holds for one row and head lies in one piece."""
    size = 1
    for length, stride in zip(tensor.shape[:1:-1], tensor.stride()[:1:-1], strict=True):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


class PackedKeys(NamedTuple):
    """Key codes of one layer with their scales and minima, laid out as this module says."""

    words: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    group_size: int


class PackedValues(NamedTuple):
    """Value codes of one layer with their scales and minima, laid out as this module says."""

    words: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    group_size: int


class Range(NamedTuple):
    """Slots of a layer as they are attended to. Those of row b are, in this order, without gaps:

    `fronts[b]` tokens in full precision (0 in all rows if `front_keys` is None), the packed ones, and the tail. Keys:
    `key_counts[b]` packed, the rest in `tail_keys`; values: `value_counts[b]` packed, the rest in `tail_values`.
    `lengths[b]` slots in all. `keys` and `values` are None while nothing is packed.

    Where KV heads differ, each head of each row is a line of its own in tensors [1, 1, N, ...] that hold them one after
    the other. `lines`, int64 [6, B, H] on the device, then says in place of the lists, in the order of `TABLES`, how
    much each holds and where its packed tokens and its tail begin; the lists hold the most of any line.
    """

    front_keys: Tensor | None
    front_values: Tensor | None
    keys: PackedKeys | None
    values: PackedValues | None
    tail_keys: Tensor
    tail_values: Tensor
    fronts: list[int]
    key_counts: list[int]
    value_counts: list[int]
    lengths: list[int]
    lines: Tensor | None = None

    @property
    def width(self) -> int:
        """Slots of the longest row or line."""
        return max(self.lengths)

    @property
    def tables(self) -> list[int]:
        """The numbers of every row, one table of `TABLES` after the other."""
        none = [0] * len(self.lengths)
        return [*self.fronts, *self.key_counts, *self.value_counts, *self.lengths, *none, *none]


TABLES = ("front", "packed keys", "packed values", "length", "first packed", "first of the tail")


def dense_range(keys: Tensor, values: Tensor, lengths: list[int]) -> Range:
    """Keys and values [B, H, S, D] in full precision; the first `lengths[b]` slots of row b are in use."""
    none = [0] * len(lengths)
    return Range(None, None, None, None, keys, values, none, none, none, lengths)
