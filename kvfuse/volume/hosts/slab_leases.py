"""Slabs of a shared volume: which this client holds, and how they come and go.

A client allocates in slabs that it holds (record l), and in no others. It takes a few ahead of need, so that nobody
who writes waits for one; gives back what stays free; and shares with the other survivors what a client held
that is gone. Nothing compares clocks: that a client is gone is said by the record store, whose lease on its m
record ended.

What reaches the store, and how:

* l records, the counters and stale f records by transactions of their own, which expect what was seen - of a slab that
  is taken from a client that is gone also that its m record is absent. Two clients that want one slab: one is refused.
* s records, and f records of slots that are freed with them, by the journal's batches: it alone puts images of
  slabs, so that no older one ever replaces a newer one.
* The fence - every commit of a client expects its own m record - is the record store's decorator (`FencedRecords`).
  It covers all slabs: one is taken from a client only where that client's m record is gone, and so is all that it
  could still commit.

`_turn` is held by who takes, grants or gives back; so between their awaits only allocations, commits and changes
that the watches bring interleave, and each step after an await looks again at what these may have changed.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import trio

from kvfuse.errors import Corrupt, EngineError, VolumeError
from kvfuse.remote.records.api import ABSENT, Change
from kvfuse.slab.image import SlabState
from kvfuse.volume.hosts.departed import Inheritance
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.hosts.freed_slots import FreedSlots, JournalPart
from kvfuse.volume.hosts.slab_view import Seen, SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.numbers import SharedNumberRange
from kvfuse.volume.store.schema import NOBODY, Holder
from kvfuse.volume.store.sealed import get_page
from kvfuse.volume.store.transaction import Transaction

AHEAD = 8
"""Free slabs held ahead of need, at the least,"""
AHEAD_SIZE = 256 << 20
"""and bytes in them, at first: to take slabs costs three questions, however many they are."""
AHEAD_GROWTH = 8
"""So many times that many after writers had to wait again and again."""
AHEAD_SHARE = 4
"""No client holds more of them than this part of its share of the slabs that nobody holds."""
PARTIAL_MAX = 4
"""Slabs in use taken at once, when there are no free ones."""
WINDOW = 4
"""Clients choose among so many times the slabs that they want, so that they seldom want the same ones."""
ATTEMPTS_MAX = 3
TICK_SECONDS = 1.0
IDLE_SECONDS = 5.0
"""A slab that was free that long is given back, if it is one too many;"""
SCARCE_SECONDS = 0.5
"""if there are fewer of nobody than this client has, that long."""
SPREAD_SECONDS = 1.0
"""What a client that is gone held is first offered to one survivor each, then to all."""
ADOPTION_GRACE_MAX = 3.0
"""Seconds, at most, before an adopted slab is written where the engine cannot cut off its former holder.

That one begins no write that may outlive its lease."""
BEHIND_SECONDS = 0.02
RETRY_SECONDS = 0.5
RESERVED_OPERATIONS = 8
"""of a commit: for the fence, the journal's own, and the member record of a client that is gone"""

log = logging.getLogger(__name__)


