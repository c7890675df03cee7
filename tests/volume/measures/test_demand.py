"""Work ahead of need gives way to what somebody waits for, and none waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
import trio.testing

from kvfuse.volume.measures.demand import CALLS_MAX, PATIENCE_SECONDS, Demand


@pytest.fixture
def demand() -> Iterator[Demand]:
    """Which has its share of calls."""
    demand = Demand()
    demand.calls = CALLS_MAX
    yield demand
    assert not demand.behind


def end_calls(demand: Demand, count: int) -> None:
    demand.calls -= count
    if demand.behind:
        demand.ended()


async def test_work_begins_when_there_is_room(demand: Demand, nursery: trio.Nursery) -> None:
    begun: list[int] = []

    async def work(number: int) -> None:
        await demand.give_way()
        begun.append(number)

    demand.calls += 1
    for number in range(3):
        nursery.start_soon(work, number)
    await trio.testing.wait_all_tasks_blocked()
    end_calls(demand, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert not begun
    end_calls(demand, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(begun) == [0, 1, 2]
    nursery.start_soon(work, 3)
    await trio.testing.wait_all_tasks_blocked()
    assert begun[3:] == [3]


async def test_work_that_is_needed_begins_at_once(demand: Demand) -> None:
    go = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(demand.give_way, go)
        await trio.testing.wait_all_tasks_blocked()
        assert demand.behind == {go}
        go.set()


async def test_no_work_waits_for_ever(demand: Demand, autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    await demand.give_way()
    assert trio.current_time() - began == pytest.approx(PATIENCE_SECONDS)


async def test_cancelled_work_leaves_nothing_behind(demand: Demand) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(demand.give_way)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
