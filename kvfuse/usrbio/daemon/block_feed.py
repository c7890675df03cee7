"""Sends a client news of the blocks of a namespace: first all present names, then each change.

After FOLLOW the connection carries news alone. The daemon disconnects a client that reads more slowly than blocks
change, as it lost some: it connects again, and gets all present names anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import trio

from kvfuse import errors
from kvfuse.access.block_follower import BlockFollower, FollowedNames, take_changes
from kvfuse.usrbio.protocol.wire import NEWS, NEWS_NAMES_MAX, NewsKind, pack_keys
from kvfuse.volume.views.news import Watch

NAMES_PER_CALL = 64
"""names that take the event loop about as long as a call of a ring"""


@dataclass
class BlockFeed(BlockFollower):
    """One client that follows the blocks of a directory."""

    stream: trio.socket.SocketType
    pause: Callable[[float], Awaitable[None]]
    """waits for the turn of the client's user for work of so many calls"""
    goes_on: bool = False
    """the former daemon sent this client news: it starts over"""

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
            await self._send(NewsKind.CLEARED, 0, b"")
        async with aclosing(self.tell_present(watch, NEWS_NAMES_MAX)) as present:
            async for told in present:
                await self._send_told(told)
        while True:
            await watch.wait()
            await self.check()
            for told in take_changes(watch, NEWS_NAMES_MAX):
                await self._send_told(told)

    async def _send_told(self, told: FollowedNames) -> None:
        kind = NewsKind[told.kind.name]
        if told.packed is not None:
            await self._send(kind, told.packed.name_count, told.packed.packed)
        else:
            await self._send(kind, len(told.names), pack_keys(list(told.names)))

    async def _send(self, kind: NewsKind, count: int, packed: bytes) -> None:
        await self.pause(1 + count / NAMES_PER_CALL)
        await self.stream.send(NEWS.pack(kind, count) + packed)
