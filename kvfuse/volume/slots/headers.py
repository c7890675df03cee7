"""Slot headers: what makes each slot describe itself, so that a volume can be rebuilt from its segments alone.

`heads` has the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.chunk import FRESH, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.slots import heads

log = logging.getLogger(__name__)


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
        return heads.transfers(self.core.superblock, [self._head(row) for row in rows])

    def _head(self, row: HeaderRow) -> heads.Head:
        extent = row.extent
        return heads.Head(
            extent.addr,
            extent.slot_size,
            extent.length,
            extent.generation,
            extent.checksums,
            row.node.ino,
            row.chunk_index,
            row.piece_offset,
            row.state,
            extent.reach,
            self._description(row),
        )

    def _description(self, row: HeaderRow) -> bytes:
        """Of the row's file, with its checksum; empty where the slot has none."""
        if row.piece_offset or not row.node.nlink:
            return b""
        node = row.node
        return heads.encode_description(
            heads.Description(
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
                is_ours = slabs.holds(self.core.geometry.slab_of(extent.addr)) and slabs.is_durable(extent.addr)
                if extent.state != FRESH and not is_ours:
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
