"""Watches and leases of a store whose only writer is this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, Lease, RecordStore

WATCH_BACKLOG_MAX = 65536
"""Changes a watch holds for a reader that has not come for them."""


class LocalWatch(AsyncIterator[Change]):
    """Changes under a prefix, from its making on."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._send, self._receive = trio.open_memory_channel[Change](WATCH_BACKLOG_MAX)
        self._behind = False

    def offer(self, changes: Sequence[Change]) -> None:
        """Tell the reader of a commit."""
        try:
            for change in changes:
                if change.key.startswith(self._prefix):
                    self._send.send_nowait(change)
        except trio.WouldBlock:
            self._behind = True
            self._send.close()
        except trio.ClosedResourceError:
            pass  # it fell behind before, and will be told

    def close(self) -> None:
        """The reader gets what it has not had yet, then the end."""
        self._send.close()

    async def __anext__(self) -> Change:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._behind:
                raise EngineError(f"the watch fell {WATCH_BACKLOG_MAX} changes behind: read the state anew") from None
            raise StopAsyncIteration from None


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
