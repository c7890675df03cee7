"""Files that C makes in folders of blocks are what Python would have made; what is not plain goes on in Python."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from block_tree import BlockTree, make_block_tree
from kernel_door import ATTR, Kernel, connect, door_ends, python_says
from volume_lab import CALLER

from kvfuse.native._blocks import KEPT_DRAFTS_SIZE, KEPT_NUMBERS_SIZE
from kvfuse.native._blocks import Door as NativeDoor
from kvfuse.volume.api import Changes
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.kernel_answers import KeptRows
from kvfuse.volume.blocks.sketches import SketchHandle
from kvfuse.volume.volume import Volume

RENAME, MKDIR, UNLINK, SETXATTR, READDIR, SETATTR = 12, 9, 10, 21, 28, 4
ENTRY_SIZE = 40
NEW = os.O_CREAT | os.O_WRONLY | os.O_EXCL


@dataclass
class Made:
    """A file that is being written."""

    kernel: Kernel
    folder: int
    ino: int
    fh: int

    def write(self, offset: int, data: bytes, flags: int = 0) -> bool:
        body = struct.pack("<QQIIQII", self.fh, offset, len(data), flags, 0, 0, 0) + data
        answer = self.kernel.ask(16, self.ino, body)
        assert answer is None or answer == (0, struct.pack("<II", len(data), 0))
        return answer is not None

    def flush(self) -> bool:
        return self.kernel.ask(25, self.ino, struct.pack("<QIIQ", self.fh, 0, 0, 0)) is not None

    def release(self) -> bool:
        return self.kernel.release(self.ino, self.fh)

    @property
    def size(self) -> int | None:
        answer = self.kernel.ask(3, self.ino, bytes(16))
        return int(ATTR.unpack_from(answer.body, 16)[1]) if answer is not None else None


@dataclass
class Door:
    """A volume with a folder of blocks, as the kernel and as Python see it."""

    tree: BlockTree
    volume: Volume
    engine: BlockEngine
    kernel: Kernel
    decisions: bytearray

    @property
    def folder(self) -> int:
        return self.tree.directory

    async def offer(self) -> None:
        await python_says(self.volume, self.folder, b"is offered by that")

    def create(self, name: bytes, mode: int = 0o644, flags: int = NEW, umask: int = 0o022) -> Made | None:
        body = struct.pack("<IIII", flags, 0o100000 | mode, umask, 0) + name + b"\0"
        answer = self.kernel.ask(35, self.folder, body, caller=CALLER)
        if answer is None:
            return None
        assert answer.error == 0
        ino, fh = (int.from_bytes(answer.body[at : at + 8], "little") for at in (0, ENTRY_SIZE + ATTR.size))
        return Made(self.kernel, self.folder, ino, fh)

    def rename(self, name: bytes, new: bytes, folder: int = 0) -> bool:
        body = struct.pack("<Q", folder or self.folder) + name + b"\0" + new + b"\0"
        return self.kernel.ask(RENAME, self.folder, body) is not None

    def store(self, name: bytes, data: bytes) -> int:
        """As programs do. The file's number."""
        made = self.create(name + b".tmp")
        assert made is not None
        assert made.write(0, data)
        assert made.flush()
        assert made.release()
        assert self.rename(name + b".tmp", name)
        return made.ino

    async def content(self, name: bytes) -> bytes | None:
        at = self.engine.find(self.folder, name)
        data = await self.engine.read(at[0], name) if at is not None else None
        return bytes(data) if data is not None else None

    def take_over(self, opcode: int, node: int, body: bytes = b"") -> dict[int, SketchHandle]:
        """What Python gets before it handles that request."""
        request = self.kernel.request(opcode, node, body)
        return dict(self.volume.files.take_over()) if self.engine.answers.door.take_over(request) else {}


@pytest.fixture
async def tree(tmp_path: Path, rng: random.Random) -> BlockTree:
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    return tree


Open = Callable[[], AbstractAsyncContextManager[Door]]


@pytest.fixture
def opened(tree: BlockTree) -> Open:
    @asynccontextmanager
    async def open_door() -> AsyncIterator[Door]:
        with door_ends() as ends:
            async with tree.opened() as (volume, engine):
                decisions = bytearray(24 * 4)
                door = Door(
                    tree, volume, engine, await connect(volume, ends, KeptRows(decisions, bytearray())), decisions
                )
                await tree.put(
                    engine, {b"first": b"bytes"}
                )  # C makes files where there are blocks of that owner and mode
                await door.offer()
                yield door
            assert (await tree.check()).clean

    return open_door


