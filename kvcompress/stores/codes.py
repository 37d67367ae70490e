"""Packed keys or values of one layer that grow at the end of each row."""

import torch
from torch import Tensor

from kvcompress.kernels import choose
from kvcompress.kernels.layout import LANES, PackedKeys, PackedValues, codes_per_word
from kvcompress.kernels.pack import naive
from kvcompress.stores.growing import Growing

Rows = slice
PACKED_SPARE = 32  # packed tokens that there may be room for; as many may lie unused in the residual


def runs_of_rows(*per_row: list[int]) -> list[tuple[Rows, tuple[int, ...]]]:
    """The whole batch as one slice where all rows agree on every number given, else each row on its own."""
    numbers = list(zip(*per_row, strict=True))
    if len(set(numbers)) == 1:
        return [(slice(0, len(numbers)), numbers[0])]
    return [(slice(row, row + 1), row_numbers) for row, row_numbers in enumerate(numbers)]


class Codes:
    """Words, scales and minima in the layout of `kernels/layout.py`; `counts[b]` tokens of row b are packed.

    Keys are quantised per channel in groups of tokens, values per token in groups of channels (KIVI, section 3.1).
    """

    def __init__(self, rows: int, kind: str, bits: int, group_size: int) -> None:
        self.kind, self.bits, self.group_size = kind, bits, group_size
        self.counts = [0] * rows
        self.parts: dict[str, Growing] = {}
        self.floor = PACKED_SPARE

    @property
    def packed(self) -> PackedKeys | PackedValues | None:
        """All that is packed; None while nothing is."""
        if not self.parts:
            return None
        layout = PackedKeys if self.kind == "keys" else PackedValues
        parts = self.parts
        return layout(parts["words"].view, parts["scale"].view, parts["minimum"].view, self.bits, self.group_size)

    def rows(self, rows: Rows) -> PackedKeys | PackedValues:
        """The same for some rows of the batch, once something is packed."""
        whole = self.packed
        assert whole is not None
        if rows.stop - rows.start == len(self.counts):
            return whole
        return whole._replace(words=whole.words[rows], scale=whole.scale[rows], minimum=whole.minimum[rows])

    def dequantised(self, rows: Rows, count: int, head_dim: int) -> Tensor:
        """The first `count` packed tokens of some rows as fp32 [B, H, count, D]."""
        codes = self.rows(rows)
        if isinstance(codes, PackedKeys):
            return naive.dequantise_keys(codes, 0, count, head_dim)
        return naive.dequantise_values(codes, 0, count)

    def append(self, x: Tensor, counts: list[int], alive: Tensor | None) -> None:
        """Quantises the first `counts[b]` tokens of `x` [B, H, T, D]; those not `alive` [B, H, T] are holes."""
        if not any(counts):
            return
        if not self.parts:
            self._start(x)
        for rows, (offset, count) in runs_of_rows(self.counts, counts):
            if count:
                present = None if alive is None else alive[rows, :, :count, None].expand(-1, -1, -1, x.shape[-1])
                self._write(rows, offset, x[rows, :, :count], present)
        self.counts = [offset + count for offset, count in zip(self.counts, counts, strict=True)]

    def _start(self, x: Tensor) -> None:
        batch, heads, _, dim = x.shape
        per_word = codes_per_word(self.bits)
        groups = 1 if self.kind == "keys" else dim // self.group_size
        word_shape = (-(-dim // per_word), LANES) if self.kind == "keys" else (dim,)
        scale_shape = (dim,) if self.kind == "keys" else (groups,)
        floors = {name: -(-self.floor // tokens) for name, tokens in self.tokens_per_entry.items()}
        words = x.new_zeros(batch, heads, 0, *word_shape, dtype=torch.int16)
        scales = x.new_zeros(batch, heads, 0, *scale_shape, dtype=torch.float16)
        self.parts = {
            "words": Growing(words, floors["words"]),
            "scale": Growing(scales, floors["scale"]),
            "minimum": Growing(scales.clone(), floors["minimum"]),
        }

    @property
    def tokens_per_entry(self) -> dict[str, int]:
        """How many tokens one entry of each part stands for."""
        per_word = LANES if self.kind == "keys" else codes_per_word(self.bits)
        per_scale = self.group_size if self.kind == "keys" else 1
        return {"words": per_word, "scale": per_scale, "minimum": per_scale}

    def _write(self, rows: Rows, offset: int, x: Tensor, alive: Tensor | None) -> None:
        stop = offset + x.shape[2]
        per_scale = self.tokens_per_entry["scale"]
        first, last = offset // per_scale, stop // per_scale
        self._reserve(-(-stop // self.tokens_per_entry["words"]), last)
        # Reserving made the parts writable, so a kernel may write into the views that it is given.
        if alive is None and choose.quantise_and_pack(x, self.rows(rows), offset):
            return
        along = 2 if self.kind == "keys" else 3
        grouped = self._grouped(x, along)
        codes, scale, minimum = naive.quantise(
            grouped, self.bits, None if alive is None else self._grouped(alive, along)
        )
        codes = codes.movedim(-1, along + 1).flatten(along, along + 1)
        (self._write_key_words if self.kind == "keys" else self._write_value_words)(rows, offset, codes)
        self.parts["scale"].writable()[rows, :, first:last] = scale.squeeze(-1)
        self.parts["minimum"].writable()[rows, :, first:last] = minimum.squeeze(-1)

    def _grouped(self, x: Tensor, along: int) -> Tensor:
        """`x` [B, H, T, D] with each group of dimension `along` as the last dimension."""
        return x.unflatten(along, (-1, self.group_size)).movedim(along + 1, -1)

    def _reserve(self, words: int, scales: int) -> None:
        self.parts["words"].reserve(words)
        self.parts["scale"].reserve(scales)
        self.parts["minimum"].reserve(scales)

    def _write_key_words(self, rows: Rows, offset: int, codes: Tensor) -> None:
        words = self.parts["words"].writable()[rows]
        count = codes.shape[2]
        if offset % LANES == 0 and count % LANES == 0:
            words[:, :, offset // LANES : (offset + count) // LANES] = naive.key_words(codes, self.bits)
            return
        token = torch.arange(offset, offset + count, device=codes.device)
        packed = naive.pack_words(codes, self.bits, -1)
        words[:, :, token // LANES, :, token % LANES] = packed.permute(2, 0, 1, 3)

    def _write_value_words(self, rows: Rows, offset: int, codes: Tensor) -> None:
        words = self.parts["words"].writable()[rows]
        per_word = codes_per_word(self.bits)
        word, lead = offset // per_word, offset % per_word
        if lead:
            before = naive.unpack_words(words[:, :, word : word + 1], self.bits, 2, lead)
            codes = torch.cat([before, codes], 2)
        packed = naive.pack_words(codes, self.bits, 2)
        words[:, :, word : word + packed.shape[2]] = packed

    def keep_units(self, index: Tensor, unit: int, counts: list[int]) -> None:
        """Keeps the units `index` [B, H, K] of `unit` tokens each, `counts[b]` tokens in all.

        Whole words and groups move, no code changes.
        """
        for name, part in self.parts.items():
            tokens = self.tokens_per_entry[name]
            entries = unit // tokens
            expanded = (index[..., None] * entries + torch.arange(entries, device=index.device)).flatten(-2)
            left = -(-max(counts) // tokens)
            part.gather(expanded[:, :, :left].clamp(max=part.used - 1))
        self.counts = counts

    def nbytes(self, names: tuple[str, ...]) -> tuple[int, int]:
        """Bytes in use and spare of the named parts."""
        parts = [self.parts[name] for name in names if name in self.parts]
        used = sum(part.bytes_per_slot * part.used for part in parts)
        return used, sum(part.buffer.untyped_storage().nbytes() for part in parts) - used

    def fork(self, copies: int) -> "Codes":
        other = Codes(0, self.kind, self.bits, self.group_size)
        other.counts = [count for count in self.counts for _ in range(copies)]
        other.parts = {name: part.fork(copies) for name, part in self.parts.items()}
        other.floor = self.floor
        return other
