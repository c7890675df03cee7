"""The cache of registrations, with a device that counts what is registered, and does nothing with it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from kvfuse.peer import queue_pair
from kvfuse.peer.registrations import Registrations
from kvfuse.peer.verbs import PIECE, RdmaDevice, Registration, VerbsError

SIZE = 1 << 16


class Piece:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        device.count += 1
        self.lkey = self.rkey = device.count

    def close(self) -> None:
        self.device.closed.append(self.lkey)


class FakeDevice:
    def __init__(self) -> None:
        self.count = 0
        self.closed: list[int] = []
        self.is_failing = False

    async def register(self, address: int, size: int, owner: object, *, remote: bool) -> Registration:
        await trio.lowlevel.checkpoint()
        if self.is_failing:
            raise VerbsError("no memory may be registered")
        return Registration(address, size, remote, owner, [Piece(self) for _ in range(0, size, PIECE)])


@asynccontextmanager
async def running(cache: Registrations) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run)
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


def make(bytes_max: int = 4 * SIZE) -> tuple[FakeDevice, Registrations]:
    device = FakeDevice()
    return device, Registrations(cast(RdmaDevice, device), bytes_max, remote=True)


def memory() -> Any:
    return np.zeros(SIZE, np.uint8)


async def cover(cache: Registrations, one: Any) -> None:
    await cache.cover(one, 0, one.nbytes)


def keys(cache: Registrations, one: Any) -> list[int] | None:
    parts = cache.parts(one, 0, one.nbytes)
    return [part.lkey for part in parts] if parts is not None else None


async def test_a_memory_is_registered_once() -> None:
    device, cache = make()
    one = memory()
    assert keys(cache, one) is None
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(cover, cache, one)
    assert keys(cache, one) == [1]
    assert (device.count, cache.bytes) == (1, SIZE)


async def test_only_the_pieces_that_are_wanted_are_registered() -> None:
    device, cache = make(10 * PIECE)
    one = np.zeros(3 * PIECE + 100, np.uint8)
    await cache.cover(one, 2 * PIECE - 10, 20)
    assert (device.count, cache.bytes) == (2, 2 * PIECE)
    address = one.ctypes.data
    assert cache.parts(one, 2 * PIECE - 10, 20) == [
        (address + 2 * PIECE - 10, 10, 1, 1),
        (address + 2 * PIECE, 10, 2, 2),
    ]
    assert cache.parts(one, PIECE, PIECE) == [(address + PIECE, PIECE, 1, 1)]
    for start, size in ((0, 1), (PIECE - 1, 2), (3 * PIECE, 1)):
        assert cache.parts(one, start, size) is None
    await cache.cover(one, 3 * PIECE + 99, 1)
    assert cache.bytes == 2 * PIECE + 100


async def test_what_was_not_used_for_longest_goes() -> None:
    device, cache = make()
    kept = [memory() for _ in range(4)]
    for one in kept:
        await cover(cache, one)
    keys(cache, kept[0])
    another = memory()
    await cover(cache, another)
    assert device.closed == [2]
    assert [keys(cache, one) is not None for one in kept] == [True, False, True, True]
    assert cache.bytes == 4 * SIZE
    with pytest.raises(VerbsError, match="more than may be registered"):
        await cover(cache, np.zeros(5 * SIZE, np.uint8))


async def test_memory_that_is_dropped() -> None:
    """Also in another thread, and if the next memory has the same identity."""
    device, cache = make()
    async with running(cache):
        held = [memory()]
        await cover(cache, held[0])
        await trio.to_thread.run_sync(held.clear)
        gc.collect()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (device.closed, cache.bytes) == ([1], 0)
        held.append(memory())
        await cover(cache, held[0])
        held.clear()
        held.append(memory())
        assert keys(cache, held[0]) is None
        await cover(cache, held[0])
        assert keys(cache, held[0]) == [3]
    assert sorted(device.closed) == [1, 2, 3], "the end of the cache ends all"


async def test_an_evicted_memory_may_be_registered_again() -> None:
    """The end of the memory is noted for each of its registrations."""
    device, cache = make(SIZE)
    one, two = memory(), memory()
    for each in (one, two, one):
        await cover(cache, each)
    assert device.closed == [1, 2]
    del one, two, each
    gc.collect()
    three = memory()
    await cover(cache, three)
    assert (device.closed, cache.bytes) == ([1, 2, 3], SIZE)


async def test_a_failure_leaves_nothing() -> None:
    device, cache = make()
    device.is_failing = True
    one = memory()
    with pytest.raises(VerbsError, match="no memory"):
        await cover(cache, one)
    assert (keys(cache, one), cache.bytes) == (None, 0)
    device.is_failing = False
    await cover(cache, one)
    assert keys(cache, one) is not None


def test_a_range_is_cut_where_pieces_end() -> None:
    device = FakeDevice()
    registration = Registration(PIECE // 2, 2 * PIECE + 100, True, None, [Piece(device) for _ in range(3)])
    parts = registration.parts(registration.address + PIECE - 10, PIECE + 50)
    assert [(part.address - registration.address, part.size, part.lkey) for part in parts] == [
        (PIECE - 10, 10, 1),
        (PIECE, PIECE, 2),
        (2 * PIECE, 40, 3),
    ]
    for address, size in ((registration.address - 1, 2), (registration.address, 2 * PIECE + 101), (PIECE, 0)):
        with pytest.raises(ValueError, match="not registered"):
            registration.parts(address, size)
    registration.close()
    assert device.closed == [3, 2, 1]
    with pytest.raises(ValueError, match="not registered"):
        registration.parts(registration.address, 1)


@pytest.mark.parametrize(("flags", "is_unresolved"), [("0x0", True), ("0x2", False)])
def test_hosts_whose_link_address_is_asked_for(tmp_path: Path, flags: str, is_unresolved: bool) -> None:
    table = tmp_path / "arp"
    table.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        f"10.9.0.7         0x1         {flags}         00:00:00:00:00:00     *        eth0\n"
        "10.9.0.70        0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    assert queue_pair._is_unresolved("10.9.0.7", table) is is_unresolved
    assert not queue_pair._is_unresolved("10.9.0.1", table)
