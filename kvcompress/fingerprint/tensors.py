"""Digests of whole tensors, computed where they lie, equal on every device, and kept until a tensor is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

BLOCK = 4096  # 32-bit words that give one sum
BLOCK_BYTES = 4 * BLOCK
CHUNK = {"cpu": 64}  # blocks at a time, few enough to stay in a core's cache
CHUNK_ELSEWHERE = 4096


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, or what a quantised or sharded one wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def version_of(tensor: Tensor) -> int | None:
    """Autograd's count of writes in place; None for a tensor made in inference mode, which has none."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _Kept:
    """A digest, and what would differ if the tensor had been written since."""

    # While a weak reference is held, no other storage can have this one's place.
    storage: StorageWeakRef
    address: int
    version: int | None
    epoch: Any
    digest: bytes


class TensorDigests:
    """The digests of plain tensors, each made again once its storage, version counter or `epoch` has changed."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        self.uncounted_writes = 0  # found so far: tensors that differ though nothing had shown it

    def of(self, tensors: Sequence[Tensor], epochs: Sequence[Any], fresh: bool = False) -> list[bytes]:
        """One digest a tensor. `epochs[i]` is whatever else says that tensor i was written; `fresh` trusts nothing.

        A tensor without a version counter is always digested anew.
        """
        known = [self._find(each, epoch) for each, epoch in zip(tensors, epochs, strict=True)]
        # All work is queued before the first result is waited for.
        rests = [
            rest(each) if fresh or old is None or old.version is None else None
            for each, old in zip(tensors, known, strict=True)
        ]
        digests = []
        for tensor, epoch, old, left in zip(tensors, epochs, known, rests, strict=True):
            if left is None:
                assert old is not None
                digests.append(old.digest)
                continue
            digests.append(_sha256(tensor, left))
            self.uncounted_writes += old is not None and old.digest != digests[-1]
            storage = StorageWeakRef(tensor.untyped_storage())
            self._kept[tensor] = _Kept(storage, tensor.data_ptr(), version_of(tensor), epoch, digests[-1])
        return digests

    def _find(self, tensor: Tensor, epoch: Any) -> _Kept | None:
        kept: _Kept | None = self._kept.get(tensor)
        if (
            kept is None
            or (kept.storage.cdata, kept.address) != (tensor.untyped_storage()._cdata, tensor.data_ptr())
            or (kept.version, kept.epoch) != (version_of(tensor), epoch)
        ):
            return None
        return kept


def digest_of(tensor: Tensor) -> bytes:
    """The 32-byte digest of a plain tensor's dtype, shape and bytes.

    Blocks of 4,096 32-bit words are reduced to one 64-bit sum each, as NH of UMAC does (Black et al., CRYPTO 1999):
    the sum of (x_i + k_i)(x_j + k_j) over pairs of words, with fixed random keys k. The sums are reduced in turn until
    one block is left, which SHA-256 takes. Two tensors that differ have the same digest with probability 2^-32 or
    less a block; it is not meant to withstand somebody who looks for such a pair.
    """
    return _sha256(tensor, rest(tensor))


def rest(tensor: Tensor) -> Tensor:
    """What is left of a tensor's bytes for SHA-256: uint8 [at most a block], on the tensor's device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    while data.numel() > BLOCK_BYTES:
        data = _block_sums(data).view(torch.uint8)
    return data


def _sha256(tensor: Tensor, left: Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(left.cpu().numpy().tobytes())
    return digest.digest()


@cache
def _keys(device: torch.device) -> Tensor:
    random = hashlib.shake_256(b"kvcompress fingerprint").digest(BLOCK_BYTES)
    return torch.from_numpy(np.frombuffer(random, "<i4").astype(np.int32)).to(device)


def _block_sums(data: Tensor) -> Tensor:
    """The sum of every block of uint8 [N]: int64 [blocks]. Zeros fill up the last."""
    whole = data.numel() - data.numel() % BLOCK_BYTES
    sums = [_sums(data[:whole])]
    if whole < data.numel():
        sums.append(_sums(torch.nn.functional.pad(data[whole:], (0, BLOCK_BYTES - data.numel() + whole))))
    return torch.cat(sums)


def _sums(data: Tensor) -> Tensor:
    if data.storage_offset() % 4:
        data = data.clone()
    keys = _keys(data.device)
    sums = [data.new_empty(0, dtype=torch.int64)]
    for part in data.view(torch.int32).view(-1, BLOCK).split(CHUNK.get(data.device.type, CHUNK_ELSEWHERE)):
        first, second = (part + keys).split(BLOCK // 2, 1)  # int32 additions wrap
        sums.append(first.long().mul_(second).sum(1))
    return torch.cat(sums)
