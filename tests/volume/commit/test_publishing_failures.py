"""What is published while a commit or a write fails, is late, or is not known to have happened."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import inside
import pytest
import trio
import trio.testing
from publishing_lab import content, names, publish
from volume_lab import CALLER, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, NotFound
from kvfuse.options.options import Options
from kvfuse.volume.api import ROOT_INODE, Changes


@pytest.fixture
def options() -> Options:
    return lab_options()


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options)


async def test_a_failed_commit_is_an_error_for_who_waits_and_is_repeated(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        chaos.commit_error = 2.0  # before the commit, always
        with pytest.raises(EngineError):
            await volume.tree.make_directory(ROOT_INODE, b"d", 0o755, CALLER)
        assert (await volume.tree.lookup(ROOT_INODE, b"d")).nlink == 2, "visible here all the same"
        assert await names(disk, options) == set()
        chaos.commit_error = 0.0
        await trio.sleep(5)
        assert await names(disk, options) == {b"d"}
    assert (await check(disk)).clean


async def test_a_failed_sync_of_segments_loses_no_change(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(disk, options, chaos) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(handle, 0, b"x" * 10_000)
        chaos.sync_error = 1.0
        with pytest.raises(EngineError):
            await volume.files.fsync(handle)
        chaos.sync_error = 0.0
        await volume.files.fsync(handle)
        assert await names(disk, options) == {b"f"}
        await volume.files.release(handle)
    assert (await check(disk)).clean


async def test_failed_segment_writes_keep_the_bytes(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(disk, options, chaos) as volume:
        chaos.write_error = 1.0
        handle, _ = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(handle, 0, b"x" * 10_000)
        with pytest.raises(EngineError):
            await volume.files.fsync(handle)
        await volume.files.write(handle, 10_000, b"y" * 10)  # it may grow on
        assert await content(volume, b"f") == b"x" * 10_000 + b"y" * 10
        assert b"f" not in await names(disk, options)
        chaos.write_error = 0.0
        await volume.files.fsync(handle)
        await volume.files.release(handle)
    async with opened(disk, options) as volume:
        assert await content(volume, b"f") == b"x" * 10_000 + b"y" * 10
    assert (await check(disk)).clean


async def test_slots_of_a_write_that_failed_and_was_overtaken_come_back(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """The chunk was changed while it was being written, then the write failed."""
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"other", b"o" * 100)
        await volume.sync()
        free = volume.space().free
        handle, node = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"x" * 10_000)
        chaos.write_error, chaos.delay, chaos.first_write = 1.0, 1.0, trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, volume.files.fsync, handle)
            await chaos.first_write.wait()
            await volume.files.write(handle, 5, b"y" * 10_000)
        chaos.write_error, chaos.delay = 0.0, 0.0
        await volume.files.release(handle)
        await volume.tree.unlink(ROOT_INODE, b"f")
        volume.tree.forget(node.ino, 1)
        await volume.sync()
        assert volume.space().free == free


async def fails(call: Callable[..., Awaitable[object]], *arguments: object) -> None:
    with pytest.raises(EngineError):
        await call(*arguments)


async def test_truncation_while_a_chunk_is_written_and_was_changed(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """What was on its way to slots when the file was cut to nothing does not come back."""
    chaos.delay = 1.0
    for wait in range(1, 15):
        async with opened(disk, options, chaos) as volume:
            handle, node = await volume.tree.create(ROOT_INODE, b"f%d" % wait, 0o644, CALLER, os.O_RDWR)
            await volume.files.write(handle, 0, b"x" * 10_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.files.fsync, handle)
                await trio.sleep(wait * 0.001)
                await volume.files.write(handle, 5, b"y" * 10)
                await volume.inodes.set_attributes(node.ino, Changes(size=0), CALLER)
                data = b"z" * (wait % 3)
                await volume.files.write(handle, 0, data)
            await volume.files.fsync(handle)
            assert bytes(await volume.files.read(handle, 0, 100)) == data
            await volume.inodes.set_attributes(node.ino, Changes(size=100), CALLER)
            assert bytes(await volume.files.read(handle, 0, 100)) == data.ljust(100, b"\0")
            await volume.files.release(handle)
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_name_removed_while_its_commit_is_unknown_stays_removed(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """The commit of a name happened but its answer was lost; the name is removed before the commit is repeated."""
    async with opened(disk, options, chaos) as volume:
        chaos.commit_error_after = 1.0
        await publish(volume, b"f", b"x" * 100)
        await trio.sleep(0.2)
        assert await names(disk, options) == {b"f"}
        await volume.tree.unlink(ROOT_INODE, b"f")
        chaos.commit_error_after = 0.0
        await trio.sleep(5)
        with pytest.raises(NotFound):
            await volume.tree.lookup(ROOT_INODE, b"f")
        assert await names(disk, options) == set()
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_name_removed_and_made_again_before_a_commit(disk: Disk, options: Options, chaos: Chaos) -> None:
    """The new file is still being written when the old one's slots are freed: the old name may not stay."""
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"f", b"x" * 100)
        await volume.sync()
        await volume.tree.unlink(ROOT_INODE, b"f")
        handle, _ = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(handle, 0, b"y" * 100)
        await inside.journal(volume).commit()
        assert await names(disk, options) == set()
        report = await check(disk.copy())
        assert report.clean, report.problems
        await volume.files.fsync(handle)
        assert await names(disk, options) == {b"f"}
        await volume.files.release(handle)


async def test_a_block_is_published_whole_though_its_temporary_name_was_known(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """mkstemp, close, open again, write, rename, while another file's bytes are on their way to slots."""
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"other", b"o" * 500_000)
        handle, node = await volume.tree.create(ROOT_INODE, b"tmp", 0o644, CALLER, os.O_RDWR)
        await volume.files.release(handle)
        chaos.delay = 1.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside.journal(volume).commit)
            await trio.sleep(0.001)
            handle = await volume.files.open(node.ino, os.O_WRONLY, CALLER)
            await volume.files.write(handle, 0, b"x" * 10_000)
            await volume.files.release(handle)
            await volume.tree.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"f", 0)
        chaos.delay = 0.0
        async with opened(disk.copy(), options) as crashed:
            if b"f" in await names(disk, options):
                assert await content(crashed, b"f") == b"x" * 10_000
    assert (await check(disk)).clean


async def test_a_dead_journal_is_an_error_not_a_wait(
    disk: Disk, options: Options, chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the committing task died of what nobody foresaw, nothing waits for it for ever, the end neither."""
    with (
        pytest.RaisesGroup(ValueError, EngineError, flatten_subgroups=True)
        if hasattr(pytest, "RaisesGroup")
        else (pytest.raises(BaseExceptionGroup))
    ):
        async with opened(disk, options, chaos) as volume:
            monkeypatch.setattr(inside.slabs(volume), "take_dirty", broken)
            with trio.fail_after(5):
                await volume.tree.make_directory(ROOT_INODE, b"d", 0o755, CALLER)
                await volume.sync()


def broken(*_: object) -> list[object]:
    raise ValueError("not foreseen")


async def test_a_volume_whose_first_commit_fails_is_not_opened_and_does_not_hang(
    disk: Disk, options: Options, chaos: Chaos
) -> None:
    chaos.commit_error = 2.0  # before every commit
    with pytest.raises(ExceptionGroup) as caught, trio.fail_after(10):
        async with opened(disk, options, chaos):
            pytest.fail("it is open")
    assert caught.value.subgroup(EngineError) is not None
    assert (await check(disk)).clean
