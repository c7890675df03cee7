"""Holds changes in memory that are not in the record store yet. Those of names are also in their entries (`Dentries`).

Every operation changes memory at once and marks its changes here. Nothing in this module waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfuse.volume.commit.late import Aside, Late, Ties, is_held, settlers
from kvfuse.volume.commit.loose import LooseRecords
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.node import Node, check_remembered

if TYPE_CHECKING:
    from kvfuse.volume.inodes.core import Core

BATCH_CHANGES = 1000
"""New changes of nodes and names that start a commit before the window has passed."""
CROWD_CHANGES = 2000
"""Changed nodes and names (without those aside) from which on operations wait for a commit before they add more. Users
with changes share this number, and each waits only above its own share. So no user makes others wait, or makes
commits so large that others notice."""
BEHIND_FACTOR = 4
"""So many times as many of both where changes outlive the daemon without a commit."""
CROWD_SIZE = 16 << 20
"""Bytes of loose records from which on operations wait."""
LINK_SHARE = 16
"""Changes that depend on each other, at which operations await their commit: one for so many operations of a commit,"""
LINKED_MAX = 1000
"""and at most so many."""


@dataclass
class JournalCounters:
    commits: int = 0
    commit_failures: int = 0
    operations: int = 0
    blocks: int = 0
    """files whose bytes were committed"""
    lost_names: int = 0
    """names changed here and lost to another host's change"""
    lost_inodes: int = 0
    """inodes changed here that another host removed"""
    merged: int = 0
    """inodes changed here and by another host, whose changes were merged"""


