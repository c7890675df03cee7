"""Bytes of files: writes and sealing, over extents in slots and staged chunks.

A write into new space is *staged* and reaches a slot when its file is closed, its chunk is full, or
someone asks for durability. A write into a small chunk that has slots is staged too (the chunk is
copied and written anew); into a large one it goes in place, after the extents were *unsealed*: the
records say so before the first byte changes, so a torn write is never taken for what was committed.

Locking: what cannot be done between two awaits (loading a chunk, unsealing, truncating) runs under the
node's lock; a write that only stages needs no lock but waits while somebody holds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import trio

from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.errors import FileTooLarge, NoSpace
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import FILE_SIZE_MAX
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.reader import ContentReader
from kvfuse.volume.inodes.chunk import FRESH, Chunk, Extent, Staged
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock

REWRITE_SIZE_MAX = GRANULE_SIZE
"""Chunks up to this size are written anew when they change; larger ones change in place."""
STAGED_CHUNKS_MAX = 1000
"""Staged chunks of one file at which it is committed although it is open: a commit may not grow with a file."""


@asynccontextmanager
async def locked(node: Node) -> AsyncIterator[None]:
    """The node's lock, for what must not interleave with other changes of its content."""
    if node.lock is None:
        node.lock = trio.Lock()
    lock = node.lock
    try:
        async with lock:
            yield
    finally:  # a node that has one is taken for one that is being changed
        if not lock.locked():
            node.lock = None


