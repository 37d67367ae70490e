"""Turns kernels into machine code, once; Numba compiles them and keeps the code on disk."""

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numba
import torch
from numba import types
from numba.extending import intrinsic

from kvcompress.kernels.cpu_code import Code
from kvcompress.kernels.cpu_threads import Kernel
from kvcompress.kernels.cpu_values import FLOAT, INT64, Value

Written = Callable[["Parameters"], None]
_kernels: dict[str, tuple[Written, Sequence[str]]] = {}
_compiling = Lock()
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Parameters:
    """What a kernel was called with: a list of int64, each found under its name."""

    def __init__(self, code: Code, address: Value, names: Sequence[str]) -> None:
        self.code, self._address, self._names = code, address, {name: at for at, name in enumerate(names)}

    def __getattr__(self, name: str) -> Value:
        return self.code.load(self._address + 8 * self._names[name], INT64)

    def float(self, name: str) -> Value:
        """A parameter whose bits are those of an fp32 number."""
        return self.code.load(self._address + 8 * self._names[name], FLOAT)

    def place(self, name: str, row: Value, head: Value) -> Value:
        """Where the slots of one row and head begin, for what `stored` put there."""
        return getattr(self, name) + row * getattr(self, f"{name}_row") + head * getattr(self, f"{name}_head")


def stored_names(*names: str) -> list[str]:
    """The parameters that `stored` fills for each of these."""
    return [name + part for name in names for part in ("", "_row", "_head", "_third")]


def stored(name: str, tensor: torch.Tensor | None) -> dict[str, int]:
    """Address of a tensor [B, H, ...] and its first three strides in bytes; nothing, thus zeros, for None."""
    if tensor is None:
        return {}
    item, strides = tensor.element_size(), tensor.stride()
    return {
        name: tensor.data_ptr(),
        name + "_row": item * strides[0],
        name + "_head": item * strides[1],
        name + "_third": item * strides[2],
    }


def gapless(tensor: torch.Tensor) -> bool:
    """Whether all that [B, H, S, ...] holds for one row and head lies in one piece."""
    size = 1
    for length, stride in zip(tensor.shape[:1:-1], tensor.stride()[:1:-1], strict=True):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


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


@cache
def sources() -> str:
    """A hash of the code of all kernels, so that none is found on disk that another version compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("cpu*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(typingctx: Any, parameters: Any, name: Any) -> Any:
    """The code of the kernel of that name."""
    written, names = _kernels[name.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(builder)
        written(Parameters(code, Value(code, builder.ptrtoint(args[0], INT64)), names))
        return context.get_dummy_value()

    return types.void(parameters, name), generate


write: Any = intrinsic(prefer_literal=True)(_write)


def compile_kernel(name: str, written: Written, parameters: Sequence[str]) -> Kernel:
    """Machine code of a kernel. `name` says which one it is, with all that its code depends on."""
    # Numba looks code up by its own function and what that encloses, not by what it calls.
    identity = f"{name} {sources()}"

    def kernel(parameters: Any) -> None:
        write(parameters, identity)

    with _compiling:
        _kernels[identity] = written, parameters
        try:
            compiled = numba.cfunc(types.void(types.voidptr), cache=True)(kernel)
        except (RuntimeError, OSError):  # no folder can be written to: the code lives as long as this process
            compiled = numba.cfunc(types.void(types.voidptr))(kernel)
    assert compiled.address is not None
    return Kernel(compiled.address)
