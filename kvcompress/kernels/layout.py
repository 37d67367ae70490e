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


class DenseLayer(NamedTuple):
    """Keys and values [B, H, S, D] as they are attended to; the first `lengths[b]` slots of row b are in use."""

    keys: Tensor
    values: Tensor
    lengths: list[int]


class PackedLayer(NamedTuple):
    """A packed layer as it is attended to. The slots of row b are, in this order, without gaps:

    `fronts[b]` tokens in full precision (0 in all rows if `front_keys` is None), the packed ones, and the tail. Keys:
    `key_counts[b]` packed, the rest in `tail_keys`; values: `value_counts[b]` packed, the rest in `tail_values`.
    `lengths[b]` slots in all. `keys` and `values` are None while nothing is packed.
    """

    front_keys: Tensor | None
    front_values: Tensor | None
    fronts: list[int]
    keys: PackedKeys | None
    key_counts: list[int]
    values: PackedValues | None
    value_counts: list[int]
    tail_keys: Tensor
    tail_values: Tensor
    lengths: list[int]
