"""Inodes in memory.

A `Node` is a decoded inode with its file's chunks. Nodes are kept while they are changed, open or
unlinked; others up to a bound. Of other inodes that the kernel knows only their places are kept (`Places`),
some dozen bytes each, so that a million of them fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from stat import S_IFDIR, S_IFMT, S_IFREG
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.volume.inodes.chunk import Chunk, Extent, blocks_of
from kvfuse.volume.store import schema
from kvfuse.volume.views.content_map import ContentMap
from kvfuse.volume.views.handover import Handover

if TYPE_CHECKING:
    from kvfuse.volume.inodes.unstored import Unstored
    from kvfuse.volume.tier.shared_tier import SharedTier

EVICTED_MIN = 1024
"""Evicted nodes that are remembered, at least: operations hold some of them."""
NAMED_MIN = 1024
"""Places of records that are remembered, at least, before those of inodes that are not in memory are dropped."""
REMOVED_MAX = 1 << 16
"""More than there can be removals that wait for a commit (see `commit.pending`)."""
EVICTION_LOOKS = 4
"""Nodes considered for eviction when one is added above the bound: more than one, as some are busy or recent."""
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
        "lost_files",
        "map",
        "mode",
        "moved_to",
        "moved_version",
        "mtime",
        "name",
        "named",
        "namespace",
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
        "unsaved",
        "unstored",
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
        self.namespace = 0
        self.rdev = 0
        self.size = 0
        self.flushed_size = 0
        """the size when the last flush for a commit began, or a smaller one since: all bytes below it are in slots

        It is stored as the size while bytes are staged. The record already has extents in slots behind it.
        """
        self.atime = self.mtime = self.ctime = 0
        self.atime_moved = False
        """``atime`` changed by a read, and no commit has the inode since"""
        self.flags = 0
        self.target = b""
        self.parent = 0
        """directory of the (only) name"""
        self.name = b""
        """the only name of an inode whose record is inline"""
        self.chunk_size = chunk_size
        self.chunks: dict[int, Chunk] = {}
        self.map: ContentMap | None = None
        """the content map for ring threads: call `changing`, `resize` or `set_size` before the content changes"""
        self.tier: SharedTier | None = None
        """the shared-memory tier, which may have a copy of the content; None: the node is not in ``Nodes`` yet"""
        self.unstored: Unstored | None = None
        """who keeps its changes for the next daemon; None: nobody does so far"""
        self.own_record = False
        """the inode has a record of its own: directories, and files that ever had two names"""
        self.stored = False
        """the record store knows the inode"""
        self.stored_epoch = 0
        """the journal's epoch when the last commit with the inode was settled; 0: none was since it was read"""
        self.changed = False
        """the journal is to put its record"""
        self.committing = False
        """a commit with its record is in flight: records read from the store may be stale"""
        self.named = False
        """it got a name since the last flush of its staged bytes began"""
        self.aside = False
        """changed, but commits skip it while it is open for writing; see `late`. Only the journal sets it"""
        self.forced = False
        """the next commit is to have it even if it is open for writing"""
        self.handles = 0
        self.writers = 0
        """handles open for writing"""
        self.staged_count = 0
        self.unsaved = False
        """the next daemon is to know that it has content which is not stored"""
        self.far_blocks = 0
        """512-byte units in chunks with records of their own, loaded or not"""
        self.dirty_chunks: AbstractSet[int] = frozenset()
        """chunks with records of their own that changed"""
        self.born: list[Extent] = []
        """extents that are new in the next record of this inode"""
        self.dead: list[Extent] = []
        """extents that are no longer in the next record of this inode, or were of a file whose name it took"""
        self.extra: dict[bytes, bytes | None] = {}
        """other records that change in the same commit; None: deleted"""
        self.lost_files = 0
        """files that the next commit of this inode removes from the store: itself, or those whose name it took"""
        self.heir: Node | None = None
        """of an unlinked inode: the one that took its name, whose commit frees the former one's slots"""
        self.described: tuple[int, bytes, int, int, int, int] | None = None
        """the file's attributes in the slot headers, see `heads.identity_of`"""
        self.reaped = False
        """it has no names, and its slots were given up"""
        self.complete = False
        """all its chunks and attribute names are in memory, so it can be removed"""
        self.unstored_attributes = NO_ATTRIBUTES
        """of a file without names: record key -> value of an attribute that is not stored; None: removed"""
        self.xattr_names: frozenset[bytes] = frozenset()
        """known names of attributes; all of them when ``complete``"""
        self.capability_free = False
        """the inode is known to have no ``security.capability``"""
        self.times_changed = False
        """a directory's times are not in the store yet"""
        self.lock: trio.Lock | None = None
        self.lost: tuple[KvfuseError, int] | None = None
        """of bytes that were taken, and the `Doubt.epoch` of which whoever has it open for writing hears it once"""
        self.recent = False
        """it was found in memory since `Nodes` last considered it for eviction"""
        self.reserved = 0
        """bytes of records that are reserved for its next commit; see `metadata_budget`"""
        self.moved_to: tuple[int, bytes] | None = None
        """(directory, name) to which another host moved the record while the inode was changed here"""
        self.moved_version = 0
        """version of the record there"""
        self.times_version = 0
        """version of the record of a directory's times in memory, before changes made here"""
        self.version = 0
        """in a shared volume: version of the record that has the inode; 0: it is not stored"""
        self.base: schema.InodeRecord | None = None
        """in a shared volume: the inode as last known to be stored"""
        self.cut_size: int | None = None
        """smallest size to which the file was cut since the stored state; bytes behind it were all written here"""
        self.appends = False
        """all bytes written behind the size of ``base`` were appended, so they may move with the end"""
        self.end_moved = 0
        """bytes by which other hosts' changes have moved the end of the file while it was in memory"""
        self.content_merges = 0
        """counts merges of other hosts' changes, each of which may drop chunks from memory"""
        self.forgotten = False
        """its membership is over: its changes will not be stored"""

    @property
    def blocks(self) -> int:
        """512-byte units in slots; staged bytes count by their length."""
        count = self.far_blocks
        for index, chunk in self.chunks.items():
            if index < schema.INLINE_CHUNKS:
                count += chunk.blocks
            elif chunk.staged is not None and not chunk.extents:
                count += -(-chunk.staged.length // 4096) * 8
        return count

    def slots(self) -> tuple[int, int]:
        """(bytes of its slots, address of the first one, below 0 for none).

        Chunks with records of their own count by their bytes; slots of other hosts' slabs not at all.
        """
        size, first = 512 * self.far_blocks, -1
        for index, chunk in self.chunks.items():
            if index < schema.INLINE_CHUNKS:
                for extent in chunk.extents:
                    size += extent.slot_size
                    first = extent.addr if first < 0 else first
                for slot in chunk.staged.slots if chunk.staged is not None else ():
                    size += slot.size
                    first = slot.addr if first < 0 else first
        return size, first

    def chunk_changed(self, index: int) -> None:
        """Have the chunk's own record, if it has one, put or deleted with the inode's."""
        if self.unstored is not None:
            self.unstored.chunk(self, index)
        if index < schema.INLINE_CHUNKS:
            return
        if isinstance(self.dirty_chunks, set):
            self.dirty_chunks.add(index)
        else:
            self.dirty_chunks = {index}

    def changing(self, index: int) -> None:
        """Before a chunk's bytes or slots change: hide them from other threads."""
        if self.unstored is not None:
            self.unstored.chunk(self, index)
        if self.tier is not None and (self.ino in self.tier.kept or self.ino in self.tier.left.places):
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.hide(index)

    def forget_copy(self) -> None:
        """Before the file gets other readers or another name: drop its copy in the tier."""
        if self.tier is not None:
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.hide_copies()

    def set_size(self, size: int) -> None:
        if size == self.size:
            return
        if self.tier is not None and (self.ino in self.tier.kept or self.ino in self.tier.left.places):
            self.tier.drop(self.ino)
        if self.map is not None:
            self.map.resize(size)
        self.size = size

    def end_map(self) -> None:
        """End the content map: the inode leaves memory, or its slots were given up."""
        if self.map is not None:
            self.map.end()
            self.map = None

    def set_extents(self, index: int, extents: list[Extent]) -> None:
        """Replace the extents of a chunk. The caller gives up the old ones' slots.

        If the bytes differ, the caller has called `changing` before.
        """
        chunk = self.chunks[index]
        if index >= schema.INLINE_CHUNKS or self.unstored is not None:
            self.chunk_changed(index)
        if index >= schema.INLINE_CHUNKS:
            self.flags |= schema.FLAG_CHUNK_RECORDS
            self.far_blocks += blocks_of(extents) - blocks_of(chunk.extents)
        chunk.extents = extents
        if extents and extents[0].packing and self.tier is not None:
            self.tier.note_packed(self.ino, index, extents[0].addr, extents[0].generation)

    def resize(self, index: int, extent: Extent, length: int) -> None:
        """Change the length of an extent, in its slot."""
        self.changing(index)
        if index >= schema.INLINE_CHUNKS:
            self.chunk_changed(index)
            self.far_blocks += (-(-length // 4096) - -(-extent.length // 4096)) * 8
        extent.length = length
        extent.reach = max(extent.reach, length)

    @property
    def busy(self) -> bool:
        """It must stay in memory."""
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
        """The record to store: without bytes that are not in slots yet."""
        inline: list[tuple[schema.ExtentRecord, ...]] = []
        first = self.chunks.get(0) if len(self.chunks) == 1 else None
        if first is not None and first.extents:
            inline.append(tuple([extent.record() for extent in first.extents]))
        for index in () if inline else range(min(max(self.chunks, default=-1) + 1, schema.INLINE_CHUNKS)):
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
            self.namespace,
        )

    def stored_length(self) -> int:
        """Bytes in slots or staged; 0 if not all chunks are in memory."""
        if self.flags & schema.FLAG_CHUNK_RECORDS and not self.complete:
            return 0
        length = 0
        for chunk in self.chunks.values():
            length += chunk.staged.length if chunk.staged is not None else chunk.length
        return length

    @classmethod
    def from_record(cls, record: schema.InodeRecord) -> Node:
        """A node without extents: the caller adds chunks, see `content.chunks`."""
        node = cls(record.ino, record.mode, record.uid, record.gid, record.chunk_size)
        node.nlink = record.nlink
        node.rdev = record.rdev
        node.size = record.size
        node.atime, node.mtime, node.ctime = record.atime, record.mtime, record.ctime
        node.flags = record.flags
        node.target = record.target
        node.parent = record.parent
        node.far_blocks = record.far_blocks
        node.namespace = record.namespace
        node.stored = True
        return node


class Nodes:
    """Decoded inodes by number, bounded: nodes that are neither busy nor recently used are evicted first.

    An inode never has two nodes: an evicted node that an operation still holds is found again.
    """

    def __init__(self, count_max: int, tier: SharedTier, handover: Handover | None = None) -> None:
        self.count_max = count_max
        self.tier = tier
        self.handover = handover or Handover()
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        """ordered, because removal at its front takes constant time, unlike a dict's"""
        self._evicted: dict[int, ReferenceType[Node]] = {}
        """by number, some of which no operation holds any more"""
        self._evicted_max = EVICTED_MIN
        """number of these at which the ones that are gone are dropped"""
        self._all_forgotten = False
        self._named: dict[tuple[int, bytes], int] = {}
        """(directory, name) -> inode whose record was there: more places than there are inodes"""
        self.unstored: Unstored | None = None  # of all
        self.removed: dict[int, None] = {}
        """numbers of inodes that lost their last name and left memory: the store may have them until a commit"""
        self.leaving: Callable[[Node], None] = lambda node: None
        """called with a node before its eviction; if that changes it, it stays"""

    def get(self, ino: int) -> Node | None:
        node = self._nodes.get(ino)
        if node is not None:
            node.recent = True
        elif (evicted := self._evicted.pop(ino, None)) is not None and (node := evicted()) is not None:
            self.add(node)
        return node

    def peek(self, ino: int) -> Node | None:
        """`get` without marking the node as recently used, and without evicted ones."""
        return self._nodes.get(ino)

    def add(self, node: Node) -> Node:
        node.tier, node.unstored = self.tier, self.unstored
        node.forgotten = self._all_forgotten
        if self.handover.still_open and node.ino not in self._nodes:
            self._count_open(node)
        self._nodes[node.ino] = node
        if len(self._nodes) > self.count_max:
            self._evict(EVICTION_LOOKS)
        return node

    def _count_open(self, node: Node) -> None:
        """The inode comes into memory: handles of a daemon before this one have it open, which nobody asked for yet."""
        before = self.handover.still_open.get(node.ino)
        if before is not None and not node.handles:  # or else it was evicted before, and counts them
            node.handles, node.writers = before.handles, before.writers

    def drop(self, node: Node) -> None:
        """Remove the node, so that the inode is read again. No effect if it has another node, or none."""
        if not node.nlink:
            self.removed[node.ino] = None
            if len(self.removed) > REMOVED_MAX:
                del self.removed[next(iter(self.removed))]
        if self._nodes.get(node.ino) is node:
            del self._nodes[node.ino]
        elif (evicted := self._evicted.get(node.ino)) is not None and evicted() is node:
            del self._evicted[node.ino]

    def note_unsaved(self, node: Node) -> None:
        """The node has content, or a size, that is not stored: say so to the next daemon, before it is answered for."""
        node.unsaved = True
        self.handover.unsaved(node.ino)

    def note_saved(self, node: Node) -> None:
        """It is stored, or nobody misses it."""
        if node.unsaved:
            node.unsaved = False
            self.handover.saved(node.ino)

    def forget_all(self) -> None:
        """End the membership of all nodes, also of those that operations in flight still add."""
        self._all_forgotten = True
        for node in self.held():
            node.forgotten = True
            node.end_map()
            self.note_saved(node)  # whoever has it open hears it of this daemon

    def _evict(self, looks: int) -> None:
        """Consider up to ``looks`` of the oldest nodes: evict those that may be, move the others to the end."""
        for _ in range(looks):
            if len(self._nodes) <= self.count_max:
                break
            ino, node = next(iter(self._nodes.items()))
            if not node.recent and self._leave_memory(node):
                continue
            node.recent = False
            self._nodes.move_to_end(ino)
        if len(self._evicted) > self._evicted_max:
            self._evicted = {ino: evicted for ino, evicted in self._evicted.items() if evicted() is not None}
            self._evicted_max = max(EVICTED_MIN, 2 * len(self._evicted))

    def _leave_memory(self, node: Node) -> bool:
        """Evict a node, unless it must stay."""
        if not node.busy:
            self.leaving(node)
            if not (node.changed or node.times_changed):
                del self._nodes[node.ino]
                node.end_map()
                self._evicted[node.ino] = ref(node)
                return True
        return False

    def evict(self, nodes: Iterable[Node]) -> None:
        """Evict these, but for those that must stay."""
        for node in nodes:
            if self._nodes.get(node.ino) is node:
                self._leave_memory(node)

    def find(self, ino: int) -> Node | None:
        """`peek`, with evicted ones that an operation still holds."""
        node, evicted = self._nodes.get(ino), self._evicted.get(ino)
        return evicted() if node is None and evicted is not None else node

    def held(self) -> list[Node]:
        """All nodes, also evicted ones that an operation still holds."""
        evicted = [node for reference in self._evicted.values() if (node := reference()) is not None]
        return [*self._nodes.values(), *evicted]

    # -- by the place of the record, in a shared volume ----------------------------------------------

    def note_place(self, ino: int, parent: int, name: bytes) -> None:
        """The name has the record of this inode, which may be in memory."""
        if len(self._named) > NAMED_MIN + 2 * len(self._nodes):
            self._named = {(node.parent, node.name): node.ino for node in self.held() if not node.own_record}
        self._named[parent, name] = ino

    def at(self, parent: int, name: bytes) -> Node | None:
        """The node whose record is in this name, as far as memory knows."""
        ino = self._named.get((parent, name))
        node = self.find(ino) if ino is not None else None
        return node if node is not None and (node.parent, node.name) == (parent, name) else None

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)


def check_remembered(*nodes: Node) -> None:
    """EngineError for a node of a membership that is over."""
    for node in nodes:
        if node.forgotten:
            raise EngineError(f"this client lost its lease of the volume, and so its changes of inode {node.ino}")


@asynccontextmanager
async def locked(node: Node) -> AsyncIterator[None]:
    """Hold the node's lock, against other changes of its content that wait."""
    if node.lock is None:
        node.lock = trio.Lock()
    lock = node.lock
    try:
        async with lock:
            yield
    finally:  # `busy` is true for a node with a lock
        if not lock.locked():
            node.lock = None
