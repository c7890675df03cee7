"""Keeps a log of atomic frames in shared memory that outlives the daemon, and room for bytes that frames refer to.

The log has two areas. A frame is appended to the active area, and becomes valid when the area's *tail* moves over it:
one store of eight bytes. When an area is used up, the caller writes all valid content as one frame into the other area,
which one such store then makes the active one. A crash ends the process, not the machine, so its earlier stores remain.

Pages are allocated ahead of need, and reused. This module does not interpret frames.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from kvfuse.kept.keeper import Keeper, Kept

FORM = 0x6B76_6675_7365_0001
"""number of this format"""
HEAD_SIZE = 4096
STORED_AT, ACTIVE_AT, TAILS_AT = 1, 2, 3
"""indices of words in the head: 1 if a daemon that cannot read the log loses nothing, the same word in any format; the
active area; the tails of both"""
NO_AREA = 2
"""value of the active area: the log is invalid"""
AREA_SIZE = 64 << 20
SHORT = 8 << 20
"""bytes of frames at which the caller has to replace them by one, or four times the size of the last replacement"""
STEP = 1 << 20
"""bytes whose pages are allocated at once"""
_LENGTH = struct.Struct("<I")
CLASSES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""sizes of pieces of the room; each is four times the one before"""
Piece = tuple[int, int]
"""(offset, size) in the room"""


