"""Volumes without a folder: made, replaced, checked and rebuilt where etcd has the names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import inside
import msgspec
import pytest
import trio
from mounting import shared_conf
from volume_lab import CALLER, Chaos, Disk, MemoryRecords, lab_options

from kvfuse.cli.volumes import _choose_capacity, ensure_volume
from kvfuse.errors import ConfigError, VolumeBusy, VolumeError
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.remote.records.api import Lease, RecordLimits
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.sizes import GIB
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume
from kvfuse_cluster.etcd import EtcdServers

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def options(etcd: EtcdServers, tmp_path: Path) -> Options:
    """Of a volume that nobody made yet; its segments are in tmp_path."""
    return config.load(shared_conf(tmp_path, etcd)).options


async def write(volume: Volume, name: bytes) -> None:
    handle, _ = await volume.tree.create(ROOT_INODE, name, 0o640, CALLER, os.O_WRONLY)
    await volume.files.write(handle, 0, CONTENT)
    await volume.files.flush(handle)
    await volume.files.release(handle)


async def names(options: Options) -> set[bytes]:
    async with open_volume(options) as volume:
        return {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 1000)}


@asynccontextmanager
async def clean(options: Options) -> AsyncIterator[None]:
    """fsck has nothing to say at the end."""
    yield
    report = await fsck(options, verify=True)
    assert report.clean, [problem.text for problem in report.problems]


async def test_what_was_written_is_there_at_the_next_opening(options: Options) -> None:
    made = await formatting.format_volume(options)
    async with clean(options):
        async with open_volume(options) as volume:
            assert inside.core(volume).superblock == made
            await write(volume, b"one")
        async with open_volume(options) as volume:
            node = await volume.tree.lookup(ROOT_INODE, b"one")
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            assert bytes(await volume.files.read(handle, 0, 2 * len(CONTENT))) == CONTENT
            await volume.files.release(handle)


async def test_a_volume_is_replaced_only_on_demand(options: Options) -> None:
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        await write(volume, b"one")
    with pytest.raises(VolumeError, match="is a kvfuse volume already; 'kvfuse format --force' would drop"):
        await formatting.format_volume(options)
    assert await names(options) == {b"one"}
    await formatting.format_volume(options, replace=True)
    async with clean(options):
        assert await names(options) == set()
        assert list(options.segments_path.iterdir()) == []


async def test_a_volume_in_use_is_left_alone(options: Options) -> None:
    await formatting.format_volume(options)
    async with clean(options), open_volume(options):
        with pytest.raises(VolumeBusy, match=f"in use by process {os.getpid()} on "):
            await formatting.format_volume(options, replace=True)
        with pytest.raises(VolumeBusy):
            await fsck(options)


def test_the_first_mount_makes_the_volume(options: Options) -> None:
    assert ensure_volume(options) == f"made the volume {options.title} with a capacity of 512MiB"
    assert ensure_volume(options) is None


async def test_hosts_that_begin_together_make_one_volume(options: Options) -> None:
    said: list[str | None] = []

    async def begin() -> None:
        said.append(await trio.to_thread.run_sync(ensure_volume, options))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(begin)
    assert sorted(said, key=str) == [None, None, f"made the volume {options.title} with a capacity of 512MiB"]
    async with clean(options):
        assert await names(options) == set()


def test_the_capacity_is_what_the_medium_has_room_for() -> None:
    assert _choose_capacity(None, 10 * GIB, "in the pool p") == 5 * GIB
    assert _choose_capacity(7 * GIB, 10 * GIB, "in the pool p") == 7 * GIB
    assert _choose_capacity(7 * GIB, None, "in the pool p") == 7 * GIB
    with pytest.raises(ConfigError, match="a capacity of 11GiB is more than the 10GiB that are free in the pool p"):
        _choose_capacity(11 * GIB, 10 * GIB, "in the pool p")
    with pytest.raises(ConfigError, match=r"free in the pool p are not known .*: set volume.capacity"):
        _choose_capacity(None, None, "in the pool p")


def test_a_read_only_mount_makes_none(options: Options) -> None:
    mount = msgspec.structs.replace(options.mount, read_only=True)
    with pytest.raises(VolumeError, match="holds no volume, and a read-only mount makes none"):
        ensure_volume(msgspec.structs.replace(options, mount=mount))
    assert not options.segments_path.exists()


async def test_a_format_that_was_cut_off_left_no_volume(options: Options) -> None:
    async with engines.open_records(options) as records:
        await records.commit(formatting.first_records(options), durable=True)
        assert not await formatting.is_vacant(records)
    with pytest.raises(VolumeError, match="holds no kvfuse volume: it has no superblock; 'kvfuse format' makes one"):
        await names(options)
    await formatting.format_volume(options)
    async with clean(options):
        assert await names(options) == set()


async def test_a_damaged_superblock_is_refused(options: Options) -> None:
    await formatting.format_volume(options)
    async with engines.open_records(options) as records:
        (row,) = await records.get([schema.SUPERBLOCK])
        assert row is not None
        damaged = bytearray(row.value)
        damaged[40] ^= 1
        assert await records.commit({schema.SUPERBLOCK: bytes(damaged)})
    with pytest.raises(VolumeError, match=rf"^{options.title}: .*damaged"):
        await names(options)


async def test_records_that_are_lost_are_made_anew_from_the_segments(options: Options) -> None:
    made = await formatting.format_volume(options)
    async with open_volume(options) as volume:
        for number in range(5):
            await write(volume, b"file-%d" % number)
    with pytest.raises(VolumeError, match=f"'etcdctl del --prefix {options.key_prefix}' and rebuild"):
        await rebuild(options)
    async with engines.open_records(options) as records:
        keys = [row.key for row in await records.scan(b"")]
        await formatting.commit_in_parts(records, deletes=keys)
    with pytest.raises(VolumeError, match="no superblock, but 1 segments: 'kvfuse fsck --rebuild' recovers"):
        await formatting.format_volume(options)
    report = await rebuild(options)
    assert (report.files, report.dropped, report.records_kept) == (5, [], "")
    async with clean(options):
        assert await names(options) == {b"file-%d" % number for number in range(5)}
        async with open_volume(options) as volume:
            assert inside.core(volume).superblock == made


class CountingRecords(MemoryRecords):
    """Notes how large commits are."""

    def __init__(self, disk: Disk, chaos: Chaos, limits: RecordLimits) -> None:
        super().__init__(disk, chaos, limits)
        self.sizes: list[int] = []

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        self.sizes.append(len(puts) + len(deletes))
        return await super().commit(puts, deletes, expect, durable=durable, lease=lease)


async def test_commits_of_any_number_of_records_keep_to_the_limits(chaos: Chaos) -> None:
    disk = Disk.format(lab_options())
    limits = dataclasses.replace(LIMITS, commit_operations_max=10, commit_bytes_max=1000)
    records = CountingRecords(disk, chaos, limits)
    puts = {b"x%02d" % number: bytes(number * 10) for number in range(40)}
    await formatting.commit_in_parts(records, puts)
    assert {key: row.value for key, row in disk.records.items() if key[:1] == b"x"} == puts
    assert max(records.sizes) == 10
    await formatting.commit_in_parts(records, {}, list(puts))
    assert not any(key.startswith(b"x") for key in disk.records)


def test_the_password_is_the_first_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with pytest.raises(ConfigError, match=f"records.password_file: {file} cannot be read: No such file"):
        engines.read_password(file)
    file.write_text("hunter2\nrest\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"others may read {file} .mode 644."):
        engines.read_password(file)
    file.chmod(0o600)
    assert engines.read_password(file) == "hunter2"
    file.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="is empty"):
        engines.read_password(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        engines.read_password(file)
