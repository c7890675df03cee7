"""One commit of what is pending: which changes go together, and what they put and delete.

Whatever may go alone does, so that a commit keeps to the limits of the record store: what has no room is left for the
next one, the oldest first. A *unit* is what may not be separated: inodes that took each other's names, a directory and
what came into it or left, an inode and all its names.

A commit is drafted first, which changes nothing, and then applied to memory: both between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvfuse.volume import schema
from kvfuse.volume.commits import RESERVED_BYTES, RESERVED_OPERATIONS, Changes
from kvfuse.volume.node import COMMITTED, FRESH, Chunk, Extent, Node
from kvfuse.volume.pending import NameChange, Pending, is_held

if TYPE_CHECKING:
    from kvfuse.remote.records.api import RecordLimits
    from kvfuse.slab.allocator import Slot

COUNTERS = 3
"""Counter records that may be put with any commit."""
SLAB_RECORD_SIZE = 2100
"""Bytes that the record of a slab has at most, about."""

Place = tuple[int, bytes, NameChange]
"""(directory, name, change)"""


@dataclass
class Draft:
    """Some changes, and what a commit of them would do."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[Place] = field(default_factory=list)
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
    byte_count: int = 0
    """of keys and values, but for slabs; see `measure`"""

    def measure(self) -> Draft:
        """The same, when nothing more is put or deleted."""
        self.deletes.difference_update(self.puts)
        self.byte_count = sum(map(len, self.puts)) + sum(map(len, self.puts.values())) + sum(map(len, self.deletes))
        self.byte_count += sum(map(len, self.expect))
        return self

    def has_room(self, other: Draft, limits: RecordLimits) -> bool:
        """Both fit in one commit."""
        slab_count = len(self.slabs) + sum([slab not in self.slabs for slab in other.slabs])
        operations = len(self.puts) + len(other.puts) + len(self.deletes) + len(other.deletes) + slab_count
        operations += len(self.expect) + len(other.expect)
        if operations + COUNTERS + RESERVED_OPERATIONS > limits.commit_operations_max:
            return False
        byte_count = self.byte_count + other.byte_count + slab_count * SLAB_RECORD_SIZE
        return byte_count + RESERVED_BYTES <= limits.commit_bytes_max

    def add(self, other: Draft) -> None:
        self.byte_count += other.byte_count
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
        self.records.update(other.records)
        self.slabs |= other.slabs


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
    is_gone: bool
    """it had no names any more: what it left went"""


@dataclass
class Batch(Changes):
    """One commit, and what to settle in memory after it."""

    nodes: list[Node] = field(default_factory=list)
    times: list[Node] = field(default_factory=list)
    names: list[Place] = field(default_factory=list)
    vacated: list[tuple[int, bytes]] = field(default_factory=list)
    freed: list[Extent] = field(default_factory=list)
    unborn: list[Extent] = field(default_factory=list)
    late: set[Node] = field(default_factory=set)
    """changed, but not in it: their bytes come first, or it had no room for them"""
    left_serial: int | None = None
    """serial number of the oldest change that it had no room for; None: it had room for all"""
    draft: Draft = field(default_factory=Draft)
    taken: list[Taken] = field(default_factory=list)
    """in a shared volume: of each inode what a refused commit has to give back"""
    ties: list[tuple[Node, Node]] = field(default_factory=list)
    too_large: bool = False
    """it is one unit, and more than a commit may be: it goes in several"""

    def changes_name(self, parent: int, name: bytes) -> bool:
        """It puts or deletes the record of a name: another host may have changed one that it leaves as it is."""
        key = schema.entry_key(parent, name)
        return key in self.puts or key in self.deletes

    def parts(self, limits: RecordLimits) -> Iterator[Changes]:
        """In several commits: first what takes slots, then what is put, then what is deleted.

        A crash between two of them leaves slots that nobody has, or an inode with two names, for fsck to mend.
        """
        keys = sorted([*self.puts, *self.deletes], key=lambda key: (key not in self.puts, key[:1] != b"s"))
        part, size = Changes(), 0
        for key in keys:
            row_size = len(key) + len(self.puts.get(key, b""))
            count = len(part.puts) + len(part.deletes)
            if count and (count >= limits.commit_operations_max or size + row_size > limits.commit_bytes_max):
                yield part
                part, size = Changes(), 0
            size += row_size
            if key in self.puts:
                part.puts[key] = self.puts[key]
            else:
                part.deletes.add(key)
        yield part


