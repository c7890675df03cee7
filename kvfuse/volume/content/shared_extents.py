"""Bytes of extents of a volume that many hosts have: fetched side by side, and verified by each read.

What is nearer (`nearby`) is asked before the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from kvfuse.errors import Corrupt
from kvfuse.volume.content.nearby import Nearby, base_of
from kvfuse.volume.content.read_ahead import Fetcher
from kvfuse.volume.content.reader import Extents, Reads, is_current
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node

READS_MAX = 8
"""Extents that one call reads side by side, where each is a round trip."""


class SharedExtents(Extents):
    """Of a volume where others free slots, too, and each read is a round trip: what was fetched, else the engine's.

    ``renew`` brings an inode up to what other hosts have stored. Stale, if it is gone.
    """

    def __init__(self, core: Core, renew: Callable[[Node], Awaitable[None]]) -> None:
        super().__init__(core)
        self.renew = renew
        self.nearby = Nearby(core)
        self.fetcher = Fetcher(core)

    async def read(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, target: memoryview | None = None
    ) -> bytes | bytearray | memoryview | None:
        """As there, but verified each time: bytes that are wrong may be those of a slot's next life.

        Then the inode is read anew once. Meanwhile it may change. ``target`` is used for what other hosts have: what
        was fetched, and what the engine gives, has memory of its own.
        """
        checksums = extent.checksums

        def is_same() -> bool:
            return is_current(node, offset, extent) and extent.checksums is checksums

        base = base_of(extent, offset - start)
        stretch = _whole_granules(extent, start, length) if target is not None else None
        data = None
        if stretch is None or not self.nearby.is_with_others(stretch, base):
            target, data = None, await self.fetcher.read(node, base, extent, start, length)
        if data is None and is_same():
            try:
                data = await self._read_nearest(node, base, extent, start, length, is_same, target)
            except Corrupt:
                await self.renew(node)
                data = await self.read_verified(node, extent, start, length, is_same) if is_same() else None
        return data if is_same() else None

    async def _read_nearest(
        self, node: Node, base: int, extent: Extent, start: int, length: int, is_same: Callable[[], bool],
        target: memoryview | None,
    ) -> memoryview | None:  # fmt: skip
        """As `read_verified`, from where the bytes are there soonest. ``target``: for whole granules."""
        if not (self.nearby.is_there and extent.checksums):
            return await self.read_verified(node, extent, start, length, is_same)
        stretch = GranuleRun.around(extent, start, start + length)
        low = stretch.low

        async def engine(*, is_beside: bool) -> memoryview | None:
            began = trio.current_time()
            data = await self.read_verified(node, extent, low, stretch.high - low, is_same)
            if data is not None and extent.checksums == stretch.checksums:
                self.nearby.offer(node, stretch, data, trio.current_time() - began)
            return data

        data = await self.nearby.read(node, base, stretch, engine, target, lasts=target is None)
        if data is None or data is target or not is_same():
            return data if is_same() else None
        return data[start - low : start - low + length]

    async def do_all(self, reads: Reads) -> None:
        """Side by side: so a call waits for about one round trip. The first error ends the others, and is raised."""
        if len(reads) < 2:
            await super().do_all(reads)
            return
        errors: list[Exception] = []
        turns = trio.Semaphore(READS_MAX)
        async with trio.open_nursery() as nursery:

            async def run(read: Callable[[], Awaitable[None]]) -> None:
                async with turns:
                    try:
                        await read()
                    except Exception as error:  # as the caller would get it, were they done one by one
                        errors.append(error)
                        nursery.cancel_scope.cancel()

            for read in reads:
                nursery.start_soon(run, read)
        if errors:
            raise errors[0]


def _whole_granules(extent: Extent, start: int, length: int) -> GranuleRun | None:
    """These bytes, where they are granules of a sealed extent, and no part of one."""
    if not extent.checksums:
        return None
    stretch = GranuleRun.around(extent, start, start + length)
    return stretch if (stretch.low, stretch.high) == (start, start + length) else None
