"""Sends commits to the store, one at a time: the journal's batch, and the transactions that fit beside it.

In a shared volume each commit also puts this client's *sequence* record and expects the version of the last put. So no
commit of this client happens twice, and one read of that record shows whether an interrupted commit happened.
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
from kvfuse.volume.namespaces.namespace_uses import NOTHING, OwnUses
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import Counts
from kvfuse.volume.store.sealed import get_marked
from kvfuse.volume.store.transaction import Transaction

RESERVED_OPERATIONS = 4
"""the committer's own in a shared volume: it expects member and sequence record, and puts sequence record and count"""
RESERVED_BYTES = 256
USE_RECORD_SIZE = 48
"""bytes of the record of a namespace's use, with its key"""
COMMITS_MAX = 3
"""A commit waits for callers that are on their way for at most so many times the duration of a commit."""
LOOK_SECONDS = 0.001
"""pause between two checks for such callers"""
SECONDS_MAX = 0.05
"""Upper bound of the assumed duration of a commit, so that one stall of the store delays no later commits."""


@dataclass
class WriteSet:
    """Puts, deletes and expected versions of one commit; like `Transaction`, but mutable."""

    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: set[bytes] = field(default_factory=set)
    expect: dict[bytes, int] = field(default_factory=dict)
    version: int = 0
    """in a shared volume: of the commit, once it is known that it happened"""
    files: int = 0
    """in a shared volume: new inodes less removed ones"""
    size: int = 0
    """in a shared volume: growth of the weight of names, inodes and attributes, in bytes"""
    uses: dict[int, Counts] = field(default_factory=dict)
    """namespace -> how it changes this client's use of it"""


