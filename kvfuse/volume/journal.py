"""Group commit: what changed in memory, and how it reaches the record store.

Every operation changes memory at once - nodes, and the *overlay* of names over the record store - and
marks what it changed here. One task commits: while one commit is in flight, everything that arrives
joins the next. A waiter (strict publishing, fsync) makes the next commit start at once; without one it
starts when the window since the first change has passed, or when the batch is full.

A batch is built in one go from memory, between two awaits: it is a consistent state. Before, the
staged bytes of its nodes are written to their slots, so no record ever names bytes that are not there.
A node that is open for writing and was never stored stays out until it is closed: a name that nobody
published never touches the store, so create, close and rename that meet in one batch become one put.
A commit that failed may have happened. The same batch is sent again, before anything newer, until the
store takes it: with one writer a repeated put is harmless, and what belongs together stays together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.volume import schema
from kvfuse.volume.node import COMMITTED, FRESH, Extent, Node

if TYPE_CHECKING:
    from kvfuse.slab.allocator import Slot
    from kvfuse.volume.core import Core
    from kvfuse.volume.flush import Flusher

log = logging.getLogger(__name__)

BATCH_CHANGES = 2000
"""New changes of nodes and names that start a commit before the window has passed."""
CROWD_CHANGES = 10_000
"""Changed nodes and names at which an operation waits for a commit before it adds more."""
CROWD_SIZE = 16 << 20
"""Bytes of other records at which it does."""
RETRY_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts after failed commits; the last goes on."""


class NameChange:
    """What a name is here, while the record store does not know it yet."""

    __slots__ = ("moved", "node", "sent", "stored", "vacated")

    def __init__(self, node: Node | None, stored: bool, moved: Node | None, vacated: bool) -> None:
        self.node = node
        """what the name means; None: it does not exist"""
        self.stored = stored
        """the record store has a record of this name"""
        self.moved = moved
        """the inode that went to another name: this one may only go when the other comes"""
        self.vacated = vacated
        """it did not exist for a while: the stored record may go although ``node`` is not ready to come"""
        self.sent = False
        """in a commit that is under way"""


class _Waiter:
    __slots__ = ("done", "durable", "error", "nodes")

    def __init__(self, nodes: tuple[Node, ...], durable: bool) -> None:
        self.nodes = nodes
        self.durable = durable
        self.done = trio.Event()
        self.error: KvfuseError | None = None


class _Batch(NamedTuple):
    """One commit, and what to settle in memory after it."""

    puts: dict[bytes, bytes]
    deletes: set[bytes]
    nodes: list[Node]
    times: list[Node]
    names: list[tuple[int, bytes, NameChange]]
    vacated: list[tuple[int, bytes]]
    """(directory, name): the stored record went, the new one comes later"""
    freed: list[Extent]
    unborn: list[Extent]
    late: set[Node]
    """changed, but not in it: their bytes come first"""


@dataclass
class JournalCounters:
    commits: int = 0
    commit_failures: int = 0
    operations: int = 0
    blocks: int = 0
    """files whose bytes were committed"""


