"""Finds the directories above a directory, whose changes concern who may use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import PATH_DEPTH_MAX, Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.views.ancestors import Ancestors


@dataclass
class AncestorSearch:
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
