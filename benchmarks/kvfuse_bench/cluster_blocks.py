"""A set of blocks whose bytes follow from their names: stored, synced, read and verified, through any mount."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvfuse.errors import KvfuseError
from kvfuse_bench.cache import read_whole, write_and_rename
from kvfuse_bench.content import BlockContent, block_key


@dataclass(frozen=True)
class BlockSet:
    """``count`` blocks of ``size`` bytes in ``root / label``, in equal parts (no remainder) for the writers.

    Each writer has a folder: in one the kernel lets one thread at a time create or rename.
    """

    root: Path
    label: str
    """names the set, and makes its blocks differ from those of all others"""
    count: int
    size: int
    writer_count: int = 1

    @property
    def folder(self) -> Path:
        """Of the first writer."""
        return self._folders()[0]

    def seen_from(self, root: Path) -> BlockSet:
        """The same blocks through another mount."""
        return replace(self, root=root)

    def make_folders(self) -> None:
        """Those of all writers, as far as they are not there."""
        for folder in self._folders():
            folder.mkdir(parents=True, exist_ok=True)

    def store(self, *, fsync: bool = False, until_synced: bool = False) -> float:
        """Blocks a second: temporary name, write, close, rename. Their bytes are made beforehand.

        ``fsync``: of each before its close. ``until_synced``: the time ends when each was fsynced after its rename.
        """
        self.make_folders()
        parts = [[(path, bytes(data)) for path, data in self._contents(writer)] for writer in range(self.writer_count)]

        def store_part(part: Sequence[tuple[str, bytes]]) -> None:
            for path, data in part:
                write_and_rename(path + ".part", path, data, fsync=fsync)

        with ThreadPoolExecutor(self.writer_count) as pool:
            start = time.perf_counter()
            list(pool.map(store_part, parts))
            if until_synced:
                self.sync()
            return self.count / (time.perf_counter() - start)

    def sync(self) -> None:
        """fsync of every block."""
        for _, path in self._blocks():
            _sync(path)

    def sync_last(self) -> None:
        """fsync of the block stored last: a file system that commits in groups commits what waits, at once."""
        _sync(self._last_path())

    def wait_for_last(self, seconds: float) -> None:
        """Return when the block stored last is there. KvfuseError after ``seconds``."""
        path = self._last_path()
        deadline = time.monotonic() + seconds
        while not os.path.exists(path):
            if time.monotonic() > deadline:
                raise KvfuseError(f"{path} is not there after {seconds:g} s")
            time.sleep(0.01)  # another host publishes it within its window: there is no event to wait for in a mount

    def read(self) -> float:
        """Blocks a second: opened, read whole, closed, one after the other. Verified when the time is taken."""
        blocks = list(self._blocks())
        room = self.size + 1  # so that a file that is too long is noticed by the same read
        memory = memoryview(bytearray(b"\xff") * (room * len(blocks)))
        pieces = [memory[offset : offset + room] for offset in range(0, len(memory), room)]
        start = time.perf_counter()
        sizes = [read_whole(path, piece) for (_, path), piece in zip(blocks, pieces, strict=True)]
        seconds = time.perf_counter() - start
        content = BlockContent(self.size)
        for (key, path), piece, size in zip(blocks, pieces, sizes, strict=True):
            content.buffer[:] = piece
            self._check(content, key, path, size)
        return len(blocks) / seconds

    def verify(self) -> None:
        """Every block is there and holds its bytes. KvfuseError names the one that does not."""
        content = BlockContent(self.size)
        for key, path in self._blocks():
            self._check(content, key, path, read_whole(path, content.buffer))

    def _check(self, content: BlockContent, key: bytes, path: str, size: int) -> None:
        difference = content.difference(key, content.buffer[:size])
        if difference is not None:
            raise KvfuseError(f"{path} {difference}")

    def _last_path(self) -> str:
        *_, (_, path) = self._blocks()
        return path

    def _folders(self) -> list[Path]:
        return [self.root / self.label / f"{writer:02x}" for writer in range(self.writer_count)]

    def _blocks(self) -> Iterator[tuple[bytes, str]]:
        """Key and path of all blocks, in the order in which their writers store them."""
        for writer in range(self.writer_count):
            yield from self._part(writer)

    def _part(self, writer: int) -> Iterator[tuple[bytes, str]]:
        folder = self._folders()[writer]
        for index in range(self.count // self.writer_count):
            key = block_key(self.label, writer, index)
            yield key, f"{folder}/{key.hex()}"

    def _contents(self, writer: int) -> Iterator[tuple[str, memoryview]]:
        """Path and bytes of a writer's blocks; the bytes are valid until the next one."""
        content = BlockContent(self.size)
        for key, path in self._part(writer):
            yield path, content.fill(key)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
