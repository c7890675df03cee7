"""The evidence of a check: inodes, names and slots as the records say, and the problems found while reading.

The readers fill an `Evidence` once; what compares changes nothing of it but the report.
"""

from __future__ import annotations

import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfuse.remote.records.api import Record, RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import PATH_DEPTH_MAX
from kvfuse.volume.namespaces.grants import Grants
from kvfuse.volume.namespaces.namespace_uses import NOTHING
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.store import schema

MALFORMED = (ValueError, struct.error)
"""The errors that decoding a damaged record raises."""
Progress = Callable[[str, int, int], None]
"""(what is done, how far, of how many; 0: not known)"""


@dataclass(frozen=True)
class Problem:
    """Something that should not be. ``puts`` and ``deletes`` mend it, and ``writes`` to segments."""

    text: str
    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: tuple[bytes, ...] = ()
    writes: tuple[Transfer, ...] = ()


@dataclass
class CheckReport:
    """The result of a check."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """nothing wrong, but worth a line"""
    files: int = 0
    directories: int = 0
    extents: int = 0
    used_bytes: int = 0
    blocks: int = 0
    """of the block store"""
    block_bytes: int = 0
    cold_objects: int = 0
    cold_blocks: int = 0
    """of these objects, also such that were replaced or removed"""
    namespaces: int = 1
    verified_bytes: int = 0
    repaired: int = 0

    @property
    def clean(self) -> bool:
        return not self.problems


@dataclass
class Inode:
    """An inode with a record of its own: that record, and the names and chunks seen of it."""

    record: schema.InodeRecord
    names: int = 0
    subdirectories: int = 0
    parent: int = 0
    has_times: bool = False
    entry: Record | None = None
    """one that names it"""


class Named(NamedTuple):
    """An extent that a record names."""

    ino: int
    chunk: int
    piece_offset: int
    """bytes of the chunk before it"""
    extent: schema.ExtentRecord


def named_extents(ino: int, chunk: int, extents: Sequence[schema.ExtentRecord]) -> Iterator[Named]:
    """The extents of one chunk."""
    offset = 0
    for extent in extents:
        yield Named(ino, chunk, offset, extent)
        offset += extent.span


def extents_in(row: Record) -> list[Named]:
    """What a d, i or c record names. Malformed."""
    if row.key[:1] == b"c":
        ino, chunks = schema.key_inode(row.key), {schema.chunk_index(row.key): schema.decode_chunk(row.value)}
    else:
        record = schema.decode_entry(row.value) if row.key[:1] == b"d" else schema.decode_inode(row.value)
        if isinstance(record, int):
            return []
        ino, chunks = record.ino, dict(enumerate(record.chunks))
    return [named for index, extents in chunks.items() for named in named_extents(ino, index, extents)]


@dataclass
class NamespaceEvidence:
    """What records say of namespaces."""

    numbers: set[int] = field(default_factory=lambda: {ROOT})
    """those with settings and a folder"""
    epochs: dict[int, int] = field(default_factory=dict)
    """namespace of blocks -> its epoch; also of those that are about to be converted"""
    converting: set[int] = field(default_factory=set)
    """caches of before that a mount began to convert: heads of blocks may be in the place of those of their files"""
    homes: dict[int, int] = field(default_factory=dict)
    """inode -> namespace, of those that are not the root's"""
    counted: dict[int, schema.Counts] = field(default_factory=dict)
    """namespace -> its files and their slots"""
    recorded: dict[int, schema.Counts] = field(default_factory=dict)
    """namespace -> its use, as the records of all clients say"""
    rows: dict[int, list[bytes]] = field(default_factory=dict)
    """namespace -> keys of these records"""
    uses: dict[int, dict[int, schema.Counts]] = field(default_factory=dict)
    """namespace -> client -> its use, as its record says"""
    quotas: dict[int, Settings] = field(default_factory=dict)
    """namespace -> settings, of those with quotas"""
    grants: dict[int, Grants] = field(default_factory=dict)
    """namespace -> what clients may have of these, in a shared volume"""
    above: dict[int, int] = field(default_factory=dict)
    """directory -> namespace, see `Evidence.namespace_of`"""

    def count(self, number: int, files: int, size: int) -> None:
        if number:
            self.counted[number] = self.counted.get(number, NOTHING).add(schema.Counts(files, size))


