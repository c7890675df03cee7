"""One commit at a time: the journal's batch, and the transactions that fit beside it.

In a shared volume each commit also moves this client's *sequence* record and expects it as the last one left it. So no
commit of this client happens twice, and what an interrupted one did is known by one look at that record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.remote.records.api import ABSENT, RecordLimits, RecordStore, Versioned
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_marked
from kvfuse.volume.store.transaction import Transaction

RESERVED_OPERATIONS = 4
"""of a commit in a shared volume: the member and the sequence record are expected, the latter and a count are put"""
RESERVED_BYTES = 256
COMMITS_MAX = 3
"""So many times as long as a commit takes others are waited for that are on their way."""
LOOK_SECONDS = 0.001
"""between looks whether somebody is"""
SECONDS_MAX = 0.05
"""What a commit is taken to last at most: nobody waits for others because the store was stalled once."""


@dataclass
class Changes:
    """What one commit does; as `Transaction`, but it grows."""

    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: set[bytes] = field(default_factory=set)
    expect: dict[bytes, int] = field(default_factory=dict)
    version: int = 0
    """of the commit that did it, once that is known"""
    files: int = 0
    """inodes that it makes, less those that it removes; in a shared volume"""
    size: int = 0
    """bytes that names, inodes and attributes weigh more after it; likewise"""


class Outcome(NamedTuple):
    """What became of a batch."""

    version: int
    """of its puts; 0: it was refused, and nothing of it was done"""
    found: Mapping[bytes, Versioned | None]
    """of a refused batch: what the expected keys have, as far as that is not what it expected"""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A transaction that a caller waits for."""

    transaction: Transaction
    done: trio.Event = field(default_factory=trio.Event)
    taken: bool = False
    version: int = 0
    error: KvfuseError | None = None


class _Group:
    """A commit under way: a batch, or none, and transactions, of which none changes what another one is about."""

    def __init__(self, batch: Changes | None, limits: RecordLimits, sequence: Sequence | None) -> None:
        begun = batch or Changes()
        self.batch = batch
        self.files, self.size = begun.files, begun.size
        self.members: list[_Waiting] = []
        self.changes = Changes(dict(begun.puts), set(begun.deletes), dict(begun.expect))
        if sequence is not None:
            self.changes.puts[sequence.key] = sequence.value
            self.changes.expect[sequence.key] = sequence.version
        self._limits = limits
        self._bytes = RESERVED_BYTES

    def join(self, waiting: _Waiting) -> bool:
        """Take a transaction along; False where it has no room, or is about the same records."""
        transaction, changes = waiting.transaction, self.changes
        written = transaction.changes
        count = len(changes.puts) + len(changes.deletes) + len(changes.expect) + transaction.operation_count
        if not self.members and self.batch is None:
            fits = True  # alone: it was looked at when it came
        else:
            fits = count + RESERVED_OPERATIONS <= self._limits.commit_operations_max
            fits = fits and self._size() + transaction.byte_count <= self._limits.commit_bytes_max
        touched = written | transaction.expect.keys()
        if (
            not fits
            or not written.isdisjoint(changes.expect)
            or not changes.deletes.isdisjoint(touched)
            or not changes.puts.keys().isdisjoint(touched)
            or any(changes.expect.get(key, version) != version for key, version in transaction.expect.items())
        ):
            return False
        changes.puts.update(transaction.puts)
        changes.deletes.update(transaction.deletes)
        changes.expect.update(transaction.expect)
        self._bytes += transaction.byte_count
        self.files += transaction.files
        self.size += transaction.size
        self.members.append(waiting)
        return True

    def _size(self) -> int:
        if self.batch is not None and self._bytes == RESERVED_BYTES:
            self._bytes += Transaction(self.batch.expect, self.batch.puts, self.batch.deletes).byte_count
        return self._bytes


