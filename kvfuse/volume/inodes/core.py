"""What the parts of a mounted volume share: engines, the slab map, inodes in memory, counters."""

from __future__ import annotations

import dataclasses
import stat
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import trio

from kvfuse.kept.log import KeptLog
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import ROOT_INODE, ReadingThread
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.inodes.block_store_view import BlockStoreView
from kvfuse.volume.inodes.chunk import COMMITTED, DISCARDED, FRESH, Extent
from kvfuse.volume.inodes.dentries import NAMES_MAX, Dentries
from kvfuse.volume.inodes.doubt import Doubt
from kvfuse.volume.inodes.grace import Grace
from kvfuse.volume.inodes.kept_unstored import KeptUnstored
from kvfuse.volume.inodes.kernel_link import KernelLink
from kvfuse.volume.inodes.known_inodes import KnownInodes
from kvfuse.volume.inodes.metadata_budget import Metadata
from kvfuse.volume.inodes.node import Node, Nodes
from kvfuse.volume.inodes.sharing import Alone, Shared
from kvfuse.volume.measures.demand import Demand
from kvfuse.volume.measures.speeds import Speeds
from kvfuse.volume.namespaces.cache import Cache
from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.store.kept_membership import NOTHING, KeptMembership
from kvfuse.volume.store.numbers import NumberRange
from kvfuse.volume.store.schema import InodeRecord
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.views.health import Health
from kvfuse.volume.views.neighbours import Neighbours

PATH_DEPTH_MAX = 256
USES_AT_ONCE = 64
"""Reads of which the caches hear together, in half a millisecond: one by one they take twice as long."""


class ReadEpochs:
    """Counts reads in flight, so that a freed slot is reused only when no read can return its new bytes.

    Reads that wait are counted under the epoch in which they began; retired slots wait until all
    reads of their own and earlier epochs ended. Reads without an await are not counted.

    Threads that read by content maps discard bytes that changed meanwhile, but they may copy straight into memory that
    a client sees. So slots wait for these threads, too.
    """

    def __init__(self) -> None:
        self.threads: set[ReadingThread] = set()
        self.speeds = Speeds()
        """of this host's tiers, as reads found them"""
        self.demand = Demand()
        """at the segments"""
        self.neighbours: Neighbours | None = None
        """other hosts that may be asked for blocks"""
        self._epochs: deque[list[int]] = deque([[0]])
        self._retired: deque[list[tuple[Callable[[list[Slot]], object], list[Slot]]]] = deque([[]])

    def connect(self, neighbours: Neighbours | None) -> None:
        """Ask these from now on."""
        self.neighbours = neighbours

    @contextmanager
    def reading(self) -> Iterator[None]:
        epoch = self._epochs[-1]
        epoch[0] += 1
        try:
            yield
        finally:
            self._end(epoch)

    def retire(self, give: Callable[[list[Slot]], object], slots: list[Slot]) -> None:
        """Call ``give(slots)`` when all reads that are now in flight have ended."""
        self._retired[-1].append((give, slots))
        epoch = self._epochs[-1]
        for thread in self.threads:
            epoch[0] += thread.tell_when_done(partial(self._end, epoch))
        if epoch[0]:
            self._epochs.append([0])
            self._retired.append([])
        self._advance()

    @property
    def has_retired(self) -> bool:
        """Some slots wait for reads in flight."""
        return any(self._retired)

    def _end(self, epoch: list[int]) -> None:
        epoch[0] -= 1
        self._advance()

    async def passed(self) -> None:
        """Return when all reads now in flight have ended, and slots that waited for them were handed on."""
        ended = trio.Event()
        self.retire(lambda _: ended.set(), [])
        await ended.wait()

    def _advance(self) -> None:
        while self._epochs[0][0] == 0:
            for give, slots in self._retired[0]:
                give(slots)
            self._retired[0] = []
            if len(self._epochs) == 1:
                return
            self._epochs.popleft()
            self._retired.popleft()


class CacheShare(NamedTuple):
    """What of the volume this host's caches may fill."""

    size: int
    """bytes of slots"""
    used: int
    """of them"""


@dataclass
class CoreCounters:
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    lookups: int = 0
    absent_lookups: int = 0
    creates: int = 0
    renames: int = 0
    removes: int = 0
    checksum_failures: int = 0


