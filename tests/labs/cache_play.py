"""Random tasks in nested namespaces, caches and others, that together never have room for all that is written.

Bytes follow from a name and the number of its version. So whoever reads any name, through any door, knows which version
that is, and that it is whole. Each name has one writer: what is absent stays so until it writes again.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import inside
import trio
from map_reading import map_read
from namespace_lab import make_namespace
from volume_lab import CALLER, MIB, Disk
from volume_play import Actor, Expected

from kvfuse.errors import EngineError, NoSpace, NotAdmitted, NotFound, Stale
from kvfuse.policy import POLICIES
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.namespaces.cache import block_key
from kvfuse.volume.namespaces.settings import Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

Place = tuple[int, bytes]
SIZES = 1, 4096, 30_000, 64 << 10, 200_000


def content(place: Place, version: int) -> bytes:
    """Of a name's version."""
    head = b"%d/%s/%d\n" % (*place, version)
    rng = random.Random(head)
    return head + rng.randbytes(rng.choice(SIZES))


@dataclass
class Written:
    """Versions of a name: an answer shows one from ``least`` on, or none."""

    place: Place
    least: int = 0
    latest: int = 0
    is_absent: bool = True
    """it is known to have no file since the last write"""

    def check(self, found: bytes | None, least: int) -> None:
        if found is None:
            return
        version = int(found.split(b"\n", 1)[0].rsplit(b"/", 1)[1])
        assert found == content(self.place, version), f"{self.place} has the bytes of another file, or a part of them"
        assert least <= version <= self.latest, f"{self.place} has version {version}, not {least}..{self.latest}"


@dataclass
class Blocks:
    """All names of all caches."""

    names: dict[Place, Written] = field(default_factory=dict)
    refusals: int = 0

    def at(self, place: Place) -> Written:
        return self.names.setdefault(place, Written(place))


