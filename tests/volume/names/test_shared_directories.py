"""What is acknowledged of directories in strict folders all hosts see at once, also where they do not ask."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from shared_lab import as_by_path, look, make, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.volume import Volume

NAMES = [b"a", b"b", b"c", b"d"]
MODES = [0o700, 0o711, 0o750, 0o777]
STEPS = 60


@dataclass
class Walk:
    """One host after the other changes a directory; all hosts store files, look, and forget what they know."""

    hosts: list[Volume]
    rng: random.Random
    truth: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """name -> (inode, mode)"""

    async def change(self) -> str:
        """Say what was done."""
        host, name = self.rng.choice(self.hosts), self.rng.choice(NAMES)
        if name not in self.truth:
            made = await host.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)
            self.truth[name] = (made.ino, 0o755)
            return f"made {name!r}"
        node = await look(host, name)
        free = [other for other in NAMES if other not in self.truth]
        chosen = self.rng.random()
        if chosen < 0.3:
            await as_by_path(lambda: host.tree.remove_directory(ROOT_INODE, name))
            del self.truth[name]
            return f"removed {name!r}"
        if chosen < 0.6 and free:
            await as_by_path(lambda: host.tree.rename(ROOT_INODE, name, ROOT_INODE, free[0], 0))
            self.truth[free[0]] = self.truth.pop(name)
            return f"renamed {name!r} to {free[0]!r}"
        mode = self.rng.choice(MODES)
        await as_by_path(lambda: host.inodes.set_attributes(node.ino, Changes(mode=mode), CALLER))
        self.truth[name] = (node.ino, mode)
        return f"gave {name!r} mode {mode:o}"

    async def check(self, host: Volume, done: str) -> None:
        for name in NAMES:
            try:
                node = await look(host, name)
                found = (node.ino, node.mode & 0o777)
            except errors.NotFound:
                found = None
            assert found == self.truth.get(name), f"{done}: host {self.hosts.index(host)} sees {name!r} as {found}"

    async def use(self, host: Volume, number: int) -> None:
        """For ever: what is committed lets the host believe what it knows, what is forgotten it asks for anew."""
        count = 0
        while True:
            if self.rng.random() < 0.3:
                inside.dentries(host).clear()
                for node in list(inside.nodes(host)):
                    if node.is_directory and node.ino != ROOT_INODE and not node.busy:
                        inside.nodes(host).drop(node)
            if self.rng.random() < 0.6:
                count += 1
                await make(host, b"file-%d-%d" % (number, count))
            else:
                try:
                    await look(host, self.rng.choice(NAMES))
                except errors.NotFound:
                    pass
            await trio.sleep(self.rng.random() * 0.01)

    async def be_deaf(self, chaos: Chaos) -> None:
        """For ever, now and then: news come late."""
        while True:
            await trio.sleep(self.rng.random() * 0.1)
            chaos.deaf = trio.Event()
            await trio.sleep(self.rng.random() * 0.06)
            chaos.deaf.set()
            chaos.deaf = None


@pytest.mark.parametrize("walk", range(10))
async def test_all_hosts_see_what_was_acknowledged(
    walk: int, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True, capacity=64 << 20)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random()), delay=0.25) for _ in range(3)]
    async with volumes(disk, options, 3, rng, chaos) as hosts, trio.open_nursery() as nursery:
        state = Walk(hosts, rng)
        for number, (host, its_chaos) in enumerate(zip(hosts, chaos, strict=True)):
            nursery.start_soon(state.use, host, number)
            nursery.start_soon(state.be_deaf, its_chaos)
        for _ in range(STEPS):
            change = await state.change()
            async with trio.open_nursery() as checks:
                for host in hosts:
                    checks.start_soon(state.check, host, change)
        for its_chaos in chaos:
            if its_chaos.deaf is not None:
                its_chaos.deaf.set()
        nursery.cancel_scope.cancel()
