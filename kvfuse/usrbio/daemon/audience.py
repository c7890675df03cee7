"""Schedules control messages: users take turns, and so do the connections of one user.

Answering a message takes the event loop about as long as starting a ring's call. If each connection waited for its own
socket, 256 connections of one user would be answered in one pass of the event loop, and all others would wait for
that. So one task per user waits for all its sockets, and takes the messages of few of them in one turn of
the user in the call queue, where calls of its rings wait, too.

Refused messages, and connections that end without a request, make a user's turns rarer: see
`penalty.py`. A ring's penalty ends with the ring; a user's decays.
"""

from __future__ import annotations

import select
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

import trio

from kvfuse import failing
from kvfuse.usrbio.daemon.call_queue import PASS_COST, CallQueue
from kvfuse.usrbio.daemon.penalty import FREE, Penalty

TURN_COST = PASS_COST / 2
"""cost of the messages of one turn of a user, in calls"""
CONNECT_COST = TURN_COST
"""cost of a connection's first message, which pays for its tables and for their end"""
FORGOTTEN_PER_SECOND = 10
"""bad messages of a user that its penalty drops"""
EXCESS_MAX = 2 * FREE
"""upper bound of a user's bad messages, so that the penalty decays within a minute"""
USERS_MAX = 1024
"""users without a connection whose penalty is remembered"""


class UserPenalty(Penalty):
    """The penalty of all connections of a user. Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._judged_at = time.monotonic()

    def judge_one(self, *, is_bad: bool) -> None:
        """Count a message that was answered, or a connection that ended."""
        forgotten = int((time.monotonic() - self._judged_at) * FORGOTTEN_PER_SECOND)
        if forgotten:
            self.forget(forgotten)
            self._judged_at += forgotten / FORGOTTEN_PER_SECOND
        self.judge(1, int(is_bad))
        self.excess = min(self.excess, EXCESS_MAX)


class Audience:
    """Schedules one user's messages, while it has connections. Event loop only, which runs `run` as a task."""

    def __init__(self, call_queue: CallQueue, key: Hashable, penalty: UserPenalty) -> None:
        self.penalty = penalty
        self.connection_count = 0
        self.scope = trio.CancelScope()
        """cancelled: `run` ends"""
        self._call_queue = call_queue
        self._key = key
        self._poll = select.epoll()
        self._waiting: dict[int, tuple[trio.Event, float]] = {}
        """descriptor -> event that starts the socket's turn, and the message's cost"""

    async def wait_turn(self, stream: trio.socket.SocketType, cost: float = 1) -> None:
        """Wait until the socket has a message, or its end, and has its turn among its user's."""
        descriptor, turn = stream.fileno(), trio.Event()
        self._waiting[descriptor] = turn, cost
        self._poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        try:
            await turn.wait()
        finally:
            if not self._poll.closed:  # else all end at once
                self._poll.unregister(descriptor)
            self._waiting.pop(descriptor, None)

    async def pause(self, cost: float) -> None:
        """Wait for the user's turn for work of this cost, in calls."""
        await self._call_queue.wait_turn(self._key, cost)

    async def run(self) -> None:
        """Give turns to sockets, until ``scope`` is cancelled."""
        try:
            with self.scope:
                while True:
                    await trio.lowlevel.wait_readable(self._poll)
                    await self._serve_some()
                    if self.penalty.seconds:
                        await trio.sleep(self.penalty.seconds)
        finally:
            self._poll.close()

    async def _serve_some(self) -> None:
        total, ready = 0.0, list[trio.Event]()
        while total < TURN_COST and (found := self._poll.poll(0, 1)):
            turn, cost = self._waiting.pop(found[0][0])
            ready.append(turn)
            total += cost
        await self._call_queue.wait_turn(self._key, total)
        for turn in ready:
            turn.set()


class Audiences:
    """The audiences of all users. Event loop only. ``nursery``: its tasks end with it."""

    def __init__(self, call_queue: CallQueue, nursery: trio.Nursery) -> None:
        self._call_queue = call_queue
        self._nursery = nursery
        self._audiences: dict[Hashable, Audience] = {}
        self._penalties: dict[Hashable, UserPenalty] = {}
        """penalties of users without connections"""

    @asynccontextmanager
    async def join(self, user: Hashable) -> AsyncIterator[Audience]:
        """Join the audience of a user, for one of its connections."""
        audience = self._audiences.get(user)
        if audience is None:
            penalty = self._penalties.pop(user, None) or UserPenalty()
            audience = self._audiences[user] = Audience(self._call_queue, user, penalty)
            self._nursery.start_soon(failing.vital_task, audience.run)
        audience.connection_count += 1
        try:
            yield audience
        finally:
            audience.connection_count -= 1
            if not audience.connection_count:
                del self._audiences[user]
                audience.scope.cancel()
                if audience.penalty.excess:
                    self._penalties[user] = audience.penalty
                    if len(self._penalties) > USERS_MAX:
                        del self._penalties[next(iter(self._penalties))]
