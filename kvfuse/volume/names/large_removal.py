"""Files that nobody can ask for any more, and that have more records than one commit may carry: taken apart in pieces.

What is left of such a file stands in its orphan record and its chunk records: each piece frees some of them, the last
one the orphan record. So a crash between two pieces leaves a smaller orphan, for the next mount.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""after a commit that failed"""


@dataclass
class Removal:
    """See the module. ``reap`` frees what is left at once, when that is little."""

    core: Core
    journal: Journal
    chunks: Chunks
    reap: Callable[[Node], None]

    def __post_init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self._work = trio.Event()

    def is_large(self, node: Node) -> bool:
        """More records go with the inode than a commit should carry beside others. Everything must be loaded."""
        count_max = self.journal.chunk_count_max
        count = len(node.chunks) - schema.INLINE_CHUNKS + len(node.xattr_names)
        return count > count_max and len(far_chunks(node)) + len(node.xattr_names) > count_max

    def begin(self, node: Node) -> None:
        """Take a large inode apart that has no names, and no handles. Nobody gets at its bytes any more."""
        node.reaped = True
        self.core.unnamed.pop(node.ino, None)
        self._waiting[node] = None
        self._work.set()

    async def run(self) -> None:
        """Take apart what is waiting, for ever."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._waiting:
                node = next(iter(self._waiting))
                try:
                    await self.take_apart(node)
                except EngineError as error:
                    log.warning("inode %d is not wholly removed yet: %s", node.ino, error)
                    await trio.sleep(RETRY_SECONDS)
                    continue
                del self._waiting[node]

    async def take_apart(self, node: Node) -> None:
        """Free everything of an inode without names and handles. A crash, or an error, leaves it an orphan."""
        await self.journal.commit(node)  # now the store knows it as an orphan
        count = self.journal.chunk_count_max
        while self.is_large(node):
            attributes = sorted(node.xattr_names)[:count]
            node.xattr_names -= frozenset(attributes)
            node.extra.update({schema.xattr_key(node.ino, name): None for name in attributes})
            for index in far_chunks(node)[-(count - len(attributes)) :] if len(attributes) < count else []:
                self.chunks.drop_chunk(node, index)
                node.extra[schema.chunk_key(node.ino, index)] = None
                del node.chunks[index]
            node.dirty_chunks = frozenset()
            self.journal.pending.left(node)
            await self.journal.commit(node)
        self.reap(node)
        await self.journal.commit(node)


def far_chunks(node: Node) -> list[int]:
    """Chunks with records of their own."""
    return sorted(index for index in node.chunks if index >= schema.INLINE_CHUNKS)
