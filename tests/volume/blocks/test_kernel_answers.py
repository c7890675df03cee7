"""What C answers the kernel about blocks is what Python would answer; what it may not answer goes to Python."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import inside
import pytest
import trio
from block_tree import BlockTree, make_block_tree
from kernel_door import (
    ATTR,
    BATCH_FORGET,
    FLUSH,
    FORGET,
    FSYNC,
    GETATTR,
    LOOKUP,
    OPEN,
    READ,
    RELEASE,
    SENT_AGAIN,
    WRITE,
    connect,
    door_ends,
    python_says,
)
from volume_lab import CALLER

from kvfuse.native._blocks import ANSWERS, Door
from kvfuse.volume.api import Changes
from kvfuse.volume.blocks.block_files import NAMES_HELD_MAX
from kvfuse.volume.blocks.block_numbers import inode_of
from kvfuse.volume.blocks.kernel_answers import KINDS, KeptRows

DECISION = Path(__file__).parents[3] / "docs/internals/decisions/045-requests-answered-in-c.md"


@pytest.fixture
async def tree(tmp_path: Path, rng: random.Random) -> BlockTree:
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    return tree


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with door_ends() as ends:
        yield ends


async def test_it_says_what_python_says(
    tree: BlockTree, rng: random.Random, ends: tuple[socket.socket, socket.socket]
) -> None:
    async with tree.opened() as (volume, engine):
        kernel = await connect(volume, ends)
        assert kernel.look_up(tree.directory, b"key-1") is None, "nobody has asked about the folder"
        for _ in range(300):
            name = rng.choice([*tree.blocks, b"absent", b"key-999", b"x" * 255])
            if rng.random() < 0.1:
                await tree.put(engine, {name: tree.content()}, rng.choice([0o644, 0o600, 0o444]))
            expected = await python_says(volume, tree.directory, name)
            assert kernel.look_up(tree.directory, name) == expected
            if expected[0]:
                answer = kernel.ask(GETATTR, expected[0], bytes(16))
                assert answer is not None
                assert answer.body == struct.pack("<QII", 1, 500_000_000, 0) + expected[1]
                assert kernel.ask(FORGET, expected[0], bytes(8)) is not None
        said = engine.answers.statistics()
        assert said["lookup"] > said["getattr"] > 100
        assert said["absent"] > 0
    assert (await tree.check()).clean


async def test_an_open_block_keeps_its_bytes(
    tree: BlockTree, rng: random.Random, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Whatever happens to its name; and its arena is free again at the end."""
    async with tree.opened() as (volume, engine):
        kernel = await connect(volume, ends)
        engine.answers.door.set_limits(1.5, 100)
        blocks = {b"new-%d" % number: tree.content() for number in range(12)}
        opened = []
        for name, data in blocks.items():
            await python_says(volume, tree.directory, name)
            await tree.put(engine, {name: data})  # it is in memory for a moment at least
            found = kernel.look_up(tree.directory, name)
            assert found is not None
            fh = kernel.open(found[0])
            assert fh is not None
            opened.append((found[0], fh, data))
        assert engine.answers.statistics()["open_handles"] == len(opened)
        for name in list(blocks)[::2]:
            engine.drop(tree.directory, [name])
        await tree.put(engine, {name: tree.content() for name in list(blocks)[1::4]})
        for number, (ino, fh, data) in enumerate(opened):
            for _ in range(5):
                offset, size = rng.randrange(len(data) + 4096), rng.choice([1, 4096, 1 << 20])
                assert kernel.read(ino, fh, offset, size) == data[offset : offset + size]
            links = 0 if number % 2 == 0 or number % 4 == 1 else 1
            answer = kernel.ask(GETATTR, ino, bytes(16))
            assert answer is not None
            assert ATTR.unpack_from(answer.body, 16)[10] == links
        for ino, fh, _ in opened:
            assert kernel.release(ino, fh)
            assert kernel.read(ino, fh, 0, 1) is None, "it is closed"
        assert engine.answers.statistics()["open_handles"] == 0
        await engine.writer.flush()
        places = [arena.place for arena in engine.arenas.by_number.values()]
        assert not any(engine.native.arena_facts(place)[2] for place in places)