class _Pages:
    """A mapping whose pages are allocated step by step."""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.size = size

    def allocate_pages(self, start: int, end: int) -> bool:
        """Allocate pages for these bytes. False: the machine has no memory for them."""
        try:
            os.posix_fallocate(self.descriptor, start, min(end, self.size) - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


class KeptLog:
    """The log of this daemon. ``room_size``: bytes of the room, at most."""

    def __init__(self, room_size: int, area_size: int = AREA_SIZE) -> None:
        self._area_size = area_size
        self._log = _Pages("kvfuse-unstored", HEAD_SIZE + 2 * area_size)
        self._room = _Pages("kvfuse-unstored-bytes", -(-max(room_size, CLASSES[-1]) // CLASSES[-1]) * CLASSES[-1])
        self._words = memoryview(self._log.memory)[:HEAD_SIZE].cast("Q")
        self._ready = [0, 0]
        """bytes of each area with pages"""
        self._active = 0
        self._tail = 0
        """bytes of frames"""
        self._tail_max = SHORT
        self._free: tuple[list[int], ...] = tuple([] for _ in CLASSES)
        self._unused = 0
        """offset at which the part of the room without pages begins"""
        self.used = 0
        """bytes of pieces in use"""
        self._log.allocate_pages(0, HEAD_SIZE)
        self._words[ACTIVE_AT] = 0
        self._words[0] = FORM

    def keep_with(self, keeper: Keeper, name: str, content: bytes) -> None:
        """Let the keeper have this log, in place of a former one. ``content`` identifies the volume."""
        keeper.keep(name, content, [self._log.descriptor, self._room.descriptor])

    # -- frames --------------------------------------------------------------------------------------

    def append_frame(self, frame: bytes) -> bool:
        """Append a frame. False: no room for it, or the caller has to call `replace_frames`."""
        return self._tail <= self._tail_max and self._write_frame(self._active, self._tail, frame)

    def replace_frames(self, frame: bytes) -> bool:
        """Replace all frames by this one. False: no room for it, and nothing has changed."""
        other = 1 - self._active
        if not self._write_frame(other, 0, frame):
            return False
        self._store_word(ACTIVE_AT, other)
        self._active = other
        self._tail_max = max(SHORT, 4 * len(frame))
        return True

    def clear_frames(self) -> None:
        """Remove all frames."""
        self._tail = 0
        self._store_word(TAILS_AT + self._active, 0)

    def invalidate_log(self) -> None:
        """Invalidate all frames."""
        self._store_word(ACTIVE_AT, NO_AREA)

    def _write_frame(self, area: int, tail: int, frame: bytes) -> bool:
        end = tail + _LENGTH.size + len(frame)
        if end > self._ready[area] and not self._allocate_area(area, end):
            return False
        self._store_bytes(HEAD_SIZE + area * self._area_size + tail, _LENGTH.pack(len(frame)) + frame)
        self._tail = end
        self._store_word(TAILS_AT + area, end)
        return True

    def _store_bytes(self, offset: int, data: bytes) -> None:
        """Write bytes that are not valid yet."""
        self._log.memory[offset : offset + len(data)] = data

    def _store_word(self, word: int, value: int) -> None:
        """Store one word of the head, which makes frames valid or invalid."""
        self._words[word] = value

    def _allocate_area(self, area: int, end: int) -> bool:
        start = HEAD_SIZE + area * self._area_size
        ready = min(-(-end // STEP) * STEP, self._area_size)
        if end > ready or not self._log.allocate_pages(start + self._ready[area], start + ready):
            return False
        self._ready[area] = ready
        return True

    # -- bytes ---------------------------------------------------------------------------------------

    @property
    def used_share(self) -> float:
        """Part of the room that is in use, of all of it."""
        return self.used / self._room.size

    def take_pieces(self, size: int) -> list[Piece] | None:
        """Take pieces of the room for so many bytes, in order. None: no room."""
        pieces: list[Piece] = []
        while size > 0:
            piece = self._take_piece(size)
            if piece is None:
                self.free_pieces(pieces)
                return None
            pieces.append(piece)
            size -= piece[1]
        return pieces

    def _take_piece(self, size: int) -> Piece | None:
        """Take the smallest piece that holds so many bytes, or else the largest free one."""
        wanted = min(bisect_left(CLASSES, size), len(CLASSES) - 1)
        for number in range(wanted, len(CLASSES)):
            if self._free[number]:
                return self._split_piece(self._free[number].pop(), number, wanted)
        end = self._unused + CLASSES[-1]
        if end <= self._room.size and self._room.allocate_pages(self._unused, end):
            offset, self._unused = self._unused, end
            return self._split_piece(offset, len(CLASSES) - 1, wanted)
        for number in range(wanted - 1, -1, -1):
            if self._free[number]:
                return self._split_piece(self._free[number].pop(), number, number)
        return None

    def _split_piece(self, offset: int, number: int, wanted: int) -> Piece:
        while number > wanted:
            number -= 1
            size = CLASSES[number]
            self._free[number].extend([offset + 3 * size, offset + 2 * size, offset + size])
        self.used += CLASSES[wanted]
        return offset, CLASSES[wanted]

    def free_pieces(self, pieces: Iterable[Piece]) -> None:
        """Free pieces to which no frame refers any more."""
        for offset, size in pieces:
            self._free[CLASSES.index(size)].append(offset)
            self.used -= size
        if not self.used and self._unused:  # else small pieces would never merge again
            for free in self._free:
                free.clear()
            self._free[-1].extend(range(self._unused - CLASSES[-1], -1, -CLASSES[-1]))

    def write_bytes(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes into a piece."""
        self._room.memory[offset : offset + len(data)] = data

    def close(self, *, is_stored: bool) -> None:
        """Unmap the log; the keeper retains it. ``is_stored``: a daemon that cannot read it loses nothing."""
        self._words[STORED_AT] = is_stored
        self._words.release()
        self._log.close()
        self._room.close()


class KeptLogReader:
    """Reads the log of a former daemon."""

    def __init__(self, kept: Kept) -> None:
        """ValueError: the entry is no log."""
        try:
            if len(kept.descriptors) != 2:
                raise ValueError("a log has two descriptors")
            self._log, self._room = (self._map_log(descriptor) for descriptor in kept.descriptors)
        finally:
            for descriptor in kept.descriptors:
                os.close(descriptor)

    @staticmethod
    def _map_log(descriptor: int) -> mmap.mmap:
        size = os.fstat(descriptor).st_size
        if size < HEAD_SIZE:
            raise ValueError("a log is not that short")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)

    @property
    def is_stored(self) -> bool:
        """A daemon that cannot read the log loses nothing, whatever its format."""
        return bool(struct.unpack_from("=Q", self._log, 8 * STORED_AT)[0])

    def read_frames(self) -> Iterator[bytes]:
        """Read all valid frames, in order. ValueError."""
        form, _, active, *tails = struct.unpack_from("=5Q", self._log)
        area_size = (len(self._log) - HEAD_SIZE) // 2
        if form != FORM or active > NO_AREA or max(tails) > area_size:
            raise ValueError("the log makes no sense")
        if active == NO_AREA:
            return
        position = HEAD_SIZE + active * area_size
        end = position + tails[active]
        while position < end:
            (length,) = _LENGTH.unpack_from(self._log, position)
            position += _LENGTH.size
            if position + length > end:
                raise ValueError("the log has a frame that does not end")
            yield self._log[position : position + length]
            position += length

    def read_pieces(self, pieces: Iterable[Piece], length: int) -> bytes:
        """Read the first ``length`` bytes of these pieces. ValueError."""
        parts = [self._room[offset : offset + size] for offset, size in pieces if offset >= 0 and size >= 0]
        data = b"".join(parts)[:length]
        if len(data) != length:
            raise ValueError("the log lacks bytes")
        return data

    def close(self) -> None:
        self._log.close()
        self._room.close()
