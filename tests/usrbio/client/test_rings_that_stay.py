"""Clients of rings go on with the next daemon, and call nothing for it."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_calls import PATIENCE_S, SIZE, done
from ring_lab import stats
from ring_load import BLOCK, Load, blocks, load_of_rings
from rings_daemon import RINGS_DAEMON, RingsDaemon

from kvfuse.usrbio.client import BlockStore, Client, connect
from kvfuse.usrbio.client.following import Follower
from kvfuse.usrbio.protocol.wire import NewsKind, Op

WAYS = [signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(command=RINGS_DAEMON) as mount:
        yield mount


@pytest.fixture
def daemon(mount: KvfuseMount) -> RingsDaemon:
    return RingsDaemon(mount)


@pytest.fixture
def path(mount: KvfuseMount) -> Path:
    return mount.point / f"file-{random.randrange(1 << 60)}"


@pytest.fixture
def data(rng: random.Random) -> bytes:
    return rng.randbytes(SIZE)


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_registered_stays(
    mount: KvfuseMount, daemon: RingsDaemon, path: Path, data: bytes, way: signal.Signals
) -> None:
    path.write_bytes(data)
    with connect(mount.point) as client, client.iov(SIZE) as iov, client.ring(8) as ring:
        file, namespace = client.file(path, "rw"), client.namespace("blocks")
        dropped = client.iov(4096)
        dropped.close()
        last = 0
        for turn in range(3):
            ring.prep_read(iov, 0, file, turn, BLOCK, user_data=1)
            ring.prep_put(iov, BLOCK, namespace, b"key-%d" % turn, BLOCK, user_data=2)
            assert done(ring, 2) == {1: BLOCK, 2: BLOCK}
            assert bytes(iov.buffer[:BLOCK]) == data[turn : turn + BLOCK]
            iov.array[2 * BLOCK : 3 * BLOCK] = 7 + turn
            ring.prep_write(iov, 2 * BLOCK, file, SIZE, BLOCK, user_data=3)
            assert done(ring) == {3: BLOCK}
            ring.prep_fsync(file, user_data=4)
            found = ring.prep_exists(namespace, [b"key-%d" % turn, b"absent"], user_data=5)
            assert done(ring, 2) == {4: 0, 5: 1}
            assert found.tolist() == [True, False]
            with client.iov(4096) as more:  # a handle that nothing had before
                assert more.handle > last
                last = more.handle
            daemon.change(way)
        assert not client.session.has_ended
        assert path.read_bytes()[SIZE:] == bytes([9]) * BLOCK
        file.close()
        namespace.close()


@pytest.mark.parametrize("way", WAYS)
def test_rings_under_load_miss_nothing(
    mount: KvfuseMount, daemon: RingsDaemon, path: Path, data: bytes, rng: random.Random, way: signal.Signals
) -> None:
    path.write_bytes(data)
    with connect(mount.point) as client, BlockStore(client, "loaded") as store:
        with load_of_rings(client, path, data, rng) as readers, Load(blocks(store)) as third:
            for _ in range(12):
                daemon.change(way)
                for one in (*readers, third):
                    one.goes_on()
        assert not client.session.has_ended


def test_writes_and_puts_under_way_are_done_once_more(mount: KvfuseMount, daemon: RingsDaemon, path: Path) -> None:
    with connect(mount.point) as client, client.iov(SIZE) as iov, client.ring(64) as ring:
        file, namespace = client.file(path, "rw"), client.namespace("repeated")
        iov.array[:] = np.arange(SIZE) % 251
        for turn in range(8):
            offsets = np.arange(30) * 4096
            ring.prep_writes(iov, offsets, file, offsets, 4096, user_data=1)
            keys = [b"%d-%d" % (turn, row) for row in range(30)]
            ring.prep_puts([iov] * 30, offsets, namespace, keys, 4096, user_data=2)
            ring.submit()
            daemon.change(signal.SIGUSR1)
            rows = ring.wait(60, PATIENCE_S)
            assert len(rows) == 60
            assert (rows["result"] == 4096).all(), rows
            found = ring.prep_exists(namespace, keys, user_data=3)
            assert done(ring) == {3: 30}
            assert found.all()
        assert path.read_bytes() == bytes(iov.buffer[: 30 * 4096])


def test_a_delete_that_is_done_again_says_what_was_there(mount: KvfuseMount, daemon: RingsDaemon) -> None:
    (mount.point / "deletes").mkdir()
    os.setxattr(mount.point / "deletes", "user.kvfuse.publish", b"strict")  # answers wait for the store
    with connect(mount.point) as client, client.iov(4096) as iov, client.ring(64) as ring:
        namespace = client.namespace("deletes")
        for turn in range(12):
            keys = [b"%d-%d" % (turn, row) for row in range(30)]
            ring.prep_puts([iov] * 30, np.zeros(30, int), namespace, keys, 100, user_data=1)
            ring.submit()
            assert (ring.wait(30, PATIENCE_S)["result"] == 100).all()
            rows = [ring.prep_delete(namespace, [key, b"absent"], user_data=2) for key in keys[:10]]
            rows.append(ring.prep_delete(namespace, [*keys[10:], b"absent"], user_data=3))
            ring.submit()
            daemon.change(signal.SIGUSR1)
            answers = ring.wait(11, PATIENCE_S)
            assert sorted(answers["result"].tolist()) == [1] * 10 + [20], answers
            assert all(row.tolist() == [True] * (len(row) - 1) + [False] for row in rows)
            ring.prep_exists(namespace, keys, user_data=4)
            assert done(ring) == {4: 0}


def test_a_sleeper_is_woken(mount: KvfuseMount, daemon: RingsDaemon, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with connect(mount.point) as client, client.iov(SIZE) as iov, client.ring(64) as ring:
        file = client.file(path)
        for turn in range(10):
            ring.prep_reads(iov, np.arange(60) * 4096, file, np.arange(60) * 4096, 4096, timeout=PATIENCE_S)
            ring.submit()
            thread = threading.Thread(target=daemon.change, args=[WAYS[turn % 2]])
            thread.start()
            rows = ring.wait(60, PATIENCE_S)
            thread.join()
            assert len(rows) == 60
            assert (rows["result"] == 4096).all()


def test_pins_stay_with_their_client(mount: KvfuseMount, daemon: RingsDaemon) -> None:
    with BlockStore(mount.point, "pinned") as store:
        store.put(b"a", np.full(BLOCK, 1, np.uint8))
        assert store.prefetch([b"a"])
        ring = store.client.ring(8, ops=[Op.GET])
        ring.prep_get(None, 0, store.namespace, b"a", 0, view=True, user_data=1)
        ring.submit()
        (row,) = ring.wait(1, PATIENCE_S)
        assert row["arena"]
        view = ring.view(row)
        daemon.change(signal.SIGUSR1)
        store.put(b"a", np.full(BLOCK, 2, np.uint8))
        assert bytes(view) == b"\1" * BLOCK
        view.release()
        ring.close()


def test_control_requests_are_answered_by_whichever_daemon(mount: KvfuseMount, daemon: RingsDaemon, path: Path) -> None:
    path.write_bytes(b"x" * BLOCK)

    def register(client: Client) -> Callable[[], None]:
        def work() -> None:
            with client.iov(BLOCK) as iov, client.file(path) as file, client.ring(4) as ring:
                namespace = client.namespace("asked")
                ring.prep_read(iov, 0, file, 0, BLOCK, user_data=1)
                assert done(ring) == {1: BLOCK}
                namespace.close()

        return work

    with connect(mount.point) as client, Load(register(client)) as asking:
        for turn in range(15):
            daemon.change(WAYS[turn % 2])
            asking.goes_on()
        assert not client.session.has_ended


def test_followers_are_told_anew(mount: KvfuseMount, daemon: RingsDaemon) -> None:
    with BlockStore(mount.point, "followed") as store, Follower(mount.point / "followed") as follower:
        news = iter(follower)
        store.put(b"one", np.ones(10, np.uint8))
        present: set[bytes] = set()

        def follow(until: NewsKind) -> None:
            for one in news:
                if one.kind in (NewsKind.PRESENT, NewsKind.STORED):
                    present.update(one.names)
                elif one.kind is NewsKind.CLEARED:
                    present.clear()
                if one.kind is until:
                    return

        follow(NewsKind.READY)
        daemon.change(signal.SIGUSR1)
        follow(NewsKind.CLEARED)
        assert not present
        follow(NewsKind.READY)
        store.put(b"two", np.ones(10, np.uint8))
        while b"two" not in present:
            follow(NewsKind.STORED)
        assert present == {b"one", b"two"}


def test_what_is_gone_meanwhile_is_not_found(mount: KvfuseMount, daemon: RingsDaemon, path: Path) -> None:
    path.write_bytes(b"x" * BLOCK)
    with connect(mount.point) as client, client.iov(BLOCK) as iov, client.ring(8) as ring:
        folder = mount.point / "removed"
        folder.mkdir()
        namespace, file = client.namespace("removed"), client.file(path)
        folder.rmdir()
        daemon.change(signal.SIGUSR1)
        ring.prep_get(iov, 0, namespace, b"key", 10, user_data=1)
        assert done(ring)[1] in (-errno.EBADF, -errno.ENOENT), "the kernel may still know the folder"
        ring.prep_read(iov, 0, file, 0, BLOCK, user_data=2)
        assert done(ring) == {2: BLOCK}


def test_clients_that_end_meanwhile_leave_nothing(mount: KvfuseMount, daemon: RingsDaemon) -> None:
    pid = os.fork()
    if not pid:
        client = connect(mount.point)
        client.iov(SIZE)
        client.ring(8)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    daemon.change(signal.SIGUSR1)
    daemon.change(signal.SIGUSR1)

    wait_until(lambda: stats(mount)["rings"]["connections"] == 0, "the end of the client")
