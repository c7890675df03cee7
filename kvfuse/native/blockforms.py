"""What the daemon and its clients share of the block store: forms of rows, heads and tables, and what results mean.

The functions are those of `kvfuse.native._blocks`, which has no twin in Python. A table is one piece of shared memory:
a header page, buckets, rows (blocktable.h). Names of a batch are three columns: see `name_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# -- results: of a put, the row of the block; of a get, its length ----------------------------------

NO_SLOT = -1
"""no slot, or no row of the table, is free"""
NO_MEMORY = -2
"""no arena has room now, or too much waits for the medium"""
NO_QUOTA = -3
TOO_LARGE = -4
"""for a slab, or not positive"""
NOT_TRIED = -5
"""an earlier block of the batch failed"""
ENDED = -6
"""the table was cleared, or removed"""
ODD_NAME = -7
"""empty, over 255 bytes, outside of the text; or, with ``plain_only``, none that a file could have"""

NOT_ADMITTED = -8
"""not of the core: the policy of a full namespace does not store it"""

PRESENT = -9
"""of a put of absent names alone: there is a block of this one"""

ABSENT = -1
NOT_RESIDENT = -2
"""only its slab has it"""
NOT_MAPPED = -3
"""`table_get`: its arena is none of those that were given"""
NO_ROOM = -4

# -- forms -----------------------------------------------------------------------------------------------

DIRTY, WRITING, HOT = 1, 2, 4
"""flags of a row: it waits for a write; that is under way; it was read since its arena was filled or recycled"""
MICROS = 12
"""bit of the flags from which on they have the microseconds of the time ``stored``"""
FOREIGN, SHADOWS = 16, 32
"""it is in a slab of another host; such a slab has, or had, an older block of its name"""
PLACES = 4096
"""of tables: the number of one is its place, and above that how often it went on in other memory"""
TABLE_LIVE, TABLE_ENDED = 1, 2
"""states of a table"""
SPARE, FILLING, FILLED, SEALED = range(4)
"""states of an arena: see `Core.arena_facts`"""
FREE_HEAD, BLOCK_HEAD, SLAB_HEAD = 0, 1, 2
"""states of a head"""
PACKED_VERSION = 2
"""of the head of a block that is compressed in its slot"""

PAGE = 4096
HEAD_MAGIC = 0x4B56
STATE_OFFSET = 72
"""of a table's state in its header; behind it, also u64: valid until, complete, neighbours"""
ASKS_OFFSET, AHEAD_OFFSET, ORIGIN_OFFSET = 132, 136, 144
"""in a table's header, u32: whoever looks blocks up asks the daemon of those that are not in memory; u64: seconds by
which the clock of the namespace is ahead; u64: serial of the table that went on as this one"""
TOLD_SIZE = 112
SLAB_STATE_SIZE = 16
"""bytes that one slab takes in the states"""
NAME_ROOM = 256
"""bytes of one slot's name in the heads and names of its slab"""
BUCKET_SIZE = 64
BUCKET_ENTRIES = 12
BUCKETS_MIN = 16
NAME_MAX = 255

