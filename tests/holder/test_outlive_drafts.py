"""Files that are being written in folders of blocks outlive their daemon: no call fails, and no byte is another one."""

from __future__ import annotations

import mmap
import os
import random
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import fails
from ring_lab import stats
from scale import scaled
from test_outlive import kill_daemon
from upgrading import upgrade

WORDS = ("outlive=true", "cache", "capacity=1GiB", "segment_size=64MiB")
PAGE = 4096
STEPS = 150
FILES = 12
SIZE_MAX = 300_000


def kill(mount: KvfuseMount) -> None:
    kill_daemon(mount)


def replace_daemon(mount: KvfuseMount) -> None:
    upgrade(mount)


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    """C makes files in its root."""
    with temporary_mount(WORDS) as mounted:
        for number in range(4):
            (mounted.point / f"there-{number}").write_bytes(b"there %d" % number)
        wait_until(lambda: is_made_in_c(mounted), "files that C makes")
        yield mounted


def check_ended(mount: KvfuseMount) -> None:
    """Nothing of the files that were open is retained."""
    wait_until(lambda: stats(mount)["fs"]["open_handle_count"] <= 1, "the end of all handles")
    wait_until(lambda: stats(mount)["block_files"]["sketches"] == 0, "the end of all files that were written")


def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    return os.open(path, flags, 0o644)


def is_made_in_c(mount: KvfuseMount) -> bool:
    before = stats(mount)["fs"]["answered_in_c"].get("create", 0)
    (mount.point / "probe").write_bytes(b"probe")
    (mount.point / "probe").unlink()
    return bool(stats(mount)["fs"]["answered_in_c"].get("create", 0) > before)


