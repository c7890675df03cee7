"""The end of all that a user has connected, in any order."""

from __future__ import annotations

import trio
import trio.testing

from kvfuse.usrbio.daemon.audience import Audience, UserPenalty
from kvfuse.usrbio.daemon.call_queue import CallQueue


async def test_who_waits_for_a_turn_may_end_after_whoever_gives_them() -> None:
    audience = Audience(CallQueue(), 0, UserPenalty())
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(audience.run)
            nursery.start_soon(audience.wait_turn, ours)
            await trio.testing.wait_all_tasks_blocked()
            audience.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
