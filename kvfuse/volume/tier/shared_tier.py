"""The shared-memory tier: copies of whole files in memory that clients may map, read-only.

The memory is cut into *arenas*, one file each. An arena has slots of one size, and blocks of one *read class*: a
client maps an arena as a whole, which it may because whoever may read one block in it may read all of them. Before
other people than until now may use the directory, its arenas are *retired*: later blocks go to others. Only the daemon
maps an arena writable (`revocable`). Numbers of arenas are never used again, and an arena that a client may have mapped
never serves another read class: when it is given back its memory is taken from all who have it mapped.

A block is free when nobody holds it, or a view of its bytes, any more: the cache here (`keep`), a staged write, a
row of a content map, a client's pin. Its slot then comes back by way of a queue, as that may happen in any thread
at any time. Everything here may be called from any thread, and waits for nothing but a short lock.

Arenas outlive the daemon where a keeper has them: `adopt`. Blocks of the daemon before this one are in ``left`` until
they were compared with the records of their files. What clients of that daemon may hold stays as it is until that is
known (`pins_are_known`).

Which blocks go is decided as in S3-FIFO (`policy/hot`), for each size and read class: what is stored or loaded and then
read at most once takes the places of its like alone. Readers note their uses in the block, without the lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from kvfuse.errors import NotFound
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.policy.hot import Recent
from kvfuse.volume.tier.arena_pool import ARENAS_MAX, SLOT_ALIGNMENT, ArenaPool, Describe
from kvfuse.volume.tier.arena_rows import packed_token
from kvfuse.volume.tier.arenas import ReadClass, TierBlock
from kvfuse.volume.tier.kept_arenas import ArenaRestoration, KeptArena, MayAdopt, drop_left
from kvfuse.volume.tier.placement import ANYWHERE, Placement
from kvfuse.volume.tier.revocable import Supply
from kvfuse.volume.tier.tier_books import TierBooks
from kvfuse.volume.tier.validity import Validity

FREED_IN_TURN = 32 << 20
"""bytes of an arena that has ended, which go in one pass of the event loop: 10 ms"""

__all__ = ["ARENAS_MAX", "ReadClass", "SharedTier", "TierBlock", "TierStatistics"]


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
    adopted: int
    """blocks that the daemon before this one left, when this one began"""
    adoption_seconds: float


class OtherArenas(Protocol):
    """Arenas with numbers of the tier that are not the tier's: those of the block store."""

    def adopt_pin(self, number: int, offset: int, size: int) -> Any:
        """As `SharedTier.adopt_pin`."""

    def pins_are_known(self) -> None:
        """As of the tier."""


