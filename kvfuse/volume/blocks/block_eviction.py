"""Removes blocks where their room is wanted: by the order of each namespace's policy, in columns.

Threads of rings note puts and uses; the event loop tells the policies of them, in turns, and before it asks them. A
policy is asked under its lock: threads ask it which blocks a full namespace admits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from math import inf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.native._blocks import name_keys
from kvfuse.native.blockforms import name_columns
from kvfuse.policy.blockrows import ROW
from kvfuse.policy.column_policy import ColumnPolicy, Victims
from kvfuse.volume.api import NameColumns
from kvfuse.volume.blocks.block_books import BlockBooks
from kvfuse.volume.blocks.block_news import BlockNews
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables
from kvfuse.volume.blocks.kernel_answers import KernelAnswers, Notes
from kvfuse.volume.blocks.uses_elsewhere import UsesElsewhere
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.measures.measures import REASONS, SegmentsTier
from kvfuse.volume.namespaces.settings import ROOT, Settings

STEP_SHARE = 0.005
"""of what is used: what one step of an eviction frees at least"""
SCATTERED_SHARE = 0.03
"""of the volume: free slots beyond which whole slabs are emptied, where slots of another size are wanted"""
NOTED_MAX = 1 << 14
LOOK_SECONDS = 1.0
"""within which a file is made whose name the kernel looked up for that"""
LOOKED_MAX = 1 << 14
FRESH_SECONDS = 0.25
"""within which a file that was closed gets its name: until then it goes only where nothing else can"""
ROWS_AHEAD = 1 << 14
"""rows that a policy knows before they are used, at least"""
AHEAD_MAX = 1 << 31
TIME_MAX = (1 << 32) - 1
"""seconds, as rows have them"""
CHUNK = 1 << 16
"""rows that are looked at together"""

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class LeavingBlocks(Protocol):
    """Blocks of one table."""

    @property
    def table(self) -> BlockTable: ...
    @property
    def rows(self) -> Numbers: ...
    @property
    def sequences(self) -> Words: ...
    @property
    def sizes(self) -> Numbers: ...


class ColdDoor(Protocol):
    """What an eviction asks of the cold tier (`cold_blocks.ColdBlocks`)."""

    leaving: Counter[int]

    def leave(self, found: npt.NDArray[np.void], sequences: Words) -> None: ...
    def left(self, found: npt.NDArray[np.void], sequences: Words) -> None: ...
    def offer(self, namespace: int, gone: Victims) -> tuple[Victims, int]: ...
    def surrender(self, size: int, namespaces: Collection[int]) -> int: ...
    def surrender_stored(self, size: int, namespaces: Collection[int]) -> int: ...
    def note_evicted(self, namespace: int, found: npt.NDArray[np.void], sequences: Words) -> None: ...


class NamespacePolicy:
    """The policy of one namespace. ``lock``: of whoever calls it."""

    def __init__(self, settings: Settings, slot_sizes: npt.NDArray[np.uint32]) -> None:
        def sizes(slabs: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint32]) -> Numbers:
            return np.maximum(slot_sizes[np.minimum(slabs, len(slot_sizes) - 1)], 1).astype(np.int64)

        self.settings = settings
        self.sizes = sizes
        self.policy = ColumnPolicy(settings.eviction, settings.admission, sizes)
        self.lock = threading.Lock()
        self.tables: dict[int, tuple[BlockTable, int]] = {}
        """place -> table, and how many rows of it the policy knows"""


@dataclass
class BlockEviction:
    """Of one membership. Event loop only, but where a docstring says otherwise.

    ``slot_sizes``: of each slab. ``use``: (bytes of slots, blocks) of a namespace and those in it.
    """

    native: NativeCore
    tables: BlockTables
    core: Core
    slot_sizes: npt.NDArray[np.uint32]
    use: Callable[[int], tuple[int, int]]
    news: BlockNews
    answers: KernelAnswers
    cold: ColdDoor | None = None
    """where blocks go that leave the volume; None: nowhere"""
    ahead: dict[int, int] = field(default_factory=dict)
    """namespace -> seconds by which its clock was moved ahead"""
    books: defaultdict[int, BlockBooks] = field(default_factory=lambda: defaultdict(BlockBooks))
    """namespace -> its figures"""
    _policies: dict[int, NamespacePolicy] = field(default_factory=dict)
    _noted: deque[tuple[BlockTable, Numbers, Numbers | None]] = field(default_factory=deque)
    """(table, rows, sizes) of puts; without sizes: of uses"""
    _looked: dict[tuple[int, bytes], float] = field(default_factory=dict)
    """(directory, name) that the kernel looked up and did not find -> when"""
    _fresh: dict[int, float] = field(default_factory=dict)
    """key of a block that a file becomes -> until when it is fresh"""
    _late: dict[int, Victims] = field(default_factory=dict)
    """namespace -> its victims that were fresh: they go with the next ones, unless they have another name by then"""
    _latest: float = 0.0
    _full: frozenset[int] = frozenset()
    """namespaces that store a block only for another one; ROOT: the volume is full"""

    def __post_init__(self) -> None:
        self.answers.on_notes.append(self._hear)
        self.elsewhere = UsesElsewhere()
        """what was used here of other hosts' blocks"""

    # -- what threads note and ask -----------------------------------------------------------------------

    def expiry(self, namespace: int, now: int, wanted: int) -> int:
        """When a block that is stored now expires, ``wanted`` or as the namespace says; 0: never. Any thread."""
        found = self.core.namespaces.all.get(namespace)
        ttl = found.settings.ttl if found is not None else 0.0
        latest = min(now + max(1, int(ttl)), TIME_MAX) if ttl else 0
        return min(wanted, latest) if wanted and latest else wanted or latest

    def note_put(self, table: BlockTable, results: Numbers, sizes: Numbers) -> None:
        """Any thread."""
        if len(self._noted) < NOTED_MAX:
            self._noted.append((table, results, sizes))

    def note_use(self, table: BlockTable, rows: Numbers) -> None:
        """Blocks were read. Any thread."""
        if len(self._noted) < NOTED_MAX:
            self._noted.append((table, rows, None))

    def note_chain(
        self, tables: Sequence[BlockTable], names: NameColumns, rows: Sequence[Numbers], *, is_read: bool = False
    ) -> None:
        """Somebody asked for a chain of blocks, root first, of a directory with these tables. Any thread.

        ``rows``: of each table; below 0: it has no such block. ``is_read``: for their bytes.
        """
        if not tables or not len(names[1]):
            return
        keys, now = self._keys(tables[0], names, len(names[1])), self._now(tables[0].namespace)
        there = np.max(rows, axis=0) >= 0
        books, uses = self.books[tables[0].namespace], None
        with books.lock:
            if is_read:
                uses = books.read(keys, there, now)
            else:
                books.asked(keys, there, now)
        found = self._policies.get(tables[0].namespace)
        if found is None:
            return
        for table, own in zip(tables, rows, strict=True):
            which = own >= 0
            if table is tables[0]:
                which |= ~there
            if uses is not None:
                which &= uses
            with found.lock:
                if which.any() and table.place in found.tables:
                    found.policy.used(table.place, keys[which], own[which], now)

    def looked(self, directory: int, name: bytes) -> None:
        """The kernel looked up a name that means nothing. It may be about to make it: `look` counts it later."""
        if len(self._looked) < LOOKED_MAX:
            self._looked.setdefault((directory, name), time.monotonic())

    def named(self, directory: int, name: bytes) -> None:
        """A file was made under a name: the kernel looked it up for that."""
        self.answers.hear()
        self._looked.pop((directory, name), None)

    def _hear(self, notes: Notes) -> None:
        """Note what C has answered the kernel."""
        for table, rows in self._by_table(notes.puts):
            for key in table.rows["low"][rows].tolist():
                self._refresh(key)
            self.note_put(table, rows, table.rows["length"][rows].astype(np.int64))
        for table, rows in self._by_table(notes.uses):
            self.note_use(table, rows)
        for directory, was_made, name in notes.looks:
            if was_made:
                self._looked.pop((directory, name), None)
            else:
                self.looked(directory, name)

    def _by_table(self, noted: Sequence[tuple[int, ...]]) -> Iterator[tuple[BlockTable, Numbers]]:
        """``noted``: place of a table, row, and more."""
        rows = defaultdict[int, list[int]](list)
        for place, row, *_ in noted:
            rows[place].append(row)
        for place, some in rows.items():
            if (table := self.tables.all.get(place)) is not None:
                yield table, np.array(some, np.int64)

    def _settle_looks(self) -> None:
        """Count names that the kernel did not find, and that nobody made since."""
        before, settled = time.monotonic() - LOOK_SECONDS, defaultdict[int, list[bytes]](list)
        for place in list(takewhile(lambda place: self._looked[place] <= before, self._looked)):
            del self._looked[place]
            settled[place[0]].append(place[1])
        for directory, names in settled.items():
            tables = self.tables.of(directory)
            rows = [table.find(names, int(self._now(table.namespace)))[0] for table in tables]
            absent = np.flatnonzero(np.max(rows, axis=0) < 0).tolist() if rows else []
            if absent:
                columns = name_columns([names[number] for number in absent])
                none = np.full(len(absent), -1, np.int64)
                self.note_chain(tables, columns, [none for _ in tables], is_read=True)

    def admits(self, table: BlockTable, names: NameColumns) -> npt.NDArray[np.bool_] | None:
        """Which blocks are worth storing; None: all. Any thread."""
        if not self._full or (ROOT not in self._full and table.namespace not in self._full):
            return None
        found = self._policies.get(table.namespace)
        if found is None or found.settings.admission == "all":
            return None
        count = len(names[1])
        with found.lock:
            admitted = found.policy.admits(self._keys(table, names, count), self._now(table.namespace), False)
        self.books[table.namespace].counters["refused"] += count - int(np.count_nonzero(admitted))
        return admitted

    def _keys(self, table: BlockTable, names: NameColumns, count: int) -> Words:
        keys = np.zeros(count, np.uint64)
        name_keys(table.memory, table.readers.directory, *names, keys)
        return keys

    def _now(self, namespace: int) -> float:
        """Seconds since the epoch, by the clock of a namespace, which never runs backwards. Any thread."""
        self._latest = max(self._latest, time.time())
        return self._latest + self.ahead.get(namespace, 0)

    # -- what the event loop does ------------------------------------------------------------------------

    def count_slow(self, namespace: int, count: int) -> None:
        """So many blocks that were just asked for are not worth reading. Any thread."""
        books = self.books[namespace]
        with books.lock:
            books.slow(count)

    @contextmanager
    def becoming(self, table: BlockTable, name: bytes) -> Iterator[None]:
        """A file that was closed becomes a block in here. Most get another name then: it may not go in between."""
        key = int(self._keys(table, name_columns([name]), 1)[0])
        self._fresh[key] = inf
        try:
            yield
        finally:
            self._refresh(key)

    def note_back(self, table: BlockTable, row: int) -> None:
        """A block came back from the cold tier for somebody who reads it next: it is as just used, whatever was asked
        for before, and fresh."""
        self._tell()
        self.used_elsewhere(table, np.array([row], np.int64))
        self._refresh(int(table.rows["low"][row]))

    def _refresh(self, key: int) -> None:
        now = time.monotonic()
        self._fresh.pop(key, None)
        self._fresh[key] = now + FRESH_SECONDS
        for old in list(takewhile(lambda key: self._fresh[key] <= now, self._fresh)):
            del self._fresh[old]

    def advance(self, namespace: int, seconds: float) -> None:
        """Move the clock of a namespace ahead, by whole seconds."""
        self._tell()
        self.ahead[namespace] = min(self.ahead.get(namespace, 0) + round(seconds), AHEAD_MAX)

    def look(self) -> None:
        """Tell policies what was noted, remove what has expired, and keep namespaces below their high water marks."""
        self._tell()
        self._settle_looks()
        self.news.tell()
        for number, found in self._policies.items():
            with found.lock:
                gone = found.policy.expired(self._now(number), forms.SHADOWS)
            self._drop(gone, "expired")
        for number, books in list(self.books.items()):
            with books.lock:
                books.look(self._now(number))
        self._keep_below()
        self.news.tell()

    def _tell(self) -> None:
        self.answers.hear()
        self._meet_tables()
        stored: defaultdict[int, list[Words]] = defaultdict(list)
        for table, rows, sizes in self._take_notes():
            now = self._now(table.namespace)
            found = self._policies.get(table.namespace)
            if found is None or table.place not in found.tables:
                continue
            table = self.tables.current(table)
            there = rows >= 0
            places = rows[there]
            if not len(places) or int(places.max()) >= found.tables[table.place][1]:
                continue
            keys, books = table.rows["low"][places], self.books[table.namespace]
            if sizes is None:
                self.elsewhere.note(table, places)
            if sizes is not None:
                stored[table.namespace].append(keys)
            else:
                with books.lock:
                    uses = books.read(keys, np.ones(len(keys), np.bool_), now)
                if not uses.all():
                    keys, places = keys[uses], places[uses]
            with found.lock:
                if sizes is not None:
                    occupied = found.sizes(table.rows["slab"][places], table.rows["length"][places])
                    found.policy.added(table.place, places, keys, occupied, now)
                elif len(places):
                    found.policy.used(table.place, keys, places, now)
        for namespace, parts in stored.items():
            with self.books[namespace].lock:
                self.books[namespace].stored(np.concatenate(parts))

    def used_elsewhere(self, table: BlockTable, rows: Numbers) -> None:
        """Another host read these blocks: its own figures count that."""
        found = self._policies.get(table.namespace)
        if found is None or table.place not in found.tables or table.has_ended:
            return
        rows = rows[rows < found.tables[table.place][1]]
        if len(rows):
            with found.lock:
                found.policy.used(table.place, table.rows["low"][rows], rows, self._now(table.namespace))

    def _take_notes(self) -> Iterator[tuple[BlockTable, Numbers, Numbers | None]]:
        """What was noted, in its order, but for puts that follow each other in one table: they are one, the last one
        first, as of a batch the first block is the newest. A row that was put again is named once."""
        notes = [self._noted.popleft() for _ in range(len(self._noted))]
        for (_, is_put), some in groupby(notes, key=lambda note: (note[0].place, note[2] is not None)):
            group = list(some)
            if not is_put or len(group) == 1:
                yield from group
                continue
            rows = np.concatenate([rows for _, rows, _ in reversed(group)])
            sizes = np.concatenate([sizes for _, _, sizes in reversed(group) if sizes is not None])
            kept = np.sort(np.unique(rows, return_index=True)[1])
            yield group[0][0], rows[kept], sizes[kept]

    def _meet_tables(self) -> None:
        """Have policies know all rows of all tables, and those that are used next: they look at all when it grows."""
        for number, found in self._policies.items():
            for place, (table, _) in list(found.tables.items()):
                if table.has_ended or self.tables.all.get(place) is not table:
                    with found.lock:
                        found.policy.drop_table(place)
                    del found.tables[place]
                    if (late := self._late.get(number)) is not None:
                        self._late[number] = _chosen(late, late.tables != place)
        for table in self.tables.all.values():
            if table.has_ended:
                continue
            found = self._policy(table.namespace)
            used = len(table.rows)
            _, known = found.tables.get(table.place, (table, -1))
            if known < used or known < 0:
                rows = table.all_rows[: used + max(ROWS_AHEAD, used // 4)]
                with found.lock:
                    meet = found.policy.add_table if known < 0 else found.policy.grow_table
                    meet(table.place, rows.view(ROW))
                found.tables[table.place] = table, len(rows)

    def _policy(self, number: int) -> NamespacePolicy:
        found = self._policies.get(number)
        namespace = self.core.namespaces.all.get(number)
        settings = namespace.settings if namespace is not None else Settings(kind="blocks")
        same = found is not None and (found.settings.eviction, found.settings.admission) == (
            settings.eviction,
            settings.admission,
        )
        if found is None or not same:
            found = self._policies[number] = NamespacePolicy(settings, self.slot_sizes)
        found.settings = settings
        return found

    # -- room --------------------------------------------------------------------------------------------

    def make_room_in(self, namespace: int, size: int) -> bool:
        """Remove blocks of a namespace, or of those in it, for one more of ``size`` bytes. False: it has none."""
        self._tell()
        used, _ = self.use(namespace)
        self._full |= {namespace}
        return self._evict_now(self._inner(namespace), max(size, int(used * STEP_SHARE))) > 0

    def make_room(self, size: int) -> bool:
        """Remove blocks of any namespace, or all of some slabs, for ``size`` bytes more. False: there are none."""
        self._tell()
        self._full |= {ROOT}
        data_size = self.core.geometry.data_size
        if self.native.statistics()["free_slots_bytes"] > SCATTERED_SHARE * data_size and self.empty_slabs():
            return True
        return self._evict_now(list(self._policies), max(size, int(STEP_SHARE * data_size))) > 0

    def _evict_now(self, numbers: Sequence[int], size: int) -> int:
        """Remove blocks of so many bytes, as somebody waits for their room. The bytes.

        With a cold tier, the next victims wait for the bucket, and those go that have waited longest, unless enough of
        the victims are in the bucket already. What is on its way there goes if there is nothing else.
        """
        if self.cold is None:
            return self._evict(numbers, size)
        before = self._leaving(numbers)
        freed = self._evict(numbers, size, ahead=True) - (self._leaving(numbers) - before)
        if freed < size:
            freed += self.cold.surrender(size - freed, numbers)
        return freed or self.cold.surrender_stored(size, numbers)

    def _keep_below(self) -> None:
        accounts, full = self.core.namespaces.accounts, set()
        for account in list(accounts.all.values()):
            size, count = self.use(account.number)
            if not size:
                continue
            size -= self._leaving(self._inner(account.number))
            settings = account.settings
            excess = _excess(settings, account.size + size, account.files + count, settings.high_water)
            if excess > 0:
                excess = _excess(settings, account.size + size, account.files + count, settings.low_water)
                self._evict(self._inner(account.number), excess, ahead=True)
            if _excess(settings, account.size + size, account.files + count, settings.low_water) > 0:
                full.add(account.number)
        own = [found.settings for found in self._policies.values()]
        if own:
            part, found = self.core.part(), self.native.statistics()
            total = part.size
            free = part.size - part.used + found["free_slots_bytes"] + found["going_slots_bytes"]
            free += found["free_slabs"] * self.core.geometry.slab_size + self._leaving(self._policies)
            if total - free > min(one.high_water for one in own) * total:
                low = min(one.low_water for one in own) * total
                self._evict(list(self._policies), int(total - free - low), ahead=True)
            if total - free > min(one.low_water for one in own) * total:
                full.add(ROOT)
        self._full = frozenset(full)

    def _leaving(self, namespaces: Iterable[int]) -> int:
        """Bytes of slots of blocks that are about to leave the volume."""
        return sum([self.cold.leaving[one] for one in namespaces]) if self.cold is not None else 0

    def _inner(self, namespace: int) -> list[int]:
        """A namespace and those in it."""
        accounts = self.core.namespaces.accounts
        return [one for one in self._policies if one == namespace or accounts.is_within(one, namespace)]

    def _own_use(self, number: int) -> tuple[int, int]:
        """(bytes of slots, blocks) of a namespace without those in it."""
        accounts, (size, count) = self.core.namespaces.accounts, self.use(number)
        for one in accounts.all:
            chain = accounts.chain(one)
            if one != number and (chain[1] if len(chain) > 1 else ROOT) == number:
                inner_size, inner_count = self.use(one)
                size, count = size - inner_size, count - inner_count
        return size, count

    def _evict(self, numbers: Sequence[int], size: int, *, ahead: bool = False) -> int:
        """Remove blocks of so many bytes: of namespaces that are not pinned first, each by its part. The bytes.

        ``ahead``: nobody waits for their room, so they may go by the cold tier, in a moment.
        """
        freed = 0
        for is_pinned in (False, True):
            chosen = [one for one in numbers if self._policies[one].settings.soft_pin == is_pinned]
            weights = {one: self._own_use(one)[0] + 1 for one in chosen}
            total = sum(weights.values())
            before, is_offered = freed, True
            while freed == before and is_offered:  # what is fresh is offered once
                is_offered = False
                for one, weight in weights.items():
                    found, wanted = self._policies[one], (size - freed) * weight // total
                    with found.lock:
                        gone = found.policy.victims(max(1, wanted), self._now(one), forms.SHADOWS)
                    is_offered |= len(gone.rows) > 0
                    freed += self._drop_settled(one, gone, ahead=ahead)
            if freed >= size:
                break
        return freed or self._drop_late(numbers)

    def _drop_settled(self, number: int, gone: Victims, *, ahead: bool = False) -> int:
        """Remove victims of a namespace, and those that were late, but for blocks that are fresh."""
        if number in self._late:
            gone = Victims._make(map(np.concatenate, zip(self._late.pop(number), gone, strict=True)))
        now = time.monotonic()
        keys = np.array([key for key, until in self._fresh.items() if until > now], np.uint64)
        is_fresh = np.zeros(len(gone.rows), np.bool_)
        for place in np.unique(gone.tables).tolist() if len(keys) else ():
            own = gone.tables == place
            is_fresh[own] = np.isin(self.tables.all[place].rows["low"][gone.rows[own]], keys)
        if is_fresh.any():
            self._late[number] = _chosen(gone, is_fresh)
            gone = _chosen(gone, ~is_fresh)
        if ahead and self.cold is not None:
            gone, leaving = self.cold.offer(number, gone)
            return leaving + self._drop(gone, "room")
        return self._drop(gone, "room")

    def drop_leaving(self, one: LeavingBlocks) -> int:
        """Remove blocks that a policy gave up a moment ago. The bytes of slots."""
        if one.table.has_ended or self.tables.all.get(one.table.place) is not one.table:
            return 0
        tables = np.full(len(one.rows), one.table.place, np.int64)
        ages = np.zeros(len(one.rows))
        return self._drop(Victims(tables, one.rows, one.sequences, one.sizes, ages), "room")

    def empty_slabs_from(self, first: int) -> int:
        """Remove all blocks of slabs from this one on, also of those that are pinned, or fresh. The bytes."""
        self._tell()
        slabs, freed = range(first, self.core.geometry.slab_count), 0
        for number, found in self._policies.items():
            with found.lock:
                gone = found.policy.in_slabs(slabs, self._now(number), forms.SHADOWS)
            freed += self._drop(gone, "room")
        return freed + self._drop_late(list(self._policies))

    def empty_slabs(self) -> int:
        """Remove all blocks of some slabs, those that have the fewest bytes. The bytes."""
        self._tell()
        count = max(1, int(STEP_SHARE * self.core.geometry.slab_count))
        sizes: npt.NDArray[np.int64] = np.zeros(self.core.geometry.slab_count, np.int64)
        pinned = np.zeros(len(sizes), np.bool_)
        for found in self._policies.values():
            with found.lock:
                columns = found.policy.by_slab()
            sizes[columns.slabs] += columns.sizes
            pinned[columns.slabs] |= found.settings.soft_pin
        sizes[self.slot_sizes[: len(sizes)] == 0] = 0  # slabs of other hosts
        if sizes[~pinned].any():
            sizes[pinned] = 0
        for late in self._late.values():  # whose slabs would not become empty yet
            for place in np.unique(late.tables).tolist():
                sizes[self.tables.all[place].rows["slab"][late.rows[late.tables == place]]] = 0
        used = np.flatnonzero(sizes)
        order, freed = used[np.argsort(sizes[used], kind="stable")], 0
        while not freed and len(order):  # of some slabs all may be fresh
            chosen, order = order[:count], order[count:]
            for number, found in self._policies.items():
                with found.lock:
                    gone = found.policy.in_slabs(chosen.tolist(), self._now(number), forms.SHADOWS)
                freed += self._drop_settled(number, gone)
        return freed or self._drop_late(list(self._policies))

    def _drop_late(self, numbers: Sequence[int]) -> int:
        """Remove blocks that are fresh, as there are no others."""
        return sum([self._drop(self._late.pop(one), "room") for one in numbers if one in self._late])

    def _drop(self, gone: Victims, reason: str) -> int:
        """The bytes of slots that are free."""
        freed = 0
        for place in np.unique(gone.tables).tolist():
            own, table = gone.tables == place, self.tables.all[place]
            rows = np.ascontiguousarray(gone.rows[own], dtype=np.int64)
            keys, stored = table.rows["low"][rows], table.rows["stored"][rows]
            sizes, sequences = np.zeros(len(rows), np.int64), np.ascontiguousarray(gone.sequences[own])
            if self.cold is not None:
                found = table.rows[rows].copy()
                self.cold.leave(found, sequences)
            self.native.drop_rows(table.number, rows, sequences, sizes)
            freed += int(sizes.sum())
            went = sizes > 0
            if self.cold is not None:
                self.cold.left(found[went], sequences[went])
                if reason == "room":
                    self.cold.note_evicted(table.namespace, found[went], sequences[went])
            self._count_gone(table, keys[went], stored[went], reason)
            self.news.gone(table, rows[went], gone.sequences[own][went])
        return freed

    def _count_gone(self, table: BlockTable, keys: Words, stored: npt.NDArray[np.uint32], reason: str) -> None:
        books, now = self.books[table.namespace], self._now(table.namespace)
        with books.lock:
            books.gone(keys, reason, np.maximum(now - stored.astype(np.float64), 0.0))

    def cleared(self, table: BlockTable) -> None:
        """All blocks of a table are about to go."""
        for start in range(0, len(table.rows), CHUNK):
            rows = table.rows[start : start + CHUNK]
            rows = rows[rows["version"] & np.uint64(1) == 1]
            self._count_gone(table, rows["low"], rows["stored"], "cleared")

    # -- figures -----------------------------------------------------------------------------------------

    def describe(self, namespace: int, unread: Mapping[str, int], tier: SegmentsTier) -> dict[str, Any]:
        """Figures of a namespace, as `Cache.statistics`."""
        self._tell()
        size, count = self._own_use(namespace)
        books = self.books[namespace]
        with books.lock:
            return books.statistics(count, size, unread, tier)

    def statistics(self) -> dict[str, Any]:
        """Blocks that went, by reason, and those that were not admitted."""
        names = (*REASONS, "refused")
        return {name: sum([books.counters[name] for books in self.books.values()]) for name in names}


def _chosen(blocks: Victims, which: npt.NDArray[np.bool_]) -> Victims:
    return Victims._make(column[which] for column in blocks)


def _excess(settings: Settings, size: int, count: int, share: float) -> int:
    """Bytes above a share of the quotas."""
    excess = size - int(settings.capacity * share) if settings.capacity else 0
    if settings.blocks and (more := count - int(settings.blocks * share)) > 0:
        excess = max(excess, more * size // max(count, 1))
    return excess
