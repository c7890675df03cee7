"""Files that several clients of a shared volume change at the same time: nothing is lost, and nothing made up."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import names_in, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options

from kvfuse import errors
from kvfuse.volume import schema
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10


async def put(volume: Volume, name: bytes, data: bytes, parent: int = ROOT_INODE) -> None:
    """Make a file, as a shell's redirection does."""
    handle, node = await volume.create(parent, name, 0o644, CALLER, os.O_RDWR)
    await volume.write(handle, 0, data)
    await volume.flush(handle)
    await volume.release(handle)
    volume.forget(node.ino, 1)


async def get(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> bytes | None:
    try:
        node = await volume.lookup(parent, name)
    except errors.NotFound:
        return None
    try:
        handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
        try:
            return bytes(await volume.read(handle, 0, 64 * MIB))
        finally:
            await volume.release(handle)
    finally:
        volume.forget(node.ino, 1)


async def write_at(volume: Volume, name: bytes, offset: int, data: bytes, flags: int = os.O_RDWR) -> None:
    node = await volume.lookup(ROOT_INODE, name)
    handle = await volume.open(node.ino, flags, CALLER)
    await volume.write(handle, offset, data)
    await volume.flush(handle)
    await volume.fsync(handle)
    await volume.release(handle)
    volume.forget(node.ino, 1)


async def quiet(*all_volumes: Volume) -> None:
    """Everything is stored, and the watches have told it."""
    for volume in all_volumes:
        await volume.sync()
    await trio.sleep(1)


def slots_of(disk: Disk) -> Counter[int]:
    """How many records name each slot."""
    found: Counter[int] = Counter()
    for key, row in disk.records.items():
        if key[:1] == b"d":
            entry = schema.decode_entry(row.value)
            chunks = () if isinstance(entry, int) else entry.chunks
        elif key[:1] in (b"i", b"o"):
            chunks = schema.decode_inode(row.value).chunks
        elif key[:1] == b"c":
            chunks = (schema.decode_chunk(row.value),)
        else:
            chunks = ()
        found.update(extent.addr for chunk in chunks for extent in chunk)
    return found


async def check_disk(disk: Disk) -> None:
    """Nobody has it open any more."""
    assert all(count == 1 for count in slots_of(disk).values())
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_what_one_wrote_the_other_reads(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict, capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    data = {b"%d" % number: rng.randbytes(rng.randrange(1, 12 * CHUNK)) for number in range(10)}
    async with volumes(disk, options, 2, rng) as (one, two):
        for number, name in enumerate(data):
            await put((one, two)[number % 2], name, data[name])
        if not strict:
            await quiet(one, two)
        for volume in (one, two):
            for name in data:
                assert await get(volume, name) == data[name]
    await check_disk(disk)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_disjoint_writes_of_two_hosts_are_both_there(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict, capacity=32 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    expected = bytearray(rng.randbytes(12 * CHUNK))
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(one, b"file", bytes(expected))
        await quiet(one, two)
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for volume, parity in ((one, 0), (two, 1)):
                    for page in rng.sample(range(parity, len(expected) // 4096, 2), 3):
                        data = rng.randbytes(4096)
                        expected[page * 4096 : (page + 1) * 4096] = data
                        nursery.start_soon(write_at, volume, b"file", page * 4096, data)
        await quiet(one, two)
        assert await get(one, b"file") == expected
        assert await get(two, b"file") == expected
    await check_disk(disk)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_appends_of_all_hosts_are_there_once(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict, capacity=32 * MIB, chunk=4096)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(one, b"log", b"")
        await quiet(one, two)

        async def append(volume: Volume, title: bytes) -> None:
            for number in range(20):
                line = b"%s %d %s\n" % (title, number, b"x" * rng.choice([1, 500, 5000]))
                node = await volume.lookup(ROOT_INODE, b"log")
                handle = await volume.open(node.ino, os.O_WRONLY | os.O_APPEND, CALLER)
                await volume.write(handle, node.size, line)  # as the kernel does, by the size it knows
                lines.add(line)
                await volume.fsync(handle)
                await volume.release(handle)
                volume.forget(node.ino, 1)

        lines: set[bytes] = set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(append, one, b"one")
            nursery.start_soon(append, two, b"two")
        await quiet(one, two)
        for volume in (one, two):
            found = await get(volume, b"log")
            assert found is not None
            assert Counter(found.splitlines(keepends=True)) == Counter(lines)
    await check_disk(disk)


async def test_of_files_that_two_put_under_one_name_one_is_whole(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=32 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    wanted: dict[bytes, list[bytes]] = {}
    async with volumes(disk, options, 3, rng) as all_volumes:

        async def work(volume: Volume, number: int, rng: random.Random) -> None:
            for serial in range(30):
                name, data = b"name%d" % rng.randrange(5), rng.randbytes(rng.randrange(1, 3 * CHUNK))
                wanted.setdefault(name, []).append(data)
                await put(volume, b"tmp%d.%d" % (number, serial), data)
                await volume.rename(ROOT_INODE, b"tmp%d.%d" % (number, serial), ROOT_INODE, name, 0)

        async with trio.open_nursery() as nursery:
            for number, volume in enumerate(all_volumes):
                nursery.start_soon(work, volume, number, random.Random(rng.random()))
        await quiet(*all_volumes)
        for volume in all_volumes:
            assert await names_in(volume) == sorted(wanted)
        found = [{name: await get(volume, name) for name in wanted} for volume in all_volumes]
        assert found[0] == found[1] == found[2]
        assert all(found[0][name] in wanted[name] for name in wanted)
        await trio.sleep(60)  # what was replaced is freed
        assert not [key for key in disk.records if key[:1] in (b"o", b"f")]
    await check_disk(disk)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_what_another_host_removes_stays_readable_while_it_is_open(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict, capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    data = rng.randbytes(10 * CHUNK)
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        node = await two.lookup(ROOT_INODE, b"file")
        handle = await two.open(node.ino, os.O_RDONLY, CALLER)
        await one.unlink(ROOT_INODE, b"file")
        await quiet(one, two)
        for number in range(10):  # would take the slots, if they were free
            await put(one, b"other%d" % number, rng.randbytes(10 * CHUNK))
        await trio.sleep(60)
        assert bytes(await two.read(handle, 0, 64 * MIB)) == data
        await two.release(handle)
        two.forget(node.ino, 1)
        await trio.sleep(120)
        assert not [key for key in disk.records if key[:1] in (b"o", b"f", b"h")]
    await check_disk(disk)


class Actor:
    """Does what it likes to a few names that others change too, and remembers what it was told."""

    def __init__(self, volume: Volume, rng: random.Random, number: int, written: dict[bytes, set[bytes]]) -> None:
        self.volume = volume
        self.rng = rng
        self.number = number
        self.written = written
        """name -> whole contents that it may have"""
        self.tolerant = False
        """some commits fail: then what was asked for may have happened"""

    async def run(self, steps: int) -> None:
        for serial in range(steps):
            name = self.rng.choice(list(self.written))
            action = self.rng.choices([self.publish, self.unlink, self.read, self.overwrite], [6, 2, 4, 2])[0]
            try:
                await action(name, serial)
            except (errors.NotFound, errors.Stale, errors.Exists):
                pass
            except errors.EngineError:
                if not self.tolerant:
                    raise

    def data(self) -> bytes:
        """Bytes that say where they come from, so that a mixture shows."""
        return self.rng.randbytes(16) * self.rng.choice([1, 300, 5000, 20_000])

    async def publish(self, name: bytes, serial: int) -> None:
        data, temporary = self.data(), b"tmp%d.%d" % (self.number, serial)
        self.written[name].add(data)
        await put(self.volume, temporary, data)
        await self.volume.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)

    async def unlink(self, name: bytes, serial: int) -> None:
        await self.volume.unlink(ROOT_INODE, name)

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
        await self.volume.unlink(ROOT_INODE, own)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["reliable", "failing"])
async def test_random_work_of_three(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool, faults: float
) -> None:
    options = lab_options(strict=strict, capacity=64 * MIB, chunk=CHUNK, nodes=rng.choice([1000, 8]))
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
                    actor.tolerant = faults > 0
                    nursery.start_soon(actor.run, 40)
            watching.cancel_scope.cancel()
        for one in chaos:
            one.commit_error_after = 0
        await quiet(*all_volumes)
        states = [{name: await get(volume, name) for name in written} for volume in all_volumes]
        assert states[0] == states[1] == states[2]
        assert all(states[0][name] is None or states[0][name] in written[name] for name in written)
        await trio.sleep(60)
        assert not [key for key in disk.records if key[:1] in (b"o", b"f")]
    for copy in (*rng.sample(crashed, min(len(crashed), 10)), disk):  # as if all had died at the same moment
        await check_disk(copy)
