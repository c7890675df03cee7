"""Brings blocks to the cold tier before they leave the volume, and back when somebody asks for them.

*Demotion*: blocks that a policy gives up ahead of need wait here, still in the volume, until an object is full of them
or a moment has passed. Once that is stored they go: so they are found all the time. Where room is wanted at once, those
that wait go without, oldest first (`surrender`); what is on its way stays. Each block that is lost so is counted.
*Promotion*: a block that is asked for is read, verified, and put back, if no other has its name then.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors, failing
from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.native._blocks import fingerprints
from kvfuse.policy.column_policy import Victims
from kvfuse.volume.api import NameColumns, RowTerms
from kvfuse.volume.blocks.block_arenas import BlockArenas
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables
from kvfuse.volume.blocks.slot_reads import SlotReads, slot_read
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_index import ColdGroup
from kvfuse.volume.cold.repacking import Repacking

if TYPE_CHECKING:
    from kvfuse.volume.cold.cold_tier import ColdTier

log = logging.getLogger(__name__)

GATHER_SECONDS = 1.0
"""for which blocks wait for others, to share an object"""
BATCH_SHARE, BATCH_MIN = 0.005, 1 << 20
"""of the volume, and bytes: as many do not wait for others, however large an object may be"""
WAITING_OBJECTS = 8
"""full objects' bytes of blocks that may wait"""
PROMOTERS = 4
TAKEN_BYTES = 16 << 20
"""of blocks that one of them reads together"""
LEAVE_SECONDS, ROOM_SECONDS = 1.0, 1.0
"""for which a block that came back waits until others are in the bucket; and then for room"""

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class HotBlocks(Protocol):
    """The block store (`block_engine.BlockEngine`), which has this."""

    core: Any
    native: NativeCore
    tables: BlockTables
    arenas: BlockArenas
    reads: SlotReads

    def now(self, namespace: int) -> int: ...
    def epoch_of(self, number: int) -> int: ...
    def has(self, directory: int, names: NameColumns) -> Mask: ...
    def table(self, directory: int, namespace: int, uid: int, gid: int, mode: int) -> BlockTable: ...
    def put_absent(self, table: BlockTable, name: bytes, data: memoryview, terms: RowTerms) -> tuple[int, int]: ...
    def note_back(self, table: BlockTable, row: int) -> None: ...
    async def make_room(self, why: int, table: BlockTable, size: int, give_up: float) -> None: ...


class LeavingRows(NamedTuple):
    """Blocks of one table that a policy gave up."""

    namespace: int
    table: BlockTable
    rows: Rows
    sequences: Words
    sizes: Rows
    """of their slots"""


@dataclass
class _Wanted:
    """A block that is on its way back, or could not come."""

    name: bytes
    row: int
    sequence: int
    done: trio.Event = field(default_factory=trio.Event)


