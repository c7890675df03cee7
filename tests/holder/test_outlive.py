"""A mount whose daemon is killed, with the holder that starts the next one: real mounts, real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, temporary_mount, wait_until

from kvfuse.cli import holders
from kvfuse.holder.signals import OTHER_SIGNALS
from kvfuse.holder.takeover import libc

OUTLIVE = ("outlive=true", "standby=false")
UNANSWERED = """
from kvfuse.cli import holders
holders.look_at = lambda row: None
from kvfuse.cli import main
main()
"""
"""the program, where a holder does not answer, or not yet"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(OUTLIVE) as mounted:
        yield mounted


def daemon_of(mount: KvfuseMount) -> int:
    """The process that serves the mount now."""
    pid = json.loads((mount.point / ".kvfuse" / "stats").read_text())["pid"]
    assert isinstance(pid, int)
    return pid


def settle(mount: KvfuseMount) -> None:
    """What was done is stored."""
    folder = os.open(mount.point, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def children_of(pid: int) -> set[int]:
    """Living ones."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def kill_daemon(mount: KvfuseMount) -> float:
    """Kill it, and wait until another one answers; returns for how long nobody did, in seconds."""
    os.kill(daemon_of(mount), signal.SIGKILL)
    began = time.monotonic()
    os.statvfs(mount.point)
    return time.monotonic() - began


def test_calls_wait_for_the_next_daemon(mount: KvfuseMount) -> None:
    folder = mount.point / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"x" * 100_000)
    settle(mount)
    former = daemon_of(mount)
    stall = kill_daemon(mount)
    assert daemon_of(mount) != former
    assert stall < PATIENCE_S
    assert (folder / "file").read_bytes() == b"x" * 100_000
    assert os.listdir(folder) == ["file"]
    (folder / "other").write_bytes(b"y")
    assert sorted(os.listdir(folder)) == ["file", "other"]


def test_a_call_under_way_is_sent_again(mount: KvfuseMount) -> None:
    """The daemon is stopped, so that it has taken the request or not, and killed then."""
    (mount.point / "file").write_bytes(b"x")
    settle(mount)
    pid, answers = daemon_of(mount), list[int]()
    os.kill(pid, signal.SIGSTOP)
    asker = threading.Thread(target=lambda: answers.append(os.statvfs(mount.point).f_bsize))
    asker.start()
    os.kill(pid, signal.SIGKILL)
    asker.join(PATIENCE_S)
    assert answers == [4096]


@pytest.mark.ring(3)
def test_again_and_again_and_nothing_grows(mount: KvfuseMount) -> None:
    holder = mount.pid

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{holder}/fd"))

    kill_daemon(mount)
    before, processes = descriptors(), len(children_of(holder))
    for number in range(5):
        (mount.point / f"file-{number}").write_bytes(b"x" * number)
        settle(mount)
        kill_daemon(mount)
    assert [(mount.point / f"file-{number}").stat().st_size for number in range(5)] == list(range(5))
    wait_until(lambda: descriptors() <= before, "descriptors of the holder")
    assert len(children_of(holder)) == processes


def test_large_requests_come_after_a_kill(mount: KvfuseMount) -> None:
    """The next daemon reads what the kernel said at first into memory that is as small as that."""
    data = bytes(range(256)) * 4096
    with (mount.point / "file").open("wb", buffering=0) as file:
        settle(mount)
        for _ in range(2):
            kill_daemon(mount)
            daemon = daemon_of(mount)
            for number in range(64):
                assert os.pwrite(file.fileno(), data, number << 20) == len(data)
            os.fsync(file.fileno())
            assert daemon_of(mount) == daemon
    assert (mount.point / "file").read_bytes() == data * 64


def test_an_unmount_ends_all_after_a_kill(mount: KvfuseMount) -> None:
    holder = mount.pid
    kill_daemon(mount)
    children = children_of(holder)
    mount.unmount()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_an_unmount_while_there_is_no_daemon_ends_all(mount: KvfuseMount) -> None:
    """The next one finds another file system where the mount was."""
    kill_daemon(mount)
    os.kill(daemon_of(mount), signal.SIGKILL)
    wait_until(lambda: libc.umount2(os.fsencode(mount.point), 0) == 0, "the end of the mount's users")
    mount.wait(0)


def test_sigterm_to_the_holder_unmounts(mount: KvfuseMount) -> None:
    kill_daemon(mount)
    (mount.point / "file").write_bytes(b"x")
    mount.terminate()
    mount.mount()
    assert (mount.point / "file").exists()


def test_signals_that_mean_nothing_to_the_holder_do_not_end_it(mount: KvfuseMount) -> None:
    for number in OTHER_SIGNALS:
        os.kill(mount.pid, number)
    time.sleep(0.5)  # a process that such a signal ends is gone by then; nothing tells of one that lives
    assert not mount.has_ended
    assert kill_daemon(mount) < PATIENCE_S


def test_with_the_holder_all_ends_and_nobody_waits(mount: KvfuseMount) -> None:
    children = children_of(mount.pid)
    os.kill(daemon_of(mount), signal.SIGSTOP)
    errors = list[OSError]()

    def ask() -> None:
        try:
            os.statvfs(mount.point)
        except OSError as error:
            errors.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    mount.kill()
    asker.join(PATIENCE_S)
    assert len(errors) == 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the end of daemon and guard")
    mount.mount()


def test_a_mount_is_given_up_where_no_daemon_can_serve_it(mount: KvfuseMount) -> None:
    records = mount.volume / "records"
    away = Path(tempfile.mkdtemp(dir=mount.volume.parent))
    pid = daemon_of(mount)
    os.kill(pid, signal.SIGSTOP)
    records.rename(away / "records")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError):
        os.statvfs(mount.point)
    mount.wait(1)
    assert "the mount is given up" in mount.log.read_text()
    subprocess.run(["umount", "-l", mount.point], check=True)
    (away / "records").rename(records)
    mount.mount()


@pytest.mark.parametrize("program", [KVFUSE, (sys.executable, "-c", UNANSWERED)], ids=["answered", "unanswered"])
def test_an_unmount_by_command_returns_when_nothing_is_left(program: Sequence[str]) -> None:
    """So that the volume's folder can be unmounted, or the volume mounted anew."""
    for _ in range(3):
        with temporary_mount(OUTLIVE) as mount:
            assert holders.find_parent(daemon_of(mount)) == mount.pid
            holder = os.pidfd_open(mount.pid)
            subprocess.run([*program, "umount", mount.point], check=True, timeout=PATIENCE_S)
            assert select.select([holder], [], [], 0)[0]
            os.close(holder)
