"""What a host of a shared volume tells another one: that it lacks room, and which of the other's blocks it uses.

Each is told to the host that decides, and no other host hears of it. Uses go by a peer's connection where there is one;
else a record of the two hosts (``a``, under the sender's lease) tells them. A host watches the records for it alone.

*Room*: slabs with blocks are what hosts can give, and all know how many each one holds (`SlabView`). A host that lacks
room asks one of those that have the most; that gives some (see `giving`), or none: a moment later another one is asked.

*Uses*: the holder of a block's slab evicts it (decision 014), and does not see who else reads it. So a host tells now
and then which blocks of others it used: to `HOLDERS_MAX` of them, `USES_MAX` of each, those first that were used most
often. All hosts together tell `ROUNDS_MAX` times a second: neither what one sends nor what one hears grows with them.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member
from kvfuse.volume.views.neighbours import USE, Uses

USE_SECONDS = 3.0
"""between two rounds of a host, at the least;"""
ROUNDS_MAX = 100
"""of all hosts in a second"""
HOLDERS_MAX = 8
"""that are told of uses in a round"""
USES_MAX = 256
"""that one of them is told of"""
ASK_SECONDS = 2.0
"""before another host is asked for room"""
PATIENCE_SECONDS = 8.0
"""So long, and a grace, a host goes on asking for room, after the last slab came."""
PAUSE_SECONDS = 30.0
"""before it asks again, if nobody gave any"""
COUNT_SECONDS = 0.5
"""age of what is known of others' slabs"""
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
    uses_told: int = 0
    """of blocks of other hosts"""
    uses_heard: int = 0
    """of blocks here, by other hosts"""


