"""Inodes in memory, and what the kernel holds of them.

A `Node` is a decoded inode with its file's chunks. Nodes are kept while they are changed, open or
unlinked, else up to a bound; of every other inode the kernel knows only its place is kept (`Places`),
a few dozen bytes each, so that a million known files fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from stat import S_IFDIR, S_IFMT, S_IFREG
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec
import trio

from kvfuse.errors import EngineError, NoSpace
from kvfuse.volume.inodes.chunk import COMMITTED, Chunk, Extent, blocks_of
from kvfuse.volume.store import schema
from kvfuse.volume.views.content_map import ContentMap

if TYPE_CHECKING:
    from kvfuse.volume.views.tier import SharedTier

EVICTION_LOOKS = 4
"""Nodes that are looked at when one is added beyond the bound: two for each that goes, and some for those that stay."""
NO_ATTRIBUTES: Mapping[bytes, bytes | None] = MappingProxyType({})


class MovedAgain(EngineError):
    """Another host moved or removed the inode after its record was read."""


class Node:
    """One inode in memory. Everything but ``chunks`` mirrors its record; see `schema.InodeRecord`."""

    __slots__ = (
        "__weakref__",
        "appends",
        "aside",
        "atime",
        "atime_moved",
        "base",
        "born",
        "capability_free",
        "changed",
        "chunk_size",
        "chunks",
        "committing",
        "complete",
        "content_merges",
        "ctime",
        "cut_size",
        "dead",
        "described",
        "dirty_chunks",
        "end_moved",
        "extra",
        "far_blocks",
        "flags",
        "flushed_size",
        "forced",
        "forgotten",
        "gid",
        "handles",
        "heir",
        "ino",
        "is_directory",
        "is_file",
        "lock",
        "lost",
        "map",
        "mode",
        "moved_to",
        "moved_version",
        "mtime",
        "name",
        "named",
        "nlink",
        "own_record",
        "parent",
        "rdev",
        "reaped",
        "recent",
        "reserved",
        "size",
        "staged_count",
        "stored",
        "stored_epoch",
        "target",
        "tier",
        "times_changed",
        "times_version",
        "uid",
        "unstored_attributes",
        "version",
        "writers",
        "xattr_names",
    )

    def __init__(self, ino: int, mode: int, uid: int, gid: int, chunk_size: int) -> None:
        self.ino = ino
        self.mode = mode
        self.is_directory = S_IFMT(mode) == S_IFDIR
        self.is_file = S_IFMT(mode) == S_IFREG
        self.uid = uid
        self.gid = gid
        self.nlink = 1
        self.rdev = 0
        self.size = 0
        self.flushed_size = 0
        """the size when the last flush for a commit began, or what was cut since: up to here all bytes are in slots

        It is stored as the size while more is staged. What came to slots behind it is in the record already.
        """
        self.atime = self.mtime = self.ctime = 0
        self.atime_moved = False
        """by a read, and no commit since had the inode"""
        self.flags = 0
        self.target = b""
        self.parent = 0
        """directory the (only) name is in"""
        self.name = b""
        """the only name of an inode whose record is inline"""
        self.chunk_size = chunk_size
        self.chunks: dict[int, Chunk] = {}
        self.map: ContentMap | None = None
        """what other threads know of the content: before it changes comes `changing`, `resize` or `set_size`"""
        self.tier: SharedTier | None = None
        """which may have a copy of the content; None: not in memory yet"""
        self.own_record = False
        """the inode has a record of its own: directories, and files that ever had two names"""
        self.stored = False
        """the record store knows the inode"""
        self.stored_epoch = 0
        """of the journal, when the last commit that carried the inode was settled; 0: it was not since it was read"""
        self.changed = False
        """its record is to be put; in the journal's care"""
        self.committing = False
        """its record is on its way to the store: what the store answers may be old"""
        self.named = False
        """got a name since the last flush of its staged bytes began"""
        self.aside = False
        """changed, and no commit looks at it, as it is open for writing; see `late`. The journal's alone"""
        self.forced = False
        """to be in the next commit even if it is open for writing"""
        self.handles = 0
        self.writers = 0
        """handles open for writing"""
        self.staged_count = 0
        self.far_blocks = 0
        """512-byte units of the chunks that have records of their own, loaded or not"""
        self.dirty_chunks: AbstractSet[int] = frozenset()
        """chunks with records of their own that changed"""
        self.born: list[Extent] = []
        """extents that the next record of this inode names for the first time"""
        self.dead: list[Extent] = []
        """extents that the next record of this inode no longer names, or that a file had whose name it took"""
        self.extra: dict[bytes, bytes | None] = {}
        """records that change together with this one's"""
        self.heir: Node | None = None
        """of an unlinked inode: the one that took its name, and settles what is left in its own commit"""
        self.described: tuple[int, bytes, int, int, int, int] | None = None
        """what the slot headers say of this file, see flush.description"""
        self.reaped = False
        """without names, and its bytes are gone"""
        self.complete = False
        """everything that goes with the inode is in memory: it may be removed"""
        self.unstored_attributes = NO_ATTRIBUTES
        """of a file without names: record key -> value of an attribute that the store does not get; None: it is gone"""
        self.xattr_names: frozenset[bytes] = frozenset()
        """names of attributes seen; all of them when ``complete``"""
        self.capability_free = False
        """``security.capability`` was looked for, and is not there"""
        self.times_changed = False
        """a directory's times are not in the store yet"""
        self.lock: trio.Lock | None = None
        self.lost: NoSpace | None = None
        """what is to be said of bytes that were taken, and given up since; once"""
        self.recent = True
        self.reserved = 0
        """bytes of records that its next commit may add; see `metadata`"""
        self.moved_to: tuple[int, bytes] | None = None
        """(directory, name) where another host has put the record, while the inode was changed here"""
        self.moved_version = 0
        """that it has there"""
        self.times_version = 0
        """of the record of a directory's times that memory has, or had before they were changed here"""
        self.version = 0
        """of the record that the inode stands in, where others write the store, too; 0: it is not stored"""
        self.base: schema.InodeRecord | None = None
        """the inode as it was last known to be stored, where others write the store, too"""
        self.cut_size: int | None = None
        """where what is stored of the file ends here, which was cut; what was written behind is ours alone"""
        self.appends = False
        """all that was written behind the size of ``base`` was appended, wherever that is"""
        self.end_moved = 0
        """bytes by which other hosts' changes have moved the end of the file, while it was in memory"""
        self.content_merges = 0
        """how often another host's change of the content was put to it: not all chunks are in memory any more"""
        self.forgotten = False
        """of a membership that is over: nothing of it is stored any more"""

    @property
    def blocks(self) -> int:
        """512-byte units in slots; what is still staged counts by its length."""
        count = self.far_blocks
        for index, chunk in self.chunks.items():
            if index < schema.INLINE_CHUNKS:
                count += chunk.blocks
            elif chunk.staged is not None and not chunk.extents:
                count += -(-chunk.staged.length // 4096) * 8
        return count

    def chunk_changed(self, index: int) -> None:
        """A chunk's own record, where it has one, is to be put, or deleted, with the inode's."""
        if index < schema.INLINE_CHUNKS:
            return
        if isinstance(self.dirty_chunks, set):
            self.dirty_chunks.add(index)
        else:
            self.dirty_chunks = {index}

    def changing(self, index: int) -> None:
        """The bytes of a chunk are about to change, or to lose their place: other threads find them no more."""
        if self.tier is not None and self.ino in self.tier.kept:
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.hide(index)

    def forget_copy(self) -> None:
        """The file is about to have other readers, or more than one name: no block of the tier may have its bytes."""
        if self.tier is not None:
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.hide_copies()

    def set_size(self, size: int) -> None:
        if size == self.size:
            return
        if self.tier is not None and self.ino in self.tier.kept:
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.resize(size)
        self.size = size

    def end_map(self) -> None:
        """The inode leaves memory, or its bytes are gone: nobody will say any more when they change."""
        if self.map is not None:
            self.map.end()
            self.map = None

    def set_extents(self, index: int, extents: list[Extent]) -> None:
        """Let a chunk consist of other extents; giving up the old ones' slots is the caller's.

        Where these are not the same bytes as before, the caller said so before (`changing`).
        """
        chunk = self.chunks[index]
        if index >= schema.INLINE_CHUNKS:
            self.flags |= schema.FLAG_CHUNK_RECORDS
            self.chunk_changed(index)
            self.far_blocks += blocks_of(extents) - blocks_of(chunk.extents)
        chunk.extents = extents

    def resize(self, index: int, extent: Extent, length: int) -> None:
        """An extent of a chunk grew or was shortened, in its slot."""
        self.changing(index)
        if index >= schema.INLINE_CHUNKS:
            self.chunk_changed(index)
            self.far_blocks += (-(-length // 4096) - -(-extent.length // 4096)) * 8
        extent.length = length
        extent.reach = max(extent.reach, length)

    @property
    def busy(self) -> bool:
        """May not be dropped from memory."""
        return bool(
            self.changed
            or self.committing
            or self.times_changed
            or self.handles
            or self.staged_count
            or self.nlink == 0
            or self.born
            or self.dead
            or self.lock
        )

    def record(self) -> schema.InodeRecord:
        """The inode as the record store shall know it: without bytes that are not yet in slots."""
        inline = []
        for index in range(min(max(self.chunks, default=-1) + 1, schema.INLINE_CHUNKS)):
            chunk = self.chunks.get(index)  # also behind the size, see `flushed_size`
            inline.append(tuple([extent.record() for extent in chunk.extents]) if chunk else ())
        while inline and not inline[-1]:
            inline.pop()
        return schema.InodeRecord(
            self.ino,
            self.mode,
            self.uid,
            self.gid,
            self.nlink,
            self.flushed_size if self.staged_count else self.size,
            self.atime,
            self.mtime,
            self.ctime,
            self.chunk_size,
            tuple(inline),
            self.parent if self.is_directory else 0,
            self.rdev,
            self.target,
            self.flags,
            self.far_blocks,
        )

    def orphan_record(self) -> schema.InodeRecord:
        """What is to be freed when this inode, unlinked but open, is gone: slots that are in a commit, no others."""
        record = self.record()
        committed = {
            extent.addr for chunk in self.chunks.values() for extent in chunk.extents if extent.state == COMMITTED
        }
        chunks = tuple([tuple([extent for extent in chunk if extent.addr in committed]) for chunk in record.chunks])
        return msgspec.structs.replace(record, chunks=chunks)

    def stored_length(self) -> int:
        """Bytes in slots, or on their way there; 0 where not all chunks are in memory."""
        if self.flags & schema.FLAG_CHUNK_RECORDS and not self.complete:
            return 0
        return sum([chunk.staged.length if chunk.staged else chunk.length for chunk in self.chunks.values()])

    @classmethod
    def from_record(cls, record: schema.InodeRecord) -> Node:
        """Without extents: the caller adds chunks, see `content.chunks`."""
        node = cls(record.ino, record.mode, record.uid, record.gid, record.chunk_size)
        node.nlink = record.nlink
        node.rdev = record.rdev
        node.size = record.size
        node.atime, node.mtime, node.ctime = record.atime, record.mtime, record.ctime
        node.flags = record.flags
        node.target = record.target
        node.parent = record.parent
        node.far_blocks = record.far_blocks
        node.stored = True
        return node


class Nodes:
    """Decoded inodes by number, bounded: what is neither busy nor recently used goes first.

    There is never a second node of an inode: one that had to go while an operation still holds it is found again.
    """

    def __init__(self, count_max: int, tier: SharedTier) -> None:
        self.count_max = count_max
        self.tier = tier
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        """from whose front entries go in constant time; a dict would look at all places of those that went"""
        self._evicted: WeakValueDictionary[int, Node] = WeakValueDictionary()
        self._all_forgotten = False
        self.leaving: Callable[[Node], None] = lambda node: None
        """is told of a node that is about to leave memory; it stays where that makes it busy"""

    def get(self, ino: int) -> Node | None:
        node = self._nodes.get(ino)
        if node is not None:
            node.recent = True
        elif self._evicted:
            node = self._evicted.pop(ino, None)
            if node is not None:
                self.add(node)
        return node

    def peek(self, ino: int) -> Node | None:
        """One that has not left memory; that it was asked for does not keep it there."""
        return self._nodes.get(ino)

    def add(self, node: Node) -> Node:
        node.tier = self.tier
        node.forgotten = self._all_forgotten
        self._nodes[node.ino] = node
        if len(self._nodes) > self.count_max:
            self._evict(EVICTION_LOOKS)
        return node

    def drop(self, node: Node) -> None:
        """Whatever of the inode is asked for next is read anew. Nothing happens where that was done already."""
        if (self._nodes.get(node.ino) or self._evicted.get(node.ino)) is node:
            self._nodes.pop(node.ino, None)
            self._evicted.pop(node.ino, None)

    def forget_all(self) -> None:
        """The membership is over for all of them, and for those that operations under way still add."""
        self._all_forgotten = True
        for node in [*self._nodes.values(), *self._evicted.values()]:
            node.forgotten = True
            node.end_map()

    def _evict(self, looks: int) -> None:
        """Look at a few of the oldest: drop what may go, give the others another round."""
        for _ in range(looks):
            if len(self._nodes) <= self.count_max:
                return
            ino, node = next(iter(self._nodes.items()))
            self._nodes.move_to_end(ino)
            if node.recent or node.busy:
                node.recent = False
                continue
            self.leaving(node)
            if not node.busy:
                del self._nodes[ino]
                node.end_map()
                self._evicted[ino] = node

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)


def check_remembered(*nodes: Node) -> None:
    """EngineError for a node of a membership that is over."""
    for node in nodes:
        if node.forgotten:
            raise EngineError(f"this client lost its lease of the volume: what was changed of inode {node.ino} is lost")


@asynccontextmanager
async def locked(node: Node) -> AsyncIterator[None]:
    """The node's lock, for what must not interleave with other changes of its content."""
    if node.lock is None:
        node.lock = trio.Lock()
    lock = node.lock
    try:
        async with lock:
            yield
    finally:  # a node that has one is taken for one that is being changed
        if not lock.locked():
            node.lock = None
