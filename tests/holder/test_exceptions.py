"""A daemon that raises at any await of its start, its service, a takeover or an upgrade: real mounts, real processes.

The await is drawn by its number (`labs/raising`). Whatever raised, the mount answers soon, rings are there, nothing
hangs, and the volume is clean. KVFUSE_TEST_SCALE=40 makes 1,000 of the points.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from killer import percentiles, serving_of
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, stopped, temporary_mount, wait_until
from places import LABS
from scale import scaled
from test_outlive import OUTLIVE, daemon_of, kill_daemon
from upgrading import holder_says

from kvfuse.errors import Disconnected
from kvfuse.holder.pulse import SILENT_SECONDS
from kvfuse.usrbio.client import BlockStore, Client, connect

POINTS = 25
STARTS = 6
ENDS = 6
ANSWER_SECONDS = 2.0
"""that a mount may take to answer after an exception, where nothing else uses the machine"""
KILLS, KILL_FACTOR = 3, 4.0
"""on a busy machine: so many times as long as after the slowest of some kills"""
AWAITS_MAX = 60
"""at places that are not known yet, before the one that raises"""
KNOWN_COUNT = 3
"""exceptions at one place after which it is known"""
BLOCK = b"x" * 20_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where daemons are told to raise."""
    monkeypatch.setenv("PYTHONPATH", str(LABS / "raising"))
    monkeypatch.setenv("KVFUSE_TESTS_RAISING", str(tmp_path))
    (tmp_path / "known").touch()
    return tmp_path


