"""A stored prefix that is in use."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvcompress.prefix.block_kv import BlockKV, ColumnSums, LayerKV, joined
from kvcompress.prefix.compressed import CompressedPrefix
from kvcompress.prefix.radix import Pinned

if TYPE_CHECKING:
    from kvcompress.prefix.prefix_cache import PrefixCache


class Match:
    """A stored prefix in use: `tokens` of it, in `blocks`, with the column sums at its end where they are stored."""

    def __init__(self, owner: PrefixCache, pinned: Pinned[BlockKV | CompressedPrefix]) -> None:
        self._owner, self._pinned = owner, pinned
        self.blocks = [entry.payload for entry in pinned.entries if isinstance(entry.payload, BlockKV)]
        attached = pinned.entries[-1].attached if pinned.entries else None
        self.sums = attached if isinstance(attached, ColumnSums) else None

    @property
    def tokens(self) -> int:
        return len(self.blocks) * self._owner.block

    def kv(self, layer: int) -> LayerKV:
        """Keys and values [H, tokens, D] of one layer, copied. Raises ValueError if nothing matched."""
        if not self.blocks:
            raise ValueError("nothing matched, so there is no KV; look at `tokens` first")
        return joined(self.blocks, layer)

    def release(self) -> None:
        """Lets go of the blocks; a second time does nothing."""
        self.blocks, self.sums = [], None
        self._owner.release(self._pinned)

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
