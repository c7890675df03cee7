"""The record store: an ordered map of bytes with multi-key optimistic commit.

This file is the whole contract; every engine passes the one conformance suite in
``tests/remote/records/test_records_conformance.py``.

* Keys are 1..``limits.key_size_max`` bytes, ordered as bytes. Values are 0..``limits.value_size_max``.
* Every present key has a *version*: a positive integer that grows with each put of that key.
  ``ABSENT`` (0) is the version of a key that is not there, and may be expected like any other.
* ``get`` and ``scan`` see the last finished commit and nothing of an unfinished one. One ``get`` is one
  round trip whatever the number of keys; it is a consistent snapshot of them.
* ``commit`` is all or nothing and answers the version that its puts now have. 0 means that an expected
  version had moved, or that the lease was gone: nothing was done, and nothing of it will be done later.
  An ``EngineError`` means *unknown*, unless it is ``EngineFull`` or raised for bad arguments
  (``ValueError``): then nothing was done.
* Durability is the caller's choice. A *durable* commit, and every commit before it, survives the loss
  of power once the call returned. An ordered one survives the death of this process, and after a loss
  of power either it is there with all commits before it, or it and all after it are not: never a hole.
* A cancelled ``commit`` is *unknown* like a timed-out one; a cancelled read has no effect. What is unknown is
  settled before a later commit of the same store is applied: it is never applied after one.
* Calls may run concurrently. Commits are applied in the order in which they were called.
* Records put under a *lease* are deleted when it ends: when it is given back, or was not renewed in time. The
  store alone judges the time. A record that was put anew since, under another lease or none, stays.
* A lease of a shared store belongs to whoever knows its *identity*: another process that goes on with it
  (``resume_lease``) renews it, puts under it, and gives it back, as the one that asked for it.
* An embedded store's lease lives as long as it is not given back, whatever its time: nobody else looks at it.
  The records of a process that died without giving it back stay; its successor finds them. It has no identity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ABSENT = 0
"""The version of a key that does not exist."""


class Versioned(NamedTuple):
    """A present key's value and version."""

    value: bytes
    version: int


class Record(NamedTuple):
    """One row of a scan."""

    key: bytes
    value: bytes
    version: int


class Change(NamedTuple):
    """One row of a watch; ``value`` is None for a delete."""

    key: bytes
    value: bytes | None
    version: int


@dataclass(frozen=True)
class RecordLimits:
    """The limits of one call. The volume sizes its batches to these."""

    key_size_max: int
    value_size_max: int
    commit_operations_max: int
    """expects + puts + deletes of one commit"""
    commit_bytes_max: int
    """keys and values of one commit"""
    shared: bool
    """other hosts may change records: the volume then publishes strictly by default"""
    durable: bool = False
    """every commit is, asked for or not"""
    deadline: float = 0.0
    """seconds after which a call is over; 0: that is not known"""

    def check_commit(
        self, puts: Mapping[bytes, bytes], deletes: Collection[bytes], expect: Mapping[bytes, int]
    ) -> None:
        """ValueError naming the limit that this commit breaks: an engine refuses it whole."""
        for keys in (puts, deletes, expect):
            if any(not 0 < len(key) <= self.key_size_max for key in keys):
                raise ValueError(f"a key is empty or longer than {self.key_size_max} bytes")
        if any(len(value) > self.value_size_max for value in puts.values()):
            raise ValueError(f"a value is longer than {self.value_size_max} bytes")
        if not puts.keys().isdisjoint(deletes):
            raise ValueError("a key is both put and deleted")
        operation_count = len(puts) + len(deletes) + len(expect)
        if operation_count > self.commit_operations_max:
            raise ValueError(f"{operation_count} operations in a commit, the limit is {self.commit_operations_max}")
        byte_count = sum(map(len, puts)) + sum(map(len, puts.values())) + sum(map(len, deletes)) + sum(map(len, expect))
        if byte_count > self.commit_bytes_max:
            raise ValueError(f"{byte_count} bytes in a commit, the limit is {self.commit_bytes_max}")


class Usage(NamedTuple):
    """Counts the weight of all records."""

    size: int = 0
    """bytes"""
    items: int = 0
    """things that records stand for"""


@dataclass(frozen=True)
class Meter:
    """Has a store count its records, in the commits that change them: the count never differs from what is there."""

    key: bytes
    """of the record in which the store keeps the count"""
    weigh: Callable[[bytes, bytes], tuple[int, int]]
    """(bytes, items) of a record: key, value"""


