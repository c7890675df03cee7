"""Which place of which device each segment of a set has: a map that all devices carry, and plans of the next one.

A map is an image in one of two areas of each device, behind the label. A changed map is the next number, and goes to
the other area of all devices; only when it is there does the volume's superblock name it (`MapName`). So all that read
a set use the map that is named, whatever a killed program has left in the other areas; and one device that has it is
enough::

    magic        8 bytes
    number       4 bytes: of changes, this one included
    devices      4 bytes
    volume       16 bytes
    segment      8 bytes: the size of the largest segment
    head         8 bytes: so much of a new segment reads as zeros
    segments     4 bytes, and 4 of padding
    for each device
        device   16 bytes: its identity, drawn by lot
        places   8 bytes: how many segments it has room for
        weight   8 bytes: its part of new segments is in proportion to this
        flags    4 bytes: bit 0: its segments move to other devices
        domain   36 bytes: what fails together with it; zeros behind
        path     184 bytes: where it was when it joined; zeros behind
    for each segment
        place    4 bytes: number of the device in the map << 24 | number of the place on it
    checksum     4 bytes: CRC32C of all before
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, Self

from kvfuse.checksum import Buffer, crc32c
from kvfuse.errors import VolumeError
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, place_size

MAGIC = b"\x89KVMAP\r\n"
AREA_SIZE = 508 << 10
DEVICES_MAX = 64
PLACES_MAX = 1 << 24
"""of one device"""
LEAVING = 1
DOMAIN_SIZE, PATH_SIZE = 36, 184
_FIELDS = struct.Struct("<8s I I 16s Q Q I 4x")
_ROW = struct.Struct(f"<16s Q Q I {DOMAIN_SIZE}s {PATH_SIZE}s")
_CHECKSUM = struct.Struct("<I")
SEGMENTS_MAX = (AREA_SIZE - _FIELDS.size - DEVICES_MAX * _ROW.size - _CHECKSUM.size) // 4
_STRIDE = 1 << 60
assert (_FIELDS.size, _ROW.size) == (56, 256)
assert PAGE_SIZE + 2 * AREA_SIZE <= HEAD_SIZE


class MapName(NamedTuple):
    """What a superblock says of the map that counts."""

    number: int
    """0: none was stored; the labels of version 1 say where segments are"""
    checksum: int


class DeviceRow(NamedTuple):
    """One device of a set."""

    device_id: bytes
    places: int
    weight: int
    domain: str = ""
    """devices of one name fail together; "": this one fails alone"""
    path: str = ""
    """where it was, for hosts that are told of no other"""
    flags: int = 0

    @property
    def is_leaving(self) -> bool:
        return bool(self.flags & LEAVING)

    @property
    def title(self) -> str:
        """In messages."""
        return f"device {self.device_id.hex()[:8]}" + (f" ({self.path})" if self.path else "")


class SegmentPlace(NamedTuple):
    """Where a segment is."""

    device: int
    """in the order of the map"""
    offset: int
    """of its page, in bytes; the segment's bytes begin ``HEAD_SIZE`` behind"""