@dataclass
class Core:
    """The state of one membership of a volume. Other threads than the event loop's may call `KnownInodes.known` alone.

    `succeed` takes over ``tier``, which is thread-safe, and ``reads.threads``: both live as long as the mount.
    """

    superblock: Superblock
    geometry: Geometry
    records: RecordStore
    segments: SegmentStore
    slabs: Allocator
    nodes: Nodes
    tier: SharedTier
    chunk_size: int
    strict: bool
    read_only: bool
    inodes: NumberRange
    generations: NumberRange
    doubt: Doubt
    metadata: Metadata
    """the budget of names, inodes and attributes"""
    file_count: int
    """inodes; in a shared volume those that this client made, less those that it removed"""
    namespaces: Namespaces
    client: int = 0
    """number of this client in a shared volume"""
    left: KeptMembership = NOTHING
    """what the daemon before this one left, if that was the same client"""
    grace: Grace = field(default_factory=lambda: Grace(0.0))
    """of freed slots of a shared volume"""
    is_alone: Callable[[], bool] = field(default=lambda: False)
    """no other client of a shared volume is known from the watch"""
    shared_part: Callable[[], CacheShare] | None = None
    """of a shared volume: see `part`"""
    more_slabs: Callable[[], Awaitable[bool]] | None = None
    """takes slabs of a shared volume that nobody holds: whether there are any. EngineError"""
    places: KnownInodes = field(default_factory=KnownInodes)
    reads: ReadEpochs = field(default_factory=ReadEpochs)
    counters: CoreCounters = field(default_factory=CoreCounters)
    kernel: KernelLink = field(default_factory=KernelLink)
    disk: DiskTier | None = None
    unstored_log: KeptLog | None = None
    """where what is not stored is kept for the next daemon; None: it is not"""
    health: Health = field(default_factory=Health)
    made_segments: set[int] = field(default_factory=set, init=False)
    blocks: BlockStoreView | None = field(default=None, init=False)
    """the block store; None: this volume has none"""
    store_superblock: Callable[[Superblock], Awaitable[None]] | None = None
    """see `HeldVolume`"""

    def __post_init__(self) -> None:
        self.dentries = Dentries(max(NAMES_MAX, self.nodes.count_max))
        log = self.unstored_log
        self.unstored = KeptUnstored(log, self.nodes, self.dentries, self.places) if log is not None else None
        self.nodes.unstored = self.unstored
        self._share_residents()
        self.caches = self.namespaces.caches
        """namespace -> books of those that are caches; empty where no file is ever evicted"""
        self.slabs.ledger = self.namespaces.accounts
        self.namespaces.accounts.use_of_all = lambda: NamespaceUse(self.slabs.used_bytes, self.file_count - 1)
        self.shared = self.records.limits.shared
        """other hosts write the same records and segments"""
        self.sharing = (Shared if self.shared else Alone)(self.slabs, self.geometry)
        self._segment_data_size = self.geometry.segment_slabs * self.geometry.slab_size
        self._data_starts = [self.geometry.data_start(segment) for segment in range(self.geometry.segment_count)]
        self.unnamed: dict[int, Node] = {}
        """inode -> file without names or handles that the kernel still knows, and may be about to open"""
        self.dead: list[Extent] = []
        """extents of removed inodes; the next commit frees their slots"""
        self.givers: dict[Node, None] = {}
        """inodes with extents in their ``dead``, and some that had"""
        self.unborn: list[Extent] = []
        """extents given up before any commit; their slots are free once their headers are marked"""

    def succeed(self, former: Core) -> None:
        """Take over what ``former``, whose membership is over, knows of the kernel and of clients."""
        self.places, self.counters, self.kernel = former.places, former.counters, former.kernel
        self.namespaces.measures = former.namespaces.measures
        self.namespaces.share_limits()
        former.namespaces.news.lose_all()
        self.places.distrust_all()
        self.reads.threads, self.reads.speeds = former.reads.threads, former.reads.speeds
        self.reads.connect(former.reads.neighbours)
        self.tier = self.nodes.tier = former.tier
        self.tier.retire(None)  # any file may have changed, and who may use its directory
        self._share_residents()
        former.tier = SharedTier(0)

    def _share_residents(self) -> None:
        """Let whoever changes what names mean, and what people may do, tell clients that look for themselves."""
        residents = self.tier.residents
        residents.end()
        self.dentries.residents = residents
        self.namespaces.gates.on_change = residents.end

    # -- places in the segments ----------------------------------------------------------------------

    def locate(self, addr: int) -> tuple[int, int]:
        """(segment, file offset) of a volume address; a faster `Geometry.locate`, for reads."""
        segment, offset = divmod(addr, self._segment_data_size)
        return segment, self._data_starts[segment] + offset

    async def make_segments(self, segments: set[int]) -> None:
        """Make those of these segments that do not exist yet, preallocated. EngineError.

        Their headers are durable before any record can say that a segment has something: else a loss of power may
        leave a volume that cannot be mounted.
        """
        new = sorted(segments - self.made_segments)
        for segment in new:
            await self.segments.create(segment, self.geometry.segment_size(segment))
            header = layout.pack_superblock(dataclasses.replace(self.superblock, segment=segment))
            await self.segments.write([Transfer(segment, 0, header)])
        if new and not self.segments.limits.durable:
            with self.doubt.syncing():
                await self.segments.sync()
        self.made_segments.update(new)

    async def add_feature(self, feature: int) -> None:
        """Say in the superblock, durably, that programs which do not know a feature cannot use the volume. EngineError.

        Before anything is stored that needs it.
        """
        if not self.superblock.features & feature:
            wanted = dataclasses.replace(self.superblock, features=self.superblock.features | feature)
            if self.store_superblock is not None:
                await self.store_superblock(wanted)
            self.superblock = wanted

    def discard(self, node: Node, extent: Extent) -> None:
        """Give up an extent of ``node``: its slot is free when neither a record nor a header refers to it."""
        if extent.state == FRESH:
            self.unborn.append(extent)
        elif extent.state == COMMITTED:
            node.dead.append(extent)
            self.givers[node] = None
        extent.state = DISCARDED

    def chunk_size_in(self, directory: Node) -> int:
        """Chunk size, in bytes, of files that are made in ``directory``."""
        return min(directory.chunk_size or self.chunk_size, self.geometry.slab_size)

    # -- caches --------------------------------------------------------------------------------------

    def is_cleared(self, file: Node | InodeRecord) -> bool:
        """The inode was in a namespace when that was cleared, and is no directory."""
        return file.ino < self.namespaces.cleared.get(file.namespace, 0) and not stat.S_ISDIR(file.mode)

    def stored_in_cache(self, node: Node, directory: int = 0, name: bytes = b"") -> None:
        """Nobody writes the file any more: from now on it may be evicted. A file with several names has several blocks.

        ``directory``, ``name``: which of its names; if not given, the last one that it was found by.
        """
        self._tell_cache(Cache.stored, node, directory or node.parent, name or node.name)

    def closed_in_cache(self, node: Node) -> None:
        """The last writer of the file closed it: soon it may be evicted."""
        self._tell_cache(Cache.closed, node, node.parent, node.name)

    def _tell_cache(
        self, news: Callable[[Cache, int, bytes, int, int], None], node: Node, parent: int, name: bytes
    ) -> None:
        """With the bytes of its slots and the first one's slab, unless the file is on another host's books."""
        cache = self.caches.get(node.namespace)
        if cache is not None and node.nlink:
            size, addr = node.slots()
            slab = max(addr, 0) // self.geometry.slab_size
            if not self.shared or addr < 0 or self.slabs.holds(slab):
                news(cache, parent, name, size, slab)
                self.namespaces.changed.set()

    def changed_elsewhere(self, directory: int, name: bytes, entry: InodeRecord | int | None) -> None:
        """Another host changed what a name means. ``entry``: the inode, or its number; None: nothing any more.

        So files of our books leave them, or are there under another name.
        """
        if isinstance(entry, InodeRecord) and stat.S_ISREG(entry.mode) and not self.is_cleared(entry):
            cache, slab = self.caches.get(entry.namespace), self.first_slab(entry)
            if cache is not None and slab is not None and self.slabs.holds(slab):
                cache.stored(directory, name, sum([one.length for chunk in entry.chunks for one in chunk]), slab)
                return
        for cache in self.caches.values():
            cache.gone(directory, name, is_told=False)

    def first_slab(self, record: InodeRecord) -> int | None:
        """The slab of a file's first slot; None where it has none, or a chunk record has it."""
        return next((one.addr // self.geometry.slab_size for chunk in record.chunks for one in chunk), None)

    def looked_in_cache(self, node: Node, name: bytes, *, is_there: bool) -> None:
        """The kernel looked up a file, or a name that a directory does not have."""
        cache = self.caches.get(node.namespace)
        if cache is not None:
            if is_there:
                self.tell_uses()
            cache.looked(node.parent if is_there else node.ino, name, self.tier_of, is_there=is_there)

    def opened_in_cache(self, node: Node) -> None:
        """The kernel opened a file, to read it."""
        uses = self.namespaces.uses
        uses.note(node.parent, (node.name,), node.namespace)
        if len(uses) >= USES_AT_ONCE:
            self.tell_uses()

    def tell_uses(self) -> None:
        """Tell the caches which blocks were read through files and by ring threads: before they hear other news."""
        for directory, names, namespace in self.namespaces.uses.take():
            cache = self._cache_in(directory) if namespace is None else self.caches.get(namespace)
            if cache is not None:
                cache.read(directory, names, self.tier_of)

    def take_uses(self, *, at_once: bool = False) -> None:
        """`tell_uses`, and what clients read, or asked for, by themselves; ``at_once``: up to now."""
        self.tell_uses()
        self.tier.residents.sample(at_once=at_once)
        for directory, names, is_read in self.tier.residents.take_uses():
            if (cache := self._cache_in(directory)) is not None:
                (cache.read if is_read else cache.asked)(directory, names, self.tier_of)

    def _cache_in(self, directory: int) -> Cache | None:
        """The books of a directory's namespace, as far as memory knows which that is."""
        node = self.nodes.get(directory)
        return self.caches.get(node.namespace) if node is not None else None

    def is_there(self, directory: int, name: bytes) -> bool:
        """The name is known to mean something."""
        dentry = self.dentries.get(directory, name)
        return dentry.ino != 0 if dentry.change is None else dentry.change.node is not None

    def tier_of(self, directory: int, name: bytes) -> str:
        """Which tier of this host has the file of a name, as far as the name is known: "dram", "disk", or ""."""
        dentry = self.dentries.get(directory, name)
        node = dentry.change.node if dentry.change is not None else None
        ino = dentry.ino if node is None else node.ino
        if ino in self.tier:
            return "dram"
        found = self.nodes.peek(ino) if self.disk is not None else None
        return "disk" if found is not None and self.is_on_disk(found) else ""

    def is_on_disk(self, node: Node) -> bool:
        """The disk tier has the start of a file, as far as memory knows where that is."""
        chunk = node.chunks.get(0)
        if self.disk is None or chunk is None or not chunk.extents:
            return False
        return self.disk.has(chunk.extents[0].addr, chunk.extents[0].generation)

    def has_spare_room(self, namespace: int, size: int) -> bool:
        """So many bytes can be stored in a namespace, and the caches do not have to give up anything for them."""
        part = self.part()
        has_room = part.used + size <= part.size * self.namespaces.low_water
        return has_room and self.namespaces.accounts.has_spare_room(namespace, size)

    def part(self) -> CacheShare:
        """The part of the volume that this host's caches may fill: all of it, where it is the only host."""
        if self.shared_part is not None:
            return self.shared_part()
        size, slabs = self.geometry.data_size, self.slabs
        return CacheShare(size, size - slabs.free_bytes - slabs.pending_bytes)

    # -- inodes --------------------------------------------------------------------------------------

    def readers_change(self, node: Node) -> None:
        """Before owner or mode of an inode, or the place of a directory change: end bindings and copies that its former
        readers may use, and what they have of directories below it."""
        self.dentries.unbind(node.ino)
        node.forget_copy()
        if node.is_directory:
            directories = [node.ino, *self.namespaces.gates.ancestors.change(node.ino)]
            self.tier.retire(directories, left_too=True)
            if self.blocks is not None:
                self.blocks.readers_change(directories)

    def path_of(self, node: Node) -> bytes:
        """The path below the root, as far as the directories above are in memory; for messages and rebuilds."""
        parts: list[bytes] = []
        here: Node | None = node
        while here is not None and here.ino != ROOT_INODE and len(parts) < PATH_DEPTH_MAX:
            if not here.name:
                parts.append(b"#%d" % here.ino)
                break
            parts.append(here.name)
            here = self.nodes.get(here.parent)
        return b"/".join(reversed(parts))


def put_directory(core: Core, node: Node, parent: int) -> None:
    """A directory is in another one from here on, or is where it was."""
    if node.parent != parent:
        core.readers_change(node)
        node.parent = parent
