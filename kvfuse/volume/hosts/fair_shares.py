"""Where little is free, those who have more of it than an equal part for each client leave some to the others.

Every client computes this alike, from what all can see. A client with more gives back slabs that are partly used: those
of which it took no slot lately, the emptiest first. A client with less, and no room, waits a while for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import Core

OWED_SECONDS = 8.0
"""So long somebody waits for slabs of others, after the last one came: they look for what they may give every few."""


@dataclass
class Shares:
    """Of one client. ``view``: what all hold and use."""

    core: Core
    view: SlabView
    _partly_free: dict[int, int] = field(default_factory=dict)
    """slabs that could be given back at the last look -> bytes that were free in them"""
    _owed_since: float | None = None
    slabs_at: float = -math.inf
    """when this client last got slabs"""
    asked: bool = False
    """this client told the others lately that it lacks room"""
    given: set[int] = field(default_factory=set)
    """slabs that this client gave to such others lately"""

    def _share(self) -> int:
        """An equal part, in bytes, of what is free in the whole volume, without slabs that are given up."""
        free = self.view.kept_end * self.core.geometry.slab_size - self.view.used_bytes
        return max(free, 0) // max(len(self.view.members), 1)

    @property
    def surplus(self) -> int:
        """Bytes that this client has too many, while what is nobody's is less than a part; or not above 0."""
        share = self._share()
        return self.core.slabs.free_bytes - share if self.view.unheld_free_bytes < share else 0

    def to_give(self) -> list[int]:
        """Slabs to be withdrawn now. Asked again and again while there is a surplus."""
        before, self._partly_free = self._partly_free, self.core.slabs.partly_free()
        given = []
        left = self.surplus
        for slab, free in sorted(self._partly_free.items(), key=lambda item: item[1], reverse=True):
            if free <= left and free >= before.get(slab, free + 1):
                given.append(slab)
                left -= free
        return given

    def note_slabs(self) -> None:
        """This client got slabs: more may follow."""
        self._owed_since = None
        self.slabs_at = trio.current_time()

    def is_owed(self) -> bool:
        """Others have more than their part, and are about to give some of it back."""
        others = len(self.view.members) - 1
        if self.core.slabs.free_bytes + others * self.core.geometry.slab_size >= self._share():
            self._owed_since = None
            return False
        if self._owed_since is None:
            self._owed_since = trio.current_time()
        return trio.current_time() < self._owed_since + OWED_SECONDS
