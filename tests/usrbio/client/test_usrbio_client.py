"""The rings' client against a real mount: what completes, what is refused, and what happens when the daemon goes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trio
from mounting import KvfuseMount, stop_process, stopped
from places import ROOT
from ring_calls import PATIENCE_S, SIZE, done

from kvfuse.usrbio.client import Client, Disconnected, Priority, connect
from kvfuse.usrbio.protocol.wire import CQE

pytestmark = [pytest.mark.ring(1), pytest.mark.engines("lmdb+file", "etcd+rados")]


# -- reading and writing ----------------------------------------------------------------------------


def test_a_ring_reads_what_the_file_door_wrote(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(SIZE) as iov, client.file(path) as file, client.ring(8) as ring:
        assert file.inode == path.stat().st_ino
        for offset, length in ((0, SIZE), (1, 4095), (SIZE - 10, 10), (12345, 300_001)):
            ring.prep_read(iov, 3, file, offset, min(length, SIZE - 3), user_data=offset)
            expected = data[offset : offset + min(length, SIZE - 3)]
            assert done(ring) == {offset: len(expected)}
            assert bytes(iov.buffer[3 : 3 + len(expected)]) == expected


def test_a_client_of_another_version_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfuse.usrbio.client.session.VERSION", 2)
    with pytest.raises(OSError, match="protocol version 2 is not supported: this daemon has 1"):
        connect(client.mount)


def test_a_read_ends_at_the_end_of_the_file_and_holes_are_zeros(client: Client, path: Path) -> None:
    with path.open("wb") as target:
        target.truncate(100_000)
        target.seek(99_990)
        target.write(b"0123456789")
    with client.iov(4096) as iov, client.file(path) as file, client.ring(8) as ring:
        iov.array[:] = 255
        ring.prep_read(iov, 0, file, 98_000, 4096, user_data=1)
        assert done(ring) == {1: 2000}
        assert bytes(iov.buffer[:2000]) == bytes(1990) + b"0123456789"
        assert (iov.array[2000:] == 255).all()
        ring.prep_read(iov, 0, file, 100_000, 10, user_data=2)
        ring.prep_read(iov, 100, file, 1 << 40, 10, user_data=3)
        assert done(ring, 2) == {2: 0, 3: 0}


def test_the_file_door_reads_what_a_ring_wrote(client: Client, path: Path, rng: random.Random) -> None:
    expected = bytearray()
    with client.iov(SIZE) as iov, client.file(path, "rw") as file, client.ring(8) as ring, path.open("rb") as reader:
        for number in range(20):
            offset, length = rng.randrange(3 * SIZE), rng.randrange(1, SIZE // 2)
            data = rng.randbytes(length)
            iov.array[:length] = np.frombuffer(data, np.uint8)
            ring.prep_write(iov, 0, file, offset, length, user_data=number)
            assert done(ring) == {number: length}
            expected.extend(bytes(max(0, offset + length - len(expected))))
            expected[offset : offset + length] = data
            assert os.fstat(reader.fileno()).st_size == len(expected)
            assert os.pread(reader.fileno(), len(expected), 0) == expected
        ring.prep_fsync(file)
        assert done(ring) == {0: 0}


def test_columns_read_and_write_like_single_entries(client: Client, path: Path, rng: random.Random) -> None:
    count, size = 200, 4096
    places = np.arange(count) * size
    with client.iov(count * size) as iov, client.file(path, "rw") as file, client.ring(256) as ring:
        data = np.frombuffer(rng.randbytes(count * size), np.uint8)
        iov.array[:] = data
        assert ring.prep_writes(iov, places, file, places, size, np.arange(count)) == count
        assert done(ring, count) == dict.fromkeys(range(count), size)
        assert path.read_bytes() == data.tobytes()
        order = np.array(rng.sample(range(count), count))
        for _ in range(4):  # the column goes over the end of the queue
            iov.array[:] = 0
            ring.prep_reads(iov, places, file, order * size, size, user_data=order, priority=Priority.HIGH)
            assert done(ring, count) == dict.fromkeys(range(count), size)
            assert (iov.array.reshape(count, size) == data.reshape(count, size)[order]).all()


def test_single_entries_and_columns_mix_in_one_submission(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(SIZE) as iov, client.file(path) as file, client.ring(16) as ring:
        for _ in range(5):
            ring.prep_read(iov, 0, file, 7, 10, user_data=1)
            ring.prep_reads(iov, [100, 200, 300], file, [1, 2, 3], [11, 12, 13], [2, 3, 4])
            ring.prep_read(iov, 400, file, 4, 14, user_data=5)
            assert ring.in_flight == 5
            assert done(ring, 5) == {1: 10, 2: 11, 3: 12, 4: 13, 5: 14}
            assert ring.in_flight == 0
            assert bytes(iov.buffer[400:414]) == data[4:18]


# -- a full ring, waiting, cancelling ---------------------------------------------------------------


def test_a_full_ring_says_so_and_nothing_was_prepared(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(4096) as iov, client.file(path) as file, client.ring(4) as ring:
        for turn in range(3):
            ring.prep_reads(iov, np.arange(3), file, 0, 1, user_data=turn)
            with pytest.raises(BlockingIOError):
                ring.prep_reads(iov, 10, file, 0, [1, 1], user_data=99)
            ring.prep_read(iov, 3, file, 0, 1, user_data=turn)
            with pytest.raises(BlockingIOError):
                ring.prep_read(iov, 4, file, 0, 1, user_data=99)
            assert ring.submit() == 4
            with pytest.raises(BlockingIOError):
                ring.prep_fsync(file)
            rows = ring.wait(4, PATIENCE_S)
            assert rows["user_data"].tolist() == [turn] * 4


def test_a_wait_ends_at_its_timeout_and_results_come_later(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "f").write_bytes(data)
    with connect(mount.point) as client, client.iov(100) as iov, client.ring(8) as ring:
        file = client.file(mount.point / "f")
        with stopped(mount.pid):
            ring.prep_read(iov, 0, file, 0, 100, user_data=5)
            ring.submit()
            started = time.monotonic()
            rows = ring.wait(timeout=0.05)
            assert 0.05 <= time.monotonic() - started < 5
            assert rows.dtype == CQE
            assert len(rows) == len(ring.peek()) == len(ring.wait(timeout=0)) == 0
            assert ring.in_flight == 1
        assert ring.wait(timeout=PATIENCE_S)["user_data"].tolist() == [5]
        assert bytes(iov.buffer) == data[:100]


def test_a_wait_asks_for_no_more_than_is_under_way(client: Client, path: Path) -> None:
    path.write_bytes(b"x")
    with client.iov(10) as iov, client.file(path) as file, client.ring(8) as ring:
        assert len(ring.wait(3)) == 0
        ring.prep_read(iov, 0, file, 0, 1)
        assert len(ring.wait(3)) == 0, "it was not submitted"
        ring.submit()
        assert len(ring.wait(3)) == 1


def test_max_results_leaves_the_rest(client: Client, path: Path) -> None:
    path.write_bytes(b"x")
    with client.iov(10) as iov, client.file(path) as file, client.ring(8) as ring:
        ring.prep_reads(iov, np.arange(5), file, 0, 1, np.arange(5))
        ring.submit()
        first = ring.wait(5, PATIENCE_S, max_results=2)
        assert len(first) == 2
        assert ring.in_flight == 3
        rest = ring.peek()
        assert sorted([*first["user_data"], *rest["user_data"]]) == list(range(5))


def test_cancelled_entries_complete(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "f").write_bytes(data)
    with connect(mount.point) as client, client.iov(SIZE) as iov, client.ring(8) as ring:
        file = client.file(mount.point / "f")
        with stopped(mount.pid):
            ring.prep_read(iov, 0, file, 0, SIZE, user_data=1)
            ring.prep_cancel(1, user_data=2)
            ring.submit()
        results = done(ring, 2)
        assert (results[1], results[2]) in ((SIZE, -errno.ENOENT), (SIZE, 0), (-errno.ECANCELED, 0))
        ring.prep_cancel(1, user_data=3)
        assert done(ring) == {3: -errno.ENOENT}


def test_an_entry_whose_time_is_over_is_not_done(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(10) as iov, client.file(path) as file, client.ring(8) as ring:
        ring.prep_write(iov, 0, client.file(path, "w"), 0, 10, user_data=1, timeout=1e-9)
        ring.prep_read(iov, 0, file, 0, 10, user_data=2, timeout=PATIENCE_S)
        assert done(ring, 2)[2] == 10
        assert path.stat().st_size == SIZE


# -- threads and event loops ------------------------------------------------------------------------


def test_threads_have_a_ring_each(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    file = client.file(path)
    failures: list[BaseException] = []

    def read_often(number: int) -> None:
        try:
            rng = random.Random(number)
            with client.iov(8 * 4096) as iov, client.ring(8) as ring:
                for _ in range(100):
                    offsets = [rng.randrange(SIZE - 4096) for _ in range(8)]
                    ring.prep_reads(iov, np.arange(8) * 4096, file, offsets, 4096, np.arange(8))
                    assert done(ring, 8) == dict.fromkeys(range(8), 4096)
                    for place, offset in enumerate(offsets):
                        assert bytes(iov.buffer[place * 4096 :][:4096]) == data[offset : offset + 4096]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read_often, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


async def read_under_a_loop(mount: KvfuseMount, data: bytes) -> None:
    with connect(mount.point) as client:
        file, iov = client.file(mount.point / "f"), client.iov(SIZE)
        async with client.ring(8) as ring, client.ring(8) as other:
            for _ in range(20):
                ring.prep_read(iov, 0, file, 10, 1000, user_data=1)
                ring.submit()
                rows = await ring.wait_async(timeout=PATIENCE_S)
                assert rows["result"].tolist() == [1000]
                assert bytes(iov.buffer[:1000]) == data[10:1010]
            with stopped(mount.pid):
                other.prep_read(iov, 0, file, 0, 1)
                other.submit()
                assert len(await other.wait_async(timeout=0.05)) == 0
            assert len(await other.wait_async(timeout=PATIENCE_S)) == 1
            assert len(await ring.wait_async()) == 0, "nothing is under way"


async def test_waiting_under_trio(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "f").write_bytes(data)
    await read_under_a_loop(mount, data)
    with connect(mount.point) as client, client.iov(10) as iov:
        file = client.file(mount.point / "f")
        async with client.ring(8) as ring, client.ring(8) as second, trio.open_nursery() as nursery:
            with stopped(mount.pid):
                for each in (ring, second):
                    each.prep_read(iov, 0, file, 0, 10)
                    each.submit()
                with trio.move_on_after(0.05) as scope:
                    await ring.wait_async()
                assert scope.cancelled_caught
                for each in (ring, second):
                    nursery.start_soon(each.wait_async)
                await trio.sleep(0.05)
        assert ring._closed


def test_waiting_under_asyncio(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "f").write_bytes(data)
    asyncio.run(read_under_a_loop(mount, data))


# -- the daemon goes, and comes back ----------------------------------------------------------------


def test_a_silent_daemon_is_a_timeout_and_late_replies_are_thrown_away(mount: KvfuseMount) -> None:
    with connect(mount.point, deadline=0.5) as client:
        with stopped(mount.pid), pytest.raises(TimeoutError):
            client.ring(8)
        for _ in range(3):
            client.ring(8).close()


def kill_soon(mount: KvfuseMount, wait: Callable[[], object]) -> float:
    """Kill the daemon while ``wait`` waits; the seconds it took to notice."""
    killer = threading.Timer(0.1, lambda: os.kill(mount.pid, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(Disconnected) as caught:
        wait()
    took = time.monotonic() - started - 0.1
    killer.join()
    assert caught.value.errno == errno.EPIPE
    mount.kill()
    return took


def test_after_a_kill_everything_works_again_once_reconnected(mount: KvfuseMount, data: bytes) -> None:
    for name in ("f", "gone", "replaced"):
        (mount.point / name).write_bytes(data)
    with open(mount.point / "f", "rb") as opened:
        os.fsync(opened.fileno())
    with connect(mount.point) as client:
        iov, plain, ring = client.iov(1000), client.wrap(np.zeros(100, np.uint8)), client.ring(8)
        file, gone, replaced = (client.file(mount.point / name, "r") for name in ("f", "gone", "replaced"))
        namespace = client.namespace("blocks")
        stop_process(mount.pid)
        ring.prep_read(iov, 0, file, 0, 10)
        ring.submit()
        assert kill_soon(mount, lambda: ring.wait(timeout=PATIENCE_S)) < 1.0
        for call in (ring.peek, lambda: ring.wait(timeout=PATIENCE_S), lambda: client.iov(10), client.reconnect):
            with pytest.raises(Disconnected):
                call()
        mount.mount()
        (mount.point / "gone").unlink()
        (mount.point / "other").write_bytes(b"other")
        (mount.point / "other").rename(mount.point / "replaced")
        client.reconnect()
        assert ring.in_flight == 1, "what was under way is known until the ring is used"
        ring.prep_read(iov, 0, file, 5, 10, user_data=1)
        ring.prep_read(plain, 0, file, 5, 10, user_data=2)
        ring.prep_read(iov, 20, gone, 5, 10, user_data=3)
        ring.prep_read(iov, 40, replaced, 0, 10, user_data=4)
        ring.prep_put(iov, 0, namespace, b"key", 10, user_data=5)
        assert done(ring, 5) == {1: 10, 2: 10, 3: -errno.EBADF, 4: -errno.EBADF, 5: 10}
        assert bytes(iov.buffer[:10]) == bytes(plain.buffer[:10]) == data[5:15]
        ring.close()


async def test_an_async_wait_notices_the_daemons_death(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "f").write_bytes(data)
    with connect(mount.point) as client, client.iov(10) as iov:
        file, ring = client.file(mount.point / "f"), client.ring(8)
        with stopped(mount.pid):
            ring.prep_read(iov, 0, file, 0, 10)
            ring.submit()
            os.kill(mount.pid, signal.SIGKILL)
            with trio.fail_after(PATIENCE_S), pytest.raises(Disconnected):
                await ring.wait_async()
        ring.close()
    mount.kill()


def test_an_idle_client_is_told_with_its_next_call(mount: KvfuseMount) -> None:
    client = connect(mount.point)
    ring = client.ring(8)
    mount.kill()
    with pytest.raises(Disconnected):
        ring.peek()
    with pytest.raises(Disconnected):
        client.namespace(".")
    ring.close()
    client.close()


# -- nothing is left behind -------------------------------------------------------------------------


def test_a_client_leaves_no_descriptor_behind(shared_mount: KvfuseMount, path: Path) -> None:
    path.write_bytes(b"x")

    def use() -> None:
        with connect(shared_mount.point) as client:
            client.ring(8)
            client.iov(100)
            client.wrap(bytearray(10))
            client.file(path)
            with client.ring(8) as ring:
                ring.prep_fsync(client.file(path))
                done(ring)

    use()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        use()
    assert os.listdir("/proc/self/fd") == before


def test_the_import_is_light() -> None:
    heavy = ("trio", "pyfuse3", "msgspec", "click", "lmdb", "asyncio", "kvfuse.volume", "kvfuse.options.config")
    script = f"import sys, kvfuse.usrbio.client; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("example", ["ring_file_io.py", "block_store.py"])
def test_the_examples_run(shared_mount: KvfuseMount, example: str) -> None:
    script = ROOT / "examples" / example
    words = [sys.executable, "-W", "error", str(script), str(shared_mount.point)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
