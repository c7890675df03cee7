"""Eviction: files of caches are removed, in the order of their policies, where their room is needed.

It runs ahead of need: above the high water mark files go until the low one is reached. A call that finds no room all
the same has more removed (`Evictor.make_room`, a source of `Space`). Files that somebody has open or writes are kept,
and offered again later. Most of the others vanish in bulk, without an inode in memory (`Pending.vanish`); those that
have other records, or pending changes, are unlinked as if a user did it. The kernel is told of names that it may know.

The books of a cache begin empty. After a mount a task reads the names that the store has, oldest use first.

Where many hosts have the volume, files go in another way, and a host has some of them on its books: `shared_eviction`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from stat import S_ISREG
from typing import Protocol

import trio

from kvfuse import errors
from kvfuse.remote.records.api import Record
from kvfuse.slab.allocator import Slot
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.eviction.shared_eviction import Ahead, SharedEviction
from kvfuse.volume.eviction.shared_sweeping import SharedSweeper
from kvfuse.volume.eviction.slab_eviction import SlabChoice
from kvfuse.volume.eviction.stored_blocks import read_blocks
from kvfuse.volume.eviction.sweeping import Sweeper
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import Dentries
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.cache import Cache, Candidate, is_back
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import schema
from kvfuse.volume.views.news import NameEvent

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""between looks at uses that ring threads noted, where nothing is stored"""
PAUSE_SECONDS = 0.02
"""after a look, so that the next one has many blocks to see to"""
BATCH_SIZE_MIN, BATCH_SIZE_MAX = 4 << 20, 256 << 20
"""bytes that one step of an eviction frees"""
PORTION_MAX = 0.99
"""share of a quota that is left at the most where it was used up"""
SWEEP_SECONDS = 1.0
"""How long a call that needs room waits for a part of the cleared files to be removed."""
REMOVED_PER_TURN = 64
"""files that are removed before other tasks may run"""
_TAKES_UNLINK = schema.FLAG_XATTRS | schema.FLAG_CHUNK_RECORDS
"""of inodes that have other records, too"""


class WaterMarks(Protocol):
    """Shares of a capacity between which evictions begin and end."""

    @property
    def low_water(self) -> float: ...

    @property
    def high_water(self) -> float: ...


