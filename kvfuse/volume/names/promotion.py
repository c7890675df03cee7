"""Brings blocks into the shared-memory tier: those that are prefetched, and those that are got again and again."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from kvfuse.volume.api import Binding
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views.tier import ReadClass


@dataclass
class Promotion:
    """Of one membership. `Blocks` has it."""

    core: Core
    reader: Reader

    def __post_init__(self) -> None:
        self._coming: dict[int, trio.Event] = {}
        """inodes that are being read -> set when that has ended"""

    async def from_neighbours(self, binding: Binding) -> bool:
        """`api.NearApi`."""
        neighbours, node = self.core.reads.neighbours, self.core.nodes.get(binding.ino)
        if neighbours is None or node is None or node.ino in self.core.tier.kept:
            return False
        chunk = node.chunks.get(0)
        if chunk is None or chunk.staged is not None or not chunk.extents or chunk.extents[0].packing:
            return False
        return neighbours.may_have(chunk.extents[0].addr) and await self.bring(node, binding)

    async def if_wanted(self, binding: Binding) -> bool:
        """`api.NearApi`."""
        node = self.core.nodes.get(binding.ino)
        if node is None or not self.core.tier.is_wanted(node.ino):
            return False
        return node.ino in self.core.tier.kept or await self.bring(node, binding)

    async def bring(self, node: Node, binding: Binding) -> bool:
        """Read a file into the tier, once for all who ask meanwhile; whether that has it then."""
        if (coming := self._coming.get(node.ino)) is not None:
            await coming.wait()
            return node.ino in self.core.tier.kept
        self._coming[node.ino] = trio.Event()
        try:
            return await self._bring(node, binding, read_class(node))
        finally:
            self._coming.pop(node.ino).set()

    async def _bring(self, node: Node, binding: Binding, readers: ReadClass) -> bool:
        """The content map will show the block instead of slots."""
        if not node.size or node.own_record or not _is_quiet(node):
            return False
        if not self.core.namespaces.may_keep(node.namespace, "dram"):
            return False
        block = self.core.tier.allocate(node.size, readers)
        if block is None:
            return False
        version = binding.map.version
        await self.reader.read_into(node, 0, block.buffer.data)
        if not (binding.valid and binding.map.version == version and _is_quiet(node)):
            return False
        self.core.tier.keep(node.ino, block, binding.name)
        if node.map is not None:
            for index in list(node.map.rows):
                node.map.hide(index)
        return True


def _is_quiet(node: Node) -> bool:
    """No caller is changing the file's bytes over several awaits."""
    return not node.writers and node.lock is None


def read_class(node: Node) -> ReadClass:
    """The read class of a file, for its copy in the tier."""
    return ReadClass(node.parent, node.uid, node.gid, node.mode & 0o444)
