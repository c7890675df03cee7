"""What changed in memory and is not in the record store yet: inodes, and the *overlay* of names over the store.

Every operation changes memory at once and marks here what it changed. Nothing in this module waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfuse.volume.commit.late import Aside, Late, Ties, is_held, settlers
from kvfuse.volume.inodes.metadata_budget import Stored
from kvfuse.volume.inodes.node import Node, check_remembered
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.inodes.core import Core
    from kvfuse.volume.slots.flusher import Flusher

BATCH_CHANGES = 1000
"""New changes of nodes and names that start a commit before the window has passed."""
CROWD_CHANGES = 2000
"""Changed nodes and names, but for those aside, at which an operation waits for a commit before it adds more. Users who
change something share them, and each waits for what is more than its own share. So none makes the others wait, nor a
commit so large that they see it."""
CROWD_SIZE = 16 << 20
"""Bytes of other records at which it does."""
GIVERS_MIN = 1000
"""see `Pending._givers_max`"""
LINK_SHARE = 16
"""One part in so many of a commit's operations: changes that depend on each other, at which their commit is awaited."""
LINKED_MAX = 1000
"""and no more of them"""
CHUNK_SHARE = 8
"""One part in so many: chunk records of one file that may be waiting for a commit."""
CHUNK_MAX = 4096
"""and no more of them"""


class NameChange:
    """What a name is here, while the record store does not know it yet."""

    __slots__ = ("holders", "leaves", "moved", "name", "node", "parent", "sent", "stored", "vacated", "version")

    def __init__(
        self, place: tuple[int, bytes], node: Node | None, stored: bool, moved: Node | None, vacated: bool, version: int
    ) -> None:
        self.parent, self.name = place
        self.node = node
        """what the name means; None: it does not exist"""
        self.stored = stored
        """the record store has a record of this name"""
        self.moved = moved
        """the inode that left the name, for another or none: this one may only go when what becomes of it comes"""
        self.vacated = vacated
        """it did not exist for a while: the stored record may go although ``node`` is not ready to come"""
        self.version = version
        """of the stored record, in a shared volume"""
        self.leaves: Node | schema.InodeRecord | None = None
        """in a shared volume: the inode that has the name in the store, and loses it, its last, by this change"""
        self.sent = False
        """in a commit that is under way"""
        self.holders: tuple[Node, ...] = ()
        """inodes that are aside, and the change with them"""

    @property
    def uid(self) -> int:
        """Whose inode it is about."""
        node = self.node or self.moved or self.leaves
        return node.uid if node is not None else 0

    @property
    def may_go_first(self) -> bool:
        """The stored record can be deleted before what the name means now is stored."""
        return self.vacated and self.stored


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


