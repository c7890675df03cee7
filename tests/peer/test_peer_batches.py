"""Batches of blocks of other hosts, some of which answer late or never. Time is trio's autojump clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import inside
import pytest
import trio
import trio.testing
from block_calls import bound, get_bound, put_shared
from shared_lab import hosts, quiet
from volume_lab import Chaos

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content.nearby import Nearby
from kvfuse.volume.views.neighbours import HEDGE_FACTOR, HEDGE_MIN, Wanted
from kvfuse.volume.volume import Volume

NAMES = [b"%d" % number for number in range(24)]
SIZE = 60_000
EVER = 1000.0


@dataclass
class Host:
    """`Neighbours`: another volume of this process, some blocks of which come late."""

    volume: Volume
    delays: dict[int, float] = field(default_factory=dict)
    """inode -> seconds"""
    usual: float = 0.001
    """seconds that reads take, as far as was measured"""
    is_shunned: bool = False
    hedged: int = 0
    overtaken: int = 0
    reads: list[int] = field(default_factory=list)
    """how many were asked for together"""

    def may_have(self, addr: int, base: int = 0) -> bool:
        return not self.is_shunned

    def feeds(self, addr: int, base: int) -> bool:
        return False

    async def feed(self, addr: int, generation: int, low: int, high: int) -> memoryview:
        raise AssertionError("it feeds nobody")

    def expect(self, wanted: Sequence[Wanted]) -> float:
        return self.usual

    async def read(self, wanted: Sequence[Wanted], targets: Sequence[memoryview], patience: float = inf) -> list[bool]:
        self.reads.append(len(wanted))
        found = [False] * len(wanted)

        async def fill(place: int) -> None:
            await trio.sleep(self.delays.get(wanted[place].ino, 0.0))
            _, view = Nearby(inside.core(self.volume)).resident(wanted[place])
            assert view is not None
            targets[place][:] = view
            found[place] = True

        with trio.move_on_after(patience):
            async with trio.open_nursery() as nursery:
                for place in range(len(wanted)):
                    nursery.start_soon(fill, place)
        self.is_shunned = not all(found)
        return found


async def blocks_of(one: Volume, two: Volume, rng: random.Random) -> tuple[dict[bytes, bytes], dict[bytes, int]]:
    """Blocks that the first one put, of which the second one knows; and their inodes."""
    data = {name: rng.randbytes(SIZE) for name in NAMES}
    for name, content in data.items():
        await put_shared(one, name, content)
    await quiet(one, two)
    return data, {name: (await bound(two, name)).ino for name in NAMES}


async def bring(volume: Volume) -> tuple[list[bool], float]:
    """As a batch of gets begins; and how long that took."""
    began = trio.current_time()
    found = await volume.near.all_of(ROOT_INODE, NAMES, lambda binding: True)
    return found, trio.current_time() - began


@pytest.mark.parametrize("late", [set(NAMES), set(NAMES[::3])], ids=["all", "some"])
async def test_a_batch_waits_once_for_a_host_that_is_late(
    late: set[bytes], rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """What came is kept; the rest comes from the engine."""
    async with hosts(rng, 2, [Chaos(random.Random(rng.random())) for _ in range(2)]) as (one, two):
        data, inodes = await blocks_of(one, two, rng)
        host = Host(one, {inodes[name]: EVER for name in late})
        two.connect_neighbours(host)
        found, seconds = await bring(two)
        assert found == [name not in late for name in NAMES]
        assert seconds == pytest.approx(HEDGE_MIN)
        found, seconds = await bring(two)
        assert found == [name not in late for name in NAMES]
        assert seconds == 0
        assert {name: await get_bound(two, name) for name in NAMES} == data
        assert host.reads == [len(NAMES)]
        two.connect_neighbours(None)


@pytest.mark.parametrize(
    ("host_seconds", "engine_seconds", "expected"),
    [
        (0.001, 0.001, HEDGE_MIN),
        (0.1, 10.0, 10.0),
        (0.1, 0.2, HEDGE_FACTOR * 0.1),
        (3.0, 0.1, HEDGE_FACTOR * 0.1),  # a slow host costs a few times what the engine takes, not what it took before
    ],
)
async def test_how_long_a_batch_waits(
    host_seconds: float, engine_seconds: float, expected: float, rng: random.Random,
    autojump_clock: trio.testing.MockClock,
) -> None:  # fmt: skip
    async with hosts(rng, 2, [Chaos(random.Random(rng.random())) for _ in range(2)]) as (one, two):
        _, inodes = await blocks_of(one, two, rng)
        speed = inside.core(two).reads.speeds.remote
        for _ in range(1000):
            speed.note(len(NAMES) * SIZE, engine_seconds)
        two.connect_neighbours(Host(one, dict.fromkeys(inodes.values(), EVER), usual=host_seconds))
        _, seconds = await bring(two)
        assert seconds == pytest.approx(expected, rel=0.01)
        two.connect_neighbours(None)
