"""The first page of a device that has a volume's segments: whose it is, and which one::

    magic        8 bytes
    version      4 bytes: 2
    flags        4 bytes: bit 0: it has left the volume
    volume       16 bytes
    device       16 bytes: its identity, drawn by lot
    checksum     4 bytes: CRC32C of all before

Where segments are says the map behind it (`segment_map`). Version 1 had no map; segments were where the order of turns
has them, for ever::

    magic        8 bytes
    version      4 bytes: 1
    device       2 bytes: this one's number in the set
    devices      2 bytes: how many the set has
    volume       16 bytes
    segment      8 bytes: the size of the largest segment
    head         8 bytes: so much of a new segment reads as zeros
    segments     8 bytes: how many the volume may have
    for each device of the set
        device   16 bytes
        places   8 bytes: how many segments it has room for
        weight   8 bytes: its part of the segments is in proportion to this
    checksum     4 bytes: CRC32C of all before
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

from kvfuse.checksum import Buffer, crc32c
from kvfuse.errors import VolumeError
from kvfuse.remote.segments.block.block_device import PAGE_SIZE
from kvfuse.remote.segments.block.segment_map import DEVICES_MAX, DeviceRow, SegmentMap

MAGIC = b"\x89KVBLK\r\n"
VERSION = 2
ID_SIZE = 16
HAS_LEFT = 1
_FIELDS = struct.Struct("<8s I I 16s 16s")
_FORMER = struct.Struct("<8s I H H 16s Q Q Q")
_FORMER_ROW = struct.Struct("<16s Q Q")
_CHECKSUM = struct.Struct("<I")
assert _FORMER.size + DEVICES_MAX * _FORMER_ROW.size + _CHECKSUM.size <= PAGE_SIZE


class Label(NamedTuple):
    """The first page of a device, read."""

    volume_id: bytes
    device_id: bytes
    has_left: bool = False
    first_map: SegmentMap | None = None
    """of a label of version 1: where segments are, if no map was stored since"""

    @property
    def title(self) -> str:
        """In messages."""
        former = "a former device" if self.has_left else "a device"
        return f"{former} of the volume {self.volume_id.hex()}"


def pack_label(label: Label) -> bytes:
    """The first page of a device, of version 2."""
    image = _FIELDS.pack(MAGIC, VERSION, HAS_LEFT if label.has_left else 0, label.volume_id, label.device_id)
    return (image + _CHECKSUM.pack(crc32c(image))).ljust(PAGE_SIZE, b"\0")


def is_label(page: Buffer) -> bool:
    """It claims to be one; `parse` says whether it is."""
    return bytes(page[: len(MAGIC)]) == MAGIC


def parse(page: Buffer) -> Label:
    """VolumeError: it is none, damaged, or of a newer program."""
    if not is_label(page) or len(page) < PAGE_SIZE:
        raise VolumeError("it has no segments of a kvfuse volume: 'kvfuse format' makes one")
    _, version, flags, volume_id, device_id = _FIELDS.unpack_from(page)
    if version == 1:
        return _parse_former(page)
    if version != VERSION:
        raise VolumeError(f"its first page is of version {version}: a newer kvfuse made it")
    _check(page, _FIELDS.size)
    return Label(volume_id, device_id, bool(flags & HAS_LEFT))


def _parse_former(page: Buffer) -> Label:
    _, _, device, count, volume_id, segment_size, head_size, segments = _FORMER.unpack_from(page)
    if not device < count <= DEVICES_MAX:
        raise VolumeError("its first page does not match its checksum")
    end = _FORMER.size + count * _FORMER_ROW.size
    _check(page, end)
    rows = [DeviceRow(*row) for row in _FORMER_ROW.iter_unpack(page[_FORMER.size : end])]
    first = SegmentMap.choose(volume_id, segment_size, head_size, segments, rows)
    return Label(volume_id, rows[device].device_id, first_map=replace(first, number=0))


def _check(page: Buffer, end: int) -> None:
    if _CHECKSUM.unpack_from(page, end)[0] != crc32c(page[:end]):
        raise VolumeError("its first page does not match its checksum")