@dataclass
class Journal:
    """See the module. ``window`` in seconds."""

    core: Core
    flusher: Flusher
    window: float
    counters: JournalCounters = field(default_factory=JournalCounters)
    make_room: Callable[[], None] = lambda: None
    """gives up what is only kept in case that somebody asks"""
    renaming: Callable[[int, bytes], None] = lambda directory, name: None
    """is told of a name before it means something else, or nothing"""

    def __post_init__(self) -> None:
        self.overlay: dict[int, dict[bytes, NameChange]] = {}
        """directory -> name -> change"""
        self._dirty: dict[Node, None] = {}
        self._times: dict[Node, None] = {}
        self._extra: dict[bytes, bytes | None] = {}
        self._sent_extra: dict[bytes, bytes | None] = {}
        self.epoch = 0
        """counts settled commits: what was read from the store in an earlier epoch may be old"""
        self._sent: _Batch | None = None
        """the commit that is under way, or failed and will be repeated"""
        self._settling: _Batch | None = None
        """the same, until the slots that it frees are free"""
        self._ties: list[tuple[Node, Node]] = []
        self._name_count = 0
        self._new_count = 0
        """changes since the last commit was built"""
        self._extra_size = 0
        """bytes of attributes and the like, since then"""
        self._waiters: list[_Waiter] = []
        self._peers = 0
        """callers that commit again and again at the same time, by the waiters of the last commits"""
        self._commit_seconds = 0.0
        """that it took"""
        self._gathered = trio.Event()
        self._work = trio.Event()
        self._urgent = trio.Event()
        self._failures = 0
        self._stopped = False

    # -- marking changes; nothing here waits ---------------------------------------------------------

    def touch(self, node: Node, *, forced: bool = False) -> None:
        """``node`` changed; ``forced``: it belongs into the next commit even while it is being written."""
        if forced:
            node.forced = True
        if not node.changed and node.nlink:
            node.changed = True
            self._dirty[node] = None
            self._new_count += 1
        self._wake()

    def touch_times(self, directory: Node) -> None:
        """Only the times of a directory changed: a put that expects nothing and conflicts with nobody's."""
        directory.times_changed = True
        self._times[directory] = None
        self._wake()

    def find(self, parent: int, name: bytes) -> NameChange | None:
        names = self.overlay.get(parent)
        return names.get(name) if names else None

    def set_name(self, parent: int, name: bytes, node: Node | None, stored: bool, moved: Node | None = None) -> None:
        """Let ``name`` mean ``node``, or nothing. ``stored``: the store has a record of the name now."""
        self.renaming(parent, name)
        names = self.overlay.setdefault(parent, {})
        previous = names.get(name)
        vacated = node is None
        self._new_count += 1
        if previous is None:
            self._name_count += 1
        else:
            stored = previous.stored
            if previous.vacated and not previous.sent:
                moved, vacated = previous.moved, True  # nothing of what came since is in the store
        if node is not None:
            node.named = True
            self.core.known.note(parent, name, node.ino)
            if moved is not None and moved is not node:
                self.tie(node, moved)
        else:
            self.core.known.drop(parent, name)
        names[name] = NameChange(node, stored, moved, vacated)
        self._wake()

    def tie(self, first: Node, second: Node) -> None:
        """One took the other's name, and both stay: neither may be committed without the other."""
        self._ties.append((first, second))

    async def untie(self, *nodes: Node) -> bool:
        """Have what is tied committed, before one of the two is renamed or removed; False when nothing was."""
        tied = any(node in tie for tie in self._ties for node in nodes)
        if tied:
            await self.commit(*nodes)
        return tied

    def _with_tied(self, nodes: Iterable[Node]) -> set[Node]:
        """These, and all that may not be committed without them."""
        whole = set(nodes)
        while grown := {node for tie in self._ties if not whole.isdisjoint(tie) for node in tie} - whole:
            whole |= grown
        return whole

    def put(self, key: bytes, value: bytes | None) -> None:
        """Any other record; None deletes it."""
        self._extra[key] = value
        self._extra_size += len(value or b"")
        self._wake()

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Forget what `put` was told of these keys, as far as it is not under way: somebody else has the last word."""
        for key in keys:
            self._extra.pop(key, None)

    def pending_puts(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """What `put` was told of keys that begin with ``prefix`` and the store does not know yet."""
        return {key: value for key, value in {**self._sent_extra, **self._extra}.items() if key.startswith(prefix)}

    def changed_in(self, directory: int) -> set[Node]:
        """Inodes that came to a name in the directory, or left one, and are not in the store so."""
        changes = self.overlay.get(directory, {}).values()
        return {node for change in changes for node in (change.node, change.moved) if node is not None}

    @property
    def crowded(self) -> bool:
        return len(self._dirty) + self._name_count > CROWD_CHANGES or self._extra_size > CROWD_SIZE

    @property
    def freeing_bytes(self) -> int:
        """Bytes of slots that were given up and become free by a commit to come."""
        given_up = [self.core.dead, self.core.unborn, *[node.dead for node in self._dirty if node.dead]]
        staged_size = 0
        for node in self.core.unnamed.values():
            for chunk in node.chunks.values():
                given_up.append(chunk.extents)
                staged_size += chunk.staged.capacity if chunk.staged is not None else 0
        if self._settling is not None:
            given_up.append(self._settling.unborn)
        return (
            sum([extent.slot_size for extents in given_up for extent in extents])
            + self.flusher.dropped_size
            + staged_size
        )

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()
        if self._is_full:
            self._urgent.set()

    @property
    def _is_full(self) -> bool:
        return self._new_count >= BATCH_CHANGES

    # -- waiting -------------------------------------------------------------------------------------

    async def commit(self, *nodes: Node, durable: bool = False) -> None:
        """Return when all that changed before the call is in the store, with the bytes of ``nodes``.

        A cancelled caller leaves the commit to happen. Raises what the engines raise; the changes then stay
        visible here and are tried again.
        """
        self._force(nodes)
        if self._stopped:
            raise EngineError("nothing is committed any more")
        waiter = _Waiter(nodes, durable)
        self._waiters.append(waiter)
        self._work.set()
        self._urgent.set()
        if len(self._waiters) >= self._peers:
            self._gathered.set()
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error

    def _force(self, nodes: Iterable[Node]) -> None:
        """Have these, and what is tied to them, in the next commit even while they are being written."""
        for node in self._with_tied(nodes):
            if node.changed:
                node.forced = True

    async def free(self) -> bool:
        """Have what was given up a moment ago free, by a commit where it takes one. False if nothing was given up."""
        free_before = self.core.slabs.free_bytes
        self.make_room()
        if not (self.freeing_bytes or self.core.slabs.pending_bytes or self.core.reads.has_retired):
            return self.core.slabs.free_bytes > free_before  # staged bytes have slots that no commit knows
        if self.flusher.dropped_size:
            await self.flusher.settled()  # slots that are being written in vain are given up only then
        await self.commit(*[node for node in self._dirty if node.dead])
        return True

    async def sync(self) -> None:
        """All that changed before the call is durable, open files included."""
        await self.commit(*self._dirty, durable=True)

    # -- the committing task -------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit whenever there is something to commit, for ever. When it ends, so does every wait for a commit."""
        try:
            await self._run()
        finally:
            self._stopped = True
            for waiter in self._waiters:
                waiter.error = EngineError("nothing is committed any more")
                waiter.done.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if not self._waiters and not self._is_full:
                self._urgent = trio.Event()  # who set it was served by the last commit
                with trio.move_on_after(self.window):
                    await self._urgent.wait()
            await self._gather()
            self._work, self._urgent = trio.Event(), trio.Event()
            try:
                await self._commit_batch()
                self._failures = 0
            except EngineError as error:
                log.warning("a commit failed and will be repeated: %s", error)
                delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
                self._failures += 1
                with trio.move_on_after(delay):
                    await self._urgent.wait()
                self._work.set()

    async def _gather(self) -> None:
        """Let those come back who were served together last time, for as long as a commit takes at most.

        Without this they fall into two groups that take turns: the first to return leaves alone, all others wait.
        """
        if 0 < len(self._waiters) < self._peers:
            self._gathered = trio.Event()
            with trio.move_on_after(self._commit_seconds):
                await self._gathered.wait()

    async def _commit_batch(self) -> None:
        """Write bytes, build, commit, settle. Operations go on at each await; only `_build` sees one state."""
        waiters = list(self._waiters)
        started = trio.current_time()
        try:
            if self._sent is not None:
                await self._send(self._sent, durable=False)
            flushed = [node for node in self._dirty if node.forced or not node.writers]
            for node in flushed:
                node.named = False
                node.flushed_size = node.size
            await self.flusher.flush(flushed)
            waiters = self._take_waiters(waiters)
            self._sent = self._settling = batch = self._build(set(flushed))
            waiters = self._leave_late(waiters, batch)
            durable = any(waiter.durable for waiter in waiters)
            if durable:
                await self.core.segments.sync()
            await self._send(batch, durable)
        except EngineError as error:
            self.counters.commit_failures += 1
            for waiter in waiters:
                waiter.error = error
            raise
        finally:
            self._peers = max(len(waiters), self._peers - 1)
            self._commit_seconds = trio.current_time() - started
            self._waiters = [waiter for waiter in self._waiters if waiter not in waiters]
            for waiter in waiters:
                waiter.done.set()

    def _take_waiters(self, early: list[_Waiter]) -> list[_Waiter]:
        """Who is served by this commit: those who came before the flush, and later ones with no bytes to be written."""
        return [
            waiter
            for waiter in self._waiters
            if waiter in early or not any(node.staged_count and node.nlink for node in waiter.nodes)
        ]

    def _leave_late(self, waiters: list[_Waiter], batch: _Batch) -> list[_Waiter]:
        """Without those whose files are not in the batch; they and all other waiters get the next one at once.

        Their files may be in the batch as they were before, or tied to others since: they are forced anew.
        """
        served = [waiter for waiter in waiters if batch.late.isdisjoint(waiter.nodes)]
        if len(served) < len(self._waiters):
            for waiter in self._waiters:
                if waiter not in served:
                    self._force(waiter.nodes)
            self._work.set()
            self._urgent.set()
        return served

    async def _send(self, batch: _Batch, durable: bool) -> None:
        """Commit and settle ``_sent``. When that fails it stays to be sent again."""
        if batch.puts or batch.deletes or durable:
            self.counters.commits += 1
            self.counters.operations += len(batch.puts) + len(batch.deletes)
            if not await self.core.records.commit(batch.puts, batch.deletes, durable=durable):
                raise EngineError("the record store refused a commit that expected nothing")
        self._sent = None
        await self._settle(batch)
        self._settling = None

    # -- one batch: these three see and change memory without waiting --------------------------------

    def _build(self, flushed: set[Node]) -> _Batch:
        """A commit of everything that changed, but for nodes with bytes that no slot has: they come next time.

        What was flushed and staged anew during the flush goes in as it was flushed, and stays changed.
        """
        puts: dict[bytes, bytes] = {}
        deletes: set[bytes] = set()
        nodes: list[Node] = []
        freed: list[Extent] = []
        self._new_count = self._extra_size = 0
        late = self._late(flushed)
        extra, self._extra = self._take_extra(late)
        for node in self._dirty:
            if node in late:
                continue
            nodes.append(node)
            node.forced = False
            node.committing = True
            if node.nlink:
                self._build_node(node, puts, deletes, freed)
            if node.extra:
                extra.update(node.extra)
                node.extra = {}
        vacated: list[tuple[int, bytes]] = []
        names = self._build_names(late, puts, deletes, vacated)
        for node in nodes:
            node.changed = bool(node.staged_count and node.nlink)
        self._dirty = {node: None for node in self._dirty if node.changed}
        for directory in self._times:
            if directory.nlink:
                puts[schema.times_key(directory.ino)] = schema.encode_times(
                    directory.atime, directory.mtime, directory.ctime
                )
        times, self._times = list(self._times), {}
        dead, self.core.dead = self.core.dead, []
        unborn, self.core.unborn = self.core.unborn, []
        self._free_slots(dead, freed)
        self._sent_extra = extra
        for key, value in {**extra, **self.core.take_counters()}.items():
            if value is None:
                deletes.add(key)
            else:
                puts[key] = value
        for state in self.core.slabs.take_dirty():
            if state.slot_size:
                puts[schema.slab_key(state.slab)] = schema.encode_slab(state.slot_size, state.bitmap)
            else:
                deletes.add(schema.slab_key(state.slab))
        deletes.difference_update(puts)
        return _Batch(puts, deletes, nodes, times, names, vacated, freed, unborn, late)

    def _late(self, flushed: set[Node]) -> set[Node]:
        """Changed nodes that this commit leaves out: they are being written, or have bytes that no slot has.

        One that was flushed, and staged more meanwhile, goes in as it was flushed - unless it got a name
        meanwhile, which may say that it is whole.
        """
        late = {
            node
            for node in self._dirty
            if node.nlink
            and ((node.staged_count and (node not in flushed or node.named)) or (node.writers and not node.forced))
        }
        if not late:
            self._ties.clear()
        late = self._with_tied(late)
        self._ties = [tie for tie in self._ties if not late.isdisjoint(tie)]
        return late

    def _take_extra(self, late: set[Node]) -> tuple[dict[bytes, bytes | None], dict[bytes, bytes | None]]:
        """(records for this commit, records for later): an attribute comes with its inode, or after it.

        The inode may have lost its name to one that is late: then the stored name still means it, as it was before.
        """
        if not late or not self._extra:
            return self._extra, {}
        later = {}
        for key, value in self._extra.items():
            if key.startswith(schema.XATTR_PREFIX) and _is_held(self.core.nodes.get(schema.key_inode(key)), late):
                later[key] = value
        return {key: value for key, value in self._extra.items() if key not in later}, later

    def _build_node(self, node: Node, puts: dict[bytes, bytes], deletes: set[bytes], freed: list[Extent]) -> None:
        record = node.record()
        if node.own_record:
            puts[schema.inode_key(node.ino)] = schema.encode_inode(record)
        else:
            puts[schema.entry_key(node.parent, node.name)] = schema.encode_entry_inline(record)
        for index in node.dirty_chunks:
            chunk = node.chunks.get(index)
            key = schema.chunk_key(node.ino, index)
            if chunk is not None and chunk.extents:
                puts[key] = schema.encode_chunk(tuple([extent.record() for extent in chunk.extents]))
            else:
                deletes.add(key)
        node.dirty_chunks = frozenset()
        if node.born:
            fresh: list[Slot] = []
            for extent in node.born:
                if extent.state == FRESH:
                    extent.state = COMMITTED
                    fresh.append(extent.slot)
            node.born.clear()
            self.core.slabs.commit(fresh)
            self.counters.blocks += 1
        if node.dead:
            self._free_slots(node.dead, freed)
            node.dead.clear()

    def _build_names(
        self, late: set[Node], puts: dict[bytes, bytes], deletes: set[bytes], vacated: list[tuple[int, bytes]]
    ) -> list[tuple[int, bytes, NameChange]]:
        """The name changes that go with this commit; ``vacated`` gets the names that only go away in it."""
        names = []
        for parent, changes in self.overlay.items():
            for name, change in changes.items():
                node = change.node
                if _is_held(change.moved, late):
                    continue
                if node in late:
                    if change.vacated and change.stored:
                        deletes.add(schema.entry_key(parent, name))
                        vacated.append((parent, name))
                    continue
                change.sent = True
                names.append((parent, name, change))
                if node is None:
                    if change.stored:
                        deletes.add(schema.entry_key(parent, name))
                elif node.own_record:
                    puts[schema.entry_key(parent, name)] = schema.encode_entry_reference(node.ino)
        return names

    def _free_slots(self, extents: Iterable[Extent], freed: list[Extent]) -> None:
        dead = list(extents)
        self.core.slabs.release([extent.slot for extent in dead])
        freed.extend(dead)

    async def _settle(self, batch: _Batch) -> None:
        """The commit is in the store: forget the overlay it carried, let freed slots be used again."""
        self.epoch += 1
        self._sent_extra = {}
        for directory in batch.times:
            directory.times_changed = directory in self._times
        for node in batch.nodes:
            node.committing = False
            node.stored = True
        for parent, name, change in batch.names:
            self.core.known.settle(parent, name, change.node is not None)
            names = self.overlay[parent]
            current = names[name]
            if current is change:
                del names[name]
                self._name_count -= 1
                if not names:
                    del self.overlay[parent]
            else:
                current.stored = change.node is not None
        for parent, name in batch.vacated:
            self.overlay[parent][name].stored = False
        freed = [extent.slot for extent in batch.freed]
        unborn = [extent.slot for extent in batch.unborn]
        if freed or unborn:
            await self.flusher.mark_free([*freed, *unborn])
            self.core.reads.retire(self.core.slabs.reclaim, freed)
            self.core.reads.retire(self.core.slabs.cancel, unborn)


def _is_held(moved: Node | None, late: set[Node]) -> bool:
    """An inode that left its name is not yet in the store elsewhere; or what it had is freed by a later heir."""
    while moved is not None and moved not in late:
        moved = moved.heir if moved.nlink == 0 else None
    return moved is not None
