"""Relaxed files whose changes outlive the daemon: no sync on their way, large writes, durable at each interval."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import inside
import pytest
import trio
import trio.testing
from handover_lab import Mount
from kept_memory import after_kill, let_go
from power_cuts import MODES, Instant, Medium, opened_on
from publishing_lab import content, publish, write_file
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.options.options import MountOptions, Options
from kvfuse.remote.segments.file import fileio
from kvfuse.remote.segments.file.fileio import Run
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.journal import FILES_MAX
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.volume import Volume

KIB = 1024
OPTIONS = lab_options(capacity=64 * MIB)
INTERVAL = OPTIONS.publish.interval
WINDOW = OPTIONS.publish.window


@pytest.fixture
def keeper() -> Iterator[MemoryKeeper]:
    keeper = MemoryKeeper()
    yield keeper
    let_go(keeper)


# -- syncs ------------------------------------------------------------------------------------------


async def test_no_sync_or_commit_is_on_the_way_of_a_relaxed_file(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    """Bytes are written, and nothing is synced or committed, until the interval ends: then first bytes, then names."""
    async with opened(Disk.format(OPTIONS), OPTIONS, chaos, keeper=keeper) as volume:
        await publish(volume, b"first", b"x")  # a segment is made
        await trio.sleep(2 * INTERVAL)
        chaos.events.clear()
        for number in range(20):
            await publish(volume, b"%d" % number, b"x" * 100 * KIB)
            await trio.sleep(4 * WINDOW)
        assert set(chaos.events) == {"write", "written"}
        assert not inside.journal(volume).flusher.staged_bytes
        await trio.sleep(INTERVAL)
        events = chaos.events[chaos.events.index("sync") :]
        assert events == ["sync", "sync", "durable commit"]  # the second one finds hardly anything
        chaos.events.clear()
        await trio.sleep(3 * INTERVAL)
        assert not chaos.events, "nothing was changed"


async def test_writers_with_one_temporary_name_do_not_wait_either(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    """A name that the store never had ties no inodes to each other, so nobody waits for a commit of both."""
    async with opened(Disk.format(OPTIONS), OPTIONS, chaos, keeper=keeper) as volume:
        await publish(volume, b"first", b"x")
        await trio.sleep(2 * INTERVAL)
        chaos.events.clear()
        for number in range(10):
            handle, _ = await volume.tree.create(ROOT_INODE, b"temporary", 0o644, CALLER, os.O_WRONLY)
            await volume.files.write(handle, 0, b"%d" % number * 5000)
            await volume.files.release(handle)
            await volume.tree.rename(ROOT_INODE, b"temporary", ROOT_INODE, b"%d" % number, 0)
        await publish(volume, b"3", b"other")
        assert not [event for event in chaos.events if "commit" in event]
        await volume.sync()
        assert [await content(volume, b"%d" % number) for number in (2, 3, 9)] == [b"2" * 5000, b"other", b"9" * 5000]


async def test_a_strict_folder_waits_for_its_commit_and_no_sync(chaos: Chaos, keeper: MemoryKeeper) -> None:
    async with opened(Disk.format(OPTIONS), OPTIONS, chaos, keeper=keeper) as volume:
        await volume.inodes.set_xattr(ROOT_INODE, b"user.kvfuse.publish", b"strict")
        await publish(volume, b"first", b"x")
        await volume.sync()
        chaos.events.clear()
        await publish(volume, b"f", b"x" * 100 * KIB)
        assert "commit" in chaos.events
        assert "sync" not in chaos.events


async def test_many_changes_do_not_wait_for_the_end_of_the_interval(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=64 * MIB, nodes=10_000)
    async with opened(Disk.format(options), options, chaos, keeper=keeper) as volume:
        load = inside.journal(volume).pending.load
        await trio.sleep(2 * INTERVAL)
        chaos.events.clear()
        await publish(volume, b"first", b"x")
        await trio.sleep(2 * WINDOW)
        assert load.is_behind
        for number in range(2500):
            await publish(volume, b"%d" % number, b"x")
        await trio.sleep(INTERVAL / 2)
        assert "durable commit" in chaos.events


async def test_a_failed_commit_is_sent_again_at_once(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(Disk.format(OPTIONS), OPTIONS, chaos, keeper=keeper) as volume:
        await publish(volume, b"f", b"x" * 100 * KIB)
        chaos.commit_error = 2.0
        with pytest.raises(EngineError, match="injected"):
            await volume.sync()
        chaos.commit_error = 0.0
        chaos.events.clear()
        await trio.sleep(INTERVAL / 4)
        assert any("commit" in event for event in chaos.events)


# -- writes -----------------------------------------------------------------------------------------


async def test_writes_are_large_and_in_order_of_their_places(
    tmp_path: Path, keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 files of 64 KiB, stored in any order of their names, reach their segment by a few system calls."""
    calls: list[list[tuple[int, int]]] = []

    def write_runs(runs: list[Run]) -> None:
        calls.append([(run.offset, run.length) for run in runs])
        fileio_write_runs(runs)

    fileio_write_runs = fileio.write_runs
    disk, chaos = Disk.format(OPTIONS), Chaos(random.Random(0))
    segments = FileSegments.open(tmp_path)
    async with run_volume(OPTIONS, HeldVolume(disk.superblock, MemoryRecords(disk, chaos), segments), keeper) as volume:
        await publish(volume, b"first", b"x" * 64 * KIB)
        await volume.sync()
        monkeypatch.setattr(fileio, "write_runs", write_runs)
        for number in random.Random(1).sample(range(200), 200):
            await publish(volume, b"%d" % number, b"x" * 64 * KIB)
        await volume.sync()
        monkeypatch.undo()
    assert all(one == sorted(one) for one in calls)
    lengths = [length for one in calls for _, length in one]
    assert sum(lengths) >= 200 * 64 * KIB
    assert len(lengths) <= 60, "heads and bytes"


