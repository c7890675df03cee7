"""The cold tier of a volume of one host: objects of a bucket, an index of their blocks, and what must not come back.

Hot rows go before cold ones: a block that was replaced while its former bytes are cold hides them, and when it leaves
the volume, they are dead (`supersede`), as they are when somebody removes the name (`kill`). Both write a grave first.
A block that was brought back stays here, too: when it leaves the volume unchanged, it counts again (`released`).

``gate``: held by whoever removes names from the volume or brings blocks back to it: neither overtakes the other.
A bucket that does not answer is not asked for a while: its blocks are absent until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.options.options import ColdBucketOptions
from kvfuse.remote.bucket import ABSENT, Bucket, Changed, NoObject, Range
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_index import ALIVE, PENDING, ROW, ColdGroup, ColdIndex
from kvfuse.volume.cold.grave_log import BEGUN, FLOOR, GRAVE, STORED, VOID, GraveLog, make_records, numbers_of

log = logging.getLogger(__name__)

LOADED_AT_ONCE = 8
PAUSE_MIN, PAUSE_MAX = 1.0, 30.0
"""seconds for which a bucket is not asked that did not answer"""
GRAVES_MAX = 64 << 20
"""bytes of graves of blocks that are not known to be in the bucket: beyond it, all that is there is given up"""
SWEEP_SECONDS = 5.0
GAP = 64 << 10
"""bytes between blocks that are read with them"""
READ_MAX = 16 << 20
COUNTED = (
    *("stored_objects", "stored_blocks", "stored_bytes", "read_blocks", "read_bytes"),
    *("damaged_blocks", "failed_puts", "failed_reads", "killed_blocks", "removed_objects"),
    *("repacked_objects", "repacked_blocks"),
)

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Breaker:
    """Whether a server is worth asking. Any thread."""

    def __init__(self) -> None:
        self._pause = PAUSE_MIN
        self._until = 0.0
        self.reason: str | None = None

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._until

    def failed(self, error: EngineError) -> None:
        if self.reason is None:
            log.warning("the cold tier does not answer: %s", error)
        self.reason = str(error)
        self._until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX)

    def answered(self) -> None:
        if self.reason is not None:
            log.info("the cold tier answers again")
        self.reason, self._until, self._pause = None, 0.0, PAUSE_MIN


@dataclass
class StoredObject:
    """One that is in the bucket, or may be."""

    number: int
    size: int
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    oldest: int = 0
    """sequence of a block of it: a grave up to a lower one names none"""
    is_stored: bool = False
    """the bucket has said so"""


class ColdTier:
    """Event loop only, but for `find`, `kill`, `supersede` and `released`."""

    def __init__(
        self, options: ColdBucketOptions, volume_id: bytes, log_path: Path, is_valid: Callable[[ColdGroup], bool],
        latest: Callable[[], int],
    ) -> None:  # fmt: skip
        """``options``: with a prefix of the volume's own. ``is_valid``: blocks of a group may be served; any thread.
        ``latest``: the highest sequence. ConfigError, OSError of the log."""
        assert options.capacity is not None
        self.options = options
        self.capacity = options.capacity
        self.index = ColdIndex()
        self.gate = threading.RLock()
        self.breaker = Breaker()
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self.on_directory: Callable[[int], None] = lambda directory: None
        """is called before the first block of a directory is here"""
        self.is_loaded = False
        self.loaded = trio.Event()
        self._reader = Bucket(options, options.deadline, options.in_flight_max)
        self._writer = Bucket(options, options.put_deadline, 4)
        self._volume_id = volume_id
        self.is_valid = is_valid
        self._latest = latest
        self._log = GraveLog(log_path)
        self._log_path = log_path
        self._is_off = False
        self._objects: dict[int, StoredObject] = {}
        self._doomed: dict[int, StoredObject] = {}
        """objects that are to be deleted, or may come late"""
        self._next = 1
        self._floor = 0
        self._killed: dict[int, tuple[int, int]] = {}
        """low half -> high half, sequence: of what was removed while objects are loaded, or was before"""

    # -- any thread ----------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        return not (self._is_off or self.breaker.is_open)

    def find(self, low: Words, high: Words, now: int) -> Rows:
        """The row of each fingerprint whose block may be read; -1: there is none."""
        if not self.is_usable or not self.index.count:
            return np.full(len(low), -1, np.int64)
        with self.index.lock:
            rows = self.index.alive(low, high, now)
            for group in np.unique(self.index.rows["group"][rows[rows >= 0]]).tolist():
                if not self.is_valid(self.index.group(group)):
                    rows[(rows >= 0) & (self.index.rows["group"][rows] == group)] = -1
            return rows

    def kill(self, low: Words, high: Words, now: int = 0) -> Mask:
        """Names are removed: their blocks never come back. Which of them could be read."""
        with self.gate, self.index.lock:
            rows = self.index.find(low, high)
            was_there = self.find(low, high, now) >= 0
            self._bury(low, high, rows, np.full(len(low), self._latest() if not self.is_loaded else 0, np.uint64))
            return was_there

    def kill_directory(self, directory: int) -> None:
        """All names of a directory are removed, or it is not known which blocks they had."""
        with self.gate, self.index.lock:
            numbers = [number for number, group in enumerate(self.index.groups) if group.directory == directory]
            found = self.index.rows[np.isin(self.index.rows["group"], numbers) & (self.index.rows["state"] != 0)]
            self.kill(found["low"].copy(), found["high"].copy())

    def supersede(self, low: Words, high: Words, sequences: Words) -> None:
        """Blocks of the volume are about to leave it: what is here and older is dead, but for the same blocks."""
        with self.gate, self.index.lock:
            rows = self.index.find(low, high)
            entries = self.index.rows[rows]
            is_older = (rows >= 0) & (entries["sequence"] < sequences) & (entries["hot"] != sequences)
            if self.is_loaded:
                if is_older.any():
                    self._bury(low[is_older], high[is_older], rows[is_older], sequences[is_older])
                return
            same = (rows >= 0) & ~is_older
            self._bury(low[~same], high[~same], np.where(is_older, rows, -1)[~same], sequences[~same] - np.uint64(1))

    def released(self, low: Words, high: Words, sequences: Words) -> None:
        """Blocks have left the volume: those that are the same here are the newest ones of their names again."""
        with self.index.lock:
            rows = self.index.find(low, high)
            is_same = (rows >= 0) & (self.index.rows["hot"][rows] == sequences)
            own = rows[is_same]
            self.index.rows["sequence"][own] = sequences[is_same]
            self.index.rows["hot"][own] = 0

    def are_copied(self, low: Words, high: Words, sequences: Words) -> Mask:
        """Which blocks of the volume are here, too."""
        with self.index.lock:
            rows = self.index.find(low, high)
            entries = self.index.rows[rows]
            is_same = (entries["hot"] == sequences) | (entries["sequence"] == sequences)
            copied: Mask = (rows >= 0) & is_same & (entries["state"] == ALIVE)
            return copied

    def _bury(self, low: Words, high: Words, rows: Rows, sequences: Words) -> None:
        """Blocks of rows are dead, and say so to later mounts. ``sequences``: up to which, where there is no row."""
        found = self.index.rows[rows]
        is_here = (rows >= 0) & np.isin(found["state"], (PENDING, ALIVE))
        named = is_here if self.is_loaded else np.ones(len(low), np.bool_)
        if not named.any():
            return
        until = np.maximum(np.where(is_here, found["sequence"], 0), np.where(self.is_loaded, 0, sequences))
        until = until.astype(np.uint64)
        try:
            if not self.is_loaded and self._log.size > GRAVES_MAX:
                self._floor = self._latest()
                self._log.append(FLOOR, np.zeros(1, np.uint64), 0, self._floor)
            elif self._floor == 0 or self.is_loaded:
                self._log.append(GRAVE, low[named], high[named], until[named])
        except OSError as error:
            self._turn_off(error)
        if not self.is_loaded:
            for one in zip(low[named].tolist(), high[named].tolist(), until[named].tolist(), strict=True):
                self._killed[one[0]] = one[1:]
        self.counters["killed_blocks"] += int(np.count_nonzero(is_here))
        self.index.end(rows[is_here])

    def _turn_off(self, error: OSError) -> None:
        """Removed blocks cannot be noted: nothing of the bucket is read any more, by later mounts either."""
        if not self._is_off:
            log.error("the cold tier ends: %s cannot be written: %s", self._log_path, error.strerror)
        self._is_off = True
        self._log_path.unlink(missing_ok=True)

    # -- at a mount ----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the heads of all objects; again and again, until the bucket answers."""
        pause = PAUSE_MIN
        while not self.is_loaded:
            try:
                await self._load()
            except EngineError as error:
                self.breaker.failed(error)
                await trio.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX)

    async def _load(self) -> None:
        began = time.perf_counter()
        listed = {}
        for one in await self._writer.list("blocks/"):
            if (number := layout.object_number(one.name)) is not None:
                listed[number] = one.size
        kept = self._read_log(set(listed))
        for number in sorted(listed):
            if number in self._objects or number in self._doomed:
                continue
            held = StoredObject(number, listed[number])
            (self._objects if number in kept else self._doomed)[number] = held
        self.breaker.answered()
        todo = iter(sorted(self._objects.values(), key=lambda one: one.number))
        async with trio.open_nursery() as nursery:
            for _ in range(LOADED_AT_ONCE):
                nursery.start_soon(self._load_some, todo)
        with self.gate, self.index.lock:
            self._tidy_log()
            self.is_loaded = True
            self._killed.clear()
        self.loaded.set()
        log.info("%d cold blocks found in %.2f s", self.index.count, time.perf_counter() - began)

    def _read_log(self, listed: set[int]) -> set[int]:
        """Which of the listed objects may be read. EngineError: the log cannot be written."""
        records = self._log.records
        begun, void = numbers_of(records, BEGUN), numbers_of(records, VOID)
        late = begun - listed - void
        self._next = max([*begun, *listed, *void, 0]) + 1
        try:
            if late:
                self._log.append(VOID, np.array(sorted(late), np.uint64))
            self._log.sync()
        except OSError as error:
            self._turn_off(error)
            raise EngineError(f"{self._log_path}: {error.strerror}") from error
        for number in late:
            self._doomed.setdefault(number, StoredObject(number, 0))
        floors = records["sequence"][records["kind"] == FLOOR]
        self._floor = max(self._floor, int(floors.max(initial=0)))
        for _, _, low, high, sequence in records[records["kind"] == GRAVE].tolist():
            if sequence >= self._killed.get(low, (0, 0))[1]:
                self._killed[low] = high, sequence
        if strange := listed - begun - void:
            log.warning("%d cold objects are not known to %s: they are deleted", len(strange), self._log_path)
        return listed & begun - void

    async def _load_some(self, objects: Iterator[StoredObject]) -> None:
        for one in objects:
            if not len(one.rows):
                await self._load_object(one)

    async def _load_object(self, one: StoredObject) -> None:
        name = layout.object_name(one.number)
        data = bytearray(min(one.size, layout.FIRST_READ))
        try:
            await self._writer.read(name, [Range(0, memoryview(data))])
            facts = layout.read_header(bytes(data), self._volume_id, one.number)
            if facts is not None and facts.size == one.size and facts.data_start > len(data):
                data += bytes(facts.data_start - len(data))
                await self._writer.read(name, [Range(0, memoryview(data))])
        except NoObject:
            facts = None
        heads = layout.read_heads(bytes(data), facts) if facts is not None and facts.size == one.size else None
        if heads is None:
            log.warning("the cold object %d is damaged, or not of this volume: its blocks are absent", one.number)
            self._doom(one)
            return
        with self.index.lock:
            one.rows = self._enter(one.number, heads, ALIVE)
            one.oldest = int(heads["sequence"].min())
        one.is_stored = True
        await trio.lowlevel.checkpoint()

    def _enter(self, number: int, heads: npt.NDArray[np.void], state: int) -> Rows:
        """Rows for the blocks of an object, but for those that are dead."""
        lengths = heads["length"].astype(np.int64)
        places = layout.offsets_of(lengths)[:-1] // layout.STEP
        entries = np.zeros(len(heads), ROW)
        for name in ("low", "high", "sequence", "length", "checksum", "expires", "stored", "priority"):
            entries[name] = heads[name]
        entries["object"], entries["place"], entries["state"] = number, places, state
        common = heads[["directory", "name_space", "epoch", "uid", "gid", "mode"]]
        groups, which = np.unique(common, return_inverse=True)
        for place, group in enumerate(groups.tolist()):
            own = ColdGroup(*group)
            if self.is_valid(own):
                entries["group"][which == place] = self.index.number_of(own)
                self.on_directory(own.directory)
            else:
                entries["state"][which == place] = 0
        entries = entries[(heads["state"] == forms.BLOCK_HEAD) & (entries["state"] != 0) & ~self._are_dead(entries)]
        _, first = np.unique(entries["low"][::-1], return_index=True)
        rows = self.index.add(entries[len(entries) - 1 - np.sort(first)])
        return rows[rows >= 0]

    def _are_dead(self, entries: npt.NDArray[np.void]) -> Mask:
        dead: Mask = entries["sequence"] <= np.uint64(self._floor)
        if self._killed:
            for place in np.flatnonzero(np.isin(entries["low"], list(self._killed))).tolist():
                high, sequence = self._killed[int(entries["low"][place])]
                dead[place] |= high == int(entries["high"][place]) and int(entries["sequence"][place]) <= sequence
        return dead

    def _tidy_log(self) -> None:
        """Keep what later mounts need: objects, and graves of what some object may have."""
        objects = np.array(sorted(self._objects), np.uint64)
        void = np.array(sorted(self._doomed), np.uint64)
        parts = [make_records(BEGUN, objects), make_records(VOID, void), make_records(STORED, objects)]
        if self._floor:
            parts.append(make_records(FLOOR, np.zeros(1, np.uint64), 0, self._floor))
        if self._objects and self._killed:
            least = max(self._floor + 1, min([one.oldest for one in self._objects.values()]))
            rows = [(low, high, sequence) for low, (high, sequence) in self._killed.items() if sequence >= least]
            graves = np.array(rows, np.uint64).reshape(-1, 3)
            parts.append(make_records(GRAVE, *graves.T.copy()))
        try:
            self._log.replace(np.concatenate(parts))
        except OSError as error:
            self._turn_off(error)

    # -- objects -------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of all objects that are in the bucket, or may be."""
        return sum([one.size for one in (*self._objects.values(), *self._doomed.values())])

    async def make_room(self, size: int) -> bool:
        """Delete objects, those without blocks first, then the oldest, until so many bytes have room. EngineError.

        False: they never have.
        """
        size += min(self.options.object_size, self.capacity - size)  # for blocks that are packed anew
        while self.used + size > self.capacity:
            stored = [number for number, one in self._objects.items() if one.is_stored]
            if not await self.sweep() and stored and self.used + size > self.capacity:
                self._doom(self._objects[min(stored)])
            if self.used + size > self.capacity and not stored and not self._doomed:
                return False
            await self._delete_doomed()
        return True

    async def sweep(self) -> int:
        """Give up objects whose blocks are all dead. How many."""
        with self.index.lock:
            states = self.index.rows["state"]
            stored = [one for one in self._objects.values() if one.is_stored]
            empty = [one for one in stored if not np.isin(states[one.rows], (PENDING, ALIVE)).any()]
        for one in empty:
            self._doom(one)
            await trio.lowlevel.checkpoint()
        return len(empty)

    def _doom(self, one: StoredObject) -> None:
        """An object is to be deleted; its blocks are absent from now on."""
        if self._objects.pop(one.number, None) is not None:
            self.index.forget(one.rows)
            one.rows = np.zeros(0, np.int64)
        self._doomed[one.number] = one

    async def _delete_doomed(self) -> None:
        numbers = sorted(self._doomed)
        if numbers:
            for number in numbers:
                self._note(VOID, number)
            await self.sync_graves()
            await self._writer.delete([layout.object_name(number) for number in numbers])
            self.breaker.answered()
            self.counters["removed_objects"] += len(numbers)
            for number in numbers:
                self._doomed.pop(number, None)

    async def compare(self) -> list[str]:
        """What the bucket has beside what is known here: what is wrong. EngineError.

        Blocks of an object that is gone, or has another length, are absent from now on. Nobody else stores objects
        here: one that is not known is deleted.
        """
        before = {one.number: one for one in (*self._objects.values(), *self._doomed.values())}
        stored, following, wrong = {number for number, one in before.items() if one.is_stored}, self._next, list[str]()
        listed = {layout.object_number(one.name): one.size for one in await self._writer.list("blocks/")}
        for number in sorted(stored & self._objects.keys()):
            one = self._objects[number]
            if (size := listed.get(number)) != one.size:
                is_what = "is gone" if size is None else f"has {size} bytes, not {one.size}"
                wrong.append(f"cold object {number} {is_what}")
                self._doom(one)
        for found, size in sorted((number, size) for number, size in listed.items() if number is not None):
            if found < following and found not in before:
                wrong.append(f"cold object {found} is not known to this volume")
                self._doomed[found] = StoredObject(found, size)
        return wrong

    async def keep_up(self) -> None:
        """Delete what is of no use, until cancelled."""
        while True:
            await trio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
                if not self.breaker.is_open:
                    await self._delete_doomed()
                    await self.make_room(0)
            except EngineError as error:
                self.breaker.failed(error)

    async def store(self, heads: npt.NDArray[np.void], data: memoryview, is_there: Callable[[], Mask]) -> Mask | None:
        """Store blocks as one object. Which of them are here then; None: it is not stored.

        ``data``: of the whole object; the part before the blocks is filled here. ``is_there``: which blocks the volume
        has still: these count, even if they leave it from then on.
        """
        size = len(data)
        if not self.is_loaded or not self.is_usable:
            return None
        try:
            if size > self.capacity or not await self.make_room(size):
                return None
        except EngineError as error:
            self.breaker.failed(error)
            return None
        one = await self._begin(size)
        if one is None:
            return None
        with self.gate:
            heads = heads.copy()
            heads["state"][~is_there()] = forms.FREE_HEAD
            one.rows = self._enter(one.number, heads, PENDING)
            one.oldest = int(heads["sequence"].min())
        if not len(one.rows):  # all have left the volume meanwhile
            self._note(VOID, one.number)
            return None
        if not await self._put(one, heads, data):
            return None
        one.is_stored = True
        with self.index.lock:
            self.index.show(one.rows)
            is_here = self.index.rows["state"][one.rows] == ALIVE
            lows = self.index.rows["low"][one.rows[is_here]]
        self.counters["stored_blocks"] += len(lows)
        return np.isin(heads["low"], lows)

    async def _begin(self, size: int) -> StoredObject | None:
        """An object that is about to be put. None: that cannot be noted."""
        one = StoredObject(self._next, size)
        self._next += 1
        try:
            self._log.append(BEGUN, np.array([one.number], np.uint64))
            await trio.to_thread.run_sync(self._log.sync)
        except OSError as error:
            self._turn_off(error)
            return None
        return one

    async def _put(self, one: StoredObject, heads: npt.NDArray[np.void], data: memoryview) -> bool:
        """False: the bucket does not have it, and it is given up."""
        layout.write_heads(data, self._volume_id, one.number, heads, one.size)
        self._objects[one.number] = one
        stored = False
        try:
            await self._writer.put(layout.object_name(one.number), data, ABSENT, is_given=True)
            stored = True
        except Changed:
            log.warning("there is a cold object %d that this volume did not store: it is deleted", one.number)
        except EngineError as error:
            self.counters["failed_puts"] += 1
            self.breaker.failed(error)
        finally:
            if not stored:  # it may come late
                self._doom(one)
                with self.gate:
                    self._note(VOID, one.number)
        if stored:
            self.breaker.answered()
            self._note(STORED, one.number)
            self.counters["stored_objects"] += 1
            self.counters["stored_bytes"] += len(data)
        return stored

    # -- objects that are mostly dead ----------------------------------------------------------------------

    async def mostly_dead(self, share: float) -> list[StoredObject]:
        """Objects of whose bytes less than this share can be read: the deadest first, and none that is wholly dead."""
        stored = [one for one in self._objects.values() if one.is_stored]
        return await trio.to_thread.run_sync(_mostly_dead, self.index.rows, stored, share)

    def alive_in(self, one: StoredObject) -> Rows:
        """Rows of an object whose blocks may be served."""
        with self.index.lock:
            rows = one.rows[self.index.rows["state"][one.rows] == ALIVE]
            groups = self.index.rows["group"][rows]
            valid = [group for group in np.unique(groups).tolist() if self.is_valid(self.index.group(group))]
            served: Rows = rows[np.isin(groups, valid)]
            return served

    async def store_again(
        self, rows: Rows, entries: npt.NDArray[np.void], heads: npt.NDArray[np.void], data: memoryview
    ) -> bool:
        """Store blocks that are alive as one more object, and have rows say that they are there. False: they are not.

        ``entries``: the rows when ``data`` was read. Blocks that died meanwhile have graves, which count in any object.
        """
        if self.used + len(data) > self.capacity or not self.is_usable:
            return False
        one = await self._begin(len(data))
        if one is None:
            return False
        one.oldest = int(heads["sequence"].min())
        if not await self._put(one, heads, data):
            return False
        places = layout.offsets_of(heads["length"].astype(np.int64))[:-1] // layout.STEP
        with self.gate, self.index.lock:
            now, stays = self.index.rows, np.ones(len(rows), np.bool_)
            for name in ("low", "high", "object", "place", "state"):
                stays &= now[name][rows] == entries[name]
            moved = rows[stays]
            now["object"][moved], now["place"][moved] = one.number, places[stays]
            one.rows, one.is_stored = moved, True
            for number in np.unique(entries["object"]).tolist():
                if (former := self._objects.get(number)) is not None:
                    former.rows = np.setdiff1d(former.rows, moved)
        self.counters["repacked_objects"] += 1
        self.counters["repacked_blocks"] += len(moved)
        await self.sweep()
        return True

    def _note(self, kind: int, number: int) -> None:
        try:
            self._log.append(kind, np.array([number], np.uint64))
        except OSError as error:
            self._turn_off(error)

    async def sync_graves(self) -> None:
        """Return when graves survive a loss of power."""
        if self._log.is_dirty and not self._is_off:
            try:
                await trio.to_thread.run_sync(self._log.sync)
            except OSError as error:
                self._turn_off(error)

    # -- bytes ---------------------------------------------------------------------------------------------

    async def read(self, rows: Rows) -> list[memoryview | None]:
        """The bytes of blocks, unverified; None: they cannot be read now."""
        with self.index.lock:
            entries = self.index.rows[rows].copy()
        found: list[memoryview | None] = [None] * len(rows)
        await self._read_entries(entries, range(len(rows)), found)
        with self.index.lock:
            now = self.index.rows[rows].copy()
        has_moved = (now["object"] != entries["object"]) & (now["state"] == ALIVE) & (now["low"] == entries["low"])
        again = [place for place in np.flatnonzero(has_moved).tolist() if found[place] is None]
        await self._read_entries(now, again, found)  # they were packed anew meanwhile
        return found

    async def _read_entries(
        self, entries: npt.NDArray[np.void], places: Sequence[int], found: list[memoryview | None]
    ) -> None:
        async with trio.open_nursery() as nursery:
            for run in runs_of(entries[list(places)]):
                nursery.start_soon(self._read_run, entries, [places[place] for place in run], found)

    async def _read_run(
        self, entries: npt.NDArray[np.void], places: Sequence[int], found: list[memoryview | None]
    ) -> None:
        own = entries[list(places)]
        starts = own["place"].astype(np.int64) * layout.STEP
        start, end = int(starts[0]), int((starts + own["length"]).max())
        target, number = memoryview(bytearray(end - start)), int(own["object"][0])
        try:
            await self._reader.read(layout.object_name(number), [Range(start, target)])
        except NoObject:
            log.warning("the cold object %d is gone: its blocks are absent", number)
            if number in self._objects:
                self._doom(self._objects[number])
            return
        except EngineError as error:
            self.counters["failed_reads"] += 1
            self.breaker.failed(error)
            return
        self.breaker.answered()
        for place, offset, length in zip(places, starts.tolist(), own["length"].tolist(), strict=True):
            found[place] = target[offset - start : offset - start + length]
        self.counters["read_blocks"] += len(places)
        self.counters["read_bytes"] += end - start

    @contextmanager
    def taking(self, row: int, sequence: int) -> Iterator[bool]:
        """While a block is brought back: whether it is still the newest of its name."""
        with self.gate:
            entry = self.index.rows[row]
            yield entry["state"] == ALIVE and int(entry["sequence"]) == sequence

    def note_hot(self, row: int, sequence: int) -> None:
        """The block of a row was brought back, as this one. In the body of `taking`."""
        self.index.rows["hot"][row] = sequence

    def note_damaged(self, row: int) -> None:
        """The bytes of a block were not those of its head."""
        self.counters["damaged_blocks"] += 1
        self.index.end(np.array([row], np.int64))

    def clear(self, is_gone: Callable[[ColdGroup], bool]) -> None:
        """Blocks of groups are dead, and later mounts know that by other means."""
        with self.gate, self.index.lock:
            numbers = [number for number, group in enumerate(self.index.groups) if is_gone(group)]
            rows = np.flatnonzero(np.isin(self.index.rows["group"], numbers) & (self.index.rows["state"] != 0))
            self.index.end(rows)

    def statistics(self) -> dict[str, Any]:
        return {
            **self.counters,
            "blocks": self.index.count,
            "block_bytes": self.index.bytes,
            "objects": len(self._objects),
            "used_bytes": self.used,
            "capacity": self.capacity,
            "is_loaded": self.is_loaded,
            "failure": "it has ended" if self._is_off else self.breaker.reason,
        }

    def close(self) -> None:
        self._log.close()


