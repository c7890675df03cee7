"""A daemon that is killed while it tells the kernel something: the guard lets go of all who wait for it.

In each test a client waits for an answer that never comes, and has a folder locked; a thread of the daemon wants the
kernel to forget a name of that folder, and waits for the lock. Without the guard the killed daemon then never ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, mount_rows, shared_conf, stopped, temporary_mount, wait_until
from places import LABS
from stuck_daemon import NAME, STUCK_DAEMON

from kvfuse import mounttable
from kvfuse.holder import guarding
from kvfuse.holder.guard import is_dying
from kvfuse.holder.guarding import Guarding, open_switch
from kvfuse.usrbio.client import BlockStore, Disconnected
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB")
LET_GO_S = 3.0
"""within which every caller gets an error once the daemon was killed"""
FOREVER_S = 2.0
"""after which a caller is taken to wait for ever"""


MUTE_DAEMON = """
import trio
from door_daemon import main
from kvfuse.fs.ops import KvfuseOperations

async def ask(*arguments):
    print("asked", flush=True)
    await trio.sleep_forever()

KvfuseOperations.getattr = ask
main([])
"""
"""A daemon that does not even answer itself: ``VOLUME POINT``."""


class Caller:
    """A call in a thread of its own, that may wait for the daemon."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except (OSError, Disconnected) as error:
            self.error = error

    def has_ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def guards(mount: KvfuseMount) -> list[int]:
    """The guards of a daemon."""
    children = [task.read_text().split() for task in Path(f"/proc/{mount.pid}/task").glob("*/children")]
    pids = [int(child) for some in children for child in some]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "kvfuse-guard\n"]


def guard(mount: KvfuseMount) -> int:
    """The one guard, once it is at work."""
    wait_until(lambda: bool(guards(mount)), "the guard")
    (pid,) = guards(mount)
    return pid


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def unkillable(mount: KvfuseMount) -> set[tuple[str, ...]]:
    """The threads of the daemon that wait in the kernel for a lock or a disk, with how often each was put to sleep."""
    found = set()
    for task in Path(f"/proc/{mount.pid}/task").iterdir():
        with suppress(OSError):
            status = (task / "status").read_text()
            if "\nState:\tD" in status:
                found.add((task.name, *(line for line in status.splitlines() if "ctxt_switches" in line)))
    return found


def wait_for_a_lock(mount: KvfuseMount) -> None:
    """Until one of them stays so: a disk would have let it go."""
    seen: Counter[tuple[str, ...]] = Counter()

    def stays() -> bool:
        seen.update(unkillable(mount))
        return max(seen.values(), default=0) > 20

    wait_until(stays, "the thread that tells the kernel")


@contextmanager
def cleaned_up(mount: KvfuseMount) -> Iterator[None]:
    """However the body ends, the connection is aborted, and with it all that waits."""
    with open(open_switch(os.stat(mount.point).st_dev), "w") as opened:
        try:
            yield
        finally:
            opened.write("1")


def ask_for_stuck(mount: KvfuseMount, folder: Path) -> Caller:
    """Somebody who has the folder locked from now on."""
    caller = Caller(lambda: os.stat(folder / NAME))
    wait_until(lambda: f"asked for {NAME}" in mount.log.read_text(), "the lookup")
    return caller


def check_is_dead(mount: KvfuseMount, end: signal.Signals = signal.SIGKILL) -> None:
    """It answers with an error, and can be mounted over as it is."""
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.statvfs(mount.point)
    mount.wait(-end)
    words = [word for word in mount.words for word in ("-o", word)]
    subprocess.run([*KVFUSE, "mount", str(mount.source), str(mount.point), *words], check=True, timeout=PATIENCE_S)
    os.listdir(mount.point)
    subprocess.run([*KVFUSE, "umount", str(mount.point)], check=True, timeout=PATIENCE_S)
    assert not mount.is_mounted


def put_where_somebody_waits(mount: KvfuseMount) -> list[Caller]:
    """The rings make a file's name that the kernel remembers as absent, in a folder that somebody has locked."""
    folder = mount.point / "blocks"
    folder.mkdir()
    with BlockStore(mount.point, "blocks") as store:
        store.put(b"one", b"1")
    assert not (folder / "two").exists()

    def put() -> None:
        with BlockStore(mount.point, "blocks", deadline=PATIENCE_S) as store:
            store.put(b"two", b"2")

    callers = [ask_for_stuck(mount, folder), Caller(put)]
    wait_for_a_lock(mount)
    return [*callers, Caller(lambda: (folder / "three").touch()), Caller(lambda: os.listdir(folder))]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGABRT])
