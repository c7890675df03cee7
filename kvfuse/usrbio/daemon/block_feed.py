"""Sends a client news of the blocks of a namespace: first all present names, then each change.

After FOLLOW the connection carries news alone. The daemon disconnects a client that reads more slowly than blocks
change, as it lost some: it connects again, and gets all present names anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import trio

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.usrbio.protocol.wire import NEWS, NEWS_NAMES_MAX, NewsKind, pack_keys
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.news import NameEvent, PackedNames, Row, Watch

NAMES_PER_CALL = 64
"""names that take the event loop about as long as a call of a ring"""
KINDS = {NameEvent.STORED: NewsKind.STORED, NameEvent.REMOVED: NewsKind.REMOVED, NameEvent.CLEARED: NewsKind.CLEARED}


@dataclass
class BlockFeed:
    """One client that follows the blocks of a directory. ``namespace``: a handle that nobody else uses."""

    volume: RingApi
    admission: NamespaceAccess
    stream: trio.socket.SocketType
    namespace: NamespaceHandle
    pause: Callable[[float], Awaitable[None]]
    """waits for the turn of the client's user for work of so many calls"""
    goes_on: bool = False
    """the former daemon sent this client news: it starts over"""

    async def check(self) -> None:
        """PermissionDenied unless the peer may list the directory; InvalidArgument: its blocks are files; Stale."""
        directory = await self.admission.read_directory(self.namespace)
        if self.namespace.is_absent:
            raise errors.Stale(f"inode {self.namespace.ino} was removed")
        if not self.admission.may_access(self.namespace, directory, 5):
            raise errors.PermissionDenied("the mode of the directory does not allow the client's user to list it")
        if await self.volume.blocks.block_namespace(directory.ino) is None:
            raise errors.InvalidArgument("the directory is in no namespace of kind blocks: only these are followed")

    async def run(self) -> None:
        """Send news until the client disconnects, sends anything, or lost some."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_end, nursery.cancel_scope)
            with self.volume.blocks.watching(self.namespace.ino) as watch:
                nursery.start_soon(self._wait_for_loss, watch, nursery.cancel_scope)
                try:
                    await self._tell_all(watch)
                except (errors.KvfuseError, OSError):  # the client lost its right, or it or the directory is gone
                    pass
            nursery.cancel_scope.cancel()

    async def _wait_for_end(self, scope: trio.CancelScope) -> None:
        await trio.lowlevel.wait_readable(self.stream)
        scope.cancel()

    async def _wait_for_loss(self, watch: Watch, scope: trio.CancelScope) -> None:
        await watch.lost.wait()
        scope.cancel()

    async def _tell_all(self, watch: Watch) -> None:
        if self.goes_on:
            await self._send(NewsKind.CLEARED, [])
        after, is_last = 0, False
        while not is_last:
            names, after = await self.volume.blocks.listing(self.namespace.ino, after, NEWS_NAMES_MAX)
            is_last = not after
            await self.check()
            for start in range(0, len(names), NEWS_NAMES_MAX):
                await self._send(NewsKind.PRESENT, names[start : start + NEWS_NAMES_MAX])
            await self._send_rows(watch.take())  # changes while the page was read, and before
        await self._send(NewsKind.READY, [])
        while True:
            await watch.wait()
            await self.check()
            await self._send_rows(watch.take())

    async def _send_rows(self, rows: Sequence[Row | PackedNames]) -> None:
        for (change, is_packed), group in itertools.groupby(rows, key=lambda row: (row[0], len(row) > 2)):
            if is_packed:
                for _, count, packed in cast(Iterable[PackedNames], group):
                    await self._send_packed(KINDS[change], count, packed)
                continue
            names = [name for _, name in cast(Iterable[Row], group) if name]
            for start in range(0, max(1, len(names)), NEWS_NAMES_MAX):
                await self._send(KINDS[change], names[start : start + NEWS_NAMES_MAX])

    async def _send(self, kind: NewsKind, names: list[bytes]) -> None:
        await self._send_packed(kind, len(names), pack_keys(names))

    async def _send_packed(self, kind: NewsKind, count: int, packed: bytes) -> None:
        await self.pause(1 + count / NAMES_PER_CALL)
        await self.stream.send(NEWS.pack(kind, count) + packed)
