"""Reads directories page by page after a miss, so that later lookups need no round trip.

A page adds hashes of names to `StoredNames`. On a shared volume the entries of the names also keep the page's records
(`Shelf`): so a host reads a directory that others filled with one round trip for many names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kvfuse import errors
from kvfuse.remote.records.api import Record, Versioned
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import NAMES_MAX
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import scan_page

LEARN_ROWS = 256
"""Entries read from a directory at each miss, until all are known."""
LEARN_ROWS_MAX = 2048
"""The same at the most with a remote store, to save round trips."""
SHELVED_MAX = NAMES_MAX // 4
"""Largest directory whose records are kept: of a larger one most would be evicted before use."""


@dataclass
class _DirectoryPage:
    """A page that is being read."""

    done: trio.Event = field(default_factory=trio.Event)
    error: errors.EngineError | None = None


@dataclass
class Learning:
    """Reads pages of directories, one at a time for each. `Lookup` owns it. ``keep``: `Shelf.keep_records`."""

    core: Core
    journal: Journal
    rows_max: int = LEARN_ROWS
    """each page is as large as all pages before it, up to this"""
    keep: Callable[[int, list[Record], set[bytes]], None] = lambda directory, rows, changed: None

    def __post_init__(self) -> None:
        self._pages: dict[int, _DirectoryPage] = {}
        """directory -> its page"""

    async def read_page(self, directory: int, row_count: int = LEARN_ROWS) -> None:
        """Read the next page of a directory, if it has one. Skips names that change meanwhile.

        A caller that misses a name while a page is being read waits for that page, and gets its error.
        """
        page = self._pages.get(directory)
        if page is not None:
            await page.done.wait()
            if page.error is not None:
                raise page.error
            return
        dentries, epoch = self.core.dentries, self.journal.pending.epoch
        stored = dentries.stored_in(directory)
        if stored.complete:
            return
        prefix, row_count = schema.entry_prefix(directory), max(row_count, min(len(stored.hashes), self.rows_max))
        page = self._pages[directory] = _DirectoryPage()
        try:
            with dentries.reading(directory) as changed:
                rows, damaged = await scan_page(self.core.records, prefix, stored.after, row_count)
                if epoch != self.journal.pending.epoch or dentries.stored_in(directory) is not stored:
                    return  # a commit was settled meanwhile, or all that is known of the directory was forgotten
                keys, newest = [*[row.key for row in rows], *damaged], max([row.version for row in rows], default=0)
                stored.learn(keys, newest, last=len(keys) < row_count)
                self.keep(directory, rows, changed)
        except errors.EngineError as error:
            page.error = error
            raise
        finally:
            del self._pages[directory]
            page.done.set()


@dataclass
class Shelf:
    """Keeps the records of pages for later lookups in a shared volume. `SharedLookup` owns it."""

    core: Core
    refresher: Refresher

    def is_worth_reading(self, directory: int) -> bool:
        """Reading a page of the directory is likely to answer a lookup in it, and later ones."""
        stored = self.core.dentries.stored_in(directory)
        return not stored.complete and len(stored.hashes) < SHELVED_MAX

    def keep_records(self, directory: int, rows: list[Record], changed: set[bytes]) -> None:
        """Keep the records of a page. ``changed``: names that changed while it was read.

        The watch may not have delivered some of these names yet.
        """
        names = [schema.split_entry_key(row.key)[2] for row in rows]
        self.core.dentries.names_come(directory)
        for name, row in zip(names, rows, strict=True):
            if name not in changed:
                self.core.dentries.shelve(directory, name, Versioned(row.value, row.version))

    def take_record(self, directory: int, name: bytes) -> Node | None:
        """The inode of a name from a kept record; None: the caller has to read the store."""
        dentry = self.core.dentries.get(directory, name)
        row, version = dentry.record, dentry.version
        if row is None:
            return None
        self.core.dentries.drop_record(directory, name)
        if row.version < version:
            return None
        record = schema.decode_entry(row.value)
        assert isinstance(record, schema.InodeRecord)
        node = self.refresher.take(record, row.version, (directory, name), own=False)
        if node.own_record or node.version != row.version:
            return None
        self.core.dentries.note(directory, name, node.ino, row.version)
        return node