def _mostly_dead(rows: npt.NDArray[np.void], objects: list[StoredObject], share: float) -> list[StoredObject]:
    """``rows`` may change meanwhile: then it is found out later."""
    alive = np.flatnonzero(rows["state"] == ALIVE)
    if not len(alive):
        return []
    numbers = rows["object"][alive].astype(np.int64)
    first = int(numbers.min())
    sizes = np.bincount(numbers - first, rows["length"][alive])
    found = []
    for one in objects:
        place = one.number - first
        live = float(sizes[place]) if 0 <= place < len(sizes) else 0.0
        if 0 < live < share * one.size:
            found.append((live / one.size, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def runs_of(entries: npt.NDArray[np.void]) -> Iterator[list[int]]:
    """Places of blocks that lie together in one object: each run is read at once."""
    order = np.lexsort((entries["place"], entries["object"])).tolist()
    run: list[int] = []
    for at in order:
        start = int(entries["place"][at]) * layout.STEP
        if run:
            first, last = entries[run[0]], entries[run[-1]]
            begin, end = int(first["place"]) * layout.STEP, int(last["place"]) * layout.STEP + int(last["length"])
            is_near = first["object"] == entries["object"][at] and start - end <= GAP
            if not is_near or start + int(entries["length"][at]) - begin > READ_MAX:
                yield run
                run = []
        run.append(at)
    if run:
        yield run
