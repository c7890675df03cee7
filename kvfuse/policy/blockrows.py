"""Rows of blocks in memory that others change, as a policy of columns sees them.

A *row* is one block, 96 bytes; a *table* is an array of rows. Blocks come and go in the rows without the policy, so a
policy keeps places of rows, and looks at a row again before it acts on it. What is its own in a row: ``due``, ``uses``
and ``list``; it writes ``used``, too. A lost race with a put gives a new block the place of the one before, no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype(
    [
        ("version", "<u8"),
        ("fingerprint", "<u8", (2,)),
        ("arena", "<u4"),
        ("page", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u4"),
        ("slab", "<u4"),
        ("slot", "<u2"),
        ("packed", "<u2"),
        ("note", "<u4"),
        ("flags", "<u4"),
        ("sequence", "<u8"),
        ("directory", "<u8"),
        ("due", "<u8"),
        ("used", "<u4"),
        ("stored", "<u4"),
        ("expires", "<u4"),
        ("uses", "u1"),
        ("list", "u1"),
        ("priority", "u1"),
        ("name_length", "u1"),
    ]
)
"""``version``: odd where the row is a block. ``fingerprint``: the first half is the key. ``sequence``: of the put,
never twice. ``due``: the smallest of a list goes first; a put sets it to its time in microseconds, and ``uses`` and
``list`` to 0. ``used``, ``stored``, ``expires``: seconds of the same clock; ``expires`` 0: never. ``priority``:
`NORMAL` is that of most."""

NORMAL = 128
UNTOLD, FIRST, SECOND = 0, 1, 2
"""lists: of blocks that nobody told the policy of; those of its order"""
DEAD, HELD, LEAVING = 253, 254, 255
"""no block; one that the caller kept, and is offered later; one that is on its way out"""

Rows = NDArray[Any]
"""of dtype `ROW`"""
Places = NDArray[np.intp]
"""indexes of rows"""
Numbers = NDArray[np.int64]
Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]


class PolicyRows:
    """The columns of one array of rows. Numbers of 64 bits are signed, so that they go together with others."""

    def __init__(self, rows: Rows) -> None:
        """ValueError if they are none, or have gaps between them."""
        if rows.dtype != ROW or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise ValueError(f"rows are one array of {ROW.itemsize} bytes each, not {rows.ndim} of {rows.dtype}")
        self.rows = rows
        self.version: Keys = rows["version"]
        self.keys: Keys = rows["fingerprint"][:, 0]
        self.flags: NDArray[np.uint32] = rows["flags"]
        self.lengths: NDArray[np.uint32] = rows["length"]
        self.slabs: NDArray[np.uint32] = rows["slab"]
        self.sequences: Numbers = rows["sequence"].view(np.int64)
        self.due: Numbers = rows["due"].view(np.int64)
        self.used: NDArray[np.uint32] = rows["used"]
        self.stored: NDArray[np.uint32] = rows["stored"]
        self.expires: NDArray[np.uint32] = rows["expires"]
        self.uses: NDArray[np.uint8] = rows["uses"]
        self.list: NDArray[np.uint8] = rows["list"]
        self.priorities: NDArray[np.uint8] = rows["priority"]
        # Views reach one row faster than arrays. Types of Python 3.11 do not say that an array is a buffer.
        self.priority_bytes = memoryview(self.priorities)  # type: ignore[arg-type]
        self.list_bytes = memoryview(self.list)  # type: ignore[arg-type]
        self.uses_bytes = memoryview(self.uses)  # type: ignore[arg-type]
        self.due_words = memoryview(self.due)  # type: ignore[arg-type]
        self.expires_words = memoryview(self.expires)  # type: ignore[arg-type]
        self.used_words = memoryview(self.used)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.rows)

    def is_live(self, which: Places | slice) -> Mask:
        live: Mask = (self.version[which] & np.uint64(1)) != 0
        return live

    def lists_of(self, which: Places | slice) -> NDArray[np.uint8]:
        """The list of each row; `DEAD` where it is no block."""
        lists = self.list[which]
        return np.where(self.is_live(which), lists, np.uint8(DEAD))
