"""One commit of what is pending, as data: what is drafted, what is sent, and what is settled in memory after it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvfuse.volume.commit.committer import RESERVED_BYTES, RESERVED_OPERATIONS, Changes
from kvfuse.volume.commit.late import Late
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.metadata_budget import growth
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.remote.records.api import RecordLimits

SPARE_OPERATIONS = 2 + RESERVED_OPERATIONS
"""Of any commit: counter records may be put, and what the committer adds."""
SLAB_RECORD_SIZE = 2100
"""Bytes that the record of a slab has at most, about."""


@dataclass
class Draft:
    """Some changes, and what a commit of them would do."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[NameChange] = field(default_factory=list)
    vacated: list[tuple[int, bytes]] = field(default_factory=list)
    """(directory, name): the stored record went, the new one comes later"""
    times: list[Node] = field(default_factory=list)
    extra: dict[bytes, bytes | None] = field(default_factory=dict)
    dead: list[Extent] = field(default_factory=list)
    """of nobody any more"""
    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: set[bytes] = field(default_factory=set)
    expect: dict[bytes, int] = field(default_factory=dict)
    """in a shared volume: key -> version"""
    records: dict[Node, schema.InodeRecord] = field(default_factory=dict)
    """in a shared volume: what is put of each inode"""
    slabs: set[int] = field(default_factory=set)
    """whose records will be put too"""
    bequests: set[Node] = field(default_factory=set)
    """in a shared volume: what these give up an orphan record names from then on, see `Planner`"""
    files: int = 0
    """in a shared volume: inodes that come into the store, less those that lose their last name"""
    before: dict[bytes, int] = field(default_factory=dict)
    """in a shared volume: what the stored records weigh that are replaced or deleted; others were not there"""
    operation_count: int = 0
    byte_count: int = 0
    """of keys and values; both but for slabs, see `measure`"""

    def measure(self) -> Draft:
        """The same, when nothing more is put or deleted."""
        self.deletes.difference_update(self.puts)
        self.operation_count = len(self.puts) + len(self.deletes) + len(self.expect)
        self.byte_count = sum(map(len, self.puts)) + sum(map(len, self.puts.values())) + sum(map(len, self.deletes))
        self.byte_count += sum(map(len, self.expect))
        return self

    def has_room(self, other: Draft, limits: RecordLimits) -> bool:
        """Both fit in one commit."""
        both = len(self.slabs) + sum([slab not in self.slabs for slab in other.slabs])
        operations = self.operation_count + other.operation_count + both + SPARE_OPERATIONS
        byte_count = self.byte_count + other.byte_count + both * SLAB_RECORD_SIZE
        return operations <= limits.commit_operations_max and byte_count + RESERVED_BYTES <= limits.commit_bytes_max

    def slab_room(self, limits: RecordLimits) -> int:
        """Records of other slabs for which there is room beside it."""
        operations = limits.commit_operations_max - SPARE_OPERATIONS - self.operation_count - len(self.slabs)
        byte_count = limits.commit_bytes_max - RESERVED_BYTES - self.byte_count - len(self.slabs) * SLAB_RECORD_SIZE
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
        self.records.update(other.records)
        self.slabs |= other.slabs
        self.bequests |= other.bequests


NOTHING = Draft()


class Taken(NamedTuple):
    """What a commit took from an inode in memory."""

    node: Node
    forced: bool
    extra: dict[bytes, bytes | None]
    born: list[Extent]
    dead: list[Extent]
    dirty_chunks: AbstractSet[int]
    chunks: list[tuple[Chunk, tuple[schema.ExtentRecord, ...], list[tuple[int, int]]]]
    """(chunk, its base, what was written)"""
    cut_size: int | None
    reserved: int
    is_gone: bool
    """it had no names any more: what it left went"""


@dataclass
class Batch(Changes):
    """One commit, and what to settle in memory after it."""

    freed: list[Extent] = field(default_factory=list)
    unborn: list[Extent] = field(default_factory=list)
    late: Late = field(default_factory=set)
    """changed, but not in it: their bytes come first, or it had no room for them"""
    left_serial: int | None = None
    """serial number of the oldest change that it had no room for; None: it had room for all"""
    draft: Draft = field(default_factory=Draft)
    """what it has of each inode and name"""
    taken: list[Taken] = field(default_factory=list)
    """in a shared volume: of each inode what a refused commit has to give back"""
    ties: list[tuple[Node, Node]] = field(default_factory=list)
    is_unsure: bool = False
    """headers of the slots that it frees could not be written, and may be later"""
    reserved: int = 0
    """bytes of records that it may add; see `metadata`"""
    too_large: bool = False
    """it is one unit, and more than a commit may be: it goes in several"""

    def changes_name(self, parent: int, name: bytes) -> bool:
        """It puts or deletes the record of a name: another host may have changed one that it leaves as it is."""
        key = schema.entry_key(parent, name)
        return key in self.puts or key in self.deletes

    def parts(self, limits: RecordLimits) -> Iterator[Changes]:
        """In several commits: first what takes slots, then what is put, what is deleted, and what frees others' slots.

        In a shared volume only where many inodes go together, each with many chunk records: what one of them gives up
        has room in one commit (`Draft.bequests`). A crash between two of them leaves slots that nobody has, or an inode
        with two names, for fsck to mend.
        """
        operations_max = limits.commit_operations_max - RESERVED_OPERATIONS
        bytes_max = limits.commit_bytes_max - RESERVED_BYTES
        keys = sorted(
            [*self.puts, *self.deletes], key=lambda key: (key[:1] == b"f", key not in self.puts, key[:1] != b"s")
        )
        part, size = Changes(), 0
        for key in keys:
            row_size = len(key) + len(self.puts.get(key, b""))
            count = len(part.puts) + len(part.deletes)
            if count and (count >= operations_max or size + row_size > bytes_max):
                part.size = growth(part.puts, part.deletes, self.draft.before)
                yield part
                part, size = Changes(), 0
            size += row_size
            if key in self.puts:
                part.puts[key] = self.puts[key]
            else:
                part.deletes.add(key)
        part.files, part.size = self.files, growth(part.puts, part.deletes, self.draft.before)
        yield part


@dataclass
class Unit:
    """Changes that go together or not at all."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[NameChange] = field(default_factory=list)
    serial: int = 0
    """of its oldest change"""

    def members(self) -> set[Node]:
        """All inodes that it is about."""
        named = {node for change in self.names for node in (change.node, change.moved) if node is not None}
        return {*self.nodes, *self.gone, *named}
