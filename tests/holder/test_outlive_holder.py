"""The holder is killed at random moments, alone and with daemons, at rest and during upgrades: real mounts.

Then the mount is over: whoever waits gets an error, all processes end, and the volume is clean.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from killer import children_of
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, temporary_mount, wait_until
from scale import scaled
from test_outlive import OUTLIVE, daemon_of

from kvfuse.holder import status_socket

pytestmark = pytest.mark.ring(3)  # one kill of a holder is in test_outlive.py

WORDS = (*OUTLIVE, "publish=strict")
ROUNDS = 2
OVER = {errno.ENOTCONN, errno.ECONNABORTED}
LOST = {errno.EIO}
"""what a writer is told as well, where its daemon was killed before the holder"""
UPGRADE_SECONDS = 4.0
"""within which a kill comes, of about as many that an upgrade takes"""


class Callers:
    """Threads that ask a mount again and again until they get an error."""

    def __init__(self, mount: KvfuseMount) -> None:
        self._point = mount.point
        self.errors: dict[str, int] = {}
        self.calls = 0
        self._file = os.open(mount.point / "file", os.O_RDWR | os.O_CREAT)
        asks = {"stat": self._stat, "look": self._look_up, "write": self._write, "make": self._make}
        self._threads = [threading.Thread(target=self._run, args=item) for item in asks.items()]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.calls > len(asks) or bool(self.errors), "the first answers")

    def _run(self, name: str, ask: Callable[[int], None]) -> None:
        try:
            while True:
                ask(self.calls)
                self.calls += 1
        except OSError as error:
            self.errors[name] = error.errno

    def _stat(self, _: int) -> None:
        os.statvfs(self._point)

    def _look_up(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.stat(self._point / f"absent-{number}")

    def _write(self, number: int) -> None:
        os.pwrite(self._file, b"x" * 5000, 5000 * (number % 100))
        os.fsync(self._file)

    def _make(self, number: int) -> None:
        path = self._point / f"made-{number}"
        path.write_bytes(b"y")
        path.rename(self._point / "made")

    def end(self) -> None:
        """All of them got an error, and the right one."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call does not end"
        with suppress(OSError):
            os.close(self._file)
        wrong = {name: errno.errorcode[number] for name, number in self.errors.items() if number not in OVER | LOST}
        assert not wrong


def guards(pid: int) -> set[int]:
    return {child.pid for child in children_of(pid) if child.is_guard}


