"""Room that other hosts are about to free or to give back: the source that `Space` asks last."""

from __future__ import annotations

import math
from dataclasses import dataclass

import trio

from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.open_elsewhere import Removed
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import scan_page

ORPHANS_MAX = 1000
"""orphan records that are looked at for what others free"""
ASKED_SLABS = 4
"""that others are asked for, where they have blocks of caches"""
LOOK_SECONDS = 0.2
"""between two looks"""
RETURN_SECONDS = 2.5
"""from the removal of an orphan record until the slabs that its client needs no more are everybody's, at the most"""


@dataclass
class RoomElsewhere:
    """Looks at what other hosts have that is about to come free. One of each membership."""

    core: Core
    shares: Shares
    removed: Removed
    reports: Reports

    def __post_init__(self) -> None:
        self._orphans: dict[bytes, float] = {}
        """orphan record of another client's -> when it was first seen, by who had no room"""
        self._seen_at = -math.inf
        """when one of these was last about to be freed"""
        self._look: trio.Event | None = None
        """of a call that looks just now: set when it has"""
        self._is_coming = False
        """what the last look said"""

    async def await_other_hosts(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: waits while other hosts may free something. All calls that have no room wait for one look."""
        with trio.move_on_at(deadline):
            if self._look is not None:
                await self._look.wait()
                return self._is_coming
            self._look = look = trio.Event()
            self._is_coming = True  # the call may be cancelled: then another one looks
            try:
                self._is_coming = await self._look_at_others()
                return self._is_coming
            finally:
                self._look = None
                look.set()
        return False

    async def _look_at_others(self) -> bool:
        """A while passes, in which others may free something. False: they are not about to. EngineError.

        What they removed, and is still there after a grace, is open somewhere: nobody waits for that again.
        """
        if self.core.is_alone():
            return False
        now = trio.current_time()
        rows, _ = await scan_page(self.core.records, b"o", limit=ORPHANS_MAX)
        theirs = [row.key for row in rows if schema.decode_orphan(row.value).remover != self.core.client]
        self._orphans = {key: self._orphans.get(key, now) for key in theirs}
        if any(now - since <= self.core.grace.seconds for since in self._orphans.values()):
            self._seen_at = now
        elif (
            not self.reports.ask(ASKED_SLABS)  # else they evict blocks of their caches
            and now > max(self._seen_at, self.removed.freed_at) + RETURN_SECONDS
            and not self.shares.is_owed()
        ):
            return False
        await trio.sleep(LOOK_SECONDS)
        return True
