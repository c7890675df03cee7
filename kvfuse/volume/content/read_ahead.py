"""Bytes of sealed extents, fetched before the kernel asks for them: where each read waits for servers or a device.

A file that is opened, or read from its start, is likely to be read on. Its extent is then fetched in parts, side by
side, and what was fetched is kept until it was handed out once (the kernel caches it then), the file is closed, or
the memory is needed. So a reader waits for about one round trip, and a small read costs no engine call of its own.
A part that nobody waits for gives way to reads and stores that somebody waits for (`measures/demand`).

Only sealed extents are fetched. A part counts when its bytes are those that the extent's checksums promise, and for
as long as the extent has these checksums; whatever else came, or failed, is left to the read itself, which knows what
to do about it (`reader`). An extent that the file no longer has is never asked for: the caller looks whether it is the
file's before it asks, and again after it waited.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, granule_checksums
from kvfuse.errors import KvfuseError
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.content.nearby import Nearby, base_of
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.read_turns import ReadTurn

log = logging.getLogger(__name__)

PART_SIZE = 4 * GRANULE_SIZE
"""Bytes of one call to the engine: what the kernel asks for at once, too."""
WINDOW_SIZE = 4 * PART_SIZE
"""Bytes of an extent that are fetched together, at most."""
MEMORY_MAX = 64 << 20
"""Bytes of all windows that are kept, or under way."""
EAGER_SIZE_MIN = PART_SIZE // 8
"""A first read of so many bytes announces more: the kernel reads that far ahead for those who read on."""


@dataclass(slots=True, eq=False)
class _Part:
    """A run of granules of a window."""

    go: trio.Event = field(default_factory=trio.Event)
    """set when a reader waits for it"""
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    error: KvfuseError | None = None
    is_whole: bool = False
    """its bytes are there, and right"""
    data: memoryview | None = None
    """its bytes, where they are not the window's"""


