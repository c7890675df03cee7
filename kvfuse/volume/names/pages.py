"""Pages of folders in which a name was missed, so that the next ones need not be asked for.

A page tells which names there are (`KnownNames`). Where other hosts write the store, too, it is kept on the shelf as
well: whoever comes to a folder that others filled reads it in pages, not by one question for each name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from kvfuse import errors
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.shelf import RECORDS_MAX
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import scan_page

LEARN_ROWS = 256
"""Entries read from a directory each time that a name is missed in it, until all are known."""
LEARN_ROWS_MAX = 2048
"""Where the store is remote a page is as large as what was read before it, up to this: its round trips count."""
SHELVED_MAX = RECORDS_MAX // 2
"""Names of a folder that are read for the sake of their records: of a larger one most would be gone before use."""


@dataclass
class _Page:
    """One that is being read."""

    done: trio.Event = field(default_factory=trio.Event)
    error: errors.EngineError | None = None


@dataclass
class Learning:
    """See the module."""

    core: Core
    journal: Journal
    refresher: Refresher

    def __post_init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        """by directory"""

    def pays(self, directory: int) -> bool:
        """A name is to be asked for: to read a page of its folder instead is likely to answer this one, and more."""
        known = self.core.known
        return known.next_page(directory) is not None and known.count(directory) < SHELVED_MAX

    async def read_page(self, directory: int, row_count: int = LEARN_ROWS) -> None:
        """Read the next page of a directory, if there is one. What changes meanwhile is asked for later.

        Who comes while one is being read waits for it, and for its error: all who miss names side by side take one.
        """
        page = self._pages.get(directory)
        if page is not None:
            await page.done.wait()
            if page.error is not None:
                raise page.error
            return
        page = self._pages[directory] = _Page()
        try:
            await self._read_page(directory, row_count)
        except errors.EngineError as error:
            page.error = error
            raise
        finally:
            del self._pages[directory]
            page.done.set()

    async def _read_page(self, directory: int, row_count: int) -> None:
        known = self.core.known
        after = known.next_page(directory)
        if after is None:
            return
        if self.core.shared:
            row_count = max(row_count, min(known.count(directory), LEARN_ROWS_MAX))
        epoch = self.journal.pending.epoch
        with known.shelf.reading() as page:
            rows, damaged = await scan_page(self.core.records, schema.entry_prefix(directory), after, row_count)
            if epoch == self.journal.pending.epoch and known.next_page(directory) == after:
                keys = sorted([row.key for row in rows] + damaged)
                known.learn(directory, keys, last=len(keys) < row_count)
                if self.core.shared:
                    page.keep(rows)

    def shelved(self, directory: int, name: bytes) -> Node | None:
        """The inode that a name means by a record that came before anybody asked for it; None: it has to be asked."""
        known = self.core.known
        row = known.shelf.take(directory, name)
        if row is None or row.version < known.version(directory, name):
            return None
        record = schema.decode_entry(row.value)
        assert isinstance(record, schema.InodeRecord)
        node = self.refresher.take(record, row.version, (directory, name), own=False)
        if node.own_record or node.version != row.version:
            return None
        known.note(directory, name, node.ino, row.version)
        return node
