"""Reports of hosts to each other: how much room they lack, and how much they could give.

Each host puts one record of its own (``a``, under its lease) when it lacks room (see `giving`), or when the bytes of
its blocks changed much. The others hear of it by a watch. So nothing is written where no store of blocks grows.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.sealed import ScanPages

REPORT_SECONDS = 3.0
"""between two reports of a host, unless it begins to lack room"""
CHANGE_SHARE = 8
"""What its caches have is told when it changed by one part in so many."""
ASK_SECONDS = 8.0
"""So long, and a grace, a host goes on asking for room, after the last slab came."""
PAUSE_SECONDS = 30.0
"""before it asks again, if nobody gave any"""
RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass
class ReportCounters:
    sent: int = 0
    """reports"""
    heard: int = 0
    """reports of other hosts"""
    asked: int = 0
    """reports that asked for room"""
    given_slabs: int = 0
    """that others asked for"""


@dataclass
class Reports:
    """Sends the reports of one membership, and hears those of others. Its parts own it."""

    core: Core
    records: RecordStore
    member: Member
    shares: Shares
    counters: ReportCounters = field(default_factory=ReportCounters)

    def __post_init__(self) -> None:
        self.others: dict[int, schema.HostReport] = {}
        """client -> its last report"""
        self.is_asked = trio.Event()
        """set when another host said that it lacks room"""
        self._wanted = 0
        self._asked_since: float | None = None
        self._hurry = trio.Event()
        self._told = 0
        """what the last report said of our caches"""

    def statistics(self) -> dict[str, int]:
        return asdict(self.counters)

    @property
    def evictable(self) -> int:
        """Bytes of slots of the blocks that this host's store has."""
        return self.core.blocks.use(ROOT)[0] if self.core.blocks is not None else 0

    # -- lacking room ----------------------------------------------------------------------------------

    def ask(self, size: int) -> bool:
        """This host lacks so many bytes. False: nobody has more in its caches, or nobody gave any for long."""
        now, own = trio.current_time(), self.evictable
        if self._is_news(own):
            self._hurry.set()
        if self.core.is_alone() or not any(one.evictable > own for one in self.others.values()):
            return False
        last = max(self._asked_since or -PAUSE_SECONDS, self.shares.slabs_at)
        if self._asked_since is None or now > self._asked_since + self._patience + PAUSE_SECONDS:
            self._asked_since = last = now
        if now > last + self._patience:
            return False
        if not self._wanted:
            self._hurry.set()
        self._wanted = max(self._wanted, size, self.core.geometry.slab_size)
        return True

    def _is_news(self, own: int) -> bool:
        """The caches have much more, or less, than others know."""
        return abs(own - self._told) * CHANGE_SHARE > max(own, self._told)

    @property
    def _patience(self) -> float:
        return self.core.grace.seconds + ASK_SECONDS

    # -- sending ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            while True:
                with trio.move_on_after(REPORT_SECONDS):
                    await self._hurry.wait()
                self._hurry = trio.Event()
                await self._report()

    async def _report(self) -> None:
        """What was used since the last one. Lost, where the store does not answer."""
        own, wanted = self.evictable, self._wanted
        self._wanted, self.shares.asked = 0, wanted > 0
        if not (wanted or self._is_news(own)) or self.core.is_alone():
            return
        report = schema.encode_report(schema.HostReport(wanted, own))
        try:
            await self.records.commit({schema.report_key(self.member.client): report}, lease=self.member.lease)
        except EngineError as error:
            log.info("what this host lacks is not reported: %s", error)
            return
        self._told = own
        self.counters.sent += 1
        self.counters.asked += wanted > 0

    # -- hearing ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                changes = self.records.watch(schema.REPORT_PREFIX)
                self.others.clear()
                async for rows, _ in ScanPages(self.records, schema.REPORT_PREFIX):
                    for row in rows:
                        self._hear(Change(*row), is_new=False)
                async for change in changes:
                    self._hear(change)
            except EngineError as error:
                log.info("the watch of other hosts' reports broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    def _hear(self, change: Change, *, is_new: bool = True) -> None:
        client = schema.key_client(change.key)
        if change.value is None:
            self.others.pop(client, None)
        elif client != self.member.client:
            try:
                report = self.others[client] = schema.decode_report(change.value)
            except schema.Malformed as error:
                log.warning("a report of another host cannot be read: %s", error)
                return
            self.counters.heard += is_new
            if report.wanted and is_new:
                self.is_asked.set()
