"""Describes one commit of pending changes: the draft, the records that are sent, and the effects on memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvfuse.volume.commit.committer import RESERVED_BYTES, RESERVED_OPERATIONS, USE_RECORD_SIZE, WriteSet
from kvfuse.volume.commit.late import Late
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.metadata_budget import growth
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.remote.records.api import RecordLimits

SPARE_OPERATIONS = 2 + RESERVED_OPERATIONS
"""Operations kept free in each commit: for counter records and for those that the committer adds."""
SLAB_RECORD_SIZE = 2100
"""Largest size of a slab's record, in bytes, about."""


@dataclass
class FileCounts:
    """Namespace -> files."""

    made: Counter[int] = field(default_factory=Counter)
    gone: Counter[int] = field(default_factory=Counter)
    """stored files that lose their last name"""
    given_up: Counter[int] = field(default_factory=Counter)
    """files that lose it, stored or not: all of them count until the commit is stored"""

    def add(self, other: FileCounts) -> None:
        self.made.update(other.made)
        self.gone.update(other.gone)
        self.given_up.update(other.given_up)


@dataclass
class Draft:
    """Some changes, and the effects of a commit of them."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[NameChange] = field(default_factory=list)
    vacated: list[tuple[int, bytes]] = field(default_factory=list)
    """(directory, name): this commit deletes the stored record, a later one puts the new record"""
    times: list[Node] = field(default_factory=list)
    extra: dict[bytes, bytes | None] = field(default_factory=dict)
    dead: list[Extent] = field(default_factory=list)
    """extents that belong to no inode any more"""
    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: set[bytes] = field(default_factory=set)
    expect: dict[bytes, int] = field(default_factory=dict)
    """in a shared volume: key -> version"""
    records: dict[Node, schema.InodeRecord] = field(default_factory=dict)
    """in a shared volume: the record that is put for each inode"""
    slabs: set[int] = field(default_factory=set)
    """slabs whose records are put as well"""
    namespaces: set[int] = field(default_factory=set)
    """those whose use may change: their records are put as well"""
    bequests: set[Node] = field(default_factory=set)
    """in a shared volume: inodes whose freed extents move to an orphan record, see `terms`"""
    files: int = 0
    """in a shared volume: new inodes less those that lose their last name"""
    in_namespaces: FileCounts = field(default_factory=FileCounts)
    """in a shared volume: files that namespaces gain and lose"""
    before: dict[bytes, int] = field(default_factory=dict)
    """in a shared volume: weights of stored records that are replaced or deleted; others do not exist"""
    operation_count: int = 0
    byte_count: int = 0
    """size of keys and values; both counts are without slabs, see `measure`"""

    def measure(self) -> Draft:
        """Count operations and bytes when the draft is complete. Returns the draft itself."""
        self.deletes.difference_update(self.puts)
        self.operation_count = len(self.puts) + len(self.deletes) + len(self.expect)
        self.byte_count = sum(map(len, self.puts)) + sum(map(len, self.puts.values())) + sum(map(len, self.deletes))
        self.byte_count += sum(map(len, self.expect))
        return self

    def has_room(self, other: Draft, limits: RecordLimits) -> bool:
        """Both drafts fit into one commit."""
        both = len(self.slabs) + sum([slab not in self.slabs for slab in other.slabs])
        uses = len(self.namespaces | other.namespaces)
        operations = self.operation_count + other.operation_count + both + uses + SPARE_OPERATIONS
        byte_count = self.byte_count + other.byte_count + both * SLAB_RECORD_SIZE + uses * USE_RECORD_SIZE
        return operations <= limits.commit_operations_max and byte_count + RESERVED_BYTES <= limits.commit_bytes_max

    def count_slab_room(self, limits: RecordLimits) -> int:
        """Number of records of other slabs that fit beside this draft."""
        uses = len(self.namespaces)
        operations = limits.commit_operations_max - SPARE_OPERATIONS - self.operation_count - len(self.slabs) - uses
        byte_count = limits.commit_bytes_max - RESERVED_BYTES - self.byte_count - len(self.slabs) * SLAB_RECORD_SIZE
        byte_count -= uses * USE_RECORD_SIZE
        return max(0, min(operations, byte_count // SLAB_RECORD_SIZE))

    def add(self, other: Draft) -> None:
        self.byte_count += other.byte_count
        self.files += other.files
        self.nodes += other.nodes
        self.gone += other.gone
        self.names += other.names
        self.vacated += other.vacated
        self.times += other.times
        self.extra.update(other.extra)
        self.dead += other.dead
        self.puts.update(other.puts)
        self.deletes |= other.deletes
        self.expect.update(other.expect)
        self.operation_count = len(self.puts) + len(self.deletes) + len(self.expect)
        self.before.update(other.before)
        self.in_namespaces.add(other.in_namespaces)
        self.records.update(other.records)
        self.slabs |= other.slabs
        self.namespaces |= other.namespaces
        self.bequests |= other.bequests


NOTHING = Draft()


class Taken(NamedTuple):
    """The state of an inode that a commit consumed; restored if the commit is refused."""

    node: Node
    forced: bool
    extra: dict[bytes, bytes | None]
    born: list[Extent]
    dead: list[Extent]
    dirty_chunks: AbstractSet[int]
    chunks: list[tuple[Chunk, tuple[schema.ExtentRecord, ...], list[tuple[int, int]]]]
    """(chunk, its base, (start, end) of written bytes)"""
    cut_size: int | None
    reserved: int
    is_gone: bool
    """the inode had no names, and the commit frees its slots and records"""


@dataclass
class Batch(WriteSet):
    """One commit, and its effects on memory once it is stored."""

    freed: list[Extent] = field(default_factory=list)
    unborn: list[Extent] = field(default_factory=list)
    late: Late = field(default_factory=set)
    """changed inodes that it leaves out: their bytes are not in slots, or it has no room for them"""
    left_serial: int | None = None
    """serial number of the oldest change for which it has no room; None: it has room for all"""
    draft: Draft = field(default_factory=Draft)
    """its changes of inodes and names"""
    taken: list[Taken] = field(default_factory=list)
    """in a shared volume: the state of inodes to restore if it is refused"""
    untouched: set[NameChange] = field(default_factory=set)
    """in a shared volume: changes of names whose records it neither puts nor deletes: others may have changed them"""
    ties: list[tuple[Node, Node]] = field(default_factory=list)
    files_gone: dict[int, int] = field(default_factory=dict)
    """namespace -> files that count until it is stored"""
    is_unsure: bool = False
    """writing headers of the slots that it frees failed, and may still happen"""
    reserved: int = 0
    """bytes of records that were reserved for it; see `metadata_budget`"""
    too_large: bool = False
    """it is one unit that is larger than a commit may be: it is sent in several"""

    def split(self, limits: RecordLimits) -> Iterator[WriteSet]:
        """Split it into several commits: slab records first, then puts, deletes, and f records of others' slots.

        In a shared volume this happens only if many inodes with many chunk records each belong together: the freed
        slots of one inode fit into one commit (`Draft.bequests`). A crash between two parts leaks slots or leaves an
        inode with two names, which fsck mends.
        """
        keys = sorted(
            [*self.puts, *self.deletes], key=lambda key: (key[:1] == b"f", key not in self.puts, key[:1] != b"s")
        )
        guarded = (schema.CLEARED_PREFIX, schema.DELEGATION_PREFIX)
        guards = {key: version for key, version in self.draft.expect.items() if key[:1] in guarded}
        operations_max = limits.commit_operations_max - RESERVED_OPERATIONS - len(guards) - len(self.uses)
        bytes_max = limits.commit_bytes_max - RESERVED_BYTES - sum(map(len, guards)) - USE_RECORD_SIZE * len(self.uses)
        part, size = WriteSet(expect=guards), 0
        for key in keys:
            row_size = len(key) + len(self.puts.get(key, b""))
            count = len(part.puts) + len(part.deletes)
            if count and (count >= operations_max or size + row_size > bytes_max):
                part.size = growth(part.puts, part.deletes, self.draft.before)
                yield part
                part, size = WriteSet(expect=guards), 0
            size += row_size
            if key in self.puts:
                part.puts[key] = self.puts[key]
            else:
                part.deletes.add(key)
        part.files, part.size = self.files, growth(part.puts, part.deletes, self.draft.before)
        part.uses = self.uses
        yield part


@dataclass
class Unit:
    """Changes that are committed together or not at all."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[NameChange] = field(default_factory=list)
    serial: int = 0
    """serial number of its oldest change"""

    def list_members(self) -> set[Node]:
        """All inodes that its changes concern."""
        named = {node for change in self.names for node in (change.node, change.moved) if node is not None}
        return {*self.nodes, *self.gone, *named}
