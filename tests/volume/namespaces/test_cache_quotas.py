"""Caches with quotas: what goes in evicts what is there, of the same namespace alone, and nothing is refused."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import inside
import pytest
import trio
import trio.testing
from namespace_lab import UseAudit, change_namespace, make_namespace
from shared_lab import eventually
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.errors import NotAdmitted, QuotaExceeded
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10
SOON = 0.5
OPTIONS = lab_options(capacity=32 * MIB)


@pytest.fixture
async def volume(autojump_clock: trio.testing.MockClock) -> AsyncIterator[Volume]:
    disk = Disk.format(OPTIONS)
    UseAudit.attach(disk)
    async with opened(disk, OPTIONS) as volume:
        yield volume
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


async def put(volume: Volume, folder: int, number: int, size: int = BLOCK) -> None:
    await volume.blocks.put(folder, b"%08d" % number, memoryview(bytes(size)), CALLER, 0o644)


async def write_file(volume: Volume, folder: int, number: int, size: int = BLOCK) -> None:
    handle, node = await volume.tree.create(folder, b"tmp%d" % number, 0o644, CALLER, os.O_WRONLY)
    for offset in range(0, size, 4096):
        assert await volume.files.write(handle, offset, bytes(4096)) == 4096
    await volume.files.release(handle)
    await volume.tree.rename(folder, b"tmp%d" % number, folder, b"%08d" % number, 0)
    volume.tree.forget(node.ino, 1)


async def make_cache(volume: Volume, name: bytes, parent: int = ROOT_INODE, **settings: Any) -> int:
    return await make_namespace(volume, parent, name, kind="cache", admission="all", **settings)


async def count_in(volume: Volume, folder: int) -> int:
    return len(await volume.tree.list_directory(folder, 0, 10_000))


@pytest.mark.parametrize("store", [put, write_file])
@pytest.mark.parametrize("quota", [{"capacity": 32 * BLOCK}, {"blocks": 32}, {"capacity": 16 * BLOCK, "blocks": 500}])
async def test_three_times_a_quota_goes_in(volume: Volume, store: Any, quota: dict[str, int]) -> None:
    beside = await make_cache(volume, b"beside")
    for number in range(10):
        await put(volume, beside, number)
    folder = await make_cache(volume, b"n", **quota)
    accounts = inside.namespaces(volume).accounts
    for number in range(96):
        await store(volume, folder, number)
        size, files = accounts.use(folder)
        assert size <= quota.get("capacity", size)
        assert files <= quota.get("blocks", files)
    assert await count_in(volume, folder) >= 12
    assert await count_in(volume, beside) == 10


async def test_an_outer_quota_evicts_from_the_caches_in_it(volume: Volume) -> None:
    outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=32 * BLOCK)
    await put(volume, outer, 0, 8 * BLOCK)
    inner = await make_cache(volume, b"inner", outer)
    for number in range(60):
        await put(volume, inner, number)
    await put(volume, outer, 1, 16 * BLOCK)
    with pytest.raises(QuotaExceeded):
        await put(volume, outer, 2, 16 * BLOCK)
    assert await count_in(volume, inner) <= 8


async def test_a_quota_that_is_lowered_is_kept_soon(volume: Volume) -> None:
    folder = await make_cache(volume, b"n")
    for number in range(64):
        await put(volume, folder, number)
    await volume.sync()
    await change_namespace(volume, folder, capacity=16 * BLOCK)
    await trio.sleep(SOON)
    assert 12 * BLOCK <= inside.namespaces(volume).accounts.use(folder).size <= 16 * BLOCK
    await change_namespace(volume, folder, capacity=0, blocks=8)
    await trio.sleep(SOON)
    assert 6 <= inside.namespaces(volume).accounts.use(folder).files <= 8


async def test_eviction_runs_ahead_of_a_quota(volume: Volume) -> None:
    folder = await make_cache(volume, b"n", capacity=64 * BLOCK, high_water=0.75, low_water=0.5)
    for number in range(49):
        await put(volume, folder, number)

    async def is_below() -> bool:
        return bool(inside.namespaces(volume).accounts.use(folder).size <= 32 * BLOCK)

    await eventually(is_below, seconds=60.0)
    assert inside.namespaces(volume).accounts.use(folder).size >= 30 * BLOCK


async def test_a_full_namespace_asks_its_admission(volume: Volume) -> None:
    folder = await make_namespace(
        volume, ROOT_INODE, b"n", kind="cache", capacity=16 * BLOCK, admission="second-touch", eviction="lru"
    )
    for number in range(14):
        await put(volume, folder, number)
    with pytest.raises(NotAdmitted):
        for number in range(14, 20):
            await put(volume, folder, number)


async def test_the_root_may_have_a_number_of_files() -> None:
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        namespaces = inside.namespaces(volume)
        namespaces.put(ROOT, namespaces.all[ROOT].stored.changed({"kind": "cache", "blocks": 40, "admission": "all"}))
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for number in range(120):
            await put(volume, folder, number)
            assert inside.core(volume).file_count - 1 <= 40
        assert await count_in(volume, folder) >= 32
        namespaces.put(ROOT, namespaces.all[ROOT].stored.changed({"kind": "files"}))
        with pytest.raises(QuotaExceeded):
            for number in range(120, 170):
                await put(volume, folder, number)
    assert (await check(disk)).clean
