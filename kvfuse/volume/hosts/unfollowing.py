"""Ends the following of directories and inodes that this host has not used for long, or of too many.

Memory must have nothing of a topic that is not followed: no name of the directory, no inode whose record is in one of
these names, and no node of the directory itself, which each call that uses its names holds. Nor may the kernel cache
something of it: a directory's name is invalidated, which drops all names below it, and their inodes, but for open ones,
whose nodes stay.

What clients map may be used without a call: bindings of a directory end with its following, and are made anew. Those
above directories in use by rings stay, as changes of their owners and modes end rights (`views.ancestors`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import trio

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.followed import NAMES, Followed

TOPICS_MAX = 8192
"""that are followed, about; each costs the store a watch, or two"""
IDLE_SECONDS = 300.0
"""after so long without use a topic is no longer followed"""
CROWDED_SECONDS = 10.0
"""the same, where there are too many topics"""
SWEEP_SECONDS = 30.0
TOLD_SECONDS = 5.0
"""for which a sweep waits for the kernel"""


@dataclass
class Unfollowing:
    """One of each membership of a shared volume."""

    refresher: Refresher
    followed: Followed

    def __post_init__(self) -> None:
        self.core, self.news = self.refresher.core, self.refresher.news

    async def run(self) -> None:
        """Sweep, for ever."""
        while True:
            await trio.sleep(SWEEP_SECONDS if len(self.followed.topics) < TOPICS_MAX else CROWDED_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """Leave what is idle. A topic that is used meanwhile stays."""
        idle = self._find_idle()
        if not idle:
            return
        idle = {key: used_at for key, used_at in idle.items() if self._tell_kernel(key)}
        with trio.move_on_after(TOLD_SECONDS) as scope:
            await self.news.told()
        if not scope.cancelled_caught:
            topics, needed = self.followed.topics, self._list_needed()
            unused = {key for key, used_at in idle.items() if topics[key].used_at == used_at and not topics[key].pins}
            self._leave({key for key in unused if schema.key_inode(key) not in needed})

    # -- nothing waits -------------------------------------------------------------------------------

    def _find_idle(self) -> dict[bytes, float]:
        """Key of each topic that is idle -> when it was used last; the oldest first."""
        now, excess = trio.current_time(), len(self.followed.topics) - TOPICS_MAX
        limit = now - (CROWDED_SECONDS if excess > 0 else IDLE_SECONDS)
        old = [(key, topic) for key, topic in self.followed.topics.items() if topic.used_at < limit]
        needed = self._list_needed() if old else set()
        found: dict[bytes, float] = {}
        for key, topic in sorted(old, key=lambda row: row[1].used_at):
            if topic.used_at > now - IDLE_SECONDS and len(found) >= excess:
                break
            node = self.core.nodes.peek(schema.key_inode(key))
            if node is not None and node.recent:  # names that memory knows are used without a read
                topic.use()
                node.recent = False
            elif not topic.pins and schema.key_inode(key) not in needed:
                found[key] = topic.used_at
        return found

    def _list_needed(self) -> set[int]:
        """Inodes that are in use, and directories with such; those that the kernel has for ever, and that are above
        what clients use."""
        busy = [node for node in self.core.nodes if node.busy]
        always = {ROOT_INODE, *self.core.namespaces.gates.ancestors.inodes(), *self.core.dentries.delegated}
        return {*always, *self.core.dentries.changes, *_needed(busy)}

    def _tell_kernel(self, key: bytes) -> bool:
        """False: the kernel knows the directory, and nobody knows here by which name."""
        ino = schema.key_inode(key)
        place = self.core.places.get(ino)
        if place is None:
            return True
        if key[0] == NAMES:
            self.news.name(*place)
        self.core.places.set_content_version(ino, 0)
        self.news.content(ino)
        return key[0] != NAMES or bool(place[1])

    def _leave(self, keys: set[bytes]) -> None:
        """Leave those of which memory has nothing, or can forget all."""
        directories = {schema.key_inode(key) for key in keys if key[0] == NAMES}
        inodes = {schema.key_inode(key) for key in keys}
        self.core.dentries.forget_directories(directories)
        nodes = self.core.nodes
        nodes.evict([node for node in nodes if node.ino in inodes or _place_of(node) in directories])
        held = _needed(nodes.held())
        for key in keys:
            if schema.key_inode(key) not in held:
                self.followed.leave(key)
            else:  # a call has it
                self.followed.topics[key].use()


def _needed(nodes: Iterable[Node]) -> set[int]:
    """These inodes, and the directories in whose names their records are."""
    return {ino for node in nodes for ino in (node.ino, _place_of(node))}


def _place_of(node: Node) -> int:
    """The directory whose name has the record; 0: it has one of its own."""
    return 0 if node.own_record else node.parent
