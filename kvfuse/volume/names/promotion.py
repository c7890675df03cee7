"""Brings blocks into the shared-memory tier: those that are prefetched, and those that are got again and again."""

from __future__ import annotations

from dataclasses import dataclass

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

    async def bring(self, node: Node, binding: Binding, readers: ReadClass) -> bool:
        """Read a file into the tier; whether that has it then. The content map will show it instead of slots."""
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
