"""Room for hosts that lack it: others give them slabs, which blocks leave for that.

A host that finds no room says so in its report (``wanted``), with how much its blocks have (``evictable``). Each host
whose blocks have more gives its part of it: slabs of its block store, emptied if need be, become nobody's at once, and
the host that asked takes them (`SlabSupply`). So blocks never keep a host from storing something that fits without
them, and hosts that store alike have about equally many.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError, OperationError
from kvfuse.volume.blocks.block_room import BlockRoom
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core

RETRY_SECONDS = 1.0
GIVE_SECONDS = 2.0
"""for which emptied slabs are waited for"""

log = logging.getLogger(__name__)


@dataclass
class Giving:
    """Gives room to others. One of each membership."""

    core: Core
    reports: Reports
    leases: SlabLeases
    _blocks: BlockRoom | None = None

    def connect(self, blocks: BlockRoom) -> None:
        """Room of the block store, before `run`."""
        self._blocks = blocks

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
        if count and self._blocks is not None:
            self.reports.counters.given_slabs += await self._blocks.give(count, self.leases.give)

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
