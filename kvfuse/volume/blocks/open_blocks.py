"""Blocks as files that are only read: their attributes, and what is open of them.

The content of an open block stays as it is, whatever happens to its name: its arena is pinned or, where too many are,
or the block is not in memory, there is a copy of it. Where copies have no room the block is read as long as it exists.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from stat import S_IFREG
from typing import NamedTuple

import numpy as np

from kvfuse import errors
from kvfuse.native import blocks as forms
from kvfuse.volume.api import Caller
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.block_numbers import inode_of, split_inode, tag_of
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.inodes.handle import FileHandle, next_handle

PINNED_SHARE = 4
"""one arena in so many may be pinned by open blocks"""
SECOND = 1_000_000_000
TORN_READS = 8


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
    note: int
    slot: int
    spare_slot: int
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
    table: BlockTable
    row: int
    sequence: int
    arena: int
    page: int
    expires: int
    priority: int
    nlink: int = 1
    rdev: int = 0

    @property
    def atime(self) -> int:
        return self.mtime

    @property
    def ctime(self) -> int:
        return self.mtime

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
        return BlockEntry(
            inode_of(table.place, number, row.sequence), S_IFREG | readers.mode, readers.uid, readers.gid, row.length,
            row.stored * SECOND, table, number, row.sequence, row.arena, row.page, row.expires, row.priority,
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
                table.place, directory, name, self._start, self._lengths[len(name)], False,
                self._engine.now(table.namespace), self._row, self._sequence,
            )  # fmt: skip
            number = int(self._row[0])
            entry = read_entry(table, number) if number >= 0 else None
            if entry is not None and (best is None or entry.sequence > best.sequence):
                best = entry
        return best


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
    by_ino: dict[int, list[OpenBlock]] = field(default_factory=dict)
    _pins: Counter[int] = field(default_factory=Counter)

    def entry_of(self, ino: int) -> BlockEntry:
        """The block of an inode number. Stale: it was removed or replaced, and is not open."""
        place, number, tag = split_inode(ino)
        table = self.engine.tables.all.get(place)
        entry = read_entry(table, number) if table is not None else None
        if entry is not None and tag_of(entry.sequence) == tag and not self._has_expired(entry):
            return entry
        if (known := self.by_ino.get(ino)) is not None:
            known[0].entry.nlink = 0
            return known[0].entry
        raise errors.Stale(f"block {ino:#x} was removed")

    def _has_expired(self, entry: BlockEntry) -> bool:
        return bool(entry.expires) and self.engine.now(entry.table.namespace) >= entry.expires

    def open(self, entry: BlockEntry, caller: Caller, *, direct: bool) -> OpenBlock:
        """Open a block; `keep` then makes its content stay."""
        handle = OpenBlock(entry, caller, direct=direct)
        self.by_ino.setdefault(entry.ino, []).append(handle)
        return handle

    async def keep(self, handle: OpenBlock) -> None:
        """Keep the content as long as the block is open, if there is room for that. Stale, EngineError."""
        entry = handle.entry
        entry.table.room["used"][entry.row] = self.engine.now(entry.table.namespace)
        if self.share(handle):
            return
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

    def share(self, handle: OpenBlock) -> bool:
        """Keep the content with another handle that does. False: there is none."""
        for other in self.by_ino[handle.entry.ino]:
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

    def release(self, handle: OpenBlock) -> None:
        ino = handle.entry.ino
        handle.content = None
        if handle.pinned:
            self._unpin(handle.pinned)
        self.memory.give(handle.copied)
        self.by_ino[ino].remove(handle)
        if not self.by_ino[ino]:
            del self.by_ino[ino]

    async def read_whole(self, entry: BlockEntry) -> bytes | bytearray:
        """A copy of a block. Stale: it was replaced or removed meanwhile, or it is damaged, and so dropped."""
        found = self._pin_content(entry, always=True)
        if found is not None:
            content, arena = found
            try:
                return bytes(content)
            finally:
                self._unpin(arena)
        data = await self.engine.read_row(entry.table, entry.row, entry.sequence)
        if data is None:
            raise errors.Stale(f"block {entry.ino:#x} was removed")
        return data

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
        return len(self._pins) < max(1, arenas.capacity // arenas.arena_size // PINNED_SHARE)

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
