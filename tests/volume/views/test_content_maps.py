"""Content maps: what a thread finds through one beside the event loop is what the file has, or it is told to ask.

Every operation that changes bytes, their places or the size raises a map's version, and takes rows away first.
"""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import inside
import numpy as np
import pytest
import trio
import trio.testing
from map_reading import CHUNK, Case, map_read
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.errors import Corrupt, EngineError, Stale
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content.in_place import has_unsealed
from kvfuse.volume.inodes.chunk import DISCARDED
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views.content_map import ContentMap, MapRow
from kvfuse.volume.volume import Volume

# -- every operation ----------------------------------------------------------------------------------


@pytest.fixture
async def case(rng: random.Random, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Case]:
    options = lab_options(capacity=24 * MIB, chunk=CHUNK, nodes=64)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        case = Case(volume, handle, bytearray())
        await case.put(0, rng.randbytes(2 * CHUNK + 10_000))
        await volume.sync()
        await volume.files.show(handle, 0, 2)
        assert len(case.shown.rows) == 3
        yield case
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


Operation = Callable[[Case, random.Random], Awaitable[None]]


async def stages_over_a_chunk(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK, rng.randbytes(CHUNK))


async def changes_a_staged_chunk(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK, rng.randbytes(CHUNK))
    row = MapRow(None, 0, 0)  # as of a block of the tier, that holds what is staged
    case.shown.rows[1] = row
    await case.put(CHUNK + 5, b"changed")
    assert 1 not in case.shown.rows


async def changes_in_place(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, rng.randbytes(1000))


async def changes_unsealed_bytes_in_place(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, b"unseals")
    await case.volume.files.show(case.handle, 1, 1)
    assert case.shown.rows[1].checksums == b""
    version = case.shown.version
    await case.put(CHUNK + 200, rng.randbytes(1000))
    assert case.shown.version > version


async def grows_a_chunk_in_place(case: Case, rng: random.Random) -> None:
    await case.put(len(case.data), b"x" * 10)


async def adds_a_chunk(case: Case, rng: random.Random) -> None:
    await case.put(3 * CHUNK, b"x")


async def cuts_a_chunk(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK + 10)


async def cuts_whole_chunks(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK)


async def cuts_and_extends(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK + 10)
    await case.volume.files.show(case.handle, 0, 2)
    await case.cut(3 * CHUNK)


async def cuts_staged_bytes(case: Case, rng: random.Random) -> None:
    await case.put(3 * CHUNK, rng.randbytes(CHUNK))
    case.shown.rows[3] = MapRow(None, 0, 0)  # as of a block of the tier
    await case.cut(3 * CHUNK + 10)
    assert 3 not in case.shown.rows


async def truncates_at_open(case: Case, rng: random.Random) -> None:
    other = await case.volume.files.open(case.ino, os.O_RDWR | os.O_TRUNC, CALLER)
    await case.volume.files.release(other)
    case.data.clear()


async def only_extends(case: Case, rng: random.Random) -> None:
    await case.cut(5 * CHUNK)


async def seals_at_close(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, rng.randbytes(1000))
    await case.volume.files.show(case.handle, 1, 1)
    version = case.shown.version
    other, case.handle = case.handle, await case.volume.files.open(case.ino, os.O_RDONLY, CALLER)
    await case.volume.files.release(other)
    while has_unsealed(case.handle.node):
        await trio.lowlevel.checkpoint()
    assert case.shown.version > version
    await case.volume.files.show(case.handle, 1, 1)
    assert case.shown.rows[1].checksums


CHANGES: tuple[Operation, ...] = (
    stages_over_a_chunk,
    changes_a_staged_chunk,
    changes_in_place,
    changes_unsealed_bytes_in_place,
    grows_a_chunk_in_place,
    adds_a_chunk,
    cuts_a_chunk,
    cuts_whole_chunks,
    cuts_and_extends,
    cuts_staged_bytes,
    truncates_at_open,
    only_extends,
    seals_at_close,
)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_raises_the_version_and_is_seen(
    small_rewrites: None, case: Case, rng: random.Random, change: Operation
) -> None:
    shown = case.shown
    first, version = shown.rows[0], shown.version
    before = map_read(shown, 0, 10 * CHUNK)
    assert before == case.data
    await change(case, rng)
    assert case.shown is shown
    assert shown.version > version
    assert map_read(shown, 0, 10 * CHUNK) in (None, case.data)
    await case.volume.sync()
    await case.volume.files.show(case.handle, 0, 100)
    assert map_read(shown, 0, 10 * CHUNK) == case.data
    if change is not truncates_at_open:
        assert shown.rows[0] is first, "the row of a chunk that nobody touched was taken away"


