"""The one question for room on a full volume, and the contract of those who answer it.

A call that finds no slot, or no room for a record, asks `Space` for more, and then tries again. `Space` asks its
sources in the order in which they were given to it. The first that gives room up ends the round: that may be enough,
and another call may take it meanwhile. The call comes back until it has what it needs, no source has any, or its time
is over.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from kvfuse.volume.inodes.core import Core

ROOM_SECONDS = 3.0
"""and a grace: for how long a call goes on asking for room, while others take what becomes free"""
ROOM_ROUNDS_MIN = 8
"""Times that a call asks for room, however long each takes: twice for each step from a removed file to free slots.
Each answer of a loaded store comes before its own deadline, and all of them together perhaps not in ``ROOM_SECONDS``.
"""


class Source(Protocol):
    """A method of a part that can give up slots, or records. Any number of calls may ask at the same time."""

    def __call__(self, deadline: float, /) -> Awaitable[bool]:
        """True: room became free, perhaps too little. False: the source has none, and none of it is on its way.

        Files and hosts that are about to give room up are waited for until ``deadline``, in trio's time, at the latest;
        engines have deadlines of their own. EngineError ends the wait of the call that asks.
        """


@dataclass
class RoomWait:
    """One call that waits for room, since it first had none."""

    deadline: float
    """holds after `ROOM_ROUNDS_MIN`"""
    round_count: int = 0


@dataclass
class Space:
    """Knows who has room. One of each membership."""

    core: Core
    sources: Sequence[Source]
    """of slots"""
    record_sources: Sequence[Source]
    """of records of names, inodes and attributes, beside what is pending"""
    store_changes: Callable[[], Awaitable[None]]
    """has everything stored that is pending, and so gives up the records that it deletes"""

    async def wait_for_room(self, wait: RoomWait | None) -> RoomWait | None:
        """Have more free slots: the call tries again, and comes back with what it got here if they are too few.

        ``wait`` is None when it asks first. None: no source has room, or the call has waited for all that was on its
        way when it began. EngineError where an engine does not answer.
        """
        wait = wait or self._begin_wait()
        if not await _ask(self.sources, wait):
            return None
        await self.core.reads.passed()
        return wait

    async def wait_for_records(self, size: int, what: str) -> bool:
        """Have room for so many bytes of names and attributes. True: somebody was waited for, look again at everything.

        False: there is room until the next await. NoSpace, where ``what`` has none when all that is pending is stored.
        """
        metadata = self.core.metadata
        if metadata.fits(size):
            return False
        wait = self._begin_wait()
        await self.store_changes()
        while not metadata.fits(size):
            if not await _ask(self.record_sources, wait):
                raise metadata.refusal(what)
            await self.store_changes()
        return True

    async def free_removed_files(self) -> None:
        """Have freed all that was removed, as far as its sources can."""
        while await _ask(self.record_sources, RoomWait(math.inf)):
            pass

    def _begin_wait(self) -> RoomWait:
        return RoomWait(trio.current_time() + self.core.grace.seconds + ROOM_SECONDS)


async def _ask(sources: Sequence[Source], wait: RoomWait) -> bool:
    """One round: some source gave something up. False also where the call has waited for long enough."""
    wait.round_count += 1
    deadline = wait.deadline if wait.round_count > ROOM_ROUNDS_MIN else math.inf
    if trio.current_time() <= deadline:
        for take in sources:
            if await take(deadline):
                return True
    return False
