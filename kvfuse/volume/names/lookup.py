"""Lookups and listings of names, which change none of them.

A lookup takes what the name's entry says (`Dentries`): a change that waits for a commit, or what the store is known to
have. Else it reads the record store, which may wait, and uses the answer only if no commit was settled meanwhile
(`Pending.epoch`).

Where other hosts write the store, too, `shared_lookup` finds names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from kvfuse import errors
from kvfuse.volume.api import NAME_MAX, ROOT_INODE, DirEntry
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import ABSENT, NameChange
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.pages import LEARN_ROWS, Learning
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound, last_key, scan_page

log = logging.getLogger(__name__)


class Found(msgspec.Struct, frozen=True, eq=False):
    """The inode of a name, and the state in which it was found."""

    node: Node | None
    stored: bool
    """the record store has a record of the name"""
    change: NameChange | None
    """the pending change that set it; None: it is as stored"""
    epoch: int
    """the journal's epoch at the lookup"""
    version: int = 0
    """in a shared volume: version of the name's stored record; 0: there is none"""


@dataclass
class Lookup:
    """Finds inodes by names and numbers, for a volume of one host; `SharedLookup` for shared ones. `Names` uses it."""

    core: Core
    journal: Journal
    refresher: Refresher

    def __post_init__(self) -> None:
        self.chunks = self.refresher.chunks
        self.learning = Learning(self.core, self.journal, self.refresher)

    # -- finding -------------------------------------------------------------------------------------

    def is_strict(self, directory: Node) -> bool:
        """Calls that change names in the directory return after their commit."""
        if directory.flags & schema.FLAG_STRICT:
            return True
        return self.core.strict and not directory.flags & schema.FLAG_RELAXED

    def asks(self, parent: int) -> bool:
        """Each lookup in the directory asks the store. Never in a volume of one host."""
        return False

    def is_doubtful(self, ino: int) -> bool:
        """The kernel must not cache the attributes of the inode, because its name is unchecked."""
        return False

    async def current(self, ino: int) -> Node:
        """`node` for an inode that the kernel reached by a path. Stale; in shared volumes Moved."""
        return self.core.nodes.get(ino) or await self.node(ino)

    async def current_directory(self, ino: int) -> Node:
        """`directory` for one that the kernel reached by a path. Stale, NotADirectory."""
        return await self.directory(ino)

    async def node(self, ino: int) -> Node:
        """The inode, read from the store if need be. Stale: it was removed."""
        node = self.core.nodes.get(ino)
        while node is None:
            epoch = self.journal.pending.epoch
            place = self.core.places.get(ino)
            keys = [schema.inode_key(ino), schema.times_key(ino)]
            if place is not None and place[1]:
                keys.append(schema.entry_key(*place))
            own, times, *entry = await self.core.records.get(keys)
            node = self.core.nodes.get(ino)
            if node is not None or epoch != self.journal.pending.epoch:
                continue
            parent, name = place or (0, b"")
            if own is not None:
                node = self._materialise(schema.decode_inode(own.value), own.version, parent, name, own=True)
                if times is not None:
                    self.refresher.take_times(node, times.value, times.version)
            elif entry and entry[0] is not None:
                record = schema.decode_entry(entry[0].value)
                if isinstance(record, schema.InodeRecord) and record.ino == ino:
                    node = self._materialise(record, entry[0].version, parent, name, own=False)
            if node is None:
                raise errors.Stale(f"inode {ino} was removed")
        return node

    async def directory(self, ino: int) -> Node:
        node = self.core.nodes.get(ino) or await self.node(ino)
        if not node.is_directory:
            raise errors.NotADirectory(f"inode {ino} is not a directory")
        return node

    async def find(self, parent: int, name: bytes) -> Found:
        """The inode of ``name`` in ``parent``, valid until the caller's next await. NameTooLong, EngineError."""
        if len(name) > NAME_MAX:
            raise errors.NameTooLong(f"a name of {len(name)} bytes: at most {NAME_MAX} are allowed")
        core = self.core
        while True:
            epoch = self.journal.pending.epoch
            dentry = core.dentries.find(parent, name)
            if dentry is not None:
                if (change := dentry.change) is not None:
                    return Found(change.node, change.stored, change, epoch)
                if dentry is ABSENT:
                    return Found(None, False, None, epoch)
                if (node := core.nodes.get(dentry.ino)) is not None:
                    return Found(node, True, None, epoch)
            record = (await core.records.get([schema.entry_key(parent, name)]))[0]
            if record is None:
                await self.learning.read_page(parent)
            if core.dentries.get(parent, name).change is not None or epoch != self.journal.pending.epoch:
                continue
            if record is None:
                return Found(None, False, None, epoch)
            entry = schema.decode_entry(record.value)
            if isinstance(entry, schema.InodeRecord):
                node = self._materialise(entry, record.version, parent, name, own=False)
            else:
                node = core.nodes.get(entry)
            if node is None:
                assert isinstance(entry, int)
                core.places.set(entry, parent, name)
                node = await self.node(entry)
                if core.dentries.get(parent, name).change is not None or epoch != self.journal.pending.epoch:
                    continue
            node.parent, node.name = parent, name
            core.dentries.note(parent, name, node.ino)
            return Found(node, True, None, epoch)

    async def exist(self, parent: int, names: list[bytes]) -> list[bool]:
        """For each name: whether it exists in a directory, all at one time. Does not wait if all its names are known.

        Known names are hashes of 64 bits: an absent name is reported as existing only if its hash collides.
        """
        while True:
            epoch = self.journal.pending.epoch
            stored_names = self.core.dentries.stored_in(parent)
            if stored_names.complete:
                found = stored_names.contain(names)
            else:
                rows = await get_sound(self.core.records, [schema.entry_key(parent, name) for name in names])
                await self.learning.read_page(parent, max(LEARN_ROWS, 4 * len(names)))
                if epoch != self.journal.pending.epoch:
                    continue
                found = [row is not None for row in rows]
            if changes := self.core.dentries.changes_in(parent):
                changed = [changes.get(name) for name in names]
                found = [
                    stored if change is None else change.node is not None
                    for stored, change in zip(found, changed, strict=True)
                ]
            return found

    def holds(self, parent: int, name: bytes, found: Found) -> bool:
        """The result of `find` is still valid, although the caller has waited since."""
        change = self.core.dentries.get(parent, name).change
        return change is found.change and (change is not None or found.epoch == self.journal.pending.epoch)

    def _materialise(self, record: schema.InodeRecord, version: int, parent: int, name: bytes, *, own: bool) -> Node:
        """The node of a record; if memory has the inode, its node, which is newer."""
        if self.core.shared:
            return self.refresher.take(record, version, (parent, name), own=own)
        node = self.core.nodes.get(record.ino)
        if node is None:
            node = self.core.nodes.add(self.chunks.restore_chunks(Node.from_record(record), record))
            node.own_record = own
            if name:
                node.parent, node.name = parent, name
        return node

    async def by_name(self, parent: int, name: bytes) -> Node:
        self.core.counters.lookups += 1
        if name == b".":
            return await self.directory(parent)
        if name == b"..":
            return await self.node((await self.directory(parent)).parent or ROOT_INODE)
        found = await self.find(parent, name)
        if found.node is None:
            self.core.counters.absent_lookups += 1
            raise errors.NotFound(name)
        return found.node

    def count_lookup(self, node: Node) -> Node:
        """Raise the kernel's lookup count of the inode. Returns the node."""
        self.core.places.add(node.ino, node.parent, node.name)
        return node

    def forget(self, ino: int, count: int) -> Node | None:
        """The kernel dropped ``count`` references. Returns the inode if it must be freed now: no name, not open."""
        if self.core.places.forget(ino, count):
            node = self.core.nodes.get(ino)
            if node is not None and node.nlink == 0 and not node.handles:
                return node
        return None

    # -- listing -------------------------------------------------------------------------------------

    async def list_directory(self, ino: int, after: int, limit: int) -> list[DirEntry]:
        """Entries behind the cookie ``after``, in the order of their cookies; see `TreeApi`.

        A name whose record is damaged is left out (the log names it), so that its neighbours can be listed.
        """
        await self.directory(ino)
        entries: list[DirEntry] = []
        while len(entries) < limit:
            epoch = self.journal.pending.epoch
            start = schema.entry_after(ino, after)
            rows, damaged = await scan_page(self.core.records, schema.entry_prefix(ino), start, limit)
            if epoch != self.journal.pending.epoch:
                continue
            more = len(rows) + len(damaged) == limit
            last = schema.split_entry_key(last_key(rows, damaged))[1] if more else (1 << 63) - 1
            page: dict[bytes, Node | schema.InodeRecord | int] = {}
            for row in rows:
                name = schema.split_entry_key(row.key)[2]
                try:
                    entry = schema.decode_entry(row.value)
                except schema.Malformed as error:
                    log.error("%s", error)
                    continue
                if self.core.shared and isinstance(entry, schema.InodeRecord):
                    page[name] = self._listed(entry, row.version, ino, name)
                else:
                    page[name] = entry
            for name, change in self.core.dentries.changes_in(ino).items():
                if after < schema.name_hash(name) <= last:
                    if change.node is None:
                        page.pop(name, None)
                    else:
                        page[name] = change.node
            entries += await self._entries(ino, page)
            if not more:
                break
            after = last
        return entries

    async def _entries(self, ino: int, page: dict[bytes, Node | schema.InodeRecord | int]) -> list[DirEntry]:
        entries = []
        if self.core.shared:
            await self._read_own([entry for entry in page.values() if isinstance(entry, int)])
        for cookie, name in sorted([(schema.name_hash(name), name) for name in page]):
            try:
                node = await self._entry_node(page[name], ino, name)
                if node is None or not node.nlink:  # removed meanwhile; another inode may have the name
                    node = (await self.find(ino, name)).node
            except errors.Corrupt:
                continue
            if node is not None and node.nlink:
                entries.append(DirEntry(name, cookie, node))
        return entries

    async def _entry_node(self, entry: Node | schema.InodeRecord | int, parent: int, name: bytes) -> Node | None:
        """The inode of a listed name; None where it is gone."""
        if isinstance(entry, Node):
            return entry
        if isinstance(entry, schema.InodeRecord):
            return self.core.nodes.get(entry.ino) or self._shown(entry, parent, name)
        try:
            node = await self.node(entry)
        except errors.Stale:
            return None
        if not (self.core.shared and node.is_directory):  # where that is its record says, which may be newer
            node.parent, node.name = parent, name
        return node

    async def _read_own(self, inodes: list[int]) -> None:
        """Have inodes with records of their own in memory, as they are now, by one question."""
        keys = [key for ino in inodes for key in (schema.inode_key(ino), schema.times_key(ino))]
        rows = await get_sound(self.core.records, keys) if keys else []
        for own, times in zip(rows[::2], rows[1::2], strict=True):
            if own is not None:
                node = self._materialise(schema.decode_inode(own.value), own.version, 0, b"", own=True)
                if times is not None:
                    self.refresher.take_times(node, times.value, times.version)

    def _listed(self, record: schema.InodeRecord, version: int, parent: int, name: bytes) -> Node:
        """The node of a row that was just read, which may be newer than what is in memory."""
        if self.core.nodes.get(record.ino) is not None:
            return self.refresher.take(record, version, (parent, name), own=False)
        node = self._shown(record, parent, name)
        node.version, node.base = version, record
        return node

    def _shown(self, record: schema.InodeRecord, parent: int, name: bytes) -> Node:
        """A node for a listing; it is kept only when the kernel takes it (`count_lookup`)."""
        node = self.chunks.restore_chunks(Node.from_record(record), record)
        node.parent, node.name = parent, name
        return node

    async def is_empty(self, ino: int) -> bool:
        """The directory has no name here, and none in the store that a pending change does not remove."""
        after = b""
        while True:
            epoch = self.journal.pending.epoch
            rows = await self.core.records.scan(schema.entry_prefix(ino), after, 64)
            if epoch != self.journal.pending.epoch:
                continue
            changes = self.core.dentries.changes_in(ino)
            if any(change.node is not None for change in changes.values()):
                return False
            for row in rows:
                if schema.split_entry_key(row.key)[2] not in changes:
                    return False
            if len(rows) < 64:
                return True
            after = rows[-1].key
