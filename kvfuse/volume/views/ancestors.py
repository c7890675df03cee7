"""Directories that clients use through rings or shared memory, with their ancestors: who counts changes of any of them.

Whether a user may use a directory depends on the owner and mode of the directory, and of those above it. Clients map
memory into which blocks of the directory come later, so the daemon has to end that before such a change, wherever on
the path it is. Who uses a directory holds its `Ancestors`: numbers alone, as there may be very many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

UNUSED_MAX = 4096
"""rows of the table that are kept though nobody uses their directories any more, about"""


class Ancestors:
    """Of one directory. Event loop only, but for ``changes``."""

    __slots__ = ("__weakref__", "above", "changes")

    def __init__(self) -> None:
        self.changes = 0
        """grows before other people may use the directory; any thread may look"""
        self.above: Sequence[int] = ()
        """inodes of the directory that it is in, and so on up to the root"""


class AncestorTable:
    """Of all directories that clients of a volume use. Event loop only."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[int, Ancestors] = WeakValueDictionary()
        self._below: dict[int, set[int]] = {}
        """inode -> directories that are, or were, below it"""
        self._row_count = 0
        """that came since all were those of directories in use"""

    def settle(self, directory: int, above: Sequence[int]) -> Ancestors:
        """Those of a directory, as they were just found, for who uses it: from here on changes of each count."""
        found = self._of.get(directory)
        if found is None:
            found = self._of[directory] = Ancestors()
        found.above = above
        self._enter(directory, above)
        self._row_count += len(above)
        if self._row_count > UNUSED_MAX + sum(map(len, self._below.values())) // 2:
            self._below, self._row_count = {}, 0
            for number, ancestors in self._of.items():
                self._enter(number, ancestors.above)
        return found

    def _enter(self, directory: int, above: Iterable[int]) -> None:
        for ino in above:
            self._below.setdefault(ino, set()).add(directory)

    def change(self, ino: int) -> list[int]:
        """Before a directory gets another owner, mode or place: the directories in use that it is, or is above of.

        Who uses one of these settles it anew before it counts the next change.
        """
        changed = {number: self._of.get(number) for number in (ino, *self._below.pop(ino, ()))}
        for ancestors in changed.values():
            if ancestors is not None:
                ancestors.changes += 1
        return [number for number, ancestors in changed.items() if ancestors is not None]

    def inodes(self) -> set[int]:
        """All of which changes count."""
        return {*self._below, *self._of}
