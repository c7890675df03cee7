"""Where the kernel found inodes last, in shared memory, for requests about them that it sends again to the next daemon.

That one knows no inode of before by its number, unless it has a record of its own or is open. By a place from here it
finds what the request is about, if the store says so, too: nothing of what is found is trusted by itself. Without it
the kernel would be answered ESTALE, and look the path up again - but only once in each call of a program, which hears
of the second time, when the next daemon is killed as well.
"""

from __future__ import annotations

import struct

from kvfuse.kept.keeper import Keeper
from kvfuse.kept.rows import COUNT_MIN, Rows
from kvfuse.volume.api import NAME_MAX

FORM = 1
ROW = struct.Struct("<QQQB263s")
"""serial number, inode, folder, length of the name, name"""
COUNT = COUNT_MIN
"""of the last look-ups: many more than requests that are under way at once"""
assert ROW.size % 8 == 0


class RecentPlaces:
    """The table: whoever comes after the last row begins with the first one again."""

    def __init__(self, keeper: Keeper) -> None:
        self._rows = Rows(keeper, "fuse/places", FORM, ROW.size, COUNT)
        self.before: dict[int, tuple[int, bytes]] = {}
        """inode -> (folder, name), of the daemon before this one"""
        found = [(*ROW.unpack_from(self._rows.memory, offset), offset) for offset in self._rows.list_used()]
        last = (0, -ROW.size)
        for serial, ino, parent, length, name, offset in sorted(found):
            last = serial, offset
            if parent and 0 < length <= NAME_MAX:
                self.before[ino] = parent, name[:length]
        self._serial, self._offset = last

    def add_place(self, ino: int, parent: int, name: bytes) -> None:
        """The kernel is about to hear that the inode is there. A kill in between leaves a row that says nothing true:
        see `before`."""
        self._serial += 1
        self._offset = (self._offset + ROW.size) % (COUNT * ROW.size)
        ROW.pack_into(self._rows.memory, self._offset, self._serial, ino, parent, len(name), name)

    def close(self) -> None:
        """The keeper goes on to have it."""
        self._rows.close()