def test_callers_are_let_go_when_the_daemon_is_killed(end: signal.Signals) -> None:
    """Or crashed: its first thread then waits, too, for the others to stop before a core file is written."""
    with temporary_mount(WORDS, STUCK_DAEMON) as mount, cleaned_up(mount):
        pid = guard(mount)
        callers = put_where_somebody_waits(mount)
        killed = time.monotonic()
        os.kill(mount.pid, end)
        for caller in callers:
            assert caller.has_ended(LET_GO_S)
            assert caller.error
        print(f"let go after {time.monotonic() - killed:.3f} s")
        wait_until(lambda: is_gone(pid), "the end of the guard")
        check_is_dead(mount, end)


def test_a_daemon_that_waits_for_itself_from_the_start_can_be_killed(tmp_path: Path) -> None:
    """Its own first request is one that the kernel lets nobody leave."""
    point = tmp_path / "mnt"
    point.mkdir()
    command = [sys.executable, "-c", MUTE_DAEMON, tmp_path / "volume", point]
    environment = {**os.environ, "PYTHONPATH": str(LABS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as daemon, ExitStack() as end:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "asked\n"
        mounted = mounttable.top_mount(point)
        assert mounted is not None
        switch = end.enter_context(open(open_switch(mounted.st_dev), "w"))
        end.callback(subprocess.run, ["umount", "-l", point], check=True)
        end.callback(switch.write, "1")
        daemon.kill()
        assert daemon.wait(PATIENCE_S) == -signal.SIGKILL


def test_without_the_guard_they_would_wait_for_ever() -> None:
    """So the test above can fail."""
    with temporary_mount(WORDS, STUCK_DAEMON) as mount:
        with cleaned_up(mount):
            os.kill(guard(mount), signal.SIGKILL)
            callers = put_where_somebody_waits(mount)
            os.kill(mount.pid, signal.SIGKILL)
            assert not callers[0].has_ended(FOREVER_S)
            assert not callers[-1].has_ended(0)
        assert all(caller.has_ended(LET_GO_S) for caller in callers)
        check_is_dead(mount)


def test_callers_are_let_go_when_the_daemon_is_told_to_end() -> None:
    """It gives them up after a while, and must not wait for them itself."""
    with temporary_mount(WORDS, STUCK_DAEMON) as mount, cleaned_up(mount):
        pid = guard(mount)
        callers = put_where_somebody_waits(mount)
        os.kill(pid, signal.SIGTERM)  # as a service manager does; a daemon may take long to end
        mount.terminate()
        for caller in callers:
            assert caller.has_ended(LET_GO_S)
            assert caller.error
        assert is_gone(pid)


def test_callers_of_a_stopped_daemon_are_let_go_by_hand() -> None:
    """From inside nothing can be done; from outside ``umount -f`` does."""
    with temporary_mount(WORDS) as mount, cleaned_up(mount):
        with stopped(mount.pid):
            caller = Caller((mount.point / "name").touch)
            assert not caller.has_ended(FOREVER_S)
            subprocess.run(["umount", "-f", str(mount.point)], check=False, timeout=PATIENCE_S, capture_output=True)
            assert caller.has_ended(LET_GO_S)
            assert caller.error
        mount.wait(0)
        subprocess.run(["umount", "-lq", str(mount.point)], check=False)


def test_the_guard_holds_nothing_and_ends_with_the_daemon() -> None:
    with temporary_mount(WORDS) as mount:
        pid = guard(mount)
        switch = f"/{os.minor(os.stat(mount.point).st_dev)}/abort"
        open_files = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
        assert open_files <= {os.devnull, switch, f"{guarding.CONNECTIONS}{switch}"}
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) == os.getpgid(pid) == pid
        assert str(mount.point).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        mount.unmount()
        assert is_gone(pid)
        mount.mount()
        pid = guard(mount)
        mount.terminate()
        assert is_gone(pid)


def test_another_mount_with_the_number_of_one_that_is_gone_is_left_alone() -> None:
    """A guard's switch is that of one connection, whatever its number stands for later."""
    with temporary_mount(WORDS) as mount, ExitStack() as opened:
        switches: dict[int, TextIO] = {}
        while (number := os.minor(os.stat(mount.point).st_dev)) not in switches:  # others mount, too
            assert len(switches) < 10
            switches[number] = opened.enter_context(open(open_switch(os.stat(mount.point).st_dev), "w"))
            mount.unmount()
            mount.mount()
        switches[number].write("1")
        switches[number].flush()
        os.statvfs(mount.point)


def control_file_systems() -> list[str]:
    """The mounts of FUSE's control file system."""
    return [line for line in mount_rows() if " - fusectl " in line]


@pytest.mark.parametrize("is_mounted", [True, False], ids=["mounted", "not mounted"])
def test_the_switch_is_found_wherever_the_control_file_system_is(
    is_mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "connections"
    monkeypatch.setattr(guarding, "CONNECTIONS", folder)
    before = control_file_systems()
    with temporary_mount(WORDS) as mount, ExitStack() as stack:
        if is_mounted:
            folder.mkdir()
            subprocess.run(["mount", "-t", "fusectl", "none", folder], check=True)
            stack.callback(subprocess.run, ["umount", folder], check=True)
        descriptors = os.listdir("/proc/self/fd")
        switch = open_switch(os.stat(mount.point).st_dev)
        assert len(os.listdir("/proc/self/fd")) == len(descriptors) + 1
        os.write(switch, b"1")
        os.close(switch)
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.statvfs(mount.point)
        subprocess.run(["umount", mount.point], check=True)
        mount.wait()
    assert control_file_systems() == before


def test_a_mount_without_a_switch_has_no_guard(caplog: pytest.LogCaptureFixture) -> None:
    with Guarding(Path("/mnt/point")) as without:
        without.start_guard(os.makedev(0, 999_999))
        assert not without.abort_connection()
    (record,) = caplog.records
    assert "/mnt/point has no guard" in record.message
    assert "999999/abort" in record.message


def test_a_dying_process_is_told_from_a_living_one() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not is_dying(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dying(process.pid)
    assert not is_dying(process.pid)  # nothing is known of it


@pytest.fixture
def two_mounts(etcd: EtcdServers) -> Iterator[tuple[KvfuseMount, KvfuseMount]]:
    """Of one volume; the daemon of the second is a `stuck_daemon`."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-guard-") as base:
        conf = shared_conf(Path(base), etcd)
        (Path(base) / "two").mkdir()
        with temporary_mount(source=conf) as one:
            two = KvfuseMount(Path(base) / "two", command=STUCK_DAEMON, source=conf)
            try:
                two.mount()
                yield one, two
            finally:
                two.remove()


def make_relaxed(one: KvfuseMount, two: KvfuseMount, name: str) -> None:
    """A folder of which the kernel keeps names: on both mounts."""
    (one.point / name).mkdir()
    os.setxattr(one.point / name, "user.kvfuse.publish", b"relaxed")
    wait_until(lambda: "user.kvfuse.publish" in os.listxattr(two.point / name), "the setting on the other mount")


def test_callers_are_let_go_where_hosts_share_the_volume(two_mounts: tuple[KvfuseMount, KvfuseMount]) -> None:
    """The news is another host's, of a name that the kernel keeps."""
    one, two = two_mounts
    folder = two.point / "folder"
    make_relaxed(one, two, "folder")
    (one.point / "folder" / "name").touch()
    wait_until(lambda: (folder / "name").exists(), "the name on the other mount")
    with cleaned_up(two):
        pid = guard(two)
        callers = [ask_for_stuck(two, folder)]
        (one.point / "folder" / "name").unlink()
        wait_for_a_lock(two)
        callers += [Caller(lambda: os.listdir(folder)), Caller(lambda: (folder / "other").touch())]
        os.kill(two.pid, signal.SIGKILL)
        for caller in callers:
            assert caller.has_ended(LET_GO_S)
            assert caller.error
        wait_until(lambda: is_gone(pid), "the end of the guard")
        check_is_dead(two)
    assert os.listdir(one.point / "folder") == []


def test_the_kernel_is_told_of_no_names_where_it_keeps_none(two_mounts: tuple[KvfuseMount, KvfuseMount]) -> None:
    """In strict folders: so nobody who has one locked can keep the news waiting."""
    one, two = two_mounts
    (one.point / "strict").mkdir()
    make_relaxed(one, two, "relaxed")
    for name in ("strict", "relaxed"):
        (one.point / name / "name").touch()
        wait_until((two.point / name / "name").exists, "the name on the other mount")
    (one.point / "strict" / "other").touch()
    with cleaned_up(two):
        ask_for_stuck(two, two.point / "strict")
        (one.point / "strict" / "other").rename(one.point / "strict" / "name")
        (one.point / "relaxed" / "name").unlink()
        wait_until(lambda: not (two.point / "relaxed" / "name").exists(), "the removal, which comes after the other")
        wait_until(lambda: not unkillable(two), "the end of what the disk has to do")
        two.kill()
