"""The volume's records in the record store: keys, values and their encoding (format version 1).

====  =======================================  =====================================================
key   rest of the key (big endian)             value
====  =======================================  =====================================================
d     parent u64, hash u64, name               b"I" + inode (inline), or b"R" + inode number u64
i     inode u64                                inode: directories, files with several names
t     directory u64                            times of a directory: atime, mtime, ctime
c     inode u64, chunk index u64               extents of a chunk that has no room in the inode
x     inode u64, attribute name                value of an extended attribute
j     inode u64                                directory u64, name: where the file's inode is (FLAG_PLACED)
s     slab u32                                 slot size u32, bitmap: the slab's allocation state
o     inode u64                                inode of an unlinked file, and (shared) the client that removed it
n     name of a counter or list                u64, or several; the counts as in q
p     namespace u64                            settings of a namespace; its number is its folder's inode, the root's 0
e     namespace u64                            u64: files of a namespace with smaller numbers were cleared, and go;
                                               of a shared volume it stays, and ends with "swept" when all are gone
u     namespace u64, client u64                i64, i64: files and bytes of slots of a namespace but the root's; of a
                                               shared volume those that the client added, less those that it removed

      of a shared volume:
m     client u64                               a client that is alive: host, pid, mount point (under its lease)
l     slab u32                                 client u64 who holds the slab (0: nobody), epoch u64
f     slab u32, addr u64, generation u64       "rested", or nothing, and the namespace u64 of its file, if that is not
                                               the root's: the slot is to be freed by who holds its slab; rested:
                                               nobody can be reading it any more
g     namespace u64                            its quotas, and what each client may have of them (`namespaces.grants`)
h     inode u64, client u64                    nothing: the client has the removed file open (under its lease)
k     client u64                               who it is to the segment engine; the version counts its commits. Of one
                                               that left with slabs: `NOBODY_TO_CUT_OFF`, `NOT_CUT_OFF` (see there)
a     client u64                               blocks of other hosts that the client used lately, and how much room it
                                               lacks, or its caches could give up (under its lease)
v     directory u64                            client u64 to whom the strict folder is delegated (under its lease)
r     client u64, directory u64                client u64 who asks the first one for the folder (under its lease)
w     client u64                               where it answers other hosts (under its lease), see `peer_records`
q     client u64                               i64, i64: inodes that the client made, less those that it removed; and
                                               bytes of names and attributes likewise (not of older programs)
====  =======================================  =====================================================

Entries of a directory are ordered by a hash of their name, which is also the readdir cookie: a listing
can go on from any entry, whatever was created or removed since, without state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from stat import S_ISREG
from typing import NamedTuple, TypeVar

import msgspec

from kvfuse.errors import Corrupt
from kvfuse.volume.api import NAME_MAX
from kvfuse.volume.store.extents import ExtentRecord as ExtentRecord

INLINE_CHUNKS = 8
"""Chunks whose extents stand in the inode record itself: one record for a file up to 8 chunks (32 MiB)."""

COOKIE_MIN = 16
"""Cookies below are for "." and ".."."""

NAMES_HASHED = 1 << 12
"""Names whose hashes are kept: of one that is stored its cache and its record ask some ten times."""

_V = TypeVar("_V")
_T = TypeVar("_T")

_U64 = struct.Struct(">Q")
_KEY = struct.Struct(">cQ")
_PAIR_KEY = struct.Struct(">cQQ")
_TIMES = struct.Struct(">qqq")
_SLAB_KEY = struct.Struct(">cI")
_SLAB_HEAD = struct.Struct(">I")
_FREED_KEY = struct.Struct(">cIQQ")
_LETTER_KEY = struct.Struct(">cQIQQ")
_HOLDER = struct.Struct(">QQ")
_COUNT = struct.Struct(">q")
_COUNTS = struct.Struct(">qq")
_USAGE = struct.Struct(">qq")

TIMES_SIZE = _TIMES.size
REFERENCE_SIZE = 1 + _U64.size
"""Bytes of a name's record, where the inode has one of its own."""

COUNTER_INODE = b"ninode"
"""First inode number of the range that nobody took yet."""
COUNTER_GENERATION = b"ngeneration"
"""First slot generation of the range that nobody took yet."""
COUNTER_FILES = b"nfiles"
"""Counts of the volume: inodes, and what names, inodes and attributes weigh; of many hosts' but for their q records."""

USAGE = b"nusage"
"""The weight of names, inodes and attributes, and the number of inodes: two i64. Of a volume that one daemon has."""
METADATA_SIZE = b"nmetadata"
"""Bytes that they may weigh: a u64, as the volume was formatted with."""