class SharedTier:
    """Arenas and their blocks; the volume owns it. ``capacity``: bytes of memory; 0: there is no tier.

    ``keeper``: keeps the arenas for the daemon after this one.
    """

    def __init__(self, capacity: int, placement: Placement = ANYWHERE, keeper: Keeper = NO_KEEPER) -> None:
        self.capacity = capacity
        recent = Recent()
        self._pool = ArenaPool(capacity, placement, recent, keeper)
        self._books = books = TierBooks(self._pool, recent)
        self._lock = threading.Lock()
        self.evicted = books.evicted
        """inodes whose blocks had to go, or are elsewhere, for who may hold them"""
        self.on_news: Callable[[], None] = lambda: None
        """called, in any thread, after something was put into ``evicted``, or there is something to tell the keeper"""
        self.kept = books.kept
        """inode -> its block; for looks without the lock"""
        self.left = books.left
        """inode -> what the daemon before this one left as its block, and nobody has compared with its record yet"""
        self.validity = Validity()
        self.others: OtherArenas | None = None

    # -- blocks --------------------------------------------------------------------------------------

    def allocate(self, size: int, read_class: ReadClass) -> TierBlock | None:
        """A block of ``size`` > 0 bytes with any content; None where there is no room for it now."""
        slot_size = -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if slot_size > self.capacity:
            return None
        pool, changes = self._pool, self._books.changes
        with self._lock:
            pool.collect()
            kind = pool.kinds.get((slot_size, read_class)) or pool.kind(slot_size, read_class)
            found = pool.take(kind) or self._books.make_room(kind)
            block = TierBlock(*found, size) if found else None
            if not kind.arenas:
                pool.drop_if_empty(kind)
        if self._books.changes != changes or pool.has_news:
            self.on_news()
        return block

    # -- memory of the block store -------------------------------------------------------------------

    @property
    def supply(self) -> Supply:
        """Makes pieces of shared memory as those of the tier."""
        return self._pool.supply

    def take_number(self) -> int | None:
        """A number for an arena of the block store, which no arena had before. None: `tell_keeper` announces more."""
        with self._lock:
            return self._pool.take_number()

    def lend(self, size: int, *, always: bool = False) -> bool:
        """Have the block store use so many bytes of the tier; blocks of files go for it. False: too much is held.

        ``always``: it uses them anyway.
        """
        with self._lock:
            return self._books.lend(size, always=always)

    def take_back(self, size: int) -> None:
        """The block store uses so many bytes less."""
        with self._lock:
            self._pool.used_bytes -= size

    def keep(self, ino: int, block: TierBlock, name: bytes = b"") -> None:
        """``block`` holds all bytes of file ``ino``: it can be found until room is needed, or it is dropped.

        ``name``: the only one of the file, in the directory of the block's read class; "": clients do not find it.
        """
        with self._lock:
            self._books.enter(ino, block, name)

    def find(self, ino: int) -> TierBlock | None:
        """The block of a file. Whoever then reads it notes the use."""
        with self._lock:
            block = self.kept.get(ino)
            if block is None:
                self._books.counters.misses += 1
                return None
            self._books.counters.hits += 1
            return block

    def is_wanted(self, ino: int) -> bool:
        """A file without a block was asked for; whether it should have one, as it was asked for lately, too."""
        if not self.capacity:
            return False
        with self._lock:
            if ino in self._books.recent:
                return True
            self._books.recent.add(ino, len(self._books))
            return False

    def __contains__(self, ino: int) -> bool:
        """There is a block of the file, which may have to be looked at before it is used. For any thread."""
        return ino in self.kept or ino in self.left.places

    def drop(self, ino: int) -> None:
        """The file has other bytes now, or other readers, or is no more. Clients that hold the block keep it."""
        if ino in self.kept or ino in self.left.places:
            with self._lock:
                self._books.forget(ino)

    def renamed(self, ino: int) -> None:
        """The file has another name in its directory: clients do not find it by that, nor by the former one."""
        with self._lock:
            if (block := self.kept.get(ino)) is not None:
                block.name = b""

    def retire(self, directories: Collection[int] | None, *, left_too: bool = False) -> None:
        """Nothing is added to the arenas of these directories (None: of all) any more: others may use them than until
        now. What is in them is found no more.

        ``left_too``: nor to those that a daemon before this one left, as long as nobody counts changes of folders above
        theirs: a client may have mapped them, and it is not known which folders let it through.
        Nor does the next daemon find them. So it is for the event loop alone, where somebody keeps arenas.
        """
        pool = self._pool
        directories = set(directories) if directories is not None else None
        with self._lock:
            for key, kind in list(pool.kinds.items()):
                is_doubtful = left_too and kind.is_left and kind.ancestors is None
                if is_doubtful or directories is None or kind.read_class.directory in directories:
                    kind.retired, kind.on_return = True, self._hear
                    kind.ancestors = None
                    del pool.kinds[key]
                    self._books.drop_all(list(kind.kept))
            pool.collect()
            retired = pool.give_back_retired()
        pool.forget(retired)
        self.on_news()

    def may_show(self, *, is_unlimited: bool) -> bool:
        """A process may map arenas and indexes. ``is_unlimited``: it could end the daemon anyway."""
        return is_unlimited or self._pool.supply.is_for_all

    def _hear(self) -> None:
        self.on_news()

    def readers_of(self, arena: int) -> tuple[ReadClass, bool] | None:
        """Whose blocks an arena has, and whether it was retired; None: there is no such arena."""
        found = self._pool.arenas.get(arena)
        return (found.kind.read_class, found.kind.retired) if found is not None else None

    def arena_descriptor(self, arena: int, ancestors: object = None) -> int:
        """A new descriptor of an arena, which can only be read, for a client of its read class. NotFound.

        ``ancestors``: of its directory; changes of them count until it is retired.
        """
        with self._lock:
            found = self._pool.arenas.get(arena)
            if found is None:
                raise NotFound(f"arena {arena} is no more")
            found.shared = True
            if not found.kind.retired:
                found.kind.ancestors = ancestors
            return found.memory.piece.open_for_others()

    def statistics(self) -> TierStatistics:
        pool, counters = self._pool, self._books.counters
        with self._lock:
            return TierStatistics(
                self.capacity,
                pool.used_bytes,
                self._books.kept_bytes,
                len(self._books),
                len(pool.arenas),
                counters.hits,
                counters.misses,
                counters.evictions,
                counters.adopted,
                counters.adoption_seconds,
            )

    # -- from one daemon to the next -----------------------------------------------------------------

    def adopt(self, found: Sequence[KeptArena], may_adopt: MayAdopt, began: float | None = None) -> None:
        """Take over what `find_left` found, as far as it may be and has room: once, before anything else, in the event
        loop. The blocks are in ``left`` then. ``began``: by `perf_counter`, when the search did."""
        began = perf_counter() if began is None else began
        adoption = ArenaRestoration(self._pool)
        drop_left(self._pool.keeper, [left for left in found if left.has_ended])
        for left in found:
            is_adopted = may_adopt(left.facts.read_class, left.facts.regime) and adoption.add(left)
            if not is_adopted and not left.has_ended:
                adoption.hold(left, self._hear)
        self._books.kept_bytes = adoption.end(self.left, self._books.of)
        self._books.clock = itertools.count(1 + max((left.used_at for left in found), default=0))
        self._books.counters.adopted = len(self.left)
        self._books.counters.adoption_seconds = perf_counter() - began

    def look_at_left(self, ino: int) -> TierBlock | None:
        """What is left as the block of a file, for a look at it. Nobody else may see it before `admit`."""
        with self._lock:
            left = self.left.get(ino)
            return left.made() if left is not None else None

    def admit(self, ino: int, block: TierBlock, name: bytes = b"") -> bool:
        """``block``, which was left, has all bytes of the file, and its readers. False: it was dropped meanwhile.

        ``name``: as in `keep`.
        """
        with self._lock:
            return self._books.admit(ino, block, name)

    def note_packed(self, ino: int, index: int, addr: int, generation: int) -> None:
        """A chunk of a file that has a block was stored compressed, in this slot."""
        if ino in self.kept and self._pool.keeper.outlives:
            with self._lock:
                self._books.note_packed(ino, packed_token(index, addr, generation))

    def tell_keeper(self, describe: Describe) -> None:
        """Have new arenas kept for the next daemon, and others no more. Event loop only."""
        self._pool.tell_keeper(describe)

    def settle(self) -> None:
        """Give back arenas that nobody needs any more, and take some memory back of those that ended."""
        pool = self._pool
        with self._lock:
            pool.collect()
            if pool.ended:
                pool.free_some(FREED_IN_TURN)
        if pool.has_news:
            self.on_news()

    def free_touched(self, *, looks_only: bool = False) -> bool:
        """Take back some memory that readers of arenas have touched where no block is. False: there is none.

        ``looks_only``: leave it there; that takes a microsecond an arena.
        """
        with self._lock:
            return self._pool.free_touched(looks_only=looks_only)

    def adopt_pin(self, arena: int, offset: int, size: int) -> Any:
        """What a client of the daemon before this one goes on to hold: any bytes of one slot, also of a block that was
        dropped. None: there is no such arena any more, and nobody writes there.

        Until `pins_are_known`, which holds for all clients, no slot that was in use is used again.
        """
        with self._lock:
            block = self._books.pin(arena, offset, size)
        return self.others.adopt_pin(arena, offset, size) if block is None and self.others is not None else block

    def pins_are_known(self) -> None:
        """`adopt_pin` was called for all that clients hold: use other slots, give back arenas that nobody needs.

        It may be called again, without effect.
        """
        pool = self._pool
        if self.others is not None:
            self.others.pins_are_known()
        if not pool.knows_pins:
            with self._lock:
                self._books.pins.clear()
                pool.pins_are_known()
            if pool.has_news:
                self.on_news()