class Outcome(NamedTuple):
    """The result of sending a batch."""

    version: int
    """version of its puts; 0: the store refused it whole"""
    found: Mapping[bytes, Versioned | None]
    """records of a refused batch's expected keys that have another version than expected"""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A transaction that a caller waits for."""

    transaction: Transaction
    done: trio.Event = field(default_factory=trio.Event)
    taken: bool = False
    version: int = 0
    error: KvfuseError | None = None


class _Group:
    """One commit: a batch, or none, and transactions, which touch different records."""

    def __init__(self, batch: WriteSet | None, limits: RecordLimits, sequence: Sequence | None) -> None:
        begun = batch or WriteSet()
        self.batch = batch
        self.files, self.size = begun.files, begun.size
        self.uses = dict(begun.uses)
        self.members: list[_Waiting] = []
        self.changes = WriteSet(dict(begun.puts), set(begun.deletes), dict(begun.expect))
        if sequence is not None:
            self.changes.puts[sequence.key] = sequence.value
            self.changes.expect[sequence.key] = sequence.version
        self._counts_key = sequence.counts_key if sequence is not None else None
        self._limits = limits
        self._bytes = RESERVED_BYTES

    def join(self, waiting: _Waiting) -> bool:
        """Add a transaction; False if it does not fit, or touches the same records."""
        transaction, changes = waiting.transaction, self.changes
        written = transaction.changes
        count = len(changes.puts) + len(changes.deletes) + len(changes.expect) + transaction.operation_count
        count += len(self.uses.keys() | transaction.uses.keys())
        if not self.members and self.batch is None:
            fits = True  # alone: `transact` checked its size
        else:
            fits = count + RESERVED_OPERATIONS <= self._limits.commit_operations_max
            fits = fits and self._count_bytes() + transaction.byte_count <= self._limits.commit_bytes_max
        touched = written | transaction.expect.keys()
        counts = self._counts_key
        if (
            not fits
            or (counts in written and bool(self.files or self.size))  # it hands over the stored counts
            or (counts in changes.deletes and bool(transaction.files or transaction.size))
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
        for number, change in transaction.uses.items():
            self._bytes += USE_RECORD_SIZE
            self.uses[number] = self.uses[number].add(change) if number in self.uses else change
        self.files += transaction.files
        self.size += transaction.size
        self.members.append(waiting)
        return True

    def _count_bytes(self) -> int:
        if self.batch is not None and self._bytes == RESERVED_BYTES:
            self._bytes += Transaction(self.batch.expect, self.batch.puts, self.batch.deletes).byte_count
            self._bytes += USE_RECORD_SIZE * len(self.batch.uses)
        return self._bytes


@dataclass
class Gathering:
    """Decides when the next commit begins: when as many callers wait as the last commits served together.

    The cost of a commit for the store and this process hardly depends on its size. Without this, callers
    form groups that take turns: the first one to return is committed alone while all others wait. A commit waits for
    missing callers as long as a commit takes; and for some times as long while a caller is known to be on its way, for
    example while the bytes of a file are written that is being closed. The committer owns it.
    """

    queues: tuple[Sized, ...]
    """callers that wait for the next commit; `add_caller` must be called for each new one"""
    is_coming: Callable[[], bool]
    """a caller is on its way that may soon wait for a commit"""

    def __post_init__(self) -> None:
        self._peers = 0
        """callers that the last commits served together"""
        self.seconds = 0.0
        """duration of the last commit, at most `SECONDS_MAX`"""
        self._complete = trio.Event()

    def add_caller(self) -> None:
        """Note that one more caller waits."""
        if sum(map(len, self.queues)) >= self._peers:
            self._complete.set()
            self._complete = trio.Event()

    def note_served(self, count: int, seconds: float) -> None:
        """Note the duration of a commit, and how many callers it served. Ignored for ``count`` 0."""
        if count:
            self._peers = max(count, (self._peers + count) // 2)
            self.seconds = min(seconds, SECONDS_MAX)

    async def await_callers(self) -> None:
        """Return when the next commit should begin."""
        began = trio.current_time()
        patience = self.seconds
        while 0 < sum(map(len, self.queues)) < self._peers:
            with trio.move_on_after(patience):
                await self._complete.wait()
                return
            if not self.is_coming() or trio.current_time() >= began + COMMITS_MAX * self.seconds:
                return
            patience = LOOK_SECONDS


@dataclass
class Sequence:
    """This client's sequence record in a shared volume. Its committer alone writes it."""

    key: bytes
    value: bytes = b""
    counts_key: bytes | None = None
    """key of the record with this client's counts of inodes and bytes; None: it has none"""
    version: int = ABSENT
    counts: Counts = NOTHING
    """what that record says now"""


@dataclass
class UseRecords:
    """This client's records of the use of namespaces. Its committer alone writes them."""

    uses: OwnUses
    client: int

    def put(self, more: Mapping[int, Counts], changes: WriteSet) -> None:
        """Put the records into the commit that changes the use, so that a crash cannot separate them."""
        for number, value in self.uses.values(more).items():
            key = schema.use_key(number, self.client)
            changes.puts[key] = value
            changes.deletes.discard(key)