COUNTER_NAMESPACES = b"nnamespaces"
"""Of a shared volume: how often a namespace was made, changed or removed. Who does so expects it as it was read before
the settings on which the change depends."""

COUNTER_SYNCED = b"nsynced"
"""Of a shared volume: the client that synced something in a relaxed folder last (`names.synced`)."""

EXACT_SIZES = b"nexact"
"""The slot sizes that the volume was formatted with, besides the geometric ones: a u64 each."""

SUPERBLOCK = b"nsuperblock"
"""The superblock's image, where the volume has no folder."""

DESTROYED = b"ndestroyed"
"""What is left of a volume that is being destroyed (JSON), in place of its superblock. It goes last."""

MOUNTED = b"nmounted"
"""The client that holds a shared volume alone: encoded as an m record, and like it under that client's lease."""

CHANGER = b"nchanger"
"""The client that changes the devices of a shared volume: a u64. It stays when that client dies."""

DRAINER = b"ndrainer"
"""The client that moves the files of a shared volume that gets smaller: a u64, and why it cannot, in UTF-8 (under its
lease)."""

COUNTER_RANGE = 1 << 16
"""Numbers taken from a counter at once; what is left of a range at a restart is never used."""


class InodeRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One inode. Times in nanoseconds; of directories they stand in a record of their own."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime: int
    mtime: int
    ctime: int
    chunk_size: int
    chunks: tuple[tuple[ExtentRecord, ...], ...]
    """extents of the first chunks, each chunk's in order"""
    parent: int
    """of a directory: the directory it is in; else 0"""
    rdev: int
    target: bytes
    """of a symbolic link"""
    flags: int
    far_blocks: int
    """512-byte units of the chunks that have records of their own"""
    namespace: int = 0
    """the namespace that it is in, of a namespace's folder its own"""

    @property
    def blocks(self) -> int:
        """As `api.Attributes` has it, of a file of which nothing is staged."""
        return self.far_blocks + sum([-(-extent.length // 4096) * 8 for extents in self.chunks for extent in extents])


class OrphanRecord(InodeRecord, array_like=True, frozen=True, gc=False):
    """An inode without names, which keeps its bytes while somebody may have it open. Readable as an `InodeRecord`."""

    remover: int = 0
    """the client that frees it; 0: whoever has the volume"""


def is_file(record: InodeRecord) -> bool:
    """The inode is a regular file."""
    return S_ISREG(record.mode)


class SlabHolder(NamedTuple):
    """The holder of a slab. ``epoch`` counts its holders: it never goes back, also while ``client`` is NOBODY."""

    client: int
    epoch: int


class FreedSlot(NamedTuple):
    """The content of the key of an f record."""

    slab: int
    addr: int
    """volume address of the slot, in bytes"""
    generation: int


class Counts(NamedTuple):
    """Inodes, and bytes that names, inodes and attributes weigh: those that are there, or came less those that went."""

    inodes: int
    size: int | None
    """None: it was not counted, by an older program"""

    def add(self, change: Counts) -> Counts:
        """With the additions and removals. A weight that was never counted stays so."""
        size = self.size + (change.size or 0) if self.size is not None else None
        return Counts(self.inodes + change.inodes, size)


NOBODY = 0
"""The client of a slab that was given back."""


class MemberRecord(msgspec.Struct, array_like=True, frozen=True):
    """Identity of a client, for people."""

    host: str
    pid: int
    mountpoint: str
    """empty: a command, such as fsck"""
    features: int = 0
    """of volumes that its program knows, as in the superblock; 0: older programs do not say"""


class HostReport(msgspec.Struct, array_like=True, frozen=True):
    """What a client tells another one."""

    wanted: int = 0
    """slabs that it lacks, and asks for"""
    uses: bytes = b""
    """blocks of the other one that it used, as `views.neighbours.USE`"""


FLAG_XATTRS = 1
"""The inode has (or had) extended attributes: without it nobody looks for them."""
FLAG_CHUNK_RECORDS = 2
"""Chunks beyond the inline ones may have records."""
FLAG_STRICT = 4
"""A directory that publishes strictly."""
FLAG_RELAXED = 8
"""A directory that publishes relaxed. Neither flag: as the mount's options say."""
PUBLISH_FLAGS = FLAG_STRICT | FLAG_RELAXED
FLAG_LEAVING = 16
"""In a shared volume a host is about to remove the directory. A host that puts a name into it clears the flag first."""


FLAG_PLACED = 32
"""A j record says where the inode's record is, if that is a name's: so it is found by its number."""


class Malformed(Corrupt, ValueError):
    """The value of a record cannot be what the volume wrote."""


def _checked(decode: Callable[[_V], _T]) -> Callable[[_V], _T]:
    """``decode``, with Malformed for every value that it cannot decode."""

    def checked(value: _V) -> _T:
        try:
            return decode(value)
        except (ValueError, struct.error) as error:
            raise Malformed(f"a record makes no sense: {error}") from error

    return checked


_encode = msgspec.msgpack.Encoder().encode
_decode_inode = msgspec.msgpack.Decoder(InodeRecord).decode


# -- keys: those of one number are a call of C each --------------------------------------------------

Key = Callable[[int], bytes]

inode_key: Key = partial(_KEY.pack, b"i")
times_key: Key = partial(_KEY.pack, b"t")
orphan_key: Key = partial(_KEY.pack, b"o")
entry_prefix: Key = partial(_KEY.pack, b"d")
chunk_prefix: Key = partial(_KEY.pack, b"c")
chunk_key: Callable[[int, int], bytes] = partial(_PAIR_KEY.pack, b"c")
xattr_prefix: Key = partial(_KEY.pack, b"x")
place_key: Key = partial(_KEY.pack, b"j")
"""of a file's place"""
slab_key: Key = partial(_SLAB_KEY.pack, b"s")
holder_key: Key = partial(_SLAB_KEY.pack, b"l")
freed_prefix: Key = partial(_SLAB_KEY.pack, b"f")
freed_key: Callable[[int, int, int], bytes] = partial(_FREED_KEY.pack, b"f")
"""of slab, address, generation"""
open_key: Callable[[int, int], bytes] = partial(_PAIR_KEY.pack, b"h")
"""of inode, client"""
member_key: Key = partial(_KEY.pack, b"m")
sequence_key: Key = partial(_KEY.pack, b"k")
NOBODY_TO_CUT_OFF = b"nobody"
"""in place of an identity: the client left in order, and nothing of it is under way in the slabs that it held"""
NOT_CUT_OFF = b""
"""likewise, but slabs were to rest, as others wrote there before: an identity that no engine cuts off"""
"""of a record that every commit of the client moves"""
files_key: Key = partial(_KEY.pack, b"q")
"""of the counts of one client"""
report_key: Callable[[int, int], bytes] = partial(_PAIR_KEY.pack, b"a")
"""of the client that is told something, and the one that tells it"""
report_prefix: Key = partial(_KEY.pack, b"a")
"""of reports to one client"""
letter_key: Callable[[int, int, int, int], bytes] = partial(_LETTER_KEY.pack, b"b")
"""of the slab's holder, the slab, the sender, a serial number"""
letter_prefix: Key = partial(_KEY.pack, b"b")
"""of letters to one client"""
delegation_key: Key = partial(_KEY.pack, b"v")
"""of a directory"""
recall_key: Callable[[int, int], bytes] = partial(_PAIR_KEY.pack, b"r")
"""of the client that a directory is delegated to, and the directory"""
recall_prefix: Key = partial(_KEY.pack, b"r")
"""of what one client is asked to give back"""
namespace_key: Key = partial(_KEY.pack, b"p")
"""of a namespace's settings"""
cleared_key: Key = partial(_KEY.pack, b"e")
use_key: Callable[[int, int], bytes] = partial(_PAIR_KEY.pack, b"u")
"""of namespace, client (0 where one host has the volume)"""

use_prefix: Key = partial(_KEY.pack, b"u")
grants_key: Key = partial(_KEY.pack, b"g")
"""of what clients may have of a namespace with quotas"""

MEMBER_PREFIX = b"m"
NAMESPACE_PREFIX = b"p"
USE_PREFIX = b"u"
GRANTS_PREFIX = b"g"
LETTER_PREFIX = b"b"
CLEARED_PREFIX = b"e"
DELEGATION_PREFIX = b"v"
XATTR_PREFIX = b"x"
"""of the keys of all extended attributes"""


def namespace_keys(number: int) -> tuple[bytes, ...]:
    """Of all records of a namespace but those of its use."""
    return namespace_key(number), cleared_key(number), grants_key(number)


def split_use_key(key: bytes) -> tuple[int, int]:
    """(namespace, client) of a u key."""
    _, number, client = _PAIR_KEY.unpack(key)
    return number, client


@lru_cache(NAMES_HASHED)
def name_hash(name: bytes) -> int:
    """The cookie of a name: COOKIE_MIN .. 2**63 - 1, spread evenly."""
    value = int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1
    return value if value >= COOKIE_MIN else value + COOKIE_MIN


def entry_key(parent: int, name: bytes, cookie: int = 0) -> bytes:
    """Key of the entry ``name`` in directory ``parent``; ``cookie``: its ``name_hash``, where that is at hand."""
    return _PAIR_KEY.pack(b"d", parent, cookie or name_hash(name)) + name


def entry_after(parent: int, cookie: int) -> bytes:
    """A key behind every entry whose cookie is ``cookie`` or less, before all others."""
    return _PAIR_KEY.pack(b"d", parent, cookie) + b"\xff" * 256


def split_entry_key(key: bytes) -> tuple[int, int, bytes]:
    """(parent, cookie, name) of an entry's key."""
    _, parent, cookie = _PAIR_KEY.unpack_from(key)
    return parent, cookie, key[_PAIR_KEY.size :]


def chunk_index(key: bytes) -> int:
    return int(_U64.unpack_from(key, 9)[0])


def key_inode(key: bytes) -> int:
    """The inode number in an i, t, o, c, x, j, h or v key, the namespace in a p, u, e or g key."""
    return int(_U64.unpack_from(key, 1)[0])


def xattr_key(ino: int, name: bytes) -> bytes:
    return xattr_prefix(ino) + name


def xattr_name(key: bytes) -> bytes:
    return key[9:]


_KEY_SIZES = {b"d": (18, 17 + NAME_MAX), b"i": (9, 9), b"t": (9, 9), b"o": (9, 9), b"c": (17, 17), b"s": (5, 5)}
_KEY_SIZES |= {b"m": (9, 9), b"l": (5, 5), b"f": (21, 21), b"h": (17, 17), b"q": (9, 9), b"k": (9, 9)}
_KEY_SIZES |= {b"a": (17, 17), b"w": (9, 9), b"p": (9, 9), b"u": (17, 17), b"e": (9, 9), b"g": (9, 9)}
_KEY_SIZES |= {b"b": (29, 29), b"v": (9, 9), b"r": (17, 17), b"j": (9, 9)}
_KEY_SIZES[b"x"] = (10, 9 + NAME_MAX)
"""prefix -> (least, most) bytes of a key"""


def is_key(key: bytes) -> bool:
    """A key of one of the kinds above, as far as its form tells."""
    least, most = _KEY_SIZES.get(key[:1], (1, 511))
    return least <= len(key) <= most


def key_client(key: bytes) -> int:
    """The client in an m, k, q or w key."""
    return int(_KEY.unpack(key)[1])


def key_slab(key: bytes) -> int:
    """The slab in an s, l or f key."""
    return int(_SLAB_KEY.unpack_from(key)[1])


def split_report_key(key: bytes) -> tuple[int, int]:
    """(client that is told something, client that tells it) of an a key."""
    _, told, teller = _PAIR_KEY.unpack(key)
    return told, teller


def recalled_directory(key: bytes) -> int:
    """The directory in an r key."""
    return int(_PAIR_KEY.unpack(key)[2])


def split_letter_key(key: bytes) -> tuple[int, int]:
    """(client that is told, slab) of a b key."""
    _, told, slab, *_ = _LETTER_KEY.unpack(key)
    return told, slab


SWEPT = b"swept"
"""how the value of an e record ends when no file is left that was cleared"""
RESTED_SLOT = b"rested"
"""how the value of an f record begins whose slot has rested"""


def encode_freed(namespace: int, *, has_rested: bool) -> bytes:
    """``namespace``: that the slot is charged to."""
    return (RESTED_SLOT if has_rested else b"") + (_U64.pack(namespace) if namespace else b"")


@_checked
def decode_freed(value: bytes) -> tuple[bool, int]:
    """(the slot has rested, the namespace that it is charged to)"""
    has_rested = value.startswith(RESTED_SLOT)
    rest = value[len(RESTED_SLOT) :] if has_rested else value
    return has_rested, int(_U64.unpack(rest)[0]) if rest else 0


@_checked
def decode_cleared(value: bytes) -> tuple[int, bool]:
    """(inode number below which files were cleared, none of these is left)"""
    return int(_U64.unpack_from(value)[0]), value.endswith(SWEPT)


def split_freed_key(key: bytes) -> FreedSlot:
    return FreedSlot(*_FREED_KEY.unpack(key)[1:])


def split_open_key(key: bytes) -> tuple[int, int]:
    """(inode, client) of an h key."""
    _, ino, client = _PAIR_KEY.unpack(key)
    return ino, client


# -- values ------------------------------------------------------------------------------------------


def encode_drainer(client: int, failure: str = "") -> bytes:
    return _U64.pack(client) + failure.encode()


@_checked
def decode_drainer(value: bytes) -> tuple[int, str]:
    """(client, why it cannot move all)"""
    return int(_U64.unpack_from(value)[0]), value[_U64.size :].decode(errors="replace")


@_checked
def decode_u64(value: bytes) -> int:
    return int(_U64.unpack(value)[0])


encode_u64: Callable[[int], bytes] = _U64.pack
encode_times: Callable[[int, int, int], bytes] = _TIMES.pack
encode_usage: Callable[[int, int], bytes] = _USAGE.pack
"""bytes and inodes; see USAGE"""
encode_inode: Callable[[InodeRecord], bytes] = _encode
encode_chunk: Callable[[tuple[ExtentRecord, ...]], bytes] = _encode
encode_member: Callable[[MemberRecord], bytes] = _encode
encode_report: Callable[[HostReport], bytes] = _encode
decode_inode: Callable[[bytes | memoryview], InodeRecord] = _checked(_decode_inode)
decode_chunk: Callable[[bytes], tuple[ExtentRecord, ...]] = _checked(
    msgspec.msgpack.Decoder(tuple[ExtentRecord, ...]).decode
)
decode_member: Callable[[bytes], MemberRecord] = _checked(msgspec.msgpack.Decoder(MemberRecord).decode)
decode_report: Callable[[bytes], HostReport] = _checked(msgspec.msgpack.Decoder(HostReport).decode)
_decode_orphan = _checked(msgspec.msgpack.Decoder(OrphanRecord).decode)
_FORMER_ORPHAN = b"\xdc\x00\x11"
"""how the orphan records of programs begin that knew no namespaces: an array of one field less"""


def decode_orphan(value: bytes) -> OrphanRecord:
    """Also of a record that does not say who removed it."""
    record = _decode_orphan(value)
    if value.startswith(_FORMER_ORPHAN):
        return msgspec.structs.replace(record, namespace=0, remover=record.namespace)
    return record


def encode_u64s(values: Iterable[int]) -> bytes:
    return b"".join([_U64.pack(value) for value in values])


@_checked
def decode_u64s(value: bytes) -> list[int]:
    return [number for (number,) in _U64.iter_unpack(value)]


@_checked
def decode_times(value: bytes) -> tuple[int, int, int]:
    atime, mtime, ctime = _TIMES.unpack(value)
    return atime, mtime, ctime


def encode_slab(slot_size: int, bitmap: bytes) -> bytes:
    return _SLAB_HEAD.pack(slot_size) + bitmap


@_checked
def decode_slab(value: bytes) -> tuple[int, bytes]:
    """(slot size, bitmap)"""
    return _SLAB_HEAD.unpack_from(value)[0], value[_SLAB_HEAD.size :]


def encode_holder(holder: SlabHolder) -> bytes:
    return _HOLDER.pack(*holder)


@_checked
def decode_holder(value: bytes) -> SlabHolder:
    return SlabHolder(*_HOLDER.unpack(value))


def encode_counts(inodes: int, size: int | None) -> bytes:
    return _COUNT.pack(inodes) if size is None else _COUNTS.pack(inodes, size)


@_checked
def decode_counts(value: bytes) -> Counts:
    if len(value) == _COUNT.size:
        return Counts(_COUNT.unpack(value)[0], None)
    return Counts(*_COUNTS.unpack(value))


def encode_orphan(record: InodeRecord, remover: int) -> bytes:
    return _encode(OrphanRecord(**{**msgspec.structs.asdict(record), "remover": remover}))


def encode_entry_inline(record: InodeRecord) -> bytes:
    return b"I" + _encode(record)


def encode_entry_reference(ino: int) -> bytes:
    return b"R" + _U64.pack(ino)


def put_inode(puts: dict[bytes, bytes], record: InodeRecord, place: tuple[int, bytes] | None) -> None:
    """Put an inode's record. ``place``: (directory, name), for the record of the name; None: a record of its own."""
    if place is None:
        puts[inode_key(record.ino)] = encode_inode(record)
        return
    puts[entry_key(*place)] = encode_entry_inline(record)
    if record.flags & FLAG_PLACED:
        puts[place_key(record.ino)] = _U64.pack(place[0]) + place[1]


@_checked
def decode_place(value: bytes) -> tuple[int, bytes]:
    """(directory, name) of a j record."""
    return _U64.unpack_from(value)[0], value[8:]


def is_inline(value: bytes) -> bool:
    """The value of an entry has the inode itself."""
    return value[:1] == b"I"


@_checked
def decode_entry(value: bytes) -> InodeRecord | int:
    """An inline inode, or the number of an inode with a record of its own."""
    if is_inline(value):
        return _decode_inode(memoryview(value)[1:])
    return int(_U64.unpack_from(value, 1)[0])
