"""Lets clients search for blocks by themselves: which blocks the index of a read class shows when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import trio

from kvfuse.errors import EngineError, OperationError
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import PATH_DEPTH_MAX, Core
from kvfuse.volume.inodes.dentries import all_places
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages
from kvfuse.volume.tier.name_filter import NAMES_MAX
from kvfuse.volume.tier.resident_indexes import BlockIndex, Touches
from kvfuse.volume.tier.shared_tier import ReadClass
from kvfuse.volume.views.ancestors import Ancestors

log = logging.getLogger(__name__)

PAGE_ROWS = 1000
PLACES_AT_ONCE = 8192
"""of the table of names, looked at in one go"""


@dataclass
class OwnSearch:
    """Of one membership (`api.SearchApi`). Event loop only."""

    core: Core
    lookup: Lookup

    async def ancestors(self, directory: int) -> tuple[Ancestors, Sequence[Node]]:
        while True:
            nodes = [await self.lookup.find_directory(directory)]
            while nodes[-1].ino != ROOT_INODE and len(nodes) < PATH_DEPTH_MAX:
                nodes.append(await self.lookup.find_directory(nodes[-1].parent))
            if all(node.parent == above.ino for node, above in pairwise(nodes)):  # also now, after all waits
                break
        above = nodes[1:]
        return self.core.namespaces.gates.ancestors.settle(directory, [node.ino for node in above]), above

    def open(self, readers: ReadClass, ancestors: Ancestors) -> Touches | None:
        rows = [row for row in self.core.tier.blocks_of(readers) if self._means(readers.directory, *row[:2])]
        return self.core.tier.residents.open(readers, rows, ancestors)

    async def read_names(self, readers: ReadClass) -> None:
        """While names are read, those that come are noted by the table of names (`Dentries.note`).

        **Names of other hosts**, where no lookup asks the store, as the watch tells it all: a name whose event came
        before the index began to take names was committed before, so the scan sees it, or its end. Events that come
        later add it, as do answers of the store that overtake the watch, each before a lookup could find it by them.
        What lookups could find before, and may find until the watch tells of its end, is in the table of names. When
        the watch breaks, filters are given up before the first lookup asks; before lookups trust the next one all
        indexes end. When the folder is made strict its indexes end: the index keeps its node, and so it hears that.
        """
        residents, directory = self.core.tier.residents, readers.directory
        try:
            folder = await self.lookup.find_directory(directory)
        except OperationError:
            return  # whoever asks for a block gets this error
        if self.lookup.must_ask(directory) or (index := residents.begin_names(readers, folder)) is None:
            return
        are_all = False
        try:
            are_all = await self._add_known(index, directory) and await self._add_stored(index, directory)
        except EngineError as error:
            log.warning("clients ask for every block of folder %d that they do not see: %s", directory, error)
        finally:
            residents.end_names(index, are_all=are_all)

    async def _add_known(self, index: BlockIndex, directory: int) -> bool:
        """Add names of which the store may not say that they are there. False: the index has ended."""
        residents, dentries = self.core.tier.residents, self.core.dentries
        goes_on = residents.add_names(index, list(dentries.changes_in(directory)))
        if self.lookup.is_memory_newest:
            return goes_on
        places = all_places(dentries)
        for start in range(0, len(places), PLACES_AT_ONCE):
            here = [name for parent, name in places[start : start + PLACES_AT_ONCE] if parent == directory]
            goes_on = residents.add_names(index, here)
            await trio.lowlevel.checkpoint()
        return goes_on

    async def _add_stored(self, index: BlockIndex, directory: int) -> bool:
        """False: the index has ended, or there are too many names. EngineError."""
        residents, count = self.core.tier.residents, 0
        async for rows, damaged in ScanPages(self.core.records, schema.entry_prefix(directory), PAGE_ROWS):
            names = [schema.split_entry_key(key)[2] for key in (*(row.key for row in rows), *damaged)]
            count += len(names)
            if count > NAMES_MAX:
                residents.doubt_names(index)
            if not residents.add_names(index, names):
                return False
            await trio.lowlevel.checkpoint()
        return True

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
