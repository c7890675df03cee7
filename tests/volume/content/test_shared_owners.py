"""Files whose bytes one client alone changes, while others rename them, set attributes and read: nothing is lost."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from packing_lab import pack_everything
from records_audit import Audit
from shared_lab import put, quiet, read, volumes
from shared_walk import EVERY_TIME
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.volume import Volume

CHUNK = 4096
SIZE = 9000
"""writes begin in front of it"""
STEPS = ("write", "write", "append", "cut", "grow", "fsync", "reopen", "read")
RENAME_NOREPLACE = 1
PAUSE_MAX = 0.08


def names_of(number: int) -> tuple[bytes, bytes]:
    """What the file of a client may be called."""
    return b"f%d" % number, b"g%d" % number


@dataclass
class Owner:
    """A program that has a file to itself, and knows what it has to say."""

    volume: Volume
    ino: int
    rng: random.Random
    data: bytearray = field(default_factory=bytearray)

    async def run(self, step_count: int) -> None:
        handle = await self.open()
        for step in range(step_count):
            what = self.rng.choice(STEPS)
            if what == "reopen":
                handle = await self.reopen(handle)
            elif what == "fsync":
                with suppress(errors.EngineError):
                    await self.volume.files.fsync(handle)
            elif what == "read":
                with suppress(errors.EngineError):
                    found = bytes(await self.volume.files.read(handle, 0, MIB))
                    assert found == self.data, f"step {step} of inode {self.ino}"
            else:
                try:
                    await self.change(handle, what)
                except errors.EngineError:  # it may have been done in part
                    await self.write_anew(handle)
            await trio.sleep(self.rng.random() * PAUSE_MAX)
        await self.volume.files.release(handle)

    async def change(self, handle: FileHandle, what: str) -> None:
        data, rng = self.data, self.rng
        if what in ("cut", "grow"):
            size = rng.randrange(len(data) + 1) if what == "cut" else len(data) + rng.randrange(SIZE)
            self.data = data[:size].ljust(size, b"\0")
            await self.resize(size)
            return
        start = len(data) if what == "append" else rng.randrange(SIZE)
        written = bytes([rng.randrange(1, 256)]) * rng.randrange(1, SIZE)
        self.data = data[:start].ljust(start, b"\0") + written + data[start + len(written) :]
        await self.volume.files.write(handle, start, written)

    async def resize(self, size: int) -> None:
        """As the kernel: a path that another client changes meanwhile is walked again."""
        for _ in range(5):
            with suppress(errors.Stale):
                await self.volume.inodes.set_attributes(self.ino, Changes(size=size), CALLER)
                return
        raise AssertionError(f"inode {self.ino} is stale time and again")

    async def write_anew(self, handle: FileHandle) -> None:
        while True:
            with suppress(errors.EngineError):
                await self.resize(0)
                if self.data:
                    await self.volume.files.write(handle, 0, bytes(self.data))
                return
            await trio.sleep(PAUSE_MAX)

    async def open(self) -> FileHandle:
        while True:
            with suppress(errors.EngineError, errors.Stale):
                return await self.volume.files.open(self.ino, os.O_RDWR, CALLER)
            await trio.sleep(PAUSE_MAX)

    async def reopen(self, handle: FileHandle) -> FileHandle:
        opened = await self.open()
        with suppress(errors.EngineError):
            await self.volume.files.flush(handle)
        await self.volume.files.release(handle)
        return opened


@dataclass
class Meddler:
    """Another program on the same client: it does to all files what changes no bytes."""

    volume: Volume
    own_ino: int
    count: int
    rng: random.Random

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            with suppress(errors.OperationError):
                await self.step(names_of(self.rng.randrange(self.count)))
            await trio.sleep(self.rng.random() * PAUSE_MAX)

    async def step(self, names: tuple[bytes, bytes]) -> None:
        volume, rng = self.volume, self.rng
        what = rng.choice(("chmod", "rename", "rename", "read", "set", "forget"))
        name, other = rng.sample(names, 2)
        if what == "read":
            await read(volume, name)
        elif what == "forget":
            for ino, _, _ in list(inside.core(volume).places):
                if ino != self.own_ino and rng.random() < 0.2:
                    volume.tree.forget(ino, EVERY_TIME)
        else:
            ino = (await volume.tree.lookup(ROOT_INODE, name)).ino
            if what == "rename":
                await volume.tree.rename(ROOT_INODE, name, ROOT_INODE, other, RENAME_NOREPLACE)
            elif what == "chmod":
                await volume.inodes.set_attributes(ino, Changes(mode=rng.choice((0o600, 0o644))), CALLER)
            else:
                await volume.inodes.set_xattr(ino, b"user.a", b"1")


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.1, 0.2], ids=["reliable", "failing", "failing often"])
@pytest.mark.parametrize("count", [2, 3])
async def test_a_file_has_what_its_owner_wrote(
    rng: random.Random, autojump_clock: trio.testing.MockClock, count: int, faults: float, strict: bool
) -> None:
    await play(rng, count, faults, strict, CHUNK)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.1], ids=["reliable", "failing"])
async def test_the_same_with_chunks_that_are_compressed(
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    faults: float,
    strict: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack_everything(monkeypatch)
    await play(rng, 2, faults, strict, 4 * CHUNK)


async def play(rng: random.Random, count: int, faults: float, strict: bool, chunk: int) -> None:
    options = lab_options(strict=strict, capacity=64 * MIB, chunk=chunk)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(count)]
    async with volumes(disk, options, count, rng, chaos) as all_volumes:
        for number, volume in enumerate(all_volumes):
            await put(volume, names_of(number)[0], b"")
        await quiet(*all_volumes)
        owners, meddlers = [], []
        for number, volume in enumerate(all_volumes):
            ino = (await volume.tree.lookup(ROOT_INODE, names_of(number)[0])).ino
            owners.append(Owner(volume, ino, random.Random(rng.random())))
            meddlers.append(Meddler(volume, ino, count, random.Random(rng.random())))
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = faults
        async with trio.open_nursery() as others:
            for meddler in meddlers:
                others.start_soon(meddler.run)
            async with trio.open_nursery() as nursery:
                for owner in owners:
                    nursery.start_soon(owner.run, 60)
            others.cancel_scope.cancel()
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = 0.0
        await quiet(*all_volumes)
        await quiet(*all_volumes)
        for volume in all_volumes:
            for number, owner in enumerate(owners):
                assert await by_either_name(volume, number) == owner.data


async def by_either_name(volume: Volume, number: int) -> bytes | None:
    for name in names_of(number):
        with suppress(errors.NotFound):
            return await read(volume, name)
    return None
