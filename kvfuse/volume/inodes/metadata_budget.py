"""What names, inodes and attributes may take: the *metadata budget* of a volume.

Each record of them weighs a little more than its bytes (`weigh`). What the store has is counted in the very commit
that changes it: by the store itself, or, where many hosts have the volume, by each host. What is pending is counted
here from the call on, so that all that was acknowledged has its room. Bytes of names are free again when the commit
that removes them is in the store.

*Many hosts.* Each counts what its commits added, less what they removed, in a record of its own (`schema.files_key`),
which goes with them; the sum over all is what the volume has. A commit expects the version of each record that it
replaces or deletes, so a host knows what that weighs (`batch.Draft.before`). Hosts hear of each other's counts by the
watch, and not of what is pending elsewhere: so each may have no more pending than its share of the room that is left.
The budget is exceeded at most by what others commit while news of it are on their way.

Records that say where bytes of files are do not count: every one stands for slots of 4 KiB or more, so the capacity
bounds them, and a full budget never keeps bytes of an existing file from being written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import NamedTuple

from kvfuse.checksum import CHECKSUM_SIZE
from kvfuse.errors import NoSpace
from kvfuse.options.config import Options
from kvfuse.remote.records.api import ABSENT, Meter, RecordStore, Versioned
from kvfuse.sizes import MIB
from kvfuse.slab.layout import FEATURE_SEALED_RECORDS, Superblock
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

SHARE = 16
"""One part in so many of the capacity: 256 bytes for each block of 4 KiB, of which one with a name of 64 takes 249."""
SIZE_MIN = 32 * MIB
"""and for the smallest volumes so much,"""
SHARED_SIZE_MAX = 2048 * MIB
"""for new ones of many hosts no more than this, a quarter of the 8 GiB that are etcd's most.

It needs 1.2 times the weight of what is there, and room for what was overwritten, until it is compacted.
"""
INODE_SIZE = 256
"""Bytes by which `df -i` judges how many more inodes there is room for."""

SLOT_SIZE = 80
"""Bytes of records, at most, for each 4 KiB in slots."""
SPREAD = 12
"""A store may need so many times the bytes of its records: pages that are a quarter full, in up to three versions.

