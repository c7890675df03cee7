"""Slots that are verified ahead of a reader: few engine calls, bounded, and never bytes that do not match."""

from __future__ import annotations

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

from kvfuse.errors import Corrupt, EngineError
from kvfuse.remote.segments.api import NoSegment, Transfer
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.content import slot_checks
from kvfuse.volume.content.reader import OwnExtents
from kvfuse.volume.content.slot_checks import SlotChecks, is_verified
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.measures import read_turns
from kvfuse.volume.volume import Volume

CHUNKS = 6
GRANULE = 256 << 10


@dataclass
class Case:
    """A file of CHUNKS slots of 1 MiB that a daemon finds: nothing of it is verified yet."""

    disk: Disk
    data: bytes
    volume: Volume
    handle: FileHandle
    warmed: list[int] = field(default_factory=list)
    """offsets of slots that were checked, in their segment"""
    read: list[int] = field(default_factory=list)
    """bytes of other reads of the engine"""
    gate: trio.Event = field(default_factory=trio.Event)
    """checks wait for it"""

    @property
    def extents(self) -> list[Extent]:
        return [self.handle.node.chunks[index].extents[0] for index in sorted(self.handle.node.chunks)]

    @property
    def checks(self) -> SlotChecks:
        found = inside.reader(self.volume).extents
        assert isinstance(found, OwnExtents)
        assert found.checks is not None
        return found.checks

    async def get(self, offset: int, length: int) -> None:
        assert bytes(await self.volume.files.read(self.handle, offset, length)) == self.data[offset : offset + length]

    async def idle(self) -> None:
        """All checks are over."""
        self.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not self.checks.size_under_way


@asynccontextmanager
async def found_file(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, beginning: bytes = b"", size: int = CHUNKS * MIB
) -> AsyncIterator[Case]:
    options = lab_options(capacity=48 * MIB)
    disk, data = Disk.format(options), beginning + rng.randbytes(size - len(beginning))
    async with opened(disk, options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, data)
        await volume.files.release(handle)
    async with opened(disk, options) as volume:
        ino = (await volume.tree.lookup(ROOT_INODE, b"file")).ino
        handle = await volume.files.open(ino, os.O_RDWR, CALLER)
        case = Case(disk, data, volume, handle)
        segments = inside.segments(volume)
        warm, read = segments.warm, segments.read

        async def noted_warm(segment: int, offset: int, length: int, threads: trio.CapacityLimiter) -> bytes:
            case.warmed.append(offset)
            await case.gate.wait()
            return await warm(segment, offset, length, threads)

        async def noted_read(batch: Sequence[Transfer]) -> None:
            case.read += [len(transfer.buffer) for transfer in batch]
            await read(batch)

        monkeypatch.setattr(segments, "warm", noted_warm)
        monkeypatch.setattr(segments, "read", noted_read)
        yield case
        await case.idle()
        await volume.files.release(handle)
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


