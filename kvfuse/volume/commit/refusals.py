"""What becomes of changes that are pending here, where another host removed, replaced or changed the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import Stale
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.inodes.dentries import NameChange

Merge = Callable[[Node, schema.InodeRecord, int], Awaitable[None]]
"""as `Merger.merge`"""
Renew = Callable[[Node], Awaitable[None]]


class ToFree:
    """Inodes that this client removed, in the store: each is freed when nobody has it open, here or elsewhere.

    `Refusals` owns it, and `Removed` takes from it.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, int]] = deque()
        """(when it was removed, inode)"""
        self._work = trio.Event()

    def add(self, ino: int) -> None:
        """The inode was removed just now."""
        self.waiting.append((trio.current_time(), ino))
        if len(self.waiting) == 1:
            self.hurry()

    def hurry(self) -> None:
        """Have those looked at that wait."""
        self._work.set()

    async def wait(self, deadline: float) -> None:
        """Until the first one comes, somebody hurries, or the deadline has passed."""
        self._work = trio.Event()
        with trio.move_on_at(deadline):
            await self._work.wait()


@dataclass
class Refusals:
    """Gives up changes that others came before, or merges them. One of each membership."""

    pending: Pending
    merger: Merge
    """puts the changes of two hosts together"""
    renew: Renew
    """brings an inode up to what other hosts have stored; Stale, if it is gone"""
    reap: Callable[[Node], None]
    """frees what an inode has in memory alone that nobody can ask for any more"""
    revive: Callable[[Node], None]
    """has an inode read anew that was removed here, and is alive"""

    def __post_init__(self) -> None:
        self.core = self.pending.core
        self.doubtful: dict[Node, None] = {}
        self.to_free = ToFree()

    def doubt(self, nodes: Iterable[Node]) -> None:
        """A commit was settled long after it happened: what others changed since may have been told in between."""
        self.doubtful.update(dict.fromkeys(nodes))
        self.core.dentries.clear()
        self.pending.load.work.set()

    async def renew_doubtful(self) -> None:
        """Read anew what `doubt` was told of. EngineError leaves it to be done again."""
        while self.doubtful:
            node = next(iter(self.doubtful))
            if node.nlink:
                with suppress(Stale):
                    await self.renew(node)
            self.doubtful.pop(node, None)

    def removed(self, node: Node) -> None:
        """A transaction took the last name of a file away: the store has its orphan record, of this client."""
        self.pending.loose.withdraw_attributes(node)
        self.pending.forget(node)
        self.to_free.add(node.ino)
        if not node.handles:
            if self.core.places.known(node.ino):
                self.core.unnamed[node.ino] = node
            else:
                self.reap(node)

    def lost(self, node: Node) -> None:
        """Another host removed an inode that was changed here: the changes go where they would have gone then."""
        self.pending.counters.lost_inodes += 1
        for change in self.pending.changes_of(node):
            self.stays(change)
            self.pending.forget_change(change.parent, change.name)
        if not node.version and node.nlink:
            self.core.file_count -= 1  # nobody ever got to know it
        node.nlink = 0
        self.pending.loose.withdraw_attributes(node)
        self.pending.forget(node)
        if not node.handles:
            self.reap(node)

    def freed_elsewhere(self, ino: int) -> None:
        """What a removed inode left, another host has freed already."""
        for node in [node for node in self.pending.gone if node.ino == ino]:
            self.pending.forget(node)
            node.dead = []

    def stays(self, change: NameChange) -> None:
        """The inode that would have been removed with a change of its name is another's business now.

        Another host renamed or removed it: what is in memory is as it was when it was removed here.
        """
        leaves, change.leaves = change.leaves, None
        if leaves is None:
            return
        self.core.file_count += 1
        if isinstance(leaves, Node) and leaves.nlink == 0:
            self.revive(leaves)

    def replaces(self, change: NameChange, record: schema.InodeRecord, version: int) -> None:
        """The change takes the name from this inode, which got it elsewhere: it is removed with it."""
        change.leaves = record
        self.core.file_count -= 1
        node = self.core.nodes.get(record.ino)
        if node is not None and node.nlink:
            node.version, node.base = version, record
            self.lost(node)

    async def merge(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        """Bring a changed inode up to what another host stored. EngineError: to be tried again."""
        self.pending.counters.merged += 1
        await self.merger(node, record, version)
