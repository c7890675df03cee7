"""A volume on disk with files of many shapes, and what should be in it: for the tests of fsck and rebuild."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from volume_lab import CALLER, MIB

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.options.options import Options, VolumeOptions
from kvfuse.remote.records.api import RecordStore
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import CheckReport
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.store.sealed import as_formatted
from kvfuse.volume.volume import Volume

KIB = 1 << 10
CHUNK = 512 * KIB

Records = dict[bytes, bytes]


class Tree:
    """A volume on disk and what should be in it."""

    def __init__(
        self, base: Path, rng: random.Random, contents: Callable[[random.Random, int], bytes] = random.Random.randbytes
    ) -> None:
        """``contents``: makes those of its files."""
        self.rng, self._contents = rng, contents
        self.options = Options(
            volume=VolumeOptions(path=base / "volume", capacity=64 * MIB, segment_size=16 * MIB, chunk_size=CHUNK)
        )
        self.files: dict[bytes, bytes] = {}

    async def make(self) -> None:
        await formatting.format_volume(self.options)
        sizes = {
            b"tiny": 100,
            b"small": 4000,
            b"page": 4096,
            b"a/mid": 70_000,
            b"a/b/granules": 3 * GRANULE_SIZE - 5,
            b"a/b/chunks": 3 * CHUNK + 7,
            b"a/b/c/far": 12 * CHUNK + 4097,  # more chunks than an inode record holds
            b"a/pieces": CHUNK - 60 * KIB,
        }
        async with self.volume() as volume:
            for path, size in sizes.items():
                await self.write(volume, path, self._contents(self.rng, size))
            await self.write(volume, b"gone", self._contents(self.rng, 9000))
            await self.write(volume, b"a/gone", self._contents(self.rng, 2 * MIB))
            await self.write(volume, b"old", self._contents(self.rng, 5000))
            await self.write(volume, b"rewritten", self._contents(self.rng, 5000))
            await self.sync_and_change(volume)

    async def sync_and_change(self, volume: Volume) -> None:
        """What happens to files after they were committed once."""
        await volume.sync()
        for path in (b"gone", b"a/gone"):
            await volume.tree.unlink(*await self.place(volume, path))
            del self.files[path]
        await volume.tree.rename(*await self.place(volume, b"old"), *await self.place(volume, b"a/b/new"), 0)
        self.files[b"a/b/new"] = self.files.pop(b"old")
        await self.write(volume, b"rewritten", self._contents(self.rng, 8000))
        await self.write(volume, b"tmp", self._contents(self.rng, 30_000))
        await volume.tree.rename(*await self.place(volume, b"tmp"), *await self.place(volume, b"tiny"), 0)
        self.files[b"tiny"] = self.files.pop(b"tmp")

    @asynccontextmanager
    async def volume(self) -> AsyncIterator[Volume]:
        async with open_volume(self.options) as volume:
            yield volume

    async def place(self, volume: Volume, path: bytes) -> tuple[int, bytes]:
        """(directory, name); directories are made."""
        folder = ROOT_INODE
        *parts, name = path.split(b"/")
        for part in parts:
            found = [entry for entry in await volume.tree.list_directory(folder, 0, 1000) if entry.name == part]
            if not found:
                folder = (await volume.tree.make_directory(folder, part, 0o755, CALLER)).ino
            else:
                volume.tree.remember(folder, found[0])
                folder = found[0].attributes.ino
        return folder, name

    async def write(self, volume: Volume, path: bytes, data: bytes) -> None:
        folder, name = await self.place(volume, path)
        if path in self.files:
            node = await volume.tree.lookup(folder, name)
            handle = await volume.files.open(node.ino, os.O_WRONLY | os.O_TRUNC, CALLER)
        else:
            handle, _ = await volume.tree.create(folder, name, 0o640, CALLER, os.O_WRONLY)
        for start in range(0, len(data), 300_000):
            await volume.files.write(handle, start, data[start : start + 300_000])
        await volume.files.flush(handle)
        await volume.files.release(handle)
        self.files[path] = data

    async def read(self) -> dict[bytes, bytes]:
        """Every file of the volume."""
        found: dict[bytes, bytes] = {}
        async with self.volume() as volume:
            await self.read_folder(volume, ROOT_INODE, b"", found)
        return found

    async def read_folder(self, volume: Volume, folder: int, above: bytes, found: dict[bytes, bytes]) -> None:
        for entry in await volume.tree.list_directory(folder, 0, 1000):
            node = await volume.tree.lookup(folder, entry.name)
            if stat.S_ISDIR(node.mode):
                await self.read_folder(volume, node.ino, above + entry.name + b"/", found)
            elif stat.S_ISREG(node.mode):
                handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
                path = above + entry.name
                data = bytes(await volume.files.read(handle, 0, 64 * MIB))
                if path.startswith(b"lost+found/") and data == self.files.get(b"page"):
                    path = b"page"  # a slot of 4 KiB that is full has no room for a name
                found[path] = data
                await volume.files.release(handle)

    @asynccontextmanager
    async def records(self) -> AsyncIterator[RecordStore]:
        async with engines.open_records(self.options) as records:
            yield as_formatted(records, formatting.read_superblock(self.options.volume_path))

    async def change(self, damage: Callable[[Records], None]) -> None:
        """Let ``damage`` work on all records, as a dict."""
        async with self.records() as records:
            before = {row.key: row.value for row in await records.scan(b"", limit=100_000)}
            after = dict(before)
            damage(after)
            puts = {key: value for key, value in after.items() if before.get(key) != value}
            await records.commit(puts, before.keys() - after.keys(), durable=True)

    async def check(self, *, repair: bool = False, verify: bool = True) -> CheckReport:
        return await fsck(self.options, repair=repair, verify=verify)


async def can_be_used(tree: Tree) -> None:
    async with tree.volume() as volume:
        await tree.write(volume, b"fresh/after", tree.rng.randbytes(100_000))
        tree.files.pop(b"fresh/after")
    report = await tree.check()
    assert report.clean, [problem.text for problem in report.problems]


async def flip(tree: Tree, path: bytes, offset: int) -> None:
    """One bit of a file, on the disk below."""
    async with tree.volume() as volume:
        folder, name = await tree.place(volume, path)
        node = await volume.tree.lookup(folder, name)
        for row in (await volume.inodes.info(node.ino))["extents"]:
            start = row["chunk"] * CHUNK
            if start <= offset < start + row["length"]:
                segment, place = row["segment"], row["offset"] + offset - start
                break
        else:
            raise AssertionError("no such byte")
    with open(tree.options.segments_path / f"{segment:08x}.seg", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