@dataclass
class Reports:
    """Sends the reports of one membership, and hears those of others. Its parts own it."""

    core: Core
    records: RecordStore
    member: Member
    shares: Shares
    view: SlabView
    counters: ReportCounters = field(default_factory=ReportCounters)

    def __post_init__(self) -> None:
        self.asked_by: dict[int, int] = {}
        """client that lacks room -> slabs that it asks this host for"""
        self.is_asked = trio.Event()
        """set when there is one"""
        self._wanted = 0
        self._lacks_room = trio.Event()
        self._asked_since: float | None = None
        self._in_vain: set[int] = set()
        """clients that were asked since the last slab came"""
        self._counts: tuple[float, dict[int, int]] = (-COUNT_SECONDS, {})
        """(when it was counted, client -> slabs with blocks that it holds)"""
        self._present: set[bytes] = set()
        """reports that are in the records"""

    def statistics(self) -> dict[str, int]:
        return asdict(self.counters)

    def lent_counts(self) -> Mapping[int, int]:
        """Client -> slabs with blocks that it holds, about as of now."""
        counted, counts = self._counts
        if trio.current_time() >= counted + COUNT_SECONDS:
            counts = Counter([self.view.seen(slab).holder.client for slab in self.view.lent])
            self._counts = trio.current_time(), counts
        return counts

    def may_give(self, giver: int, asker: int) -> int:
        """Slabs that one client gives another one at most: half of those that it has more. To one without any it gives
        its last one."""
        counts = self.lent_counts()
        own, asked = counts.get(asker, 0), counts.get(giver, 0)
        return max(0, (asked - own + (not own)) // 2)

    # -- lacking room ----------------------------------------------------------------------------------

    def ask(self, slabs: int) -> bool:
        """This host lacks so many slabs. False: nobody has more of them, or nobody gave any for long."""
        now = trio.current_time()
        if self.core.is_alone() or not self._givers():
            return False
        last = max(self._asked_since or -PAUSE_SECONDS, self.shares.slabs_at)
        if self._asked_since is None or now > self._asked_since + self._patience + PAUSE_SECONDS:
            self._asked_since = last = now
        if now > last + self._patience:
            return False
        self._wanted = max(self._wanted, slabs)
        self._lacks_room.set()
        return True

    @property
    def _patience(self) -> float:
        return self.core.grace.seconds + PATIENCE_SECONDS

    def _givers(self) -> dict[int, int]:
        """Client that is alive -> slabs that it may give this one."""
        own = self.member.client
        found = {client: self.may_give(client, own) for client in self.lent_counts() if client in self.view.members}
        return {client: count for client, count in found.items() if count and client != own}

    async def _ask_always(self) -> None:
        while True:
            await self._lacks_room.wait()
            self._lacks_room, wanted, self._wanted = trio.Event(), self._wanted, 0
            asked_at, givers = trio.current_time(), self._givers()
            if givers.keys() <= self._in_vain:
                self._in_vain.clear()
            left = {client: count for client, count in givers.items() if client not in self._in_vain}
            if left:
                many = [client for client, count in left.items() if 2 * count >= max(left.values())]
                client = random.choice(many)  # hosts that lack room together ask several
                self.shares.asked = True
                self._in_vain.add(client)
                self.counters.asked += await self._put({client: schema.HostReport(wanted)})
                await trio.sleep(ASK_SECONDS)
            if self.shares.slabs_at >= asked_at:
                self._in_vain.clear()
            self.shares.asked = self._lacks_room.is_set()

    # -- uses ------------------------------------------------------------------------------------------

    async def _tell_uses(self) -> None:
        while True:
            await trio.sleep(max(USE_SECONDS, len(self.view.members) / ROUNDS_MAX))
            told = self._uses() if self.core.blocks is not None else {}
            neighbours, reports = self.core.reads.neighbours, dict[int, schema.HostReport]()
            for client, uses in told.items():
                self.counters.uses_told += len(uses)
                if neighbours is None or not neighbours.tell_uses(client, uses):
                    reports[client] = schema.HostReport(uses=uses.tobytes())
            if reports or self._present:
                await self._put(reports, is_round=True)

    def _uses(self) -> dict[int, Uses]:
        """Client -> which of its blocks were used here since the last round, those that were used most often first."""
        assert self.core.blocks is not None
        uses = self.core.blocks.take_uses()
        slabs, numbers = np.unique(uses["slab"], return_inverse=True)
        holders = np.array([self.view.seen(slab).holder.client for slab in slabs.tolist()], np.uint64)[numbers]
        known = Counter(holders.tolist())
        del known[schema.NOBODY], known[self.member.client]
        return {client: uses[holders == np.uint64(client)][:USES_MAX] for client, _ in known.most_common(HOLDERS_MAX)}

    # -- sending and hearing ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._ask_always)
            nursery.start_soon(self._tell_uses)

    async def _put(self, reports: Mapping[int, schema.HostReport], *, is_round: bool = False) -> bool:
        """Put them. Lost, where the store does not answer. ``is_round``: those of the last round go."""
        own = self.member.client
        puts = {schema.report_key(client, own): schema.encode_report(one) for client, one in reports.items()}
        gone = self._present - puts.keys() if is_round else set[bytes]()
        try:
            await self.records.commit(puts, gone, lease=self.member.lease)
        except EngineError as error:
            log.info("what other hosts are to hear is not told: %s", error)
            return False
        self._present = (self._present - gone) | puts.keys()
        self.counters.sent += len(puts)
        return True

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self.records.watch(schema.report_prefix(self.member.client)):
                    self._hear(change)
            except EngineError as error:
                log.info("the watch of other hosts' reports broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    def _hear(self, change: Change) -> None:
        if change.value is None:
            return
        try:
            report = schema.decode_report(change.value)
            uses = np.frombuffer(report.uses, USE)
        except ValueError as error:
            log.warning("a report of another host cannot be read: %s", error)
            return
        self.counters.heard += 1
        self.hear_uses(uses)
        if report.wanted > 0:
            self.asked_by[schema.split_report_key(change.key)[1]] = report.wanted
            self.is_asked.set()

    def hear_uses(self, uses: Uses) -> None:
        """Another host used these blocks."""
        self.counters.uses_heard += len(uses)
        if self.core.blocks is not None:
            self.core.blocks.hear_uses(uses)
