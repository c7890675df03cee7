"""Writes into files, over extents in slots and staged chunks.

A write into new space is *staged* and reaches a slot when its file is closed, its chunk is full, or
someone asks for durability. A write into a small chunk that has slots is staged too (the chunk is
copied and written anew); into a large one it goes in place (`in_place`).

Locking: what cannot be done between two awaits (loading a chunk, unsealing, truncating) runs under the
node's lock; a write that only stages needs no lock but waits while somebody holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import FileTooLarge, NoSpace
from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import FILE_SIZE_MAX
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.content.in_place import InPlaceWriter
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.inodes.chunk import Chunk, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node, locked
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.slots.space import RoomFinder, RoomWait
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock

REWRITE_SIZE_MAX = GRANULE_SIZE
"""Chunks up to this size are written anew when they change; larger ones change in place."""
STAGED_CHUNKS_MAX = 1000
"""Staged chunks of one file at which it is committed although it is open: a commit may not grow with a file."""


@dataclass
class Staging:
    """Puts bytes into staged chunks, with slots for them. One of each membership. Nothing here waits."""

    core: Core
    pending: Pending
    flusher: Flusher

    def stage(self, node: Node, index: int, chunk: Chunk, start: int, data: bytes | memoryview) -> None:
        """Put ``data`` into the chunk's staged bytes. NoSpace leaves everything as it was."""
        node.changing(index)
        self.core.sharing.wrote(chunk, start, start + len(data))
        staged = chunk.staged
        if staged is None or staged.writing:
            staged = Staged() if staged is None else staged.copy()
        before = staged.length
        self._reserve(node, staged, max(before, start + len(data)))
        node.chunks[index] = chunk
        if start == before:
            staged.append(data)
        else:
            staged.overwrite(start, data)
        if staged is chunk.staged:
            self.flusher.grew(staged.length - before)
        else:
            self.flusher.stage(node, chunk, staged)
        if staged.length == node.chunk_size:
            self.flusher.chunk_is_full(node, index)

    def _reserve(self, node: Node, staged: Staged, length: int) -> None:
        """Have slots for ``length`` bytes; NoSpace leaves the slots there were."""
        if staged.slots and length <= staged.capacity:
            return
        slabs = self.core.slabs
        try:
            slots = slabs.allocate(length, node.namespace)
        except NoSpace:
            if not staged.slots or staged.unsure:
                raise
            slabs.exchange(staged.slots, length)
        else:
            if staged.slots:
                self.flusher.cancel(staged, staged.slots)
            staged.slots, staged.unsure = slots, False

    def stage_copy(
        self, node: Node, chunk: Chunk, data: bytes | bytearray | memoryview, slots: Sequence[Slot] = ()
    ) -> None:
        """Stage all bytes of a chunk as they are in its slots. ``slots``: allocated for them; else NoSpace leaves
        everything as it was."""
        staged = Staged()
        staged.slots = list(slots)
        self._reserve(node, staged, len(data))
        staged.pieces = [data]
        staged.length = len(data)
        self.core.sharing.changes(chunk)
        self.flusher.stage(node, chunk, staged)

    def lay(self, node: Node, offset: int, head: bytes | memoryview, data: bytes) -> None:
        """Put bytes behind ``offset``, where what another host stored of the file ends. NoSpace leaves a part undone.

        ``head``: what is stored in front of them, of the chunk in which they begin.
        """
        view, position = memoryview(data), 0
        while position < len(data):
            index, start = divmod(offset + position, node.chunk_size)
            part = view[position : position + node.chunk_size - start]
            chunk = node.chunks.setdefault(index, Chunk())
            if chunk.staged is None and start and head:
                self.stage_copy(node, chunk, head)
            self.stage(node, index, chunk, start, part)
            position += len(part)
            node.set_size(max(node.size, offset + position))
        self.note_change(node)

    def note_change(self, node: Node) -> None:
        node.mtime = node.ctime = clock.now()
        is_kept = node.unstored is not None and node.unstored.is_on
        if not node.unsaved and self.core.nodes.handover.outlives and not is_kept:
            self.core.nodes.note_unsaved(node)
        self.pending.touch(node, forced=node.staged_count > STAGED_CHUNKS_MAX)


