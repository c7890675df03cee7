"""How many free slabs a client holds: a few ahead of need, so that nobody who writes waits for one, and no more.

What stays free goes back. Where others may want it all of that does, and partly used slabs as well (`Shares`).

Slabs of nobody that are in use may be full of a cache's blocks: who has caches takes them, so that somebody evicts what
is in them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import trio

from kvfuse.slab.free_slabs import Stripe, Turns
from kvfuse.volume.hosts.fair_shares import Shares
from kvfuse.volume.hosts.held_slabs import HeldSlabs
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store.schema import NOBODY

AHEAD_IDLE = 4
"""Free slabs held ahead of need by a client that uses none: all others hear of each that it takes, or gives back;"""
AHEAD = 8
"""by one that used some, at the least,"""
AHEAD_SIZE = 256 << 20
"""and bytes in them: to take slabs costs three questions, however many they are."""
AHEAD_GROWTH = 8
"""So many times that many after writers had to wait again and again."""
AHEAD_SHARE = 4
"""No client holds more of them than this part of its share of the slabs that nobody holds."""
PARTIAL_MAX = 4
"""Slabs in use taken at once, when there are no free ones."""
WINDOW = 4
"""Clients choose among so many times the slabs that they want, so that they seldom want the same ones; and among twice
as many each time that others were faster, as all of them may want some at once."""
IDLE_SECONDS = 5.0
"""A slab that was free that long is given back, if it is one too many;"""
SCARCE_SECONDS = 0.5
"""if there are fewer of nobody than this client has, that long."""

GIVEN_SECONDS = 15.0
"""So long, and a grace, a slab that was given back full is left to those who asked for room."""
GIVEN_MAX = 16
"""of them are taken at once"""
USED_SECONDS = 2.0
"""between two looks for slabs of nobody that are in use"""


@dataclass
class SlabSupply:
    """Chooses slabs to take and to give back. `SlabLeases` owns it, and lets one task at a time call it."""

    core: Core
    view: SlabView
    held: HeldSlabs
    shares: Shares

    def __post_init__(self) -> None:
        self._ahead_used = max(AHEAD, AHEAD_SIZE // self.core.geometry.slab_size)
        self._ahead = AHEAD_IDLE
        self._opened = 0
        """free slabs that came into use since the last look for idle ones"""
        self._idle: set[int] = set()
        """slabs that were free at that look"""
        self._looked = trio.current_time()
        self._used: set[int] = set()
        """slabs of nobody that were in use at the last look for such"""
        self._looked_used = -USED_SECONDS
        self._going: set[int] = set()
        """slabs of nobody that are given up and were in use at the last look"""
        self._random = random.Random(self.core.client)
        self._turns = Turns()

    @property
    def _target(self) -> int:
        """Free slabs to be held. Where few are left: none, but one by those who need them now."""
        share = self.view.unheld_count // (AHEAD_SHARE * max(len(self.view.members), 1))
        return min(self._ahead, share) or bool(self._opened)

    @property
    def _is_short(self) -> bool:
        return self.core.slabs.free_slab_count < (self._target + 1) // 2

    def note_opened(self) -> bool:
        """A free slab came into use. True: take others ahead."""
        self._opened += 1
        if self._is_short:
            self._ahead = max(self._ahead, self._ahead_used)
        return self._is_short

    async def take_ahead(self) -> None:
        if self._is_short:
            await self._take_empty(self._target - self.core.slabs.free_slab_count)

    async def take_more(self, count: int = 1) -> None:
        """Take free slabs of nobody, else such in use with free slots, else what clients held that are gone."""
        self._ahead = min(2 * max(self._ahead, self._ahead_used), AHEAD_GROWTH * self._ahead_used)
        wanted = max(self._target - self.core.slabs.free_slab_count, count)
        if not await self._take_empty(wanted) and not await self.held.take(self._partly_used()):
            for client in self.view.gone():
                await self.held.take(self.view.held_by(client))
            if self.shares.asked:
                await self.held.take(self._given())

    async def _take_empty(self, count: int) -> int:
        """Take up to ``count`` free slabs of nobody; how many. Others may be faster, while there are some."""
        taken, window_size = 0, WINDOW * count
        while not taken:
            end = self.view.kept_end
            empty = (slab for slab in self.view.unheld() if slab < end and not self.view.use(slab).slots_used)
            window = self._window(empty, window_size)
            window_size *= 2
            if not window:
                break
            taken = await self.held.take(sorted(self._sample(window, count)))
        return taken

    def _window(self, empty: Iterable[int], size: int) -> list[int]:
        """The lowest ones; of each device, where there are several."""
        return list(islice(empty, size)) if self.core.spread is None else self.core.spread.window_of(empty, size)

    def _sample(self, window: list[int], count: int) -> list[int]:
        """Of all devices in turn, else at random."""
        if self.core.spread is None:
            return self._random.sample(window, min(count, len(window)))
        stripes: dict[Stripe, list[int]] = {}
        for slab in self._random.sample(window, len(window)):
            stripes.setdefault(self.core.spread.stripe(slab), []).append(slab)
        chosen: list[int] = []
        while stripes and len(chosen) < count:
            stripe = self._turns.take(stripes)
            chosen.append(stripes[stripe].pop())
            if not stripes[stripe]:
                del stripes[stripe]
        return chosen

    def _given(self) -> list[int]:
        """Slabs whose holders gave them back lately, as somebody lacks room: they are about to be free."""
        since = trio.current_time() - GIVEN_SECONDS - self.core.grace.seconds
        given = [slab for slab, time in self.view.given.items() if time >= since and slab not in self.shares.given]
        return sorted(slab for slab in given if slab < self.view.kept_end)[:GIVEN_MAX]

    def _partly_used(self) -> list[int]:
        """Slabs of nobody that are in use and have free slots: those with the most free bytes."""
        kept = [slab for slab in self.view.unheld() if slab < self.view.kept_end]
        free = {slab: self.view.slots_free(slab) * self.view.use(slab).slot_size for slab in kept}
        return sorted(filter(free.__getitem__, free), key=free.__getitem__, reverse=True)[:PARTIAL_MAX]

    async def take_used(self, heir: Callable[[int], int]) -> None:
        """Take slabs of nobody that have blocks: first ``heir`` of each does, later all do."""
        now = trio.current_time()
        if self.core.blocks is None or now < self._looked_used + USED_SECONDS:
            return
        self._looked_used = now
        rest, given = GIVEN_SECONDS + self.core.grace.seconds, self.view.given
        used = {slab for slab in self.view.abandoned if now > given.get(slab, -math.inf) + rest}
        wanted = [slab for slab in sorted(used) if slab in self._used or heir(slab) == self.core.client]
        self._used = used.difference(wanted)
        await self.held.take(wanted)

    async def take_going(self, heir: Callable[[int], int]) -> None:
        """Take slabs of nobody that are given up, and in use, so that their slots can be freed: first ``heir`` of each
        does, at the next look all do."""
        used = {slab for slab in self.view.going() if self.view.seen(slab).holder.client == NOBODY}
        wanted = [slab for slab in sorted(used) if slab in self._going or heir(slab) == self.core.client]
        self._going = used.difference(wanted)
        await self.held.take(wanted)

    async def return_surrendered(self) -> None:
        """Give back slabs that are given up, and free."""
        if self.core.slabs.surrendered:
            for slab in self.held.may_give(sorted(self.core.slabs.surrendered)):
                self.core.slabs.withdraw(slab)
            await self.held.give_back_unused()

    async def return_idle(self) -> None:
        """Give back slabs that were free for a while and are not needed: all of them, where others may want them.

        There also of those that are partly used, see `Shares`.
        """
        free = self.core.slabs.free_slabs()
        has_surplus = self.shares.surplus > 0 and not self.core.is_alone()
        is_scarce = has_surplus or (self.view.unheld_count < len(free) and not self.core.is_alone())
        if trio.current_time() < self._looked + (SCARCE_SECONDS if is_scarce else IDLE_SECONDS):
            return
        idle = [slab for slab in free if slab in self._idle]
        surplus = min(len(idle), len(free) - self._target)
        if not self._opened:
            self._ahead = min(self._ahead, self._ahead_used)
        self._looked, self._opened, self._idle = trio.current_time(), 0, set(free)
        given = idle[len(idle) - max(surplus, 0) :]
        if has_surplus:
            given += self.shares.to_give()
        for slab in self.held.may_give(given):
            self.core.slabs.withdraw(slab)
        await self.held.give_back_unused()
