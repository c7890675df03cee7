"""Records in etcd: shared by many hosts, linearizable, with leases and watches.

**Keys.** A record is at ``PREFIX r/KEY``; its version is etcd's mod_revision. ``PREFIX m/ID`` is a store's marker.

**Commits** of one store go one after the other, in the order in which they were called: the volume puts what waits
into one. Every commit is durable when it returns (a majority of the members has synced it).

**Markers: what became of a commit.** A request that was not answered may have been applied, or be applied later. So
every transaction also compares the revision of this store's marker with the last one known, and puts the marker:
"done N" with the changes, "refused N" where another comparison failed. Whichever of the attempts at commit N is
applied first moves the marker; every other one finds it moved, does nothing, and reads in the marker what
became of N. Attempts may therefore be repeated, at any member, and come late: N happens once or not at all.
When the deadline passes without an answer N is in doubt (EngineTimeout). Before the next commit the marker is then
moved to "refused N", if N has not moved it: from there on an attempt of N that is still on its way does nothing.

**The marker's lease** is this store's own, of ``MARKER_SECONDS``, renewed by commits. When it is gone so is the marker,
and no attempt that expects it can be applied: a new lease and marker then begin. So a store
that died leaves nothing for long.

**Awaits.** Reads run beside commits and each other. While a commit awaits its answer, others of the same store wait in
``_turns``; those of other stores do not, which is what expected versions are for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import trio

from kvfuse.errors import ConfigError, EngineError, EngineTimeout
from kvfuse.remote.records.api import Following, Lease, Record, RecordLimits, RecordStore, Versioned
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.calls import (
    CLOSE_SECONDS,
    KV_RANGE,
    KV_TXN,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    Compacted,
    EtcdClient,
    EtcdPlace,
    LeaseGone,
)
from kvfuse.remote.records.etcd.watch import EtcdFeed

__all__ = ["EtcdLease", "EtcdPlace", "EtcdRecords"]

KEY_SIZE_MAX = 511
VALUE_SIZE_MAX = 1 << 20
OPERATION_OVERHEAD = 64
"""bytes of a request for one operation, beside its key (with the prefix) and value"""
REQUEST_OVERHEAD = 4096
SCAN_PAGE = 5000
"""rows asked for at once"""
SNAPSHOT_TRIES = 3
FIRST_KEY = b"\0"
"""no record is before it; the empty key is the feed's"""
LEASE_ID = struct.Struct(">q")
MARKER_SECONDS = 3600
"""how long what a dead store leaves may stay"""


@dataclass
class _Marker:
    """This store's marker: what moves with every commit. ``revision`` 0: not there yet."""

    key: bytes
    lease_id: int
    renewed_at: float
    revision: int = 0
    sequence: int = 0
    in_doubt: bool = False
    """a commit was sent, and what became of it is not known"""

    def done(self) -> bytes:
        return b"done %d" % self.sequence

    def compare(self) -> bytes:
        return messages.was_changed_at(self.key, self.revision)

    def put(self, value: bytes) -> bytes:
        return messages.put_operation(messages.put(self.key, value, self.lease_id))

    def refusal(self) -> bytes:
        """A transaction: move the marker if no attempt has moved it; else show it."""
        show = messages.get_operation(messages.get(self.key))
        return messages.transaction([self.compare()], [self.put(b"refused %d" % self.sequence)], [show])

    def settle_commit(self, answer: messages.TransactionAnswer) -> int | None:
        """Take in the answer to a commit, see ``settle``."""
        if not answer.succeeded:
            return self.settle(answer.inner(0), answer.revision)
        self.revision = answer.revision
        self.in_doubt = False
        return self.revision

    def settle(self, refusal: messages.TransactionAnswer, revision: int) -> int | None:
        """Take in the answer to ``refusal``, given at ``revision``: the version of what was done, or 0: nothing was.

        Either way it is over. None: the marker is gone. Nothing more will be done, but something may have been.
        """
        version = 0
        if not refusal.succeeded:
            shown = refusal.row(0)
            if shown is None:
                return None
            revision = shown.mod_revision
            version = revision if shown.value == self.done() else 0
        self.revision = revision
        self.in_doubt = False
        return version


@dataclass(frozen=True)
class _Commit:
    """One commit's operations, copied from the caller's."""

    changes: list[bytes]
    compares: list[bytes]

    def transaction(self, marker: _Marker) -> bytes:
        return messages.transaction(
            [*self.compares, marker.compare()],
            [*self.changes, marker.put(marker.done())],
            [messages.transaction_operation(marker.refusal())],
        )


