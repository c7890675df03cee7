"""Blocks that are rows, as files: names, sketches that become blocks, and what stays an ordinary file."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import inside
import pytest
import trio
import trio.testing
from namespace_lab import make_namespace
from volume_lab import MIB, Disk, check, lab_options, opened

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE, ROW_TERMS, Attributes, Caller, Changes
from kvfuse.volume.blocks import block_tables
from kvfuse.volume.blocks.sketches import Sketch
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

KERNEL = Caller(0, 0)
RING = Caller(0, 0, keeps_privileges=True, groups=frozenset())


@dataclass
class Door:
    """The file door and the ring door of a directory of blocks."""

    volume: Volume
    folder: int

    async def store(self, name: bytes, data: bytes, flags: int = os.O_WRONLY) -> None:
        handle = await self.create(name, flags)
        await self.volume.files.write(handle, 0, data, by_kernel=True)
        await self.close(handle)

    async def store_as(self, caller: Caller, name: bytes, data: bytes) -> None:
        handle = await self.create(name, caller=caller)
        await self.volume.files.write(handle, 0, data, by_kernel=True)
        await self.close(handle)

    async def replace(self, name: bytes, data: bytes) -> None:
        await self.store(b"tmp", data)
        await self.rename(b"tmp", name)

    async def remove(self, name: bytes) -> None:
        await self.volume.tree.unlink(self.folder, name)

    async def store_again(self, name: bytes, data: bytes) -> None:
        handle = await self.open(name, os.O_WRONLY | os.O_TRUNC)
        await self.volume.files.write(handle, 0, data, by_kernel=True)
        await self.close(handle)

    async def create(self, name: bytes, flags: int = os.O_WRONLY, mode: int = 0o644, caller: Caller = KERNEL):  # type: ignore[no-untyped-def]
        return (await self.volume.tree.create(self.folder, name, mode, caller, flags))[0]

    async def open(self, name: bytes, flags: int = os.O_RDONLY):  # type: ignore[no-untyped-def]
        return await self.volume.files.open((await self.look(name)).ino, flags, KERNEL)

    async def close(self, handle) -> None:  # type: ignore[no-untyped-def]
        try:
            await self.volume.files.flush(handle)
        finally:
            await self.volume.files.release(handle)

    async def look(self, name: bytes) -> Attributes:
        found = await self.volume.tree.lookup(self.folder, name)
        self.volume.tree.forget(found.ino, 1)
        return found

    async def kind(self, name: bytes) -> str:
        """sketch, block or file"""
        return str((await self.volume.inodes.info((await self.look(name)).ino)).get("kind", "file"))

    async def is_there(self, name: bytes) -> bool:
        try:
            await self.look(name)
        except errors.NotFound:
            return False
        return True

    async def read(self, name: bytes) -> bytes:
        handle = await self.open(name)
        try:
            return bytes(await self.volume.files.read(handle, 0, 1 << 30))
        finally:
            await self.close(handle)

    async def names(self, limit: int = 3) -> list[bytes]:
        found, after = list[bytes](), 0
        while entries := await self.volume.tree.list_directory(self.folder, after, limit):
            found += [entry.name for entry in entries]
            assert all(2 < entry.cookie < 1 << 63 for entry in entries)
            after = entries[-1].cookie
        assert len(found) == len(set(found)), "each name once"
        return sorted(found)

    async def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        await self.volume.tree.rename(self.folder, old, self.folder, new, flags)

    # -- by rings ----------------------------------------------------------------------------------

    async def put(self, name: bytes, data: bytes, uid: int = 0, mode: int = 0o644) -> None:
        rows, node = self.volume.rows, inside.nodes(self.volume).get(self.folder)
        assert rows is not None
        assert node is not None
        table = rows.table(self.folder, node.namespace, uid, 0, mode)
        await rows.put(table, [name], [memoryview(data)], ROW_TERMS)

    async def get(self, name: bytes) -> bytes | None:
        rows = self.volume.rows
        assert rows is not None
        found = rows.find(self.folder, name)
        data = await rows.read(found[0], name) if found is not None else None
        return bytes(data) if data is not None else None


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=64 * MIB, staging_size=16 * MIB)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options)


@asynccontextmanager
async def door_of(disk: Disk, options: Options) -> AsyncIterator[Door]:
    """A namespace of blocks; the volume is clean at the end."""
    async with opened(disk, options) as volume:
        try:
            folder = (await volume.tree.lookup(ROOT_INODE, b"kv")).ino
        except errors.NotFound:
            folder = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        yield Door(volume, folder)
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


async def test_a_file_becomes_a_block_at_its_close(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        handle = await door.create(b"one", os.O_RDWR)
        await door.volume.files.write(handle, 0, b"first ", by_kernel=True)
        await door.volume.files.write(handle, 6, b"second", by_kernel=True)
        assert await door.get(b"one") is None
        assert bytes(await door.volume.files.read(handle, 0, 100)) == b"first second"
        assert await door.names() == [b"one"]
        number = (await door.look(b"one")).ino
        await door.volume.files.flush(handle)
        assert await door.get(b"one") == b"first second"
        assert (await door.look(b"one")).size == 12
        await door.volume.files.release(handle)
        found = await door.look(b"one")
        assert await door.kind(b"one") == "block"
        assert found.ino == number, "the kernel keeps its pages"
        assert (found.mode, found.size, found.nlink, found.blocks) == (0o100644, 12, 1, 8)
        assert await door.read(b"one") == b"first second"
        assert await door.names() == [b"one"]
    async with door_of(disk, options) as door:
        await inside.parts(door.volume).engine.has_names(door.folder)  # type: ignore[union-attr]
        assert await door.names() == [b"one"]
        assert await door.read(b"one") == b"first second"


async def test_blocks_of_rings_are_files(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        await door.volume.tree.make_directory(door.folder, b"sub", 0o755, KERNEL)
        for number in range(50):
            await door.put(b"%03d" % number, b"%d" % number * 100, uid=number % 3)
        handle = await door.open(b"007")
        first = (await door.look(b"007")).ino
        await door.put(b"007", b"another")
        assert bytes(await door.volume.files.read(handle, 0, 3)) == b"777"
        assert (await door.look(b"007")).ino != first
        assert await door.read(b"007") == b"another"
        assert (await door.volume.inodes.attributes(first)).nlink == 0
        await door.close(handle)
        assert (await door.volume.inodes.attributes(first)).nlink == 0, "it was looked up a moment ago"
        assert await door.names() == sorted([b"sub", *[b"%03d" % number for number in range(50)]])
        with pytest.raises(errors.NotEmpty):
            await door.volume.tree.remove_directory(ROOT_INODE, b"kv")
        for number in range(50):
            await door.volume.tree.unlink(door.folder, b"%03d" % number)
        assert await door.names() == [b"sub"]
        await door.volume.tree.remove_directory(door.folder, b"sub")
        await door.volume.tree.remove_directory(ROOT_INODE, b"kv")


async def test_a_name_that_is_replaced_between_lookup_and_open(disk: Disk, options: Options) -> None:
    """The kernel looks a name up, then opens the number: what it opens is what the name meant."""
    async with door_of(disk, options) as door:
        files = door.volume.files
        for replace in (door.put, door.replace):
            await replace(b"name", b"first")
            number = (await door.look(b"name")).ino
            await replace(b"name", b"second")
            reader = await files.open(number, os.O_RDONLY, KERNEL)
            assert bytes(await files.read(reader, 0, 100)) == b"first"
            writer = await files.open(number, os.O_RDWR, KERNEL)
            await files.write(writer, 5, b" and more", by_kernel=True)
            assert bytes(await files.read(writer, 0, 100)) == b"first and more"
            found = await door.volume.inodes.set_attributes(number, Changes(size=3, mode=0o600), KERNEL)
            assert (found.nlink, found.size) == (0, 3)
            await door.close(writer)
            await door.close(reader)
            assert await door.read(b"name") == b"second"
            assert await door.names() == [b"name"]
        number = (await door.look(b"name")).ino
        await door.volume.inodes.set_xattr(door.folder, b"user.kvfuse.clear", b"")
        with pytest.raises(errors.Stale):
            await files.open(number, os.O_RDONLY, KERNEL)


async def test_a_listing_shows_names_once_while_they_change(disk: Disk, options: Options, rng: random.Random) -> None:
    """Blocks are stored again, moved to other tables or opened for writing, and sketches become files meanwhile."""
    names = [b"%03d" % number for number in range(60)]
    async with door_of(disk, options) as door:
        for name in names:
            await rng.choice([door.put, door.replace])(name, name)
        empty = [await door.create(b"empty-%d" % number) for number in range(5)]

        async def change() -> None:
            name, kind = rng.choice(names), rng.randrange(4)
            if kind == 0:
                await door.put(name, name * 2, uid=rng.randrange(3))
            elif kind == 1:
                await door.store_again(name, name * 3)
            elif kind == 2:
                await door.replace(name, name)
            elif empty:
                await door.close(empty.pop())

        for reader in range(1, 30):
            found, after = list[bytes](), 0
            while entries := await door.volume.tree.list_directory(door.folder, after, 7, reader):
                taken = entries[: rng.randrange(1, 8)]  # the kernel may have no room for all
                found += [entry.name for entry in taken]
                after = taken[-1].cookie
                for _ in range(4):
                    await change()
            door.volume.tree.close_directory(reader)
            stable = [name for name in found if name != b"tmp"]
            assert sorted(stable) == sorted([*names, *[b"empty-%d" % number for number in range(5)]])
        while empty:
            await door.close(empty.pop())


async def test_names_that_only_the_medium_has(disk: Disk, options: Options) -> None:
    names = [b"%05d" % number * 3 for number in range(300)]
    async with door_of(disk, options) as door:
        for name in names:
            await door.put(name, name * 10)
    async with door_of(disk, options) as door:
        assert not await inside.lookups(door.volume).is_empty(door.folder)
        assert await door.names(limit=128) == names
        assert await door.read(names[7]) == names[7] * 10
        handle = await door.open(names[9], os.O_RDWR)
        await door.volume.files.write(handle, 0, b"X", by_kernel=True)
        await door.close(handle)
        assert await door.get(names[9]) == b"X" + (names[9] * 10)[1:]


async def test_a_rename_is_a_change_of_the_key(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        await door.store(b"tmp", b"new")
        await door.store(b"name", b"old")
        await door.rename(b"tmp", b"name")
        assert await door.get(b"name") == b"new"
        assert await door.get(b"tmp") is None
        assert await door.names() == [b"name"]
        handle = await door.create(b"tmp")  # renamed while it is open
        await door.volume.files.write(handle, 0, b"newer", by_kernel=True)
        await door.rename(b"tmp", b"name")
        assert await door.read(b"name") == b"newer"
        await door.close(handle)
        assert await door.get(b"name") == b"newer"
        with pytest.raises(errors.Exists):
            await door.store(b"name", b"")
        await door.store(b"other", b"x")
        with pytest.raises(errors.Exists):
            await door.rename(b"other", b"name", RENAME_NOREPLACE)
        await door.rename(b"other", b"name", RENAME_EXCHANGE)
        assert (await door.read(b"name"), await door.read(b"other")) == (b"x", b"newer")
        assert await door.kind(b"name") == "file"
        with pytest.raises(errors.NotFound):
            await door.rename(b"absent", b"name")
        with pytest.raises(errors.CrossesNamespaces):
            await door.volume.tree.rename(door.folder, b"other", ROOT_INODE, b"other", 0)
        sub = (await door.volume.tree.make_directory(door.folder, b"sub", 0o755, KERNEL)).ino
        with pytest.raises(errors.IsADirectory):
            await door.rename(b"other", b"sub")
        with pytest.raises(errors.NotADirectory):
            await door.rename(b"sub", b"other")
        await door.volume.tree.rename(door.folder, b"other", sub, b"moved", 0)
        assert await Door(door.volume, sub).read(b"moved") == b"newer"
        assert await door.names() == [b"name", b"sub"]


async def test_times_of_a_block(disk: Disk, options: Options) -> None:
    """A block has the time of its file, to a microsecond; a rename or another mode keeps it, also beyond a mount."""
    moment = 1_234_567_890_123_456_000
    async with door_of(disk, options) as door:
        await door.store(b"tmp", b"data")
        before = await door.look(b"tmp")
        await door.rename(b"tmp", b"name")
        found = await door.look(b"name")
        assert (found.mtime, found.ino) == (before.mtime, before.ino)
        await door.volume.inodes.set_attributes(found.ino, Changes(mtime=moment), KERNEL)
        await door.volume.inodes.set_attributes(found.ino, Changes(mode=0o600), KERNEL)
        await door.rename(b"name", b"other")
        found = await door.look(b"other")
        assert (found.mtime, found.mode & 0o777) == (moment, 0o600)
        assert found.ctime > moment
        assert await door.kind(b"other") == "block"
    async with door_of(disk, options) as door:
        await inside.lookups(door.volume).is_empty(door.folder)
        assert (await door.look(b"other")).mtime == moment


async def test_a_folder_shows_when_files_changed_its_names(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:

        async def changed() -> int:
            return (await door.volume.inodes.attributes(door.folder)).mtime

        for change in (door.store(b"one", b"1"), door.rename(b"one", b"two"), door.remove(b"two")):
            node = inside.nodes(door.volume).get(door.folder)
            assert node is not None
            node.mtime = 5
            await change
            assert await changed() > 5


async def test_what_cannot_be_a_block_is_an_ordinary_file(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        volume = door.volume
        await door.store(b"empty", b"")
        large = random.Random(1).randbytes(9 * MIB)
        handle = await door.create(b"large")
        for start in range(0, len(large), MIB):
            await volume.files.write(handle, start, large[start : start + MIB], by_kernel=True)
        await door.close(handle)
        handle = await door.create(b"far")
        await volume.files.write(handle, 3 * MIB, b"far", by_kernel=True)
        await door.close(handle)
        await door.store(b"linked", b"linked")
        await volume.tree.link((await door.look(b"linked")).ino, door.folder, b"second")
        await door.store(b"attributed", b"attributed")
        await volume.inodes.set_xattr((await door.look(b"attributed")).ino, b"user.a", b"1")
        await door.store(b"registered", b"registered")
        ring = await volume.files.open((await door.look(b"registered")).ino, os.O_RDONLY, RING)
        await volume.files.release(ring)
        await door.store(b"setuid", b"setuid")
        await volume.inodes.set_attributes((await door.look(b"setuid")).ino, Changes(mode=0o4755), KERNEL)
        expected = [b"attributed", b"empty", b"far", b"large", b"linked", b"registered", b"second", b"setuid"]
        assert await door.names() == expected
        for name in expected:
            assert await door.get(name) is None, name
            assert await door.kind(name) == "file", name
        assert await door.read(b"large") == large
        assert await door.read(b"far") == bytes(3 * MIB) + b"far"
        assert await door.read(b"second") == b"linked"
        assert door.folder in volume.rows.with_files  # type: ignore[union-attr]
        await door.store(b"tmp", b"block")
        await door.rename(b"tmp", b"empty")
        assert await door.get(b"empty") == b"block"
        await door.rename(b"far", b"empty")
        assert await door.get(b"empty") is None
        assert await door.names() == [name for name in expected if name != b"far"]
        await volume.sync()


@pytest.mark.parametrize("was_block", [False, True])
async def test_a_block_of_the_name_of_an_empty_file_that_is_closed_stays(
    disk: Disk, options: Options, was_block: bool
) -> None:
    """close returns after FLUSH, before RELEASE: what is stored then is newer than the file."""
    async with door_of(disk, options) as door:
        if was_block:
            await door.put(b"name", b"old")
        handle = await (door.open(b"name", os.O_WRONLY | os.O_TRUNC) if was_block else door.create(b"name"))
        await door.volume.files.flush(handle)
        await door.put(b"name", b"new")
        await door.volume.files.release(handle)
        assert await door.get(b"name") == b"new"
        assert await door.kind(b"name") == "block"
        assert await door.names() == [b"name"]
        handle = await door.open(b"name", os.O_WRONLY | os.O_TRUNC)
        await door.close(handle)
        assert await door.get(b"name") is None
        assert await door.kind(b"name") == "file"


async def test_attributes_that_no_file_can_have(disk: Disk, options: Options) -> None:
    """The error of an ordinary file, whatever it is at the moment."""
    async with door_of(disk, options) as door:
        await door.put(b"block", b"block")
        sketch = await door.create(b"sketch")
        for name in (b"block", b"sketch"):
            inodes, ino = door.volume.inodes, (await door.look(name)).ino
            for call in (inodes.get_xattr, inodes.remove_xattr):
                with pytest.raises(errors.InvalidArgument):
                    await call(ino, b"security.")
                with pytest.raises(errors.Unsupported):
                    await call(ino, b"users.name")
                with pytest.raises(errors.NoAttribute):
                    await call(ino, b"user.name")
        await door.close(sketch)


async def test_owners_and_modes(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        handle = await door.create(b"one", mode=0o600, caller=Caller(7, 8))
        await door.volume.files.write(handle, 0, b"x", by_kernel=True)
        await door.close(handle)
        found = await door.look(b"one")
        assert (found.uid, found.gid, found.mode) == (7, 8, 0o100600)
        changed = await door.volume.inodes.set_attributes(found.ino, Changes(mode=0o640, uid=9), KERNEL)
        assert (changed.uid, changed.gid, changed.mode) == (9, 8, 0o100640)
        found = await door.look(b"one")
        assert (found.uid, found.gid, found.mode) == (9, 8, 0o100640)
        await door.volume.inodes.set_attributes(found.ino, Changes(atime=1, mtime=2), KERNEL)
        assert await door.read(b"one") == b"x"
        await door.volume.inodes.set_attributes(found.ino, Changes(size=3), KERNEL)
        assert await door.get(b"one") == b"x\0\0"
        await door.volume.inodes.set_attributes((await door.look(b"one")).ino, Changes(size=0), KERNEL)
        assert await door.get(b"one") is None
        assert (await door.look(b"one")).size == 0


@pytest.mark.parametrize("then", ["chmod", "write", "read"])
async def test_a_file_whose_last_close_is_late_keeps_its_bytes(
    disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It is used while its release, of which no caller hears, stores it."""
    async with door_of(disk, options) as door:
        files, inodes = door.volume.files, door.volume.inodes
        handle = await door.create(b"one")
        await files.write(handle, 0, b"bytes", by_kernel=True)
        await files.flush(handle)
        ino = (await door.look(b"one")).ino
        await inodes.set_attributes(ino, Changes(uid=9), KERNEL)
        names = inside.parts(door.volume).block_names
        assert names is not None
        publish, is_storing, may_end = names.files.publish, trio.Event(), trio.Event()

        async def publish_late(sketch: Sketch) -> None:
            is_storing.set()
            await may_end.wait()
            await publish(sketch)

        async def use() -> None:
            if then == "chmod":
                await inodes.set_attributes(ino, Changes(mode=0o2755), KERNEL)
                return
            other = await files.open(ino, os.O_WRONLY if then == "write" else os.O_RDONLY, KERNEL)
            if then == "write":
                await files.write(other, 5, b"!", by_kernel=True)
            else:
                assert bytes(await files.read(other, 0, 100)) == b"bytes"
            await door.close(other)

        monkeypatch.setattr(names.files, "publish", publish_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.release, handle)
            await is_storing.wait()
            nursery.start_soon(use)
            await trio.testing.wait_all_tasks_blocked()
            may_end.set()
        found = await door.look(b"one")
        assert (found.ino, found.mode) == (ino, 0o102755 if then == "chmod" else 0o100644)
        assert await door.read(b"one") == (b"bytes!" if then == "write" else b"bytes")


