"""Deadlines of what is under way: each is told at its time, and nothing that has ended before."""

from __future__ import annotations

import random
import time

import pytest
import trio
import trio.testing

from kvfuse.usrbio.daemon.deadlines import Deadlines


class Told:
    """What expired, and when: seconds since this was made."""

    def __init__(self) -> None:
        self._start = trio.current_time()
        self.rows: list[tuple[int, int]] = []

    def __call__(self, item: int) -> None:
        self.rows.append((item, round(trio.current_time() - self._start)))


async def test_each_is_told_at_its_time(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """Whatever their order, and although many end before, which the timer was set for."""
    told, start = Told(), time.monotonic()
    wanted: list[tuple[int, int]] = []
    async with trio.open_nursery() as nursery:
        deadlines: Deadlines[int] = Deadlines(nursery, told)
        for number in range(500):
            seconds = rng.randrange(1, 1000)
            deadlines.add(number, start + seconds)
            if rng.random() < 0.7:
                deadlines.remove(number)
            else:
                wanted.append((number, seconds))
        await trio.sleep(2000)
        deadlines.add(500, start + 2000 + 7)  # the timer was at rest
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert sorted(told.rows) == [*wanted, (500, 2007)]
    assert [when for _, when in told.rows] == sorted(when for _, when in told.rows)


async def test_what_is_due_already_is_told_soon(autojump_clock: trio.testing.MockClock) -> None:
    told = Told()
    async with trio.open_nursery() as nursery:
        deadlines: Deadlines[int] = Deadlines(nursery, told)
        deadlines.add(1, time.monotonic() + 100)
        deadlines.add(2, time.monotonic() - 100)
        await trio.testing.wait_all_tasks_blocked()
        assert told.rows == [(2, 0)]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("by", ["remove", "clear"])
async def test_what_has_ended_is_never_told(by: str, autojump_clock: trio.testing.MockClock) -> None:
    told = Told()
    async with trio.open_nursery() as nursery:
        deadlines: Deadlines[int] = Deadlines(nursery, told)
        deadlines.add(1, time.monotonic() + 100)
        await trio.sleep(50)
        deadlines.remove(1) if by == "remove" else deadlines.clear()
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert told.rows == []
