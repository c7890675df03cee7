"""Has the event loop make room for puts of rings' threads, which wait for it a moment: then a batch goes on as one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from kvfuse.errors import KvfuseError
from kvfuse.volume.blocks.block_tables import BlockTable

WAIT_SECONDS = 0.05
"""for which a thread waits at most: until then its ring serves nothing else"""


@dataclass(eq=False)
class _Request:
    """``why``: the result of the put that was refused, of a block of ``size`` bytes."""

    why: int
    table: BlockTable
    size: int
    done: threading.Event = field(default_factory=threading.Event)
    is_made: bool = False


class RoomRequests:
    """Of one membership. ``make_room``: see `BlockEngine.make_room`."""

    def __init__(self, make_room: Callable[[int, BlockTable, int, float], Awaitable[None]]) -> None:
        self._make_room = make_room
        self._requests: deque[_Request] = deque()
        self._has_some = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def wait(self, why: int, table: BlockTable, size: int) -> bool:
        """Return when a put that was refused has a chance again; False: it has none, or not soon. A ring's thread."""
        request = _Request(why, table, size)
        try:
            if self._token is not None:
                self._token.run_sync_soon(self._add, request)
        except trio.RunFinishedError:  # the daemon ends
            return False
        return self._token is not None and request.done.wait(WAIT_SECONDS) and request.is_made

    def _add(self, request: _Request) -> None:
        self._requests.append(request)
        self._has_some.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        while True:
            await self._has_some.wait()
            self._has_some = trio.Event()
            while self._requests:
                await self._serve(self._requests.popleft())

    async def _serve(self, request: _Request) -> None:
        try:
            give_up = trio.current_time() + WAIT_SECONDS
            await self._make_room(request.why, request.table, request.size, give_up)
            request.is_made = True
        except KvfuseError:  # a call of the event loop tells the client, when it finds the same
            pass
        finally:
            request.done.set()
