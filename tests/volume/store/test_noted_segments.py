"""Writes of a client that may still happen after their calls have ended are known by slab."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from stopped_servers import Servers
from volume_lab import MIB, Chaos, Disk, MemorySegments, lab_options

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.layout import PAGE_SIZE, Geometry
from kvfuse.volume.store.noted_segments import NotedSegments

SECONDS = 7.0
SLAB = 3


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    made.install(monkeypatch)
    return made


async def opened(chaos: Chaos) -> tuple[NotedSegments, Geometry]:
    disk = Disk.format(lab_options(capacity=9 * MIB), shared=True)
    geometry = disk.superblock.geometry
    store = NotedSegments(MemorySegments(disk, chaos), geometry, SECONDS)
    await store.create(0, geometry.segment_size(0))
    return store, geometry


def in_slab(geometry: Geometry) -> Transfer:
    return Transfer(*geometry.locate(SLAB * geometry.slab_size), b"bytes")


async def test_what_is_written_well_is_under_way_until_it_returns(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = Chaos(rng)
    store, geometry = await opened(chaos)
    chaos.stalled_writes = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.write, [in_slab(geometry), Transfer(*geometry.locate_head(5), b"head")])
        await trio.testing.wait_all_tasks_blocked()
        assert store.noted.slabs() == {SLAB, 5}
        chaos.stalled_writes.set()
    assert store.noted.slabs() == set()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_fails_or_is_cancelled_may_happen_for_a_while(
    rng: random.Random, autojump_clock: trio.testing.MockClock, is_cancelled: bool
) -> None:
    chaos = Chaos(rng)
    store, geometry = await opened(chaos)
    if is_cancelled:
        chaos.stalled_writes = trio.Event()
        with trio.move_on_after(1):
            await store.write([in_slab(geometry)])
    else:
        chaos.write_error = 1.0
        with pytest.raises(EngineError):
            await store.servers.write_some([in_slab(geometry)])
    assert store.noted.slabs() == {SLAB}
    await trio.sleep(SECONDS - 0.1)
    assert store.noted.slabs() == {SLAB}
    await trio.sleep(0.2)
    assert store.noted.slabs() == set()


async def test_what_is_late_may_happen_until_its_servers_answered_for_a_while(
    rng: random.Random, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    store, geometry = await opened(Chaos(rng))
    one = in_slab(geometry)
    servers.is_stopped = lambda segment, part: part == one.offset // MIB
    other = Transfer(*geometry.locate((SLAB + 2) * geometry.slab_size), b"bytes")
    assert await store.servers.write_some([one, other]) == {0}
    for _ in range(5):
        await trio.sleep(SECONDS)
        assert store.noted.slabs() == {SLAB}
    servers.go_on()
    assert store.noted.slabs() == {SLAB}
    await trio.sleep(SECONDS + 0.1)
    assert store.noted.slabs() == set()


def test_each_byte_of_a_segment_is_of_the_slab_that_has_it() -> None:
    geometry = Disk.format(lab_options(capacity=9 * MIB), shared=True).superblock.geometry
    assert list(geometry.slabs_at(0, 0, PAGE_SIZE)) == [], "the superblock"
    last = geometry.slab_count - 1
    for slab in (0, SLAB, last):
        segment, head = geometry.locate_head(slab)
        for offset in (head, head + geometry.head_size - 64):
            assert list(geometry.slabs_at(segment, offset, 64)) == [slab]
        segment, data = geometry.locate(slab * geometry.slab_size)
        for offset in (data, data + geometry.slab_size - 64):
            assert list(geometry.slabs_at(segment, offset, 64)) == [slab]
    assert list(geometry.slabs_at(0, PAGE_SIZE, 2 * geometry.head_size)) == [0, 1]
    assert list(geometry.slabs_at(*geometry.locate(0), geometry.slab_size + 1)) == [0, 1]
