"""Block calls of rings: whole files by (directory, name), and bindings of names (`api.BlockApi`)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from stat import S_ISDIR, S_ISREG
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors
from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import DIRECTORIES_MAX, NAME_MAX, ROOT_INODE, VIRTUAL_NAME, Binding, Caller
from kvfuse.volume.blocks.ancestor_search import AncestorSearch
from kvfuse.volume.blocks.outlook import Outlook
from kvfuse.volume.blocks.promotion import Promotion
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.kept_copies import read_class
from kvfuse.volume.content.mapper import Mapper
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.inodes.chunk import Chunk, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.regime import regime_of
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.listing import Listing
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.pages import LEARN_ROWS
from kvfuse.volume.names.plans import Plan
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.slots.space import RoomFinder, RoomWait
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound
from kvfuse.volume.tier.arena_pool import NO_REGIME
from kvfuse.volume.tier.shared_tier import TierBlock
from kvfuse.volume.views.content_map import SIZE_UNKNOWN
from kvfuse.volume.views.handover import DECIDED
from kvfuse.volume.views.news import Watch

log = logging.getLogger(__name__)

PREFETCH_PEERS = 8
"""Blocks that are read into the tier at the same time."""
PAUSE_KEYS = 16
"""keys of one call that are processed before other tasks may run"""
FILES_LOOKED_FOR = 256
"""entries of a directory of blocks that are read at once"""
DELETE_PEERS = 128
"""Names of a call that are removed at the same time: they share round trips to the store, and commits."""


@dataclass
class BlockCounters:
    puts: int = 0
    put_bytes: int = 0
    deletes: int = 0
    asked: int = 0
    """names in calls of ``exists``"""
    prefetches: int = 0


@dataclass
class Blocks:
    """The blocks of one membership, for the event loop only. `Parts` has it."""

    core: Core
    journal: Journal
    flusher: Flusher
    space: RoomFinder
    lookup: Lookup
    names: Names
    reader: Reader
    mapper: Mapper

    def __post_init__(self) -> None:
        self.counters = BlockCounters()
        self.outlook = Outlook(self.core)
        self.promotion = Promotion(self.core, self.reader, self.bind)
        self.search = AncestorSearch(self.core, self.lookup)

    def start(self) -> None:
        """Connect the tier to the event loop: call it there, once, before any use of the tier."""
        token = trio.lowlevel.current_trio_token()

        def in_loop() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self.hear_of_tier, idempotent=True)

        self.core.tier.on_news = in_loop

    # -- bindings ------------------------------------------------------------------------------------

    async def find(self, directory: int, name: bytes) -> Node | None:
        return (await self.lookup.find_name(directory, name)).node

    async def bind(self, directory: int, name: bytes) -> Binding | None:
        dentries = self.core.dentries
        binding = dentries.get(directory, name).binding
        if binding is not None and binding.map.size != SIZE_UNKNOWN:
            return binding
        node = (await self.lookup.find_name(directory, name)).node if len(name) <= NAME_MAX else None
        if node is None or not node.is_file:
            return None
        binding = dentries.get(directory, name).binding
        if binding is not None and binding.map is node.map:
            return binding  # somebody else was faster: whom it was given to may be about to use it
        return dentries.bind(directory, name, node, self.mapper.map_of(node))

    def hear_of_tier(self) -> None:
        """Drop blocks that the tier evicts, and have its arenas kept for the next daemon."""
        evicted = self.core.tier.evicted
        while evicted:
            node = self.core.nodes.get(evicted.popleft())
            if node is not None and node.map is not None:
                node.map.hide_copies()
        self.core.tier.tell_keeper(self._regime)
        self.core.tier.settle()

    def _regime(self, directory: int) -> bytes:
        node = self.core.nodes.get(directory)
        return regime_of(node, self.core.namespaces) if node is not None else NO_REGIME

    def watching(self, directory: int) -> AbstractContextManager[Watch]:
        node = self.core.nodes.get(directory)
        return self.core.namespaces.news.watching(directory, node.namespace if node is not None else ROOT)

    async def listing(self, directory: int, after: int, limit: int) -> tuple[list[bytes], int]:
        if self.core.blocks is not None and await self.block_namespace(directory) is not None:
            return await self.core.blocks.list_names(directory, after, limit)
        entries = await Listing(self.lookup, directory).read_entries(after, limit)
        names = [entry.name for entry in entries if S_ISREG(entry.attributes.mode)]
        return names, entries[-1].cookie if len(entries) >= limit else 0  # a page may have more

    # -- looking -------------------------------------------------------------------------------------

    async def exists(self, directory: int, names: list[bytes]) -> list[bool]:
        began = perf_counter()
        folder = await self.lookup.find_directory(directory)
        self.counters.asked += len(names)
        found = await self._look(directory, names)
        namespace = self.core.namespaces.all.get(folder.namespace)
        if namespace is not None and namespace.settings.recompute_rate and True in found:
            found = await self.outlook.worth(directory, names, found, namespace)
        measures = self.core.namespaces.measures[folder.namespace]
        measures.seconds["exists"].add(perf_counter() - began)
        measures.readers[measures] = began
        return found

    async def costs(self, directory: int, names: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        return await self.outlook.arrivals(directory, names, await self.exists(directory, names))

    async def _look(self, directory: int, names: list[bytes]) -> list[bool]:
        """Without waiting once the directory was read to its end: then by hashes of names, which have 64 bits."""
        dentries, pending = self.core.dentries, self.journal.pending
        while True:
            epoch = pending.epoch
            stored_names = dentries.stored_in(directory)
            if stored_names.complete:
                found = stored_names.contain(names)
            else:
                rows = await get_sound(self.core.records, [schema.entry_key(directory, name) for name in names])
                await self.lookup.learning.read_page(directory, max(LEARN_ROWS, 4 * len(names)))
                if epoch != pending.epoch:
                    continue
                found = [row is not None for row in rows]
                if True in found:
                    self.core.dentries.names_come(directory)
            if changes := dentries.changes_in(directory):
                for index, name in enumerate(names):
                    if (change := changes.get(name)) is not None:
                        found[index] = change.node is not None
            return found

    async def prefetch(
        self, directory: int, names: Sequence[bytes], may_read: Callable[[Binding], bool] = lambda binding: True
    ) -> list[bool]:
        loaded = [False] * len(names)

        async def load(number: int, name: bytes) -> None:
            try:
                loaded[number] = await self._load(directory, name, may_read)
            except errors.OperationError as error:
                log.warning("reading block %r into the tier failed: %s", name, error)

        await _for_each(names, load, PREFETCH_PEERS)
        return loaded

    async def _load(self, directory: int, name: bytes, may_read: Callable[[Binding], bool]) -> bool:
        binding = await self.bind(directory, name)
        node = self.core.nodes.get(binding.ino) if binding is not None else None
        if binding is None or node is None or not may_read(binding):
            return False
        if (present := self.core.tier.find(node.ino)) is not None:
            present.note_use()
            return True
        await self.core.reads.demand.give_way()
        is_there = await self.promotion.bring(node, binding)
        self.counters.prefetches += is_there
        return is_there

    # -- changing ------------------------------------------------------------------------------------

    async def put(self, directory: int, name: bytes, data: memoryview | TierBlock, caller: Caller, mode: int) -> int:
        began = perf_counter()
        self._check(directory, name)
        content = data.buffer.data if isinstance(data, TierBlock) else data
        plan, slots, gone = await self._prepare(directory, name, len(content), mode, caller)
        node, folder = self.names.replace(plan), plan.ends[0].directory
        self._stage(node, content, slots)
        namespace = self.core.namespaces.all.get(node.namespace)
        is_wanted = namespace is None or namespace.settings.tiers in ("all", "dram")
        if is_wanted and isinstance(data, TierBlock) and data.read_class == read_class(node):
            self.core.tier.keep(node.ino, data, name)
        self.counters.puts += 1
        self.counters.put_bytes += len(content)
        if self.names.is_publish_awaited(folder, node):
            with trio.CancelScope(shield=True):  # it is done: the caller has to hear what was replaced
                await self.names.publish(folder, node)
        measures = self.core.namespaces.measures[node.namespace]
        seconds, times = perf_counter() - began, measures.seconds["put"]
        times.counts[bisect_left(times.bounds, seconds)] += 1
        times.sum += seconds
        measures.written_bytes += len(content)
        return plan.unlinked.ino if plan.unlinked is not None else gone

    async def block_namespace(self, directory: int) -> int | None:
        number = (await self.lookup.find_directory(directory)).namespace
        blocks = self.core.blocks
        return number if blocks is not None and blocks.is_block_namespace(number) else None

    async def has_files(self, directory: int) -> bool:
        names: set[bytes] = set()
        entries = await Listing(self.lookup, directory).read_entries(0, FILES_LOOKED_FOR)
        while entries:
            names.update(entry.name for entry in entries)
            if any(not S_ISDIR(entry.attributes.mode) for entry in entries) or len(names) > DIRECTORIES_MAX:
                return True
            entries = await Listing(self.lookup, directory).read_entries(entries[-1].cookie, FILES_LOOKED_FOR)
        if self.core.blocks is not None:
            self.core.blocks.note_directories(directory, (await self.lookup.find_directory(directory)).namespace, names)
        return False

    def waits(self, directory: int) -> bool:
        folder = self.core.nodes.get(directory)
        return folder is None or self.lookup.has_strict_blocks(folder)

    async def _prepare(
        self, directory: int, name: bytes, size: int, mode: int, caller: Caller
    ) -> tuple[Plan, list[list[Slot]], int]:
        """(plan, slots for each chunk, inode that lost the name already, or 0).

        Valid until the next await.
        """
        if self.flusher.staged_bytes > self.flusher.staging_size or self.flusher.line.places:
            folder = self.core.nodes.get(directory)
            await self.flusher.wait_for_memory(folder.namespace if folder is not None else ROOT, size)
        wait: RoomWait | None = None
        gone = 0
        while True:
            plan = await self.names.plan_replacement(directory, name, mode, caller)
            try:
                slots = self._reserve(size, plan.node)
            except errors.NoSpace as error:
                wait = await self.space.wait_for_room(wait, error.namespace)
                if wait is None:
                    raise
                continue
            if plan.unlinked is None or not self.names.must_unlink_first(plan):
                return plan, slots, gone
            for taken in slots:  # there is room: nobody waits with it
                self.core.slabs.cancel(taken)
            gone = plan.unlinked.ino
            with suppress(errors.NotFound):
                await self.names.unlink(directory, name)

    def _reserve(self, size: int, node: Node) -> list[list[Slot]]:
        """Slots for each chunk of a file of ``size`` bytes. NoSpace, with nothing reserved."""
        slots: list[list[Slot]] = []
        try:
            for offset in range(0, size, node.chunk_size):
                slots.append(self.core.slabs.allocate(min(node.chunk_size, size - offset), node.namespace))
        except errors.NoSpace:
            for taken in slots:
                self.core.slabs.cancel(taken)
            raise
        return slots

    def _stage(self, node: Node, content: memoryview, slots: list[list[Slot]]) -> None:
        """Stage the bytes of a new file."""
        node.set_size(len(content))
        for index, taken in enumerate(slots):
            staged = Staged()
            start = index * node.chunk_size
            staged.pieces = [content[start : start + node.chunk_size] if len(slots) > 1 else content]
            staged.length = len(staged.pieces[0])
            staged.slots = taken
            chunk = node.chunks[index] = Chunk()
            self.flusher.stage(node, chunk, staged)
            if staged.length == node.chunk_size and self.flusher.is_half_full:
                self.flusher.chunk_is_full(node, index)

    async def delete(
        self, directory: int, names: Sequence[bytes], found: Callable[[int], None] = lambda number: None
    ) -> list[int]:
        self._check_writable()
        gone: dict[int, Node] = {}

        async def remove(number: int, name: bytes) -> None:
            token = DECIDED.set(lambda ino, other: found(number))
            try:
                with suppress(errors.NotFound, errors.NameTooLong, errors.IsADirectory):
                    _, gone[number] = await self.names.unlink(directory, name)
            finally:
                DECIDED.reset(token)

        await _for_each(names, remove, DELETE_PEERS)
        if gone:
            self.counters.deletes += len(gone)
            await self.names.publish(await self.lookup.find_directory(directory), *gone.values())
        return [gone[number].ino if number in gone else 0 for number in range(len(names))]

    def _check_writable(self) -> None:
        if self.core.read_only:
            raise errors.ReadOnly("the volume is mounted read-only")

    def _check(self, directory: int, name: bytes) -> None:
        """Check a name as the kernel does for files. InvalidArgument, NotPermitted."""
        self._check_writable()
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise errors.InvalidArgument(f"{name!r} is not a legal file name")
        if directory == ROOT_INODE and name == VIRTUAL_NAME:
            raise errors.NotPermitted(f"{name!r} in the mount's root belongs to the daemon")

    def statistics(self) -> dict[str, Any]:
        return {**asdict(self.counters), "bindings": self.core.dentries.binding_count}


async def _for_each(names: Sequence[bytes], job: Callable[[int, bytes], Awaitable[None]], peer_count: int) -> None:
    """Call ``job`` with the place and the name of each, ``peer_count`` at a time.

    After an OperationError no further one is begun; it is raised when those under way have ended.
    """
    rest = iter(enumerate(names))
    failures: list[errors.OperationError] = []
    count = busy = 0
    """of tasks, and of those that work on a name"""
    is_looked_after = False

    async def work() -> None:
        nonlocal count, busy
        for number, name in rest:
            if number + 1 < len(names):
                see_to_more()
            busy += 1
            try:
                await job(number, name)
            except errors.OperationError as error:
                failures.append(error)
            busy -= 1
            if failures:
                break
            if number % PAUSE_KEYS == PAUSE_KEYS - 1:
                await trio.lowlevel.checkpoint()
        count -= 1

    def see_to_more() -> None:
        nonlocal is_looked_after
        if count < peer_count and not is_looked_after:
            is_looked_after = True
            nursery.start_soon(add)

    async def add() -> None:
        """Add tasks while all of them wait: one task, with pauses, does the names that need no wait."""
        nonlocal count, is_looked_after
        is_looked_after = False
        if busy == count:
            more = min(count, peer_count - count)
            count += more
            for _ in range(more):
                nursery.start_soon(work)

    async with trio.open_nursery() as nursery:
        count = 1
        nursery.start_soon(work)
    if failures:
        raise failures[0]
