"""Clears of namespaces of a shared volume: what each host does when it hears of one.

A clear is a transaction that puts an e record: its *bound* is the value of the counter of inodes, which the transaction
expects and moves. So every number that any host has got by then is smaller, and each range that is taken later is not.
Whatever has a smaller number is there for nobody who has heard of the clear; a sweep removes it (`shared_sweeping`).

No file gets a name that was cleared before. Each commit that gives a file a name expects the e record of its namespace
as its host has heard of it (`SharedTerms`, `names.name_change.PlanDraft`); the store refuses it after a clear that the
host has not heard of. What the host had in memory of files with smaller numbers is dropped then, before the next commit
is built (`Conflicts.drop_cleared`): a file that was about to be stored during a clear is a miss. So once a scan of all
names has found no such file, there will never be one. The record is marked as swept, and stays: a commit of a host that
was cut off for long must not find it as it was before the clear. Nobody filters any more.

A host may end its filter once it has heard of the mark, has nothing of such files to be committed, and has forgotten
what it read before: answers of the store that are under way are asked for again.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import trio

from kvfuse import errors
from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.eviction.sweeping import forget_in_kernel
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import schema
from kvfuse.volume.store.numbers import SharedNumberRange

RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass
class SharedClearing:
    """Hears of clears. One of each membership of a shared volume."""

    core: Core
    journal: Journal
    lookup: SharedLookup

    def __post_init__(self) -> None:
        self.cleared = self.core.namespaces.cleared
        self.cleared.hear = self.hear
        self.news = self.lookup.refresher.news
        self._unsettled = set(self.cleared)
        """namespaces of which this host may have something in memory that was cleared"""
        self._swept: set[int] = set()
        """namespaces whose e record says so"""
        self.progress_at = trio.current_time()
        """when a host was last known to sweep, or a clear was heard of; trio's time"""
        self._work = trio.Event()
        self._is_gathering = False
        """what the kernel is to be told of clears is not all gathered"""
        self._gathered = trio.Event()
        """set, and made anew, when it is"""

    def hear(self, number: int, value: bytes | None, version: int) -> None:
        """The e record of a namespace, however it was read. An older one than is known changes nothing."""
        if value is None:
            self.cleared.versions.pop(number, None)
            self.cleared.pop(number, None)
            return
        if version <= self.cleared.versions.get(number, ABSENT):
            return
        self.cleared.versions[number] = version
        try:
            bound, is_swept = schema.decode_cleared(value)
        except schema.Malformed:
            log.error("namespace %d: its record of clears is damaged: run 'kvfuse fsck --repair'", number)
            return
        if bound > self.cleared.bounds.get(number, 0):
            self._clear(number, bound)
        if is_swept and number in self.cleared:
            self._swept.add(number)
            self._work.set()

    def _clear(self, number: int, bound: int) -> None:
        self.cleared.bounds[number] = bound
        self._swept.discard(number)
        self.core.namespaces.clear(number, bound)
        numbers = self.core.inodes
        if isinstance(numbers, SharedNumberRange) and not numbers.leave(bound) and number in self.core.caches:
            self.core.caches[number].before.begin()  # files with larger numbers were on the books, too
        self._forget()
        folder = self.core.nodes.get(number) if number != ROOT else None
        if folder is not None and folder.name:
            self.news.name(folder.parent, folder.name)  # with all below it
        self.heard_removal()
        self._unsettled.add(number)
        self._is_gathering = True
        self._work.set()

    def _forget(self) -> None:
        """Forget all names, what is being read of them, and cleared files that nobody uses."""
        self.lookup.records.lost_track()
        self.journal.pending.distrust_reads()
        self.core.dentries.clear()
        for node in [node for node in self.core.nodes if not node.busy and is_quiet(node)]:
            if self.core.is_cleared(node):
                node.end_map()
                self.core.tier.drop(node.ino)
                self.core.nodes.drop(node)

    def heard_removal(self) -> None:
        """A host has removed a name: perhaps it is sweeping."""
        self.progress_at = trio.current_time()

    async def told(self) -> None:
        """Return when the kernel was told of all clears that were heard of."""
        if self._is_gathering:
            await self._gathered.wait()
        await self.news.told()

    async def run(self) -> None:
        """Settle what was heard of, until cancelled."""
        if self._unsettled:
            self._work.set()
        while True:
            await self._work.wait()
            self._work = trio.Event()
            try:
                await self._settle()
            except errors.EngineError as error:
                log.info("what was cleared is settled later: %s", error)
                self._work.set()
                await trio.sleep(RETRY_SECONDS * random.random())

    async def _settle(self) -> None:
        while self._unsettled:
            bounds = {number: self.cleared.bounds.get(number) for number in self._unsettled}
            await forget_in_kernel(self.core, self.news)
            if bounds == {number: self.cleared.bounds.get(number) for number in self._unsettled}:
                self._is_gathering = False
                self._gathered.set()
                self._gathered = trio.Event()
            if not self.core.read_only:
                await self.journal.commit()
            same = {number for number, bound in bounds.items() if self.cleared.bounds.get(number) == bound}
            self._unsettled -= same  # the others were cleared again meanwhile
        if self._swept:
            self._forget()
        while self._swept:
            self.cleared.has_swept(self._swept.pop())
