"""Three hosts do random work on one volume, on engines that are reliable or fail, with room or without."""

from __future__ import annotations

import random

import inside
import pytest
import trio
import trio.testing
from records_audit import Audit
from scale import scaled
from shared_lab import LEASE, check_disk, get, joined, put, quiet, volumes, write_at
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.options.options import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
DISK_DEADLINE = 5.0
"""seconds, of the engines"""


class Actor:
    """Does what it likes to a few names that others change too, and remembers what it was told."""

    def __init__(self, volume: Volume, rng: random.Random, number: int, written: dict[bytes, set[bytes]]) -> None:
        self.volume = volume
        self.rng = rng
        self.number = number
        self.written = written
        """name -> whole contents that it may have"""
        self.tolerated: tuple[type[errors.KvfuseError], ...] = ()
        """where commits fail, what was asked for may have happened all the same"""

    async def run(self, steps: int, pause: float = 0.0) -> None:
        """``pause``: seconds between two of them, at most."""
        for serial in range(steps):
            if pause:
                await trio.sleep(self.rng.random() * pause)
            name = self.rng.choice(list(self.written))
            action = self.rng.choices([self.publish, self.unlink, self.read, self.overwrite], [6, 2, 4, 2])[0]
            try:
                await action(name, serial)
            except (errors.NotFound, errors.Stale, errors.Exists, *self.tolerated):
                pass

    def data(self) -> bytes:
        """Bytes that say where they come from, so that a mixture shows."""
        return self.rng.randbytes(16) * self.rng.choice([1, 300, 5000, 20_000])

    async def publish(self, name: bytes, serial: int) -> None:
        data, temporary = self.data(), b"tmp%d.%d" % (self.number, serial)
        self.written[name].add(data)
        await put(self.volume, temporary, data)
        await self.volume.tree.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)

    async def unlink(self, name: bytes, serial: int) -> None:
        await self.volume.tree.unlink(ROOT_INODE, name)

    async def read(self, name: bytes, serial: int) -> None:
        data = await get(self.volume, name)
        assert data is None or data in self.written[name], f"{name!r}: {len(data)} bytes that nobody wrote"

    async def overwrite(self, name: bytes, serial: int) -> None:
        """A file of its own, in place, in pieces."""
        own = b"own%d" % self.number
        data = self.data()
        await put(self.volume, own, data)
        offset = self.rng.randrange(len(data))
        piece = self.rng.randbytes(self.rng.randrange(1, 5000))
        await write_at(self.volume, own, offset, piece)
        expected = bytearray(data)
        expected[offset : offset + len(piece)] = piece
        assert await get(self.volume, own) == expected
        await self.volume.tree.unlink(ROOT_INODE, own)


def is_held(disk: Disk, freed_key: bytes) -> bool:
    """Somebody holds the slab of an f record, and should have seen to it."""
    row = disk.records[schema.holder_key(schema.key_slab(freed_key))]
    return schema.decode_holder(row.value).client != schema.NOBODY


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["reliable", "failing"])
@pytest.mark.parametrize("capacity", [64 * MIB, 9 * MIB], ids=["roomy", "full"])
async def test_random_work_of_three(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool, faults: float, capacity: int
) -> None:
    """``full``: there is hardly room for it, and the three have to share slabs."""
    options = lab_options(strict=strict, capacity=capacity, chunk=CHUNK, nodes=rng.choice([1000, 8]))
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(rng.random()), delay=0.3) for _ in range(3)]
    written: dict[bytes, set[bytes]] = {b"name%d" % number: set() for number in range(4)}
    async with volumes(disk, options, 3, rng, chaos) as all_volumes:
        for one in chaos:
            one.commit_error_after = faults
        crashed: list[Disk] = []

        async def crash() -> None:
            while True:
                await trio.sleep(rng.random() * 0.1)
                crashed.append(disk.copy())

        async with trio.open_nursery() as watching:
            watching.start_soon(crash)
            async with trio.open_nursery() as nursery:
                for number, volume in enumerate(all_volumes):
                    actor = Actor(volume, random.Random(rng.random()), number, written)
                    actor.tolerated = (errors.EngineError,) * (faults > 0) + (errors.NoSpace,) * (capacity < 64 * MIB)
                    nursery.start_soon(actor.run, 40)
            watching.cancel_scope.cancel()
        for one in chaos:
            one.commit_error_after = 0
        await quiet(*all_volumes)
        states = [{name: await get(volume, name) for name in written} for volume in all_volumes]
        assert states[0] == states[1] == states[2]
        assert all(states[0][name] is None or states[0][name] in written[name] for name in written)
        await trio.sleep(60)
        assert not [key for key in disk.records if key[:1] == b"o" or (key[:1] == b"f" and is_held(disk, key))]
    for copy in (*rng.sample(crashed, min(len(crashed), scaled(5))), disk):  # as if all had died at the same moment
        await check_disk(copy)


