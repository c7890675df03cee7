"""Directories that clients use through rings or shared memory, with their ancestors: who counts changes of any of them.

Whether a user may use a directory depends on the owner and mode of the directory, and of those above it. Clients map
memory into which blocks of the directory come later, so the daemon has to end that before such a change, wherever on
the path it is. Who uses a directory holds its `Ancestors`: while somebody does, their inodes stay in memory, and so
this host also hears of changes that other hosts make.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

UNUSED_MAX = 1024
"""inodes in the table below which nobody uses a directory any more"""


class Directory(Protocol):
    """A node: live, and owned by the volume."""

    @property
    def ino(self) -> int: ...
    @property
    def parent(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def mode(self) -> int: ...


class Ancestors:
    """Of one directory. Event loop only, but for ``changes``."""

    __slots__ = ("__weakref__", "changes", "nodes")

    def __init__(self) -> None:
        self.changes = 0
        """grows before other people may use the directory; any thread may look"""
        self.nodes: Sequence[Directory] = ()
        """the directory, the one that it is in, and so on up to the root; empty: not known"""

    @property
    def are_known(self) -> bool:
        """No directory among them has another place by now."""
        return bool(self.nodes) and all(node.parent == above.ino for node, above in pairwise(self.nodes))


class AncestorTable:
    """Of all directories that clients of a volume use. Event loop only."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[int, Ancestors] = WeakValueDictionary()
        self._below: dict[int, WeakSet[Ancestors]] = {}
        """inode -> of directories that are it, or below it; or were so"""
        self._unused_max = UNUSED_MAX

    def of(self, directory: int) -> Ancestors:
        """Those of a directory, for who uses it. They may have to be found first."""
        found = self._of.get(directory)
        if found is None:
            found = self._of[directory] = Ancestors()
        return found

    def settle(self, ancestors: Ancestors, nodes: Sequence[Directory]) -> None:
        """These were found: from here on changes of each count."""
        ancestors.nodes = nodes
        for node in nodes:
            self._below.setdefault(node.ino, WeakSet()).add(ancestors)
        if len(self._below) > self._unused_max:
            self._below = {ino: below for ino, below in self._below.items() if below}
            self._unused_max = 2 * len(self._below) + UNUSED_MAX

    def change(self, ino: int) -> list[int]:
        """Before a directory gets another owner, mode or place: the directories in use that it is, or is above of."""
        changed = [ancestors for ancestors in self._below.pop(ino, ()) if ancestors.nodes]
        directories = [ancestors.nodes[0].ino for ancestors in changed]
        for ancestors in changed:
            ancestors.changes += 1
            ancestors.nodes = ()
        return directories

    def inodes(self) -> set[int]:
        """All that are to stay in memory."""
        return {node.ino for ancestors in self._of.values() for node in ancestors.nodes}
