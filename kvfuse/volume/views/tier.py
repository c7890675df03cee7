"""The shared-memory tier: copies of whole files in memory that clients may map, read-only.

The memory is cut into *arenas*, one memfd each. An arena has slots of one size, and blocks of one *read class*: a
client maps an arena as a whole, which it may because whoever may read one block in it may read all of them. The
daemon maps an arena writable and then seals it: nobody else can, whoever he is. Numbers of arenas are never used
again, and an arena that a client may have mapped never serves another read class.

A block is free when nobody holds it, or a view of its bytes, any more: the cache here (`keep`), a staged write, a
row of a content map, a client's pin. Its slot then comes back by way of a queue, as that may happen in any thread
at any time. Everything here may be called from any thread, and waits for nothing but a short lock.

Which blocks go is decided as in S3-FIFO (`policy/hot`), for each size and read class: what is stored or loaded and then
read at most once takes the places of its like alone. Readers note their uses in the block, without the lock.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvfuse.errors import NotFound
from kvfuse.policy.hot import Recent
from kvfuse.volume.views.arenas import Arena, Kind, Memory, ReadClass, TierBlock
from kvfuse.volume.views.placement import ANYWHERE, Placement
from kvfuse.volume.views.resident import Residents, Shown

__all__ = ["ReadClass", "SharedTier", "TierBlock", "TierStatistics"]

ARENA_SIZE = 64 << 20
"""Bytes of an arena, about; more where one slot is larger. Memory is used as it is touched."""
ARENAS_MAX = 256
"""Each takes a descriptor."""
SLOT_ALIGNMENT = 4096
EVICTIONS_MAX = 16
"""Blocks that make room in one call: those that somebody still holds free nothing yet."""


class TierStatistics(NamedTuple):
    """Of the tier; sizes in bytes."""

    capacity: int
    used_bytes: int
    """memory that was touched"""
    kept_bytes: int
    """of blocks that can be found"""
    blocks: int
    arenas: int
    hits: int
    misses: int
    evictions: int


@dataclass(slots=True)
class _Counters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class SharedTier:
    """Arenas and their blocks; the volume owns it. ``capacity``: bytes of memory; 0: there is no tier."""

    def __init__(self, capacity: int, placement: Placement = ANYWHERE) -> None:
        self.capacity = capacity
        self._placement = placement
        self.evicted: deque[int] = deque()
        """inodes whose blocks had to go, for who may hold them elsewhere"""
        self.on_eviction: Callable[[], None] = lambda: None
        """called, in any thread, after something was put into ``evicted``"""
        self._lock = threading.Lock()
        self._kinds: dict[tuple[int, ReadClass], Kind] = {}
        self.kept: dict[int, TierBlock] = {}
        """inode -> its block; for looks without the lock"""
        self._recent = Recent()
        """inodes that were read, or evicted, lately, and have no block"""
        self._arenas: dict[int, Arena] = {}
        self._returned: deque[tuple[Arena, int]] = deque()
        self._clock = itertools.count(1)
        """also numbers the arenas"""
        self._used_bytes = self._kept_bytes = 0
        self._counters = _Counters()

        def note_use(ino: int) -> None:
            if (block := self.kept.get(ino)) is not None:
                block.note_use()

        self.residents = Residents(note_use)

    # -- blocks --------------------------------------------------------------------------------------

    def allocate(self, size: int, read_class: ReadClass) -> TierBlock | None:
        """A block of ``size`` > 0 bytes with any content; None where there is no room for it now."""
        slot_size = -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if slot_size > self.capacity:
            return None
        evictions = self._counters.evictions
        with self._lock:
            self._collect()
            kind = self._kinds.get((slot_size, read_class))
            if kind is None:
                kind = self._kinds[slot_size, read_class] = Kind(slot_size, read_class, self._recent)
            found = self._take(kind) or self._make_room(kind)
            block = TierBlock(*found, size) if found else None
            if not kind.arenas:
                self._kinds.pop((slot_size, read_class), None)
        if self._counters.evictions != evictions:
            self.on_eviction()
        return block

    def keep(self, ino: int, block: TierBlock, name: bytes = b"") -> None:
        """``block`` holds all bytes of file ``ino``: it can be found until room is needed, or it is dropped.

        ``name``: the only one of the file, in the directory of the block's read class; "": clients do not find it.
        """
        arena = block.home
        with self._lock:
            if ino in self.kept:
                self._forget(ino)
            if arena.kind.retired:
                return
            self.kept[ino] = block
            block.name = name
            self.residents.show(name, ino, block)
            arena.kind.kept.add(ino, block)
            self._kept_bytes += block.size
            arena.kept_count += 1
            block.kept_at = arena.used_at = next(self._clock)

    def find(self, ino: int) -> TierBlock | None:
        """The block of a file. Whoever then reads it notes the use."""
        with self._lock:
            block = self.kept.get(ino)
            if block is None:
                self._counters.misses += 1
                return None
            self._counters.hits += 1
            return block

    def is_wanted(self, ino: int) -> bool:
        """A file without a block was asked for; whether it should have one, as it was asked for lately, too."""
        if not self.capacity:
            return False
        with self._lock:
            if ino in self._recent:
                return True
            self._recent.add(ino, len(self.kept))
            return False

    def drop(self, ino: int) -> None:
        """The file has other bytes now, or other readers, or is no more. Clients that hold the block keep it."""
        if ino in self.kept:
            with self._lock:
                self._forget(ino)

    def renamed(self, ino: int) -> None:
        """The file has another name in its directory: clients do not find it by that, nor by the former one."""
        with self._lock:
            self.residents.hide(ino)
            if (block := self.kept.get(ino)) is not None:
                block.name = b""

    def clear(self) -> None:
        """Any file may have changed."""
        with self._lock:
            for ino in list(self.kept):
                self._forget(ino)

    def retire(self, directory: int | None) -> None:
        """Nothing is added to the arenas of a directory (None: of all) any more: others may use it than until now."""
        self.residents.end(directory)
        with self._lock:
            for key, kind in list(self._kinds.items()):
                if directory in (None, kind.read_class.directory):
                    kind.retired = True
                    del self._kinds[key]
                    for ino in list(kind.kept):
                        self._forget(ino)
            self._collect()
            for arena in list(self._arenas.values()):
                if arena.kind.retired and not arena.leased_count:
                    self._give_back(arena)

    def blocks_of(self, readers: ReadClass) -> list[Shown]:
        """(name, inode, block) of the blocks of a read class; a name may mean something else by now."""
        with self._lock:
            kinds = [kind for (_, own), kind in self._kinds.items() if own == readers]
            return [(self.kept[ino].name, ino, self.kept[ino]) for kind in kinds for ino in kind.kept]

    def read_classes(self) -> dict[int, ReadClass]:
        """Arena -> whose blocks it has."""
        with self._lock:
            return {number: arena.kind.read_class for number, arena in self._arenas.items()}

    def arena_descriptor(self, arena: int) -> int:
        """A new descriptor of an arena, which can only be read, for a client of its read class. NotFound."""
        with self._lock:
            found = self._arenas.get(arena)
            if found is None:
                raise NotFound(f"arena {arena} is no more")
            found.shared = True
            return os.open(f"/proc/self/fd/{found.memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                self.capacity,
                self._used_bytes,
                self._kept_bytes,
                len(self.kept),
                len(self._arenas),
                self._counters.hits,
                self._counters.misses,
                self._counters.evictions,
            )

    # -- under the lock ------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Let slots be used again that nobody holds any more."""
        while self._returned:
            arena, slot = self._returned.popleft()
            arena.leased_count -= 1
            if not arena.kind.retired:
                arena.kind.free.append((arena, slot))
            elif not arena.leased_count:
                self._give_back(arena)

    def _forget(self, ino: int) -> None:
        block = self.kept.pop(ino, None)
        if block is not None:
            self.residents.hide(ino)
            block.home.kind.kept.remove(ino)
            block.home.kept_count -= 1
            self._kept_bytes -= block.size

    def _take(self, kind: Kind) -> tuple[Arena, int] | None:
        """A free slot, one that was never used, or the first one of a new arena: if there is memory for it."""
        if kind.free:
            arena, slot = kind.free.pop()
        else:
            unused = next((arena for arena in kind.arenas if arena.has_unused), None)
            new = unused or self._add_arena(kind)
            if new is None or not self._touch(new):
                return None
            arena, slot = new, new.touched - 1
        arena.leased_count += 1
        return arena, slot

    def _touch(self, arena: Arena) -> bool:
        """Take one slot more of an arena into use. False where that is too much memory."""
        end = (arena.touched + 1) * arena.kind.slot_size
        added = max(0, self._resident_to(end, len(arena.memory.bytes)) - arena.memory.resident)
        if self._used_bytes + added > self.capacity:
            return False
        self._used_bytes += added
        arena.memory.resident += added
        arena.touched += 1
        return True

    def _resident_to(self, end: int, size: int) -> int:
        """Bytes of memory of ``size`` that are taken when those before ``end`` were touched."""
        page_size = self._placement.page_size
        return min(-(-end // page_size) * page_size, size)

    def _add_arena(self, kind: Kind, memory: Memory | None = None) -> Arena | None:
        if memory is None:
            size = max(1, ARENA_SIZE // kind.slot_size) * kind.slot_size
            first = self._resident_to(kind.slot_size, size)
            if len(self._arenas) >= ARENAS_MAX or self._used_bytes + first > self.capacity:
                return None
            memory = Memory(size, self._placement)
        arena = Arena(next(self._clock), kind, memory, self._returned)
        kind.arenas.append(arena)
        self._arenas[arena.number] = arena
        return arena

    def _make_room(self, kind: Kind) -> tuple[Arena, int] | None:
        """Evict what is used least: blocks of this kind, or a whole arena of another one."""
        self.residents.sample()
        evictions_left = EVICTIONS_MAX
        while evictions_left:
            ino = kind.kept.next_to_go()
            other = self._idle_arena(kind, self.kept[ino].kept_at if ino is not None else None)
            if other is not None:
                evictions_left -= other.leased_count > 0
                self._evict([ino for ino in other.kind.kept if self.kept[ino].home is other])
                self._collect()
                if not other.leased_count:
                    self._reassign(other, kind)
            elif ino is not None:
                evictions_left -= 1
                self._evict([ino])
                self._collect()
            else:
                return None
            if found := self._take(kind):
                return found
        return None

    def _idle_arena(self, kind: Kind, before: int | None) -> Arena | None:
        """The arena of another kind that nobody but the cache holds, and that was not used since ``before``.

        One whose blocks were read is spared a few times, so that blocks that are stored and never read go before it.
        """
        for _ in range(ARENAS_MAX):
            found = self._oldest_arena(kind, before)
            if found is None or before is None or not found.uses or not found.leased_count:
                return found
            found.uses -= 1
            found.used_at = next(self._clock)
        return None

    def _oldest_arena(self, kind: Kind, before: int | None) -> Arena | None:
        """The same, without regard to reads."""
        found, found_time = None, before
        for arena in self._arenas.values():
            if arena.kind is kind or arena.leased_count != arena.kept_count:
                continue
            time = arena.used_at if arena.leased_count else 0
            if found_time is None or time < found_time:
                found, found_time = arena, time
        return found

    def _evict(self, inos: list[int]) -> None:
        for ino in inos:
            self._forget(ino)
            self._recent.add(ino, len(self.kept))
        self.evicted.extend(inos)
        self._counters.evictions += len(inos)

    def _reassign(self, arena: Arena, kind: Kind) -> None:
        """Let another kind have an arena that is wholly free - unless somebody may have it mapped, or it is too small.

        Its number is not used again, and other readers than before find nothing of what was in it. A kind that has
        slots that were never used needs memory for them, not more of them.
        """
        self._give_back(arena)
        memory = arena.memory
        if arena.shared or len(memory.bytes) < kind.slot_size or any(own.has_unused for own in kind.arenas):
            return
        if arena.kind.read_class != kind.read_class:
            memory.bytes[: memory.resident] = 0
        self._used_bytes += memory.resident
        self._add_arena(kind, memory)

    def _give_back(self, arena: Arena) -> None:
        """An arena that nobody uses is no more; its memory goes when nobody maps it."""
        kind = arena.kind
        kind.free = [entry for entry in kind.free if entry[0] is not arena]
        kind.arenas.remove(arena)
        if not kind.arenas and not kind.retired:
            self._kinds.pop((kind.slot_size, kind.read_class), None)
        del self._arenas[arena.number]
        self._used_bytes -= arena.memory.resident