@dataclass
class Evidence:
    """Of one pass over a volume; the check owns it."""

    superblock: Superblock
    records: RecordStore
    segments: SegmentStore
    progress: Progress = lambda what, done, total: None
    wants_verify: bool = False
    """bytes and slot heads are compared, too"""
    mends_heads: bool = False
    """the caller writes ``head_mends`` at the end"""
    head_mends: list[Transfer] = field(default_factory=list)
    """what rewrites the heads that only notes are about"""
    report: CheckReport = field(default_factory=CheckReport)
    slabs: Allocator = field(init=False)
    inodes: dict[int, Inode] = field(default_factory=dict)
    inline: set[int] = field(default_factory=set)
    orphans: set[int] = field(default_factory=set)
    attributed: set[int] = field(default_factory=set)
    """inodes that say they have attributes"""
    owners: dict[int, int] = field(default_factory=dict)
    """slot address -> inode"""
    contested: set[int] = field(default_factory=set)
    """slots that several files claim"""
    far_files: dict[int, list[bytes]] = field(default_factory=dict)
    """inode with chunk records -> key of its own record"""
    far_blocks: Counter[int] = field(default_factory=Counter)
    """inode -> units in its chunk records, less those that its own record counts"""
    sealed: list[tuple[int, schema.ExtentRecord, list[bytes]]] = field(default_factory=list)
    """what `verify` reads: (inode, extent, keys of the records that go when it is wrong)"""
    generation_max: int = 0
    damaged: set[bytes] = field(default_factory=set)
    """keys of records that do not match their checksums"""
    weights: dict[bytes, int] = field(default_factory=dict)
    """kind of records -> what they weigh"""
    named: dict[int, Named] = field(default_factory=dict)
    """slot address -> what a file has there, of files that have names; where heads are compared"""
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """inode -> (directory, name): one of its names"""
    inline_records: dict[int, schema.InodeRecord] = field(default_factory=dict)
    """of inodes without records of their own, where heads are compared"""
    freed: set[int] = field(default_factory=set)
    """slots that only wait for who holds their slab"""
    counted: dict[bytes, schema.Counts] = field(default_factory=dict)
    """key of a client's counts -> these"""
    namespaces: NamespaceEvidence = field(default_factory=NamespaceEvidence)

    def __post_init__(self) -> None:
        self.slabs = Allocator(self.geometry)

    @property
    def geometry(self) -> Geometry:
        return self.superblock.geometry

    @property
    def weight(self) -> int:
        """Of all records."""
        return sum(self.weights.values())

    def problem(
        self, text: str, puts: dict[bytes, bytes] | None = None,
        deletes: Sequence[bytes] = (), writes: Sequence[Transfer] = (),
    ) -> None:  # fmt: skip
        self.report.problems.append(Problem(text, puts or {}, tuple(deletes), tuple(writes)))

    def exists(self, ino: int) -> bool:
        return ino in self.inodes or ino in self.inline or ino in self.orphans

    def namespace_of(self, directory: int) -> int:
        """The namespace that a directory is in, by its own settings or those of the nearest one above it."""
        found, path, number = self.namespaces, list[int](), ROOT
        while directory != ROOT_INODE and directory in self.inodes and directory not in path:
            if (known := found.above.get(directory)) is not None or directory in found.numbers:
                number = directory if known is None else known
                break
            path.append(directory)
            directory = self.inodes[directory].record.parent
        found.above.update(dict.fromkeys(path, number))
        return number

    def file_record(self, ino: int) -> schema.InodeRecord | None:
        inode = self.inodes.get(ino)
        return inode.record if inode is not None else self.inline_records.get(ino)

    def path_of(self, ino: int) -> bytes:
        """One path of an inode, as its names are; empty where it is not below the root."""
        parts: list[bytes] = []
        while ino != ROOT_INODE:
            if ino not in self.places or len(parts) > PATH_DEPTH_MAX:
                return b""
            ino, name = self.places[ino]
            parts.append(name)
        return b"/".join(reversed(parts))


def directory_record(ino: int, mode: int, links: int, parent: int = 0) -> schema.InodeRecord:
    """A directory of root's that is as new."""
    now = time.time_ns()
    return schema.InodeRecord(ino, stat.S_IFDIR | mode, 0, 0, links, 0, now, now, now, 0, (), parent, 0, b"", 0, 0)
