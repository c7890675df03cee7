"""Slabs that this client holds: taken, granted to its allocator, and given back.

* l records change by transactions of their own, which expect what was seen - of a slab that is taken from a client that
  is gone also that its m record is absent. Two clients that want one slab: one is refused.
* The fence - every commit of a client expects its own m record - is the record store's decorator (`FencedRecords`).
  It covers all slabs: one is taken from a client only where that client's m record is gone, and so is all that it
  could still commit.
* A client that goes on after its daemon was killed (`store.member`) has its slabs: their l records name it. But which
  of the free slots in them that daemon was writing to, nobody knows, and which it freed so lately that others may be
  reading them. So the slabs rest like adopted ones, for the longer of the grace of freed slots and the engine's
  quarantine, and are then granted as their records say: every free slot in them is one that nothing is on its way to.
  Meanwhile slots in them are freed as those of other holders are, and bytes go to slabs that were nobody's.
  The engine was told before to cut off that daemon, where it can. A client that ends before its slabs have rested
  keeps them, so that others take them only when its lease has run out. One that was handed over (`unsettled`) says
  which slabs have to rest: those with slots that are neither free nor named by a record, or with late writes.
* A slab becomes nobody's only when nothing of this client can happen in it any more (`may_give`): who takes it writes
  at once. A client that leaves keeps the others (`leave`), and says what is under way in them (`last_words`): its
  heirs have it cut off. What it freed lately others may be reading, so slabs that it kept also rest for a grace since
  their images changed. A client that saw no change, as it joined later, leaves that to checksums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import trio

from kvfuse.errors import Corrupt, VolumeError
from kvfuse.remote.records.api import ABSENT, Change
from kvfuse.slab.image import SlabState
from kvfuse.volume.hosts.freed_slots import FreedSlots, JournalPart
from kvfuse.volume.hosts.slab_view import Seen, SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import NOBODY, SlabHolder
from kvfuse.volume.store.sealed import get_page
from kvfuse.volume.store.transaction import Transaction

ATTEMPTS_MAX = 3
ADOPTION_GRACE_MAX = 3.0
"""Seconds, at most, before an adopted slab is written where the engine cannot cut off its former holder.

That one begins no write that may outlive its lease."""
RESERVED_OPERATIONS = 9
"""of a commit: for the fence, the journal's own, the superblock, and the member record of a client that is gone"""

log = logging.getLogger(__name__)


