"""Defines the protocol of client and daemon: the ring's memory, its entries, and the messages that set it up.

``docs/usrbio.md`` describes the same for clients in other languages. All numbers are little-endian.

A ring is one mapping that the daemon makes: a header, the indices, the submission queue (SQ), the completion queue
(CQ), and an *aux area* that the client uses as it likes for keys and per-key results.

The daemon trusts none of it: after it wrote the header it reads it only to check that
it is unchanged, and it copies indices, entries and keys before it checks them.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.keys import KEY_SIZE_MAX

VERSION = 1
MAGIC = int.from_bytes(b"KVFRING1", "little")
SOCKET_PATH = ".kvfuse/control.sock"
"""path of the control socket below the mount point"""

PAGE = 4096
ENTRIES_MAX = 1 << 16
AUX_SIZE_MAX = 64 << 20
KEYS_MAX = 1 << 16
"""most keys in one entry"""
LENGTH_MAX = 1 << 30
"""bytes that one entry moves"""
IOV_SIZE_MAX = 1 << 40

# -- the ring's memory ------------------------------------------------------------------------------

HEADER = struct.Struct("<QIIIIQQQQ")
"""magic, version, entries, SQE size, CQE size, then byte offsets: SQ, CQ, aux area, end of the mapping"""


class Word(IntEnum):
    """Index of each shared 64-bit word, in words from the start of the mapping: a cache line for each writer.

    Head: entries taken by the consumer; tail: entries given by the producer. Both only grow; an
    index masked with ``entries - 1`` is a place in the queue. A sleep word is 0 while that side is awake.
    While it is going to sleep or sleeps, it is the tail at which to wake it (1: any), at least 1: the side that
    publishes that tail, or one beyond it, must ring its bell.
    """

    SQ_HEAD = 8
    SQ_TAIL = 16
    DAEMON_SLEEPS = 24
    CQ_HEAD = 32
    CQ_TAIL = 40
    CLIENT_SLEEPS = 48
    DAEMON_EPOCH = 56
    """start of the daemon that serves the ring, in ns of CLOCK_MONOTONIC; 0: a daemon of an older version"""
    DAEMON_PID = 57
    """its number in its own pid namespace"""
    DAEMON_NAMESPACE = 58
    """the inode of that namespace: /proc/self/ns/pid"""
    DAEMON_TRACES = 59
    """the epoch of the last daemon that made spans; if that of the present one, entries may name parents"""


PARENTS_OFFSET, PARENTS_MAX = 1024, 96
"""Where the spans begin that entries may name as their parents, and for how many there is room: `traceparent.SIZE`
bytes each. The client writes them, and changes none that an entry under way names."""

PID_NAMESPACE = "/proc/self/ns/pid"


class DaemonId(NamedTuple):
    """The process that serves, as the header of a ring and the reply to HELLO say. All 0: a daemon of an older version.

    A client may rely on what it remembers of a daemon while the epoch is the same, and no longer than its connection,
    with which the next daemon continues.
    """

    epoch: int = 0
    """its start, in ns of CLOCK_MONOTONIC: of two daemons of a mount the later one has the larger"""
    pid: int = 0
    """its number in its own pid namespace"""
    namespace: int = 0
    """inode of that"""


def own_id() -> DaemonId:
    """The identity of this process, as a daemon."""
    return _id_of(os.getpid())


@cache
def _id_of(pid: int) -> DaemonId:
    """Cached by pid, as a daemon may be a fork of the standby."""
    return DaemonId(time.monotonic_ns(), pid, pid_namespace())


def pid_namespace() -> int:
    """Inode of the pid namespace of this process; 0: unknown."""
    try:
        return os.stat(PID_NAMESPACE).st_ino
    except OSError:
        return 0


class Op(IntEnum):
    """Operations of an SQE."""

    READ = 1
    """file bytes at ``offset`` into the iov; result: bytes, short at the end of the file"""
    WRITE = 2
    """bytes of the iov to ``offset`` of the file; result: bytes"""
    FSYNC = 3
    """the file survives the loss of power when this completed"""
    GET = 4
    """a whole block into the iov, at most ``length`` bytes of it; result: the block's bytes, -ENOENT for a miss"""
    PUT = 5
    """``length`` bytes of the iov replace the block of that key; result: ``length``"""
    EXISTS = 6
    """many keys: one result byte for each (0 or 1); result: how many exist"""
    DELETE = 7
    """many keys, as EXISTS: which existed and were removed"""
    PREFETCH = 8
    """many keys, as EXISTS: which are in the shared-memory tier now"""
    CANCEL = 9
    """the submission whose ``user_data`` is this one's ``offset``; result: 0, -ENOENT if it is not in flight"""
    RELEASE = 10
    """give back the pin ``offset``; posts no completion"""


