"""A daemon that answers late: a timeout, and the connection goes on; which processes may write, and which serves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KvfuseMount, stop_process, stopped, temporary_mount, wait_until
from ring_calls import PATIENCE_S, done
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.usrbio.protocol.wire import PID_NAMESPACE

SIZE = 64 << 10
COUNT = 8
KEYS = [b"key-%d" % number for number in range(COUNT)]
OFFSETS = [number * SIZE for number in range(COUNT)]
SIZES = [SIZE] * COUNT
LATE = [-errno.ETIMEDOUT] * COUNT
SHORT_S = 0.5
ASK_PID = "import sys; from kvfuse.usrbio.client import connect; print(connect(sys.argv[1]).session.daemon_pid)"


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    """With folders whose blocks are files: of others a client knows itself that they are absent."""
    with temporary_mount() as mount:
        for name in ("late", "said", "memory", "taken", "ended", "closed"):
            (mount.point / name).mkdir()
        yield mount


@pytest.fixture
def held() -> Iterator[KvfuseMount]:
    """A mount that outlives its daemons."""
    with temporary_mount(("outlive=true",)) as mount:
        for name in ("succeeded", "left"):
            (mount.point / name).mkdir()
        yield mount


def blocks(number: int) -> list[bytes]:
    return [bytes([number + row]) * SIZE for row in range(COUNT)]


def has_ring(store: BlockStore) -> None:
    """From here on: calls of one thread need no other."""

    def is_served() -> bool:
        late = store.lanes.late_calls
        store.prefetch([b"absent"])
        return store.lanes.late_calls == late

    wait_until(is_served, "an answer in time")


def serving(mount: KvfuseMount) -> int:
    """The daemon that answers, by its own word."""
    return int(stats(mount)["pid"])


def holder_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(mount: KvfuseMount) -> int:
    """Kill the daemon. The next one, which answers."""
    former = serving(mount)
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: serving(mount) != former, "the next daemon")
    return serving(mount)


def test_a_late_completion_is_nobodys(mount: KvfuseMount) -> None:
    """Neither does it count for a later call, nor does its memory, nor a view of it, stay taken."""
    with connect(mount.point) as client, BlockStore(client, "late", deadline=SHORT_S, grace=SHORT_S) as store:
        wait_until(lambda: bool(store.put_many(KEYS, blocks(1)).all()), "a put in time")
        wait_until(lambda: None not in store.get_many(KEYS), "a get in time")
        with stopped(mount.pid):
            assert store.get_many(KEYS) == [None] * COUNT  # views, and so pins
            assert not store.is_silent
        wait_until(lambda: store.is_silent, "the answers")
        for turn in range(20):
            wait_until(lambda turn=turn: bool(store.put_many(KEYS, blocks(turn)).all()), "a put in time")
            got = [None if view is None else bytes(view) for view in store.get_many(KEYS)]
            assert all(one in (expected, None) for one, expected in zip(got, blocks(turn), strict=True))

        def pins() -> int:
            store.prefetch([b"absent"])
            return int(stats(mount)["rings"]["pins"])

        wait_until(lambda: pins() == 0, "the pins to be given back")
        assert stats(mount)["rings"]["rings"] == 1, "the late ring is in use again"


@pytest.mark.parametrize("has_idle_ring", [True, False])
def test_what_each_call_says_of_a_late_daemon(mount: KvfuseMount, has_idle_ring: bool) -> None:
    with BlockStore(mount.point, "said", deadline=SHORT_S, grace=SHORT_S) as store:
        session = store.client.session
        calls = [
            (lambda: store.get("absent"), None),
            (lambda: store.get_into("absent", bytearray(10)), None),
            (lambda: store.put_many(["a"], [b"x"]).tolist(), [False]),
            (lambda: store.exists([b"absent", "a" * 250]).tolist(), [False, False]),
            (lambda: store.longest_prefix(["a" * 250]), 0),
        ]
        for call, expected in calls:
            if has_idle_ring:
                has_ring(store)
            with stopped(mount.pid):
                assert call() == expected
        for call in (lambda: store.put("a", b"x"), lambda: store.delete("a")):
            if has_idle_ring:
                has_ring(store)
            with stopped(mount.pid), pytest.raises(TimeoutError) as caught:
                call()
            assert caught.value.errno == errno.ETIMEDOUT
        has_ring(store)
        assert store.client.session is session
        assert not session.has_ended


def test_memory_is_the_daemons_until_it_has_answered(mount: KvfuseMount) -> None:
    with (
        connect(mount.point) as client,
        client.iov(COUNT * SIZE) as iov,
        BlockStore(client, "memory", deadline=SHORT_S, grace=PATIENCE_S) as patient,
        BlockStore(client, "memory", deadline=SHORT_S, grace=SHORT_S) as store,
    ):
        assert patient.get_at(KEYS, iov, OFFSETS, SIZES).tolist() == [-errno.ENOENT] * COUNT
        assert patient.is_silent
        assert patient.lanes.late_calls == 0
        has_ring(store)
        before = store.lanes.late_calls
        with stopped(mount.pid):
            assert store.put_at(KEYS, iov, OFFSETS, SIZES).tolist() == LATE
            assert not store.is_silent
            assert store.lanes.late_calls == before + 1
        wait_until(lambda: store.is_silent, "the answers")
        assert not client.session.has_ended


def test_what_was_not_taken_in_time_is_not_done(mount: KvfuseMount) -> None:
    """Its caller has other bytes in the memory by then: they would be the block of that key."""
    with (
        connect(mount.point) as client,
        client.iov(COUNT * SIZE) as iov,
        BlockStore(client, "taken", deadline=SHORT_S, grace=SHORT_S) as store,
    ):
        has_ring(store)
        parts = [iov.array[offset : offset + SIZE] for offset in OFFSETS]
        wait_until(lambda: bool(store.put_many([b"first"], parts[:1]).all()), "a put in time")
        iov.array[:] = 1
        with stopped(mount.pid):
            with pytest.raises(TimeoutError, match="until is_silent"):
                store.put_many(KEYS, parts)
            iov.array[:] = 2
        wait_until(lambda: store.is_silent, "the answers")
        assert bool((iov.array == 2).all())
        assert all(view is None or bytes(view) == b"\1" * SIZE for view in store.get_many(KEYS))
        has_ring(store)
        with stopped(mount.pid), pytest.raises(TimeoutError, match="until is_silent"):
            store.get_many_into([b"absent"], parts[:1])


def test_after_the_connection_silence_is_the_end_of_whoever_served_it(mount: KvfuseMount) -> None:
    with connect(mount.point) as client, client.iov(COUNT * SIZE) as iov:
        store = BlockStore(client, "ended", deadline=SHORT_S, grace=SHORT_S)
        has_ring(store)
        stop_process(mount.pid)
        assert store.get_at(KEYS, iov, OFFSETS, SIZES).tolist() == LATE
        client.session.close()
        store.close()
        assert not store.is_silent, "it may go on where it was"
        mount.kill()
        wait_until(lambda: store.is_silent, "the end of the daemon")


def test_a_daemon_that_goes_on_lets_go_of_an_ended_connection(mount: KvfuseMount) -> None:
    with connect(mount.point) as client, client.iov(COUNT * SIZE) as iov:
        store = BlockStore(client, "closed", deadline=SHORT_S, grace=SHORT_S)
        has_ring(store)
        with stopped(mount.pid):
            assert store.get_at(KEYS, iov, OFFSETS, SIZES).tolist() == LATE
            client.session.close()
            assert not store.is_silent
        wait_until(lambda: store.is_silent, "the daemon to let go")
        store.close()


def test_what_is_registered_too_late_is_let_go_of(mount: KvfuseMount) -> None:
    (mount.point / "file").write_bytes(b"x")
    with open(mount.point / "file", "rb") as opened, connect(mount.point, deadline=SHORT_S) as client:
        session = client.session
        asks = [lambda: client.ring(8), lambda: client.iov(4096), lambda: client.file(opened.fileno())]
        with stopped(mount.pid):
            for ask in asks:
                with pytest.raises(TimeoutError, match="did not answer ADD_") as caught:
                    ask()
                assert caught.value.errno == errno.ETIMEDOUT

        def registered() -> dict[str, int]:
            try:
                client.iov(4096).close()
            except TimeoutError:
                return {}
            return {kind: stats(mount)["rings"][kind] for kind in ("rings", "iovs", "files")}

        wait_until(lambda: registered() == {"rings": 0, "iovs": 0, "files": 0}, "what nobody knows to be dropped")
        assert client.session is session
        assert not session.has_ended


# -- the next daemon ---------------------------------------------------------------------------------


def test_who_serves_is_known_without_a_call(held: KvfuseMount) -> None:
    with connect(held.point) as client, connect(held.point) as idle, client.ring(8) as ring:
        namespace = client.namespace("known")
        known = []
        for _ in range(3):
            ring.prep_exists(namespace, [b"x"])
            assert done(ring) == {0: 0}
            known.append(client.session.daemon)
            assert client.session.daemon_pid == serving(held)
            assert idle.session.daemon == client.session.daemon, "it has no ring, and asks"
            with stopped(serving(held)):
                assert client.session.daemon == known[-1]
            kill(held)
        assert [one.epoch for one in known] == sorted({one.epoch for one in known})


@pytest.mark.parametrize("command", [[], ["unshare", "--pid", "--fork"]], ids=["here", "elsewhere"])
def test_a_pid_of_another_namespace_is_none(held: KvfuseMount, command: list[str]) -> None:
    asked = [*command, sys.executable, "-c", ASK_PID, str(held.point)]
    said = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S).stdout
    assert int(said) == (0 if command else serving(held))
    with connect(held.point) as client:
        assert client.session.daemon.namespace == os.stat(PID_NAMESPACE).st_ino


def test_a_successor_that_hangs_is_not_silent(held: KvfuseMount) -> None:
    """Nor is a dead daemon whose next one is to come: that does again what was under way."""
    with connect(held.point) as client, client.iov(COUNT * SIZE) as iov:
        store = BlockStore(client, "succeeded", deadline=SHORT_S, grace=SHORT_S)
        has_ring(store)
        successor = kill(held)
        has_ring(store)
        stop_process(successor)
        assert store.get_at(KEYS, iov, OFFSETS, SIZES).tolist() == LATE
        assert not store.is_silent
        with stopped(holder_of(successor)):
            os.kill(successor, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{successor}/fd/0").exists(), "the end of the daemon")
            assert not store.is_silent, "the holder has the ring for the next one"
        wait_until(lambda: store.is_silent, "the answers of the next daemon")
        assert not client.session.has_ended
        assert client.session.daemon_pid == serving(held) != successor
        store.close()


def test_a_connection_that_ends_while_there_is_no_daemon(held: KvfuseMount) -> None:
    with connect(held.point) as client, client.iov(COUNT * SIZE) as iov:
        store = BlockStore(client, "left", deadline=SHORT_S, grace=SHORT_S)
        has_ring(store)
        former = serving(held)
        stop_process(former)
        assert store.get_at(KEYS, iov, OFFSETS, SIZES).tolist() == LATE
        with stopped(holder_of(former)):
            os.kill(former, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{former}/fd/0").exists(), "the end of the daemon")
            client.session.close()
            assert not store.is_silent
        wait_until(lambda: store.is_silent, "the next daemon to let go")
        store.close()
