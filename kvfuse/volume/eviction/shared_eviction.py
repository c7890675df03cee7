"""Eviction where many hosts have the volume: each evicts the blocks whose first slot is in a slab that it holds.

*Books.* What a host stores is in its own slabs, so it is on its books at once. When a slab comes from another host, the
names of the store are read for what is in it; when a slab goes, its blocks leave the books. Who renames or replaces a
file of another host's books is heard of by the watch.

*Removal* is what an unlink is, of many files by one commit (`names.bulk_removal`). After a refusal those that others
have changed are left out, and kept.

*Ahead of need.* What is evicted is room only after the grace. So a host keeps as much room free, or on its way, as its
callers have used up lately in such a time (`Ahead`), beside what the water marks say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from stat import S_ISREG
from typing import NamedTuple

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Record
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.eviction.shared_sweeping import SharedSweeper
from kvfuse.volume.eviction.stored_blocks import read_blocks
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.bulk_removal import BulkRemoval, Going
from kvfuse.volume.namespaces.accounts import Account
from kvfuse.volume.namespaces.cache import Cache, Candidate, is_back
from kvfuse.volume.store import schema

PEERS = 4
"""commits of one eviction that wait at the same time: while one is under way the next one is read for"""
ATTEMPTS_MAX = 4
AHEAD_SHARE = 2
"""At most one part in so many of a host's part of the volume is kept free ahead of need, or on its way: a small cache
that is stored to fast is half at rest, and its callers seldom wait for that."""
DOUBLED_SECONDS = 2.0
"""after which it may double again"""
LEAST_SHIFT = 6
"""by which a quota is divided: so much is kept free in a namespace where anybody waited"""
AHEAD_GRACES = 8
"""After so many graces in which nobody waited for room, half as much is kept."""
READ_SHARE = 10
"""Names are read for slabs that came from other hosts during one part in so many of the time."""
READ_PAUSE_SECONDS = 2.0
"""at least between two times"""


class EvictionCandidate(NamedTuple):
    """A candidate that a commit is to remove."""

    candidate: Candidate
    file: Going


@dataclass
class Ahead:
    """How much room a host keeps free, or on its way, of the volume or of what a namespace may have.

    ``least``: bytes that are kept where anybody ever waited. ``most``: how much there is.
    """

    core: Core
    least: int
    most: Callable[[], int]
    size: int = 0
    """bytes"""
    _changed: float = 0.0
    """when it grew or shrank last"""

    def waited(self) -> None:
        """A call found no room: it doubles, soon again where that is too little."""
        now = trio.current_time()
        if not self.size or now >= self._changed + min(self.core.grace.seconds, DOUBLED_SECONDS):
            self.size = min(max(2 * self.size, self.least), self.most() // AHEAD_SHARE)
            self._changed = now

    def look(self) -> None:
        """Time passes."""
        now, grace = trio.current_time(), self.core.grace.seconds
        if self.size and now >= self._changed + AHEAD_GRACES * max(grace, 1.0):
            self.size = self.size // 2 if self.size > self.least else 0
            self._changed = now


@dataclass
class SharedEviction:
    """What an `Evictor` does otherwise in a shared volume. Each membership has one."""

    core: Core
    journal: Journal
    removal: BulkRemoval
    sweeper: SharedSweeper

    def __post_init__(self) -> None:
        self._files_max = self.removal.files_max
        self._read_at = 0.0
        """when names may be read next"""
        self._ahead: dict[int, Ahead] = {}
        """namespace -> what is kept free there ahead of need"""

    # -- books -----------------------------------------------------------------------------------------

    async def read_new_slabs(self) -> None:
        """Put the blocks of slabs on the books that came from other hosts. EngineError: later."""
        unread = any(not cache.before.is_known for cache in self.core.caches.values())
        namespaces = self.core.namespaces
        if unread and not self.core.slabs.used_bytes:  # after a mount: what is there is in slabs of others
            for cache in self.core.caches.values():
                cache.before.end()
            unread = False
        if not (namespaces.new_slabs or unread) or trio.current_time() < self._read_at:
            return
        began, came = trio.current_time(), set(namespaces.new_slabs)
        holds, is_first = self.core.slabs.holds, unread
        await read_blocks(self.core, list(self.core.caches), lambda slab: holds(slab) and (is_first or slab in came))
        namespaces.new_slabs -= came
        now = trio.current_time()
        self._read_at = now + max(READ_SHARE * (now - began), READ_PAUSE_SECONDS)

    # -- room ------------------------------------------------------------------------------------------

    @property
    def coming_size(self) -> int:
        """Bytes that are free in a while without an eviction."""
        return self.journal.refusals.to_free.size + self.core.slabs.pending_bytes + self.journal.freeing_bytes

    def waited_in(self, account: Account) -> None:
        """A call found that the quotas of a namespace were used up."""
        ahead = self._ahead.get(account.number)
        if ahead is None:
            most = partial(_capacity_of, account)
            ahead = self._ahead[account.number] = Ahead(self.core, most() >> LEAST_SHIFT, most)
        ahead.waited()

    def excess_in(self, account: Account, mark: float) -> int:
        """Bytes to evict here: this host's part, by the blocks that it has, of what a namespace has above a mark."""
        ahead = self._ahead.get(account.number)
        if ahead is not None and ahead.size:
            ahead.look()
            share = min(ahead.size / max(_capacity_of(account), 1), 1 / AHEAD_SHARE)
            mark = min(mark, 1 - share)
        excess = account.excess(mark)
        if excess <= 0:
            return excess
        inner = self.caches_in(account.number)
        own = sum([self.core.caches[one].policy.size for one in inner])
        total = max(account.size + account.size_elsewhere, own, 1)
        return excess * own // total - self.journal.refusals.to_free.count_size_in(inner)

    def is_coming(self, namespace: int | None, ahead: int) -> bool:
        """So much is about to be free that a call need not evict for it.

        ``ahead``: bytes that are kept free in the volume.
        """
        account = self.core.namespaces.accounts.all.get(namespace or 0)
        if namespace is None or account is None:
            return self.coming_size >= ahead
        return 0 < account.lack.size <= self.journal.refusals.to_free.count_size_in(self.caches_in(namespace))

    def caches_in(self, number: int) -> list[int]:
        return [one for one in self.core.caches if self.core.namespaces.accounts.is_within(one, number)]

    # -- removal ---------------------------------------------------------------------------------------

    async def remove(
        self, cache: Cache, candidates: Sequence[Candidate], reason: str, unlink: Callable[[Record], Awaitable[bool]]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """As `Evictor`'s: (those that are to be kept, those whose names the store does not know, or not yet)."""
        kept: list[Candidate] = []
        unstored: list[Candidate] = []
        failures: list[EngineError] = []
        parts = iter([candidates[at : at + self._files_max] for at in range(0, len(candidates), self._files_max)])

        async def work() -> None:
            for part in parts:
                try:
                    await self._remove_part(cache, part, reason, unlink, kept, unstored)
                except EngineError as error:
                    failures.append(error)
                if failures:
                    break

        async with trio.open_nursery() as nursery:
            for _ in range(min(PEERS, -(-len(candidates) // self._files_max))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return kept, unstored

    async def _remove_part(
        self,
        cache: Cache,
        part: Sequence[Candidate],
        reason: str,
        unlink: Callable[[Record], Awaitable[bool]],
        kept: list[Candidate],
        unstored: list[Candidate],
    ) -> None:
        rows = await self._rows_of(part)
        unstored += [candidate for candidate, row in zip(part, rows, strict=True) if row is None]
        going, others = self._sort(cache, [(one, row) for one, row in zip(part, rows, strict=True) if row is not None])
        for _ in range(ATTEMPTS_MAX):
            if not going or await self._commit(cache, going, reason):
                going = []
                break
            rows = await self._rows_of([one.candidate for one in going])
            kept += [one.candidate for one, row in zip(going, rows, strict=True) if row != one.file.row]
            same = [(one.candidate, one.file.row) for one, row in zip(going, rows, strict=True) if row == one.file.row]
            going, changing = self._sort(cache, same)
            others += changing
        kept += [one.candidate for one in going]
        for candidate, row in others:
            if await unlink(row):
                cache.evicted(candidate.victim, reason)
            else:
                kept.append(candidate)

    async def _rows_of(self, candidates: Sequence[Candidate]) -> list[Record | None]:
        return await self.core.records.seek([schema.entry_key(one.directory, b"", one.cookie) for one in candidates])

    def _sort(
        self, cache: Cache, found: Sequence[tuple[Candidate, Record]]
    ) -> tuple[list[EvictionCandidate], list[tuple[Candidate, Record]]]:
        """Files that a commit may remove; and those that are to be unlinked as users do it, if they may go at all."""
        going: list[EvictionCandidate] = []
        others: list[tuple[Candidate, Record]] = []
        for candidate, row in found:
            if is_back(cache, candidate):
                cache.absent([candidate])
                continue
            record = schema.decode_entry(row.value)
            if not isinstance(record, schema.InodeRecord) or not S_ISREG(record.mode) or self._is_changing(row, record):
                others.append((candidate, row))
            elif (slab := self.core.first_slab(record)) is not None and not self.core.slabs.holds(slab):
                cache.absent([candidate])  # another host has put its own file there
            else:
                going.append(EvictionCandidate(candidate, Going(row, record)))
        return going, others

    def _is_changing(self, row: Record, record: schema.InodeRecord) -> bool:
        """The file is open here, or it or its name is about to change."""
        directory, _, name = schema.split_entry_key(row.key)
        node = self.core.nodes.get(record.ino)
        return (node is not None and (node.busy or node.own_record)) or self.core.dentries.get(
            directory, name
        ).change is not None

    async def _commit(self, cache: Cache, leaving: Sequence[EvictionCandidate], reason: str) -> bool:
        """As `BulkRemoval.commit`."""
        candidates = {one.file.row.key: one.candidate for one in leaving}

        def gone(file: Going) -> None:
            directory, _, name = schema.split_entry_key(file.row.key)
            if self.core.dentries.get(directory, name).change is None:
                cache.gone(directory, name)
            cache.evicted(candidates[file.row.key].victim, reason)

        return await self.removal.commit([one.file for one in leaving], gone)


def _capacity_of(account: Account) -> int:
    """Bytes that a namespace may have; of one that is bounded by its files alone, that it has."""
    return account.settings.capacity or account.size + account.size_elsewhere
