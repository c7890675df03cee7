"""Sets of devices: labels, weights, two hosts on one device, and a device that goes away and comes back."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from loop_lab import loop_device, loop_devices, resize
from places import GOLDEN

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout, VolumeError
from kvfuse.remote.segments.api import SegmentInfo, Transfer
from kvfuse.remote.segments.block import label, pieces, reservations
from kvfuse.remote.segments.block.block_device import place_size
from kvfuse.remote.segments.block.making import examine, make_set, place_count
from kvfuse.remote.segments.block.segment_map import (
    AREA_SIZE,
    PLACES_MAX,
    SEGMENTS_MAX,
    DeviceRow,
    SegmentMap,
    parse_map,
)
from kvfuse.remote.segments.block.store import BlockSegments

MIB = 1 << 20
SIZE = MIB
DEVICE_SIZE = 32 * MIB
VOLUME, OTHER = b"volume" * 2 + b"id!!", b"other!" * 2 + b"id!!"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A plain file in the place of a device."""
    return blank(tmp_path / "image")


def blank(path: Path, size: int = DEVICE_SIZE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def made(paths: list[Path], volume_id: bytes = VOLUME, count: int = 8, **more: object) -> list[Path]:
    make_set(paths, volume_id, SIZE, SIZE, count, **more)  # type: ignore[arg-type]
    return paths


async def read(store: BlockSegments, offset: int = 0, length: int = 4096, segment: int = 1) -> bytes:
    buffer = bytearray(length)
    await store.read([Transfer(segment, offset, buffer)])
    return bytes(buffer)


# -- labels and places ----------------------------------------------------------------------------------


def row(name: bytes, places: int, weight: int = 1, domain: str = "") -> DeviceRow:
    return DeviceRow(name * 16, places, weight, domain)


def chosen(count: int, *rows: DeviceRow) -> SegmentMap:
    return SegmentMap.choose(VOLUME, SIZE, SIZE, count, rows)


def devices_of(made: SegmentMap) -> list[int]:
    return [made.place(segment).device for segment in range(len(made.places))]


def test_segments_go_to_devices_by_weight_until_these_are_full() -> None:
    rows = row(b"a", 100, 2), row(b"b", 100), row(b"c", 3)
    made = chosen(203, *rows)
    assert Counter(devices_of(made)[:12]) == {0: 6, 1: 3, 2: 3}
    assert Counter(devices_of(made)) == {0: 100, 1: 100, 2: 3}
    assert len({made.place(segment) for segment in range(203)}) == 203
    assert chosen(20, *rows).places == made.places[:20]


def test_segments_in_turn_are_in_several_domains() -> None:
    rows = [row(bytes([65 + index]), 50, domain=f"rack{index % 3}") for index in range(7)]
    found = devices_of(chosen(100, *rows))
    domains = [rows[device].domain for device in found]
    assert all(one != other for one, other in pairwise(domains[:70]))
    assert set(found) == set(range(7))
    uneven = [row(b"a", 50, domain="one"), row(b"b", 50, domain="one"), row(b"c", 50, domain="two")]
    found = devices_of(chosen(60, *uneven))
    assert Counter(found) == {0: 20, 1: 20, 2: 20}, "a domain of two devices has two turns"


def test_a_label_of_version_1_means_what_it_meant() -> None:
    page = (GOLDEN / "device_label_v1.bin").read_bytes()
    found = label.parse(page)
    assert found[:3] == (VOLUME, b"b" * 16, False)
    made = found.first_map
    assert made is not None
    assert made.name == (0, 0)
    assert (made.segment_size, made.head_size, made.rows[2]) == (MIB, 4096, DeviceRow(b"c" * 16, 3, 3))
    places = [(2, 1), (0, 1), (2, 3), (2, 5), (0, 3), (1, 1), (0, 5), (0, 7), (1, 3)]
    assert [made.place(segment) for segment in range(9)] == [(device, place * MIB) for device, place in places]
    damaged = bytearray(page)
    damaged[100] ^= 1
    with pytest.raises(VolumeError, match="checksum"):
        label.parse(damaged)


def test_labels_and_maps_say_what_they_were_made_of_and_damage_is_found() -> None:
    page = bytearray(label.pack_label(label.Label(VOLUME, b"d" * 16, has_left=True)))
    assert label.parse(page) == (VOLUME, b"d" * 16, True, None)
    page[40] ^= 1
    with pytest.raises(VolumeError, match="checksum"):
        label.parse(page)
    page[8:12] = b"\3\0\0\0"
    with pytest.raises(VolumeError, match="newer kvfuse"):
        label.parse(page)
    made = chosen(7, row(b"a", 5, 2, "rack"), DeviceRow(b"b" * 16, 9, 1, path="/dev/disk/ä"))
    made = made.leaving(b"a" * 16)
    image = bytearray(made.image.ljust(AREA_SIZE, b"\0"))
    assert parse_map(image) == made
    image[300] ^= 1
    with pytest.raises(VolumeError, match="checksum"):
        parse_map(image)
    with pytest.raises(ValueError, match="segments at most"):
        chosen(SEGMENTS_MAX + 70 * 64, row(b"a", PLACES_MAX)).image  # noqa: B018


def planned(kind: str, made: SegmentMap, number: int, data: st.DataObject) -> SegmentMap:
    """A change of the map, or ValueError."""
    count = len(made.places)
    device_id = data.draw(st.sampled_from(made.rows)).device_id if made.rows else b""
    if kind == "join":
        return made.joined(row(bytes([100 + number]), data.draw(st.integers(1, 6)), 1 + number % 3))
    if kind == "extend":
        return made.extended(count + data.draw(st.integers(1, 5)))
    if kind == "cut":
        return made.cut(max(count - 1, 1))
    if kind == "move":
        return made.moved(data.draw(st.integers(0, count - 1)))
    if kind == "drop":
        return made.without(device_id)
    return made.leaving(device_id, is_leaving=kind == "leave")


def bytes_of(made: SegmentMap) -> list[tuple[bytes, int]]:
    """Where each segment is, whatever the order of devices."""
    places = map(made.place, range(len(made.places)))
    return [(made.rows[place.device].device_id, place.offset) for place in places]


@given(st.data())
def test_plans_keep_what_they_do_not_move_and_give_no_place_twice(data: st.DataObject) -> None:
    made = chosen(3, row(b"a", 4), row(b"b", 4, 2))
    for number in range(data.draw(st.integers(1, 25))):
        kind, former = data.draw(st.sampled_from(["join", "extend", "cut", "leave", "stay", "move", "drop"])), made
        try:
            made = planned(kind, former, number, data)
        except ValueError:
            continue
        assert made.number == former.number + 1
        assert len(set(made.places)) == len(made.places)
        moved = sum(one != other for one, other in zip(bytes_of(made), bytes_of(former), strict=False))
        assert moved == (kind == "move")
        for place in map(made.place, range(len(made.places))):
            assert place.offset + place_size(SIZE) <= made.size_min(place.device)
        assert parse_map(made.image) == made


async def test_foreign_incomplete_and_other_sets_are_refused(tmp_path: Path) -> None:
    first, second, other, empty = (blank(tmp_path / name) for name in ("first", "second", "other", "empty"))
    made([first, second])
    made([other], OTHER)
    with pytest.raises(VolumeError, match=f"{empty}.*no segments of a kvfuse volume"):
        await BlockSegments.open([empty], VOLUME)
    with pytest.raises(VolumeError, match=f"{other} is a device of the volume {OTHER.hex()}.*{VOLUME.hex()}"):
        await BlockSegments.open([other], VOLUME)
    with pytest.raises(VolumeError, match=rf"device of the volume {OTHER.hex()}.*device of the volume {VOLUME.hex()}"):
        await BlockSegments.open([second, other], None)
    with pytest.raises(ConfigError, match="one and the same device"):
        await BlockSegments.open([first, first], VOLUME)
    store = await BlockSegments.open([second, first], VOLUME)  # in any order
    for segment in range(8):
        await store.create(segment, SIZE)
    assert await store.list() == [SegmentInfo(segment, SIZE) for segment in range(8)]
    with pytest.raises(EngineFull):
        await store.create(8, SIZE)
    await store.aclose()
    store = await BlockSegments.open([first], VOLUME)  # the map says where the other one is
    assert len(await store.list()) == 8
    await store.aclose()
    second.rename(tmp_path / "moved")
    with pytest.raises(VolumeError, match=rf"has 2 devices, and device [0-9a-f]{{8}} \({second}\) is not among"):
        await BlockSegments.open([first], VOLUME)
    await (await BlockSegments.open([tmp_path / "moved", first], VOLUME)).aclose()


async def test_a_set_is_not_made_over_data_or_where_there_is_no_room(image: Path) -> None:
    with pytest.raises(ConfigError, match="room for 15 segments"):
        made([image], count=16)
    assert place_count(DEVICE_SIZE, SIZE) == 15
    made([image])
    before = image.read_bytes()
    with pytest.raises(VolumeError, match=f"is a device of the volume {VOLUME.hex()}"):
        made([image], OTHER)
    assert image.read_bytes() == before
    store = await BlockSegments.open(made([image], OTHER, replace=True))
    assert await store.list() == []
    await store.aclose()
    image.write_bytes(os.urandom(DEVICE_SIZE))
    assert [found.content for found in examine([image])] == ["holds data of a kind that is not known"]
    with pytest.raises(VolumeError, match="data of a kind"):
        made([image])


async def test_what_was_on_the_device_is_not_in_the_heads_of_segments(image: Path) -> None:
    image.write_bytes(b"\xee" * DEVICE_SIZE)
    make_set([image], VOLUME, SIZE, 8192, 3, replace=True)
    store = await BlockSegments.open([image], VOLUME)
    assert await store.list() == []
    await store.create(2, SIZE)
    assert await read(store, 0, 8192, 2) == bytes(8192)
    await store.write([Transfer(2, 0, b"head")])
    await store.remove(2)
    await store.create(2, SIZE)
    assert await read(store, 0, 8192, 2) == bytes(8192)
    await store.aclose()


# -- two hosts ----------------------------------------------------------------------------------------


async def test_two_hosts_see_each_others_bytes_and_segments(tmp_path: Path) -> None:
    with loop_devices(tmp_path / "image", DEVICE_SIZE, 2) as devices:
        made(devices[:1])
        one, two = [await BlockSegments.open([device], VOLUME) for device in devices]
        async with trio.open_nursery() as nursery:  # both at the same time
            for store in (one, two):
                nursery.start_soon(store.create, 1, SIZE)
        for number in range(20):
            data = bytes([number]) * 4096
            writer, reader = (one, two) if number % 2 else (two, one)
            await writer.write([Transfer(1, 4096 * (number % 3), data)])
            assert await read(reader, 4096 * (number % 3)) == data
        for store in (one, two):
            await store.create(1, SIZE)
            assert await store.list() == [SegmentInfo(1, SIZE)]
            await store.aclose()


# -- a device that fails --------------------------------------------------------------------------------


async def until_it_is_back(store: BlockSegments) -> bytes:
    with trio.fail_after(30):
        while True:
            try:
                return await read(store)
            except EngineError:
                await trio.sleep(0.05)


async def test_a_device_that_vanished_is_an_error_and_comes_back(tmp_path: Path) -> None:
    """It reads as 0 bytes then, and has no room for writes."""
    image = tmp_path / "image"
    with loop_device(image, DEVICE_SIZE) as device:
        store = await BlockSegments.open(made([device]), VOLUME)
        await store.create(1, SIZE)
        await store.write([Transfer(1, 0, b"kept" * 1024)])
        copy = image.read_bytes()
        resize(device, image, 0)
        with pytest.raises(EngineError, match="is gone") as caught:
            await read(store)
        assert not isinstance(caught.value, EngineTimeout)
        with pytest.raises(EngineError) as caught:
            await store.write([Transfer(1, 0, b"more" * 1024)])
        assert not isinstance(caught.value, EngineFull)
        image.write_bytes(copy)
        resize(device, image, DEVICE_SIZE)
        assert await until_it_is_back(store) == b"kept" * 1024
        await store.aclose()


async def test_a_write_to_a_device_without_room_is_no_full_medium(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with loop_device(image, DEVICE_SIZE) as device:
        store = await BlockSegments.open(made([device]), VOLUME)
        await store.create(1, SIZE)
        resize(device, image, 0)
        with pytest.raises(EngineError, match="is gone") as caught:
            await store.write([Transfer(1, 0, bytes(4096))])
        assert not isinstance(caught.value, EngineFull)
        await store.aclose()


async def test_a_device_is_found_under_another_name(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with loop_devices(image, DEVICE_SIZE, 1) as (first,):
        store = await BlockSegments.open(made([first]), VOLUME)
        await store.create(1, SIZE)
        await store.write([Transfer(1, 0, b"kept" * 1024)])
        copy = image.read_bytes()
        second_image = tmp_path / "second"
        with loop_device(second_image, DEVICE_SIZE):
            resize(first, image, 0)
            with pytest.raises(EngineError):
                await read(store)
            second_image.write_bytes(copy)
            assert await until_it_is_back(store) == b"kept" * 1024
            await store.aclose()


# -- a device that stalls -------------------------------------------------------------------------------


class Stall:
    """Holds up writes of whole pieces before they reach the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.reads = False
        self._write, self._read = pieces.write_fully, pieces.read_fully
        monkeypatch.setattr(pieces, "write_fully", self.write)
        monkeypatch.setattr(pieces, "read_fully", self.read)

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        self.go_on.wait(30)
        self._write(fd, view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> None:
        if self.reads:
            self.go_on.wait(30)
        self._read(fd, view, offset)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(monkeypatch)
    stall.go_on.set()
    yield stall
    stall.go_on.set()


async def test_a_stalled_device_costs_one_deadline_and_not_the_callers_memory(image: Path, stall: Stall) -> None:
    store = await BlockSegments.open(made([image]), VOLUME, deadline=0.5)
    await store.create(1, SIZE)
    stall.go_on.clear()
    stall.reads = True
    source = bytearray(b"early---" * 1024)
    target = bytearray(8192)
    with pytest.raises(EngineTimeout):
        await store.write([Transfer(1, 4096, source)])
    with pytest.raises(EngineTimeout, match="has not answered"):
        await store.read([Transfer(1, 0, target)])
    source[:] = b"later---" * 1024
    gc.collect()  # the errors' tracebacks know it
    source.extend(b"no thread holds it")  # BufferError otherwise
    stall.go_on.set()
    with trio.fail_after(20):
        while True:
            try:
                if await read(store, 4096, 8192) == b"early---" * 1024:
                    break
            except EngineTimeout:
                pass
            await trio.sleep(0.05)
    assert target == bytes(8192)
    await store.aclose()


async def test_bytes_of_a_late_write_are_not_written_before_it_ended(image: Path, stall: Stall) -> None:
    """The older bytes would come last."""
    store = await BlockSegments.open(made([image]), VOLUME, deadline=0.5)
    await store.create(1, SIZE)
    stall.go_on.clear()
    with pytest.raises(EngineTimeout):
        await store.write([Transfer(1, 4096, b"old!" * 1024)])
    assert await until_it_is_back(store) == bytes(4096)  # reads are not held up
    with pytest.raises(EngineTimeout, match="earlier write there"):
        await store.write([Transfer(1, 5000, b"new!")])
    stall.go_on.set()
    with trio.fail_after(20):
        while True:
            try:
                await store.write([Transfer(1, 5000, b"new!")])
                break
            except EngineTimeout:
                await trio.sleep(0.05)
    assert (await read(store, 4096))[900:912] == b"old!new!old!"
    await store.aclose()


async def test_stuck_threads_are_bounded(image: Path, stall: Stall) -> None:
    store = await BlockSegments.open(made([image]), VOLUME, deadline=0.3)
    await store.create(1, SIZE)
    threads = threading.active_count()
    stall.go_on.clear()
    stall.reads = True
    waited = 0
    for number in range(40):
        with pytest.raises(EngineTimeout) as caught:
            await store.write([Transfer(1, 4096 * number, bytes(4096))])
        waited += "within" in str(caught.value)
    assert waited == 1, "each call cost a deadline"
    assert threading.active_count() - threads <= 4
    stall.go_on.set()
    await store.aclose()


# -- reservations ---------------------------------------------------------------------------------------


class Reservations:
    """What a device with reservations would do, beside a plain file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: set[bytes] = set()
        self.holder_type = 0
        monkeypatch.setattr(reservations.fcntl, "ioctl", self.ioctl)

    def ioctl(self, fd: int, request: int, image: bytearray) -> int:
        assert type(image) is bytearray, "a status would be lost"
        if request == reservations.REGISTER:
            old, new, flags = reservations.REGISTRATION.unpack(image)
            assert (old, flags) == (reservations.NO_KEY, reservations.IGNORE_KEY)
            self.keys.add(new)
        elif request == reservations.RESERVE:
            key, self.holder_type, _ = reservations.RESERVATION.unpack(image)
            return 0 if key in self.keys else 0x4083
        else:
            assert request == reservations.PREEMPT_ABORT
            own, other, _, _ = reservations.PREEMPTION.unpack(image)
            if own not in self.keys or other not in self.keys:
                return 0x4083
            self.keys.remove(other)
        return 0


def test_the_kernels_numbers_of_reservations() -> None:
    assert (reservations.REGISTER, reservations.RESERVE) == (0x401870C8, 0x401070C9)
    assert reservations.PREEMPT_ABORT == 0x401870CC


async def test_a_dead_clients_key_is_taken_away_and_it_is_not_vouched_for(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Reservations(monkeypatch)
    made([image])
    one, two = [await BlockSegments.open([image], VOLUME, reservations=True) for _ in range(2)]
    identity = one.identity()
    assert device.keys == {identity, two.identity()}
    assert device.holder_type == 5
    for _ in range(2):
        assert not await two.fence(identity)
        assert device.keys == {two.identity()}
    await one.renew()
    assert one.identity() != identity
    assert device.keys == {one.identity(), two.identity()}
    for store in (one, two):
        await store.aclose()


async def test_a_device_without_reservations_is_used_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loop_device(tmp_path / "image", DEVICE_SIZE) as device:
        store = await BlockSegments.open(made([device]), VOLUME, reservations=True)
        assert f"{device} has none" in caplog.text
        assert store.identity() == b""
        assert not await store.fence(b"somebody")
        await store.create(1, SIZE)
        await store.aclose()
