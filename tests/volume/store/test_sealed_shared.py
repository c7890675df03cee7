"""A shared volume some of whose records in etcd were changed by hand: hosts go on, and believe none of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import inside
import pytest
import trio
from mounting import shared_conf
from shared_lab import put, read
from volume_lab import CALLER

from kvfuse.errors import Corrupt, OperationError, Stale
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.slab import layout
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume
from kvfuse_cluster.etcd import EtcdServers

CONTENT = bytes(range(256)) * 300


@pytest.fixture
def options(etcd: EtcdServers, tmp_path: Path) -> Options:
    return config.load(shared_conf(tmp_path, etcd)).options


async def damage(options: Options, *kinds: bytes, name: bytes = b"") -> list[bytes]:
    """Flip a bit at the end of records of these kinds; of ``name`` alone, where it is given."""
    async with engines.open_records(options) as records:
        rows = [row for kind in kinds for row in await records.scan(kind) if row.key.endswith(name)]
        await records.commit({row.key: row.value[:-1] + bytes([row.value[-1] ^ 1]) for row in rows})
    return [row.key for row in rows]


@asynccontextmanager
async def two_hosts(options: Options) -> AsyncIterator[tuple[Volume, Volume]]:
    await formatting.format_volume(options)
    async with open_volume(options) as first, open_volume(options) as second:
        yield first, second


async def test_hosts_go_on_beside_a_changed_record(options: Options) -> None:
    """The change is heard of by the watch of both: neither shows it, and both follow each other as before."""
    async with two_hosts(options) as (first, second):
        assert inside.core(first).superblock.features == layout.NEW_FEATURES
        for name in (b"victim", b"neighbour"):
            await put(first, name, CONTENT)
        assert await read(second, b"victim") == CONTENT
        assert await damage(options, b"d", name=b"victim")
        for volume in (first, second):
            with trio.fail_after(20):
                while True:
                    try:
                        await volume.tree.lookup(ROOT_INODE, b"victim")
                    except Corrupt:
                        break
                    await trio.sleep(0.05)
            assert await read(volume, b"neighbour") == CONTENT
            listed = {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 100)}
            assert listed == {b"neighbour"}
        await put(second, b"later", CONTENT)
        await first.tree.rename(ROOT_INODE, b"neighbour", ROOT_INODE, b"moved", 0)
        assert await read(first, b"later") == CONTENT
        assert await read(second, b"moved") == CONTENT
    report = await fsck(options, repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    async with open_volume(options) as volume:
        assert {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 100)} == {b"moved", b"later"}


async def test_a_change_of_a_file_whose_record_was_changed_by_hand_is_lost_alone(options: Options) -> None:
    async with two_hosts(options) as (first, _):
        for name in (b"victim", b"neighbour"):
            await put(first, name, CONTENT)
        node = await first.tree.lookup(ROOT_INODE, b"victim")
        handle = await first.files.open(node.ino, os.O_WRONLY, CALLER)
        await damage(options, b"d", name=b"victim")
        await first.files.write(handle, 0, b"changed")
        with suppress(OperationError):
            await first.files.flush(handle)
        with suppress(OperationError):
            await first.files.release(handle)
        await first.sync()  # what was changed here of the file is lost, and nothing else waits for it
        with pytest.raises((Corrupt, Stale)):
            await first.tree.lookup(ROOT_INODE, b"victim")
        await put(first, b"later", CONTENT)
        await first.sync()
        assert await read(first, b"later") == CONTENT


@pytest.mark.parametrize("kind", [b"s", b"l"], ids=["slab", "holder"])
async def test_slabs_with_damaged_records_are_not_used(options: Options, kind: bytes) -> None:
    """The next host takes others; the bytes in them stay."""
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        for number in range(10):
            await put(volume, b"old-%d" % number, CONTENT)
    assert await damage(options, kind)
    async with open_volume(options) as volume:
        with trio.fail_after(30):
            for number in range(10):
                await put(volume, b"new-%d" % number, CONTENT)
        for number in range(10):
            assert await read(volume, b"old-%d" % number) == CONTENT
            assert await read(volume, b"new-%d" % number) == CONTENT
    report = await fsck(options, repair=True, verify=True)
    assert report.clean, [problem.text for problem in report.problems]
    async with open_volume(options) as volume:
        for number in range(10):
            assert await read(volume, b"old-%d" % number) == CONTENT
            assert await read(volume, b"new-%d" % number) == CONTENT
