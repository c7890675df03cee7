"""The memory of the shared-memory tier: its arenas, which of their slots are free, and who keeps them.

`SharedTier` has the pool, and calls it under its lock; what is for the event loop alone says so.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvfuse.kept.keeper import Keeper
from kvfuse.policy.hot import Recent
from kvfuse.volume.tier.arena_numbers import ArenaNumbers
from kvfuse.volume.tier.arena_rows import ArenaRows
from kvfuse.volume.tier.arenas import Arena, ArenaKind, ArenaMemory, ReadClass
from kvfuse.volume.tier.placement import Placement
from kvfuse.volume.tier.revocable import Supply

ARENA_SIZE = 64 << 20
"""Bytes of an arena, about; more where one slot is larger, or the tier is. Memory is used as it is touched."""
ARENAS_MAX = 256
"""Each takes a few descriptors."""
SLOT_ALIGNMENT = 4096
ARENA_PREFIX = "tier/arena/"
REGIME_SIZE = 16
NO_REGIME = bytes(REGIME_SIZE)
RETIRED = b"\xff" * REGIME_SIZE
"""the regime of no directory: nothing is found in the arena any more, and clients may have it mapped"""
FREED_AT_ONCE = 4 << 20
"""bytes of an arena that has ended, which go while somebody waits for memory: 1 ms"""
_FORM = 2
_FACTS = struct.Struct(f"<IIQQQQII{REGIME_SIZE}s")
"""form, bits of the mode, number, slot size, size, directory, uid, gid, regime"""

Describe = Callable[[int], bytes]
"""directory -> its *regime*: who may use it, in `REGIME_SIZE` bytes; `NO_REGIME`: that is not known"""


class ArenaFacts(NamedTuple):
    """What is kept of an arena, beside its memory and rows."""

    number: int
    slot_size: int
    size: int
    read_class: ReadClass
    regime: bytes

    def pack(self) -> bytes:
        directory, uid, gid, mode = self.read_class
        return _FACTS.pack(_FORM, mode, *self[:3], directory, uid, gid, self.regime)

    @classmethod
    def unpack(cls, content: bytes) -> ArenaFacts:
        """ValueError where these are no facts of this version."""
        if len(content) != _FACTS.size:
            raise ValueError("no facts of an arena")
        form, mode, number, slot_size, size, directory, uid, gid, regime = _FACTS.unpack(content)
        is_sound = form == _FORM and slot_size and not slot_size % SLOT_ALIGNMENT and size >= slot_size
        if not is_sound:
            raise ValueError(f"no facts of an arena of form {_FORM}")
        return cls(number, slot_size, size, ReadClass(directory, uid, gid, mode), regime)


class ArenaPool:
    """Arenas of up to ``capacity`` bytes together. Event loop only, when it is made."""

    def __init__(self, capacity: int, placement: Placement, recent: Recent, keeper: Keeper) -> None:
        self.capacity = capacity
        self.arenas: dict[int, Arena] = {}
        self.kinds: dict[tuple[int, ReadClass], ArenaKind] = {}
        self.returned: deque[tuple[Arena, int]] = deque()
        """slots that nobody holds any more; filled in any thread"""
        self.withheld: set[tuple[Arena, int]] = set()
        """free slots that a client of the daemon before this one may hold, while that is not known"""
        self.used_bytes = 0
        self.ended: deque[Arena] = deque()
        """given back, while somebody may have them mapped: their memory is counted until it was taken back"""
        self.news: deque[int] = deque()
        """numbers of arenas of which the keeper is to hear; appended in any thread"""
        self._undescribed: set[int] = set()
        """those that are kept, though the regime of their directory is not known yet"""
        self.knows_pins = not keeper.outlives
        """what clients hold of the arenas of a daemon before this one is known"""
        self.supply = Supply(placement, keeper)
        self._recent = recent
        self.keeper = keeper
        self._numbers = ArenaNumbers(keeper)

    @property
    def has_news(self) -> bool:
        """The event loop has something to do: `tell_keeper`, or `free_some`."""
        return bool(self.news or self.ended)

    # -- slots ---------------------------------------------------------------------------------------

    def kind(self, slot_size: int, read_class: ReadClass) -> ArenaKind:
        key = slot_size, read_class
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = ArenaKind(slot_size, read_class, self._recent)
        return kind

    def drop_if_empty(self, kind: ArenaKind) -> None:
        if not kind.arenas and not kind.retired:
            self.kinds.pop((kind.slot_size, kind.read_class), None)

    def collect(self) -> None:
        """Let slots be used again that nobody holds any more."""
        while self.returned:
            arena, slot = self.returned.popleft()
            arena.leased_count -= 1
            if arena.is_former and not self.knows_pins:
                self.withheld.add((arena, slot))
            elif not arena.kind.retired:
                arena.kind.free.append((arena, slot))
            elif not arena.leased_count:
                self.give_back(arena)

    def take(self, kind: ArenaKind) -> tuple[Arena, int] | None:
        """A free slot, one that was never used, or the first one of a new arena: if there is memory for it."""
        if kind.free:
            arena, slot = kind.free.pop()
        else:
            unused = next((arena for arena in kind.arenas if arena.has_unused), None)
            new = unused or self._add(kind)
            if new is None or not self._touch(new):
                return None
            arena, slot = new, new.touched - 1
        arena.leased_count += 1
        return arena, slot

    def _touch(self, arena: Arena) -> bool:
        """Take one slot more of an arena into use. False where that is too much memory."""
        end = (arena.touched + 1) * arena.kind.slot_size
        added = max(0, self._resident_to(end, len(arena.memory.bytes)) - arena.memory.resident)
        if not self.has_room(added):
            return False
        self.used_bytes += added
        arena.memory.resident += added
        arena.touched += 1
        if arena.rows is not None:
            arena.rows.touch(arena.touched)
        return True

    def take_number(self) -> int | None:
        """A number for an arena of somebody else. None: the event loop announces more soon."""
        return self._numbers.take() if self._numbers.has_more else None

    def has_room(self, size: int) -> bool:
        """So many bytes more fit into the capacity. Takes back memory of arenas that have ended for them."""
        while self.ended and self.used_bytes + size > self.capacity:
            self.free_some(max(FREED_AT_ONCE, self.used_bytes + size - self.capacity))
        return self.used_bytes + size <= self.capacity

    def _resident_to(self, end: int, size: int) -> int:
        """Bytes of memory of ``size`` that are taken when those before ``end`` were touched."""
        page_size = self.supply.placement.page_size
        return min(-(-end // page_size) * page_size, size)

    # -- arenas --------------------------------------------------------------------------------------

    def _add(self, kind: ArenaKind, memory: ArenaMemory | None = None) -> Arena | None:
        if not self._numbers.has_more:
            return None  # the event loop announces more soon
        if memory is None:
            about = max(ARENA_SIZE, -(-self.capacity // (ARENAS_MAX // 2)))
            size = max(1, about // kind.slot_size) * kind.slot_size
            first = self._resident_to(kind.slot_size, size)
            if len(self.arenas) >= ARENAS_MAX or not self.has_room(first):
                return None
            memory = ArenaMemory(self.supply.make("kvfuse-tier", size), self.supply.placement)
        rows = ArenaRows(len(memory.bytes) // kind.slot_size) if self.keeper.outlives else None
        arena = Arena(self._numbers.take(), kind, memory, self.returned, rows)
        self._enter(arena)
        self._tell_soon(arena.number)
        return arena

    def _enter(self, arena: Arena) -> None:
        arena.kind.arenas.append(arena)
        self.arenas[arena.number] = arena

    def reassign(self, arena: Arena, kind: ArenaKind) -> None:
        """Let another kind have an arena that is wholly free - unless somebody may have it mapped, or it is too small.

        Its number is not used again, and other readers than before find nothing of what was in it. A kind that has
        slots that were never used needs memory for them, not more of them.
        """
        self.give_back(arena)
        memory = arena.memory
        if arena.shared or len(memory.bytes) < kind.slot_size or any(own.has_unused for own in kind.arenas):
            return
        if arena.kind.read_class != kind.read_class:
            memory.bytes[: memory.resident] = 0
        if self._add(kind, memory) is not None:
            self.used_bytes += memory.resident

    def oldest(self, kind: ArenaKind | None, before: int | None) -> Arena | None:
        """The arena of another kind that nobody but the tier holds, and that was not used since ``before``; None: there
        was no such moment."""
        found, found_time = None, before
        for arena in self.arenas.values():
            if arena.kind is kind or arena.leased_count != arena.kept_count or self._may_be_held(arena):
                continue
            time = arena.used_at if arena.leased_count else 0
            if found_time is None or time < found_time:
                found, found_time = arena, time
        return found

    def _may_be_held(self, arena: Arena) -> bool:
        """By a client of the daemon before this one."""
        return arena.is_former and not self.knows_pins

    def pins_are_known(self) -> None:
        self.knows_pins = True
        self.collect()
        for arena, slot in self.withheld:
            if arena.number in self.arenas and not arena.kind.retired:
                arena.kind.free.append((arena, slot))
        self.withheld.clear()
        for arena in list(self.arenas.values()):
            if arena.is_former and not arena.leased_count:
                self.give_back(arena)

    def give_back_retired(self) -> list[Arena]:
        """Of retired kinds, those that nobody holds. Those that are left."""
        left = []
        for arena in [arena for arena in self.arenas.values() if arena.kind.retired]:
            if arena.leased_count or self._may_be_held(arena):
                left.append(arena)
            else:
                self.give_back(arena)
        return left

    def give_back(self, arena: Arena) -> None:
        """An arena that nobody uses is no more. Where somebody may have it mapped, its memory is taken back first."""
        kind = arena.kind
        kind.free = [entry for entry in kind.free if entry[0] is not arena]
        kind.arenas.remove(arena)
        self.drop_if_empty(kind)
        del self.arenas[arena.number]
        if arena.shared:
            self.ended.append(arena)
        else:
            self.used_bytes -= arena.memory.resident
            self._end(arena)

    def free_some(self, size: int) -> None:
        """Take back up to ``size`` bytes of an arena that has ended."""
        arena = self.ended[0]
        memory = arena.memory
        end = memory.resident
        memory.resident -= min(size, end)
        if memory.resident:
            memory.piece.take_back(memory.resident, end)
        else:
            memory.piece.take_back(0, len(memory.bytes))  # and what readers touched elsewhere
            self.ended.popleft()
            self._end(arena)
        self.used_bytes -= end - memory.resident

    def free_touched(self, *, looks_only: bool) -> bool:
        """Take back some pages that readers have touched behind what is in use. False: there are none.

        A process that reads a hole of memory that it has mapped fills it, and the page stays when the process ends.
        """
        for arena in self.arenas.values():
            memory = arena.memory
            pages = memory.piece.next_pages(memory.resident) if arena.shared else None
            if pages is not None:
                if not looks_only:
                    memory.piece.take_back(pages[0], min(pages[1], pages[0] + FREED_AT_ONCE))
                return True
        return False

    def _end(self, arena: Arena) -> None:
        if arena.rows is not None:
            arena.rows.touch(0)  # its memory may be that of another arena soon
        self._tell_soon(arena.number)

    # -- for the daemon after this one ---------------------------------------------------------------

    def _tell_soon(self, number: int) -> None:
        if self.keeper.outlives:
            self.news.append(number)

    def tell_keeper(self, describe: Describe) -> None:
        """Have the new arenas kept, and others no more. Event loop only."""
        if not self.news and not self._undescribed:
            return
        numbers, self._undescribed = dict.fromkeys(self._undescribed), set()
        while self.news:
            numbers[self.news.popleft()] = None
        ended = {arena.number for arena in list(self.ended)}
        for number in numbers:
            arena = self.arenas.get(number)
            if arena is not None:
                self._keep(arena, RETIRED if arena.kind.retired else describe(arena.kind.read_class.directory))
            elif number not in ended:  # the next daemon has to take its memory back, if this one is killed before
                self.keeper.drop(f"{ARENA_PREFIX}{number}")
        self._numbers.announce_more()

    def _keep(self, arena: Arena, regime: bytes) -> None:
        assert arena.rows is not None
        kind, memory = arena.kind, arena.memory
        if regime == NO_REGIME:
            self._undescribed.add(arena.number)
        facts = ArenaFacts(arena.number, kind.slot_size, len(memory.bytes), kind.read_class, regime)
        descriptors = memory.descriptor, memory.piece.readable, arena.rows.descriptor
        self.keeper.keep(f"{ARENA_PREFIX}{arena.number}", facts.pack(), descriptors)

    def forget(self, arenas: Iterable[Arena]) -> None:
        """The next daemon is to find nothing in these. Event loop only, where somebody keeps them."""
        for arena in arenas if self.keeper.outlives else ():
            self._keep(arena, RETIRED)

    def add_left(self, number: int, kind: ArenaKind, memory: ArenaMemory, rows: ArenaRows) -> Arena | None:
        """An arena of the daemon before this one; None: there is no room for it. Of a retired kind there always is."""
        touched = min(rows.touched, len(memory.bytes) // kind.slot_size)
        resident = self._resident_to(touched * kind.slot_size, len(memory.bytes))
        if not kind.retired and (len(self.arenas) >= ARENAS_MAX or self.used_bytes + resident > self.capacity):
            return None
        arena = Arena(number, kind, memory, self.returned, rows)
        arena.is_former = arena.shared = True
        arena.touched = touched
        memory.resident = resident
        self.used_bytes += resident
        self._enter(arena)
        return arena
