"""Random tasks over slow and failing engines, against a plain model, and a crash between any two steps.

Each file has one writer; many files are written at once, by name and through open handles. After every step
its writer compares. A crash is a copy of what the engines hold: the copy must be clean, hold all that was
fsynced byte for byte, and show every published name as one of the blocks it was, whole.
"""

from __future__ import annotations

import copy
import os
import random
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import inside
import numpy as np
import trio
import trio.testing
from volume_lab import CALLER, Chaos, Disk, check, opened

from kvfuse.errors import EngineError, NoSpace, NotFound
from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordLimits
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE, Changes, Handle
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
FILE_MAX = 20 * CHUNK


@dataclass
class Expected:
    """What a crash may show. The first state of each list is the one that must at least be there."""

    blocks: dict[bytes, list[bytes | None]] = field(default_factory=dict)
    """path -> contents that it had, None: absent"""
    edits: dict[bytes, list[bytes]] = field(default_factory=dict)
    """path -> contents of a file that changes in place: each byte is that of any of them"""


def pattern(rng: random.Random, length: int) -> bytes:
    return rng.randbytes(length)


def log_size(rng: random.Random, size_max: int) -> int:
    return int(size_max ** rng.random())


class Actor:
    """One task with files of its own."""

    def __init__(
        self, volume: Volume, expected: Expected, rng: random.Random, number: int, home: int = ROOT_INODE
    ) -> None:
        self.volume = volume
        self.home = home
        self.expected = expected
        self.rng = rng
        self.number = number
        self.serial = 0
        self.refusals = 0
        """writes that found no room"""
        self.known: list[int] = []
        """inodes looked up, as a kernel that remembers them: until the end of the step"""

    def forget(self) -> None:
        for ino in self.known:
            self.volume.tree.forget(ino, 1)
        self.known.clear()

    async def tolerant(self, work: Awaitable[object]) -> bool:
        """False when an engine failed: what was asked is visible all the same, but perhaps not stored.

        So it is where bytes that a failed sync left in doubt have no room to be written again.
        """
        try:
            await work
        except (EngineError, NoSpace):
            return False
        return True

    async def find(self, parent: int, name: bytes) -> int | None:
        try:
            node = await self.volume.tree.lookup(parent, name)
        except NotFound:
            return None
        self.known.append(node.ino)
        return node.ino

    async def create(self, parent: int, name: bytes) -> tuple[Handle, int]:
        try:
            handle, node = await self.volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR)
        except EngineError:  # strict: the name is there, its commit will be tried again
            node = await self.volume.tree.lookup(parent, name)
            handle = await self.volume.files.open(node.ino, os.O_RDWR, CALLER)
        return handle, node.ino

    async def close(self, handle: Handle, ino: int) -> None:
        await self.tolerant(self.volume.files.flush(handle))
        await self.volume.files.release(handle)
        self.volume.tree.forget(ino, 1)

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        try:
            return await self.volume.files.write(handle, offset, data)
        except NoSpace:
            self.refusals += 1
            return 0

    async def try_write(self, handle: Handle, offset: int, data: bytes) -> int:
        try:
            return await self.write(handle, offset, data)
        except EngineError:
            return 0

    async def read_all(self, ino: int) -> bytes:
        handle = await self.volume.files.open(ino, os.O_RDONLY, CALLER)
        data = bytes(await self.volume.files.read(handle, 0, FILE_MAX * 2))
        await self.volume.files.release(handle)
        return data


