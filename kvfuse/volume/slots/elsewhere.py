"""Stored bytes go elsewhere where servers do not answer: to slots of the same sizes whose servers do.

A stopped server has a part of all slots, and nobody knows which before one was late. So the engine is asked about the
free slots of a size, in their order (`Servers.answers`), and probes many that it does not know, at once. Only
segments that exist are looked at, as to make one takes a server of its own: those of free slabs are made ahead of need.

A write that was late may still happen. So its slot rests: until its server has answered - a later write of this client
then comes after the late one - and a grace more, as another host may get the slab. Meanwhile nobody is charged for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import trio

from kvfuse.errors import EngineError
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.chunk import Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.slots.items import Item

log = logging.getLogger(__name__)

PROBED_MAX = 48
"""parts of segments that are probed at once"""
ROUNDS_MAX = 8
"""of questions for one batch"""
WALK_MAX = 50_000
"""free slots that are looked at, some 50 ms, for one size"""
SLABS_SECONDS = 1.0
"""for which slabs are waited for that nobody holds"""
LOOK_SECONDS = 0.5
"""between looks at slots that rest, and at slabs that came"""


@dataclass
class Elsewhere:
    """Moves staged bytes away from servers that do not answer. Each membership has one; `run` has to be running."""

    core: Core
    moved: int = 0
    """slots that were exchanged for others"""

    def __post_init__(self) -> None:
        self._resting: list[Slot] = []

    @property
    def resting(self) -> int:
        """Slots that wait for their servers."""
        return len(self._resting)

    async def move(self, items: Sequence[Item]) -> None:
        """Exchange slots whose servers do not answer, as far as there are others. EngineError."""
        for number in range(ROUNDS_MAX):
            left = [item.staged for item in items if not self._is_well(item.staged)]
            unknown = self._exchange(left) if left else []
            for staged in left:
                staged.unsure = staged.unsure and not self._is_well(staged)  # what answers has done what came before
            if unknown:
                await self.core.segments.servers.probe(unknown)
            elif all(map(self._is_well, left)) or not await self._has_more_slabs(1 << number):
                return

    async def _has_more_slabs(self, count: int) -> bool:
        """This host has up to so many more slabs now that nobody had, in segments that are there. EngineError."""
        with trio.move_on_after(SLABS_SECONDS):
            if self.core.more_slabs is not None and await self.core.more_slabs(count):
                await self._make_segments()
                return True
        return False

    def _is_well(self, staged: Staged) -> bool:
        return all(self._answers(addr, size) for addr, size, _ in staged.slots)

    def _answers(self, addr: int, size: int) -> bool | None:
        """True without a word of segments that are to be made, while nothing is late."""
        segment, offset = self.core.locate(addr)
        said = self.core.segments.servers.answers(segment, offset, size)
        return said if said is not None or segment in self.core.made_segments else False

    def _exchange(self, left: Sequence[Staged]) -> list[tuple[int, int, int]]:
        """Give them slots that are known to answer. Returns places to be asked about, if there are too few."""
        unknown: dict[tuple[int, int], tuple[int, int, int]] = {}
        for size in {size for staged in left for _, size, _ in staged.slots}:
            bad = [
                (staged, number)
                for staged in left
                for number, slot in enumerate(staged.slots)
                if slot.size == size and not self._answers(slot.addr, size)
            ]
            addresses = [staged.slots[number].addr for staged, number in bad if not staged.unsure]
            for addr in [*addresses, *islice(self.core.slabs.free_slots(size), WALK_MAX)]:
                if not bad or len(unknown) >= PROBED_MAX:
                    break
                said = self._answers(addr, size)
                if said:
                    self._replace(*bad.pop(), addr)
                elif said is None:
                    segment, offset = self.core.locate(addr)
                    unknown[segment, offset // max(self.core.segments.limits.part_size, 1)] = segment, offset, size
        return [] if all(map(self._is_well, left)) else list(unknown.values())

    def _replace(self, staged: Staged, number: int, addr: int) -> None:
        old = staged.slots[number]
        (self.rest if staged.unsure else self.core.slabs.cancel)([old])
        self.core.slabs.claim(old._replace(addr=addr))
        staged.slots = [*staged.slots[:number], old._replace(addr=addr), *staged.slots[number + 1 :]]
        self.moved += 1

    def rest(self, slots: Sequence[Slot]) -> None:
        """Free slots to which a write may still be on its way, when that can be no more."""
        ledger, answers = self.core.slabs.ledger, self.core.segments.servers.answers
        ready: list[Slot] = []
        for addr, size, owner in slots:
            if owner and ledger is not None:
                ledger.charge(owner, -size)
            is_silent = answers(*self.core.locate(addr), size) is False
            (self._resting if is_silent else ready).append(Slot(addr, size))
        self.core.grace.later(self.core.slabs.cancel)(ready)

    async def run(self) -> None:
        """Free what has rested, and make segments ahead, until cancelled. Returns where nothing is known of servers."""
        while self.core.segments.limits.part_size:
            await trio.sleep(LOOK_SECONDS)
            resting, self._resting = self._resting, []
            self.rest(resting)
            try:
                await self._make_segments()
            except EngineError as error:
                log.info("segments are made later: %s", error)

    async def _make_segments(self) -> None:
        """Those of free slabs."""
        await self.core.make_segments(
            {slab // self.core.geometry.segment_slabs for slab in self.core.slabs.free_slabs()}
        )