async def test_what_is_not_plain_is_pythons(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        name = next(iter(tree.blocks))
        await tree.put(engine, {name: b"bytes"})
        ino, _ = await python_says(volume, folder, name)
        assert kernel.look_up(folder, name) is not None
        for odd in (b".", b"..", b"", b"x" * 256, b"%41"):
            assert kernel.look_up(folder, odd) is None
        assert kernel.ask(LOOKUP, folder, name) is None, "without an end"
        assert kernel.ask(LOOKUP, folder, name + b"\0", mark=SENT_AGAIN) is None
        assert kernel.look_up(1, name) is None
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC, os.O_DIRECT, os.O_APPEND):
            assert kernel.open(ino, flags) is None
        assert kernel.ask(WRITE, ino, bytes(40)) is None
        for opcode in (GETATTR, OPEN, READ, RELEASE):
            assert kernel.ask(opcode, ino, b"short") is None
        for number in (1, 1 << 61, ino ^ 1, ino + (1 << 26), 3 << 62, inode_of(1023, 0, 1)):
            assert kernel.ask(GETATTR, number, bytes(16)) is None
            assert kernel.open(number) is None
        assert kernel.read(ino, 1 << 60, 0, 1) is None


async def test_what_python_knows_more_of_is_pythons(tree: BlockTree, ends: tuple[socket.socket, socket.socket]) -> None:
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes", b"two": b"others"})
        ino, _ = await python_says(volume, folder, b"one")
        fh = kernel.open(ino)
        assert fh is not None
        handle = await volume.files.open(ino, os.O_WRONLY, CALLER)  # a sketch under the number of the block
        assert kernel.look_up(folder, b"one") is None
        assert kernel.ask(GETATTR, ino, bytes(16)) is None
        assert kernel.open(ino) is None
        assert kernel.read(ino, fh, 0, 9) is None, "its writer changes what others read"
        assert kernel.look_up(folder, b"two") is not None
        await volume.files.release(handle)
        assert not kernel.release(ino, fh), "Python has a handle of it"
        await volume.files.release(kernel.taken.pop(fh))
        assert not kernel.taken
        await volume.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)  # another row, by the same number
        expected = await python_says(volume, folder, b"one")
        assert expected[0] == ino
        assert kernel.look_up(folder, b"one") == expected
        answer = kernel.ask(GETATTR, ino, bytes(16))
        assert answer is not None
        assert answer.body[16:] == expected[1]
        _, made = await volume.tree.create(folder, b"three", 0o644, CALLER, os.O_WRONLY)
        assert kernel.look_up(folder, b"three") is None, "a sketch"
        await volume.tree.unlink(folder, b"three")
        await python_says(volume, folder, b"two")
        assert kernel.look_up(folder, b"three") == (0, b"")
        assert made.nlink == 0


async def test_other_names_than_those_of_blocks_are_pythons(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket]
) -> None:
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        await python_says(volume, folder, b"one")
        assert kernel.look_up(folder, b"absent") == (0, b"")
        await volume.tree.make_directory(folder, b"below", 0o755, CALLER)
        for name in (b"below", b"absent"):
            assert kernel.look_up(folder, name) is None
        await volume.tree.make_node(folder, b"fifo", 0o010644, 0, CALLER)
        await python_says(volume, folder, b"below")
        for name in (b"below", b"fifo"):
            assert kernel.look_up(folder, name) is None
        assert kernel.look_up(folder, b"one") is not None, "blocks are blocks"
        assert kernel.look_up(folder, b"absent") == (0, b"")
        for number in range(NAMES_HELD_MAX):
            await volume.tree.make_node(folder, b"fifo-%d" % number, 0o010644, 0, CALLER)
        await python_says(volume, folder, b"one")
        for name in (b"fifo-7", b"absent", b"one"):
            assert kernel.look_up(folder, name) is None, "there are too many"