async def test_heads_of_many_files_describe_them_by_their_last_names(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    """Also of more than one commit writes bytes of, if they were written before their files were renamed."""
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS, chaos, keeper=keeper) as volume:
        for number in range(FILES_MAX + 100):
            await write_file(volume, ROOT_INODE, b"t%d" % number, b"x" * 100)
        await trio.sleep(4 * WINDOW)
        assert not inside.journal(volume).flusher.staged_bytes
        for number in range(FILES_MAX + 100):
            await volume.tree.rename(ROOT_INODE, b"t%d" % number, ROOT_INODE, b"%d" % number, 0)
        await volume.sync()
        report = await check(disk.copy())
        assert report.clean
        assert not report.notes


# -- the bound --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["cache.staging_size", "mount.outlive_size"])
async def test_who_writes_more_than_may_be_staged_waits(chaos: Chaos, keeper: MemoryKeeper, bound: str) -> None:
    options = lab_options(capacity=64 * MIB, chunk=8 * MIB, staging_size=(64 if bound.startswith("mount") else 4) * MIB)
    if bound.startswith("mount"):
        options = _with_room(options, 4 * MIB)
    async with opened(Disk.format(options), options, chaos, keeper=keeper) as volume:
        unstored = inside.core(volume).unstored
        assert unstored is not None
        handle, _ = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        chaos.stalled_writes = trio.Event()
        written = 0
        with trio.move_on_after(0.3):
            for number in range(8):
                await volume.files.write(handle, number * MIB, bytes(MIB))
                unstored.seal()
                written += 1
        assert 4 <= written <= 5
        chaos.stalled_writes.set()
        for number in range(written, 8):
            await volume.files.write(handle, number * MIB, bytes([number]) * MIB)
            unstored.seal()
        await volume.files.release(handle)
        assert await content(volume, b"f") == bytes(written * MIB) + b"".join(
            [bytes([number]) * MIB for number in range(written, 8)]
        )