@dataclass
class ContentWriter(ContentReader):
    """See the module."""

    journal: Journal
    flusher: Flusher

    # -- writing -------------------------------------------------------------------------------------

    async def write(self, node: Node, offset: int, data: bytes | memoryview, *, appends: bool = False) -> int:
        """Take all of ``data`` (kept, so it never changes). Waits only for room in the staging memory, or in place.

        ``appends``: it belongs behind what is there, wherever that ends when it is stored.
        """
        end = offset + len(data)
        if end > min(FILE_SIZE_MAX, node.chunk_size << 32):
            raise FileTooLarge(f"inode {node.ino}: offset {end} is beyond what a file may have")
        mark = node.end_moved if appends else None
        if self.flusher.staged_bytes > self.flusher.staging_size:
            await self.flusher.wait_for_room()
        if self._is_many(node):
            await self._commit_so_far(node)
        place = offset + _end_moved(node, mark)
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
                    self._changed(node)  # what is read here of it from now on is stored, too
                    raise
        self._changed(node)
        return written

    async def write_in_slots(self, node: Node, writes: Sequence[tuple[int, memoryview]]) -> list[bool]:
        """Write (offset, data) at once where the bytes have unsealed slots; which were written, the others not at all.

        Of those that overlap only the first is. EngineError: each of them may have been written or not.
        """
        written = [False] * len(writes)
        async with locked(node):
            transfers: list[Transfer] = []
            reach = 0
            for number in sorted(range(len(writes)), key=lambda number: writes[number][0]):
                offset, data = writes[number]
                transfer = self._transfer_in_slot(node, offset, data) if offset >= reach else None
                if transfer is not None:
                    transfers.append(transfer)
                    written[number] = True
                    reach = offset + len(data)
            for index in {offset // node.chunk_size for (offset, _), done in zip(writes, written, strict=True) if done}:
                node.changing(index)
            if transfers:
                with self.core.reads.reading():
                    await self.core.segments.write(transfers)
                self._changed(node)
        return written

    def _transfer_in_slot(self, node: Node, offset: int, data: memoryview) -> Transfer | None:
        """What writes the bytes into a slot that may be written to as it is; None where more has to be done."""
        index, start = divmod(offset, node.chunk_size)
        chunk = node.chunks.get(index)
        if chunk is None or chunk.staged is not None or not chunk.extents:
            return None
        extent = chunk.extents[0]
        if extent.checksums or start + len(data) > extent.length or offset + len(data) > node.size:
            return None
        return Transfer(*self.core.locate(extent.addr + start), data)

    async def _write_parts(self, node: Node, offset: int, data: bytes | memoryview, mark: int | None) -> int:
        """Under the lock: write chunk by chunk; how many bytes had room. NoSpace when not even the first had."""
        view = memoryview(data)
        position = 0
        while position < len(data):
            if self._is_many(node):
                await self._commit_so_far(node)
            place = offset + position + _end_moved(node, mark)
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
        if self.core.shared:
            _note_append(node, end, appends=mark is not None)
        if end > node.size:
            node.set_size(end)

    def _is_many(self, node: Node) -> bool:
        """A file's changed chunks are to be in the store, before there are more than one commit may carry."""
        return node.staged_count + len(node.dirty_chunks) >= self.journal.chunk_count_max and node.nlink > 0

    async def _commit_so_far(self, node: Node) -> None:
        """The file is then as if it had been written, or cut, so far."""
        self.journal.touch(node, forced=True)
        await self.journal.commit(node)

    async def _write_part(self, node: Node, index: int, start: int, data: bytes | memoryview, mark: int | None) -> None:
        """``mark``: `Node.end_moved`, if the place is where the file ends. _EndMoved, if it is not any more."""
        wait = self.journal.room_wait()
        while True:
            if await self.chunk(node, index) is None:
                node.chunks[index] = Chunk()
            _check_end(node, mark)
            try:
                is_done = self._stage_new(node, index, start, data) or await self._write_existing(
                    node, index, start, data, mark
                )
            except NoSpace:
                if await self.journal.free(wait):
                    await self.core.reads.passed()
                elif await self._write_within(node, index, start, data):
                    return
                else:
                    raise
            else:
                if is_done:
                    return

    async def _write_within(self, node: Node, index: int, start: int, data: bytes | memoryview) -> bool:
        """Under the lock, without space for new slots: write into those the chunk has. False if they are too small."""
        chunk = node.chunks[index]
        if self.core.shared:
            return False
        if chunk.writing is not None:
            await self.flusher.settled()
        capacity = sum(extent.slot_size for extent in chunk.extents)
        if chunk.staged is not None or start + len(data) > capacity:
            return False
        return await self._write_in_place(node, index, chunk, start, data)

    def _stage_new(self, node: Node, index: int, start: int, data: bytes | memoryview) -> bool:
        """Stage a write where no byte has to be read for it; False where one has."""
        chunk = node.chunks.get(index)
        if chunk is None:
            if index >= schema.INLINE_CHUNKS and node.flags & schema.FLAG_CHUNK_RECORDS:
                return False  # perhaps it has a record
            chunk = Chunk()
        if chunk.staged is None and chunk.extents and (start or len(data) < chunk.length):
            return False
        self._stage(node, index, chunk, start, data)
        return True

    def _stage(self, node: Node, index: int, chunk: Chunk, start: int, data: bytes | memoryview) -> None:
        """Put ``data`` into the chunk's staged bytes. NoSpace leaves everything as it was."""
        node.changing(index)
        if self.core.shared:
            chunk.wrote(start, start + len(data))
        staged = chunk.staged
        if staged is None or staged.writing:
            twin = Staged() if staged is None else staged.copy()
            self._reserve(twin, max(twin.length, start + len(data)))
            self.flusher.stage(node, chunk, twin)
            staged = twin
        else:
            self._reserve(staged, max(staged.length, start + len(data)))
        node.chunks[index] = chunk
        before = staged.length
        if start == before:
            staged.append(data)
        else:
            staged.overwrite(start, data)
        self.flusher.grew(staged.length - before)
        if staged.length == node.chunk_size:
            self.flusher.chunk_is_full(node, index)

    def _reserve(self, staged: Staged, length: int) -> None:
        """Have slots for ``length`` bytes; NoSpace leaves the slots there were."""
        if staged.slots and length <= staged.capacity:
            return
        slabs = self.core.slabs
        try:
            slots = slabs.allocate(length)
        except NoSpace:
            if not staged.slots:
                raise
            # Its own slots may be what is missing.
            before = staged.capacity
            if staged.unsure:
                raise
            slabs.cancel(staged.slots)
            try:
                staged.slots = slabs.allocate(length)
            except NoSpace:
                staged.slots = slabs.allocate(before)
                raise
            return
        if staged.slots:
            self.flusher.cancel(staged, staged.slots)
        staged.slots, staged.unsure = slots, False

    async def _write_existing(
        self, node: Node, index: int, start: int, data: bytes | memoryview, mark: int | None
    ) -> bool:
        """Under the lock: change a chunk whose bytes are in slots, and only partly replaced. ``mark``: as above.

        False where the chunk went out of memory meanwhile.
        """
        while (chunk := node.chunks.get(index)) is not None:
            _check_end(node, mark)
            if chunk.staged is not None or not chunk.extents:  # it was being written, or not yet empty, when we looked
                self._stage(node, index, chunk, start, data)
                return True
            if self.core.shared:  # somebody else may read these slots: what is in them never changes
                await self._stage_existing(node, index, chunk)
                continue
            capacity = sum(extent.slot_size for extent in chunk.extents)
            if max(chunk.length, start + len(data)) > REWRITE_SIZE_MAX and start + len(data) <= capacity:
                if await self._write_in_place(node, index, chunk, start, data):
                    return True
            else:
                try:
                    await self._stage_existing(node, index, chunk)
                except NoSpace:
                    if start + len(data) > capacity:
                        raise
                    if await self._write_in_place(node, index, chunk, start, data):
                        return True
        return False

    async def _stage_existing(self, node: Node, index: int, chunk: Chunk) -> None:
        """Stage a copy of the chunk's bytes; the slots they are in are given up when the copy has its own."""
        extents = chunk.extents
        buffer = np.empty(chunk.length, np.uint8).data
        await self._read_chunk(node, index, chunk, 0, buffer)
        if chunk.staged is not None or chunk.extents is not extents or node.chunks.get(index) is not chunk:
            return
        self._stage_copy(node, chunk, buffer)

    def _stage_copy(self, node: Node, chunk: Chunk, data: bytes | memoryview) -> None:
        """Stage all bytes of a chunk as they are in its slots. NoSpace leaves everything as it was."""
        staged = Staged()
        self._reserve(staged, len(data))
        staged.pieces = [data]
        staged.length = len(data)
        if self.core.shared:
            chunk.changes()
        self.flusher.stage(node, chunk, staged)

    async def _write_in_place(self, node: Node, index: int, chunk: Chunk, start: int, data: bytes | memoryview) -> bool:
        """Write into the chunk's own slots; False when they were replaced meanwhile."""
        extents = chunk.extents
        await self._reach(chunk, start + len(data))
        await self._unseal(node, index, chunk, start, start + len(data))
        if chunk.staged is not None or chunk.extents is not extents:
            return False
        transfers, grown = [], []
        extent_start = 0
        gap = bytes(max(0, start - chunk.length))
        low, payload = start - len(gap), gap + data if gap else data
        view = memoryview(payload)
        for number, extent in enumerate(extents):
            last = number == len(extents) - 1
            room_end = extent_start + (extent.slot_size if last else extent.length)
            part_low, part_high = max(low, extent_start), min(low + len(payload), room_end)
            if part_low < part_high:
                segment, offset = self.core.locate(extent.addr + part_low - extent_start)
                transfers.append(Transfer(segment, offset, view[part_low - low : part_high - low]))
                if part_high - extent_start > extent.length:
                    grown.append((extent, part_high - extent_start))
            extent_start += extent.length
        node.changing(index)
        with self.core.reads.reading():
            await self.core.segments.write(transfers)
        for extent, length in grown:
            node.resize(index, extent, length)
        return True

    async def _reach(self, chunk: Chunk, end: int) -> None:
        """Have no description of the file at the last slot's end, before bytes up to ``end`` of the chunk go there."""
        last = chunk.extents[-1]
        reach = min(end - start_of(chunk.extents), last.slot_size)
        if reach > last.reach:
            last.reach = reach
            await self.flusher.described()

    async def _unseal(self, node: Node, index: int, chunk: Chunk, start: int, end: int) -> None:
        """Have it in the records that the chunk's extents are no longer what their checksums say."""
        sealed = [(extent, extent.checksums) for extent in chunk.extents if extent.checksums]
        if not sealed:
            return
        for extent, _ in sealed:
            extent.checksums = b""
            extent.verified = 0
        if index >= schema.INLINE_CHUNKS:
            node.chunk_changed(index)
        if any(extent.state != FRESH for extent, _ in sealed):
            self.journal.touch(node, forced=True)
            try:
                await self.journal.commit(node, durable=True)
            except BaseException:
                node.changing(index)  # it may have been shown without checksums
                for extent, checksums in sealed:  # no byte was changed: the next write has to ask again
                    extent.checksums = checksums
                if index >= schema.INLINE_CHUNKS:
                    node.chunk_changed(index)
                self.journal.touch(node)
                raise

    async def seal(self, node: Node) -> None:
        """Checksum what was changed in place, when nobody writes any more."""
        for index, chunk in list(node.chunks.items()):
            for extent in chunk.extents:
                if extent.checksums or chunk.staged is not None:
                    continue
                async with locked(node):
                    segment, offset = self.core.locate(extent.addr)
                    buffer = bytearray(extent.length)
                    with self.core.reads.reading():
                        await self.core.segments.read([Transfer(segment, offset, buffer)])
                    if node.writers or extent not in chunk.extents or extent.length != len(buffer):
                        return
                    node.changing(index)
                    extent.checksums = granule_checksums(buffer)
                    extent.verified = 0
                    if index >= schema.INLINE_CHUNKS:
                        node.chunk_changed(index)
                    self.journal.touch(node)
                    await self.flusher.write_header(node, index, extent)

    def has_unsealed(self, node: Node) -> bool:
        return any(not extent.checksums for chunk in node.chunks.values() for extent in chunk.extents)

    def lay(self, node: Node, offset: int, head: bytes | memoryview, data: bytes) -> None:
        """Put bytes behind ``offset``, where what another host stored of the file ends. NoSpace leaves a part undone.

        Nothing waits. ``head``: what is stored in front of them, of the chunk in which they begin.
        """
        view, position = memoryview(data), 0
        while position < len(data):
            index, start = divmod(offset + position, node.chunk_size)
            part = view[position : position + node.chunk_size - start]
            chunk = node.chunks.setdefault(index, Chunk())
            if chunk.staged is None and start and head:
                self._stage_copy(node, chunk, head)
            self._stage(node, index, chunk, start, part)
            position += len(part)
            node.set_size(max(node.size, offset + position))
        self._changed(node)

    def _changed(self, node: Node) -> None:
        node.mtime = node.ctime = clock.now()
        self.journal.touch(node, forced=node.staged_count > STAGED_CHUNKS_MAX)


class _EndMoved(Exception):
    """Another host's change of the file has moved its end: what is appended belongs elsewhere."""


def _check_end(node: Node, mark: int | None) -> None:
    if mark is not None and node.end_moved != mark:
        raise _EndMoved


def _end_moved(node: Node, mark: int | None) -> int:
    """Bytes by which others have moved the end of the file since; 0 for what is not appended."""
    return 0 if mark is None else node.end_moved - mark


def _note_append(node: Node, end: int, *, appends: bool) -> None:
    """Whether all bytes behind what is stored of the file were appended, and only those."""
    stored_size = node.base.size if node.base is not None else 0
    if node.size <= stored_size:
        node.appends = appends
    elif end > stored_size:
        node.appends = node.appends and appends


def start_of(kept: list[Extent]) -> int:
    """Offset in the chunk at which the last of these extents begins."""
    return sum(extent.length for extent in kept[:-1])
