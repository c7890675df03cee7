"""The index of blocks that are resident in shared memory: its layout, fingerprints of keys, and how it is read.

The daemon makes one table for each *read class* of a directory (files that the same people may read) and changes it;
clients that may read these map it, read-only, with the arenas that the bytes are in. `docs/usrbio.md` says the same
for other languages.

A table has buckets of 8 slots. A key can be in two buckets, which two halves of its fingerprint choose. A slot has a
*version*: odd while it describes a block; it grows with every change. A client that wants a block

    finds the slot with the fingerprint in the two buckets
    version = slot.version; it must be odd, and the fingerprint still there
    copies the bytes from slot.arena at slot.offset
    if slot.version != version, or the table has ended or expired: throws the copy away, asks the daemon

The daemon, before the bytes can change, before the name means something else or other people may read it, makes the
version even, or ends the table.

**Why a copy that was kept has the bytes of that key.** Say that the client copied a byte that was written later for
another block. Between the store of the version (or of the table's state) and that write the daemon took and released
the lock of the shared-memory tier, to give out the memory: so the version was stored before the byte, for every
observer. x86-64 lets neither two stores nor two loads pass each other, and a locked instruction orders the
non-temporal stores of a large copy, too; on aarch64 the release and the acquire of that lock order the stores, and the
client's fence (`ldar`, `dmb ishld`) the loads. So the client, which read the byte before it read the version again,
sees the new version. Fields and fingerprint are written while the version is even, so they are those of that version.

**Absent keys.** A table has a filter of the names of its directory: four bits of each, by the quarters of its
fingerprint. The daemon sets them before a name means anything, and clears none. Once all names are in it, the table
is *complete*: a key of which a bit is missing has no block, of nobody. A key whose bits are all there may have one.

**Fingerprints** have 128 bits: four sums modulo 2^64 of products of the key's 32-bit words (and its length) with
random numbers of the table, of each of which the upper 32 bits are taken. Such a hash is strongly universal: two keys
that do not depend on the numbers have the same fingerprint with a probability of 2^-128.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.errors import EngineError

native: Any
try:
    from kvfuse.native import _native as native
except ImportError:  # it was built without a compiler
    native = None

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Fingerprints = npt.NDArray[np.uint64]
"""a row of two numbers for each key; the first is never 0"""

MAGIC = int.from_bytes(b"KVFINDX1", "little")
HEADER_SIZE = 4096
HEADER = struct.Struct("<QIIQQQQQQ")
"""magic, version, buckets, byte offsets: fingerprints, slots, end of the mapping; inode of the directory; offset of the
filter, and how many bits it has"""
VERSION = 2
BUCKET = 8
BUCKETS_MAX = 1 << 24
FILTER_BITS_MIN, FILTER_BITS_MAX = 1 << 16, 1 << 32
STATE, VALID_UNTIL, COMPLETE, NEIGHBOURS = 8, 9, 10, 11
"""words of the header: `LIVE` or `ENDED`; CLOCK_MONOTONIC nanoseconds up to which the table holds, 0: no limit; 1: the
filter has all names; 1: other hosts may have blocks in memory that are not here, so that a PREFETCH with NEAR pays"""
LIVE, ENDED = 1, 2
MULTIPLIERS_OFFSET = 128
SUMS = 4
WORDS_MAX = 1 + 64
"""of a key of 255 bytes, and its length"""
SLOT = np.dtype(
    [
        ("version", "<u8"),  # odd: there is a block
        ("arena", "<u4"),  # number of the arena
        ("tier", "<u4"),  # as in answers of EXISTS with COSTS
        ("offset", "<u8"),  # of the first byte in the arena
        ("length", "<u8"),
        ("checksum", "<u4"),  # CRC32C of the bytes; where `has_checksum`
        ("has_checksum", "<u4"),
        ("generation", "<u8"),  # of the inode: another file of the same name has another one
        ("reserved", "<u8", 2),
    ]
)
FIELDS = struct.Struct("<IIQQIIQ")
"""of a slot, behind its version"""

TOUCHES_MAX = 8192
"""slots (u32) in a page of touches, in turn; before them, in a page of its own, how many were ever written (u64)"""
ASKED_MAX, ASKED_SIZE = 4096, 256
"""rows, behind the slots: keys of questions that the client answered itself, as not all of the blocks were there, in
turn, each a byte of length and the key; before each question a row of length 0. How many rows were ever written is the
second word (u64) of the first page"""
ASKED_OFFSET = HEADER_SIZE + 4 * TOUCHES_MAX
TOUCHES_SIZE = ASKED_OFFSET + ASKED_MAX * ASKED_SIZE

SPOT = np.dtype([("slot", "<i8"), ("version", "<u8"), ("arena", "<u8"), ("offset", "<u8"), ("length", "<u8")])
"""where a block is; ``slot``: `ABSENT` for none"""

ABSENT = -1
"""no such key in the table, or what was there was overtaken"""
UNMAPPED = -2
"""the block is in an arena that the caller did not give"""
TOO_LARGE = -3
"""there is no room for the block"""

ARENA = np.dtype([("number", "<u8"), ("address", "<u8"), ("size", "<u8")])
"""a mapped arena, for `Table.get`"""

assert SLOT.itemsize == 64
assert HEADER.size <= STATE * 8


class Table:
    """A mapped table. ``memory``: all of it, as bytes. EngineError where it is none of this version."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        magic, version, self.buckets, fingerprints, slots, size, self.directory, bitmap, bits = HEADER.unpack(
            memory[: HEADER.size].tobytes()
        )
        count = self.buckets * BUCKET
        is_sound = magic == MAGIC and version == VERSION and 0 < self.buckets <= BUCKETS_MAX
        is_sound &= FILTER_BITS_MIN <= bits <= FILTER_BITS_MAX and not (
            bits & (bits - 1) or self.buckets & (self.buckets - 1)
        )
        if not is_sound or (fingerprints, slots, bitmap, size) != places(self.buckets, bits):
            raise EngineError(f"no index of blocks of version {VERSION}")
        if len(memory) != size:
            raise EngineError(f"an index of {size} bytes in a mapping of {len(memory)}")
        self.words = memory[:HEADER_SIZE].view(np.uint64).data
        end = MULTIPLIERS_OFFSET + SUMS * WORDS_MAX * 8
        self.multipliers: Fingerprints = memory[MULTIPLIERS_OFFSET:end].view(np.uint64).reshape(WORDS_MAX, SUMS).copy()
        self.fingerprints: Fingerprints = memory[fingerprints:slots].view(np.uint64).reshape(count, 2)
        self.slots: Any = memory[slots:bitmap].view(SLOT)
        self.filter: Bytes = memory[bitmap:size]
        self.versions = memory[slots:bitmap].view(np.uint64).data
        """every eighth is the version of a slot"""

    @property
    def has_ended(self) -> bool:
        """The daemon has another one by now, or none for this client."""
        return bool(self.words[STATE] != LIVE)

    @property
    def has_neighbours(self) -> bool:
        """Other hosts may have in memory what is not here."""
        return bool(self.words[NEIGHBOURS])

    def holds(self) -> bool:
        """What was read of it before this call is true of some moment before."""
        until = self.words[VALID_UNTIL]
        return bool(self.words[STATE] == LIVE and (not until or time.monotonic_ns() <= until))

    def find(self, keys: Sequence[bytes]) -> Numbers:
        """The slot of each key, `ABSENT` for others. All keys have 1 to 255 bytes."""
        numbers: Numbers = np.full(len(keys), ABSENT, np.int64)
        if native is not None:
            native.find(self.memory, keys, numbers)
            return numbers
        wanted = fingerprints_of(self.multipliers, keys)
        mask = np.uint64(self.buckets - 1)
        for half in (0, 1):
            buckets = (wanted[:, half] & mask).astype(np.int64)
            found = self.fingerprints.reshape(self.buckets, BUCKET, 2)[buckets] == wanted[:, None, :]
            places_found = found.all(2)
            rows = np.flatnonzero(places_found.any(1))
            slots = buckets[rows] * BUCKET + places_found[rows].argmax(1)
            is_block = (self.slots["version"][slots] & np.uint64(1)).astype(bool)
            numbers[rows[is_block]] = slots[is_block]
        return numbers

    look_up = find
    """for who does not read them: as `MappedTable.look_up`"""

    def lacks(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """The keys that certainly have no block. All keys have 1 to 255 bytes. The caller asks `holds` afterwards."""
        if not self.words[COMPLETE]:
            return np.zeros(len(keys), np.bool_)
        places_in, bits = self.bits_of(fingerprints_of(self.multipliers, keys))
        lacking: npt.NDArray[np.bool_] = (self.filter[places_in] & bits != bits).any(1)
        return lacking

    def bits_of(self, fingerprints: Fingerprints) -> tuple[Numbers, Bytes]:
        """(bytes of the filter, their bits): four for each row."""
        places_in = fingerprints.view("<u4").astype(np.int64) & (8 * len(self.filter) - 1)
        return places_in >> 3, np.left_shift(1, places_in & 7).astype(np.uint8)

    def get(
        self, keys: Sequence[bytes], arenas: npt.NDArray[np.void], targets: npt.NDArray[np.uint64], rooms: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Copy blocks to ``targets`` (addresses), where there is room for so many bytes.

        (slots as of `find`; the length of each block, `ABSENT`, `UNMAPPED` or `TOO_LARGE`: then the room may have any
        bytes). The caller asks `holds` afterwards.
        """
        results: Numbers = np.empty(len(keys), np.int64)
        if native is not None:
            numbers: Numbers = np.empty(len(keys), np.int64)
            native.get(self.memory, keys, arenas, targets, rooms, numbers, results)
            return numbers, results
        numbers = self.find(keys)
        results[:] = ABSENT
        self._copy(keys, numbers, arenas, targets, rooms, results)
        return numbers, results

    def look(self, keys: Sequence[bytes]) -> npt.NDArray[np.void]:
        """Where each block is, a row of `SPOT`: for callers that copy it themselves, and then ask `is_unchanged`."""
        spots = np.zeros(len(keys), SPOT)
        numbers = spots["slot"] = self.find(keys)
        rows = np.flatnonzero(numbers >= 0)
        slots = numbers[rows]
        spots["version"][rows] = self.slots["version"][slots]
        fence()
        for field in ("arena", "offset", "length"):
            spots[field][rows] = self.slots[field][slots]
        wanted = fingerprints_of(self.multipliers, [keys[row] for row in rows.tolist()])
        is_other = (self.fingerprints[slots] != wanted).any(1) | (spots["version"][rows] & np.uint64(1) == 0)
        spots["slot"][rows[is_other]] = ABSENT
        return spots

    def is_unchanged(self, spot: np.void) -> bool:
        """What was copied of a block that `look` found has its bytes. The caller asks `holds`, too."""
        fence()
        return bool(self.versions[8 * int(spot["slot"])] == spot["version"])

    def _copy(
        self, keys: Sequence[bytes], numbers: Numbers, arenas: npt.NDArray[np.void], targets: npt.NDArray[np.uint64],
        rooms: Numbers, results: Numbers,
    ) -> None:  # fmt: skip
        wanted = fingerprints_of(self.multipliers, keys)
        where = {int(row["number"]): (int(row["address"]), int(row["size"])) for row in arenas}
        for place, number in enumerate(numbers.tolist()):
            if number < 0:
                continue
            version = self.versions[8 * number]
            if not version & 1 or (self.fingerprints[number] != wanted[place]).any():
                continue
            slot = self.slots[number]
            arena, offset, length = int(slot["arena"]), int(slot["offset"]), int(slot["length"])
            address, size = where.get(arena, (0, 0))
            if not address:
                results[place] = UNMAPPED
            elif length > rooms[place]:
                results[place] = TOO_LARGE
            elif offset + length <= size:
                ctypes.memmove(int(targets[place]), address + offset, length)
                fence()
                if self.versions[8 * number] == version:
                    results[place] = length


_turnstile = threading.Lock()


def fence() -> None:
    """Accesses before it are done before those behind it: what precedes a release is done before the next acquire."""
    for _ in range(2):
        with _turnstile:
            pass


def places(buckets: int, filter_bits: int) -> tuple[int, int, int, int]:
    """Where fingerprints, slots and filter begin, and the table ends, in bytes."""
    count = buckets * BUCKET
    slots = HEADER_SIZE + 16 * count
    bitmap = slots + SLOT.itemsize * count
    return HEADER_SIZE, slots, bitmap, bitmap + filter_bits // 8


def fingerprints_of(multipliers: Fingerprints, keys: Sequence[bytes]) -> Fingerprints:
    """The fingerprints of keys of 1 to 255 bytes. Those of one length are made at once."""
    found: Fingerprints = np.zeros((len(keys), 2), np.uint64)
    if native is not None:
        native.fingerprints(multipliers, keys, found)
        return found
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        same = keys if len(rows) == len(keys) else [keys[row] for row in rows.tolist()]
        width = -(-length // 4)
        words = np.zeros((len(rows), 4 * width), np.uint8)
        words[:, :length] = np.frombuffer(b"".join(same), np.uint8).reshape(len(rows), length)
        columns = words.view("<u4").astype(np.uint64)
        sums = columns @ multipliers[1 : width + 1] + multipliers[0] * np.uint64(length)
        halves = sums >> np.uint64(32)
        found[rows, 0] = halves[:, 0] | halves[:, 1] << np.uint64(32)
        found[rows, 1] = halves[:, 2] | halves[:, 3] << np.uint64(32)
    found[found[:, 0] == 0, 0] = 1  # 0 is an empty place
    return found
