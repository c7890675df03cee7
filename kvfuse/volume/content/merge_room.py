"""Room for the changes of two hosts that are put together: none are lost because a host has no free slab just now."""

from __future__ import annotations

import trio

from kvfuse.errors import NoSpace, QuotaExceeded
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node

ROOM_SECONDS = 3.0
"""how long changes wait for room, beside a grace, before some are lost"""
FORGOTTEN_SECONDS = 60.0
"""after which a wait has ended without a merge: its inode is gone"""


class MergeRoom:
    """Says which merges have to wait. One of each `Merger`; nothing here waits.

    Slabs are taken by commits, and a merge is on the way of one: so it is put off, and the commit after it tries again.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._deadlines: dict[tuple[int, int], float] = {}
        """(inode, its merges before) -> when it waits no longer, in trio's time"""

    def is_to_wait(self, node: Node, lengths: list[int]) -> bool:
        """There is no room for extents of these ``lengths`` (bytes), but there may be soon: slabs are taken for them.

        False: there is room until the next await, or there was none for long, or none to wait for.
        """
        merge, now = (node.ino, node.content_merges), trio.current_time()
        if self._core.need_slabs is None or not self._is_short(node, lengths):
            self._deadlines.pop(merge, None)
            return False
        if merge not in self._deadlines:
            self._deadlines = {other: end for other, end in self._deadlines.items() if now < end + FORGOTTEN_SECONDS}
            self._deadlines[merge] = now + self._core.grace.seconds + ROOM_SECONDS
        if now >= self._deadlines[merge]:
            del self._deadlines[merge]
            return False
        self._core.need_slabs(len(lengths))
        return True

    def _is_short(self, node: Node, lengths: list[int]) -> bool:
        """There are no slots. False also where the quota is used up: slabs are no room there."""
        slots: list[Slot] = []
        try:
            for length in lengths:
                slots += self._core.slabs.allocate(length, node.namespace)
        except QuotaExceeded:
            return False
        except NoSpace:
            return True
        finally:
            self._core.slabs.cancel(slots)
        return False
