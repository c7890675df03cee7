"""Clients of rings whose daemon is killed, with the holder that starts the next one: real mounts, real processes."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from places import LABS
from posix_calls import as_user
from ring_calls import PATIENCE_S, SIZE, done
from ring_lab import stats
from ring_load import BLOCK, Load, blocks, load_of_rings

from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.usrbio.client.files import File, Namespace
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.ring import Ring
from kvfuse.usrbio.protocol.wire import MESSAGE_SIZE_MAX, SOCKET_PATH, VERSION, Message, Request

T = TypeVar("T")

KILLS = 4
MANY = 3000


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(("outlive=true",)) as mounted:
        yield mounted


@pytest.fixture
def data(rng: random.Random) -> bytes:
    return rng.randbytes(SIZE)


def kill(mount: KvfuseMount) -> None:
    """Kill the daemon, and return when the next one answers."""
    former = stats(mount)["pid"]
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: bool(stats(mount)["pid"] != former), "the next daemon")


def registered(mount: KvfuseMount, kind: str) -> int:
    """-1 while the door of the rings is closed."""
    return int(stats(mount).get("rings", {}).get(kind, -1))


def settle(mount: KvfuseMount) -> None:
    """What was done is stored."""
    folder = os.open(mount.point, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def stored(mount: KvfuseMount, name: str, data: bytes) -> None:
    with open(mount.point / name, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.ring(3)
def test_rings_under_load_notice_nothing(mount: KvfuseMount, data: bytes, rng: random.Random) -> None:
    stored(mount, "loaded", data)
    path = mount.point / "loaded"
    with connect(mount.point) as client, BlockStore(client, "blocks") as store:
        with load_of_rings(client, path, data, rng) as readers, Load(blocks(store, is_lossy=True)) as third:
            for _ in range(KILLS):
                kill(mount)
                for one in (*readers, third):
                    one.goes_on()
        assert not client.session.has_ended


def test_blocks_that_were_put_into_a_folder_of_files_stay(mount: KvfuseMount, data: bytes) -> None:
    (mount.point / "files").mkdir()
    with BlockStore(mount.point, "files") as store:
        for turn in range(KILLS):
            keys = [f"{turn}-{number}" for number in range(64)]
            assert store.put_many(keys, [data[number : number + 4096] for number in range(64)]).all()
            os.kill(stats(mount)["pid"], signal.SIGKILL)
            for number, key in enumerate(keys):
                assert (mount.point / "files" / key).read_bytes() == data[number : number + 4096]


@pytest.mark.root
def test_blocks_stay_while_rights_change_and_daemons_are_killed(data: bytes) -> None:
    """Where their tables are mapped, they go on in other memory; the next daemon finds all of them."""
    size, keys = 16 << 10, [f"key-{number}" for number in range(200)]
    values = {key: data[number : number + size] for number, key in enumerate(keys)}
    mounted = temporary_mount(("outlive=true,allow_other",))
    with mounted as mount, BlockStore(mount.point, "blocks") as store:
        folder, target = mount.point / "blocks", bytearray(size)

        def check() -> None:
            for key, value in values.items():
                assert store.get_into(key, target) == size
                assert target == value

        for turn in range(KILLS):
            assert store.put_many(list(values), list(values.values())).all()
            check()
            with as_user(), connect(mount.point) as client, BlockStore(client, folder, create=False) as other:
                assert other.get_into(keys[turn], target) == size  # a process of another user maps the table
                os.seteuid(0)
                folder.chmod((0o700, 0o755)[turn % 2])
                folder.chmod(0o755)
                check()
                values[keys[turn]] = data[-size - turn : len(data) - turn]
                store.put(keys[turn], values[keys[turn]])
                check()
                if turn % 2:
                    kill(mount)
            kill(mount)
            check()


def test_what_is_under_way_is_done(mount: KvfuseMount) -> None:
    stored(mount, "written", b"")
    with connect(mount.point) as client, client.iov(SIZE) as iov, client.ring(128) as ring:
        file, namespace = client.file(mount.point / "written", "rw"), client.namespace("under-way")
        iov.array[:] = np.arange(SIZE) % 251
        offsets = np.arange(30) * 4096
        for turn in range(KILLS):
            keys = [b"%d-%d" % (turn, row) for row in range(30)]
            ring.prep_writes(iov, offsets, file, offsets, 4096, user_data=1)
            ring.prep_puts([iov] * 30, offsets, namespace, keys, 4096, user_data=2)
            ring.prep_fsync(file, user_data=3)
            ring.submit()
            kill(mount)
            rows = ring.wait(61, PATIENCE_S)
            assert len(rows) == 61
            moved = rows["result"][rows["user_data"] != 3]
            assert (moved == 4096).all(), moved.tolist()
            synced = rows["result"][rows["user_data"] == 3].tolist()
            for _ in range(2):
                ring.prep_fsync(file)
                synced.append(done(ring)[0])
            assert sorted(synced[:2]) in ([0, 0], [-errno.EIO, 0]), (
                "writes that had completed may be lost: it says so, once"
            )
            assert synced[2] == 0
        ring.prep_writes(iov, offsets, file, offsets, 4096, user_data=1)
        assert done(ring, 30) == {1: 4096}
        assert (mount.point / "written").read_bytes() == bytes(iov.buffer[: 30 * 4096])


def test_what_one_user_registered_keeps_nobody_else_waiting() -> None:
    """The next daemon registers it again by and by, as work of that user."""
    with temporary_mount(("outlive=true", "allow_other")) as mount, ExitStack() as ends:
        stored(mount, "file", b"x")
        mount.point.chmod(0o755)
        (mount.point / "many").mkdir()
        with as_user():
            theirs = ends.enter_context(connect(mount.point))
            for _ in range(MANY):
                theirs.namespace("many")
        ours = ends.enter_context(connect(mount.point))
        file, ring = ours.file(mount.point / "file", "rw"), ends.enter_context(ours.ring(8))
        os.kill(stats(mount)["pid"], signal.SIGKILL)
        ring.prep_fsync(file)
        assert done(ring) == {0: 0}
        again = registered(mount, "namespaces")
        assert 0 <= again < MANY, "all were registered again before that"
        wait_until(lambda: registered(mount, "namespaces") == MANY, "the other user's namespaces")


def test_a_lost_write_is_told_once(mount: KvfuseMount) -> None:
    stored(mount, "cut", b"x" * 4096)
    with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
        file, other = client.file(mount.point / "cut", "rw"), client.file(mount.point / "cut", "rw")
        ring.prep_write(iov, 0, file, 4096, 4096)
        assert done(ring) == {0: 4096}
        kill(mount)
        for one in (file, other):
            results = []
            for _ in range(2):
                ring.prep_fsync(one)
                results.append(done(ring)[0])
            assert results in ([0, 0], [-errno.EIO, 0])
        if (mount.point / "cut").stat().st_size == 4096:
            assert results == [-errno.EIO, 0]


def test_an_unlinked_file_stays_readable(mount: KvfuseMount, data: bytes) -> None:
    stored(mount, "unlinked", data)
    with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
        file = client.file(mount.point / "unlinked")
        (mount.point / "unlinked").unlink()
        settle(mount)
        for _ in range(2):
            kill(mount)
            ring.prep_read(iov, 0, file, 1000, 4096)
            assert done(ring) == {0: 4096}
            assert bytes(iov.buffer) == data[1000:5096]
        file.close()


def test_a_renamed_file_stays(mount: KvfuseMount, data: bytes) -> None:
    stored(mount, "before", data)
    with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
        file = client.file(mount.point / "before")
        (mount.point / "before").rename(mount.point / "after")
        settle(mount)
        kill(mount)
        ring.prep_read(iov, 0, file, 1000, 4096)
        assert done(ring) == {0: 4096}
        assert bytes(iov.buffer) == data[1000:5096]


def test_a_view_keeps_its_bytes(mount: KvfuseMount) -> None:
    with BlockStore(mount.point, "viewed") as store:
        store.put(b"key", np.full(BLOCK, 1, np.uint8))
        ring = store.client.ring(8)
        ring.prep_get(None, 0, store.namespace, b"key", 0, view=True)
        ring.submit()
        (row,) = ring.wait(1, PATIENCE_S)
        assert row["arena"]
        view = ring.view(row)
        assert registered(mount, "pins") == 1
        for turn in range(3):
            kill(mount)
            wait_until(lambda: registered(mount, "pins") == 1, "the pin")
            for number in range(50):
                store.put(b"%d-%d" % (turn, number), np.full(BLOCK, 2, np.uint8))
            assert bytes(view) == b"\1" * BLOCK
        view.release()
        del view
        ring.prep_get(None, 0, store.namespace, b"absent", 0)
        done(ring)
        wait_until(lambda: registered(mount, "pins") == 0, "the end of the pin")
        ring.close()


def test_clients_that_end_while_there_is_no_daemon_leave_nothing(mount: KvfuseMount) -> None:
    client = connect(mount.point)
    iov, ring = client.iov(SIZE), client.ring(8)
    os.kill(stats(mount)["pid"], signal.SIGKILL)
    client.close()
    wait_until(lambda: registered(mount, "connections") == 0, "the end of the client")
    assert registered(mount, "rings") == 0
    del iov, ring


@pytest.mark.ring(3)
def test_one_that_has_connected_and_said_nothing_goes_on(mount: KvfuseMount) -> None:
    """The daemon that accepted it is killed, twice, before it is greeted; another one ends unheard."""
    wait_until(lambda: registered(mount, "connections") == 0, "the door of the rings")
    before = sockets_of(mount.pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early, early.dup() as same:
        early.settimeout(PATIENCE_S)
        os.chdir(mount.point)  # the path of a socket may be 107 bytes long
        try:
            early.connect(SOCKET_PATH)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as short:
                short.connect(SOCKET_PATH)
                wait_until(lambda: len(sockets_of(mount.pid) - before) == 2, "the daemon to accept both")
            wait_until(lambda: len(sockets_of(mount.pid) - before) == 1, "the daemon to notice that one is gone")
        finally:
            os.chdir("/")
        for _ in range(2):
            kill(mount)
            wait_until(lambda: registered(mount, "connections") == 0, "the door of the rings")
        same.send(Message(Request.HELLO, 1, values=(VERSION,)).pack())
        assert Message.unpack(early.recv(MESSAGE_SIZE_MAX)).values[0] == VERSION
        kill(mount)
        same.send(Message(Request.HELLO, 2, values=(VERSION,)).pack())
        assert Message.unpack(early.recv(MESSAGE_SIZE_MAX)).values[0] == VERSION
    wait_until(lambda: registered(mount, "connections") == 0, "the daemon to notice that it is gone")
    wait_until(lambda: len(sockets_of(mount.pid)) <= len(before), "the holder to let go of it")


def sockets_of(pid: int) -> set[str]:
    """Connected and listening ones of this process: how they are called."""
    folder = f"/proc/{pid}/fd"
    found = set()
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # closed just now
            found.add(os.readlink(f"{folder}/{name}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize("moment", ["new", "done", "told", "noted"])
def test_a_daemon_may_die_over_any_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, moment: str
) -> None:
    monkeypatch.setenv("KVFUSE_TESTS_DEADLY", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(LABS / "deadly"))
    with temporary_mount(("outlive=true", "standby=true")) as mount, ExitStack() as ends:
        stored(mount, "file", data)

        def dies(kind: str, ask: Callable[[], T]) -> T:
            former = stats(mount)["pid"]
            (tmp_path / f"{kind}-{moment}").touch()
            answer = ask()
            wait_until(lambda: bool(stats(mount)["pid"] != former), "the next daemon")
            wait_until(lambda: registered(mount, "connections") == 1, "its clients")
            return answer

        def use(ring: Ring, iov: Iov, file: File, namespace: Namespace) -> None:
            ring.prep_read(iov, 0, file, 1000, 4096, user_data=1)
            assert done(ring) == {1: 4096}
            assert bytes(iov.buffer[:4096]) == data[1000:5096]
            ring.prep_put(iov, 0, namespace, b"key", 4096, user_data=2)
            assert done(ring) == {2: 4096}
            ring.prep_get(iov, 8192, namespace, b"key", 8192, user_data=3)
            assert done(ring) == {3: 4096}
            assert bytes(iov.buffer[8192:12288]) == data[1000:5096]

        client = dies("hello", lambda: connect(mount.point, deadline=3 * PATIENCE_S))
        ends.callback(client.close)
        if moment == "new":
            client.close()
            with dies("accept", lambda: connect(mount.point, deadline=3 * PATIENCE_S)):
                return
        namespace = dies("open_namespace", lambda: client.namespace("blocks"))
        iov = dies("add_iov", lambda: client.iov(65536))
        file = dies("add_file", lambda: client.file(mount.point / "file"))
        ring = dies("add_ring", lambda: client.ring(8))
        use(ring, iov, file, namespace)
        others = client.ring(8), client.iov(65536), client.file(mount.point / "file"), client.namespace("blocks")
        use(*others)
        dies("drop_ring", ring.close)
        dies("drop_file", file.close)
        dies("drop_iov", iov.close)
        dies("close_namespace", namespace.close)
        use(*others)
        client.close()
        wait_until(lambda: registered(mount, "connections") == 0, "the end of the connection")


@pytest.mark.ring(3)
def test_a_lost_write_is_told_whenever_daemons_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFUSE_TESTS_DEADLY", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(LABS / "deadly"))
    with temporary_mount(
        ("outlive=true", "publish.window=60", "mount.outlive_size=0")
    ) as mount:  # nothing is stored by itself
        stored(mount, "cut", b"x" * 4096)
        with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
            file = client.file(mount.point / "cut", "rw")
            ring.prep_write(iov, 0, file, 4096, 4096)
            assert done(ring) == {0: 4096}
            kill(mount)
            is_lost = (mount.point / "cut").stat().st_size == 4096
            (tmp_path / "cut-told").touch()
            ring.prep_fsync(file)
            assert done(ring) == {0: -errno.EIO if is_lost else 0}
            ring.prep_fsync(file)
            assert done(ring) == {0: 0}
