"""Group commit: how many commits what costs, in which order bytes and records become durable, what failures do."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options, opened

from kvfuse.errors import EngineError, NotFound, Stale
from kvfuse.options.options import Options, VolumeOptions
from kvfuse.remote.records.decorators import Delayed
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.content.writer import STAGED_CHUNKS_MAX
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.opening import engines, format
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import as_formatted
from kvfuse.volume.volume import Volume, run_volume

COMMIT_SECONDS = 0.001


async def publish(volume: Volume, name: bytes, data: bytes) -> None:
    """A block as engines write it: temporary name, write, close, rename."""
    temporary = b"tmp." + name
    handle, node = await volume.create(ROOT_INODE, temporary, 0o644, CALLER, os.O_WRONLY)
    await volume.write(handle, 0, data)
    await volume.flush(handle)
    await volume.release(handle)
    await volume.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)
    volume.forget(node.ino, 1)


async def content(volume: Volume, name: bytes) -> bytes:
    node = await volume.lookup(ROOT_INODE, name)
    handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
    data = bytes(await volume.read(handle, 0, 64 * MIB))
    await volume.release(handle)
    volume.forget(node.ino, 1)
    return data


async def names(disk: Disk, options: Options) -> set[bytes]:
    """What a crash now would show in the root directory."""
    async with opened(disk.copy(), options) as volume:
        return {entry.name for entry in await volume.list_directory(ROOT_INODE, 0, 10_000)}


# -- the real record store, a millisecond further away ------------------------------------------------


@asynccontextmanager
async def delayed_volume(folder: Path, mode: str) -> AsyncIterator[Volume]:
    options = Options(volume=VolumeOptions(path=folder, capacity=512 * MIB))
    await format.format_volume(options)
    options = lab_options(strict=mode == "strict")
    options = Options(volume=VolumeOptions(path=folder), publish=options.publish)
    async with engines.open_records(options) as records, engines.open_segments(options) as segments:
        delayed = Delayed(records, COMMIT_SECONDS)
        superblock = format.read_superblock(folder)
        async with run_volume(options, superblock, as_formatted(delayed, superblock), segments) as volume:
            yield volume


async def test_relaxed_blocks_cost_a_fraction_of_a_commit(tmp_path: Path) -> None:
    """2,000 blocks a second for a second: fewer than 20 record commits for 1,000 of them."""
    blocks, rate = 2000, 2000
    async with delayed_volume(tmp_path / "volume", "relaxed") as volume:
        trips = volume.core.records.counters.round_trips
        start = time.perf_counter()
        for number in range(blocks):
            await publish(volume, b"%d" % number, b"x" * 65536)
            await trio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        elapsed = time.perf_counter() - start
        await volume.sync()
        trips = volume.core.records.counters.round_trips - trips
    # On a machine that does not reach the rate the window closes more often for as many blocks.
    allowed = 20 * max(1.0, elapsed * rate / blocks)
    print(f"{trips * 1000 / blocks:.1f} round trips for 1,000 blocks at {blocks / elapsed:.0f} blocks/s")
    assert trips * 1000 / blocks < allowed


async def test_files_that_were_replaced_are_forgotten(tmp_path: Path) -> None:
    async with delayed_volume(tmp_path / "volume", "relaxed") as volume:
        for number in range(4000):
            await publish(volume, b"%d" % (number % 10), b"x" * 4096)
        await volume.sync()
        gc.collect()  # those of the tests before
        nodes = sum(isinstance(one, Node) for one in gc.get_objects())
    assert nodes < 1500


async def test_strict_writers_share_commits(tmp_path: Path) -> None:
    """Create, close and rename wait for their commits; what eight writers bring at once is one commit."""
    writers, blocks = 8, 400
    async with delayed_volume(tmp_path / "volume", "strict") as volume:
        commits = volume.core.records.counters.commits

        async def write(writer: int) -> None:
            for number in range(writer, blocks, writers):
                await publish(volume, b"%d" % number, b"x" * 65536)

        async with trio.open_nursery() as nursery:
            for writer in range(writers):
                nursery.start_soon(write, writer)
        commits = volume.core.records.counters.commits - commits
    print(f"{commits * 1000 / blocks:.0f} commits for 1,000 blocks of {writers} writers")
    assert commits <= 3 * blocks / writers * 1.1 + 5


# -- order ------------------------------------------------------------------------------------------


async def test_fsync_syncs_bytes_before_the_durable_commit(chaos: Chaos) -> None:
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        handle, _ = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.write(handle, 0, b"x" * 10_000)
        chaos.events.clear()
        await volume.fsync(handle)
        events = list(chaos.events)
        await volume.release(handle)
    assert events[-1] == "durable commit"
    assert events.index("written") < events.index("sync") < events.index("durable commit")


async def test_records_never_name_bytes_that_are_not_written(chaos: Chaos) -> None:
    """Before each commit every segment write has returned."""
    options = lab_options()
    disk = Disk.format(options)
    chaos.delay = 0.3
    async with opened(disk, options, chaos) as volume:
        for number in range(20):
            await publish(volume, b"%d" % number, b"x" * 5000)
            await trio.sleep(0.01)
            assert (await check(disk.copy())).clean


@asynccontextmanager
async def sealed_file(disk: Disk, options: Options, chaos: Chaos) -> AsyncIterator[tuple[Volume, int]]:
    """(volume, handle to write) of the file ``f``, 700,000 committed bytes "x"."""
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"f", b"x" * 700_000)
        await volume.sync()
        node = await volume.lookup(ROOT_INODE, b"f")
        yield volume, await volume.open(node.ino, os.O_RDWR, CALLER)


async def test_an_in_place_change_is_unsealed_first(chaos: Chaos) -> None:
    """No byte of a sealed extent changes before the records say that it is not sealed any more."""
    options = lab_options()
    disk = Disk.format(options)
    async with sealed_file(disk, options, chaos) as (volume, handle):
        chaos.events.clear()
        await volume.write(handle, 300_000, b"y" * 100)
        assert chaos.events.index("durable commit") < chaos.events.index("write")
        assert (await check(disk.copy())).clean
        await volume.release(handle)
    assert (await check(disk)).clean


async def test_an_unsealing_that_failed_is_asked_for_again(chaos: Chaos) -> None:
    options = lab_options()
    disk = Disk.format(options)
    async with sealed_file(disk, options, chaos) as (volume, handle):
        chaos.commit_error = 2.0  # before every commit
        for _ in range(2):
            with pytest.raises(EngineError):
                await volume.write(handle, 300_000, b"y" * 100)
        report = await check(disk.copy())
        assert report.clean, report.problems
        chaos.commit_error = 0.0
        await volume.write(handle, 300_000, b"y" * 100)
        assert (await check(disk.copy())).clean
        await volume.release(handle)
        assert await content(volume, b"f") == b"x" * 300_000 + b"y" * 100 + b"x" * 399_900


async def test_one_write_and_rename_in_one_window_is_one_put(chaos: Chaos) -> None:
    """The temporary name never touches the store."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"f", b"x" * 5000)
        await volume.sync()
    keys = [key for key in disk.records if key[:1] == b"d"]
    assert len(keys) == 1
    assert chaos.commits <= 3  # the ranges of numbers, the block, the end


