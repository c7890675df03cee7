"""Blocks of the shared-memory tier that a daemon before this one left: looked at when their files are asked for.

Such a block is used if the file's record, as it is now, says that these are its bytes: each of its extents is sealed,
and its checksums are those of the bytes in the block; where it is compressed, its slot is the one that the block's row
names (`tier/arena_rows`), and the row's checksum is that of the bytes. So it does not matter what the daemon before
this one was doing when it was killed, nor what other hosts did to the file since. And the file has to have the readers
that the arena has. Else the block is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from kvfuse.checksum import crc32c, granule_checksums
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.tier.arena_rows import packed_token
from kvfuse.volume.tier.shared_tier import ReadClass, TierBlock

log = logging.getLogger(__name__)

LOOKS_HERE_MAX = 1 << 20
"""Bytes that are looked at on the event loop, in a tenth of a millisecond or two: a thread costs as much."""


class _Piece(NamedTuple):
    """What a record says of a part of a file: an extent."""

    chunk: int
    start: int
    length: int
    addr: int
    generation: int
    checksums: bytes
    """of the bytes; empty: they are compressed, and it has none"""


@dataclass
class KeptCopies:
    """For the readers of one membership. Event loop only."""

    core: Core
    chunks: Chunks

    async def admit(self, node: Node) -> TierBlock | None:
        """The block of a file that was left, once it was found right: now, or by somebody else meanwhile.

        None: there is none, or it was none of these bytes, or somebody is about to write to the file. EngineError.
        """
        tier = self.core.tier
        block = tier.look_at_left(node.ino)
        if block is None:
            return tier.kept.get(node.ino)
        if node.writers or node.lock is not None:
            return None
        for index in range(-(-min(node.size, block.size) // node.chunk_size)):
            if index not in node.chunks:
                await self.chunks.load_chunk(node, index)
        pieces = _pieces(node, block)
        if pieces is not None and await _has(block, pieces):
            if _pieces(node, block) == pieces:  # nothing has waited since
                if len(pieces) == 1 and pieces[0].checksums:
                    block.checksums = pieces[0].checksums
                return block if tier.admit(node.ino, block, self._name(node)) else tier.kept.get(node.ino)
        elif pieces is not None:
            log.warning("the bytes of inode %d in shared memory are others than its record says: dropped", node.ino)
        tier.drop(node.ino)
        return None

    def _name(self, node: Node) -> bytes:
        """By which clients may find the file: its name, while it means the file."""
        dentry = self.core.dentries.get(node.parent, node.name)
        if dentry.change is not None:
            return node.name if dentry.change.node is node else b""
        return node.name if dentry.ino == node.ino else b""


def _pieces(node: Node, block: TierBlock) -> list[_Piece] | None:
    """Extents that have all bytes of a file. None: the block cannot be compared with them, or has other readers."""
    is_like = node.is_file and node.nlink and not node.own_record and node.size == block.size
    if not is_like or node.reaped or read_class(node) != block.read_class:
        return None
    pieces: list[_Piece] = []
    end = 0
    for index in range(-(-node.size // node.chunk_size)):
        chunk = node.chunks.get(index)
        if chunk is None or chunk.staged is not None or end != index * node.chunk_size:
            return None  # the rest of the chunk before are zeros
        for extent in chunk.extents:
            if not extent.checksums:
                return None
            checksums = b"" if extent.packing else extent.checksums
            pieces.append(_Piece(index, end, extent.span, extent.addr, extent.generation, checksums))
            end += extent.span
    return pieces if end == node.size else None


async def _has(block: TierBlock, pieces: Sequence[_Piece]) -> bool:
    if block.size <= LOOKS_HERE_MAX:
        return _has_now(block, pieces)
    return await trio.to_thread.run_sync(_has_now, block, pieces)


def _has_now(block: TierBlock, pieces: Sequence[_Piece]) -> bool:
    data, token = block.buffer.data, 0
    for one in pieces:
        if not one.checksums:
            token ^= packed_token(one.chunk, one.addr, one.generation)
        elif granule_checksums(data[one.start : one.start + one.length]) != one.checksums:
            return False
    return not token or block.packed() == (token, crc32c(data))


def read_class(node: Node) -> ReadClass:
    """The read class of a file, for its copy in the tier."""
    return ReadClass(node.parent, node.uid, node.gid, node.mode & 0o444)
