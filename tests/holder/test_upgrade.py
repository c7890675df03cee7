"""A daemon that makes way for another one, of another version perhaps, while files are in use: real mounts."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, temporary_mount, wait_until
from test_outlive import OUTLIVE, daemon_of
from upgrading import holder_says, other_python, processes_of, refused, run_upgrade, upgrade

import kvfuse


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(OUTLIVE) as mounted:
        yield mounted


class Users:
    """Read, write, make and remove files until they are stopped; every byte and every count is checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: list[BaseException] = []
        self.rounds = 0
        self.longest = 0.0
        """seconds, of one call"""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._guarded, args=(number,)) for number in range(3)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.rounds > 5 or bool(self.errors), "users to begin")
        return self

    def __exit__(self, *_: object) -> None:
        seen = self.rounds
        wait_until(lambda: self.rounds > seen + 5 or bool(self.errors), "users to go on")
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors

    def _guarded(self, number: int) -> None:
        try:
            self._work(number)
        except BaseException as error:
            traceback.print_exc()
            self.errors.append(error)

    def _work(self, number: int) -> None:
        folder = self.folder / f"user-{number}"
        folder.mkdir()
        long = os.open(folder / "long", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        gone = os.open(folder / "gone", os.O_RDWR | os.O_CREAT)
        os.write(gone, b"gone" * 10_000)
        os.fsync(gone)
        os.unlink(folder / "gone")
        written, digest = 0, hashlib.sha256()
        while not self._stop.is_set():
            began = time.monotonic()
            data = os.urandom(10_000)
            assert os.write(long, data) == len(data)
            digest.update(data)
            written += len(data)
            path, other = folder / f"file-{self.rounds}", folder / f"other-{self.rounds}"
            path.write_bytes(data)
            path.rename(other)
            assert other.read_bytes() == data
            assert os.pread(gone, 50_000, 0) == b"gone" * 10_000
            assert os.fstat(long).st_size == written
            other.unlink()
            assert sorted(os.listdir(folder)) == ["long"]
            self.rounds += 1
            self.longest = max(self.longest, time.monotonic() - began)
        assert hashlib.sha256(os.pread(long, written, 0)).digest() == digest.digest()
        os.close(long)
        os.close(gone)


@pytest.mark.ring(3)
def test_again_and_again_under_load(mount: KvfuseMount) -> None:
    stalls = []
    with Users(mount.point) as users:
        for _ in range(5):
            former = daemon_of(mount)
            stalls.append(upgrade(mount))
            assert daemon_of(mount) != former
    print("calls waited", stalls, "longest round", users.longest)
    said = holder_says(mount)
    assert (said["upgrades"], said["deaths"]) == (5, 0)


@pytest.mark.ring(3)
def test_nothing_grows(mount: KvfuseMount) -> None:
    upgrade(mount)
    descriptors, processes = len(os.listdir(f"/proc/{mount.pid}/fd")), processes_of(mount)
    for _ in range(3):
        upgrade(mount)
    wait_until(lambda: len(os.listdir(f"/proc/{mount.pid}/fd")) <= descriptors, "descriptors of the holder")
    wait_until(lambda: processes_of(mount) == processes, "daemons that do not serve to end")


def test_another_version_serves_from_then_on(mount: KvfuseMount, tmp_path: Path) -> None:
    version = mount.point / ".kvfuse" / "version"
    with other_python(tmp_path) as python:
        with Users(mount.point):
            upgrade(mount, "--python", python)
            assert version.read_text() == "99.0\n"
        os.kill(daemon_of(mount), signal.SIGKILL)
        assert version.read_text() == "99.0\n"
        upgrade(mount)
        assert version.read_text() == f"{kvfuse.__version__}\n"


FAILING = {
    "import": (["import kvfuse_is_not_here"], "kvfuse_is_not_here"),
    "hello": (["import sys, time", "print('no hurry', file=sys.stderr, flush=True)", "time.sleep(600)"], "no hurry"),
    "start": (
        ["import os", "import kvfuse.holder.daemon_side as h", "h.Holding._restore_stderr = lambda self: os._exit(7)"],
        "exit status 7",
    ),
    "ready": (
        [
            "import time",
            "import kvfuse.holder.daemon_side as h",
            "h.Holding.report_ready = lambda self: time.sleep(600)",
        ],
        "not ready",
    ),
}
SECONDS = {"hello": "10", "ready": "20"}
"""that an upgrade waits for a daemon which fails by being late: it has to begin in them, at least"""


@pytest.mark.parametrize("how", FAILING)
def test_one_that_fails_is_not_noticed(mount: KvfuseMount, tmp_path: Path, how: str) -> None:
    lines, message = FAILING[how]
    # One that served and is killed has lost what was not stored yet.
    with other_python(tmp_path, lines) as python, nullcontext() if how == "ready" else Users(mount.point):
        former = daemon_of(mount)
        said = refused(mount, "--python", python, "--timeout", SECONDS.get(how, "60"))
        assert message in said
        assert (daemon_of(mount) == former) == (how in ("import", "hello"))
    assert (mount.point / ".kvfuse" / "version").read_text() == f"{kvfuse.__version__}\n"
    assert holder_says(mount)["upgrades"] == 0
    wait_until(lambda: processes_of(mount) == 2, "daemons that do not serve to end")
    upgrade(mount)


@pytest.mark.ring(3)
@pytest.mark.parametrize("whom", ["old", "new", "both"])
def test_a_kill_in_between(mount: KvfuseMount, tmp_path: Path, whom: str) -> None:
    """Whoever serves is killed as soon as the new daemon is told to begin."""
    told = tmp_path / "told"
    lines = [
        "import os, signal",
        "import kvfuse.holder.daemon_side as h",
        f"told = {str(told)!r}",
        "h.Holding._restore_stderr = lambda self: (open(told, 'w').close(), os.kill(os.getpid(), signal.SIGKILL))",
    ]
    with other_python(tmp_path, lines if whom in ("new", "both") else ()) as python:
        former = daemon_of(mount)
        asking = threading.Thread(target=run_upgrade, args=(mount, "--python", python, "--timeout", "30"))
        asking.start()
        if whom == "old":
            os.kill(former, signal.SIGKILL)
        elif whom == "both":
            wait_until(told.exists, "the new daemon to begin")
            os.kill(daemon_of(mount), signal.SIGKILL)
        asking.join(4 * PATIENCE_S)
        assert daemon_of(mount) != former
    upgrade(mount)


def test_sigterm_in_between(mount: KvfuseMount) -> None:
    (mount.point / "file").write_bytes(b"x")
    asking = threading.Thread(target=run_upgrade, args=(mount,))
    asking.start()
    wait_until(lambda: processes_of(mount) > 2, "the new daemon")
    mount.terminate()
    asking.join(PATIENCE_S)
    mount.mount()
    assert (mount.point / "file").read_bytes() == b"x"


def test_mount_conf_is_read_again_at_an_upgrade_alone(tmp_path: Path) -> None:
    conf = tmp_path / "mount.conf"
    conf.write_text(f'volume.path = "{tmp_path / "volume"}"\nvolume.capacity = "1GiB"\nmount.entry_timeout = 11\n')
    with temporary_mount(OUTLIVE, source=conf) as mount:

        def entry_timeout() -> object:
            return json.loads((mount.point / ".kvfuse" / "config").read_text())["mount"]["entry_timeout"]

        good = conf.read_text()
        for text in ("no TOML", good.replace("11", "22"), None):
            conf.unlink() if text is None else conf.write_text(text)
            os.kill(daemon_of(mount), signal.SIGKILL)
            assert entry_timeout() == 11
            wait_until(lambda: holder_says(mount)["serves"] is True, "the next daemon to be ready")
            if text != good.replace("11", "22"):
                assert "mount.conf" in refused(mount)
        conf.write_text(good.replace("11", "22"))
        upgrade(mount)
        assert entry_timeout() == 22
        conf.write_text(good)


def test_who_may_ask_and_what_is_said(mount: KvfuseMount, tmp_path: Path) -> None:
    assert "is not a mount point" in refused(mount, "--python", sys.executable) if not mount.is_mounted else True
    command = [*KVFUSE, "upgrade", str(tmp_path)]
    assert "is not a mount point" in subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "there is no program" in refused(mount, "--python", "/nowhere/python")
    with temporary_mount() as plain:
        assert "with outlive=false" in refused(plain)
    major, minor = os.major(mount.point.stat().st_dev), os.minor(mount.point.stat().st_dev)
    socket = Path(f"/run/kvfuse/holder-{major}-{minor}.sock")
    assert socket.stat().st_mode & 0o777 == 0o600
    mount.unmount()
    assert not socket.exists()
    mount.mount()
