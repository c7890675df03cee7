"""A client of a volume in etcd goes on with the next daemon, by the lease that etcd counts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import inside
import pytest
from mounting import shared_conf
from shared_lab import eventually
from volume_lab import CALLER

from kvfuse.errors import VolumeBusy
from kvfuse.kept.keeper import NO_KEEPER, Keeper, MemoryKeeper
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Standing
from kvfuse.volume.volume import Volume
from kvfuse_cluster.etcd import EtcdServers

CONTENT = bytes(range(256)) * 400
WORDS = ("client.lease=15",)


@pytest.fixture
def options(etcd_alone: EtcdServers, tmp_path: Path) -> Options:
    """Of a volume that nobody made yet; its segments are in tmp_path."""
    return config.load(shared_conf(tmp_path, etcd_alone), words=WORDS).options


async def write(volume: Volume, name: bytes) -> None:
    handle, _ = await volume.tree.create(ROOT_INODE, name, 0o640, CALLER, os.O_WRONLY)
    await volume.files.write(handle, 0, CONTENT)
    await volume.files.flush(handle)
    await volume.files.release(handle)


async def read(volume: Volume, name: bytes) -> bytes:
    node = await volume.tree.lookup(ROOT_INODE, name)
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    try:
        return bytes(await volume.files.read(handle, 0, 2 * len(CONTENT)))
    finally:
        await volume.files.release(handle)


@asynccontextmanager
async def killed(options: Options, keeper: Keeper) -> AsyncIterator[Volume]:
    """A volume whose daemon dies at the end of the body: nothing is stored or given back any more."""
    async with open_volume(options, keeper=keeper) as volume:
        yield volume
        volume.hand_over()
        await inside.life(volume).end()


async def has_all(volume: Volume, client: int) -> bool:
    """It allocates in all slabs that are a client's."""
    assert inside.leases(volume) is not None
    return all(map(inside.slabs(volume).holds, inside.leases(volume).view.held_by(client)))


async def holders(options: Options) -> set[int]:
    """Clients that hold slabs."""
    async with engines.open_records(options) as plain:
        records = formatting.sealed.as_formatted(plain, await formatting.read_shared_superblock(plain, ""))
        rows = await records.scan(b"l")
    return {schema.decode_holder(row.value).client for row in rows} - {schema.NOBODY}


async def test_the_next_daemon_has_the_lease(options: Options) -> None:
    await formatting.format_volume(options)
    keeper = MemoryKeeper()
    async with open_volume(options) as other:
        assert inside.leases(other) is not None
        await write(other, b"theirs")
        members = inside.leases(other).view.members
        async with killed(options, keeper) as volume:
            client = inside.client(volume)
            await write(volume, b"before")
        assert client in await holders(options)
        async with open_volume(options, keeper=keeper) as volume:
            assert inside.client(volume) == client
            await write(volume, b"after")
            await eventually(lambda: has_all(volume, client), seconds=60, pause=0.05)
            assert client in members
            assert await holders(options) == {client, inside.client(other)}
            for host in (volume, other):
                for name in (b"before", b"after", b"theirs"):
                    assert await read(host, name) == CONTENT
            volume.hand_over()
        assert client in members
        async with open_volume(options, keeper=keeper) as volume:
            assert inside.client(volume) == client
            assert await has_all(volume, client), "they need not rest"
            await write(volume, b"last")

        async def is_gone() -> bool:
            return client not in members

        await eventually(is_gone, seconds=60, pause=0.05)
        assert await read(other, b"last") == CONTENT
    report = await fsck(options, verify=True)
    assert report.clean, [problem.text for problem in report.problems]


async def test_a_lease_that_ended_makes_another_client(options: Options) -> None:
    await formatting.format_volume(options)
    keeper = MemoryKeeper()
    async with killed(options, keeper) as volume:
        client = inside.client(volume)
        await write(volume, b"before")
    async with engines.open_records(options) as records:

        async def nobody_has_it() -> bool:
            return not await records.scan(schema.MEMBER_PREFIX)

        await eventually(nobody_has_it, seconds=60, pause=0.05)
    async with open_volume(options, keeper=keeper) as volume:
        assert inside.client(volume) != client
        assert await read(volume, b"before") == CONTENT
        standing = Standing.take(keeper)
        assert standing is not None
        assert standing.client == inside.client(volume)
    assert Standing.take(keeper) is None
    report = await fsck(options, verify=True)
    assert report.clean, [problem.text for problem in report.problems]


async def test_a_client_that_is_to_go_on_is_in_use(options: Options) -> None:
    """Its process, which its record names, is another one by then."""
    await formatting.format_volume(options)
    keeper = MemoryKeeper()
    async with killed(options, keeper):
        pass
    async with open_volume(options, keeper=keeper):
        with pytest.raises(VolumeBusy, match=f"in use by process {os.getpid()} on "):
            await fsck(options)


async def test_a_volume_in_a_folder_has_no_client(tmp_path: Path) -> None:
    options = config.load(tmp_path / "volume", words=("volume.capacity=64MiB",)).options
    await formatting.format_volume(options)
    keeper = MemoryKeeper()
    for name in (b"one", b"two"):
        async with open_volume(options, keeper=keeper) as volume:
            await write(volume, name)
            volume.hand_over()
            assert Standing.take(keeper) is None
    async with open_volume(options, keeper=NO_KEEPER) as volume:
        assert await read(volume, b"one") == await read(volume, b"two") == CONTENT
