"""Staged bytes on their way to slots: checksums, slot headers, batched writes.

One batch is written at a time; whatever is staged meanwhile joins the next. Bytes are written before
any record names them (`Journal` sees to that), headers with their bytes.

A header makes its slot self-describing. Behind it, or in the slot's unused end, stands a *description*
of the file - path, owner, mode, size - so that a volume can be rebuilt from its segments alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, crc32c, extent_checksum, granule_checksums
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.volume.core import Core
from kvfuse.volume.grace import Give
from kvfuse.volume.node import FRESH, Chunk, Extent, Node, Staged

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
"""Staged bytes written in one call to the segment engine."""


class Description(msgspec.Struct, array_like=True, frozen=True):
    """What a slot says of the file it belongs to; enough to make the file anew."""

    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    chunk_size: int
    stored: int
    """bytes in slots, if they were known: a file of which fewer are found is not whole"""


class _Item(NamedTuple):
    """One staged chunk in a batch."""

    node: Node
    chunk_index: int
    chunk: Chunk
    staged: Staged
    extents: list[Extent]


class HeaderRow(NamedTuple):
    """One slot header to be written."""

    extent: Extent
    node: Node
    chunk_index: int
    piece_offset: int
    state: int


@dataclass
class Flusher:
    """Writes staged chunks and slot headers. ``staging_size``: bytes that may be staged before writers wait."""

    core: Core
    staging_size: int
    staged_bytes: int = 0
    dropped_size: int = 0
    """bytes of slots that are being written in vain"""
    _full: dict[tuple[int, int], tuple[Node, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = trio.Lock()
        self._work = trio.Event()
        self._room = trio.Event()
        self._is_over = False

    def give_up(self) -> None:
        """What is staged will never be written: nobody waits for that any more."""
        self._is_over = True
        self._room.set()

    # -- staging accounts ----------------------------------------------------------------------------

    def stage(self, node: Node, chunk: Chunk, staged: Staged) -> None:
        """``staged`` becomes the chunk's staged bytes, instead of what was staged before."""
        if chunk.staged is None:
            node.staged_count += 1
        else:
            self.staged_bytes -= chunk.staged.length
        chunk.staged = staged
        self.staged_bytes += staged.length

    def unstage(self, node: Node, chunk: Chunk) -> None:
        """The chunk's staged bytes are gone: written, or given up (the slots are the caller's)."""
        if chunk.staged is not None:
            self.staged_bytes -= chunk.staged.length
            node.staged_count -= 1
            chunk.staged = None
            self._room.set()
            self._room = trio.Event()

    def drop(self, staged: Staged) -> None:
        """What is being written is no longer wanted: its slots come back when it was."""
        if not staged.dropped:
            staged.dropped = True
            self.dropped_size += staged.capacity

    def grew(self, byte_count: int) -> None:
        """Staged bytes grew (or shrank) in place."""
        self.staged_bytes += byte_count

    def chunk_is_full(self, node: Node, index: int) -> None:
        """A chunk will hardly change any more: write it without waiting for a commit."""
        self._full[node.ino, index] = (node, index)
        self._work.set()

    @property
    def is_half_full(self) -> bool:
        """So much is staged that it should be written before the next commit asks for it."""
        return self.staged_bytes > self.staging_size // 2

    async def wait_for_room(self) -> None:
        """Return when less is staged than may be. Everything staged is being written meanwhile."""
        while self.staged_bytes > self.staging_size:
            if self._is_over:
                raise EngineError("nothing is written any more")
            room = self._room
            self._work.set()
            with trio.move_on_after(0.1):
                await room.wait()

    async def settled(self) -> None:
        """Return when the batch that is being written now has been."""
        async with self._lock:
            pass

    async def run(self) -> None:
        """Write full chunks as they come, everything when too much is staged; for ever."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            full, self._full = self._full, {}
            try:
                await self._flush_chunks(list(full.values()))
                if self.staged_bytes > self.staging_size:
                    await self.flush([node for node in self.core.nodes if node.staged_count])
            except EngineError as error:
                log.error("staged bytes could not be written, they stay in memory: %s", error)
                await trio.sleep(0.1)

    # -- writing -------------------------------------------------------------------------------------

    async def flush(self, nodes: Iterable[Node]) -> None:
        """Everything that is staged in ``nodes`` now is in slots when this returns, with headers that are true.

        A chunk changed meanwhile has been written as it was, and is still staged as it is now.
        """
        nodes = list(nodes)
        chunks = [
            (node, index)
            for node in nodes
            if node.staged_count
            for index, chunk in node.chunks.items()
            if chunk.staged is not None
        ]
        if chunks:
            await self._flush_chunks(chunks)
        await self._describe([node for node in nodes if node.nlink and node.described is not None])

    async def _flush_chunks(self, chunks: Sequence[tuple[Node, int]]) -> None:
        async with self._lock:
            start = 0
            while start < len(chunks):
                end, size = start, 0
                while end < len(chunks) and size < BATCH_BYTES:
                    node, index = chunks[end]
                    chunk = node.chunks.get(index)
                    size += chunk.staged.length if chunk is not None and chunk.staged is not None else 0
                    end += 1
                await self._write_batch(chunks[start:end])
                start = end

    async def _write_batch(self, chunks: Sequence[tuple[Node, int]]) -> None:
        """Under the lock. Between the two awaits staged chunks may be replaced or dropped; `_install` looks again."""
        items: list[_Item] = []
        transfers: list[Transfer] = []
        rows: list[HeaderRow] = []
        for node, index in chunks:
            chunk = node.chunks.get(index)
            if chunk is None or chunk.staged is None or not chunk.staged.length:
                continue
            staged = chunk.staged
            staged.writing = True
            chunk.writing = staged
            extents = self._plan_extents(staged, transfers)
            items.append(_Item(node, index, chunk, staged, extents))
            offset = 0
            for extent in extents:
                rows.append(HeaderRow(extent, node, index, offset, layout.STATE_SEALED))
                offset += extent.length
        if not items:
            return
        try:
            await self.core.make_segments({transfer.segment for transfer in transfers})
            await self.core.segments.write([*transfers, *self._header_transfers(rows)])
        except BaseException:
            for item in items:
                self._keep_staged(item)
            raise
        for item in items:
            self._install(item)

    def _keep_staged(self, item: _Item) -> None:
        """It could not be written: it stays staged, in memory that the failed write has no views of.

        The engine may still write it: it writes the same chunk's later bytes after that, but nobody else may.
        """
        staged = item.staged
        staged.writing = False
        item.chunk.writing = None
        staged.pieces = [b"".join(staged.pieces)]
        if staged.dropped:
            self.dropped_size -= staged.capacity
        staged.unsure = True
        if item.chunk.staged is not staged:
            self.cancel(staged, staged.slots)

    def _plan_extents(self, staged: Staged, transfers: list[Transfer]) -> list[Extent]:
        """The extents that will hold the staged bytes; adds what is to be written to ``transfers``."""
        pieces = staged.pieces
        if len(pieces) > 1 and (len(staged.slots) > 1 or any(len(piece) % GRANULE_SIZE for piece in pieces[:-1])):
            pieces = staged.pieces = [b"".join(pieces)]
        extents: list[Extent] = []
        offset = 0
        for slot in staged.slots:
            length = min(slot.size, staged.length - offset)
            if length <= 0:
                break
            parts = [memoryview(pieces[0])[offset : offset + length]] if len(pieces) == 1 else pieces
            checksums = b"".join([granule_checksums(part) for part in parts])
            extents.append(Extent(slot.addr, slot.size, length, self.core.generations.next(), checksums, FRESH))
            part_addr = slot.addr
            for part in parts:
                segment, file_offset = self.core.locate(part_addr)
                transfers.append(Transfer(segment, file_offset, part))
                part_addr += len(part)
            offset += length
        spare = staged.slots[len(extents) :]
        if spare:
            self.cancel(staged, spare)
            staged.slots = staged.slots[: len(extents)]
        return extents

    def cancel(self, staged: Staged, slots: list[Slot]) -> None:
        """Allocated slots of staged bytes are not needed. Where others write, too, a late write must not hit them."""
        cancel: Give = self.core.slabs.cancel
        if self.core.shared and staged.unsure:
            cancel = self.core.grace.later(cancel)
        cancel(slots)

    def _install(self, item: _Item) -> None:
        """The bytes are in their slots: they replace the chunk's extents - unless the chunk is gone."""
        node, chunk, staged = item.node, item.chunk, item.staged
        staged.writing = False
        chunk.writing = None
        if staged.dropped:
            self.dropped_size -= staged.capacity
            for extent in item.extents:
                self.core.discard(node, extent)
            return
        if chunk.staged is staged:
            self.unstage(node, chunk)
        for extent in chunk.extents:
            self.core.discard(node, extent)
        # The file's bytes are the same as before, and no map shows the old extents since bytes were staged over them.
        node.set_extents(item.chunk_index, item.extents)
        node.born.extend(item.extents)
        if item.chunk_index == 0:
            node.described = self._identity(node)

    # -- headers -------------------------------------------------------------------------------------

    def _header_transfers(self, rows: Sequence[HeaderRow]) -> list[Transfer]:
        """Headers and descriptions of a batch of slots, as ranges to be written."""
        geometry = self.core.geometry
        descriptions = [self._place(row) for row in rows]
        table = layout.pack_headers(
            len(rows),
            state=[row.state for row in rows],
            length=[row.extent.length for row in rows],
            slot_size=[row.extent.slot_size for row in rows],
            generation=[row.extent.generation for row in rows],
            fingerprints=b"".join([self.core.fingerprint(row.node.ino, row.chunk_index) for row in rows]),
            inode=[row.node.ino for row in rows],
            chunk=[row.chunk_index for row in rows],
            piece_offset=[row.piece_offset for row in rows],
            checksum=[_checksum(row.extent) for row in rows],
            time=int(time.time()),
            descriptor_length=[len(text) for text, _ in descriptions],
            descriptor_place=[place for _, place in descriptions],
        ).tobytes()
        transfers = []
        for number, (row, (text, place)) in enumerate(zip(rows, descriptions, strict=True)):
            header = table[number * layout.HEADER_SIZE : (number + 1) * layout.HEADER_SIZE]
            extent = row.extent
            if place == layout.DESCRIPTOR_BEHIND_HEADER:
                header += text
            elif place == layout.DESCRIPTOR_AT_SLOT_END:
                segment, offset = self.core.locate(extent.addr)
                transfers.append(Transfer(segment, offset + extent.slot_size - len(text), text))
            transfers.append(Transfer(*geometry.locate_header(extent.addr, extent.slot_size), header))
        return transfers

    def _place(self, row: HeaderRow) -> tuple[bytes, int]:
        """The description of the row's file, with its checksum, and where it fits."""
        if row.piece_offset or not row.node.nlink:
            return b"", layout.DESCRIPTOR_NONE
        node = row.node
        text = msgspec.msgpack.encode(
            Description(
                self.core.path_of(node),
                node.mode,
                node.uid,
                node.gid,
                node.size,
                node.mtime,
                node.chunk_size,
                node.stored_length(),
            )
        )
        text += crc32c(text).to_bytes(4, "little")
        extent = row.extent
        if len(text) <= self.core.geometry.header_stride(extent.slot_size) - layout.HEADER_SIZE:
            return text, layout.DESCRIPTOR_BEHIND_HEADER
        if len(text) <= extent.slot_size - extent.length:
            return text, layout.DESCRIPTOR_AT_SLOT_END
        return b"", layout.DESCRIPTOR_NONE

    @staticmethod
    def _identity(node: Node) -> tuple[int, bytes, int, int, int, int]:
        return (node.parent, node.name, node.mode, node.uid, node.gid, node.size)

    async def _describe(self, nodes: Sequence[Node]) -> None:
        """Write the headers again of files that were renamed, or grew, since they were written."""
        rows = []
        for node in nodes:
            identity = self._identity(node)
            chunk = node.chunks.get(0)
            if identity != node.described and chunk is not None and chunk.extents:
                node.described = identity
                extent = chunk.extents[0]
                if not self.core.slabs.holds(self.core.geometry.slab_of(extent.addr)):
                    continue  # another host may free the slot, and use it again
                rows.append(
                    HeaderRow(extent, node, 0, 0, layout.STATE_SEALED if extent.checksums else layout.STATE_UNSEALED)
                )
        if rows:
            with self.core.reads.reading():  # a slot that is given up meanwhile is nobody else's yet
                await self.core.segments.write(self._header_transfers(rows))

    async def write_header(self, node: Node, index: int, extent: Extent) -> None:
        """The state or length of an extent changed in place."""
        offset = 0
        for other in node.chunks[index].extents:
            if other is extent:
                break
            offset += other.length
        row = HeaderRow(extent, node, index, offset, _state(extent))
        with self.core.reads.reading():
            await self.core.segments.write(self._header_transfers([row]))

    async def mark_free(self, slots: Sequence[Slot]) -> None:
        """Say in the headers that slots are free, before anyone may use them again.

        A header that could not be written is only a block too many after a rebuild: logged, no error.
        """
        free = bytes(layout.HEADER_SIZE)
        geometry = self.core.geometry
        try:
            await self.core.segments.write(
                [Transfer(*geometry.locate_header(slot.addr, slot.size), free) for slot in slots]
            )
        except EngineError as error:
            log.warning("headers of %d freed slots could not be written: %s", len(slots), error)


def _state(extent: Extent) -> int:
    return layout.STATE_SEALED if extent.checksums else layout.STATE_UNSEALED


def _checksum(extent: Extent) -> int:
    """Of all the extent's bytes; 0 where it is unsealed."""
    if len(extent.checksums) == CHECKSUM_SIZE:
        return int.from_bytes(extent.checksums, "little")
    return extent_checksum(extent.checksums, extent.length) if extent.checksums else 0
