"""Blocks as files that are only read: their attributes, and what is open of them.

The content of an open block stays as it is, whatever happens to its name: its arena is pinned or, where too many are,
or the block is not in memory, there is a copy of it. Where copies have no room the block is read as long as it exists.
A block that is replaced or removed between the kernel's lookup and its open is a file without a name: its bytes are in
its arena until that is used again, and its note there, and its checksum, say whether these are its own.
Who writes to the file by the kernel changes it for all who have it open by that number: they share the kernel's pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from stat import S_IFREG
from struct import Struct
from typing import NamedTuple

import numpy as np

from kvfuse import errors
from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.volume.api import Caller
from kvfuse.volume.blocks.block_engine import SEQUENCE_LAG_US, BlockEngine
from kvfuse.volume.blocks.block_numbers import inode_of, is_block, split_inode, tag_of
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.inodes.handle import FileHandle, next_handle
from kvfuse.volume.views import clock

SECOND = 1_000_000_000
NOBODY = Caller(0, 0)
TORN_READS = 8
OPENED_MAX = 8192
LOOKED_UP_MAX = 1024
_NOTE = Struct("<QI")
"""how a note begins: sequence and row of its block"""
_TAIL = 64
"""bytes at the end of an arena; notes are in front of them"""


class Row(NamedTuple):
    """A row as `forms.ROW` has it."""

    version: int
    low: int
    high: int
    arena: int
    page: int
    length: int
    checksum: int
    slab: int
    slot: int
    packed: int
    note: int
    flags: int
    sequence: int
    directory: int
    due: int
    used: int
    stored: int
    expires: int
    uses: int
    list: int
    priority: int
    name_length: int


@dataclass(slots=True, eq=False)
class BlockEntry:
    """A block, as `api.Attributes`, and where its row was."""

    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    used: int
    table: BlockTable
    row: int
    sequence: int
    arena: int
    page: int
    note: int
    checksum: int
    expires: int
    priority: int
    nlink: int = 1
    rdev: int = 0

    @property
    def atime(self) -> int:
        return max(self.mtime, self.used)

    @property
    def ctime(self) -> int:
        """Sequences are about the microseconds at which blocks were stored; times are those of a tick before that."""
        stored = self.sequence * 1000
        return self.mtime if -clock.TICK_MAX < self.mtime - stored <= SEQUENCE_LAG_US * 1000 else stored

    @property
    def blocks(self) -> int:
        return -(-self.size // 4096) * 8

    @property
    def directory(self) -> int:
        return self.table.readers.directory


def read_entry(table: BlockTable, number: int) -> BlockEntry | None:
    """The block of a row; None: it has none."""
    rows = table.room
    for _ in range(TORN_READS):
        if table.has_ended or number >= len(rows):
            return None
        row = Row._make(rows[number].item())
        if int(rows["version"][number]) != row.version:
            continue
        if not row.version & 1:
            return None
        readers = table.readers
        mtime = row.stored * SECOND + (row.flags >> forms.MICROS) * 1000
        return BlockEntry(
            inode_of(table.place, number, row.sequence), S_IFREG | readers.mode, readers.uid, readers.gid, row.length,
            mtime, row.used * SECOND, table, number, row.sequence, row.arena, row.page, row.note, row.checksum,
            row.expires, row.priority,
        )  # fmt: skip
    return None


class NameSearch:
    """Finds single names, with arrays that are made once. Event loop only."""

    def __init__(self, engine: BlockEngine) -> None:
        self._engine = engine
        self._start = np.zeros(1, np.uint64)
        self._lengths = [np.array([length], np.uint32) for length in range(forms.NAME_MAX + 1)]
        self._row, self._sequence = np.empty(1, np.int64), np.empty(1, np.uint64)

    def find(self, directory: int, name: bytes) -> BlockEntry | None:
        """The block of a name; the newest, if several tables have one."""
        best: BlockEntry | None = None
        for table in self._engine.tables_of(directory) if len(name) <= forms.NAME_MAX else ():
            self._engine.native.find(
                table.number, directory, name, self._start, self._lengths[len(name)], False,
                self._engine.now(table.namespace), self._row, self._sequence,
            )  # fmt: skip
            number = int(self._row[0])
            entry = read_entry(table, number) if number >= 0 else None
            if entry is not None and (best is None or entry.sequence > best.sequence):
                best = entry
        return best


class WrittenNumbers:
    """Numbers by which the kernel wrote what are blocks now: as long as they are known, it uses its pages of them.

    Of the last blocks that the file door stored. C has them, as it gives such numbers, too. Event loop only.
    """

    def __init__(self, engine: BlockEngine) -> None:
        self._answers, self._tables = engine.answers, engine.tables
        self._door = engine.answers.door

    def __contains__(self, ino: int) -> bool:
        return self._door.find_written(ino) is not None

    def note(self, ino: int, entry: BlockEntry) -> None:
        """The kernel has the bytes of a block as the content of an inode. Who has that open sees what it is now."""
        self._door.note_written(ino, entry.table.place, entry.row, entry.sequence)
        self._answers.take_handles(ino)

    def forget(self, ino: int) -> None:
        """The inode gets another content."""
        self._door.forget_written(ino)

    def show(self, entry: BlockEntry) -> BlockEntry:
        """The block, under the number by which the kernel knows it."""
        entry.ino = self._door.number_of(entry.table.place, entry.row, entry.sequence)
        return entry

    def find(self, ino: int) -> BlockEntry | None:
        if (known := self._door.find_written(ino)) is None:
            return None
        table = self._tables.all.get(known[0])
        entry = read_entry(table, known[1]) if table is not None else None
        return self.show(entry) if entry is not None and entry.sequence == known[2] else None


class LookedUp:
    """Blocks as the kernel was given them last: it opens them a moment later. Event loop only."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, BlockEntry] = OrderedDict()
        self._names: dict[int, bytes] = {}
        self._opened: dict[int, None] = {}
        """that were not in memory then"""

    def note(self, entry: BlockEntry, name: bytes) -> None:
        self._entries[entry.ino] = entry
        self._names[entry.ino] = name
        self._entries.move_to_end(entry.ino)
        if len(self._entries) > LOOKED_UP_MAX:
            self.forget(next(iter(self._entries)))

    def forget(self, ino: int) -> None:
        """Other people may read it than until now."""
        self._entries.pop(ino, None)
        self._names.pop(ino, None)

    def name_of(self, ino: int) -> bytes | None:
        return self._names.get(ino)

    def is_again(self, ino: int) -> bool:
        """It was opened before, not long ago: most blocks are opened once, and the kernel has their pages then."""
        if ino in self._opened:
            return True
        self._opened[ino] = None
        if len(self._opened) > OPENED_MAX:
            del self._opened[next(iter(self._opened))]
        return False

    def find(self, ino: int) -> BlockEntry | None:
        """A block that has lost its name."""
        entry = self._entries.get(ino)
        return replace(entry, ino=ino, nlink=0) if entry is not None else None


