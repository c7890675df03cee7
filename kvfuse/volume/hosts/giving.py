"""Room for hosts that lack it: others give them slabs, which blocks leave for that.

A host that finds no room asks one that holds more slabs with blocks (`Reports`). That gives it some: slabs of its block
store, emptied if need be, become nobody's at once, and the host that asked takes them (`SlabSupply`). So blocks never
keep a host from storing something that fits without them, and hosts that store alike have about equally many.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError, OperationError
from kvfuse.volume.blocks.block_room import BlockRoom
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core

RETRY_SECONDS = 1.0

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
            while self.reports.asked_by:
                client, wanted = self.reports.asked_by.popitem()
                try:
                    await self._give(client, wanted)
                except (EngineError, OperationError) as error:
                    log.warning("room for another host is given later: %s", error)
                    await trio.sleep(RETRY_SECONDS)

    async def _give(self, client: int, wanted: int) -> None:
        count = min(wanted, self.reports.may_give(self.core.client, client))
        if count and self._blocks is not None:
            self.reports.counters.given_slabs += await self._blocks.give(count, self.leases.give)
