"""A disk below a volume that is full, fails for a while, or turned read-only: no daemon dies of it, nothing that was
acknowledged is lost, also when daemons are killed meanwhile, and once the disk is well all is stored.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import shake_128
from pathlib import Path

import pytest
from killer import serving_of
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, wait_until
from sick_disk import SickDisk, sick_disk

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]

WORDS = ("outlive=true", "volume.capacity=64MiB", "volume.segment_size=16MiB", "mount.outlive_size=16MiB")
FILES = 200
"""small files that are written, and not synced, while the disk is full"""
KILLS = 3


class Lab:
    """A volume on a disk of its own, its mount and its holder."""

    def __init__(self, disk: SickDisk, mount: KvfuseMount) -> None:
        self.disk, self.mount = disk, mount
        self.point = mount.point

    def write(self, name: str, size: int = 50_000, *, sync: bool = True) -> int:
        """The errno; 0: it was taken."""
        try:
            with (self.point / name).open("wb", buffering=0) as file:
                file.write(content(name, size))
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            return error.errno or -1
        return 0

    def check(self, *names: str, size: int = 50_000) -> None:
        for name in names:
            assert (self.point / name).read_bytes() == content(name, size), name

    def kill(self) -> None:
        """The daemon; the next one answers."""
        former = serving_of(self.mount.pid)
        assert former is not None
        os.kill(former, signal.SIGKILL)
        os.statvfs(self.point)  # the kernel asks a daemon each time
        wait_until(lambda: serving_of(self.mount.pid) not in (None, former), "another daemon")

    def reasons(self) -> list[str]:
        """Why the mount is degraded, as `kvfuse status` says, by its exit status, too."""
        status = run("status", str(self.point), "--json")
        (row,) = json.loads(status.stdout)
        assert row["problem"] is None, row
        assert status.returncode == bool(row["degraded"])
        assert all(one["remedy"] and one["since"] > 0 for one in row["degraded"])
        return [one["reason"] for one in row["degraded"]]

    def wait_until_well(self) -> None:
        wait_until(lambda: self.reasons() == [], "the mount to be well")


def content(name: str, size: int) -> bytes:
    return shake_128(name.encode()).digest(size)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "500"}
    return subprocess.run(
        [*KVFUSE, *words], capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment
    )


@contextmanager
def mounted(*, journal: bool = False, words: tuple[str, ...] = WORDS) -> Iterator[Lab]:
    """At the end it is unmounted and must be clean, with every byte of it."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-sick-"))
    try:
        with sick_disk(base, journal=journal) as disk:
            mount = KvfuseMount(base, words)
            mount.volume = mount.source = disk.path / "volume"
            try:
                mount.mount()
                yield Lab(disk, mount)
                if mount.is_mounted:
                    mount.check_unexpected_errors()
                    mount.unmount()
                mount.fsck(verify=True)
            finally:
                mount.remove()
    finally:
        shutil.rmtree(base)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with mounted() as made:
        yield made


def test_a_full_disk_and_killed_daemons(lab: Lab) -> None:
    old = [f"old{number}" for number in range(20)]
    assert [lab.write(name) for name in old] == [0] * len(old)
    lab.disk.fill()
    new = [f"new{number}" for number in range(FILES)]
    assert [lab.write(name, 3000, sync=False) for name in new] == [0] * FILES
    (lab.point / "old0").rename(lab.point / "renamed")
    (lab.point / "old1").unlink()
    # Small commits find room in what the store has; this takes more than that.
    while lab.write("synced", 1000) == 0:
        os.setxattr(lab.point / "new0", "user.large", os.urandom(60_000))
    for _ in range(KILLS):
        assert "commit" in lab.reasons()
        lab.kill()
        lab.check(*old[2:])
        lab.check(*new, size=3000)
        assert (lab.point / "renamed").read_bytes() == content("old0", 50_000)
        assert not (lab.point / "old0").exists()
        assert not (lab.point / "old1").exists()
        assert lab.write("synced", 1000) == errno.ENOSPC
    finding = [row for row in json.loads(run("doctor", "--json").stdout) if str(lab.point) in row["name"]]
    assert [row["state"] for row in finding] == ["degraded"]
    assert "degraded: the record store refuses commits" in run("status", str(lab.point)).stdout
    refused = run("umount", str(lab.point))
    assert refused.returncode
    assert "No space left on device" in refused.stderr
    lab.disk.make_room()
    wait_until(lambda: lab.write("synced", 1000) == 0, "room")
    lab.wait_until_well()
    assert "degraded" not in run("status", str(lab.point)).stdout
    lab.kill()
    lab.check(*new, size=3000)
    lab.mount.unmount()
    lab.disk.mount_again()
    lab.mount.mount()
    lab.check(*old[2:])
    lab.check(*new, size=3000)