In ordinary use it is 1.5 to 4 times."""

RECORD_OVERHEAD = 32
"""bytes that a record takes in a store besides its key and its value: its version, a checksum, its place in a page"""
RECORD_INLINE_MAX = 1900
"""Bytes of a record beyond which it has pages of its own,"""
RECORD_PAGE_SIZE = 4096
"""of which each has so many."""
INODE_WEIGHT = 136
"""An inode weighs what its numbers may take, so that none of them is refused to grow; where data is is not counted."""


def default_size(capacity: int, *, is_shared: bool = False) -> int:
    """The budget of a volume that has none of its own. Bytes."""
    size = max(capacity // SHARE, SIZE_MIN)
    return min(size, SHARED_SIZE_MAX) if is_shared else size


def own_size(options: Options) -> int | None:
    """The budget that a new volume is given for good; None: that of its capacity."""
    size, capacity = options.volume.metadata_size, options.volume.capacity or 0
    if size is None and options.is_shared and default_size(capacity) > SHARED_SIZE_MAX:
        return SHARED_SIZE_MAX
    return size


def store_size(limit: int, data_size: int) -> int:
    """Bytes that a record store may take of its medium, with a budget of ``limit`` and so many bytes of data."""
    return SPREAD * (limit + data_size // 4096 * SLOT_SIZE)


def affordable_limit(size: int, data_size: int) -> int:
    """The budget with which a store takes ``size`` bytes at most; see `store_size`."""
    return max(0, size // SPREAD - data_size // 4096 * SLOT_SIZE)


async def bound_store(records: RecordStore, limit: int, data_size: int) -> int:
    """Have a store take no more of its medium than a budget of ``limit`` needs. The budget: less where a process may
    not map as much. EngineError."""
    bound = await records.bound(store_size(limit, data_size))
    return min(limit, affordable_limit(bound, data_size)) if bound else limit


def size_in(records: RecordStore) -> int:
    """Bytes of them that a store counts itself."""
    return records.usage.size if records.usage is not None else 0


class Metadata:
    """The budget of a volume, and who has reserved what. ``stored``: what the store has of it, in bytes.

    None: nobody knows, as an older program made the volume of many hosts: then the budget bounds nothing.
    """

    def __init__(self, limit: int, stored: Callable[[], int | None]) -> None:
        self.limit = limit
        self.stored = stored
        self.sharers: Sized = ()
        """clients among whom the room that is left is shared out; none: it is all this one's"""
        self.pending = 0
        """bytes by which the store may grow with what is pending here, or on its way there"""

    def share_out(self, stored: Callable[[], int | None], sharers: Sized) -> None:
        """Many hosts have the volume. ``stored``: as before; ``sharers``: clients that share the room that is left."""
        self.stored, self.sharers = stored, sharers

    @property
    def size(self) -> int | None:
        """Bytes that are taken, those included that pending changes may yet take. None: not known."""
        stored = self.stored()
        return stored + self.pending if stored is not None else None

    def fits(self, size: int) -> bool:
        stored = self.stored()
        if not size or stored is None:
            return True
        return self.pending + size <= (self.limit - stored) // (len(self.sharers) or 1)

    def inodes_free(self, count: int) -> int:
        """How many more inodes there is room for, about; ``count`` are there."""
        if self.size is None:
            return max(0, self.limit // INODE_SIZE - count)
        return max(0, self.limit - self.size) // INODE_SIZE

    def refusal(self, what: str) -> NoSpace:
        sharers = len(self.sharers)
        shared = f", and {sharers} clients share what is left" if sharers > 1 else ""
        return NoSpace(
            f"{what}: names and attributes have {self.size} of the {self.limit} bytes that they may have in this"
            f" volume{shared}: remove some"
        )

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """A transaction with so many more bytes of records, for which there is room, is on its way."""
        self.pending += size
        try:
            yield
        finally:
            self.pending -= size

    def reserve(self, node: Node, size: int) -> None:
        """``node`` is to be stored with so many more bytes of records, for which there is room."""
        node.reserved += size
        self.pending += size

    def release(self, size: int) -> None:
        """The store counts them now, or they are not wanted any more."""
        self.pending -= size


def weight(key_size: int, value_size: int) -> int:
    """Bytes that a record counts for: never less than it takes."""
    if key_size + value_size + RECORD_OVERHEAD <= RECORD_INLINE_MAX:
        return key_size + value_size + RECORD_OVERHEAD
    return key_size + RECORD_OVERHEAD - (-(value_size + RECORD_OVERHEAD) // RECORD_PAGE_SIZE) * RECORD_PAGE_SIZE


def weigh(key: bytes, value: bytes) -> tuple[int, int]:
    """(bytes, inodes) that a record counts for. Records of bytes in slots are bounded by these, and weigh nothing."""
    kind = key[:1]
    if kind == b"d":
        if value[:1] == b"I":
            return inode_weight(len(key), _target_size(value[1:])), 1
        return weight(len(key), len(value)), 0
    if kind == b"i":
        return inode_weight(len(key), _target_size(value)), 1
    if kind == b"o":
        return inode_weight(len(key), _target_size(value)), 0
    if kind in (b"x", b"t"):
        return weight(len(key), len(value)), 0
    return 0, 0


class Stored(NamedTuple):
    """What the store has of a record, as far as is known."""

    version: int
    weight: int

    @classmethod
    def of(cls, key: bytes, row: Versioned | None) -> Stored:
        """Of an attribute. That a damaged one weighs less than it did is mended with it, by fsck."""
        return cls(row.version, weight(len(key), len(row.value))) if row is not None else NOT_STORED


NOT_STORED = Stored(ABSENT, 0)
ENTRY_KEY_SIZE = len(schema.entry_key(0, b"", 1))
"""and the name"""
TIMES_WEIGHT = weight(len(schema.times_key(0)), schema.TIMES_SIZE)


def meter_of(superblock: Superblock) -> Meter:
    """Has a store count the records of a volume that one daemon has."""
    sealed = superblock.features & FEATURE_SEALED_RECORDS
    return Meter(schema.USAGE, _weigh_sealed if sealed else weigh)


def _weigh_sealed(key: bytes, stored: bytes) -> tuple[int, int]:
    return weigh(key, stored[:-CHECKSUM_SIZE])


def inode_weight(key_size: int, target_size: int) -> int:
    """Of the record that an inode stands in. ``target_size``: of a symbolic link."""
    return weight(key_size, INODE_WEIGHT + target_size)


def entry_weight(name_size: int) -> int:
    """Of a name whose inode has a record of its own."""
    return weight(ENTRY_KEY_SIZE + name_size, schema.REFERENCE_SIZE)


_SYMLINK_MODE = re.compile(rb"\xdc..(?:[\0-\x7f]|\xcc.|\xcd..|\xce....|\xcf........)\xcd[\xa0-\xaf]", re.DOTALL)
"""an inode record that begins with a number and the mode of a symbolic link"""


def _target_size(record: bytes) -> int:
    """Bytes of the target of the symbolic link in an encoded inode, 0 of others; without decoding those."""
    if _SYMLINK_MODE.match(record) is None:
        return 0
    try:
        return len(schema.decode_inode(record).target)
    except (ValueError, struct.error):
        return len(record)  # it is damaged


def growth(puts: Mapping[bytes, bytes], deletes: Collection[bytes], before: Mapping[bytes, int]) -> int:
    """Bytes that records weigh more when these are put and deleted. ``before``: what those weigh that are stored."""
    size = sum([weigh(key, value)[0] - before.get(key, 0) for key, value in puts.items()])
    return size - sum([before.get(key, 0) for key in deletes])


FILE_WEIGHT = inode_weight(ENTRY_KEY_SIZE, 0)
"""Of a file that is not a symbolic link, and its only name: the name's bytes are to be added."""


def new_inode(name: bytes, *, is_directory: bool = False, target: bytes = b"") -> int:
    """Bytes that an inode and its first name take."""
    if not is_directory:
        return inode_weight(ENTRY_KEY_SIZE + len(name), len(target)) if target else FILE_WEIGHT + len(name)
    return entry_weight(len(name)) + inode_weight(len(schema.inode_key(0)), 0) + TIMES_WEIGHT


def new_name(name: bytes, node: Node) -> int:
    """Bytes that another name of an inode takes; a second one moves the inode's record to a key of its own."""
    size = entry_weight(len(name))
    if not node.own_record:
        size += inode_weight(len(schema.inode_key(0)), 0) + entry_weight(len(node.name))
        size -= inode_weight(ENTRY_KEY_SIZE + len(node.name), 0)
    return size
