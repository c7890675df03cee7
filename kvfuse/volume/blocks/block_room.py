"""Room for files, of the slabs and quotas that blocks have: the last source of room, as blocks go for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import trio

from kvfuse.volume.blocks.block_engine import BlockEngine

SLABS = 4
"""that are given back at once: a file that lacks room mostly lacks more"""
GIVE_SECONDS = 5.0
"""for which slabs are emptied for another host at a time"""
WRITE_SECONDS = 1.0
"""for which a call waits until emptied slabs are written as free ones"""


@dataclass
class BlockRoom:
    """Of one membership. Event loop only."""

    engine: BlockEngine

    async def make_room(self, deadline: float, namespace: int | None) -> bool:
        """A `RoomSource`. Of a namespace, blocks go until its quotas have room for what a file lacked last."""
        engine = self.engine
        if namespace is not None:
            account = engine.core.namespaces.accounts.all.get(namespace)
            return engine.eviction.make_room_in(namespace, account.lack.size if account is not None else 1)
        engine.slabs.want()
        if engine.slabs.give_back(SLABS):
            return True
        if not engine.eviction.empty_slabs():
            return False
        with trio.move_on_at(min(deadline, trio.current_time() + WRITE_SECONDS)):
            while not engine.slabs.give_back(SLABS):
                await engine.writer.await_progress()
        return True

    async def give(self, count: int, give: Callable[[Iterable[int]], Awaitable[int]]) -> int:
        """Empty up to so many slabs for another host. ``give``: gives free slabs to it. How many. EngineError."""
        given, deadline = 0, trio.current_time() + GIVE_SECONDS
        while given < count and trio.current_time() < deadline and await self.make_room(deadline, None):
            await self.engine.commit()  # before that, a slab is not known to be free
            given += await give(self.engine.core.slabs.free_slabs()[: count - given])
        return given
