"""Lets clients search for blocks by themselves: which blocks the index of a read class shows when it is opened."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages
from kvfuse.volume.views.resident import Touches
from kvfuse.volume.views.tier import ReadClass

log = logging.getLogger(__name__)

PAGE_ROWS = 1000
NAMES_MAX = 1 << 18
"""of a directory; to read more takes too long"""


@dataclass
class OwnSearch:
    """Of one membership (`api.SearchApi`). Event loop only."""

    core: Core

    def open(self, readers: ReadClass) -> Touches | None:
        rows = [row for row in self.core.tier.blocks_of(readers) if self._means(readers.directory, *row[:2])]
        return self.core.tier.residents.open(readers, rows)

    async def read_names(self, readers: ReadClass) -> None:
        """While names are read, those that come are noted by the table of names (`Dentries.note`)."""
        residents, directory = self.core.tier.residents, readers.directory
        if self.core.client or (index := residents.begin_names(readers)) is None:
            return
        are_all, count = False, 0
        try:
            goes_on = residents.add_names(index, list(self.core.dentries.changes_in(directory)))
            async for rows, damaged in ScanPages(self.core.records, schema.entry_prefix(directory), PAGE_ROWS):
                names = [schema.split_entry_key(key)[2] for key in (*(row.key for row in rows), *damaged)]
                count += len(names)
                if not goes_on or count > NAMES_MAX:
                    return
                goes_on = residents.add_names(index, names)
                await trio.lowlevel.checkpoint()
            are_all = True
        except EngineError as error:
            log.warning("clients ask for every block of folder %d that they do not see: %s", directory, error)
        finally:
            residents.end_names(index, are_all=are_all)

    def _means(self, directory: int, name: bytes, ino: int) -> bool:
        """The name means the inode now.

        One that is not in memory has no other name: the tier drops blocks of files that are removed or linked here, and
        forgets the names of those that are renamed.
        """
        folder, node = self.core.nodes.get(directory), self.core.nodes.peek(ino)
        if folder is None or ino < self.core.namespaces.cleared.get(folder.namespace, 0):
            return False
        if node is None:
            return not self.core.client  # other hosts may have renamed it
        return node.nlink > 0 and node.parent == directory and node.name == name
