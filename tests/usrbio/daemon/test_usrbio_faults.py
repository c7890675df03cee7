"""Clients that are killed leave nothing behind, and a daemon that is gone is noticed, and replaced."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mounting import PATIENCE_S, KvfuseMount, stop_process, stopped, temporary_mount, wait_until
from ring_clients import BLOCKS, GONE, OPERATIONS, prepare
from ring_lab import Process, nothing_left_behind, stats, wait_for_rings, witness
from scale import scaled

from kvfuse.usrbio.client import BlockStore, Client, Disconnected, connect

KIB, MIB = 1 << 10, 1 << 20
WORDS = (
    "allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB", "cache.tier_size=64MiB",
    "publish.window=0.05",
)  # fmt: skip
KILLS = int(os.environ.get("KVFUSE_KILL_ROUNDS", scaled(16)))
"""clients that are killed; 100 show it well"""
NOTICE_S = 1.0
"""within which the end of the daemon is noticed"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- clients that die -------------------------------------------------------------------------------


def test_killed_clients_leave_nothing_behind(mount: KvfuseMount, rng: random.Random) -> None:
    folder = mount.point / "victims"
    prepare(folder)
    process = Process("ring_clients.py", "victims", mount.point)
    try:
        process.ask(kind="batch", seed=0)  # whatever is made once is made now
        prepare(folder)
        with nothing_left_behind(mount), witness(mount, rng.randrange(1 << 30)):
            for number in range(KILLS):
                kind, seed = OPERATIONS[number % len(OPERATIONS)], rng.randrange(1 << 30)
                assert process.ask(kind=kind, seed=seed) == -signal.SIGKILL, f"{kind} with seed {seed}"
                if number % 8 == 7:
                    prepare(folder)
        process.end()
    except BaseException:
        process.kill()
        raise
    names = {f"f{number}" for number in range(4)} | {f"b{number}" for number in range(BLOCKS)}
    assert set(os.listdir(folder)) <= names, f"files called {GONE} are not gone"


def kill_some(mount: KvfuseMount, rng: random.Random) -> None:
    process = Process("ring_clients.py", "victims", mount.point)
    try:
        for kind in ("unlinked", "put", "batch", "write", "delete", "unlinked", "batch", "delete"):
            assert process.ask(kind=kind, seed=rng.randrange(1 << 30)) == -signal.SIGKILL
        process.end()
    except BaseException:
        process.kill()
        raise
    wait_until(lambda: stats(mount)["rings"]["connections"] == 0, "the end of the connections")


def test_space_of_killed_clients_comes_back(mount: KvfuseMount, rng: random.Random) -> None:
    """Slots of files that only a killed client had, of blocks it removed, of puts that it did not see the end of."""
    folder = mount.point / "victims"
    prepare(folder)
    kill_some(mount, rng)
    for path in folder.iterdir():
        path.unlink()
    sync(folder)
    wait_until(lambda: stats(mount)["slabs"]["used_bytes"] == 0, "the space of removed files")


def test_the_kernel_sees_what_killed_clients_did(mount: KvfuseMount, rng: random.Random) -> None:
    """Whatever of it was done: nothing that the kernel had cached before is shown any more."""
    folder = mount.point / "victims"
    prepare(folder)
    cached = [path.read_bytes() for path in folder.iterdir()]
    assert cached
    kill_some(mount, rng)
    with connect(mount.point) as client, client.iov(MIB) as iov, client.ring(8) as ring:
        namespace = client.namespace("victims")
        for name in [f"b{number}" for number in range(BLOCKS)] + [f"f{number}" for number in range(4)]:
            ring.prep_get(iov, 0, namespace, name.encode(), MIB)
            ring.submit()
            result = int(ring.wait(1, PATIENCE_S)["result"][0])
            path = folder / name
            assert (path.read_bytes() if path.exists() else None) == (
                bytes(iov.buffer[:result]) if result >= 0 else None
            )


# -- the daemon goes --------------------------------------------------------------------------------


class Worker:
    """A thread that uses a ring of its own until the daemon is gone, which it notes."""

    def __init__(self, client: Client, number: int) -> None:
        self.client = client
        self.iov = client.iov(64 * KIB)
        self.file = client.file(f"{client.mount}/w{number}", "rw")
        self.ring = client.ring(64)
        self.rounds = 0
        self.noticed = 0.0
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)

    def work(self) -> None:
        """Write, make it durable, read back."""
        self.iov.array[: 16 * KIB] = self.rounds % 251
        self.ring.prep_write(self.iov, 0, self.file, 0, 16 * KIB)
        self._finish()
        self.ring.prep_fsync(self.file)
        self._finish()
        self.ring.prep_read(self.iov, 32 * KIB, self.file, 0, 16 * KIB)
        self._finish()
        assert bool((self.iov.array[32 * KIB : 48 * KIB] == self.rounds % 251).all())
        self.rounds += 1

    def _finish(self) -> None:
        self.ring.submit()
        (row,) = self.ring.wait(1, PATIENCE_S)
        assert row["result"] >= 0, row

    def _run(self) -> None:
        try:
            while True:
                self.work()
        except Exception as error:
            self.error = error
            self.noticed = time.monotonic()