@dataclass
class Held:
    """An open file, and what it is to be."""

    descriptor: int
    path: Path | None
    data: bytearray = field(default_factory=bytearray)
    mode: int = 0o644

    def write(self, offset: int, data: bytes) -> None:
        assert os.pwrite(self.descriptor, data, offset) == len(data)
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data

    def cut(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def check(self) -> None:
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel has to ask
        found = os.fstat(self.descriptor)
        assert (found.st_size, found.st_nlink) == (len(self.data), int(self.path is not None))
        assert stat.S_IMODE(found.st_mode) == self.mode
        assert os.pread(self.descriptor, len(self.data) + 1, 0) == self.data
        if self.path is not None:
            assert self.path.read_bytes() == self.data

    def close(self) -> None:
        os.close(self.descriptor)
        if self.path is not None:
            assert self.path.read_bytes() == self.data
            assert stat.S_IMODE(self.path.stat().st_mode) == self.mode


def hold_all(point: Path) -> dict[str, Held]:
    """A file of each kind."""
    new, held = os.O_RDWR | os.O_CREAT | os.O_EXCL, dict[str, Held]()
    for number, name in enumerate(("unchanged", "changed", "read")):
        flags = os.O_RDONLY if name == "read" else os.O_RDWR
        path = point / f"there-{number}"
        held[name] = Held(opened(path, flags), path, bytearray(b"there %d" % number))
    held["changed"].write(3, b"other bytes")
    path = point / "there-3"
    held["emptied"] = Held(opened(path, os.O_RDWR | os.O_TRUNC), path)
    for name in ("new", "empty", "closed", "renamed", "removed", "mode", "hole", "python"):
        path = point / name
        held[name] = Held(opened(path, new), path)
    for name in ("new", "closed", "renamed", "removed", "mode"):
        held[name].write(0, name.encode() * 5000)
        held[name].write(len(held[name].data), b"second write")
    held["hole"].write(20_000, b"behind a hole")
    os.fsync(held["python"].descriptor)  # C leaves it to Python
    held["python"].write(0, b"by Python" * 1000)
    held["synced"] = Held(opened(point / "not synced", new), (point / "not synced"))
    held["synced"].path = (point / "not synced").rename(point / "synced")
    os.fsync(held["synced"].descriptor)  # what is empty becomes an ordinary file
    os.close(os.dup(held["closed"].descriptor))
    held["closed, renamed"] = Held(opened(point / "former", new), point / "latter", bytearray(b"bytes"))
    os.write(held["closed, renamed"].descriptor, b"bytes")
    os.close(os.dup(held["closed, renamed"].descriptor))
    (point / "former").rename(point / "latter")
    held["renamed"].path = (point / "renamed").rename(point / "renamed then")
    (point / "removed").unlink()
    held["removed"].path = None
    os.fchmod(held["mode"].descriptor, 0o600)
    held["mode"].mode = 0o600
    return held


@pytest.mark.parametrize("end", [kill, replace_daemon])
def test_open_files_go_on(mount: KvfuseMount, end: Callable[[KvfuseMount], None]) -> None:
    held = hold_all(mount.point)
    names = sorted(os.listdir(mount.point))
    for turn in range(3):
        end(mount)
        assert sorted(os.listdir(mount.point)) == names
        for name, one in held.items():
            one.check()
            if name != "read" and turn:
                one.write(len(one.data) // 2, b"turn %d" % turn)
                one.check()
    for one in held.values():
        one.close()
    check_ended(mount)
    kill_daemon(mount)
    for one in held.values():
        if one.path is not None:
            assert one.path.read_bytes() == one.data


def test_two_descriptors_of_a_file(mount: KvfuseMount) -> None:
    """The first close does not end what the other one has."""
    path = mount.point / "two"
    first = Held(opened(path), path)
    first.write(0, b"first" * 3000)
    second = Held(opened(path, os.O_RDWR), path, first.data)
    second.write(5, b"SECOND")
    kill_daemon(mount)
    first.close()
    second.check()
    kill_daemon(mount)
    second.write(100_000, b"end")
    second.close()
    check_ended(mount)


def test_direct_writes_go_on(mount: KvfuseMount) -> None:
    path = mount.point / "direct"
    descriptor = opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with mmap.mmap(-1, 4 * PAGE) as page:
        page[:] = bytes(range(256)) * 64
        assert os.pwrite(descriptor, page, 0) == len(page)
        kill_daemon(mount)
        assert os.pwrite(descriptor, page, len(page)) == len(page)
        os.close(descriptor)
        assert path.read_bytes() == bytes(page) * 2


def test_a_file_that_outgrew_a_block_goes_on(mount: KvfuseMount) -> None:
    path, data = mount.point / "large", random.Random(1).randbytes(1 << 20)
    descriptor = opened(path)
    for number in range(80):
        assert os.write(descriptor, data) == len(data)
        if number in (20, 70):
            kill_daemon(mount)
    for number in range(80):
        assert os.pread(descriptor, len(data), number << 20) == data
    os.close(descriptor)
    assert path.stat().st_size == 80 << 20
    check_ended(mount)


def test_files_become_ordinary_beside_kills(mount: KvfuseMount, rng: random.Random) -> None:
    """An empty file does at its fsync. A daemon that is killed then has begun an ordinary file."""
    for turn in range(scaled(6)):
        delay, pid, names = rng.random() * 0.05, stats(mount)["pid"], list[Path]()
        killer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
        killer.start()
        while not killer.finished.is_set():
            names.append(mount.point / f"file-{turn}-{len(names)}")
            with names[-1].open("wb") as file:
                os.fsync(file.fileno())
                file.write(names[-1].name.encode())
        killer.join()
        for path in names:
            assert path.read_bytes() == path.name.encode()
            path.unlink()
    check_ended(mount)


def test_what_nobody_has_open_any_more_ends(mount: KvfuseMount) -> None:
    """A process dies beside its daemon: its files become what they were at that moment, and nobody retains them."""
    program = f"""
import os, signal, sys
one = os.open({str(mount.point / "orphan")!r}, os.O_RDWR | os.O_CREAT)
os.write(one, b"bytes")
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(["python3", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        kill_daemon(mount)
        process.kill()
    wait_until(lambda: stats(mount)["block_files"]["sketches"] == 0, "its file to end")
    assert (mount.point / "orphan").read_bytes() == b"bytes"


def test_the_folder_of_the_mount_itself_is_found(mount: KvfuseMount) -> None:
    """C knows that ``.kvfuse`` is no name of the volume's, in each daemon from the start."""
    kill_daemon(mount)
    for number in range(20):  # C answers about the root by then
        (mount.point / f"more-{number}").write_bytes(b"more")
        assert not (mount.point / "absent").exists()
        assert (mount.point / ".kvfuse" / "stats").read_bytes()


class Player:
    """Does something at random to open files."""

    def __init__(self, rng: random.Random, point: Path) -> None:
        self.rng, self.point = rng, point
        self.held: list[Held] = []
        self.closed: dict[Path, Held] = {}
        self.count = 0

    def step(self) -> None:
        choices = [self.open_new, self.open_again]
        if self.held:
            choices = [
                *choices,
                *[self.write] * 6,
                self.cut,
                self.rename,
                self.remove,
                self.close,
                self.flush,
                self.mode,
            ]
        self.rng.choice(choices)()

    def pick(self) -> Held:
        return self.rng.choice(self.held)

    def open_new(self) -> None:
        self.count += 1
        path = self.point / f"file-{self.count}"
        extra = self.rng.choice([0, 0, os.O_EXCL])
        self.held.append(Held(opened(path, os.O_RDWR | os.O_CREAT | extra), path))
        if len(self.held) > FILES:
            self.close()

    def open_again(self) -> None:
        if self.closed:
            path = self.rng.choice(list(self.closed))
            one = self.closed.pop(path)
            one.descriptor = opened(path, os.O_RDWR)
            self.held.append(one)

    def write(self) -> None:
        one = self.pick()
        data = self.rng.randbytes(self.rng.choice([1, 100, PAGE, 20_000, 100_000]))
        offset = len(one.data) if self.rng.random() < 0.6 else self.rng.randrange(len(one.data) + 9000)
        one.write(min(offset, SIZE_MAX), data)

    def cut(self) -> None:
        one = self.pick()
        one.cut(self.rng.randrange(len(one.data) + 5000))

    def rename(self) -> None:
        one = self.pick()
        if one.path is None:
            return
        self.count += 1
        target = self.point / f"file-{self.count}"
        if self.closed and self.rng.random() < 0.5:
            target = self.rng.choice(list(self.closed))
            del self.closed[target]
        one.path = one.path.rename(target)

    def remove(self) -> None:
        one = self.pick()
        if one.path is not None:
            one.path.unlink()
            one.path = None

    def close(self) -> None:
        one = self.pick()
        self.held.remove(one)
        one.close()
        if one.path is not None:
            self.closed[one.path] = one

    def flush(self) -> None:
        descriptor = self.pick().descriptor
        os.fsync(descriptor)
        os.close(os.dup(descriptor))

    def mode(self) -> None:
        one = self.pick()
        one.mode = self.rng.choice([0o644, 0o600, 0o755])
        os.fchmod(one.descriptor, one.mode)

    def check(self) -> None:
        for one in self.held:
            one.check()
        for path, one in self.closed.items():
            assert path.read_bytes() == one.data, path


@pytest.mark.parametrize("end", [kill, replace_daemon])
def test_anything_goes_on(mount: KvfuseMount, rng: random.Random, end: Callable[[KvfuseMount], None]) -> None:
    player = Player(rng, mount.point)
    for number in range(scaled(STEPS)):
        player.step()
        if number % 15 == 14:
            end(mount)
        if number % 10 == 9:
            player.check()
    while player.held:
        player.close()
    player.check()
    check_ended(mount)


def test_a_file_without_memory_that_is_kept_says_so(tmp_path: Path) -> None:
    """More files are being written than are kept: the others end with their daemon, each with EIO."""
    with temporary_mount(WORDS) as mount:
        held = []
        for number in range(1100):
            descriptor = opened(mount.point / f"file-{number}")
            os.pwrite(descriptor, b"bytes", 9000)  # a hole: C leaves it to Python
            held.append(descriptor)
        kill_daemon(mount)
        good = 0
        for descriptor in held:
            try:
                assert os.pread(descriptor, 5, 9000) == b"bytes"
                good += 1
            except OSError:
                with fails(5):
                    os.write(descriptor, b"more")
        assert good == 1024
        for descriptor in held:
            try:
                os.close(descriptor)
            except OSError:
                pass