async def test_a_store_is_a_block(opened: Open, rng: random.Random) -> None:
    """By the number under which it was written, as long as that is known."""
    async with opened() as door:
        for number, size in enumerate((1, 700, 4096, 65_536, 1 << 20)):
            name, data = b"block-%d" % number, rng.randbytes(size)
            ino = door.store(name, data)
            expected = await python_says(door.volume, door.folder, name)
            assert expected[0] == ino
            assert door.kernel.look_up(door.folder, name) == expected
            assert await door.content(name) == data
            fh = door.kernel.open(ino)
            assert fh is not None
            assert door.kernel.read(ino, fh, 0, 1 << 20) == data
            assert door.kernel.release(ino, fh)
            assert await python_says(door.volume, door.folder, name + b".tmp") == (0, b"")
        said = door.engine.answers.statistics()
        assert (said["create"], said["flush"], said["rename"], said["drafts"]) == (5, 5, 5, 0)
        await door.engine.writer.flush()
        places = [arena.place for arena in door.engine.arenas.by_number.values()]
        assert not any(door.engine.native.arena_facts(place)[2] for place in places), "pinned"


async def test_python_hears_of_stores(opened: Open) -> None:
    async with opened() as door:
        before = (await door.volume.inodes.attributes(door.folder)).mtime
        ino = door.store(b"one", b"bytes")
        notes = door.engine.answers.door.take_notes()
        assert [size for _, _, size in notes[2]] == [5, 0]
        assert [place for place, _ in notes[3]] == [door.folder]
        assert notes[:2] == ([], [(door.folder, True, b"one.tmp")])
        assert door.kernel.look_up(door.folder, b"two.tmp") == (0, b"")
        door.store(b"two", b"bytes")
        assert door.take_over(READDIR, door.folder) == {}
        assert (await door.volume.inodes.attributes(door.folder)).mtime > before
        assert not door.engine.answers.door.take_notes()[1], "a name that was looked up to be made is not looked for"
        assert door.store(b"one", b"others") != ino
        assert await door.content(b"one") == b"others"


async def test_python_goes_on_with_a_file(opened: Open, rng: random.Random) -> None:
    """Whatever it is asked about it: the bytes are there, and closing makes the block."""
    others = {
        "open": (14, "number", struct.pack("<II", os.O_RDWR, 0)),
        "read": (15, "number", bytes(40)),
        "setattr": (SETATTR, "number", bytes(88)),
        "fsync": (20, "number", bytes(16)),
        "setxattr": (SETXATTR, "number", bytes(16)),
        "unlink": (UNLINK, "folder", b"file\0"),
        "rename": (RENAME, "folder", struct.pack("<Q", 1) + b"file\0other\0"),
        "rename onto it": (
            RENAME,
            "root",
            b"",
        ),
        "link": (13, "root", b""),
        "lookup": (1, "folder", b"file\0"),
        "readdir": (READDIR, "folder", bytes(40)),
        "mkdir": (MKDIR, "folder", bytes(8) + b"file\0"),
        "create": (35, "folder", bytes(16) + b"file\0"),
    }
    async with opened() as door:
        for number, (kind, (opcode, node, body)) in enumerate(others.items()):
            await door.offer()
            made = door.create(b"file")
            assert made is not None, kind
            data = rng.randbytes(70_000)
            assert made.write(0, data)
            if kind == "rename onto it":
                body = struct.pack("<Q", door.folder) + b"x\0file\0"
            if kind == "link":
                body = struct.pack("<Q", made.ino) + b"x\0"
            assert door.take_over(1, door.folder, b"others\0") == {}, "it is not asked about"
            place = {"number": made.ino, "folder": door.folder, "root": 1}[node]
            found = door.take_over(opcode, place, body)
            assert list(found) == [made.fh], kind
            assert not made.write(len(data), b"more"), "it is Python's now"
            assert made.size is None
            assert door.kernel.look_up(door.folder, b"file") is None
            (handle,) = found.values()
            assert await door.volume.files.write(handle, len(data), b"more", by_kernel=True) == 4
            await door.volume.files.flush(handle)
            await door.volume.files.release(handle)
            assert not made.release()
            assert await door.content(b"file") == data + b"more"
            assert (await python_says(door.volume, door.folder, b"file"))[0] == made.ino
            name = b"done-%d" % number
            assert door.rename(b"file", name)
            assert door.kernel.look_up(door.folder, name) == await python_says(door.volume, door.folder, name)


