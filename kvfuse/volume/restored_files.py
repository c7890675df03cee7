"""Restores handles that clients have open since a former daemon, see `views.handover`."""

from __future__ import annotations

import logging

import trio

from kvfuse import errors
from kvfuse.volume.api import Caller
from kvfuse.volume.blocks.block_files import BlockHandle
from kvfuse.volume.blocks.block_numbers import is_block
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.parts import Parts

log = logging.getLogger(__name__)


class RestoredFiles:
    """Implements `api.RestoredFilesApi`. Each membership has one."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._lookups, self._coherence = parts.core, parts.lookups, parts.coherence
        handover = self._handover = parts.core.nodes.handover
        self._blocks = parts.block_names.files if parts.block_names is not None else None
        self.ring_files, self.movers = handover.ring_files, handover.movers

    async def load(self, ino: int) -> None:
        if self._blocks is not None and ino in self._blocks.sketches.by_ino:
            return
        if is_block(ino):
            if self._blocks is None or ((before := self._handover.still_open.get(ino)) is not None and before.writers):
                raise errors.Stale(f"block {ino:#x} was being written")
            await self._blocks.keep_restored(ino)
            return
        node = await self._lookups.find_node(ino)
        if not node.nlink and node.handles and self._coherence is not None:
            self._coherence.hold(node)

    def take_over(self, ino: int, flags: int, caller: Caller) -> FileHandle | BlockHandle:
        if self._blocks is not None and (sketch := self._blocks.restore_sketch(ino, flags, caller)) is not None:
            self._took_block(ino, writable=sketch.writable)
            return sketch
        if is_block(ino) and self._blocks is not None:
            handle = self._blocks.restore(ino, flags, caller)
            self._took_block(ino, writable=False)
            return handle
        node = self._core.nodes.get(ino)
        assert node is not None, f"inode {ino} is not loaded"
        file = FileHandle(node, flags, caller)
        self._uncount(node, writable=file.writable)
        if self._coherence is not None:
            self._coherence.taken_over(file)
        return file

    def give_up(self, ino: int, *, writable: bool) -> None:
        node = self._core.nodes.get(ino)
        if node is not None:
            self._uncount(node, writable=writable)
        else:
            self._took_block(ino, writable=writable)

    async def close_unknown(self, ino: int) -> None:
        if self._blocks is not None:
            await self._blocks.close_unknown(ino)

    def _took_block(self, ino: int, *, writable: bool) -> None:
        """One handle fewer waits; also for an inode that is not in memory."""
        self._handover.took(ino, writable=writable)
        if self._blocks is not None and ino not in self._handover.still_open:
            self._blocks.all_restored(ino)

    def _uncount(self, node: Node, *, writable: bool) -> None:
        """Uncount the handle, which the node has counted since it was loaded."""
        node.handles -= 1
        node.writers -= writable
        self._handover.took(node.ino, writable=writable)

    async def load_all(self) -> None:
        """Load all, so that no caller takes an open file for a closed one. Runs in the background of a start."""
        for ino in list(self._handover.still_open):
            if ino in self._handover.still_open:
                try:
                    await self.load(ino)
                except errors.OperationError as error:
                    log.info("inode %d is open, and cannot be read: %s", ino, error)
            await trio.lowlevel.checkpoint()
