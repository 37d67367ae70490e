"""Turns kernels into machine code, once; Numba compiles them and keeps the code on disk."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from kvcompress.kernels.jit.code import Code
from kvcompress.kernels.jit.threads import Kernel
from kvcompress.kernels.jit.values import FLOAT, INT64, WIDTH, Value

Written = Callable[["Parameters"], None]
_kernels: dict[str, tuple[Written, Sequence[str]]] = {}
_compiling = Lock()


class Parameters:
    """What a kernel was called with, while it runs: a list of int64, each found under its name."""

    def __init__(self, code: Code, address: Value, names: Sequence[str]) -> None:
        self.code, self._address, self._names = code, address, {name: at for at, name in enumerate(names)}

    def __getattr__(self, name: str) -> Value:
        return self.code.load(self._address + 8 * self._names[name], INT64)

    def float(self, name: str) -> Value:
        """A parameter whose bits are those of an fp32 number."""
        return self.code.load(self._address + 8 * self._names[name], FLOAT)

    def place(self, name: str, row: Value, head: Value) -> Value:
        """Where the slots of one row and head begin, for what `stored` (in `call.py`) put there."""
        return getattr(self, name) + row * getattr(self, f"{name}_row") + head * getattr(self, f"{name}_head")


@cache
def sources() -> str:
    """A hash of the code of all kernels, so that none is found on disk that another version compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
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
    identity = f"{name} of {WIDTH} lanes {sources()}"

    def kernel(parameters: Any) -> None:
        write(parameters, identity)

    with _compiling:
        _kernels[identity] = written, parameters
        try:
            compiled = numba.cfunc(types.void(types.voidptr), cache=True)(kernel)
        except (RuntimeError, OSError):  # no folder can be written to: the code lives as long as this process
            compiled = numba.cfunc(types.void(types.voidptr))(kernel)
    assert compiled.address is not None
    return Kernel(compiled.address, compiled)
