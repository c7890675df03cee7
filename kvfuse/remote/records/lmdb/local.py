"""Watches and leases of a store whose only writer is this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from kvfuse.remote.records.api import Change, Lease, RecordStore
from kvfuse.remote.records.backlog import BacklogFollowing


class LocalFollowing(BacklogFollowing):
    """Changes under prefixes, from their adding on."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = trio.Event()

    def offer(self, change: Change) -> None:
        """Keep a change of any key, if it is one to show."""
        if self.shows(change, len(change.key) + 1):
            self.keep(change)

    def newest(self) -> int:
        return 0

    async def wait(self) -> None:
        self._woken = trio.Event()
        if not self.has_news:
            await self._woken.wait()

    def wake(self) -> None:
        self._woken.set()

    async def catch_up(self) -> None:
        await self.await_reader()

    async def __anext__(self) -> Change:
        await trio.lowlevel.checkpoint()
        return await super().__anext__()


class LocalLease(Lease):
    """Alive until it is given back: nobody else looks at it. ``end`` then deletes what is ``attached``."""

    def __init__(self, ttl: float, store: RecordStore, end: Callable[[LocalLease], Awaitable[None]]) -> None:
        self.ttl = ttl
        self.store = store
        self.revoked = False
        self.attached: dict[bytes, int] = {}
        """key -> the version it was put with"""
        self._end = end

    def attach(self, changes: Iterable[Change]) -> None:
        """Account for a commit under this lease."""
        self.attached.update({change.key: change.version for change in changes if change.value is not None})

    async def keepalive(self) -> bool:
        return not self.revoked

    async def revoke(self) -> None:
        self.revoked = True  # before the first await: no commit is begun under it any more
        await self._end(self)
        self.attached.clear()


def own_lease(lease: Lease | None, store: RecordStore) -> LocalLease | None:
    """The lease, if it is one of ``store``; else ValueError."""
    if lease is None or (isinstance(lease, LocalLease) and lease.store is store):
        return lease
    raise ValueError("the lease is not one of this store")