@pytest.fixture
def words() -> tuple[str, ...]:
    """With every service that a mount alone can have."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"metrics.listen=127.0.0.1:{port}"
    return (*OUTLIVE, "standby", "cache", "capacity=64MiB", "scrub.rate=1MiB", listen)


def arm(folder: Path, name: str, number: int) -> None:
    (folder / "raised").unlink(missing_ok=True)
    (folder / "taken").unlink(missing_ok=True)
    (folder / "arming").write_text(str(number))
    (folder / "arming").rename(folder / name)


def raised(folder: Path) -> tuple[float, str]:
    """(time of CLOCK_MONOTONIC, where)"""
    wait_until(lambda: has_raised(folder), "an await to raise")
    at, where = (folder / "raised").read_text().split(" ", 1)
    return float(at), where


def has_raised(folder: Path) -> bool:
    """Where a daemon that was about to end had been told to raise, the next one is."""
    if (folder / "raised").exists():
        return True
    with suppress(FileNotFoundError):
        taker = int((folder / "taken").read_text())
        if not (Path("/proc") / str(taker)).exists() and not (folder / "raised").exists():
            arm(folder, "now", 1)
    return False


class Users:
    """Threads that use files until the end. A call may fail with EIO: that is what one request gets that raised."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.count = 0
        self.failed: Counter[str] = Counter()
        self._is_over = False
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call does not end"

    def _run(self, number: int) -> None:
        while not self._is_over:
            try:
                self._work(self._folder / f"file-{number}-{self.count % 50}")
            except OSError as error:
                self.failed[os.strerror(error.errno or 0)] += 1
            self.count += 1
            time.sleep(0.005)  # a load that never pauses leaves the daemon no time

    def _work(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(BLOCK)
            os.fsync(file.fileno())
        other = path.with_suffix(".other")
        path.rename(other)
        assert other.read_bytes() == BLOCK
        if self.count % 7 == 0:
            other.unlink()
        os.listdir(path.parent)


class Rings:
    """A client of rings that stays connected. One whose own connection raised may lose it: it connects anew."""

    def __init__(self, point: Path) -> None:
        self._point = point
        self.lost = 0
        self._number = 0
        self._connect()

    def _connect(self) -> None:
        # A daemon that ended before it had bound the socket is followed by one that binds it.
        wait_until((self._point / ".kvfuse/control.sock").is_socket, "the control socket")
        self._client: Client = connect(self._point, deadline=PATIENCE_S)
        self._store = BlockStore(self._client, "blocks")

    def work(self) -> None:
        """Store a block, and find it: by the connection that there was, but for ``lost``."""
        self._number += 1
        key = b"key-%d" % self._number
        wait_until(lambda: self._works(key), "rings to work")

    def _works(self, key: bytes) -> bool:
        data = bytearray(len(BLOCK))
        try:
            self._store.put(key, BLOCK)
            return self._store.get_into(key, data) == len(BLOCK) and data == BLOCK
        except Disconnected:
            self.close()
            self.lost += 1
            self._connect()
            return False

    def close(self) -> None:
        self._store.close()
        self._client.close()


class Points:
    """What became of exceptions at points drawn at random, in one mount."""

    def __init__(self, mount: KvfuseMount, folder: Path, chance: random.Random, rings: Rings) -> None:
        self._mount, self._folder, self._chance, self._rings = mount, folder, chance, rings
        self.seconds: list[float] = []
        """from each exception to an answer"""
        self.places: Counter[str] = Counter()

    def strike(self, kind: str) -> None:
        lost = self._rings.lost
        with {"takeover": self._takeover, "service": self._service, "upgrade": self._upgrade}[kind]():
            where = self._measure()
        self._rings.work()
        assert self._rings.lost == lost or where.endswith("Clients._serve"), (
            f"a client of rings lost its connection: {where}"
        )

    def _measure(self) -> str:
        """Where it was raised; notes how long the mount took to answer after that."""
        at, where = raised(self._folder)
        with suppress(FileNotFoundError):
            os.lstat(self._mount.point / f"absent-{at}")
        self.seconds.append(time.monotonic() - at)
        place = where.split(" ")[0]
        self.places[place] += 1
        if self.places[place] == KNOWN_COUNT:
            with (self._folder / "known").open("a") as known:
                known.write(place + "\n")
        return where

    @contextmanager
    def _takeover(self) -> Iterator[None]:
        arm(self._folder, "start", self._chance.randint(1, AWAITS_MAX))
        wait_until(self._kill, "a daemon that serves")  # one that raised may have answered until now
        self._rings.work()
        yield

    def _kill(self) -> bool:
        pid = serving_of(self._mount.pid)
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    @contextmanager
    def _service(self) -> Iterator[None]:
        arm(self._folder, "now", self._chance.randint(1, AWAITS_MAX))
        self._rings.work()
        yield

    @contextmanager
    def _upgrade(self) -> Iterator[None]:
        """The command may go on for much longer than anybody waits for the mount."""
        arm(self._folder, self._chance.choice(("now", "start")), self._chance.randint(1, AWAITS_MAX))
        command = [*KVFUSE, "upgrade", str(self._mount.point), "--timeout", str(PATIENCE_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as upgrade:
            yield
            _, said = upgrade.communicate(timeout=4 * PATIENCE_S)
        assert upgrade.returncode in (0, 5), said


def metrics_of(words: tuple[str, ...]) -> str:
    listen = next(word for word in words if word.startswith("metrics.listen=")).partition("=")[2]
    with urllib.request.urlopen(f"http://{listen}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


@pytest.mark.ring(3)
@pytest.mark.timeout(300 + 10 * scaled(POINTS))
def test_at_any_await(folder: Path, words: tuple[str, ...], seed: int) -> None:
    chance = random.Random(seed)
    with temporary_mount(words) as mount:
        limit = max(ANSWER_SECONDS, *(KILL_FACTOR * kill_daemon(mount) for _ in range(KILLS)))
        rings = Rings(mount.point)
        points = Points(mount, folder, chance, rings)
        with Users(mount.point) as users:
            for _ in range(scaled(POINTS)):
                points.strike(chance.choices(("takeover", "service", "upgrade"), (12, 12, 1))[0])
        wait_until(lambda: serves(mount), "a daemon that serves")  # one that raised may have answered until now
        said = holder_says(mount)
        seconds = sorted(points.seconds)
        print(f"{len(seconds)} exceptions at {len(points.places)} places: {percentiles(seconds)}; {said['causes']};")
        print(f"rounds of users {users.count}, {dict(users.failed)}; connections of rings lost {rings.lost}")
        print("\n".join(f"{count} x {where}" for where, count in points.places.most_common()))
        assert seconds[-1] < limit, "no answer for too long"
        rings.close()
        wait_until(lambda: is_there(lambda: metrics_of(words)), "metrics")
        causes = said["causes"]
        assert isinstance(causes, dict)
        for cause, count in causes.items():
            assert f'kvfuse_daemon_deaths_total{{cause="{cause}"}} {float(count)}' in metrics_of(words)
        subprocess.run([*KVFUSE, "upgrade", str(mount.point)], check=True, timeout=4 * PATIENCE_S)  # errors are counted


def serves(mount: KvfuseMount) -> bool:
    try:
        return holder_says(mount)["serves"] is True
    except subprocess.CalledProcessError:  # none does
        return False


def is_there(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except OSError:
        return False
    return True


@pytest.mark.ring(3)
def test_in_the_first_start(folder: Path, seed: int) -> None:
    """Until the mount is there an error is the caller's, and nothing is left of it; after that it is a death."""
    chance = random.Random(seed)
    with temporary_mount(OUTLIVE) as mount:
        for _ in range(scaled(STARTS)):
            mount.unmount()
            arm(folder, "start", chance.randint(1, AWAITS_MAX))
            try:
                mount.mount()
            except AssertionError:
                assert (folder / "raised").exists(), mount.log.read_text()
                mount.wait(1)
                assert not mount.is_mounted
                mount.fsck()
                mount.mount()
            _, where = raised(folder)
            os.statvfs(mount.point)
            print(where)
            Rings(mount.point).close()
        wait_until(lambda: holder_says(mount)["serves"] is True, "a daemon that serves")
        subprocess.run([*KVFUSE, "upgrade", str(mount.point)], check=True, timeout=4 * PATIENCE_S)  # errors are counted


@pytest.mark.ring(3)
def test_at_the_end(folder: Path, seed: int) -> None:
    """A daemon that raises while it stores all and unmounts is followed by one that does: nothing is lost."""
    chance = random.Random(seed)
    with temporary_mount((*OUTLIVE, "publish.window=60")) as mount:
        for number in range(scaled(ENDS)):
            for name in range(5):
                (mount.point / f"file-{name}").write_bytes(b"%d" % number * 20_000)
            arm(folder, "now", chance.randint(1, AWAITS_MAX // 3))
            mount.terminate()
            print((folder / "raised").read_text() if (folder / "raised").exists() else "it did not raise")
            (folder / "now").unlink(missing_ok=True)
            mount.fsck()
            mount.mount()
            assert [(mount.point / f"file-{name}").read_bytes() for name in range(5)] == [b"%d" % number * 20_000] * 5


def test_a_silent_daemon_is_replaced() -> None:
    with temporary_mount(OUTLIVE) as mount:
        rings = Rings(mount.point)
        rings.work()
        former = daemon_of(mount)
        with stopped(former):
            began = time.monotonic()
            os.statvfs(mount.point)
            took = time.monotonic() - began
            assert daemon_of(mount) != former
        assert took > SILENT_SECONDS / 2
        rings.work()
        assert rings.lost == 0
        rings.close()
        said = holder_says(mount)
        assert said["causes"] == {"killed": 0, "exception": 0, "silent": 1, "crash": 0, "exit": 0}


def test_a_stopped_holder_takes_no_daemon_for_silent() -> None:
    """As where all of a container was frozen: the time in which the holder did not run does not count."""
    with temporary_mount(OUTLIVE) as mount:
        former = daemon_of(mount)
        with stopped(former), stopped(mount.pid):
            time.sleep(SILENT_SECONDS + 1)  # that time passes is what is tried
        assert daemon_of(mount) == former
        assert holder_says(mount)["deaths"] == 0


@pytest.mark.ring(3)
@pytest.mark.parametrize("mistakes", [1, 2])
def test_taking_over_a_client_of_rings_is_tried_again_once(folder: Path, mistakes: int) -> None:
    with temporary_mount(OUTLIVE) as mount:
        rings = Rings(mount.point)
        rings.work()
        (folder / "adoptions").write_text(str(mistakes))
        kill_daemon(mount)
        wait_until(lambda: (folder / "adoptions").read_text() == "0", "daemons that take over")
        rings.work()
        assert rings.lost == mistakes - 1
        rings.close()
        causes = holder_says(mount)["causes"]
        assert causes == {"killed": 1, "exception": 1, "silent": 0, "crash": 0, "exit": 0}
