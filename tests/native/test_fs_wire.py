"""What stands between pyfuse3 and the kernel: fewer requests, and never at the price of a byte or an attribute."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until
from posix_calls import fails, opened

from kvfuse.native import fusewire
from kvfuse_cluster.etcd import EtcdServers

WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", "entry_timeout=3600", "attr_timeout=3600")
WITHOUT_WIRE = (sys.executable, "-c", "import pyfuse3; from kvfuse.cli import main; main()", "mount", "--foreground")
"""pyfuse3 was there first"""
CAPABILITY = "security.capability"
CAP_CHOWN = bytes.fromhex("0100000201000000000000000000000000000000")
SIZE = 1 << 16


@pytest.fixture(scope="module")
def point() -> Iterator[Path]:
    with temporary_mount(WORDS) as mount:
        yield mount.point


def door(point: Path) -> dict[str, dict[str, int]]:
    return dict(json.loads((point / ".kvfuse/stats").read_text())["fs"])


def sent(point: Path) -> Counter[str]:
    return Counter(door(point)["requests"])


def store(path: Path, content: bytes) -> None:
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        assert os.write(fd, content) == len(content)


def test_it_is_there_where_the_tests_run(point: Path) -> None:
    assert fusewire.is_there, "not built: headers of libfuse or a compiler are missing"
    flags = door(point)["wire"]["flags"]
    assert flags
    assert not flags & fusewire.AUTO_INVAL_DATA


def areas_of(pid: int) -> Iterator[tuple[int, dict[str, str]]]:
    """(address, what the kernel says) of each mapping of a process."""
    address, facts = 0, dict[str, str]()
    for line in [*Path(f"/proc/{pid}/smaps").read_text().splitlines(), "0-0 end"]:
        name, _, value = line.partition(":")
        if " " in name:
            if facts:
                yield address, facts
            address, facts = int(line.split("-")[0], 16), {}
        else:
            facts[name] = value.strip()


def test_a_kill_finds_no_page_fault_in_the_copy_of_a_request(point: Path) -> None:
    """The kernel copies a request into pages that are there, and goes on with a kill behind that. At a fault it would
    give up: the request would fail with EIO, and no next daemon could do it."""
    content = mmap.mmap(-1, 1 << 20)
    content[:] = os.urandom(mmap.PAGESIZE) * (len(content) // mmap.PAGESIZE)
    with opened(point / "large", os.O_CREAT | os.O_WRONLY | os.O_DIRECT) as fd:
        os.pwrite(fd, content, 0)
    pid = int(json.loads((point / ".kvfuse/stats").read_text())["pid"])
    # No child may have them: after a fork each next write to a page would be a fault again.
    found = [(address, facts) for address, facts in areas_of(pid) if {"lo", "dc"} <= set(facts["VmFlags"].split())]
    rooms, size = 0, len(content) + mmap.PAGESIZE  # of requests; the kernel shows neighbours as one area
    with opened(Path(f"/proc/{pid}/mem"), os.O_RDONLY) as memory:
        parts = list[bytes]()
        for address, facts in found:
            assert facts["Rss"] == facts["Locked"] == facts["Size"]
            count, rest = divmod(int(facts["Size"].split()[0]) << 10, size)
            assert not rest
            rooms += count
            for number in range(count):
                parts.append(os.pread(memory, 2 * mmap.PAGESIZE, address + number * size + len(content) // 2))
    assert rooms > 1, "each reader has one"
    assert any(content[: mmap.PAGESIZE] in part for part in parts), "the request was read to somewhere else"


def test_what_was_just_written_is_read_from_the_kernels_pages(point: Path) -> None:
    content = os.urandom(SIZE)
    paths = [point / f"written{number}" for number in range(8)]
    for path in paths:
        store(path, content)
        os.stat(path)
    first, second = sent(point), sent(point)
    for path in paths:
        assert path.read_bytes() == content
    assert (sent(point) - second)["read"] == (second - first)["read"], "besides those for the counters"


def test_only_closes_that_somebody_waits_for_are_announced(point: Path) -> None:
    relaxed, strict = point / "relaxed", point / "strict"
    for folder in (relaxed, strict):
        folder.mkdir()
    os.setxattr(strict, "user.kvfuse.publish", b"strict")
    before = sent(point)
    store(relaxed / "file", bytes(10))
    (relaxed / "file").read_bytes()
    between = sent(point)
    assert (between - before)["flush"] == 0
    store(strict / "file", bytes(10))
    (strict / "file").read_bytes()
    assert (sent(point) - between)["flush"] == 1


def test_a_write_still_takes_a_capability_away(point: Path) -> None:
    path = point / "program"
    store(path, b"made here")
    os.setxattr(path, CAPABILITY, CAP_CHOWN)
    asked = door(point)["wire"]["capability"]
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"changed")
    assert door(point)["wire"]["capability"] == asked, "answered in C what only the volume knows"
    with fails(errno.ENODATA):
        os.getxattr(path, CAPABILITY)


def test_a_file_of_before_is_asked_for() -> None:
    with temporary_mount(WORDS) as mount:
        store(mount.point / "old", b"old")
        os.setxattr(mount.point / "old", CAPABILITY, CAP_CHOWN)
        mount.unmount()
        mount.mount()
        with opened(mount.point / "old", os.O_WRONLY) as fd:
            os.write(fd, b"new")
        with fails(errno.ENODATA):
            os.getxattr(mount.point / "old", CAPABILITY)


def test_many_files_get_in_each_others_way_without_harm(point: Path) -> None:
    """The table of inodes has few places: who lost his is asked for as without it."""
    folder = point / "many"
    folder.mkdir()
    for number in range(64):
        store(folder / f"{number}", b"x")
        if number % 2:
            os.setxattr(folder / f"{number}", CAPABILITY, CAP_CHOWN)
    for number in range(64):
        with opened(folder / f"{number}", os.O_WRONLY) as fd:
            os.write(fd, b"y")
        assert os.listxattr(folder / f"{number}") == []


@contextmanager
def readers(path: Path, count: int) -> Iterator[None]:
    """Processes that read a page of the file for ever."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            fd = os.open(path, os.O_RDONLY)
            while True:
                os.pread(fd, mmap.PAGESIZE, 0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_direct_writes_are_seen_by_readers_of_pages(point: Path) -> None:
    path = point / "direct"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    with opened(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
        os.pwrite(fd, page, 0)
        with readers(path, 2), opened(path, os.O_RDONLY) as beside:
            for number in range(2000):
                page[:] = bytes([number % 251]) * mmap.PAGESIZE
                os.pwrite(fd, page, 0)
                assert os.pread(beside, 1, 0)[0] == number % 251


def test_a_file_that_is_open_for_direct_writes_can_be_mapped(point: Path) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[:5] = b"first"
    with opened(point / "mapped", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
        os.pwrite(fd, page, 0)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
            assert mapped[:5] == b"first"
            mapped[:5] = b"other"
            mapped.flush()
        os.preadv(fd, [page], 0)
    assert page[:5] == b"other"


def test_everything_works_without_it() -> None:
    with temporary_mount(WORDS, command=WITHOUT_WIRE) as mount:
        assert door(mount.point)["wire"] == {}
        folder = mount.point / "folder"
        folder.mkdir()
        store(folder / "file.tmp", b"content")
        os.rename(folder / "file.tmp", folder / "file")
        assert (folder / "file").read_bytes() == b"content"
        assert (mount.point / ".kvfuse/version").read_bytes()
        assert sent(mount.point)["flush"] > 0


@pytest.fixture(scope="module")
def two_mounts(etcd: EtcdServers) -> Iterator[tuple[Path, Path]]:
    """Of one volume of two hosts, with a relaxed folder."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-wire-") as base:
        source = shared_conf(Path(base), etcd)
        (Path(base) / "two").mkdir()
        with temporary_mount(source=source) as one:
            two = KvfuseMount(Path(base) / "two", source=source)
            try:
                two.mount()
                (one.point / "relaxed").mkdir()
                os.setxattr(one.point / "relaxed", "user.kvfuse.publish", b"relaxed")
                yield one.point, two.point
                two.unmount()
            finally:
                two.remove()


def test_a_relaxed_block_of_a_shared_volume_is_six_requests(two_mounts: tuple[Path, Path]) -> None:
    one, _ = two_mounts
    folder = one / "relaxed"
    store(folder / "first.tmp", bytes(SIZE))
    first, second = sent(one), sent(one)
    for number in range(8):
        store(folder / f"{number}.tmp", bytes(SIZE))
        os.rename(folder / f"{number}.tmp", folder / f"{number}")
    kinds = sent(one) - second - (second - first)
    assert not kinds["flush"] + kinds["getxattr"], kinds
    assert kinds["write"] == kinds["create"] == kinds["rename"] == kinds["release"] == 8, kinds


def test_a_strict_close_of_a_shared_volume_is_announced(two_mounts: tuple[Path, Path]) -> None:
    one, two = two_mounts
    before = sent(one)
    store(one / "strict", b"whole")
    assert (two / "strict").read_bytes() == b"whole"
    assert (sent(one) - before)["flush"] == (sent(one) - before)["getxattr"] == 1


def test_a_write_takes_away_the_capability_that_another_host_gave(two_mounts: tuple[Path, Path]) -> None:
    one, two = two_mounts
    path = one / "relaxed" / "program"
    store(path, b"made here")
    wait_until((two / "relaxed" / "program").exists, "the file on the other host")
    os.setxattr(two / "relaxed" / "program", CAPABILITY, CAP_CHOWN)
    wait_until(lambda: CAPABILITY in os.listxattr(path), "news of the attribute")
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"changed")
    with fails(errno.ENODATA):
        os.getxattr(path, CAPABILITY)
