"""Records the places of recent lookups in shared memory, by which the next daemon finds inodes of resent requests.

The next daemon does not know former inode numbers, but for inodes with a record of their own and open ones. A place
from this table leads it to the inode, if the store confirms it: no row is trusted by itself. Without a place the daemon
would answer ESTALE, and the kernel would look the path up again - but only once in each call of a program: the program
gets a second ESTALE, when the next daemon is killed as well.
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
"""rows, of the latest lookups: many more than requests in flight at once"""
assert ROW.size % 8 == 0


class RecentPlaces:
    """The table, written in a circle: the first row follows the last one."""

    def __init__(self, keeper: Keeper) -> None:
        self._rows = Rows(keeper, "fuse/places", FORM, ROW.size, COUNT)
        self.before: dict[int, tuple[int, bytes]] = {}
        """inode -> (folder, name), of the former daemon"""
        found = [(*ROW.unpack_from(self._rows.memory, offset), offset) for offset in self._rows.list_used()]
        last = (0, -ROW.size)
        for serial, ino, parent, length, name, offset in sorted(found):
            last = serial, offset
            if parent and 0 < length <= NAME_MAX:
                self.before[ino] = parent, name[:length]
        self._serial, self._offset = last

    def add_place(self, ino: int, parent: int, name: bytes) -> None:
        """Record a place before the kernel learns that it has the inode. A kill meanwhile leaves a row that may be
        wrong: the store has to confirm it."""
        self._serial += 1
        self._offset = (self._offset + ROW.size) % (COUNT * ROW.size)
        ROW.pack_into(self._rows.memory, self._offset, self._serial, ino, parent, len(name), name)

    def close(self) -> None:
        """Unmap the table; the keeper retains it."""
        self._rows.close()