@dataclass(frozen=True)
class SegmentMap:
    """What all devices of one volume agree on. Plans raise ValueError with the reason where there is no such map."""

    volume_id: bytes
    segment_size: int
    head_size: int
    rows: tuple[DeviceRow, ...]
    places: tuple[int, ...] = ()
    """of each segment: number of the device << 24 | number of the place"""
    number: int = 1

    @classmethod
    def choose(
        cls, volume_id: bytes, segment_size: int, head_size: int, segment_count: int, rows: Sequence[DeviceRow]
    ) -> Self:
        """The first map of a volume."""
        made = cls(volume_id, segment_size, head_size, tuple(rows)).extended(segment_count)
        return replace(made, number=1)

    # -- questions -----------------------------------------------------------------------------------

    def place(self, segment: int) -> SegmentPlace:
        found = self.places[segment]
        return SegmentPlace(found >> 24, HEAD_SIZE + (found & PLACES_MAX - 1) * place_size(self.segment_size))

    def size_min(self, device: int) -> int:
        """Bytes that the device has at least."""
        return HEAD_SIZE + self.rows[device].places * place_size(self.segment_size)

    def segments_of(self, device: int) -> list[int]:
        return [segment for segment, place in enumerate(self.places) if place >> 24 == device]

    def index_of(self, device_id: bytes) -> int | None:
        """Of a device in the map. None: it is not in it."""
        return next((index for index, row in enumerate(self.rows) if row.device_id == device_id), None)

    @property
    def room(self) -> int:
        """Segments that devices have places for which stay."""
        return min(SEGMENTS_MAX, sum(row.places for row in self.rows if not row.is_leaving))

    @cached_property
    def image(self) -> bytes:
        """What devices carry. ValueError: an area has no room for it."""
        fields = (MAGIC, self.number, len(self.rows), self.volume_id, self.segment_size, self.head_size)
        rows = b"".join(_ROW.pack(*_row_fields(row)) for row in self.rows)
        image = _FIELDS.pack(*fields, len(self.places)) + rows + array("I", self.places).tobytes()
        if len(image) + _CHECKSUM.size > AREA_SIZE:
            raise ValueError(f"a volume on devices has {SEGMENTS_MAX} segments at most: larger ones need a new volume")
        return image + _CHECKSUM.pack(crc32c(image))

    @property
    def name(self) -> MapName:
        if not self.number:
            return MapName(0, 0)
        return MapName(self.number, _CHECKSUM.unpack(self.image[-_CHECKSUM.size :])[0])

    # -- plans ---------------------------------------------------------------------------------------

    def _changed(self, rows: Sequence[DeviceRow], places: Sequence[int]) -> Self:
        return replace(self, rows=tuple(rows), places=tuple(places), number=self.number + 1)

    def extended(self, segment_count: int) -> Self:
        """With so many segments; those that there are stay where they are.

        New ones go to devices by turns, see `_turns`, each to the first place that is free.
        """
        missing = segment_count - len(self.places)
        free = self._free_places()
        order = _turns(self.rows, [len(places) for places in free])
        found = [device for device, _ in zip(order, range(missing), strict=False)]
        if len(found) < missing:
            places = len(self.places) + sum(map(len, free))
            raise ValueError(f"its devices have places for {places} segments, and not for {segment_count}")
        nexts = [iter(places) for places in free]
        return self._changed(self.rows, (*self.places, *(device << 24 | next(nexts[device]) for device in found)))

    def joined(self, row: DeviceRow) -> Self:
        """With a device more."""
        if len(self.rows) >= DEVICES_MAX:
            raise ValueError(f"a volume has at most {DEVICES_MAX} devices")
        if self.index_of(row.device_id) is not None:
            raise ValueError(f"{row.title} is one of its devices already")
        return self._changed((*self.rows, row), self.places)

    def leaving(self, device_id: bytes, *, is_leaving: bool = True) -> Self:
        """With a device whose segments move to others, or do not any more."""
        index = self._known(device_id)
        row = self.rows[index]._replace(flags=LEAVING if is_leaving else 0)
        return self._changed((*self.rows[:index], row, *self.rows[index + 1 :]), self.places)

    def moved(self, segment: int) -> Self:
        """With a segment on another device: a free place, by weight, beside no neighbour's domain where that can be."""
        free = self._free_places()
        domains = [_domain(row, index) for index, row in enumerate(self.rows)]
        beside = {
            domains[self.places[near] >> 24] for near in (segment - 1, segment + 1) if 0 <= near < len(self.places)
        }
        used = [row.places - len(places) for row, places in zip(self.rows, free, strict=True)]
        source = self.places[segment] >> 24
        ranked = [
            (domains[index] in beside, (used[index] + 1) / row.weight, index)
            for index, row in enumerate(self.rows)
            if free[index] and index != source
        ]
        if not ranked:
            raise ValueError(f"no other device has a place for segment {segment}")
        device = min(ranked)[-1]
        place = device << 24 | free[device][0]
        return self._changed(self.rows, (*self.places[:segment], place, *self.places[segment + 1 :]))

    def cut(self, segment_count: int) -> Self:
        """Without the last segments."""
        return self._changed(self.rows, self.places[:segment_count])

    def without(self, device_id: bytes) -> Self:
        """Without a device that has no segments."""
        index = self._known(device_id)
        if self.segments_of(index):
            raise ValueError(f"{self.rows[index].title} has segments")
        moved = [place - (1 << 24) if place >> 24 > index else place for place in self.places]
        return self._changed((*self.rows[:index], *self.rows[index + 1 :]), moved)

    def _known(self, device_id: bytes) -> int:
        index = self.index_of(device_id)
        if index is None:
            raise ValueError(f"device {device_id.hex()[:8]} is none of the volume's")
        return index

    def _free_places(self) -> list[Sequence[int]]:
        """Of each device, ascending; none of one that leaves."""
        used: list[set[int]] = [set() for _ in self.rows]
        for place in self.places:
            used[place >> 24].add(place & PLACES_MAX - 1)
        return [
            [] if row.is_leaving else [place for place in range(row.places) if place not in used[index]]
            for index, row in enumerate(self.rows)
        ]


