"""What kernels are called with: a list of int64, which are numbers, strides and addresses."""

import ctypes
import struct
from collections.abc import Sequence

import torch

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def stored_names(*names: str) -> list[str]:
    """The parameters that `stored` fills for each of these."""
    return [name + part for name in names for part in ("", "_row", "_head", "_third")]


def stored(name: str, tensor: torch.Tensor | None, shared: bool = False) -> dict[str, int]:
    """Address of a tensor [B, H, ...] and its first three strides in bytes; nothing, thus zeros, for None.

    With `shared`, every row and head begins at the same address.
    """
    if tensor is None:
        return {}
    item, strides = tensor.element_size(), tensor.stride()
    return {
        name: tensor.data_ptr(),
        name + "_row": 0 if shared else item * strides[0],
        name + "_head": 0 if shared else item * strides[1],
        name + "_third": item * strides[2],
    }


def float_bits(number: float) -> int:
    """An fp32 number as a parameter."""
    return struct.unpack("i", struct.pack("f", number))[0]


class Call:
    """What a kernel is called with: its parameters, and tables of int64 that some of them are the addresses of."""

    def __init__(self, names: Sequence[str], numbers: dict[str, int], **tables: Sequence[int]) -> None:
        self._names = names
        length = len(names)
        self._block = (ctypes.c_int64 * (length + sum(map(len, tables.values()))))()
        self.address = ctypes.addressof(self._block)
        self._tables: dict[str, int] = {}
        for name, table in tables.items():
            self._tables[name] = length
            numbers[name] = self.address + 8 * length
            self._block[length : length + len(table)] = table
            length += len(table)
        self._block[: len(names)] = [numbers.get(name, 0) for name in names]

    def again(self, **numbers: int) -> None:
        """Changes some parameters for the next kernel; those that are tables begin with this number."""
        for name, number in numbers.items():
            self._block[self._tables.get(name, self._names.index(name))] = number
