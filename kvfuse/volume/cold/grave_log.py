"""What must not come back from the cold tier, in a file of the volume's folder: records of 32 bytes, only appended.

An object of a bucket is never changed. So a block in it that was replaced or removed is named here, before the head of
whatever replaced it says free. The file also knows objects that this volume has begun to store: one whose end nobody
saw may come late, and is never read. Without the file no object is read.

``GRAVE``: blocks of a fingerprint up to a sequence. ``FLOOR``: all blocks up to a sequence. ``BEGUN``: an object.
``VOID``: an object that is not to be read, whenever it comes. ``STORED``: one that the bucket has, unless it is void.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import crc32c

GRAVE, FLOOR, BEGUN, VOID, STORED = 1, 2, 3, 4, 5
RECORD = np.dtype(
    [("kind", np.uint32), ("crc", np.uint32), ("low", np.uint64), ("high", np.uint64), ("sequence", np.uint64)]
)
"""``crc``: of the record, with 0 in its place. ``low``: of BEGUN, VOID and STORED, the number of the object"""
Records = npt.NDArray[np.void]
Words = npt.NDArray[np.uint64]


class GraveLog:
    """Any thread appends; `sync` may be called beside."""

    def __init__(self, path: Path) -> None:
        """OSError. ``records``: what the file had. ``is_new``: there was none."""
        self._path = path
        self.is_new = not path.exists()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.records = _read(self._descriptor)
        self.size = len(self.records) * RECORD.itemsize
        os.ftruncate(self._descriptor, self.size)
        self.is_dirty = False

    def append(self, kind: int, low: Words, high: Words | int = 0, sequence: Words | int = 0) -> None:
        """Survives the death of this process when this returns, and the loss of power after a `sync`. OSError."""
        records = make_records(kind, low, high, sequence)
        os.write(self._descriptor, records.tobytes())
        self.size += records.nbytes
        self.is_dirty = True

    def sync(self) -> None:
        """OSError."""
        self.is_dirty = False
        os.fdatasync(self._descriptor)

    def replace(self, records: Records) -> None:
        """Have these records alone, durably. OSError."""
        beside = self._path.with_suffix(".new")
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, records.tobytes())
            os.fdatasync(descriptor)
            os.rename(beside, self._path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self.size, self.is_dirty = records.nbytes, False
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        os.close(self._descriptor)


def read_graves(path: Path) -> Records | None:
    """The records of a file, of which nothing is changed; None: there is none. OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Records:
    """Records up to the first one that is torn."""
    size = os.fstat(descriptor).st_size // RECORD.itemsize * RECORD.itemsize
    records = np.frombuffer(os.pread(descriptor, size, 0), RECORD).copy()
    wrong = np.flatnonzero(_sums_of(records) != records["crc"])
    return records[: int(wrong[0])] if len(wrong) else records


def numbers_of(records: Records, kind: int) -> set[int]:
    """Objects of which the records say so: BEGUN, VOID or STORED."""
    return set(records["low"][records["kind"] == kind].tolist())


def make_records(kind: int, low: Words, high: Words | int = 0, sequence: Words | int = 0) -> Records:
    """Of one kind."""
    records = np.zeros(len(low), RECORD)
    records["kind"], records["low"], records["high"], records["sequence"] = kind, low, high, sequence
    records["crc"] = _sums_of(records)
    return records


def _sums_of(records: Records) -> npt.NDArray[np.uint32]:
    plain = records.copy()
    plain["crc"] = 0
    return np.array([crc32c(one.tobytes()) for one in plain], np.uint32)
