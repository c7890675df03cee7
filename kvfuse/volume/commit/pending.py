"""What changed in memory and is not in the record store yet. Changes of names stand in their entries (`Dentries`), too.

Every operation changes memory at once and marks here what it changed. Nothing in this module waits.
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
    from kvfuse.volume.store import schema

BATCH_CHANGES = 1000
"""New changes of nodes and names that start a commit before the window has passed."""
CROWD_CHANGES = 2000
"""Changed nodes and names, but for those aside, at which an operation waits for a commit before it adds more. Users who
change something share them, and each waits for what is more than its own share. So none makes the others wait, nor a
commit so large that they see it."""
CROWD_SIZE = 16 << 20
"""Bytes of loose records at which it does."""
LINK_SHARE = 16
"""One part in so many of a commit's operations: changes that depend on each other, at which their commit is awaited."""
LINKED_MAX = 1000
"""and no more of them"""


@dataclass
class JournalCounters:
    commits: int = 0
    commit_failures: int = 0
    operations: int = 0
    blocks: int = 0
    """files whose bytes were committed"""
    lost_names: int = 0
    """names of ours that another host's took the place of"""
    lost_inodes: int = 0
    """inodes that another host removed while they were being changed here"""
    merged: int = 0
    """inodes that another host changed, too"""


