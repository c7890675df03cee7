"""Brings blocks of a shared volume to the cold tier, and back to whichever host asks for them.

What the index says of a name is what is true of it in the bucket, and each step is a compare-and-set there:

*Demotion*: the object is stored; its blocks leave their slots, and heads that say so are durable; then their entries
name the bucket in the place of the slots, if they are still those of these blocks. So no block is in a slot and in the
bucket, and one that was replaced or removed meanwhile, by any host, stays so. For that moment it is absent.
*Promotion*: bytes are read and verified; the block is put here if the index still has its entry, and that entry gets
the slot's place before the writer takes the block (`decided`). If it was removed meanwhile, the block goes again. A
host that is killed in between has written nothing, and the block is where it was.
*Removal*, by any host: the entry is dropped (`IndexedBlocks.remove_cold`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors
from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.remote.index.api import Entry, Replacement
from kvfuse.slab.layout import FEATURE_COLD
from kvfuse.volume.api import NameColumns, RowTerms
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.blocks.cold_blocks import (
    LEAVE_SECONDS,
    ROOM_SECONDS,
    TAKEN_BYTES,
    ColdBlocks,
    HotBlocks,
    LeavingRows,
)
from kvfuse.volume.blocks.indexed_blocks import AT_ONCE, IndexedBlocks, keys_of, split_keys
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_entries import ColdEntry, encode
from kvfuse.volume.cold.cold_index import ColdGroup

if TYPE_CHECKING:
    from kvfuse.volume.cold.host_objects import HostObject
    from kvfuse.volume.cold.hosts_cold_tier import SharedColdTier

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class SharedHotBlocks(HotBlocks, Protocol):
    """The block store of a shared volume."""

    with_files: set[int]

    def latest_sequence(self) -> int: ...
    def undo_put(self, table: BlockTable, row: int, sequence: int) -> None: ...
    async def settle_gone(self) -> None: ...


@dataclass
class _ComingBlock:
    """A block that is on its way back, or could not come."""

    name: bytes
    cold: ColdEntry
    done: trio.Event = field(default_factory=trio.Event)


class _Put(NamedTuple):
    """A block that is here, unless its entry has changed."""

    cold: ColdEntry
    table: BlockTable
    row: int
    sequence: int


class _Lack(NamedTuple):
    """Why a block could not be put."""

    why: int
    table: BlockTable
    size: int


_Right = list[tuple[_ComingBlock, memoryview]]
"""blocks that are on their way back, and their bytes"""


@dataclass
class SharedColdBlocks(ColdBlocks):
    """Of one membership. Event loop only."""

    engine: SharedHotBlocks
    tier: SharedColdTier  # type: ignore[assignment]
    """another class than the base's: what is inherited asks it only for what both have"""
    indexed: IndexedBlocks = field(kw_only=True)
    client: int = field(kw_only=True)
    turn: trio.Lock = field(default_factory=trio.Lock)
    """of whoever has blocks change their places for the bucket, or hears that other hosts have newer ones"""
    _deciding: trio.Lock = field(default_factory=trio.Lock)
    """while blocks are here of which it is not known yet whether they may be"""
    _going: dict[bytes, int] = field(default_factory=dict)
    """key -> sequence of blocks that the bucket has, and that are to leave now"""
    _coming: dict[bytes, _ComingBlock] = field(default_factory=dict)
    _to_bring: deque[_ComingBlock] = field(default_factory=deque)

    def _start_repacking(self, nursery: trio.Nursery) -> None:
        """Objects that are mostly dead go when they are the oldest."""

    # -- look-ups ------------------------------------------------------------------------------------------

    def _find_entries(self, directory: int, names: NameColumns) -> list[ColdEntry | None]:
        """The block in the bucket of each name, as the index said a moment ago."""
        if directory in self.engine.with_files or not self.tier.is_usable:  # a file may have the name
            return [None] * len(names[1])
        asked = trio.current_time()
        found = [self.indexed.cold.find(key, asked) for key in self._keys(directory, names)]
        return [one if one is not None and self._may_be_served(one) else None for one in found]

    def _may_be_served(self, cold: ColdEntry) -> bool:
        now = self.engine.now(cold.group.namespace)
        return self.indexed.cold.counts(cold) and self.tier.is_valid(cold.group) and not 0 < cold.expires <= now

    def _keys(self, directory: int, names: NameColumns) -> list[bytes]:
        low, high = self._halves(directory, names)
        return split_keys(np.stack([low, high], axis=1))

    def find(self, directory: int, names: NameColumns) -> Rows | None:
        """0 for each name that the bucket has a block of, -1 for others; None: it has none."""
        found = self._find_entries(directory, names)
        return np.array([-1 if one is None else 0 for one in found], np.int64) if any(found) else None

    def look_up(self, directory: int, names: NameColumns) -> tuple[Mask, Rows] | None:
        found = self._find_entries(directory, names)
        if not any(found):
            return None
        return np.array([one is not None for one in found]), np.array([one.length if one else 0 for one in found])

    # -- what is removed -----------------------------------------------------------------------------------

    def kill(self, directory: int, names: NameColumns) -> Mask:
        """Here at once, and elsewhere as soon as the index knows it."""
        was_there = np.array([one is not None for one in self._find_entries(directory, names)], np.bool_)
        self._hide(self._keys(directory, names))
        return was_there

    def bury(self, found: npt.NDArray[np.void]) -> None:
        self._hide(keys_of(found))

    def _hide(self, keys: Sequence[bytes]) -> None:
        sequence = self.engine.latest_sequence()
        self.indexed.hide_cold([(key, sequence) for key in keys])

    def bury_directory(self, directory: int) -> None:
        """The slots of its blocks are free then, and what they hid goes with that."""

    def clear(self, is_gone: Callable[[ColdGroup], bool]) -> None:
        """Entries have the epoch of their namespace."""

    def leave(self, found: npt.NDArray[np.void], sequences: Words) -> None:
        """The index does not know yet of blocks that were not written."""
        untold = found[(found["sequence"] == sequences) & (found["flags"] & np.uint32(forms.DIRTY) != 0)]
        for key, sequence in zip(keys_of(untold), untold["sequence"].tolist(), strict=True):
            self.indexed.cold.hide(key, sequence)

    def left(self, found: npt.NDArray[np.void], sequences: Words) -> None:
        for key, sequence in zip(keys_of(found), sequences.tolist(), strict=True):
            if self._going.get(key) == sequence:
                self.indexed.cold.kept[key] = sequence

    async def remove(self, directory: int, names: NameColumns) -> Mask:
        """Blocks of these names are in the bucket no more. Which were there. EngineError: some may be yet."""
        removed = {one.key for one in await self.indexed.remove_cold(self._keys(directory, names)) if self._counts(one)}
        return np.array([key in removed for key in self._keys(directory, names)], np.bool_)

    def _counts(self, cold: ColdEntry) -> bool:
        return self._may_be_served(cold) and self.tier.is_usable

    # -- out -----------------------------------------------------------------------------------------------

    async def _demote(self) -> None:
        while not self.engine.core.superblock.features & FEATURE_COLD:
            try:
                await self.engine.core.add_feature(FEATURE_COLD)
            except errors.EngineError as error:
                log.info("blocks do not leave for the bucket yet: %s", error)
                await trio.sleep(LEAVE_SECONDS)
        await super()._demote()

    def _are_copied(self, found: npt.NDArray[np.void], sequences: Words) -> Mask:
        pairs = zip(keys_of(found), sequences.tolist(), strict=True)
        return np.array([self._going.get(key) == sequence for key, sequence in pairs], np.bool_)

    async def _put_object(
        self, heads: npt.NDArray[np.void], data: memoryview, whole: Sequence[LeavingRows], some: list[LeavingRows]
    ) -> Mask | None:
        one = await self.tier.put(heads, data)
        if one is None:
            return None
        with self.tier.naming(one):
            async with self.turn:
                here = self._are_here(whole) & (heads["state"] == forms.BLOCK_HEAD)
                keys, sequences = keys_of(heads), heads["sequence"].tolist()
                self._going = {keys[at]: sequences[at] for at in np.flatnonzero(here).tolist()}
                try:
                    self._let_all_go(some)
                    kept = self.indexed.cold.kept
                    went = [at for at in np.flatnonzero(here).tolist() if kept.get(keys[at]) == sequences[at]]
                    named = await self._name(one, heads, went) if await self._have_left() else np.zeros_like(here)
                    self.counters["surrendered"] += len(went) - int(np.count_nonzero(named))
                    return named
                finally:
                    self._going = {}

    async def _have_left(self) -> bool:
        """Whether slots say, durably, that blocks have left them: no entry names the bucket before that."""
        try:
            await self.engine.settle_gone()
        except errors.EngineError as error:
            log.warning("blocks are lost on their way to the bucket: %s", error)
            return False
        return True

    async def _name(self, one: HostObject, heads: npt.NDArray[np.void], went: Collection[int]) -> Mask:
        """Have the index name the bucket for these blocks, which have left their slots. Which it does."""
        places = layout.offsets_of(heads["length"].astype(np.int64)) // layout.STEP
        changes = [(at, encode(heads[at], self.client, one.place.number, int(places[at]))) for at in went]
        named = np.zeros(len(heads), np.bool_)
        for start in range(0, len(changes), AT_ONCE):
            some = changes[start : start + AT_ONCE]
            try:
                done = await self.indexed.index.replace([Replacement(entry.sequence, entry) for _, entry in some])
            except errors.EngineError as error:
                log.info("whether blocks are in the bucket only the index knows: %s", error)
                continue
            for (at, entry), was in zip(some, done, strict=True):
                named[at] = was
                self.indexed.cold.forget(entry.key)
        one.blocks, one.block_bytes = int(np.count_nonzero(named)), int(heads["length"][named].sum())
        return named

    # -- back ----------------------------------------------------------------------------------------------

    async def decided(self) -> None:
        """Return when no block is here of which it is not known whether it may be."""
        async with self._deciding:
            pass

    async def warm(self, directory: int, names: Sequence[bytes]) -> None:
        columns = forms.name_columns(names)
        entries = self._find_entries(directory, columns)
        if not any(entries) or self.engine.core.read_only:
            return
        absent, waiting = ~self.engine.has(directory, columns), list[_ComingBlock]()
        for name, cold, is_absent in zip(names, entries, absent.tolist(), strict=True):
            if cold is not None and is_absent:
                if (one := self._coming.get(cold.key)) is None:
                    one = self._coming[cold.key] = _ComingBlock(name, cold)
                    self._to_bring.append(one)
                waiting.append(one)
        self._asked.set()
        with trio.move_on_after(self.tier.options.deadline + LEAVE_SECONDS + ROOM_SECONDS):
            for one in waiting:
                await one.done.wait()

    async def _promote(self) -> None:
        while True:
            while not self._to_bring:
                self._asked = trio.Event()
                await self._asked.wait()
            await trio.lowlevel.checkpoint()  # more may be asked for in this turn
            some, size = list[_ComingBlock](), 0
            while self._to_bring and size < TAKEN_BYTES:
                some.append(self._to_bring.popleft())
                size += some[-1].cold.length
            try:
                if some:
                    await self._bring(some, size)
            except errors.EngineError as error:
                log.debug("cold blocks cannot come back: %s", error)
            finally:
                for one in some:
                    self._coming.pop(one.cold.key, None)
                    one.done.set()

    async def _bring(self, some: Sequence[_ComingBlock], size: int) -> None:
        """EngineError: the index does not answer."""
        with self.engine.core.reads.speeds.cold.reading(size):
            found, gone = await self.tier.read([one.cold for one in some])
        self.indexed.forget_entries([(one.key, one.sequence) for one in gone])
        right: _Right = []
        for one, data in zip(some, found, strict=True):
            if data is None:
                continue
            if crc32c(data) == one.cold.checksum:
                right.append((one, data))
                continue
            self.tier.counters["damaged_blocks"] += 1
            log.warning("a cold block of object %d of host %016x is damaged, and dropped", *one.cold[3:1:-1])
            self.indexed.forget_entries([(one.cold.key, one.cold.sequence)])
        patience = trio.current_time() + LEAVE_SECONDS
        try:
            while right:
                right, lack = await self._put_some(right)
                if lack is None:
                    break
                if lack.why == forms.NO_MEMORY or not await self._await_leaving(patience):
                    await self.engine.make_room(lack.why, lack.table, lack.size, patience + ROOM_SECONDS)
        except errors.OperationError as error:
            self.counters["refused"] += len(right)
            log.debug("cold blocks cannot come back: %s", error)

    async def _put_some(self, right: _Right) -> tuple[_Right, _Lack | None]:
        """Put blocks, if they are still in the bucket. Those that lack room. EngineError, the errors of `table`."""
        async with self._deciding:
            confirmed = await self.indexed.confirm([one.cold for one, _ in right])
            put, rest, lack = list[_Put](), _Right(), None
            try:
                for at, (one, data) in enumerate(right):
                    cold, group = one.cold, one.cold.group
                    if cold not in confirmed or not self._may_be_served(cold):
                        continue
                    table = self.engine.table(group.directory, group.namespace, group.uid, group.gid, group.mode)
                    terms = RowTerms(cold.expires, cold.priority, shown_us=cold.stored * 1_000_000)
                    result, sequence = self.engine.put_absent(table, one.name, data, terms)
                    if result >= 0:
                        put.append(_Put(cold, table, result, sequence))
                    elif result != forms.PRESENT:
                        rest, lack = right[at:], _Lack(result, table, cold.length)
                        break
            finally:
                await self._decide(put)
        for one, _ in right[: len(right) - len(rest)]:
            one.done.set()
        return rest, lack

    async def _decide(self, put: Sequence[_Put]) -> None:
        """Have entries name slots in the place of the bucket; blocks whose entries are other ones go. EngineError."""
        changes, chosen, stay = list[Replacement](), list[_Put](), set[bytes]()
        for one in put:
            entry = self._entry_of(one)
            if entry is not None:
                changes.append(Replacement(one.cold.sequence, entry))
                chosen.append(one)
        try:
            done = await self.indexed.index.replace(changes)
            stay = {one.cold.key for one, was in zip(chosen, done, strict=True) if was}
        finally:
            for one in put:
                self.indexed.cold.forget(one.cold.key)
                if one.cold.key not in stay:
                    self.indexed.cold.kept[one.cold.key] = one.sequence
                    self.engine.undo_put(one.table, one.row, one.sequence)
                    continue
                self.engine.note_back(one.table, one.row)
                self.counters["promoted"] += 1
                self.counters["promoted_bytes"] += one.cold.length

    def _entry_of(self, one: _Put) -> Entry | None:
        """What the index is to say of a block that was just put. None: it is not there any more, or clocks differ."""
        key = one.cold.key
        told = self.engine.native.tell(int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))
        if told is None or one.sequence <= one.cold.sequence:
            return None
        is_it = int(np.frombuffer(told, forms.TOLD)["sequence"][0]) == one.sequence
        return Entry(key, one.sequence, told) if is_it else None