@dataclass
class Evictor:
    """Evicts files of all caches of a volume. Each membership has one. Event loop only."""

    core: Core
    journal: Journal
    lookup: Lookup
    names: Names
    news: KernelNews
    shared: SharedEviction | None = None
    """what is otherwise where many hosts have the volume"""

    def __post_init__(self) -> None:
        own = Sweeper(self.core, self.journal, self.names, self.news, self._vanish)
        self.sweeper: Sweeper | SharedSweeper = own if self.shared is None else self.shared.sweeper
        self._lock = trio.Lock()
        """held by one eviction"""
        self._steps = 0
        """of evictions that removed something"""
        size = self.core.geometry.data_size
        shift = 6 if self.shared is None else 9
        self._batch_size = min(max(size >> shift, BATCH_SIZE_MIN), BATCH_SIZE_MAX, max(size >> 4, 1))
        self._ahead = Ahead(self.core, self._batch_size, lambda: self.core.part().size)
        self._choice = SlabChoice(self.core)
        self._running = trio.CancelScope()
        self._is_over = False

    async def stop(self) -> None:
        """Evict nothing any more: this client leaves. Returns when no eviction is under way."""
        self._is_over = True
        self._running.cancel()
        async with self._lock:
            pass

    async def run(self) -> None:
        """Follow uses, and keep below the water marks, until cancelled or `stop`; may be begun anew."""
        if not self._is_over:
            with trio.CancelScope() as self._running:
                await self._follow()

    async def _follow(self) -> None:
        namespaces = self.core.namespaces
        while True:
            with trio.move_on_after(LOOK_SECONDS if self.core.caches or namespaces.cleared else math.inf):
                await namespaces.changed.wait()
            namespaces.changed = trio.Event()
            if self.core.caches or namespaces.cleared:  # what was cleared may be no cache any more
                try:
                    await self._look()
                except errors.OperationError as error:
                    log.warning("eviction is late: %s", error)
                    await trio.sleep(LOOK_SECONDS)
            await trio.sleep(PAUSE_SECONDS)

    async def _look(self) -> None:
        for number in list(self.core.namespaces.cleared):
            await self.sweeper.sweep(number)
        if self.shared is not None:
            await self.shared.read_new_slabs()
            self._ahead.look()
        elif unread := [number for number, cache in self.core.caches.items() if not cache.before.is_known]:
            await _store_closed(self.journal)
            await read_blocks(self.core, unread, lambda slab: True)
        self._take_uses()
        await self._remove_expired()
        for account in list(self.core.namespaces.accounts.all.values()):
            excess = account.excess if self.shared is None else partial(self.shared.excess_in, account)
            await self._keep_below(excess, account.settings, account.number)
        accounts = self.core.namespaces.accounts
        if accounts.root_blocks:
            await self._keep_below(lambda mark: accounts.root.excess(mark), accounts.root.settings, ROOT)
        await self._keep_below(self._excess, self.core.namespaces, None)

    async def _keep_below(self, excess: Callable[[float], int], marks: WaterMarks, namespace: int | None) -> None:
        """Evict down to the low water mark, if the high one is reached, in a namespace or (None) in the volume.

        ``excess``: bytes above a mark. Of a large cache what is stored meanwhile is left to the next time, up to half
        of what is between both marks: to go after each handful would take a commit for each.
        """
        low, high = marks.low_water, marks.high_water
        if (above_high := excess(high)) <= 0:
            return
        between = excess(low) - above_high
        left = between // 2 if between >= BATCH_SIZE_MIN else 0
        while (size := excess(low)) > left and await self.evict_some(min(size, self._batch_size), namespace):
            self._take_uses()

    async def _remove_expired(self) -> None:
        for number, cache in list(self.core.caches.items()):
            namespace = self.core.namespaces.all.get(number)  # it may have gone while files of another were removed
            ttl = namespace.settings.ttl if namespace is not None else 0
            if ttl and (candidates := cache.expired(ttl)):
                async with self._lock:
                    await self._evict(cache, candidates, "expired")
                if self.shared is None:
                    await self.journal.free_given_up(math.inf, None)

    def _excess(self, mark: float) -> int:
        """Bytes above a water mark, or that are missing ahead of need; not above 0: none."""
        part = self.core.part()
        return part.used - min(int(part.size * mark), part.size - self._ahead.size)

    def _take_uses(self) -> None:
        """Tell the caches what ring threads saw, and have them count what the kernel looked for in vain."""
        for cache in self.core.caches.values():
            cache.settle_looks()
            cache.settle_closed()
        self.core.take_uses()

    # -- room --------------------------------------------------------------------------------------------

    async def make_room(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: evict some files of the largest cache, and free their slots. False: no cache has any to give."""
        if self.core.namespaces.cleared:
            with trio.move_on_after(SWEEP_SECONDS):
                await self.core.namespaces.cleared.swept.wait()
            return True
        if not self.core.caches:
            return False
        if self.shared is not None and self.shared.is_coming(namespace, self._ahead.size):
            return False
        return await self.evict_some(self._portion(namespace), namespace)

    async def hasten(self, deadline: float, namespace: int | None) -> bool:
        """A `Source` without room of its own: a call found none, so evict further ahead of need."""
        account = self.core.namespaces.accounts.all.get(namespace or ROOT)
        if self.core.caches and namespace is None:
            self._ahead.waited()
            self.core.namespaces.changed.set()
        elif self.shared is not None and account is not None:
            self.shared.waited_in(account)
            self.core.namespaces.changed.set()
        return False

    def _portion(self, namespace: int | None) -> int:
        """Bytes to evict at once: where a quota is used up, down to the low water mark, as ahead of need."""
        accounts = self.core.namespaces.accounts
        account = accounts.all.get(namespace or ROOT) or accounts.root
        excess = account.excess(min(account.settings.low_water, PORTION_MAX))
        return min(self._batch_size, excess) if excess > 0 else self._batch_size

    async def evict_some(self, size: int, namespace: int | None = None) -> bool:
        """Evict files of ``size`` bytes, in a namespace (None: anywhere).

        True: some went, in this call or in one that it waited for.
        """
        if self._is_over:
            return False
        step = self._steps
        async with self._lock:
            if self._steps != step:
                return True
            if namespace is None and self.shared is None and (slabs := self._choice.choose(size)):
                await self._empty(slabs)
                await self.journal.free_given_up(math.inf, None)
                self._steps += 1
                return True
            for cache in self._caches_in(namespace):
                if await self._evict_from(cache, size):
                    if self.shared is None:
                        await self.journal.free_given_up(math.inf, namespace)
                    self._steps += 1
                    return True
        return False

    async def empty_slabs(self, slabs: Collection[int]) -> None:
        """Evict all blocks that begin in these slabs, but for those that are to be kept. EngineError."""
        async with self._lock:
            await self._empty(slabs)

    async def _empty(self, slabs: Collection[int]) -> None:
        for cache in list(self.core.caches.values()) if not self._is_over else ():
            if candidates := cache.in_slabs(slabs):
                await self._evict(cache, candidates, "room")

    def _caches_in(self, namespace: int | None) -> list[Cache]:
        """The largest first, those that are pinned after all others."""
        namespaces, caches = self.core.namespaces, self.core.caches
        numbers = [one for one in caches if namespace is None or namespaces.accounts.is_within(one, namespace)]
        numbers.sort(key=lambda one: (namespaces.all[one].settings.soft_pin, -caches[one].policy.size))
        return [caches[one] for one in numbers]

    async def _evict_from(self, cache: Cache, size: int) -> int:
        """How many files went."""
        count = 0
        self.core.tell_uses()
        while count == 0 and (candidates := cache.candidates(size)):
            count = await self._evict(cache, candidates, "room")
        return count

    async def _evict(self, cache: Cache, candidates: list[Candidate], reason: str) -> int:
        """Remove candidates, and tell their cache: how many went. EngineError: the others stay on its books."""
        try:
            return await self._evict_or_keep(cache, candidates, reason)
        finally:  # the caller may also be cancelled
            cache.interrupted(candidates)

    async def _evict_or_keep(self, cache: Cache, candidates: list[Candidate], reason: str) -> int:
        """If none go, names that were not stored are, first."""
        kept, unstored = await self._remove(cache, candidates, reason)
        if len(kept) + len(unstored) == len(candidates) and unstored:
            await self.journal.commit(*_unstored_files(self.core.dentries, unstored))
            more_kept, unstored = await self._remove(cache, before := unstored, reason)
            late, absent = _late_and_absent(self.core.dentries, unstored)
            cache.absent(absent)
            cache.kept(kept + more_kept + late)
            return len(before) - len(more_kept) - len(unstored)
        cache.kept(kept + unstored)
        return len(candidates) - len(kept) - len(unstored)

    async def _remove(
        self, cache: Cache, candidates: list[Candidate], reason: str
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Remove files. Returns those that are to be kept, and those whose names the store does not know (yet)."""
        if self.shared is not None:
            return await self.shared.remove(cache, candidates, reason, self._unlink)
        kept: list[Candidate] = []
        unstored: list[Candidate] = []
        for start in range(0, len(candidates), REMOVED_PER_TURN):
            part = candidates[start : start + REMOVED_PER_TURN]
            rows = await self._rows_of(part)
            epoch = self.journal.pending.epoch
            for candidate, row in zip(part, rows, strict=True):
                if is_back(cache, candidate):
                    kept.append(candidate)
                elif row is None:
                    unstored.append(candidate)
                elif (epoch == self.journal.pending.epoch and self._vanish_evicted(row)) or await self._unlink(row):
                    cache.evicted(candidate.victim, reason)
                else:
                    kept.append(candidate)
            self._touch_directories({one.directory for one in part})
            await trio.lowlevel.checkpoint()
        return kept, unstored

    async def _rows_of(self, candidates: list[Candidate]) -> list[Record | None]:
        """The records of their names as they are until the next await, or as memory knows better."""
        prefixes = [schema.entry_key(one.directory, b"", one.cookie) for one in candidates]
        while True:
            epoch = self.journal.pending.epoch
            rows = await self.core.records.seek(prefixes)
            if epoch == self.journal.pending.epoch:
                return rows

    def _vanish_evicted(self, row: Record) -> bool:
        """`_vanish`, and tell those who follow the directory."""
        if not self._vanish(row):
            return False
        directory, _, name = schema.split_entry_key(row.key)
        self.core.namespaces.news.tell(directory, NameEvent.REMOVED, name)
        return True

    def _vanish(self, row: Record) -> bool:
        """Remove a file that nobody has open or changes. False: it takes an unlink."""
        core = self.core
        record, (directory, _, name) = schema.decode_entry(row.value), schema.split_entry_key(row.key)
        if not isinstance(record, schema.InodeRecord) or record.flags & _TAKES_UNLINK or not S_ISREG(record.mode):
            return False
        node, dentries = core.nodes.get(record.ino), core.dentries
        if (node is not None and node.busy) or record.ino in core.nodes.handover.still_open:
            return False
        if dentries.get(directory, name).change is not None or (directory, name) in dentries.vanishing.places:
            return False
        slabs, namespace = core.slabs, record.namespace
        slots = [Slot(one.addr, slabs.slot_size(one.addr), namespace) for chunk in record.chunks for one in chunk]
        if not all(slabs.is_durable(slot.addr) for slot in slots):
            return False  # damaged: an unlink says so
        if core.places.known(
            record.ino
        ):  # the kernel may be about to open it: it then finds it removed, and looks anew
            self.news.name(directory, name)
        core.tier.drop(record.ino)
        self.journal.pending.vanish(row.key, (directory, name), namespace, tuple(slots))
        if node is not None:
            node.nlink, node.reaped = 0, True  # whoever still has it (access times are noted late) finds it removed
            core.nodes.drop(node)
            node.end_map()
        core.counters.removes += 1
        return True

    def _touch_directories(self, inos: set[int]) -> None:
        for ino in inos:
            directory = self.core.nodes.peek(ino)
            if directory is not None:
                self.names.memory.touch_entries(directory)

    async def _unlink(self, row: Record) -> bool:
        """Unlink a file and free it at once. False: somebody has it open, or it is no file any more."""
        directory, _, name = schema.split_entry_key(row.key)
        node = (await self.lookup.find_name(directory, name)).node
        if node is None or not node.is_file or node.handles or node.lock is not None:
            return node is None
        try:
            _, node = await self.names.unlink(directory, name)
        except (errors.NotFound, errors.IsADirectory):
            return True
        if self.core.places.known(node.ino):
            self.news.name(directory, name)
        if node.ino in self.core.unnamed and not node.handles:
            self.names.nameless.reap(node)
        return True


async def _store_closed(journal: Journal) -> None:
    """Store the names of all files that nobody writes: books that a cache begins anew know of no pending ones."""
    nodes = *journal.pending.dirty, *journal.pending.aside.nodes
    closed = [node for node in nodes if node.is_file and not node.writers]
    if closed or journal.is_committing:
        await journal.commit(*closed)


def _unstored_files(dentries: Dentries, unstored: list[Candidate]) -> list[Node]:
    """The files of these names, but for those that are being written again."""
    places = {(one.directory, one.cookie) for one in unstored}
    return [
        change.node
        for ino in {one.directory for one in unstored}
        for name, change in dentries.changes_in(ino).items()
        if change.node is not None and not change.node.writers and (ino, schema.name_hash(name)) in places
    ]


def _late_and_absent(dentries: Dentries, unstored: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Files that a later commit stores, as their bytes were not in slots; and those that are there no more."""
    directories = {one.directory for one in unstored}
    coming = {(ino, schema.name_hash(name)) for ino in directories for name in dentries.changes_in(ino)}
    late = [one for one in unstored if (one.directory, one.cookie) in coming]
    return late, [one for one in unstored if (one.directory, one.cookie) not in coming]
