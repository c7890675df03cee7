"""Callers that wait for commits again and again at the same time are served together.

A commit costs the store's members, and this process, about the same whatever it carries. So one begins when as many
wait as were served together lately. Who is missing is waited for as long as a commit takes; and for some times that,
while somebody is seen on the way, as with bytes that are being written for a file that is closed. Without this callers
fall into groups that take turns: the first to return leaves alone, all others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.volume.commit.late import Late, is_held, settlers

if TYPE_CHECKING:
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.inodes.node import Node

COMMITS_MAX = 3
"""So many times as long as a commit takes others are waited for that are on their way."""
LOOK_SECONDS = 0.001
"""between looks whether somebody is"""
SECONDS_MAX = 0.05
"""What a commit is taken to last at most: nobody waits for others because the store was stalled once."""


@dataclass
class Gathering:
    """Says when the next commit should begin; its committer owns it.

    ``waiting``: how many wait for the next commit; `came` is to be called when one more does.
    """

    waiting: Callable[[], int]
    coming: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    """somebody is on the way who may wait for a commit then"""

    def __post_init__(self) -> None:
        self._peers = 0
        """that the last commits served together"""
        self.seconds = 0.0
        """that the last one took, or `SECONDS_MAX`"""
        self._complete = trio.Event()

    def came(self) -> None:
        """One more waits."""
        if self.waiting() >= self._peers:
            self._complete.set()
            self._complete = trio.Event()

    def served(self, count: int, seconds: float) -> None:
        """A commit took so long, and so many had waited for it. One that nobody waited for says nothing of others."""
        if count:
            self._peers = max(count, (self._peers + count) // 2)
            self.seconds = min(seconds, SECONDS_MAX)

    async def meet(self) -> None:
        """Return when the next commit should begin."""
        began = trio.current_time()
        patience = self.seconds
        while 0 < self.waiting() < self._peers:
            with trio.move_on_after(patience):
                await self._complete.wait()
                return
            if not self.coming() or trio.current_time() >= began + COMMITS_MAX * self.seconds:
                return
            patience = LOOK_SECONDS


@dataclass(eq=False, slots=True)
class Waiter:
    """One caller that waits for a commit."""

    nodes: tuple[Node, ...]
    durable: bool
    serial: int
    """of the last change before it came"""
    done: trio.Event = field(default_factory=trio.Event)
    error: KvfuseError | None = None


class Waiters:
    """All callers that wait for a commit of what is pending. The journal owns it."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.waiting: list[Waiter] = []
        self._has_stopped = False

    def __len__(self) -> int:
        return len(self.waiting)

    def nodes(self) -> set[Node]:
        """Inodes that somebody waits for, and what is tied to them."""
        return self._pending.ties.closure([node for waiter in self.waiting for node in waiter.nodes])

    def add(self, nodes: tuple[Node, ...], durable: bool) -> Waiter:
        """One more, who gets a commit at once. EngineError where none will come."""
        self._force(nodes)
        if self._has_stopped:
            raise EngineError("nothing is committed any more")
        waiter = Waiter(nodes, durable, self._pending.serial)
        self.waiting.append(waiter)
        self._pending.load.hurry()
        return waiter

    def force(self, waiters: Iterable[Waiter]) -> None:
        """Have what they wait for in the next commit."""
        self._force([node for waiter in waiters for node in waiter.nodes])

    def _force(self, nodes: Iterable[Node]) -> None:
        """Have these, and what is tied to them, in the next commit even while they are being written."""
        for member in self._pending.ties.closure([settler for node in nodes for settler in settlers(node)]):
            if member.changed:
                member.forced = True
                self._pending.reconsider(member)

    def served_by(self, late: Late, left_serial: int | None, early: list[Waiter]) -> list[Waiter]:
        """Those whose changes are in the batch that was built a moment ago. All others get the next one at once.

        ``late``: inodes that are not in it. ``left_serial``: the oldest change for which it had no room.
        ``early``: those who came before the bytes were written. Later ones are served if they have none. What the
        others wait for may be in the batch as it was before, or tied to more since: it is forced anew.
        """
        served = [
            waiter
            for waiter in self.waiting
            if (waiter in early or not any(node.staged_count and node.nlink for node in waiter.nodes))
            and _is_served(waiter, late, left_serial)
        ]
        if len(served) < len(self.waiting):
            self.force([waiter for waiter in self.waiting if waiter not in served])
            self._pending.load.hurry()
        return served

    def release(self, waiters: list[Waiter], error: KvfuseError | None = None) -> None:
        """These wait no longer."""
        released = set(waiters)
        self.waiting = [waiter for waiter in self.waiting if waiter not in released]
        for waiter in waiters:
            waiter.error = error
            waiter.done.set()

    def stop(self) -> None:
        """No commit will come any more."""
        self._has_stopped = True
        self.release(self.waiting, EngineError("nothing is committed any more"))


def _is_served(waiter: Waiter, late: Late, left_serial: int | None) -> bool:
    """The batch has what the waiter waits for, as far as it is not open for writing.

    An inode without names is gone from the store only when the one that took its name is there.
    """
    if not waiter.nodes:
        return left_serial is None or waiter.serial < left_serial
    return not any(is_held(node, late) for node in waiter.nodes)