class Committer:
    """Sends one commit after the other. The journal owns it."""

    def __init__(
        self,
        records: RecordStore,
        sequence: Sequence | None = None,
        uses: UseRecords | None = None,
        *,
        batch_waiters: Sized = (),
        on_late_commit: Callable[[], None] = lambda: None,
        is_coming: Callable[[], bool] = lambda: False,
    ) -> None:
        """``sequence``: None if no other client writes the store. ``uses``: None where nothing is counted.
        ``batch_waiters``: callers that wait for a batch.

        ``on_late_commit``: called if an interrupted commit turns out to have happened: other hosts may have changed the
        same records since. ``is_coming``: see `Gathering`.
        """
        self.records = records
        counts = sequence.counts if sequence is not None else NOTHING
        self.size = counts.size or 0
        """stored weight of names, inodes and attributes of this client, in bytes; below 0 if it removed more"""
        self._files = counts.inodes
        """stored inodes that this client made, less those that it removed"""
        self._sequence = sequence
        self._uses = uses
        self._on_late_commit = on_late_commit
        self.turn = trio.Lock()
        """Only its holder commits: the batch that the holder builds is the next commit."""
        self._waiting: deque[_Waiting] = deque()
        self._work = trio.Event()
        self._batch_waiters = batch_waiters
        self.gathering = Gathering((self._waiting, batch_waiters), is_coming)
        self._taken = trio.Event()
        """set when the next commit has taken the waiting transactions"""
        self._unknown: _Group | None = None
        """an interrupted commit that may have happened"""
        self._stopped = False

    # -- transactions --------------------------------------------------------------------------------

    async def transact(self, transaction: Transaction) -> bool:
        """Commit a transaction. False, with nothing done, if an expected version had changed.

        If the caller is cancelled before the commit began, it does not happen; after that it may. EngineError: it may
        have happened. ValueError: it is larger than a commit may be.
        """
        try:
            self._check_size(transaction)
        except BaseException:
            transaction.refused()
            raise
        if self._stopped:
            transaction.refused()
            raise EngineError("nothing is committed any more")
        waiting = _Waiting(transaction)
        self._waiting.append(waiting)
        self._work.set()
        self.gathering.add_caller()
        try:
            await waiting.done.wait()
        finally:
            if not waiting.taken and not waiting.done.is_set():
                self._waiting.remove(waiting)
                transaction.refused()
        if waiting.error is not None:
            raise waiting.error
        return waiting.version > 0

    def _check_size(self, transaction: Transaction) -> None:
        """ValueError: it would not fit into a commit, with the committer's own records beside it."""
        limits = self.records.limits
        limits.check_commit(transaction.puts, transaction.deletes, transaction.expect)
        operations, size = transaction.operation_count + len(transaction.uses), transaction.byte_count
        if self._sequence is not None:
            operations, size = operations + RESERVED_OPERATIONS, size + RESERVED_BYTES
        size += USE_RECORD_SIZE * len(transaction.uses)
        if operations > limits.commit_operations_max or size > limits.commit_bytes_max:
            raise ValueError(f"{operations} operations with {size} bytes are more than a commit may have")

    async def run(self) -> None:
        """Commit transactions that no batch includes, until cancelled. Then their callers get EngineError."""
        try:
            while True:
                await self._work.wait()
                self._work = trio.Event()
                while self._waiting:
                    await self._await_partners()
                    async with self.turn:
                        if self._waiting:
                            await self._send_alone()
        finally:
            self._stopped = True
            self._refuse_all(EngineError("nothing is committed any more"))

    def _refuse_all(self, error: EngineError) -> None:
        for waiting in self._waiting:
            _refuse(waiting, error)
        self._waiting.clear()

    async def _await_partners(self) -> None:
        """Wait for callers that can share the commit, and for the journal's batch, if it is about to be sent."""
        await self.gathering.await_callers()
        if self._batch_waiters:
            with trio.move_on_after(self.gathering.seconds):
                await self._taken.wait()

    async def _send_alone(self) -> None:
        try:
            await self.resolve()
        except EngineError as error:  # no caller waits for more than one deadline
            self._refuse_all(error)
            return
        with suppress(EngineError):  # its callers got the error
            await self.send(None, durable=False)

    # -- sending -------------------------------------------------------------------------------------

    async def send(
        self, batch: WriteSet | None, *, durable: bool, waiter_count: int = 0, began: float | None = None
    ) -> Outcome:
        """Commit a batch, and transactions beside it. EngineError: it may have happened; see `resolve`.

        The caller has the turn. ``batch``: None commits transactions alone. ``waiter_count``: callers that wait for the
        batch. ``began``: when the work for this commit began, in trio's time; None: now.
        """
        began = trio.current_time() if began is None else began
        if self._unknown is not None:
            await self.resolve()
        group = self._gather(batch)
        while batch is not None or group.members:
            changes = group.changes
            if (group.files or group.size) and self._sequence and self._sequence.counts_key:
                # In the same commit, so that a crash cannot separate them.
                counts = schema.encode_counts(self._files + group.files, self.size + group.size)
                changes.puts[self._sequence.counts_key] = counts
            if group.uses and self._uses is not None:
                self._uses.put(group.uses, changes)
            try:
                version = await self.records.commit(changes.puts, changes.deletes, changes.expect, durable=durable)
                found = {} if version else await self._read_changed(changes.expect)
            except BaseException as error:
                self._note_interrupted(group, error)
                raise
            if version:
                self.gathering.note_served(len(group.members) + waiter_count, trio.current_time() - began)
                self._apply_group(group, version)
                return Outcome(version, {})
            if self._sequence is not None and self._sequence.key in found:
                refusal = EngineError("another daemon commits under this client's number: unmount and mount again")
                for waiting in group.members:
                    _refuse(waiting, refusal)
                raise refusal
            group = self._drop_losers(group, found)
            if batch is not None and any(key in batch.expect for key in found):
                self._put_back(group)
                return Outcome(0, {key: row for key, row in found.items() if key in batch.expect})
        return Outcome(0, {})

    def _gather(self, batch: WriteSet | None) -> _Group:
        """Group the batch and as many waiting transactions as fit beside it, in order of arrival."""
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

    async def _read_changed(self, expect: Mapping[bytes, int]) -> dict[bytes, Versioned | None]:
        """Records of keys that have another version than expected (None: absent); of damaged ones only the version."""
        keys = list(expect)
        rows = await get_marked(self.records, keys)
        return {
            key: row for key, row in zip(keys, rows, strict=True) if (row.version if row else ABSENT) != expect[key]
        }

    def _drop_losers(self, group: _Group, found: Mapping[bytes, Versioned | None]) -> _Group:
        """The group without transactions whose expected versions had changed. These are finished as refused."""
        rest = _Group(group.batch, self.records.limits, self._sequence)
        for waiting in group.members:
            if any(key in found for key in waiting.transaction.expect):
                _refuse(waiting)
            else:
                rest.join(waiting)
        return rest

    def _put_back(self, group: _Group) -> None:
        """Return transactions to the queue: another commit takes them."""
        for waiting in group.members:
            waiting.taken = False
        self._waiting.extendleft(reversed(group.members))
        if group.members:
            self._work.set()

    def _apply_group(self, group: _Group, version: int) -> None:
        if self._sequence is not None:
            self._sequence.version = version
            if group.batch is not None:
                group.batch.version = version
        self._files += group.files
        self.size += group.size
        if group.uses and self._uses is not None:
            self._uses.uses.stored(group.uses)
        for waiting in group.members:
            waiting.transaction.applied(version)
            _finish(waiting, version)

    def _note_interrupted(self, group: _Group, error: BaseException) -> None:
        """Note a commit that may have happened: its callers get the error, and the next commit resolves it first."""
        if self._sequence is not None:
            self._unknown = group
        shown = error if isinstance(error, KvfuseError) else EngineError("nothing is committed any more")
        for waiting in group.members:
            _finish(waiting, error=shown)

    async def resolve(self) -> None:
        """Find out whether the last commit happened. EngineError: the store does not say yet.

        If it did, sets `WriteSet.version` of its batch, and applies its transactions. The caller has the turn.
        """
        group, sequence = self._unknown, self._sequence
        if group is None or sequence is None:
            return
        # A commit asks, because the engine first makes sure that no earlier request takes effect later.
        version = sequence.version
        if not await self.records.commit({}, (), {sequence.key: version}):
            (row,) = await self.records.get([sequence.key])
            version = row.version if row else ABSENT
        self._unknown = None
        if version != sequence.version:
            self._apply_group(group, version)
            self._on_late_commit()
        else:
            for waiting in group.members:
                waiting.transaction.refused()


def _finish(waiting: _Waiting, version: int = 0, error: KvfuseError | None = None) -> None:
    waiting.version, waiting.error = version, error
    waiting.done.set()


def _refuse(waiting: _Waiting, error: KvfuseError | None = None) -> None:
    """End a transaction that will never happen."""
    waiting.transaction.refused()
    _finish(waiting, error=error)
