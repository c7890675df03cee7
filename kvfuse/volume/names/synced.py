"""Makes synced files visible to other hosts at their next open, also in relaxed folders of a shared volume.

In relaxed folders an open uses memory, which a watch keeps current, a moment late. Reading the store at each open would
take a round trip for each block that is read. So a host that syncs a file puts one record more, the *stamp* of the
volume, after the commit, and returns when no host relies on older state any more (`WAIT_SECONDS`). A host relies on its
memory for `SURE_SECONDS` after it sent a read of the stamp, if the watch had delivered that stamp: then the watch has
delivered all earlier commits. All opens of that time share one read. Where the watch is behind, an open reads the file
itself. A host that is alone neither reads nor waits.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema

SURE_SECONDS = 0.01
"""time for which a host relies on its memory after it sent the read"""
ASK_SECONDS = 1.0
"""limit of an open's wait for the answer: it uses memory while the store is away"""
PAUSE_SECONDS = 2.0
"""pause after a read without an answer"""
WAIT_SECONDS = 1.25 * SURE_SECONDS
"""Wait after a stamp: longer, because clocks of hosts differ in rate."""

log = logging.getLogger(__name__)


class Synced:
    """The stamp, as this host puts it and the watch delivers it. One per membership. Event loop only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heard = 0
        """version up to which the watch has delivered all"""
        self._sure_until = -math.inf
        self._putting = trio.Lock()
        self.asked = 0
        """reads of the stamp"""
        self._puts = 0
        """stamps that were put, or failed"""

    def note_change(self, change: Change) -> None:
        """Note a change that the watch delivers: it has delivered all commits before that one."""
        is_stamp = change.key == schema.COUNTER_SYNCED
        self._heard = max(self._heard, change.version - (not is_stamp))

    def forget_heard(self) -> None:
        """Forget all when the watch restarts: state cached before it may be stale."""
        self._heard, self._sure_until = 0, -math.inf

    async def is_sure(self) -> bool:
        """Memory has all that was synced before this call, or the store does not answer in time."""
        if trio.current_time() < self._sure_until or self._core.is_alone():
            return True
        asked_at = trio.current_time()
        self.asked += 1
        sure_for, row = PAUSE_SECONDS, None
        with suppress(EngineError), trio.move_on_after(ASK_SECONDS):
            (row,) = await self._core.records.get([schema.COUNTER_SYNCED])
            sure_for = SURE_SECONDS
        if row is not None and row.version > self._heard:
            return False
        self._sure_until = max(self._sure_until, asked_at + sure_for)
        return True

    async def publish(self) -> None:
        """Return when each host's next open sees the store's present state. Waiting callers share stamps."""
        if self._core.is_alone():
            return
        wanted = self._puts + 1 + self._putting.locked()  # a stamp in flight may be older than the commit
        while self._puts < wanted:
            async with self._putting:
                if self._puts < wanted:
                    await self._put_stamp()
        await trio.sleep(WAIT_SECONDS)

    async def _put_stamp(self) -> None:
        try:
            await self._core.records.commit({schema.COUNTER_SYNCED: schema.encode_u64(self._core.client)})
        except EngineError as error:  # the file is stored all the same, as a sync promises
            log.warning("other hosts may see what was synced a moment late: %s", error)
        finally:
            self._puts += 1
