"""Numbers and vectors that exist while a kernel runs, with Python's operators; see `code.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir

if TYPE_CHECKING:
    from kvcompress.kernels.jit.code import Code

FEATURES = llvm.get_host_cpu_features()
RUNS_HERE = all(FEATURES.get(name) for name in ("avx2", "fma", "f16c")) or FEATURES.get("neon", False)
"""Whether this machine has what the kernels count on: vectors, fused multiply-add, fp16."""
WIDTH = 16 if FEATURES.get("avx512f") and FEATURES.get("avx512bw") else 8
"""Lanes of one vector."""

BYTE, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
FLOATS, HALVES, INTS, SHORTS, BYTES = (ir.VectorType(kind, WIDTH) for kind in (FLOAT, HALF, INT32, INT16, BYTE))

Number: TypeAlias = "Value | int | float"


@dataclass(eq=False)
class Value:
    """A number, or a vector of them, while the kernel runs."""

    code: Code
    ir: Any

    def _with(self, other: Number, for_ints: str, for_floats: str, swap: bool = False) -> Value:
        pair = self.ir, self.code.like(other, self.ir.type).ir
        first, second = reversed(pair) if swap else pair
        element = self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type
        name = for_ints if isinstance(element, ir.IntType) else for_floats
        return Value(self.code, getattr(self.code.builder, name)(first, second))

    def __add__(self, other: Number) -> Value:
        return self._with(other, "add", "fadd")

    def __sub__(self, other: Number) -> Value:
        return self._with(other, "sub", "fsub")

    def __mul__(self, other: Number) -> Value:
        return self._with(other, "mul", "fmul")

    def __truediv__(self, other: Number) -> Value:
        return self._with(other, "sdiv", "fdiv")

    def __floordiv__(self, other: Number) -> Value:
        return self._with(other, "udiv", "fdiv")

    def __mod__(self, other: Number) -> Value:
        return self._with(other, "urem", "frem")

    def __and__(self, other: Number) -> Value:
        return self._with(other, "and_", "and_")

    def __or__(self, other: Number) -> Value:
        return self._with(other, "or_", "or_")

    def __lshift__(self, other: Number) -> Value:
        return self._with(other, "shl", "shl")

    def __rsub__(self, other: Number) -> Value:
        return self._with(other, "sub", "fsub", swap=True)

    def __rtruediv__(self, other: Number) -> Value:
        return self._with(other, "sdiv", "fdiv", swap=True)

    __radd__, __rmul__ = __add__, __mul__

    def _compare(self, other: Number, how: str) -> Value:
        second, builder = self.code.like(other, self.ir.type).ir, self.code.builder
        element = self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type
        compare = builder.icmp_signed if isinstance(element, ir.IntType) else builder.fcmp_ordered
        return Value(self.code, compare(how, self.ir, second))

    def __lt__(self, other: Number) -> Value:
        return self._compare(other, "<")

    def __gt__(self, other: Number) -> Value:
        return self._compare(other, ">")

    def equals(self, other: Number) -> Value:
        """Whether both are the same; `==` stays Python's own."""
        return self._compare(other, "==")

    def differs(self, other: Number) -> Value:
        """Whether the two are not the same."""
        return self._compare(other, "!=")

    @property
    def count(self) -> int:
        """How many lanes it has."""
        return self.ir.type.count

    def where(self, condition: Value, other: Number) -> Value:
        """This where the condition holds, else `other`; lane by lane for vectors."""
        return Value(self.code, self.code.builder.select(condition.ir, self.ir, self.code.like(other, self.ir.type).ir))

    def at_most(self, other: Number) -> Value:
        """The smaller of two."""
        return self.where(self < other, other)

    def at_least(self, other: Number) -> Value:
        """The larger of two; `other` where one is NaN."""
        return self.where(self > other, other)

    def times_plus(self, factor: Number, addend: Number) -> Value:
        """self · factor + addend, rounded once where the machine can."""
        kind = self.ir.type
        return self.code.call("fmuladd", self, self.code.like(factor, kind), self.code.like(addend, kind))

    def convert(self, kind: ir.Type) -> Value:
        """The same number as another type: ints widen without sign, fp16 and ints become fp32."""
        source = self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type
        target = kind.element if isinstance(kind, ir.VectorType) else kind
        builder = self.code.builder
        if isinstance(source, ir.IntType):
            change = builder.zext if isinstance(target, ir.IntType) else builder.sitofp
        else:
            change = builder.fptosi if isinstance(target, ir.IntType) else builder.fpext
        return Value(self.code, change(self.ir, kind))

    def cut(self, kind: ir.Type) -> Value:
        """The lowest bits of an int, or fp32 rounded to fp16."""
        builder = self.code.builder
        narrow = builder.trunc if isinstance(getattr(kind, "element", kind), ir.IntType) else builder.fptrunc
        return Value(self.code, narrow(self.ir, kind))

    def bits_as(self, kind: ir.Type) -> Value:
        """The same bits read as another type."""
        return Value(self.code, self.code.builder.bitcast(self.ir, kind))

    def splat(self) -> Value:
        """The number in every lane."""
        return Value(self.code, self.code.splatted(self.ir))

    def lanes(self, indices: Sequence[int], other: Value | None = None) -> Value:
        """A vector of the lanes with these indices; those of `other` follow this one's."""
        mask = ir.Constant(ir.VectorType(INT32, len(indices)), list(indices))
        second = other.ir if other is not None else ir.Constant(self.ir.type, ir.Undefined)
        return Value(self.code, self.code.builder.shuffle_vector(self.ir, second, mask))

    def first(self) -> Value:
        """The first lane."""
        return Value(self.code, self.code.builder.extract_element(self.ir, ir.Constant(INT32, 0)))

    def total(self) -> Value:
        """The sum of all lanes, halves added to each other."""
        value, lanes = self, self.count
        while lanes > 1:
            lanes //= 2
            value = value.lanes(range(lanes)) + value.lanes(range(lanes, 2 * lanes))
        return value.first()

    def largest(self) -> Value:
        """The largest lane; NaN if any lane is NaN."""
        return self._reduced("maximum")

    def smallest(self) -> Value:
        """The smallest lane; NaN if any lane is NaN."""
        return self._reduced("minimum")

    def _reduced(self, function: str) -> Value:
        value, lanes = self, self.count
        while lanes > 1:
            lanes //= 2
            halves = value.lanes(range(lanes)), value.lanes(range(lanes, 2 * lanes))
            value = self.code.call(function, *halves)
        return value.first()


def item_size(kind: ir.Type) -> int:
    """Bytes of one element."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    if isinstance(element, ir.IntType):
        return element.width // 8
    return 2 if isinstance(element, ir.HalfType) else 4