@dataclass
class Unit:
    """Changes that go together or not at all."""

    nodes: list[Node] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)
    names: list[Place] = field(default_factory=list)
    serial: int = 0
    """of its oldest change"""

    def members(self) -> set[Node]:
        """All inodes that it is about."""
        named = {node for _, _, change in self.names for node in (change.node, change.moved) if node is not None}
        return {*self.nodes, *self.gone, *named}


@dataclass
class BatchBuilder(Pending):
    """See the module."""

    def _build(self, flushed: set[Node]) -> Batch:
        """A commit of everything that changed, but for nodes with bytes that no slot has: they come next time.

        What was flushed and staged anew during the flush goes in as it was flushed, and stays changed.
        """
        self._new_count = self._extra_size = 0
        batch = Batch(late=self._late(flushed))
        draft = self._draft_all(batch.late) if self._may_fit() else None
        if draft is None or not draft.has_room(Draft(), self.core.records.limits):
            draft = self._draft_some(batch)
        self._apply(draft, batch)
        return batch

    def _may_fit(self) -> bool:
        """Unless it is clear from the numbers that not everything has room in one commit."""
        return len(self._dirty) + len(self._extra) <= self.core.records.limits.commit_operations_max

    # -- drafting: nothing is changed ----------------------------------------------------------------

    def _draft_all(self, late: set[Node]) -> Draft:
        """Everything but what is late."""
        draft = Draft(extra=dict(self._ready_extra(late)))
        for node in self._dirty:
            if node not in late:
                self._draft_node(draft, node)
        for node in self._gone:
            self._draft_gone(draft, node)
        for parent, changes in self.overlay.items():
            for name, change in changes.items():
                if not is_held(change.moved, late):
                    self._draft_name(draft, (parent, name, change), late)
        for directory in self._times:
            self._draft_times(draft, directory)
        draft.dead = self.core.dead
        self._draft_dead(draft, draft.dead)
        self._draft_extra(draft)
        return draft.measure()

    def _draft_node(self, draft: Draft, node: Node) -> None:
        draft.nodes.append(node)
        if node.nlink:
            record = node.record()
            if node.own_record:
                key = schema.inode_key(node.ino)
                draft.puts[key] = schema.encode_inode(record)
            else:
                key = schema.entry_key(node.parent, node.name)
                draft.puts[key] = schema.encode_entry_inline(record)
            if self.core.shared:
                draft.records[node] = record
                draft.expect.setdefault(key, node.version)
            for index in node.dirty_chunks:
                chunk = node.chunks.get(index)
                key = schema.chunk_key(node.ino, index)
                if chunk is not None and chunk.extents:
                    draft.puts[key] = schema.encode_chunk(tuple([extent.record() for extent in chunk.extents]))
                else:
                    draft.deletes.add(key)
            if node.born:
                self._draft_slabs(draft, node.born)
            if node.dead:
                self._draft_dead(draft, node.dead)
        if node.extra:
            draft.extra.update(node.extra)

    def _draft_gone(self, draft: Draft, node: Node) -> None:
        draft.gone.append(node)
        draft.extra.update(node.extra)
        if self.core.shared and node.version:  # what was found by an orphan record is freed once, by whom it concerns
            draft.expect[schema.orphan_key(node.ino)] = node.version
        if _leaves_orphan(node) and not self.core.shared:  # bytes that were staged may have come to slots since
            draft.extra[schema.orphan_key(node.ino)] = schema.encode_inode(node.orphan_record())
        self._draft_dead(draft, self._dead_of_gone(node))

    def _dead_of_gone(self, node: Node) -> list[Extent]:
        """What is freed with the last name: in a shared volume the orphan record names all that is stored."""
        return [] if self.core.shared and _leaves_orphan(node) else node.dead

    def _draft_dead(self, draft: Draft, extents: list[Extent]) -> None:
        """Slots that cease to be durable. Those in slabs of others are left to them."""
        if self.core.shared:
            for extent in extents:
                slab = self.core.geometry.slab_of(extent.addr)
                if not self.core.slabs.holds(slab):
                    draft.puts[schema.freed_key(slab, extent.addr, extent.generation)] = b""
            extents = [extent for extent in extents if self._is_mine(extent)]
        self._draft_slabs(draft, extents)

    def _is_mine(self, extent: Extent) -> bool:
        return not self.core.shared or self.core.slabs.holds(self.core.geometry.slab_of(extent.addr))

    def _draft_slabs(self, draft: Draft, extents: list[Extent]) -> None:
        """The slabs of slots that become durable, or cease to be."""
        slab_size = self.core.geometry.slab_size
        draft.slabs.update([extent.addr // slab_size for extent in extents])

    def _draft_name(self, draft: Draft, place: Place, late: set[Node]) -> None:
        """A change of a name that may go now; only the first half of it where ``node`` comes later."""
        parent, name, change = place
        node = change.node
        if node in late:
            if change.vacated and change.stored:
                draft.deletes.add(schema.entry_key(parent, name))
                draft.vacated.append((parent, name))
                if self.core.shared:
                    draft.expect[schema.entry_key(parent, name)] = change.version
                    self._draft_leaving(draft, change)
            return
        draft.names.append(place)
        if self.core.shared and (node is not None or change.stored):
            draft.expect[schema.entry_key(parent, name)] = change.version
            self._draft_leaving(draft, change)
            directory = self.folders.get(parent)
            if node is not None and directory is not None and directory.version:
                self._draft_folder(draft, directory)
        if node is None:
            if change.stored:
                draft.deletes.add(schema.entry_key(parent, name))
        elif node.own_record:
            draft.puts[schema.entry_key(parent, name)] = schema.encode_entry_reference(node.ino)

    def _draft_leaving(self, draft: Draft, change: NameChange) -> None:
        """Whoever loses the name is kept by an orphan record, as it is stored: so the name's version says."""
        record = change.leaves.base if isinstance(change.leaves, Node) else change.leaves
        if record is not None:
            draft.puts[schema.orphan_key(record.ino)] = orphan_of(record, self.core.client)

    def _draft_folder(self, draft: Draft, directory: Node) -> None:
        """A name comes into a directory, which must not be removed meanwhile: who is about to has marked it."""
        key = schema.inode_key(directory.ino)
        draft.expect.setdefault(key, directory.version)
        if directory.base is not None and directory.base.flags & schema.FLAG_LEAVING:
            directory.flags &= ~schema.FLAG_LEAVING
            draft.records[directory] = record = directory.record()
            draft.puts[key] = schema.encode_inode(record)

    def _draft_times(self, draft: Draft, directory: Node) -> None:
        draft.times.append(directory)
        if directory.nlink:
            times = schema.encode_times(directory.atime, directory.mtime, directory.ctime)
            draft.puts[schema.times_key(directory.ino)] = times

    def _ready_extra(self, late: set[Node]) -> Iterable[tuple[bytes, bytes | None]]:
        """Other records that may go now: an attribute comes with its inode, or after it.

        The inode may have lost its name to one that is late: then the stored name still means it, as it was before.
        """
        if not late or not self._extra:
            return self._extra.items()
        return [
            (key, value)
            for key, value in self._extra.items()
            if not key.startswith(schema.XATTR_PREFIX) or not is_held(self.core.nodes.get(schema.key_inode(key)), late)
        ]

    def _draft_extra(self, draft: Draft) -> None:
        for key, value in draft.extra.items():
            if value is None:
                draft.deletes.add(key)
            else:
                draft.puts[key] = value

    # -- when not everything has room ----------------------------------------------------------------

    def _draft_some(self, batch: Batch) -> Draft:
        """As many units as have room, the oldest first, and of what goes alone as much as has room beside them.

        What is left out is added to what is late.
        """
        limits = self.core.records.limits
        late = set(batch.late)
        units = self._units(late)
        draft = Draft()
        taken = 0
        for unit in units:
            part = self._draft_unit(unit, late)
            if not draft.has_room(part, limits):
                if taken:
                    break
                batch.too_large = True
            draft.add(part)
            taken += 1
        for unit in units[taken:]:
            batch.late.update(unit.members())
        if taken < len(units):
            batch.left_serial = units[taken].serial
        if not batch.too_large and not self._add_loose(draft, batch.late):
            batch.left_serial = 0
        return draft

    def _draft_unit(self, unit: Unit, late: set[Node]) -> Draft:
        draft = Draft()
        for node in unit.nodes:
            self._draft_node(draft, node)
            if node in self._times:
                self._draft_times(draft, node)
        for node in unit.gone:
            self._draft_gone(draft, node)
        for place in unit.names:
            self._draft_name(draft, place, late)
        self._draft_extra(draft)
        return draft.measure()

    def _add_loose(self, draft: Draft, late: set[Node]) -> bool:
        """Times, attributes and slots that belong to no unit, as far as there is room; False if something is left."""
        for piece in list(self._loose(draft, late)):
            if not draft.has_room(piece.measure(), self.core.records.limits):
                return False
            draft.add(piece)
        return True

    def _loose(self, draft: Draft, late: set[Node]) -> Iterator[Draft]:
        for extent in self.core.dead:
            piece = Draft(dead=[extent])
            self._draft_dead(piece, [extent])
            yield piece
        with_unit = set(draft.times)
        for directory in self._times:
            if directory not in late and directory not in with_unit:
                piece = Draft()
                self._draft_times(piece, directory)
                yield piece
        for key, value in self._ready_extra(late):
            if key not in draft.extra:
                piece = Draft(extra={key: value})
                self._draft_extra(piece)
                yield piece

    def _units(self, late: set[Node]) -> list[Unit]:
        """What may go now, in units, the oldest first."""
        groups = _Groups()
        places: list[tuple[Place, Node | None]] = []
        for parent, changes in self.overlay.items():
            for name, change in changes.items():
                if is_held(change.moved, late):
                    continue
                if change.node in late:
                    if change.vacated and change.stored:
                        places.append(((parent, name, change), groups.join(_left_by(change))))
                    continue
                members = _left_by(change)
                if change.node is not None:
                    members.append(change.node)
                if any(node.is_directory for node in members):
                    members += [node for node in [self.core.nodes.get(parent)] if node in self._dirty]
                places.append(((parent, name, change), groups.join(members)))
        for tie in self._ties:
            if late.isdisjoint(tie):
                groups.join(tie)
        units: dict[Node | None, Unit] = {}
        alone: list[Unit] = []
        for node, serial in self._dirty.items():
            if node not in late:
                unit = units.setdefault(groups.first(node), Unit(serial=serial))
                unit.nodes.append(node)
                unit.serial = min(unit.serial, serial)
        for node, serial in self._gone.items():
            unit = units.setdefault(groups.first(node), Unit(serial=serial))
            unit.gone.append(node)
            unit.serial = min(unit.serial, serial)
        for place, member in places:
            home = units.get(groups.first(member)) if member is not None else None
            if home is None:
                alone.append(home := Unit())
            home.names.append(place)
        return sorted([*alone, *units.values()], key=lambda unit: unit.serial)

    # -- applying ------------------------------------------------------------------------------------

    def _apply(self, draft: Draft, batch: Batch) -> None:
        """Memory is as if the commit were in the store, but for what `_settle` does then."""
        late = batch.late
        if self.core.shared:
            batch.ties = list(self._ties)
            gone = dict.fromkeys(draft.gone)
            batch.taken = [_taken(node, node in gone) for node in {**dict.fromkeys(draft.nodes), **gone}]
            batch.expect, batch.draft = draft.expect, draft
        self._ties = [tie for tie in self._ties if not late.isdisjoint(tie)] if late else []
        self._linked_count = len(self._ties)
        dead: list[Extent] = []
        for node in draft.nodes:
            self._apply_node(node, dead)
        for node in draft.gone:
            dead += self._dead_of_gone(node)
            node.extra, node.dead = {}, []
            del self._gone[node]
        for _, _, change in draft.names:
            change.sent = True
        for node in draft.nodes:
            node.changed = bool(node.staged_count and node.nlink)
            if not node.changed:
                del self._dirty[node]
        for key in draft.extra:
            self._extra.pop(key, None)
        self._sent_extra = draft.extra
        if batch.left_serial is None:
            self._times = {}
            dead += self.core.dead
            self.core.dead = []
        else:
            for directory in draft.times:
                del self._times[directory]
            dead += draft.dead
            del self.core.dead[: len(draft.dead)]
            late.update(self._attributed(self._extra))
        batch.puts, batch.deletes = draft.puts, draft.deletes
        batch.nodes, batch.times, batch.names, batch.vacated = draft.nodes, draft.times, draft.names, draft.vacated
        batch.unborn, self.core.unborn = self.core.unborn, []
        if batch.too_large:
            self.core.dead += dead  # its records go in several commits: none of them may find a slot free already
        else:
            batch.freed = self._release(dead)
        self._put_slabs(batch)

    def _release(self, dead: list[Extent]) -> list[Extent]:
        """Those whose slots leave the durable image with this commit."""
        slabs = self.core.slabs
        if not self.core.shared:
            slabs.release([extent.slot for extent in dead])
            return dead
        released = []
        for extent in dead:  # the slot of one that another host gave up, too, may be released already
            if self._is_mine(extent) and slabs.is_durable(extent.addr):
                extent.slot_size = slabs.slot_size(extent.addr)
                slabs.release([extent.slot])
                released.append(extent)
        return released

    def _attributed(self, keys: Iterable[bytes]) -> list[Node]:
        """Inodes that some of these records are attributes of."""
        inos = {schema.key_inode(key) for key in keys if key.startswith(schema.XATTR_PREFIX)}
        return [node for node in map(self.core.nodes.get, inos) if node is not None]

    def _apply_node(self, node: Node, dead: list[Extent]) -> None:
        node.forced = False
        node.committing = True
        node.extra = {}
        if not node.nlink:
            return
        if self.core.shared:
            _begin_base(node)
        node.dirty_chunks = frozenset()
        if node.born:
            fresh: list[Slot] = []
            for extent in node.born:
                if extent.state == FRESH:
                    extent.state = COMMITTED
                    fresh.append(extent.slot)
            node.born.clear()
            self.core.slabs.commit(fresh)
            self.counters.blocks += 1
        if node.dead:
            dead += node.dead
            node.dead.clear()

    def _put_slabs(self, batch: Batch) -> None:
        """The bitmaps and counters that changed."""
        for key, value in self.core.take_counters().items():
            if value is not None:
                batch.puts[key] = value
        for state in self.core.slabs.take_dirty():
            if state.slot_size:
                batch.puts[schema.slab_key(state.slab)] = schema.encode_slab(state.slot_size, state.bitmap)
            else:
                batch.deletes.add(schema.slab_key(state.slab))


class _Groups:
    """Which inodes go together."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def first(self, node: Node) -> Node:
        """The one that stands for all that go with ``node``."""
        while (above := self._above.get(node, node)) is not node:
            node = above
        return node

    def join(self, nodes: Iterable[Node]) -> Node | None:
        """These go together: one of them."""
        top: Node | None = None
        for node in nodes:
            here = self.first(node)
            if top is None:
                top = here
            elif here is not top:
                self._above[here] = top
        return top


def orphan_of(record: schema.InodeRecord, client: int) -> bytes:
    """The orphan record of an inode as it is stored."""
    return schema.encode_orphan(msgspec.structs.replace(record, nlink=0), client)


def _taken(node: Node, is_gone: bool) -> Taken:
    chunks = [(chunk, chunk.base, chunk.dirty) for chunk in node.chunks.values() if chunk.base is not None]
    born = [extent for extent in node.born if extent.state == FRESH and node.nlink]
    return Taken(node, node.forced, node.extra, born, list(node.dead), node.dirty_chunks, chunks, is_gone)


def _begin_base(node: Node) -> None:
    """What is stored of each chunk is from now on what this commit says."""
    for chunk in node.chunks.values():
        if chunk.base is not None:
            chunk.base = None if chunk.staged is None else tuple([extent.record() for extent in chunk.extents])
            chunk.dirty = [] if chunk.staged is None else chunk.dirty


def _leaves_orphan(node: Node) -> bool:
    """Its orphan record is to be put."""
    return node.extra.get(schema.orphan_key(node.ino)) is not None


def _left_by(change: NameChange) -> list[Node]:
    """Whoever settles what the inode that left the name had: itself, or its heirs."""
    node, found = change.moved, []
    while node is not None:
        found.append(node)
        node = node.heir if node.nlink == 0 else None
    return found
