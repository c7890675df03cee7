"""Names, heirs and orphans at every commit: a daemon that is killed there leaves nothing that has to be mended."""

from __future__ import annotations

import os
import random

import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import KvfuseError
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import FileHandle, Volume

STEPS = 150


class Walk:
    """Blocks under a few names: made, renamed over each other, removed, held open, forgotten by the kernel."""

    def __init__(self, volume: Volume, rng: random.Random) -> None:
        self.volume = volume
        self.rng = rng
        self.known: list[int] = []
        self.handles: list[FileHandle] = []

    def name(self) -> bytes:
        return b"f%d" % self.rng.randrange(6)

    async def step(self, number: int) -> None:
        volume, rng = self.volume, self.rng
        action = rng.random()
        if action < 0.4:
            temporary = b"tmp%d" % number
            handle, node = await volume.create(ROOT_INODE, temporary, 0o644, CALLER, os.O_WRONLY)
            self.known.append(node.ino)
            await volume.write(handle, 0, b"x" * rng.choice([1000, 300_000, MIB, 2 * MIB]))
            await volume.release(handle)
            if rng.random() < 0.3:
                await trio.sleep(rng.random() * 0.1)
            await volume.rename(ROOT_INODE, temporary, ROOT_INODE, self.name(), 0)
        elif action < 0.55:
            await volume.unlink(ROOT_INODE, self.name())
        elif action < 0.7:
            await volume.rename(ROOT_INODE, self.name(), ROOT_INODE, self.name(), 0)
        elif action < 0.8:
            node = await volume.lookup(ROOT_INODE, self.name())
            self.known.append(node.ino)
            self.handles.append(await volume.open(node.ino, os.O_RDONLY, CALLER))
        elif action < 0.9 and self.handles:
            await volume.release(self.handles.pop(rng.randrange(len(self.handles))))
        elif action < 0.96 and self.known:
            volume.forget(self.known.pop(rng.randrange(len(self.known))), 1)
        else:
            await trio.sleep(rng.random() * 0.2)

    async def end(self) -> None:
        for handle in self.handles:
            await self.volume.release(handle)
        for ino in self.known:
            self.volume.forget(ino, 1)


@pytest.mark.parametrize("number", range(16))
async def test_a_crash_after_any_commit(seed: int, number: int, autojump_clock: trio.testing.MockClock) -> None:
    rng = random.Random(seed + number)
    options = lab_options(capacity=32 * MIB, chunk=4 * MIB)
    disk = Disk.format(options)
    crashes: list[Disk] = []
    disk.audit = lambda puts, deletes: crashes.append(disk.copy())
    chaos = Chaos(rng, delay=rng.choice([0, 0.3, 1.0]))
    async with opened(disk, options, chaos) as volume:
        walk = Walk(volume, rng)
        for step in range(STEPS):
            try:
                await walk.step(step)
            except KvfuseError:
                pass  # a name that is not there
        await walk.end()
        chaos.delay = 0
    assert len(crashes) > 5
    for crash in crashes:
        report = await check(crash)
        assert report.clean, [problem.text for problem in report.problems]
