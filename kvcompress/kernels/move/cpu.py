"""Moves the slots that stay to the front of a store's memory, without a second copy of it."""

from functools import cache
from math import prod

import torch
from torch import Tensor

from kvcompress.kernels.jit.call import Call, stored, stored_names
from kvcompress.kernels.jit.compile import Parameters, compile_kernel
from kvcompress.kernels.jit.threads import Kernel
from kvcompress.kernels.jit.values import INT32, INT64
from kvcompress.kernels.layout import gapless

LITTLE = 1 << 16  # bytes that one thread has moved before another has woken

PARAMETERS = [
    "next_task",
    "tasks",
    "heads",
    "first",  # slot that may move
    "kept",
    "size",  # bytes of a slot
    *stored_names("slots", "index"),
]


def evict(p: Parameters) -> None:
    """Each task is one KV head of one row. A slot only ever moves down, to a place whose slot has moved before."""
    code = p.code
    with code.tasks(p.next_task, p.tasks) as task:
        row, head = task // p.heads, task % p.heads
        slots, index = p.place("slots", row, head), p.place("index", row, head)
        with code.loop(p.first, p.kept) as target:
            kept = code.load(index + target.index * 8, INT64)
            to, of = (slots + slot * p.slots_third for slot in (target.index, kept))
            with code.when(kept.differs(target.index)):
                with code.when(p.size.equals(4)):
                    code.store(to, code.load(of, INT32))
                with code.when(p.size.differs(4)):
                    code.copy(to, of, p.size)


@cache
def evict_kernel() -> Kernel:
    """The kernel for all dtypes."""
    return compile_kernel("evict", evict, PARAMETERS)


def evict_in_place(slots: Tensor, index: Tensor, first: int) -> bool:
    """See `kvcompress.kernels.choose.evict_in_place`."""
    batch, heads, kept = slots.shape[0], slots.shape[1], index.shape[2]
    if not gapless(slots) or index.dtype != torch.int64 or index.stride(2) != 1 or index.device != slots.device:
        return False
    size = prod(slots.shape[3:]) * slots.element_size()
    numbers = {
        "tasks": batch * heads,
        "heads": heads,
        "first": first,
        "kept": kept,
        "size": size,
        **stored("slots", slots),
        **stored("index", index.expand(batch, heads, kept)),
    }
    call = Call(PARAMETERS, numbers, next_task=[0, 0])
    evict_kernel().run(call.address, 1 if size * kept * batch * heads < LITTLE else batch * heads)
    return True