class Load:
    """Counts pending changes, and wakes the task that commits them. `Pending` owns it."""

    def __init__(self, operation_count: int) -> None:
        """``operation_count``: operations that the record store accepts in one commit."""
        self.work = trio.Event()
        """set after a change: a commit starts when the window has passed"""
        self.urgent = trio.Event()
        """set to start a commit at once"""
        self._loose_size = 0
        """bytes of loose records, since the last commit was built"""
        self.is_behind = False
        """changes outlive the daemon without a commit: more of them may wait for one"""
        self.linked_count = 0
        """changes that cannot be committed alone, made since a commit last had room for all"""
        self._new_count = 0
        """changes since the last commit was built"""
        self._counts: dict[int, int] = {}
        """user -> its changes that the next commit looks at"""
        self._batch_max = min(BATCH_CHANGES, max(1, operation_count // 4))
        self._crowd_max = min(CROWD_CHANGES, 8 * operation_count)
        self.linked_max = max(1, min(LINKED_MAX, operation_count // LINK_SHARE))

    def hurry(self) -> None:
        """Start the next commit at once."""
        self.work.set()
        self.urgent.set()

    def add(self, uid: int, count: int = 1) -> None:
        """Count changed inodes and names of this user."""
        self._new_count += count
        self._counts[uid] = self._counts.get(uid, 0) + count
        self.work.set()
        if self._new_count >= self._batch_max and self.is_full:
            self.urgent.set()

    def add_loose(self, size: int) -> None:
        """Count a changed loose record of ``size`` bytes."""
        self._loose_size += size
        self.work.set()

    def begin_anew(self, uids: Iterable[int]) -> None:
        """Count anew after a commit was built. ``uids``: the user of each change that is left for the next one."""
        self._new_count = self._loose_size = 0
        self._counts = dict(Counter(uids))

    def is_crowded(self, uid: int) -> bool:
        """The user has used up its share of changes that may wait for a commit."""
        crowd_max = self._crowd_max * (BEHIND_FACTOR if self.is_behind else 1)
        return self._counts.get(uid, 0) * len(self._counts) > crowd_max or self._loose_size > CROWD_SIZE

    @property
    def is_full(self) -> bool:
        if not self.is_behind:
            return self._new_count >= self._batch_max
        return self._new_count >= self._batch_max * BEHIND_FACTOR or self.linked_count > self.linked_max // 2


@dataclass
class Pending:
    """All changes for the next commits, and those that the next one leaves out. The journal owns it."""

    core: Core
    counters: JournalCounters = field(default_factory=JournalCounters, kw_only=True)

    def __post_init__(self) -> None:
        self.dentries = self.core.dentries
        self.epoch = 0
        """counts settled commits: a record read from the store in an earlier epoch may be stale"""
        self.dirty: dict[Node, int] = {}
        """changed inode, a candidate of the next commit -> serial number of its first change"""
        self.names: dict[NameChange, None] = {}
        """changes of names that are candidates of the next commit"""
        self.aside = Aside[NameChange]()
        self.gone: dict[Node, int] = {}
        """inode without names whose slots or records are to be freed -> serial number of the removal"""
        self.times: dict[Node, None] = {}
        """directories with changed times"""
        self.ties = Ties()
        self.put_off: set[Node] = set()
        """that the next commit leaves out: changes of two hosts wait for room"""
        self.left_out: set[int] = set()
        """directories whose new files the next commit leaves out, see `Conflicts`"""
        self.serial = 0
        """serial number of the last change"""
        self.load = Load(self.core.records.limits.commit_operations_max)
        self.unstored = self.core.unstored
        self.loose = LooseRecords(self.load.add_loose, self.unstored)

    def touch(self, node: Node, *, forced: bool = False) -> None:
        """Mark ``node`` as changed. ``forced``: commit it even while open for writing. EngineError: as `set_name`."""
        if node.forgotten:
            check_remembered(node)
        if self.unstored is not None:
            self.unstored.node(node)
        if forced:
            node.forced = True
        if not node.changed and node.nlink:
            node.changed = True
            self.serial += 1
            self.dirty[node] = self.serial
            self.load.add(node.uid)
            return
        if node.aside and (node.forced or not node.writers):
            self.reconsider(node)
        self.load.work.set()

    def touch_times(self, directory: Node) -> None:
        """Mark changed times of a directory: their put expects no version, so it cannot conflict."""
        if directory.forgotten:
            check_remembered(directory)
        directory.times_changed = True
        self.times[directory] = None
        if self.unstored is not None:
            self.unstored.times(directory)
        if directory.ino in self.dentries.changes:
            self.dentries.folders[directory.ino] = directory
        self.load.work.set()

    def add_gone(self, node: Node) -> None:
        """Commit ``dead`` and ``extra`` of a node without names and heir with the removal of its name."""
        check_remembered(node)
        if node.extra or node.dead:
            self.loose.withdraw(node.extra)
            if node not in self.gone:
                self.serial += 1
                self.gone[node] = self.serial
        self.load.work.set()

    def set_name(
        self,
        parent: int,
        name: bytes,
        node: Node | None,
        stored: bool,
        moved: Node | None = None,
        version: int = 0,
        leaves: Node | None = None,
    ) -> None:
        """Let ``name`` mean ``node``, or nothing (None). ``stored``: the store has a record of it, of ``version``.

        ``moved``: the inode that left the name. ``leaves``: the inode that lost its last name by this.
        EngineError, with nothing changed, if the membership is over.
        """
        for one in (node, moved, leaves):
            if one is not None and one.forgotten:
                check_remembered(one)
        is_stored = leaves is not None and (leaves.version or leaves.committing)
        change = NameChange(parent, name, node, stored, moved, node is None, version, leaves if is_stored else None)
        previous = self.dentries.put_change(change)
        if self.unstored is not None:
            self.unstored.name(parent, name)
        if previous is not None:
            self._replace_change(change, previous)
        moved = change.moved
        if node is not None:
            node.named = True
            if moved is not None and moved is not node and moved.nlink:
                self.tie(node, moved)
            self.load.linked_count += node.own_record
        elif moved is not None:
            self.load.linked_count += moved.own_record
        if self.aside.nodes:
            for one in (node, leaves, *settlers(moved)):
                if one is not None:
                    self.reconsider(one)
        self.names[change] = None
        self.load.add(change.uid)

    def _replace_change(self, change: NameChange, previous: NameChange) -> None:
        """Let a change replace one that is not in the store yet."""
        self._drop_name(previous)
        change.stored, change.version = previous.stored, previous.version
        if previous.vacated and not previous.sent and self._may_lose(previous):
            change.moved, change.vacated = previous.moved, True  # no later change is in the store
        if not previous.sent:
            change.leaves = previous.leaves  # likewise
        self.load.linked_count += change.stored

    def _may_lose(self, previous: NameChange) -> bool:
        """The store may have an inode by the name that it left: the next owner is not stored before that inode is."""
        moved = previous.moved
        return previous.stored or self.unstored is None or (moved is not None and (moved.stored or moved.committing))

    def tie(self, first: Node, second: Node) -> None:
        """Tie two inodes of which one took the other's name, and both stay: they are committed together."""
        self.load.linked_count += 1
        self.ties.add(first, second)
        self.reconsider(first)
        self.reconsider(second)

    def find_changed_in(self, directory: int) -> set[Node]:
        """Inodes that got or lost a name in the directory by a change that is not in the store."""
        changes = self.dentries.changes_in(directory).values()
        return {node for change in changes for node in (change.node, change.moved) if node is not None}

    @property
    def has_removals(self) -> bool:
        """The next commit may remove files from the store."""
        return bool(self.gone or self.names)

    def list_givers(self) -> list[Node]:
        """Changed inodes with slots to free, or with files that their commit removes."""
        givers = self.core.givers = {node: None for node in self.core.givers if node.dead or node.lost_files}
        return [
            node
            for node in {**givers, **self.gone}
            if (node.dead or node.lost_files) and (node.changed or node in self.gone)
        ]

    # -- dropping changes -------------------------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Drop all pending changes of the inode."""
        self.reconsider(node)
        if not node.handles:
            self.core.nodes.note_saved(node)
        self.dirty.pop(node, None)
        self.core.metadata.release(node.reserved)
        node.reserved = 0
        self.gone.pop(node, None)
        self.times.pop(node, None)
        self.ties.drop(node)
        node.changed = node.forced = node.times_changed = False
        self.loose.forget_seen(node.extra)
        node.extra = {}

    def give_up_times(self, ino: int, current: Node | None) -> None:
        """Drop changed times of other nodes of the directory than ``current``: another host has changed it since."""
        for directory in [directory for directory in self.times if directory.ino == ino and directory is not current]:
            self.forget(directory)

    def list_changes_of(self, node: Node) -> list[NameChange]:
        return [
            change for changes in self.dentries.changes.values() for change in changes.values() if change.node is node
        ]

    def list_changed(self, ino: int) -> list[Node]:
        """Changed nodes of an inode; memory may have another node of it by now, or none."""
        return [node for node in (*self.dirty, *self.aside.nodes) if node.ino == ino]

    def list_changed_inline(self, *, aside: bool) -> list[Node]:
        """Changed inodes whose records are in their names. ``aside``: include those that are aside."""
        return [node for node in (*self.dirty, *(self.aside.nodes if aside else ())) if not node.own_record]

    def forget_change(self, parent: int, name: bytes) -> None:
        """Drop the pending change of a name."""
        self.epoch += 1
        self._drop_name(self.dentries.give_up(parent, name))

    # -- leaving changes out of the next commit ------------------------------------------------------

    def reconsider(self, node: Node) -> None:
        """Make an inode that may be aside, and all that waits for it, candidates of the next commit."""
        work = [node] if node.aside else []
        while work:
            one = work.pop()
            if one.aside:
                self.dirty[one], names = self.aside.take(one)
                work += self.ties.others.get(one, ())
                for change in names:
                    work += change.holders
                    self.names[change] = None
                self.load.work.set()

    def _drop_name(self, change: NameChange) -> None:
        """Remove a change that was replaced or dropped."""
        for holder in change.holders:
            self.reconsider(holder)
        self.names.pop(change, None)

    def _set_aside(self, written: set[Node]) -> None:
        """Set aside inodes that are open for writing, and all that may not be committed without them."""
        for node in self._find_closure(written):
            if node in self.dirty:
                self.aside.put(node, self.dirty.pop(node))
        held = [(change, holders) for change in self.names if (holders := _find_holders(change))]
        for change, holders in held:
            del self.names[change]
            self.aside.hold(change, holders)

    def find_late(self, flushed: set[Node]) -> Late:
        """Changed nodes that the next commit leaves out: they are aside, or have bytes that no slot has.

        A node that was flushed, and staged more since, is committed as it was flushed, unless it got a name
        since, which may publish it as whole.
        """
        written = {node for node in self.dirty if node.nlink and node.writers and not node.forced}
        if written or self.aside.nodes:
            self._set_aside(written)
        staged = {
            node for node in self.dirty if node.nlink and node.staged_count and (node not in flushed or node.named)
        }
        if self.put_off:
            staged |= self.put_off & self.dirty.keys()
            self.put_off.clear()
        if self.left_out:
            staged |= {node for node in self.dirty if node.parent in self.left_out and not node.version}
            self.left_out.clear()
        return self._find_closure(staged) if staged or self.aside.nodes else staged

    def _find_closure(self, nodes: set[Node]) -> set[Node]:
        """These, and all that wait for them: tied inodes, and those that took a name which may not change yet."""
        nodes = self.ties.find_closure(nodes)
        while held_back := self._find_held_back(nodes):
            nodes = self.ties.find_closure(nodes | held_back)
        return nodes

    def _find_held_back(self, nodes: set[Node]) -> set[Node]:
        """Inodes that took a name which may not change yet, because its former inode is settled with one of these."""
        return {
            change.node
            for change in self.names
            if change.moved is not None
            and change.node in self.dirty
            and change.node not in nodes
            and is_held(change.moved, nodes)
        }


def _find_holders(change: NameChange) -> tuple[Node, ...]:
    """The inodes aside for which the change has to wait; may be none."""
    holders = [node for node in settlers(change.moved) if node.aside]
    if change.node is not None and change.node.aside and (holders or not change.may_go_first):
        holders.append(change.node)
    return tuple(holders)
