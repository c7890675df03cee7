"""The frames of a log of what is not stored: see `kept_unstored`, which writes them, and `names.restoring`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvfuse.kept.log import Piece

if TYPE_CHECKING:
    from kvfuse.volume.inodes.chunk import Chunk
    from kvfuse.volume.inodes.node import Node

NOTHING_STAGED, LOST = -1, -2
"""instead of the length of what is staged of a chunk"""


class ExtentState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """As `chunk.Extent`."""

    addr: int
    slot_size: int
    length: int
    reach: int
    generation: int
    checksums: bytes
    packing: bytes


class ChunkState(msgspec.Struct, array_like=True, frozen=True):
    """A chunk of a file."""

    ino: int
    index: int
    extents: tuple[ExtentState, ...]
    staged_length: int = NOTHING_STAGED
    pieces: tuple[Piece, ...] = ()


class NodeState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An inode, as `schema.InodeRecord` has it."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime: int
    mtime: int
    ctime: int
    chunk_size: int
    parent: int
    name: bytes
    rdev: int
    target: bytes
    flags: int
    far_blocks: int
    namespace: int
    own_record: bool
    attributes: tuple[tuple[bytes, bytes | None], ...] = ()
    """(key, value) of those that are not stored, of a file without names"""


class Frame(msgspec.Struct, array_like=True):
    """Changes that belong together. What ends comes before what is set."""

    nodes: list[NodeState] = []
    chunks: list[ChunkState] = []
    names: list[tuple[int, bytes, int]] = []
    """(directory, name, inode or 0)"""
    times: list[tuple[int, int, int, int]] = []
    """(directory, atime, mtime, ctime)"""
    attributes: list[tuple[bytes, bytes | None]] = []
    """key and value of a record; None: removed"""
    no_nodes: list[int] = []
    """with all their chunks"""
    no_chunks: list[tuple[int, int]] = []
    no_names: list[tuple[int, bytes]] = []
    no_times: list[int] = []
    no_attributes: list[bytes] = []


encode_frame = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(Frame).decode


def state_of(node: Node) -> NodeState:
    return NodeState(
        node.ino,
        node.mode,
        node.uid,
        node.gid,
        node.nlink,
        node.size,
        node.atime,
        node.mtime,
        node.ctime,
        node.chunk_size,
        node.parent,
        node.name,
        node.rdev,
        node.target,
        node.flags,
        node.far_blocks,
        node.namespace,
        node.own_record,
        () if node.nlink else tuple(node.unstored_attributes.items()),
    )


def extents_of(chunk: Chunk | None) -> tuple[ExtentState, ...]:
    if chunk is None:
        return ()
    return tuple(
        [
            ExtentState(one.addr, one.slot_size, one.length, one.reach, one.generation, one.checksums, one.packing)
            for one in chunk.extents
        ]
    )
