"""Bytes that are read past the page cache: the file's and verified each time, or left to another way."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import Corrupt, EngineError
from kvfuse.remote.segments.api import Fetch
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.volume import Volume

SIZE = 3 * MIB + 12_345
"""bytes of the file: three chunks, and one with an end that is no page's"""


@dataclass
class Case:
    """A file that a daemon finds, with nothing of it in the page cache."""

    disk: Disk
    data: bytes
    volume: Volume
    handle: FileHandle
    gate: trio.Event = field(default_factory=trio.Event)
    """fetches wait for it"""
    fetched: list[Fetch] = field(default_factory=list)
    target: memoryview = field(default_factory=lambda: memoryview(mmap.mmap(-1, SIZE + 3 * GRANULE_SIZE)))

    async def get(self, offset: int, length: int) -> bytes | None:
        found = await self.volume.files.read_once(self.handle, offset, length, self.target)
        return None if found is None else bytes(found)

    async def expect(self, offset: int, length: int) -> None:
        assert await self.get(offset, length) == self.data[offset : offset + length]


@asynccontextmanager
async def found_file(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    options, data = lab_options(capacity=48 * MIB), rng.randbytes(SIZE)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, data)
        await volume.files.release(handle)
    async with opened(disk, options) as volume:
        handle = await volume.files.open((await volume.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        case = Case(disk, data, volume, handle)
        segments = inside.segments(volume)
        fetch = segments.fetch

        async def noted_fetch(batch: Sequence[Fetch], threads: trio.CapacityLimiter) -> Sequence[bytes]:
            case.fetched += batch
            await case.gate.wait()
            return await fetch(batch, threads)

        monkeypatch.setattr(segments, "fetch", noted_fetch)
        monkeypatch.setattr(segments, "view", lambda *_: None)
        yield case
        await volume.files.release(handle)
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


async def test_any_range_is_the_files(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        await case.expect(0, SIZE)
        assert len(case.fetched) == 4
        for _ in range(30):
            offset = rng.choice([0, MIB, GRANULE_SIZE, rng.randrange(SIZE)])
            await case.expect(offset, rng.randint(1, SIZE - offset))
        assert all(one.length <= MIB for one in case.fetched)


async def test_what_does_not_match_is_left_to_the_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        await case.expect(0, SIZE)
        extent = case.handle.node.chunks[1].extents[0]
        segment, place = inside.core(case.volume).locate(extent.addr)
        image = case.disk.segments[segment]
        image[place + GRANULE_SIZE] ^= 1
        assert await case.get(0, SIZE) is None
        await case.expect(MIB, GRANULE_SIZE)  # its neighbours are whole
        assert inside.core(case.volume).counters.checksum_failures == 0
        with pytest.raises(Corrupt):
            await case.volume.files.read(case.handle, MIB + GRANULE_SIZE, 10)
        assert inside.core(case.volume).counters.checksum_failures == 1
        image[place + GRANULE_SIZE] ^= 1  # for the check of the volume


async def test_what_changes_meanwhile_is_left_to_the_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(case: Case) -> None:
        await case.volume.files.write(case.handle, MIB + 5, b"new")

    async def cut(case: Case) -> None:
        await case.volume.inodes.set_attributes(case.handle.node.ino, Changes(size=MIB + 5), CALLER)

    for change in (write, cut):
        async with found_file(rng, monkeypatch) as case, trio.open_nursery() as nursery:
            found: list[bytes | None] = []

            async def get(case: Case = case, found: list[bytes | None] = found) -> None:
                found.append(await case.get(0, SIZE))

            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked()
            assert case.fetched
            await change(case)
            case.gate.set()
            await trio.testing.wait_all_tasks_blocked()
            assert found == [None]


async def test_other_ways_read_the_rest(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        await case.volume.files.write(case.handle, MIB + 5, b"staged")
        assert await case.get(MIB, 10) is None
        await case.volume.files.write(case.handle, 9 * MIB, b"behind a hole")
        assert await case.get(7 * MIB, MIB) is None
        monkeypatch.undo()
        assert await case.get(0, MIB) is None  # it is in the page cache


async def test_what_the_page_cache_has_in_part_is_read_past_it(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        first = case.handle.node.chunks[0].extents[0]
        there = inside.core(case.volume).locate(first.addr)
        monkeypatch.setattr(
            inside.segments(case.volume), "view", lambda *place: case.target if place[:2] == there else None
        )
        await case.expect(0, SIZE)
        assert await case.get(0, MIB) is None


async def test_a_failing_engine_is_left_to_the_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:

        async def fails(*_: object) -> list[bytes]:
            raise EngineError("injected: a fetch")

        monkeypatch.setattr(inside.segments(case.volume), "fetch", fails)
        assert await case.get(0, MIB) is None
        case.handle.node.chunks[0].extents[0].addr, addr = 1 << 44, case.handle.node.chunks[0].extents[0].addr
        assert await case.get(0, MIB) is None  # in no segment
        case.handle.node.chunks[0].extents[0].addr = addr