class EtcdRecords(RecordStore):
    """The shared record store. Made by ``open``."""

    def __init__(self, place: EtcdPlace) -> None:
        super().__init__(_limits(place))
        self._options = place.options
        self._prefix = place.prefix
        self._base = place.prefix + b"r/"
        self._client = EtcdClient(place)
        self._turns = trio.Lock()  # fair: commits are applied in the order of the calls
        self._marker: _Marker | None = None
        self._feed = EtcdFeed(self._client, self._base)

    @classmethod
    async def open(cls, place: EtcdPlace) -> Self:
        """Connect. ConfigError where the options cannot work, EngineError where no member answers or lets us in."""
        store = cls(place)
        try:
            await store._new_marker(store._deadline())  # who may not write here learns it now
        except BaseException:
            with trio.CancelScope(shield=True):
                await store._client.aclose()
            raise
        return store

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        """As the contract says; one round trip for every ``operations_max`` keys, all at one revision."""
        if any(not 0 < len(key) <= self.limits.key_size_max for key in keys):
            raise ValueError(f"a key is empty or longer than {self.limits.key_size_max} bytes")
        for _ in range(SNAPSHOT_TRIES):
            rows: list[Versioned | None] = []
            revision = 0
            try:
                for start in range(0, len(keys), self._options.operations_max):
                    found, revision = await self._get(keys[start : start + self._options.operations_max], revision)
                    rows += found
            except Compacted:
                continue
            return rows
        raise EngineError(f"etcd was compacted {SNAPSHOT_TRIES} times while {len(keys)} keys were read")

    async def _get(self, keys: Sequence[bytes], revision: int) -> tuple[list[Versioned | None], int]:
        """Rows as they were at a revision (0: now), and that revision."""
        self._client.check_open()
        self.counters.gets += 1
        asked = [messages.get(self._base + key, revision=revision) for key in keys]
        answer = await self._get_rows(asked)
        rows: list[Versioned | None] = []
        for index, key in enumerate(keys):
            row = answer.row(index)
            if row is not None and row.key != self._base + key:
                raise EngineError(f"etcd answered {row.key!r} when asked for {self._base + key!r}")
            rows.append(Versioned(row.value, row.mod_revision) if row else None)
        return rows, revision or answer.revision

    async def _get_rows(self, asked: list[bytes]) -> messages.TransactionAnswer:
        """With an answer to each `messages.get`."""
        message = messages.transaction([], map(messages.get_operation, asked))
        answer = await self._client.call(KV_TXN, message, messages.TransactionAnswer.parse, self._deadline())
        if len(answer.operations) != len(asked):
            raise EngineError(f"etcd answered {len(answer.operations)} of {len(asked)} questions")
        return answer

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        """As the contract says; one round trip for every ``SCAN_PAGE`` rows, all at one revision."""
        if max(len(prefix), len(after)) > self.limits.key_size_max:
            raise ValueError(f"a prefix or key is longer than {self.limits.key_size_max} bytes")
        first = max(prefix, after + b"\0") if after else prefix or FIRST_KEY
        for _ in range(SNAPSHOT_TRIES):
            try:
                return await self._scan(self._base + first, messages.prefix_end(self._base + prefix), limit)
            except Compacted:
                continue
        raise EngineError(f"etcd was compacted {SNAPSHOT_TRIES} times while {limit} rows were read")

    async def seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        """As the contract says; one round trip for every ``operations_max`` prefixes, each at a revision of its own."""
        found: list[Record | None] = []
        for start in range(0, len(prefixes), self._options.operations_max):
            found += await self._seek(prefixes[start : start + self._options.operations_max])
        return found

    async def _seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        self._client.check_open()
        self.counters.scans += 1
        ranges = [(self._base + (prefix or FIRST_KEY), messages.prefix_end(self._base + prefix)) for prefix in prefixes]
        answer = await self._get_rows([messages.get(key, end, limit=1) for key, end in ranges])
        rows: list[Record | None] = []
        for index, (key, end) in enumerate(ranges):
            row = answer.row(index)
            if row is not None and not key <= row.key < end:
                raise EngineError(f"etcd answered {row.key!r} when asked for a key from {key!r} to {end!r}")
            rows.append(Record(row.key[len(self._base) :], row.value, row.mod_revision) if row else None)
        return rows

    async def _scan(self, key: bytes, key_end: bytes, limit: int) -> list[Record]:
        """Rows from key to before key_end, as they were at one revision."""
        records: list[Record] = []
        revision = 0
        while len(records) < limit and key < key_end:
            self._client.check_open()
            self.counters.scans += 1
            asked = messages.get(key, key_end, limit=min(limit - len(records), SCAN_PAGE), revision=revision)
            answer = await self._client.call(KV_RANGE, asked, messages.RangeAnswer.parse, self._deadline())
            if any(not key <= kv.key < key_end for kv in answer.kvs):
                raise EngineError(f"etcd answered keys that are not from {key!r} to {key_end!r}")
            records += [Record(kv.key[len(self._base) :], kv.value, kv.mod_revision) for kv in answer.kvs]
            if not answer.more or not answer.kvs:
                break
            key, revision = answer.kvs[-1].key + b"\0", revision or answer.revision
        return records

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        """As the contract says; always durable. The deadline includes waiting for earlier commits."""
        expect = expect or {}
        self.limits.check_commit(puts, deletes, expect)
        commit = self._commit(puts, deletes, expect, _lease_id(self, lease))
        self.counters.commits += 1
        self.counters.commit_operations += len(puts) + len(deletes) + len(expect)
        deadline = self._deadline()
        try:
            with trio.fail_at(deadline):
                await self._turns.acquire()
        except trio.TooSlowError:
            raise EngineTimeout("etcd: earlier commits took all of the time; this one was not sent") from None
        try:
            self._client.check_open()
            version = await self._apply(commit, deadline)
        finally:
            self._turns.release()
        self.counters.conflicts += not version
        return version

    def _commit(
        self, puts: Mapping[bytes, bytes], deletes: Collection[bytes], expect: Mapping[bytes, int], lease_id: int
    ) -> _Commit:
        base = self._base
        changes = [messages.put_operation(messages.put(base + key, value, lease_id)) for key, value in puts.items()]
        changes += [messages.delete_operation(base + key) for key in deletes]
        return _Commit(changes, [messages.was_changed_at(base + key, version) for key, version in expect.items()])

    async def _apply(self, commit: _Commit, deadline: float) -> int:
        """Have it done or refused, whatever happened before; its version or 0. Called in turn."""
        marker = await self._ready_marker(deadline)
        marker.sequence += 1
        marker.in_doubt = True  # until an answer is taken in: also when this task is cancelled
        try:
            message = commit.transaction(marker)
            answer = await self._client.call(KV_TXN, message, messages.TransactionAnswer.parse, deadline)
        except LeaseGone:  # the caller's
            version = await self._resolve(marker, deadline)
        else:
            version = marker.settle_commit(answer)
        if version is None:
            self._marker = None
            raise EngineError("etcd: this store's own lease ended during a commit, which may have been done")
        return version

    async def _ready_marker(self, deadline: float) -> _Marker:
        """The marker, with nothing in doubt, under a lease that has long to live. Called in turn."""
        marker = self._marker
        now = trio.current_time()
        if marker is not None and now - marker.renewed_at > MARKER_SECONDS / 3:
            alive = await self.keep_alive(marker.lease_id, deadline)
            marker.renewed_at = now
            marker = self._marker = marker if alive else None
        if marker is not None and (not marker.in_doubt or await self._resolve(marker, deadline) is not None):
            return marker
        return await self._new_marker(deadline)

    async def _resolve(self, marker: _Marker, deadline: float) -> int | None:
        """Learn the outcome of the last commit, see ``_Marker.settle``."""
        try:
            answer = await self._client.call(KV_TXN, marker.refusal(), messages.TransactionAnswer.parse, deadline)
        except LeaseGone:
            return None
        return marker.settle(answer, answer.revision)

    async def _new_marker(self, deadline: float) -> _Marker:
        """One that is there: from now on an attempt at a commit that finds it absent does nothing."""
        now = trio.current_time()
        lease = await self._grant(MARKER_SECONDS, deadline)
        marker = _Marker(self._prefix + b"m/%x" % lease.lease_id, lease.lease_id, now)
        if await self._resolve(marker, deadline) is None:
            raise EngineError("etcd: the lease that was granted for a marker is gone")
        self._marker = marker
        return marker

    def follow(self) -> Following:
        """As the contract says. All followings share one stream."""
        if self._feed.failure is not None:
            self._feed = EtcdFeed(self._client, self._base)
        return self._feed.follow()

    async def lease(self, ttl: float) -> Lease:
        """A lease of whole seconds, two at the least; ``ttl`` of what is returned says how many."""
        if ttl <= 0:
            raise ValueError(f"a lease of {ttl} seconds")
        granted = await self._grant(math.ceil(ttl), self._deadline())
        return EtcdLease(self, granted.lease_id, float(granted.ttl))

    async def resume_lease(self, identity: bytes) -> Lease | None:
        """As the contract says; the identity is the cluster's number of the lease."""
        if len(identity) != LEASE_ID.size:
            return None
        (lease_id,) = LEASE_ID.unpack(identity)
        seconds = await self.keep_alive(lease_id)
        return EtcdLease(self, lease_id, float(seconds)) if seconds else None

    async def _grant(self, ttl: int, deadline: float) -> messages.LeaseAnswer:
        """One whose answer was lost ends by itself, with nothing under it."""
        self._client.check_open()
        return await self._client.call(LEASE_GRANT, messages.lease_grant(ttl), messages.LeaseAnswer.parse, deadline)

    async def keep_alive(self, lease_id: int, deadline: float | None = None) -> int:
        """Renew a lease: the seconds for which it lasts from now on; 0 when it is gone."""
        self._client.check_open()
        message = messages.lease_call(lease_id)
        parse = messages.LeaseAnswer.parse
        answer = await self._client.call(LEASE_KEEP_ALIVE, message, parse, deadline or self._deadline())
        return max(answer.ttl, 0)

    async def revoke(self, lease_id: int) -> None:
        """End a lease, if it has not ended."""
        self._client.check_open()
        with suppress(LeaseGone):
            message = messages.lease_call(lease_id)
            await self._client.call(LEASE_REVOKE, message, messages.EtcdAnswer.parse, self._deadline())

    async def aclose(self) -> None:
        """As the contract says. Leases that were not given back end when their time does.

        Not cancelled: it takes as long as the deadlines of the calls under way, at the most.
        """
        with trio.CancelScope(shield=True):
            await self._feed.aclose()
            async with self._turns:  # after the commits that were called before
                if self._client.closed:
                    return
                if self._marker is not None:
                    with trio.move_on_after(CLOSE_SECONDS), suppress(EngineError):  # else it goes with its lease, later
                        await self.revoke(self._marker.lease_id)
                await self._client.aclose()

    def _deadline(self) -> float:
        return trio.current_time() + self._options.deadline


