"""Finds inodes by names and numbers, and changes none: the interface `Lookup`, and `OwnLookup` for one host's volume.

`OwnLookup` uses the name's entry in the dentry table (`Dentries`): a pending change, or a state that the store is known
to have. Else it reads the record store, which may wait, and uses the answer only if no commit was settled meanwhile
(`Pending.epoch`).

`shared_lookup` implements it for shared volumes. `listing` lists directories of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from stat import S_ISDIR
from typing import ClassVar, Literal

import msgspec

from kvfuse import errors
from kvfuse.volume.api import NAME_MAX, ROOT_INODE
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import ABSENT, NameChange
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.open_before import find_open_before
from kvfuse.volume.names.pages import Learning
from kvfuse.volume.store import schema

DOTS = b".", b".."
"""names that each directory has, and the store does not"""


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
class Lookup(ABC):
    """Finds inodes by names and numbers. `Parts` makes an `OwnLookup` or, for a shared volume, a `SharedLookup`."""

    core: Core
    journal: Journal
    refresher: Refresher
    learning: Learning = field(init=False)
    _placed_count: int = field(default=0, init=False)
    """inodes whose places were added since a caller waited for that"""

    is_memory_newest: ClassVar[bool]
    """No stored record is newer than the inode in memory: no other host writes the store."""

    # -- folders and inodes --------------------------------------------------------------------------

    async def await_names(self, directory: int) -> None:  # noqa: B027 - no other host gives names
        """Return when the store, or memory, has all names that any host gave in a strict folder. EngineError."""

    def is_strict(self, directory: Node) -> bool:
        """Calls that change names in the directory return after their commit."""
        flags = directory.flags
        return bool(flags & schema.FLAG_STRICT or (self.core.strict and not flags & schema.FLAG_RELAXED))

    def has_strict_blocks(self, directory: Node) -> bool:
        """Calls that change blocks of the directory return when these are durable. On a volume that hosts share, too,
        only who asks for that has it: a cache may lose its last seconds."""
        flags = directory.flags
        return bool(flags & schema.FLAG_STRICT or (self.core.strict_blocks and not flags & schema.FLAG_RELAXED))

    @abstractmethod
    def must_ask(self, parent: int) -> bool:
        """Each lookup in the directory reads the store. Never on a volume of one host."""

    async def find_node(self, ino: int) -> Node:
        """The inode, read from the store if need be. Stale: it was removed."""
        node, learned = self.core.nodes.get(ino), (0, b"")
        while node is None:
            epoch = self.journal.pending.epoch
            known = self.core.places.get(ino)
            place = known or self.core.nodes.handover.place_before(ino) or learned
            if ino in self.core.nodes.handover.still_open:
                node = await find_open_before(ino, self.core, self.journal.pending, self.refresher, self.take_record)
                if node is not None:
                    break
            last = schema.entry_key(*place) if place[1] else schema.place_key(ino)
            keys = [schema.inode_key(ino), schema.times_key(ino), last]
            own, times, entry = await self.core.records.get(keys)
            node = self.core.nodes.get(ino)
            if node is not None or epoch != self.journal.pending.epoch:
                continue
            if own is not None:
                node = self.take_record(schema.decode_inode(own.value), own.version, known or (0, b""), own=True)
                if times is not None:
                    self.refresher.take_times(node, times.value, times.version)
            elif entry is not None and not place[1]:
                learned = schema.decode_place(entry.value)
                continue
            elif entry is not None:
                record = schema.decode_entry(entry.value)
                if isinstance(record, schema.InodeRecord) and record.ino == ino:
                    node = self.take_record(record, entry.version, place, own=False)
            if node is None:
                raise errors.Stale(f"inode {ino} was removed")
        return node

    async def find_directory(self, ino: int) -> Node:
        """`find_node` for a directory. Stale, NotADirectory."""
        node = self.core.nodes.get(ino)
        if node is None:
            self.expect_own([ino])
            node = await self.find_node(ino)
        if not node.is_directory:
            raise errors.NotADirectory(f"inode {ino} is not a directory")
        return node

    def expect_own(self, inodes: Sequence[int]) -> None:  # noqa: B027 - a volume of one host follows nobody
        """These are about to be read, and have records of their own: in a shared volume they would be read twice."""

    @abstractmethod
    async def find_current(self, ino: int) -> Node:
        """`find_node` for an inode that the kernel reached by a path. Stale; on shared volumes Moved."""

    @abstractmethod
    async def find_current_directory(self, ino: int) -> Node:
        """`find_directory` for one that the kernel reached by a path. Stale, NotADirectory."""

    @abstractmethod
    def take_record(self, record: schema.InodeRecord, version: int, place: tuple[int, bytes], *, own: bool) -> Node:
        """The node of a record that was just read, see `Refresher.take`."""

    # -- names ---------------------------------------------------------------------------------------

    @abstractmethod
    async def find_name(self, parent: int, name: bytes) -> Found:
        """The inode of ``name`` in ``parent``, valid until the caller's next await. NameTooLong, EngineError."""

    def is_valid(self, parent: int, name: bytes, found: Found) -> bool:
        """The result of `find_name` is still valid, although the caller has waited since."""
        change = self.core.dentries.get(parent, name).change
        return change is found.change and (change is not None or found.epoch == self.journal.pending.epoch)

    async def is_empty(self, ino: int) -> bool:
        """The directory has no block, no name in memory, and pending changes remove all its names in the store."""
        if await self._has_blocks(ino):
            return False
        if self.is_memory_newest and (is_empty := self.core.dentries.is_empty(ino)) is not None:
            return is_empty
        after = b""
        while True:
            epoch = self.journal.pending.epoch
            rows = await self.core.records.scan(schema.entry_prefix(ino), after, 64)
            if epoch != self.journal.pending.epoch:
                continue
            changes = self.core.dentries.changes_in(ino)
            if any(change.node is not None for change in changes.values()):
                return False
            names = [schema.split_entry_key(row.key)[2] for row in rows]
            if any(name not in changes for name in names):
                return False
            if len(rows) < 64:
                return True
            after = rows[-1].key

    async def _has_blocks(self, directory: int) -> bool:
        """Also of other hosts: folders of other kinds wait for no round of these."""
        blocks, namespace = self.core.blocks, (await self.find_directory(directory)).namespace
        return blocks is not None and blocks.is_block_namespace(namespace) and await blocks.has_names(directory)

    # -- for the kernel ------------------------------------------------------------------------------

    async def find_dots(self, parent: int, name: bytes) -> Found:
        """The inode of one of `DOTS`; "." of any inode is that itself. Stale, NotADirectory."""
        if name == b".":
            node = await self._find_forgotten(parent)
        else:
            node = await self.find_node((await self.find_directory(parent)).parent or ROOT_INODE)
        return Found(node, True, None, self.journal.pending.epoch)

    async def _find_forgotten(self, ino: int) -> Node:
        """An inode that the kernel had forgotten, and of which a caller has the number still. Stale."""
        nodes = self.core.nodes
        if ino not in nodes.removed:
            node = await self.find_node(ino)
            if ino in nodes.removed:
                nodes.drop(node)  # it was read before the store had its removal
            elif node.nlink or node.handles:
                return node
        raise errors.Stale(f"inode {ino} was removed")

    @abstractmethod
    async def find_for_kernel(self, parent: int, name: bytes) -> Found:
        """`find_name` for the kernel. On shared volumes Moved: a name above has changed, walk the path again."""

    def find_at_once(self, parent: int, name: bytes) -> Node | Literal[False] | None:
        """As `find_for_kernel`, where the kernel may cache the answer. False: no such name. None: it may wait."""
        return None

    def find_node_at_once(self, ino: int) -> Node | None:
        """As `find_current`, of an inode whose attributes the kernel may cache. None: it may have to wait."""
        return None

    @abstractmethod
    def is_doubtful(self, ino: int) -> bool:
        """The kernel must not cache the attributes of the inode, because its name is unchecked."""

    def count_lookup(self, node: Node) -> Node:
        """Raise the kernel's lookup count of the inode. Returns the node."""
        self.core.places.add(node.ino, node.parent, node.name)
        if self.core.exported and self.lacks_place(node):
            node.flags |= schema.FLAG_PLACED
            self.journal.pending.touch(node)
            self._placed_count += 1
        return node

    def lacks_place(self, inode: Node | schema.InodeRecord) -> bool:
        """The store is to keep the place of this inode, which the kernel is about to know, and does not."""
        if not self.core.exported or inode.flags & schema.FLAG_PLACED or not inode.nlink or S_ISDIR(inode.mode):
            return False
        return not isinstance(inode, Node) or not (inode.own_record or inode.forgotten)

    async def wait_for_places(self) -> None:
        """Wait for a commit of places that lookups have added, where many wait for one."""
        if self._placed_count and self.journal.pending.load.is_full:
            self._placed_count = 0
            with suppress(errors.EngineError):  # names are found all the same
                await self.journal.commit()

    @abstractmethod
    def forget(self, ino: int) -> None:
        """The kernel dropped its last reference to the inode."""


