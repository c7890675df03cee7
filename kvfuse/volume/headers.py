"""Slot headers: what makes each slot describe itself, so that a volume can be rebuilt from its segments alone.

Behind a header, or in the slot's unused end, stands a *description* of the file: path, owner, mode, size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import trio

from kvfuse.checksum import CHECKSUM_SIZE, crc32c, extent_checksum
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.volume.chunk import Extent
from kvfuse.volume.core import Core
from kvfuse.volume.node import Node

log = logging.getLogger(__name__)


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


_encode = msgspec.msgpack.Encoder().encode


class HeaderRow(NamedTuple):
    """One slot header to be written."""

    extent: Extent
    node: Node
    chunk_index: int
    piece_offset: int
    state: int


@dataclass
class HeaderWriter:
    """Writes headers and descriptions."""

    core: Core

    def __post_init__(self) -> None:
        self._describing = trio.Lock()

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
            if place == layout.DESCRIPTOR_BEHIND_HEADER:  # up to the next one: those of neighbours are one write then
                header = (header + text).ljust(geometry.header_stride(extent.slot_size), b"\0")
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
        text = _encode(
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
        # Not where the store may still name bytes, as before a cut that is not committed, nor where a write may go.
        if len(text) <= extent.slot_size - extent.reach:
            return text, layout.DESCRIPTOR_AT_SLOT_END
        return b"", layout.DESCRIPTOR_NONE

    @staticmethod
    def _identity(node: Node) -> tuple[int, bytes, int, int, int, int]:
        return (node.parent, node.name, node.mode, node.uid, node.gid, node.size)

    async def _describe(self, nodes: Sequence[Node]) -> None:
        """Write the headers again of files that were renamed, or grew, since they were written."""
        async with self._describing:
            rows = self._out_of_date(nodes)
            if rows:
                with self.core.reads.reading():  # a slot that is given up meanwhile is nobody else's yet
                    await self.core.segments.write(self._header_transfers(rows))

    def _out_of_date(self, nodes: Sequence[Node]) -> list[HeaderRow]:
        rows = []
        for node in nodes:
            identity = self._identity(node)
            chunk = node.chunks.get(0)
            if identity != node.described and chunk is not None and chunk.extents:
                node.described = identity
                extent, slabs = chunk.extents[0], self.core.slabs
                if not slabs.holds(self.core.geometry.slab_of(extent.addr)) or not slabs.is_durable(extent.addr):
                    continue  # another host may free the slot, and use it again
                extent.slot_size = slabs.slot_size(extent.addr)  # perhaps the slab was another's when it was read
                rows.append(
                    HeaderRow(extent, node, 0, 0, layout.STATE_SEALED if extent.checksums else layout.STATE_UNSEALED)
                )
        return rows

    async def described(self) -> None:
        """Return when no description is being written; later ones keep clear of what every extent reaches now."""
        async with self._describing:
            pass

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
