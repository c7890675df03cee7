"""Who waits for whom before a commit begins. Times are those of a clock that jumps."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvfuse.volume.commit.committer import COMMITS_MAX, LOOK_SECONDS, SECONDS_MAX, Gathering

COMMIT = 0.01
"""Seconds."""


class Waiters:
    """How many wait, and whether more are on their way."""

    def __init__(self, served: int, seconds: float = COMMIT) -> None:
        self.count = 1
        self.is_coming = False
        self.gathering = Gathering((self,), is_coming=lambda: self.is_coming)
        self.gathering.note_served(served, seconds)

    def __len__(self) -> int:
        return self.count

    async def come(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.count += 1
        self.gathering.add_caller()

    async def meet(self) -> float:
        """How long it took."""
        began = trio.current_time()
        await self.gathering.await_callers()
        return trio.current_time() - began


@pytest.mark.parametrize("served", [0, 1])
async def test_who_is_alone_waits_for_nobody(served: int, autojump_clock: trio.testing.MockClock) -> None:
    assert await Waiters(served).meet() == 0


async def test_a_commit_begins_when_all_are_back_who_were_served_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    waiters = Waiters(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiters.come, COMMIT / 4)
        nursery.start_soon(waiters.come, COMMIT / 2)
        assert await waiters.meet() == pytest.approx(COMMIT / 2)
    assert await waiters.meet() == 0


async def test_who_does_not_come_back_is_waited_for_as_long_as_a_commit_takes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    assert await Waiters(2).meet() == pytest.approx(COMMIT)


async def test_who_is_on_the_way_is_waited_for_some_commits(autojump_clock: trio.testing.MockClock) -> None:
    waiters = Waiters(2)
    waiters.is_coming = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiters.come, 2.5 * COMMIT)
        assert await waiters.meet() == pytest.approx(2.5 * COMMIT)
    waiters = Waiters(2)
    waiters.is_coming = True
    assert await waiters.meet() == pytest.approx(COMMITS_MAX * COMMIT, abs=LOOK_SECONDS)


async def test_once_nobody_is_on_the_way_any_more_the_commit_begins(autojump_clock: trio.testing.MockClock) -> None:
    waiters = Waiters(2)
    waiters.is_coming = True

    async def turn_away() -> None:
        await trio.sleep(2 * COMMIT)
        waiters.is_coming = False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn_away)
        assert await waiters.meet() == pytest.approx(2 * COMMIT, abs=2 * LOOK_SECONDS)


async def test_those_who_stay_away_are_soon_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    waiters = Waiters(64)
    waits = 0
    while await waiters.meet():
        waiters.gathering.note_served(1, COMMIT)
        waits += 1
    assert 0 < waits <= 6


async def test_a_commit_that_nobody_waited_for_says_nothing(autojump_clock: trio.testing.MockClock) -> None:
    waiters = Waiters(2)
    waiters.gathering.note_served(0, SECONDS_MAX)
    assert await waiters.meet() == pytest.approx(COMMIT)


async def test_a_commit_that_was_held_up_makes_nobody_wait_as_long(autojump_clock: trio.testing.MockClock) -> None:
    assert await Waiters(2, seconds=5.0).meet() == pytest.approx(SECONDS_MAX)
