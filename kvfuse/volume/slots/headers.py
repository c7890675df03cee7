"""Slot headers: what makes each slot describe itself, so that a volume can be rebuilt from its segments alone.

`heads` has the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.chunk import FRESH, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.slots.heads import Description, Head, encode_description, transfers

log = logging.getLogger(__name__)


@dataclass
class HeaderWriter:
    """Writes slot headers, and the descriptions of files in them. One of each membership."""

    core: Core

    def __post_init__(self) -> None:
        self._describing = trio.Lock()

    def head(self, node: Node, index: int, offset: int, extent: Extent) -> Head:
        """The head of the slot of an extent that begins at ``offset`` of a chunk; the first one describes the file."""
        return Head(
            extent.addr,
            extent.slot_size,
            extent.length,
            extent.generation,
            extent.checksums,
            node.ino,
            index,
            offset,
            layout.STATE_SEALED if extent.checksums else layout.STATE_UNSEALED,
            extent.reach,
            b"" if offset or not node.nlink else self._description(node),
        )

    def _description(self, node: Node) -> bytes:
        return encode_description(
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

    async def describe(self, nodes: Sequence[Node]) -> None:
        """Write the headers again of files that were renamed, or grew, since they were written."""
        async with self._describing:
            heads = self._out_of_date(nodes)
            if heads:
                await self._write(heads)

    async def _write(self, heads: Sequence[Head]) -> None:
        with self.core.reads.reading():  # a slot that is given up meanwhile is nobody else's yet
            await self.core.segments.write(transfers(self.core.superblock, heads))

    def _out_of_date(self, nodes: Sequence[Node]) -> list[Head]:
        heads = []
        for node in nodes:
            identity = identity_of(node)
            chunk = node.chunks.get(0)
            if identity != node.described and chunk is not None and chunk.extents:
                node.described = identity
                extent, slabs = chunk.extents[0], self.core.slabs
                is_ours = slabs.holds(self.core.geometry.slab_of(extent.addr)) and slabs.is_durable(extent.addr)
                if extent.state != FRESH and not is_ours:
                    continue  # another host may free the slot, and use it again
                extent.slot_size = slabs.slot_size(extent.addr)  # perhaps the slab was another's when it was read
                heads.append(self.head(node, 0, 0, extent))
        return heads

    async def settle_descriptions(self) -> None:
        """Return when no description is being written; later ones keep clear of what every extent reaches now."""
        async with self._describing:
            pass

    async def write_header(self, node: Node, index: int, extent: Extent) -> None:
        """The state or length of an extent changed in place."""
        await self._write([self.head(node, index, node.chunks[index].start_of(extent), extent)])

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


def identity_of(node: Node) -> tuple[int, bytes, int, int, int, int]:
    """What the headers say of a file: it is other when they have to be written again."""
    return node.parent, node.name, node.mode, node.uid, node.gid, node.size