class SlabLeases:
    """The slabs of one client. ``core.slabs`` begins without any; ``run`` has to be running."""

    def __init__(self, core: Core, journal: JournalPart, free_later: Callable[[int], None] = lambda ino: None) -> None:
        self.core = core
        self.journal = journal
        self.view = SlabView(core.records, core.geometry, self._noticed)
        self.freed = FreedSlots(core, journal)
        self.inheritance = Inheritance(core, journal, self.view, self.heir, free_later)
        self.shares = Shares(core, self.view)
        self._held: dict[int, Seen] = {}
        """slabs whose l record names this client"""
        self._coming: dict[int, float] = {}
        """held slabs that are not granted yet -> when they may be"""
        self._grants = 0
        """slabs granted since the start"""
        self._ahead_min = max(AHEAD, AHEAD_SIZE // core.geometry.slab_size)
        self._ahead = self._ahead_min
        self._opened = 0
        """free slabs that came into use since the last look for idle ones"""
        self._idle: set[int] = set()
        """slabs that were free at that look"""
        self._looked = trio.current_time()
        self._damaged: set[int] = set()
        """held slabs whose records cannot be read"""
        self._gone_since: dict[int, float] = {}
        self._bulk = (core.records.limits.commit_operations_max - RESERVED_OPERATIONS) // 2
        self._random = random.Random(core.client)
        self._turn = trio.Lock()
        self._work = trio.Event()
        core.slabs.slab_opened = self._slab_opened
        core.is_alone = self._is_alone
        core.is_owed_room = self.shares.is_owed
        ranges = (core.inodes, core.generations)
        self._numbers = [numbers for numbers in ranges if isinstance(numbers, SharedNumberRange)]
        for numbers in self._numbers:
            numbers.wanted = self._wake

    # -- questions, and what is told -----------------------------------------------------------------

    def heir(self, client: int) -> int:
        """Which of the clients that are alive sees to what a client left behind that is gone. All agree, by and by."""
        survivors = sorted(self.view.members) or [self.core.client]
        return survivors[client % len(survivors)]

    def space(self) -> tuple[int, int]:
        """(free bytes, inodes) of the whole volume, as far as this client has heard."""
        slabs, view = self.core.slabs, self.view
        used_elsewhere = view.used_bytes
        for slab in self._held:
            if slabs.holds(slab):
                used_elsewhere -= view.use(slab).slot_size * view.use(slab).slots_used
        used_elsewhere -= sum(view.freed_bytes(slab) for slab in view.freed if not slabs.holds(slab))
        slabs_elsewhere = self.core.geometry.slab_count - slabs.slab_count
        free = slabs_elsewhere * self.core.geometry.slab_size - used_elsewhere + slabs.free_bytes + slabs.pending_bytes
        inodes = view.counts_beside(self.core.client).inodes + self.core.file_count
        return free, max(inodes, 1)

    def _is_alone(self) -> bool:
        return self.view.ready.is_set() and self.view.members == {self.core.client}

    def _wake(self) -> None:
        self._work.set()

    def _slab_opened(self) -> None:
        self._opened += 1
        if self._is_short:
            self._wake()

    def _noticed(self, change: Change) -> None:
        """After the view took it over."""
        kind = change.key[:1]
        if kind == b"f" and change.value is not None and schema.key_slab(change.key) in self._held:
            self.freed.hint([change.key])
            self._wake()
        elif kind == b"m" and change.value is None:
            self.inheritance.is_behind = True
            self._wake()

    # -- the task ------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tend to the slabs for ever; started when there are some, where there are any, and numbers to give.

        EngineError before it is started, if the store does not answer.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.view.run)
            nursery.start_soon(self.core.grace.run)
            await self.view.ready.wait()
            await self._begin()
            task_status.started()
            while True:
                with trio.move_on_after(self._pause()):
                    await self._work.wait()
                self._work = trio.Event()
                try:
                    await self._tend()
                except EngineError as error:
                    log.info("slabs are looked after later: %s", error)
                    await trio.sleep(RETRY_SECONDS)

    def _pause(self) -> float:
        """Seconds until there is something to do, if nothing happens."""
        if self.freed.is_behind:
            return BEHIND_SECONDS
        ripe = min(self._coming.values(), default=float("inf"))
        return max(min(TICK_SECONDS, ripe - trio.current_time()), 0)

    async def _begin(self) -> None:
        """Have slabs and numbers. What clients left that are gone is seen to later, unless nothing else is free.

        To cut them off takes seconds, and this one may be among those who were away together.
        """
        async with self._turn:
            await self._take_ahead()
            await self._ripen()
        if not self.core.slabs.free_slab_count:
            await self._tend()
        await self._fill_numbers()
        self._wake()

    async def _tend(self) -> None:
        gone = self.view.gone()
        if self.core.client not in gone:  # nobody cuts off himself
            await self.inheritance.fence_all([client for client in gone if client in self.view.held_counts])
        async with self._turn:
            await self._adopt()
            await self._take_ahead()
            await self._ripen()
            await self._return_idle()
            if self.freed.is_behind:
                await self.freed.free()
        await self._fill_numbers()
        if self.inheritance.is_behind and self.core.client in self.view.members:
            await self.inheritance.settle()

    async def _fill_numbers(self) -> None:
        for numbers in self._numbers:
            await numbers.fill(self.core.records, self.journal.transact)

    async def close(self) -> None:
        """Give everything back, after the last commit and the last write: others need no grace then."""
        async with self._turn:
            try:
                await self._give_back(sorted(self._held))
                await self.inheritance.take_over_counts(self.core.client)
            except EngineError as error:
                log.warning("slabs were not given back, others take them when the lease has ended: %s", error)

    # -- having enough -------------------------------------------------------------------------------

    @property
    def _target(self) -> int:
        """Free slabs to be held. Where few are left: none, but one by those who need them now."""
        share = self.view.unheld_count // (AHEAD_SHARE * max(len(self.view.members), 1))
        return min(self._ahead, share) or bool(self._opened)

    @property
    def _is_short(self) -> bool:
        return self.core.slabs.free_slab_count < (self._target + 1) // 2

    async def _take_ahead(self) -> None:
        if self._is_short:
            await self._take_empty(self._target - self.core.slabs.free_slab_count)

    async def take_unheld_slabs(self, deadline: float = math.inf, length: int = 0) -> bool:
        """A `Source`: takes slabs that no client holds. ``length``: bytes of an extent that found no room, if known.

        Free slabs first, then such in use with slots of the size; then what a client held that is gone, and the files
        that it had removed. What waits for its grace is waited for. EngineError where the store does not answer.
        """
        grants = self._grants
        async with self._turn:
            if self._grants > grants:
                return True  # they came while it was another's turn
            self._ahead = min(2 * self._ahead, AHEAD_GROWTH * self._ahead_min)
            wanted = max(self._target - self.core.slabs.free_slab_count, 1)
            if not await self._take_empty(wanted) and not await self._take(self._partial(length)):
                for client in self.view.gone():
                    await self._take(self.view.held_by(client))
            await self._ripen()
        if self._grants > grants or await self._wait_for_grace():
            return True
        return self.inheritance.is_behind and await self.inheritance.settle()

    async def _wait_for_grace(self) -> bool:
        """Until a slab or some slots have waited long enough. False: none is waiting."""
        ripe = min(self._coming.values(), default=float("inf"))
        if not self._coming and self.core.grace.is_empty:
            return False
        with trio.CancelScope(deadline=ripe):
            await self.core.grace.passed.wait()
        async with self._turn:
            await self._ripen()
        return True

    async def _take_empty(self, count: int) -> int:
        """Take up to ``count`` free slabs of nobody; how many. Others may be faster, while there are some."""
        taken = 0
        while not taken:
            empty = (slab for slab in self.view.unheld() if not self.view.use(slab).slots_used)
            window = list(islice(empty, WINDOW * count))
            if not window:
                break
            taken = await self._take(sorted(self._random.sample(window, min(count, len(window)))))
        return taken

    def _partial(self, length: int) -> list[int]:
        """Slabs of nobody that are in use and have free slots: those of the sizes for ``length``, or of any."""
        view = self.view
        slabs = [slab for slab in view.unheld() if view.slots_free(slab)]
        sizes = self.core.slabs.classes.plan(length) if length else ()
        slabs = [slab for slab in slabs if view.use(slab).slot_size in sizes] or slabs
        slabs.sort(key=lambda slab: view.slots_free(slab) * view.use(slab).slot_size, reverse=True)
        return slabs[:PARTIAL_MAX]

    async def _return_idle(self) -> None:
        """Give back slabs that were free for a while and are not needed: all of them, where others may want them.

        There also of those that are partly used, see `Shares`.
        """
        free = self.core.slabs.free_slabs()
        has_surplus = self.shares.surplus > 0 and not self._is_alone()
        is_scarce = has_surplus or (self.view.unheld_count < len(free) and not self._is_alone())
        if trio.current_time() < self._looked + (SCARCE_SECONDS if is_scarce else IDLE_SECONDS):
            return
        idle = [slab for slab in free if slab in self._idle]
        surplus = min(len(idle), len(free) - self._target)
        if not self._opened:
            self._ahead = self._ahead_min
        self._looked, self._opened, self._idle = trio.current_time(), 0, set(free)
        given = idle[len(idle) - max(surplus, 0) :]
        if has_surplus and not self.journal.is_committing:
            given += self.shares.to_give()
        for slab in given:
            self.core.slabs.withdraw(slab)
        unused = self._held.keys() - self._coming.keys() - self._damaged
        await self._give_back(sorted(slab for slab in unused if not self.core.slabs.holds(slab)))

    # -- taking and giving back: in one's turn -------------------------------------------------------

    def _parts(self, slabs: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(slabs), self._bulk):
            yield list(slabs[start : start + self._bulk])

    async def _take(self, slabs: Sequence[int]) -> int:
        """Take these, all of nobody or all of one client that is gone, as far as they still are; how many."""
        taken = 0
        for part in self._parts(slabs):
            for _ in range(ATTEMPTS_MAX):
                if not part or await self._take_part(part):
                    break
                holders = {self.view.seen(slab).holder.client for slab in part} - {NOBODY}
                await self.view.refresh([*map(schema.holder_key, part), *map(schema.member_key, holders)])
                part = [slab for slab in part if self._is_free_to_take(slab)]
            else:
                continue
            taken += len(part)
        return taken

    def _is_free_to_take(self, slab: int) -> bool:
        client = self.view.seen(slab).holder.client
        return client == NOBODY or client not in self.view.members

    async def _take_part(self, slabs: Sequence[int]) -> bool:
        """One transaction. If its outcome is unknown, what became of it is told to `_taken` later, or never was."""
        expect: dict[bytes, int] = {}
        puts: dict[bytes, bytes] = {}
        found = {slab: self.view.seen(slab) for slab in slabs}
        holders = {seen.holder.client for seen in found.values()} - {NOBODY}
        are_cut_off = all([await self.inheritance.fence(client) for client in holders])
        grace = 0.0 if are_cut_off else min(self.core.grace.seconds, ADOPTION_GRACE_MAX)
        for slab, (holder, version) in found.items():
            expect[schema.holder_key(slab)] = version
            puts[schema.holder_key(slab)] = schema.encode_holder(Holder(self.core.client, holder.epoch + 1))
            if holder.client != NOBODY:
                expect[schema.member_key(holder.client)] = ABSENT

        def taken(version: int) -> None:
            for key, value in puts.items():
                self.view.apply(Change(key, value, version))
                slab = schema.key_slab(key)
                self._held[slab] = self.view.seen(slab)
                self._coming[slab] = trio.current_time() + grace
            self._wake()

        return await self.journal.transact(Transaction(expect, puts, applied=taken))

    async def _ripen(self) -> None:
        """Grant the slabs that have waited long enough, as their records say."""
        now = trio.current_time()
        ripe = sorted(slab for slab, time in self._coming.items() if time <= now)
        for part in self._parts(ripe):
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
            self._grants += 1
            self.shares.came()

    async def _give_back(self, slabs: Sequence[int]) -> None:
        """Slabs in which this client allocates no more are nobody's. After an EngineError: to be tried again."""
        for part in self._parts(slabs):
            expect = {schema.holder_key(slab): self._held[slab].version for slab in part}
            puts = {
                schema.holder_key(slab): schema.encode_holder(Holder(NOBODY, self._held[slab].holder.epoch))
                for slab in part
            }

            def given(version: int, puts: dict[bytes, bytes] = puts) -> None:
                for key, value in puts.items():
                    self._held.pop(schema.key_slab(key), None)
                    self.view.apply(Change(key, value, version))

            await self.journal.transact(Transaction(expect, puts, applied=given))

    # -- clients that are gone -----------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Take this client's part of what those held that are gone; after a while whatever is left of it."""
        now = trio.current_time()
        gone = self.view.gone()
        if self.core.client in gone or not self.view.ready.is_set():
            return  # its own lease has ended: nothing can be taken any more
        self._gone_since = {client: self._gone_since.get(client, now) for client in gone}
        for client in gone:
            is_left = now >= self._gone_since[client] + SPREAD_SECONDS
            slabs = self.view.held_by(client)
            await self._take([slab for slab in slabs if is_left or self.heir(slab) == self.core.client])
            if client in self.view.counts and (is_left or self.heir(client) == self.core.client):
                await self.inheritance.take_over_counts(client)