class Publisher(Actor):
    """Temporary name, write, rename over what was there; unlinks; moves; exchanges; hard links."""

    async def run(self, steps: int, folders: list[int]) -> None:
        self.names = [(folder, b"p%d.%d" % (self.number, index)) for folder in folders for index in range(3)]
        for place in self.names:
            self.expected.blocks[b"%d/%s" % place] = [None]
        for _ in range(steps):
            place = self.rng.choice(self.names)
            action = self.rng.choices(
                [self.publish, self.unlink, self.move, self.exchange, self.link, self.settle], [8, 2, 2, 1, 2, 1]
            )[0]
            await action(place)
            await self.compare(place)
            self.forget()

    def history(self, place: tuple[int, bytes]) -> list[bytes | None]:
        return self.expected.blocks[b"%d/%s" % place]

    async def change(self, work: Awaitable[object], *places: tuple[int, bytes], settles: bool = True) -> bool:
        """Do what ``history`` says of ``places`` already. When an engine fails it may have been done or not."""
        if await self.tolerant(work):
            if inside.core(self.volume).strict and settles:
                self.settled(*places)
            return True
        for place in places:
            ino = await self.find(*place)
            found = None if ino is None else await self.read_all(ino)
            assert found in self.history(place)[-2:]
            self.history(place).append(found)
        return False

    def settled(self, *places: tuple[int, bytes]) -> None:
        for place in places:
            del self.history(place)[:-1]

    async def publish(self, place: tuple[int, bytes]) -> None:
        self.serial += 1
        folder, name = place
        data = pattern(self.rng, log_size(self.rng, 4 * CHUNK))
        temporary = b"tmp.%d.%d" % (self.number, self.serial)
        handle, ino = await self.create(folder, temporary)
        position = 0
        while position < len(data):
            piece = data[position : position + self.rng.choice([len(data), 4096, 30_000])]
            written = await self.try_write(handle, position, piece)
            if not written:
                await self.close(handle, ino)
                await self.tolerant(self.volume.tree.unlink(folder, temporary))
                return
            position += written
        if self.rng.random() < 0.2:
            await self.tolerant(self.volume.files.fsync(handle))
        early = self.rng.random() < 0.3
        if not early:
            await self.close(handle, ino)
        self.history(place).append(data)
        done = await self.change(self.volume.tree.rename(folder, temporary, folder, name, 0), place, settles=not early)
        if early:
            if done and self.rng.random() < 0.4 and await self.tolerant(self.volume.files.fsync(handle)):
                self.settled(place)
            await self.close(handle, ino)

    async def unlink(self, place: tuple[int, bytes]) -> None:
        history = self.history(place)
        if history[-1] is not None:
            keep = await self.find(*place)
            handle = None
            if self.rng.random() < 0.5 and keep is not None:
                handle = await self.volume.files.open(keep, os.O_RDWR, CALLER)
            data = history[-1]
            history.append(None)
            await self.change(self.volume.tree.unlink(*place), place)
            if handle is not None:  # the open file lives on, and may be written
                assert bytes(await self.volume.files.read(handle, 0, FILE_MAX)) == data
                extra = pattern(self.rng, log_size(self.rng, CHUNK))
                has_no_name = (await self.volume.inodes.attributes(keep)).nlink == 0
                if has_no_name and await self.try_write(handle, len(data), extra) == len(extra):
                    assert bytes(await self.volume.files.read(handle, 0, FILE_MAX)) == data + extra
                await self.volume.files.release(handle)

    async def move(self, place: tuple[int, bytes]) -> None:
        other = self.rng.choice(self.names)
        source, target = self.history(place), self.history(other)
        if source[-1] is None or other == place:
            return
        same = await self.find(*place) == await self.find(*other)  # two names of one inode: rename does nothing
        if not same:
            target.append(source[-1])
            source.append(None)
        await self.change(self.volume.tree.rename(*place, *other, 0), place, other)

    async def exchange(self, place: tuple[int, bytes]) -> None:
        other = self.rng.choice(self.names)
        first, second = self.history(place), self.history(other)
        if first[-1] is None or second[-1] is None or other == place:
            return
        first_data, second_data = first[-1], second[-1]
        first.append(second_data)
        second.append(first_data)
        await self.change(self.volume.tree.rename(*place, *other, RENAME_EXCHANGE), place, other)

    async def link(self, place: tuple[int, bytes]) -> None:
        other = self.rng.choice(self.names)
        ino = await self.find(*place)
        if ino is None or self.history(other)[-1] is not None:
            return
        self.history(other).append(self.history(place)[-1])
        if await self.change(self.volume.tree.link(ino, *other), other):
            self.known.append(ino)

    async def settle(self, place: tuple[int, bytes]) -> None:
        if await self.tolerant(self.volume.sync()):
            self.settled(*self.names)

    async def compare(self, place: tuple[int, bytes]) -> None:
        wanted = self.history(place)[-1]
        ino = await self.find(*place)
        if wanted is None:
            assert ino is None, f"{place} is there again"
        else:
            assert ino is not None, f"{place} is gone"
            assert await self.read_all(ino) == wanted, f"{place} has other bytes"