class _Window:
    """Up to WINDOW_SIZE bytes of an extent, which begin ``low`` bytes into it."""

    __slots__ = ("base", "bytes", "checksums", "low", "node", "parts", "reach", "rest")

    def __init__(self, node: Node, base: int, extent: Extent, low: int) -> None:
        self.node = node
        self.base = base
        """as of `nearby.base_of`"""
        self.low = low
        self.checksums = extent.checksums
        self.bytes = np.empty(min(extent.length - low, WINDOW_SIZE), np.uint8).data
        """memory is used as it is filled"""
        self.parts: list[_Part | None] = [None] * -(-len(self.bytes) // PART_SIZE)
        """None: not asked for"""
        self.rest = len(self.bytes)
        """bytes that nobody was given yet"""
        self.reach = 0
        """up to where they were given"""

    def between(self, low: int, high: int) -> memoryview:
        """Bytes that are there. A copy, where some came from the disk tier and one part has not all of them."""
        starts = range(low // PART_SIZE * PART_SIZE, high, PART_SIZE)
        own = [part.data if (part := self.parts[start // PART_SIZE]) is not None else None for start in starts]
        if not any(data is not None for data in own):
            return self.bytes[low:high]
        found = [
            (data if data is not None else self.bytes[start : start + PART_SIZE])[max(0, low - start) : high - start]
            for start, data in zip(starts, own, strict=True)
        ]
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def is_intact(self, number: int, data: memoryview) -> bool:
        """These bytes of a part are those that its checksums promise."""
        start = (self.low + number * PART_SIZE) // GRANULE_SIZE * CHECKSUM_SIZE
        found = granule_checksums(data)
        return found == self.checksums[start : start + len(found)]


Key = tuple[Extent, int]
"""of a window: its extent, and its number in that"""


class Fetcher:
    """Fetches parts of extents while `run` is running. `Extents` that need it have one. Event loop only."""

    def __init__(self, core: Core, memory_max: int = MEMORY_MAX) -> None:
        self.core = core
        self.nearby = Nearby(core)
        self.memory_max = memory_max
        self.memory_size = 0
        """bytes of all windows"""
        self._nursery: trio.Nursery | None = None
        self._windows: dict[Key, _Window] = {}
        """the oldest first"""
        self._files: dict[Node, set[Key]] = {}

    async def run(self) -> None:
        """Fetch, for ever. Nothing that is under way outlives it."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # while it still takes tasks: once its last one has ended it does not

    def opened(self, node: Node, extent: Extent) -> None:
        """A file was opened that begins with ``extent``, and the kernel has nothing of it: its start will be read."""
        self._begin(node, base_of(extent, 0), (extent, 0), PART_SIZE)

    def closed(self, node: Node) -> None:
        """Nobody has the file open any more: nothing is kept of it."""
        for key in list(self._files.get(node, ())):
            self._drop(key)

    async def read(self, node: Node, base: int, extent: Extent, start: int, length: int) -> memoryview | None:
        """Bytes of an extent, right but maybe no longer the file's; None where they have to be read.

        ``base``: as of `nearby.base_of`. EngineError where they were waited for, and the engine failed.
        """
        number, offset = divmod(start, WINDOW_SIZE)
        key = extent, number
        if offset + length > WINDOW_SIZE:
            return None
        if (window := self._windows.get(key)) is not None and window.checksums != extent.checksums:
            self._drop(key)  # it was changed in its slot since
        self._expect(node, base, key, offset, length)
        window = self._windows.get(key)
        if window is None or offset + length > len(window.bytes):
            return None
        for part in window.parts[offset // PART_SIZE : -(-(offset + length) // PART_SIZE)]:
            if part is None or (part.done.is_set() and not part.is_whole):
                return None
            if not part.done.is_set():
                await self._wait_for(part)
            if part.error is not None:
                raise part.error
            if not part.is_whole:
                return None
        window.rest -= length
        window.reach = max(window.reach, offset + length)
        if window.rest <= 0 and self._windows.get(key) is window:
            self._drop(key)
        return window.between(offset, offset + length)

    @staticmethod
    def is_near_end(extent: Extent, end: int) -> bool:
        """Who read an extent up to ``end`` is about to need what follows it."""
        return end > extent.length - PART_SIZE

    async def _wait_for(self, part: _Part) -> None:
        """A reader needs the part."""
        demand = self.core.reads.demand
        demand.calls += 1
        part.go.set()
        try:
            await part.done.wait()
        finally:
            demand.calls -= 1
            if demand.behind:
                demand.ended()

    # -- what to fetch -------------------------------------------------------------------------------

    def _expect(self, node: Node, base: int, key: Key, offset: int, length: int) -> None:
        """A range of a window is about to be read: fetch it where it is read from its start on, and what follows."""
        window = self._windows.get(key)
        if offset and (window is None or offset > window.reach + PART_SIZE):
            return
        is_eager = bool(offset) or length >= EAGER_SIZE_MIN
        self._begin(node, base, key, WINDOW_SIZE if is_eager else PART_SIZE)

    def _begin(self, node: Node, base: int, key: Key, length: int) -> None:
        """Have the first ``length`` bytes of a window, unless they are there or under way."""
        nursery, (extent, number) = self._nursery, key
        if nursery is None or not extent.checksums or not node.handles:
            return
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(node, base, extent, number * WINDOW_SIZE)
            self._files.setdefault(node, set()).add(key)
            self.memory_size += len(window.bytes)
            while self.memory_size > self.memory_max and len(self._windows) > 1:
                self._drop(next(iter(self._windows)))
        for index in range(min(-(-length // PART_SIZE), len(window.parts))):
            if window.parts[index] is None:
                window.parts[index] = part = _Part()
                nursery.start_soon(self._fetch, extent, window, index, part)

    async def _fetch(self, extent: Extent, window: _Window, index: int, part: _Part) -> None:
        """Fill a part. Where the window was dropped meanwhile, only readers that wait for the part get its bytes."""
        target = window.bytes[index * PART_SIZE : (index + 1) * PART_SIZE]
        start = window.low + index * PART_SIZE
        try:
            with part.scope:
                if not part.go.is_set():
                    await self.core.reads.demand.give_way(part.go)
                if self.nearby.is_there:
                    part.is_whole = await self._read_nearest(extent, window, index, part)
                else:
                    await self._read(window.node, extent, start, target)
                    part.is_whole = window.is_intact(index, target)
        except KvfuseError as error:
            part.error = error
        except ValueError as error:
            log.warning("nothing could be fetched: %s", error)  # whoever reads it hears why
        finally:
            part.done.set()

    async def _read(self, node: Node, extent: Extent, start: int, target: memoryview) -> None:
        """From the engine. EngineError."""
        async with ReadTurn(self.core.namespaces.measures[node.namespace], len(target)):
            with self.core.reads.reading(), self.core.reads.speeds.remote.reading(len(target)):
                await self.core.segments.read([Transfer(*self.core.locate(extent.addr + start), target)])

    async def _read_nearest(self, extent: Extent, window: _Window, index: int, part: _Part) -> bool:
        """From what is nearer than the engine, if that has the bytes. Whether they are right. EngineError."""
        start, target = window.low + index * PART_SIZE, window.bytes[index * PART_SIZE : (index + 1) * PART_SIZE]
        stretch = GranuleRun.around(extent, start, start + len(target))
        if stretch.checksums != window.checksums:
            await self._read(window.node, extent, start, target)
            return window.is_intact(index, target)

        async def engine(*, is_beside: bool) -> memoryview | None:
            began = trio.current_time()
            data = np.empty(len(target), np.uint8).data if is_beside else target
            neighbours = self.core.reads.neighbours
            if neighbours is not None and neighbours.feeds(extent.addr, window.base):
                async with ReadTurn(self.core.namespaces.measures[window.node.namespace], len(target)):
                    data[:] = await neighbours.feed(extent.addr, extent.generation, start, start + len(target))
            else:
                await self._read(window.node, extent, start, data)
            if not window.is_intact(index, data):
                return None
            self.nearby.offer(window.node, stretch, data, trio.current_time() - began)
            return data

        data = await self.nearby.read(window.node, window.base, stretch, engine, target)
        if data is None:
            return False
        part.data = None if data is target else data
        return True

    def _drop(self, key: Key) -> None:
        """A window is not needed. Parts under way are cancelled: a reader that waits for one then reads by itself."""
        window = self._windows.pop(key)
        self.memory_size -= len(window.bytes)
        keys = self._files[window.node]
        keys.discard(key)
        if not keys:
            del self._files[window.node]
        for part in window.parts:
            if part is not None:
                part.scope.cancel()
