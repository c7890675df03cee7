"""What hosts of a shared volume have of each other's blocks: how readers ask for it, and what may be asked of a host.

Only granules of sealed extents are asked for. They are named by the address and generation of their slot, which mean
the same bytes for ever; whoever gets them verifies them by the checksums in the extent's record. So a host that has
something else, or nothing, or does not answer, costs time and never a byte: the engine is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

HEDGE_MIN = 0.05
"""Seconds: no read that took less is late, however fast its host usually is."""
FED_PATIENCE = 1.0
"""Seconds, likewise, of bytes that the host which is asked may have to read from the segments."""
HEDGE_FACTOR = 4.0
"""Reads from other hosts that take so many times as long as they usually do, or as the engine would, are late."""
BLOCK = (1 << 63) + 1
"""in the place of an inode: bytes of a block that is a row, by address and sequence; ``checksums`` is one for all"""
NO_BASE = -1
"""the slot does not have the bytes of the file as they are (they are compressed)"""


USE = np.dtype([("slab", "<u4"), ("slot", "<u4"), ("sequence", "<u8")])
"""a block that a host used, of a slab that another one holds"""
Uses = npt.NDArray[np.void]
"""of `USE`"""


class Wanted(NamedTuple):
    """Neighbouring granules of a sealed extent. Sizes and offsets in bytes."""

    ino: int
    """of the file"""
    base: int
    """where the extent begins in the file; or `NO_BASE`"""
    addr: int
    generation: int
    low: int
    """where the first granule begins in the extent"""
    high: int
    """where the last one ends"""
    checksums: bytes
    """of these granules, 4 bytes little endian each"""


def patience(expected: float, engine: float) -> float:
    """Seconds after which a read from other hosts is late, which usually takes ``expected`` ones."""
    return max(HEDGE_FACTOR * min(expected, engine), engine, HEDGE_MIN)


class WantedBlocks(NamedTuple):
    """Whole blocks that are rows. Columns: slabs, addresses, sequences, sizes in bytes, CRC32C of all bytes, and where
    they are to come to in memory."""

    slabs: npt.NDArray[np.uint32]
    addresses: npt.NDArray[np.uint64]
    generations: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.uint64]


class LandsBlocks(Protocol):
    """`native._blocks.Landing`: memory that was reserved for blocks."""

    def way(self) -> object:
        """By which a thread that receives a block shows it at once."""


class Answer(IntEnum):
    """What a host says of granules, or of a block, that it was asked for."""

    HERE = 1
    """it has them"""
    ABSENT = 2
    """it does not"""
    MOVED = 3
    """it has other bytes of that file: the extent is another's, or no more"""
    ELSEWHERE = 4
    """others have them, too, and have less to do"""
    BUSY = 5
    """it has enough to do for the one who asks"""
    STORED = 6
    """of a block: not in memory; its disk tier may have it"""


class Neighbours(Protocol):
    """Other hosts, for readers of this one. Event loop only."""

    hedged: int
    """reads beside which the engine was asked, because they took longer than usual"""
    overtaken: int
    """of these, where the engine had the bytes first"""

    def may_have(self, addr: int, base: int = 0) -> bool:
        """A host can be asked: it holds the slab, and most likely wrote what is there. ``base``: as of `Wanted`; of an
        extent behind a file's start it is the host that reads such extents for all."""

    def feeds(self, addr: int, base: int) -> bool:
        """This host reads the extent for all others."""

    async def feed(self, addr: int, generation: int, low: int, high: int) -> memoryview:
        """Bytes of an extent that this host `feeds` others with, as the segments have them. EngineError, ValueError."""

    def expect(self, wanted: Sequence[Wanted]) -> float:
        """Seconds in which reads that begin now usually are over, if all of these are asked for together."""

    async def read(self, wanted: Sequence[Wanted], targets: Sequence[memoryview], patience: float = inf) -> list[bool]:
        """Fill each target, of ``high - low`` bytes, with verified bytes: which have them.

        A target that has not them has any bytes. No target is touched after this returned, be it by a cancellation. It
        takes no longer than the neighbours' deadline, and ``patience`` seconds; what is late is asked of the engine.
        """

    def tell_uses(self, client: int, uses: Uses) -> bool:
        """Tell a client which of its blocks were used here: it may not hear it. False: there is no connection to it."""

    async def read_blocks(
        self, wanted: WantedBlocks, engine: float, landing: LandsBlocks | None = None,
        places: npt.NDArray[np.uint32] | None = None,
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        """The same of blocks, whichever hosts hold their slabs. ``engine``: seconds that it would take.

        ``landing``: what comes is shown by it as soon as it is right; ``places``: of each block in it.
        """
