"""fsync: what it brings to the store, what it waits for, and when it has nothing to do."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import inside
import pytest
import trio
import trio.testing
from shared_lab import hosts, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.options.options import Options, VolumeOptions
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.content import writer
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.store.sealed import as_formatted
from kvfuse.volume.volume import Volume

SIZE = 700_000
"""Bytes of a file that is changed in place."""


@pytest.fixture
def options() -> Options:
    return lab_options()


@pytest.fixture
async def volume(disk: Disk, options: Options, chaos: Chaos) -> AsyncIterator[Volume]:
    async with opened(disk, options, chaos) as volume:
        yield volume


async def make(volume: Volume, name: bytes, data: bytes) -> FileHandle:
    handle, _ = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    await volume.files.write(handle, 0, data)
    return handle


async def open_again(volume: Volume, name: bytes) -> FileHandle:
    """Open a file that nobody has open, to read."""
    node = await volume.tree.lookup(ROOT_INODE, name)
    return await volume.files.open(node.ino, os.O_RDONLY, CALLER)


async def crashed_content(disk: Disk, name: bytes) -> bytes:
    """What a daemon finds that starts after a crash now; the check finds nothing to mend."""
    crashed = disk.copy()
    report = await check(crashed)
    assert report.clean, report.problems
    async with opened(crashed, lab_options()) as volume:
        handle = await open_again(volume, name)
        data = bytes(await volume.files.read(handle, 0, 64 * MIB))
        await volume.files.release(handle)
    return data


# -- a file whose name another one took -----------------------------------------------------------------


@pytest.fixture
async def replaced(volume: Volume) -> AsyncIterator[FileHandle]:
    """A file that had the name ``f``: it is stored under it, as who took it is not stored yet."""
    old = await make(volume, b"f", b"x" * SIZE)
    await volume.files.fsync(old)
    late = await make(volume, b"new", b"y" * 1000)
    await volume.tree.rename(ROOT_INODE, b"new", ROOT_INODE, b"f", 0)
    late.node.forced = False  # as if the rename had been in a commit that its bytes just missed
    yield old
    await volume.files.release(old)
    await volume.files.release(late)


async def test_no_byte_changes_in_place_of_a_file_that_still_has_its_name_in_the_store(
    disk: Disk, volume: Volume, replaced: FileHandle
) -> None:
    await volume.files.write(replaced, 300_000, b"z" * 100)
    assert await crashed_content(disk, b"f") == b"y" * 1000


async def test_what_was_fsynced_is_not_followed_by_what_was_before(
    disk: Disk, volume: Volume, replaced: FileHandle
) -> None:
    """The name may mean the old file, or the new one: but the old one only as it was fsynced."""
    await volume.inodes.set_attributes(replaced.node.ino, Changes(size=10), CALLER)
    await volume.files.fsync(replaced)
    assert await crashed_content(disk, b"f") == b"y" * 1000


# -- a description at the end of a slot -----------------------------------------------------------------


async def test_a_description_keeps_clear_of_bytes_that_a_cut_leaves_in_the_store(disk: Disk, volume: Volume) -> None:
    """The slot's end is free in memory, but the store has the file as it was before."""
    handle = await make(volume, b"f", b"x" * 4096)
    await volume.files.fsync(handle)
    await volume.inodes.set_attributes(handle.node.ino, Changes(size=1), CALLER)
    await inside.journal(volume).flusher.flush([handle.node])  # as the next commit does before it is sent
    assert await crashed_content(disk, b"f") == b"x" * 4096
    await volume.files.release(handle)


