"""Tables of the block store: rows of all blocks of a directory that the same people may read (`native/blocktable.h`).

A table is shared memory that outlives the daemon. Clients of its read class map it read-only.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.errors import NoSpace
from kvfuse.kept.keeper import Keeper
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core, begin_table
from kvfuse.touchpage import fence
from kvfuse.volume.api import RowReaders as Readers
from kvfuse.volume.tier.revocable import RevocableMemory, Supply

log = logging.getLogger(__name__)

TABLES_MAX = 1024
"""each takes two descriptors here, and two in the holder"""
TABLES_KEPT, TABLES_OF_EACH = 256, 8
"""so many are kept for users that own fewer than this: nobody uses them up for others"""
ROWS_MAX = 1 << 26
TABLE_PREFIX = "blocks/table/"
_FORM = 3
_FACTS = struct.Struct("<I16sIQIQQ")
"""form, volume, place, namespace, epoch, serial, size"""
STATE, VALID_UNTIL, COMPLETE, NEIGHBOURS = range(4)
"""of `BlockTable.words`"""
_SHOWN_OFFSET = forms.PAGE - 8

Words = npt.NDArray[np.uint64]


class BlockTable:
    """One table. Any thread may call `put`, `get` and `find`; the event loop alone ends it."""

    def __init__(
        self, core: Core, number: int, namespace: int, epoch: int, readers: Readers, piece: RevocableMemory
    ) -> None:
        """``epoch``: of the namespace."""
        self.core = core
        self.number = number
        """by which the core knows it"""
        self.place = number % forms.PLACES
        """that nobody else has; a table that goes on in other memory keeps it, and its rows their numbers"""
        self.namespace = namespace
        self.epoch = epoch
        self.readers = readers
        self.piece = piece
        size = os.fstat(piece.descriptor).st_size
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(piece.descriptor, size), np.uint8)
        self.words = self.memory[forms.STATE_OFFSET : forms.STATE_OFFSET + 48].view(np.uint64).data
        """state, valid until, complete, neighbours, (buckets, rows), live rows"""
        self._counts = self.memory[104:112].view(np.uint32).data
        """buckets in use, rows that were ever in use"""
        self.buckets_max = int(self.memory[12:16].view(np.uint32)[0])
        self.all_rows = forms.rows_of(self.memory, self.buckets_max)
        """also those that were never in use: what looks at these has them made"""
        self._shown = self.memory[_SHOWN_OFFSET : forms.PAGE].view(np.uint64).data
        self._asks = self.memory[forms.ASKS_OFFSET : forms.ASKS_OFFSET + 4].view(np.uint32).data
        self._ahead = self.memory[forms.AHEAD_OFFSET : forms.AHEAD_OFFSET + 8].view(np.uint64).data
        self.ancestors: object = None
        """of its directory, if it is shown, see `views.ancestors`; None: not known yet"""

    @property
    def is_shown(self) -> bool:
        """Somebody may have it mapped from whom later blocks may have to be kept. The next daemon knows it, too."""
        return bool(self._shown[0])

    @is_shown.setter
    def is_shown(self, value: bool) -> None:
        self._shown[0] = value

    def tell_clients(self, *, asks: bool, ahead: int) -> None:
        """``asks``: they ask whether what is not in memory is worth reading. ``ahead``: seconds, of their clock."""
        self._asks[0], self._ahead[0] = asks, ahead

    def descriptor(self) -> int:
        """A new one, which can only be read."""
        return self.piece.open_for_others()

    @property
    def size(self) -> int:
        return len(self.memory)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    @property
    def serial(self) -> int:
        return int(self.memory[64:72].view(np.uint64)[0])

    @property
    def origin(self) -> int:
        """Serial of the table that went on as this one."""
        return int(self.memory[forms.ORIGIN_OFFSET : forms.ORIGIN_OFFSET + 8].view(np.uint64)[0])

    @property
    def has_ended(self) -> bool:
        return bool(self.words[STATE] != forms.TABLE_LIVE)

    @cached_property
    def room(self) -> npt.NDArray[np.void]:
        """All rows that there may be, as they are now."""
        return forms.rows_of(self.memory, int(self.memory[:64].view(np.uint32)[3]))

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """All rows that were ever in use, as they are now."""
        return self.all_rows[: self._counts[1]]

    def find(self, names: Sequence[bytes], now: int) -> tuple[npt.NDArray[np.int64], Words]:
        """(row, sequence) of each; a row below 0: there is no such block."""
        rows, sequences = np.empty(len(names), np.int64), np.empty(len(names), np.uint64)
        self.core.find(self.number, self.readers.directory, *forms.name_columns(names), False, now, rows, sequences)
        return rows, sequences


class BlockTables:
    """All tables of a volume. Event loop only, but for `of`.

    ``multipliers``: of the volume's fingerprints. ``rows_max``: blocks that the volume may have at the most.
    """

    def __init__(
        self, core: Core, supply: Supply, keeper: Keeper, volume_id: bytes, rows_max: int,
        when_entered: Callable[[int], None],
    ) -> None:  # fmt: skip
        """``when_entered``: called when a directory has got a table, before anything is in it."""
        self._core = core
        self._supply = supply
        self._when_entered = when_entered
        self._keeper = keeper
        self._volume_id = volume_id
        self.multipliers = forms.multipliers_of(volume_id)
        self.set_rows_max(rows_max)
        self._serials = itertools.count(1)
        self.by_directory: dict[int, tuple[BlockTable, ...]] = {}
        """to be looked at in any thread; replaced, never changed"""
        self.all: dict[int, BlockTable] = {}
        """place -> table"""
        self.ended: list[BlockTable] = []
        """whose slots are not all given back yet"""
        self._left: list[BlockTable] = []
        """that went on in other memory, and whose pages are to be freed"""

    def set_rows_max(self, rows_max: int) -> None:
        """Of tables that are made from now on."""
        self._rows_max = min(max(rows_max, 1 << 12), ROWS_MAX)

    def of(self, directory: int) -> tuple[BlockTable, ...]:
        return self.by_directory.get(directory, ())

    def current(self, table: BlockTable) -> BlockTable:
        """What a table goes on as, if it does in other memory."""
        found = self.all.get(table.place)
        return found if found is not None and found.origin == table.origin else table

    def of_namespace(self, namespace: int) -> list[BlockTable]:
        return [table for table in self.all.values() if table.namespace == namespace and not table.has_ended]

    def open(self, namespace: int, space: int, epoch: int, readers: Readers) -> BlockTable:
        """The table of these readers, made if need be. NoSpace: there are too many."""
        for table in self.of(readers.directory):
            if table.readers == readers:
                return table
        place = next((place for place in range(TABLES_MAX) if place not in self.all), None)
        mine = sum(table.readers.uid == readers.uid for table in self.all.values())
        if place is None or (len(self.all) >= TABLES_MAX - TABLES_KEPT and mine >= TABLES_OF_EACH):
            raise NoSpace(f"user {readers.uid} has {mine} of {len(self.all)} groups of blocks with one folder and mode")
        buckets_max = max(forms.BUCKETS_MIN, -(-self._rows_max // 6))
        table = self._begin(place, namespace, epoch, readers, buckets_max, self._rows_max)
        self._add(table, space)
        self._keep(table)
        self._enter(table)
        return table

    def _begin(
        self, number: int, namespace: int, epoch: int, readers: Readers, buckets_max: int, rows_max: int
    ) -> BlockTable:
        size = forms.table_size(buckets_max, rows_max)
        piece = self._supply.make("kvfuse-blocks", size)
        begin_table(
            mmap.mmap(piece.descriptor, size), self.multipliers, buckets_max, rows_max, readers.directory, namespace,
            readers.uid, readers.gid, readers.mode, next(self._serials),
        )  # fmt: skip
        return BlockTable(self._core, number, namespace, epoch, readers, piece)

    def _keep(self, table: BlockTable) -> None:
        numbers = table.place, table.namespace, table.epoch, table.serial, table.size
        facts = _FACTS.pack(_FORM, self._volume_id, *numbers)
        self._keeper.keep(f"{TABLE_PREFIX}{table.serial}", facts, (table.piece.descriptor, table.piece.readable))

    def _add(self, table: BlockTable, space: int) -> None:
        self._core.hold(table.address, table.memory)
        self._core.add_table(table.place, space, table.address, table.size)

    def _enter(self, table: BlockTable) -> None:
        directory = table.readers.directory
        for other in (table, *self.of(directory)):
            other.words[COMPLETE] = 0
        fence()
        self.all[table.place] = table
        self.by_directory = {**self.by_directory, directory: (*self.of(directory), table)}
        self._when_entered(directory)

    def renew(self, table: BlockTable) -> None:
        """Have a table go on in other memory: who has it, or its arenas, mapped sees nothing that is stored later.

        OSError: there is no memory. Daemons that are killed here leave two tables with one place: `restore` knows.
        """
        fresh = self._begin(
            table.number, table.namespace, table.epoch, table.readers, table.buckets_max, len(table.room)
        )
        fresh.words[STATE] = 0
        self._core.hold(fresh.address, fresh.memory)
        self._keep(fresh)
        fresh.number = self._core.renew_table(table.number, fresh.address, fresh.size)
        self._core.hold(table.address, None)
        self._keeper.drop(f"{TABLE_PREFIX}{table.serial}")
        self.all[table.place] = fresh
        own = tuple(fresh if other is table else other for other in self.of(table.readers.directory))
        self.by_directory = {**self.by_directory, table.readers.directory: own}
        self._left.append(table)

    def end(self, table: BlockTable) -> None:
        """Nobody finds anything in it any more; `sweep` gives back what its blocks have."""
        self._core.end_table(table.place)
        directory = table.readers.directory
        rest = tuple(other for other in self.of(directory) if other is not table)
        others = {key: found for key, found in self.by_directory.items() if key != directory}
        self.by_directory = {**others, directory: rest} if rest else others
        self.ended.append(table)
        self._keeper.drop(f"{TABLE_PREFIX}{table.serial}")

    def sweep(self, rows: int, forget_arenas: Callable[[int], tuple[int, int]]) -> bool:
        """Give back slots and memory of so many rows of tables that have ended. True: there are more, at once.

        ``forget_arenas``: takes the place of a table, whose arenas nobody needs; how many went, and are left.
        """
        while self._left:
            table = self._left.pop()
            table.piece.take_back(forms.PAGE, table.size)
        for table in list(self.ended):
            if self._core.sweep_table(table.place, rows):
                return True
            freed, left = forget_arenas(table.place)
            if freed and left:
                return True
            if not left and self._core.remove_table(table.place):
                del self.all[table.place]
                self._core.hold(table.address, None)
                table.piece.take_back(forms.PAGE, table.size)
                self.ended.remove(table)
        return False

    # -- from one daemon to the next -----------------------------------------------------------------

    def restore(self, find_space: Any) -> None:
        """Take over the tables of the former daemon. ``find_space``: (namespace, epoch) -> its space; None: ended."""
        last = 0
        # Of two with one place the later one counts, if it is live: the other one was about to end.
        for name, entry in sorted(take_all(self._keeper, TABLE_PREFIX), key=_serial_of, reverse=True):
            piece = RevocableMemory(*entry.descriptors) if len(entry.descriptors) == 2 else None
            space = None
            if piece is not None and len(entry.content) == _FACTS.size:
                form, volume_id, place, namespace, epoch, serial, size = _FACTS.unpack(entry.content)
                is_ours = form == _FORM and volume_id == self._volume_id and place not in self.all
                last = max(last, serial if is_ours else 0)
                if is_ours and os.fstat(piece.descriptor).st_size == size and _is_live(piece):
                    space = find_space(namespace, epoch)
            if piece is None or space is None:
                self._keeper.drop(name)
                if piece is not None:
                    _end_piece(piece)
                continue
            head = np.frombuffer(mmap.mmap(piece.descriptor, forms.PAGE), np.uint8)
            directory = int(head[32:40].view(np.uint64)[0])
            uid, gid, mode = head[48:60].view(np.uint32).tolist()
            table = BlockTable(self._core, place, namespace, epoch, Readers(directory, uid, gid, mode), piece)
            self._add(table, space)
            self._enter(table)
        self._serials = itertools.count(last + 1)


def _serial_of(kept: tuple[str, Any]) -> int:
    serial = kept[0].removeprefix(TABLE_PREFIX)
    return int(serial) if serial.isdecimal() else 0


def _is_live(piece: RevocableMemory) -> bool:
    state: int = struct.unpack("<Q", os.pread(piece.descriptor, 8, forms.STATE_OFFSET))[0]
    return state == forms.TABLE_LIVE


def _end_piece(piece: RevocableMemory) -> None:
    """Nobody finds anything in a table that no daemon goes on with."""
    size = os.fstat(piece.descriptor).st_size
    if size > forms.PAGE:
        os.pwrite(piece.descriptor, struct.pack("<Q", forms.TABLE_ENDED), forms.STATE_OFFSET)
        piece.take_back(forms.PAGE, size)


def take_all(keeper: Keeper, prefix: str) -> Iterator[tuple[str, Any]]:
    """(name, entry) of all that the former daemon kept below a prefix."""
    for name in keeper.list_names(prefix):
        kept = keeper.take(name)
        if kept is not None:
            yield name, kept