async def test_all_files_are_taken_over(opened: Open) -> None:
    async with opened() as door:
        made = [door.create(b"file-%d" % number) for number in range(5)]
        assert door.engine.answers.has_drafts(door.folder)
        assert await door.engine.has_names(door.folder)
        found = dict(door.volume.files.take_over(is_all=True))
        assert sorted(found) == sorted(one.fh for one in made if one is not None)
        for handle in found.values():
            await door.volume.files.flush(handle)
            await door.volume.files.release(handle)
        assert not door.engine.answers.has_drafts(door.folder)


async def test_what_is_odd_is_pythons(opened: Open, rng: random.Random) -> None:
    async with opened() as door:
        for name in (b".", b"..", b"", b"%41", b"x" * 256, b".kvfuse-1", b"first"):
            assert door.create(name) is None
        assert door.create(b"mode", 0o600) is None, "no block has it yet"
        assert door.create(b"mode", 0o4644) is None
        assert door.create(b"direct", flags=NEW | os.O_DIRECT) is None
        made = door.create(b"file") or pytest.fail("it is not made")
        assert door.create(b"file") is None
        assert not made.flush(), "nothing is in it"
        assert not made.write(1, b"behind a hole")
        assert made.write(0, b"bytes")
        assert not made.write(0, b"of a mapping", 1)
        assert not made.write(0, b"")
        assert not made.write(door.engine.block_max - 4, b"bytes"), "it is no block any more"
        other = Made(door.kernel, door.folder, made.ino, made.fh ^ 1 << 20)
        assert not other.write(0, b"x")
        assert not other.flush()
        assert not other.release()
        assert not door.kernel.read(made.ino, made.fh, 0, 9)
        assert not made.release(), "it has no name yet"
        assert not door.rename(b"file", b"other"), "somebody writes it"
        assert not door.rename(b"first", b"file")
        assert made.flush()
        assert not door.rename(b"file", b"file")
        assert not door.rename(b"absent", b"other")
        assert not door.rename(b"file", b"other", folder=1)
        assert not door.rename(b"file", b".kvfuse-1")
        assert not made.write(5, b"more"), "a block is not written"
        door.engine.answers.take_back(door.folder)
        assert not door.rename(b"file", b"other"), "nobody offers it"
        assert door.create(b"other") is None
        assert made.release()


@pytest.mark.parametrize("why", ["ttl", "setgid", "followed", "file"])
async def test_where_more_is_to_be_done(opened: Open, why: str) -> None:
    async with opened() as door:
        made = door.create(b"file") or pytest.fail("it is not made")
        assert made.write(0, b"bytes")
        news = door.engine.core.namespaces.news
        if why == "followed":
            with news.watching(door.folder, door.folder):
                assert not made.flush(), "who follows the folder has to hear of it"
                await door.offer()
                assert door.create(b"other") is None
                assert door.kernel.look_up(door.folder, b"first") is not None
        elif why == "file":
            await door.volume.tree.make_node(door.folder, b"fifo", 0o010644, 0, CALLER)
            assert not made.flush()
        else:
            if why == "ttl":
                await door.volume.inodes.set_xattr(door.folder, b"user.kvfuse.namespace", b"kind=blocks ttl=60")
            else:
                await door.volume.inodes.set_attributes(door.folder, Changes(mode=0o2755), CALLER)
            door.take_over(SETATTR, door.folder)
            assert not made.flush()
            await door.offer()
            assert door.create(b"other") is None
        for handle in dict(door.volume.files.take_over(is_all=True)).values():
            await door.volume.files.flush(handle)
            await door.volume.files.release(handle)
        assert await door.content(b"file") == b"bytes"


async def test_files_that_grow_side_by_side(opened: Open, rng: random.Random) -> None:
    """Each has its bytes, wherever the others' lie, and blocks of rings between them."""
    async with opened() as door:
        contents = {b"file-%d" % number: b"" for number in range(4)}
        made = {name: door.create(name) or pytest.fail("it is not made") for name in contents}
        for step in range(60):
            name = rng.choice(list(contents))
            part, data = rng.randbytes(rng.choice([1, 3000, 4096, 9000])), contents[name]
            offset = len(data) if rng.random() < 0.8 else rng.randrange(len(data) + 1)
            assert made[name].write(offset, part)
            contents[name] = data[:offset] + part + data[offset + len(part) :]
            assert made[name].size == len(contents[name])
            if step % 20 == 0:
                await door.tree.put(door.engine, {b"ring-%d" % step: rng.randbytes(5000)})
        await door.offer()
        for name, one in made.items():
            assert one.flush() or not contents[name]
            assert await door.content(name) == (contents[name] or None)
            assert one.release() or not contents[name]
        for handle in dict(door.volume.files.take_over(is_all=True)).values():
            await door.volume.files.release(handle)


