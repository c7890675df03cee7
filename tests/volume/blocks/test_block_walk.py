"""Random calls for the same names by the file door and the ring door, against a plain model."""

from __future__ import annotations

import os
import random

import inside
import pytest
import trio
from test_block_files import Door, door_of
from volume_lab import MIB, Disk, lab_options

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import Changes

NAMES = [b"name-%d" % number for number in range(12)]
FAR = 3 * MIB


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=128 * MIB, staging_size=16 * MIB)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options)


class Walk:
    """What each name has, and what is open, beside the volume."""

    def __init__(self, door: Door, seed: random.Random, model: dict[bytes, bytes]) -> None:
        self.door, self.random, self.model = door, seed, model
        self.readers: list[tuple[object, list[bytes]]] = []
        """handles, and the content of their files"""
        self.files: dict[bytes, list[bytes]] = {name: [data] for name, data in model.items()}
        """of each name: its content is in a list of one item, which calls for the same file change"""

    def fill(self, name: bytes, data: bytes) -> None:
        """The file of a name has other bytes."""
        self.model[name] = self.files[name][0] = data

    def replace(self, name: bytes, data: bytes) -> None:
        """Another file has the name."""
        self.model[name], self.files[name] = data, [data]

    def move(self, name: bytes, other: bytes) -> None:
        if name != other:
            self.model[other], self.files[other] = self.model.pop(name), self.files.pop(name)

    def data(self) -> bytes:
        size = self.random.choice([1, 100, 4096, 70_000, 300_000])
        return self.random.randbytes(8) * (size // 8 + 1)

    async def step(self) -> None:
        kinds = [self.store, self.put, self.delete, self.unlink, self.rename, self.rewrite, self.open, self.close]
        kinds += [self.store, self.put, self.truncate, self.append, self.spread, self.chmod, self.rename, self.empty]
        await self.random.choice(kinds)(self.random.choice(NAMES))

    async def store(self, name: bytes) -> None:
        data = self.data()
        try:
            handle = await self.door.create(name)
        except errors.Exists:
            assert name in self.model
            handle = await self.door.open(name, os.O_WRONLY | os.O_TRUNC)
        else:
            assert name not in self.model
            self.replace(name, b"")
        cut = self.random.randrange(len(data))
        await self.door.volume.files.write(handle, 0, data[:cut], by_kernel=True)
        if self.random.random() < 0.3:
            await trio.lowlevel.checkpoint()
        await self.door.volume.files.write(handle, cut, data[cut:], by_kernel=True)
        await self.door.close(handle)
        self.fill(name, data)

    async def put(self, name: bytes) -> None:
        data = self.data()
        await self.door.put(name, data, uid=self.random.randrange(2), mode=self.random.choice([0o644, 0o600]))
        if await self.door.volume.blocks.has_files(self.door.folder):  # as the ring door does
            await self.door.volume.blocks.delete(self.door.folder, [name])
        self.replace(name, data)

    async def delete(self, name: bytes) -> None:
        gone = self.door.volume.rows.drop(self.door.folder, [name])  # type: ignore[union-attr]
        (ino,) = await self.door.volume.blocks.delete(self.door.folder, [name])
        assert (gone[0] or ino != 0) == (name in self.model)
        self.model.pop(name, None)

    async def unlink(self, name: bytes) -> None:
        try:
            await self.door.volume.tree.unlink(self.door.folder, name)
        except errors.NotFound:
            assert name not in self.model
        else:
            del self.model[name]

    async def rename(self, name: bytes) -> None:
        other = self.random.choice(NAMES)
        try:
            await self.door.rename(name, other)
        except errors.NotFound:
            assert name not in self.model
        else:
            self.move(name, other)

    async def rewrite(self, name: bytes) -> None:
        if name in self.model:
            handle = await self.door.open(name, os.O_RDWR)
            other, data = self.random.choice(NAMES), self.data()
            await self.door.volume.files.write(handle, 10, data, by_kernel=True)
            if self.random.random() < 0.3:
                await self.door.rename(name, other)
                self.move(name, other)
                name = other
            await self.door.close(handle)
            old = self.model[name].ljust(10, b"\0")
            self.fill(name, old[:10] + data + old[10 + len(data) :])

    async def append(self, name: bytes) -> None:
        if name in self.model:
            handle = await self.door.open(name, os.O_WRONLY | os.O_APPEND)
            await self.door.volume.files.write(handle, handle.size, b"more", by_kernel=True)
            await self.door.close(handle)
            self.fill(name, self.model[name] + b"more")

    async def truncate(self, name: bytes) -> None:
        if name in self.model:
            size = self.random.randrange(1, 2 * len(self.model[name]) + 2)
            await self.door.volume.inodes.set_attributes(
                (await self.door.look(name)).ino, Changes(size=size), inside_caller()
            )
            self.fill(name, self.model[name][:size].ljust(size, b"\0"))

    async def spread(self, name: bytes) -> None:
        if name in self.model and self.random.random() < 0.3:
            handle = await self.door.open(name, os.O_WRONLY)
            await self.door.volume.files.write(handle, FAR, b"far", by_kernel=True)
            await self.door.close(handle)
            old = self.model[name].ljust(FAR, b"\0")
            self.fill(name, old[:FAR] + b"far" + old[FAR + 3 :])

    async def empty(self, name: bytes) -> None:
        if name not in self.model and self.random.random() < 0.3:
            await self.door.close(await self.door.create(name))
            self.replace(name, b"")

    async def chmod(self, name: bytes) -> None:
        if name in self.model:
            found = await self.door.look(name)
            mode, uid = self.random.choice([0o600, 0o640]), self.random.randrange(3)
            await self.door.volume.inodes.set_attributes(found.ino, Changes(mode=mode, uid=uid), inside_caller())
            found = await self.door.look(name)
            assert (found.mode & 0o777, found.uid) == (mode, uid)

    async def open(self, name: bytes) -> None:
        if name in self.model and len(self.readers) < 5:
            self.readers.append((await self.door.open(name), self.files[name]))

    async def close(self, name: bytes) -> None:
        if self.readers:
            handle, file = self.readers.pop(self.random.randrange(len(self.readers)))
            assert bytes(await self.door.volume.files.read(handle, 0, 1 << 30)) == file[0]
            await self.door.close(handle)

    async def check(self) -> None:
        assert await self.door.names(limit=self.random.choice([1, 3, 100])) == sorted(self.model)
        for name in NAMES:
            assert await self.door.is_there(name) == (name in self.model)
            if name in self.model:
                assert (await self.door.look(name)).size == len(self.model[name])
                assert await self.door.read(name) == self.model[name]
            by_ring = await self.door.get(name)
            assert by_ring in (None, self.model.get(name))

    async def end(self) -> None:
        while self.readers:
            await self.close(b"")


def inside_caller():  # type: ignore[no-untyped-def]
    from kvfuse.volume.api import Caller

    return Caller(0, 0)


@pytest.mark.parametrize("part", range(4))
async def test_both_doors_against_a_model(disk: Disk, options: Options, part: int) -> None:
    seed = random.Random(f"{os.environ.get('KVFUSE_TEST_SEED', 'walk')}-{part}")
    model: dict[bytes, bytes] = {}
    for _ in range(3):
        async with door_of(disk, options) as door:
            await inside.lookups(door.volume).is_empty(door.folder)  # all heads were read
            walk = Walk(door, seed, model)
            await walk.check()
            for _ in range(120):
                await walk.step()
                await walk.check()
            await walk.end()
            files = inside.parts(door.volume).block_names.files.statistics()  # type: ignore[union-attr]
            assert set(files.values()) == {0}, "nothing is kept for what is closed"
            assert not inside.parts(door.volume).engine.names_held  # type: ignore[union-attr]
