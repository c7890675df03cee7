"""One inode that two hosts changed: both changes put together.

Of attributes those hold that were set here, and of the rest those of the other host. Chunk by chunk, what only one of
the two changed is taken over; where both did, the bytes written here are laid over the other's and go to new slots.
Bytes that were appended move to the new end, so that appends of two hosts both survive. Where the file was cut here,
the other host's change comes first, and then the cut, and what was written since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import trio

from kvfuse.errors import EngineError, NoSpace
from kvfuse.remote.records.api import Versioned
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.content.merge_room import MergeRoom
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.content.writer import Staging
from kvfuse.volume.inodes.chunk import FRESH, Chunk, blocks_of
from kvfuse.volume.inodes.core import Core, put_directory
from kvfuse.volume.inodes.node import MovedAgain, Node
from kvfuse.volume.store import schema

ATTEMPTS_MAX = 100
LOOK_SECONDS = 0.02
"""pause before the next commit, while there is no room"""

Bytes = bytes | memoryview
Both = tuple[Bytes, Bytes]
"""a chunk as another host stored it, and as it is here"""
Extents = tuple[schema.ExtentRecord, ...]
Theirs = dict[int, Extents]
"""chunk -> its extents as they are stored now"""


@dataclass
class Merger:
    """Puts other hosts' changes into inodes that were changed here. One of each membership."""

    core: Core
    chunks: Chunks
    reader: Reader
    staging: Staging
    news: KernelNews

    def __post_init__(self) -> None:
        self.room = MergeRoom(self.core)

    async def merge(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        """Bring a changed inode up to ``record``, which another host stored. EngineError: to be tried again.

        Where there is no room just now, the inode is left as it is, and its next commit is refused once more.
        Bytes are read first; if the inode changes here meanwhile, again. Then everything is done in one step.
        """
        if node.version < version and node.nlink:
            await self._merge(node, record, version)
        self.core.places.set_content_version(node.ino, 0)
        self.news.content(node.ino)

    async def _merge(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        if not node.is_file or node.base is None or not _is_content_changed(node.base, record):
            self._merge_attributes(node, record, version)
            return
        for _ in range(ATTEMPTS_MAX):
            cut_size, version_before = node.cut_size, version
            far = _far_needed(node, record) | await self._far_cut_off(node, record)
            record, version, theirs = await self._read_theirs(node, record, version, sorted(far))
            if cut_size is not None and version != version_before:
                continue  # perhaps there are more chunks behind the cut
            if node.cut_size != cut_size or not theirs.keys() >= _far_needed(node, record):
                continue
            both = self._changed_by_both(node, record, theirs)
            seen = {index: _look(node.chunks[index]) for index in both}
            read = {index: await self._read_both(node, index, theirs[index]) for index in both}
            moved_from = _moved_from(node, record)
            tail = await self._read_tail(node, record, theirs, read)
            if not node.nlink:
                return
            still = self._changed_by_both(node, record, theirs)
            is_known = theirs.keys() >= _far_needed(node, record)
            is_known = is_known and (node.cut_size, _moved_from(node, record)) == (cut_size, moved_from)
            if is_known and still == both and all(_look(node.chunks[index]) == seen[index] for index in both):
                break
        else:
            raise EngineError(f"inode {node.ino} changes faster than another host's changes can be put to it")
        if self.room.is_to_wait(node, _lengths(node, record.size, read, tail)):
            await trio.sleep(LOOK_SECONDS)  # nothing of the inode has changed, so the next commit is refused again
            return
        size_before = node.size
        self._merge_chunks(node, record, theirs, read)
        self._merge_attributes(node, record, version)
        if tail is not None:
            node.appends = True
            try:
                self.staging.lay(node, record.size, *tail)
            except NoSpace:
                _lose(self.core, node)
        node.end_moved += node.size - size_before

    def _merge_attributes(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        base = node.base or record
        node.nlink += record.nlink - base.nlink
        fields = ("mode", "uid", "gid", "flags", "chunk_size", "target")
        taken = {field: getattr(record, field) for field in fields if getattr(node, field) == getattr(base, field)}
        if any(taken.get(field, getattr(node, field)) != getattr(node, field) for field in ("mode", "uid", "gid")):
            self.core.readers_change(node)
        for field, value in taken.items():
            setattr(node, field, value)
        node.flags |= record.flags & (schema.FLAG_XATTRS | schema.FLAG_CHUNK_RECORDS)  # records that only a flag names
        node.atime = _merged_time(node.atime, base.atime, record.atime)
        node.mtime = _merged_time(node.mtime, base.mtime, record.mtime)
        node.ctime = max(node.ctime, record.ctime)
        if node.is_directory:
            put_directory(self.core, node, record.parent)
            if node.namespace != record.namespace:
                self.core.namespaces.moves_border(node.ino)
                node.namespace = record.namespace
        node.base, node.version, node.stored = record, version, True
        self.core.nodes.handover.stored(node.ino)

    # -- reading: this may wait ----------------------------------------------------------------------

    async def _far_cut_off(self, node: Node, record: schema.InodeRecord) -> set[int]:
        """Chunks with records of their own behind the place where the file was cut here."""
        found: set[int] = set()
        if node.cut_size is None or not record.flags & schema.FLAG_CHUNK_RECORDS:
            return found
        after = schema.chunk_key(node.ino, max(schema.INLINE_CHUNKS, -(-node.cut_size // node.chunk_size)) - 1)
        while rows := await self.core.records.scan(schema.chunk_prefix(node.ino), after):
            found.update([schema.chunk_index(row.key) for row in rows])
            after = rows[-1].key
        return found

    async def _read_theirs(
        self, node: Node, record: schema.InodeRecord, version: int, far: list[int]
    ) -> tuple[schema.InodeRecord, int, Theirs]:
        """(record, version, extents of all inline chunks and of those in ``far``): of one moment."""
        rows: list[Versioned | None] = []
        if far:
            key = schema.inode_key(node.ino) if node.own_record else schema.entry_key(node.parent, node.name)
            found, *rows = await self.core.records.get([key, *[schema.chunk_key(node.ino, index) for index in far]])
            decode = schema.decode_inode if node.own_record else schema.decode_entry
            entry = decode(found.value) if found is not None else None
            if found is None or not isinstance(entry, schema.InodeRecord) or entry.ino != node.ino:
                raise MovedAgain(f"inode {node.ino} was moved or removed by another host once more")
            record, version = entry, found.version
        inline = [*record.chunks, *[()] * schema.INLINE_CHUNKS][: schema.INLINE_CHUNKS]
        theirs: Theirs = dict(enumerate(inline))
        for index, row in zip(far, rows, strict=True):
            theirs[index] = schema.decode_chunk(row.value) if row is not None else ()
        return record, version, theirs

    def _changed_by_both(self, node: Node, record: schema.InodeRecord, theirs: Theirs) -> list[int]:
        """Chunks of which bytes of both hosts are needed; also those from which appended bytes move away."""
        moved_from = _moved_from(node, record)
        found = []
        for index, extents in theirs.items():
            chunk = node.chunks.get(index)
            if chunk is not None and chunk.base is not None:
                reach = index * node.chunk_size + max([high for _, high in chunk.dirty], default=0)
                if chunk.base != extents or (moved_from is not None and reach > moved_from):
                    found.append(index)
        return found

    async def _read_both(self, node: Node, index: int, theirs: Extents) -> Both:
        chunk = node.chunks.get(index)
        ours: Bytes
        if chunk is None:  # it was cut off while another one was read: who asked looks again
            return b"", b""
        if chunk.staged is not None:
            ours = bytes(chunk.staged.read(0, chunk.staged.length))
        else:
            ours = await self._read_extents([extent.record() for extent in chunk.extents])
        return await self._read_extents(list(theirs)), ours

    async def _read_extents(self, extents: list[schema.ExtentRecord]) -> memoryview:
        view = np.empty(sum(extent.length for extent in extents), np.uint8).data
        parts, start = [], 0
        for extent in extents:
            parts.append(view[start : start + extent.length])
            start += extent.length
        with self.core.reads.reading():
            places = [self.core.locate(extent.addr) for extent in extents]
            await self.core.segments.read([Transfer(*place, part) for place, part in zip(places, parts, strict=True)])
        plain = [await self.reader.extents.check(*pair) for pair in zip(extents, parts, strict=True)]
        return plain[0] if len(extents) == 1 else view  # what is packed is all of its chunk

    async def _read_tail(
        self, node: Node, record: schema.InodeRecord, theirs: Theirs, read: dict[int, Both]
    ) -> tuple[Bytes, bytes] | None:
        """(what the other host has in the chunk in which its bytes end, bytes that were appended here).

        None, if nothing was, or the other host has not changed the end of the file.
        """
        start = _moved_from(node, record)
        if start is None or node.size <= start:
            return None
        index, head = record.size // node.chunk_size, record.size % node.chunk_size
        before: Bytes = b""
        if head:
            before = read[index][0] if index in read else await self._read_extents(list(theirs.get(index, ())))
        return before[:head], bytes(await self.reader.read(node, start, node.size - start))

    # -- putting together: nothing waits -------------------------------------------------------------

    def _merge_chunks(self, node: Node, record: schema.InodeRecord, theirs: Theirs, read: dict[int, Both]) -> None:
        base = node.base
        assert base is not None
        appended_from = _moved_from(node, record)
        has_room = True
        node.content_merges += 1
        for index in [index for index in node.chunks if index >= schema.INLINE_CHUNKS and index not in theirs]:
            if node.chunks[index].base is None:
                del node.chunks[index]  # its record may be another by now
        for index, extents in theirs.items():
            chunk = node.chunks.get(index)
            if chunk is None or chunk.base is None:
                self._take_over(node, index, extents)
            elif index in read and not self._lay_over(node, index, extents, read[index], record.size, appended_from):
                has_room = False
        self._merge_dead(node, theirs)
        node.far_blocks = record.far_blocks + self._far_difference(node, theirs)
        node.set_size(record.size if appended_from is not None else _merged_size(node, base, record))
        if not has_room:
            _lose(self.core, node)
            node.set_size(min(node.size, max(record.size, _reach(node, node.size))))
        # what was appended here stays where it is if the other host has not changed the end
        node.appends = node.appends and has_room and node.cut_size is None and record.size == base.size

    def _merge_dead(self, node: Node, theirs: Theirs) -> None:
        """This host frees stored extents that the file does not have here; another host has freed the rest."""
        kept = {(extent.addr, extent.generation) for chunk in node.chunks.values() for extent in chunk.extents}
        node.dead = [
            self.core.sharing.extent_of(extent, node.namespace)
            for extents in theirs.values()
            for extent in extents
            if (extent.addr, extent.generation) not in kept
        ]
        self.core.givers[node] = None

    def _far_difference(self, node: Node, theirs: Theirs) -> int:
        """Units that the changed far chunks have more here than they are stored with."""
        difference = 0
        for index, extents in theirs.items():
            if index >= schema.INLINE_CHUNKS:
                kept = node.chunks[index].extents if index in node.chunks else []
                difference += blocks_of(kept) - blocks_of(extents)
        return difference

    def _take_over(self, node: Node, index: int, extents: Extents) -> None:
        """A chunk that was not changed here; what is behind a cut is given up."""
        chunk = node.chunks.get(index)
        if node.cut_size is not None and index * node.chunk_size >= node.cut_size:
            node.changing(index)
            node.chunks.pop(index, None)
            if extents and index >= schema.INLINE_CHUNKS:
                chunk = node.chunks[index] = Chunk()
                chunk.base = extents
                node.chunk_changed(index)  # the next commit deletes its record
            return
        if chunk is not None and tuple([extent.record() for extent in chunk.extents]) == extents:
            return
        node.changing(index)
        if extents or chunk is not None:
            chunk = node.chunks.setdefault(index, Chunk())
            chunk.extents = [self.core.sharing.extent_of(extent, node.namespace) for extent in extents]

    def _lay_over(
        self, node: Node, index: int, extents: Extents, both: Both, stored_size: int, appended_from: int | None
    ) -> bool:
        """A chunk that both changed: what was written here stands over what is stored now, and is staged anew.

        False where there is no room for that: the chunk is what is stored, as far as it was not cut off here.
        """
        (stored, ours), chunk, start = both, node.chunks[index], index * node.chunk_size
        kept = len(stored) if node.cut_size is None else min(len(stored), max(0, node.cut_size - start))
        merged = bytearray(stored[: min(kept, max(0, stored_size - start))])
        laid: list[tuple[int, int]] = []
        for low, high in chunk.dirty:
            end = min(high, len(ours))
            if appended_from is not None:
                end = min(end, appended_from - start)
            if low < end:
                if len(merged) < low:
                    merged.extend(bytes(low - len(merged)))
                merged[low:end] = ours[low:end]
                laid.append((low, end))
        node.changing(index)
        self.chunks.unstage(node, chunk)
        for extent in chunk.extents:
            if extent.state == FRESH:
                self.core.discard(node, extent)
        node.born = [extent for extent in node.born if extent.state == FRESH]
        chunk.extents = [self.core.sharing.extent_of(extent, node.namespace) for extent in extents]
        node.dirty_chunks = {*node.dirty_chunks} - {index}
        chunk.base, chunk.dirty = extents, []
        if 0 < kept < len(stored):
            self.chunks.cut_chunk(node, index, kept, stored[:kept])
        elif kept < len(stored):
            self.chunks.drop_chunk(node, index)
        if not laid or not self._stage(node, chunk, merged):
            if kept == len(stored):
                chunk.base = None
            return not laid
        node.chunks[index], chunk.dirty = chunk, laid
        node.chunk_changed(index)
        return True

    def _stage(self, node: Node, chunk: Chunk, merged: bytearray) -> bool:
        """False where there is no room for that."""
        try:
            self.staging.stage_copy(node, chunk, merged)
        except NoSpace:
            return False
        return True


def _lengths(node: Node, stored_size: int, read: dict[int, Both], tail: tuple[Bytes, bytes] | None) -> list[int]:
    """Bytes, at most, of each chunk that is to be staged and has no slots for that yet."""
    ends = {index: max(map(len, both)) for index, both in read.items()}
    if tail is not None:
        size = stored_size + len(tail[1])
        for index in range(stored_size // node.chunk_size, -(-size // node.chunk_size)):
            ends[index] = max(ends.get(index, 0), min(node.chunk_size, size - index * node.chunk_size))
    return [end for index, end in ends.items() if end and not (index in node.chunks and node.chunks[index].staged)]


def _is_content_changed(base: schema.InodeRecord, record: schema.InodeRecord) -> bool:
    is_same = record.chunks == base.chunks and record.size == base.size
    return not is_same or bool(record.flags & schema.FLAG_CHUNK_RECORDS)


def _merged_time(ours: int, base: int, theirs: int) -> int:
    """Either may have been set to the past."""
    if ours == base:
        return theirs
    return ours if theirs == base else max(ours, theirs)


def _lose(core: Core, node: Node) -> None:
    """Bytes that were taken here are given up. The next fsync or close of the file reports it."""
    error = NoSpace(f"inode {node.ino}: no room to put the changes of two hosts together, some of ours are lost")
    core.doubt.lose(node, error, is_new=True)


def _merged_size(node: Node, base: schema.InodeRecord, record: schema.InodeRecord) -> int:
    """Of a file in which nothing was appended behind what is stored, or the other host left the size as it was."""
    if node.cut_size is None and node.size == base.size:
        return max(record.size, _reach(node, node.size))  # theirs, but for what was written here
    return node.size if node.cut_size is not None or record.size == base.size else max(node.size, record.size)


def _reach(node: Node, size: int) -> int:
    """Where the last bytes end that were written here within the first ``size`` of the file."""
    ends = [
        index * node.chunk_size + high
        for index, chunk in node.chunks.items()
        if chunk.base is not None
        for low, high in chunk.dirty
        if index * node.chunk_size + low < size
    ]
    return min(size, max(ends, default=0))


def _moved_from(node: Node, record: schema.InodeRecord) -> int | None:
    """Where in the file the bytes begin that were appended here, if the end is elsewhere by now."""
    if node.base is None or not node.appends or node.cut_size is not None or record.size == node.base.size:
        return None
    return node.base.size if _reach(node, node.base.size) <= record.size else None


def _far_needed(node: Node, record: schema.InodeRecord) -> set[int]:
    """Chunks with records of their own: those that were changed here, and that behind which appended bytes go."""
    needed = {index for index, chunk in node.chunks.items() if chunk.base is not None}
    if _moved_from(node, record) is not None:
        needed.add(record.size // node.chunk_size)
    return {index for index in needed if index >= schema.INLINE_CHUNKS}


def _look(chunk: Chunk) -> tuple[object, ...]:
    """A value that differs once the chunk was changed."""
    staged_length = chunk.staged.length if chunk.staged is not None else 0
    return chunk.staged, staged_length, [*chunk.extents], chunk.length, len(chunk.dirty), chunk.dirty[-1:]
