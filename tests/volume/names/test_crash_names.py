"""Names, heirs, orphans, bytes changed in place: a daemon killed at any commit leaves nothing that has to be mended."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing
from crash_model import Camera, File, Model
from scale import scaled
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options, opened

from kvfuse.errors import Exists, NoAttribute, NoSpace, NotFound
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.volume import Volume

STEPS = 150
OFFSETS = (0, 0, 500_000, 12_345, 262_143, 1_100_000)
LENGTHS = (1, 1000, 4096, 70_001, 400_000)


class Walk:
    """Files under a few names: made, renamed over each other, linked, removed, held open, written and cut in place."""

    def __init__(self, volume: Volume, rng: random.Random, model: Model, nursery: trio.Nursery) -> None:
        self.volume = volume
        self.rng = rng
        self.model = model
        self.nursery = nursery
        self.known: list[int] = []
        self.handles: list[FileHandle] = []
        self.steps = [
            (self.replace, 20),
            (self.unlink, 8),
            (self.rename, 10),
            (self.link, 5),
            (self.open, 14),
            (self.close, 8),
            (self.write, 20),
            (self.write_in_slots, 6),
            (self.truncate, 6),
            (self.fsync, 7),
            (self.sync, 1),
            (self.read, 6),
            (self.set, 6),
            (self.unset, 3),
            (self.forget, 5),
            (self.wait, 5),
        ]

    def name(self) -> bytes:
        return b"f%d" % self.rng.randrange(6)

    async def step(self, number: int) -> None:
        (step,) = self.rng.choices([step for step, _ in self.steps], [weight for _, weight in self.steps])
        self.number = number
        await step()

    # -- names ---------------------------------------------------------------------------------------

    async def replace(self) -> None:
        """A block: written under another name, closed, and renamed over what was there."""
        volume, rng, temporary = self.volume, self.rng, b"tmp%d" % self.number
        handle, node = await volume.tree.create(ROOT_INODE, temporary, 0o644, CALLER, os.O_WRONLY)
        self.known.append(node.ino)
        file = self.model.made(node.ino, temporary)
        await self._write(handle, file, 0, rng.choice([1000, 4096, 300_000, MIB, 2 * MIB]))
        await volume.files.release(handle)
        file.keep(file.as_it_is())  # what is closed is whole under any name
        if rng.random() < 0.3:
            await self.wait()
        await self._rename(temporary, self.name(), 0)

    async def rename(self) -> None:
        await self._rename(self.name(), self.name(), RENAME_EXCHANGE if self.rng.random() < 0.2 else 0)

    async def _rename(self, name: bytes, new_name: bytes, flags: int) -> None:
        names = self.model.names
        self.model.doubt(name, new_name)
        await self.volume.tree.rename(ROOT_INODE, name, ROOT_INODE, new_name, flags)
        if flags == RENAME_EXCHANGE:
            names[name], names[new_name] = names[new_name], names[name]
        elif names[name] != names.get(new_name):
            names[new_name] = names.pop(name)

    async def unlink(self) -> None:
        name = self.name()
        self.model.doubt(name)
        await self.volume.tree.unlink(ROOT_INODE, name)
        del self.model.names[name]

    async def link(self) -> None:
        name, new_name = self.name(), b"g%d" % self.rng.randrange(3)
        if name in self.model.names:
            self.model.doubt(new_name)
            await self.volume.tree.link(self.model.names[name], ROOT_INODE, new_name)
            self.known.append(self.model.names[name])
            self.model.names[new_name] = self.model.names[name]

    # -- attributes ----------------------------------------------------------------------------------

    async def set(self) -> None:
        node = await self.volume.tree.lookup(ROOT_INODE, self.name())
        self.known.append(node.ino)
        await self.volume.inodes.set_xattr(node.ino, b"user." + self.name(), b"value")

    async def unset(self) -> None:
        node = await self.volume.tree.lookup(ROOT_INODE, self.name())
        self.known.append(node.ino)
        with suppress(NoAttribute):
            await self.volume.inodes.remove_xattr(node.ino, b"user." + self.name())

    async def forget(self) -> None:
        if self.known:
            self.volume.tree.forget(self.known.pop(self.rng.randrange(len(self.known))), 1)

    async def wait(self) -> None:
        await trio.sleep(self.rng.random() * 0.15)

    # -- bytes ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        node = await self.volume.tree.lookup(ROOT_INODE, self.name())
        self.known.append(node.ino)
        flags = self.rng.choice([os.O_RDONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_TRUNC])
        file = self.model.files[node.ino]
        if flags & os.O_TRUNC and file.is_busy:
            return
        if flags & os.O_TRUNC:
            file.truncate(0)
        self.handles.append(await self.volume.files.open(node.ino, flags, CALLER))

    async def close(self) -> None:
        free = [handle for handle in self.handles if not self._file(handle).is_busy]
        if free:
            handle = self.rng.choice(free)
            self.handles.remove(handle)
            await self.volume.files.release(handle)

    def _file(self, handle: FileHandle) -> File:
        return self.model.files[handle.node.ino]

    def _free_handle(self, *, writable: bool) -> FileHandle | None:
        """An open one, of a file that nobody writes to now."""
        free = [
            handle for handle in self.handles if not self._file(handle).is_busy and (handle.writable or not writable)
        ]
        return self.rng.choice(free) if free else None

    async def write(self) -> None:
        handle = self._free_handle(writable=True)
        if handle is not None:
            offset, length = self.rng.choice(OFFSETS), self.rng.choice(LENGTHS)
            write = partial(self._write, handle, self._file(handle), offset, length)
            if self.rng.random() < 0.3:
                self._file(handle).is_busy = True
                self.nursery.start_soon(write)
            else:
                await write()

    async def _write(self, handle: FileHandle, file: File, offset: int, length: int) -> None:
        data = file.begin_write(offset, length)
        try:
            written = await self.volume.files.write(handle, offset, data)
        except NoSpace:
            file.is_known = False
        else:
            file.wrote(offset, data[:written])
        finally:
            file.is_busy = False

    async def write_in_slots(self) -> None:
        handle = self._free_handle(writable=True)
        if handle is not None:
            file = self._file(handle)
            offset = self.rng.choice(OFFSETS)
            data = file.begin_write(offset, 1000)
            file.sizes[-1] = len(file.data)
            where = np.array([offset]), np.array([len(data)])
            if len(await self.volume.files.write_in_slots(handle, *where, [memoryview(data)])):
                file.wrote(offset, data)

    async def truncate(self) -> None:
        handle = self._free_handle(writable=True)
        if handle is not None:
            size = self.rng.choice([0, 1, 4096, 250_001, 300_001, MIB, 2 * MIB + 5])
            self._file(handle).truncate(size)
            await self.volume.inodes.set_attributes(handle.node.ino, Changes(size=size), CALLER)

    async def fsync(self) -> None:
        handle = self._free_handle(writable=False)
        if handle is not None:
            file = self._file(handle)
            promise = file.as_it_is()
            await self.volume.files.fsync(handle)
            file.keep(promise)
            self.model.promise_names(file.ino)

    async def sync(self) -> None:
        files = [file for file in self.model.files.values() if not file.is_busy]
        promises = [file.as_it_is() for file in files]
        await self.volume.sync()
        for file, promise in zip(files, promises, strict=True):
            file.keep(promise)
            self.model.promise_names(file.ino)

    async def read(self) -> None:
        handle = self._free_handle(writable=False)
        if handle is not None and self._file(handle).is_known:
            expected = self._file(handle).data.tobytes()
            assert bytes(await self.volume.files.read(handle, 0, 1 << 30)) == expected

    async def end(self) -> None:
        for handle in self.handles:
            await self.volume.files.release(handle)
        for ino in self.known:
            self.volume.tree.forget(ino, 1)


@pytest.mark.parametrize("number", range(scaled(8)))
async def test_a_crash_after_any_commit(seed: int, number: int, autojump_clock: trio.testing.MockClock) -> None:
    assert not await walk(random.Random(seed + number))


async def walk(rng: random.Random) -> list[str]:
    """What is wrong at the first commit after which something is."""
    options = lab_options(capacity=32 * MIB, chunk=4 * MIB)
    disk = Disk.format(options)
    model = Model()
    camera = Camera(disk, model)
    chaos = Chaos(rng, delay=rng.choice([0, 0.3, 1.0]))
    async with opened(disk, options, chaos) as volume:
        async with trio.open_nursery() as nursery:
            steps = Walk(volume, rng, model, nursery)
            for step in range(STEPS):
                with suppress(Exists, NotFound, NoSpace):  # names are drawn; and so small a volume is full now and then
                    await steps.step(step)
        await steps.end()
        chaos.delay = 0
    assert len(camera.pictures) > 5
    for number, picture in enumerate(camera.pictures):
        if problems := await picture.problems(disk, options):
            return [f"picture {number} of {len(camera.pictures)}", *problems]
    return []
