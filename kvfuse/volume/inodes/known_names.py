"""What is known of names without asking the record store.

Two facts are kept. For names used lately: which inode they mean. For directories that were made here, or read to
the end: the hashes of all their stored names, so that an absent name costs no round trip - an engine asks
for many blocks that nobody has. A hash has 64 bits and depends on a secret of this process (Python's own of bytes):
it is cheap enough for thousands of names in a call. Both hold because nobody else writes this store, or because a
watch of it tells what others change (`coherence`); what is not committed yet is the journal's overlay, which is asked
first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvfuse.volume.inodes.shelf import Shelf
from kvfuse.volume.store import schema

INODES_MAX = 20_000
"""Names whose inode is kept; and those whose version is."""
DIRECTORIES_MAX = 20_000
"""Directories whose names are kept."""
RECENT_MAX = 4096
"""Changes of a `HashSet` that are kept apart before they are merged."""


class HashSet:
    """A set of signed 64-bit numbers in 8 bytes each: a sorted array, and the changes since it was merged last."""

    def __init__(self) -> None:
        self._sorted = array("q")
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def add(self, value: int) -> None:
        self._removed.discard(value)
        if not self._in_sorted(value):
            self._added.add(value)
            self._merge_if_many()

    def discard(self, value: int) -> None:
        self._added.discard(value)
        if self._in_sorted(value):
            self._removed.add(value)
            self._merge_if_many()

    def __contains__(self, value: int) -> bool:
        return value in self._added or (value not in self._removed and self._in_sorted(value))

    def contain(self, values: Sequence[int]) -> list[bool]:
        """Which of ``values`` are in the set."""
        if self._sorted:
            members = np.frombuffer(self._sorted, np.int64)
            wanted = np.array(values, np.int64)
            places = np.minimum(np.searchsorted(members, wanted), len(members) - 1)
            found: list[bool] = (members[places] == wanted).tolist()
        else:
            found = [False] * len(values)
        if self._added:
            found = [known or value in self._added for known, value in zip(found, values, strict=True)]
        if self._removed:
            found = [known and value not in self._removed for known, value in zip(found, values, strict=True)]
        return found

    def __len__(self) -> int:
        return len(self._sorted) + len(self._added) - len(self._removed)

    def _in_sorted(self, value: int) -> bool:
        index = bisect_left(self._sorted, value)
        return index < len(self._sorted) and self._sorted[index] == value

    def _merge_if_many(self) -> None:
        if len(self._added) + len(self._removed) <= RECENT_MAX:
            return
        merged = np.frombuffer(self._sorted, np.int64) if self._sorted else np.empty(0, np.int64)
        # Nothing is sorted anew: numpy's set functions would stop the daemon for as long as a million names take.
        merged = np.delete(merged, np.searchsorted(merged, np.array(list(self._removed), np.int64)))
        added = np.sort(np.array(list(self._added), np.int64))
        merged = np.insert(merged, np.searchsorted(merged, added), added)
        self._sorted = array("q", merged.tobytes())
        self._added.clear()
        self._removed.clear()


class _Directory:
    """The stored names of one directory, as far as they were read."""

    __slots__ = ("after", "complete", "hashes")

    def __init__(self, *, complete: bool) -> None:
        self.hashes = HashSet()
        self.complete = complete
        self.after = b""
        """key up to which the directory was read"""


class KnownNames:
    """Names and absences that are known; the core owns it. It never waits: callers hand in what they read (`learn`)."""

    def __init__(self) -> None:
        self._inodes: dict[tuple[int, bytes], int] = {}
        self._versions: dict[tuple[int, bytes], int] = {}
        self._directories: dict[int, _Directory] = {}
        self.shelf = Shelf()
        """records of names that were not asked for, where others write the store, too"""

    def clear(self) -> None:
        """Nothing is known any more."""
        self._inodes.clear()
        self._versions.clear()
        self._directories.clear()
        self.shelf.clear()

    def version(self, parent: int, name: bytes) -> int:
        """Of the commit that said last what the name means, where others write the store, too; 0: not known."""
        return self._versions.get((parent, name), 0)

    def inode(self, parent: int, name: bytes) -> int | None:
        """The inode that the stored name means; None: not known."""
        return self._inodes.get((parent, name))

    def is_absent(self, parent: int, name: bytes) -> bool:
        """No stored name of the directory has the hash of this one."""
        directory = self._directories.get(parent)
        return directory is not None and directory.complete and hash(name) not in directory.hashes

    def stored(self, parent: int, names: Sequence[bytes]) -> list[bool] | None:
        """Which names the directory has in the store, as far as their hashes tell; None: not known."""
        directory = self._directories.get(parent)
        if directory is None or not directory.complete:
            return None
        return directory.hashes.contain(list(map(hash, names)))

    def note(self, parent: int, name: bytes, ino: int, version: int = 0) -> None:
        """The name means this inode. ``version``: of the record that says so, where others write the store, too."""
        if len(self._inodes) >= INODES_MAX:
            self._forget_some(self._inodes)
        if version:
            self._set_version(parent, name, version)
        elif self._versions:
            self._versions.pop((parent, name), None)
        self._inodes[parent, name] = ino
        self.shelf.drop(parent, name)

    def drop(self, parent: int, name: bytes, version: int = 0) -> None:
        """The name means nothing, or another inode.

        ``version``: of the commit that made it so, where others write the store, too: an answer of the store that is
        older is known by it.
        """
        self.shelf.drop(parent, name)
        self._inodes.pop((parent, name), None)
        if version:
            self._set_version(parent, name, version)
        elif self._versions:
            self._versions.pop((parent, name), None)

    def _set_version(self, parent: int, name: bytes, version: int) -> None:
        if len(self._versions) >= INODES_MAX:
            self._forget_some(self._versions)
        self._versions[parent, name] = version

    def _forget_some(self, names: dict[tuple[int, bytes], int]) -> None:
        """Those that are there for the longest time. Many at once: to find its first entry a dict passes all places of
        those that were in front of it.
        """
        for name in list(islice(names, INODES_MAX // 8)):
            self._inodes.pop(name, None)
            self._versions.pop(name, None)

    def made(self, ino: int) -> None:
        """A directory was made: it is empty, and all that comes will be seen."""
        self._add(ino, _Directory(complete=True))

    def removed(self, ino: int) -> None:
        self._directories.pop(ino, None)

    def settle(self, parent: int, name: bytes, present: bool) -> None:
        """A commit put or deleted the name's record."""
        self.shelf.drop(parent, name)
        directory = self._directories.get(parent)
        if directory is not None:
            if present:
                directory.hashes.add(hash(name))
            else:
                directory.hashes.discard(hash(name))

    # -- learning a directory that was there before --------------------------------------------------

    def next_page(self, parent: int) -> bytes | None:
        """Key after which the directory is to be read on; None when it is known to the end."""
        directory = self._directories.get(parent)
        if directory is None:
            directory = self._add(parent, _Directory(complete=False))
        return None if directory.complete else directory.after

    def learn(self, parent: int, keys: list[bytes], *, last: bool) -> None:
        """The keys of the next page of a directory, as they are in the store now; ``last``: there are no more."""
        directory = self._directories.get(parent)
        if directory is None or directory.complete:
            return
        for key in keys:
            directory.hashes.add(hash(schema.split_entry_key(key)[2]))
        directory.after = keys[-1] if keys else directory.after
        directory.complete = last

    def count(self, parent: int) -> int:
        """Stored names of a directory that are known, if only by their hashes."""
        directory = self._directories.get(parent)
        return len(directory.hashes) if directory is not None else 0

    def _add(self, ino: int, directory: _Directory) -> _Directory:
        if len(self._directories) >= DIRECTORIES_MAX:
            self._directories.pop(next(iter(self._directories)))
        self._directories[ino] = directory
        return directory
