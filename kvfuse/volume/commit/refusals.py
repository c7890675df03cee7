"""Drops or merges pending changes of objects that another host removed, replaced or changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError, Stale
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.inodes.dentries import NameChange

Merge = Callable[[Node, schema.InodeRecord, int], Awaitable[None]]
"""`Merger.merge`: (changed inode, its record in the store, the record's version)"""
Renew = Callable[[Node], Awaitable[None]]


class ToFree:
    """Inodes whose removal by this client is stored: each is freed when no client has it open.

    `Refusals` owns it, and `Removed` takes from it.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, int]] = deque()
        """(time of the removal, inode number), in trio's time"""
        self._work = trio.Event()

    def add(self, ino: int) -> None:
        """Add an inode that was removed just now."""
        self.waiting.append((trio.current_time(), ino))
        if len(self.waiting) == 1:
            self.hurry()

    def hurry(self) -> None:
        """Have the waiting inodes checked now."""
        self._work.set()

    async def wait(self, deadline: float) -> None:
        """Return at the first `add`, at `hurry`, or at the deadline (in trio's time)."""
        self._work = trio.Event()
        with trio.move_on_at(deadline):
            await self._work.wait()


class ToRecall:
    """Folders that are delegated to other hosts, and to which a refused commit of this one adds names.

    `Refusals` owns it, and `Delegations` takes from it.
    """

    def __init__(self) -> None:
        self._folders: dict[int, EngineError | None] = {}
        """folder that is asked for, or (with an error) was not given back"""
        self._new: set[int] = set()
        self._work = trio.Event()

    def add(self, folder: int) -> None:
        """Have the folder asked for. EngineError: it was, and is not given back."""
        if (error := self._folders.get(folder)) is not None:
            del self._folders[folder]
            raise error
        if folder not in self._folders:
            self._folders[folder] = None
            self._new.add(folder)
            self._work.set()

    async def take(self) -> set[int]:
        """The next folders to ask for."""
        await self._work.wait()
        self._work = trio.Event()
        new, self._new = self._new, set()
        return new

    def end(self, folder: int, error: EngineError | None) -> None:
        """The folder was given back, or not, for a reason."""
        if error is None:
            self._folders.pop(folder, None)
        else:
            self._folders[folder] = error


@dataclass
class Refusals:
    """Drops or merges changes that conflict with other hosts' commits. Each membership has one."""

    pending: Pending
    merger: Merge
    """merges the changes of two hosts"""
    renew: Renew
    """updates an inode to the stored state; Stale if it is removed"""
    reap: Callable[[Node], None]
    """frees what only memory has of an inode that no caller can reach any more"""
    revive: Callable[[Node], None]
    """reads again an inode that was removed here, but still exists"""

    def __post_init__(self) -> None:
        self.core = self.pending.core
        self.doubtful: dict[Node, None] = {}
        self.to_free = ToFree()
        self.to_recall = ToRecall()

    def mark_doubtful(self, nodes: Iterable[Node]) -> None:
        """Have these read again: their commit was settled late, perhaps after the watch delivered newer changes."""
        self.doubtful.update(dict.fromkeys(nodes))
        self.core.dentries.clear()
        self.pending.load.work.set()

    async def renew_doubtful(self) -> None:
        """Read the inodes of `mark_doubtful` again. EngineError: the next call reads the rest."""
        while self.doubtful:
            node = next(iter(self.doubtful))
            if node.nlink:
                with suppress(Stale):
                    await self.renew(node)
            self.doubtful.pop(node, None)

    def note_removed(self, node: Node) -> None:
        """Note that a transaction removed the last name of a file: the store has its orphan record, of this client."""
        self.pending.loose.withdraw_attributes(node)
        self.pending.forget(node)
        self.to_free.add(node.ino)
        if not node.handles:
            if self.core.places.known(node.ino):
                self.core.unnamed[node.ino] = node
            else:
                self.reap(node)

    def drop_changes(self, node: Node) -> None:
        """Drop the changes of an inode that another host removed, as if it had been unlinked while it was open."""
        self.pending.counters.lost_inodes += 1
        for change in self.pending.list_changes_of(node):
            self.keep_inode(change)
            self.pending.forget_change(change.parent, change.name)
        if not node.version and node.nlink:
            self.core.file_count -= 1  # it was never stored
            if node.is_file and node.namespace:
                self.core.namespaces.accounts.add_files(node.namespace, -1)
        node.nlink = 0
        self.pending.loose.withdraw_attributes(node)
        self.pending.forget(node)
        if not node.handles:
            self.reap(node)

    def note_freed_elsewhere(self, ino: int) -> None:
        """Forget slots of a removed inode that another host has already freed."""
        for node in [node for node in self.pending.gone if node.ino == ino]:
            self.pending.forget(node)
            node.dead = []

    def keep_inode(self, change: NameChange) -> None:
        """Do not remove the inode that would have lost its last name by the change: another host renamed or removed it.

        Memory has it in the state in which it was removed here, so it is read again.
        """
        leaves, change.leaves = change.leaves, None
        if leaves is None:
            return
        self.core.file_count += 1
        if isinstance(leaves, Node) and leaves.nlink == 0:
            self.revive(leaves)

    def replace_inode(self, change: NameChange, record: schema.InodeRecord, version: int) -> None:
        """Have the change remove this inode, which another host put under the name meanwhile."""
        change.leaves = record
        self.core.file_count -= 1
        node = self.core.nodes.get(record.ino)
        if node is not None and node.nlink:
            node.version, node.base = version, record
            self.drop_changes(node)

    async def merge(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        """Merge another host's stored changes into a changed inode. EngineError: try again.

        Where that waits for room, every other commit goes on without the inode: nobody else waits for it.
        """
        await self.merger(node, record, version)
        if node.version < version and node.nlink:
            self.pending.put_off.add(node)
        else:
            self.pending.counters.merged += 1
