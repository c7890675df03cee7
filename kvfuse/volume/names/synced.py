"""What other hosts synced is seen at the next open, also in relaxed folders of a shared volume.

In relaxed folders an open uses what is known here, which a watch keeps true, a moment late. To ask the store at each
open would take a round trip for each block that is read. So a host that syncs a file puts one record more, the *stamp*
of the volume, after the commit, and returns when no host is sure any more of what it knew before (`WAIT_SECONDS`). A
host is sure for `SURE_SECONDS` after it asked which stamp there is, if the watch had told of that one: then it has told
of all that was committed before. All opens of that time share one question. Where the watch is behind, the file itself
is asked for. A host that is alone neither asks nor waits.
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
"""for which a host may use what it knew when it asked"""
ASK_SECONDS = 1.0
"""for which an open waits for the answer: what is known here is used where the store is away"""
PAUSE_SECONDS = 2.0
"""from one question without an answer to the next"""
WAIT_SECONDS = 1.25 * SURE_SECONDS
"""Wait after a stamp: longer, because clocks of hosts differ in rate."""

log = logging.getLogger(__name__)


class Synced:
    """The stamp, as this host puts it and has heard of it. One of each membership. Event loop only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heard = 0
        """version up to which the watch has told all"""
        self._sure_until = -math.inf
        self._putting = trio.Lock()
        self.asked = 0
        """questions which stamp there is"""
        self._puts = 0
        """stamps that were put, or failed"""

    def note_change(self, change: Change) -> None:
        """The watch tells of a change: of all commits before it, it has told everything."""
        is_stamp = change.key == schema.COUNTER_SYNCED
        self._heard = max(self._heard, change.version - (not is_stamp))

    def forget_heard(self) -> None:
        """The watch begins anew: what was cached before it is not known to be true."""
        self._heard, self._sure_until = 0, -math.inf

    async def is_sure(self) -> bool:
        """What is known here has all that was synced before this call, or the store does not say by and by."""
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
        """Return when each host sees at its next open what is in the store now. Those who wait share stamps."""
        if self._core.is_alone():
            return
        wanted = self._puts + 1 + self._putting.locked()  # a stamp under way may be older than what is to be seen
        while self._puts < wanted:
            async with self._putting:
                if self._puts < wanted:
                    await self._put_stamp()
        await trio.sleep(WAIT_SECONDS)

    async def _put_stamp(self) -> None:
        try:
            await self._core.records.commit({schema.COUNTER_SYNCED: schema.encode_u64(self._core.client)})
        except EngineError as error:  # it is stored all the same, which is what a sync is about
            log.warning("other hosts may see what was synced a moment late: %s", error)
        finally:
            self._puts += 1
