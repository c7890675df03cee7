"""What the parts of a mounted volume share: engines, the slab map, inodes in memory, counters."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import ROOT_INODE, ReadingThread
from kvfuse.volume.inodes.chunk import COMMITTED, DISCARDED, FRESH, Extent
from kvfuse.volume.inodes.dentries import NAMES_MAX, Dentries
from kvfuse.volume.inodes.grace import Grace
from kvfuse.volume.inodes.kernel_link import KernelLink
from kvfuse.volume.inodes.metadata_budget import Metadata
from kvfuse.volume.inodes.node import Node, Nodes
from kvfuse.volume.inodes.places import Places
from kvfuse.volume.inodes.sharing import Alone, Shared
from kvfuse.volume.store.numbers import NumberRange
from kvfuse.volume.views.tier import SharedTier

PATH_DEPTH_MAX = 256


class ReadEpochs:
    """Which reads are under way, so that a freed slot is reused only when none of them can see it.

    Reads that wait are counted under the epoch in which they began; what is retired waits until all
    reads of its own and earlier epochs ended. Reads that answer without an await need no counting.

    Threads that read by content maps throw away what changed meanwhile, but they may copy straight into memory that
    a client sees. So they are asked, too.
    """

    def __init__(self) -> None:
        self.threads: set[ReadingThread] = set()
        self._epochs: deque[list[int]] = deque([[0]])
        self._retired: deque[list[tuple[Callable[[list[Slot]], object], list[Slot]]]] = deque([[]])

    @contextmanager
    def reading(self) -> Iterator[None]:
        epoch = self._epochs[-1]
        epoch[0] += 1
        try:
            yield
        finally:
            self._end(epoch)

    def retire(self, give: Callable[[list[Slot]], object], slots: list[Slot]) -> None:
        """Call ``give(slots)`` when no read that is under way now remains."""
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
        """Slots wait for reads that are under way."""
        return any(self._retired)

    def _end(self, epoch: list[int]) -> None:
        epoch[0] -= 1
        self._advance()

    async def passed(self) -> None:
        """Return when every read that is under way now has ended, and what waited for them was given back."""
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
    """The state of one membership of a volume. Other threads than the event loop's only ask `Places.known`.

    `succeed` hands on ``tier``, which is for any thread, and ``reads.threads``: both live as long as the volume.
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
    metadata: Metadata
    """what names, inodes and attributes may take"""
    file_count: int
    """inodes; in a shared volume those that this client made, less those that it removed"""
    client: int = 0
    """this one among those of a shared volume"""
    grace: Grace = field(default_factory=lambda: Grace(0.0))
    """of freed slots of a shared volume"""
    is_alone: Callable[[], bool] = field(default=lambda: False)
    """no other client of a shared volume is known of: nobody else reads, as far as has been heard"""
    places: Places = field(default_factory=Places)
    reads: ReadEpochs = field(default_factory=ReadEpochs)
    counters: CoreCounters = field(default_factory=CoreCounters)
    kernel: KernelLink = field(default_factory=KernelLink)

    def __post_init__(self) -> None:
        self.dentries = Dentries(max(NAMES_MAX, self.nodes.count_max))
        self.shared = self.records.limits.shared
        """other hosts write the same records and segments"""
        self.sharing = (Shared if self.shared else Alone)(self.slabs, self.geometry)
        self._segment_data_size = self.geometry.segment_slabs * self.geometry.slab_size
        self._data_starts = [self.geometry.data_start(segment) for segment in range(self.geometry.segment_count)]
        self.made_segments: set[int] = set()
        self.unnamed: dict[int, Node] = {}
        """files without names that nobody has open, but the kernel may: it may be about to open one it looked up"""
        self.dead: list[Extent] = []
        """extents of inodes that are no more; the next commit frees their slots"""
        self.givers: dict[Node, None] = {}
        """inodes with extents in ``dead``, and some that had"""
        self.unborn: list[Extent] = []
        """extents that were given up before any commit; their slots are free when their headers say so"""

    def succeed(self, former: Core) -> None:
        """Begin with what the kernel and other doors have of the volume, as ``former`` knows it. That one is over."""
        self.places, self.counters, self.kernel = former.places, former.counters, former.kernel
        self.places.distrust_all()
        self.reads.threads = former.reads.threads
        self.tier = self.nodes.tier = former.tier
        self.tier.clear()
        former.tier = SharedTier(0)

    # -- places in the segments ----------------------------------------------------------------------

    def locate(self, addr: int) -> tuple[int, int]:
        """(segment, file offset) of a volume address; `Geometry.locate` from a table, as reads need it often."""
        segment, offset = divmod(addr, self._segment_data_size)
        return segment, self._data_starts[segment] + offset

    async def make_segments(self, segments: set[int]) -> None:
        """Have these segments, each preallocated whole when it is first needed."""
        for segment in sorted(segments - self.made_segments):
            await self.segments.create(segment, self.geometry.segment_size(segment))
            header = layout.pack_superblock(dataclasses.replace(self.superblock, segment=segment))
            await self.segments.write([Transfer(segment, 0, header)])
            self.made_segments.add(segment)

    def discard(self, node: Node, extent: Extent) -> None:
        """An extent is no longer part of ``node``: its slot is free when neither a record nor a header names it."""
        if extent.state == FRESH:
            self.unborn.append(extent)
        elif extent.state == COMMITTED:
            node.dead.append(extent)
            self.givers[node] = None
        extent.state = DISCARDED

    def chunk_size_in(self, directory: Node) -> int:
        """Bytes of a chunk of files that are made in ``directory``."""
        return min(directory.chunk_size or self.chunk_size, self.geometry.slab_size)

    # -- inodes --------------------------------------------------------------------------------------

    def readers_change(self, node: Node) -> None:
        """Owner or mode of an inode are about to change: of a directory, who was let through it may not be any more."""
        self.dentries.unbind(node.ino)
        node.forget_copy()
        if node.is_directory:
            self.tier.retire(node.ino)

    def path_of(self, node: Node) -> bytes:
        """The path from the root, as far as the directories above are in memory; for people and for rebuilds."""
        parts: list[bytes] = []
        here: Node | None = node
        while here is not None and here.ino != ROOT_INODE and len(parts) < PATH_DEPTH_MAX:
            if not here.name:
                parts.append(b"#%d" % here.ino)
                break
            parts.append(here.name)
            here = self.nodes.get(here.parent)
        return b"/".join(reversed(parts))
