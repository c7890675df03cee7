"""The folders of namespaces. Their nodes, and those above, stay in memory: so their paths are known."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

log = logging.getLogger(__name__)


def number_of(node: Node) -> int | None:
    """The namespace whose folder this is; None for every other inode."""
    if node.ino == ROOT_INODE:
        return ROOT
    return node.ino if node.namespace == node.ino else None


def end_namespace(core: Core, node: Node) -> None:
    """The folder is no namespace any more, from its next commit on."""
    core.namespaces.remove(node.ino)
    node.extra[schema.namespace_key(node.ino)] = node.extra[schema.use_key(node.ino, 0)] = None


@dataclass
class Folders:
    """The folders of one membership's namespaces."""

    core: Core
    lookups: Lookup
    _held: dict[int, list[Node]] = field(default_factory=dict)
    """namespace -> its folder and those above"""

    def path_of(self, number: int) -> bytes:
        """The path of a namespace's folder from the root on; "#NUMBER" while that is not known."""
        nodes = self.hold(number)
        return b"/" + b"/".join([node.name for node in reversed(nodes)]) if nodes is not None else b"#%d" % number

    def hold(self, number: int) -> list[Node] | None:
        """The folder and those above it, which stay in memory from here on; None while they are not known."""
        nodes: list[Node] = []
        ino = number or ROOT_INODE
        while ino != ROOT_INODE:
            node = self.core.nodes.get(ino)
            if node is None or not node.name:
                return None
            nodes.append(node)
            ino = node.parent or ROOT_INODE
        self._held[number] = nodes
        return nodes

    def let_go(self, number: int) -> None:
        """There is no such namespace any more."""
        self._held.pop(number, None)

    async def find(self) -> None:
        """Find the folders of all namespaces, once, after the volume was opened.

        An inode's record does not have its name, so names of those above are read until the right one is found.
        """
        for number in list(self.core.namespaces.all):
            nodes: list[Node] = []
            try:
                node = await self.lookups.node(number or ROOT_INODE)
                while node.ino != ROOT_INODE:
                    nodes.append(node)
                    await self._find_name(node)
                    node = await self.lookups.node(node.parent or ROOT_INODE)
            except errors.OperationError as error:
                log.warning("the folder of namespace %d is not found: %s", number, error)
            self._held[number] = nodes

    async def _find_name(self, node: Node) -> None:
        reference = schema.encode_entry_reference(node.ino)
        pages = ScanPages(self.core.records, schema.entry_prefix(node.parent))
        while not node.name:
            try:
                rows, _ = await anext(pages)
            except StopAsyncIteration:
                raise errors.Stale(f"directory {node.ino} has no name in directory {node.parent}") from None
            names = [schema.split_entry_key(row.key)[2] for row in rows if row.value == reference]
            node.name = node.name or b"".join(names[:1])
