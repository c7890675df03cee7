"""The stored names of a directory, as hashes of 8 bytes each: a directory may have millions.

A hash has 64 bits and depends on a secret of this process (Python's hash of bytes): thousands
of them in a call are cheap.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvfuse.volume.store import schema

RECENT_MAX = 4096
"""Changes of a set that are kept apart until they are merged into its array."""


class HashSet:
    """Signed 64-bit numbers: a sorted array, and the changes since it was merged last. `StoredNames` has one."""

    def __init__(self) -> None:
        self._sorted = array("q")
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def add(self, value: int) -> None:
        if value in self._removed:
            self._removed.remove(value)
        elif value not in self:
            self._added.add(value)
            self._merge_if_many()

    def discard(self, value: int) -> None:
        if value in self._added:
            self._added.remove(value)
        elif value in self:
            self._removed.add(value)
            self._merge_if_many()

    def __contains__(self, value: int) -> bool:
        index = bisect_left(self._sorted, value)
        if index < len(self._sorted) and self._sorted[index] == value:
            return value not in self._removed
        return value in self._added

    def contain(self, values: Sequence[int]) -> list[bool]:
        """For each of ``values``: whether it is in the set."""
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

    def _merge_if_many(self) -> None:
        if len(self._added) + len(self._removed) <= RECENT_MAX:
            return
        merged = np.frombuffer(self._sorted, np.int64) if self._sorted else np.empty(0, np.int64)
        # The array is not sorted again: for a million names that would block the event loop.
        merged = np.delete(merged, np.searchsorted(merged, np.array(list(self._removed), np.int64)))
        added = np.sort(np.array(list(self._added), np.int64))
        merged = np.insert(merged, np.searchsorted(merged, added), added)
        self._sorted = array("q", merged.tobytes())
        self._added.clear()
        self._removed.clear()


@dataclass(slots=True, eq=False)
class StoredNames:
    """The stored names of one directory that were read so far. `Dentries` owns it."""

    complete: bool
    """the directory was read to its end: names without a hash here do not exist"""
    after: bytes = b""
    """the last key that was read"""
    newest: int = 0
    """largest version of the records that were read"""
    hashes: HashSet = field(default_factory=HashSet)

    def contain(self, names: Sequence[bytes]) -> list[bool]:
        """For each name: False: it does not exist (if ``complete``); True: some name with its hash does."""
        return self.hashes.contain(list(map(hash, names)))

    def learn(self, keys: Iterable[bytes], newest: int, *, last: bool) -> None:
        """Add the next page of the directory, as it is in the store now. ``newest``: largest version of its records.
        ``last``: it is the last one."""
        for key in sorted(keys):
            self.hashes.add(hash(schema.split_entry_key(key)[2]))
            self.after = key
        self.newest = max(self.newest, newest)
        self.complete = last
