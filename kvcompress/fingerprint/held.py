"""The tensors that modules hold, and whether they may have been written or replaced; nothing is read from a device."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kvcompress.fingerprint.tensors import parts_of, version_of

_versions = attrgetter("_version")


class HeldTensors:
    """The parameters and buffers of `modules` as they are now. `uncounted`: some have no version counter."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places = [held for module in modules for held in (module._parameters, module._buffers)]
        self._places = [held for held in places if held]
        tensors = self._current()
        self._identities = self._identified(tensors)
        parts = [(index, part) for index, each in enumerate(tensors) if each is not None for part in parts_of(each)]
        self.uncounted = any(version_of(part) is None for _, part in parts)
        # What accelerate offloads is on the meta device between two calls.
        parts = [(index, part) for index, part in parts if not part.is_meta]
        self._wrapping = sorted({index for index, part in parts if part is not tensors[index]})
        self._alone = [index for index, part in parts if part is tensors[index]]
        self._counted = [index for index, part in parts if part is tensors[index] and version_of(part) is not None]
        # As long as a storage lives, no other one can have its address.
        self._storages = [StorageWeakRef(part.untyped_storage()) for _, part in parts]
        self._marks = self._marked(tensors)

    def may_have_changed(self, thorough: bool) -> bool:
        """Whether a tensor was replaced, got other memory, or was written as far as a version counter tells.

        `thorough`: also whether other memory came to lie at the same address.
        """
        tensors = self._current()
        return (
            self._identified(tensors) != self._identities
            or self._marked(tensors) != self._marks
            or (thorough and any(UntypedStorage._expired(storage.cdata) for storage in self._storages))
        )

    def _current(self) -> list[Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._places)))

    def _identified(self, tensors: list[Tensor | None]) -> list[int]:
        # accelerate makes an offloaded one anew after every call
        return [0 if each is None or each.is_meta else id(each) for each in tensors]

    def _marked(self, tensors: list[Any]) -> list[Any]:
        marks: list[Any] = [tensors[index].data_ptr() for index in self._alone]
        marks += map(_versions, [tensors[index] for index in self._counted])
        marks += [(part.data_ptr(), version_of(part)) for index in self._wrapping for part in parts_of(tensors[index])]
        return marks
