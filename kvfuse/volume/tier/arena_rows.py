"""What is in the slots of an arena, for the daemon after this one: a row for each, in shared memory.

An arena of the shared-memory tier outlives its daemon where somebody keeps its memory (`kept.keeper`). Then this
table is kept with it. A row says which file the bytes of a slot are a copy of, and is valid while its word ``kept_at``
is not 0. Only the daemon maps the table, under the lock of the tier, but for ``uses``, which are a hint.

**A daemon may be killed between any two instructions**, and the rows it leaves must not be wrong. What it has stored in
shared memory by then is there, in the order of the program, and nothing that came later; a word is stored as a whole.

- ``kept_at`` is stored last, when the block's bytes are in the slot and the other fields are written. So the fields of
  a valid row are of one block, whose bytes are all there.
- It is cleared before the lease of the slot can end: before the tier lets go of the block. So a slot that is written to
  has no valid row, whoever wrote to it before.
- The block of a file whose bytes or readers change is dropped before they do, as without a keeper.

A row does not say that the file has these bytes: the daemon may be killed before it stores them in the volume, and
other hosts may change the file before the next daemon runs. That compares the bytes with what the record of the file
says of them, and the readers of the file with those of the arena, before it uses a block (`content/left_copies`). Where
a file is stored compressed, the record has no checksums of its bytes: then the row says in which slots they are, once
they are there. The generation of a slot is never used again, so a record with the same slots means the same bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

ROW = np.dtype(
    [
        ("kept_at", "<u8"),  # a time of the tier's clock; 0: the row is not valid
        ("ino", "<u8"),
        ("size", "<u8"),  # bytes of the file
        ("uses", "<u4"),  # as `policy/hot` counts them
        ("is_proven", "<u4"),  # it was not on probation when it was kept
        ("packed", "<u8"),  # of a file that is stored compressed: its slots, as `packed_token` has them
        ("checksum", "<u8"),  # and CRC32C of its bytes, which its record does not have
        ("reserved", "<u8", 2),
    ]
)
HEADER = np.dtype([("magic", "<u8"), ("touched", "<u8"), ("reserved", "<u8", 6)])
"""``touched``: slots from the start that were in use at some time"""
MAGIC = int.from_bytes(b"KVFROWS1", "little")
_WORDS = ROW.itemsize // 8
_USES = 2 * 3
"""word of 4 bytes in a row"""
_CHUNK = struct.Struct("<QQQ")

assert ROW.itemsize == HEADER.itemsize == 64


def packed_token(index: int, addr: int, generation: int) -> int:
    """Of a chunk in a slot; that of a file is the exclusive or of its chunks'."""
    return int.from_bytes(blake2b(_CHUNK.pack(index, addr, generation), digest_size=8).digest(), "little")


class ArenaRows:
    """The table of an arena of so many slots. ``descriptor``: of a daemon before this one, and the table's from then
    on; ValueError where it is none of so many slots."""

    __slots__ = ("__weakref__", "_numbers", "_words", "descriptor", "table")

    def __init__(self, slot_count: int, descriptor: int | None = None) -> None:
        size = HEADER.itemsize + slot_count * ROW.itemsize
        made = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("kvfuse-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if made:
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            elif os.fstat(descriptor).st_size != size:
                raise ValueError(f"no rows of {slot_count} slots")
            memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            self._words = memory.view(np.uint64).data
            self._numbers = memory.view(np.uint32).data
            self.table: npt.NDArray[Any] = memory[HEADER.itemsize :].view(ROW)
            if made:
                self._words[0] = MAGIC
            elif self._words[0] != MAGIC:
                raise ValueError("no rows of this version")
        except BaseException:
            if made:
                os.close(descriptor)
            raise
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    def touched(self) -> int:
        return int(self._words[1])

    def touch(self, count: int) -> None:
        self._words[1] = count

    def show(self, slot: int, kept_at: int, ino: int, size: int, is_proven: int) -> None:
        """The block in a slot is the copy of a file."""
        words, first = self._words, 8 * slot + 8
        words[first + 1] = ino
        words[first + 2] = size
        words[first + 3] = is_proven << 32  # and no uses
        words[first + 4] = 0
        words[first] = kept_at

    def add_packed(self, slot: int, token: int, checksum: int) -> None:
        """One chunk more of the file is in a slot. Until all are, ``packed`` is that of no record."""
        words, first = self._words, (slot + 1) * _WORDS
        words[first + 5] = checksum
        words[first + 4] ^= token

    def packed(self, slot: int) -> tuple[int, int]:
        """(``packed``, ``checksum``)"""
        first = (slot + 1) * _WORDS
        return self._words[first + 4], self._words[first + 5]

    def hide(self, slot: int) -> None:
        """It is not any more, or its bytes are about to change."""
        self._words[8 * slot + 8] = 0

    def note_uses(self, slot: int, uses: int) -> None:
        """For any thread."""
        self._numbers[16 * slot + 16 + _USES] = uses
