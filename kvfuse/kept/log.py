"""Shared memory that outlives the daemon: a log of frames, of which each is there wholly or not at all, and room for
bytes that frames refer to.

The log has two areas. Frames go one behind the other into the active one, and count when its *tail* was moved over
them: one store of eight bytes. Where an area is used up, all that still counts is written as one frame into the other,
which then becomes the active one, by one such store. What dies is the process, not the machine, so what it stored
before is there.

Pages are taken from the system ahead of need, and used again and again. Nothing here knows what frames mean.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator

from kvfuse.kept.keeper import Keeper, Kept

FORM = 0x6B76_6675_7365_0001
"""number of this format"""
HEAD_SIZE = 4096
STORED_AT, ACTIVE_AT, TAILS_AT = 1, 2, 3
"""numbers of words in the head: nobody misses what this has, which is the same word in any format; the active area; the
tails of both"""
NO_AREA = 2
"""as the active one: nothing counts"""
AREA_SIZE = 64 << 20
SHORT = 1 << 20
"""bytes of frames at which what still counts is to be written anew, or four times what that took the last time"""
STEP = 1 << 20
"""bytes for which pages are taken at once"""
_LENGTH = struct.Struct("<I")
CLASSES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""sizes of pieces of the room; each is four of the one before"""

Piece = tuple[int, int]
"""(offset, size) in the room"""


class _Pages:
    """A mapping whose pages are taken step by step."""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.size = size

    def allocate_pages(self, start: int, end: int) -> bool:
        """Have pages for these bytes. False: the machine has no memory for them."""
        try:
            os.posix_fallocate(self.descriptor, start, min(end, self.size) - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


class KeptLog:
    """Of this daemon. ``room_size``: bytes of the room, at most."""

    def __init__(self, room_size: int, area_size: int = AREA_SIZE) -> None:
        self._area_size = area_size
        self._log = _Pages("kvfuse-unstored", HEAD_SIZE + 2 * area_size)
        self._room = _Pages("kvfuse-unstored-bytes", -(-max(room_size, CLASSES[-1]) // CLASSES[-1]) * CLASSES[-1])
        self._words = memoryview(self._log.memory)[:HEAD_SIZE].cast("Q")
        self._ready = [0, 0]
        """bytes of each area that have pages"""
        self._active = 0
        self._tail = 0
        """bytes of frames"""
        self._tail_max = SHORT
        self._free: tuple[list[int], ...] = tuple([] for _ in CLASSES)
        self._unused = 0
        """where the part of the room begins that has no pages yet"""
        self.used = 0
        """bytes of pieces that are taken"""
        self._log.allocate_pages(0, HEAD_SIZE)
        self._words[ACTIVE_AT] = 0
        self._words[0] = FORM

    def keep_with(self, keeper: Keeper, name: str, content: bytes) -> None:
        """From now on the next daemon finds this one, and none before. ``content``: to know what it belongs to."""
        keeper.keep(name, content, [self._log.descriptor, self._room.descriptor])

    # -- frames --------------------------------------------------------------------------------------

    def append_frame(self, frame: bytes) -> bool:
        """Have one more frame. False: there is no room for it, or it is time to `begin_anew`."""
        return self._tail <= self._tail_max and self._write_frame(self._active, self._tail, frame)

    def replace_frames(self, frame: bytes) -> bool:
        """Have this frame instead of all. False: there is no room for it, and nothing has changed."""
        other = 1 - self._active
        if not self._write_frame(other, 0, frame):
            return False
        self._store_word(ACTIVE_AT, other)
        self._active = other
        self._tail_max = max(SHORT, 4 * len(frame))
        return True

    def clear_frames(self) -> None:
        """Have no frames."""
        self._tail = 0
        self._store_word(TAILS_AT + self._active, 0)

    def invalidate_log(self) -> None:
        """Nothing counts from now on."""
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
        """Write what does not count yet."""
        self._log.memory[offset : offset + len(data)] = data

    def _store_word(self, word: int, value: int) -> None:
        """One store into the head, with which something counts, or does not any more."""
        self._words[word] = value

    def _allocate_area(self, area: int, end: int) -> bool:
        start = HEAD_SIZE + area * self._area_size
        ready = min(-(-end // STEP) * STEP, self._area_size)
        if end > ready or not self._log.allocate_pages(start + self._ready[area], start + ready):
            return False
        self._ready[area] = ready
        return True

    # -- bytes ---------------------------------------------------------------------------------------

    def take_pieces(self, size: int) -> list[Piece] | None:
        """Pieces of the room for so many bytes, in order. None: there is no room."""
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
        """The smallest piece that holds so many bytes, or else the largest that there is."""
        wanted = next((number for number, least in enumerate(CLASSES) if least >= size), len(CLASSES) - 1)
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
        """No frame refers to these any more."""
        for offset, size in pieces:
            self._free[CLASSES.index(size)].append(offset)
            self.used -= size
        if not self.used and self._unused:  # or else large ones would never come together again
            for free in self._free:
                free.clear()
            self._free[-1].extend(range(self._unused - CLASSES[-1], -1, -CLASSES[-1]))

    def write_bytes(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into a piece."""
        self._room.memory[offset : offset + len(data)] = data

    def close(self, *, is_stored: bool) -> None:
        """The keeper goes on to have what it has. ``is_stored``: nobody misses it who cannot read it."""
        self._words[STORED_AT] = is_stored
        self._words.release()
        self._log.close()
        self._room.close()


class KeptLogReader:
    """Of a daemon before this one."""

    def __init__(self, kept: Kept) -> None:
        """ValueError: it makes no sense."""
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
        """Nobody misses what it has, in whatever format that is."""
        return bool(struct.unpack_from("=Q", self._log, 8 * STORED_AT)[0])

    def read_frames(self) -> Iterator[bytes]:
        """All that count, in order. ValueError."""
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
        """The first bytes of these pieces. ValueError."""
        parts = [self._room[offset : offset + size] for offset, size in pieces if offset >= 0 and size >= 0]
        data = b"".join(parts)[:length]
        if len(data) != length:
            raise ValueError("the log lacks bytes")
        return data

    def close(self) -> None:
        self._log.close()
        self._room.close()
