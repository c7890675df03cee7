"""Reports of hosts to each other: which blocks of others they used, and how much room they lack.

A block is on the books of the host that holds the slab of its first slot (`names.shared_eviction`), and uses of it by
other hosts keep it there. Each host puts one record of its own every few seconds (``a``, under its lease), if it used
such blocks: their keys, in the order of use, each request's by themselves, as policies learn chains from that. Each
host hears of it by a watch, and tells its caches of those keys that are on its books.

Keys, and no bits of slots: a bit cannot say in which order the blocks of a chain were used; `exists` asks for names
whose slots nobody has looked up; and a host would need a table from slots to names for it. Nothing has to arrive:
whoever misses a report evicts in a slightly worse order.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.cache import used_elsewhere
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member

REPORT_SECONDS = 3.0
"""between two reports of a host"""
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


@dataclass
class Reports:
    """Sends the reports of one membership, and hears those of others. Its parts own it."""

    core: Core
    records: RecordStore
    member: Member
    counters: ReportCounters = field(default_factory=ReportCounters)

    def __post_init__(self) -> None:
        self._elsewhere = self.core.namespaces.elsewhere
        self._elsewhere.is_there = self.core.is_there

    def statistics(self) -> dict[str, int]:
        return {**asdict(self.counters), "dropped_keys": self._elsewhere.dropped}

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            while True:
                await trio.sleep(REPORT_SECONDS)
                if self.core.caches:
                    await self._report()

    async def _report(self) -> None:
        """What was used since the last one. Lost, where the store does not answer."""
        self.core.take_uses()
        chains = self._elsewhere.take()
        if not chains or self.core.is_alone():
            return
        key = schema.report_key(self.member.client)
        try:
            await self.records.commit({key: schema.encode_report(chains)}, lease=self.member.lease)
        except EngineError as error:
            log.info("uses of other hosts' blocks are not reported: %s", error)
            return
        self.counters.sent += 1
        self.counters.sent_keys += sum([len(keys) for _, keys in chains])

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self.records.watch(schema.REPORT_PREFIX):
                    self._hear(change)
            except EngineError as error:
                log.info("the watch of other hosts' reports broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    def _hear(self, change: Change) -> None:
        if change.value is None or schema.key_client(change.key) == self.member.client:
            return
        try:
            chains = schema.decode_report(change.value)
        except schema.Malformed as error:
            log.warning("a report of another host cannot be read: %s", error)
            return
        self.counters.heard += 1
        for namespace, keys in chains:
            self.counters.heard_keys += len(keys)
            cache = self.core.caches.get(namespace)
            if cache is not None:
                self.counters.own_keys += used_elsewhere(cache, keys)
