"""Quotas of namespaces at the doors of files and blocks: never exceeded, not by one slot, and given back."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator

import inside
import pytest
import trio.testing
from namespace_lab import Counted, UseAudit, change_namespace, count_uses, make_namespace, recorded_uses
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import NotFound, QuotaExceeded
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10
OPTIONS = lab_options(capacity=24 * MIB)


@pytest.fixture
def disk() -> Disk:
    disk = Disk.format(OPTIONS)
    UseAudit.attach(disk)
    return disk


@pytest.fixture
async def volume(disk: Disk, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Volume]:
    async with opened(disk, OPTIONS, Chaos(random.Random(0))) as volume:
        yield volume
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


def use(volume: Volume, number: int) -> NamespaceUse:
    return inside.namespaces(volume).accounts.use(number)


async def put(volume: Volume, folder: int, name: bytes, size: int = BLOCK) -> None:
    await volume.blocks.put(folder, name, memoryview(random.randbytes(size)), CALLER, 0o644)


async def write_file(volume: Volume, folder: int, name: bytes, size: int = BLOCK) -> int:
    """Bytes that had room."""
    handle, node = await volume.tree.create(folder, name, 0o644, CALLER, os.O_WRONLY)
    try:
        return await volume.files.write(handle, 0, random.randbytes(size))
    finally:
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


async def test_files_have_a_capacity(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=4 * BLOCK)
    for index in range(4):
        assert await write_file(volume, number, b"%d" % index) == BLOCK
    with pytest.raises(QuotaExceeded, match=f"namespace {number}"):
        await write_file(volume, number, b"more")
    assert use(volume, number) == NamespaceUse(4 * BLOCK, 5)
    await volume.tree.unlink(number, b"2")
    assert await write_file(volume, number, b"more2") == BLOCK, "room is there again, once a commit has freed it"
    assert use(volume, number).size == 4 * BLOCK


async def test_a_write_that_finds_room_for_a_part_is_short(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=MIB + BLOCK)
    assert await write_file(volume, number, b"f", 3 * MIB) == MIB
    assert use(volume, number).size == MIB


async def test_puts_have_a_capacity(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=4 * BLOCK)
    for index in range(4):
        await put(volume, number, b"%d" % index)
    with pytest.raises(QuotaExceeded):
        await put(volume, number, b"more")
    assert use(volume, number) == NamespaceUse(4 * BLOCK, 4), "of what was refused nothing is left"
    assert await volume.blocks.delete(number, [b"0", b"1"])
    await put(volume, number, b"more", 2 * BLOCK)
    assert use(volume, number) == NamespaceUse(4 * BLOCK, 3)


async def test_a_capacity_between_two_slots_is_not_exceeded(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=2 * BLOCK - 1)
    await put(volume, number, b"a")
    with pytest.raises(QuotaExceeded):
        await put(volume, number, b"b")
    assert use(volume, number).size == BLOCK


async def test_a_namespace_counts_towards_the_one_that_it_is_in(volume: Volume) -> None:
    outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=4 * BLOCK, blocks=4)
    inner = await make_namespace(volume, outer, b"inner", blocks=3)
    await put(volume, outer, b"a", 2 * BLOCK)
    await put(volume, inner, b"b")
    assert (use(volume, outer), use(volume, inner)) == (NamespaceUse(3 * BLOCK, 2), NamespaceUse(BLOCK, 1))
    with pytest.raises(QuotaExceeded, match=f"namespace {outer}"):
        await put(volume, inner, b"c", 2 * BLOCK)
    await put(volume, inner, b"c", 4096)
    await put(volume, inner, b"d", 4096)
    with pytest.raises(QuotaExceeded, match=f"namespace {inner} may have 3 files"):
        await put(volume, inner, b"e", 0)
    with pytest.raises(QuotaExceeded, match=f"namespace {outer} may have 4 files"):
        await put(volume, outer, b"e", 0)


async def test_files_have_a_number(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", blocks=3)
    for index in range(3):
        await put(volume, number, b"%d" % index)
    with pytest.raises(QuotaExceeded):
        await volume.tree.create(number, b"more", 0o644, CALLER, os.O_WRONLY)
    await put(volume, number, b"0")
    await volume.tree.make_directory(number, b"folder", 0o755, CALLER)
    await volume.tree.rename(number, b"1", number, b"0", 0)
    await volume.tree.link((await volume.tree.lookup(number, b"0")).ino, number, b"other name")
    await put(volume, number, b"1")
    with pytest.raises(QuotaExceeded):
        await put(volume, number, b"other name")
    await volume.sync()
    assert use(volume, number).files == 3


async def test_a_number_of_files_holds_in_the_store_at_every_commit(disk: Disk, volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", blocks=2)
    for index in range(30):
        name, other = b"%d" % (index % 4), b"%d" % ((index + 1) % 4)
        try:
            await put(volume, number, name)
            await volume.tree.rename(number, name, number, other, 0)
        except QuotaExceeded:
            for victim in (b"0", b"1", b"2", b"3"):
                if await volume.blocks.delete(number, [victim]) != [0]:
                    break
        if index % 3:
            await trio.sleep(0.04)
    await volume.sync()
    assert recorded_uses(disk)[number].files == use(volume, number).files <= 2


async def test_a_capacity_below_the_use_refuses_what_needs_slots(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n")
    handle, _ = await volume.tree.create(number, b"open", 0o644, CALLER, os.O_RDWR)
    await volume.files.write(handle, 0, b"x" * 4096)
    await put(volume, number, b"a", 4 * BLOCK)
    await volume.sync()
    await change_namespace(volume, number, capacity=2 * BLOCK)
    with pytest.raises(QuotaExceeded):
        await volume.files.write(handle, 4096, bytes(BLOCK))
    assert await volume.files.read(handle, 0, BLOCK) == b"x" * 4096
    assert use(volume, number).size == 4 * BLOCK + 4096
    await volume.files.fsync(handle)
    await volume.blocks.delete(number, [b"a"])
    assert await volume.files.write(handle, 4096, bytes(BLOCK)) == BLOCK
    await volume.files.release(handle)
    await change_namespace(volume, number, capacity=0)
    await put(volume, number, b"b", 8 * BLOCK)


async def test_bytes_that_are_staged_grow_into_the_last_room(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=2 * BLOCK)
    handle, _ = await volume.tree.create(number, b"f", 0o644, CALLER, os.O_RDWR)
    for offset in range(0, 2 * BLOCK, 4096):
        assert await volume.files.write(handle, offset, bytes(4096)) == 4096
    assert use(volume, number).size == 2 * BLOCK
    with pytest.raises(QuotaExceeded):
        await volume.files.write(handle, 2 * BLOCK, bytes(4096))
    await volume.inodes.set_attributes(handle.node.ino, Changes(size=4096), CALLER)
    await volume.files.release(handle)
    await volume.sync()


async def test_slots_of_an_open_file_count_until_it_is_closed(disk: Disk, volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=BLOCK)
    await put(volume, number, b"a")
    await volume.sync()
    node = await volume.tree.lookup(number, b"a")
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    await volume.tree.unlink(number, b"a")
    await volume.sync()
    assert recorded_uses(disk)[number] == Counted(BLOCK, 0)
    with pytest.raises(QuotaExceeded):
        await put(volume, number, b"b")
    await volume.files.release(handle)
    await put(volume, number, b"b")
    volume.tree.forget(node.ino, 1)


async def test_the_use_survives(autojump_clock: trio.testing.MockClock) -> None:
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=8 * MIB)
        inner = await make_namespace(volume, outer, b"inner", capacity=MIB)
        for index in range(8):
            await put(volume, inner if index % 2 else outer, b"%d" % index)
        node = await volume.tree.lookup(inner, b"1")
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await volume.tree.unlink(inner, b"1")
        await volume.sync()
        before = use(volume, outer), use(volume, inner)
        crashed = disk.copy()
        await volume.files.release(handle)
    assert before == (NamespaceUse(8 * BLOCK, 7), NamespaceUse(4 * BLOCK, 3))
    assert count_uses(crashed) == recorded_uses(crashed)
    UseAudit.attach(crashed)
    async with opened(crashed, OPTIONS) as volume:
        await volume.sync()
        assert (use(volume, outer), use(volume, inner)) == (NamespaceUse(7 * BLOCK, 7), NamespaceUse(3 * BLOCK, 3))
        with pytest.raises(QuotaExceeded, match=f"namespace {inner}"):
            await put(volume, inner, b"large", MIB)
        with pytest.raises(NotFound):
            await volume.tree.lookup(inner, b"1")


async def test_a_page_that_the_kernel_writes_back_without_room_is_refused(volume: Volume) -> None:
    number = await make_namespace(volume, ROOT_INODE, b"n", capacity=MIB + BLOCK)
    handle, _ = await volume.tree.create(number, b"f", 0o644, CALLER, os.O_RDWR)
    await volume.inodes.set_attributes(handle.node.ino, Changes(size=3 * MIB), CALLER)
    with pytest.raises(QuotaExceeded):
        await volume.files.write(handle, 0, bytes(3 * MIB), by_kernel=True)
    await volume.files.release(handle)


async def test_what_is_said_of_a_namespace_has_its_use_and_capacity(volume: Volume) -> None:
    outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=4 * MIB)
    inner = await make_namespace(volume, outer, b"inner")
    await put(volume, inner, b"a", MIB)
    await volume.sync()
    rows = {row["number"]: (row["used"], row["capacity"]) for row in volume.stats()["namespaces"]}
    none = {"blocks": 0, "block_bytes": 0}
    used, size = {"bytes": MIB, "files": 1, **none}, inside.core(volume).geometry.data_size
    assert rows == {0: ({"bytes": MIB, "files": 4, **none}, size), outer: (used, 4 * MIB), inner: (used, 4 * MIB)}
    await change_namespace(volume, outer, capacity=MIB // 2)
    assert volume.stats()["namespaces"][2]["capacity"] == MIB // 2


async def test_a_namespace_that_goes_gives_back_what_it_had(volume: Volume) -> None:
    outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=2 * BLOCK)
    inner = await make_namespace(volume, outer, b"inner")
    await put(volume, inner, b"a", 2 * BLOCK)
    await volume.sync()
    await volume.blocks.delete(inner, [b"a"])
    await volume.sync()
    core = inside.core(volume)
    core.namespaces.remove(inner)
    await volume.tree.remove_directory(outer, b"inner")
    inside.journal(volume).put(schema.namespace_key(inner), None)
    inside.journal(volume).put(schema.use_key(inner, 0), None)
    await put(volume, outer, b"b", 2 * BLOCK)
    assert use(volume, outer) == NamespaceUse(2 * BLOCK, 1)
    assert use(volume, inner) == NamespaceUse(0, 0)