async def test_rows_are_gone_before_bytes_change_in_place(small_rewrites: None, case: Case) -> None:
    """Looked at where the engine is asked to write. A row that is shown during the write has the length of before."""
    segments = inside.segments(case.volume)
    write, seen = segments.write, []

    async def watched(batch: Sequence[Transfer]) -> None:
        row = case.shown.rows.get(2)
        seen.append((case.shown.version > version, row is None))
        await case.volume.files.show(case.handle, 2, 2)
        await write(batch)

    version = case.shown.version
    segments.write = watched
    await case.put(len(case.data), b"in place, behind the end")
    segments.write = write
    assert seen[-1] == (True, True)
    assert map_read(case.shown, 0, 3 * CHUNK) in (None, case.data)
    await case.volume.files.show(case.handle, 2, 2)
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


async def test_a_failed_unsealing_leaves_no_unverified_row(small_rewrites: None, case: Case) -> None:
    chaos = inside.records(case.volume).chaos
    chaos.commit_error = 2
    case.shown.rows.clear()
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(EngineError):
                await case.volume.files.write(case.handle, CHUNK + 100, b"in place")

        nursery.start_soon(write)
        while case.handle.node.chunks[1].extents[0].checksums:
            await trio.lowlevel.checkpoint()
        await case.volume.files.show(case.handle, 1, 1)
    chaos.commit_error = 0.0
    await case.volume.files.show(case.handle, 0, 2)
    assert case.shown.rows[1].checksums
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


# -- the end of a map ---------------------------------------------------------------------------------


def ended(shown: ContentMap, version: int) -> bool:
    return shown.version > version and not shown.rows and shown.size < 0


async def test_an_unlinked_file_is_shown_until_it_is_closed(case: Case) -> None:
    shown, version, node = case.shown, case.shown.version, case.handle.node
    await case.volume.tree.unlink(ROOT_INODE, b"file")
    await case.volume.sync()
    assert map_read(shown, 0, 3 * CHUNK) == case.data
    await case.volume.files.release(case.handle)
    case.volume.tree.forget(node.ino, 1)
    assert ended(shown, version)
    with pytest.raises(Stale):
        case.volume.files.content_map(node)


async def test_a_replaced_file_is_shown_no_more(case: Case) -> None:
    shown, version = case.shown, case.shown.version
    await case.volume.files.release(case.handle)
    case.volume.tree.forget(case.ino, 1)
    other, node = await case.volume.tree.create(ROOT_INODE, b"other", 0o644, CALLER, os.O_RDWR)
    await case.volume.files.release(other)
    await case.volume.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"file", 0)
    assert ended(shown, version)
    case.volume.tree.forget(node.ino, 1)


async def crowd(volume: Volume, node: Node) -> None:
    """Make other inodes until ``node`` had to leave memory."""
    for number in range(1000):
        handle, _ = await volume.tree.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
        await volume.files.release(handle)
        if number % 50 == 0:
            await volume.sync()
        if node not in list(inside.nodes(volume)):
            return
    raise AssertionError("it stays in memory")


async def test_a_map_ends_when_its_inode_leaves_memory(case: Case) -> None:
    volume, shown, version, node = case.volume, case.shown, case.shown.version, case.handle.node
    with pytest.raises(AssertionError, match="stays"):
        await crowd(volume, node)  # it is open
    await volume.files.release(case.handle)
    for number in range(1000):
        await volume.tree.unlink(ROOT_INODE, b"%d" % number)
    await crowd(volume, node)
    assert ended(shown, version)
    case.handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    assert case.shown is not shown
    await volume.files.show(case.handle, 0, 2)
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


async def test_an_inode_that_left_memory_comes_back_for_its_map(case: Case) -> None:
    """Somebody still holds it; were it not found again, nobody would end its map."""
    volume, node = case.volume, case.handle.node
    await volume.files.release(case.handle)
    await crowd(volume, node)
    shown = volume.files.content_map(node)
    assert node in list(inside.nodes(volume))
    assert shown.size == len(case.data)


# -- what is shown ------------------------------------------------------------------------------------