class Editor(Actor):
    """One file changed in place, truncated, reopened, fsynced."""

    async def run(self, steps: int, folder: int) -> None:
        self.folder, self.name = folder, b"e%d" % self.number
        self.handle, self.ino = await self.create(folder, self.name)
        while not await self.tolerant(self.volume.files.fsync(self.handle)):
            pass
        self.data = b""
        self.states = self.expected.edits.setdefault(b"%d/%s" % (folder, self.name), [b""])
        actions = [self.overwrite, self.append, self.truncate, self.fsync, self.reopen, self.compare]
        for _ in range(steps):
            await self.rng.choices(actions, [6, 4, 2, 2, 2, 1])[0]()
            await self.compare()
            self.forget()
        await self.close(self.handle, self.ino)

    def becomes(self, data: bytes) -> None:
        self.data = data
        self.states.append(data)

    async def put(self, offset: int, data: bytes) -> None:
        before = self.data
        after = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]
        self.states.append(after)
        try:
            written = await self.write(self.handle, offset, data)
        except EngineError:
            now = await self.read_all(self.ino)
            assert len(before) <= len(now) <= max(len(before), len(after))
            assert made_of(now, [before, after]), "a failed write changed other bytes"
            self.becomes(now)
            return
        if written:
            self.becomes(before[:offset].ljust(offset, b"\0") + data[:written] + before[offset + written :])
        else:
            self.becomes(before)

    async def overwrite(self) -> None:
        size = log_size(self.rng, 2 * CHUNK)
        await self.put(self.rng.randrange(max(1, len(self.data))), pattern(self.rng, size))

    async def append(self) -> None:
        if len(self.data) < FILE_MAX - 4 * CHUNK:
            gap = log_size(self.rng, 2 * CHUNK) if self.rng.random() < 0.2 else 0
            await self.put(len(self.data) + gap, pattern(self.rng, log_size(self.rng, 3 * CHUNK)))

    async def truncate(self) -> None:
        size = self.rng.choice([0, len(self.data) // 2, self.rng.randrange(FILE_MAX // 2), len(self.data) + 5])
        self.states.append(self.data[:size].ljust(size, b"\0"))
        if await self.tolerant(self.volume.inodes.set_attributes(self.ino, Changes(size=size), CALLER)):
            self.data = self.states[-1]
        else:
            self.becomes(await self.read_all(self.ino))

    async def fsync(self) -> None:
        try:
            is_durable = await self.tolerant(self.volume.files.fsync(self.handle))
        except NoSpace:  # a sync failed before, and a full quota has no room for its bytes again
            is_durable = False
        if is_durable:
            del self.states[:-1]

    async def reopen(self) -> None:
        await self.close(self.handle, self.ino)
        node = await self.volume.tree.lookup(self.folder, self.name)
        self.ino = node.ino
        flags = os.O_RDWR
        if self.rng.random() < 0.2:
            flags |= os.O_TRUNC
            self.becomes(b"")
        self.handle = await self.volume.files.open(node.ino, flags, CALLER)

    async def compare(self) -> None:
        offset = self.rng.randrange(len(self.data) + 1)
        size = self.rng.choice([len(self.data), 1000, CHUNK])
        got = bytes(await self.volume.files.read(self.handle, offset, size))
        assert got == self.data[offset : offset + size], f"inode {self.ino}: other bytes at {offset}"
        assert (await self.volume.inodes.attributes(self.ino)).size == len(self.data)


class Gardener(Actor):
    """Folders that come and go with files in them, attributes, and files that move out of a dying folder."""

    async def run(self, steps: int) -> None:
        volume = self.volume
        for _ in range(steps):
            self.serial += 1
            name = b"d%d.%d" % (self.number, self.serial)
            await self.tolerant(volume.tree.make_directory(self.home, name, 0o755, CALLER))
            folder = await self.find(self.home, name)
            assert folder is not None
            handle, ino = await self.create(folder, b"f")
            await self.try_write(handle, 0, pattern(self.rng, 5000))
            await self.tolerant(volume.inodes.set_xattr(ino, b"user.a", b"1"))
            if self.rng.random() < 0.5:
                await self.tolerant(volume.files.fsync(handle))
            target = b"moved.%d" % self.number
            moving = self.rng.random() < 0.7
            if moving:
                await self.try_write(handle, 0, pattern(self.rng, 6000))
                await self.tolerant(volume.tree.rename(folder, b"f", self.home, target, 0))
                await self.try_write(handle, 3, pattern(self.rng, 6000))
            else:
                await self.tolerant(volume.tree.unlink(folder, b"f"))
            if await self.tolerant(volume.tree.remove_directory(self.home, name)):
                assert await self.find(self.home, name) is None
            await self.close(handle, ino)
            self.forget()


def made_of(data: bytes, states: list[bytes]) -> bool:
    """Every byte is that of one of the states at its place; what a state does not cover is zero."""
    got = np.frombuffer(data, np.uint8)
    fits = np.zeros(len(got), bool)
    for state in states:
        fits |= got == np.frombuffer(state[: len(data)].ljust(len(data), b"\0"), np.uint8)
    return bool(fits.all())


async def check_crash(disk: Disk, options: Options, expected: Expected) -> None:
    """A daemon died and left ``disk``."""
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]
    async with opened(disk, options) as volume:
        reader = Actor(volume, expected, random.Random(0), 0)
        for path, history in expected.blocks.items():
            found = await find_path(reader, path)
            assert found in history, f"{path!r} holds what it never was: {describe(found, history)}"
        for path, states in expected.edits.items():
            found = await find_path(reader, path)
            assert found is not None, f"{path!r} was fsynced and is gone"
            assert min(map(len, states)) <= len(found) <= max(map(len, states)), f"{path!r}: size {len(found)}"
            assert made_of(found, states), f"{path!r} holds bytes it never had"
        await read_everything(reader, ROOT_INODE)
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]
    assert all("heads" in note for note in report.notes), report.notes