class Load:
    """Counts what is pending, and wakes the task that commits it. `Pending` owns it."""

    def __init__(self, operation_count: int) -> None:
        """``operation_count``: what the record store takes in one commit."""
        self.work = trio.Event()
        """set when something changed: it is committed when the window has passed"""
        self.urgent = trio.Event()
        """set when it is to be committed at once"""
        self._loose_size = 0
        """bytes of loose records, since the last commit was built"""
        self.linked_count = 0
        """changes that cannot be committed each alone, since nothing was left out of a commit"""
        self._new_count = 0
        """changes since the last commit was built"""
        self._counts: dict[int, int] = {}
        """user -> its changes that the next commit looks at"""
        self._batch_max = min(BATCH_CHANGES, max(1, operation_count // 4))
        self._crowd_max = min(CROWD_CHANGES, 8 * operation_count)
        self.linked_max = max(1, min(LINKED_MAX, operation_count // LINK_SHARE))

    def hurry(self) -> None:
        """Have the next commit begin at once."""
        self.work.set()
        self.urgent.set()

    def add(self, uid: int) -> None:
        """An inode or a name of this user changed."""
        self._new_count += 1
        self._counts[uid] = self._counts.get(uid, 0) + 1
        self.work.set()
        if self._new_count >= self._batch_max:
            self.urgent.set()

    def add_loose(self, size: int) -> None:
        """A loose record of so many bytes changed."""
        self._loose_size += size
        self.work.set()

    def begin_anew(self, uids: Iterable[int]) -> None:
        """A commit was built. ``uids``: of each change that the next one looks at."""
        self._new_count = self._loose_size = 0
        self._counts = dict(Counter(uids))

    def is_crowded(self, uid: int) -> bool:
        """A user has its share of the changes that may be waiting for a commit."""
        return self._counts.get(uid, 0) * len(self._counts) > self._crowd_max or self._loose_size > CROWD_SIZE

    @property
    def is_full(self) -> bool:
        return self._new_count >= self._batch_max


@dataclass
class Pending:
    """All that the next commits have to store, and what of it the next one leaves out. The journal owns it."""

    core: Core
    counters: JournalCounters = field(default_factory=JournalCounters, kw_only=True)

    def __post_init__(self) -> None:
        self.dentries = self.core.dentries
        self.epoch = 0
        """counts settled commits: what was read from the store in an earlier epoch may be old"""
        self.dirty: dict[Node, int] = {}
        """changed inode that the next commit looks at -> serial number of the change that made it so"""
        self.names: dict[NameChange, None] = {}
        """changes of names that the next commit looks at"""
        self.aside = Aside[NameChange]()
        self.gone: dict[Node, int] = {}
        """inode that lost its last name and leaves slots or records -> as above"""
        self.times: dict[Node, None] = {}
        """directories of which only the times changed"""
        self.folders: dict[int, Node] = {}
        """directories with changed names, in a shared volume"""
        self.ties = Ties()
        self.serial = 0
        """of the last change"""
        self.load = Load(self.core.records.limits.commit_operations_max)
        self.loose = LooseRecords(self.load.add_loose)

    def touch(self, node: Node, *, forced: bool = False) -> None:
        """``node`` changed; ``forced``: it belongs into the next commit even while it is being written."""
        if node.forgotten:
            check_remembered(node)
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
        """Only the times of a directory changed: a put that expects nothing and conflicts with nobody's."""
        if directory.forgotten:
            check_remembered(directory)
        directory.times_changed = True
        self.times[directory] = None
        self.load.work.set()

    def left(self, node: Node) -> None:
        """``node`` lost its last name, and nobody takes on what it leaves: ``dead`` and ``extra`` go with the name."""
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
        """Let ``name`` mean ``node``, or nothing. ``stored``: the store has a record of the name now, of ``version``.

        ``moved``: the inode that the name meant, where it means nothing now. ``leaves``: the inode that the name meant,
        where that was its last one. EngineError, and nothing is changed, where the membership is over.
        """
        for one in (node, moved, leaves):
            if one is not None and one.forgotten:
                check_remembered(one)
        change = NameChange(parent, name, node, stored, moved, node is None, version)
        previous = self.dentries.put_change(change)
        if previous is not None:
            self._follow(change, previous)
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
        if self.core.shared:
            if previous is None and (folder := self.core.nodes.get(parent)) is not None:
                self.folders[parent] = folder
            change.leaves = self._leaves(previous, leaves)

    def _follow(self, change: NameChange, previous: NameChange) -> None:
        """A change takes the place of one that is not in the store yet."""
        self._drop_name(previous)
        change.stored, change.version = previous.stored, previous.version
        if previous.vacated and not previous.sent:
            change.moved, change.vacated = previous.moved, True  # nothing of what came since is in the store
        self.load.linked_count += change.stored

    def _leaves(self, previous: NameChange | None, removed: Node | None) -> Node | schema.InodeRecord | None:
        """The inode that the store has under a name when the next commit is built, if that is to be removed.

        It is never renamed meanwhile: of what is stored, or about to be, names change in a transaction.
        """
        if previous is not None and not previous.sent:
            return previous.leaves  # what had the name here since never came into the store
        return removed if removed is not None and (removed.version or removed.committing) else None

    def tie(self, first: Node, second: Node) -> None:
        """One took the other's name, and both stay: neither may be committed without the other."""
        self.load.linked_count += 1
        self.ties.add(first, second)
        self.reconsider(first)
        self.reconsider(second)

    def changed_in(self, directory: int) -> set[Node]:
        """Inodes that came to a name in the directory, or left one, and are not in the store so."""
        changes = self.dentries.changes_in(directory).values()
        return {node for change in changes for node in (change.node, change.moved) if node is not None}

    def giving_up(self) -> list[Node]:
        """Changed inodes that give up slots."""
        givers = self.core.givers = {node: None for node in self.core.givers if node.dead}
        return [node for node in {**givers, **self.gone} if node.dead and (node.changed or node in self.gone)]

    # -- what is not to be stored any more --------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Nothing of the inode is to be stored any more."""
        self.reconsider(node)
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
        """Of a directory that memory dropped, or has anew as ``current``: others have changed it since."""
        for directory in [directory for directory in self.times if directory.ino == ino and directory is not current]:
            self.forget(directory)

    def changes_of(self, node: Node) -> list[NameChange]:
        return [
            change for changes in self.dentries.changes.values() for change in changes.values() if change.node is node
        ]

    def changed(self, ino: int) -> list[Node]:
        """What is changed of an inode; in memory there may be another one of it by now, or none."""
        return [node for node in (*self.dirty, *self.aside.nodes) if node.ino == ino]

    def changed_inline(self, *, aside: bool) -> list[Node]:
        """Changed inodes whose records stand in their names. ``aside``: those that are aside, too."""
        return [node for node in (*self.dirty, *(self.aside.nodes if aside else ())) if not node.own_record]

    def forget_change(self, parent: int, name: bytes) -> None:
        """The name is what it is in the store."""
        self.epoch += 1
        self._drop_name(self.dentries.give_up(parent, name))
        self.drop_folders()

    def drop_folders(self) -> None:
        """Keep only directories that have changed names still."""
        self.folders = {ino: folder for ino, folder in self.folders.items() if ino in self.dentries.changes}

    # -- what the next commit leaves out -------------------------------------------------------------

    def reconsider(self, node: Node) -> None:
        """Have the next commit look at an inode that may be aside, and at all that waits for it."""
        work = [node] if node.aside else []
        while work:
            one = work.pop()
            if one.aside:
                self.dirty[one], names = self.aside.take(one)
                work += self.ties.others.get(one, ())
                for change in names:
                    work += change.holders
                    self.names[change] = None

    def _drop_name(self, change: NameChange) -> None:
        """The change is no more: another takes its place, or none."""
        for holder in change.holders:
            self.reconsider(holder)
        self.names.pop(change, None)

    def _set_aside(self, written: set[Node]) -> None:
        """Set aside what is being written, and what may not be committed without that."""
        for node in self._closure(written):
            if node in self.dirty:
                self.aside.put(node, self.dirty.pop(node))
        held = [(change, holders) for change in self.names if (holders := _holders(change))]
        for change, holders in held:
            del self.names[change]
            self.aside.hold(change, holders)

    def late(self, flushed: set[Node]) -> Late:
        """Changed nodes that the next commit leaves out: they are aside, or have bytes that no slot has.

        One that was flushed, and staged more meanwhile, goes in as it was flushed - unless it got a name
        meanwhile, which may say that it is whole.
        """
        written = {node for node in self.dirty if node.nlink and node.writers and not node.forced}
        if written or self.aside.nodes:
            self._set_aside(written)
        staged = {
            node for node in self.dirty if node.nlink and node.staged_count and (node not in flushed or node.named)
        }
        return self._closure(staged) if staged or self.aside.nodes else staged

    def _closure(self, nodes: set[Node]) -> set[Node]:
        """These, and all that have to wait for them: tied ones, and those that took a name which may not change yet."""
        nodes = self.ties.closure(nodes)
        while held_back := self._held_back(nodes):
            nodes = self.ties.closure(nodes | held_back)
        return nodes

    def _held_back(self, nodes: set[Node]) -> set[Node]:
        """Inodes that took a name which may not change yet, as what it meant is settled with one of these."""
        return {
            change.node
            for change in self.names
            if change.moved is not None
            and change.node in self.dirty
            and change.node not in nodes
            and is_held(change.moved, nodes)
        }


def _holders(change: NameChange) -> tuple[Node, ...]:
    """The inodes that are aside for which the change has to wait; none where it need not."""
    holders = [node for node in settlers(change.moved) if node.aside]
    if change.node is not None and change.node.aside and (holders or not change.may_go_first):
        holders.append(change.node)
    return tuple(holders)