async def test_bytes_are_written_before_the_room_for_them_is_full(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    options = _with_room(lab_options(capacity=64 * MIB), 4 * MIB)
    async with opened(Disk.format(options), options, chaos, keeper=keeper) as volume:
        await publish(volume, b"first", b"x")
        await trio.sleep(2 * WINDOW)
        chaos.events.clear()
        began = trio.current_time()
        for number in range(9):
            await publish(volume, b"%d" % number, b"x" * 256 * KIB)
            _seal(volume)
        await trio.testing.wait_all_tasks_blocked()
        assert "written" in chaos.events
        assert trio.current_time() < began + WINDOW


def _with_room(options: Options, size: int) -> Options:
    return Options(options.volume, publish=options.publish, cache=options.cache, mount=MountOptions(outlive_size=size))


async def test_a_killed_daemon_loses_nothing_of_much_that_was_written() -> None:
    """More bytes of open files than the room for them: some go to their slots before the next ones are taken."""
    mount = Mount(_with_room(lab_options(capacity=64 * MIB, chunk=8 * MIB), 4 * MIB))
    data = {b"%d" % number: random.Random(number).randbytes(3 * MIB) for number in range(6)}
    async with mount.daemon() as daemon:
        handles = {name: (await daemon.create(name))[0] for name in data}
        for start in range(0, 3 * MIB, MIB):
            for name, fh in handles.items():
                await daemon.ask("write", fh, start, data[name][start : start + MIB])
        mount.kill()
    async with mount.daemon() as daemon:
        for name, fh in handles.items():
            found = [bytes(await daemon.ask("read", fh, at, MIB)) for at in range(0, 3 * MIB, MIB)]
            assert b"".join(found) == data[name]
            await daemon.ask("release", fh)
    await mount.check()


# -- a loss of power --------------------------------------------------------------------------------


@dataclass
class History:
    """Versions of files, and what a loss of power may have left of them."""

    names: Sequence[bytes]
    versions: dict[bytes, list[tuple[float, bytes]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = {name: [(-inf, b"")] for name in self.names}

    def note(self, name: bytes, data: bytes) -> None:
        self.versions[name].append((trio.current_time(), data))

    async def check(self, disk: Disk, options: Options, time: float) -> None:
        """Each file has all bytes of a version that is not older than the interval."""
        durable_from = time - INTERVAL - 0.5
        async with opened(disk, options) as volume:
            for name, versions in self.versions.items():
                found = await _content_or_nothing(volume, name)
                allowed = [data for at, data in versions if durable_from < at <= time]
                allowed += [data for at, data in versions if at <= durable_from][-1:]
                assert found in allowed, f"{name!r} at {time}"
        assert (await check(disk)).clean


@pytest.mark.parametrize("capacity", [64 * MIB, 8 * MIB], ids=["empty", "full"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_loss_of_power_takes_at_most_the_interval(
    keeper: MemoryKeeper, rng: random.Random, mode: str, capacity: int, autojump_clock: trio.testing.MockClock
) -> None:
    """At any instant, also where slots of former versions are needed before the interval ends."""
    options = lab_options(capacity=capacity)
    medium, history = Medium(Disk.format(options)), History([b"%d" % number for number in range(8)])
    instants: list[tuple[float, Instant]] = []

    def note_instant() -> None:
        if rng.random() < 0.02:
            instants.append((trio.current_time(), medium.freeze()))

    async with opened_on(medium, options, rng, keeper) as volume:
        medium.on_event = note_instant
        for _ in range(120):
            name, data = rng.choice(history.names), rng.randbytes(rng.randint(150, 300) * KIB)
            await publish(volume, name, data)
            history.note(name, data)
            await trio.sleep(rng.choice([0.0, 0.01, 0.3]))
        await trio.sleep(INTERVAL + 1)
        instants.append((trio.current_time(), medium.freeze()))
        medium.on_event = None
    for time, instant in instants:
        await history.check(instant.cut(rng, mode), options, time)


@pytest.mark.parametrize("mode", ["none", "sectors"])
async def test_a_loss_of_power_after_kills_takes_no_more(
    keeper: MemoryKeeper, rng: random.Random, mode: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing is lost with a daemon, and the next one makes durable what that one had answered."""
    medium, history = Medium(Disk.format(OPTIONS)), History([b"%d" % number for number in range(8)])
    for _ in range(6):
        async with opened_on(medium, OPTIONS, rng, keeper) as volume:
            for name, versions in history.versions.items():
                assert await _content_or_nothing(volume, name) == versions[-1][1]
            for _ in range(rng.randint(1, 20)):
                name, data = rng.choice(history.names), rng.randbytes(rng.randint(1, 300) * KIB)
                await publish(volume, name, data)
                history.note(name, data)
                await trio.sleep(rng.choice([0.0, 0.01, 0.5]))
            _seal(volume)
            instant, time = medium.freeze(), trio.current_time()
            medium, left = medium.fork(), after_kill(keeper)
        let_go(keeper)
        for name in left.list_names(""):
            kept = left.take(name)
            assert kept is not None
            keeper.keep(name, kept.content, kept.descriptors)
        let_go(left)
        await history.check(instant.cut(rng, mode), OPTIONS, time)


async def test_a_file_that_is_replaced_while_it_is_made_durable_is_durable(
    keeper: MemoryKeeper, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The interval's commit leaves out what took the name meanwhile: the store had neither version for one more."""
    medium, history = Medium(Disk.format(OPTIONS)), History([b"f"])
    count = 0

    def replace() -> None:
        """Before each write of bytes: as an engine that publishes a file again just then."""
        nonlocal count
        if began + INTERVAL <= trio.current_time() and count < 4:
            count += 1
            nursery.start_soon(publish_again)

    async def publish_again() -> None:
        data = rng.randbytes(100 * KIB)
        await publish(volume, b"f", data)
        history.note(b"f", data)

    async with opened_on(medium, OPTIONS, rng, keeper) as volume, trio.open_nursery() as nursery:
        await volume.sync()
        await publish_again()
        began, medium.on_event = trio.current_time(), replace
        await trio.sleep(INTERVAL + 0.4)
        assert count == 4
        medium.on_event = None
        instant, time = medium.freeze(), trio.current_time() + 0.2
        await history.check(instant.cut(rng, "none"), OPTIONS, time)


async def test_the_next_daemon_makes_durable_what_was_only_committed(
    keeper: MemoryKeeper, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    medium = Medium(Disk.format(OPTIONS))
    async with opened_on(medium, OPTIONS, rng, keeper) as volume:
        await volume.inodes.set_xattr(ROOT_INODE, b"user.kvfuse.publish", b"strict")
        await volume.sync()
        await publish(volume, b"f", b"x" * 100 * KIB)
        medium, left = medium.fork(), after_kill(keeper)
    async with opened_on(medium, OPTIONS, rng, left):
        await trio.sleep(INTERVAL + 1)
        disk = medium.freeze().cut(rng, "none")
    let_go(left)
    async with opened(disk, OPTIONS) as volume:
        assert await content(volume, b"f") == b"x" * 100 * KIB


def _seal(volume: Volume) -> None:
    """What was done is answered."""
    unstored = inside.core(volume).unstored
    assert unstored is not None
    unstored.seal()


async def _content_or_nothing(volume: Volume, name: bytes) -> bytes:
    found = {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 1000)}
    return await content(volume, name) if name in found else b""


async def test_a_file_that_stays_open_is_stored_after_two_intervals(
    chaos: Chaos, keeper: MemoryKeeper, autojump_clock: trio.testing.MockClock
) -> None:
    """Also one to which somebody writes all the time."""
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS, chaos, keeper=keeper) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_WRONLY)
        data, durable = b"", 0
        for _ in range(100):
            await volume.files.write(handle, len(data), b"x" * 10 * KIB)
            data += b"x" * 10 * KIB
            await trio.sleep(INTERVAL / 10)
            crashed = disk.copy()
            async with opened(crashed, OPTIONS) as after:
                durable = len(await _content_or_nothing(after, b"f"))
            assert durable >= len(data) - 22 * 10 * KIB
        assert durable
        await volume.files.release(handle)


async def test_nobody_waits_for_ever_for_bytes_of_removed_files(chaos: Chaos, keeper: MemoryKeeper) -> None:
    """They take room for copies as long as these files are open."""
    options = _with_room(lab_options(capacity=64 * MIB), 4 * MIB)
    async with opened(Disk.format(options), options, chaos, keeper=keeper) as volume:
        handles = []
        with trio.fail_after(20):
            for number in range(40):
                handle, _ = await volume.tree.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
                await volume.files.write(handle, 0, bytes([number]) * 300 * KIB)
                await volume.tree.unlink(ROOT_INODE, b"%d" % number)
                _seal(volume)
                handles.append(handle)
        assert not inside.core(volume).nodes.handover.lost
        for number, handle in enumerate(handles):
            assert bytes(await volume.files.read(handle, 0, MIB)) == bytes([number]) * 300 * KIB
            await volume.files.release(handle)