class EtcdLease(Lease):
    """A lease that the cluster counts; this host's clock has no part in it."""

    def __init__(self, store: EtcdRecords, lease_id: int, ttl: float) -> None:
        self.store = store
        self.id = lease_id
        self.ttl = ttl
        self.identity = LEASE_ID.pack(lease_id)

    async def keepalive(self) -> bool:
        """As the contract says. EngineTimeout: it may have been renewed."""
        return await self.store.keep_alive(self.id) > 0

    async def revoke(self) -> None:
        """As the contract says. EngineTimeout: it may have ended; it will, when its time is over."""
        await self.store.revoke(self.id)


def _lease_id(store: EtcdRecords, lease: Lease | None) -> int:
    if lease is None:
        return 0
    if isinstance(lease, EtcdLease) and lease.store is store:
        return lease.id
    raise ValueError("the lease is not one of this store")


def _limits(place: EtcdPlace) -> RecordLimits:
    """The limits of one transaction, less the marker.

    etcd counts comparisons and changes apart; their sum is what is held here. What a refused commit does to the marker
    counts as one more. ConfigError where nothing would fit.
    """
    options = place.options
    operations = options.operations_max - 2
    overhead = (options.operations_max + 1) * (OPERATION_OVERHEAD + len(place.prefix)) + REQUEST_OVERHEAD
    size = options.request_size_max - overhead
    if operations < 1 or size < 2 * KEY_SIZE_MAX:
        raise ConfigError(
            f"etcd with {options.operations_max} operations (records.operations_max) and {options.request_size_max}"
            " bytes (records.request_size_max) of a request has no room for a commit"
        )
    return RecordLimits(
        key_size_max=KEY_SIZE_MAX,
        value_size_max=min(VALUE_SIZE_MAX, size - KEY_SIZE_MAX),
        commit_operations_max=operations,
        commit_bytes_max=size,
        shared=True,
        durable=True,
        deadline=options.deadline,
    )
