"""Indexes of blocks in the shared-memory tier, for clients that find and copy blocks themselves (`kvfuse/blockindex`).

There is an index for each read class that some client asked for. A block is in it while the tier keeps it and its name
means it: the tier says so when it keeps or drops a block, the table of names when a name changes, and whoever changes
what people may do ends indexes. All of that is before the change. Any thread may call, and waits for a short lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvfuse.blockindex import (
    ASKED_MAX,
    ASKED_OFFSET,
    ASKED_SIZE,
    BUCKET,
    BUCKETS_MAX,
    ENDED,
    FIELDS,
    FILTER_BITS_MIN,
    HEADER,
    HEADER_SIZE,
    LIVE,
    MAGIC,
    MULTIPLIERS_OFFSET,
    NEIGHBOURS,
    STATE,
    SUMS,
    TOUCHES_MAX,
    TOUCHES_SIZE,
    VALID_UNTIL,
    VERSION,
    WORDS_MAX,
    Fingerprints,
    Numbers,
    Table,
    fence,
    fingerprints_of,
    places,
)
from kvfuse.checksum import extent_checksum
from kvfuse.keys import HASHED, file_names, key_of
from kvfuse.volume.views.arenas import ReadClass, TierBlock
from kvfuse.volume.views.name_filter import NameFilter

BUCKETS_MIN = 512
FULL = 0.75
"""of the slots: then a table of twice as many takes the place of this one"""
INDEXES_MAX = 256
"""each takes a descriptor"""
SAMPLE_SECONDS = 0.05
"""between looks at what clients read by themselves"""
SAMPLE_SLOTS, PAGE_SLOTS = 8192, 1024
"""looked at in one go, slots and keys alike: of all clients, of one page; what clients write beyond is not seen"""
USES_MAX = 1 << 12
"""samples that wait for somebody to take them"""
TIER_DRAM = 1
"""as in answers of EXISTS with COSTS"""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x0010  # F_SEAL_FUTURE_WRITE


Shown = tuple[bytes, int, TierBlock]
"""name, inode, block"""


class _Memory:
    """One memfd with a table, which others can only read."""

    def __init__(self, buckets: int, filter_bits: int, directory: int) -> None:
        fingerprints, slots, bitmap, size = places(buckets, filter_bits)
        self.descriptor = os.memfd_create("kvfuse-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            memory = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.fchmod(self.descriptor, 0o400)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)
        where = fingerprints, slots, size, directory, bitmap, filter_bits
        HEADER.pack_into(memory.data, 0, MAGIC, VERSION, buckets, *where)
        random = os.urandom(SUMS * WORDS_MAX * 8)
        memory[MULTIPLIERS_OFFSET : MULTIPLIERS_OFFSET + len(random)] = np.frombuffer(random, np.uint8)
        memory[:HEADER_SIZE].view(np.uint64)[STATE] = LIVE
        self.table = Table(memory)
        self.fields = self.table.slots.view(np.uint8).data


class BlockIndex:
    """The table of one read class. `Residents` has it, and calls it under its lock."""

    def __init__(self, readers: ReadClass, buckets: int, filter_bits: int, valid_until: int) -> None:
        self.readers = readers
        self.user_count = 0
        """connections that have it"""
        self.names: dict[int, bytes] = {}
        """slot -> file name"""
        self._slots: dict[bytes, int] = {}
        self._inos: dict[int, int] = {}
        """slot -> inode"""
        self._memory = _Memory(buckets, filter_bits, readers.directory)
        self._table = self._memory.table
        self.filter = NameFilter(self._table)
        self.extend_to(valid_until)

    @property
    def size(self) -> int:
        return len(self._table.memory)

    @property
    def buckets(self) -> int:
        return int(self._table.buckets)

    def __len__(self) -> int:
        return len(self._slots)

    def descriptor(self) -> int:
        """A new one, which can only be read."""
        return os.open(f"/proc/self/fd/{self._memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def extend_to(self, valid_until: int) -> None:
        self._table.words[VALID_UNTIL] = valid_until

    def tell_of_neighbours(self, are_there: bool) -> None:
        self._table.words[NEIGHBOURS] = are_there

    def end(self) -> None:
        self._table.words[STATE] = ENDED
        self.filter.give_up()
        self._slots.clear()
        self._inos.clear()
        self.names.clear()

    def ino_of(self, name: bytes) -> int:
        """0: it is not in the table."""
        slot = self._slots.get(name)
        return 0 if slot is None else self._inos[slot]

    def show_first(self, rows: Sequence[Shown]) -> bool:
        """Show blocks in an empty table, many at once. False: some found no place."""
        keys = [key_of(name) if not name.startswith(HASHED) else None for name, _, _ in rows]
        rows = [row for row, key in zip(rows, keys, strict=True) if key is not None]
        wanted = fingerprints_of(self._table.multipliers, [key for key in keys if key is not None])
        slots, free = np.full(len(rows), -1, np.int64), np.zeros(self.buckets, np.int64)
        for half in (0, 1):  # each in its first bucket where that has room, else in the second
            left = np.flatnonzero(slots < 0)
            buckets = (wanted[left, half] & np.uint64(self.buckets - 1)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            ordered = buckets[order]
            starts = np.searchsorted(ordered, ordered)  # of the run of its bucket
            places_in = free[ordered] + np.arange(len(ordered)) - starts
            fits = places_in < BUCKET
            slots[left[order[fits]]] = ordered[fits] * BUCKET + places_in[fits]
            np.add.at(free, ordered[fits], 1)
        shown = np.flatnonzero(slots >= 0)
        self._fill(slots[shown], wanted[shown], [rows[row] for row in shown.tolist()])
        return len(shown) == len(rows)

    def _fill(self, slots: Numbers, wanted: Fingerprints, rows: Sequence[Shown]) -> None:
        table = self._table.slots
        blocks = [block for _, _, block in rows]
        table["arena"][slots] = [block.arena for block in blocks]
        table["tier"][slots] = TIER_DRAM
        table["offset"][slots] = [block.offset for block in blocks]
        table["length"][slots] = [block.size for block in blocks]
        table["generation"][slots] = [ino for _, ino, _ in rows]
        self._table.fingerprints[slots] = wanted
        fence()
        table["version"][slots] = 1
        numbers = slots.tolist()
        names, inos = [name for name, _, _ in rows], [ino for _, ino, _ in rows]
        self.names, self._inos = dict(zip(numbers, names, strict=True)), dict(zip(numbers, inos, strict=True))
        self._slots = dict(zip(names, numbers, strict=True))

    def ino_at(self, slot: int) -> int:
        return self._inos[slot]

    def shown(self) -> list[tuple[bytes, int]]:
        """(name, inode) of all blocks."""
        return [(name, self._inos[slot]) for name, slot in self._slots.items()]

    def show(self, name: bytes, ino: int, block: TierBlock) -> bool:
        """The block can be found, if its name has a key. False: there is no place for it."""
        key = key_of(name) if not name.startswith(HASHED) else None
        if key is None:
            return True
        self.hide(name)
        table = self._table
        wanted = fingerprints_of(table.multipliers, [key])
        slot = self._place(wanted[0])
        if slot < 0 or len(self._slots) >= FULL * BUCKET * self.buckets:
            return False
        checksum = (extent_checksum(block.checksums, block.size), 1) if block.checksums else (0, 0)
        start, version = 64 * slot + 8, table.versions[8 * slot]
        FIELDS.pack_into(self._memory.fields, start, block.arena, TIER_DRAM, block.offset, block.size, *checksum, ino)
        table.fingerprints[slot] = wanted[0]
        fence()
        table.versions[8 * slot] = version + 1
        self._slots[name], self._inos[slot], self.names[slot] = slot, ino, name
        return True

    def _place(self, wanted: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> int:
        """A free slot of the emptier of two buckets; -1: both are full."""
        mask, best = self.buckets - 1, (0, -1)
        for half in (0, 1):
            first = (int(wanted[half]) & mask) * BUCKET
            free = [slot for slot in range(first, first + BUCKET) if slot not in self._inos]
            best = max(best, (len(free), free[0] if free else -1))
        return best[1]

    def hide(self, name: bytes) -> None:
        """The name does not mean that block any more, or its bytes are about to change."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        table = self._table
        table.versions[8 * slot] = table.versions[8 * slot] + 1
        fence()
        table.fingerprints[slot] = 0
        del self._inos[slot], self.names[slot]