def _row_fields(row: DeviceRow) -> tuple[bytes, int, int, int, bytes, bytes]:
    path = row.path.encode("utf-8", "replace")
    return (
        row.device_id, row.places, row.weight, row.flags, row.domain.encode(), path if len(path) <= PATH_SIZE else b""
    )  # fmt: skip


def _domain(row: DeviceRow, index: int) -> str | int:
    return row.domain or index


class _Domain:
    """Devices that fail together, and when it is whose turn."""

    def __init__(self, rows: Sequence[DeviceRow], indices: Sequence[int], left: list[int]) -> None:
        self._rows, self._left = rows, left
        self.is_named = bool(rows[indices[0]].domain)
        self._turns = [(_STRIDE // rows[index].weight, index) for index in indices]
        heapify(self._turns)

    @property
    def stride(self) -> int:
        return _STRIDE // sum(self._rows[index].weight for _, index in self._turns)

    def take(self) -> int:
        """The device whose turn it is."""
        turn, device = self._turns[0]
        self._left[device] -= 1
        if self._left[device]:
            heapreplace(self._turns, (turn + _STRIDE // self._rows[device].weight, device))
        else:
            heappop(self._turns)
        return device

    def __bool__(self) -> bool:
        """It has free places."""
        return bool(self._turns)


def _turns(rows: Sequence[DeviceRow], free: Sequence[int]) -> Iterator[int]:
    """Devices of new segments, until no device has a free place.

    Domains take turns, and so do the devices in each: one of twice the weight has two turns while another has one. A
    domain with a name does not follow itself where another one is due soon. Labels of version 1 count on this order
    for devices without names of domains.
    """
    left = list(free)
    members: dict[str | int, list[int]] = {}
    for index, row in enumerate(rows):
        if left[index]:
            members.setdefault(_domain(row, index), []).append(index)
    domains = [_Domain(rows, indices, left) for indices in members.values()]
    turns = [(domain.stride, order) for order, domain in enumerate(domains)]
    heapify(turns)
    last = -1
    while turns:
        turn, order = heappop(turns)
        domain = domains[order]
        if order == last and domain.is_named and turns and turns[0][0] <= turn + domain.stride:
            turn, order = heapreplace(turns, (turn, order))
            domain = domains[order]
        yield domain.take()
        last = order
        if domain:
            heappush(turns, (turn + domain.stride, order))


# -- areas -------------------------------------------------------------------------------------------


def area_of(number: int) -> int:
    """Where on a device the map of that number is."""
    return PAGE_SIZE + number % 2 * AREA_SIZE


def parse_map(image: Buffer) -> SegmentMap:
    """VolumeError: it is none, or damaged."""
    if len(image) < _FIELDS.size or bytes(image[: len(MAGIC)]) != MAGIC:
        raise VolumeError("there is no map of segments")
    _, number, devices, volume_id, segment_size, head_size, segments = _FIELDS.unpack_from(image)
    rows_end = _FIELDS.size + devices * _ROW.size
    end = rows_end + 4 * segments
    if end + _CHECKSUM.size > len(image) or _CHECKSUM.unpack_from(image, end)[0] != crc32c(image[:end]):
        raise VolumeError("the map of segments does not match its checksum")
    rows = [_parsed_row(*row) for row in _ROW.iter_unpack(image[_FIELDS.size : rows_end])]
    places = array("I", bytes(image[rows_end:end]))
    return SegmentMap(volume_id, segment_size, head_size, tuple(rows), tuple(places), number)


def _parsed_row(device_id: bytes, places: int, weight: int, flags: int, domain: bytes, path: bytes) -> DeviceRow:
    name = domain.rstrip(b"\0").decode("utf-8", "replace")
    where = path.rstrip(b"\0").decode("utf-8", "replace")
    return DeviceRow(device_id, places, weight, name, where, flags)
