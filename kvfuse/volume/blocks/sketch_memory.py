"""Keeps sketches in shared memory, where the next daemon finds them: their bytes, and what else they are.

A kept sketch has a *slot*: a head, and room for as many bytes as a block may have. Only bytes that somebody wrote have
pages, and a free slot retains some for the next sketch. A head has words that are stored at once, and two copies of
the rest, of which one word names the valid one: a kill leaves a sketch as it was before a change, or after it. The
kernel sends a request again that the daemon did not answer.

A sketch without a slot is in the memory of this process, and ends with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from kvfuse.kept.keeper import Keeper
from kvfuse.kept.mappings import map_kept
from kvfuse.native import blockforms as forms

log = logging.getLogger(__name__)

SKETCHES = "blocks/sketches"
"""entry of the keeper"""
_FORM = b"form 1"
SLOTS_MAX = 1024
ROOM_MAX = 1 << 40
"""bytes of addresses for all slots"""
STEP = 64 << 10
"""bytes whose pages a slot gets at least, and retains when it is free"""
_HEAD_SIZE = 1024
_WORDS = _HEAD_SIZE // 8
_INO, _SIZE, _MTIME, _CTIME, _FLAGS, _SEQUENCE, _COPY = range(7)
"""words of a head: 0, or the inode of a live sketch; bytes; nanoseconds, twice; `CHANGED` and others; that of the
sketch; the valid copy"""
_COPIES_AT, _COPY_SIZE = 64, 480
_COPY_FORM = Struct("<QQqIIIIIBB")
_MAX = (1 << 64) - 1
CHANGED, REWRITTEN, REFUSED, WRITTEN, NAMED = 1, 2, 4, 8, 16
"""flags: see `Sketch`; a handle has written since its last flush; the name means the sketch"""


class SketchFacts(NamedTuple):
    """What a sketch is, but for its bytes, words and flags."""

    directory: int
    namespace: int
    atime: int
    mode: int
    uid: int
    gid: int
    nlink: int
    expires: int
    priority: int
    name: bytes


class SketchBytes:
    """Bytes in the memory of this process."""

    is_kept = False

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._bytes = bytearray(content)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def view(self) -> memoryview:
        """All bytes. The caller releases it before they change."""
        return memoryview(self._bytes)

    def allocate(self, size: int) -> bool:
        """Have memory for so many bytes. False: there is none."""
        return True

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes that have memory; what lies before them, and was not written, is zero."""
        if offset > len(self._bytes):
            self._bytes.extend(bytes(offset - len(self._bytes)))
        self._bytes[offset : offset + len(data)] = data

    def set_size(self, size: int) -> None:
        """Cut bytes off, or add zeros that have memory."""
        if size < len(self._bytes):
            del self._bytes[size:]
        else:
            self._bytes.extend(bytes(size - len(self._bytes)))

    def note_times(self, mtime: int, ctime: int, flags: int) -> None:
        """The bytes were changed."""

    def note_flags(self, flags: int) -> None: ...
    def note_facts(self, ino: int, sequence: int, facts: SketchFacts) -> None: ...
    def end(self) -> None:
        """Nobody needs the bytes any more."""
        self._bytes = bytearray()


class SketchSlot(SketchBytes):
    """Bytes, and all that a sketch is, in shared memory."""

    is_kept = True

    def __init__(self, memory: SketchMemory, number: int) -> None:
        self._memory = memory
        self.number = number
        self._words = memory.words[number * _WORDS : (number + 1) * _WORDS]
        self._start = memory.data_at + number * memory.stride
        self._copies_at = number * _HEAD_SIZE + _COPIES_AT
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    def view(self) -> memoryview:
        return self._memory.bytes[self._start : self._start + self._size]

    def allocate(self, size: int) -> bool:
        return self._memory.allocate(self.number, size)

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        memory, start, end = self._memory.bytes, self._start + offset, offset + len(data)
        if offset > self._size:
            memory[self._start + self._size : start] = bytes(offset - self._size)
        memory[start : start + len(data)] = data
        if end > self._size:
            self._words[_SIZE] = self._size = end

    def set_size(self, size: int) -> None:
        if size > self._size:
            self._memory.bytes[self._start + self._size : self._start + size] = bytes(size - self._size)
        self._words[_SIZE] = self._size = size

    def note_times(self, mtime: int, ctime: int, flags: int) -> None:
        words = self._words
        words[_MTIME], words[_CTIME], words[_FLAGS] = mtime & _MAX, ctime & _MAX, flags

    def note_flags(self, flags: int) -> None:
        self._words[_FLAGS] = flags

    def note_facts(self, ino: int, sequence: int, facts: SketchFacts) -> None:
        """The next daemon finds it from here on."""
        words, copy = self._words, 1 - (self._words[_COPY] & 1)
        at = self._copies_at + copy * _COPY_SIZE
        _COPY_FORM.pack_into(self._memory.bytes, at, *facts[:-1], len(facts.name))
        at += _COPY_FORM.size
        self._memory.bytes[at : at + len(facts.name)] = facts.name
        words[_COPY], words[_SEQUENCE] = copy, sequence
        words[_INO] = ino

    def end(self) -> None:
        self._words[_INO] = 0
        self._words[_SIZE] = self._size = 0
        self._memory.free(self.number)

    # -- from the former daemon ------------------------------------------------------------------------

    @property
    def ino(self) -> int:
        return self._words[_INO]

    def restore(self) -> tuple[SketchFacts, int] | None:
        """(what it is, its sequence) of a live slot. None: the head is damaged."""
        at = self._copies_at + (self._words[_COPY] & 1) * _COPY_SIZE
        *facts, length = _COPY_FORM.unpack_from(self._memory.bytes, at)
        at += _COPY_FORM.size
        found = SketchFacts._make([*facts, bytes(self._memory.bytes[at : at + length])])
        if self._words[_SIZE] > self._memory.stride or found.nlink > 1 or not found.directory or b"/" in found.name:
            return None
        self._size = self._words[_SIZE]
        return found, self._words[_SEQUENCE]

    @property
    def times(self) -> tuple[int, int]:
        """(mtime, ctime) in nanoseconds"""
        return _signed(self._words[_MTIME]), _signed(self._words[_CTIME])

    @property
    def flags(self) -> int:
        return self._words[_FLAGS]