class Touches:
    """A page that one client writes: the slots of an index whose blocks it read. A hint: it may write anything."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.descriptor = os.memfd_create("kvfuse-touches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, TOUCHES_SIZE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = np.frombuffer(mmap.mmap(self.descriptor, TOUCHES_SIZE), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)
        self._counts = memory[:16].view(np.uint64).data
        self._slots: npt.NDArray[np.uint32] = memory[HEADER_SIZE:ASKED_OFFSET].view(np.uint32)
        self._asked = memory[ASKED_OFFSET:].reshape(ASKED_MAX, ASKED_SIZE)
        self._seen = [0, 0]

    def take(self) -> list[int]:
        """Slots that were written since the last call, each once; of many the last ones."""
        return list(dict.fromkeys(self._slots[self._new(0, TOUCHES_MAX)].tolist()))

    @property
    def has_asked(self) -> bool:
        """`take_asked` has something."""
        return bool(self._counts[1] != self._seen[1])

    def take_asked(self) -> list[list[bytes]]:
        """The keys of each question since the last call; of many the last ones."""
        questions: list[list[bytes]] = [[]]
        for row in self._asked[self._new(1, ASKED_MAX)]:  # a copy: the page is the client's
            if length := int(row[0]):
                questions[-1].append(row[1 : 1 + length].tobytes())
            else:
                questions.append([])
        return [keys for keys in questions if keys]

    def _new(self, which: int, places_max: int) -> Numbers:
        """Places that were written since the last call, in order."""
        count = int(self._counts[which])
        new, self._seen[which] = min((count - self._seen[which]) % (1 << 64), PAGE_SLOTS), count
        first = (count - new) % places_max  # the count is the client's: any number
        return (first + np.arange(new)) % places_max


class Residents:
    """All indexes of a volume. `SharedTier` has it.

    ``note_use``: the block of an inode was read.
    """

    def __init__(self, note_use: Callable[[int], None]) -> None:
        self._note_use = note_use
        self._touches: deque[Touches] = deque()
        """in the order in which they are looked at"""
        self._sampled_at = 0.0
        self._uses: deque[tuple[int, list[bytes], bool]] = deque(maxlen=USES_MAX)
        self.by_directory: dict[int, dict[ReadClass, BlockIndex]] = {}
        """to be looked at without the lock; replaced, never changed"""
        self._shown: dict[int, tuple[BlockIndex, bytes]] = {}
        """inode -> where its block is shown"""
        self._valid_until = 0
        self._have_neighbours = False
        self._filter_bits: dict[int, int] = {}
        """directory -> what its next index needs, where that is not the least"""
        self._lock = threading.Lock()

    def open(self, readers: ReadClass, blocks: Iterable[Shown]) -> Touches | None:
        """The index of a read class, for one connection more, in a page for its touches. ``blocks`` (name, inode,
        block): what it shows if it is new. None: there are too many indexes."""
        with self._lock:
            index = self.by_directory.get(readers.directory, {}).get(readers)
            if index is None:
                if not self._has_room():
                    return None
                index = self._make(readers, blocks)
            touches = Touches(index)
            index.user_count += 1
            self._touches.append(touches)
            return touches

    def leave(self, touches: Touches) -> None:
        """A connection has them no more."""
        with self._lock:
            self._touches.remove(touches)
            touches.index.user_count -= 1

    def show(self, name: bytes, ino: int, block: TierBlock) -> None:
        """The tier keeps the block of a file, which has this name alone."""
        readers = block.read_class
        if readers.directory not in self.by_directory:
            return
        with self._lock:
            index = self.by_directory.get(readers.directory, {}).get(readers)
            if index is None:
                return
            self._shown[ino] = index, name
            if not index.show(name, ino, block):
                self._end(index)  # clients that ask again find a larger one

    def hide(self, ino: int) -> None:
        """The bytes of a file, or its memory, are about to change."""
        if ino in self._shown:
            with self._lock:
                shown = self._shown.pop(ino, None)
                if shown is not None and shown[0].ino_of(shown[1]) == ino:
                    shown[0].hide(shown[1])

    def name_changes(self, directory: int, name: bytes, ino: int) -> None:
        """A name is about to mean this inode; 0: none, or that is not known."""
        for index in self.by_directory.get(directory, {}).values():
            with self._lock:
                if ino:
                    self._add_names(index, [name])
                shown = index.ino_of(name)
                if shown and shown != ino:
                    self._shown.pop(shown, None)
                    index.hide(name)

    def names_come(self, directory: int, names: Sequence[bytes]) -> None:
        """Names may mean something from now on: another host has made them. Before anything here believes it."""
        for index in self.by_directory.get(directory, {}).values():
            with self._lock:
                self._add_names(index, names)

    def sample(self, *, at_once: bool = False) -> None:
        """Note which blocks clients read by themselves. Does nothing, unless ``at_once``, a moment after a call."""
        now = time.monotonic()
        if not self._touches or (now < self._sampled_at + SAMPLE_SECONDS and not at_once):
            return
        with self._lock:
            self._sampled_at, left = now, SAMPLE_SLOTS
            for touches in list(self._touches):
                self._touches.rotate(-1)
                left -= self._note(touches)
                if left <= 0:
                    break

    def _note(self, touches: Touches) -> int:
        """Under the lock; how many slots."""
        index, slots, asked = touches.index, touches.take(), touches.take_asked()
        found = [(name, index.ino_at(slot)) for slot in slots if (name := index.names.get(slot))]
        for _, ino in found:
            self._note_use(ino)
        # Who reads has asked before: then it is one use, not two.
        self._uses.extend([(index.readers.directory, file_names(keys), False) for keys in asked])
        if found:
            self._uses.append((index.readers.directory, [name for name, _ in found], True))
        return len(slots) + sum(map(len, asked))

    @property
    def has_asked(self) -> bool:
        """Clients have asked themselves for blocks, and not all were there: before these are stored, caches hear it."""
        return any(touches.has_asked for touches in self._touches)

    def take_uses(self) -> Iterator[tuple[int, list[bytes], bool]]:
        """(directory, names, whether they were read) of what was sampled since the last call."""
        while self._uses:
            yield self._uses.popleft()

    # -- the names of a directory --------------------------------------------------------------------

    def begin_names(self, readers: ReadClass, folder: object) -> BlockIndex | None:
        """The index of a read class, if nobody has read all names of its directory for it yet: the caller does.

        ``folder``: stays in memory as long as they are known.
        """
        with self._lock:
            index = self.by_directory.get(readers.directory, {}).get(readers)
            if index is None or index.filter.is_begun:
                return None
            index.filter.begin(folder)
            return index

    def add_names(self, index: BlockIndex, names: Sequence[bytes]) -> bool:
        """More names of its directory. False: it does not take them any more."""
        with self._lock:
            self._add_names(index, names)
            return index.filter.takes

    def end_names(self, index: BlockIndex, *, are_all: bool) -> None:
        """All names were added, or they could not be read."""
        with self._lock:
            if are_all:
                index.filter.complete()
            else:
                index.filter.fail()

    def doubt_names(self, index: BlockIndex | None = None) -> None:
        """Nobody tells of new names any more: what is absent is not known until an index (None: each) has ended."""
        with self._lock:
            for other in self._all() if index is None else [index]:
                other.filter.give_up()
            fence()

    def end(self, directory: int | None = None) -> None:
        """Other people may use a directory (None: any) than until now: clients ask again."""
        with self._lock:
            for index in self._all():
                if directory in (None, index.readers.directory):
                    self._end(index)

    def hold(self, seconds: float) -> None:
        """Of a shared volume: what indexes say holds for so long from now on, and no longer."""
        with self._lock:
            self._valid_until = max(1, time.monotonic_ns() + int(seconds * 1e9)) if seconds > 0 else 1
            for index in self._all():
                index.extend_to(self._valid_until)

    def tell_of_neighbours(self, are_there: bool) -> None:
        """Other hosts can be asked for blocks now, or none can."""
        with self._lock:
            self._have_neighbours = are_there
            for index in self._all():
                index.tell_of_neighbours(are_there)

    # -- under the lock ------------------------------------------------------------------------------

    def _all(self) -> list[BlockIndex]:
        return [index for found in self.by_directory.values() for index in found.values()]

    def _has_room(self) -> bool:
        """For one index more; one that nobody has goes for it."""
        indexes = self._all()
        if len(indexes) < INDEXES_MAX:
            return True
        unused = next((index for index in indexes if not index.user_count), None)
        if unused is not None:
            self._end(unused)
        return unused is not None

    def _make(self, readers: ReadClass, blocks: Iterable[Shown]) -> BlockIndex:
        """A new index that shows these blocks, in the place of any former one."""
        rows, buckets = list(blocks), BUCKETS_MIN
        while BUCKET * buckets * FULL / 2 < len(rows) and buckets < BUCKETS_MAX:
            buckets *= 2
        bits = self._filter_bits.get(readers.directory, FILTER_BITS_MIN)
        index = BlockIndex(readers, buckets, bits, self._valid_until)
        while not index.show_first(rows) and buckets < BUCKETS_MAX:
            buckets *= 2
            index = BlockIndex(readers, buckets, bits, self._valid_until)
        self._shown |= {ino: (index, name) for name, ino in index.shown()}
        index.tell_of_neighbours(self._have_neighbours)
        self._set(readers, index)
        return index

    def _add_names(self, index: BlockIndex, names: Sequence[bytes]) -> None:
        if not index.filter.add(names):
            kept = list(self._filter_bits.items())[-INDEXES_MAX:]
            self._filter_bits = {**dict(kept), index.readers.directory: index.filter.bits_wanted}
            self._end(index)

    def _end(self, index: BlockIndex) -> None:
        index.end()
        if self.by_directory.get(index.readers.directory, {}).get(index.readers) is index:
            self._set(index.readers, None)
        for ino in [ino for ino, shown in self._shown.items() if shown[0] is index]:
            del self._shown[ino]

    def _set(self, readers: ReadClass, index: BlockIndex | None) -> None:
        found = {key: other for key, other in self.by_directory.get(readers.directory, {}).items() if key != readers}
        if index is not None:
            found[readers] = index
        others = {number: rows for number, rows in self.by_directory.items() if number != readers.directory}
        self.by_directory = {**others, readers.directory: found} if found else others