async def test_python_hears_what_was_asked(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        ino, _ = await python_says(volume, folder, b"one")
        assert kernel.look_up(folder, b"one") == (ino, (await python_says(volume, folder, b"one"))[1])
        assert engine.answers.name_of(ino) == b"one"
        assert engine.answers.name_of(ino + 1) is None
        fh = kernel.open(ino)
        assert fh is not None
        for number in range(2000):
            assert kernel.look_up(folder, b"no-%d" % number) is not None
        uses, looks, puts, changed = engine.answers.door.take_notes()
        assert uses == [(ino >> 52 & 1023, ino >> 26 & (1 << 26) - 1)]
        assert looks[:2] == [(folder, False, b"no-0"), (folder, False, b"no-1")]
        assert len(looks) == 1024, "the rest is not counted"
        assert (puts, changed) == ([], [])
        assert engine.answers.door.take_notes() == ([], [], [], [])
        assert kernel.release(ino, fh)


async def test_blocks_that_expire_are_absent(tree: BlockTree, ends: tuple[socket.socket, socket.socket]) -> None:
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        table, row, _ = engine.find(folder, b"one") or pytest.fail("it is not there")
        ino, _ = await python_says(volume, folder, b"one")
        table.room["expires"][row] = engine.now(folder) + 3600
        assert kernel.look_up(folder, b"one") is not None
        engine.eviction.advance(folder, 7200)
        engine.eviction.look()
        await trio.lowlevel.checkpoint()
        assert kernel.look_up(folder, b"one") == (0, b"")
        assert kernel.open(ino) is None
        assert inside.core(volume) is not None


async def test_handles_of_another_daemon_are_no_handles(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket]
) -> None:
    """The kernel goes on with what a former daemon gave: that may not mean another block."""
    given = set[int]()
    for _ in range(2):
        async with tree.opened() as (volume, engine):
            kernel, folder = await connect(volume, ends), tree.directory
            await tree.put(engine, {b"one": b"bytes", b"two": b"others"})
            one, two = [(await python_says(volume, folder, name))[0] for name in (b"one", b"two")]
            fh = kernel.open(one)
            assert fh is not None
            assert fh not in given
            for former in given:
                assert kernel.read(one, former, 0, 9) is None
            assert kernel.read(two, fh, 0, 9) is None, "it is a handle of another block"
            assert not kernel.release(two, fh)
            assert kernel.read(one, fh, 0, 9) == b"bytes"
            given.add(fh)
            assert kernel.release(one, fh)


def test_the_decision_has_the_table_of_c() -> None:
    rows = re.findall(r"^\| (\w+) \((\d+)\) \| (yes|no) \| (.+) \|$", DECISION.read_text(), re.M)
    assert [(kind, int(opcode), may == "yes", why) for kind, opcode, may, why in rows] == list(ANSWERS)


async def test_what_is_not_in_the_table_is_pythons(tree: BlockTree, ends: tuple[socket.socket, socket.socket]) -> None:
    """Whichever bytes come, and of whatever size."""
    answered = {opcode for _, opcode, may, _ in ANSWERS if may}
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        ino, _ = await python_says(volume, folder, b"one")
        fh = kernel.open(ino)
        assert fh is not None
        for opcode in {*range(70), 4096, 1 << 31} - answered:
            for node in (folder, ino):
                for body in (b"", b"one\0", fh.to_bytes(8, "little") + bytes(120)):
                    assert kernel.ask(opcode, node, body) is None
        assert not kernel.release(ino, fh), "Python was asked by it"


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_any_kind_may_be_left_to_python(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket], kind: str
) -> None:
    """Which then has to close the handles that it is asked by; C keeps none of them."""
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        ino, _ = await python_says(volume, folder, b"one")
        engine.answers.answer_only(KINDS - {kind})
        fh = kernel.open(ino)
        assert (fh is None) == (kind == "open")
        renaming = struct.pack("<Q", folder) + b"one\0two\0"
        left = {
            "rename": kernel.ask(12, folder, renaming) is None,
            "lookup": kernel.look_up(folder, b"one") is None,
            "getattr": kernel.ask(GETATTR, ino, bytes(16)) is None,
            "read": fh is not None and kernel.read(ino, fh, 0, 9) is None,
            "release": fh is not None and not kernel.release(ino, fh),
            "forget": kernel.ask(FORGET, ino, bytes(8)) is None,
        }
        many = struct.pack("<IIQQ", 1, 0, ino, 1)
        assert (kernel.ask(BATCH_FORGET, ino, many) is None) == (kind == "forget")
        shared = {"release"} if kind == "read" else set()
        made = {"open", "create", "write", "flush"}
        assert {name for name, is_left in left.items() if is_left} == {kind, *shared} - made
        assert engine.answers.statistics()["open_handles"] == 0
        engine.answers.answer_only(KINDS)
        assert kernel.look_up(folder, b"one") is not None


