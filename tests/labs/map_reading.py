"""A reader of content maps as ring threads are, in its plainest form, and a file that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from volume_lab import CALLER

from kvfuse.checksum import GRANULE_SIZE, crc32c
from kvfuse.volume.api import Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.views.content_map import ContentMap, MapRow
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10


def map_read(shown: ContentMap, offset: int, length: int, pause: Callable[[], object] = lambda: None) -> bytes | None:
    """Bytes of the file as a thread reads them that does not wait for the event loop; None: it has to ask.

    ``pause``: what goes on elsewhere between the look at a row and the copy.
    """
    version = shown.version
    size = shown.size
    if size < 0:
        return None
    end = min(offset + length, size)
    parts = []
    position = offset
    while position < end:
        index, start = divmod(position, shown.chunk_size)
        part = min(end - position, shown.chunk_size - start)
        row = shown.rows.get(index)
        if row is None:
            return None
        pause()
        if not is_verified(row):
            assert shown.version != version, "a row shows other bytes than its checksums say"
            return None
        parts.append(copied(row, start, part))
        position += part
    return b"".join(parts) if shown.version == version else None


def is_verified(row: MapRow) -> bool:
    for number in range(len(row.checksums) // 4):
        if row.source is not None and not row.verified >> number & 1:
            low = row.start + number * GRANULE_SIZE
            part = row.source.bytes[low : min(low + GRANULE_SIZE, row.start + row.length)]
            if crc32c(part.data) != int.from_bytes(row.checksums[4 * number : 4 * number + 4], "little"):
                return False
            row.verified |= 1 << number
    return True


def copied(row: MapRow, start: int, length: int) -> bytes:
    """``length`` bytes of a chunk from ``start`` on. numpy lets go of the interpreter lock while it copies."""
    result = np.zeros(length, np.uint8)
    stored = min(row.length - start, length)
    if row.source is not None and stored > 0:
        np.copyto(result[:stored], row.source.bytes[row.start + start : row.start + start + stored])
    return result.tobytes()


@dataclass
class Case:
    """A file of three chunks, stored, sealed and shown; and what it holds."""

    volume: Volume
    handle: FileHandle
    data: bytearray

    @property
    def shown(self) -> ContentMap:
        return self.volume.files.content_map(self.handle)

    @property
    def ino(self) -> int:
        return self.handle.node.ino

    async def put(self, offset: int, data: bytes) -> None:
        assert await self.volume.files.write(self.handle, offset, data) == len(data)
        self.data[len(self.data) :] = bytes(max(0, offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

    async def cut(self, size: int) -> None:
        await self.volume.inodes.set_attributes(self.ino, Changes(size=size), CALLER)
        self.data[:] = self.data[:size].ljust(size, b"\0")