@pytest.mark.parametrize("seconds", [0, 0.01, 0.02, 0.03])
async def test_a_description_and_bytes_that_grow_into_its_place(
    volume: Volume,
    chaos: Chaos,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A commit describes the file at the end of the slot, while a write in place goes there."""
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 0)  # as on a full volume
    data = os.urandom(4096)
    for number in range(20):
        handle = await make(volume, b"f%d" % number, data[:1000])
        await volume.files.fsync(handle)
        await volume.files.write(handle, 0, data[:1])  # unsealed
        chaos.delay = 1.0
        async with trio.open_nursery() as nursery:
            await volume.tree.rename(ROOT_INODE, b"f%d" % number, ROOT_INODE, b"g%d" % number, 0)
            nursery.start_soon(volume.files.fsync, handle)
            await trio.sleep(seconds * chaos.random.random())
            await volume.files.write(handle, 1000, data[1000:])
        chaos.delay = 0
        assert bytes(await volume.files.read(handle, 0, MIB)) == data
        await volume.files.release(handle)


# -- nothing to do --------------------------------------------------------------------------------------


async def check_clean_fsync(volume: Volume, commit_count: Callable[[], int]) -> None:
    """Commits are sent for what changed, and for nothing else."""
    handle = await make(volume, b"f", b"x" * 10_000)
    await volume.files.fsync(handle)
    other = await make(volume, b"other", b"x")
    await volume.files.fsync(other)
    before = commit_count()
    for file in (handle, other):
        await volume.files.fsync(file)
        file.node.atime = 0
        await volume.files.read(file, 0, 100)
        await volume.files.fsync(file, data_only=True)
    assert commit_count() == before, "nothing was changed"
    await volume.files.fsync(other)
    assert commit_count() > before, "an access time was"
    await volume.inodes.set_xattr(handle.node.ino, b"user.a", b"value")
    await volume.files.fsync(handle)
    assert commit_count() > before, "an attribute was"
    before = commit_count()
    await volume.files.write(handle, 5000, b"y")
    await volume.files.fsync(handle)
    assert commit_count() > before, "a byte was"
    before = commit_count()
    await volume.files.fsync(handle)
    assert commit_count() == before
    await volume.files.release(handle)
    await volume.files.release(other)


async def test_fsync_of_what_is_durable_commits_nothing(tmp_path: Path) -> None:
    options = Options(volume=VolumeOptions(path=tmp_path / "volume", capacity=64 * MIB))
    await formatting.format_volume(options)
    async with engines.open_records(options) as records, engines.open_segments(options) as segments:
        superblock = formatting.read_superblock(tmp_path / "volume")
        async with run_volume(options, HeldVolume(superblock, as_formatted(records, superblock), segments)) as volume:
            await check_clean_fsync(volume, lambda: records.counters.commits)


async def test_fsync_of_what_is_durable_in_a_shared_volume_commits_nothing(rng: random.Random, chaos: Chaos) -> None:
    async with hosts(rng, 1, [chaos]) as (volume,):
        await check_clean_fsync(volume, lambda: chaos.durable_commits)  # others take slabs ahead of need


async def test_where_all_is_durable_that_was_committed_fsync_of_what_was_closed_does_nothing(
    rng: random.Random, chaos: Chaos
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    disk.durable = True
    async with volumes(disk, options, 1, rng, [chaos]) as (volume,):
        handle = await make(volume, b"f", b"x" * 10_000)
        await volume.files.flush(handle)
        await volume.tree.rename(ROOT_INODE, b"f", ROOT_INODE, b"g", 0)
        before = chaos.commits
        await volume.files.fsync(handle)
        assert chaos.commits == before
        await volume.files.write(handle, 10_000, b"y")
        await volume.files.fsync(handle)
        assert chaos.commits > before, "it has one byte more"
        await volume.sync()
        await volume.files.release(handle)
        assert "durable commit" not in chaos.events
        assert "sync" not in chaos.events


async def test_fsync_of_a_file_that_was_read_after_a_mount_commits_once(
    disk: Disk, options: Options, chaos: Chaos, mock_clock: trio.testing.MockClock
) -> None:
    """The daemon before may have been killed between a commit and its sync. Time stands still: no sync is due."""
    async with opened(disk, options) as volume:
        await volume.files.release(await make(volume, b"f", b"x"))
    async with opened(disk, options, chaos) as volume:
        handle = await open_again(volume, b"f")
        for _ in range(2):
            await volume.files.fsync(handle)
            assert chaos.durable_commits == 1
        await volume.files.release(handle)


# -- what is on its way ---------------------------------------------------------------------------------


@pytest.fixture
async def handle(volume: Volume) -> AsyncIterator[FileHandle]:
    """Of a file that was just made, and opened again to read."""
    await volume.files.release(await make(volume, b"f", b"x" * 1000))
    handle = await open_again(volume, b"f")
    yield handle
    await volume.files.release(handle)


async def test_fsync_of_what_was_only_committed_in_order_syncs_it(
    volume: Volume, handle: FileHandle, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    await trio.sleep(1)
    assert (handle.node.changed, chaos.durable_commits) == (False, 0), "the window has passed"
    await volume.files.fsync(handle)
    assert (chaos.events[-2:], chaos.durable_commits) == (["sync", "durable commit"], 1)


async def test_fsync_after_a_sync_of_everything_commits_nothing(
    volume: Volume, handle: FileHandle, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    await trio.sleep(1)
    await volume.sync()
    before = chaos.commits
    await volume.files.fsync(handle)
    assert chaos.commits == before


async def test_fsync_waits_for_the_commit_that_carries_the_file(
    disk: Disk, volume: Volume, handle: FileHandle, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    going_on, returned = trio.Event(), trio.Event()
    disk.audit = lambda puts, deletes: setattr(chaos, "stalled", going_on)  # the store does not answer any more
    await trio.sleep(1)  # the window has passed
    disk.audit = None

    async def fsync() -> None:
        await volume.files.fsync(handle)
        returned.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fsync)
        await trio.sleep(1)
        assert handle.node.committing
        assert not returned.is_set()
        going_on.set()
    assert chaos.durable_commits == 1


@pytest.mark.parametrize("when", ["commit_error", "commit_error_after"])
async def test_fsync_after_one_that_failed_is_not_taken_for_done(
    volume: Volume, chaos: Chaos, when: str, autojump_clock: trio.testing.MockClock
) -> None:
    """The failed commit is sent again, but nobody waits for that to be synced."""
    handle = await make(volume, b"f", b"x" * 1000)
    setattr(chaos, when, 2.0)
    with pytest.raises(EngineError, match="injected"):
        await volume.files.fsync(handle)
    setattr(chaos, when, 0.0)
    await trio.sleep(2)  # less than the interval
    assert not handle.node.changed, "it was sent again"
    before = chaos.durable_commits
    await volume.files.fsync(handle)
    assert chaos.durable_commits == before + 1
    await volume.files.release(handle)