class CacheActor(Actor):
    """Writes names of its own in the folders of caches, and reads all."""

    name_count = 200
    """in each folder"""

    def __init__(self, volume: Volume, blocks: Blocks, rng: random.Random, number: int, folders: list[int]) -> None:
        super().__init__(volume, Expected(), rng, number)
        self.blocks, self.folders, self.steps = blocks, folders, 0

    async def run(self, steps: int, pause: float = 0.0) -> None:
        actions: list[Callable[[Written], Awaitable[None]]] = [
            self.put, self.publish, self.publish_by_link, self.remove, self.cut, self.agree, self.hold, self.delete,
        ]  # fmt: skip
        for _ in range(steps):
            name = b"c%d.%d" % (self.number, self.rng.randrange(self.name_count))
            written = self.blocks.at((self.rng.choice(self.folders), name))
            await self.rng.choices(actions, [8, 6, 1, 1, 1, 3, 2, 1])[0](written)
            await self.look_around()
            check_space(self.volume)
            self.forget()
            if pause:
                await trio.sleep(self.rng.random() * pause)

    # -- writing -------------------------------------------------------------------------------------

    async def write_version(self, written: Written, write: Callable[[bytes], Awaitable[object]]) -> None:
        written.latest += 1
        written.is_absent = False
        try:
            await write(content(written.place, written.latest))
        except NotAdmitted:
            written.latest -= 1
        except EngineError:
            pass  # an engine failed before the write or after it: this version may be there, or the one before
        except NoSpace as error:
            raise AssertionError("a cache refuses what fits") from error
        else:
            written.least = written.latest

    async def put(self, written: Written) -> None:
        async def put(data: bytes) -> None:
            await self.volume.blocks.put(*written.place, memoryview(data), CALLER, 0o644)

        await self.write_version(written, put)

    async def write_file(self, place: Place, data: bytes) -> int:
        handle, ino = await self.create(*place)
        try:
            position = 0
            while position < len(data):
                piece = data[position : position + self.rng.choice([len(data), 20_000])]
                position += await self.volume.files.write(handle, position, piece)
        finally:
            await self.close(handle, ino)
        return ino

    async def publish(self, written: Written) -> None:
        self.steps += 1
        folder, name = written.place
        temporary = b"tmp%d.%d" % (self.number, self.steps)

        async def publish(data: bytes) -> None:
            await self.write_file((folder, temporary), data)
            try:
                await self.volume.tree.rename(folder, temporary, folder, name, 0)
            except NotFound:  # it was evicted between its last write and its new name
                self.blocks.refusals += 1
                raise NotAdmitted("") from None

        await self.write_version(written, publish)

    async def publish_by_link(self, written: Written) -> None:
        folder, name = written.place
        await self.remove(written)
        if not written.is_absent:
            return
        self.steps += 1
        temporary = b"tmp%d.%d" % (self.number, self.steps)

        async def publish(data: bytes) -> None:
            await self.write_file((folder, temporary), data)
            ino = await self.find(folder, temporary)
            try:
                if ino is not None:
                    await self.volume.tree.link(ino, folder, name)
                    self.known.append(ino)
                    await self.volume.tree.unlink(folder, temporary)
            except (NotFound, Stale):
                ino = None
            if ino is None:
                raise NotAdmitted("")

        await self.write_version(written, publish)

    async def remove(self, written: Written) -> None:
        try:
            await self.volume.tree.unlink(*written.place)
        except NotFound:
            pass
        except EngineError:
            return
        written.is_absent, written.least = True, written.latest + 1

    async def delete(self, written: Written) -> None:
        if await self.tolerant(self.volume.blocks.delete(written.place[0], [written.place[1]])):
            written.is_absent, written.least = True, written.latest + 1

    async def cut(self, written: Written) -> None:
        """Other work on a file of a cache, and folders that come and go there."""
        self.steps += 1
        place = written.place[0], b"cut%d.%d" % (self.number, self.steps)
        try:
            ino = await self.write_file(place, bytes(100_000))
            found = await self.find(*place)
            if found == ino:
                await self.volume.inodes.set_attributes(ino, Changes(size=5000), CALLER)
                await self.volume.inodes.set_xattr(ino, b"user.a", b"1")
                assert await self.read_all(ino) == bytes(5000)
            folder = await self.volume.tree.make_directory(place[0], b"d" + place[1], 0o755, CALLER)
            await self.volume.blocks.put(folder.ino, b"f", memoryview(bytes(50_000)), CALLER, 0o644)
            await self.tolerant(self.volume.tree.unlink(folder.ino, b"f"))
            await self.volume.tree.remove_directory(place[0], b"d" + place[1])
            self.volume.tree.forget(folder.ino, 1)
        except (NotFound, Stale, NotAdmitted, EngineError):
            pass

    # -- reading -------------------------------------------------------------------------------------

    async def look_around(self) -> None:
        for place in self.rng.sample(sorted(self.blocks.names), min(3, len(self.blocks.names))):
            written = self.blocks.at(place)
            least = written.least if written.place[1].startswith(b"c%d." % self.number) else 0
            door = self.rng.choice([self.read_by_name, self.read_by_map])
            try:
                found = await door(written.place)
            except EngineError:
                continue
            written.check(found, least)

    async def read_by_name(self, place: Place) -> bytes | None:
        ino = await self.find(*place)
        try:
            return None if ino is None else await self.read_all(ino)
        except Stale:
            return None

    async def read_by_map(self, place: Place) -> bytes | None:
        """As the thread of a ring."""
        _, uses = self.volume.blocks.terms(place[0])
        if uses is not None:
            uses.note(place[0], [place[1]])
        if self.rng.random() < 0.3:
            await self.volume.blocks.prefetch(place[0], [place[1]])
        binding = await self.volume.blocks.bind(*place)
        if binding is None or not binding.valid:
            return None
        try:
            node = inside.nodes(self.volume).get(binding.ino)
            if node is not None:
                await inside.mapper(self.volume).show(node, 0, max(0, (node.size - 1) // node.chunk_size))
        except Stale:
            return None
        found = map_read(binding.map, 0, 1 << 30)
        return found if binding.valid and found else None

    async def agree(self, written: Written) -> None:
        """What is absent at one door is absent at the next, until it is written again."""
        folder, name = written.place

        async def exists() -> bool:
            return (await self.volume.blocks.exists(folder, [name]))[0]

        async def binds() -> bool:
            return await self.volume.blocks.bind(folder, name) is not None

        async def is_found() -> bool:
            return await self.find(folder, name) is not None

        async def is_listed() -> bool:
            return name in {entry.name for entry in await self.volume.tree.list_directory(folder, 0, 100_000)}

        doors = [exists, binds, is_found, is_listed]
        self.rng.shuffle(doors)
        there = not written.is_absent
        for door in [*doors, doors[0]]:
            try:
                found = await door()
            except EngineError:
                return
            assert there or not found, f"{written.place} is there again, says {door.__name__}"
            there = found

    async def hold(self, written: Written) -> None:
        """An open file stays as it is, however long."""
        least = written.least if not written.is_absent else 0
        ino = await self.find(*written.place)
        if ino is None:
            return
        try:
            handle = await self.volume.files.open(ino, os.O_RDONLY, CALLER)
        except (Stale, EngineError):
            return
        if self.rng.random() < 0.5:
            self.forget()
        for _ in range(3):
            await trio.sleep(self.rng.random() * 3)
            try:
                data = bytes(await self.volume.files.read(handle, 0, 1 << 20))
            except EngineError:
                continue
            written.check(data, least)
        await self.volume.files.release(handle)


def check_space(volume: Volume) -> None:
    """Nothing has more than it may have."""
    space, core = volume.space(), inside.core(volume)
    assert 0 <= space.free <= space.size
    assert core.slabs.free_bytes + core.slabs.pending_bytes <= core.geometry.data_size
    assert core.file_count > 0


async def make_namespaces(disk: Disk, volume: Volume, rng: random.Random) -> tuple[list[int], int]:
    """(folders in caches of all policies, nested, and a folder of files in the root, which is a cache)."""
    policies = list(POLICIES)
    rng.shuffle(policies)
    folders = [ROOT_INODE]
    for number, policy in enumerate(policies):
        parent = rng.choice(folders[-2:]) if number % 2 else ROOT_INODE
        capacity = (2 if number % 2 else 4) * MIB
        admission = rng.choice(["all", "adaptive", "second-touch"])
        folders.append(
            await make_namespace(
                volume, parent, b"n%d" % number, kind="cache", eviction=policy, admission=admission, capacity=capacity
            )
        )
    return folders, await make_namespace(volume, ROOT_INODE, b"files", capacity=16 * MIB)


def make_cache(disk: Disk, rng: random.Random) -> None:
    """Let the root of a new volume be a cache."""
    settings = Settings().changed({"kind": "cache", "eviction": rng.choice(list(POLICIES)), "admission": "all"})
    disk.apply({schema.namespace_key(0): encode_settings(settings)}, ())


async def check_books(disk: Disk, volume: Volume) -> None:
    """At rest: the books of caches have all their files, and nothing else."""
    await volume.sync()
    caches, records = inside.caches(volume), disk.records
    names: dict[int, dict[int, bytes]] = {number: {} for number in caches}
    for key, row in records.items():
        if key[:1] == b"d":
            entry = schema.decode_entry(row.value)
            inode = schema.decode_inode(records[schema.inode_key(entry)].value) if isinstance(entry, int) else entry
            if inode.namespace in caches and stat.S_ISREG(inode.mode):
                directory, _, name = schema.split_entry_key(key)
                names[inode.namespace][block_key(directory, name)] = b"%d/%s" % (directory, name)
    for number, cache in caches.items():
        unknown = [name for key, name in names[number].items() if key not in cache.policy]
        assert not unknown, f"no eviction will ever see these of namespace {number}: {unknown}"
        assert len(cache.policy) == len(names[number]), f"files of namespace {number} that are not there"
