"""What a store may have after a crash: a model that a walk tells of every change, and of each promise.

Bytes written since the last promise may be there or not, each of them; but none that this file never had there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from volume_lab import CALLER, Disk, check, opened

from kvfuse.options.config import Options
from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume

BLOCK_SIZE = 256 << 10
"""Bytes of a segment that two pictures of a disk share while they are the same."""


class Change(NamedTuple):
    """Bytes ``start``..``end`` became ``tag``."""

    start: int
    end: int
    tag: int


class Promise(NamedTuple):
    """What is there in every later picture, until something newer replaces it."""

    data: bytes
    change_count: int
    """of the changes before it"""


@dataclass
class File:
    """One inode. ``data`` is what a reader finds now."""

    ino: int
    data: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    changes: list[Change] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0])
    """after each change"""
    promise: Promise = field(default_factory=lambda: Promise(b"", 0))
    is_busy: bool = False
    """a write to it is under way"""
    is_known: bool = True
    """no change failed half way"""

    def next_tag(self) -> int:
        """Of no other change of this file, nor of files made shortly before or after."""
        return 1 + (self.ino * 61 + len(self.changes)) % 255

    def begin_write(self, offset: int, length: int) -> bytes:
        """The bytes for a write that is about to begin."""
        tag = self.next_tag()
        self._changes_to(Change(offset, offset + length, tag), max(len(self.data), offset + length))
        return bytes([tag]) * length

    def wrote(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.data):
            self.data = np.pad(self.data, (0, offset + len(data) - len(self.data)))
        self.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def truncate(self, size: int) -> None:
        self._changes_to(Change(size, 1 << 62, 0), size)
        kept = self.data[:size]
        self.data = np.pad(kept, (0, size - len(kept)))

    def _changes_to(self, change: Change, size: int) -> None:
        self.changes.append(change)
        self.sizes.append(size)

    def as_it_is(self) -> Promise:
        return Promise(self.data.tobytes(), len(self.changes))

    def keep(self, promise: Promise) -> None:
        if self.is_known:
            self.promise = promise

    def state(self) -> FileState:
        return FileState(self, self.promise, len(self.changes))


class FileState(NamedTuple):
    """A file when a picture was taken."""

    file: File
    promise: Promise
    change_count: int

    def wrong(self, found: bytes) -> str:
        """What is wrong with the bytes that a daemon found; empty: nothing."""
        file, (promised, first), last = self.file, self.promise, self.change_count
        sizes = file.sizes[first : last + 1]
        if not min(sizes) <= len(found) <= max(sizes):
            return f"inode {file.ino} has {len(found)} bytes: it had {sizes}"
        got = np.frombuffer(found, np.uint8)
        right = got == np.frombuffer(promised[: len(found)].ljust(len(found), b"\0"), np.uint8)
        for start, end, tag in file.changes[first:last]:
            right[start:end] |= got[start:end] == tag
        if right.all():
            return ""
        at = int(np.argmin(right))
        later = [change for change in file.changes[first:last] if change.start <= at < change.end]
        was = promised[at] if at < len(promised) else 0
        return f"inode {file.ino} has {got[at]} at {at}: it was promised {was}, then came {later}"


@dataclass
class Model:
    """All files, and their names in the root directory."""

    files: dict[int, File] = field(default_factory=dict)
    names: dict[bytes, int] = field(default_factory=dict)
    promised_names: dict[bytes, int] = field(default_factory=dict)

    def made(self, ino: int, name: bytes) -> File:
        self.names[name] = ino
        file = self.files[ino] = File(ino)
        return file

    def doubt(self, *names: bytes) -> None:
        """These names are about to change."""
        for name in names:
            self.promised_names.pop(name, None)

    def promise_names(self, ino: int) -> None:
        self.promised_names.update({name: ino for name, named in self.names.items() if named == ino})


@dataclass
class Picture:
    """All that survives a crash at some moment, and what was promised by then."""

    records: dict[bytes, Versioned]
    segments: dict[int, list[bytes]]
    files: dict[int, FileState]
    names: dict[bytes, int]

    async def problems(self, blank: Disk, options: Options) -> list[str]:
        """What the check, and a daemon that starts on it, find wrong."""
        segments = {number: bytearray().join(blocks) for number, blocks in self.segments.items()}
        disk = Disk(blank.superblock, dict(self.records), blank.version, segments)
        report = await check(disk)
        if not report.clean:
            return [problem.text for problem in report.problems]
        async with opened(disk, options) as volume:
            return await self._look(volume)

    async def _look(self, volume: Volume) -> list[str]:
        names = [entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 1000)]
        inos = {name: (await volume.tree.lookup(ROOT_INODE, name)).ino for name in names}
        problems = [
            f"{name!r} is inode {inos.get(name)}: {ino} was promised"
            for name, ino in self.names.items()
            if inos.get(name) != ino
        ]
        for ino in set(inos.values()):
            problems.append(self.files[ino].wrong(await read_whole(volume, ino)))
        return [problem for problem in problems if problem]


async def read_whole(volume: Volume, ino: int) -> bytes:
    handle = await volume.files.open(ino, os.O_RDONLY, CALLER)
    data = bytes(await volume.files.read(handle, 0, 1 << 30))
    await volume.files.release(handle)
    return data


class Camera:
    """Takes pictures of a disk: of all bytes as they are at each commit, with the records before it and after it."""

    def __init__(self, disk: Disk, model: Model) -> None:
        self.disk = disk
        self.model = model
        self.pictures: list[Picture] = []
        self._records = dict(disk.records)
        self._blocks: dict[int, list[bytes]] = {}
        disk.audit = self._committed

    def _committed(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        self.take()
        self._records = dict(self.disk.records)
        self.take()

    def take(self) -> None:
        """As it is now."""
        for number, image in self.disk.segments.items():
            known = self._blocks.get(number, [])
            blocks = [bytes(image[start : start + BLOCK_SIZE]) for start in range(0, len(image), BLOCK_SIZE)]
            self._blocks[number] = [
                known[index] if index < len(known) and known[index] == block else block
                for index, block in enumerate(blocks)
            ]
        files = {ino: file.state() for ino, file in self.model.files.items()}
        names = dict(self.model.promised_names)
        self.pictures.append(Picture(self._records, dict(self._blocks), files, names))