def describe(found: bytes | None, history: list[bytes | None]) -> str:
    def short(data: bytes | None) -> str:
        return "absent" if data is None else f"{len(data)} bytes {data[:4].hex()}"

    return f"{short(found)}, not one of {[short(state) for state in history]}"


async def find_path(reader: Actor, path: bytes) -> bytes | None:
    folder, _, name = path.partition(b"/")
    ino = await reader.find(int(folder), name)
    return None if ino is None else await reader.read_all(ino)


async def read_everything(reader: Actor, folder: int) -> None:
    for entry in await reader.volume.tree.list_directory(folder, 0, 10_000):
        ino = entry.attributes.ino
        reader.volume.tree.remember(folder, entry)
        if stat.S_ISDIR(entry.attributes.mode):
            await read_everything(reader, ino)
        else:
            await reader.read_all(ino)


async def _in_root(disk: Disk, volume: Volume) -> int:
    return ROOT_INODE


async def play(
    rng: random.Random,
    options: Options,
    chaos: Chaos,
    *,
    faults: float,
    steps: int,
    crashes: int,
    limits: RecordLimits = LIMITS,
    make_home: Callable[[Disk, Volume], Awaitable[int]] = _in_root,
) -> None:
    """Actors at work; copies of the disk at random moments, checked after each batch of them.

    ``make_home``: the folder in which they work.
    """
    disk = Disk.format(options)
    expected = Expected()
    snapshots: list[tuple[Disk, Expected]] = []
    async with opened(disk, options, chaos, limits) as volume:
        folders, home = [], await make_home(disk, volume)
        for name in (b"x", b"y"):
            folders.append((await volume.tree.make_directory(home, name, 0o755, CALLER)).ino)
        await volume.sync()
        chaos.commit_error = chaos.write_error = faults
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as actors:
                seeds: Iterator[random.Random] = iter(lambda: random.Random(rng.random()), None)
                for number in range(3):
                    actors.start_soon(Publisher(volume, expected, next(seeds), number).run, steps, folders)
                    actors.start_soon(Editor(volume, expected, next(seeds), number).run, steps, folders[0])
                actors.start_soon(Gardener(volume, expected, next(seeds), 0, home).run, steps // 4)
                nursery.start_soon(take_snapshots, disk, expected, snapshots, rng, crashes)
            nursery.cancel_scope.cancel()
        chaos.commit_error = chaos.write_error = 0.0
    snapshots.append((disk, copy.deepcopy(expected)))
    for history in (*expected.blocks.values(), *expected.edits.values()):
        del history[:-1]
    snapshots.append((disk.copy(), expected))  # after the end everything is there
    for crashed, wanted in snapshots:
        await check_crash(crashed, options, wanted)


async def take_snapshots(
    disk: Disk, expected: Expected, snapshots: list[tuple[Disk, Expected]], rng: random.Random, count: int
) -> None:
    for _ in range(count):
        await trio.sleep(rng.random() * 0.15)
        snapshots.append((disk.copy(), copy.deepcopy(expected)))
