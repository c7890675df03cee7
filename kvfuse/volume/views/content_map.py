"""Content maps: where a file's bytes are, for threads other than the event loop's.

The event loop alone makes and changes a `ContentMap`. Any thread may read one:

    version = map.version
    size, row = map.size, map.rows.get(chunk)
    ... copy the bytes out of row.source, or zeros; the interpreter lock may be released meanwhile ...
    if map.version != version: throw them away

Where there is no row, the size is below 0, or the copy was thrown away, the thread asks the event loop (`Files.show`,
`Files.read_into`). Besides looking it may keep a source or a row, and set bits of a row's ``verified``.

The event loop, before it changes bytes that a row shows, lets go of the slot they are in, or changes the size: takes
the row away, then raises the version, then changes. Adding a row changes nothing: it says what was true before.

Why a copy that was not thrown away holds bytes that the file had between the two looks at the version: Say that the
reader copied a byte of a later state. The event loop raised the version before that byte was written, while it held
the interpreter lock. The reader takes that lock again after its copy, so it does so later, and sees the raised
version; the lock is a barrier, on any processor. If that is the version it began with, it looked for the row after
the version was raised, hence after the row was taken away: what it found there came later, and shows the later state.

A segment's medium may fail: a copy counts if `MappedSource.is_intact` says so after it. Else the event loop reads the
bytes with system calls, which have an error for what is not there; a source that failed is shown to nobody any more.

Two things are as in read(2): a read beside a write in place may see some of both (the row has no checksums then), and
bytes that were copied before the version was raised are those of before.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.remote.mapguard import GuardedMap
from kvfuse.volume.views import clock

Bytes = npt.NDArray[np.uint8]

SIZE_UNKNOWN = -1


class MappedSource:
    """Mapped memory that holds bytes of files: a whole segment, or an arena of the shared-memory tier.

    A row keeps its source, and a source its mapping and descriptor, for as long as a thread may copy from them.
    """

    __slots__ = ("arena", "bytes", "fd", "guard")

    def __init__(self, fd: int, data: Bytes, arena: int = 0, guard: GuardedMap | None = None) -> None:
        self.fd = fd
        """of the file that is mapped, for preadv(2); open while this is held"""
        self.bytes = data
        """read-only"""
        self.arena = arena
        """number of the arena; 0: a segment"""
        self.guard = guard
        """of a segment, whose medium may fail; memory does not"""

    def is_intact(self) -> bool:
        """All bytes copied from it until now are the file's."""
        return self.guard is None or self.guard.is_intact()


class MapRow:
    """Where the bytes of one chunk are. Made for these bytes, and never used for others."""

    __slots__ = ("block", "checksums", "length", "source", "start", "verified")

    def __init__(
        self,
        source: MappedSource | None,
        start: int,
        length: int,
        checksums: bytes = b"",
        verified: int = 0,
        block: Any = None,
    ) -> None:
        self.source = source
        """None: a hole"""
        self.start = start
        """of the chunk's first byte in ``source.bytes``"""
        self.length = length
        """bytes there; the rest of the chunk, up to the file's size, reads as zeros"""
        self.checksums = checksums
        """CRC32C of each started granule, 4 bytes little-endian each; empty: there is nothing to check"""
        self.verified = verified
        """bit n: granule n was verified. Threads set bits; one that gets lost means to verify once more."""
        self.block = block
        """what holds the bytes in their place: a block of the tier, or None"""


class ReadLog:
    """Maps of files that threads have read since the event loop looked. ``keeps_last``: the last moment counts, not
    the first."""

    __slots__ = ("keeps_last", "maps")

    def __init__(self, *, keeps_last: bool) -> None:
        self.keeps_last = keeps_last
        self.maps: deque[ContentMap] = deque()


class ContentMap:
    """Where the bytes of one file are, as far as it was asked for; see the module.

    A map ends when its inode leaves memory, or is removed: it then has no rows and no size, and never will again.
    """

    __slots__ = (
        "__weakref__",
        "chunk_size",
        "has_copies",
        "ino",
        "is_in_place",
        "notes_reads",
        "read_at",
        "read_log",
        "rows",
        "size",
        "version",
    )

    def __init__(self, ino: int, chunk_size: int, size: int, read_log: ReadLog | None = None) -> None:
        """``read_log``: where reads are noted; None: nowhere."""
        self.ino = ino
        self.chunk_size = chunk_size
        self.size = size
        """of the file in bytes; below 0: unknown, the map has ended"""
        self.version = 0
        self.rows: dict[int, MapRow] = {}
        """by chunk; what is absent is unknown. A row is never replaced by another: it is hidden first."""

        self.has_copies = False
        """rows are of a block of the shared-memory tier: one block for the whole file, so they go together"""
        self.is_in_place = False
        """the last write changed bytes in their slots: a hint for who has some to write"""
        self.read_log = read_log
        self.notes_reads = read_log is not None
        """whoever reads calls `note_read`"""
        self.read_at = 0
        """when a thread read the file, since the event loop looked; 0: none did"""

    def note_read(self) -> None:
        """A thread has read bytes of the file."""
        assert self.read_log is not None
        is_first = not self.read_at
        self.read_at = clock.now()
        self.notes_reads = self.read_log.keeps_last
        if is_first:
            self.read_log.maps.append(self)

    # The event loop only; each returns before anything else is changed.

    def take_read(self) -> int:
        """When a thread read the file."""
        moment, self.read_at = self.read_at, 0
        self.notes_reads = True
        return moment

    def add(self, index: int, row: MapRow) -> None:
        """Show a chunk, if it is not shown yet."""
        if index not in self.rows:
            self.rows[index] = row
            self.has_copies |= row.block is not None

    def hide(self, index: int) -> None:
        """The bytes of a chunk, or their place, are about to change."""
        if self.has_copies:
            self.hide_copies()
        row = self.rows.pop(index, None)
        self.version += 1
        del row  # not before: a block's memory may have another content at once

    def hide_copies(self) -> None:
        """Blocks of the shared-memory tier do not hold the file's bytes any more."""
        self.has_copies = False
        for index in [index for index, row in self.rows.items() if row.block is not None]:
            self.hide(index)

    def resize(self, size: int) -> None:
        """The file is about to have another size. Rows of chunks that lose bytes are hidden one by one."""
        if self.has_copies:
            self.hide_copies()
        self.size = size
        self.version += 1

    def end(self) -> None:
        rows, self.rows = self.rows, {}
        self.resize(SIZE_UNKNOWN)
        del rows
