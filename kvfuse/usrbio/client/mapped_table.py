"""A table of blocks that are rows, as a client has it mapped (`kvfuse/native/blocktable.h` says how it is read)."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.errors import EngineError
from kvfuse.keys import KEY_SIZE_MAX, encode_keys, file_name, file_names
from kvfuse.native import blockforms as forms
from kvfuse.touchpage import fence

native: Any
try:
    from kvfuse.native import _blocks as native
except ImportError:  # it was built without a compiler: the daemon is asked for all
    native = None

MAGIC = b"KVBLOCKS"
VERSION = 4
_HEADER = struct.Struct("<8sIIQQQ")
"""magic, version, buckets, offset of the rows, size, directory"""
_SERIAL_OFFSET = 64
_STATE, _VALID_UNTIL, _COMPLETE, _NEIGHBOURS = range(4)
_LATEST = (1 << 32) - 1
_FIRST = bytes(8)
"""where the one name of a batch of one begins"""
_LENGTHS = [struct.pack("<I", length) for length in range(256)]
_NONE = np.zeros(0, np.uint64)
SPOT = np.dtype([("row", "<i8"), ("version", "<u8"), ("arena", "<u8"), ("offset", "<u8"), ("length", "<u8")])
"""where a block is; ``arena`` 0: not in memory"""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
Spots = npt.NDArray[np.void]


class MappedTable:
    """``memory``: all of it. EngineError where it is no table of this version, or the native part is not there."""

    def __init__(self, memory: Bytes) -> None:
        magic, version, buckets, rows, size, self.directory = _HEADER.unpack(memory[: _HEADER.size].tobytes())
        is_sound = magic == MAGIC and version == VERSION and size == len(memory) and native is not None
        if not is_sound or rows != forms.PAGE + buckets * forms.BUCKET_SIZE:
            raise EngineError(f"no table of blocks of version {VERSION}")
        self.memory = memory
        self.serial = int(memory[_SERIAL_OFFSET : _SERIAL_OFFSET + 8].view(np.uint64)[0])
        self._words = memory[forms.STATE_OFFSET : forms.STATE_OFFSET + 32].view(np.uint64).data
        self._asks = memory[forms.ASKS_OFFSET : forms.ASKS_OFFSET + 4].view(np.uint32).data
        self._ahead = memory[forms.AHEAD_OFFSET : forms.AHEAD_OFFSET + 8].view(np.uint64).data
        self.rows: npt.NDArray[np.void] = forms.rows_of(memory, buckets)

    @property
    def has_ended(self) -> bool:
        """The daemon has another one by now, or none for this client."""
        return bool(self._words[_STATE] != forms.TABLE_LIVE)

    @property
    def has_neighbours(self) -> bool:
        """Other hosts may have in memory what is not here."""
        return bool(self._words[_NEIGHBOURS])

    def holds(self) -> bool:
        """What was read of it before this call is true of some moment before."""
        until = self._words[_VALID_UNTIL]
        return bool(self._words[_STATE] == forms.TABLE_LIVE and (not until or time.monotonic_ns() <= until))

    @property
    def is_complete(self) -> bool:
        """A block that was not found before this call is none. The caller asks `holds`, too."""
        return bool(self._words[_COMPLETE])

    def _now(self) -> int:
        """Seconds since the epoch, by the clock of the namespace."""
        return min(int(time.time()) + int(self._ahead[0]), _LATEST)

    def look_up(self, keys: Sequence[bytes | str]) -> Numbers:
        """As `find`, for who does not read them: below 0 also where the daemon knows whether a block is worth it."""
        rows = self.find(keys)
        if self._asks[0]:
            rows[self.rows["arena"][np.maximum(rows, 0)] == 0] = forms.NOT_RESIDENT
        return rows

    def find(self, keys: Sequence[bytes | str]) -> Numbers:
        """The row of each key, below 0 for others. All keys have 1 to 255 bytes."""
        rows: Numbers = np.empty(len(keys), np.int64)
        columns = _columns(keys)
        native.table_get(self.memory, self.directory, *columns, self._now(), _NONE, _NONE, _NONE, rows, rows, False)
        return rows

    def lacks(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Of keys that `look_up` did not find: those that certainly have no block. The caller asks `holds`, too."""
        return np.full(len(keys), self.is_complete and not self._asks[0])

    def get(
        self, keys: Sequence[bytes], arenas: npt.NDArray[np.void], targets: Addresses, rooms: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Copy blocks to ``targets`` (addresses), where there is room for so many bytes.

        (rows; the length of each block, or a code of `native.blocks`: then the room may have any bytes). The caller
        asks `holds` afterwards.
        """
        rows: Numbers = np.empty(len(keys), np.int64)
        results: Numbers = np.empty(len(keys), np.int64)
        columns = _columns(keys)
        native.table_get(
            self.memory, self.directory, *columns, self._now(), arenas, targets, rooms, rows, results, True
        )
        return rows, results

    def get_one(self, key: bytes, arenas: npt.NDArray[np.void], target: Addresses, room: Numbers) -> tuple[int, int]:
        """As `get`, at less expense."""
        (name,) = file_names([key])
        row, result = bytearray(8), bytearray(8)
        native.table_get(
            self.memory, self.directory, name, _FIRST, _LENGTHS[len(name)], self._now(), arenas, target, room, row,
            result, True,
        )  # fmt: skip
        return int.from_bytes(row, "little", signed=True), int.from_bytes(result, "little", signed=True)

    def look(self, keys: Sequence[bytes]) -> Spots:
        """Where each block is, a row of `SPOT`: for callers that copy it themselves, and then ask `is_unchanged`."""
        spots = np.zeros(len(keys), SPOT)
        numbers = self.find(keys)
        here = np.flatnonzero(numbers >= 0)
        rows = numbers[here]
        spots["version"][here] = self.rows["version"][rows]
        fence()
        for field in ("arena", "length"):
            spots[field][here] = self.rows[field][rows]
        spots["offset"][here] = self.rows["page"][rows].astype(np.uint64) * np.uint64(forms.PAGE)
        # A row that has the version of before the second look when all is over was that key's in between.
        is_other = (self.find(keys) != numbers) | (spots["version"] & np.uint64(1) == 0)
        spots["row"] = np.where(is_other & (numbers >= 0), forms.NOT_RESIDENT, numbers)
        return spots

    def is_unchanged(self, spot: np.void) -> bool:
        """What was copied of a block that `look` found has its bytes. The caller asks `holds`, too."""
        fence()
        return bool(self.rows["version"][int(spot["row"])] == spot["version"])


def _columns(keys: Sequence[bytes | str]) -> tuple[Any, Any, Any]:
    """`name_columns` of the files of keys. ValueError for a key that is not 1 to 255 bytes long."""
    some = keys if isinstance(keys, list) else list(keys)
    found: tuple[Any, Any, Any] | None = native.plain_names(some)
    if found is not None:
        return found
    encoded = encode_keys(some)
    columns = forms.name_columns(file_names(encoded))
    lengths = columns[2]
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= KEY_SIZE_MAX:
        for key in encoded:
            file_name(key)
    return columns
