"""Reads of namespaces share the segments and the event loop by weight, and one that reads alone waits for nothing."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import inside
import pytest
import trio
import trio.testing
from held_reads import HeldReads
from namespace_lab import change_namespace, make_namespace
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.measures import read_turns
from kvfuse.volume.measures.limiter import KERNEL_WAITING_MAX
from kvfuse.volume.measures.measures import JUST_NOW_SECONDS, Measures
from kvfuse.volume.measures.read_turns import LOOP_BANDWIDTH, WAITING_MAX, WINDOW, ReadTurn, wait_for_loop
from kvfuse.volume.volume import Volume

PIECE = 256 << 10
COUNT = 40
"""reads of each namespace, of neighbouring pieces"""


class Readers:
    """Two namespaces with a file each, whose reads the segment engine holds until the test lets them go."""

    def __init__(self, volume: Volume, held: HeldReads, handles: dict[str, FileHandle], data: bytes) -> None:
        self.volume, self.held, self.handles, self.data = volume, held, handles, data
        self.served = Counter[str]()
        """bytes"""
        self.let_go = 0
        """reads of the engine, in the order in which they began"""
        for number in range(2 * COUNT):
            held.gates[number] = trio.Event()

    def of(self, name: str) -> Measures:
        return inside.core(self.volume).namespaces.measures[self.handles[name].node.namespace]

    async def read(self, name: str, number: int) -> None:
        target = memoryview(bytearray(PIECE))
        await self.volume.files.read_into(self.handles[name], number * PIECE, target)
        assert target == self.data[number * PIECE : (number + 1) * PIECE]
        self.served[name] += PIECE

    async def begin(self, nursery: trio.Nursery, name: str, first: int, last: int) -> None:
        for number in range(first, last):
            nursery.start_soon(self.read, name, number)
        await trio.testing.wait_all_tasks_blocked()

    async def let_one_go(self) -> None:
        self.held.gates[self.let_go].set()
        self.let_go += 1
        await trio.testing.wait_all_tasks_blocked()

    async def let_all_go(self) -> None:
        while self.let_go < len(self.held.gates):
            await self.let_one_go()


@asynccontextmanager
async def readers(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, light: float, heavy: float
) -> AsyncIterator[Readers]:
    """``light``, ``heavy``: weights of the namespaces of these names."""
    options = lab_options(capacity=64 * MIB)
    disk, data = Disk.format(options), rng.randbytes(COUNT * PIECE)
    async with opened(disk, options) as volume:
        for name, weight in ((b"light", light), (b"heavy", heavy)):
            folder = await make_namespace(volume, ROOT_INODE, name, kind="files", weight=weight)
            handle, _ = await volume.tree.create(folder, b"file", 0o644, CALLER, os.O_RDWR)
            await volume.files.write(handle, 0, data)
            await volume.files.release(handle)
    async with opened(disk, options) as volume:
        handles = {}
        for name in ("light", "heavy"):
            folder = (await volume.tree.lookup(ROOT_INODE, name.encode())).ino
            ino = (await volume.tree.lookup(folder, b"file")).ino
            handles[name] = await volume.files.open(ino, os.O_RDONLY, CALLER)
        yield Readers(volume, HeldReads(volume, monkeypatch), handles, data)
        for handle in handles.values():
            await volume.files.release(handle)
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


async def test_reads_are_served_by_the_weights_of_their_namespaces(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_turns, "WINDOW", 5 * PIECE)
    async with readers(rng, monkeypatch, 1, 4) as found, trio.open_nursery() as nursery:
        await found.begin(nursery, "light", 0, 1)
        await found.begin(nursery, "heavy", 0, COUNT)
        await found.begin(nursery, "light", 1, COUNT)
        assert found.of("light").reading == PIECE
        assert found.of("heavy").reading == 4 * PIECE
        while found.served["heavy"] < (COUNT - 4) * PIECE:
            await found.let_one_go()
        assert found.served["heavy"] / found.served["light"] == pytest.approx(4, rel=0.15)
        await found.let_all_go()
        assert found.served == {"light": COUNT * PIECE, "heavy": COUNT * PIECE}


async def test_another_weight_holds_for_reads_that_wait(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_turns, "WINDOW", 5 * PIECE)
    async with readers(rng, monkeypatch, 1, 4) as found, trio.open_nursery() as nursery:
        await found.begin(nursery, "heavy", 0, 4)
        await found.begin(nursery, "light", 0, COUNT)
        assert found.of("light").reading == PIECE
        await change_namespace(found.volume, found.handles["light"].node.namespace, weight=16)
        for _ in range(5):
            await found.let_one_go()
        assert found.of("light").reading >= 4 * PIECE
        await found.let_all_go()


async def test_a_namespace_that_reads_alone_waits_for_nothing(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_turns, "WINDOW", PIECE)
    async with readers(rng, monkeypatch, 0.01, 100) as found, trio.open_nursery() as nursery:
        await found.begin(nursery, "light", 0, COUNT // 2)
        assert found.of("light").reading == COUNT // 2 * PIECE
        other = found.of("heavy")  # it read, but no longer does
        other.readers[other] = other.readers[found.of("light")] - 2 * JUST_NOW_SECONDS
        await found.begin(nursery, "light", COUNT // 2, COUNT)
        assert found.of("light").reading == COUNT * PIECE
        await found.let_all_go()


def two_measures(weight: float) -> tuple[Measures, Measures]:
    """Of a namespace of this weight, and of one of weight 1 that reads now."""
    of_both: dict[Measures, float] = {}
    one, other = Measures(of_both), Measures(of_both)
    one.weight = weight
    one.begin_reading(0)
    other.begin_reading(1)
    return one, other


async def test_who_gives_up_lets_the_next_one_go(nursery: trio.Nursery) -> None:
    one, _ = two_measures(1)
    begun, end = list[int](), trio.Event()

    async def read(number: int, size: int) -> None:
        async with ReadTurn(one, size):
            begun.append(number)
            await end.wait()

    nursery.start_soon(read, 0, WINDOW // 4)
    await trio.testing.wait_all_tasks_blocked()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(read, 1, WINDOW)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(read, 2, WINDOW // 4)
            await trio.testing.wait_all_tasks_blocked()
            assert begun == [0]
            scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert begun == [0, 2]
    assert not one.line.places
    end.set()
    await trio.testing.wait_all_tasks_blocked()
    assert not one.reading


async def test_the_event_loop_hands_out_bytes_by_weight(autojump_clock: trio.testing.MockClock) -> None:
    one, _ = two_measures(0.25)
    began, count = trio.current_time(), 100
    for _ in range(count):
        await wait_for_loop(one, MIB)
    expected = 5 * count * MIB / LOOP_BANDWIDTH
    assert trio.current_time() - began == pytest.approx(expected, rel=0.05)


async def test_one_that_gives_up_took_nothing_of_the_event_loop(autojump_clock: trio.testing.MockClock) -> None:
    one, _ = two_measures(0.25)
    await wait_for_loop(one, 16 * MIB)
    with trio.move_on_after(0):
        await wait_for_loop(one, 1 << 40)
    began = trio.current_time()
    await wait_for_loop(one, MIB)
    assert trio.current_time() - began < 0.1


async def test_few_requests_wait_so_that_the_mount_answers_others(autojump_clock: trio.testing.MockClock) -> None:
    one, _ = two_measures(0.01)
    began, passed, end = trio.current_time(), 0, trio.Event()

    async def read() -> None:
        nonlocal passed
        async with ReadTurn(one, WINDOW):
            passed += 1
            await end.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(WAITING_MAX + 11):
            nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert passed == 11
        end.set()
    async with trio.open_nursery() as nursery:
        for _ in range(KERNEL_WAITING_MAX + 10):
            nursery.start_soon(wait_for_loop, one, MIB)
        await trio.testing.wait_all_tasks_blocked()
        assert one.kernel_waiting == KERNEL_WAITING_MAX
        assert len(nursery.child_tasks) == KERNEL_WAITING_MAX
    assert trio.current_time() - began == pytest.approx(101 * (KERNEL_WAITING_MAX - 1) * MIB / LOOP_BANDWIDTH, rel=0.1)


async def test_what_did_not_wait_delays_nobody(autojump_clock: trio.testing.MockClock) -> None:
    one, _ = two_measures(0.01)
    async with trio.open_nursery() as nursery:
        for _ in range(40 * KERNEL_WAITING_MAX):
            nursery.start_soon(wait_for_loop, one, MIB)
    began = trio.current_time()
    await wait_for_loop(one, MIB)
    assert trio.current_time() - began < 1


async def test_who_waits_for_the_event_loop_goes_on_once_no_other_reads(autojump_clock: trio.testing.MockClock) -> None:
    one, other = two_measures(0.01)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(KERNEL_WAITING_MAX):
            nursery.start_soon(wait_for_loop, one, 16 * MIB)
        await trio.testing.wait_all_tasks_blocked()
        other.end_reading(1)
        other.readers[other] -= 2 * JUST_NOW_SECONDS
    assert trio.current_time() - began < 1
    other.begin_reading(1)
    await wait_for_loop(one, MIB)
    assert trio.current_time() - began < 1  # what did not wait is no debt
    assert not one.kernel_waiting


async def test_the_event_loop_hands_bytes_to_a_lone_namespace_at_once() -> None:
    one, other = two_measures(0.01)
    other.reading = 0
    other.readers[other] -= 2 * JUST_NOW_SECONDS
    with trio.testing.assert_no_checkpoints():
        for _ in range(100):
            await wait_for_loop(one, 64 * MIB)
        async with ReadTurn(one, 2 * WINDOW):
            pass