@contextmanager
def workers(mount: KvfuseMount, count: int = 3) -> Iterator[list[Worker]]:
    """They have all begun. All must end with Disconnected, ``NOTICE_S`` after the body, and then work again."""
    with connect(mount.point) as client:
        made = [Worker(client, number) for number in range(count)]
        for worker in made:
            worker.thread.start()
        wait_until(lambda: all(worker.rounds or worker.error for worker in made), "the workers")
        yield made
        for worker in made:
            assert isinstance(worker.error, Disconnected), worker.error
        mount.mount()
        wait_for_rings(mount)
        client.reconnect()
        for worker in made:
            worker.work()


def check_notices(made: list[Worker], started: float) -> None:
    for worker in made:
        worker.thread.join(PATIENCE_S)
        assert not worker.thread.is_alive()
    slowest = max(worker.noticed for worker in made) - started
    print(f"noticed after {slowest:.3f} s")
    assert slowest < NOTICE_S


def test_a_killed_daemon_is_noticed_at_once(mount: KvfuseMount) -> None:
    with workers(mount) as made:
        started = time.monotonic()
        mount.kill()
        check_notices(made, started)


def test_a_killed_daemon_is_noticed_by_who_waits_for_what_will_never_come(mount: KvfuseMount) -> None:
    with workers(mount) as made:
        stop_process(mount.pid)
        started = time.monotonic()
        mount.kill()
        check_notices(made, started)


def test_a_terminated_daemon_is_noticed_at_once(mount: KvfuseMount) -> None:
    with workers(mount) as made:
        started = time.monotonic()
        mount.terminate()
        check_notices(made, started)


def test_an_unmount_is_noticed_at_once(mount: KvfuseMount) -> None:
    with workers(mount) as made:
        started = time.monotonic()
        mount.unmount()
        check_notices(made, started)


def test_who_does_not_work_notices_at_the_next_call(mount: KvfuseMount) -> None:
    with connect(mount.point) as client:
        store = BlockStore(client, "blocks")
        store.put(b"a", b"1")
        iov, ring = client.iov(4096), client.ring(8)
        sync(mount.point / "blocks")
        mount.kill()
        calls: list[Callable[[], object]] = [
            lambda: store.get(b"a"), lambda: store.put(b"a", b"2"), lambda: store.exists([b"a"]),
            ring.peek, lambda: client.iov(4096), client.reconnect,
        ]  # fmt: skip
        for call in calls:
            started = time.monotonic()
            with pytest.raises(Disconnected):
                call()
            assert time.monotonic() - started < NOTICE_S
        mount.mount()
        wait_for_rings(mount)
        client.reconnect()
        assert store.exists([b"a"]).tolist() == [True]
        with store.get(b"a") as view:
            assert bytes(view) == b"1"
        ring.prep_get(iov, 0, store.namespace, b"a", 1)
        ring.submit()
        assert ring.wait(1, PATIENCE_S)["result"].tolist() == [1]


def test_a_daemon_that_stands_still_makes_nobody_wait_beyond_his_deadline(mount: KvfuseMount) -> None:
    with connect(mount.point, deadline=0.3) as client, BlockStore(mount.point, "blocks", deadline=0.3) as store:
        store.put(b"a", b"1")
        iov, file, ring = client.iov(4096), client.file(mount.point / "f", "rw"), client.ring(8)
        with stopped(mount.pid):
            started = time.monotonic()
            ring.prep_read(iov, 0, file, 0, 4096, user_data=5)
            ring.submit()
            assert len(ring.wait(1, timeout=0.3)) == 0
            with pytest.raises(TimeoutError):
                client.iov(4096)
            assert store.get_into(b"absent", np.zeros(1, np.uint8)) is None
            assert time.monotonic() - started < 0.3 + 0.3 + 2 * (0.3 + 1.0) + 3 * NOTICE_S
        assert ring.wait(1, PATIENCE_S)["user_data"].tolist() == [5]  # nothing is lost
        client.iov(4096).close()
        assert store.get_into(b"a", np.zeros(1, np.uint8)) == 1
