"""Says what C may answer the kernel by itself about blocks: see ``native/blockdoor.h``, whose `Door` this fills.

What the file door knows of blocks beyond their rows is *held* here: names that sketches have, and numbers of blocks
that somebody writes. C leaves those to Python. It tells by and by what it did (`Notes`), and gives up files that are
being written where Python is asked about them (`taken`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from mmap import mmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvfuse.kept.keeper import Keeper
from kvfuse.kept.mappings import map_kept
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import ANSWERS, KEPT_DRAFTS_SIZE, KEPT_NUMBERS_SIZE, Door
from kvfuse.volume.api import ROOT_INODE, VIRTUAL_NAME

if TYPE_CHECKING:
    from kvfuse.volume.blocks.block_tables import BlockTable

DRAFTS = "blocks/drafts"
"""entry of the keeper"""
_FORM = b"form 1"
OFFER_SECONDS = 1.0
"""for which C answers about a folder, before Python looks at it again"""
TABLES_MAX = 8
"""groups of blocks that a folder may have"""
ACCESS_SHIFT = 57
"""of the access mode in the handle of a file that C made"""
NUMBERS = 1024
"""of inodes, that C has at a time"""
KINDS = frozenset(kind for kind, _, may, _ in ANSWERS if may)
"""of requests that C may answer"""


class Notes(NamedTuple):
    """What C answered since the last ones were taken."""

    uses: list[tuple[int, int]]
    """(place of the table, row) of blocks that were opened"""
    looks: list[tuple[int, bool, bytes]]
    """(directory, whether a file was made there, name) of names that meant nothing"""
    puts: list[tuple[int, int, int]]
    """(place of the table, row, bytes that were written) of blocks that were stored; of those that were renamed 0"""
    changed: list[tuple[int, int]]
    """(directory, time in nanoseconds) of changes of names"""


class KeptRows(NamedTuple):
    """Memory that the next daemon finds; see ``native/blockdoor.h``. Rows of three u64."""

    decisions: mmap | bytearray
    """see `idempotent_changes.Decisions`"""
    handles: mmap | bytearray
    """see `handles`"""


NOT_KEPT = KeptRows(bytearray(), bytearray())
"""nothing outlives this daemon"""


class TakenFile(NamedTuple):
    """A file that is being written, that C made, and that Python goes on with; ``fh``: the handle of who writes it."""

    fh: int
    ino: int
    directory: int
    table: int
    """place of the table that its block comes to"""
    unique: int
    """number of the request that made it; 0: nothing outlives this daemon"""
    mode: int
    uid: int
    gid: int
    pid: int
    flags: int
    """O_ACCMODE of its handle"""
    name: bytes
    content: bytes
    made: int
    mtime: int


class KernelAnswers:
    """Of one engine. Any thread may hold; else event loop only."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.on_notes: list[Callable[[Notes], None]] = []
        """who hears of them"""
        self.bell = -1
        """a descriptor that is readable once there are some, where there may be any"""
        self.take_handles: Callable[[int], None] = lambda _ino: None
        """makes handles of Python's of those of an inode that C gave, as `Door.take_handles` says"""

    def begin(
        self, attr_timeout: float, arenas_max: int, block_max: int, kept: KeptRows, take_handles: Callable[[int], None]
    ) -> object:
        """What ``_fusewire`` answers by. ``arenas_max``: that open blocks may keep in memory. ``block_max``: bytes.

        ``kept``: what outlives this daemon. Blocks that were open in the former one are open. ``take_handles``: see the
        attribute.
        """
        self.door.set_limits(attr_timeout, arenas_max)
        self.take_handles = take_handles
        self.hold_name(ROOT_INODE, VIRTUAL_NAME, 1)  # no block, and no name of the volume's
        self.bell = self.door.begin_drafts(block_max, *kept)
        return self.door.way()

    def restore(self, keeper: Keeper, volume_id: bytes) -> None:
        """Go on with what C knew in the former daemon, and keep it for the next one: numbers of blocks that were
        written, and files that are being written. Once, when all tables and arenas are restored."""
        kept = map_kept(keeper, DRAFTS, _FORM + volume_id, KEPT_NUMBERS_SIZE + KEPT_DRAFTS_SIZE)
        os.close(kept.descriptor)
        memory = memoryview(kept.memory)
        self.door.keep_rows(memory[:KEPT_NUMBERS_SIZE], memory[KEPT_NUMBERS_SIZE:])

    def answer_only(self, kinds: Collection[str]) -> None:
        """Leave all kinds of requests but these to Python."""
        self.door.set_kinds(sum(1 << opcode for kind, opcode, _, _ in ANSWERS if kind in kinds))

    def end(self) -> None:
        """Use those rows no more."""
        self.door.begin_drafts(0, *NOT_KEPT)

    def offer(self, directory: int, tables: tuple[BlockTable, ...], *, is_bare: bool, is_writable: bool) -> None:
        """Answer about a folder that has the blocks of these tables, all of them known. ``is_bare``: nothing else.
        ``is_writable``: files may be made there, of which nobody has to hear at once."""
        if len(tables) <= TABLES_MAX:
            places = np.array([table.place for table in tables], np.uint16)
            if not self.door.offer(directory, places, is_bare, is_writable, OFFER_SECONDS):
                self.hear()

    def take_back(self, directory: int) -> None:
        """Answer no more about a folder, until it is offered again."""
        self.door.take_back(directory)

    def hold_name(self, directory: int, name: bytes, by: int) -> None:
        """Something else than its block may have a name. ``by``: 1, and -1 for no more; likewise below."""
        if len(name) <= forms.NAME_MAX:
            self.door.hold_name(directory, name, by)

    def hold_inode(self, ino: int, by: int) -> None:
        """What the kernel knows by the number of a block is more than that. Who has it open sees that, too."""
        self.door.hold_inode(ino, by)
        if by > 0:
            self.take_handles(ino)

    def name_of(self, ino: int) -> bytes | None:
        """The name by which C told the kernel of a block, if that was a moment ago."""
        return self.door.name_of(ino)

    def hear(self) -> None:
        """Tell all who hear of it what C did."""
        notes = Notes(*self.door.take_notes())
        for tell in self.on_notes:
            tell(notes)

    def taken(self, *, is_all: bool = False) -> Iterator[TakenFile]:
        """Files that Python takes over; ``is_all``: those of which it was not asked, too. The next daemon finds each
        with C until the caller asks for the one after it, and has to find it elsewhere from then on."""
        if is_all:
            self.door.take_all()
        while (found := self.door.next_taken()) is not None:
            try:
                yield TakenFile(*found)
            finally:
                self.door.drop_taken(found[0])

    def give_numbers(self, take: Callable[[int], int]) -> None:
        """Have it have some inode numbers. ``take``: takes so many that follow each other; the first one."""
        if self.door.give_numbers(0, 0) < NUMBERS // 2:
            self.door.give_numbers(take(NUMBERS), NUMBERS)

    def has_drafts(self, directory: int) -> bool:
        """Files are being written there of which Python does not know."""
        return self.door.has_drafts(directory)

    def statistics(self) -> dict[str, int]:
        return self.door.statistics()