# -- failures ---------------------------------------------------------------------------------------


async def test_a_failed_commit_is_an_error_for_who_waits_and_is_repeated(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        chaos.commit_error = 2.0  # before the commit, always
        with pytest.raises(EngineError):
            await volume.make_directory(ROOT_INODE, b"d", 0o755, CALLER)
        assert (await volume.lookup(ROOT_INODE, b"d")).nlink == 2, "visible here all the same"
        assert await names(disk, options) == set()
        chaos.commit_error = 0.0
        await trio.sleep(5)
        assert await names(disk, options) == {b"d"}
    assert (await check(disk)).clean


async def test_a_failed_sync_of_segments_loses_no_change(chaos: Chaos, autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        handle, _ = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.write(handle, 0, b"x" * 10_000)
        chaos.sync_error = 1.0
        with pytest.raises(EngineError):
            await volume.fsync(handle)
        chaos.sync_error = 0.0
        await volume.fsync(handle)
        assert await names(disk, options) == {b"f"}
        await volume.release(handle)
    assert (await check(disk)).clean


async def test_failed_segment_writes_keep_the_bytes(chaos: Chaos, autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        chaos.write_error = 1.0
        handle, _ = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.write(handle, 0, b"x" * 10_000)
        with pytest.raises(EngineError):
            await volume.fsync(handle)
        await volume.write(handle, 10_000, b"y" * 10)  # it may grow on
        assert await content(volume, b"f") == b"x" * 10_000 + b"y" * 10
        assert b"f" not in await names(disk, options)
        chaos.write_error = 0.0
        await volume.fsync(handle)
        await volume.release(handle)
    async with opened(disk, options) as volume:
        assert await content(volume, b"f") == b"x" * 10_000 + b"y" * 10
    assert (await check(disk)).clean


async def test_slots_of_a_write_that_failed_and_was_overtaken_come_back(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """The chunk was changed while it was being written, then the write failed."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"other", b"o" * 100)
        await volume.sync()
        free = volume.space().free
        handle, node = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_RDWR)
        await volume.write(handle, 0, b"x" * 10_000)
        chaos.write_error, chaos.delay, chaos.first_write = 1.0, 1.0, trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, volume.fsync, handle)
            await chaos.first_write.wait()
            await volume.write(handle, 5, b"y" * 10_000)
        chaos.write_error, chaos.delay = 0.0, 0.0
        await volume.release(handle)
        await volume.unlink(ROOT_INODE, b"f")
        volume.forget(node.ino, 1)
        await volume.sync()
        assert volume.space().free == free


async def fails(call: Callable[..., Awaitable[object]], *arguments: object) -> None:
    with pytest.raises(EngineError):
        await call(*arguments)


async def test_truncation_while_a_chunk_is_written_and_was_changed(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """What was on its way to slots when the file was cut to nothing does not come back."""
    options = lab_options()
    disk = Disk.format(options)
    chaos.delay = 1.0
    for wait in range(1, 15):
        async with opened(disk, options, chaos) as volume:
            handle, node = await volume.create(ROOT_INODE, b"f%d" % wait, 0o644, CALLER, os.O_RDWR)
            await volume.write(handle, 0, b"x" * 10_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.fsync, handle)
                await trio.sleep(wait * 0.001)
                await volume.write(handle, 5, b"y" * 10)
                await volume.set_attributes(node.ino, Changes(size=0), CALLER)
                data = b"z" * (wait % 3)
                await volume.write(handle, 0, data)
            await volume.fsync(handle)
            assert bytes(await volume.read(handle, 0, 100)) == data
            await volume.set_attributes(node.ino, Changes(size=100), CALLER)
            assert bytes(await volume.read(handle, 0, 100)) == data.ljust(100, b"\0")
            await volume.release(handle)
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_name_removed_while_its_commit_is_unknown_stays_removed(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """The commit of a name happened but its answer was lost; the name is removed before the commit is repeated."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        chaos.commit_error_after = 1.0
        await publish(volume, b"f", b"x" * 100)
        await trio.sleep(0.2)
        assert await names(disk, options) == {b"f"}
        await volume.unlink(ROOT_INODE, b"f")
        chaos.commit_error_after = 0.0
        await trio.sleep(5)
        with pytest.raises(NotFound):
            await volume.lookup(ROOT_INODE, b"f")
        assert await names(disk, options) == set()
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_name_removed_and_made_again_before_a_commit(chaos: Chaos) -> None:
    """The new file is still being written when the old one's slots are freed: the old name may not stay."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"f", b"x" * 100)
        await volume.sync()
        await volume.unlink(ROOT_INODE, b"f")
        handle, _ = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        await volume.write(handle, 0, b"y" * 100)
        await volume.journal.commit()
        assert await names(disk, options) == set()
        report = await check(disk.copy())
        assert report.clean, report.problems
        await volume.fsync(handle)
        assert await names(disk, options) == {b"f"}
        await volume.release(handle)


async def test_a_block_is_published_whole_though_its_temporary_name_was_known(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """mkstemp, close, open again, write, rename, while another file's bytes are on their way to slots."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await publish(volume, b"other", b"o" * 500_000)
        handle, node = await volume.create(ROOT_INODE, b"tmp", 0o644, CALLER, os.O_RDWR)
        await volume.release(handle)
        chaos.delay = 1.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.journal.commit)
            await trio.sleep(0.001)
            handle = await volume.open(node.ino, os.O_WRONLY, CALLER)
            await volume.write(handle, 0, b"x" * 10_000)
            await volume.release(handle)
            await volume.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"f", 0)
        chaos.delay = 0.0
        async with opened(disk.copy(), options) as crashed:
            if b"f" in await names(disk, options):
                assert await content(crashed, b"f") == b"x" * 10_000
    assert (await check(disk)).clean


async def test_a_dead_journal_is_an_error_not_a_wait(chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the committing task died of what nobody foresaw, nothing waits for it for ever, the end neither."""
    options = lab_options()
    disk = Disk.format(options)
    with (
        pytest.RaisesGroup(ValueError, EngineError, flatten_subgroups=True)
        if hasattr(pytest, "RaisesGroup")
        else (pytest.raises(BaseExceptionGroup))
    ):
        async with opened(disk, options, chaos) as volume:
            monkeypatch.setattr(volume.core.slabs, "take_dirty", broken)
            with trio.fail_after(5):
                await volume.make_directory(ROOT_INODE, b"d", 0o755, CALLER)
                await volume.sync()


def broken(*_: object) -> list[object]:
    raise ValueError("not foreseen")


# -- large changes -----------------------------------------------------------------------------------


async def test_a_file_of_many_chunks_is_committed_and_removed(
    chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """Sparse writes into ever new chunks are committed as they come: no commit, and no memory, grows with the file."""
    options = lab_options(chunk=4096, capacity=100 * MIB)
    disk = Disk.format(options)
    records = MemoryRecords(disk, chaos)
    count = 3 * STAGED_CHUNKS_MAX
    async with run_volume(options, disk.superblock, records, MemorySegments(disk, chaos)) as volume:
        free = volume.space().free
        handle, node = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_RDWR)
        for number in range(count):
            await volume.write(handle, number * 4096, b"%d" % number)
            if number % 100 == 0:
                await trio.sleep(0.01)
        assert volume.core.nodes.get(node.ino).staged_count < 2 * STAGED_CHUNKS_MAX
        await volume.fsync(handle)
        assert (await check(disk.copy())).clean
        assert bytes(await volume.read(handle, 4096 * (count - 1), 10)) == b"%d" % (count - 1)
        await volume.release(handle)
        await volume.unlink(ROOT_INODE, b"f")
        volume.forget(node.ino, 1)
        await volume.sync()
        assert volume.space().free == free
    assert (await check(disk)).clean


async def test_large_attributes_are_committed(chaos: Chaos) -> None:
    """More bytes of attributes than one commit may carry."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        folder = await volume.make_directory(ROOT_INODE, b"d", 0o755, CALLER)
        for number in range(300):
            await volume.set_xattr(folder.ino, b"user.%d" % number, b"v" * 65536)
        await volume.sync()
        assert await volume.get_xattr(folder.ino, b"user.299") == b"v" * 65536
    assert (await check(disk)).clean


async def test_fsync_of_a_file_written_while_its_bytes_are_flushed() -> None:
    """Its earlier bytes go with the commit that is under way; the later ones need another, although it is open."""
    options = lab_options()
    slow = Chaos(random.Random(0), delay=1.0)
    async with opened(Disk.format(options), options, slow) as volume:
        handle, node = await volume.create(ROOT_INODE, b"name", 0o644, CALLER, os.O_RDWR)
        await volume.write(handle, 0, b"first")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.fsync, handle)
            await slow.first_write.wait()
            await volume.write(handle, 5, b"second")
            with trio.fail_after(5):
                await volume.fsync(handle)
        assert node.size == 11
        await volume.release(handle)


async def test_fsync_of_a_folder_brings_what_was_renamed_while_others_were_flushed() -> None:
    """The commit that is under way cannot have the new file: fsync has to wait for the next."""
    options = lab_options()
    disk = Disk.format(options)
    slow = Chaos(random.Random(0), delay=1.0)
    async with opened(disk, options, slow) as volume:
        await publish(volume, b"first", b"x" * 5000)
        await slow.first_write.wait()
        await publish(volume, b"second", b"y" * 5000)
        await volume.fsync_directory(ROOT_INODE)
        assert schema.entry_key(ROOT_INODE, b"second") in disk.records


async def test_a_file_that_lost_its_name_between_lookup_and_open(chaos: Chaos) -> None:
    """It is still there for who looked it up; when its bytes had to make room it is stale, and never zeros."""
    options = lab_options()
    async with opened(Disk.format(options), options, chaos) as volume:
        await publish(volume, b"f", b"x" * 5000)
        node = await volume.lookup(ROOT_INODE, b"f")
        await publish(volume, b"f", b"y" * 5000)
        handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
        assert bytes(await volume.read(handle, 0, 5000)) == b"x" * 5000
        await volume.release(handle)
        await volume.sync()
        assert await volume.parts.space.wait_for_room(None), "space is needed"
        with pytest.raises(Stale):
            await volume.open(node.ino, os.O_RDONLY, CALLER)
        with pytest.raises(Stale):
            await volume.set_attributes(node.ino, Changes(size=10), CALLER)
        assert (await volume.attributes(node.ino)).nlink == 0, "a stat still answers"


async def test_an_attribute_of_a_file_whose_name_was_taken_by_a_late_one(chaos: Chaos) -> None:
    """The store still knows the file as it was before it had the attribute: so may not know the attribute either."""
    options = lab_options()
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        handle, node = await volume.create(ROOT_INODE, b"old", 0o644, CALLER, os.O_WRONLY)
        await volume.fsync(handle)
        await volume.set_xattr(node.ino, b"user.a", b"value")
        await volume.rename(ROOT_INODE, b"old", ROOT_INODE, b"target", 0)
        await volume.release(handle)
        late, _ = await volume.create(ROOT_INODE, b"new", 0o644, CALLER, os.O_WRONLY)
        await volume.rename(ROOT_INODE, b"new", ROOT_INODE, b"target", 0)
        await volume.write(late, 0, b"not yet in a slot")
        late.node.forced = False  # as if the rename had been in a commit that its bytes just missed
        await volume.journal.commit()
        crashed = disk.copy()
        await volume.release(late)
    async with opened(crashed, options) as volume:
        for name in await names(crashed, options):
            await volume.unlink(ROOT_INODE, name)
    assert (await check(crashed)).clean


async def test_a_volume_whose_first_commit_fails_is_not_opened_and_does_not_hang(chaos: Chaos) -> None:
    options = lab_options()
    disk = Disk.format(options)
    chaos.commit_error = 2.0  # before every commit
    with pytest.raises(ExceptionGroup) as caught, trio.fail_after(10):
        async with opened(disk, options, chaos):
            pytest.fail("it is open")
    assert caught.value.subgroup(EngineError) is not None
    assert (await check(disk)).clean