async def test_staged_bytes_and_chunks_in_pieces_are_not_shown(autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options(capacity=24 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, node = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_RDWR)
        data = random.Random(0).randbytes(300 << 10)
        await volume.files.write(handle, 0, data)
        await volume.files.show(handle, 0, 0)
        assert not volume.files.content_map(handle).rows
        await volume.sync()
        assert len(node.chunks[0].extents) > 1, "the test needs a chunk in pieces"
        await volume.files.show(handle, 0, 0)
        assert not volume.files.content_map(handle).rows
        target = bytearray(len(data))
        assert await volume.files.read_into(handle, 0, memoryview(target)) == len(data)
        assert target == data
        await volume.files.release(handle)


async def test_a_slot_that_a_damaged_volume_may_give_away_is_not_shown(case: Case) -> None:
    case.shown.rows.clear()
    extent = case.handle.node.chunks[1].extents[0]
    state, extent.state = extent.state, DISCARDED  # as for a slot that the slabs' records call free
    await case.volume.files.show(case.handle, 0, 2)
    assert sorted(case.shown.rows) == [0, 2]
    extent.state = state


async def test_holes_far_chunks_and_the_end(case: Case, rng: random.Random) -> None:
    await case.put(40 * CHUNK + 7, b"far")
    await case.volume.sync()
    await case.volume.files.show(case.handle, 0, 1 << 40)
    shown = case.shown
    assert sorted(shown.rows) == list(range(41))
    assert shown.rows[20].source is None
    assert map_read(shown, 0, 100 * CHUNK) == case.data
    target = bytearray(b"\xff" * (42 * CHUNK))
    assert await case.volume.files.read_into(case.handle, 0, memoryview(target)) == len(case.data)
    assert target == case.data + b"\xff" * (len(target) - len(case.data)), "bytes behind the end were touched"
    assert await case.volume.files.read_into(case.handle, 41 * CHUNK, memoryview(target)) == 0
    assert await case.volume.files.read_into(case.handle, 3 * CHUNK - 5, memoryview(target)[:10]) == 10
    assert target[:10] == bytes(10)


async def test_read_into_verifies(case: Case) -> None:
    node = case.handle.node
    extent = node.chunks[1].extents[0]
    segment, offset = inside.core(case.volume).locate(extent.addr)
    image = inside.segments(case.volume).disk.segments[segment]
    image[offset] ^= 1
    with pytest.raises(Corrupt):
        await case.volume.files.read_into(case.handle, 0, memoryview(bytearray(2 * CHUNK)))
    image[offset] ^= 1
    target = bytearray(2 * CHUNK)
    assert await case.volume.files.read_into(case.handle, 0, memoryview(target)) == 2 * CHUNK
    assert target == case.data[: 2 * CHUNK]


# -- writes of memory that is kept --------------------------------------------------------------------


async def test_memory_that_was_written_is_kept_until_it_is_stored_and_never_changed(
    case: Case, rng: random.Random
) -> None:
    memory = np.frombuffer(rng.randbytes(CHUNK), np.uint8).copy()
    before, gone = memory.tobytes(), weakref.ref(memory)
    view = memory.data.toreadonly()
    case.data[CHUNK : 2 * CHUNK] = before
    await case.volume.files.write(case.handle, CHUNK, view)
    staged = case.handle.node.chunks[1].staged
    assert staged is not None
    assert staged.pieces == [view]
    assert staged.pieces[0] is view, "it was copied"
    assert bytes(await case.volume.files.read(case.handle, CHUNK, CHUNK)) == before
    await case.put(CHUNK + 10, b"changed")
    assert memory.tobytes() == before
    assert bytes(await case.volume.files.read(case.handle, 0, 10 * CHUNK)) == case.data
    await case.put(CHUNK, memory.data[:CHUNK].tobytes())
    await case.volume.files.write(case.handle, CHUNK, view)
    del view, staged, memory
    await case.volume.sync()
    assert gone() is None, "somebody still holds the memory"
    assert bytes(await case.volume.files.read(case.handle, 0, 10 * CHUNK)) == case.data


async def test_views_of_any_size_are_written_anywhere(small_rewrites: None, case: Case, rng: random.Random) -> None:
    """Small and large, over chunks, into gaps, in place, behind what is staged, while it is being written."""
    for _ in range(150):
        data = rng.randbytes(int((3 * CHUNK) ** rng.random()))
        offset = rng.choice([len(case.data), rng.randrange(6 * CHUNK)])
        memory = np.frombuffer(data, np.uint8).copy()
        if offset + len(data) <= 8 * CHUNK:
            case.data[len(case.data) :] = bytes(max(0, offset - len(case.data)))
            case.data[offset : offset + len(data)] = data
            assert await case.volume.files.write(case.handle, offset, memory.data) == len(data)
        if rng.random() < 0.3:
            await case.volume.sync()
        assert bytes(await case.volume.files.read(case.handle, 0, 10 * CHUNK)) == case.data
        assert memory.tobytes() == data