@dataclass
class Writer:
    """Takes bytes into files. One of each membership."""

    core: Core
    journal: Journal
    flusher: Flusher
    space: RoomFinder
    reader: Reader
    staging: Staging
    in_place: InPlaceWriter

    async def write(
        self, node: Node, offset: int, data: bytes | memoryview, *, appends: bool = False, direct: bool = False
    ) -> int:
        """Take all of ``data`` (kept, so it never changes). Waits only for room in the staging memory, or in place.

        ``appends``: it belongs behind what is there, wherever that ends when it is stored.
        ``direct``: chunks that are whole with it are in slots when this returns. EngineError: perhaps not.
        """
        if not data:
            return 0
        end = offset + len(data)
        if end > min(FILE_SIZE_MAX, node.chunk_size << 32):
            raise FileTooLarge(f"inode {node.ino}: offset {end} is beyond what a file may have")
        mark = node.end_moved if appends else None  # others may move the end of the file meanwhile
        if self.flusher.is_over_full or self.flusher.line.places:
            await self.flusher.wait_for_memory(node.namespace, len(data))
        if (node.staged_count or node.dirty_chunks) and self.is_many(node):
            await self.commit_so_far(node)
        place = offset if mark is None else offset + node.end_moved - mark
        index, start = divmod(place, node.chunk_size)
        written = len(data)
        try:
            staged = (
                start + written <= node.chunk_size and node.lock is None and self._stage_new(node, index, start, data)
            )
        except NoSpace:
            staged = False  # the way below makes room
        if staged:
            self._wrote(node, place + written, mark)
        else:
            async with locked(node):
                try:
                    written = await self._write_parts(node, offset, data, mark)
                except NoSpace:
                    raise  # nothing was taken
                except BaseException:  # a cancellation, too
                    self.staging.note_change(node)  # what is read here of it from now on is stored, too
                    raise
        self.staging.note_change(node)
        if direct:
            await self._write_whole(node, offset if mark is None else offset + node.end_moved - mark, written)
        return written

    async def _write_whole(self, node: Node, start: int, length: int) -> None:
        """Return when no chunk of these bytes that is full is staged as it is now. EngineError."""
        for index in range(start // node.chunk_size, -(-(start + length) // node.chunk_size)):
            chunk = node.chunks.get(index)
            if chunk is not None and chunk.staged is not None and chunk.staged.length == node.chunk_size:
                await self.flusher.write_whole(node, index, chunk)

    async def _write_parts(self, node: Node, offset: int, data: bytes | memoryview, mark: int | None) -> int:
        """Under the lock: write chunk by chunk; how many bytes had room. NoSpace when not even the first had."""
        view = memoryview(data)
        position = 0
        while position < len(data):
            if self.is_many(node):
                await self.commit_so_far(node)
            place = offset + position + (0 if mark is None else node.end_moved - mark)
            index, start = divmod(place, node.chunk_size)
            length = min(len(data) - position, node.chunk_size - start)
            part = data if length == len(data) else view[position : position + length]
            try:
                await self._write_part(node, index, start, part, None if mark is None else node.end_moved)
            except _EndMoved:
                continue
            except NoSpace:
                if position:
                    return position
                raise
            position += length
            self._wrote(node, place + length, mark)
        return position

    def _wrote(self, node: Node, end: int, mark: int | None) -> None:
        """Bytes up to ``end`` were taken just now."""
        stored_size = node.base.size if node.base is not None else 0
        if node.size <= stored_size:
            node.appends = mark is not None
        elif end > stored_size:
            node.appends = node.appends and mark is not None
        if end > node.size:
            node.set_size(end)

    def is_many(self, node: Node) -> bool:
        """A file's changed chunks are to be in the store, before there are more than one commit may carry."""
        return node.staged_count + len(node.dirty_chunks) >= self.journal.chunk_count_max and node.nlink > 0

    async def commit_so_far(self, node: Node) -> None:
        """The file is then as if it had been written, or cut, so far."""
        self.journal.pending.touch(node, forced=True)
        await self.journal.commit(node)

    async def _write_part(self, node: Node, index: int, start: int, data: bytes | memoryview, mark: int | None) -> None:
        """``mark``: `Node.end_moved`, if the place is where the file ends. _EndMoved, if it is not any more."""
        wait: RoomWait | None = None
        while True:
            if await self.reader.chunks.load_chunk(node, index) is None:
                node.chunks[index] = Chunk()
            _check_end(node, mark)
            try:
                if self._stage_new(node, index, start, data):
                    return
                if await self._write_existing(node, index, start, data, mark):
                    return
            except NoSpace as error:
                wait = await self.space.wait_for_room(wait, error.namespace)
                if wait is None:
                    if await self._write_within(node, index, start, data):
                        return
                    raise

    async def _write_within(self, node: Node, index: int, start: int, data: bytes | memoryview) -> bool:
        """Under the lock, without space for new slots: write into those the chunk has. False if they are too small."""
        chunk = node.chunks[index]
        if chunk.writing is not None:
            await self.flusher.settled()
        if chunk.staged is not None or not self.core.sharing.may_write_in(chunk, start + len(data)):
            return False
        return await self.in_place.write(node, index, chunk, start, data)

    def _stage_new(self, node: Node, index: int, start: int, data: bytes | memoryview) -> bool:
        """Stage a write where no byte has to be read for it; False where one has."""
        chunk = node.chunks.get(index)
        if chunk is None:
            if index >= schema.INLINE_CHUNKS and node.flags & schema.FLAG_CHUNK_RECORDS:
                return False  # perhaps it has a record
            chunk = Chunk()
        if chunk.staged is None and chunk.extents and (start or len(data) < chunk.length):
            return False
        self.staging.stage(node, index, chunk, start, data)
        return True

    async def _write_existing(
        self, node: Node, index: int, start: int, data: bytes | memoryview, mark: int | None
    ) -> bool:
        """Under the lock: change a chunk whose bytes are in slots, and only partly replaced. ``mark``: as above.

        False where the chunk went out of memory meanwhile.
        """
        while (chunk := node.chunks.get(index)) is not None:
            _check_end(node, mark)
            if chunk.staged is not None or not chunk.extents:  # it was being written, or not yet empty, when we looked
                self.staging.stage(node, index, chunk, start, data)
                return True
            end = start + len(data)
            may_change = self.core.sharing.may_write_in(chunk, end)
            if not may_change or max(chunk.length, end) <= REWRITE_SIZE_MAX:
                try:
                    await self._stage_existing(node, index, chunk)
                    continue
                except NoSpace:
                    if not may_change:
                        raise
            if await self.in_place.write(node, index, chunk, start, data):
                return True
        return False

    async def _stage_existing(self, node: Node, index: int, chunk: Chunk) -> None:
        """Stage a copy of the chunk's bytes; the slots they are in are given up when the copy has its own."""
        extents = chunk.extents
        buffer = np.empty(chunk.length, np.uint8).data
        await self.reader.read_chunk(node, index, chunk, 0, buffer)
        if chunk.staged is not None or chunk.extents is not extents or node.chunks.get(index) is not chunk:
            return
        self.staging.stage_copy(node, chunk, buffer)


class _EndMoved(Exception):
    """Another host's change of the file has moved its end: what is appended belongs elsewhere."""


def _check_end(node: Node, mark: int | None) -> None:
    if mark is not None and node.end_moved != mark:
        raise _EndMoved
