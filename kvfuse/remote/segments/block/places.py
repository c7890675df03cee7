"""Segments at fixed places of a block device.

Behind the first MiB, which is the owner's, the device is divided into equal places; segment 26 has the one with that
number. A place begins with a page that says which segment is there, and whose; the segment's bytes begin a MiB further:

    magic       8 bytes
    owner       16 bytes: pages of a former owner mean nothing
    segment     4 bytes, and 4 of padding
    size        8 bytes: of the segment
    checksum    4 bytes: CRC32C of all before

A device need not be wiped for a new owner. Zeros are written to that part of a new segment which is read before it is
written; the whole of it, unless the owner says less.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvfuse.checksum import Buffer, crc32c
from kvfuse.errors import EngineFull
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, place_size
from kvfuse.remote.segments.file import fileio
from kvfuse.remote.segments.file.fileio import SegmentFile
from kvfuse.remote.segments.file.places import SegmentPlaces

MAGIC = b"\x89KVSEG1\n"
_PAGE = struct.Struct("<8s 16s I 4x Q")
_CHECKSUM = struct.Struct("<I")
OWNER_SIZE = 16


def pack_page(owner: bytes, segment: int, size: int) -> bytes:
    """What the page of a place says where ``owner`` has a segment there."""
    fields = _PAGE.pack(MAGIC, owner, segment, size)
    return fields + _CHECKSUM.pack(crc32c(fields))


def size_in_page(page: Buffer, owner: bytes, segment: int) -> int | None:
    """Bytes of the segment that the page of a place names. None: it is not this one of this owner."""
    if len(page) < PAGE_SIZE:
        return None
    size: int = _PAGE.unpack_from(page)[-1]
    image = pack_page(owner, segment, size)
    return size if page[: len(image)] == image else None


class DevicePlaces(SegmentPlaces):
    """The places of one owner of a device. One client at a time makes or drops a segment."""

    are_mappable = False

    def __init__(self, path: Path, owner: bytes, segment_size: int, zeroed_size: int | None = None) -> None:
        """``segment_size``: of the largest segment; ``zeroed_size``: bytes of a new one that read as zeros."""
        assert len(owner) == OWNER_SIZE
        self.path = path
        self._owner = owner
        self._place_size = place_size(segment_size)
        self._zeroed_size = zeroed_size

    def found(self) -> Sequence[SegmentFile]:
        with ExitStack() as on_failure, fileio.translated(self.path):
            with open(self.path, "rb", buffering=0) as device:
                count = max(device.seek(0, os.SEEK_END) - HEAD_SIZE, 0) // self._place_size + 1
                sizes = {segment: self._size_of(device.fileno(), segment) for segment in range(count)}
            files = []
            for segment, size in sizes.items():
                if size is not None:
                    files.append(self._open(segment, size))
                    on_failure.callback(files[-1].retire)
            on_failure.pop_all()
        return files

    def find(self, segment: int) -> SegmentFile | None:
        with fileio.translated(self.path), open(self.path, "rb", buffering=0) as device:
            size = self._size_of(device.fileno(), segment)
            return None if size is None else self._open(segment, size)

    def make(self, segment: int, size: int) -> SegmentFile:
        place = self._place(segment)
        with fileio.translated(self.path, place), open(self.path, "r+b", buffering=0) as device:
            fd = device.fileno()
            present = self._size_of(fd, segment)
            if present is not None:
                return self._open(segment, present)
            end = place + HEAD_SIZE + size
            if place_size(size) > self._place_size or end > device.seek(0, os.SEEK_END):
                raise EngineFull(f"{self.path} has no room for segment {segment} of {size} bytes")
            zeroed = size if self._zeroed_size is None else min(size, self._zeroed_size)
            fileio.write_zeros(fd, place + HEAD_SIZE, -(-zeroed // PAGE_SIZE) * PAGE_SIZE)
            os.fsync(fd)
            self._put_page(fd, segment, pack_page(self._owner, segment, size))
            return self._open(segment, size)

    def drop(self, file: SegmentFile) -> None:
        with fileio.translated(self.path, self._place(file.segment)), open(self.path, "r+b", buffering=0) as device:
            self._put_page(device.fileno(), file.segment, b"")

    def _place(self, segment: int) -> int:
        return HEAD_SIZE + segment * self._place_size

    def _open(self, segment: int, size: int) -> SegmentFile:
        """With a descriptor of its own, to which errors of its writes are reported."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        start = self._place(segment) + HEAD_SIZE
        return SegmentFile(self.path, segment, fd, is_direct=False, start=start, size=size)

    # -- the page of a place

    def _size_of(self, fd: int, segment: int) -> int | None:
        """Bytes of the segment in a place; None: there is none."""
        return size_in_page(os.pread(fd, PAGE_SIZE, self._place(segment)), self._owner, segment)

    def _put_page(self, fd: int, segment: int, image: bytes) -> None:
        os.pwrite(fd, image.ljust(PAGE_SIZE, b"\0"), self._place(segment))
        os.fsync(fd)