async def test_where_there_is_no_room_python_waits_for_some(opened: Open, rng: random.Random) -> None:
    async with opened() as door:
        data, made = rng.randbytes(100_000), []
        for number in range(1000):
            await door.offer()
            one = door.create(b"file-%d" % number)
            if one is None or not one.write(0, data) or not one.flush():
                break
            made.append(one)
        else:
            pytest.fail("there is room for all")
        found = dict(door.volume.files.take_over(is_all=True))
        for handle in found.values():
            if not handle.size:
                assert await door.volume.files.write(handle, 0, data, by_kernel=True) == len(data)
            await door.volume.files.flush(handle)
            await door.volume.files.release(handle)
        assert all(one.release() for one in made)
        assert len(made) > 3


async def test_a_rename_says_first_what_it_is_about_to_do(opened: Open) -> None:
    async with opened() as door:
        await door.tree.put(door.engine, {b"other": b"others"})
        other = (await python_says(door.volume, door.folder, b"other"))[0]
        first = (await python_says(door.volume, door.folder, b"first"))[0]
        for number in range(5):
            assert door.rename(b"first", b"other") if number % 2 == 0 else door.rename(b"other", b"first")
            ino, replaced, unique = struct.unpack_from("<QQQ", door.decisions, number % 4 * 24)
            assert unique == door.kernel.unique
            assert (ino, replaced) == (first, other if number == 0 else 0)  # the number by which the kernel knows it
        assert await door.content(b"other") == b"bytes"


async def test_a_block_that_was_looked_up_is_opened(opened: Open) -> None:
    """Also where another one has taken its name since: its bytes are there for a while."""
    async with opened() as door:
        former = door.store(b"one", b"former")
        assert (door.kernel.look_up(door.folder, b"one") or (0,))[0] == former
        latter = door.store(b"one", b"latter")
        assert latter != former
        fh = door.kernel.open(former)
        assert fh is not None
        assert door.kernel.read(former, fh, 0, 9) == b"former"
        assert door.kernel.release(former, fh)
        assert await door.content(b"one") == b"latter"


def left_to(door: Door, numbers: bytes, drafts: bytes, ino: int = 0) -> tuple[dict[bytes, bytes], bool]:
    """What the next daemon's C would go on with: content of drafts by name, and whether it knows a number."""
    following = NativeDoor(door.engine.native, door.engine.tables.multipliers, 0.0, 0, 0)
    following.keep_rows(bytearray(numbers), bytearray(drafts))
    found = {}
    while (draft := following.next_taken()) is not None:
        found[draft[10]] = draft[11]
        following.drop_taken(draft[0])
    return found, following.find_written(ino) is not None


async def test_what_is_kept_of_drafts(opened: Open, rng: random.Random) -> None:
    """At each moment the next daemon finds all that was answered. Damaged rows do no harm."""
    numbers, drafts = bytearray(KEPT_NUMBERS_SIZE), bytearray(KEPT_DRAFTS_SIZE)
    async with opened() as door:
        door.engine.answers.door.keep_rows(numbers, drafts)
        data = {name: rng.randbytes(50_000) for name in (b"one", b"two", b"three")}
        made = {name: door.create(name) for name in data}
        for name, one in made.items():
            assert one is not None
            assert one.write(0, data[name][:20_000])
            assert one.write(20_000, data[name][20_000:])
        assert left_to(door, numbers, drafts, made[b"one"].ino) == (data, False)
        assert made[b"one"].flush()
        del data[b"one"]
        assert left_to(door, numbers, drafts, made[b"one"].ino) == (data, True)
        for _ in range(300):
            damaged = bytearray(numbers), bytearray(drafts)
            for memory in damaged:
                for _ in range(rng.randrange(40)):
                    memory[rng.randrange(rng.choice([1200, len(memory)]))] = rng.choice([0, 255, rng.randrange(256)])
            left_to(door, *damaged)
        assert made[b"two"].flush()
        assert made[b"three"].flush()
        assert left_to(door, numbers, drafts) == ({}, False)
        assert all(one.release() for one in made.values())
