"""Turns a plan into a transaction: puts, deletes, expected versions, and effects on memory afterwards.

It builds them from the stored records (`Node.base`, `Node.version`), not from inodes in memory: those may have changes
that the journal will store later, with bytes that have no slots yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.inodes.metadata_budget import TIMES_WEIGHT, growth, inode_weight, weight
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.plans import End, Plan
from kvfuse.volume.store import schema
from kvfuse.volume.store.transaction import Transaction


class InodeChange:
    """The new record of one inode, and the key of that record."""

    __slots__ = ("before", "name", "node", "own", "parent", "record")

    def __init__(self, node: Node, record: schema.InodeRecord) -> None:
        self.node = node
        self.record = record
        self.own = node.own_record
        self.parent = node.parent
        self.name = node.name
        self.before = self.key
        """key of the record before the change"""

    def set_fields(self, **values: object) -> None:
        """Replace fields of the record."""
        self.record = msgspec.structs.replace(self.record, **values)

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return schema.inode_key(self.node.ino) if self.own else schema.entry_key(self.parent, self.name)

    def put(self, puts: dict[bytes, bytes]) -> None:
        schema.put_inode(puts, self.record, None if self.own else (self.parent, self.name))

    def apply(self, version: int) -> None:
        """Note in memory that the inode is stored so. Its other changes stay pending.

        Skips an inode that was read since, as another host changed it again, or removed, which is noted without a
        version.
        """
        node, record = self.node, self.record
        if node.version > version or not node.nlink:
            return
        node.base, node.version, node.stored = record, version, True
        node.own_record, node.nlink = self.own, record.nlink
        node.parent, node.name = self.parent, self.name
        node.namespace = record.namespace
        if not node.is_directory:
            node.ctime = max(node.ctime, record.ctime)
        else:
            node.flags = node.flags & ~schema.FLAG_LEAVING | record.flags & schema.FLAG_LEAVING


class PlanDraft:
    """The records of one plan. Each attempt makes its own, before it looks anything up.

    ``client``: the remover, in orphan records. ``delegated``: see `Dentries`.
    """

    def __init__(self, client: int, delegated: Mapping[int, int]) -> None:
        self.client = client
        self._delegated = delegated
        self.inodes: dict[int, InodeChange] = {}
        self.names: list[tuple[int, bytes, Node | None]] = []
        """(directory, name, its new inode)"""
        self.made: list[Node] = []
        self.removed: list[Node] = []
        self.expected: dict[bytes, int] = {}
        """versions by key, as they were read"""
        self._puts: dict[bytes, bytes] = {}
        self._deletes: set[bytes] = set()
        self.is_stale = False
        """another host has changed a record from which it is built"""

    def _expect_key(self, key: bytes, version: int) -> None:
        if self.expected.setdefault(key, version) != version:
            self.is_stale = True

    def expect_all(self, versions: Mapping[bytes, int]) -> None:
        """Expect these versions (by key)."""
        for key, version in versions.items():
            self._expect_key(key, version)

    def expect_inode(self, node: Node) -> None:
        """Expect the inode's record as it is known here."""
        key = schema.inode_key(node.ino) if node.own_record else schema.entry_key(node.parent, node.name)
        self._expect_key(key, node.version)

    def expect_name(self, end: End) -> None:
        """Expect the name's record as it was read, or as this host has stored the inode in it since."""
        node, place, version = end.found.node, (end.directory.ino, end.name), end.found.version
        if node is not None and node.nlink and not node.own_record and (node.parent, node.name) == place:
            version = node.version or version
        self._expect_key(schema.entry_key(*place), version)

    def change_inode(self, node: Node) -> InodeChange:
        """Have the inode's record put. Returns the change, for the caller to fill."""
        change = self.inodes.get(node.ino)
        if change is None:
            assert node.base is not None, f"inode {node.ino} is not stored"
            self.expect_inode(node)
            change = self.inodes[node.ino] = InodeChange(node, node.base)
        return change

    def store(self, records: Mapping[bytes, bytes | None]) -> None:
        """Put or delete (None) these records, too, whatever they are."""
        self._puts.update({key: value for key, value in records.items() if value is not None})
        self._deletes.update([key for key, value in records.items() if value is None])

    def add(self, plan: Plan, now: int) -> None:
        """Add all changes of a plan."""
        changed = list(zip(plan.ends, plan.means, strict=False))
        counts = dict.fromkeys([end.directory for end, node in changed if node is not None], 0) | dict(plan.counts)
        for directory, more in counts.items():
            self._enter_directory(directory, more)
        lost, made = plan.unlinked or plan.removed, plan.made
        if made is not None:
            self.inodes[made.ino] = InodeChange(made, made.record())
            self.made.append(made)
            if made.is_directory:
                self._puts[schema.times_key(made.ino)] = schema.encode_times(made.atime, made.mtime, made.ctime)
        elif plan.linked is not None:
            self._add_link(plan.linked)
        elif lost is not None:
            self._remove_name(lost, now)
        for end, node in changed:
            self._set_name(end, node)
            if node is not None and node is not made:
                self.change_inode(node).set_fields(ctime=now)

    def _enter_directory(self, directory: Node, more: int) -> None:
        """Change the number of directories by ``more``, and expect the record, so that the directory is not removed."""
        self.expect_inode(directory)
        if more or (directory.base is not None and directory.base.flags & schema.FLAG_LEAVING):
            change = self.change_inode(directory)
            change.set_fields(nlink=change.record.nlink + more, flags=change.record.flags & ~schema.FLAG_LEAVING)

    def _add_link(self, node: Node) -> None:
        """Add a name. The record moves from the only name, which becomes a reference, to a key of its own."""
        change = self.change_inode(node)
        change.set_fields(nlink=change.record.nlink + 1)
        if not change.own:
            self._give_own_record(change)
            self._put_name(change)

    def _give_own_record(self, change: InodeChange) -> None:
        """Also to a file that leaves its directory: hosts that have it open find it by its number, and follow it."""
        change.own = True
        self._expect_key(schema.inode_key(change.node.ino), ABSENT)

    def _remove_name(self, node: Node, now: int) -> None:
        """Remove a name of a file, or a directory. The last name leaves an orphan record of file and attributes."""
        change = self.change_inode(node)
        change.set_fields(nlink=0 if node.is_directory else change.record.nlink - 1, ctime=now)
        if change.record.nlink:
            return
        self.removed.append(node)
        if change.own:
            self._deletes.add(schema.inode_key(node.ino))
        if node.is_directory:
            self._deletes.add(schema.times_key(node.ino))
            if self._expect_delegation(node.ino):
                self._deletes.add(schema.delegation_key(node.ino))
            if node.namespace == node.ino:
                self._deletes.update(schema.namespace_keys(node.ino))
                self._deletes.add(schema.use_key(node.ino, self.client))
        if not node.is_directory or change.record.flags & schema.FLAG_XATTRS:
            self._puts[schema.orphan_key(node.ino)] = schema.encode_orphan(change.record, self.client)

    def _set_name(self, end: End, node: Node | None) -> None:
        """Change the inode of a name (None: remove it), expecting its record as it was read."""
        parent, name = end.directory.ino, end.name
        key = schema.entry_key(parent, name)
        self.expect_name(end)
        if node is None:
            self._deletes.add(key)
            self.names.append((parent, name, None))
            return
        self._deletes.discard(key)
        self._expect_delegation(parent)
        change = self.change_inode(node)
        if not change.own and node not in self.made and change.parent != parent:
            self._give_own_record(change)
        change.parent, change.name = parent, name
        if node.is_directory:
            change.set_fields(parent=parent)
        self._put_name(change)

    def _expect_delegation(self, directory: int) -> int:
        """Expect that no other host alone adds names to the directory. The version of this host's delegation of it."""
        version = self._delegated.get(directory, ABSENT)
        self._expect_key(schema.delegation_key(directory), version)
        return version

    def _put_name(self, change: InodeChange) -> None:
        if change.own:
            key = schema.entry_key(change.parent, change.name)
            self._puts[key] = schema.encode_entry_reference(change.node.ino)
        self.names.append((change.parent, change.name, change.node))

    @property
    def is_empty(self) -> bool:
        return not self.inodes

    def make_transaction(self, applied: Callable[[int], None]) -> Transaction:
        """``applied`` is called as `Transaction.applied` says, after the inodes were changed in memory."""
        puts = dict(self._puts)
        for change in self.inodes.values():
            if change.record.nlink:
                change.put(puts)

        def apply(version: int) -> None:
            for change in self.inodes.values():
                change.apply(version)
            applied(version)

        files, deletes = len(self.made) - len(self.removed), self._deletes - puts.keys()
        size = growth(puts, deletes, self._weigh_before())
        return Transaction(self.expected, puts, deletes, apply, files, size, self._count_uses())

    def _count_uses(self) -> dict[int, schema.Counts]:
        counts = Counter([node.namespace for node in self.made if node.is_file and node.namespace])
        counts.subtract([node.namespace for node in self.removed if node.is_file and node.namespace])
        return {number: schema.Counts(count, 0) for number, count in counts.items() if count}

    def _weigh_before(self) -> dict[bytes, int]:
        """Weights, by key, of stored records that may be replaced: names, inodes, times of removed directories."""
        names = {key for key, version in self.expected.items() if key[:1] == b"d" and version != ABSENT}
        before = {key: weight(len(key), schema.REFERENCE_SIZE) for key in names}
        before |= {key: TIMES_WEIGHT for key in self._deletes if key[:1] == b"t"}
        for change in self.inodes.values():
            if change.node not in self.made:
                before[change.before] = inode_weight(len(change.before), len(change.record.target))
        return before
