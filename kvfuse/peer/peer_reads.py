"""Reads of granules from other hosts, from the question to bytes that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from kvfuse.traceparent import SPAN
from kvfuse.volume.views.neighbours import Answer, Wanted

SETTLE_SECONDS = 0.02


class Asked(Protocol):
    """Who is asked."""

    def note(self, *, is_well: bool) -> None:
        """How that ended."""


class Writing(Protocol):
    """What writes into targets by itself."""

    settled: trio.Event
    """set, and made anew, when it has ended some of that"""

    def end(self, why: str) -> None:
        """It writes nothing from now on."""


class Destination(Protocol):
    """Where bytes of reads go while they come."""

    def abandon(self, read: Read) -> None:
        """Its bytes go nowhere from now on."""


class ReadBatch:
    """Reads that one caller waits for together."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.done = trio.Event()

    def one_done(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.set()


class Read:
    """One row of a question. `finish` is called once for each time it is asked."""

    __slots__ = (
        "answer",
        "asked",
        "batch",
        "destinations",
        "failure",
        "flags",
        "is_right",
        "is_wrong",
        "link",
        "named",
        "parent",
        "row",
        "size",
        "target",
        "wanted",
        "without",
    )

    def __init__(self, wanted: Wanted, target: memoryview) -> None:
        self.wanted = wanted
        self.size = wanted.high - wanted.low
        self.target: memoryview | None = target
        """None: the caller has it back"""
        self.flags = self.without = self.row = 0
        self.is_right = False
        self.parent = SPAN.get()
        """the packed span that it belongs to; empty: none"""
        self.begin(None)

    def begin(self, batch: ReadBatch | None, asked: Asked | None = None) -> None:
        """It is to be asked of somebody."""
        self.batch, self.asked = batch, asked
        self.answer: Answer | None = None
        """None: there was none"""
        self.named: list[int] = []
        self.is_wrong = False
        self.destinations: Destination | None = None
        """where its bytes go, while they come, from the row ``row`` on"""
        self.link: Writing | None = None
        """writes into the target now"""
        self.failure = ""
        """of a READ that was to fetch it"""

    def abandon(self) -> None:
        """Nobody waits for it any more: its target is not touched from now on."""
        self.target = None
        if self.destinations is not None:
            self.destinations.abandon(self)

    def arrived(self, *, is_right: bool) -> None:
        """All bytes are there."""
        self.destinations = None
        if self.target is not None:
            self.is_right, self.is_wrong = is_right, not is_right

    @property
    def is_finished(self) -> bool:
        return self.batch is None

    def finish(self) -> None:
        if self.batch is not None:
            self.batch.one_done()
            self.batch = None


async def settle(reads: Sequence[Read]) -> None:
    """Have nothing write into their targets any more. To its end, also when cancelled.

    What other hosts have is read straight into targets, and ending one such READ ends the queue pair, with all that is
    read by it. So those under way have a moment to come: they are late by now, so that this is rare.
    """
    if not any(read.link is not None for read in reads):
        return
    with trio.CancelScope(shield=True), trio.move_on_after(SETTLE_SECONDS):
        while (link := next((read.link for read in reads if read.link is not None), None)) is not None:
            await link.settled.wait()
    for read in reads:
        if read.link is not None:
            read.link.end("ABANDONED")
            read.link = None
