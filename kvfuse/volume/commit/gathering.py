"""Callers that wait for commits again and again at the same time are served together.

A commit costs the store's members, and this process, about the same whatever it carries. So one begins when as many
wait as were served together lately. Who is missing is waited for as long as a commit takes; and for some times that,
while somebody is seen on the way, as with bytes that are being written for a file that is closed. Without this callers
fall into groups that take turns: the first to return leaves alone, all others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

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
