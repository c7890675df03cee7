"""Chunks of files in memory: loaded from their records, shortened, and given up with their slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, granule_checksums
from kvfuse.volume.inodes.chunk import COMMITTED, Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import NO_ATTRIBUTES, Node
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.store import schema
from kvfuse.volume.store.extents import cut

Bytes = bytes | bytearray | memoryview


@dataclass
class Chunks:
    """Puts chunks into nodes, and takes them away. One of each membership; the nodes own the chunks."""

    core: Core
    flusher: Flusher

    # -- from records --------------------------------------------------------------------------------

    def restore_chunks(self, node: Node, record: schema.InodeRecord) -> Node:
        """Give a node decoded from ``record`` its inline chunks."""
        for index, extents in enumerate(record.chunks):
            if extents:
                node.chunks[index] = self._restore(node, extents)
        if record.chunks and record.chunks[0]:
            node.described = (-1, b"", 0, 0, 0, 0)
        return node

    def _restore(self, node: Node, records: Iterable[schema.ExtentRecord]) -> Chunk:
        return Chunk([self.core.sharing.extent_of(record, node.namespace) for record in records])

    async def load_chunk(self, node: Node, index: int) -> Chunk | None:
        """The chunk, from its record where it has one of its own; None for a hole."""
        while True:
            chunk = node.chunks.get(index)
            if chunk is not None or index < schema.INLINE_CHUNKS or not node.flags & schema.FLAG_CHUNK_RECORDS:
                return chunk
            merges = node.content_merges
            found = (await self.core.records.get([schema.chunk_key(node.ino, index)]))[0]
            if node.content_merges != merges:
                continue  # what was read may be older than what is known by now
            if found is None or index in node.chunks or index in node.dirty_chunks:
                return node.chunks.get(index)
            node.chunks[index] = self._restore(node, schema.decode_chunk(found.value))

    async def load_all(self, node: Node, first: int = 0) -> None:
        """Have every chunk from ``first`` on in memory."""
        if not node.flags & schema.FLAG_CHUNK_RECORDS:
            return
        prefix = schema.chunk_prefix(node.ino)
        start = schema.chunk_key(node.ino, first - 1) if first > 0 else b""
        after, merges = start, node.content_merges
        while True:
            rows = await self.core.records.scan(prefix, after)
            if node.content_merges != merges:  # as in `load_chunk`
                after, merges = start, node.content_merges
                continue
            for row in rows:
                index = schema.chunk_index(row.key)
                if index not in node.chunks and index not in node.dirty_chunks:
                    node.chunks[index] = self._restore(node, schema.decode_chunk(row.value))
            if not rows:
                return
            after = rows[-1].key

    # -- given up ------------------------------------------------------------------------------------

    def cut_chunk(self, node: Node, index: int, length: int, before: Bytes) -> None:
        """Shorten one chunk to ``length`` > 0 bytes, in its slots. Nothing waits.

        ``before``: bytes in front of there; all that the granule has in which the chunk is cut, or more.
        """
        chunk = node.chunks[index]
        node.changing(index)
        self.core.sharing.changes(chunk)
        staged = chunk.staged
        if staged is not None and staged.length > length:
            self.flusher.grew(length - staged.length)
            staged.truncate(length)
        if chunk.length > length and chunk.extents[0].packing:
            node.changing(index)
            (only,) = chunk.extents
            only.packing = cut(only.packing, length)
            node.set_extents(index, chunk.extents)
        elif chunk.length > length:
            kept = extents_within(chunk.extents, length)
            last, last_length = kept[-1], length - chunk.start_of(kept[-1])
            if last.checksums and last_length < last.length:
                whole, rest = divmod(last_length, GRANULE_SIZE)
                tail = memoryview(before)[len(before) - rest :]
                last.checksums = last.checksums[: whole * CHECKSUM_SIZE] + granule_checksums(tail)
                last.verified &= (1 << whole) - 1
            node.resize(index, last, last_length)
            for extent in chunk.extents[len(kept) :]:
                self.core.discard(node, extent)
            node.set_extents(index, kept)

    def drop_chunk(self, node: Node, index: int) -> None:
        """Give up a chunk: the inode's next record frees its slots."""
        node.changing(index)
        chunk = node.chunks[index]
        self.unstage(node, chunk)
        self.core.sharing.changes(chunk)
        for extent in chunk.extents:
            self.core.discard(node, extent)
        node.set_extents(index, [])
        if index < schema.INLINE_CHUNKS:
            del node.chunks[index]  # of the others the empty chunk stays, until the store knows that it is gone

    def unstage(self, node: Node, chunk: Chunk) -> None:
        """Give up what is staged of the chunk, with its slots."""
        staged = chunk.staged
        if chunk.writing is not None:
            self.flusher.drop(chunk.writing)
        if staged is not None:
            self.flusher.unstage(node, chunk)
            if not staged.writing:
                self.flusher.cancel(staged, staged.slots)

    def drop_all(self, node: Node) -> dict[bytes, bytes | None]:
        """The inode is no more: its extents are dead, its staged bytes gone. Every chunk must be loaded (`load_all`).

        Returns the records that go with them.
        """
        records: dict[bytes, bytes | None] = {}
        for index in list(node.chunks):
            self.drop_chunk(node, index)
            if index >= schema.INLINE_CHUNKS:
                records[schema.chunk_key(node.ino, index)] = None
        node.born = []
        node.dirty_chunks = frozenset()
        node.end_map()
        return records

    def reap_unstored(self, node: Node) -> None:
        """Free what no record names of an inode without names and handles; an orphan record names the rest."""
        core = self.core
        core.unnamed.pop(node.ino, None)
        core.nodes.note_saved(node)
        node.reaped = True
        self.drop_all(node)
        node.dead = []
        if not core.places.known(node.ino):
            core.nodes.drop(node)

    def revive(self, node: Node) -> None:
        """An inode that was removed here is alive: it is read anew, and open files go on with what is read then."""
        node.unstored_attributes = NO_ATTRIBUTES
        if node.reaped or not node.handles:
            self.reap_unstored(node)
            self.core.nodes.drop(node)

    # -- for people ----------------------------------------------------------------------------------

    def describe_chunk(self, node: Node, index: int) -> list[dict[str, object]]:
        """Rows about a chunk's extents, and what is staged over them."""
        chunk = node.chunks[index]
        if chunk.staged is not None:
            return [{"chunk": index, "piece": 0, "staged": True, "length": chunk.staged.length}]
        rows: list[dict[str, object]] = []
        for piece, extent in enumerate(chunk.extents):
            segment, offset = self.core.locate(extent.addr)
            rows.append(
                {
                    "chunk": index,
                    "piece": piece,
                    "staged": False,
                    "segment": segment,
                    "offset": offset,
                    "slab": self.core.geometry.slab_of(extent.addr),
                    "slot_size": extent.slot_size,
                    "length": extent.length,
                    "sealed": bool(extent.checksums),
                    "granules": len(extent.checksums) // CHECKSUM_SIZE,
                    "generation": extent.generation,
                    "packed": bool(extent.packing),
                }
            )
        return rows


def forget_lost(node: Node) -> None:
    """Of an inode found after a crash: leave out extents that never were in a commit."""
    for chunk in node.chunks.values():
        chunk.extents = [extent for extent in chunk.extents if extent.state == COMMITTED]


def extents_within(extents: list[Extent], length: int) -> list[Extent]:
    """Those that have some of the first ``length`` bytes."""
    starts = accumulate([extent.span for extent in extents], initial=0)
    return [extent for extent, start in zip(extents, starts, strict=False) if start < length]
