"""What the store has of files that are unlinked while they are open: only slots that are in a commit."""

from __future__ import annotations

import msgspec

from kvfuse.volume.inodes.chunk import COMMITTED, Chunk
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

MADE_LATER = b""
"""in place of an orphan record in ``Node.extra``: the commit makes it, unless the inode was reaped before"""


def orphan_records(node: Node) -> dict[bytes, bytes | None]:
    """The orphan record of such a file, and those of its changed chunks. key -> value, None: to be deleted."""
    record = node.record()
    inline = tuple([_committed(node.chunks.get(index)) for index in range(len(record.chunks))])
    record = msgspec.structs.replace(record, chunks=inline)
    records: dict[bytes, bytes | None] = {schema.orphan_key(node.ino): schema.encode_inode(record)}
    for index in node.dirty_chunks:
        extents = _committed(node.chunks.get(index))
        records[schema.chunk_key(node.ino, index)] = schema.encode_chunk(extents) if extents else None
    return records


def _committed(chunk: Chunk | None) -> tuple[schema.ExtentRecord, ...]:
    if chunk is None:
        return ()
    return tuple([extent.record() for extent in chunk.extents if extent.state == COMMITTED])
