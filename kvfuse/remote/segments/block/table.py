"""The set of devices as this host has it, and the pages of all its places: which segments there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE
from kvfuse.remote.segments.block.pieces import read_page, write_page, write_zeros
from kvfuse.remote.segments.block.places import pack_page, size_in_page
from kvfuse.remote.segments.block.segment_map import SegmentMap
from kvfuse.remote.segments.block.set_device import SetDevice

LISTED_PAGES = 64
"""pages that one thread reads within one deadline"""
ZEROED_SIZE = 64 << 20
"""bytes of zeros that one thread writes within one deadline"""


@dataclass
class DeviceSet:
    """Replaced in one step when the map changes: what is read from it is stale after an await."""

    map: SegmentMap
    devices: dict[bytes, SetDevice]
    """by identity"""

    def at(self, segment: int) -> tuple[SetDevice, int]:
        """(device, offset of the segment's page)"""
        place = self.map.place(segment)
        return self.devices[self.map.rows[place.device].device_id], place.offset

    def in_order(self) -> list[SetDevice]:
        return [self.devices[row.device_id] for row in self.map.rows]


class PageTable:
    """Of one set. All methods raise EngineError, EngineTimeout."""

    def __init__(self, members: DeviceSet) -> None:
        self._set = members

    async def size(self, segment: int) -> int | None:
        """Bytes of a segment; None: there is none."""
        if not 0 <= segment < len(self._set.map.places):
            return None
        device, offset = self._set.at(segment)
        page = await device.run(lambda fd: read_page(fd, offset))
        return size_in_page(page, self._set.map.volume_id, segment)

    async def sizes(self) -> dict[int, int]:
        """Of all segments, by number."""
        found: dict[int, int] = {}
        by_device: dict[SetDevice, list[int]] = {}
        for segment in range(len(self._set.map.places)):
            by_device.setdefault(self._set.at(segment)[0], []).append(segment)
        for device, segments in by_device.items():
            for start in range(0, len(segments), LISTED_PAGES):
                found |= await self._sizes_of(device, segments[start : start + LISTED_PAGES])
        return found

    async def _sizes_of(self, device: SetDevice, segments: Sequence[int]) -> dict[int, int]:
        """All of one device."""
        made = self._set.map
        offsets = [made.place(segment).offset for segment in segments]
        pages = await device.run(lambda fd: [read_page(fd, offset) for offset in offsets])
        sizes = [size_in_page(page, made.volume_id, segment) for page, segment in zip(pages, segments, strict=True)]
        return {segment: size for segment, size in zip(segments, sizes, strict=True) if size is not None}

    async def add(self, segment: int, size: int) -> None:
        """Several hosts may do so at once: they write the same."""
        device, offset = self._set.at(segment)
        image = pack_page(self._set.map.volume_id, segment, size)
        await device.run(lambda fd: write_page(fd, offset, image))

    async def drop(self, segment: int, size: int) -> None:
        """Zeros first, so that a place without a page has zeros where a new segment has to have them."""
        device, offset = self._set.at(segment)
        await clear_place(device, offset, min(size, self._set.map.head_size))


async def clear_place(device: SetDevice, offset: int, head_size: int) -> None:
    """Have no page in a place, and zeros where a new segment has to have them. EngineError."""
    length = -(-head_size // PAGE_SIZE) * PAGE_SIZE
    for start in range(0, length, ZEROED_SIZE):
        count = min(ZEROED_SIZE, length - start)
        await device.run(partial(write_zeros, offset=offset + HEAD_SIZE + start, length=count))
    await device.run(lambda fd: write_page(fd, offset, b""))