class KilledHost:
    """A host whose daemon is killed, or handed over, again and again; each is the same client."""

    def __init__(self, disk: Disk, options: Options, rng: random.Random, written: dict[bytes, set[bytes]]) -> None:
        self.disk, self.options, self.rng, self.written = disk, options, rng, written
        self.keeper = MemoryKeeper()
        self.clients: list[int] = []
        """of each life"""
        self.chaos: Chaos

    async def live(self, lives: int, arrivals: trio.Nursery) -> None:
        for life in range(lives):
            self.chaos = Chaos(random.Random(self.rng.random()), delay=0.3)
            self.chaos.late_writes, self.chaos.late_commits = trio.Event(), trio.Event()
            async with (
                joined(self.disk, self.options, 9, self.chaos, self.keeper) as volume,
                trio.open_nursery() as nursery,
            ):
                self.clients.append(inside.client(volume))
                actor = Actor(volume, random.Random(self.rng.random()), 100 + life, self.written)
                actor.tolerated = (errors.NoSpace,)
                nursery.start_soon(actor.run, 1000, 0.2)
                await trio.sleep(self.rng.random() ** 2 * 15)
                if self.rng.random() < 0.7:
                    self.chaos.stalled_writes = trio.Event()  # so that some are under way
                    await trio.sleep(self.rng.random())
                    self.chaos.killed = True
                    for event in (self.chaos.late_writes, self.chaos.late_commits):
                        arrivals.start_soon(self.arrive, event)
                nursery.cancel_scope.cancel()
                volume.hand_over()
            await trio.sleep(self.rng.random() * LEASE / 2)

    async def arrive(self, event: trio.Event) -> None:
        """What was under way when the daemon was killed, while nobody counts on its being over."""
        await trio.sleep(self.rng.random() * 2 * DISK_DEADLINE)
        event.set()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize(
    "capacity", [pytest.param(64 * MIB, marks=pytest.mark.ring(3)), 9 * MIB], ids=["roomy", "full"]
)
async def test_random_work_beside_a_host_that_is_killed(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool, capacity: int
) -> None:
    options = lab_options(strict=strict, capacity=capacity, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    written: dict[bytes, set[bytes]] = {b"name%d" % number: set() for number in range(4)}
    chaos = [Chaos(random.Random(rng.random()), delay=0.3) for _ in range(2)]
    killed = KilledHost(disk, options, rng, written)
    async with volumes(disk, options, 2, rng, chaos) as all_volumes:
        async with trio.open_nursery() as nursery:
            for number, volume in enumerate(all_volumes):
                actor = Actor(volume, random.Random(rng.random()), number, written)
                actor.tolerated = (errors.NoSpace,)
                nursery.start_soon(actor.run, 10_000, 0.5)
            async with trio.open_nursery() as arrivals:
                await killed.live(scaled(6), arrivals)
            nursery.cancel_scope.cancel()
        assert set(killed.clients) == {9}
        await quiet(*all_volumes)
        states = [{name: await get(volume, name) for name in written} for volume in all_volumes]
        assert states[0] == states[1]
        assert all(states[0][name] is None or states[0][name] in written[name] for name in written)
        await trio.sleep(60)
        assert not [key for key in disk.records if key[:1] == b"o" or (key[:1] == b"f" and is_held(disk, key))]
    await check_disk(disk)
