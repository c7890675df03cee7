"""Frees unreachable files that have more records than one commit may have, in several commits.

Such a file has an orphan record and chunk records: each commit frees some chunk records, the last one the orphan
record. So a crash between two commits leaves a smaller orphan, for the next mount.
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
"""pause after a failed commit"""


@dataclass
class Removal:
    """Frees large files in several commits. `Nameless` owns it. ``reap``: frees an inode that fits into one commit."""

    core: Core
    journal: Journal
    chunks: Chunks
    reap: Callable[[Node], None]

    def __post_init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self._work = trio.Event()

    def is_large(self, node: Node) -> bool:
        """The inode has more records than a commit should free beside others. All its chunks must be in memory."""
        count_max = self.journal.chunk_count_max
        count = len(node.chunks) - schema.INLINE_CHUNKS + len(node.xattr_names)
        return count > count_max and len(list_far_chunks(node)) + len(node.xattr_names) > count_max

    def begin_freeing(self, node: Node) -> None:
        """Begin to free a large inode without names and handles. No caller can read its bytes any more."""
        node.reaped = True
        self.core.unnamed.pop(node.ino, None)
        self._waiting[node] = None
        self._work.set()

    async def run(self) -> None:
        """Free the waiting inodes, until cancelled; may be restarted."""
        self._work.set()
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._waiting:
                node = next(iter(self._waiting))
                try:
                    await self.free_in_pieces(node)
                except EngineError as error:
                    log.warning("freeing the removed inode %d failed and is tried again: %s", node.ino, error)
                    await trio.sleep(RETRY_SECONDS)
                    continue
                del self._waiting[node]

    async def free_in_pieces(self, node: Node) -> None:
        """Free everything of an inode without names and handles. After a crash or EngineError it is still an orphan."""
        await self.journal.commit(node)  # now the store knows it as an orphan
        count = self.journal.chunk_count_max
        while self.is_large(node):
            attributes = sorted(node.xattr_names)[:count]
            node.xattr_names -= frozenset(attributes)
            node.extra.update({schema.xattr_key(node.ino, name): None for name in attributes})
            for index in list_far_chunks(node)[-(count - len(attributes)) :] if len(attributes) < count else []:
                self.chunks.drop_chunk(node, index)
                node.extra[schema.chunk_key(node.ino, index)] = None
                del node.chunks[index]
            node.dirty_chunks = frozenset()
            self.journal.pending.add_gone(node)
            await self.journal.commit(node)
        self.reap(node)
        await self.journal.commit(node)


def list_far_chunks(node: Node) -> list[int]:
    """Chunks with records of their own."""
    return sorted(index for index in node.chunks if index >= schema.INLINE_CHUNKS)
