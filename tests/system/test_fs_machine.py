"""The mount and a tmpfs folder, driven by the same calls, must give the same answers and hold the same trees.

Hypothesis chooses the calls, compares result or errno of each, then both trees whole: names, kinds, modes, owners,
link counts, sizes, bytes, symlink targets and attributes. Now and then the volume is unmounted and mounted again.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from engine_pairs import Engines
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from mounting import KvfuseMount
from posix_calls import renameat2

Outcome = tuple[str, Any]

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: Path(*parts))
SLOTS = st.integers(0, 3)
MODES = st.sampled_from([0o000, 0o600, 0o644, 0o755, 0o1777, 0o2755, 0o4711])
OFFSETS = st.sampled_from([0, 1, 100, 4095, 4096, 65_536, 70_001, 262_143, 262_144, 300_000, 4_194_304, 5_000_000])
SIZES = st.sampled_from([0, 1, 10, 4096, 5000, 65_536, 100_000, 262_145])
ACCESS = st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
EXTRA_FLAGS = st.sets(
    st.sampled_from([os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_NOFOLLOW, os.O_DIRECTORY]), max_size=3
)
XATTR_NAMES = st.sampled_from(["user.one", "user.two"])


def outcome(call: Callable[[], Any]) -> Outcome:
    """("ok", the result) or ("failed", the name of the errno)."""
    try:
        return "ok", call()
    except OSError as error:
        return "failed", errno.errorcode[error.errno or 0]


def shown(status: os.stat_result) -> tuple[int, ...]:
    """What must be the same on both sides. A directory's size means nothing."""
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid, size


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below ``root``, by path."""
    found: dict[str, tuple[Any, ...]] = {".": shown(os.lstat(root))}
    for directory, directory_names, file_names in os.walk(root):
        for name in directory_names + file_names:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: Any = None
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            xattrs = sorted(name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user."))
            found[os.path.relpath(path, root)] = (*shown(status), content, xattrs)
    return found


class MountMachine(RuleBasedStateMachine):
    """Calls on two folders: ``ours`` on the mount, ``theirs`` on tmpfs. Slots hold pairs of open descriptors."""

    def __init__(self, mount: KvfuseMount) -> None:
        super().__init__()
        self.mount = mount
        self.ours = Path(tempfile.mkdtemp(dir=mount.point))
        self.theirs = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.slots: dict[int, tuple[int, int]] = {}
        self.remount_count = 0

    def both(self, call: Callable[[Path], Any]) -> Outcome:
        """``call`` with the root of either side; the outcomes must be equal."""
        ours, theirs = outcome(lambda: call(self.ours)), outcome(lambda: call(self.theirs))
        assert ours == theirs
        return ours

    def both_open(self, slot: int, call: Callable[[int], Any]) -> None:
        """``call`` with the descriptors in ``slot``, if there are any."""
        if slot in self.slots:
            ours, theirs = (outcome(lambda fd=fd: call(fd)) for fd in self.slots[slot])
            assert ours == theirs

    def close_slot(self, slot: int) -> None:
        for fd in self.slots.pop(slot, ()):
            os.close(fd)

    # -- descriptors ---------------------------------------------------------------------------------

    @rule(slot=SLOTS, path=PATHS, access=ACCESS, extra=EXTRA_FLAGS, mode=MODES)
    def open(self, slot: int, path: Path, access: int, extra: set[int], mode: int) -> None:
        self.close_slot(slot)
        flags = access | sum(extra) | os.O_NONBLOCK  # or opening a fifo would wait
        opened: list[int] = []
        try:
            self.both(lambda root: opened.append(os.open(root / path, flags, mode)))
        except AssertionError:
            for fd in opened:
                os.close(fd)
            raise
        if opened:
            self.slots[slot] = (opened[0], opened[1])

    @rule(slot=SLOTS, offset=OFFSETS, size=SIZES, byte=st.integers(1, 255))
    def pwrite(self, slot: int, offset: int, size: int, byte: int) -> None:
        self.both_open(slot, lambda fd: os.pwrite(fd, bytes([byte]) * size, offset))

    @rule(slot=SLOTS, size=SIZES, byte=st.integers(1, 255))
    def write(self, slot: int, size: int, byte: int) -> None:
        self.both_open(slot, lambda fd: os.write(fd, bytes([byte]) * size))

    @rule(slot=SLOTS, offset=OFFSETS, size=SIZES)
    def pread(self, slot: int, offset: int, size: int) -> None:
        self.both_open(slot, lambda fd: os.pread(fd, size, offset))

    @rule(slot=SLOTS, size=OFFSETS)
    def ftruncate(self, slot: int, size: int) -> None:
        self.both_open(slot, lambda fd: os.ftruncate(fd, size))

    @rule(slot=SLOTS)
    def fstat(self, slot: int) -> None:
        self.both_open(slot, lambda fd: shown(os.fstat(fd)))

    @rule(slot=SLOTS)
    def fsync(self, slot: int) -> None:
        self.both_open(slot, os.fsync)

    @rule(slot=SLOTS, mode=MODES)
    def fchmod(self, slot: int, mode: int) -> None:
        self.both_open(slot, lambda fd: os.fchmod(fd, mode))

    @rule(slot=SLOTS)
    def close(self, slot: int) -> None:
        self.close_slot(slot)

    # -- names ---------------------------------------------------------------------------------------

    @rule(path=PATHS, size=SIZES)
    def make_file(self, path: Path, size: int) -> None:
        self.both(lambda root: (root / path).write_bytes(b"f" * size))

    @rule(path=PATHS, mode=MODES)
    def mkdir(self, path: Path, mode: int) -> None:
        self.both(lambda root: os.mkdir(root / path, mode))

    @rule(path=PATHS, other=PATHS)
    def symlink(self, path: Path, other: Path) -> None:
        self.both(lambda root: os.symlink(other, root / path))

    @rule(path=PATHS)
    def readlink(self, path: Path) -> None:
        self.both(lambda root: os.readlink(root / path))

    @rule(path=PATHS, other=PATHS)
    def link(self, path: Path, other: Path) -> None:
        self.both(lambda root: os.link(root / path, root / other, follow_symlinks=False))

    @rule(path=PATHS)
    def unlink(self, path: Path) -> None:
        self.both(lambda root: os.unlink(root / path))

    @rule(path=PATHS)
    def rmdir(self, path: Path) -> None:
        self.both(lambda root: os.rmdir(root / path))

    @rule(path=PATHS, other=PATHS, flags=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def rename(self, path: Path, other: Path, flags: int) -> None:
        self.both(lambda root: renameat2(root / path, root / other, flags))

    @rule(path=PATHS)
    def listdir(self, path: Path) -> None:
        self.both(lambda root: sorted(os.listdir(root / path)))

    # -- attributes ----------------------------------------------------------------------------------

    @rule(path=PATHS)
    def stat(self, path: Path) -> None:
        self.both(lambda root: shown(os.stat(root / path)))

    @rule(path=PATHS, mode=MODES)
    def chmod(self, path: Path, mode: int) -> None:
        self.both(lambda root: os.chmod(root / path, mode))

    @rule(path=PATHS, size=OFFSETS)
    def truncate(self, path: Path, size: int) -> None:
        self.both(lambda root: os.truncate(root / path, size))

    @rule(path=PATHS, seconds=st.integers(0, 1 << 33))
    def utime(self, path: Path, seconds: int) -> None:
        def set_and_show(root: Path) -> tuple[float, float]:
            os.utime(root / path, (seconds, seconds + 1))
            return os.stat(root / path).st_atime, os.stat(root / path).st_mtime

        self.both(set_and_show)

    @rule(path=PATHS, name=XATTR_NAMES, flags=st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]), size=SIZES)
    def setxattr(self, path: Path, name: str, flags: int, size: int) -> None:
        value = b"v" * min(size, 1000)
        self.both(lambda root: os.setxattr(root / path, name, value, flags, follow_symlinks=False))

    @rule(path=PATHS, name=XATTR_NAMES)
    def getxattr(self, path: Path, name: str) -> None:
        self.both(lambda root: os.getxattr(root / path, name, follow_symlinks=False))

    @rule(path=PATHS, name=XATTR_NAMES)
    def removexattr(self, path: Path, name: str) -> None:
        self.both(lambda root: os.removexattr(root / path, name, follow_symlinks=False))

    # -- the whole -----------------------------------------------------------------------------------

    @precondition(lambda self: self.remount_count < 1)
    @rule()
    def remount(self) -> None:
        self.remount_count += 1
        for slot in list(self.slots):
            self.close_slot(slot)
        self.mount.unmount()
        self.mount.mount()

    @invariant()
    def trees_are_equal(self) -> None:
        assert tree(self.ours) == tree(self.theirs)

    def teardown(self) -> None:
        for slot in list(self.slots):
            self.close_slot(slot)
        for root in (self.ours, self.theirs):
            shutil.rmtree(root)


@pytest.mark.root
def test_the_mount_behaves_as_tmpfs(mount: KvfuseMount, engines: Engines, seed: int) -> None:
    machine = hypothesis.seed(seed)(lambda: MountMachine(mount))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=5 if engines.is_shared else 25,  # where a call may be a round trip to servers
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
