"""Records on disk: one JSON line each, written so that nothing finished is ever lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from filelock import FileLock, Timeout

from kvcompress.measure.record import Record


class RecordsError(OSError):
    """A results folder cannot be written, is in use, or holds what is no record."""


Key = tuple[str, int]


class Line(Protocol):
    """A record that is one line; a later one of the same key replaces an earlier one."""

    @property
    def key(self) -> Key: ...
    def to_json(self) -> str: ...
    @classmethod
    def from_json(cls, line: str) -> Self: ...


R = TypeVar("R", bound=Line)


@contextmanager
def only_writer(folder: Path, *parts: str) -> Iterator[None]:
    """Makes the folder and its `parts` and holds it. Raises RecordsError if it cannot be written or is held already."""
    try:
        for each in (folder, *(folder / part for part in parts)):
            each.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise RecordsError(f"{folder}: another run is writing here; wait for it, or choose another --out") from None
    except OSError as error:
        raise RecordsError(f"{folder}: cannot be written ({error.strerror}); choose another --out") from None
    try:
        yield
    finally:
        lock.release()


class LineFile(Generic[R]):
    """The records of one kind in a results folder, one a line."""

    def __init__(self, folder: Path, name: str, kind: type[R]) -> None:
        self.folder, self.path, self.kind = folder, folder / name, kind
        self.records: dict[Key, R] = {}
        self.dropped: list[int] = []

    @contextmanager
    def opened(self) -> Iterator[LineFile[R]]:
        """Holds the folder for one writer. Raises RecordsError if it cannot be written or another run is in it."""
        with only_writer(self.folder):
            self.go_on()
            yield self

    def go_on(self) -> None:
        """Mends and reads what an earlier run left. For who holds the folder."""
        self._mend()
        self.read()

    def read(self) -> dict[Key, R]:
        """All whole records; the numbers of the other lines are in `dropped`. A killed run leaves half a line."""
        self.records, self.dropped = {}, []
        if not self.path.exists():
            return self.records
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                record = self.kind.from_json(line.decode())
            except ValueError:
                self.dropped.append(number)
                continue
            self.records[record.key] = record
        return self.records

    def append(self, record: R) -> None:
        """Writes one record through to the disk before it returns. Raises RecordsError if the disk refuses it."""
        line = record.to_json().encode() + b"\n"
        try:
            with self.path.open("ab") as file:
                before = file.tell()
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, before)
                    raise
        except OSError as error:
            raise RecordsError(
                f"{self.path}: cannot be written ({error.strerror}); {len(self.records)} finished records are safe "
                "there. Make room and run the same command again: it goes on where it stopped"
            ) from None
        self.records[record.key] = record

    def _mend(self) -> None:
        """Ends a half-written last line, so that the next record starts on a line of its own."""
        try:
            if self.path.exists():
                content = self.path.read_bytes()
                if content and not content.endswith(b"\n"):
                    os.truncate(self.path, content.rfind(b"\n") + 1)
            else:
                self.path.touch()
        except OSError as error:
            raise RecordsError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from None


class RecordFile(LineFile[Record]):
    """`records.jsonl` of a results folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "records.jsonl", Record)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: a reader sees the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordsError(f"{path}: cannot be written ({error.strerror})") from None