@dataclass
class Pending:
    """See the module."""

    core: Core
    flusher: Flusher
    counters: JournalCounters = field(default_factory=JournalCounters, kw_only=True)
    renaming: Callable[[int, bytes], None] = field(default=lambda directory, name: None, kw_only=True)
    """is told of a name before it means something else, or nothing"""

    def __post_init__(self) -> None:
        self.overlay: dict[int, dict[bytes, NameChange]] = {}
        """directory -> name -> change"""
        self.epoch = 0
        """counts settled commits: what was read from the store in an earlier epoch may be old"""
        self._dirty: dict[Node, int] = {}
        """changed inode that the next commit looks at -> serial number of the change that made it so"""
        self._names: dict[NameChange, None] = {}
        """changes of names that the next commit looks at"""
        self._aside = Aside()
        self._gone: dict[Node, int] = {}
        """inode that lost its last name and leaves slots or records -> as above"""
        self._times: dict[Node, None] = {}
        self._extra: dict[bytes, bytes | None] = {}
        self.folders: dict[int, Node] = {}
        """directories with changed names, in a shared volume"""
        self._sent_extra: dict[bytes, bytes | None] = {}
        self.seen: dict[bytes, Stored] = {}
        """in a shared volume: attribute that is pending, or under way -> what the store has in its place"""
        self._ties = Ties()
        self._serial = 0
        self._new_count = 0
        """changes since the last commit was built"""
        self._givers_max = GIVERS_MIN
        """how many inodes may be kept as giving up slots before those are forgotten that have none any more"""
        self._counts: dict[int, int] = {}
        """user -> its changes that the next commit looks at"""
        self._linked_count = 0
        """changes that cannot be committed each alone, since nothing was left out of a commit"""
        self._extra_size = 0
        """bytes of attributes and the like, since the last commit was built"""
        self._work = trio.Event()
        self._urgent = trio.Event()
        operation_count = self.core.records.limits.commit_operations_max
        self._batch_max = min(BATCH_CHANGES, max(1, operation_count // 4))
        self._crowd_max = min(CROWD_CHANGES, 8 * operation_count)
        self._linked_max = max(1, min(LINKED_MAX, operation_count // LINK_SHARE))
        self.chunk_count_max = max(2, min(CHUNK_MAX, operation_count // CHUNK_SHARE))
        """chunk records of one file that may be waiting for a commit"""

    def touch(self, node: Node, *, forced: bool = False) -> None:
        """``node`` changed; ``forced``: it belongs into the next commit even while it is being written."""
        if node.forgotten:
            check_remembered(node)
        if forced:
            node.forced = True
        if not node.changed and node.nlink:
            node.changed = True
            self._serial += 1
            self._dirty[node] = self._serial
            self._count_new(node.uid)
        elif node.aside and (node.forced or not node.writers):
            self.reconsider(node)
        self._wake()

    def touch_times(self, directory: Node) -> None:
        """Only the times of a directory changed: a put that expects nothing and conflicts with nobody's."""
        if directory.forgotten:
            check_remembered(directory)
        directory.times_changed = True
        self._times[directory] = None
        self._wake()

    def left(self, node: Node) -> None:
        """``node`` lost its last name, and nobody takes on what it leaves: ``dead`` and ``extra`` go with the name."""
        check_remembered(node)
        if node.extra or node.dead:
            self.withdraw(node.extra)
            if node not in self._gone:
                self._serial += 1
                self._gone[node] = self._serial
        self._wake()

    def find(self, parent: int, name: bytes) -> NameChange | None:
        names = self.overlay.get(parent)
        return names.get(name) if names else None

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
        self.renaming(parent, name)
        names = self.overlay.setdefault(parent, {})
        previous = names.get(name)
        vacated = node is None
        if previous is None:
            if self.core.shared and (folder := self.core.nodes.get(parent)) is not None:
                self.folders[parent] = folder
        else:
            self._drop_name(previous)
            stored, version = previous.stored, previous.version
            if previous.vacated and not previous.sent:
                moved, vacated = previous.moved, True  # nothing of what came since is in the store
            self._linked_count += stored
        if node is not None:
            node.named = True
            self.core.known.note(parent, name, node.ino)
            if moved is not None and moved is not node and moved.nlink:
                self.tie(node, moved)
            self._linked_count += node.own_record
        else:
            self._linked_count += moved is not None and moved.own_record
            self.core.known.drop(parent, name)
        for one in (node, leaves, *settlers(moved)):
            if one is not None:
                self.reconsider(one)
        names[name] = change = NameChange((parent, name), node, stored, moved, vacated, version)
        self._names[change] = None
        self._count_new(change.uid)
        if self.core.shared:
            change.leaves = self._leaves(previous, leaves)
        self._wake()

    def _leaves(self, previous: NameChange | None, removed: Node | None) -> Node | schema.InodeRecord | None:
        """The inode that the store has under a name when the next commit is built, if that is to be removed.

        It is never renamed meanwhile: of what is stored, or about to be, names change in a transaction.
        """
        if previous is not None and not previous.sent:
            return previous.leaves  # what had the name here since never came into the store
        return removed if removed is not None and (removed.version or removed.committing) else None

    def tie(self, first: Node, second: Node) -> None:
        """One took the other's name, and both stay: neither may be committed without the other."""
        self._linked_count += 1
        self._ties.add(first, second)
        self.reconsider(first)
        self.reconsider(second)

    def put(self, key: bytes, value: bytes | None, stored: Stored | None = None) -> None:
        """Any other record; None deletes it. ``stored``: what the store has, of an attribute in a shared volume."""
        self._extra[key] = value
        if stored is not None:
            self.seen.setdefault(key, stored)
        self._extra_size += len(value or b"")
        self._wake()

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Forget what `put` was told of these keys, as far as it is not under way: somebody else has the last word."""
        for key in keys:
            self._extra.pop(key, None)

    def forget_seen(self, keys: Iterable[bytes]) -> None:
        """These are not to change any more, but for those that are under way."""
        for key in keys:
            if key not in self._sent_extra:
                self.seen.pop(key, None)

    def withdraw_attributes(self, node: Node) -> None:
        """The inode was removed: what is pending of its attributes is not put, or taken away by the next commit.

        Its orphan record, which says whether there are attributes to be removed, need not know of these. Who has the
        file open still sees them.
        """
        if not node.flags & schema.FLAG_XATTRS:
            return
        prefix = schema.xattr_prefix(node.ino)
        node.unstored_attributes = {**self.pending_puts(prefix), **node.unstored_attributes}
        keys = [key for key in self._extra if key.startswith(prefix)]
        self.withdraw(keys)
        self.forget_seen(keys)
        for key, value in self._sent_extra.items():
            if value is not None and key.startswith(prefix):  # that commit may be refused: then it is pending again
                self._extra[key] = None

    def pending_puts(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """What `put` was told of keys that begin with ``prefix`` and the store does not know yet."""
        return {key: value for key, value in {**self._sent_extra, **self._extra}.items() if key.startswith(prefix)}

    def changed_in(self, directory: int) -> set[Node]:
        """Inodes that came to a name in the directory, or left one, and are not in the store so."""
        changes = self.overlay.get(directory, {}).values()
        return {node for change in changes for node in (change.node, change.moved) if node is not None}

    def crowded(self, uid: int) -> bool:
        """A user has its share of the changes that may be waiting for a commit."""
        return self._counts.get(uid, 0) * len(self._counts) > self._crowd_max or self._extra_size > CROWD_SIZE

    def _count_new(self, uid: int) -> None:
        self._new_count += 1
        self._counts[uid] = self._counts.get(uid, 0) + 1

    def _count_anew(self) -> None:
        """A commit was built: the next one looks at what is left."""
        self._counts = dict(Counter([*[node.uid for node in self._dirty], *[change.uid for change in self._names]]))
        if len(self.core.givers) > self._givers_max:
            self._giving_up()
            self._givers_max = GIVERS_MIN + 2 * len(self.core.givers)

    @property
    def freeing_bytes(self) -> int:
        """Bytes of slots that were given up and become free by a commit to come."""
        given_up = [self.core.dead, self.core.unborn, *[node.dead for node in self._giving_up()]]
        staged_size = 0
        for node in self.core.unnamed.values():
            for chunk in node.chunks.values():
                given_up.append(chunk.extents)
                staged_size += chunk.staged.capacity if chunk.staged is not None else 0
        return (
            sum([extent.slot_size for extents in given_up for extent in extents])
            + self.flusher.dropped_size
            + staged_size
        )

    def _giving_up(self) -> list[Node]:
        """Changed inodes that give up slots."""
        givers = self.core.givers = {node: None for node in self.core.givers if node.dead}
        return [node for node in {**givers, **self._gone} if node.dead and (node.changed or node in self._gone)]

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()
        if self._is_full:
            self._urgent.set()

    @property
    def _is_full(self) -> bool:
        return self._new_count >= self._batch_max

    # -- what the next commit leaves out -------------------------------------------------------------

    def reconsider(self, node: Node) -> None:
        """Have the next commit look at an inode that may be aside, and at all that waits for it."""
        work = [node] if node.aside else []
        while work:
            one = work.pop()
            if one.aside:
                self._dirty[one], names = self._aside.take(one)
                work += self._ties.of(one)
                for change in names:
                    work += change.holders
                    self._names[change] = None

    def _drop_name(self, change: NameChange) -> None:
        """The change is no more: another takes its place, or none."""
        for holder in change.holders:
            self.reconsider(holder)
        self._names.pop(change, None)

    def _set_aside(self) -> None:
        """Set aside what is being written, and what may not be committed without that."""
        written = {node for node in self._dirty if node.nlink and node.writers and not node.forced}
        for node in self._closure(written):
            if node in self._dirty:
                self._aside.put(node, self._dirty.pop(node))
        if self._aside:
            held = [(change, holders) for change in self._names if (holders := _holders(change))]
            for change, holders in held:
                del self._names[change]
                self._aside.hold(change, holders)

    def _late(self, flushed: set[Node]) -> Late:
        """Changed nodes that the next commit leaves out: they are aside, or have bytes that no slot has.

        One that was flushed, and staged more meanwhile, goes in as it was flushed - unless it got a name
        meanwhile, which may say that it is whole.
        """
        self._set_aside()
        staged = {
            node for node in self._dirty if node.nlink and node.staged_count and (node not in flushed or node.named)
        }
        return Late(self._closure(staged))

    def _closure(self, nodes: set[Node]) -> set[Node]:
        """These, and all that have to wait for them: tied ones, and those that took a name which may not change yet."""
        nodes = self._ties.closure(nodes)
        while held_back := self._held_back(nodes):
            nodes = self._ties.closure(nodes | held_back)
        return nodes

    def _held_back(self, nodes: set[Node]) -> set[Node]:
        """Inodes that took a name which may not change yet, as what it meant is settled with one of these."""
        if not nodes and not self._aside:
            return set()
        late = Late(nodes)
        return {
            change.node
            for change in self._names
            if change.moved is not None
            and change.node in self._dirty
            and change.node not in nodes
            and is_held(change.moved, late)
        }


def _holders(change: NameChange) -> tuple[Node, ...]:
    """The inodes that are aside for which the change has to wait; none where it need not."""
    holders = [node for node in settlers(change.moved) if node.aside]
    if change.node is not None and change.node.aside and (holders or not change.may_go_first):
        holders.append(change.node)
    return tuple(holders)
