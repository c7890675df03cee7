"""What the parts of a mounted volume share: engines, the slab map, inodes in memory, counters."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import trio

from kvfuse.errors import InvalidArgument, MediumError, VolumeError
from kvfuse.kept.log import KeptLog
from kvfuse.remote.index.api import BlockIndex
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.remote.segments.block.segment_map import MapName
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import ROOT_INODE, ReadingThread
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.inodes.block_store_view import BlockStoreView
from kvfuse.volume.inodes.chunk import COMMITTED, DISCARDED, FRESH, Extent
from kvfuse.volume.inodes.dentries import NAMES_MAX, Dentries
from kvfuse.volume.inodes.device_spread import DeviceSpread
from kvfuse.volume.inodes.doubt import Doubt
from kvfuse.volume.inodes.grace import Grace
from kvfuse.volume.inodes.kept_unstored import KeptUnstored
from kvfuse.volume.inodes.kernel_link import KernelLink
from kvfuse.volume.inodes.known_inodes import KnownInodes
from kvfuse.volume.inodes.metadata_budget import Metadata, bound_store, default_size
from kvfuse.volume.inodes.node import Node, Nodes
from kvfuse.volume.inodes.sharing import Alone, Shared
from kvfuse.volume.measures.demand import Demand
from kvfuse.volume.measures.speeds import Speeds
from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.store.kept_membership import NOTHING, KeptMembership
from kvfuse.volume.store.numbers import NumberRange
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.views.health import Health
from kvfuse.volume.views.neighbours import Neighbours

PATH_DEPTH_MAX = 256
ChangeSuperblock: TypeAlias = Callable[[Callable[[Superblock], Superblock]], Awaitable[Superblock]]


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
    """What of the volume this host's blocks may fill."""

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
    """folders are strict where nothing else is set"""
    strict_blocks: bool
    """so are folders of blocks"""
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
    host_count: Callable[[], int] = field(default=lambda: 1)
    """clients that have the volume, this one included, as far as it has heard"""
    shared_part: Callable[[], CacheShare] | None = None
    """of a shared volume: see `part`"""
    before_shrinking: Callable[[], Awaitable[None]] | None = None
    """of a shared volume: to be awaited first. InvalidArgument, EngineError"""
    files_size: Callable[[], int] | None = None
    """bytes of slots that files have, on a shared volume, as far as this client has heard"""
    more_slabs: Callable[[int], Awaitable[bool]] | None = None
    """takes slabs of a shared volume that nobody holds, about so many: whether there are any. EngineError"""
    need_slabs: Callable[[int], object] | None = None
    """the same for those who cannot await it: they are taken by and by"""
    places: KnownInodes = field(default_factory=KnownInodes)
    reads: ReadEpochs = field(default_factory=ReadEpochs)
    counters: CoreCounters = field(default_factory=CoreCounters)
    kernel: KernelLink = field(default_factory=KernelLink)
    block_index: BlockIndex | None = None
    """of the blocks of a shared volume"""
    disk: DiskTier | None = None
    unstored_log: KeptLog | None = None
    """where what is not stored is kept for the next daemon; None: it is not"""
    health: Health = field(default_factory=Health)
    made_segments: set[int] = field(default_factory=set, init=False)
    blocks: BlockStoreView | None = field(default=None, init=False)
    """the block store; None: this volume has none"""
    change_superblock: ChangeSuperblock | None = None
    """see `HeldVolume`"""
    exported: bool = False
    """an NFS server exports the mount: each file that the kernel knows is to be found by its number"""
    has_own_budget: bool = True
    """the budget of metadata does not follow from the capacity"""

    def __post_init__(self) -> None:
        self.dentries = Dentries(max(NAMES_MAX, self.nodes.count_max))
        log = self.unstored_log
        self.unstored = KeptUnstored(log, self.nodes, self.dentries, self.places) if log is not None else None
        self.nodes.unstored = self.unstored
        self.slabs.ledger = self.namespaces.accounts
        self.namespaces.accounts.use_of_all = lambda: NamespaceUse(self.slabs.used_bytes, self.file_count - 1)
        self.shared = self.records.limits.shared
        """other hosts write the same records and segments"""
        self.sharing = (Shared if self.shared else Alone)(self.slabs, self.geometry)
        self.locate = self.geometry.locate
        """(segment, file offset) of a volume address"""
        self.resized = trio.Event()
        """set when the volume has another capacity, or is to have one; who waits for it puts another in its place"""
        self.unnamed: dict[int, Node] = {}
        """inode -> file without names or handles that the kernel still knows, and may be about to open"""
        self.dead: list[Extent] = []
        """extents of removed inodes; the next commit frees their slots"""
        self.givers: dict[Node, None] = {}
        """inodes with extents in their ``dead``, and some that had"""
        self.unborn: list[Extent] = []
        """extents given up before any commit; their slots are free once their headers are marked"""
        self.spread: DeviceSpread | None = None
        """of slabs over devices; None: the volume has none"""
        self.slabs.keep_to(self.superblock.kept_slab_count)
        if self.segments.devices is not None:
            self.segments.devices.expect(MapName(*self.superblock.segment_map))
            self.spread = DeviceSpread(self.geometry, self.segments.devices)
            self.slabs.spread_by(self.spread)

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
        former.tier = SharedTier(0)

    # -- places in the segments ----------------------------------------------------------------------

    async def make_segments(self, segments: set[int]) -> None:
        """Make those of these segments that do not exist yet, preallocated. EngineError.

        Their headers are durable before any record can say that a segment has something: else a loss of power may
        leave a volume that cannot be mounted.
        """
        new = sorted(segments - self.made_segments)
        for segment in new:
            await self.segments.create(segment, self.geometry.segment_size(segment))
            header = await self._find_header(segment)
            await self.segments.write([Transfer(segment, 0, header)])
        if new and not self.segments.limits.durable:
            with self.doubt.syncing():
                await self.segments.sync()
        self.made_segments.update(new)

    async def _find_header(self, segment: int) -> bytes | bytearray:
        """The header that a segment has, else a new one. EngineError.

        Who made the segment may not have synced its header, so it is written again; but never as another one: the
        volume may have other features by now, and who is killed amid that write leaves half of each.
        """
        image = bytearray(layout.SUPERBLOCK_SIZE)
        with suppress(VolumeError, ValueError, MediumError):  # not there yet, removed since it was made, or lost
            await self.segments.read([Transfer(segment, 0, image)])
            found = layout.parse_superblock(image)
            if (found.volume_id, found.segment) == (self.superblock.volume_id, segment):
                return image
        return layout.pack_superblock(dataclasses.replace(self.superblock, segment=segment))

    async def add_feature(self, feature: int) -> None:
        """Say in the superblock, durably, that programs which do not know a feature cannot use the volume. EngineError.

        Before anything is stored that needs it.
        """
        if not self.superblock.features & feature:
            await self.change_superblock_by(lambda found: dataclasses.replace(found, features=found.features | feature))

    async def resize(self, capacity: int, freeing: int = 0) -> None:
        """Have room for ``capacity`` bytes from now on, and for good; or begin to empty the segments beyond (`Drain`).

        ``freeing``: bytes of slots that the next commit frees. InvalidArgument, with the reason; EngineError. Who is
        killed here leaves a volume with the former capacity, or with the new one: nothing is in the slabs that it has
        more, and their segments are made when they are needed. Of volumes without devices: see `DeviceChanges`.
        """
        with invalid_if_impossible():
            await self.change_superblock_by(lambda found: self.resized_superblock(found, capacity, freeing))
        await self.rebound()

    def resized_superblock(self, found: Superblock, capacity: int, freeing: int, room: int | None = None) -> Superblock:
        """ValueError: it cannot have that capacity, or files do not fit."""
        lent_size = len(self.slabs.lent) * self.geometry.slab_size
        size = self.slabs.used_bytes - lent_size - self.slabs.pending_bytes - freeing
        if self.files_size is not None:
            size = self.files_size() - freeing
        wanted = found.resized(capacity, room)
        kept = wanted.kept_slab_count
        if self.shared and wanted.target and not found.features & layout.FEATURE_SHRINKS:
            raise ValueError("a volume that hosts share gets smaller by a capacity alone")
        if kept is not None and kept * self.geometry.slab_size < size:
            raise ValueError(f"files have {size} bytes in slots, and {kept} slabs of {self.geometry.slab_size} stay")
        return wanted

    async def rebound(self) -> None:
        """The budget of metadata follows from the capacity, unless it is given. EngineError."""
        limit = self.metadata.limit if self.has_own_budget else default_size(self.geometry.capacity)
        if not self.shared:
            self.metadata.limit = await bound_store(self.records, limit, self.geometry.data_size)

    async def change_superblock_by(self, change: Callable[[Superblock], Superblock]) -> None:
        """Durably. EngineError, VolumeError, and what ``change`` raises."""
        changed = change(self.superblock)
        self.take_superblock(await self.change_superblock(change) if self.change_superblock is not None else changed)

    def take_superblock(self, stored: Superblock) -> None:
        """It is stored: other hosts may have changed it, too. A copy that came late changes nothing."""
        if stored.volume_id != self.superblock.volume_id or stored.resizes < self.superblock.resizes:
            return
        features, is_newer = self.superblock.features | stored.features, stored.resizes > self.superblock.resizes
        if self.segments.devices is not None:
            self.segments.devices.expect(MapName(*stored.segment_map))
        if self.shared and is_newer:
            self.made_segments.clear()  # another host may have removed some
            self.segments.recheck()
        if self.geometry.become(stored.geometry):
            if self.shared and not self.has_own_budget:
                self.metadata.limit = default_size(self.geometry.capacity, is_shared=True)
            if self.blocks is not None:
                self.blocks.volume_resized()
        self.superblock = dataclasses.replace(stored, geometry=self.geometry, features=features)
        if is_newer:
            self.slabs.keep_to(self.superblock.kept_slab_count)
        self.resized.set()

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

    def part(self) -> CacheShare:
        """The part of the volume that this host's blocks may fill: all of it, where it is the only host."""
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
            self.end_reads([node.ino, *self.namespaces.gates.ancestors.change(node.ino)], left_too=True)

    def end_reads(self, directories: Sequence[int], *, left_too: bool = False) -> None:
        """Before other people may use these directories than until now: what clients have mapped ends.

        ``left_too``: also what a former daemon showed, of which it is not known which directories are above it.
        """
        self.tier.retire(directories, left_too=left_too)
        if self.blocks is not None and (directories or left_too):
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


@contextmanager
def invalid_if_impossible() -> Iterator[None]:
    """InvalidArgument for what a plan refuses."""
    try:
        yield
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def put_directory(core: Core, node: Node, parent: int) -> None:
    """A directory is in another one from here on, or is where it was."""
    if node.parent != parent:
        core.readers_change(node)
        node.parent = parent
