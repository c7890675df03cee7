"""Makes synced files visible to other hosts at their next open, also in relaxed folders of a shared volume.

In relaxed folders an open uses memory, which a watch keeps current, a moment late. Reading the store at each open would
take a round trip for each block that is read. So a host that syncs a file puts one record more, the *stamp* of the
volume, after the commit, and returns when no host relies on older state any more (`WAIT_SECONDS`). A host relies on its
memory for `SURE_SECONDS` after it sent a read of the stamp, if the watch had caught up since it first read that stamp:
then it has delivered all earlier commits of what is followed here. All opens of that time share one read. Until the
watch has caught up, an open reads the file itself. A host that is alone neither reads nor waits.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

import trio

from kvfuse.errors import EngineError
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.followed import Followed

SURE_SECONDS = 0.01
"""time for which a host relies on its memory after it sent the read"""
ASK_SECONDS = 1.0
"""limit of an open's wait for the answer: it uses memory while the store is away"""
PAUSE_SECONDS = 2.0
"""pause after a read without an answer"""
UNSURE_MAX = 8
"""Opens in `COUNT_SECONDS` that read files because of stamps, before the watch catches up where that is dear."""
COUNT_SECONDS = 1.0
WAIT_SECONDS = 1.25 * SURE_SECONDS
"""Wait after a stamp: longer, because clocks of hosts differ in rate."""

log = logging.getLogger(__name__)


class Synced:
    """The stamp, as this host puts it and the watch delivers it. One per membership. Event loop only."""

    def __init__(self, core: Core, followed: Followed) -> None:
        self._core = core
        self._followed = followed
        self._heard = 0
        """newest stamp up to which the watch has delivered all"""
        self._read = 0
        """newest stamp that was read"""
        self._sure_until = -math.inf
        self._unsure: list[float] = []
        """when opens read files, of the last `COUNT_SECONDS`; trio's time"""
        self._wanted = trio.Event()
        """set when the watch is to catch up"""
        self._putting = trio.Lock()
        self.asked = 0
        """reads of the stamp"""
        self._puts = 0
        """stamps that were put, or failed"""

    async def begin(self, *, is_memory_empty: bool) -> None:
        """The watch begins. ``is_memory_empty``: all that memory will have is read after this call. EngineError."""
        self._heard, self._sure_until = 0, -math.inf
        if is_memory_empty:
            (row,) = await self._core.records.get([schema.COUNTER_SYNCED])
            self._heard = row.version if row is not None else 0

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
            self._note_unsure(row.version)
            return False
        self._sure_until = max(self._sure_until, asked_at + sure_for)
        return True

    def _note_unsure(self, stamp: int) -> None:
        now = trio.current_time()
        self._read = max(self._read, stamp)
        self._unsure = [*[time for time in self._unsure if time > now - COUNT_SECONDS], now]
        if len(self._unsure) >= UNSURE_MAX or not self._followed.is_catching_up_dear:
            self._wanted.set()

    async def run(self) -> None:
        """Have the watch catch up where that is wanted, until cancelled.

        What is followed since the call began was read after the stamp, so it is no older.
        """
        while True:
            await self._wanted.wait()
            self._wanted, self._unsure = trio.Event(), []
            stamp = self._read
            try:
                if await self._followed.catch_up():
                    self._heard = max(self._heard, stamp)
            except EngineError as error:
                log.info("opens ask the store for each file: %s", error)
                await trio.sleep(PAUSE_SECONDS)

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
