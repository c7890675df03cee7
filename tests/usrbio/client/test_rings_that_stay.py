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
from rings_daemon import RINGS_DAEMON, RingsDaemon

from kvfuse.usrbio.client import BlockStore, Client, connect
from kvfuse.usrbio.client.following import Follower
from kvfuse.usrbio.protocol.wire import NewsKind, Op

WAYS = [signal.SIGUSR1, signal.SIGUSR2]
BLOCK = 8192


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


class Load:
    """Does ``work`` again and again, in a thread, while it is entered."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.count = 0
        self._work = work
        self._failures: list[BaseException] = []
        self._end = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end:
                self._work()
                self.count += 1
        except BaseException as failure:
            self._failures.append(failure)

    def goes_on(self, times: int = 2) -> None:
        """Return when the work was done some times more. Raises what it raised."""
        before = self.count
        wait_until(lambda: self.count >= before + times or bool(self._failures), "the load going on")
        for failure in self._failures:
            raise failure

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._thread.join(PATIENCE_S)
        for failure in self._failures:
            raise failure


@pytest.mark.parametrize("way", WAYS)
def test_rings_under_load_miss_nothing(
    mount: KvfuseMount, daemon: RingsDaemon, path: Path, data: bytes, rng: random.Random, way: signal.Signals
) -> None:
    """Several rings of one client, and a store: many entries, and lone ones; all bytes right, and each once."""
    path.write_bytes(data)
    with connect(mount.point) as client, client.iov(SIZE) as iov, BlockStore(client, "loaded") as store:
        file, rings = client.file(path, "r"), [client.ring(64), client.ring(64)]
        seed = rng.random()

        def read(ring_number: int) -> Callable[[], None]:
            ring, own = rings[ring_number], random.Random(seed + ring_number)
            base = ring_number * SIZE // 2

            def work() -> None:
                count = own.choice([1, 1, 5, 64])
                offsets = np.array([own.randrange(SIZE - 4096) for _ in range(count)])
                iov_offsets = base + 4096 * np.arange(count)
                ring.prep_reads(iov, iov_offsets, file, offsets, 4096, user_data=np.arange(count))
                ring.submit()
                seen: list[int] = []
                while len(seen) < count:
                    rows = ring.wait(1, PATIENCE_S)
                    assert len(rows), f"nothing came, {count - len(seen)} of {count} are missing"
                    assert (rows["result"] == 4096).all(), rows
                    seen += rows["user_data"].tolist()
                assert sorted(seen) == list(range(count))
                for offset, iov_offset in zip(offsets.tolist(), iov_offsets.tolist(), strict=True):
                    assert bytes(iov.buffer[iov_offset : iov_offset + 4096]) == data[offset : offset + 4096]
                assert not len(ring.peek())

            return work

        number = [0]

        def blocks() -> None:
            keys = [b"%d-%d" % (number[0], row) for row in range(40)]
            number[0] += 1
            values = [np.full(BLOCK, (number[0] + row) % 251, np.uint8) for row in range(40)]
            store.put_many(keys, values)
            store.put(b"alone-%d" % number[0], values[0])
            assert store.exists(keys).all()
            targets = [np.zeros(BLOCK, np.uint8) for _ in keys]
            assert list(store.get_many_into(keys, targets)) == [BLOCK] * 40
            assert all((one == other).all() for one, other in zip(targets, values, strict=True))
            view = store.get(keys[3])
            assert view is not None
            with view:
                assert (np.frombuffer(view, np.uint8) == values[3]).all()

        with Load(read(0)) as first, Load(read(1)) as second, Load(blocks) as third:
            for _ in range(12):
                daemon.change(way)
                for one in (first, second, third):
                    one.goes_on()
        assert not client.session.has_ended
        assert number[0] > 12
        for ring in rings:
            ring.close()


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
    from mounting import wait_until

    wait_until(lambda: stats(mount)["rings"]["connections"] == 0, "the end of the client")
