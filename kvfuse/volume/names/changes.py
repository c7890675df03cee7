"""Changes of names: creation, links, removal, rename.

Every change follows one shape: read what is needed (this may wait), look again at what may have
changed meanwhile, then change memory between two awaits and tell the journal. Strict folders then wait
for the commit; relaxed ones return. No name or directory is ever locked: nobody waits for another's change of one.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass

from kvfuse import errors
from kvfuse.volume.api import (
    LINK_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INODE,
    SYMLINK_MAX,
    Caller,
)
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes import metadata_budget, privileges
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Found, Lookup
from kvfuse.volume.names.nameless import Nameless
from kvfuse.volume.slots.space import Space
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock


@dataclass
class Names:
    """See the module."""

    core: Core
    journal: Journal
    space: Space
    nameless: Nameless
    lookup: Lookup

    # -- publishing ----------------------------------------------------------------------------------

    def is_strict(self, directory: Node) -> bool:
        if directory.flags & schema.FLAG_STRICT:
            return True
        return self.core.strict and not directory.flags & schema.FLAG_RELAXED

    async def publish(self, directory: Node, *nodes: Node) -> None:
        """After a change in ``directory``: wait for its commit where the folder, or a crowd of changes of the user whom
        the inodes belong to, asks for it.
        """
        if self.is_strict(directory):
            await self.journal.commit(*nodes)
        elif self.journal.crowded((nodes or (directory,))[0].uid):
            await self.journal.commit()

    def publish_waits(self, directory: Node, node: Node) -> bool:
        """`publish` has something to wait for."""
        return self.is_strict(directory) or self.journal.crowded(node.uid)

    # -- creating ------------------------------------------------------------------------------------

    async def _free_name(self, parent: int, name: bytes, weight: Callable[[], int]) -> tuple[Node, bool]:
        """(directory, stored) where ``name`` may be created: there is room for records of so many bytes.

        NotFound, if the directory was removed. NoSpace.
        """
        directory = await self.lookup.directory(parent)
        await self.journal.untie()
        while True:
            found = await self.lookup.find(parent, name)
            if found.node is not None:
                raise errors.Exists(f"{name!r} exists in directory {parent}")
            if directory.nlink == 0:
                raise errors.NotFound(f"directory {parent} was removed")
            if not await self.space.wait_for_records(weight(), f"{name!r} in directory {parent}"):
                return directory, found.stored

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b""
    ) -> tuple[Node, Node]:
        """(directory, new inode) of any type; not yet published. The inode is counted as looked up."""
        if len(target) > SYMLINK_MAX:
            raise errors.NameTooLong(f"a symbolic link's target of {len(target)} bytes: at most {SYMLINK_MAX}")
        weight = metadata_budget.new_inode(name, is_directory=stat.S_ISDIR(mode), target=target)
        directory, stored = await self._free_name(parent, name, lambda: weight)
        node = self._new_node(directory, name, mode, caller)
        node.rdev, node.target = rdev, target
        node.size = len(target)
        if node.is_directory:
            node.own_record = True
            node.nlink = 2
            node.flags = directory.flags & (schema.FLAG_STRICT | schema.FLAG_RELAXED)
            directory.nlink += 1
            self.journal.touch(directory)
            self.journal.touch_times(node)
            self.core.known.made(node.ino)
        self.journal.set_name(parent, name, node, stored)
        self.journal.touch(node)
        self.core.metadata.reserve(node, weight)
        self._changed(directory)
        return directory, self.lookup.count_lookup(node)

    def _new_node(self, directory: Node, name: bytes, mode: int, caller: Caller) -> Node:
        """An inode in memory that is about to get a name."""
        core = self.core
        gid = directory.gid if directory.mode & stat.S_ISGID else caller.gid
        mode = privileges.mode_of_new(directory, mode, caller)
        node = Node(core.inodes.next(), mode, caller.uid, gid, core.chunk_size_in(directory))
        node.parent, node.name = directory.ino, name
        node.atime = node.mtime = node.ctime = clock.now()
        core.file_count += 1
        core.counters.creates += 1
        return core.nodes.add(node)

    async def find_replaceable(self, parent: int, name: bytes) -> tuple[Node, Found]:
        """(directory, what the name means), true until the next await: a new file may take the name.

        IsADirectory where a directory has it; NotFound, if the directory was removed. NoSpace.
        """
        weight = metadata_budget.new_inode(name)
        directory = await self.lookup.directory(parent)
        while True:
            found = await self.lookup.find(parent, name)
            old = found.node
            if directory.nlink == 0:
                raise errors.NotFound(f"directory {parent} was removed")
            if old is not None and old.is_directory:
                raise errors.IsADirectory(f"{name!r} is a directory")
            if old is not None and self.nameless.needs_loading(old):
                await self.nameless.load(old)
            elif old is not None and await self.journal.untie(old):
                continue
            elif not await self.space.wait_for_records(weight, f"{name!r} in directory {parent}"):
                return directory, found

    def goes_first(self, found: Found) -> bool:
        """What has the name loses it by itself, before a new file takes it."""
        return False

    def replace(self, directory: Node, name: bytes, found: Found, mode: int, caller: Caller) -> Node:
        """A new regular file under a name, instead of what has it, as if it had been made elsewhere and renamed.

        ``found`` is of `find_replaceable`. The file is neither published nor counted as looked up.
        """
        node = self._new_node(directory, name, stat.S_IFREG | stat.S_IMODE(mode), caller)
        old = found.node
        self.journal.set_name(directory.ino, name, node, found.stored, version=found.version, leaves=old)
        if old is not None:
            self._drop_link(old, heir=node)
            if old.nlink:
                self.journal.tie(node, old)
        self.journal.touch(node)
        self.core.metadata.reserve(node, metadata_budget.new_inode(name))
        self._changed(directory)
        return node

    async def link(self, ino: int, parent: int, name: bytes) -> tuple[Node, Node]:
        """(directory, inode): another name for a file; not yet published."""
        node = await self.lookup.node(ino)
        if node.is_directory:
            raise errors.NotPermitted(f"inode {ino} is a directory: it has one name only")
        directory, stored = await self._free_name(parent, name, lambda: metadata_budget.new_name(name, node))
        if node.nlink == 0:
            raise errors.NotFound(f"inode {ino} was removed")
        if node.nlink >= LINK_MAX:
            raise errors.TooManyLinks(f"inode {ino} has {LINK_MAX} names, it may not have more")
        weight = metadata_budget.new_name(name, node)
        if not node.own_record:
            # The record moves from the name to a key of its own; the first name becomes a reference.
            node.own_record = True
            self.journal.set_name(node.parent, node.name, node, node.stored or node.committing)
        self.forget_copy(node)
        node.nlink += 1
        node.ctime = clock.now()
        self.journal.set_name(parent, name, node, stored)
        self.journal.touch(node, forced=True)
        self.core.metadata.reserve(node, weight)
        self._changed(directory)
        return directory, self.lookup.count_lookup(node)

    def forget_copy(self, node: Node) -> None:
        """The file is about to have other readers, or more than one name: no block of the tier may have its bytes."""
        self.core.tier.drop(node.ino)
        if node.map is not None:
            node.map.hide_copies()

    def _changed(self, directory: Node) -> None:
        """Entries of the directory changed."""
        directory.mtime = directory.ctime = clock.now()
        self.journal.touch_times(directory)

    # -- removing ------------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> tuple[Node, Node]:
        """(directory, inode) after the name is gone; not yet published."""
        directory = await self.lookup.directory(parent)
        while True:
            found = await self.lookup.find(parent, name)
            node = found.node
            if node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
            if node.is_directory:
                raise errors.IsADirectory(f"{name!r} is a directory")
            if self.nameless.needs_loading(node):
                await self.nameless.load(node)
            elif not await self.journal.untie(node):
                break
        self.core.counters.removes += 1
        self.journal.set_name(parent, name, None, found.stored, moved=node, version=found.version)
        self._drop_link(node)
        self._changed(directory)
        return directory, node

    async def remove_directory(self, parent: int, name: bytes) -> tuple[Node, Node]:
        directory = await self.lookup.directory(parent)
        while True:
            found = await self.lookup.find(parent, name)
            node = found.node
            if node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
            if not node.is_directory:
                raise errors.NotADirectory(f"{name!r} is no directory")
            if self.nameless.needs_loading(node):
                await self.nameless.load(node)
                continue
            await self._check_empty(node, name)
            if await self.journal.untie(node):
                continue
            if self.lookup.holds(parent, name, found):
                break
        self.core.counters.removes += 1
        self.journal.set_name(parent, name, None, found.stored, moved=node)
        self._drop_directory(directory, node)
        self._changed(directory)
        return directory, node

    async def _check_empty(self, directory: Node, name: bytes) -> None:
        """NotEmpty, unless the directory may be removed. What was moved out of it is gone from the store then."""
        if leaving := self._leaving(directory):
            await self.journal.commit(*leaving)
        if not await self.lookup.is_empty(directory.ino):
            raise errors.NotEmpty(f"directory {name!r} is not empty")

    def _leaving(self, directory: Node) -> list[Node]:
        """Inodes moved out of the directory whose commit may yet have to wait for bytes."""
        changes = self.journal.overlay.get(directory.ino, {}).values()
        moved = [change.moved for change in changes if change.moved is not None]
        return [node for node in moved if node.writers or node.staged_count]

    def _drop_link(self, node: Node, heir: Node | None = None) -> None:
        node.nlink -= 1
        node.ctime = clock.now()
        if node.nlink:
            self.journal.touch(node, forced=True)
        else:
            self.nameless.removed(node, heir)

    def _drop_directory(self, parent: Node, node: Node) -> None:
        node.nlink = 0
        parent.nlink -= 1
        self.journal.touch(parent)
        self.nameless.removed(node)

    # -- renaming ------------------------------------------------------------------------------------

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> tuple[Node, Node, Node]:
        """(old directory, new directory, inode); not yet published."""
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise errors.InvalidArgument(f"rename flags {flags:#x} are not offered")
        source_directory = await self.lookup.directory(parent)
        target_directory = await self.lookup.directory(new_parent)
        growth = max(0, len(new_name) - len(name))
        while True:
            source = await self.lookup.find(parent, name)
            target = await self.lookup.find(new_parent, new_name)
            node, other = source.node, target.node
            if node is None or (flags == RENAME_EXCHANGE and other is None):
                raise errors.NotFound(f"{name if node is None else new_name!r} does not exist")
            if other is not None and flags != RENAME_EXCHANGE and other is not node:
                await self._check_replace(node, other, new_name, flags)
                if self.nameless.needs_loading(other):
                    await self.nameless.load(other)
                    continue
            if await self._is_inside(target_directory, node) or (
                flags == RENAME_EXCHANGE and other is not None and await self._is_inside(source_directory, other)
            ):
                raise errors.InvalidArgument(f"directory {name!r} cannot go into itself")
            if await self.journal.untie(node, *([other] if other is not None else [])):
                continue
            if await self.space.wait_for_records(growth, f"{new_name!r} in directory {new_parent}"):
                continue
            if self.lookup.holds(parent, name, source) and self.lookup.holds(new_parent, new_name, target):
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
            self.journal.set_name(parent, name, None, source.stored, moved=node, version=source.version)
            if other is not None and other.is_directory:
                self._drop_directory(target_directory, other)
            elif other is not None:
                self._drop_link(other, heir=node)
        if other is not None and other.nlink:
            self.journal.tie(node, other)
        self._move(node, source_directory, target_directory, new_name)
        self.journal.set_name(new_parent, new_name, node, target.stored, version=target.version)
        self.core.metadata.reserve(node, growth)
        self._changed(source_directory)
        if target_directory is not source_directory:
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
            here = await self.lookup.node(here.parent or ROOT_INODE)
        return True

    def _move(self, node: Node, old: Node, new: Node, name: bytes) -> None:
        if node.is_directory and old is not new:
            old.nlink -= 1
            new.nlink += 1
            self.journal.touch(old)
            self.journal.touch(new)
        if old is not new:
            self.forget_copy(node)
        node.parent, node.name = new.ino, name
        node.ctime = clock.now()
        self.core.places.set(node.ino, new.ino, name)
        self.journal.touch(node, forced=True)
        if node.is_directory:
            self.journal.touch_times(node)