async def test_a_reader_finds_what_follows_verified(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        await case.get(0, GRANULE // 2)  # the kernel's first read-ahead
        await case.idle()
        assert len(case.warmed) == CHUNKS
        case.read.clear()
        for offset in range(0, len(case.data), GRANULE):
            await case.get(offset, GRANULE)
        assert not case.read
        assert len(case.warmed) == CHUNKS


HEADER = b'{"weight": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'


async def test_weights_of_a_model_are_read_on_from_their_header(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found_file(rng, monkeypatch, len(HEADER).to_bytes(8, "little") + HEADER) as case:
        case.gate.set()
        await case.get(0, 4096)
        await case.idle()
        assert len(case.warmed) == CHUNKS


@pytest.mark.parametrize("beginning", [b"", HEADER, (1 << 40).to_bytes(8, "little") + HEADER, b"\2" + bytes(7) + b"[]"])
async def test_a_small_read_of_other_files_is_left_alone(
    beginning: bytes, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found_file(rng, monkeypatch, beginning) as case:
        case.gate.set()
        await case.get(0, 4096)
        await case.idle()
        assert not case.warmed


async def test_no_more_is_under_way_than_may_be(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_checks, "AHEAD_MAX", 2 * MIB)
    async with found_file(rng, monkeypatch) as case, trio.open_nursery() as nursery:
        nursery.start_soon(case.get, 0, MIB)
        await trio.testing.wait_all_tasks_blocked()
        assert len(case.warmed) == 2
        assert case.checks.size_under_way == 2 * MIB
        case.gate.set()


async def test_slots_are_checked_in_pieces_beside_another_namespace(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much at once as the namespace's share, so that the other one's reads need not wait for a whole slot."""
    monkeypatch.setattr(read_turns, "WINDOW", MIB)
    monkeypatch.setattr(slot_checks, "PIECE", GRANULE)
    async with found_file(rng, monkeypatch) as case, trio.open_nursery() as nursery:
        inside.core(case.volume).namespaces.measures[1 << 40].begin_reading(1)
        nursery.start_soon(case.get, 0, MIB)
        await trio.testing.wait_all_tasks_blocked()
        assert len(case.warmed) == MIB // 2 // GRANULE
        await case.idle()
        assert len(case.warmed) == CHUNKS * MIB // GRANULE
        assert all(is_verified(extent, 0, extent.length) for extent in case.extents)


@pytest.mark.parametrize(("offset", "length"), [(3 * MIB + 4096, 4096), (2 * MIB + GRANULE, GRANULE)])
async def test_a_read_at_random_is_left_alone(
    offset: int, length: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found_file(rng, monkeypatch) as case:
        await case.get(offset, length)
        assert not case.warmed


async def test_what_does_not_match_is_no_bytes(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        extent = case.extents[0]
        segment, place = inside.core(case.volume).locate(extent.addr)
        image = case.disk.segments[segment]
        image[place + GRANULE] ^= 1
        case.gate.set()
        with pytest.raises(Corrupt):
            await case.volume.files.read(case.handle, 0, MIB)
        await case.idle()
        assert extent.verified == 0b1101
        image[place + GRANULE] ^= 1  # for the check of the volume
        await case.get(0, MIB)


async def test_a_slot_that_changes_meanwhile_is_not_verified(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found_file(rng, monkeypatch) as case:
        extent = case.extents[1]
        case.checks.expect(case.handle.node, 1, extent, 0, MIB)
        await trio.testing.wait_all_tasks_blocked()
        await case.volume.files.write(case.handle, MIB + 5, b"new")
        case.data = case.data[: MIB + 5] + b"new" + case.data[MIB + 8 :]
        await case.idle()
        assert not extent.verified
        await case.get(MIB, MIB)


async def test_what_others_verify_meanwhile_is_not_checked(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch, size=GRANULE - 1) as case:
        await case.volume.files.show(case.handle, 0, 0)
        extent = case.extents[0]
        case.checks.expect(case.handle.node, 0, extent, 0, GRANULE - 1)
        extent.verified = 1  # by a small read, which does not wait for the check
        case.gate.set()
        await case.idle()
        await case.get(0, GRANULE - 1)


async def test_a_slot_that_is_cut_meanwhile_leaves_room(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.checks.expect(case.handle.node, CHUNKS - 1, case.extents[-1], 0, MIB)
        await trio.testing.wait_all_tasks_blocked()
        case.data = case.data[: -MIB + 1000]
        await case.volume.inodes.set_attributes(case.handle.node.ino, Changes(size=len(case.data)), CALLER)
        await case.idle()
        await case.get((CHUNKS - 1) * MIB, MIB)


async def test_a_slot_in_no_segment_is_left_to_the_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        extent = case.extents[0]
        addr, extent.addr = extent.addr, 1 << 44
        with pytest.raises(NoSegment):
            await case.volume.files.read(case.handle, 0, MIB)
        extent.addr = addr
        await case.get(0, MIB)


async def test_a_failing_check_is_left_to_the_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()

        async def fails(*_: object) -> bytes:
            raise EngineError("injected: a check")

        monkeypatch.setattr(inside.segments(case.volume), "warm", fails)
        for offset in range(0, len(case.data), MIB):
            await case.get(offset, MIB)
        assert sum(case.read) == len(case.data)


async def test_the_rings_way_waits_for_the_slots(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async with found_file(rng, monkeypatch) as case:
        case.gate.set()
        await case.volume.files.verify_ahead(case.handle, 100, 2 * MIB)
        assert [extent.verified for extent in case.extents[:2]] == [0b1111, 0b1111]
        await case.volume.files.verify_ahead(case.handle, 4 * MIB, 4 * MIB + 4096)
        assert not case.read
