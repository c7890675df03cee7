"""Indexes of blocks in the shared-memory tier, for clients that find and copy blocks themselves (`kvfuse/blockindex`).

There is an index for each read class that some client asked for. A block is in it while the tier keeps it and its name
means it: the tier says so when it keeps or drops a block, the table of names when a name changes, and whoever changes
what people may do ends indexes. All of that is before the change. Any thread may call, and waits for a short lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvfuse.blockindex import BUCKET, BUCKETS_MAX, FILTER_BITS_MIN, fence
from kvfuse.kept.alive import ALIVE_SECONDS, Alive
from kvfuse.keys import file_names
from kvfuse.volume.tier.arenas import ReadClass, TierBlock
from kvfuse.volume.tier.block_index import FULL, BlockIndex, Shown
from kvfuse.volume.tier.revocable import Supply
from kvfuse.volume.tier.touches import Touches

__all__ = ["BlockIndex", "Residents", "Shown", "Touches"]

BUCKETS_MIN = 512
INDEXES_MAX = 256
"""each takes a descriptor"""
SAMPLE_SECONDS = 0.05
"""between looks at what clients read by themselves"""
SAMPLE_SLOTS = 8192
"""looked at in one go, slots and keys alike, of all clients"""
USES_MAX = 1 << 12
"""samples that wait for somebody to take them"""


class Residents:
    """All indexes of a volume. `SharedTier` has it.

    ``note_use``: the block of an inode was read. ``supply``: makes their memory.
    """

    def __init__(self, note_use: Callable[[int], None], supply: Supply | None = None) -> None:
        self._note_use = note_use
        self._supply = supply or Supply()
        self._touches: deque[Touches] = deque()
        """in the order in which they are looked at"""
        self._sampled_at = 0.0
        self._uses: deque[tuple[int, list[bytes], bool]] = deque(maxlen=USES_MAX)
        self.by_directory: dict[int, dict[ReadClass, BlockIndex]] = {}
        """to be looked at without the lock; replaced, never changed"""
        self._shown: dict[int, tuple[BlockIndex, bytes]] = {}
        """inode -> where its block is shown"""
        self._valid_until = 0
        self._lease_until = 0
        """of a shared volume: when the lease ends"""
        self.alive: Alive | None = None
        """where the daemon after this one finds how long indexes hold"""
        self._have_neighbours = False
        self._filter_bits: dict[int, int] = {}
        """directory -> what its next index needs, where that is not the least"""
        self._lock = threading.Lock()
        self._watches: dict[int, Callable[[], None]] = {}
        """directory -> what hears of the next name there"""

    def watch_names(self, directory: int, hear: Callable[[], None]) -> None:
        """Call ``hear`` before a name of the directory means an inode, once. Event loop only, as are such changes."""
        self._watches[directory] = hear
        with self._lock:
            self.by_directory = {**self.by_directory, directory: self.by_directory.get(directory, {})}

    def open(self, readers: ReadClass, blocks: Iterable[Shown], ancestors: object = None) -> Touches | None:
        """The index of a read class, for one connection more, in a page for its touches. ``blocks`` (name, inode,
        block): what it shows if it is new. ``ancestors``: of the directory, whose changes count while the index is
        live. None: there are too many indexes."""
        with self._lock:
            index = self.by_directory.get(readers.directory, {}).get(readers)
            if index is None:
                if not self._has_room():
                    return None
                index = self._make(readers, blocks)
            index.ancestors = ancestors
            touches = Touches(index)
            index.user_count += 1
            self._touches.append(touches)
            return touches

    def leave(self, touches: Touches) -> None:
        """A connection has them no more."""
        with self._lock:
            self._touches.remove(touches)
            touches.index.user_count -= 1
            touches.end()

    def show(self, name: bytes, ino: int, block: TierBlock) -> None:
        """The tier keeps the block of a file, which has this name alone."""
        readers = block.home.kind.read_class
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
        if ino and (hear := self._watches.pop(directory, None)) is not None:
            hear()
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

    def end(self, directories: Collection[int] | None = None) -> None:
        """Other people may use these directories (None: any) than until now: clients ask again."""
        with self._lock:
            for index in self._all():
                if directories is None or index.readers.directory in directories:
                    self._end(index)

    def hold(self, seconds: float) -> None:
        """Of a shared volume: what indexes say holds for so long from now on, and no longer."""
        with self._lock:
            self._lease_until = max(1, time.monotonic_ns() + int(seconds * 1e9)) if seconds > 0 else 1
        self.live_on()

    @property
    def valid_until(self) -> int:
        """Up to when indexes hold, in nanoseconds of CLOCK_MONOTONIC; 0: no limit."""
        return self._valid_until

    def live_on(self) -> None:
        """Where a daemon may come after this one: indexes hold for `ALIVE_SECONDS` from now on, and no longer."""
        with self._lock:
            self._valid_until = self._lease_until
            if self.alive is not None:
                until = time.monotonic_ns() + int(ALIVE_SECONDS * 1e9)
                self._valid_until = min(until, self._lease_until or until)
            indexes = self._all()
            if self.alive is not None and indexes:
                self.alive.note_expiry(self._valid_until)
            for index in indexes:
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
        if self.alive is not None:
            self.alive.note_expiry(self._valid_until)
        index = BlockIndex(readers, buckets, bits, self._valid_until, self._supply)
        while not index.show_first(rows) and buckets < BUCKETS_MAX:
            buckets *= 2
            index = BlockIndex(readers, buckets, bits, self._valid_until, self._supply)
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
        is_looked_at = found or readers.directory in self._watches
        self.by_directory = {**others, readers.directory: found} if is_looked_at else others
