"""The bytes of a trace, gzipped or not."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from kvcompress.prefix.requests import TraceError

GZIP = b"\x1f\x8b"


@contextmanager
def open_trace(path: Path) -> Iterator[BinaryIO]:
    """Opens a trace for reading, unpacked if its first bytes are those of gzip, whatever its name is.

    Raises `TraceError` where gzipped data turns out to be damaged or cut short.
    """
    with path.open("rb") as file:
        if not file.peek(2).startswith(GZIP):
            yield file
            return
        try:
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: gzipped, but damaged or cut short: {error}") from None
