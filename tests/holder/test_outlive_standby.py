"""A process that stands by and forks daemons: killed, stopped, upgraded, beside kills of daemons: real mounts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import killer
import pytest
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, stopped, temporary_mount, wait_until
from test_outlive import OUTLIVE, children_of, daemon_of, kill_daemon, settle
from test_upgrade import FAILING, SECONDS, Users, holder_says, other_python, refused, upgrade

import kvfuse
from kvfuse.cli.checks import stands_by
from kvfuse.holder.things import GUARD_SECONDS
from kvfuse.options.options import MountOptions

STANDBY = (*OUTLIVE, "standby")


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(STANDBY) as mounted:
        yield mounted


def named(mount: KvfuseMount, name: str) -> list[int]:
    """Living children of the holder that `ps` shows under this name."""
    found = []
    for pid in children_of(mount.pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def standby_of(mount: KvfuseMount) -> int:
    """The process that forked the daemon that serves."""
    (pid,) = named(mount, "kvfuse-standby")
    return pid


def guards_of(mount: KvfuseMount) -> set[int]:
    return {child.pid for child in killer.children_of(mount.pid) if child.is_guard}


def waiting_of(mount: KvfuseMount, daemon: int) -> set[int]:
    """Who stands by, whether or not it has forked yet."""
    return children_of(mount.pid) - guards_of(mount) - {daemon}


def has_standby(mount: KvfuseMount) -> bool:
    """There are a guard, a daemon and one that stands by."""
    return len(children_of(mount.pid)) == 3


def answers(mount: KvfuseMount) -> None:
    os.statvfs(mount.point)


def test_daemons_are_forks_of_one_process(mount: KvfuseMount) -> None:
    (mount.point / "file").write_bytes(b"x")
    settle(mount)
    standby, served = standby_of(mount), {daemon_of(mount)}
    for _ in range(5):
        kill_daemon(mount)
        served.add(daemon_of(mount))
        assert (mount.point / "file").read_bytes() == b"x"
    assert len(served) == 6
    assert named(mount, "kvfuse-standby") == [standby]
    assert named(mount, "kvfuse-daemon") == [daemon_of(mount)]
    assert holder_says(mount)["deaths"] == 5


def test_there_is_one_by_default() -> None:
    with temporary_mount(("outlive=true",)) as mount:
        assert stands_by(MountOptions()), "the machine that runs the tests has memory for it"
        standby = standby_of(mount)
        kill_daemon(mount)
        assert standby_of(mount) == standby


@pytest.mark.parametrize(
    ("limit", "free", "expected"), [("max", 256, True), ("max", 255, False), (512, 256, True), (511, 256, False)]
)
def test_by_default_there_is_one_where_memory_allows(
    tmp_path: Path, limit: str | int, free: int, expected: bool
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 16777216 kB\nMemAvailable: {free * 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("35 25 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{limit if limit == 'max' else int(limit) << 20}\n")
    assert stands_by(MountOptions(), tmp_path) is expected
    assert stands_by(MountOptions(standby=True), tmp_path)
    assert not stands_by(MountOptions(standby=False), tmp_path)


def test_what_forks_has_one_thread(mount: KvfuseMount) -> None:
    kill_daemon(mount)
    assert len(os.listdir(f"/proc/{standby_of(mount)}/task")) == 1


@pytest.mark.ring(3)
def test_nothing_grows(mount: KvfuseMount) -> None:
    kill_daemon(mount)
    standby = standby_of(mount)

    def descriptors() -> tuple[int, int]:
        return tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in (mount.pid, standby))

    before = descriptors()
    for _ in range(5):
        kill_daemon(mount)
    wait_until(lambda: descriptors() <= before, "descriptors of the holder, and of what stands by")


def test_one_that_is_killed_is_replaced(mount: KvfuseMount) -> None:
    daemon = daemon_of(mount)
    for _ in range(2):
        wait_until(lambda: len(waiting_of(mount, daemon)) == 1, "one that stands by")
        (standby,) = waiting_of(mount, daemon)
        os.kill(standby, signal.SIGKILL)
        wait_until(lambda standby=standby: standby not in children_of(mount.pid), "its end")
    wait_until(lambda: len(waiting_of(mount, daemon)) == 1, "another one")
    assert daemon_of(mount) == daemon
    kill_daemon(mount)
    assert holder_says(mount)["deaths"] == 1


@pytest.mark.ring(3)
def test_both_are_killed(mount: KvfuseMount) -> None:
    for _ in range(3):
        wait_until(lambda: has_standby(mount), "one that stands by")
        for pid in children_of(mount.pid) - guards_of(mount):
            os.kill(pid, signal.SIGKILL)
        answers(mount)


def test_one_that_does_not_answer_is_killed(mount: KvfuseMount) -> None:
    standby = standby_of(mount)
    with stopped(standby):
        kill_daemon(mount)
        assert not Path(f"/proc/{standby}").exists()
    wait_until(lambda: has_standby(mount), "another one")
    kill_daemon(mount)


def test_with_the_holder_all_ends(mount: KvfuseMount) -> None:
    kill_daemon(mount)
    children = children_of(mount.pid)
    mount.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the end of all")
    mount.mount()


def test_an_unmount_ends_all(mount: KvfuseMount) -> None:
    kill_daemon(mount)
    children = children_of(mount.pid)
    mount.unmount()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    mount.mount()


def test_a_start_in_the_background_ends_its_output(tmp_path: Path) -> None:
    """Whoever waits for the end of what the command says does not wait for the process that stands by."""
    point, volume = tmp_path / "mnt", tmp_path / "volume"
    point.mkdir()
    words = [word for option in STANDBY for word in ("-o", option)]
    command = [*KVFUSE, "mount", str(volume), str(point), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    try:
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([*KVFUSE, "umount", point], check=True, timeout=PATIENCE_S)


def test_a_failed_start_leaves_nobody(tmp_path: Path) -> None:
    point, volume = tmp_path / "mnt", tmp_path / "volume"
    point.mkdir()
    volume.mkdir()
    (volume / "volume.json").write_text("not one")
    (volume / "records").write_text("not a folder")
    words = [word for option in STANDBY for word in ("-o", option)]
    command = [*KVFUSE, "mount", str(volume), str(point), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("kvfuse: ")


def test_a_guard_that_is_killed_is_replaced(mount: KvfuseMount) -> None:
    (guard,) = guards_of(mount)
    wait_until(lambda: age_of(guard) > 2 * GUARD_SECONDS, "the guard to have lived a while")
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: bool(guards_of(mount) - {guard}), "another guard")
    with stopped(daemon_of(mount)):
        mount.kill()


def age_of(pid: int) -> float:
    """Seconds."""
    begun = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")


def test_upgrades(mount: KvfuseMount, tmp_path: Path) -> None:
    version = mount.point / ".kvfuse" / "version"
    former = standby_of(mount)
    with other_python(tmp_path) as python:
        with Users(mount.point):
            upgrade(mount, "--python", python)
            assert version.read_text() == "99.0\n"
        assert standby_of(mount) != former
        wait_until(lambda: has_standby(mount), "the end of the former version")
        kill_daemon(mount)
        assert version.read_text() == "99.0\n"
        upgrade(mount)
        assert version.read_text() == f"{kvfuse.__version__}\n"
        kill_daemon(mount)
        assert version.read_text() == f"{kvfuse.__version__}\n"


@pytest.mark.ring(3)
@pytest.mark.parametrize("how", FAILING)
def test_upgrades_that_fail(mount: KvfuseMount, tmp_path: Path, how: str) -> None:
    lines, message = FAILING[how]
    former = standby_of(mount)
    with other_python(tmp_path, lines) as python:
        said = refused(mount, "--python", python, "--timeout", SECONDS.get(how, "60"))
        assert message in said
        assert (mount.point / ".kvfuse" / "version").read_text() == f"{kvfuse.__version__}\n"
        wait_until(lambda: has_standby(mount), "the end of the new version")
        assert standby_of(mount) == former
        kill_daemon(mount)
    upgrade(mount)


def test_status_and_top_tell_of_it(mount: KvfuseMount) -> None:
    def said(command: str, *words: str) -> str:
        done = subprocess.run([*KVFUSE, command, mount.point, *words], capture_output=True, text=True, check=True)
        return done.stdout

    line = f"outlives its daemon, held by process {mount.pid}, one stands by"
    wait_until(lambda: line in said("status"), "one that stands by")
    assert "daemons died" not in said("status")
    kill_daemon(mount)
    kill_daemon(mount)
    wait_until(lambda: holder_says(mount)["serves"] is True, "the next daemon to be ready")
    for command, *words in (("status",), ("top", "--once")):
        shown = " ".join(said(command, *words).split())  # lines are as wide as the page
        assert "2 daemons died (2 killed, the last with SIGKILL), 0 upgrades" in shown
        assert re.search(r"at 20\S+ \S+ calls waited [\d.]+ s", shown)
    facts = holder_says(mount)
    assert 0 < facts["last_stall"] <= facts["longest_stall"]
    assert facts["waits"] is None
    upgrade(mount)
    assert holder_says(mount)["upgrades"] == 1


@pytest.mark.ring(3)
def test_an_upgrade_brings_it_and_takes_it_away(tmp_path: Path) -> None:
    conf = tmp_path / "mount.conf"
    text = f'volume.path = "{tmp_path / "volume"}"\nvolume.capacity = "1GiB"\nmount.standby = '
    conf.write_text(text + "false\n")
    with temporary_mount(("outlive=true",), source=conf) as mount:
        kill_daemon(mount)
        assert not named(mount, "kvfuse-standby")
        conf.write_text(text + "true\n")
        kill_daemon(mount)  # what mount.conf says counts from an upgrade on
        assert not named(mount, "kvfuse-standby")
        upgrade(mount)
        standby = standby_of(mount)
        kill_daemon(mount)
        assert standby_of(mount) == standby
        conf.write_text(text + "false\n")
        upgrade(mount)
        wait_until(lambda: len(children_of(mount.pid)) == 2, "the end of the one that stood by")
        kill_daemon(mount)
        assert len(children_of(mount.pid)) == 2
