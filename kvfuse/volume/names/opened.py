"""Finds files to open by their inode, after the kernel's lookup of the name; publishes files for other hosts' opens."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvfuse import errors
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.path_beliefs import Moved, PathStep
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)


@dataclass
class Opened:
    """Opens files of a volume that one host has."""

    lookups: Lookup

    async def find_file(self, ino: int) -> Node:
        """The node of a file to open, with everything that another host synced before. Stale, EngineError."""
        return await self.lookups.find_current(ino)

    async def publish(self, directory: int) -> None:
        """Return when other hosts see the stored state of a directory's files at their next open."""


@dataclass
class SharedOpened(Opened):
    """Opens files of a shared volume."""

    lookups: SharedLookup

    async def find_file(self, ino: int) -> Node:
        try:
            return await self._find_current(ino)
        except Moved:
            raise
        except errors.Stale:
            if (removed := await self._find_removed(ino)) is None:
                raise
            return removed

    async def _find_removed(self, ino: int) -> Node | None:
        """A file that lost its name after the same call's lookup of it: treated as if it had been open before.

        The kernel walks a path twice at most, and other hosts may replace a file between lookup and open each time. It
        looks a name up in each call in strict folders; and in its second walk, if the name was found to be wrong.
        """
        parent, name = self.lookups.core.places.get(ino) or (0, b"")
        if not name:
            return None
        if not (self.lookups.must_ask(parent) or self.lookups.paths.is_contested(parent, name)):
            self.lookups.paths.lose_name(PathStep(parent, name, ino))
            return None
        (row,) = await self.lookups.core.records.get([schema.orphan_key(ino)])
        if row is None or self.lookups.core.nodes.get(ino) is not None:
            return self.lookups.core.nodes.get(ino)
        record = schema.decode_orphan(row.value)
        node = self.lookups.refresher.chunks.restore_chunks(Node.from_record(record), record)
        node.nlink, node.version, node.base = 0, row.version, record
        return self.lookups.core.nodes.add(node)

    async def _find_current(self, ino: int) -> Node:
        node = await self.lookups.find_current(ino)
        if self._is_watched_alone(node) and not await self.lookups.synced.is_sure() and self._is_watched_alone(node):
            try:
                await self.lookups.refresher.renew(node)
            except errors.Stale:
                if node.handles:
                    return node  # a descriptor means the inode, whatever its names are
                self.lookups.paths.lose_name(PathStep(node.parent, node.name, ino))
                raise Moved(f"{node.name!r} in directory {node.parent} is not inode {ino} any more") from None
            except errors.EngineError as error:
                log.info("inode %d is opened as it is known here: %s", ino, error)
            node = await self.lookups.find_node(ino)
        await self.lookups.refresher.news.told_of(ino)
        return node

    async def publish(self, directory: int) -> None:
        node = self.lookups.core.nodes.get(directory)
        if node is None or not self.lookups.is_strict(node):
            await self.lookups.synced.publish()

    def _is_watched_alone(self, node: Node) -> bool:
        """Only the watch reports other hosts' changes of the file, and nothing is changed here."""
        change = self.lookups.core.dentries.get(node.parent, node.name).change
        return (
            not self.lookups.must_ask(node.parent)
            and node.version > 0
            and node.nlink > 0
            and change is None
            and is_quiet(node)
        )


def make_opened(lookups: Lookup) -> Opened:
    """Make the one that fits ``lookups``."""
    return SharedOpened(lookups) if isinstance(lookups, SharedLookup) else Opened(lookups)
