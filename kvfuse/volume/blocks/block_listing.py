"""Lists directories of blocks: each name once, also where blocks are stored again, and sketches are closed, meanwhile.

Three parts: rows that are older than the listing; ordinary files and sketches, in the order of their names' hashes, so
that a sketch that becomes an ordinary file keeps its place; rows that were stored since the listing began. The last
part leaves out what was shown: a `Reading` remembers that for as long as the directory is open.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from stat import S_ISDIR

import numpy as np

from kvfuse.volume.api import DirEntry
from kvfuse.volume.blocks.block_engine import SEQUENCE_LAG_US
from kvfuse.volume.blocks.block_files import DRAFT, BlockFiles
from kvfuse.volume.blocks.block_numbers import (
    FILE_COOKIE,
    FIRST_ROW_COOKIE,
    after_file,
    file_cookie,
    late_cookie,
    row_cookie,
    split_row_cookie,
)
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.blocks.open_blocks import read_entry
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.listing import Listing
from kvfuse.volume.store.schema import name_hash
from kvfuse.volume.views import clock

ListedRow = tuple[int, int, int, int, bytes | None, int, int, int]
"""as `Core.list_rows` has it: row, sequence, length, stored, name, slab, slot, length of the name"""
LateRow = tuple[BlockTable, int, int]
"""table, row, sequence"""

READINGS_MAX = 1024
SHOWN_MAX = 8 << 20
"""names that all readings remember, at 8 bytes each; of more, names that are stored meanwhile may be shown twice"""
LATE_MIN = 1024
"""so many blocks that were stored since, and as many as there were, a listing shows: it ends also where new names come
without pause"""


def sequence_now() -> int:
    """Blocks that are stored from now on have larger sequences."""
    return clock.fine() // 1000 - SEQUENCE_LAG_US - 1


class Reading:
    """One open directory that is listed from its start to its end."""

    def __init__(self, puts: int, blocks: int) -> None:
        self.began = self.looked = sequence_now()
        """when it began, and when it looked last for rows that were stored since: they have larger sequences"""
        self.puts = puts
        """of the store, when it began"""
        self.has_passed = False
        """rows were left for the last part"""
        self.shown = array("Q")
        """hashes of names"""
        self.remembers_all = True
        self.page: list[DirEntry] = []
        """as it was given last: the kernel may have taken a part of it"""
        self.last = 0
        """cookie before the page"""
        self.late: list[LateRow] = []
        """found, and not shown yet"""
        self.has_found = True
        """the last look found some that were not shown"""
        self.late_max = LATE_MIN + blocks

    def take_page(self, after: int, *, has_room: bool) -> bool:
        """Remember what was taken of the last page. False: the listing goes on elsewhere, as after a seek."""
        taken = next((n + 1 for n, entry in enumerate(self.page) if entry.cookie == after), 0)
        if not taken and after != self.last:
            return False
        if has_room:
            self.shown.extend(name_hash(entry.name) for entry in self.page[:taken])
        else:
            self.remembers_all = False
        if taken < len(self.page):
            self.late, self.looked, self.has_found = [], self.began, True  # the rest of the page is found again
        self.page, self.last = [], after
        return True

    def unseen(self, entries: Sequence[DirEntry]) -> list[DirEntry]:
        if not self.shown or not entries:
            return list(entries)
        hashes = np.array([name_hash(entry.name) for entry in entries], np.uint64)
        is_seen = np.isin(hashes, np.frombuffer(self.shown, np.uint64))
        return [entry for entry, seen in zip(entries, is_seen, strict=True) if not seen]


@dataclass
class BlockListing:
    """Of one membership. Event loop only."""

    files: BlockFiles
    _readings: OrderedDict[int, Reading] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._engine, self._lookups, self._sketches = self.files.engine, self.files.lookups, self.files.sketches

    async def list_entries(self, folder: Node, after: int, limit: int, reader: int) -> list[DirEntry]:
        """As `api.TreeApi.list_directory`."""
        reading = self._reading(folder.ino, reader, after)
        found: list[DirEntry] = []
        place = max(after, FIRST_ROW_COOKIE)
        while place < FILE_COOKIE and len(found) < limit:
            rows, place = await self._list_rows(folder.ino, place, limit - len(found), reading)
            found += rows
        if len(found) < limit and place < late_cookie(0):
            start = after_file(place) if place > FILE_COOKIE else 0
            found += await self._list_files(folder.ino, start, limit - len(found), reading)
        if len(found) < limit and reading is not None:
            found += await self._list_late(folder.ino, limit - len(found), reading, found)
        if reading is not None:
            reading.page = found
        return found

    def end(self, reader: int) -> None:
        """A directory is no longer open."""
        self._readings.pop(reader, None)

    def _reading(self, directory: int, reader: int, after: int) -> Reading | None:
        """None: nobody remembers what was shown."""
        if not after and reader:
            blocks = sum(len(table.rows) for table in self._engine.tables_of(directory))
            self._readings[reader] = reading = Reading(self._puts, blocks)
            if len(self._readings) > READINGS_MAX:
                self._readings.popitem(last=False)
            return reading
        found = self._readings.get(reader)
        if found is not None:
            has_room = sum(len(other.shown) for other in self._readings.values()) < SHOWN_MAX
            if not found.take_page(after, has_room=has_room):
                del self._readings[reader]
                return None
        return found

    @property
    def _puts(self) -> int:
        return self._engine.native.statistics()["puts"]

    # -- rows ------------------------------------------------------------------------------------------

    async def _list_rows(
        self, directory: int, after: int, limit: int, reading: Reading | None
    ) -> tuple[list[DirEntry], int]:
        """(blocks behind a cookie, where to go on): of one table."""
        place, row = split_row_cookie(after)
        tables = sorted(self._engine.tables_of(directory), key=lambda table: table.place)
        table = next((table for table in tables if table.place >= place), None)
        if table is None:
            return [], FILE_COOKIE
        start = row if table.place == place else -1
        rows, last = self._engine.native.list_rows(
            table.place, directory, start, limit, self._engine.now(table.namespace)
        )
        end = row_cookie(table.place + 1, -1) if last < 0 else row_cookie(table.place, last)
        if reading is not None:
            older = [row for row in rows if row[1] <= reading.began]
            reading.has_passed |= len(older) < len(rows)
            rows = older
        entries = await self._make_entries(table, rows)
        return [DirEntry(entry.name, row_cookie(*numbers), entry.attributes) for numbers, entry in entries], end

    async def _make_entries(
        self, table: BlockTable, rows: Sequence[ListedRow]
    ) -> list[tuple[tuple[int, int], DirEntry]]:
        """((place of the table, row), entry without a cookie) of the rows that are still there."""
        names = await self._read_names(table, rows)
        entries = []
        for name, (number, sequence, *_) in zip(names, rows, strict=True):
            entry = read_entry(table, number) if name else None
            if entry is not None and entry.sequence == sequence:
                sketch = self._sketches.by_place.get((table.readers.directory, name))
                meant = sketch or self.files.open_blocks.written.show(entry)
                entries.append(((table.place, number), DirEntry(name, 0, meant)))
        return entries

    async def _read_names(self, table: BlockTable, rows: Sequence[ListedRow]) -> list[bytes]:
        """The names of rows; those of blocks that are not in memory are read together. Empty: it is none any more."""
        places = [row[5:] for row in rows if row[4] is None]
        read = await self._engine.slabs.read_names(places) if places else []
        if read:
            found, _ = table.find(read, self._engine.now(table.namespace))
            numbers = [row[0] for row in rows if row[4] is None]
            read = [name if number == there else b"" for name, number, there in zip(read, numbers, found, strict=True)]
        others = iter(read)
        return [row[4] if row[4] is not None else next(others) for row in rows]

    # -- files and sketches ----------------------------------------------------------------------------

    async def _list_files(self, directory: int, start: int, limit: int, reading: Reading | None) -> list[DirEntry]:
        """Ordinary files, and sketches whose names mean no block, behind the hash of a name.

        Sketches are looked at first: one that becomes an ordinary file meanwhile is found as either.
        """
        found: list[DirEntry] = []
        while len(found) < limit:
            sketches = [
                DirEntry(sketch.name, name_hash(sketch.name), sketch)
                for sketch in self._sketches.in_directory(directory)
                if self._engine.find(directory, sketch.name) is None
            ]
            page = await Listing(self._lookups, directory).read_entries(start, limit)
            is_last = len(page) < limit
            end = page[-1].cookie if page and not is_last else 1 << 63
            page = [entry for entry in page if not entry.name.startswith(DRAFT) and self._is_no_block(directory, entry)]
            names = {entry.name for entry in page}
            page += [entry for entry in sketches if start < entry.cookie <= end and entry.name not in names]
            page = sorted(page, key=lambda entry: entry.cookie)
            found += page if reading is None else reading.unseen(page)
            if is_last:
                break
            start = end
        return [DirEntry(entry.name, file_cookie(entry.cookie), entry.attributes) for entry in found[:limit]]

    def _is_no_block(self, directory: int, entry: DirEntry) -> bool:
        """A daemon may have ended when a block became a file: then there are both, and the block counts."""
        return S_ISDIR(entry.attributes.mode) or self._engine.find(directory, entry.name) is None

    # -- rows that were stored meanwhile ---------------------------------------------------------------

    async def _list_late(
        self, directory: int, limit: int, reading: Reading, found: Sequence[DirEntry]
    ) -> list[DirEntry]:
        """Blocks that were stored since the listing began, whose names it has not shown. ``found``: by this call."""
        entries: list[DirEntry] = []
        names = {entry.name for entry in found}
        limit = min(limit, reading.late_max)
        is_needed = reading.has_passed or self._puts != reading.puts
        while is_needed and len(entries) < limit:
            if not reading.late:
                if not reading.has_found:
                    break
                since, reading.looked, reading.has_found = reading.looked, sequence_now(), False
                reading.late = self._find_late(directory, since)
            count = limit - len(entries)
            batch, reading.late = reading.late[:count], reading.late[count:]
            before = len(entries)
            for table in {late[0].place: late[0] for late in batch}.values():
                entries += await self._show_late(self._engine.tables.current(table), batch, reading, names)
            reading.has_found |= len(entries) > before  # those of a host whose clock is ahead are found each time
        reading.late_max -= len(entries)
        return entries

    def _find_late(self, directory: int, since: int) -> list[LateRow]:
        late: list[LateRow] = []
        for table in self._engine.tables_of(directory):
            rows = table.rows
            numbers = np.flatnonzero((rows["sequence"] > np.uint64(since)) & (rows["version"] & np.uint64(1) == 1))
            late += [(table, number, int(rows["sequence"][number])) for number in numbers.tolist()]
        return late

    async def _show_late(
        self, table: BlockTable, batch: Sequence[LateRow], reading: Reading, names: set[bytes]
    ) -> list[DirEntry]:
        """``names``: shown by this call, as what is returned is from then on."""
        rows = []
        now = self._engine.now(table.namespace)
        for other, number, sequence in batch:
            if other.place == table.place:
                listed, _ = self._engine.native.list_rows(table.number, table.readers.directory, number - 1, 1, now)
                rows += [row for row in listed if row[:2] == (number, sequence)]
        made = await self._make_entries(table, rows)
        entries = [DirEntry(entry.name, late_cookie(row_cookie(*at)), entry.attributes) for at, entry in made]
        entries = [entry for entry in reading.unseen(entries) if entry.name not in names]
        names.update(entry.name for entry in entries)
        return entries