@pytest.mark.parametrize("opcode", [FSYNC, FLUSH, READ])
async def test_a_handle_by_which_python_was_asked_is_pythons(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket], opcode: int
) -> None:
    """It made one of its own, which it would keep open if it heard of no close."""
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await tree.put(engine, {b"one": b"bytes"})
        ino, _ = await python_says(volume, folder, b"one")
        fhs = [kernel.open(ino) for _ in range(2)]
        assert None not in fhs
        engine.answers.answer_only(KINDS - {"read"})
        assert kernel.ask(opcode, ino, struct.pack("<QQ", fhs[0] or 0, 0)) is None
        assert not kernel.release(ino, fhs[0] or 0)
        assert kernel.release(ino, fhs[1] or 0)
        assert engine.answers.statistics()["open_handles"] == 0


@pytest.mark.parametrize("change", ["bytes", "mode", "nothing"])
async def test_who_has_a_block_open_sees_what_is_changed_by_its_number(
    tree: BlockTree, ends: tuple[socket.socket, socket.socket], change: str
) -> None:
    """Also once it has no name."""
    async with tree.opened() as (volume, engine):
        kernel, folder = await connect(volume, ends), tree.directory
        await python_says(volume, folder, b"absent")
        await tree.put(engine, {b"one": b"bytes"})
        found = kernel.look_up(folder, b"one")
        assert found is not None
        ino, fh = found[0], kernel.open(found[0])
        assert fh is not None
        if change == "bytes":
            writer = await volume.files.open(ino, os.O_WRONLY, CALLER)
            await volume.files.write(writer, 2, b"others")
            await volume.files.release(writer)
        elif change == "mode":
            await volume.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        await volume.tree.unlink(folder, b"one")
        if change == "nothing":
            await volume.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)  # fchmod
        assert kernel.read(ino, fh, 0, 9) is None
        assert kernel.ask(GETATTR, ino, bytes(16)) is None
        handle = kernel.taken.pop(fh)
        assert bytes(await volume.files.read(handle, 0, 9)) == (b"byothers" if change == "bytes" else b"bytes")
        seen = await volume.inodes.attributes(ino)
        assert (seen.nlink, seen.mode & 0o777) == (0, 0o600 if change == "mode" else 0o644)
        assert not kernel.release(ino, fh)
        await volume.files.release(handle)


async def test_open_blocks_stay_open(tree: BlockTree, ends: tuple[socket.socket, socket.socket]) -> None:
    """By the handles that the former daemon gave."""
    async with tree.opened() as (volume, engine):
        kernel, folder, kept = await connect(volume, ends), tree.directory, KeptRows(bytearray(), bytearray(24 * 8))
        engine.answers.begin(1.5, 100, engine.block_max, kept, lambda _: None)
        blocks = {b"new-%d" % number: b"%d" % number * 5000 for number in range(6)}
        await tree.put(engine, blocks)
        opened = {}
        for name in blocks:
            ino, _ = await python_says(volume, folder, name)
            opened[name] = ino, kernel.open(ino)
        for name in list(blocks)[::2]:
            assert kernel.release(*opened[name])
        engine.drop(folder, [b"new-3"])
        door = Door(engine.native, engine.tables.multipliers, 1.5, 0, 0)  # the next daemon's, as it were
        door.set_limits(1.5, 100)
        door.begin_drafts(engine.block_max, bytearray(), bytearray(kept.handles))
        said = door.statistics()
        assert said["open_handles"] == 2
        for name in (b"new-1", b"new-5"):
            ino, fh = opened[name]
            request = kernel.request(READ, ino, struct.pack("<QQIIQII", fh, 1, 99, 0, 0, 0, 0))
            assert door.answer(kernel.theirs.fileno(), request)
            assert kernel.ours.recv(1 << 20)[16:] == blocks[name][1:100]
            for gone in (fh ^ 1, fh ^ 1 << 20):
                request = kernel.request(READ, ino, struct.pack("<QQIIQII", gone, 1, 99, 0, 0, 0, 0))
                assert not door.answer(kernel.theirs.fileno(), request)
        for number in (0, 2, 3, 4):
            request = kernel.request(OPEN, opened[b"new-1"][0], bytes(8))
            assert door.answer(kernel.theirs.fileno(), request), number
            kernel.ours.recv(1 << 20)
        assert door.statistics()["open_handles"] == 6