async def test_a_block_is_written_again(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        await door.put(b"one", b"0123456789")
        number = (await door.look(b"one")).ino
        handle = await door.open(b"one", os.O_RDWR)
        assert (await door.look(b"one")).ino == number
        await door.close(handle)
        assert (await door.look(b"one")).ino == number, "nothing was written"
        handle = await door.open(b"one", os.O_RDWR | os.O_APPEND)
        await door.volume.files.write(handle, handle.size, b"ab", by_kernel=True)
        assert (await door.volume.inodes.attributes(number)).size == 12
        assert await door.get(b"one") == b"0123456789"
        await door.volume.files.fsync(handle)
        assert await door.get(b"one") == b"0123456789ab"
        await door.close(handle)
        assert await door.read(b"one") == b"0123456789ab"
        await door.put(b"one", b"by a ring")
        assert (await door.look(b"one")).ino != number
        handle = await door.open(b"one", os.O_WRONLY | os.O_TRUNC)
        await door.volume.tree.unlink(door.folder, b"one")
        await door.volume.files.write(handle, 0, b"lost", by_kernel=True)
        await door.close(handle)
        assert await door.names() == []
        assert not await door.is_there(b"one")


async def test_a_change_by_a_number_that_is_no_more_is_not_lost(disk: Disk, options: Options) -> None:
    """A last close may come between the kernel's lookup for a chmod and the chmod: with Stale it looks again."""
    async with door_of(disk, options) as door:
        change = door.volume.inodes.set_attributes
        await door.put(b"one", b"0123456789")
        number = (await door.look(b"one")).ino
        await door.close(await door.open(b"one", os.O_WRONLY | os.O_TRUNC))
        assert await door.kind(b"one") == "file"
        assert (await door.look(b"one")).ino != number
        with pytest.raises(errors.Stale):
            await change(number, Changes(mode=0o600), KERNEL)
        await door.put(b"two", b"0123456789")
        reader = await door.open(b"two")
        await door.volume.tree.unlink(door.folder, b"two")
        assert (await change(reader.number, Changes(mode=0o600), KERNEL)).nlink == 0, "fchmod"
        await door.close(reader)


async def loaded(door: Door) -> None:
    """All heads were read."""
    await inside.lookups(door.volume).is_empty(door.folder)


async def test_what_survives_a_crash(disk: Disk) -> None:
    strict, relaxed = [lab_options(capacity=64 * MIB, staging_size=16 * MIB, strict=is_strict) for is_strict in (1, 0)]
    async with door_of(disk, strict) as door:
        await door.store(b"closed", b"closed")
        await door.store(b"tmp", b"renamed")
        await door.rename(b"tmp", b"renamed")
        await door.store(b"gone", b"gone")
        await door.volume.tree.unlink(door.folder, b"gone")
        await door.volume.inodes.fsync_directory(ROOT_INODE)
        handle = await door.create(b"lost")
        await door.volume.files.write(handle, 0, b"lost", by_kernel=True)
        crashed = disk.copy()
        await door.close(handle)
    async with door_of(crashed, relaxed) as door:
        await loaded(door)
        assert await door.names() == [b"closed", b"renamed"]
        assert await door.read(b"renamed") == b"renamed"
        handle = await door.create(b"synced")
        await door.volume.files.write(handle, 0, b"synced", by_kernel=True)
        await door.volume.files.fsync(handle)
        empty = await door.create(b"empty")
        await door.volume.files.fsync(empty)
        crashed = crashed.copy()
        await door.close(handle)
        await door.close(empty)
    async with door_of(crashed, relaxed) as door:
        await loaded(door)
        assert await door.names() == [b"closed", b"empty", b"renamed", b"synced"]
        assert await door.read(b"synced") == b"synced"


async def test_memory_is_bounded(disk: Disk) -> None:
    options = lab_options(capacity=64 * MIB, staging_size=MIB, tier_size=16 * MIB)
    async with door_of(disk, options) as door:
        handles = [await door.create(b"%d" % number) for number in range(6)]
        for handle in handles:
            await door.volume.files.write(handle, 0, bytes(300_000), by_kernel=True)
        used = inside.parts(door.volume).block_names.files.statistics()["copied_bytes"]  # type: ignore[union-attr]
        assert 600_000 <= used <= MIB
        for handle in handles:
            await door.close(handle)
        kinds = sorted([await door.kind(b"%d" % number) for number in range(6)])
        assert kinds == ["block"] * 3 + ["file"] * 3
        for number in range(6):
            assert await door.read(b"%d" % number) == bytes(300_000)


async def test_blocks_do_not_become_files_by_a_setting(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        await door.store(b"one", b"first")
        kind = NAMESPACE + b".kind"
        with pytest.raises(errors.NotEmpty, match="has 1 blocks"):
            await door.volume.inodes.set_xattr(door.folder, kind, b"files")
        assert await door.get(b"one") == b"first"
        await door.volume.inodes.set_xattr(door.folder, kind, b"cache")  # the former name of what it is
        assert await door.get(b"one") == b"first"
        await door.volume.inodes.set_xattr(door.folder, NAMESPACE, b"kind=files clear=now")
        assert await door.get(b"one") is None
        await door.store(b"one", b"file")
        assert await door.kind(b"one") == "file"


async def test_no_block_comes_back_in_the_next_namespace_of_its_folder(disk: Disk, options: Options) -> None:
    async with door_of(disk, options) as door:
        await door.put(b"one", b"first")
        await door.volume.sync()
        await door.volume.inodes.set_xattr(door.folder, b"user.kvfuse.clear", b"")
        await door.volume.inodes.remove_xattr(door.folder, NAMESPACE)
        await door.volume.inodes.set_xattr(door.folder, NAMESPACE, b"kind=blocks")
        await door.put(b"other", b"second")
        assert await door.names() == [b"other"]
    async with door_of(disk, options) as door:
        await loaded(door)
        assert await door.names() == [b"other"]
        assert await door.get(b"one") is None


@pytest.mark.parametrize("rename_first", [False, True])
async def test_a_daemon_that_ends_while_a_block_becomes_a_file(
    disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch, rename_first: bool
) -> None:
    """The name means the block, whole, and once it is removed nothing."""
    async with door_of(disk, options) as door:
        await door.put(b"name", b"content")
        parts = inside.parts(door.volume)
        assert parts.block_names is not None
        files = parts.block_names.files

        async def end(*_: object) -> None:
            raise errors.EngineError("the daemon ends here")

        if rename_first:
            await files._make_file(files.search.find(door.folder, b"name"), door.folder, b"name", b"content", 0)  # type: ignore[arg-type]
        else:
            monkeypatch.setattr(files.names, "rename", end)
            monkeypatch.setattr(files.names, "unlink", end)
            with pytest.raises(errors.EngineError):
                await door.volume.inodes.set_xattr((await door.look(b"name")).ino, b"user.a", b"b")
            monkeypatch.undo()
    async with door_of(disk, options) as door:
        await inside.lookups(door.volume).is_empty(door.folder)
        assert await door.names() == [b"name"]
        assert await door.kind(b"name") == "block"
        assert await door.read(b"name") == b"content"
        await door.remove(b"name")
        assert await door.names() == []
        await door.store(b"name", b"other")
        assert await door.read(b"name") == b"other"
        await door.remove(b"name")
        await door.volume.tree.remove_directory(ROOT_INODE, b"kv")


async def test_nobody_uses_up_the_tables_of_others(
    disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no table becomes an ordinary file; that is so for one who has many of them."""
    monkeypatch.setattr(block_tables, "TABLES_MAX", 40)
    monkeypatch.setattr(block_tables, "TABLES_KEPT", 16)
    greedy, others = Caller(1001, 1001), [Caller(2000 + number, 2000) for number in range(8)]
    async with door_of(disk, options) as door:
        for number in range(60):
            sub = (await door.volume.tree.make_directory(door.folder, b"%d" % number, 0o777, KERNEL)).ino
            await Door(door.volume, sub).store_as(greedy, b"name", b"greedy")
            assert await Door(door.volume, sub).read(b"name") == b"greedy"
            assert await Door(door.volume, sub).kind(b"name") == ("block" if number < 24 else "file")
        for other in others:
            await door.store_as(other, b"%d-of" % other.uid, b"modest")
            assert await door.kind(b"%d-of" % other.uid) == "block"


@pytest.mark.parametrize("then", ["the last close", "a write", "another close"])
async def test_what_a_close_could_not_store_is_not_stored_unasked(
    disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """By then the name may mean what another host, or a ring, has stored under it."""
    async with door_of(disk, options) as door:
        engine, files = door.volume.rows, door.volume.files

        async def fail(*_: object, **__: object) -> None:
            raise errors.EngineError("injected")

        handle = await door.create(b"name")
        await files.write(handle, 0, b"refused", by_kernel=True)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "put", fail)
            with pytest.raises(errors.EngineError):
                await files.flush(handle)
        await door.put(b"name", b"newer")
        if then == "a write":
            await files.write(handle, 0, b"written", by_kernel=True)
        elif then == "another close":
            await files.flush(handle)
        await files.release(handle)
        expected = {"the last close": b"newer", "a write": b"written", "another close": b"refused"}[then]
        assert await door.get(b"name") == await door.read(b"name") == expected
