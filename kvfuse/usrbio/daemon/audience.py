"""Whose control message is answered next: users take turns, and so do the connections of one user.

To answer a message takes the event loop about as long as to start a ring's call. If each connection waited for its own
socket, 256 connections of one user would be answered in one pass of the event loop, and everybody else would wait for
that. So one task of a user waits for all of its sockets at once, and takes the messages of few of them in one turn of
the user at the desk, where calls of its rings wait, too.

Messages that are refused, and connections that end before they ask for anything, make a user's turns rare: see
`penalty.py`. A ring's penalty ends with the ring; a user's is forgotten after a while.
"""

from __future__ import annotations

import select
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

import trio

from kvfuse.usrbio.daemon.desk import PASS_COST, Desk
from kvfuse.usrbio.daemon.penalty import FREE, Penalty

TURN_COST = PASS_COST / 2
"""cost of the messages of one turn of a user, in calls"""
CONNECT_COST = TURN_COST
"""of a connection's first message: its tables are made with it, and taken down at its end"""
FORGOTTEN_PER_SECOND = 10
"""bad messages of a user"""
EXCESS_MAX = 2 * FREE
"""so that it is forgotten within half a minute"""
USERS_MAX = 1024
"""users without a connection whose penalty is remembered"""


class UserPenalty(Penalty):
    """Of all connections of a user. Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._judged_at = time.monotonic()

    def judge_one(self, *, is_bad: bool) -> None:
        """One more message was answered, or a connection has ended."""
        forgotten = int((time.monotonic() - self._judged_at) * FORGOTTEN_PER_SECOND)
        if forgotten:
            self.forget(forgotten)
            self._judged_at += forgotten / FORGOTTEN_PER_SECOND
        self.judge(1, int(is_bad))
        self.excess = min(self.excess, EXCESS_MAX)


class Audience:
    """Of one user, while it has connections. Event loop only, which runs `run` as a task."""

    def __init__(self, desk: Desk, key: Hashable, penalty: UserPenalty) -> None:
        self.penalty = penalty
        self.connection_count = 0
        self.scope = trio.CancelScope()
        """cancelled: `run` ends"""
        self._desk = desk
        self._key = key
        self._poll = select.epoll()
        self._waiting: dict[int, tuple[trio.Event, float]] = {}
        """by descriptor: what is set when its message is next, and what the message costs"""

    async def turn(self, stream: trio.socket.SocketType, cost: float = 1) -> None:
        """Wait until the socket has a message, or its end, and it is the next one of its user's."""
        descriptor, came = stream.fileno(), trio.Event()
        self._waiting[descriptor] = came, cost
        self._poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        try:
            await came.wait()
        finally:
            self._poll.unregister(descriptor)
            self._waiting.pop(descriptor, None)

    async def pause(self, cost: float) -> None:
        """Wait until it is the user's turn to do what costs so much."""
        await self._desk.turn(self._key, cost)

    async def run(self) -> None:
        """Give turns."""
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
            came, cost = self._waiting.pop(found[0][0])
            ready.append(came)
            total += cost
        await self._desk.turn(self._key, total)
        for came in ready:
            came.set()


class Audiences:
    """Of all users. Event loop only. ``nursery``: its tasks end with it."""

    def __init__(self, desk: Desk, nursery: trio.Nursery) -> None:
        self._desk = desk
        self._nursery = nursery
        self._audiences: dict[Hashable, Audience] = {}
        self._penalties: dict[Hashable, UserPenalty] = {}
        """of users that are gone, and were bad"""

    @asynccontextmanager
    async def of(self, user: Hashable) -> AsyncIterator[Audience]:
        """For one connection of a user."""
        audience = self._audiences.get(user)
        if audience is None:
            penalty = self._penalties.pop(user, None) or UserPenalty()
            audience = self._audiences[user] = Audience(self._desk, user, penalty)
            self._nursery.start_soon(audience.run)
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
