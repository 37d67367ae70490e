"""Kernels are written in Python that runs once, to write machine code: this is the language for it.

Inside a kernel a `Value` stands for a number that is known only when the kernel runs: int64 (also an address in
bytes), fp32, or a vector of them as wide as one register of this machine. Python's operators work on values, Python's
own `if` and `for` choose which code is written, and `loop`, `when` and `tasks` write loops and branches. Numba's own
language would need seconds for each combination of rows, bits and dtype; this needs a fraction of one.

Nothing checks an address. Integers are taken as non-negative in `//` and `%`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kvcompress.kernels.jit.values import BYTE, FLOAT, FLOATS, INT32, INT64, INTS, WIDTH, Number, Value, item_size


@dataclass
class Loop:
    """A loop that is being written: its index, and values that each round hands to the next."""

    index: Value
    carried: list[Value]


class Code:
    """Where the code of one kernel is written."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def like(self, number: Number, kind: ir.Type) -> Value:
        """A constant as a value of the given type; a value stays what it is."""
        if isinstance(number, Value):
            return number
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [number] * kind.count))
        return Value(self, ir.Constant(kind, number))

    def int(self, number: int) -> Value:
        return self.like(number, INT64)

    def float(self, number: float) -> Value:
        return self.like(number, FLOAT)

    def floats(self, number: float) -> Value:
        """A vector with the same fp32 number in every lane."""
        return self.like(number, FLOATS)

    def vector(self, numbers: Sequence[float]) -> Value:
        """A vector of these fp32 numbers."""
        return Value(self, ir.Constant(FLOATS, list(numbers)))

    def ints(self, numbers: Sequence[int]) -> Value:
        """A vector of these int32 numbers."""
        return Value(self, ir.Constant(INTS, list(numbers)))

    def splatted(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, WIDTH)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))

    def call(self, function: str, *args: Value) -> Value:
        """One of LLVM's own functions of one type, such as `fmuladd`."""
        kind = args[0].ir.type
        vector = isinstance(kind, ir.VectorType)
        suffix = f"v{kind.count}f32" if vector else {FLOAT: "f32"}[kind]
        return self._call(f"llvm.{function}.{suffix}", kind, [arg.ir for arg in args])

    def _call(self, name: str, result: ir.Type, args: Sequence[Any]) -> Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [arg.type for arg in args]), name)
        return Value(self, self.builder.call(function, args))

    def load(self, address: Value, kind: ir.Type = FLOATS, align: int | None = None) -> Value:
        """What lies at an address, aligned to its element unless said otherwise."""
        place = self.builder.inttoptr(address.ir, kind.as_pointer())
        return Value(self, self.builder.load(place, align=align or item_size(kind)))

    def store(self, address: Value, value: Value) -> None:
        place = self.builder.inttoptr(address.ir, value.ir.type.as_pointer())
        self.builder.store(value.ir, place, align=item_size(value.ir.type))

    def copy(self, target: Value, source: Value, size: Value) -> None:
        """Copies bytes; the two places do not overlap."""
        places = [self.builder.inttoptr(each.ir, BYTE.as_pointer()) for each in (target, source)]
        fixed = ir.Constant(ir.IntType(1), 0)
        self._call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [*places, size.ir, fixed])

    def take_number(self, address: Value) -> Value:
        """Adds one to the int64 at the address, atomically, and returns what was there."""
        place = self.builder.inttoptr(address.ir, INT64.as_pointer())
        return Value(self, self.builder.atomic_rmw("add", place, ir.Constant(INT64, 1), "seq_cst"))

    def prefetch(self, address: Value) -> None:
        """Asks for the cache line at an address."""
        place = self.builder.inttoptr(address.ir, BYTE.as_pointer())
        to_read, keep, data = (ir.Constant(INT32, each) for each in (0, 3, 1))
        self._call("llvm.prefetch.p0", ir.VoidType(), [place, to_read, keep, data])

    @contextmanager
    def loop(self, start: Number, stop: Number, step: int | Value = 1, carried: Sequence[Value] = ()) -> Iterator[Loop]:
        """Code for each index from `start` up to `stop`. What the body leaves in `carried` the next round begins with,
        and it is there after the loop."""
        builder, begin, end = self.builder, self.like(start, INT64).ir, self.like(stop, INT64).ir
        before = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(INT64)
        index.add_incoming(begin, before)
        phis = [builder.phi(value.ir.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value.ir, before)
        builder.cbranch(builder.icmp_signed("<", index, end), body, after)
        builder.position_at_end(body)
        loop = Loop(Value(self, index), [Value(self, phi) for phi in phis])
        yield loop
        for phi, value in zip(phis, loop.carried, strict=True):
            phi.add_incoming(value.ir, builder.block)
        index.add_incoming(builder.add(index, self.like(step, INT64).ir), builder.block)
        self._as_written(builder.branch(head))
        builder.position_at_end(after)
        loop.carried = [Value(self, phi) for phi in phis]

    def _as_written(self, branch: Any) -> None:
        """Keeps LLVM from unrolling the loop that this branch closes: it takes seconds and wins nothing here."""
        options = [["llvm.loop.unroll.disable"], ["llvm.loop.vectorize.enable", ir.Constant(ir.IntType(1), 0)]]
        metadata = self.builder.module.metadata
        node = self.builder.module.add_metadata([f"loop {len(metadata)}", *options])
        node.operands = (node, *node.operands[1:])  # what tells one loop from another is the node itself
        branch.set_metadata("llvm.loop", node)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Code for when the condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def tasks(self, counter: Value, count: Value) -> Iterator[Value]:
        """Code for each number below `count` that this thread takes from the counter."""
        builder = self.builder
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        task = self.take_number(counter)
        builder.cbranch((task < count).ir, body, after)
        builder.position_at_end(body)
        yield task
        builder.branch(head)
        builder.position_at_end(after)