FILE_OPS = frozenset({Op.READ, Op.WRITE, Op.FSYNC})
MANY_KEY_OPS = frozenset({Op.EXISTS, Op.DELETE, Op.PREFETCH})
KEY_OPS = MANY_KEY_OPS | {Op.GET, Op.PUT}


class Flag(IntFlag):
    """Flags of an SQE."""

    VIEW = 1
    """GET: answer with a pinned view of the shared-memory tier if the block is in it"""
    PREFIX = 2
    """EXISTS: stop at the first key that is absent"""
    COSTS = 4
    """EXISTS: answer for each block with its tier, and when its bytes are expected: see `costs`"""
    NEAR = 8
    """PREFETCH: only what other hosts have at hand, and as urgent as a GET: the caller waits for it"""


class Priority(IntEnum):
    """Higher ones are served first; every eighth turn serves the priority that has waited longest."""

    NORMAL = 0
    HIGH = 1
    LOW = 2


TTL_MAX = (1 << 32) - 1
HINT_BITS = 40
"""of a packed `PutHints`"""


class PutHints(NamedTuple):
    """How long, and how much, a block is worth keeping. Only namespaces of blocks heed it."""

    ttl: int = 0
    """seconds from the put on, up to `TTL_MAX`, and no longer than the namespace's ``ttl``; 0: as that says"""
    priority: int = 0
    """-128 to 127: of blocks that would be evicted at the same time those of lower priority go first"""

    def pack(self) -> int:
        """As ``offset`` of a PUT. ValueError."""
        if not (0 <= self.ttl <= TTL_MAX and -128 <= self.priority <= 127):
            raise ValueError(f"a put has a ttl of 0 to {TTL_MAX} s and a priority from -128 to 127, not {self}")
        return self.ttl | (self.priority & 0xFF) << 32

    @classmethod
    def unpack(cls, offset: int) -> PutHints:
        """Of a PUT. ValueError."""
        if offset >> HINT_BITS:
            raise ValueError(f"a put has no hints {offset:#x}")
        return cls(offset & TTL_MAX, ((offset >> 32) + 128) % 256 - 128)


NO_HINTS = PutHints()

SQE = np.dtype(
    [
        ("op", "u1"),
        ("priority", "u1"),
        ("flags", "<u2"),
        ("handle", "<u4"),  # of the file, or of the namespace
        ("iov", "<u4"),  # handle of the iov
        ("key_length", "<u4"),  # bytes at key_offset
        ("offset", "<u8"),  # in the file; many keys: of the result bytes in the aux area; PUT: see `PutHints`
        ("iov_offset", "<u8"),
        ("length", "<u8"),  # bytes; many keys: their number
        ("key_offset", "<u8"),  # in the aux area
        ("user_data", "<u8"),  # repeated in the completion
        ("timeout_us", "<u4"),  # from the moment the daemon takes it; 0: none
        ("parent", "<u4"),  # number of its parent among those of the ring, from 1 on; 0: none
    ]
)
SQE_STRUCT = struct.Struct("<BBHIIIQQQQQII")
"""one SQE packed or unpacked alone: much faster than a numpy record"""

