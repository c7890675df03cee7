"""Slots of a file that is read on, brought to the page cache and verified ahead of the reader, in threads.

The event loop then answers a read with a view: it neither waits for the disk nor copies or sums bytes. A thread reads a
slot without the interpreter, in pieces of a granule through one small buffer, which stays in the processor's cache.
Nothing but pages of the kernel's cache is kept, so what was fetched in vain costs no memory of the daemon, and the
kernel drops it when it needs room.

A file that begins as weights of a model do (safetensors) is read from its begin to its end, whatever the size of the
first requests, which are for its header. A reader of others reads on where its request is as large as the kernel's
read-ahead, and follows a granule that is verified; or where it is so large that the rest of the slot must follow. A
small read at random is left to the reader itself.

A granule counts as verified for an extent whose checksums are those that the thread compared with: a slot that was
given up, or written in place meanwhile, has others. What does not match is left to the read, which says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.errors import EngineError
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.measures.read_turns import PIECE, ReadTurn, window_of

Buffer = bytes | bytearray | memoryview
log = logging.getLogger(__name__)

READ_ON_MIN = GRANULE_SIZE // 2
"""Bytes of a read that follows verified ones, from which on it is one of many: the kernel reads so far ahead."""
LARGE_READ = 2 * GRANULE_SIZE
"""Bytes of a read after which the rest of its slot is expected."""
AHEAD_MAX = 16 << 20
"""Bytes of slots that are under way at a time, of all files; one slot may always be."""
THREADS_MAX = 3
"""A disk has enough to do with as many slots."""

WEIGHTS_HEADER_MAX = 100_000_000
"""Bytes of the header of a file of weights, as its readers have it"""

LoadChunk = Callable[[Node, int], Awaitable[Chunk | None]]


class SlotChecks:
    """Of the extents of one membership, while `run` is running. Event loop only."""

    def __init__(self, core: Core, load_chunk: LoadChunk) -> None:
        self.core = core
        self._load_chunk = load_chunk
        self._nursery: trio.Nursery | None = None
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._under_way: dict[Extent, trio.Event] = {}
        self._loading: set[tuple[Node, int]] = set()
        """chunks whose records are read, to check their slots"""
        self.size_under_way = 0
        """bytes of slots"""

    async def run(self) -> None:
        """Check, for ever. Nothing that is under way outlives it."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def wait(self, extent: Extent) -> bool:
        """Until the extent's check under way is over. False: there is none."""
        if (done := self._under_way.get(extent)) is None:
            return False
        await done.wait()
        return True

    def begin(self, node: Node, data: Buffer) -> None:
        """A reader got the first bytes of a file: check all that follows, if it is one of weights."""
        if self._nursery is not None and are_weights(data, node.size):
            self._go_on(node, 0)

    def expect(self, node: Node, index: int, extent: Extent, start: int, length: int) -> None:
        """A reader asks for ``length`` bytes from ``start`` of an extent, chunk ``index``: check what it needs next."""
        if self._nursery is None or not extent.checksums:
            return
        is_over = start + length > extent.length - LARGE_READ
        if not is_verified(extent, start, length):
            if extent in self._under_way or not _reads_on(node, index, extent, start, length):
                return
            self._begin(node, extent)
        elif not is_over or length < READ_ON_MIN:
            return
        self._go_on(node, index + 1)

    def _go_on(self, node: Node, index: int) -> None:
        """Check the slots that follow, as many as may be under way."""
        last = (node.size - 1) // node.chunk_size
        expected = 0
        while index <= last and self.size_under_way + expected < AHEAD_MAX and expected < AHEAD_MAX:
            chunk = node.chunks.get(index)
            if chunk is None:
                self._load(node, index)
                return
            expected += node.chunk_size
            extent = chunk.extents[0] if chunk.staged is None and len(chunk.extents) == 1 else None
            if extent is not None and self._can_check(extent) and not is_verified(extent, 0, extent.length):
                self._begin(node, extent)
            index += 1

    def _can_check(self, extent: Extent) -> bool:
        return bool(extent.checksums) and not extent.packing and extent not in self._under_way

    def _load(self, node: Node, index: int) -> None:
        """Go on at this chunk once its record was read."""
        if self._nursery is not None and (node, index) not in self._loading:
            self._loading.add((node, index))
            self._nursery.start_soon(self._load_and_go_on, node, index)

    async def _load_and_go_on(self, node: Node, index: int) -> None:
        try:
            chunk = await self._load_chunk(node, index)
        except EngineError as error:
            log.info("inode %d: chunk %d is not read ahead: %s", node.ino, index, error)
            return
        finally:
            self._loading.discard((node, index))
        if chunk is not None and node.handles:
            self._go_on(node, index)

    def _begin(self, node: Node, extent: Extent) -> None:
        assert self._nursery is not None
        self._under_way[extent] = trio.Event()
        self.size_under_way += extent.length
        self._nursery.start_soon(self._check, node, extent, extent.length)

    async def _check(self, node: Node, extent: Extent, size: int) -> None:
        """Have what is not verified yet of a slot in the page cache, and verified. ``size``: of it when this began."""
        of, checksums = self.core.namespaces.measures[node.namespace], extent.checksums
        low = ((~extent.verified & (extent.verified + 1)).bit_length() - 1) * GRANULE_SIZE
        try:
            while low < extent.length and extent.checksums is checksums:  # a small read may verify all meanwhile
                left, is_cut = extent.length - low, extent.length > window_of(of)
                await self._check_piece(of, extent, low, min(left, PIECE) if is_cut else left)
                low += PIECE if is_cut else left
        except (EngineError, ValueError) as error:  # ValueError: a record names a place that is in no segment
            log.info("a slot is not read ahead: %s", error)  # whoever reads it hears why
        finally:
            self.size_under_way -= size  # it may have been cut
            self._under_way.pop(extent).set()

    async def _check_piece(self, of: Measures, extent: Extent, low: int, length: int) -> None:
        """Whole granules of a slot, from ``low`` on, in a turn of the namespace. EngineError, ValueError."""
        checksums, first = extent.checksums, low // GRANULE_SIZE
        async with ReadTurn(of, length):
            segment, place = self.core.locate(extent.addr)
            with self.core.reads.reading(), self.core.reads.speeds.remote.reading(length):
                sums = await self.core.segments.warm(segment, place + low, length, self._threads)
        if extent.checksums is checksums:
            expected = checksums[first * CHECKSUM_SIZE : -(-(low + length) // GRANULE_SIZE) * CHECKSUM_SIZE]
            extent.verified |= _equal(sums, expected) << first


def are_weights(data: Buffer, size: int) -> bool:
    """Whether a file of this size that begins with ``data`` is one of safetensors: the size of a header, and JSON."""
    start = bytes(data[:9])
    header_size = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and 1 < header_size <= min(WEIGHTS_HEADER_MAX, size - 8)


def _equal(sums: bytes, expected: bytes) -> int:
    """Bits of the granules whose checksums are the same."""
    if sums == expected:
        return (1 << len(sums) // CHECKSUM_SIZE) - 1
    places = range(0, min(len(sums), len(expected)), CHECKSUM_SIZE)
    return sum(
        1 << place // CHECKSUM_SIZE for place in places if sums[place : place + 4] == expected[place : place + 4]
    )


def needed_of(extent: Extent, start: int, length: int) -> int:
    """Bits of granules that a read touches, and that nobody has verified yet."""
    first, last = start // GRANULE_SIZE, (start + length - 1) // GRANULE_SIZE
    return ((2 << (last - first)) - 1) << first & ~extent.verified


def is_verified(extent: Extent, start: int, length: int) -> bool:
    return not needed_of(extent, start, length)


def _reads_on(node: Node, index: int, extent: Extent, start: int, length: int) -> bool:
    """What follows such a read will be read, too; see the module."""
    if length < READ_ON_MIN:
        return False
    if length >= LARGE_READ:
        return True
    needed = needed_of(extent, start, length)
    number = (needed & -needed).bit_length() - 1
    if number:
        return bool(extent.verified >> (number - 1) & 1)
    before = node.chunks.get(index - 1)
    if before is None or not before.extents:
        return index == 0
    last = before.extents[-1]
    return bool(last.verified >> ((last.length - 1) // GRANULE_SIZE) & 1)
