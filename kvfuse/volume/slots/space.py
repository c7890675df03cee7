"""Finding room on a full volume, and the contract of the sources of room.

A call that finds no slot, or no room for a record, asks `RoomFinder` for more, and then tries again. `RoomFinder` asks
its sources in their order, until one gives up some room. That may be too little, or another call may take it first.
So the call asks again until it has what it needs, no source has any room, or its time
is over.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from kvfuse.errors import EngineTimeout, QuotaExceeded
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.settings import ROOT

ROOM_SECONDS = 3.0
"""How long, beside a grace, a call goes on asking for room while others take what becomes free."""
EVICTION_SECONDS = 30.0
"""The same where blocks go for it: there is room then, and it takes only luck to get it. Callers through rings have
deadlines of their own."""
ROOM_ROUNDS_MIN = 8
"""Rounds in which a call asks for room without regard to time: two for each step from a removed file to free slots.
A loaded store answers each call within its deadline, but all of them together perhaps not within ``ROOM_SECONDS``.
"""
UNLUCKY_ROUNDS = 2
"""Rounds in which others took what became free, after which a call has blocks go first."""


class RoomSource(Protocol):
    """A method that gives up slots or records. Several calls may use it at the same time."""

    def __call__(self, deadline: float, namespace: int | None, /) -> Awaitable[bool]:
        """True: some room became free. False: the source has none, and none is about to become free.

        ``namespace``: where room is wanted, because its quota is used up; None: anywhere in the volume.
        Waits for files and hosts that are about to give up room until ``deadline`` (trio's time) at the latest;
        engines have deadlines of their own. EngineError ends the wait of the call that asks.
        """


@dataclass
class RoomWait:
    """The wait of one call, since it first found no room."""

    deadline: float
    """in trio's time; ignored in the first `ROOM_ROUNDS_MIN` rounds"""
    seconds: float = math.inf
    """from its begin to that"""
    round_count: int = 0

    @property
    def is_over(self) -> bool:
        return self.round_count > ROOM_ROUNDS_MIN and trio.current_time() > self.deadline


@dataclass
class RoomFinder:
    """Asks the sources of room. Each membership has one."""

    core: Core
    sources: Sequence[RoomSource]
    """of slots"""
    record_sources: Sequence[RoomSource]
    """sources of room for records of names, inodes and attributes"""
    store_changes: Callable[[], Awaitable[None]]
    """commits all pending changes, and so frees the room of the records that they delete"""
    evictors: Sequence[RoomSource] = ()
    """those for which blocks go: asked last, but by unlucky calls"""
    elsewhere: Sequence[RoomSource] = ()
    """of slots that other hosts are about to give up: these are asked after all others, and it takes a grace more"""

    def connect(self, evictor: RoomSource) -> None:
        """One more for which blocks go."""
        self.evictors = [*self.evictors, evictor]

    async def wait_for_room(self, wait: RoomWait | None, namespace: int | None = None) -> RoomWait | None:
        """Free some slots. The caller tries again, and passes the returned wait if they were too few.

        ``wait``: None at first. ``namespace``: see `RoomSource`; its files count as room, too. Returns None if no
        source has room, or the caller's time is over. EngineError: an engine does not answer. EngineTimeout: its time
        is over where blocks go for room, so that there is room by and by.
        """
        wait = wait or self._begin_wait()
        is_unlucky = wait.round_count >= UNLUCKY_ROUNDS
        sources = [*self.evictors, *self.sources] if is_unlucky else [*self.sources, *self.evictors]
        if not await _ask([*sources, *self.elsewhere], wait, namespace):
            if wait.is_over and self._evicts:
                raise EngineTimeout(
                    f"others took all room that became free in {wait.seconds:g} s: the volume is too small"
                )
            return None
        await self.core.reads.passed()
        return wait

    async def wait_for_file(self, namespace: int) -> None:
        """Return when a namespace may have one more file: until the next await. QuotaExceeded, EngineError."""
        wait: RoomWait | None = None
        while True:
            try:
                return self.core.namespaces.accounts.check_file(namespace)
            except QuotaExceeded as error:
                wait = await self.wait_for_room(wait, error.namespace)
                if wait is None:
                    raise

    async def wait_for_records(self, size: int, what: str) -> bool:
        """Make room for ``size`` bytes of records. True: this waited, so the caller must check all conditions again.

        False: there is room until the next await. NoSpace (for ``what``): there is none after all pending commits.
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
        """Free all removed files that the sources can free. EngineError."""
        while await _ask(self.record_sources, RoomWait(math.inf)):
            pass

    def _begin_wait(self) -> RoomWait:
        rounds = 1 + bool(self.elsewhere)
        seconds = rounds * (self.core.grace.seconds + (EVICTION_SECONDS if self._evicts else ROOM_SECONDS))
        return RoomWait(trio.current_time() + seconds, seconds)

    @property
    def _evicts(self) -> bool:
        """There are blocks that go for room."""
        return bool(self.evictors) and self.core.blocks is not None and self.core.blocks.use(ROOT)[1] > 0


async def _ask(sources: Sequence[RoomSource], wait: RoomWait, namespace: int | None = None) -> bool:
    """One round. True: a source gave up room. False: none has any, or the call's time is over."""
    wait.round_count += 1
    deadline = wait.deadline if wait.round_count > ROOM_ROUNDS_MIN else math.inf
    if not wait.is_over:
        for take in sources:
            if await take(deadline, namespace):
                return True
    return False
