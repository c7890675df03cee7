"""Drafts commits: chooses their pending changes, and the records that they put and delete. Changes nothing.

Commits keep to the limits of the record store: the oldest changes are first, and those without room wait for the
next one. A *unit* is a set of changes that may not be separated: inodes that took each other's names, a directory and
names that were added to it or removed, an inode and all its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvfuse.volume.commit.batch import Batch, Draft, Unit
from kvfuse.volume.commit.late import Late, is_held, is_late, settlers
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.commit.terms import Terms
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.orphans import orphan_records
from kvfuse.volume.store import schema


class Planner:
    """Drafts commits of pending changes. Each journal has one."""

    def __init__(self, pending: Pending, terms: Terms) -> None:
        self.pending = pending
        self.core = pending.core
        self._terms = terms
        self._limits = pending.core.records.limits
        self._slab_size = self.core.geometry.slab_size

    def draft_all(self, late: Late) -> Draft:
        """Draft all changes but those of late inodes."""
        draft, pending = Draft(), self.pending
        if pending.loose.changes:
            draft.extra = self._list_ready_extra(late)
        for node in pending.dirty:
            if node not in late:
                self._draft_node(draft, node)
        for node in pending.gone:
            self._draft_gone(draft, node)
        for change in pending.names:
            named = change.node
            if change.moved is None and named is not None and not (named.own_record or named.aside or named in late):
                draft.names.append(change)  # of a new file: the inode's record is the name's
            elif change.moved is None or not is_held(change.moved, late):
                self._draft_name(draft, change, late)
        for directory in pending.times:
            self._draft_times(draft, directory)
        if self.core.dead:
            draft.dead = self.core.dead
            draft.namespaces.update([extent.owner for extent in draft.dead])
            self._draft_dead(draft, draft.dead)
        if draft.extra:
            self._draft_extra(draft)
        return self._terms.complete(draft)

    def _draft_node(self, draft: Draft, node: Node, *, bequeaths: bool = False) -> None:
        draft.nodes.append(node)
        if node.namespace:
            draft.namespaces.add(node.namespace)
        if node.nlink:
            if node.dirty_chunks and node.base is not None:
                node.ctime = max(node.ctime, node.base.ctime + 1)  # by this other hosts see the change
            record = draft.records[node] = node.record()
            schema.put_inode(draft.puts, record, None if node.own_record else (node.parent, node.name))
            for index in node.dirty_chunks:
                chunk = node.chunks.get(index)
                key = schema.chunk_key(node.ino, index)
                if chunk is not None and chunk.extents:
                    draft.puts[key] = schema.encode_chunk(tuple([extent.record() for extent in chunk.extents]))
                else:
                    draft.deletes.add(key)
            for extent in node.born:
                draft.slabs.add(extent.addr // self._slab_size)
            if node.dead and not (bequeaths and self._terms.bequeath(draft, node)):
                self._draft_dead(draft, node.dead)
        if node.extra:
            draft.extra.update(node.extra)

    def _draft_gone(self, draft: Draft, node: Node) -> None:
        draft.gone.append(node)
        draft.namespaces.add(node.namespace)
        draft.extra.update(node.extra)
        if node.extra.get(schema.orphan_key(node.ino)) is not None:  # slots may have got staged bytes since
            draft.extra.update(orphan_records(node))
        self._draft_dead(draft, node.dead)

    def _draft_dead(self, draft: Draft, extents: list[Extent]) -> None:
        """Draft the freeing of slots: in our slabs by the slabs' records, in others' by f records for their holders."""
        draft.puts.update(self.core.sharing.freed(extents))
        self._draft_slabs(draft, self.core.sharing.own_extents(extents))

    def _draft_slabs(self, draft: Draft, extents: list[Extent]) -> None:
        """Draft the records of slabs in which slots become durable or are freed."""
        draft.slabs.update([extent.addr // self._slab_size for extent in extents])

    def _draft_name(self, draft: Draft, change: NameChange, late: Late) -> None:
        """Draft a change of a name; only the deletion of the stored record if ``node`` is committed later."""
        parent, name, node = change.parent, change.name, change.node
        if node is not None and (node.aside or node in late):
            if change.may_go_first:
                draft.deletes.add(schema.entry_key(parent, name))
                draft.vacated.append((parent, name))
            return
        draft.names.append(change)
        if node is None:
            if change.stored:
                draft.deletes.add(schema.entry_key(parent, name))
        elif node.own_record:
            draft.puts[schema.entry_key(parent, name)] = schema.encode_entry_reference(node.ino)

    def _draft_times(self, draft: Draft, directory: Node) -> None:
        draft.times.append(directory)
        if directory.nlink:
            times = schema.encode_times(directory.atime, directory.mtime, directory.ctime)
            draft.puts[schema.times_key(directory.ino)] = times

    def _list_ready_extra(self, late: Late) -> dict[bytes, bytes | None]:
        """Loose records that may be committed now: an attribute only with its inode, or after it.

        The inode may have lost its name to a late one: then the stored name still means it, in its former state.
        """
        return {
            key: value
            for key, value in self.pending.loose.changes.items()
            if not key.startswith(schema.XATTR_PREFIX) or not is_held(self.core.nodes.get(schema.key_inode(key)), late)
        }

    def _draft_extra(self, draft: Draft) -> None:
        for key, value in draft.extra.items():
            if value is None:
                draft.deletes.add(key)
            else:
                draft.puts[key] = value

    # -- when there is no room for all ---------------------------------------------------------------

    def draft_some(self, batch: Batch) -> Draft:
        """Draft as many units as fit, the oldest first, and as many loose changes as fit beside them.

        Adds the members of the other units to ``batch.late``.
        """
        limits = self._limits
        late = set(batch.late)
        units = self._group_units(late)
        draft = Draft()
        taken = 0
        for unit in units:
            part = self._draft_unit(unit, late)
            if not draft.has_room(part, limits):
                if taken:
                    break
                whole = self._draft_unit(unit, late, bequeaths=True)
                batch.too_large = not draft.has_room(whole, limits)
                part = part if batch.too_large else whole
            draft.add(part)
            taken += 1
        for unit in units[taken:]:
            batch.late |= unit.list_members()
        if taken < len(units):
            batch.left_serial = units[taken].serial
        if not batch.too_large and not self._add_loose(draft, batch.late):
            batch.left_serial = 0
        return draft

    def _draft_unit(self, unit: Unit, late: Late, *, bequeaths: bool = False) -> Draft:
        draft = Draft()
        for node in unit.nodes:
            self._draft_node(draft, node, bequeaths=bequeaths)
            if node in self.pending.times:
                self._draft_times(draft, node)
        for node in unit.gone:
            self._draft_gone(draft, node)
        for change in unit.names:
            self._draft_name(draft, change, late)
        self._draft_extra(draft)
        return self._terms.complete(draft)

    def _add_loose(self, draft: Draft, late: Late) -> bool:
        """Add times, attributes and slots that belong to no unit while they fit; False if some are left."""
        for piece in list(self._split_loose(draft, late)):
            if not draft.has_room(self._terms.complete(piece), self._limits):
                return False
            draft.add(piece)
        return True

    def _split_loose(self, draft: Draft, late: Late) -> Iterator[Draft]:
        """Yield loose changes one by one. A slot that another host freed stays with its f record."""
        paired = set()
        for extent in self.core.dead:
            piece = Draft(dead=[extent], namespaces={extent.owner})
            key = schema.freed_key(self.core.geometry.slab_of(extent.addr), extent.addr, extent.generation)
            if self.pending.loose.changes.get(key, b"") is None:
                piece.extra[key] = None
                paired.add(key)
            self._draft_dead(piece, [extent])
            self._draft_extra(piece)
            yield piece
        with_unit = set(draft.times)
        for directory in self.pending.times:
            if not is_late(directory, late) and directory not in with_unit:
                piece = Draft()
                self._draft_times(piece, directory)
                yield piece
        for key, value in self._list_ready_extra(late).items():
            if key not in draft.extra and key not in paired:
                piece = Draft(extra={key: value})
                self._draft_extra(piece)
                yield piece

    def _group_units(self, late: Late) -> list[Unit]:
        """Group the changes that may be committed now into units, the oldest first."""
        groups = _Groups()
        changes: list[tuple[NameChange, Node | None]] = []
        for change in self.pending.names:
            if is_held(change.moved, late):
                continue
            if is_late(change.node, late):
                if change.may_go_first:
                    changes.append((change, groups.join(settlers(change.moved))))
                continue
            members = list(settlers(change.moved))
            if change.node is not None:
                members.append(change.node)
            if any(node.is_directory for node in members):
                members += [node for node in [self.core.nodes.get(change.parent)] if node in self.pending.dirty]
            changes.append((change, groups.join(members)))
        for node, others in self.pending.ties.others.items():
            if not is_late(node, late):
                groups.join((node, *others))
        units: dict[Node | None, Unit] = {}
        alone: list[Unit] = []
        for node, serial in self.pending.dirty.items():
            if node not in late:
                unit = units.setdefault(groups.find_first(node), Unit(serial=serial))
                unit.nodes.append(node)
                unit.serial = min(unit.serial, serial)
        for node, serial in self.pending.gone.items():
            unit = units.setdefault(groups.find_first(node), Unit(serial=serial))
            unit.gone.append(node)
            unit.serial = min(unit.serial, serial)
        for change, member in changes:
            home = units.get(groups.find_first(member)) if member is not None else None
            if home is None:
                alone.append(home := Unit())
            home.names.append(change)
        return sorted([*alone, *units.values()], key=lambda unit: unit.serial)


class _Groups:
    """Sets of inodes that belong together (union-find)."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def find_first(self, node: Node) -> Node:
        """The representative of the set of ``node``."""
        while (above := self._above.get(node, node)) is not node:
            node = above
        return node

    def join(self, nodes: Iterable[Node]) -> Node | None:
        """Join the sets of these inodes. Returns their representative; None for none."""
        top: Node | None = None
        for node in nodes:
            here = self.find_first(node)
            if top is None:
                top = here
            elif here is not top:
                self._above[here] = top
        return top