CQE = np.dtype(
    [
        ("user_data", "<u8"),
        ("result", "<i8"),  # see Op; negative: -errno
        ("offset", "<u8"),  # of a view, in its arena
        ("arena", "<u4"),  # of a view; 0: the bytes are in the iov
        ("pin", "<u4"),  # to be given back with RELEASE
    ]
)
CQE_STRUCT = struct.Struct("<QqQII")

assert SQE.itemsize == SQE_STRUCT.size == 64
assert CQE.itemsize == CQE_STRUCT.size == 32


class Layout(NamedTuple):
    """Offsets of everything in a ring's mapping, in bytes."""

    entries: int
    sq_offset: int
    cq_offset: int
    aux_offset: int
    size: int

    @classmethod
    def of(cls, entries: int, aux_size: int) -> Layout:
        """The layout for ``entries`` (a power of two) and an aux area of at least ``aux_size`` bytes. ValueError."""
        if not 0 < entries <= ENTRIES_MAX or entries & (entries - 1):
            raise ValueError(f"a ring of {entries} entries: it must be a power of two up to {ENTRIES_MAX}")
        if not 0 <= aux_size <= AUX_SIZE_MAX:
            raise ValueError(f"an aux area of {aux_size} bytes: at most {AUX_SIZE_MAX}")
        sq_offset = PAGE
        cq_offset = sq_offset + entries * SQE.itemsize
        aux_offset = -(-(cq_offset + entries * CQE.itemsize) // PAGE) * PAGE
        return cls(entries, sq_offset, cq_offset, aux_offset, aux_offset + -(-aux_size // PAGE) * PAGE)

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.entries, SQE.itemsize, CQE.itemsize, *self[1:])

    @classmethod
    def parse(cls, header: bytes) -> Layout:
        """The layout that a header describes. ValueError where it is not one of this version."""
        magic, version, entries, sqe_size, cqe_size, *_, aux_offset, size = HEADER.unpack(header[: HEADER.size])
        if magic != MAGIC or version != VERSION or (sqe_size, cqe_size) != (SQE.itemsize, CQE.itemsize):
            raise ValueError(f"no ring of version {VERSION}: magic {magic:#x}, version {version}")
        layout = cls.of(entries, size - aux_offset)
        if layout.header() != header[: HEADER.size]:
            raise ValueError("the ring's header contradicts itself")
        return layout


def key_sizes(keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """The sizes of keys, in bytes. ValueError for a key of a wrong size."""
    sizes = np.fromiter(map(len, keys), np.uint32, len(keys))
    if len(keys) and not (sizes.min() >= 1 and sizes.max() <= KEY_SIZE_MAX):
        raise ValueError(f"a key has 1 to {KEY_SIZE_MAX} bytes, not {sizes.min()} or {sizes.max()}")
    return sizes


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Many keys in the aux area: their lengths as u16, then their bytes. ValueError for a key of a wrong size."""
    return key_sizes(keys).astype("<u2").tobytes() + b"".join(keys)


def unpack_keys(data: bytes, count: int) -> list[bytes]:
    """The keys that `pack_keys` packed. ValueError where ``data`` is anything else."""
    lengths_size = 2 * count
    if len(data) < lengths_size:
        raise ValueError(f"{count} keys in {len(data)} bytes")
    lengths = np.frombuffer(data, "<u2", count)
    if count and not (lengths.min() >= 1 and lengths.max() <= KEY_SIZE_MAX):
        raise ValueError(f"a key has 1 to {KEY_SIZE_MAX} bytes")
    ends = (np.cumsum(lengths, dtype=np.int64) + lengths_size).tolist()
    if (ends[-1] if ends else lengths_size) != len(data):
        raise ValueError(f"{count} keys do not fill {len(data)} bytes")
    return [data[start:end] for start, end in zip([lengths_size, *ends], ends, strict=False)]


# -- control messages -------------------------------------------------------------------------------


class Request(IntEnum):
    """Requests of a client on the control socket (SOCK_SEQPACKET, one message each, answered in order)."""

    HELLO = 1
    """(version) -> (version, daemon's pid, entries_max, abilities, its epoch, its pid namespace: see `DaemonId`); the
    first message of a connection, and whenever one asks again"""
    ADD_FILE = 2
    """(access), an open descriptor of a regular file of this mount -> (handle, inode, size)"""
    DROP_FILE = 3
    """(handle)"""
    ADD_IOV = 4
    """(size), the descriptor of shared memory -> (handle, writable)"""
    DROP_IOV = 5
    """(handle)"""
    ADD_RING = 6
    """(entries, aux_size, op_mask) -> (handle, size), descriptors: memory, the daemon's bell, the client's bell"""
    DROP_RING = 7
    """(handle)"""
    OPEN_NAMESPACE = 8
    """(mode of new files), the descriptor of a directory of this mount -> (handle, inode)"""
    CLOSE_NAMESPACE = 9
    """(handle)"""
    MAP_ARENA = 10
    """(arena) of a view that this client got, or of an index that it has -> (size), a read-only descriptor"""
    FOLLOW = 11
    """(handle of a namespace); after the reply the daemon sends news of its blocks, and takes no more requests"""
    SHOW_TOKEN = 12
    """the token of a namespace, as the text behind the message, for all that the connection does from here on"""
    DESCRIBE = 13
    """(handle of a namespace), and what its blocks are, a JSON object, as the text behind the message"""
    MAP_INDEX = 14
    """(handle of a namespace, number) -> (size), descriptors: the index, read-only; a page for touches"""
    ADD_DMABUF = 15
    """(offset, size), the descriptor of a dma-buf -> (handle) of an iov for READ and GET alone"""


class Ability(IntFlag):
    """Abilities that other daemons of the version may lack: in the reply to HELLO."""

    DMABUF = 1
    """it may have a device that fills memory of others: see ADD_DMABUF"""


class NewsKind(IntEnum):
    """The meaning of names in a message of news."""

    PRESENT = 1
    """names of present blocks: some of the directory's in each message before READY, together all"""
    READY = 2
    """all present names were sent; it has no names"""
    STORED = 3
    """the names mean blocks now, or others than before"""
    REMOVED = 4
    """the names mean no blocks any more"""
    CLEARED = 5
    """no name that was sent means a block any more; it has no names"""


NEWS = struct.Struct("<II")
"""head of a message of news: its kind, how many names follow, packed as keys are"""
NEWS_NAMES_MAX = 128
NEWS_SIZE_MAX = 64 << 10


class Access(IntFlag):
    """The access that ADD_FILE requests; the descriptor must be open for it."""

    READ = 1
    WRITE = 2
    ONCE = 4
    """with READ: its bytes are read once, and need not stay in the page cache of the disk. Older daemons refuse it"""


MESSAGE = struct.Struct("<IIq6Q")
"""request, number (chosen by the client, repeated in the reply), status (replies: 0 or -errno), six values"""
TEXT_SIZE_MAX = 1024
"""bytes of the text behind a reply with an error: the reason, UTF-8; or behind a request"""
MESSAGE_SIZE_MAX = MESSAGE.size + TEXT_SIZE_MAX
DESCRIPTORS_MAX = 3


class Message(NamedTuple):
    """A request or a reply."""

    request: int
    number: int
    status: int = 0
    values: tuple[int, ...] = ()
    text: str = ""

    def pack(self) -> bytes:
        values = (*self.values, *(0,) * (6 - len(self.values)))
        text = self.text.encode(errors="replace")[:TEXT_SIZE_MAX]
        return MESSAGE.pack(self.request, self.number, self.status, *values) + text

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        """Parse a message. ValueError for a wrong size."""
        if not MESSAGE.size <= len(data) <= MESSAGE_SIZE_MAX:
            raise ValueError(f"a control message of {len(data)} bytes")
        request, number, status, *values = MESSAGE.unpack(data[: MESSAGE.size])
        return cls(request, number, status, tuple(values), data[MESSAGE.size :].decode(errors="replace"))
