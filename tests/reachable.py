"""Bytes of every tensor storage that an object reaches through its attributes and containers."""

from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


def reachable_bytes(held: object, not_from: object = None) -> int:
    """Bytes of the storages reached from `held`, less those that `not_from` reaches too (a model, its rotary)."""
    found, shared = storages(held), storages(not_from)
    return sum(size for place, size in found.items() if place not in shared)


def storages(start: object) -> dict[int, int]:
    """Address and bytes of each storage reached from `start`."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = [start]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, nn.Module):
            waiting += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, dict):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, FunctionType | MethodType | ModuleType):
            waiting += vars(thing).values()
    found.pop(0, None)  # storages without memory
    return found
