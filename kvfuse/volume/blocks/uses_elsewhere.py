"""Which blocks of other hosts are used here: their holders are told of it (`hosts.reports`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.views.neighbours import USE, Uses

NOTED_MAX = 1 << 16
"""uses between two calls of `take`; more are left out"""


class UsesElsewhere:
    """Event loop only."""

    def __init__(self) -> None:
        self._noted: list[Uses] = []
        self._left = NOTED_MAX

    def note(self, table: BlockTable, rows: npt.NDArray[np.int64]) -> None:
        """These rows were used: those of other hosts' blocks are kept."""
        rows = rows[table.rows["flags"][rows] & np.uint32(forms.FOREIGN) != 0][: self._left]
        if len(rows):
            found, uses = table.rows[rows], np.empty(len(rows), USE)
            for name in USE.names or ():
                uses[name] = found[name]
            self._noted.append(uses)
            self._left -= len(rows)

    def take(self) -> Uses:
        """Each block that was used since the last call, those that were used most often first."""
        noted, self._noted, self._left = self._noted, [], NOTED_MAX
        if not noted:
            return np.empty(0, USE)
        uses = np.concatenate(noted)
        keys = uses["sequence"] ^ (uses["slab"].astype(np.uint64) << np.uint64(40)) ^ uses["slot"]  # nearly unique
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        return uses[first[np.argsort(-counts, kind="stable")]]