@dataclass
class OwnLookup(Lookup):
    """Finds inodes of a volume that one host has."""

    is_memory_newest = True

    def __post_init__(self) -> None:
        self.learning = Learning(self.core, self.journal)

    def must_ask(self, parent: int) -> bool:
        return False

    async def find_current(self, ino: int) -> Node:
        return self.core.nodes.get(ino) or await self.find_node(ino)

    find_current_directory = Lookup.find_directory

    def take_record(self, record: schema.InodeRecord, version: int, place: tuple[int, bytes], *, own: bool) -> Node:
        node = self.core.nodes.get(record.ino)
        if node is None:
            node = self.core.nodes.add(self.refresher.chunks.restore_chunks(Node.from_record(record), record))
            node.own_record = own
            if place[1]:
                node.parent, node.name = place
        return node

    async def find_name(self, parent: int, name: bytes) -> Found:
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
            if self._has_changed(parent, name, epoch):
                continue
            if record is None:
                return Found(None, False, None, epoch)
            entry = schema.decode_entry(record.value)
            if isinstance(entry, schema.InodeRecord):
                node = self.take_record(entry, record.version, (parent, name), own=False)
            elif (node := core.nodes.get(entry)) is None:
                core.places.set(entry, parent, name)
                node = await self.find_node(entry)
                if self._has_changed(parent, name, epoch):
                    continue
            node.parent, node.name = parent, name
            core.dentries.note(parent, name, node.ino)
            return Found(node, True, None, epoch)

    def _has_changed(self, parent: int, name: bytes, epoch: int) -> bool:
        """The store's answer about a name, read in ``epoch``, is stale."""
        dentries = self.core.dentries
        return dentries.get(parent, name).change is not None or epoch != self.journal.pending.epoch

    find_for_kernel = find_name

    def find_at_once(self, parent: int, name: bytes) -> Node | Literal[False] | None:
        dentry = self.core.dentries.find(parent, name)
        if dentry is None or name in DOTS or len(name) > NAME_MAX:
            return None
        if dentry.change is not None:
            return dentry.change.node or False
        return False if dentry is ABSENT else self.core.nodes.get(dentry.ino)

    def find_node_at_once(self, ino: int) -> Node | None:
        return self.core.nodes.get(ino)

    def is_doubtful(self, ino: int) -> bool:
        return False

    def forget(self, ino: int) -> None:
        pass
