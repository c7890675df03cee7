"""A small cache that hosts share, stored to faster than its slots rest: callers wait, and are not refused."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
import trio.testing
from cache_lab import write_file
from shared_lab import volumes
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


class Stores:
    """What tasks of several hosts stored: how long each store took, and what refused it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.refused: Counter[str] = Counter()

    async def work(self, volume: Volume, number: int, count: int, size: int, pause: float) -> None:
        """Store blocks: even numbers by key, odd ones through the file system."""
        for index in range(count):
            began = trio.current_time()
            data = bytes([index]) * size
            try:
                if number % 2:
                    await write_file(volume, b"file-%d-%d" % (number, index), data)
                else:
                    await volume.blocks.put(ROOT_INODE, b"%04d%04d" % (number, index), memoryview(data), CALLER, 0o644)
            except errors.OperationError as error:
                self.refused[type(error).__name__] += 1
            self.seconds.append(trio.current_time() - began)
            await trio.sleep(pause)


async def store(rng: random.Random, capacity: int, host_count: int, count: int, size: int, pause: float) -> Stores:
    """By two tasks on each host."""
    options, stores = lab_options(capacity=capacity), Stores()
    disk = Disk.format(options, shared=True)
    settings = Settings(kind="cache").changed({"admission": "all"})
    disk.apply({schema.namespace_key(ROOT): encode_settings(settings)}, ())
    chaos = [Chaos(rng) for _ in range(host_count)]
    async with volumes(disk, options, host_count, rng, chaos) as hosts, trio.open_nursery() as nursery:
        for host, volume in enumerate(hosts):
            for task in range(2):
                nursery.start_soon(stores.work, volume, 2 * host + task, count, size, pause)
    return stores


async def test_room_is_made_ahead_of_need(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """Half of the cache is at rest at this pace: most find room at once, and none is refused."""
    stores = await store(rng, 64 * MIB, 2, 60, 1_000_000, 1.0)
    assert not stores.refused
    print(f"on average {sum(stores.seconds) / len(stores.seconds):.2f} s, at most {max(stores.seconds):.2f} s")
    assert sum(stores.seconds) / len(stores.seconds) < 0.7
    assert max(stores.seconds) < 11


@pytest.mark.ring(3)
async def test_no_store_is_told_that_a_cache_is_full(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """At twenty times the pace at which slots have rested some wait for too long, which is not a lack of space."""
    stores = await store(rng, 16 * MIB, 3, 40, 4_000_000, 1.0)
    assert set(stores.refused) <= {"EngineTimeout"}
