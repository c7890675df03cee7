"""Reports of hosts to each other: which blocks of others they used, and how much room they lack or could give.

A block is on the books of the host that holds the slab of its first slot (`eviction.shared_eviction`), and uses of it
by other hosts keep it there. Each host puts one record of its own every few seconds (``a``, under its lease), if it
used such blocks: their keys, in the order of use, each request's by themselves, as policies learn chains from that.
Each host hears of it by a watch, and tells its caches of those keys that are on its books.

Keys, and no bits of slots: a bit cannot say in which order the blocks of a chain were used; `exists` asks for names
whose slots nobody has looked up; and a host would need a table from slots to names for it. Nothing has to arrive:
whoever misses a report evicts in a slightly worse order.

The record also says how much room the host lacks (see `giving`), and how many bytes of blocks its caches have, where
that changed much. So nothing is written where nothing is used and no cache grows.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.cache import used_elsewhere
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
    sent_keys: int = 0
    heard: int = 0
    """reports of other hosts"""
    heard_keys: int = 0
    own_keys: int = 0
    """of those that were heard: on the books of this host"""
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
        self._elsewhere = self.core.namespaces.elsewhere
        self._elsewhere.is_there = self.core.is_there
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
        return {**asdict(self.counters), "dropped_keys": self._elsewhere.dropped}

    @property
    def evictable(self) -> int:
        """Bytes of blocks that the caches of this host have on their books, and its block store has."""
        rows = self.core.blocks.use(ROOT)[0] if self.core.blocks is not None else 0
        return rows + sum([cache.policy.size for cache in self.core.caches.values()])

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
        if self.core.caches:
            self.core.take_uses()
        chains, own, wanted = self._elsewhere.take(), self.evictable, self._wanted
        self._wanted, self.shares.asked = 0, wanted > 0
        if not (chains or wanted or self._is_news(own)) or self.core.is_alone():
            return
        uses = tuple([(namespace, schema.encode_u64s(keys)) for namespace, keys in chains])
        report = schema.encode_report(schema.HostReport(uses, wanted, own))
        try:
            await self.records.commit({schema.report_key(self.member.client): report}, lease=self.member.lease)
        except EngineError as error:
            log.info("uses of other hosts' blocks are not reported: %s", error)
            return
        self._told = own
        self.counters.sent += 1
        self.counters.asked += wanted > 0
        self.counters.sent_keys += sum([len(keys) for _, keys in chains])

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
                uses = [(namespace, schema.decode_u64s(keys)) for namespace, keys in report.uses if is_new]
            except schema.Malformed as error:
                log.warning("a report of another host cannot be read: %s", error)
                return
            self.counters.heard += is_new
            self._take(uses)
            if report.wanted and is_new:
                self.is_asked.set()

    def _take(self, uses: list[tuple[int, list[int]]]) -> None:
        for namespace, keys in uses:
            self.counters.heard_keys += len(keys)
            cache = self.core.caches.get(namespace)
            if cache is not None:
                self.counters.own_keys += used_elsewhere(cache, keys)
