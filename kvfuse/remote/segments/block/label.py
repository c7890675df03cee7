"""The first page of a device that has a volume's segments: which device it is, of which set, and where segments are.

It is written when the volume is made, and never again::

    magic        8 bytes
    version      4 bytes
    device       2 bytes: this one's number in the set
    devices      2 bytes: how many the set has
    volume       16 bytes
    segment      8 bytes: the size of the largest segment
    head         8 bytes: so much of a new segment reads as zeros
    segments     8 bytes: how many the volume may have
    for each device of the set
        device   16 bytes: its identity, drawn by lot
        places   8 bytes: how many segments it has room for
        weight   8 bytes: its part of the segments is in proportion to this
    checksum     4 bytes: CRC32C of all before
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from kvfuse.checksum import Buffer, crc32c
from kvfuse.errors import VolumeError
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE
from kvfuse.remote.segments.block.places import place_size

MAGIC = b"\x89KVBLK\r\n"
VERSION = 1
DEVICES_MAX = 64
ID_SIZE = 16
WEIGHT_MAX = 1 << 40
_FIELDS = struct.Struct("<8s I H H 16s Q Q Q")
_ROW = struct.Struct("<16s Q Q")
_CHECKSUM = struct.Struct("<I")
_STRIDE = 1 << 60
assert _FIELDS.size + DEVICES_MAX * _ROW.size + _CHECKSUM.size <= PAGE_SIZE


class DeviceRow(NamedTuple):
    """One device of a set."""

    device_id: bytes
    places: int
    weight: int


class SegmentPlace(NamedTuple):
    """Where a segment is."""

    device: int
    offset: int
    """of its page, in bytes; the segment's bytes begin ``HEAD_SIZE`` behind"""


@dataclass(frozen=True)
class DeviceSet:
    """What all devices of one volume agree on."""

    volume_id: bytes
    segment_size: int
    head_size: int
    segment_count: int
    rows: tuple[DeviceRow, ...]

    @cached_property
    def places(self) -> Sequence[SegmentPlace]:
        """Of all segments that there may be, by number.

        Each goes to the device whose turn it is: one of twice the weight has two turns while another has one, until
        it is full.
        """
        size = place_size(self.segment_size)
        turns = [(_STRIDE // row.weight, index) for index, row in enumerate(self.rows) if row.places]
        heapify(turns)
        used = [0] * len(self.rows)
        found: list[SegmentPlace] = []
        while turns and len(found) < self.segment_count:
            turn, device = turns[0]
            found.append(SegmentPlace(device, HEAD_SIZE + used[device] * size))
            used[device] += 1
            if used[device] < self.rows[device].places:
                heapreplace(turns, (turn + _STRIDE // self.rows[device].weight, device))
            else:
                heappop(turns)
        return found

    def size_min(self, device: int) -> int:
        """Bytes that the device has at least."""
        return HEAD_SIZE + self.rows[device].places * place_size(self.segment_size)

    def pack(self, device: int) -> bytes:
        """The first page of a device of the set."""
        fields = (MAGIC, VERSION, device, len(self.rows), self.volume_id)
        sizes = (self.segment_size, self.head_size, self.segment_count)
        image = _FIELDS.pack(*fields, *sizes) + b"".join(_ROW.pack(*row) for row in self.rows)
        return (image + _CHECKSUM.pack(crc32c(image))).ljust(PAGE_SIZE, b"\0")


class Label(NamedTuple):
    """The first page of a device, read."""

    device: int
    set: DeviceSet

    @property
    def device_id(self) -> bytes:
        return self.set.rows[self.device].device_id

    @property
    def title(self) -> str:
        """In messages."""
        return f"device {self.device + 1} of {len(self.set.rows)} of the volume {self.set.volume_id.hex()}"


def is_label(page: Buffer) -> bool:
    """It claims to be one; `parse` says whether it is."""
    return bytes(page[: len(MAGIC)]) == MAGIC


def parse(page: Buffer) -> Label:
    """VolumeError: it is none, damaged, or of a newer program."""
    if not is_label(page) or len(page) < PAGE_SIZE:
        raise VolumeError("it has no segments of a kvfuse volume: 'kvfuse format' makes one")
    _, version, device, count, volume_id, segment_size, head_size, segments = _FIELDS.unpack_from(page)
    if version != VERSION:
        raise VolumeError(f"its first page is of version {version}: a newer kvfuse made it")
    end = _FIELDS.size + count * _ROW.size
    if not device < count <= DEVICES_MAX or _CHECKSUM.unpack_from(page, end)[0] != crc32c(page[:end]):
        raise VolumeError("its first page does not match its checksum")
    rows = tuple(DeviceRow(*row) for row in _ROW.iter_unpack(page[_FIELDS.size : end]))
    return Label(device, DeviceSet(volume_id, segment_size, head_size, segments, rows))
