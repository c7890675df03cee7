"""Slot heads: the header of a slot, and behind it, or in the slot's unused end, a description of the file.

The description has path, owner, mode and size: a rebuild makes files anew from the segments alone. `HeaderWriter`
writes heads again when files change; those of new slots are written with their bytes (`flusher`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import trio

from kvfuse.checksum import CHECKSUM_SIZE, extend, extent_checksum
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.slab.layout import Superblock
from kvfuse.volume.inodes.chunk import FRESH, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)


class Description(msgspec.Struct, array_like=True, frozen=True):
    """What a slot's head says of the file that it belongs to; enough to make the file anew."""

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
_decode = msgspec.msgpack.Decoder(Description).decode


def encode_description(description: Description) -> bytes:
    """With its checksum."""
    text = _encode(description)
    return text + extend(0, text).to_bytes(CHECKSUM_SIZE, "little")


def decode_description(text: bytes) -> Description | None:
    """None where it is damaged, or of another program version."""
    body, checksum = text[:-CHECKSUM_SIZE], int.from_bytes(text[-CHECKSUM_SIZE:], "little")
    if len(text) <= CHECKSUM_SIZE or extend(0, body) != checksum:
        return None
    try:
        return _decode(body)
    except ValueError:
        return None


class Head(NamedTuple):
    """What the head of a slot has to say."""

    addr: int
    slot_size: int
    length: int
    generation: int
    checksums: bytes
    """of the extent's granules; empty: unsealed"""
    ino: int
    chunk: int
    piece_offset: int
    state: int
    reach: int
    """bytes of the slot that no description may cover"""
    description: bytes = b""
    """with its checksum; empty: none"""

    @property
    def checksum(self) -> int:
        """Of all the extent's bytes; 0 where it is unsealed."""
        if len(self.checksums) == CHECKSUM_SIZE:
            return int.from_bytes(self.checksums, "little")
        return extent_checksum(self.checksums, self.length) if self.checksums else 0


def fingerprint(superblock: Superblock, ino: int, chunk: int) -> bytes:
    """128 bits that name a file's chunk in this volume."""
    return blake2b(schema.chunk_key(ino, chunk), digest_size=16, key=superblock.volume_id).digest()


def transfers(superblock: Superblock, heads: Sequence[Head]) -> list[Transfer]:
    """Heads of a batch of slots, as ranges to be written."""
    geometry, now = superblock.geometry, int(time.time())
    made = []
    for head in heads:
        stride, description, place = geometry.header_stride(head.slot_size), head.description, layout.DESCRIPTOR_NONE
        if description and len(description) <= stride - layout.HEADER_SIZE:
            place = layout.DESCRIPTOR_BEHIND_HEADER
        elif description and len(description) <= head.slot_size - head.reach:
            # Not where the store may still name bytes, as before a cut that is not committed, nor where a write may go.
            place = layout.DESCRIPTOR_AT_SLOT_END
        header = layout.pack_header(
            state=head.state,
            length=head.length,
            slot_size=head.slot_size,
            generation=head.generation,
            fingerprint=fingerprint(superblock, head.ino, head.chunk),
            inode=head.ino,
            chunk=head.chunk,
            piece_offset=head.piece_offset,
            checksum=head.checksum,
            time=now,
            descriptor_length=len(description) if place else 0,
            descriptor_place=place,
        )
        if place == layout.DESCRIPTOR_BEHIND_HEADER:  # up to the next one: those of neighbours are one write then
            header = (header + description).ljust(stride, b"\0")
        elif place == layout.DESCRIPTOR_AT_SLOT_END:
            segment, offset = geometry.locate(head.addr)
            made.append(Transfer(segment, offset + head.slot_size - len(description), description))
        made.append(Transfer(*geometry.locate_header(head.addr, head.slot_size), header))
    return made


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
        path, stored = self.core.path_of(node), node.stored_length()
        return encode_description(
            Description(path, node.mode, node.uid, node.gid, node.size, node.mtime, node.chunk_size, stored)
        )

    async def describe(self, nodes: Sequence[Node]) -> None:
        """Write the headers again of files that were renamed, or grew, since they were written."""
        async with self._describing:
            heads = [self.head(node, 0, 0, node.chunks[0].extents[0]) for node in nodes if self._is_out_of_date(node)]
            if heads:
                await self._write(heads)

    def _is_out_of_date(self, node: Node) -> bool:
        """The header of its first extent has to be written again, and may be; then it counts as written."""
        identity, chunk = identity_of(node), node.chunks.get(0)
        if identity == node.described or chunk is None or not chunk.extents:
            return False
        node.described = identity
        extent, slabs = chunk.extents[0], self.core.slabs
        is_ours = slabs.holds(self.core.geometry.slab_of(extent.addr)) and slabs.is_durable(extent.addr)
        if extent.state != FRESH and not is_ours:
            return False  # another host may free the slot, and use it again
        extent.slot_size = slabs.slot_size(extent.addr)  # perhaps the slab was another's when it was read
        return True

    async def _write(self, heads: Sequence[Head]) -> None:
        with self.core.reads.reading():  # a slot that is given up meanwhile is nobody else's yet
            await self.core.segments.write(transfers(self.core.superblock, heads))

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
        free, locate = bytes(layout.HEADER_SIZE), self.core.geometry.locate_header
        try:
            await self.core.segments.write([Transfer(*locate(slot.addr, slot.size), free) for slot in slots])
        except EngineError as error:
            log.warning("headers of %d freed slots could not be written: %s", len(slots), error)


def identity_of(node: Node) -> tuple[int, bytes, int, int, int, int]:
    """What the headers say of a file: it is other when they have to be written again."""
    return node.parent, node.name, node.mode, node.uid, node.gid, node.size