@dataclass
class ColdBlocks:
    """Of one membership. Event loop only, but for `find`, `look_up` and `removing`."""

    engine: HotBlocks
    tier: ColdTier
    drop: Callable[[LeavingRows], int]
    """removes blocks, as evicted ones; returns bytes of slots"""
    counters: Counter[str] = field(default_factory=Counter)
    leaving: Counter[int] = field(default_factory=Counter)
    """namespace -> bytes of slots that are about to be free"""
    _queue: deque[LeavingRows] = field(default_factory=deque)
    _stored: list[LeavingRows] = field(default_factory=list)
    """on their way to the bucket: they stay until it has them, or has not taken them, or nothing else can go"""
    _work: trio.Event = field(default_factory=trio.Event)
    _is_hurried: bool = False
    """somebody waits for the room of blocks that leave"""
    _went: trio.Event = field(default_factory=trio.Event)
    """set, and replaced, when some have left"""
    _wanted: dict[int, _Wanted] = field(default_factory=dict)
    """row of the index -> the block that is on its way back"""
    _to_read: deque[_Wanted] = field(default_factory=deque)
    _asked: trio.Event = field(default_factory=trio.Event)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing.service, "heads of cold blocks", self.tier.load)
            nursery.start_soon(failing.service, "cold objects", self.tier.keep_up)
            if not self.engine.core.read_only:
                nursery.start_soon(failing.service, "blocks that become cold", self._demote)
                self._start_repacking(nursery)
            for _ in range(PROMOTERS):
                nursery.start_soon(failing.service, "cold blocks that come back", self._promote)

    def _start_repacking(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(failing.service, "cold blocks that are packed anew", Repacking(self.tier).run)

    # -- look-ups: any thread ------------------------------------------------------------------------------

    def find(self, directory: int, names: NameColumns) -> Rows | None:
        """The row of each name in the index of the cold tier, -1: none; None: there are none of the directory."""
        if not (self.tier.index.has_directory(directory) and self.tier.is_usable):
            return None
        return self.tier.find(*self._halves(directory, names), self._now(directory))

    def look_up(self, directory: int, names: NameColumns) -> tuple[Mask, Rows] | None:
        """Which names the cold tier has blocks of, and their bytes."""
        rows = self.find(directory, names)
        if rows is None:
            return None
        return rows >= 0, np.where(rows >= 0, self.tier.index.rows["length"][rows], 0).astype(np.int64)

    def kill(self, directory: int, names: NameColumns) -> Mask:
        """Names are about to mean nothing, or something else. Which had cold blocks."""
        if self.tier.is_loaded and not self.tier.index.has_directory(directory):
            return np.zeros(len(names[1]), np.bool_)
        return self.tier.kill(*self._halves(directory, names), self._now(directory))

    def bury(self, found: npt.NDArray[np.void]) -> None:
        """Blocks of these rows are about to be removed, and do not come back."""
        self.tier.kill(found["low"].copy(), found["high"].copy())

    def bury_directory(self, directory: int) -> None:
        """All names of a directory are removed, or it is not known which blocks they had."""
        self.tier.kill_directory(directory)

    def clear(self, is_gone: Callable[[ColdGroup], bool]) -> None:
        """Blocks of groups are dead, and other mounts know that by other means."""
        self.tier.clear(is_gone)

    def leave(self, found: npt.NDArray[np.void], sequences: Words) -> None:
        """Blocks of these rows, with these sequences, are about to leave the volume."""
        is_it = found["sequence"] == sequences
        self.tier.supersede(found["low"][is_it], found["high"][is_it], sequences[is_it])

    def left(self, found: npt.NDArray[np.void], sequences: Words) -> None:
        """They have left it."""
        self.tier.released(found["low"].copy(), found["high"].copy(), sequences)

    def _halves(self, directory: int, names: NameColumns) -> tuple[Words, Words]:
        halves = np.zeros(2 * len(names[1]), np.uint64)
        fingerprints(self.engine.tables.multipliers, directory, *names, halves)
        return halves[::2].copy(), halves[1::2].copy()

    def _now(self, directory: int) -> int:
        tables = self.engine.tables.of(directory)
        return self.engine.now(tables[0].namespace if tables else 0)

    # -- out -----------------------------------------------------------------------------------------------

    def offer(self, namespace: int, gone: Victims) -> tuple[Victims, int]:
        """Take those victims that are worth it: they go later. The others; bytes of slots of those that it took."""
        room = WAITING_OBJECTS * self.tier.options.object_size - sum(self.leaving.values())
        if not self.tier.is_usable or room <= 0 or not len(gone.rows):
            return gone, 0
        takes, rate = np.zeros(len(gone.rows), np.bool_), self._recompute_rate(namespace)
        for place in np.unique(gone.tables).tolist():
            own, table = np.flatnonzero(gone.tables == place), self.engine.tables.all[place]
            found = table.rows[gone.rows[own]]
            fits = self._are_wanted(namespace, found, gone.sequences[own])
            if rate:
                fits &= self.engine.core.reads.speeds.cold.expect(found["length"]) < found["length"] / rate
            fits &= np.cumsum(np.where(fits, gone.sizes[own], 0)) <= room
            room -= int(gone.sizes[own][fits].sum())
            takes[own] = fits
            if fits.any():
                self._take(namespace, table, gone, own[fits])
        if not takes.any():
            return gone, 0
        self._work.set()
        return Victims._make(column[~takes] for column in gone), int(gone.sizes[takes].sum())

    def _recompute_rate(self, namespace: int) -> int:
        found = self.engine.core.namespaces.all.get(namespace)
        return found.settings.recompute_rate if found is not None else 0

    def _are_wanted(self, namespace: int, found: npt.NDArray[np.void], sequences: Words) -> Mask:
        """Which blocks are to be in the cold tier once they leave the volume, and are not. ``found``: their rows."""
        settings = self.engine.core.namespaces.all.get(namespace)
        if settings is None or settings.settings.cold == "none":
            return np.zeros(len(found), np.bool_)
        fits: Mask = (found["flags"] & np.uint32(forms.FOREIGN) == 0) & (found["sequence"] == sequences)
        fits &= found["length"] <= self.tier.options.object_size // 2
        fits &= found["flags"] & np.uint32(forms.SHADOWS) == 0
        if settings.settings.cold == "used":
            fits &= (found["flags"] & np.uint32(forms.HOT) != 0) | (found["used"] > found["stored"])
        return fits & ~self._are_copied(found, sequences)

    def _are_copied(self, found: npt.NDArray[np.void], sequences: Words) -> Mask:
        """Which blocks of these rows the bucket has, too."""
        return self.tier.are_copied(found["low"].copy(), found["high"].copy(), sequences)

    def note_evicted(self, namespace: int, found: npt.NDArray[np.void], sequences: Words) -> None:
        """Blocks of these rows have left the volume for room. Those that were to become cold, and did not, are lost."""
        self.counters["surrendered"] += int(np.count_nonzero(self._are_wanted(namespace, found, sequences)))

    def _take(self, namespace: int, table: BlockTable, gone: Victims, own: Rows) -> None:
        rows = np.ascontiguousarray(gone.rows[own], np.int64)
        self._queue.append(LeavingRows(namespace, table, rows, gone.sequences[own].copy(), gone.sizes[own].copy()))
        self.leaving[namespace] += int(gone.sizes[own].sum())

    def surrender(self, size: int, namespaces: Collection[int]) -> int:
        """Have blocks of so many bytes, which wait for the bucket, leave the volume now, those first that were given up
        first. The bytes of slots."""
        return _let_go_some(self._queue, size, namespaces, self._let_go)

    def surrender_stored(self, size: int, namespaces: Collection[int]) -> int:
        """As `surrender`, of blocks that are on their way to the bucket: they are absent until it has them."""
        return _let_go_some(self._stored, size, namespaces, self._let_go)

    def _let_go(self, one: LeavingRows) -> int:
        self.leaving[one.namespace] -= int(one.sizes.sum())
        went, self._went = self._went, trio.Event()
        went.set()
        return self.drop(one)

    async def _demote(self) -> None:
        await self.tier.loaded.wait()
        while True:
            await self._gather()
            some = self._next_batch()
            if not some:
                continue
            began = trio.current_time()
            size = await self._store(some)
            if (rate := self.tier.options.rate) and size:
                await trio.sleep(max(0.0, size / rate - (trio.current_time() - began)))

    async def _gather(self) -> None:
        while not self._queue:
            self._work = trio.Event()
            await self._work.wait()
        part = int(BATCH_SHARE * self.engine.core.geometry.data_size)
        enough = min(self.tier.options.object_size, max(BATCH_MIN, part))
        with trio.move_on_after(GATHER_SECONDS):
            while not self._is_hurried and sum([int(one.sizes.sum()) for one in self._queue]) < enough:
                self._work = trio.Event()
                await self._work.wait()

    def _next_batch(self) -> list[LeavingRows]:
        """What goes into the next object, or what is to be dropped with it."""
        room, some = self.tier.options.object_size - layout.data_start(0), list[LeavingRows]()
        self._is_hurried = False
        while self._queue:
            one = self._queue.popleft()
            each = one.table.rows["length"][one.rows].astype(np.int64) + layout.STEP + forms.HEAD.itemsize
            count = int(np.searchsorted(np.cumsum(each), room, side="right"))
            if count:
                some.append(_part(one, slice(0, count)))
                room -= int(each[:count].sum())
            if count < len(one.rows):
                self._queue.appendleft(_part(one, slice(count, None)))
                break
        return some

    async def _store(self, some: list[LeavingRows]) -> int:
        """Store blocks, and have them leave the volume. Bytes that were stored.

        If cancelled they stay in the volume.
        """
        whole, size = tuple(some), 0
        self._stored = some
        try:
            heads = np.concatenate([self._heads_of(one) for one in whole])
            offsets = layout.offsets_of(heads["length"].astype(np.int64))
            data = np.zeros(int(offsets[-1]), np.uint8).data  # zeros also between blocks: all of it leaves this machine
            await self._fill(whole, heads, offsets, data)
            here = await self._put_object(heads, data, whole, some)
            if here is not None:
                self.counters["demoted"] += int(np.count_nonzero(here))
                self.counters["demoted_bytes"] += (size := int(heads["length"][here].sum()))
        except errors.EngineError as error:
            log.warning("blocks cannot be read for the cold tier: %s", error)
        except Exception:  # the policy does not offer them again
            self._let_all_go(some)
            raise
        self._let_all_go(some)
        return size

    async def _put_object(
        self, heads: npt.NDArray[np.void], data: memoryview, whole: Sequence[LeavingRows], some: list[LeavingRows]
    ) -> Mask | None:
        """Have the bucket have blocks, of which those in ``some`` are still to leave. Which are there; None: none."""
        return await self.tier.store(heads, data, lambda: self._are_here(whole))

    def _let_all_go(self, some: list[LeavingRows]) -> None:
        while some:
            self._let_go(some.pop())

    def _are_here(self, some: Sequence[LeavingRows]) -> Mask:
        """Which blocks the volume has still."""
        found = [(one.table, one.table.rows[one.rows], one.sequences) for one in some]
        return np.concatenate(
            [
                (rows["version"] & np.uint64(1) == 1) & (rows["sequence"] == sequences) & (not table.has_ended)
                for table, rows, sequences in found
            ]
        )

    def _heads_of(self, one: LeavingRows) -> npt.NDArray[np.void]:
        rows, readers = one.table.rows[one.rows].copy(), one.table.readers
        heads = np.zeros(len(rows), forms.HEAD)
        for name in ("length", "low", "high", "sequence", "directory", "checksum", "stored", "expires", "priority"):
            heads[name] = rows[name]
        heads["magic"], heads["version"], heads["name_length"] = forms.HEAD_MAGIC, 1, rows["name_length"]
        heads["uid"], heads["gid"], heads["mode"] = readers.uid, readers.gid, readers.mode
        heads["name_space"], heads["epoch"] = one.namespace, self.engine.epoch_of(one.namespace)
        heads["micros"] = rows["flags"] >> np.uint32(forms.MICROS)
        is_it = (rows["version"] & np.uint64(1) == 1) & (rows["sequence"] == one.sequences)
        heads["state"] = np.where(is_it, forms.BLOCK_HEAD, forms.FREE_HEAD)
        heads["length"][~is_it] = 0
        return heads

    async def _fill(
        self, some: Sequence[LeavingRows], heads: npt.NDArray[np.void], offsets: Rows, data: memoryview
    ) -> None:
        """Bring the blocks to where they belong in an object; what is not right there is none. EngineError."""
        copies, reads, at = list[tuple[int, Any]](), list[Any](), 0
        for one in some:
            for row, sequence in zip(one.rows.tolist(), one.sequences.tolist(), strict=True):
                target = data[offsets[at] : offsets[at] + int(heads["length"][at])]
                held = self.engine.arenas.hold(one.table, row, sequence) if len(target) else None
                if held is not None:
                    copies.append((at, held))
                elif len(target) and (read := self._slot_of(one, row, sequence, target)) is not None:
                    reads.append(read)
                at += 1
        if reads:
            await self.engine.reads.read(reads)

        def copy() -> None:
            for place, held in copies:
                length, start = int(heads["length"][place]), int(offsets[place])
                data[start : start + length] = held.home.bytes[held.offset : held.offset + length].data
            for place in range(len(heads)):
                start, length = int(offsets[place]), int(heads["length"][place])
                if crc32c(data[start : start + length]) != heads["checksum"][place]:
                    heads["state"][place] = forms.FREE_HEAD

        await trio.to_thread.run_sync(copy)

    def _slot_of(self, one: LeavingRows, row: int, sequence: int, target: memoryview) -> Any:
        found = one.table.rows[row].copy()
        slab, slot, packed = found[["slab", "slot", "packed"]].item()
        if int(found["sequence"]) != sequence:
            return None
        with suppress(ValueError):  # a thread dropped it just now
            _, offset = self.engine.native.slot_places(slab, slot)
            address = slab * self.engine.core.geometry.slab_size + offset
            return slot_read(one.namespace, address, sequence, target, packed * forms.PAGE)
        return None

    # -- back ----------------------------------------------------------------------------------------------

    async def warm(self, directory: int, names: Sequence[bytes]) -> None:
        """Bring blocks back that are asked for now: return when they are in the volume, or cannot come."""
        columns = forms.name_columns(names)
        rows = self.find(directory, columns)
        if rows is None or not (rows >= 0).any():
            return
        absent = ~self.engine.has(directory, columns) & (rows >= 0)
        waiting = []
        for place in np.flatnonzero(absent).tolist():
            row = int(rows[place])
            one = self._wanted.get(row)
            if one is None:
                one = self._wanted[row] = _Wanted(names[place], row, int(self.tier.index.rows["sequence"][row]))
                self._to_read.append(one)
            waiting.append(one)
        self._asked.set()
        with trio.move_on_after(self.tier.options.deadline + LEAVE_SECONDS + ROOM_SECONDS):
            for one in waiting:
                await one.done.wait()

    async def _promote(self) -> None:
        while True:
            while not self._to_read:
                self._asked = trio.Event()
                await self._asked.wait()
            await trio.lowlevel.checkpoint()  # more may be asked for in this turn
            some, size = list[_Wanted](), 0
            while self._to_read and size < TAKEN_BYTES:
                some.append(self._to_read.popleft())
                size += int(self.tier.index.rows["length"][some[-1].row])
            if some:
                try:
                    await self._bring_back(some, size)
                finally:
                    for one in some:
                        self._wanted.pop(one.row, None)
                        one.done.set()

    async def _bring_back(self, some: Sequence[_Wanted], size: int) -> None:
        entries = self.tier.index.rows[[one.row for one in some]].copy()
        with self.engine.core.reads.speeds.cold.reading(size):
            found = await self.tier.read(np.array([one.row for one in some], np.int64))
        for one, entry, data in zip(some, entries, found, strict=True):
            if data is None:
                continue
            if crc32c(data) != int(entry["checksum"]):
                with self.tier.taking(one.row, one.sequence) as is_it:
                    if is_it:
                        self.tier.note_damaged(one.row)
                        log.warning("a cold block of object %d is damaged, and dropped", entry["object"])
                continue
            try:
                await self._put_back(one, entry, data)
            except errors.OperationError as error:
                self.counters["refused"] += 1
                log.debug("a cold block cannot come back: %s", error)
            one.done.set()

    async def _put_back(self, one: _Wanted, entry: npt.NDArray[np.void], data: memoryview) -> None:
        group = self.tier.index.group(int(entry["group"]))
        with self.tier.taking(one.row, one.sequence) as is_it:
            if not is_it:  # its folder may be gone
                return
        table = self.engine.table(group.directory, group.namespace, group.uid, group.gid, group.mode)
        terms = RowTerms(int(entry["expires"]), int(entry["priority"]), shown_us=int(entry["stored"]) * 1_000_000)
        patience = trio.current_time() + LEAVE_SECONDS
        while True:
            with self.tier.taking(one.row, one.sequence) as is_it:
                if not is_it or not self.tier.is_valid(group):
                    return
                result, sequence = self.engine.put_absent(table, one.name, data, terms)
                if result >= 0:
                    self.tier.note_hot(one.row, sequence)
                    self.engine.note_back(table, result)
            if result >= 0 or result == forms.PRESENT:
                break
            if result == forms.NO_MEMORY or not await self._await_leaving(patience):
                await self.engine.make_room(result, table, len(data), patience + ROOM_SECONDS)
        if result >= 0:
            self.counters["promoted"] += 1
            self.counters["promoted_bytes"] += len(data)

    async def _await_leaving(self, until: float) -> bool:
        """Wait until some of the blocks that leave have left. False: there are none, or none has by then."""
        if not sum(self.leaving.values()):
            return False
        self._is_hurried = True
        self._work.set()
        with trio.move_on_at(until) as scope:
            await self._went.wait()
        return not scope.cancelled_caught

    def statistics(self) -> dict[str, Any]:
        return {**self.tier.statistics(), **self.counters, "leaving_bytes": sum(self.leaving.values())}


def _let_go_some(
    waiting: deque[LeavingRows] | list[LeavingRows], size: int, namespaces: Collection[int],
    let_go: Callable[[LeavingRows], int],
) -> int:  # fmt: skip
    """Let go of blocks of namespaces, the first ones first, until they have so many bytes of slots. The bytes."""
    freed = 0
    for one in list(waiting):
        if freed >= size:
            break
        if one.namespace in namespaces:
            count = int(np.searchsorted(np.cumsum(one.sizes), size - freed)) + 1
            place = next(number for number, other in enumerate(waiting) if other is one)
            if count < len(one.rows):
                waiting[place] = _part(one, slice(count, None))
            else:
                del waiting[place]
            freed += let_go(_part(one, slice(0, count)))
    return freed


def _part(one: LeavingRows, which: slice) -> LeavingRows:
    return one._replace(rows=one.rows[which], sequences=one.sequences[which], sizes=one.sizes[which])
