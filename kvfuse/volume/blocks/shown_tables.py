"""Tables and arenas of the block store that clients map: who may have them, until when, and what is read of them.

A client that may read all blocks of a table maps it, and the arenas of its blocks, for reading. It finds and copies
blocks without the daemon (`native/blocktable.h`). Nobody takes a mapping from it. So before other people than until now
may use a directory, its tables go on in other memory, as far as anybody may have them, and so do blocks that are stored
later. In the former memory a table has ended: nothing in it is found any more, and its pages are freed.

A table holds up to a moment that the daemon moves on while it lives. The next daemon goes on with the same memory.

A table is *complete* while a name that is not in it has no block: it is the only one of its directory, the heads of all
slabs were read, and no name of the directory means an inode. Whoever changes that says so before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import OperationError
from kvfuse.keys import file_names
from kvfuse.native.blockforms import name_columns
from kvfuse.touchpage import fence
from kvfuse.volume.api import FindAncestors
from kvfuse.volume.blocks.block_arenas import BlockArenas
from kvfuse.volume.blocks.block_eviction import BlockEviction
from kvfuse.volume.blocks.block_tables import COMPLETE, NEIGHBOURS, VALID_UNTIL, BlockTable, BlockTables
from kvfuse.volume.blocks.kernel_answers import KernelAnswers
from kvfuse.volume.inodes.dentries import Dentries
from kvfuse.volume.measures.profiling import PROFILE
from kvfuse.volume.tier.touches import TouchPage
from kvfuse.volume.tier.validity import Validity

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.05
"""between looks at what clients read by themselves"""
SAMPLED_AT_ONCE = 8192
"""rows and keys alike, of all clients"""
IN_PLACE = "get in place"
"""operation of a profile: blocks that clients read by themselves, each once in `SAMPLE_SECONDS`"""
_EXPIRED = 1
"""as the moment up to which a table holds"""

Numbers = npt.NDArray[np.int64]


class RowTouches(TouchPage):
    """The page of one connection for a table."""

    def __init__(self, table: BlockTable) -> None:
        super().__init__()
        self.table = table
        self.pid = 0
        """whose it is, if that is known"""


class FileDirectories(set[int]):
    """Directories of which a name may mean an ordinary file. `add` comes before the name means it."""

    def __init__(self, shown: ShownTables, answers: KernelAnswers) -> None:
        super().__init__()
        self._shown, self._answers = shown, answers

    def add(self, directory: int) -> None:
        self._shown.names_come(directory)
        super().add(directory)
        self._answers.take_back(directory)


@dataclass
class ShownTables:
    """Of one engine, which calls it. Event loop only, but where it says otherwise."""

    tables: BlockTables
    arenas: BlockArenas
    validity: Validity
    dentries: Dentries
    eviction: BlockEviction
    """hears what is read"""
    has_cold: Callable[[int], bool] = lambda directory: False
    """the cold tier has blocks of a directory"""
    on_lost: Callable[[int], None] = lambda directory: None
    """all blocks of a directory are about to be lost"""
    _have_neighbours: bool = False
    _touches: deque[RowTouches] = field(default_factory=deque)
    _opened: trio.Event = field(default_factory=trio.Event)
    _looked_at: dict[int, bool] = field(default_factory=dict)
    """directory -> whether a name of it came to mean an inode since somebody began to look"""

    # -- who has them ------------------------------------------------------------------------------------

    def open(self, table: BlockTable, ancestors: object, *, is_unlimited: bool) -> RowTouches:
        """Show a table to one connection more, which gives it back to `leave`.

        ``ancestors``: of its directory, whose changes count from here on. ``is_unlimited``: the process could end the
        daemon anyway, so nothing is kept from it.
        """
        self._note_shown(table, ancestors, is_unlimited=is_unlimited)
        table.words[VALID_UNTIL] = self.validity.until
        table.words[NEIGHBOURS] = self._have_neighbours
        touches = RowTouches(table)
        self._touches.append(touches)
        self._opened.set()
        return touches

    def leave(self, touches: RowTouches) -> None:
        """A connection has them no more."""
        self._touches.remove(touches)
        touches.end()

    def table_of(self, arena: int) -> BlockTable | None:
        """Whose blocks an arena has."""
        return self.arenas.table_of(arena)

    def arena_descriptor(self, arena: int, ancestors: object, *, is_unlimited: bool) -> int:
        """A new descriptor of an arena, which can only be read. NotFound. As for `open`."""
        table = self.arenas.table_of(arena)
        if table is not None:
            self._note_shown(table, ancestors, is_unlimited=is_unlimited)
        return self.arenas.descriptor_of(arena)

    def _note_shown(self, table: BlockTable, ancestors: object, *, is_unlimited: bool) -> None:
        if not (is_unlimited or table.has_ended):
            table.ancestors = ancestors
            table.is_shown = True

    def readers_change(self, directories: Collection[int] | None) -> bool:
        """Before other people may use these directories (None: any) than until now. Whether anybody had their tables.

        Those of the former daemon count whatever changes, until the directories above their own are known.
        """
        ending = [
            table
            for table in self.tables.all.values()
            if table.is_shown and not table.has_ended
            and (directories is None or table.ancestors is None or table.readers.directory in directories)
        ]  # fmt: skip
        for table in ending:
            try:
                self.tables.renew(table)
            except OSError as error:
                log.warning("a group of blocks is lost, as there is no memory for other people's: %s", error)
                self.on_lost(table.readers.directory)
                self.tables.end(table)
            table.ancestors = None
        fence()
        return bool(ending)

    async def find_ancestors(self, find: FindAncestors) -> None:
        """Have changes above the directories of the former daemon's tables count."""
        for table in list(self.tables.all.values()):
            if table.is_shown and table.ancestors is None and not table.has_ended:
                try:
                    ancestors, _ = await find(table.readers.directory)
                except OperationError:  # it was removed, or cannot be read: then any change ends the table
                    continue
                if not table.has_ended:
                    table.ancestors = ancestors

    # -- until when --------------------------------------------------------------------------------------

    def live_on(self) -> None:
        """Tables hold for a while more."""
        until = self.validity.until
        for table in self.tables.all.values():
            table.words[VALID_UNTIL] = until

    def tell_of_neighbours(self, are_there: bool) -> None:
        """Other hosts can be asked for blocks now, or none can."""
        self._have_neighbours = are_there
        for table in self.tables.all.values():
            table.words[NEIGHBOURS] = are_there

    def expire(self) -> None:
        """Clients ask again, whoever the next daemon is."""
        for table in self.tables.all.values():
            table.words[VALID_UNTIL] = _EXPIRED

    # -- what is absent ----------------------------------------------------------------------------------

    def begin_look(self, directory: int) -> None:
        """Somebody is about to look whether a name of a directory means a file."""
        self._looked_at[directory] = False
        self.dentries.watch_names(directory, "clients", lambda: self.names_come(directory))

    def end_look(self, directory: int, *, has_files: bool, knows_all: bool) -> bool:
        """``has_files``: what was found. ``knows_all``: heads of all slabs were read."""
        is_plain = self._looked_at.get(directory) is False and not has_files
        tables = self.tables.of(directory)
        if is_plain and knows_all and len(tables) == 1 and not self.has_cold(directory):
            tables[0].words[COMPLETE] = 1
        return is_plain

    def names_come(self, directory: int) -> None:
        """A name of a directory is about to mean an inode."""
        self._looked_at[directory] = True
        for table in self.tables.of(directory):
            table.words[COMPLETE] = 0
        fence()

    def cold_blocks_come(self, directory: int) -> None:
        """A name that is in no table is about to have a block in the cold tier."""
        for table in self.tables.of(directory):
            table.words[COMPLETE] = 0
        fence()

    # -- what is read ------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Note what clients have read, and asked for, by themselves."""
        left, now = SAMPLED_AT_ONCE, int(time.time())
        for touches in list(self._touches):
            self._touches.rotate(-1)
            left -= self._note(touches, now + self.eviction.ahead.get(touches.table.namespace, 0))
            if left <= 0:
                break

    def _note(self, touches: RowTouches, now: int) -> int:
        table, asked = touches.table, touches.take_asked()
        numbers: Numbers = np.array(touches.take(), np.int64)
        if table.has_ended:
            return len(numbers)
        rows = table.rows
        numbers = numbers[numbers < len(rows)]
        numbers = numbers[rows["version"][numbers] & np.uint64(1) == 1]
        if len(numbers):
            if PROFILE.is_on:
                size = int(rows["length"][numbers].sum())
                PROFILE.note(touches.pid, table.readers.directory, IN_PLACE, None, calls=len(numbers), size=size)
            rows["used"][numbers] = now
            self.eviction.note_use(table, numbers)
        for keys in asked:
            names = file_names(keys)
            self.eviction.note_chain([table], name_columns(names), [table.find(names, now)[0]])
        return len(numbers) + sum(map(len, asked))

    async def run(self) -> None:
        """Look at what clients read, as long as there are some."""
        while True:
            if not self._touches:
                self._opened = trio.Event()
                await self._opened.wait()
            await trio.sleep(SAMPLE_SECONDS)
            self.sample()
