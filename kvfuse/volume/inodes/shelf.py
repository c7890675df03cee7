"""Stored records of names that nobody here has asked for yet: what pages of folders and the watch brought anyway.

A lookup in a relaxed folder takes the record from here instead of asking the store. It is there as long as it is what
the store has: everything that says what a name means, by this host's doing or another's, goes through `KnownNames`,
and takes the record away. So does what comes while a page is on its way, of the names that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvfuse.remote.records.api import Record, Versioned
from kvfuse.volume.store import schema

RECORDS_MAX = 16_384
"""Records kept, of some hundred bytes each."""


class Page:
    """Rows of a folder that are being read."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.changed: set[tuple[int, bytes]] = set()
        """names of which news came meanwhile: what was read may be older"""
        self.is_void = False
        """everything that is known was given up meanwhile"""

    def keep(self, rows: Sequence[Record]) -> None:
        """These are the rows."""
        if self.is_void:
            return
        for row in rows:
            parent, _, name = schema.split_entry_key(row.key)
            if (parent, name) not in self.changed:
                self._shelf.put(parent, name, row.value, row.version)


class Shelf:
    """Records that arrived before a lookup wanted them; the core owns it. It never waits."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self.records_max = records_max
        self._records: dict[tuple[int, bytes], Versioned] = {}
        """the oldest first"""
        self._pages: list[Page] = []

    def __len__(self) -> int:
        return len(self._records)

    def put(self, parent: int, name: bytes, value: bytes, version: int) -> None:
        """The store has this record of a name. Only such that are the inode's, too, are worth keeping."""
        if not schema.is_inline(value):
            return
        if len(self._records) >= self.records_max:
            del self._records[next(iter(self._records))]
        self._records[parent, name] = Versioned(value, version)

    def take(self, parent: int, name: bytes) -> Versioned | None:
        """The record of a name; from now on the inode in memory is what is known of it."""
        return self._records.pop((parent, name), None)

    def drop(self, parent: int, name: bytes) -> None:
        """Something was said of what the name means: what is here may be older."""
        self._records.pop((parent, name), None)
        for page in self._pages:
            page.changed.add((parent, name))

    def clear(self) -> None:
        self._records.clear()
        for page in self._pages:
            page.is_void = True

    @contextmanager
    def reading(self) -> Iterator[Page]:
        """A page of a folder is being read; `Page.keep` shelves it."""
        page = Page(self)
        self._pages.append(page)
        try:
            yield page
        finally:
            self._pages.remove(page)
