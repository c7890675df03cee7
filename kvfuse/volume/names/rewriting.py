"""Rewrites bytes to other slots: those that no sync vouches for since one failed (`inodes.doubt`), and those in slabs
that are given up.

It reads the bytes back and verifies them: the kernel's cache of them is right, whether they are on the disk or not. It
stages them as if a writer had written the file anew, so they get other slots, and the next commit frees the former
ones. An fsync does so with its file before it commits; a background task does the rest. Bytes that cannot be read back
are lost: each handle that has the file open for writing gets the error once, as on Linux; a descriptor whose fsync
failed has had it.

"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import numpy as np
import trio

from kvfuse import errors
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.content.writer import Staging
from kvfuse.volume.inodes.chunk import COMMITTED, Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node, locked
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.slots.space import RoomFinder, RoomWait
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages
from kvfuse.volume.views.health import SYNC

PAUSE_MIN, PAUSE_MAX = 0.5, 30.0
"""Seconds between two attempts in the background: after the first failure, and at most."""

log = logging.getLogger(__name__)


@dataclass
class Rewriter:
    """Rewrites bytes in doubt. One per membership."""

    core: Core
    journal: Journal
    lookup: Lookup
    reader: Reader
    staging: Staging
    space: RoomFinder

    async def rewrite_file(self, node: Node) -> None:
        """Stage a file's bytes in doubt again: its next commit has them. EngineError, NoSpace: not all are staged."""
        doubt = self.core.doubt
        if not (doubt.is_any and node.is_file):
            return
        async with locked(node):
            await self.reader.chunks.load_all(node)
            for index in list(node.chunks):
                try:
                    await self._rewrite_chunk(node, index, self._has_doubtful)
                except (errors.Corrupt, errors.MediumError) as error:
                    if (chunk := node.chunks.get(index)) is not None:
                        doubt.lost.update([extent.generation for extent in chunk.extents])
                    doubt.lose(node, errors.MediumError(str(error)))
            doubt.renewed(node.ino)

    def _has_doubtful(self, node: Node, chunk: Chunk) -> bool:
        """The loss of some was found before, and reported."""
        is_lost = any(extent.generation in self.core.doubt.lost for extent in chunk.extents)
        return self.core.doubt.covers(node.ino, [chunk]) and not is_lost

    async def move_all(self, first: int) -> None:
        """Move bytes of files with names, and of open ones, out of all slots at or behind an address. EngineError,
        NoSpace; Corrupt, MediumError: bytes of a file are damaged."""

        def has_going(node: Node, chunk: Chunk) -> bool:
            return any(extent.addr >= first for extent in chunk.extents)

        async def move(node: Node | None) -> None:
            if node is None or not node.is_file or node.nlink == 0:
                return
            async with locked(node):
                await self.reader.chunks.load_all(node)
                for index in list(node.chunks):
                    with suppress(errors.Stale):  # another host removed it
                        await self._rewrite_chunk(node, index, has_going)

        def is_wanted(record: schema.InodeRecord) -> bool:
            addrs = [row.addr for chunk in record.chunks for row in chunk]
            return bool(record.flags & schema.FLAG_CHUNK_RECORDS) or max(addrs, default=-1) >= first

        async with aclosing(self._find_names(is_wanted)) as names:
            async for parent, name in names:
                await move((await self.lookup.find_name(parent, name)).node)
        for node in list(self.core.nodes):
            await move(node)
        await self.journal.sync()

    async def _rewrite_chunk(self, node: Node, index: int, is_wanted: Callable[[Node, Chunk], bool]) -> None:
        """Rewrite a chunk; the caller has the node's lock. At each await writers may stage, cut or drop its bytes.

        Corrupt, MediumError: they cannot be read back.
        """
        wait: RoomWait | None = None
        while (chunk := node.chunks.get(index)) is not None and chunk.staged is None:
            extents = chunk.extents
            if not is_wanted(node, chunk):
                return
            buffer = np.empty(chunk.length, np.uint8).data
            await self.journal.flusher.wait_for_memory(node.namespace, len(buffer))
            await self._read_back(node, index, chunk, buffer)
            if chunk.staged is not None or chunk.extents is not extents or node.chunks.get(index) is not chunk:
                continue
            try:
                self._stage_copy(node, index, chunk, buffer)
            except errors.NoSpace as error:
                wait = await self.space.wait_for_room(wait, error.namespace)
                if wait is None:
                    raise

    async def _read_back(self, node: Node, index: int, chunk: Chunk, buffer: memoryview) -> None:
        for extent in chunk.extents:
            extent.verified = 0
        await self.reader.read_chunk(node, index, chunk, 0, buffer)

    def _stage_copy(self, node: Node, index: int, chunk: Chunk, buffer: memoryview) -> None:
        """Stage the bytes that were read back. NoSpace."""
        is_lost = self.core.doubt.covers(node.ino, [chunk]) and not all(extent.checksums for extent in chunk.extents)
        node.changing(index)
        self.staging.stage_copy(node, chunk, buffer)
        self.journal.pending.touch(node, forced=True)
        if is_lost:  # no checksum says whether these bytes were written last
            error = errors.MediumError(f"inode {node.ino}: a sync failed, bytes written in place may be lost")
            self.core.doubt.lose(node, error)

    # -- in the background ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Rewrite all bytes that fall into doubt, until cancelled."""
        pause = PAUSE_MIN
        while True:
            await self.core.doubt.arose.wait()
            try:
                await self.rewrite_all()
                pause = PAUSE_MIN
            except (errors.EngineError, errors.OperationError) as error:
                log.warning("bytes that a failed sync left in doubt are not yet written again: %s", error)
                await trio.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX)

    async def rewrite_all(self) -> None:
        """Return when a sync vouches again for all that was in doubt at the call. EngineError, NoSpace."""
        doubt = self.core.doubt
        if not doubt.is_any:
            return
        doubted, inodes, refusal = doubt.all, 0, None

        async def rewrite(node: Node | None) -> bool:
            nonlocal refusal
            try:
                if is_wanted := node is not None and node.nlink > 0:
                    await self.rewrite_file(node)
            except errors.NoSpace as error:  # other files are not to wait for this one's room
                refusal = error
            return is_wanted

        await self._rewrite_headers()
        async with aclosing(self._find_names(self._is_doubtful)) as names:
            async for parent, name in names:
                inodes += await rewrite((await self.lookup.find_name(parent, name)).node)
        for node in list(self.core.nodes):
            await rewrite(node)
        await self.journal.sync()
        if refusal is not None:
            raise refusal
        if doubt.settled(doubted):
            self.core.health.worked(SYNC)
            self.core.segments.drop_cache()
            log.warning("bytes of %d files that a failed sync left in doubt were written again, and are synced", inodes)

    async def _rewrite_headers(self) -> None:
        """Rewrite headers of segments that may have been made since the last good sync: a mount needs them."""
        made = {info.segment for info in await self.core.segments.list()} & set(range(self.core.geometry.segment_count))
        self.core.made_segments -= made
        await self.core.make_segments(made)

    async def _find_names(
        self, is_wanted: Callable[[schema.InodeRecord], bool]
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield (directory, name) of stored files that are wanted."""
        references: dict[int, tuple[int, bytes]] = {}
        async for rows, _ in ScanPages(self.core.records, b"d"):
            for row in rows:
                parent, _, name = schema.split_entry_key(row.key)
                entry = schema.decode_entry(row.value)
                if isinstance(entry, int):
                    references[entry] = parent, name
                elif is_wanted(entry):
                    yield parent, name
        async for rows, _ in ScanPages(self.core.records, b"i"):
            for row in rows:
                record = schema.decode_inode(row.value)
                if record.ino in references and is_wanted(record):
                    yield references[record.ino]

    def _is_doubtful(self, record: schema.InodeRecord) -> bool:
        """The file may have bytes in doubt. Chunks with records of their own are checked one by one, later."""
        rows = [row for chunk in record.chunks for row in chunk]
        extents = [Extent(row.addr, 0, row.length, row.generation, row.checksums, COMMITTED) for row in rows]
        return bool(record.flags & schema.FLAG_CHUNK_RECORDS) or self.core.doubt.covers(record.ino, [Chunk(extents)])
