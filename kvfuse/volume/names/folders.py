"""Finds the folders of namespaces, and keeps their nodes and those above in memory: so their paths are known."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

log = logging.getLogger(__name__)


def number_of(node: Node) -> int | None:
    """The namespace whose folder this is; None for every other inode."""
    if node.ino == ROOT_INODE:
        return ROOT
    return node.ino if node.namespace == node.ino else None


def has_other_token(core: Core, number: int, settings: Settings) -> bool:
    """A namespace is about to get another token than it has, if it exists."""
    former = core.namespaces.all.get(number)
    return settings.token != (former.stored.token if former is not None else "")


def end_access(core: Core, node: Node | None) -> None:
    """End the access of a folder's users, to directories below it, too, before it gets another token.

    ``node`` None: it is not in memory, so none of those is in use.
    """
    if node is not None:
        core.readers_change(node)


def close_mode(mode: int) -> int:
    """The mode of a folder that gets a token: only the owner may enter."""
    return mode & ~0o077


def end_namespace(core: Core, node: Node) -> None:
    """End the folder's namespace with the folder's next commit."""
    if has_other_token(core, node.ino, Settings()):
        end_access(core, node)
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
        nodes = self.hold_path(number)
        return b"/" + b"/".join([node.name for node in reversed(nodes)]) if nodes is not None else b"#%d" % number

    def hold_path(self, number: int) -> list[Node] | None:
        """Keep the folder and those above it in memory, and return them; None while they are not known."""
        nodes: list[Node] = []
        ino = number or ROOT_INODE
        while ino != ROOT_INODE:
            node = self.core.nodes.get(ino)
            if node is None or not node.name:
                return None
            nodes.append(node)
            ino = node.parent or ROOT_INODE
        self._held[number] = nodes
        there = self.core.namespaces.all
        if len(self._held) > len(there):
            self._held = {number: nodes for number, nodes in self._held.items() if number in there}
        return nodes

    def count_owned_by(self, uid: int) -> int:
        """Number of namespaces whose folders the user owns."""
        held = [nodes for number, nodes in self._held.items() if number in self.core.namespaces.all]
        return sum([bool(nodes) and nodes[0].uid == uid for nodes in held])

    async def find_all(self) -> None:
        """Find the folders of all namespaces, once, after the volume was opened."""
        nodes = await self._load_nodes(set(self.core.namespaces.all) - {ROOT})
        self._held.update({node.ino: [node] for node in nodes})
        level = nodes
        while level:
            await self._find_names([node for node in level if not node.name])
            level = await self._load_nodes({node.parent for node in level} - {ROOT_INODE})
            nodes += level  # held until their paths are known
        for number in list(self._held):
            self.hold_path(number)

    async def _load_nodes(self, inos: set[int]) -> list[Node]:
        nodes = []
        for ino in sorted(inos):
            try:
                nodes.append(await self.lookups.find_node(ino))
            except errors.OperationError as error:
                log.warning("the folder of a namespace is not found: %s", error)
        return nodes

    async def _find_names(self, nodes: list[Node]) -> None:
        """Find names of directories. Inodes do not have them: this reads all names of the directories above."""
        wanted = {schema.encode_entry_reference(node.ino): node for node in nodes}
        for parent in {node.parent for node in nodes}:
            try:
                async for rows, _ in ScanPages(self.core.records, schema.entry_prefix(parent)):
                    for row in rows:
                        node = wanted.get(row.value)
                        if node is not None and not node.name:  # else a call has looked it up, or renamed it
                            node.name = schema.split_entry_key(row.key)[2]
            except errors.EngineError as error:
                log.warning("names of directory %d are not read, of namespaces in it: %s", parent, error)
