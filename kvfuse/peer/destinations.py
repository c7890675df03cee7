"""Where the bytes of an answer go: a row for each granule, which `rowreceiver` fills and sums."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, extent_checksum
from kvfuse.native.rowreceiver import ROW
from kvfuse.peer.peer_reads import Read
from kvfuse.volume.views.neighbours import BLOCK, Wanted

_SINK = np.empty(GRANULE_SIZE, np.uint8)
"""for bytes that nobody waits for any more"""
_SINK_ADDRESS = int(_SINK.ctypes.data)


class Destinations:
    """Of reads whose bytes come one after the other. Event loop only, as what receives is."""

    def __init__(self, reads: Sequence[Read], landed: Callable[[Read], None]) -> None:
        """``landed`` is called for each when it has all, and says whether it is right."""
        self._landed = landed
        self._reads = reads
        self._next = 0
        self.rows = array("q")
        self.left = 0
        """bytes that are still to come"""
        for read in reads:
            address, size = _address_of(read), read.size
            read.row, read.destinations = len(self.rows) // ROW, self
            self.left += size
            for low in range(0, size, GRANULE_SIZE):
                self.rows.extend((address + low if address else _SINK_ADDRESS, min(GRANULE_SIZE, size - low), 0, 0))

    def abandon(self, read: Read) -> None:
        """Its bytes go nowhere from now on."""
        for place in range(ROW * read.row, ROW * (read.row + _granules(read)), ROW):
            self.rows[place] = _SINK_ADDRESS

    def count_received(self, byte_count: int, row_count: int) -> None:
        """So many bytes more; so many rows are full now."""
        self.left -= byte_count
        while self._next < len(self._reads):
            read = self._reads[self._next]
            stop = read.row + _granules(read)
            if stop > row_count:
                return
            self._next += 1
            found = self.rows[ROW * read.row + 3 : ROW * stop : ROW].tolist()
            checksums = b"".join([checksum.to_bytes(CHECKSUM_SIZE, "little") for checksum in found])
            read.arrived(is_right=_is_right(read.wanted, checksums))
            self._landed(read)


def _is_right(wanted: Wanted, checksums: bytes) -> bool:
    if wanted.ino == BLOCK:
        size = wanted.high - wanted.low
        return extent_checksum(checksums, size) == int.from_bytes(wanted.checksums, "little")
    return checksums == wanted.checksums


def _granules(read: Read) -> int:
    return -(-read.size // GRANULE_SIZE)


def _address_of(read: Read) -> int:
    """Of its target; 0: nobody waits for it."""
    if read.target is None:
        return 0
    return int(np.frombuffer(read.target, np.uint8).__array_interface__["data"][0])
