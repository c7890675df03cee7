"""Segments move between devices while they are written: no byte that was acknowledged is lost."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from test_block_segments import SIZE, VOLUME, blank, devices_of, made

from kvfuse.errors import EngineError, VolumeError
from kvfuse.remote.segments.api import DeviceControl, Transfer
from kvfuse.remote.segments.block import changing, moving
from kvfuse.remote.segments.block.making import prepare_device
from kvfuse.remote.segments.block.segment_map import MapName
from kvfuse.remote.segments.block.store import BlockSegments

PAGE = 4096
SEGMENTS = 4


async def opened(folder: Path, wanted: MapName | None = None) -> BlockSegments:
    return await BlockSegments.open([folder / name for name in "abc"], VOLUME, wanted, alone=True)


@pytest.fixture
async def store(tmp_path: Path) -> BlockSegments:
    made([blank(tmp_path / name) for name in "abc"], count=SEGMENTS)
    store = await opened(tmp_path)
    for segment in range(SEGMENTS):
        await store.create(segment, SIZE)
    return store


def control(store: BlockSegments) -> DeviceControl:
    assert store.devices is not None
    return store.devices


def check() -> None:
    """Writing is allowed."""


class Writer:
    """Writes pages here and there, and knows what each has to have."""

    def __init__(self, store: BlockSegments, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self.pages: dict[tuple[int, int], bytes] = {}
        self.count = 0

    async def run(self, share: int) -> None:
        while True:
            segment = self.rng.randrange(SEGMENTS)
            page = self.rng.randrange(share, SIZE // PAGE, 3)
            offset, data = page * PAGE, self.rng.randbytes(PAGE)
            await self.store.write([Transfer(segment, offset, data)])
            self.pages[segment, offset] = data
            self.count += 1

    async def verify(self, store: BlockSegments) -> None:
        for (segment, offset), data in self.pages.items():
            buffer = bytearray(PAGE)
            await store.read([Transfer(segment, offset, buffer)])
            assert buffer == data, (segment, offset)


async def test_segments_move_under_writes(
    store: BlockSegments, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "CHUNK_SIZE", 64 << 10)
    monkeypatch.setattr("kvfuse.remote.segments.block.store.CHUNK_SIZE", 64 << 10)
    writer, names = Writer(store, rng), []

    async def commit(name: MapName) -> None:
        before = writer.count
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        names.append(name)
        assert writer.count - before <= 3, "calls that had begun"

    async with trio.open_nursery() as nursery:
        for share in range(3):
            nursery.start_soon(writer.run, share)
        for _ in range(12):
            segment, before = rng.randrange(SEGMENTS), devices_of(control(store).map)
            await control(store).move(segment, check, commit)
            after = devices_of(control(store).map)
            assert [one != other for one, other in zip(before, after, strict=True)] == [
                number == segment for number in range(SEGMENTS)
            ]
        nursery.cancel_scope.cancel()
    assert writer.count > 50
    await writer.verify(store)
    await store.aclose()
    store = await opened(tmp_path, names[-1])
    await writer.verify(store)
    await store.aclose()


async def test_a_move_that_cannot_be_recorded_leaves_the_segment_where_it_was(
    store: BlockSegments, tmp_path: Path, rng: random.Random
) -> None:
    writer, before = Writer(store, rng), control(store).map

    async def fail(name: MapName) -> None:
        raise EngineError("injected")

    def lost() -> None:
        raise EngineError("the lease is lost")

    for checked, commit in ((check, fail), (lost, fail)):
        with pytest.raises(EngineError):
            await control(store).move(1, checked, commit)
        assert control(store).map == before
        with trio.move_on_after(0.2):
            await writer.run(0)
        await writer.verify(store)
    await store.aclose()
    store = await opened(tmp_path, before.name)  # which takes back what was not named
    await writer.verify(store)
    await store.aclose()
    store = await opened(tmp_path)
    assert control(store).map == before
    await store.aclose()


async def test_a_host_looks_again_and_again_for_a_device_that_joined(
    store: BlockSegments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "FOLLOW_SECONDS", 0.05)
    other, path, found = await opened(tmp_path), blank(tmp_path / "d"), control(store).map
    prepare_device(path, VOLUME, found.segment_size, found.head_size, [row.device_id for row in found.rows])
    row = await control(store).examine(path, 0, "")
    with pytest.raises(VolumeError, match="device of this volume already"):
        await control(store).examine(tmp_path / "a", 0, "")
    name = await control(store).prepare(lambda made: made.joined(row).extended(made.room + row.places), check)
    await control(store).adopt(name)
    last = len(control(store).map.places) - 1
    await store.create(last, SIZE)
    path.rename(tmp_path / "away")
    control(other).expect(name)
    buffer = bytearray(PAGE)
    for message in ("is not among", "again and again"):
        with pytest.raises(EngineError, match=message):
            await other.read([Transfer(last, 0, buffer)])
    await other.read([Transfer(0, 0, buffer)])
    (tmp_path / "away").rename(path)
    with trio.fail_after(10):
        while bytes(buffer) != b"\xee" * PAGE:
            await store.write([Transfer(last, 0, b"\xee" * PAGE)])
            with suppress(EngineError):
                await other.read([Transfer(last, 0, buffer)])
    assert control(other).map == control(store).map
    for one in (store, other):
        await one.aclose()


async def test_a_place_that_was_used_is_zeros_for_a_new_segment(store: BlockSegments, tmp_path: Path) -> None:
    async def commit(name: MapName) -> None:
        pass

    await store.write([Transfer(0, 0, b"\xee" * SIZE)])
    former = control(store).map.place(0)
    await control(store).move(0, check, commit)
    rows = len(control(store).map.rows)
    name = await control(store).prepare(lambda found: found.extended(found.room), check)
    await control(store).adopt(name)
    found = control(store).map
    again = next(segment for segment in range(SEGMENTS, len(found.places)) if found.place(segment) == former)
    await store.create(again, SIZE)
    buffer = bytearray(SIZE)
    await store.read([Transfer(again, 0, buffer)])
    assert buffer == bytes(SIZE)
    await store.read([Transfer(0, 0, buffer)])
    assert buffer == b"\xee" * SIZE
    assert rows == 3
    await store.aclose()
