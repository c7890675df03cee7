"""Slabs of a shared volume: when a client takes some, gives some back, and adopts those of clients that are gone.

A client allocates in slabs that it holds (record l, `HeldSlabs`), and in no others. It takes a few ahead of need
(`SlabSupply`), and shares with the other survivors what a client held that is gone. Nothing compares clocks: the record
store says that a client is gone, when its lease on the client's m record ended.

A task that takes, grants or gives back holds `_turn`; so between its awaits only allocations, commits and changes
that the watches bring interleave, and each step after an await looks again at what these may have changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import trio

from kvfuse import failing
from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change
from kvfuse.volume.hosts.departed import Inheritance
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.hosts.freed_slots import FreedSlots, JournalPart
from kvfuse.volume.hosts.held_slabs import HeldSlabs
from kvfuse.volume.hosts.slab_supply import SlabSupply
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import CacheShare, Core
from kvfuse.volume.store import schema
from kvfuse.volume.store.numbers import SharedNumberRange
from kvfuse.volume.store.schema import NOBODY

TICK_SECONDS = 1.0
SPREAD_SECONDS = 1.0
"""The slabs of a client that is gone are first offered to one survivor each, then to all."""
BEHIND_SECONDS = 0.02
RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


class SlabLeases:
    """The slabs of one client. ``core.slabs`` begins without any; ``run`` has to be running."""

    def __init__(
        self,
        core: Core,
        journal: JournalPart,
        free_later: Callable[[int], None] = lambda ino: None,
        late: Callable[[], set[int]] = set,
    ) -> None:
        """``free_later``: called with inodes that this client is to free now. ``late``: see `HeldSlabs`."""
        self.core = core
        self.journal = journal
        self.view = SlabView(core.records, core.geometry, self._noticed, core.take_superblock)
        self.freed = FreedSlots(core, journal)
        self.inheritance = Inheritance(core, journal, self.view, self.heir, free_later)
        self.shares = Shares(core, self.view)
        fence = self.inheritance.fence
        self.held = HeldSlabs(core, journal, self.view, self.freed, fence, self._wake, self.shares.note_slabs, late)
        self.supply = SlabSupply(core, self.view, self.held, self.shares)
        self._gone_since: dict[int, float] = {}
        self._needed = 0
        """slabs for those who cannot await them"""
        self._is_over = False
        """nothing is taken any more"""
        self._turn = trio.Lock()
        self._work = trio.Event()
        core.slabs.slab_opened = self._slab_opened
        core.is_alone = self._is_alone
        core.host_count = lambda: max(len(self.view.members), 1)
        core.shared_part = self._part
        core.more_slabs = self.take_empty_slabs
        core.need_slabs = self._note_need
        core.files_size = self.view.files_size
        ranges = (core.inodes, core.generations)
        self._numbers = [numbers for numbers in ranges if isinstance(numbers, SharedNumberRange)]
        for numbers in self._numbers:
            numbers.wanted = self._wake

    # -- questions and announcements -----------------------------------------------------------------

    def heir(self, client: int) -> int:
        """Which of the clients that are alive sees to what a client left behind that is gone. All agree, by and by."""
        return self.view.heir(client, self.core.client)

    def space(self) -> tuple[int, int]:
        """(free bytes, inodes) of the whole volume, as far as this client has heard."""
        slabs, view = self.core.slabs, self.view
        used_elsewhere = view.used_bytes
        for slab in self.held.slabs:
            if slabs.holds(slab):
                used_elsewhere -= view.use(slab).slot_size * view.use(slab).slots_used
        used_elsewhere -= sum(view.freed_bytes(slab) for slab in view.freed if not slabs.holds(slab))
        slabs_elsewhere = view.kept_end - slabs.slab_count
        free = slabs_elsewhere * self.core.geometry.slab_size - used_elsewhere + slabs.free_bytes + slabs.pending_bytes
        inodes = view.counts_beside(self.core.client).inodes + self.core.file_count
        return free, max(inodes, 1)

    def _part(self) -> CacheShare:
        """What this client holds, and an equal part of what nobody does."""
        slabs, held_size = self.core.slabs, self.core.slabs.slab_count * self.core.geometry.slab_size
        unheld = max(self.view.unheld_free_bytes, 0) // max(len(self.view.members), 1)
        return CacheShare(held_size + unheld, max(held_size - slabs.free_bytes - slabs.pending_bytes, 0))

    def _is_alone(self) -> bool:
        return self.view.ready.is_set() and self.view.members == {self.core.client}

    def _wake(self) -> None:
        self._work.set()

    def hurry(self) -> None:
        """There may be slabs to give back."""
        self._wake()

    def _note_need(self, count: int) -> None:
        self._needed = max(self._needed, count)
        self._wake()

    def _slab_opened(self) -> None:
        if self.supply.note_opened():
            self._wake()

    def _noticed(self, change: Change) -> None:
        """After the view took it over."""
        kind = change.key[:1]
        if kind == b"f" and change.value is not None:
            if self.core.disk is not None:
                freed = schema.split_freed_key(change.key)
                self.core.disk.drop(freed.addr, self.view.use(freed.slab).slot_size, freed.generation)
            if schema.key_slab(change.key) in self.held.slabs:
                self.freed.hint([change.key])
                self._wake()
        elif kind == b"l" and self.view.ready.is_set():
            slab = schema.key_slab(change.key)
            if self.view.seen(slab).holder.client == NOBODY:
                self.view.given.setdefault(slab, trio.current_time())
            else:
                self.view.given.pop(slab, None)
        elif kind == b"m" and change.value is None:
            self.inheritance.is_behind = True
            self._wake()

    def statistics(self) -> dict[str, int]:
        """Slabs of this client, those of them that nobody may use yet; clients that are alive, and slabs of others."""
        return {
            "held_count": len(self.held.slabs),
            "resting_count": len(self.held.resting),
            "host_count": len(self.view.members),
            "departed_slab_count": sum(self.view.held_counts[client] for client in self.view.gone()),
        }

    # -- the task ------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tend to the slabs until `close`; started when there are some, where there are any, and numbers to give.

        EngineError before it is started, if the store does not answer.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing.vital_task, self.view.run)
            nursery.start_soon(failing.vital_task, self.core.grace.run)
            await self.view.ready.wait()
            await self._begin()
            task_status.started()
            with failing.vital():
                await self._tend_always()

    async def _tend_always(self) -> None:
        while not self._is_over:
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
        return max(min(TICK_SECONDS, self.held.ripe_at - trio.current_time()), 0)

    async def _begin(self) -> None:
        """Have slabs and numbers. Slabs of clients that are gone follow later, unless nothing else is free.

        To cut them off takes seconds, and this one may be among those who were away together.
        """
        async with self._turn:
            if self.core.left.is_resumed:
                self.held.take_up()
                await self.held.ripen()
            await self.supply.take_ahead()
            await self.held.ripen()
        if not self.core.slabs.free_slab_count:
            await self._tend()
        await self._fill_numbers()
        self._wake()

    async def _tend(self) -> None:
        gone = self.view.gone()
        if self.core.client not in gone:  # nobody cuts off himself
            await self.inheritance.fence_all([client for client in gone if client in self.view.held_counts])
        async with self._turn:
            if self._is_over:
                return
            await self._adopt()
            needed, self._needed = self._needed, 0
            await (self.supply.take_more(needed) if needed else self.supply.take_ahead())
            await self.supply.take_used(self.heir)
            if self.view.kept_end < self.core.geometry.slab_count and not self.core.read_only:
                await self.supply.take_going(self.heir)
            await self.held.ripen()
            await self.supply.return_idle()
            await self.supply.return_surrendered()
            if self.freed.is_behind:
                await self.freed.free()
        await self._fill_numbers()
        if self.inheritance.is_behind and self.core.client in self.view.members:
            await self.inheritance.settle()

    async def _fill_numbers(self) -> None:
        for numbers in self._numbers:
            await numbers.fill(self.core.records, self.journal.transact)

    async def give(self, slabs: Iterable[int]) -> int:
        """Give slabs back now, as far as they may be withdrawn; how many. EngineError: they will be."""
        async with self._turn:
            given = self.held.may_give(slabs)
            for slab in given:
                self.core.slabs.withdraw(slab)
            self.shares.given.update(given)
            await self.held.give_back_unused()
        return len(given)

    async def close(self) -> bool:
        """Give back all in which nothing of this client can happen any more, when its parts have ended that write.

        Others find the rest as of a client that is gone. False: they may not for a while, as slabs of a client that
        went on have not rested yet.
        """
        async with self._turn:
            self._is_over = True
            try:
                await self.held.give_back(self.held.leave())
                await self.inheritance.take_over_counts(self.core.client)
                spaces = self.core.namespaces.accounts.records.spaces()
                await self.inheritance.take_over_uses(self.core.client, spaces)
            except EngineError as error:
                log.warning("slabs were not given back, others take them when the lease has ended: %s", error)
        return not (self.core.left.is_resumed and self.held.resting)

    # -- having enough -------------------------------------------------------------------------------

    async def take_unheld_slabs(self, deadline: float = math.inf, namespace: int | None = None) -> bool:
        """A `Source`: takes slabs that no client holds; then what a client held that is gone, and its removed files.

        What waits for its grace is waited for. Slabs are no room where a quota is used up. EngineError where the
        store does not answer.
        """
        grants = self.held.grant_count
        if namespace is None:
            async with self._turn:
                if self.held.grant_count > grants:
                    return True  # they came while it was another's turn
                await self._take_more()
            if self.held.grant_count > grants or await self._wait_for_grace():
                return True
        return self.inheritance.is_behind and await self.inheritance.settle()

    async def take_empty_slabs(self, count: int) -> bool:
        """Take free slabs of nobody that need no grace, about ``count``: whether there were any. EngineError."""
        grants = self.held.grant_count
        async with self._turn:
            await self._take_more(count)
        return self.held.grant_count > grants

    async def _take_more(self, count: int = 1) -> None:
        if not self._is_over:
            await self.supply.take_more(count)
            await self.held.ripen()

    async def _wait_for_grace(self) -> bool:
        """Until a slab or some slots have waited long enough. False: none is waiting."""
        ripe_at = self.held.ripe_at
        if self._is_over or (ripe_at == math.inf and self.core.grace.is_empty):
            return False
        with trio.CancelScope(deadline=ripe_at):
            await self.core.grace.passed.wait()
        async with self._turn:
            if not self._is_over:
                await self.held.ripen()
        return True

    # -- clients that are gone -----------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Take this client's part of what those held that are gone; after a while whatever is left of it."""
        now = trio.current_time()
        accounts = self.core.namespaces.accounts
        gone = sorted({*self.view.gone(), *(accounts.elsewhere.clients() - self.view.members)})
        if self.core.client in gone or not self.view.ready.is_set():
            return  # its own lease has ended: nothing can be taken any more
        self._gone_since = {client: self._gone_since.get(client, now) for client in gone}
        for client in gone:
            is_left = now >= self._gone_since[client] + SPREAD_SECONDS
            slabs = self.view.held_by(client)
            await self.held.take([slab for slab in slabs if is_left or self.heir(slab) == self.core.client])
            if client in self.view.counts and (is_left or self.heir(client) == self.core.client):
                await self.inheritance.take_over_counts(client)
            if is_left or self.heir(client) == self.core.client:
                await self.inheritance.take_over_uses(client, accounts.elsewhere.spaces(client))