ROW = np.dtype(
    [
        ("version", np.uint64),  # odd: it is a block
        ("low", np.uint64),
        ("high", np.uint64),
        ("arena", np.uint32),  # its number; 0: not in memory
        ("page", np.uint32),
        ("length", np.uint32),
        ("checksum", np.uint32),
        ("slab", np.uint32),
        ("slot", np.uint16),
        ("packed", np.uint16),  # pages in the slot, if its bytes are compressed there; else 0
        ("note", np.uint32),
        ("flags", np.uint32),
        ("sequence", np.uint64),
        ("directory", np.uint64),
        ("due", np.uint64),
        ("used", np.uint32),
        ("stored", np.uint32),
        ("expires", np.uint32),
        ("uses", np.uint8),
        ("list", np.uint8),
        ("priority", np.uint8),
        ("name_length", np.uint8),
    ]
)
HEAD = np.dtype(
    [
        ("magic", np.uint16),
        ("version", np.uint8),
        ("state", np.uint8),
        ("length", np.uint32),
        ("low", np.uint64),
        ("high", np.uint64),
        ("sequence", np.uint64),
        ("directory", np.uint64),
        ("name_space", np.uint64),
        ("epoch", np.uint32),
        ("incarnation", np.uint32),
        ("uid", np.uint32),
        ("gid", np.uint32),
        ("checksum", np.uint32),
        ("stored", np.uint32),
        ("expires", np.uint32),
        ("mode", np.uint16),
        ("name_length", np.uint8),
        ("priority", np.uint8),
        ("slot_size", np.uint32),
        ("token", np.uint32),  # of a slab; of a block of `PACKED_VERSION`: bytes in its slot
        ("micros", np.uint32),  # behind the second ``stored``
        ("crc", np.uint32),
    ]
)
RUN = np.dtype([("slab", np.int64), ("offset", np.int64), ("address", np.uint64), ("length", np.int64)])
"""One write of a batch: see `Batch.runs`."""
STORED = np.dtype(
    [
        (name, np.uint64)
        for name in ("number", "namespace", "address", "sequence", "data", "size", "slot_size", "must_pack")
    ]
)
"""A block of a batch: where its slot is in the volume, and where the bytes for it are in memory. See `Batch.blocks`.

``must_pack``: its slot is one for compressed bytes."""
PACKED = np.dtype([("number", np.uint64), ("offset", np.uint64), ("size", np.uint64)])
"""Compressed bytes of a block in a buffer, filled up to a page; size 0: they are no fewer. See `Batch.pack`."""
TOLD = np.dtype([*HEAD.descr, ("slab", np.uint32), ("slot", np.uint32), ("spare", np.uint64)])
"""What a host tells another one of a block: its head, and where that is. `TOLD_SIZE` bytes."""
GONE = np.dtype([(name, np.uint64) for name in ("address", "sequence", "size", "low", "high")])
"""A slot of the volume whose block is no more, or in another one, then without a fingerprint: see `Core.take_gone`."""
ARENA = np.dtype([("number", np.uint64), ("address", np.uint64), ("size", np.uint64)])
"""An arena that a client has mapped: see `table_get`."""

MULTIPLIERS_COUNT = 4 * 67


def table_size(buckets_max: int, rows_max: int) -> int:
    """Bytes of the memory of a table."""
    return PAGE + BUCKET_SIZE * buckets_max + ROW.itemsize * rows_max


def rows_of(memory: npt.NDArray[np.uint8], buckets_max: int) -> npt.NDArray[np.void]:
    """The rows of a table, as they lie in its memory."""
    return memory[PAGE + BUCKET_SIZE * buckets_max :].view(ROW)


def name_columns(keys: Sequence[bytes]) -> tuple[bytes, Words, npt.NDArray[np.uint32]]:
    """All names one behind the other, and where each begins, and how long it is."""
    text, length = b"".join(keys), len(keys[0]) if keys else 0
    if len(text) == length * len(keys) and set(map(len, keys)) <= {length}:  # as most often
        return text, np.arange(len(keys), dtype=np.uint64) * np.uint64(length), np.full(len(keys), length, np.uint32)
    lengths = np.fromiter(map(len, keys), np.uint32, len(keys))
    offsets = np.cumsum(lengths, dtype=np.uint64)
    offsets -= lengths
    return text, offsets, lengths


def multipliers_of(volume_id: bytes) -> Words:
    """Of all tables of a volume. They never change: fingerprints on the medium are made with them."""
    digests = [
        blake2b(volume_id, salt=number.to_bytes(16, "little"), person=b"kvfuse.blocks").digest()
        for number in range(-(-MULTIPLIERS_COUNT // 8))
    ]
    return np.frombuffer(b"".join(digests), "<u8")[:MULTIPLIERS_COUNT].astype(np.uint64)


def fingerprints(
    multipliers: Words, directories: npt.NDArray[np.uint64], names: Sequence[bytes]
) -> tuple[Words, Words]:
    """The two halves of each name's fingerprint, as `blocktable.h` makes them."""
    table = multipliers.reshape(-1, 4)
    low, high = np.zeros(len(names), np.uint64), np.zeros(len(names), np.uint64)
    lengths = np.fromiter(map(len, names), np.uint64, len(names))
    for length in np.unique(lengths).tolist():
        mine = np.flatnonzero(lengths == length)
        size = -(-length // 4) * 4
        text = b"".join([names[at].ljust(size, b"\0") for at in mine.tolist()])
        words = np.frombuffer(text, "<u4").reshape(len(mine), -1)
        folder = directories[mine, None]
        sums = table[0] * (folder & np.uint64(0xFFFFFFFF)) + table[1] * (folder >> np.uint64(32))
        sums += table[2] * np.uint64(length)
        for place in range(words.shape[1]):
            sums += table[3 + place] * words[:, place, None].astype(np.uint64)
        halves = sums >> np.uint64(32)
        low[mine] = halves[:, 0] | halves[:, 1] << np.uint64(32)
        high[mine] = halves[:, 2] | halves[:, 3] << np.uint64(32)
    return low, high
