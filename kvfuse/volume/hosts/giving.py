"""Room for hosts that lack it: others evict whole slabs of blocks for them, and give these slabs back.

A host that finds no room says so in its report (``wanted``), with how much its caches have (``evictable``). Each host
whose caches have more gives its part of it: of the slabs whose blocks were not used for longest it evicts all blocks,
and gives them back at once. The host that asked takes them (`SlabSupply`), and has their slots a grace later, when the
evicted files are freed. So blocks of caches
never keep a host from storing something that fits without them, and hosts that store alike have caches of equal size.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError, OperationError
from kvfuse.volume.blocks.block_room import BlockRoom
from kvfuse.volume.eviction.evictor import Evictor
from kvfuse.volume.eviction.shared_eviction import SharedEviction
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.cache import blocks_by_slab

RETRY_SECONDS = 1.0
MIN_SHARE = 2
"""A slab is given if at least one part in so many of it is blocks of caches."""

log = logging.getLogger(__name__)


@dataclass
class Giving:
    """Gives room to others. One of each membership."""

    core: Core
    reports: Reports
    leases: SlabLeases
    evictor: Evictor
    eviction: SharedEviction
    blocks: BlockRoom | None = None
    """of the block store"""

    async def run(self) -> None:
        """Send and hear reports, and give others room, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reports.run)
            if not self.core.read_only:
                nursery.start_soon(self._serve)

    async def _serve(self) -> None:
        while True:
            await self.reports.is_asked.wait()
            self.reports.is_asked = trio.Event()
            for client in list(self.reports.others):
                try:
                    await self._give(client)
                except (EngineError, OperationError) as error:
                    log.warning("room for another host is given later: %s", error)
                    await trio.sleep(RETRY_SECONDS)

    async def _give(self, client: int) -> None:
        count = self._count_for(client)
        slabs = self._choose(count)
        if self.blocks is not None and len(slabs) < count:
            self.reports.counters.given_slabs += await self.blocks.give(count - len(slabs), self.leases.give)
        if not slabs:
            return
        self.eviction.removal.giving.update(slabs)
        try:
            await self.evictor.empty_slabs(slabs)
            self.reports.counters.given_slabs += await self.leases.give(slabs)
        finally:
            self.eviction.removal.giving.difference_update(slabs)

    def _count_for(self, client: int) -> int:
        """Slabs for a client: our part of what it asked for, half of what we have more at the most."""
        asked, own = self.reports.others.get(client), self.reports.evictable
        if asked is None or not asked.wanted or own <= asked.evictable:
            return 0
        has_none = not asked.evictable
        others = [one.evictable for one in self.reports.others.values() if one.evictable > asked.evictable]
        part = asked.wanted * own / (own + sum(others))
        most = own if has_none else (own - asked.evictable) / 2
        slab_size = self.core.geometry.slab_size
        count = math.ceil(min(part, most) / slab_size)
        return count if has_none or most >= slab_size else 0

    def _choose(self, count: int) -> list[int]:
        """Slabs that may be given, those whose blocks were not used for longest."""
        least = self.core.geometry.slab_size // MIN_SHARE
        found = blocks_by_slab(self.core.caches.values()) if count else {}
        slabs = [slab for slab, (size, _) in found.items() if size >= least and self.core.slabs.may_withdraw(slab)]
        return sorted(slabs, key=lambda slab: found[slab][1])[:count]