@dataclass
class HeldSlabs:
    """The slabs whose l record names this client. `SlabLeases` owns it, and lets one task at a time call it."""

    core: Core
    journal: JournalPart
    view: SlabView
    freed: FreedSlots
    fence: Callable[[int], Awaitable[bool]]
    """has the segment engine cut off a client that is gone"""
    wake: Callable[[], object]
    """slabs were taken, and are to be granted when they are ripe"""
    granted: Callable[[], object]
    late: Callable[[], set[int]] = set
    """slabs in which writes of this client may still happen, or are owed"""

    def __post_init__(self) -> None:
        self.slabs: dict[int, Seen] = {}
        self.grant_count = 0
        """slabs granted since the start"""
        self._coming: dict[int, float] = {}
        """slabs that are not granted yet -> when they may be"""
        self._damaged: set[int] = set()
        """slabs whose records cannot be read"""
        self._bulk = (self.core.records.limits.commit_operations_max - RESERVED_OPERATIONS) // 3

    @property
    def ripe_at(self) -> float:
        """When the next slab may be granted, in trio's time; infinite if none is waiting."""
        return min(self._coming.values(), default=math.inf)

    @property
    def resting(self) -> set[int]:
        """Slabs that may not be granted yet."""
        now = trio.current_time()
        return {slab for slab, time in self._coming.items() if time > now}

    def take_up(self) -> None:
        """Have the slabs that records say are this client's already; grant them when they have rested."""
        left, now = self.core.left, trio.current_time()
        for slab in self.view.held_by(self.core.client):
            has_to_rest = left.resting is None or slab in left.resting
            self.slabs[slab] = self.view.seen(slab)
            self._coming[slab] = now + (left.rest_seconds if has_to_rest else 0.0)

    def unsettled(self) -> list[int]:
        """Slabs with slots of which the allocator alone knows what may still happen in them, and those that rest."""
        slabs = self.core.slabs
        held = [slab for slab in self.slabs if slabs.holds(slab) and not slabs.may_withdraw(slab)]
        return sorted({*held, *self.resting, *(self.late() & self.slabs.keys())})

    def may_give(self, slabs: Iterable[int]) -> list[int]:
        """Those that may be withdrawn and given to others: nothing is under way in them, nor their images.

        Nor is a slot of theirs about to leave its image: its f record goes with that.
        """
        is_sending, may_withdraw = self.journal.is_sending, self.core.slabs.may_withdraw
        found = [slab for slab in slabs if may_withdraw(slab) and not is_sending(slab)]
        late = self.late() if found else set()
        busy = late.union([self.core.geometry.slab_of(extent.addr) for extent in self.core.dead])
        return [slab for slab in found if slab not in busy]

    def leave(self) -> list[int]:
        """Decide no longer for all that may be given, at the end; those, to be given back. No await: no image follows.

        Slabs that were taken, but not granted yet, are as they were found, unless they have to rest.
        """
        slabs, late, resting = self.core.slabs, self.late(), self.resting
        for slab in self.may_give(self.slabs):
            slabs.withdraw(slab)
        for slab in self.slabs.keys() - late:
            if slabs.may_part_with(slab) and not self.journal.is_sending(slab):
                slabs.part_with(slab)
        return sorted(slab for slab in self.slabs if not slabs.holds(slab) and slab not in resting)

    def last_words(self) -> tuple[dict[bytes, bytes], list[bytes]]:
        """(puts, deletes) of the sequence record, at the very end: heirs learn from it whether to have it cut off."""
        key = schema.sequence_key(self.core.client)
        if not self.slabs:
            return {}, [key]
        if self.late() & self.slabs.keys():
            return {}, []
        return {key: schema.NOT_CUT_OFF if self.resting else schema.NOBODY_TO_CUT_OFF}, []

    def _pieces(self, slabs: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(slabs), self._bulk):
            yield list(slabs[start : start + self._bulk])

    async def take(self, slabs: Sequence[int]) -> int:
        """Take these, all of nobody or all of one client that is gone, as far as they still are; how many."""
        taken = 0
        for part in self._pieces([slab for slab in slabs if self._may_be_wanted(slab)]):
            for _ in range(ATTEMPTS_MAX):
                if not part or await self._take_part(part):
                    break
                holders = {self.view.seen(slab).holder.client for slab in part} - {NOBODY}
                images = [schema.slab_key(slab) for slab in part if slab >= self.view.kept_end]
                keys = [*map(schema.holder_key, part), *map(schema.member_key, holders), *images, schema.SUPERBLOCK]
                await self.view.refresh(keys)
                part = [slab for slab in part if self._is_free_to_take(slab)]
            else:
                continue
            taken += len(part)
        return taken

    def _is_free_to_take(self, slab: int) -> bool:
        client = self.view.seen(slab).holder.client
        return (client == NOBODY or client not in self.view.members) and self._may_be_wanted(slab)

    def _may_be_wanted(self, slab: int) -> bool:
        """Of those that are given up, one that has to be emptied, or was a dead client's."""
        is_used = self.view.use(slab).slots_used > 0 or self.view.seen(slab).holder.client != NOBODY
        return slab < self.view.kept_end or is_used

    async def _take_part(self, slabs: Sequence[int]) -> bool:
        """One transaction. If its outcome is unknown, `_taken` gets it later, or it never happened."""
        expect: dict[bytes, int] = {}
        puts: dict[bytes, bytes] = {}
        found = {slab: self.view.seen(slab) for slab in slabs}
        holders = {seen.holder.client for seen in found.values()} - {NOBODY}
        are_cut_off = all([await self.fence(client) for client in holders])
        grace = 0.0
        if not are_cut_off:
            grace = max(min(self.core.grace.seconds, ADOPTION_GRACE_MAX), self.core.segments.limits.quarantine)
        self._expect_kept(slabs, expect)
        until = {slab: self._readers_until(slab) for slab, seen in found.items() if seen.holder.client != NOBODY}
        for slab, (holder, version) in found.items():
            expect[schema.holder_key(slab)] = version
            puts[schema.holder_key(slab)] = schema.encode_holder(SlabHolder(self.core.client, holder.epoch + 1))
            if holder.client != NOBODY:
                expect[schema.member_key(holder.client)] = ABSENT

        def taken(version: int) -> None:
            for key, value in puts.items():
                self.view.apply(Change(key, value, version))
                slab = schema.key_slab(key)
                self.slabs[slab] = self.view.seen(slab)
                self._coming[slab] = max(trio.current_time() + grace, until.get(slab, 0.0))
            self.wake()

        return await self.journal.transact(Transaction(expect, puts, applied=taken))

    def _expect_kept(self, slabs: Sequence[int], expect: dict[bytes, int]) -> None:
        """The volume is to have as many slabs as this client knows; one that is given up is in use as it knows.

        So who finds all slabs that are given up empty, and of nobody, knows that they stay so (`SharedDrain`).
        """
        expect[schema.SUPERBLOCK] = self.view.version(schema.SUPERBLOCK)
        for slab in slabs:
            if slab >= self.view.kept_end:
                expect[schema.slab_key(slab)] = self.view.version(schema.slab_key(slab))

    def _readers_until(self, slab: int) -> float:
        """Until when others may be reading slots that its last holder freed, as far as this client saw that."""
        return self.view.imaged.get(slab, -math.inf) + self.core.grace.seconds

    async def ripen(self) -> None:
        """Grant the slabs that have waited long enough, as their records say."""
        now = trio.current_time()
        ripe = sorted(slab for slab, time in self._coming.items() if time <= now)
        for part in self._pieces(ripe):
            states = await self._states(part)
            found = await self.freed.find([state.slab for state in states])
            await self.freed.drop_stale(states, found)
            for state in states:
                self._grant(state)
                self.freed.granted(found.get(state.slab, ()))

    async def _states(self, slabs: Sequence[int]) -> list[SlabState]:
        """Of slabs that this client waited for. One with a damaged record stays unused: its slots may be files'."""
        rows, damaged = await get_page(self.core.records, [schema.slab_key(slab) for slab in slabs])
        states = []
        for slab, row in zip(slabs, rows, strict=True):
            try:
                if schema.slab_key(slab) in damaged:
                    raise Corrupt("its record does not match its checksum")
                states.append(SlabState(slab, *(schema.decode_slab(row.value) if row is not None else (0, b""))))
            except Corrupt as error:
                del self._coming[slab]
                self._refuse(slab, error)
        return states

    def _refuse(self, slab: int, error: Exception) -> None:
        self._damaged.add(slab)
        log.error("slab %d is not used, 'kvfuse fsck' mends what can be: %s", slab, error)

    def _grant(self, state: SlabState) -> None:
        del self._coming[state.slab]
        try:
            self.core.slabs.grant(state)
        except VolumeError as error:
            self._refuse(state.slab, error)
        else:
            self.grant_count += 1
            self.granted()

    async def give_back(self, slabs: Sequence[int]) -> None:
        """Slabs in which this client allocates no more are nobody's. After an EngineError: to be tried again."""
        for piece in self._pieces(slabs):
            part = [slab for slab in piece if slab in self.slabs]  # an attempt of before may have given some meanwhile
            expect = {schema.holder_key(slab): self.slabs[slab].version for slab in part}
            puts = {
                schema.holder_key(slab): schema.encode_holder(SlabHolder(NOBODY, self.slabs[slab].holder.epoch))
                for slab in part
            }

            def given(version: int, puts: dict[bytes, bytes] = puts) -> None:
                for key, value in puts.items():
                    self.slabs.pop(schema.key_slab(key), None)
                    self.view.apply(Change(key, value, version))

            await self.journal.transact(Transaction(expect, puts, applied=given))

    async def give_back_unused(self) -> None:
        """Those that the allocator does not hold, or no more."""
        unused = self.slabs.keys() - self._coming.keys() - self._damaged
        await self.give_back(sorted(slab for slab in unused if not self.core.slabs.holds(slab)))