@dataclass
class RecordCounters:
    """Calls of an engine, for the metric "record round trips per 1,000 blocks"."""

    gets: int = 0
    scans: int = 0
    commits: int = 0
    commit_operations: int = 0
    conflicts: int = 0
    medium_failures: int = 0
    """calls that failed because bytes of the store were lost (lmdb)"""

    @property
    def round_trips(self) -> int:
        return self.gets + self.scans + self.commits


class Following(AsyncIterator[Change], ABC):
    """Changes of the records under some prefixes, of which there may be many, and which come and go.

    Changes of one prefix come in the order of their commits; those of different prefixes may come in another order.
    ``__anext__``: EngineError: it broke, and changes may be missing: read the state anew. It ends when the store is
    closed; changes that had not come by then are left out. For one reader at a time.
    """

    @abstractmethod
    def add(self, prefix: bytes) -> None:
        """Follow it, too: all changes after the newest version that an answer had told this store of when this was
        called. Adding one twice is adding it once."""

    @abstractmethod
    def remove(self, prefix: bytes) -> None:
        """No longer. Changes of it that were not shown yet may still come."""

    @property
    def is_catching_up_dear(self) -> bool:
        """Once somebody has caught up, the store hands this host the changes of all records, whatever it follows."""
        return False

    @abstractmethod
    def newest(self) -> int:
        """The newest version that an answer has told the store of; 0, where it shows no change that is older."""

    @abstractmethod
    async def catch_up(self) -> None:
        """Return when every change under the prefixes that was committed before this call has been handed to the
        reader, which has come back for the next. One round trip. EngineError: the store does not answer, or the
        following has ended."""


class Lease(ABC):
    """A client's timed right. Liveness of this client as others see it."""

    ttl: float
    """seconds; a store may give more than was asked for"""
    identity: bytes = b""
    """for ``resume_lease``; empty: only this process can have it"""

    @abstractmethod
    async def keepalive(self) -> bool:
        """Renew; False when the lease is gone and everything held under it must be given up."""

    @abstractmethod
    async def revoke(self) -> None:
        """Give the lease back, and delete the records put under it. Idempotent."""


@dataclass
class RecordStore(ABC):
    """Interface of all record engines and their decorators."""

    limits: RecordLimits
    counters: RecordCounters = field(default_factory=RecordCounters, init=False)

    @property
    def usage(self) -> Usage | None:
        """The weight of the records after the last finished commit; None where the store does not count it."""
        return None

    async def bound(self, size: int) -> int:
        """Take no more than ``size`` bytes of the medium from now on. Returns the bound; 0: the store has none.
        EngineError."""
        return 0

    @abstractmethod
    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        """Values and versions in the order of ``keys``; None where a key is absent. One round trip."""

    @abstractmethod
    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        """Up to ``limit`` records whose key starts with ``prefix`` and is greater than ``after``, in order.

        Fewer than ``limit`` rows mean that there are no more. ``after`` is a whole key (it need not
        exist) or empty.
        """

    async def seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        """The first record under each prefix, as `scan` has it; None where there is none."""
        rows = [await self.scan(prefix, limit=1) for prefix in prefixes]
        return [row[0] if row else None for row in rows]

    @abstractmethod
    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        """Apply all puts and deletes if every key of ``expect`` has the expected version.

        Answers the version (> 0) of all its puts, or 0: refused. Deleting an absent key is no error. A key may
        not be both put and deleted (ValueError). An empty commit with ``durable=True`` makes all earlier
        commits durable. The puts are attached to ``lease``, one of this store's own (ValueError).
        """

    @abstractmethod
    def follow(self) -> Following:
        """Changes by whichever client, of no prefix yet. A reader that falls too far behind gets ``EngineError``."""

    def watch(self, prefix: bytes) -> Following:
        """Changes under ``prefix`` committed after the call, in commit order. A shared store may also show changes
        committed shortly before the call."""
        following = self.follow()
        following.add(prefix)
        return following

    @abstractmethod
    async def lease(self, ttl: float) -> Lease:
        """A new lease of ``ttl`` seconds."""

    async def resume_lease(self, identity: bytes) -> Lease | None:
        """The lease of this identity, renewed now, with its records as they are. None: it has ended, or never was."""
        return None

    def distrust_cache(self) -> None:  # noqa: B027 - most engines have none
        """Commits of another process failed: what the kernel's cache has of the store may not be on its medium."""

    @abstractmethod
    async def aclose(self) -> None:
        """Finish what is in flight and let go of everything. Idempotent."""
