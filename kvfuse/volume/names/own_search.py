"""Lets clients search for blocks by themselves: which blocks the index of a read class shows when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from kvfuse.volume.inodes.core import Core
from kvfuse.volume.views.resident import Touches
from kvfuse.volume.views.tier import ReadClass


@dataclass
class OwnSearch:
    """Of one membership (`api.SearchApi`). Event loop only."""

    core: Core

    def open(self, readers: ReadClass) -> Touches | None:
        rows = [row for row in self.core.tier.blocks_of(readers) if self._means(readers.directory, *row[:2])]
        return self.core.tier.residents.open(readers, rows)

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