@dataclass
class Gathering:
    """Says when the next commit should begin: when as many callers wait as were served together lately.

    A commit costs the store's members, and this process, about the same whatever it carries. Without this, callers
    fall into groups that take turns: the first to return leaves alone, all others wait. Those that are missing are
    waited for as long as a commit takes; and for some times that, while somebody is seen on the way, as with bytes that
    are being written for a file that is closed. The committer owns it.
    """

    queues: tuple[Sized, ...]
    """of those who wait for the next commit; `came` is to be called when one more does"""
    coming: Callable[[], bool]
    """somebody is on the way who may wait for a commit then"""

    def __post_init__(self) -> None:
        self._peers = 0
        """that the last commits served together"""
        self.seconds = 0.0
        """that the last one took, or `SECONDS_MAX`"""
        self._complete = trio.Event()

    def came(self) -> None:
        """One more waits."""
        if sum(map(len, self.queues)) >= self._peers:
            self._complete.set()
            self._complete = trio.Event()

    def served(self, count: int, seconds: float) -> None:
        """A commit took so long, and so many had waited for it. One that nobody waited for says nothing of others."""
        if count:
            self._peers = max(count, (self._peers + count) // 2)
            self.seconds = min(seconds, SECONDS_MAX)

    async def meet(self) -> None:
        """Return when the next commit should begin."""
        began = trio.current_time()
        patience = self.seconds
        while 0 < sum(map(len, self.queues)) < self._peers:
            with trio.move_on_after(patience):
                await self._complete.wait()
                return
            if not self.coming() or trio.current_time() >= began + COMMITS_MAX * self.seconds:
                return
            patience = LOOK_SECONDS


@dataclass
class Sequence:
    """This client's sequence record in a shared volume. Its committer alone writes it."""

    key: bytes
    value: bytes = b""
    counts_key: bytes | None = None
    """of the record that counts what this client made, less what it removed; None: nobody counts"""
    version: int = ABSENT


class Committer:
    """Sends one commit after the other. The journal owns it."""

    def __init__(
        self,
        records: RecordStore,
        sequence: Sequence | None = None,
        *,
        batch_waiters: Sized = (),
        came_late: Callable[[], None] = lambda: None,
        coming: Callable[[], bool] = lambda: False,
    ) -> None:
        """``sequence``: None where nobody else writes the store. ``batch_waiters``: callers that wait for a batch.

        ``came_late``: called when an interrupted commit turns out to have happened: others may have changed the same.
        ``coming``: see `Gathering`.
        """
        self.records = records
        self.size = 0
        """bytes of names, inodes and attributes, as they are in the store"""
        self._files = 0
        """inodes, likewise"""
        self._sequence = sequence
        self._came_late = came_late
        self.turn = trio.Lock()
        """Nobody else commits while it is held: what is built then is sent before anything else is."""
        self._waiting: deque[_Waiting] = deque()
        self._work = trio.Event()
        self._batch_waiters = batch_waiters
        self.gathering = Gathering((self._waiting, batch_waiters), coming)
        """of those, and of transactions"""
        self._taken = trio.Event()
        """the next commit sets it, when it has taken along who waits"""
        self._unknown: _Group | None = None
        """its outcome is not known"""
        self._stopped = False

    # -- transactions --------------------------------------------------------------------------------

    async def transact(self, transaction: Transaction) -> bool:
        """Return True when it is in the store, False when an expected version had moved and nothing was done.

        A caller that is cancelled before the commit began takes it back; after, it may happen. EngineError: unknown.
        ValueError for one that is larger than a commit may be.
        """
        self.records.limits.check_commit(transaction.puts, transaction.deletes, transaction.expect)
        if self._stopped:
            raise EngineError("nothing is committed any more")
        waiting = _Waiting(transaction)
        self._waiting.append(waiting)
        self._work.set()
        self.gathering.came()
        try:
            await waiting.done.wait()
        finally:
            if not waiting.taken and not waiting.done.is_set():
                self._waiting.remove(waiting)
        if waiting.error is not None:
            raise waiting.error
        return waiting.version > 0

    async def run(self) -> None:
        """Commit transactions that no batch takes along, for ever. When it ends, so does every wait for one."""
        try:
            while True:
                await self._work.wait()
                self._work = trio.Event()
                while self._waiting:
                    await self._meet()
                    async with self.turn:
                        if self._waiting:
                            await self._send_alone()
        finally:
            self._stopped = True
            self._refuse_all(EngineError("nothing is committed any more"))

    def _refuse_all(self, error: EngineError) -> None:
        for waiting in self._waiting:
            _finish(waiting, error=error)
        self._waiting.clear()

    async def _meet(self) -> None:
        """Let others come who go with the same commit. The journal's batch takes along who waits, where it is near:
        it may have bytes to write first.
        """
        await self.gathering.meet()
        if self._batch_waiters:
            with trio.move_on_after(self.gathering.seconds):
                await self._taken.wait()

    async def _send_alone(self) -> None:
        try:
            await self.resolve()
        except EngineError as error:  # they wait no longer than a call takes
            self._refuse_all(error)
            return
        with suppress(EngineError):  # those whom it concerns were told
            await self.send(None, durable=False)

    # -- sending -------------------------------------------------------------------------------------

    async def send(
        self, batch: Changes | None, *, durable: bool, waiter_count: int = 0, began: float | None = None
    ) -> Outcome:
        """In one's turn: commit a batch, and transactions beside it. EngineError: unknown; see `resolve`.

        ``batch``: None commits transactions alone. ``waiter_count``: how many wait for it. ``began``: when the work
        for this commit did; None: now.
        """
        began = trio.current_time() if began is None else began
        if self._unknown is not None:
            await self.resolve()
        group = self._gather(batch)
        while batch is not None or group.members:
            changes = group.changes
            if (group.files or group.size) and self._sequence and self._sequence.counts_key:
                # With what changes it, so that no crash comes between.
                counts = schema.encode_counts(self._files + group.files, self.size + group.size)
                changes.puts[self._sequence.counts_key] = counts
            try:
                version = await self.records.commit(changes.puts, changes.deletes, changes.expect, durable=durable)
                found = {} if version else await self._look(changes.expect)
            except BaseException as error:
                self._interrupted(group, error)
                raise
            if version:
                self.gathering.served(len(group.members) + waiter_count, trio.current_time() - began)
                self._applied(group, version)
                return Outcome(version, {})
            if self._sequence is not None and self._sequence.key in found:
                told = EngineError("another daemon commits under this client's number: unmount and mount again")
                for waiting in group.members:
                    _finish(waiting, error=told)
                raise told
            group = self._without_losers(group, found)
            if batch is not None and any(key in batch.expect for key in found):
                self._put_back(group)
                return Outcome(0, {key: row for key, row in found.items() if key in batch.expect})
        return Outcome(0, {})

    def _gather(self, batch: Changes | None) -> _Group:
        """The batch and as many of those that wait as fit beside it, in the order in which they came."""
        group = _Group(batch, self.records.limits, self._sequence)
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if group.join(waiting):
                waiting.taken = True
            else:
                self._waiting.append(waiting)
        if self._waiting:
            self._work.set()
        self._taken.set()
        self._taken = trio.Event()
        return group

    async def _look(self, expect: Mapping[bytes, int]) -> dict[bytes, Versioned | None]:
        """What is there now of keys whose version is not the expected one; of damaged records the version alone."""
        keys = list(expect)
        rows = await get_marked(self.records, keys)
        return {
            key: row for key, row in zip(keys, rows, strict=True) if (row.version if row else ABSENT) != expect[key]
        }

    def _without_losers(self, group: _Group, found: Mapping[bytes, Versioned | None]) -> _Group:
        """The same without transactions that expected something else. They are told."""
        rest = _Group(group.batch, self.records.limits, self._sequence)
        for waiting in group.members:
            if any(key in found for key in waiting.transaction.expect):
                _finish(waiting)
            else:
                rest.join(waiting)
        return rest

    def _put_back(self, group: _Group) -> None:
        """These were not the reason; they go with another commit."""
        for waiting in group.members:
            waiting.taken = False
        self._waiting.extendleft(reversed(group.members))
        if group.members:
            self._work.set()

    def _applied(self, group: _Group, version: int) -> None:
        if self._sequence is not None:
            self._sequence.version = version
        self._files += group.files
        self.size += group.size
        if group.batch is not None:
            group.batch.version = version
        for waiting in group.members:
            waiting.transaction.applied(version)
            _finish(waiting, version)

    def _interrupted(self, group: _Group, error: BaseException) -> None:
        """The commit may have happened. Callers hear it; the next commit finds out first."""
        if self._sequence is not None:
            self._unknown = group
        told = error if isinstance(error, KvfuseError) else EngineError("nothing is committed any more")
        for waiting in group.members:
            _finish(waiting, error=told)

    async def resolve(self) -> None:
        """In one's turn: have it known whether the last commit happened. EngineError where that cannot be told yet.

        If it did, `Changes.version` of its batch says so, and what its transactions do when they are done is done.
        """
        group, sequence = self._unknown, self._sequence
        if group is None or sequence is None:
            return
        # Asked by a commit: before it, the engine makes sure that nothing sent earlier is done later.
        version = sequence.version
        if not await self.records.commit({}, (), {sequence.key: version}):
            (row,) = await self.records.get([sequence.key])
            version = row.version if row else ABSENT
        self._unknown = None
        if version != sequence.version:
            self._applied(group, version)
            self._came_late()


def _finish(waiting: _Waiting, version: int = 0, error: KvfuseError | None = None) -> None:
    waiting.version, waiting.error = version, error
    waiting.done.set()
