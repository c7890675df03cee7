"""Changes of names where other hosts change them, too.

In strict folders, and wherever more than one name or a directory is concerned, a change is one `Transaction` that
expects every record it was decided by: so it happens for all hosts in one step, or it is decided again. In relaxed
folders three things go through the journal, which publishes them later: new regular files, their first names as long
as the store does not know them, and the removal of a regular file's only name, by itself or by a new file that takes
it. So what the store has, or is about to have, never stands elsewhere in memory: renaming it is waited for.

A name is put into a directory with its record expected. Who removes a directory puts a mark into that record first,
looks whether it is empty, and then removes it expecting the marked record. So a name that came before the mark is seen,
and who comes later has to take the mark away, with which the removal fails. A mark that was left behind harms nobody.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import NamedTuple

from kvfuse import errors
from kvfuse.volume.api import LINK_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE, SYMLINK_MAX, Caller
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.attempts import Attempts
from kvfuse.volume.names.lookup import Found
from kvfuse.volume.names.name_change import Draft
from kvfuse.volume.names.path_beliefs import outlive_beliefs
from kvfuse.volume.names.shared_lookup import check_name
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock


class _Rename(NamedTuple):
    """What is asked of `rename`."""

    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    flags: int


class _Ends(NamedTuple):
    """The directories and names of a rename, as they are now."""

    old: Node
    new: Node
    source: Found
    target: Found


@dataclass
class SharedNames(Attempts):
    """See the module."""

    def __post_init__(self) -> None:
        self.lookup.refresher.revive = self.journal.revive
        self.journal.renew = self.lookup.renew

    async def publish(self, directory: Node, *nodes: Node) -> None:
        """As there. What a transaction brought into the store waits for nothing."""
        pending = [node for node in nodes if node.nlink and (node.changed or node.committing or not node.stored)]
        if pending or not self.is_strict(directory):
            await super().publish(directory, *pending)
        if directory in nodes and self.is_strict(directory):  # its own attributes
            await outlive_beliefs()

    # -- creating ------------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b""
    ) -> tuple[Node, Node]:
        if len(target) > SYMLINK_MAX:
            raise errors.NameTooLong(f"a symbolic link's target of {len(target)} bytes: at most {SYMLINK_MAX}")
        directory = await self._directory(parent, is_fresh=False)
        if stat.S_ISREG(mode) and not self.is_strict(directory):
            return await super().create(parent, name, mode, caller, rdev=rdev, target=target)
        check_name(name)
        ino = self.core.inodes.next()
        made: list[Node] = []

        async def plan(is_fresh: bool) -> Draft:
            folder = await self._directory(parent, is_fresh)
            if (await self._find(parent, name, is_fresh)).node is not None:
                raise errors.Exists(f"{name!r} exists in directory {parent}")
            node = self._made(ino, folder, name, mode, caller)
            node.rdev, node.target, node.size = rdev, target, len(target)
            made[:] = [node]
            draft = Draft(self.core.client)
            draft.enter(folder, directory_count=int(node.is_directory))
            draft.make(node)
            return draft

        if stat.S_ISDIR(mode):
            self.core.known.made(ino)  # before others can put names into it
        try:
            await self._attempt(plan, name)
        except errors.OperationError:
            self.core.known.removed(ino)
            raise
        (node,) = made
        return directory, self.lookup.count_lookup(self.core.nodes.get(ino) or node)

    def _made(self, ino: int, directory: Node, name: bytes, mode: int, caller: Caller) -> Node:
        """An inode that nobody knows of yet."""
        gid = directory.gid if directory.mode & stat.S_ISGID else caller.gid
        mode = privileges.mode_of_new(directory, mode, caller)
        node = Node(ino, mode, caller.uid, gid, self.core.chunk_size_in(directory))
        node.parent, node.name = directory.ino, name
        node.atime = node.mtime = node.ctime = clock.now()
        if node.is_directory:
            node.own_record = True
            node.nlink = 2
            node.flags = directory.flags & (schema.FLAG_STRICT | schema.FLAG_RELAXED)
        return node

    async def find_replaceable(self, parent: int, name: bytes) -> tuple[Node, Found]:
        await self._directory(parent, is_fresh=False)
        return await super().find_replaceable(parent, name)

    def goes_first(self, found: Found) -> bool:
        """Others may change the rest of its names at the same time. So the name is absent for a moment: a miss."""
        return found.node is not None and found.node.own_record

    async def link(self, ino: int, parent: int, name: bytes) -> tuple[Node, Node]:
        node = await self.lookup.current(ino)
        if node.is_directory:
            raise errors.NotPermitted(f"inode {ino} is a directory: it has one name only")
        check_name(name)
        directory = await self._directory(parent, is_fresh=False)

        async def plan(is_fresh: bool) -> Draft:
            folder = await self._directory(parent, is_fresh)
            await self._settled(node)
            if is_fresh:
                await self.lookup.renew(node)
            if node.nlink == 0:
                raise errors.NotFound(f"inode {ino} was removed")
            if node.nlink >= LINK_MAX:
                raise errors.TooManyLinks(f"inode {ino} has {LINK_MAX} names, it may not have more")
            if (await self._find(parent, name, is_fresh)).node is not None:
                raise errors.Exists(f"{name!r} exists in directory {parent}")
            draft = Draft(self.core.client)
            draft.enter(folder)
            draft.own(node)
            change = draft.change(node)
            change.set(nlink=change.record.nlink + 1, ctime=clock.now())
            draft.name(parent, name, 0, node)
            return draft

        await self._attempt(plan, name)
        self.forget_copy(node)
        return directory, self.lookup.count_lookup(node)

    # -- removing ------------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> tuple[Node, Node]:
        directory = await self.lookup.directory(parent)
        if not self.is_strict(directory):
            found = await self.lookup.find(parent, name)
            if found.node is not None and _is_plain(found.node):
                self._take_name(directory, name, found)
                self.core.counters.removes += 1
                return directory, found.node
        gone: list[Node] = []

        async def plan(is_fresh: bool) -> Draft:
            found = await self._find(parent, name, is_fresh)
            node = found.node
            if node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
            if node.is_directory:
                raise errors.IsADirectory(f"{name!r} is a directory")
            if node.committing or is_fresh:  # what is changed here, and elsewhere, too, is brought up by its commit
                await self._settled(node)
            gone[:] = [node]
            draft = Draft(self.core.client)
            draft.expect_all(await self.lookup.path_versions(parent, is_fresh))
            draft.name(parent, name, found.version, None)
            draft.unlink(node, clock.now())
            return draft

        await self._attempt(plan, name)
        self.core.counters.removes += 1
        return directory, gone[0]

    def _take_name(self, directory: Node, name: bytes, found: Found) -> None:
        """Remove a regular file with one name, in memory."""
        node = found.node
        assert node is not None
        self.journal.set_name(directory.ino, name, None, found.stored, moved=node, version=found.version, leaves=node)
        self._drop_link(node)
        self._changed(directory)

    async def remove_directory(self, parent: int, name: bytes) -> tuple[Node, Node]:
        directory = await self.lookup.directory(parent)
        gone: list[Node] = []

        async def plan(is_fresh: bool) -> Draft:
            folder = await self._directory(parent, is_fresh)
            found = await self._find(parent, name, is_fresh=True)
            node = found.node
            if node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {parent}")
            if not node.is_directory:
                raise errors.NotADirectory(f"{name!r} is no directory")
            versions = await self.lookup.path_versions(parent, is_fresh)
            await self._have_left(node, name)  # nothing waits after it: news of a name in it would pass for the mark
            gone[:] = [node]
            draft = Draft(self.core.client)
            draft.expect_all(versions)
            draft.name(parent, name, found.version, None)
            draft.remove_directory(node)
            draft.enter(folder, directory_count=-1)
            return draft

        await self._attempt(plan, name)
        self.core.counters.removes += 1
        if self.is_strict(directory):
            await outlive_beliefs()
        return directory, gone[0]

    async def _check_empty(self, directory: Node, name: bytes) -> None:
        """As there, by what is stored: what was removed here before is removed there first."""
        while changes := self.journal.overlay.get(directory.ino):
            if any(change.node is not None for change in changes.values()):
                raise errors.NotEmpty(f"directory {name!r} is not empty")
            await self.journal.commit(*self.journal.changed_in(directory.ino))
        await super()._check_empty(directory, name)

    async def _have_left(self, directory: Node, name: bytes) -> None:
        """Mark an empty directory, so that it may be removed if it still has the mark then. NotEmpty."""
        await self._settled(directory)
        await self._check_empty(directory, name)
        while True:
            marked = await self._mark(directory, leaving=True)
            if marked:
                await self._check_empty(directory, name)
                if directory.version == marked:
                    return
            await self.lookup.renew(directory)

    # -- renaming ------------------------------------------------------------------------------------

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> tuple[Node, Node, Node]:
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise errors.InvalidArgument(f"rename flags {flags:#x} are not offered")
        move = _Rename(parent, name, new_parent, new_name, flags)
        moved = await self._rename_new(move)
        if moved is not None:
            return moved
        check_name(new_name)
        ends: list[_Ends] = []

        async def plan(is_fresh: bool) -> Draft:
            ends[:] = [await self._ends(move, is_fresh)]
            return await self._plan_rename(move, ends[0], is_fresh)

        await self._attempt(plan, name)
        self.core.counters.renames += 1
        old, new, source, target = ends[0]
        assert source.node is not None
        if old is not new:
            self.forget_copy(source.node)
        is_strict = self.is_strict(old) or self.is_strict(new)
        if is_strict and any(end.node is not None and end.node.is_directory for end in (source, target)):
            await outlive_beliefs()
        return old, new, source.node

    async def _rename_new(self, move: _Rename) -> tuple[Node, Node, Node] | None:
        """Rename a regular file that the store does not know yet, in relaxed folders; None: it is something else.

        The file is published later, under its new name, and what has that name in the store goes with it.
        """
        old = await self.lookup.directory(move.parent)
        new = await self._directory(move.new_parent, is_fresh=False)
        if move.flags or self.is_strict(old) or self.is_strict(new):
            return None
        growth = max(0, len(move.new_name) - len(move.name))
        while True:
            source = await self.lookup.find(move.parent, move.name)
            target = await self.lookup.find(move.new_parent, move.new_name)
            if await self.space.wait_for_records(growth, f"{move.new_name!r} in directory {move.new_parent}"):
                continue
            if self.lookup.holds(move.parent, move.name, source):
                break
        node, other = source.node, target.node
        if node is None or not _is_plain(node) or node.version or node.committing:
            return None
        if other is not None and not _is_plain(other):
            return None
        if new.nlink == 0:
            raise errors.NotFound(f"directory {new.ino} was removed")
        self.core.counters.renames += 1
        if other is not node:
            self.journal.set_name(old.ino, move.name, None, source.stored, moved=node, version=source.version)
            self.journal.set_name(new.ino, move.new_name, node, target.stored, version=target.version, leaves=other)
            if other is not None:
                self._drop_link(other)
            self._move(node, old, new, move.new_name)
            self.core.metadata.reserve(node, growth)
            self._changed(old)
            self._changed(new)
        return old, new, node

    async def _ends(self, move: _Rename, is_fresh: bool) -> _Ends:
        old = await self.lookup.directory(move.parent)
        new = await self._directory(move.new_parent, is_fresh)
        if move.flags == RENAME_EXCHANGE:
            old = await self._directory(move.parent, is_fresh)
        source = await self._find(move.parent, move.name, is_fresh)
        target = await self._find(move.new_parent, move.new_name, is_fresh)
        await self._settled(*[found.node for found in (source, target) if found.node is not None])
        return _Ends(old, new, source, target)

    async def _plan_rename(self, move: _Rename, ends: _Ends, is_fresh: bool) -> Draft:
        node, other = ends.source.node, ends.target.node
        is_exchange = move.flags == RENAME_EXCHANGE
        if node is None or (is_exchange and other is None):
            raise errors.NotFound(f"{move.name if node is None else move.new_name!r} does not exist")
        draft = Draft(self.core.client)
        if other is not None and move.flags == RENAME_NOREPLACE:
            raise errors.Exists(f"{move.new_name!r} exists")
        if other is node:
            return draft
        draft.expect_all(await self.lookup.path_versions(move.parent, is_fresh))
        if move.new_parent != move.parent:
            draft.expect_all(await self.lookup.path_versions(move.new_parent, is_fresh))
        await self._expect_outside(draft, node, ends.new, is_fresh)
        now = clock.now()
        if other is not None and is_exchange:
            await self._expect_outside(draft, other, ends.old, is_fresh)
            draft.enter(ends.old, directory_count=other.is_directory - node.is_directory)
            draft.enter(ends.new, directory_count=node.is_directory - other.is_directory)
            draft.name(move.parent, move.name, ends.source.version, other)
            draft.change(other).set(ctime=now)
        else:
            await self._plan_replacement(draft, move, ends, now)
        draft.name(move.new_parent, move.new_name, ends.target.version, node)
        draft.change(node).set(ctime=now)
        return draft

    async def _plan_replacement(self, draft: Draft, move: _Rename, ends: _Ends, now: int) -> None:
        """The old name goes, and what had the new one."""
        node, other = ends.source.node, ends.target.node
        assert node is not None
        if other is not None and other.is_directory:
            if not node.is_directory:
                raise errors.IsADirectory(f"{move.new_name!r} is a directory")
            await self._have_left(other, move.new_name)
            draft.remove_directory(other)
        elif other is not None and node.is_directory:
            raise errors.NotADirectory(f"{move.new_name!r} is no directory")
        elif other is not None:
            draft.unlink(other, now)
        came = int(node.is_directory and ends.old is not ends.new)
        went = int(other is not None and other.is_directory)
        draft.enter(ends.new, directory_count=came - went)
        if came:
            draft.enter(ends.old, directory_count=-1)
        draft.name(move.parent, move.name, ends.source.version, None)

    async def _expect_outside(self, draft: Draft, node: Node, directory: Node, is_fresh: bool) -> None:
        """InvalidArgument where ``directory`` is ``node`` or below it. No directory above may be moved meanwhile."""
        if not node.is_directory:
            return
        here = directory
        while here.ino != ROOT_INODE:
            if here is node:
                raise errors.InvalidArgument(f"directory {node.name!r} cannot go into itself")
            if is_fresh:
                await self._settled(here)
                await self.lookup.renew(here)
            draft.expect(here)
            here = await self.lookup.node(here.parent or ROOT_INODE)


def _is_plain(node: Node | None) -> bool:
    """A regular file that never had two names: relaxed folders publish its name later."""
    return node is not None and node.is_file and not node.own_record
