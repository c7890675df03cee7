"""Who is asked for room, in which order, and for how long."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from volume_lab import Chaos, Disk, lab_options, opened

from kvfuse.errors import EngineError, EngineTimeout, NoSpace
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.slots.space import (
    EVICTION_SECONDS,
    ROOM_ROUNDS_MIN,
    ROOM_SECONDS,
    UNLUCKY_ROUNDS,
    RoomFinder,
    RoomSource,
)


@dataclass
class Asked:
    """Sources that note when they are asked. ``seconds``: how long each takes."""

    seconds: float = 0.0
    names: list[str] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)

    def source(self, name: str, answer: Callable[[], bool]) -> RoomSource:
        async def take(deadline: float, namespace: int | None, /) -> bool:
            self.names.append(name)
            self.deadlines.append(deadline - trio.current_time())
            await trio.sleep(self.seconds)
            return answer()

        return take


@pytest.fixture
async def core() -> Core:
    options = lab_options()
    async with opened(Disk.format(options), options, Chaos(random.Random(0))) as volume:
        return inside.core(volume)


async def nothing() -> None:
    pass


async def test_the_first_source_that_has_room_ends_the_round(core: Core) -> None:
    asked = Asked()
    answers = iter([False, True, True])
    sources = [asked.source("first", lambda: next(answers)), asked.source("second", lambda: next(answers))]
    space = RoomFinder(core, [*sources, asked.source("last", lambda: False)], [], nothing)
    wait = await space.wait_for_room(None)
    assert wait is not None
    assert asked.names == ["first", "second"]
    assert await space.wait_for_room(wait) is wait
    assert asked.names == ["first", "second", "first"]


async def test_there_is_no_room_when_no_source_has_any(core: Core) -> None:
    asked = Asked()
    space = RoomFinder(core, [asked.source(name, lambda: False) for name in "abc"], [], nothing)
    assert await space.wait_for_room(None) is None
    assert asked.names == ["a", "b", "c"]


async def test_a_call_asks_several_times_however_long_each_takes(
    core: Core, autojump_clock: trio.testing.MockClock
) -> None:
    asked = Asked(seconds=10.0)
    space = RoomFinder(core, [asked.source("slow", lambda: True)], [], nothing)
    wait, rounds = await space.wait_for_room(None), 1
    while wait is not None:
        wait = await space.wait_for_room(wait)
        rounds += wait is not None
    assert rounds == ROOM_ROUNDS_MIN


async def test_a_call_gives_up_when_others_take_all_that_becomes_free(
    core: Core, autojump_clock: trio.testing.MockClock
) -> None:
    asked = Asked(seconds=0.1)
    space = RoomFinder(core, [asked.source("quick", lambda: True)], [], nothing)
    began = trio.current_time()
    wait = await space.wait_for_room(None)
    while wait is not None:
        wait = await space.wait_for_room(wait)
    assert trio.current_time() - began == pytest.approx(core.grace.seconds + ROOM_SECONDS, abs=0.2)
    assert all(deadline == float("inf") for deadline in asked.deadlines[:ROOM_ROUNDS_MIN])
    assert all(0 <= deadline <= ROOM_SECONDS for deadline in asked.deadlines[ROOM_ROUNDS_MIN:])


async def test_a_call_from_which_others_took_what_became_free_has_blocks_go(core: Core) -> None:
    """What is removed and rewritten all the time gave up room in each round, and others were always faster."""
    asked = Asked()
    evictors = [asked.source("blocks", lambda: True)]
    space = RoomFinder(core, [asked.source("given up", lambda: True)], [], nothing, evictors)
    wait = None
    for _ in range(UNLUCKY_ROUNDS + 2):
        wait = await space.wait_for_room(wait)
    assert asked.names == ["given up"] * UNLUCKY_ROUNDS + ["blocks"] * 2


async def test_a_call_goes_on_for_longer_where_blocks_go(core: Core, autojump_clock: trio.testing.MockClock) -> None:
    asked = Asked(seconds=0.1)
    assert core.blocks is not None
    core.blocks.use = lambda number: (1, 1)  # type: ignore[method-assign]
    space = RoomFinder(core, [], [], nothing, [asked.source("blocks", lambda: True)])
    began, wait = trio.current_time(), await space.wait_for_room(None)
    with pytest.raises(EngineTimeout, match="the volume is too small"):
        while wait is not None:
            wait = await space.wait_for_room(wait)
    assert trio.current_time() - began == pytest.approx(EVICTION_SECONDS, abs=0.5)


async def test_an_engine_that_fails_ends_the_wait(core: Core) -> None:
    async def fails(deadline: float, namespace: int | None, /) -> bool:
        raise EngineError("injected")

    with pytest.raises(EngineError):
        await RoomFinder(core, [fails], [], nothing).wait_for_room(None)


async def test_records_have_room_once_what_is_pending_and_what_sources_gave_is_stored(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    room = 0
    gives = iter([True, True, False])

    async def store() -> None:
        nonlocal room
        room += 100

    monkeypatch.setattr(core.metadata, "fits", lambda size: size <= room)
    space = RoomFinder(core, [], [asked.source("removed", lambda: next(gives))], store)
    assert await space.wait_for_records(250, "a name")
    assert asked.names == ["removed", "removed"]
    assert not await space.wait_for_records(250, "a name")
    with pytest.raises(NoSpace):
        await space.wait_for_records(1000, "a name")
