"""The pages of all places of a set: which segments there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE
from kvfuse.remote.segments.block.label import DeviceSet
from kvfuse.remote.segments.block.pieces import read_page, write_page, write_zeros
from kvfuse.remote.segments.block.places import pack_page, size_in_page
from kvfuse.remote.segments.block.set_device import SetDevice

LISTED_PAGES = 64
"""pages that one thread reads within one deadline"""
ZEROED_SIZE = 64 << 20
"""bytes of zeros that one thread writes within one deadline"""


class PageTable:
    """Of one set. All methods raise EngineError, EngineTimeout."""

    def __init__(self, devices: Sequence[SetDevice], made: DeviceSet) -> None:
        self._devices = devices
        self._set = made

    async def size(self, segment: int) -> int | None:
        """Bytes of a segment; None: there is none."""
        if not 0 <= segment < len(self._set.places):
            return None
        device, offset = self._set.places[segment]
        page = await self._devices[device].run(lambda fd: read_page(fd, offset))
        return size_in_page(page, self._set.volume_id, segment)

    async def sizes(self) -> dict[int, int]:
        """Of all segments, by number."""
        by_device: dict[int, list[int]] = {}
        for segment, place in enumerate(self._set.places):
            by_device.setdefault(place.device, []).append(segment)
        found: dict[int, int] = {}
        for index, segments in by_device.items():
            for start in range(0, len(segments), LISTED_PAGES):
                found |= await self._sizes_of(index, segments[start : start + LISTED_PAGES])
        return found

    async def _sizes_of(self, index: int, segments: Sequence[int]) -> dict[int, int]:
        """All of one device."""
        offsets = [self._set.places[segment].offset for segment in segments]
        pages = await self._devices[index].run(lambda fd: [read_page(fd, offset) for offset in offsets])
        sizes = [
            size_in_page(page, self._set.volume_id, segment) for page, segment in zip(pages, segments, strict=True)
        ]
        return {segment: size for segment, size in zip(segments, sizes, strict=True) if size is not None}

    async def add(self, segment: int, size: int) -> None:
        """Several hosts may do so at once: they write the same."""
        await self._put(segment, pack_page(self._set.volume_id, segment, size))

    async def drop(self, segment: int, size: int) -> None:
        """Zeros first, so that a place without a page has zeros where a new segment has to have them."""
        device, offset = self._set.places[segment]
        length = min(size, self._set.head_size)
        for start in range(0, length, ZEROED_SIZE):
            count = min(ZEROED_SIZE, -(-(length - start) // PAGE_SIZE) * PAGE_SIZE)
            begin = offset + HEAD_SIZE + start
            await self._devices[device].run(partial(write_zeros, offset=begin, length=count))
        await self._put(segment, b"")

    async def _put(self, segment: int, image: bytes) -> None:
        device, offset = self._set.places[segment]
        await self._devices[device].run(lambda fd: write_page(fd, offset, image))
