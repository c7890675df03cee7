"""Says which blocks C may show the kernel by itself: see ``native/blockdoor.h``, whose `Door` this fills.

What the file door knows of blocks beyond their rows is *held* here: names that sketches have, rows that are shown under
another number, numbers of blocks that somebody writes. C leaves those to Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Door

if TYPE_CHECKING:
    from kvfuse.volume.blocks.block_tables import BlockTable

OFFER_SECONDS = 1.0
"""for which C answers about a folder, before Python looks at it again"""
TABLES_MAX = 8
"""groups of blocks that a folder may have"""


class KernelAnswers:
    """Of one engine. Any thread may hold; else event loop only."""

    def __init__(self, door: Door) -> None:
        self.door = door

    def begin(self, attr_timeout: float, arenas_max: int) -> object:
        """What ``_fusewire`` answers by. ``arenas_max``: that open blocks may keep in memory."""
        self.door.set_limits(attr_timeout, arenas_max)
        return self.door.way()

    def offer(self, directory: int, tables: tuple[BlockTable, ...], *, is_bare: bool) -> None:
        """Answer about a folder that has the blocks of these tables, all of them known. ``is_bare``: nothing else."""
        if len(tables) <= TABLES_MAX:
            places = np.array([table.place for table in tables], np.uint16)
            self.door.offer(directory, places, is_bare, OFFER_SECONDS)

    def take_back(self, directory: int) -> None:
        """Answer no more about a folder, until it is offered again."""
        self.door.take_back(directory)

    def hold_name(self, directory: int, name: bytes, by: int) -> None:
        """Something else than its block may have a name. ``by``: 1, and -1 for no more; likewise below."""
        if len(name) <= forms.NAME_MAX:
            self.door.hold_name(directory, name, by)

    def hold_row(self, table: int, row: int, sequence: int, by: int) -> None:
        """The kernel knows a block by another number. ``table``: its place."""
        self.door.hold_row(table, row, sequence, by)

    def hold_inode(self, ino: int, by: int) -> None:
        """What the kernel knows by the number of a block is more than that."""
        self.door.hold_inode(ino, by)

    def name_of(self, ino: int) -> bytes | None:
        """The name by which C told the kernel of a block, if that was a moment ago."""
        return self.door.name_of(ino)

    def take_notes(self) -> tuple[list[tuple[int, int]], list[tuple[int, bytes]]]:
        """What C answered since the last call: (place of the table, row) of blocks that were opened, and (directory,
        name) of names that mean nothing."""
        return self.door.take_notes()

    def statistics(self) -> dict[str, int]:
        return self.door.statistics()