class SketchMemory:
    """All slots of a volume. Event loop only. ``stride``: bytes of the largest block that it may ever have."""

    def __init__(self, keeper: Keeper, volume_id: bytes, stride: int) -> None:
        self.stride = stride
        self._count = min(SLOTS_MAX, ROOM_MAX // self.stride) if keeper.outlives else 0
        self.data_at = -(-self._count * _HEAD_SIZE // forms.PAGE) * forms.PAGE
        self._ready = [0] * self._count
        """bytes of each slot that have pages"""
        self._free = list(range(self._count))[::-1]
        self._left: list[int] = []
        if not self._count:
            return
        try:
            kept = map_kept(keeper, SKETCHES, _FORM + volume_id, self.data_at + self._count * self.stride)
        except OSError as error:
            log.warning("files that are being written in folders of blocks end with this daemon: %s", error.strerror)
            self._free = []
            return
        self._descriptor = kept.descriptor
        weakref.finalize(self, os.close, kept.descriptor)
        self._mapping = kept.memory
        self.bytes = memoryview(self._mapping)
        self.words = self.bytes[: self.data_at].cast("Q")
        os.posix_fallocate(self._descriptor, 0, self.data_at)
        if kept.was_kept:
            self._left = [number for number in range(self._count) if self.words[number * _WORDS + _INO]]
            self._free = [number for number in self._free if not self.words[number * _WORDS + _INO]]
            for number in self._free:
                self._give_pages(number, 0, self.stride)

    def take(self) -> SketchBytes:
        """Memory for a new sketch: a slot, if one is free."""
        return SketchSlot(self, self._free.pop()) if self._free else SketchBytes()

    def restore(self) -> Iterator[tuple[SketchSlot, SketchFacts, int]]:
        """(slot, what it has, its sequence) of sketches of the former daemon. Once."""
        for number in self._left:
            slot = SketchSlot(self, number)
            found = slot.restore()
            if found is None:
                log.warning("a file that was being written is lost: its row is damaged")
                slot.end()
                continue
            self._ready[number] = ready = -(-slot.size // forms.PAGE) * forms.PAGE
            self._give_pages(number, ready, self.stride)
            yield slot, *found
        self._left = []

    def allocate(self, number: int, size: int) -> bool:
        """Give pages to a slot. False: the machine has no memory for them, or it is too large for a slot."""
        ready = self._ready[number]
        if size <= ready:
            return True
        wanted = min(self.stride, max(STEP, 2 * ready, -(-size // forms.PAGE) * forms.PAGE))
        if size > wanted:
            return False
        try:
            start = self.data_at + number * self.stride
            os.posix_fallocate(self._descriptor, start + ready, wanted - ready)
        except OSError as error:
            log.warning("no memory for a file that is being written: %s", error.strerror)
            return False
        self._ready[number] = wanted
        return True

    def free(self, number: int) -> None:
        """A slot is free again. It retains its first pages for the next sketch, which is likely to get this slot."""
        self._give_pages(number, STEP, self._ready[number])
        self._ready[number] = min(self._ready[number], STEP)
        self._free.append(number)

    def _give_pages(self, number: int, start: int, end: int) -> None:
        if end > start:
            self._mapping.madvise(mmap.MADV_REMOVE, self.data_at + number * self.stride + start, end - start)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
