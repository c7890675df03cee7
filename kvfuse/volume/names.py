"""Names and inodes: lookup, creation, links, removal, rename, listings.

Every change follows one shape: read what is needed (this may wait), look again at what may have
changed meanwhile, then change memory between two awaits and tell the journal. Strict folders then wait
for the commit; relaxed ones return.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import NamedTuple

from kvfuse import errors
from kvfuse.volume import clock, schema
from kvfuse.volume.api import (
    LINK_MAX,
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INODE,
    SYMLINK_MAX,
    Caller,
    DirEntry,
)
from kvfuse.volume.content import Content
from kvfuse.volume.core import Core
from kvfuse.volume.journal import Journal, NameChange
from kvfuse.volume.node import Node

LEARN_ROWS = 256
"""Entries read from a directory each time that a name is missed in it, until all are known."""


class Found(NamedTuple):
    """What a name means, and where that was seen."""

    node: Node | None
    stored: bool
    """the record store has a record of the name"""
    change: NameChange | None
    """the entry of the overlay that said so; None: the store did"""
    epoch: int
    """of the journal, when it was seen"""


@dataclass
class Names:
    """See the module."""

    core: Core
    journal: Journal
    content: Content

    # -- finding -------------------------------------------------------------------------------------

    async def node(self, ino: int) -> Node:
        """The inode in memory. Stale, when it is gone."""
        node = self.core.nodes.get(ino)
        while node is None:
            epoch = self.journal.epoch
            place = self.core.places.get(ino)
            keys = [schema.inode_key(ino), schema.times_key(ino)]
            if place is not None and place[1]:
                keys.append(schema.entry_key(*place))
            own, times, *entry = await self.core.records.get(keys)
            node = self.core.nodes.get(ino)
            if node is not None or epoch != self.journal.epoch:
                continue
            parent, name = place or (0, b"")
            if own is not None:
                node = self._materialise(schema.decode_inode(own.value), parent, name, own=True)
                if times is not None:
                    node.atime, node.mtime, node.ctime = schema.decode_times(times.value)
            elif entry and entry[0] is not None:
                record = schema.decode_entry(entry[0].value)
                if isinstance(record, schema.InodeRecord) and record.ino == ino:
                    node = self._materialise(record, parent, name, own=False)
            if node is None:
                raise errors.Stale(f"inode {ino} is gone")
        return node

    async def directory(self, ino: int) -> Node:
        node = await self.node(ino)
        if not node.is_directory:
            raise errors.NotADirectory(f"inode {ino} is no directory")
        return node

    async def find(self, parent: int, name: bytes) -> Found:
        """What ``name`` in ``parent`` means now: true until the caller's next await."""
        if len(name) > NAME_MAX:
            raise errors.NameTooLong(f"a name of {len(name)} bytes: at most {NAME_MAX} are allowed")
        core = self.core
        while True:
            change = self.journal.find(parent, name)
            if change is not None:
                return Found(change.node, change.stored, change, self.journal.epoch)
            epoch = self.journal.epoch
            ino = core.known.inode(parent, name)
            node = core.nodes.get(ino) if ino is not None else None
            if node is not None:
                return Found(node, True, None, epoch)
            cookie = schema.name_hash(name)
            if core.known.is_absent(parent, cookie):
                return Found(None, False, None, epoch)
            record = (await core.records.get([schema.entry_key(parent, name, cookie)]))[0]
            if record is None:
                await self._learn(parent)
            if self.journal.find(parent, name) is not None or epoch != self.journal.epoch:
                continue
            if record is None:
                return Found(None, False, None, epoch)
            entry = schema.decode_entry(record.value)
            if isinstance(entry, schema.InodeRecord):
                node = self._materialise(entry, parent, name, own=False)
            else:
                node = core.nodes.get(entry)
            if node is None:
                assert isinstance(entry, int)
                core.places.set(entry, parent, name)
                node = await self.node(entry)
                if self.journal.find(parent, name) is not None or epoch != self.journal.epoch:
                    continue
            node.parent, node.name = parent, name
            core.known.note(parent, name, node.ino)
            return Found(node, True, None, epoch)

    async def _learn(self, parent: int) -> None:
        """Read a page of a directory in which a name was missed, so that later ones need not be asked for."""
        after = self.core.known.next_page(parent)
        if after is None:
            return
        epoch = self.journal.epoch
        rows = await self.core.records.scan(schema.entry_prefix(parent), after, LEARN_ROWS)
        if epoch == self.journal.epoch and self.core.known.next_page(parent) == after:
            self.core.known.learn(parent, [row.key for row in rows], last=len(rows) < LEARN_ROWS)

    def _holds(self, parent: int, name: bytes, found: Found) -> bool:
        """What `find` said is still so, although the caller has waited since."""
        change = self.journal.find(parent, name)
        return change is found.change and (change is not None or found.epoch == self.journal.epoch)

    async def find_existing(self, parent: int, name: bytes) -> tuple[Node, bool]:
        """(node, stored) of a name that exists. NotFound."""
        found = await self.find(parent, name)
        if found.node is None:
            raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
        return found.node, found.stored

    def _materialise(self, record: schema.InodeRecord, parent: int, name: bytes, *, own: bool) -> Node:
        """The node of a record; the one in memory, if it is there already (it is newer)."""
        node = self.core.nodes.get(record.ino)
        if node is None:
            node = self.core.nodes.add(self.content.restore_chunks(Node.from_record(record), record))
            node.own_record = own
            if name:
                node.parent, node.name = parent, name
        return node

    async def lookup(self, parent: int, name: bytes) -> Node:
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
        """The kernel gets to know the inode, or counts it once more."""
        self.core.places.add(node.ino, node.parent, node.name)
        return node

    def forget(self, ino: int, count: int) -> None:
        if self.core.places.forget(ino, count):
            node = self.core.nodes.get(ino)
            if node is not None and node.nlink == 0 and not node.handles:
                self.core.nodes.drop(ino)

    # -- publishing ----------------------------------------------------------------------------------

    def is_strict(self, directory: Node) -> bool:
        if directory.flags & schema.FLAG_STRICT:
            return True
        return self.core.strict and not directory.flags & schema.FLAG_RELAXED

    async def publish(self, directory: Node, *nodes: Node) -> None:
        """After a change in ``directory``: wait for its commit where the folder, or a crowd of changes, asks for it."""
        if self.is_strict(directory):
            await self.journal.commit(*nodes)
        elif self.journal.crowded:
            await self.journal.commit()

    # -- creating ------------------------------------------------------------------------------------

    async def _free_name(self, parent: int, name: bytes) -> tuple[Node, bool]:
        """(directory, stored) where ``name`` may be created. NotFound, if the directory was removed."""
        directory = await self.directory(parent)
        found = await self.find(parent, name)
        if found.node is not None:
            raise errors.Exists(f"{name!r} exists in directory {parent}")
        if directory.nlink == 0:
            raise errors.NotFound(f"directory {parent} was removed")
        return directory, found.stored

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b""
    ) -> tuple[Node, Node]:
        """(directory, new inode) of any type; not yet published. The inode is counted as looked up."""
        if len(target) > SYMLINK_MAX:
            raise errors.NameTooLong(f"a symbolic link's target of {len(target)} bytes: at most {SYMLINK_MAX}")
        directory, stored = await self._free_name(parent, name)
        core = self.core
        gid = directory.gid if directory.mode & stat.S_ISGID else caller.gid
        node = Node(core.inodes.next(), mode, caller.uid, gid, core.chunk_size_in(directory))
        node.rdev, node.target = rdev, target
        node.size = len(target)
        node.parent, node.name = parent, name
        node.atime = node.mtime = node.ctime = clock.now()
        if node.is_directory:
            node.own_record = True
            node.nlink = 2
            node.mode |= directory.mode & stat.S_ISGID
            node.flags = directory.flags & (schema.FLAG_STRICT | schema.FLAG_RELAXED)
            directory.nlink += 1
            self.journal.touch(directory)
            self.journal.touch_times(node)
            core.known.made(node.ino)
        core.nodes.add(node)
        core.file_count += 1
        core.counters.creates += 1
        self.journal.set_name(parent, name, node, stored)
        self.journal.touch(node)
        self._changed(directory)
        return directory, self.count_lookup(node)

    async def link(self, ino: int, parent: int, name: bytes) -> tuple[Node, Node]:
        """(directory, inode): another name for a file; not yet published."""
        node = await self.node(ino)
        if node.is_directory:
            raise errors.NotPermitted(f"inode {ino} is a directory: it has one name only")
        directory, stored = await self._free_name(parent, name)
        if node.nlink == 0:
            raise errors.NotFound(f"inode {ino} was removed")
        if node.nlink >= LINK_MAX:
            raise errors.TooManyLinks(f"inode {ino} has {LINK_MAX} names, it may not have more")
        if not node.own_record:
            # The record moves from the name to a key of its own; the first name becomes a reference.
            node.own_record = True
            self.journal.set_name(node.parent, node.name, node, node.stored or node.committing)
        node.nlink += 1
        node.ctime = clock.now()
        self.journal.set_name(parent, name, node, stored)
        self.journal.touch(node, forced=True)
        self._changed(directory)
        return directory, self.count_lookup(node)

    def _changed(self, directory: Node) -> None:
        """Entries of the directory changed."""
        directory.mtime = directory.ctime = clock.now()
        self.journal.touch_times(directory)

    # -- removing ------------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> tuple[Node, Node]:
        """(directory, inode) after the name is gone; not yet published."""
        directory = await self.directory(parent)
        while True:
            node, stored = await self.find_existing(parent, name)
            if node.is_directory:
                raise errors.IsADirectory(f"{name!r} is a directory")
            if self._needs_loading(node):
                await self.load_for_removal(node)
            elif not await self.journal.untie(node):
                break
        self.core.counters.removes += 1
        self.journal.set_name(parent, name, None, stored, moved=node if node.nlink > 1 else None)
        self._drop_link(node)
        self._changed(directory)
        return directory, node

    async def remove_directory(self, parent: int, name: bytes) -> tuple[Node, Node]:
        directory = await self.directory(parent)
        while True:
            found = await self.find(parent, name)
            node = found.node
            if node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
            if not node.is_directory:
                raise errors.NotADirectory(f"{name!r} is no directory")
            if self._needs_loading(node):
                await self.load_for_removal(node)
                continue
            await self._check_empty(node, name)
            if self._holds(parent, name, found):
                break
        self.core.counters.removes += 1
        self.journal.set_name(parent, name, None, found.stored)
        self._drop_directory(directory, node)
        self._changed(directory)
        return directory, node

    async def _check_empty(self, directory: Node, name: bytes) -> None:
        """NotEmpty, unless the directory may be removed. What was moved out of it is gone from the store then."""
        if leaving := self._leaving(directory):
            await self.journal.commit(*leaving)
        if not await self._is_empty(directory.ino):
            raise errors.NotEmpty(f"directory {name!r} is not empty")

    def _leaving(self, directory: Node) -> list[Node]:
        """Inodes moved out of the directory whose commit may yet have to wait for bytes."""
        changes = self.journal.overlay.get(directory.ino, {}).values()
        moved = [change.moved for change in changes if change.moved is not None]
        return [node for node in moved if node.writers or node.staged_count]

    async def _is_empty(self, ino: int) -> bool:
        """No entry in the overlay, none in the store that the overlay does not take away."""
        after = b""
        while True:
            epoch = self.journal.epoch
            rows = await self.core.records.scan(schema.entry_prefix(ino), after, 64)
            if epoch != self.journal.epoch:
                continue
            changes = self.journal.overlay.get(ino, {})
            if any(change.node is not None for change in changes.values()):
                return False
            for row in rows:
                if schema.split_entry_key(row.key)[2] not in changes:
                    return False
            if len(rows) < 64:
                return True
            after = rows[-1].key

    def _needs_loading(self, node: Node) -> bool:
        """Records that go with the inode are not known yet."""
        flags = schema.FLAG_CHUNK_RECORDS | schema.FLAG_XATTRS
        return bool(node.flags & flags) and node.nlink == (2 if node.is_directory else 1) and not node.complete

    async def load_for_removal(self, node: Node) -> None:
        """Have in memory all that has to be removed with the inode."""
        await self.content.load_all(node)
        if node.flags & schema.FLAG_XATTRS:
            after = b""
            while rows := await self.core.records.scan(schema.xattr_prefix(node.ino), after):
                node.xattr_names |= {schema.xattr_name(row.key) for row in rows}
                after = rows[-1].key
        node.complete = True

    def _drop_link(self, node: Node, heir: Node | None = None) -> None:
        node.nlink -= 1
        node.ctime = clock.now()
        if node.nlink:
            self.journal.touch(node, forced=True)
        else:
            self._removed(node, heir)

    def _drop_directory(self, parent: Node, node: Node) -> None:
        node.nlink = 0
        parent.nlink -= 1
        self.journal.touch(parent)
        self._removed(node)

    def _removed(self, node: Node, heir: Node | None = None) -> None:
        """The last name is gone: free everything, or note an orphan while the file is open.

        ``heir``: the file that took the name. What is freed then is freed in the commit that gives it the name.
        """
        self.core.file_count -= 1
        records: dict[bytes, bytes | None] = node.extra
        if node.own_record:
            records[schema.inode_key(node.ino)] = None
        if node.is_directory:
            records[schema.times_key(node.ino)] = None
            self.core.known.removed(node.ino)
        if node.handles and (node.stored or node.committing):
            records[schema.orphan_key(node.ino)] = schema.encode_inode(node.orphan_record())
        elif not (node.stored or node.committing):
            for name in node.xattr_names:  # their puts may be under way, and nothing else tells of the inode
                self.journal.put(schema.xattr_key(node.ino, name), None)
        node.heir = heir
        self._pass_on(node, records, heir)
        node.extra = {}
        if not node.handles:
            self.reap(node, heir)

    def _pass_on(self, node: Node, records: dict[bytes, bytes | None], heir: Node | None) -> None:
        """What an inode leaves behind when it goes: slots and records, to its heir or to the next commit."""
        if heir is not None:
            heir.dead += node.dead
            heir.extra.update(records)
        else:
            self.core.dead += node.dead
            for key, value in records.items():
                self.journal.put(key, value)
        node.dead = []

    def reap(self, node: Node, heir: Node | None = None) -> None:
        """Free what an inode without names and handles has. Everything must be loaded."""
        later = node.heir
        while later is not None:
            if schema.orphan_key(node.ino) in later.extra:
                heir = later  # the store still has the name: the slots may not be freed before that changes
            later = later.heir
        records = self.content.drop_all(node)
        for name in node.xattr_names:
            records[schema.xattr_key(node.ino, name)] = None
        if node.stored or node.committing:
            records[schema.orphan_key(node.ino)] = None
        self._pass_on(node, records, heir)
        if not self.core.places.known(node.ino):
            self.core.nodes.drop(node.ino)

    # -- renaming ------------------------------------------------------------------------------------

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> tuple[Node, Node, Node]:
        """(old directory, new directory, inode); not yet published."""
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise errors.InvalidArgument(f"rename flags {flags:#x} are not offered")
        source_directory = await self.directory(parent)
        target_directory = await self.directory(new_parent)
        while True:
            source = await self.find(parent, name)
            target = await self.find(new_parent, new_name)
            node, other = source.node, target.node
            if node is None or (flags == RENAME_EXCHANGE and other is None):
                raise errors.NotFound(f"{name if node is None else new_name!r} does not exist")
            if other is not None and flags != RENAME_EXCHANGE and other is not node:
                await self._check_replace(node, other, new_name, flags)
                if self._needs_loading(other):
                    await self.load_for_removal(other)
                    continue
            if await self._is_inside(target_directory, node) or (
                flags == RENAME_EXCHANGE and other is not None and await self._is_inside(source_directory, other)
            ):
                raise errors.InvalidArgument(f"directory {name!r} cannot go into itself")
            if await self.journal.untie(node, *([other] if other is not None else [])):
                continue
            if self._holds(parent, name, source) and self._holds(new_parent, new_name, target):
                break
        if target_directory.nlink == 0:
            raise errors.NotFound(f"directory {new_parent} was removed")
        self.core.counters.renames += 1
        if flags == RENAME_NOREPLACE and other is not None:
            raise errors.Exists(f"{new_name!r} exists")
        if other is node:
            return source_directory, target_directory, node
        if flags == RENAME_EXCHANGE and other is not None:
            self._move(other, target_directory, source_directory, name)
            self.journal.set_name(parent, name, other, source.stored)
        else:
            self.journal.set_name(parent, name, None, source.stored, moved=node)
            if other is not None and other.is_directory:
                self._drop_directory(target_directory, other)
            elif other is not None:
                self._drop_link(other, heir=node)
        if other is not None and other.nlink:
            self.journal.tie(node, other)
        self._move(node, source_directory, target_directory, new_name)
        self.journal.set_name(new_parent, new_name, node, target.stored)
        self._changed(source_directory)
        self._changed(target_directory)
        return source_directory, target_directory, node

    async def _check_replace(self, node: Node, other: Node, new_name: bytes, flags: int) -> None:
        if flags == RENAME_NOREPLACE:
            raise errors.Exists(f"{new_name!r} exists")
        if other.is_directory:
            if not node.is_directory:
                raise errors.IsADirectory(f"{new_name!r} is a directory")
            await self._check_empty(other, new_name)
        elif node.is_directory:
            raise errors.NotADirectory(f"{new_name!r} is no directory")

    async def _is_inside(self, directory: Node, node: Node) -> bool:
        """``directory`` is ``node`` or below it."""
        if not node.is_directory:
            return False
        here = directory
        while here is not node:
            if here.ino == ROOT_INODE:
                return False
            here = await self.node(here.parent or ROOT_INODE)
        return True

    def _move(self, node: Node, old: Node, new: Node, name: bytes) -> None:
        if node.is_directory and old is not new:
            old.nlink -= 1
            new.nlink += 1
            self.journal.touch(old)
            self.journal.touch(new)
        node.parent, node.name = new.ino, name
        node.ctime = clock.now()
        self.core.places.set(node.ino, new.ino, name)
        self.journal.touch(node, forced=True)
        if node.is_directory:
            self.journal.touch_times(node)

    # -- listing -------------------------------------------------------------------------------------

    async def list_directory(self, ino: int, after: int, limit: int) -> list[DirEntry]:
        """Entries behind the cookie ``after``, in the order of their cookies; see `VolumeApi`."""
        await self.directory(ino)
        entries: list[DirEntry] = []
        while len(entries) < limit:
            epoch = self.journal.epoch
            rows = await self.core.records.scan(schema.entry_prefix(ino), schema.entry_after(ino, after), limit)
            if epoch != self.journal.epoch:
                continue
            more = len(rows) == limit
            last = schema.split_entry_key(rows[-1].key)[1] if more else (1 << 63) - 1
            page: dict[bytes, Node | schema.InodeRecord | int] = {}
            for row in rows:
                page[schema.split_entry_key(row.key)[2]] = schema.decode_entry(row.value)
            for name, change in self.journal.overlay.get(ino, {}).items():
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
        for cookie, name in sorted([(schema.name_hash(name), name) for name in page]):
            entry = page[name]
            if isinstance(entry, int):
                try:
                    node = await self.node(entry)
                except errors.Stale:
                    continue  # removed while we were looking
                node.parent, node.name = ino, name
            elif isinstance(entry, Node):
                node = entry
            else:
                node = self.core.nodes.get(entry.ino) or self._shown(entry, ino, name)
            if node.nlink:
                entries.append(DirEntry(name, cookie, node))
        return entries

    def _shown(self, record: schema.InodeRecord, parent: int, name: bytes) -> Node:
        """A node for a listing; it is kept only when the kernel takes it (`count_lookup`)."""
        node = self.content.restore_chunks(Node.from_record(record), record)
        node.parent, node.name = parent, name
        return node
