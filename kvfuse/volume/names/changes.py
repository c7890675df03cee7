"""Changes names: creates, links, removes and renames.

`plans` plans each change from the present inodes of the names. An executor carries it out in memory first
(`apply_first`) or, on a shared volume, in the store first (`commit_first`). Callers then `publish` it: strict folders
wait for the commit, relaxed ones return.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from stat import S_IFREG, S_IMODE, S_ISGID, S_ISREG

from kvfuse import errors
from kvfuse.volume.api import RENAME_EXCHANGE, Caller
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names import plans
from kvfuse.volume.names.apply_first import ApplyFirst
from kvfuse.volume.names.commit_first import CommitFirst
from kvfuse.volume.names.folders import Folders
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.nameless import Nameless
from kvfuse.volume.names.plans import End, NamePlace, NewInode, Plan
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock


@dataclass
class Names:
    """Changes names for both doors. Each membership has one."""

    core: Core
    journal: Journal
    lookup: Lookup
    nameless: Nameless
    memory: ApplyFirst
    executor: ApplyFirst | CommitFirst
    """`CommitFirst` on a shared volume; else ``memory``"""

    def __post_init__(self) -> None:
        self.folders = Folders(self.core, self.lookup)

    # -- publishing ----------------------------------------------------------------------------------

    async def publish(self, directory: Node, *nodes: Node) -> None:
        """Wait for the commit of a change in ``directory`` if it is strict, or the owner has too much pending."""
        if self.lookup.is_strict(directory):
            await self.executor.publish(directory, nodes)
        elif self.journal.pending.load.is_crowded((nodes or (directory,))[0].uid):
            with suppress(errors.EngineError):  # the change is made, and stored as soon as the store takes it
                await self.journal.commit()

    def _check_crowd(self, uid: int) -> None:
        """EngineError, with nothing made, while the store refuses commits and the user's share of pending changes is
        used up. Removals are accepted all the same: there are only as many as files."""
        failure = self.journal.failure
        if failure is not None and self.journal.pending.load.is_crowded(uid):
            raise type(failure)(f"too much waits for a commit that fails: {failure}")

    def is_publish_awaited(self, directory: Node, node: Node) -> bool:
        """`publish` would wait."""
        return self.lookup.is_strict(directory) or self.journal.pending.load.is_crowded(node.uid)

    # -- creating ------------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b"", ino: int = 0
    ) -> tuple[Node, Node]:
        """(directory, new inode) of any type; not yet published. The inode is counted as looked up.

        ``ino``: its number, which was given before; 0: the next one.
        """
        self._check_crowd(caller.uid)
        planning = partial(plans.plan_create, new=NewInode(caller, mode, rdev, target, ino), make=self._make_node)
        plan = await self.executor.carry_out(
            [NamePlace(parent, name)], planning, _always if S_ISREG(mode) else plans.never
        )
        return plan.ends[0].directory, self.lookup.count_lookup(plan.node)

    def _make_node(self, end: End, new: NewInode) -> Node:
        """Make a node that no table has yet."""
        directory, caller = end.directory, new.caller
        gid = directory.gid if directory.mode & S_ISGID else caller.gid
        mode = privileges.mode_of_new(directory, new.mode, caller)
        node = Node(new.ino or self.core.inodes.next(), mode, caller.uid, gid, self.core.chunk_size_in(directory))
        node.parent, node.name = directory.ino, end.name
        node.namespace = directory.namespace
        node.atime = node.mtime = node.ctime = clock.now()
        node.flags = schema.FLAG_PLACED if self.core.exported else 0
        node.rdev, node.target, node.size = new.rdev, new.target, len(new.target)
        if node.is_directory:
            node.own_record = True
            node.nlink = 2
            node.flags = directory.flags & schema.PUBLISH_FLAGS
        return node

    async def plan_replacement(self, parent: int, name: bytes, mode: int, caller: Caller) -> Plan:
        """Plan a new regular file that takes a name from its present inode; valid until the next await.

        IsADirectory: a directory has the name. NotFound: the directory was removed. NoSpace.
        """
        self._check_crowd(caller.uid)
        new = NewInode(caller, S_IFREG | S_IMODE(mode))
        planning = partial(plans.plan_replacement, new=new, make=self._make_node)
        return await self.executor.plan_later([NamePlace(parent, name)], planning)

    def must_unlink_first(self, plan: Plan) -> bool:
        """The caller unlinks the name's file first (a miss for a moment): other hosts may change its other names."""
        return self.executor is not self.memory and plan.unlinked is not None and plan.unlinked.own_record

    def replace(self, plan: Plan) -> Node:
        """Execute `plan_replacement`. The file is neither published nor counted as looked up."""
        self.memory.apply(plan)
        return plan.node

    async def link(self, ino: int, parent: int, name: bytes) -> tuple[Node, Node]:
        """Give a file another name. Returns (directory, inode); not yet published."""
        node = await self.lookup.find_current(ino)
        self._check_crowd(node.uid)
        planning = partial(plans.plan_link, node=node)
        plan = await self.executor.carry_out([NamePlace(parent, name)], planning, node=node)
        return plan.ends[0].directory, self.lookup.count_lookup(node)

    # -- removing and renaming -----------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> tuple[Node, Node]:
        """Remove a file's name. Returns (directory, inode); not yet published."""
        plan = await self.executor.carry_out([NamePlace(parent, name, is_entered=False)], plans.plan_unlink, _is_plain)
        self.core.counters.removes += 1
        return plan.ends[0].directory, plan.node

    async def remove_directory(self, parent: int, name: bytes) -> tuple[Node, Node]:
        """Remove an empty directory. Returns (directory, inode); not yet published."""
        plan = await self.executor.carry_out([NamePlace(parent, name)], plans.plan_rmdir)
        self.core.counters.removes += 1
        return plan.ends[0].directory, plan.node

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> tuple[Node, Node]:
        """Rename or exchange. Returns (directory, inode); not yet published. The directory is the stricter one."""
        places = [NamePlace(parent, name, is_entered=flags == RENAME_EXCHANGE), NamePlace(new_parent, new_name)]
        fits = plans.never if flags else _is_new
        plan = await self.executor.carry_out(places, partial(plans.plan_rename, flags=flags), fits)
        self.core.counters.renames += 1
        old, new = plan.ends[0].directory, plan.ends[1].directory
        return (old if old is not new and self.lookup.is_strict(old) else new), plan.node


def _always(end: End) -> bool:
    return True


def _is_plain(end: End) -> bool:
    """The name means a regular file that never had two names: relaxed folders publish its changes later."""
    node = end.found.node
    return node is not None and node.is_file and not node.own_record


def _is_new(source: End, target: End) -> bool:
    """The source is a regular file that the store does not have yet: relaxed folders publish it under its new name.

    The same commit removes the file that has that name in the store.
    """
    node = source.found.node
    is_new = node is not None and not node.version and not node.committing
    return is_new and _is_plain(source) and (target.found.node is None or _is_plain(target))