@pytest.mark.parametrize("is_full", [True, False])
def test_new_files_after_a_kill_are_taken_as_before(lab: Lab, is_full: bool) -> None:
    """The next daemon has numbers for them that the former one did not use."""
    lab.disk.fill() if is_full else lab.disk.refuse()
    names = [f"new{number}" for number in range(30 * KILLS)]
    for number in range(KILLS):
        some = names[30 * number : 30 * number + 30]
        assert [lab.write(name, 3000, sync=False) for name in some] == [0] * len(some)
        assert lab.write("synced", 1000) in (0, errno.ENOSPC, errno.EIO)
        lab.kill()
    assert [lab.write(name, 5000, sync=False) for name in names[:10]] == [0] * 10
    assert len({(lab.point / name).stat().st_ino for name in names}) == len(names)
    lab.disk.make_room()
    lab.disk.mend()
    wait_until(lambda: lab.write("synced", 1000) == 0, "the disk to be well")
    lab.kill()
    lab.check(*names[10:], size=3000)
    lab.check(*names[:10], size=5000)


@pytest.mark.ring(2)
def test_a_volume_on_a_full_disk_is_mounted_and_read(lab: Lab) -> None:
    assert lab.write("file") == 0
    lab.mount.unmount()
    lab.disk.fill()
    lab.mount.mount()
    lab.check("file")
    (lab.point / "file").rename(lab.point / "renamed")
    lab.kill()
    assert (lab.point / "renamed").read_bytes() == content("file", 50_000)
    lab.disk.make_room()
    wait_until(lambda: lab.write("other") == 0, "room")
    lab.wait_until_well()


def test_removed_files_that_a_full_disk_does_not_let_go_are_freed_later(lab: Lab) -> None:
    """They were open when the daemon was killed: the next one begins without their removal."""
    before = os.statvfs(lab.point).f_bfree
    assert lab.write("removed", 4 << 20) == 0
    held = os.open(lab.point / "removed", os.O_RDWR)
    (lab.point / "removed").unlink()
    os.sync()
    lab.disk.fill()
    os.close(held)
    lab.kill()
    lab.disk.make_room()
    assert lab.write("other") == 0
    (lab.point / "other").unlink()
    wait_until(lambda: os.statvfs(lab.point).f_bfree >= before, "the room of removed files")


@pytest.mark.parametrize("what", ["syncs", "segments", "records/data.mdb"])
@pytest.mark.parametrize("kill_at", ["never", "sick", "well", "synced"])
def test_a_disk_that_failed_for_a_while(lab: Lab, what: str, kill_at: str) -> None:
    """What was written meanwhile is there once an fsync says so: also for who reads the disk alone."""
    assert lab.write("old") == 0
    assert lab.write("before", sync=False) == 0
    volume = lab.mount.volume
    lab.disk.refuse(*{"syncs": [], "segments": (volume / "segments").iterdir()}.get(what, [volume / what]))
    descriptors = [os.open(lab.point / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    os.write(descriptors[0], content("file", 300_000))
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(descriptors[0])
    lab.check("old")
    assert lab.reasons()
    if kill_at == "sick":
        lab.kill()
    lab.disk.mend()
    if kill_at == "well":
        lab.kill()
    wait_until(lambda: is_synced(descriptors[0]), "the disk to be well")  # the kernel may have an error left to tell
    if kill_at == "synced":
        lab.kill()
    os.fsync(descriptors[1])
    for descriptor in descriptors:
        os.close(descriptor)
    assert lab.write("after") == 0
    lab.wait_until_well()
    lab.mount.unmount()
    lab.disk.mount_again()
    lab.mount.mount()
    lab.check("old", "before", "after")
    lab.check("file", size=300_000)


def is_synced(descriptor: int) -> bool:
    try:
        os.fsync(descriptor)
    except OSError as error:
        assert error.errno == errno.EIO, error
        return False
    return True


def test_a_lazy_unmount_says_what_may_be_lost(lab: Lab) -> None:
    """The next daemons go on to store it: a disk that is well within half a minute has all."""
    lab.disk.refuse()
    assert lab.write("new") == errno.EIO
    assert lab.reasons()
    done = run("umount", "--lazy", str(lab.point))
    assert not done.returncode
    assert "what is not stored is lost, unless" in done.stderr
    assert "degraded: " in done.stderr
    wait_until(lambda: "another one takes over" in lab.mount.log.read_text(), "a daemon that cannot store it")
    lab.disk.mend()
    lab.mount.wait()
    lab.mount.mount()
    lab.check("new")


@pytest.mark.ring(2)
def test_a_disk_that_turned_read_only() -> None:
    """The next daemon serves what there is, and keeps what is new until the disk takes it."""
    with mounted(journal=True) as lab:
        assert lab.write("old") == 0
        try:
            lab.disk.turn_read_only()
        except OSError as error:
            pytest.skip(f"this kernel turns no file system read-only on demand: {error}")
        assert lab.write("new", sync=False) == 0
        for _ in range(KILLS):
            lab.kill()
            lab.check("old", "new")
            assert lab.write("old") == errno.EROFS
            assert "commit" in lab.reasons()
        assert run("umount", str(lab.point)).returncode
        lab.mount.remove()
        lab.disk.mount_again()