@dataclass
class CopyMemory:
    """Memory for bytes of files that have no other place. Event loop only."""

    limit: int
    used: int = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size


class OpenBlock:
    """A block that is open for reading; see `api.Handle`. ``content``: None as long as nothing keeps it."""

    file: FileHandle | None = None
    cache_valid = True
    appends = False
    is_new = False
    readable = True
    writable = False
    place = 0, b""

    def __init__(self, entry: BlockEntry, caller: Caller, *, direct: bool) -> None:
        self.id = next_handle()
        self.entry = entry
        self.number = inode_of(entry.table.place, entry.row, entry.sequence)
        self.caller = caller
        self.direct = direct
        self.content: memoryview | None = None
        self.pinned = 0
        """number of the arena that has the content"""
        self.copied = 0

    @property
    def size(self) -> int:
        return self.entry.size


@dataclass
class OpenBlocks:
    """Event loop only."""

    engine: BlockEngine
    memory: CopyMemory
    written: WrittenNumbers = field(init=False)
    looked_up: LookedUp = field(default_factory=LookedUp)
    by_ino: dict[int, list[OpenBlock]] = field(default_factory=dict)
    _pins: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.written = WrittenNumbers(self.engine)

    def entry_of(self, ino: int) -> BlockEntry:
        """The block of an inode number; without a name, if it was removed or replaced a moment ago, or is open.

        Stale: it is none.
        """
        if (entry := self.find_named(ino)) is not None:
            return entry
        if ino not in self.by_ino:
            self.engine.answers.take_handles(ino)
        if (known := self.by_ino.get(ino)) is not None:
            known[0].entry.nlink = 0
            return known[0].entry
        if (lost := self.looked_up.find(ino)) is not None and not self._has_expired(lost):
            self._follow(lost)
            if not lost.table.has_ended:
                return lost
        raise errors.Stale(f"block {ino:#x} was removed")

    def find_named(self, ino: int) -> BlockEntry | None:
        """The block of an inode number, if a name still means it."""
        entry = self.written.find(ino)
        if entry is None and is_block(ino):
            place, number, tag = split_inode(ino)
            table = self.engine.tables.all.get(place)
            entry = read_entry(table, number) if table is not None else None
            if entry is not None and tag_of(entry.sequence) != tag:
                entry = None
        if entry is None or self._has_expired(entry):
            return None
        entry.ino = ino
        return entry

    def _follow(self, entry: BlockEntry) -> None:
        """Its table may go on in other memory."""
        entry.table = self.engine.tables.current(entry.table)

    def _has_expired(self, entry: BlockEntry) -> bool:
        return bool(entry.expires) and self.engine.now(entry.table.namespace) >= entry.expires

    def open(self, entry: BlockEntry, caller: Caller, *, direct: bool) -> OpenBlock:
        """Open a block; `keep` then makes its content stay."""
        handle = OpenBlock(entry, caller, direct=direct)
        self.by_ino.setdefault(entry.ino, []).append(handle)
        return handle

    def take_over(self, ino: int) -> Iterator[tuple[int, OpenBlock]]:
        """What C has open of a block, by fh; its arenas stay already."""
        for fh, place, row, arena, start, size, mode, uid, gid, mtime in self.engine.answers.door.take_handles(ino):
            entry, page = self.find_named(ino), start // forms.PAGE
            if entry is None:
                table = self.engine.tables.all[place]
                entry = BlockEntry(
                    ino, mode, uid, gid, size, mtime, 0, table, row, 0, arena, page, 0, 0, 0, 128, nlink=0,
                )  # fmt: skip
            handle = self.open(entry, NOBODY, direct=False)
            if self._pin(arena):
                handle.content = self.engine.arenas.by_number[arena].bytes[start : start + size].data
                handle.pinned = arena
            yield fh, handle

    async def keep(self, handle: OpenBlock) -> None:
        """Keep the content as long as the block is open, if there is room for that. Stale, EngineError."""
        entry = handle.entry
        if entry.nlink:
            entry.table.room["used"][entry.row] = self.engine.now(entry.table.namespace)
            self.engine.eviction.note_use(entry.table, np.array([entry.row], np.int64))
        if self.share(handle):
            return
        if not entry.arena and entry.nlink and self.looked_up.is_again(entry.ino):
            await self._bring(entry)
        if (found := self._pin_content(entry)) is not None:
            handle.content, handle.pinned = found
        elif self.memory.take(entry.size):
            handle.copied = entry.size
            try:
                handle.content = memoryview(await self.read_whole(entry))
            except BaseException:
                self.memory.give(handle.copied)
                handle.copied = 0
                raise

    async def _bring(self, entry: BlockEntry) -> None:
        """Bring a block into memory, if its name is known: whoever opens it next finds it there. EngineError."""
        name = self.looked_up.name_of(entry.ino) or self.engine.answers.name_of(entry.ino)
        if name is not None:
            self._follow(entry)
            rows, sequences = np.array([entry.row], np.int64), np.array([entry.sequence], np.uint64)
            await self.engine.fetch(entry.table, [name], rows, sequences)

    def share(self, handle: OpenBlock) -> bool:
        """Keep the content with another handle that does. False: there is none."""
        for other in self.by_ino[handle.entry.ino]:
            if other.entry.sequence != handle.entry.sequence:
                continue
            if other.pinned and self._pin(other.pinned):
                handle.content, handle.pinned = other.content, other.pinned
                return True
            if other.copied and other.content is not None and self.memory.take(other.copied):
                handle.content, handle.copied = other.content, other.copied
                return True
        return False

    async def read(self, handle: OpenBlock, offset: int, size: int) -> memoryview | bytes:
        content = handle.content
        if content is None:
            content = memoryview(await self.read_whole(handle.entry))
        return content[offset : offset + size]

    def rewrite(self, ino: int, data: bytes) -> None:
        """Whoever has an inode open reads these bytes from now on, as its kernel does: they were written there."""
        for handle in self.by_ino.get(ino, ()):
            self._let_go(handle)
            handle.entry = replace(handle.entry, size=len(data), sequence=0)
            if self.memory.take(len(data)):
                handle.content, handle.copied = memoryview(data), len(data)

    def _let_go(self, handle: OpenBlock) -> None:
        handle.content = None
        if handle.pinned:
            self._unpin(handle.pinned)
        self.memory.give(handle.copied)
        handle.pinned = handle.copied = 0

    def release(self, handle: OpenBlock) -> None:
        ino = handle.entry.ino
        self._let_go(handle)
        self.by_ino[ino].remove(handle)
        if not self.by_ino[ino]:
            del self.by_ino[ino]

    async def read_whole(self, entry: BlockEntry) -> bytes | bytearray:
        """A copy of a block. Stale: it was replaced or removed meanwhile, or it is damaged, and so dropped."""
        self._follow(entry)
        found = self._pin_content(entry, always=True)
        if found is not None:
            content, arena = found
            try:
                return bytes(content)
            finally:
                self._unpin(arena)
        data = self._read_lost(entry) or await self.engine.read_row(entry.table, entry.row, entry.sequence)
        if data is None:
            raise errors.Stale(f"block {entry.ino:#x} was removed")
        return data

    def _read_lost(self, entry: BlockEntry) -> bytes | None:
        """A copy of a block that is no more, if its arena still has it."""
        if not entry.arena or entry.table.has_ended or not self._pin(entry.arena):
            return None
        try:
            memory = self.engine.arenas.by_number[entry.arena].bytes
            start, note = entry.page * forms.PAGE, len(memory) - _TAIL - 8 * entry.note
            if memory[note : note + 12].tobytes() != _NOTE.pack(entry.sequence, entry.row):
                return None
            data = memory[start : start + entry.size].tobytes()
            return data if crc32c(data) == entry.checksum else None
        finally:
            self._unpin(entry.arena)

    # -- pins ------------------------------------------------------------------------------------------

    def _pin_content(self, entry: BlockEntry, *, always: bool = False) -> tuple[memoryview, int] | None:
        """(bytes in an arena that stays, its number); None: the block is not in memory, or too many arenas stay."""
        for _ in range(TORN_READS):
            now = read_entry(entry.table, entry.row)
            if now is None or now.sequence != entry.sequence or not now.arena:
                return None
            if not (always or now.arena in self._pins or self._may_pin_more) or not self._pin(now.arena):
                return None
            again = read_entry(entry.table, entry.row)
            if again is not None and (again.sequence, again.arena, again.page) == (now.sequence, now.arena, now.page):
                start = now.page * forms.PAGE
                return self.engine.arenas.by_number[now.arena].bytes[start : start + now.size].data, now.arena
            self._unpin(now.arena)
        return None

    @property
    def _may_pin_more(self) -> bool:
        arenas = self.engine.arenas
        return len(self._pins) < arenas.pinned_max

    def _pin(self, arena: int) -> bool:
        if arena not in self._pins and not self.engine.native.pin_arena(arena, 1):
            return False
        self._pins[arena] += 1
        return True

    def _unpin(self, arena: int) -> None:
        self._pins[arena] -= 1
        if not self._pins[arena]:
            del self._pins[arena]
            self.engine.native.pin_arena(arena, -1)

    def statistics(self) -> dict[str, int]:
        return {
            "open_blocks": sum(map(len, self.by_ino.values())),
            "pinned_arenas": len(self._pins),
            "copied_bytes": self.memory.used,
        }
