"""What somebody waits for at one medium, and work ahead of need, which gives way to it.

Readers and writers count their calls in lines of their own: a call of a function costs more than what it would do.

    demand.calls += 1
    try:
        ...
    finally:
        demand.calls -= 1
        if demand.behind:
            demand.ended()
"""

from __future__ import annotations

import trio

CALLS_MAX = 16
"""Calls that somebody waits for; with so many no work ahead of need is begun. More than one prefetch has under way."""
PATIENCE_SECONDS = 0.25
"""after which work ahead of need is begun all the same, so that none waits for ever"""


class Demand:
    """At one medium. Event loop only."""

    __slots__ = ("behind", "calls")

    def __init__(self) -> None:
        self.calls = 0
        """under way, for which somebody waits"""
        self.behind: set[trio.Event] = set()
        """of work that gives way to them"""

    async def give_way(self, go: trio.Event | None = None) -> None:
        """Return when few calls are under way, when ``go`` is set, or after PATIENCE_SECONDS."""
        if self.calls < CALLS_MAX:
            return
        go = trio.Event() if go is None else go
        self.behind.add(go)
        try:
            with trio.move_on_after(PATIENCE_SECONDS):
                await go.wait()
        finally:
            self.behind.discard(go)

    def ended(self) -> None:
        """Fewer calls are under way, and there is work behind them."""
        if self.calls < CALLS_MAX:
            for go in self.behind:
                go.set()
            self.behind.clear()
