"""Access times: which reads move them under which options, and that they outlive the mount."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import inside
import msgspec
import pytest
import trio
import trio.testing
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import opened
from ring_calls import done
from ring_lab import wait_for_rings
from shared_lab import hosts, joined, quiet
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options
from volume_lab import opened as opened_volume

from kvfuse.options.config import Options
from kvfuse.usrbio.client import connect
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.content.access_times import STORE_SECONDS
from kvfuse.volume.volume import Volume

WORDS = ("allow_other", "volume.capacity=1GiB", "volume.segment_size=64MiB")
"""with the timeouts that users have: the kernel keeps attributes for a minute"""
CLOCK_TICK_S = 0.02
Call = Callable[[Path], object]


@contextmanager
def mounted(*words: str) -> Iterator[KvfuseMount]:
    with temporary_mount((*WORDS, *words)) as mount:
        wait_for_rings(mount)
        yield mount


def wait_for_a_tick() -> None:
    """What is stamped next has a later time than what was."""
    tick = time.time() + CLOCK_TICK_S
    wait_until(lambda: time.time() > tick, "the clock")


def moves(path: Path, read: Call) -> bool:
    """Whether it moves the access time. It moves no other time. The clock has ticked before and after."""
    before = os.lstat(path)
    wait_for_a_tick()
    read(path)
    after = os.lstat(path)
    wait_for_a_tick()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert after.st_atime_ns >= before.st_atime_ns
    return after.st_atime_ns > before.st_atime_ns


def append(path: Path) -> None:
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"more")


def read_through_mapping(path: Path) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            assert mapped[0]


def read_without_a_trace(path: Path) -> None:
    with opened(path, os.O_RDONLY | os.O_NOATIME) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.read(fd, 10)


KINDS: dict[str, tuple[Call, Call, Call]] = {
    "file": (lambda path: path.write_bytes(b"content"), Path.read_bytes, append),
    "program": (
        lambda path: (path.write_text("#!/bin/sh\n"), path.chmod(0o755)),
        lambda path: subprocess.run([path], check=True),
        lambda path: os.truncate(path, 9),
    ),
    "mapping": (lambda path: path.write_bytes(b"content"), read_through_mapping, append),
    "directory": (os.mkdir, os.listdir, lambda path: (path / f"new{time.time_ns()}").touch()),
    "symlink": (
        lambda path: path.symlink_to("target"),
        os.readlink,
        lambda path: os.utime(path, follow_symlinks=False),
    ),
}
"""how it is made, read, and changed"""


def history(path: Path, kind: str) -> list[bool]:
    """Whether these move the access time: the first read, the second; after a change of content one, and another; after
    one of attributes one, and another."""
    make, read, change = KINDS[kind]
    make(path)
    rows = [moves(path, read), moves(path, read)]
    change(path)
    rows += [moves(path, read), moves(path, read)]
    os.chown(path, 1, 1, follow_symlinks=False)
    return [*rows, moves(path, read), moves(path, read)]


IF_NOT_THE_LATEST = [True, False] * 3
POLICIES: dict[str, tuple[Sequence[str], list[bool], list[bool]]] = {
    "relatime": (("noatime,relatime",), IF_NOT_THE_LATEST, IF_NOT_THE_LATEST),
    "strictatime": (("strictatime",), [True] * 6, [True] * 6),
    "noatime": (("noatime",), [False] * 6, [False] * 6),
    "nodiratime": (("nodiratime",), IF_NOT_THE_LATEST, [False] * 6),
}
"""-o words, and the histories of files and of directories"""


@pytest.mark.root
@pytest.mark.kvfuse_only
@pytest.mark.parametrize("policy", POLICIES)
def test_which_reads_move_an_access_time(policy: str) -> None:
    """The cases of xfstests generic/003, with what the kernel has cached in between."""
    words, of_files, of_directories = POLICIES[policy]
    with mounted(*words) as mount:
        for kind in KINDS:
            expected = of_directories if kind == "directory" else of_files
            assert history(mount.point / kind, kind) == expected, kind
        (mount.point / "other").write_bytes(b"content")
        assert not moves(mount.point / "other", read_without_a_trace)


@pytest.mark.root
@pytest.mark.kvfuse_only
def test_a_day_old_access_time_moves() -> None:
    with mounted("attr_timeout=0") as mount:
        path = mount.point / "file"
        path.write_bytes(b"content")
        day = 86_400 * 10**9
        ahead = time.time_ns() + 30 * day  # of ctime, which nobody can set
        os.utime(path, ns=(ahead, 0))
        assert not moves(path, Path.read_bytes)
        os.utime(path, ns=(time.time_ns() - 2 * day, 0))
        assert moves(path, Path.read_bytes)


def read_by_ring(path: Path) -> None:
    with connect(path.parent) as client, client.file(path, "r") as file:
        iov, ring = client.iov(1 << 16), client.ring(64)
        for number in range(40):  # so many that they are read together
            ring.prep_read(iov, 8 * number, file, 0, 4, user_data=number)
        assert set(done(ring, 40).values()) == {4}


def get_by_ring(path: Path) -> None:
    with connect(path.parent) as client:
        iov, ring = client.iov(1 << 16), client.ring(8)
        namespace = client.namespace(path.parent, create=False)
        for _ in range(2):
            ring.prep_get(iov, 0, namespace, path.name.encode(), 1 << 16)
            assert list(done(ring).values()) == [7]


@pytest.mark.root
@pytest.mark.kvfuse_only
def test_access_times_outlive_the_mount() -> None:
    """Of files, directories and symbolic links, of all that may read them."""
    with mounted("attr_timeout=0") as mount:
        rows: list[tuple[Path, Call]] = []
        for kind, (make, read, _) in KINDS.items():
            make(mount.point / kind)
            rows.append((mount.point / kind, read))
        for name, read in (("read", read_by_ring), ("get", get_by_ring)):
            (mount.point / name).write_bytes(b"content")
            rows.append((mount.point / name, read))
        subprocess.run(["sync", "-f", mount.point], check=True)
        assert [path.name for path, read in rows if not moves(path, read)] == []
        before = {path.name: os.lstat(path).st_atime_ns for path, _ in rows}
        mount.unmount()
        mount.mount()
        assert {path.name: os.lstat(path).st_atime_ns for path, _ in rows} == before


@pytest.mark.root
@pytest.mark.kvfuse_only
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_access_time_survives_a_crash_after_fsync(kind: str) -> None:
    make, read, _ = KINDS[kind]
    with mounted() as mount:
        path = mount.point / kind
        make(path)
        with opened(mount.point, os.O_RDONLY) as top, opened(path, os.O_RDONLY | os.O_NOATIME) as fd:
            os.fsync(top)
            assert moves(path, read)
            os.fsync(fd)
        before = os.lstat(path).st_atime_ns
        mount.kill()
        mount.mount()
        assert os.lstat(path).st_atime_ns == before


# -- a volume in memory -----------------------------------------------------------------------------


@pytest.fixture
def options() -> Options:
    return lab_options(nodes=20)


async def make_files(volume: Volume, count: int) -> None:
    for number in range(count):
        handle, node = await volume.tree.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"content")
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)
    await volume.sync()


async def read_files(volume: Volume, count: int) -> None:
    for number in range(count):
        node = await volume.tree.lookup(ROOT_INODE, b"%d" % number)
        node.atime = 1
        handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
        assert bytes(await volume.files.read(handle, 0, 10)) == b"content"
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


async def stored_atimes(disk: Disk, options: Options, count: int) -> list[int]:
    """As they would be after a crash now."""
    async with opened_volume(disk.copy(), options) as volume:
        return [(await volume.tree.lookup(ROOT_INODE, b"%d" % number)).atime for number in range(count)]


async def test_an_access_time_is_stored_before_the_inode_leaves_memory(disk: Disk, options: Options) -> None:
    async with opened_volume(disk, options) as volume:
        await make_files(volume, 200)
    before = await stored_atimes(disk, options, 200)
    async with opened_volume(disk, options) as volume:
        wait_for_a_tick()
        await read_files(volume, 200)
        await inside.journal(volume).commit()
        after = await stored_atimes(disk, options, 200)
    moved = sum(new > old for new, old in zip(after, before, strict=True))
    assert moved >= 100, f"{moved} of 200 are stored, and about 20 are in memory"


async def test_an_access_time_is_stored_after_a_while(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    publish = msgspec.structs.replace(options.publish, interval=10 * STORE_SECONDS)  # no commit but those for times
    async with opened_volume(disk, msgspec.structs.replace(options, publish=publish)) as volume:
        await make_files(volume, 10)
        commits = inside.journal(volume).counters.commits
        before = await stored_atimes(disk, options, 10)
        wait_for_a_tick()
        for _ in range(50):
            await read_files(volume, 10)
        await trio.sleep(STORE_SECONDS / 2)
        assert await stored_atimes(disk, options, 10) == before
        assert inside.journal(volume).counters.commits == commits, "no read waits for one"
        await trio.sleep(STORE_SECONDS)
        assert all(new > old for new, old in zip(await stored_atimes(disk, options, 10), before, strict=True))
        assert inside.journal(volume).counters.commits <= commits + 2


async def test_a_removed_file_has_no_access_time_to_store(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened_volume(disk, options) as volume:
        await make_files(volume, 10)
        await read_files(volume, 10)
        for number in rng.sample(range(10), 5):
            await volume.tree.unlink(ROOT_INODE, b"%d" % number)
        await trio.sleep(2 * STORE_SECONDS)
        assert len(await volume.tree.list_directory(ROOT_INODE, 0, 100)) == 5


# -- many hosts -------------------------------------------------------------------------------------


async def test_what_two_hosts_read_is_stored_when_they_end(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """A read is news to nobody before that, however long it takes, and no file is refreshed for it but in its times."""
    made = lab_options(capacity=16 * MIB)
    disk = Disk.format(made, shared=True)
    async with joined(disk, made, 1, Chaos(rng)) as one:
        await make_files(one, 5)
    async with joined(disk, made, 3, Chaos(rng)) as last:
        async with joined(disk, made, 1, Chaos(rng)) as one, joined(disk, made, 2, Chaos(rng)) as two:
            before = [(await last.tree.lookup(ROOT_INODE, b"%d" % number)).atime for number in range(5)]
            wait_for_a_tick()
            await read_files(one, 3)
            await read_files(two, 5)
            commits = inside.journal(one).counters.commits, inside.journal(two).counters.commits
            await trio.sleep(10 * STORE_SECONDS)
            assert (inside.journal(one).counters.commits, inside.journal(two).counters.commits) == commits
        await trio.sleep(1)
        after = [(await last.tree.lookup(ROOT_INODE, b"%d" % number)).atime for number in range(5)]
        assert all(new > old for new, old in zip(after, before, strict=True))


async def test_a_read_does_not_undo_what_another_host_sets(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, capacity=16 * MIB) as (one, two):
        await make_files(one, 2)
        await quiet(one, two)
        made = (await one.tree.lookup(ROOT_INODE, b"1")).atime
        wait_for_a_tick()
        await read_files(one, 2)
        for number, changes in enumerate((Changes(atime=5 * 10**9), Changes(mode=0o600))):
            ino = (await two.tree.lookup(ROOT_INODE, b"%d" % number)).ino
            await two.inodes.set_attributes(ino, changes, CALLER)
        await two.sync()
        await trio.sleep(1)
        assert (await one.tree.lookup(ROOT_INODE, b"0")).atime == 5 * 10**9
        kept = await one.tree.lookup(ROOT_INODE, b"1")
        assert kept.mode & 0o777 == 0o600
        assert kept.atime > made
        await quiet(one, two)
        assert (await two.tree.lookup(ROOT_INODE, b"1")).atime == kept.atime
