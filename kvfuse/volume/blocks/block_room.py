"""Room for files, of the slabs and quotas that blocks have: the last source of room, as blocks go for it."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from kvfuse.volume.blocks.block_engine import BlockEngine

SLABS = 4
"""that are given back at once: a file that lacks room mostly lacks more"""
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