def strike(mount: KvfuseMount, whom: str, rng: random.Random) -> None:
    """Kill the holder, and others just before or after it."""
    others = {child.pid for child in children_of(mount.pid)} - guards(mount.pid)
    serving = {daemon_of(mount)} if whom == "daemon" else set()
    victims = [mount.pid, *{"holder": set(), "daemon": serving, "all": others}[whom]]
    rng.shuffle(victims)
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_over(mount: KvfuseMount, processes: set[int]) -> None:
    """No process is left, and the mount can be taken away and made anew."""
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "the end of all processes")
    mount.wait(-signal.SIGKILL)
    done = subprocess.run([*KVFUSE, "umount", mount.point], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert not mount.is_mounted
    mount.fsck()
    mount.mount()


@pytest.mark.parametrize("whom", ["holder", "daemon", "all"])
@pytest.mark.parametrize("words", [(), ("standby",)], ids=["", "standby"])
def test_at_rest(words: tuple[str, ...], whom: str, seed: int) -> None:
    rng = random.Random(f"{seed} {words} {whom}")
    with temporary_mount((*WORDS, *words)) as mount:
        for _ in range(scaled(ROUNDS)):
            callers = Callers(mount)
            processes = {child.pid for child in children_of(mount.pid)}
            strike(mount, whom, rng)
            callers.end()
            is_over(mount, processes)


@pytest.mark.parametrize("words", [(), ("standby",)], ids=["", "standby"])
def test_while_the_next_daemon_begins(words: tuple[str, ...], seed: int) -> None:
    rng = random.Random(f"{seed} {words}")
    with temporary_mount((*WORDS, *words)) as mount:
        for _ in range(scaled(ROUNDS)):
            callers = Callers(mount)
            os.kill(daemon_of(mount), signal.SIGKILL)
            time.sleep(rng.uniform(0.0, 0.5))  # the moment is what is drawn: nothing is waited for
            processes = {child.pid for child in children_of(mount.pid)}
            os.kill(mount.pid, signal.SIGKILL)
            callers.end()
            is_over(mount, processes)


@pytest.mark.parametrize("whom", ["holder", "all"])
@pytest.mark.parametrize("words", [(), ("standby",)], ids=["", "standby"])
def test_during_upgrades(words: tuple[str, ...], whom: str, seed: int) -> None:
    rng = random.Random(f"{seed} {words} {whom}")
    with temporary_mount((*WORDS, *words)) as mount:
        for _ in range(scaled(ROUNDS)):
            callers = Callers(mount)
            command = [*KVFUSE, "upgrade", str(mount.point)]
            upgrade = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            before = len(children_of(mount.pid))
            wait_until(lambda: len(children_of(mount.pid)) > before or upgrade.poll() is not None, "the upgrade")  # noqa: B023
            time.sleep(rng.uniform(0.0, UPGRADE_SECONDS))  # as above
            processes = {child.pid for child in children_of(mount.pid)}
            strike(mount, whom, rng)
            callers.end()
            said, _ = upgrade.communicate(timeout=PATIENCE_S)
            print(said.strip())
            assert "holder" in said or "->" in said
            is_over(mount, processes)


@pytest.mark.parametrize("words", [(), ("standby",)], ids=["", "standby"])
def test_daemons_killed_during_upgrades(words: tuple[str, ...], seed: int) -> None:
    """New ones and old ones, the guard aside: the mount goes on."""
    rng = random.Random(f"{seed} {words}")
    with temporary_mount((*WORDS, *words)) as mount:
        for number in range(scaled(2 * ROUNDS)):
            command = [*KVFUSE, "upgrade", str(mount.point), "--timeout", "30"]
            before = len(children_of(mount.pid))
            upgrade = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            wait_until(lambda: len(children_of(mount.pid)) > before or upgrade.poll() is not None, "the upgrade")  # noqa: B023
            for _ in range(rng.randrange(1, 3)):
                time.sleep(rng.uniform(0.0, UPGRADE_SECONDS))  # as above
                daemons = [child.pid for child in children_of(mount.pid) if not child.is_guard]
                for pid in rng.sample(daemons, rng.randrange(1, len(daemons) + 1) if daemons else 0):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            (mount.point / f"file-{number}").write_bytes(b"x")
            said, _ = upgrade.communicate(timeout=4 * PATIENCE_S)
            print(said.strip())
        expected = 3 if words else 2
        wait_until(lambda: len(children_of(mount.pid)) == expected, "daemons that do not serve to end")
        assert len(list(mount.point.glob("file-*"))) == scaled(2 * ROUNDS)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        stream.connect(os.fspath(path))


def test_sockets_of_dead_holders_are_removed() -> None:
    with temporary_mount(OUTLIVE) as mount:
        device = mount.point.stat().st_dev
        path = Path(status_socket.make_path("/run/kvfuse", f"{os.major(device)}:{os.minor(device)}"))
        mount.kill()
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):  # a mount of another test removes it
            connect(path)
        with temporary_mount(OUTLIVE) as other:  # which may have the same number, or a mount of another test
            device = other.point.stat().st_dev
            theirs = Path(status_socket.make_path("/run/kvfuse", f"{os.major(device)}:{os.minor(device)}"))
            assert theirs.is_socket()
            with suppress(FileNotFoundError):
                connect(path)
        mount.mount()
