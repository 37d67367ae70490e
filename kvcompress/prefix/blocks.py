"""Names of prompt blocks: chained SHA-256 keys, and small integers that stand for them."""

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

NUMBERED = 2**26  # contents below this are looked up in an array of 4 bytes each, others in a dict
ROOT = hashlib.sha256(b"kvcompress/v1").digest()


def block_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The 32-byte key of one block, given the key of the block before it (`ROOT` for the first).

    `key = sha256(parent || uint32le(len(extra)) || extra || uint32le of each token)`. The chain makes a key name
    the whole prompt up to the block's end, so equal keys mean equal prefixes. `extra` tells apart what equal tokens
    do not: see `extra_bytes`.

    Raises `ValueError` if a token id is negative or needs more than 32 bits.
    """
    return _chain(parent, _tagged(extra), _uint32(tokens))


def block_keys(tokens: Sequence[int], block: int, extra: bytes = b"") -> list[bytes]:
    """The keys of the full blocks of `block` tokens in a prompt; what is left at its end has no key.

    Raises `ValueError` if `block` is below 1 or a token id is not an unsigned 32-bit integer.
    """
    check_block(block)
    data, tag = _uint32(tokens), _tagged(extra)
    keys, parent = [], ROOT
    for start in range(0, len(data) - 4 * block + 1, 4 * block):
        parent = _chain(parent, tag, data[start : start + 4 * block])
        keys.append(parent)
    return keys


def extra_bytes(parts: Mapping[str, str | bytes]) -> bytes:
    """Packs named parts (weights' fingerprint, dtype, rotary settings, tenant salt) into the extra bytes of a key.

    Every name and value is preceded by its length and the names are sorted, so two different mappings never give
    the same bytes and the order of insertion does not matter.
    """
    packed = []
    for name in sorted(parts):
        value = parts[name]
        for piece in (name.encode(), value.encode() if isinstance(value, str) else value):
            packed += [len(piece).to_bytes(4, "little"), piece]
    return b"".join(packed)


def check_block(block: int) -> None:
    """Raises `ValueError` unless `block`, a number of tokens, is at least 1."""
    if block < 1:
        raise ValueError(f"block={block}: a block holds at least 1 token; 16 is what serving engines use")


class BlockTable:
    """Stands a small integer for every distinct prefix, in the order of first sight.

    A block is named by its parent's integer (-1 at the start of a prompt) and what it holds, so the integers form a
    tree in which a child's number is always greater than its parent's.

    `parent[i]`: the block before block `i`, or -1. `end[i]`: tokens from the prompt's start to the end of block `i`.
    `label[i]`: a name to print, of blocks that have one.
    """

    def __init__(self) -> None:
        self.parent = array("i")
        self.end = array("q")
        self.label: dict[int, str] = {}
        # The first block that held each content: of a small integer, such as a hash id, in the array, -1 for none.
        self._numbered = array("i")
        self._first: dict[Hashable, int] = {}
        self._others: dict[tuple[int, Hashable, int], int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, parent: int, content: Hashable, tokens: int, label: str | None = None) -> int:
        """The integer of the block of `tokens` tokens that holds `content` after block `parent`."""
        (name,) = self.add_all(parent, (content,), tokens)
        if label is not None:
            self.label[name] = label
        return name

    def add_all(self, parent: int, contents: Iterable[Hashable], tokens: int) -> list[int]:
        """The integers of a run of blocks of `tokens` tokens each, the first of which follows block `parent`."""
        path: list[int] = []
        # every block of a trace goes through this loop
        first, numbered, parents, ends = self._first, self._numbered, self.parent, self.end
        end, size = ends[parent] if parent >= 0 else 0, len(parents)
        for content in contents:
            end += tokens
            if type(content) is int and 0 <= content < NUMBERED:
                if content >= len(numbered):
                    numbered.extend(array("i", [-1]) * (content + 1 - len(numbered) + len(numbered) // 8))
                found = numbered[content]
                if found < 0:
                    found = numbered[content] = size
            else:
                found = first.setdefault(content, size)
            if found != size and (parents[found] != parent or ends[found] != end):
                # the same content was first seen after another prefix: a different block
                found = self._others.setdefault((parent, content, tokens), size)
            if found == size:
                parents.append(parent)
                ends.append(end)
                size += 1
            path.append(found)
            parent = found
        return path


def _uint32(tokens: Sequence[int]) -> bytes:
    array = np.asarray(tokens)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**32):
        bad = next((t for t in tokens if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < 2**32), tokens)
        raise ValueError(f"token id {bad!r}: expected an integer from 0 to {2**32 - 1}")
    return array.astype("<u4").tobytes()


def _tagged(extra: bytes) -> bytes:
    return len(extra).to_bytes(4, "little") + extra


def _chain(parent: bytes, tag: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tag + tokens).digest()
