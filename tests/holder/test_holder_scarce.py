"""A holder for which no descriptor, process or thread is free: it goes on, and so does its mount."""

from __future__ import annotations

import _thread
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mounting import FOREGROUND, temporary_mount, wait_until
from test_outlive import daemon_of, kill_daemon
from test_outlive_standby import STANDBY, has_standby, standby_of
from test_upgrade import holder_says

from kvfuse.holder.child import KEEP, Child
from kvfuse.holder.main import Holder
from kvfuse.holder.status_socket import LEAVING, StatusCaller, Upgrade
from kvfuse.holder.things import Things
from kvfuse.usrbio.client import BlockStore

SOFT, HARD = 128, 4096
CLIENTS = 80
LOW = 6
"""descriptors that suffice for poll(2), and not for one more daemon"""


@contextmanager
def scarce_descriptors(pid: int, limit: int | None = None) -> Iterator[None]:
    """The process can open nothing more. ``limit``: also where it closes what has this number, or a greater one."""
    former = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = min(set(range(len(opened) + 1)) - opened)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit or free, former[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, former)


def test_clients_of_rings_do_not_fill_the_holder() -> None:
    """The daemon has descriptors up to its hard limit; the holder has those, too."""
    with ExitStack() as stack:
        limited = ("prlimit", f"--nofile={SOFT}:{HARD}", *FOREGROUND)
        mount = stack.enter_context(temporary_mount(STANDBY, limited))
        (mount.point / "blocks").mkdir()
        stores = [stack.enter_context(BlockStore(mount.point, "blocks")) for _ in range(CLIENTS)]
        assert len(os.listdir(f"/proc/{mount.pid}/fd")) > SOFT
        kill_daemon(mount)
        for number, store in enumerate(stores):
            store.put(b"block %d" % number, b"x" * 4096)
        assert holder_says(mount)["deaths"] == 1


def test_a_living_daemon_is_not_taken_for_dead() -> None:
    with temporary_mount(STANDBY) as mount:
        daemon = daemon_of(mount)
        with scarce_descriptors(mount.pid):
            for _ in range(10):
                time.sleep(0.1)  # the holder looks meanwhile, and is to do nothing
                os.statvfs(mount.point)
        assert daemon_of(mount) == daemon


def test_daemons_come_once_they_can_be_started() -> None:
    with temporary_mount(STANDBY) as mount:
        (mount.point / "file").write_bytes(b"x")
        with scarce_descriptors(mount.pid, LOW):
            for pid in standby_of(mount), daemon_of(mount):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)  # it tries, and fails, for so long
        assert (mount.point / "file").read_bytes() == b"x"
        wait_until(lambda: has_standby(mount), "one that stands by")


def test_what_is_dropped_is_closed_once_there_can_be_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    things = Things([], "/nowhere")
    kept, ours = os.pipe()
    things.keep("thing", b"", [kept])
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", no_thread)
        things.drop("thing")
    things.drop("another")
    wait_until(lambda: not Path(f"/proc/self/fd/{kept}").exists(), "the close")
    os.close(ours)


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def test_half_a_thing_is_not_kept() -> None:
    child, theirs = pair()
    here = os.open("/", os.O_PATH)
    socket.send_fds(theirs, [bytes([KEEP]) + b"thing\0content"], [here] * 8)
    with scarce_descriptors(os.getpid()):
        message = child.receive()
    assert message is not None
    kind, name, _, descriptors = message
    assert (chr(kind), name, descriptors) == ("D", "thing", [])
    os.close(here)
    close(child, theirs)


@pytest.mark.parametrize("hello", [b"", b"[]", b"null", b"\xff", b'{"version": "1"}'])
def test_what_is_no_daemon_is_killed(hello: bytes) -> None:
    child, theirs = pair(started())
    holder = Holder({"command": [], "guard": [], "point": "/nowhere"})
    theirs.send(b"H\0" + hello)
    assert holder.read_message(child)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL
    close(child, theirs)


def started() -> int:
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")


def pair(pid: int = 0) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = pid or os.getpid()
    return Child(ours, pid, os.pidfd_open(pid)), theirs


def close(child: Child, theirs: socket.socket) -> None:
    theirs.close()
    child.close()


def test_a_daemon_that_just_died_is_asked_to_leave() -> None:
    """An upgrade begins in the moment between the end of its socket and that of its pid."""
    serving, gone = pair()
    gone.close()
    (next, next_end), (back, back_end) = pair(), pair()
    next.has_said_hello = back.has_said_hello = True
    holder = Holder({"command": [], "guard": [], "point": "/nowhere"})
    holder.serving = serving
    holder.upgrade = Upgrade(StatusCaller.__new__(StatusCaller), next, back, [], 5.0)
    holder.advance_upgrade()
    assert holder.upgrade.phase == LEAVING
    for child, end in ((next, next_end), (back, back_end), (serving, gone)):
        close(child, end)
