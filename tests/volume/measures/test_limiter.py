"""Limits of bytes and operations a second: pure, and at the doors of a volume under a clock that jumps."""

from __future__ import annotations

import os
import random

import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Disk, lab_options, opened

from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.measures.limiter import BURST_SECONDS, Limiter, Rate, wait_for_limits
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

KIB = 1 << 10
LIMIT = 4 * MIB


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=64 * MIB)


def test_no_more_passes_than_the_rate_allows_and_the_burst(rng: random.Random) -> None:
    rate = Rate(1000.0, burst=300)
    now, passed = 0.0, []
    for _ in range(2000):
        now += rng.choice([0.0, 0.001, 0.01, 0.3])
        amount = rng.randint(1, 100)
        passed.append((max(now, rate.enter(amount, now)), amount))
    assert [time for time, _ in passed] == sorted(time for time, _ in passed), "in the order of arrival"
    for _ in range(300):
        first = rng.randrange(len(passed))
        last = rng.randrange(first, len(passed))
        within = sum(amount for _, amount in passed[first : last + 1])
        assert within <= 1000.0 * (passed[last][0] - passed[first][0]) + 300 + 100 + 1e-6


def test_who_has_paid_waits_for_nothing() -> None:
    rate = Rate(100.0, burst=10)
    assert rate.enter(1_000_000, 5.0) <= 5.0, "no operation is too large"
    assert rate.enter(1, 5.0) == pytest.approx(5.0 + 10_000 - 0.1)
    rate.leave(1_000_000)
    assert rate.enter(1, 5.1) <= 5.1


async def test_who_gives_up_has_paid_nothing(autojump_clock: trio.testing.MockClock) -> None:
    limiter = Limiter(bandwidth=1000, iops=0, burst=0)
    assert await wait_for_limits(lambda: [limiter], 10_000) == 0.0
    with trio.move_on_after(1):
        await wait_for_limits(lambda: [limiter], 50_000)
    assert await wait_for_limits(lambda: [limiter], 1) == pytest.approx(9 - BURST_SECONDS)


async def test_of_the_kernels_requests_a_bounded_number_waits(autojump_clock: trio.testing.MockClock) -> None:
    measures = Measures()
    measures.limiters = (Limiter(bandwidth=0, iops=100, burst=0),)
    async with trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(measures.throttle_kernel, 1)
        await trio.testing.wait_all_tasks_blocked(0.001)
        assert measures.kernel_waiting == 128
    assert trio.current_time() == pytest.approx(1.95, abs=0.7), "those that went on are paid for by the others"


async def make_file(volume: Volume, folder: int, size: int) -> int:
    handle, node = await volume.tree.create(folder, b"file", 0o644, CALLER, os.O_RDWR)
    await volume.files.write(handle, 0, bytes(size))
    await volume.files.release(handle)
    return node.ino


async def read_for(volume: Volume, ino: int, seconds: float) -> int:
    handle = await volume.files.open(ino, os.O_RDONLY, CALLER)
    total, end = 0, trio.current_time() + seconds
    while trio.current_time() < end:
        total += len(await volume.files.read(handle, 0, 64 * KIB))
        await trio.lowlevel.checkpoint()
    await volume.files.release(handle)
    return total


async def limited_folder(volume: Volume, parent: int, name: bytes, settings: bytes) -> int:
    folder = await volume.tree.make_directory(parent, name, 0o755, CALLER)
    await volume.inodes.set_xattr(folder.ino, NAMESPACE, settings)
    return folder.ino


async def test_a_limit_holds_for_all_callers_together(
    disk: Disk, options: Options, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(disk, options) as volume:
        folder = await limited_folder(volume, ROOT_INODE, b"limited", b"bandwidth=4MiB")
        ino = await make_file(volume, folder, 64 * KIB)
        totals: list[int] = []

        async def read() -> None:
            totals.append(await read_for(volume, ino, 20))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
        assert sum(totals) == pytest.approx(20 * LIMIT, rel=0.05)
        measures = volume.inodes.measures(ino)
        assert measures.throttled_seconds == pytest.approx(60, rel=0.05)


async def test_writes_pay_and_namespaces_in_it_pay_too(
    disk: Disk, options: Options, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(disk, options) as volume:
        outer = await limited_folder(volume, ROOT_INODE, b"outer", b"iops=100")
        inner = await limited_folder(volume, outer, b"inner", b"bandwidth=1MiB")
        handle, node = await volume.tree.create(inner, b"file", 0o644, CALLER, os.O_RDWR)
        began = trio.current_time()
        for _ in range(32):
            await volume.files.write(handle, 0, bytes(64 * KIB), by_kernel=True)
        assert trio.current_time() - began == pytest.approx(31 / 16 - BURST_SECONDS, rel=0.05)
        await volume.inodes.set_xattr(inner, NAMESPACE, b"bandwidth=0")
        began = trio.current_time()
        for _ in range(200):
            await volume.files.write(handle, 0, bytes(4 * KIB), by_kernel=True)
        assert trio.current_time() - began == pytest.approx(199 / 100 - BURST_SECONDS, rel=0.05)
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


async def test_other_limits_hold_at_once(disk: Disk, options: Options, autojump_clock: trio.testing.MockClock) -> None:
    async with opened(disk, options) as volume:
        folder = await limited_folder(volume, ROOT_INODE, b"limited", b"bandwidth=1KiB")
        ino = await make_file(volume, folder, 64 * KIB)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read_for, volume, ino, 0.1)
            await trio.sleep(5)
            await volume.inodes.set_xattr(folder, NAMESPACE, b"bandwidth=0")
        assert trio.current_time() - began == pytest.approx(5, abs=0.5)
        assert not volume.inodes.measures(ino).limiters


async def test_other_limits_of_a_namespace_above_hold_at_once(
    disk: Disk, options: Options, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(disk, options) as volume:
        outer = await limited_folder(volume, ROOT_INODE, b"outer", b"bandwidth=1KiB")
        inner = await limited_folder(volume, outer, b"inner", b"bandwidth=1GiB")
        ino = await make_file(volume, inner, 64 * KIB)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read_for, volume, ino, 0.1)
            await trio.sleep(5)
            await volume.inodes.set_xattr(outer, NAMESPACE, b"bandwidth=0")
        assert trio.current_time() - began == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize("limit", [b"64KiB", b"512KiB"])
async def test_who_waits_waits_for_the_other_limits(
    disk: Disk, options: Options, autojump_clock: trio.testing.MockClock, limit: bytes
) -> None:
    """They do not all pass at once."""
    async with opened(disk, options) as volume:
        folder = await limited_folder(volume, ROOT_INODE, b"limited", b"bandwidth=128KiB")
        ino = await make_file(volume, folder, 64 * KIB)
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(read_for, volume, ino, 0.01)
            await trio.sleep(2)
            await volume.inodes.set_xattr(folder, NAMESPACE, b"bandwidth=" + limit)
            began, before = trio.current_time(), volume.inodes.measures(ino).read_bytes
        seconds = trio.current_time() - began
        passed = volume.inodes.measures(ino).read_bytes - before
        assert passed / seconds == pytest.approx({b"64KiB": 64, b"512KiB": 512}[limit] * KIB, rel=0.1)
