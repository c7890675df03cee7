"""What a client refuses, what a daemon answers with an errno, and where no mount can be reached."""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path

import pytest
from mounting import KvfuseMount
from ring_calls import done

from kvfuse.usrbio.client import Client, Disconnected, File, Op, connect
from kvfuse.usrbio.protocol.wire import SOCKET_PATH, Word

pytestmark = pytest.mark.engines("lmdb+file", "etcd+rados")


def test_refused_entries_have_their_errno_and_the_ring_lives_on(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(4096) as iov, client.ring(16) as ring:
        reader, writer = client.file(path, "r"), client.file(path, "w")
        closed = client.file(path)
        closed.close()
        ring.prep_read(iov, 0, writer, 0, 10, user_data=1)
        ring.prep_write(iov, 0, reader, 0, 10, user_data=2)
        ring.prep_read(iov, 20, closed, 0, 10, user_data=3)
        ring.prep_read(iov, 4090, reader, 0, 10, user_data=4)
        ring.prep_read(iov, (1 << 64) - 5, reader, 0, 10, user_data=5)
        ring.prep_read(iov, 100, reader, 0, 10, user_data=6)
        ring.prep_read(iov, 109, reader, 0, 10, user_data=7)
        assert done(ring, 7) == {
            1: -errno.EBADF, 2: -errno.EBADF, 3: -errno.EBADF, 4: -errno.EFAULT, 5: -errno.EFAULT,
            6: 10, 7: -errno.EINVAL,  # its buffer overlaps that of the one before
        }  # fmt: skip
        iov.close()
        ring.prep_read(iov, 0, reader, 0, 10, user_data=7)
        assert done(ring) == {7: -errno.EFAULT}


def test_a_ring_does_only_what_it_was_made_for(client: Client, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with client.iov(4096) as iov, client.ring(4, ops=[Op.READ]) as ring:
        file, namespace = client.file(path, "rw"), client.namespace("only")
        ring.prep_write(iov, 0, file, 0, 10, user_data=1)
        ring.prep_read(iov, 0, file, 0, 10, user_data=2)
        assert done(ring, 2) == {1: -errno.EPERM, 2: 10}
        with pytest.raises(ValueError, match="file operations only"):
            ring.prep_get(iov, 0, namespace, b"key", 10)
        with pytest.raises(BlockingIOError):
            ring.prep_exists(namespace, [b"key"])
        assert ring.in_flight == 0


def test_a_number_that_does_not_fit_is_refused_at_once(client: Client, path: Path) -> None:
    path.write_bytes(b"x")
    with client.iov(10) as iov, client.file(path) as file, client.ring(4) as ring:
        for offset, length, user_data in ((-1, 1, 0), (0, -1, 0), (0, 1 << 64, 0), (0, 1, -1), (0, 1, 1 << 64)):
            with pytest.raises(ValueError):
                ring.prep_read(iov, 0, file, offset, length, user_data=user_data)
        assert ring.in_flight == 0
        ring.prep_read(iov, 0, file, 0, 1, user_data=(1 << 64) - 1)
        assert done(ring) == {(1 << 64) - 1: 1}


def test_the_aux_area_can_be_full(client: Client) -> None:
    with client.ring(4, aux_size=4 * 256 + 4096) as ring:
        namespace = client.namespace("aux")
        keys = [b"%03d" % number + b"x" * 200 for number in range(15)]
        first = ring.prep_exists(namespace, keys)
        with pytest.raises(BlockingIOError):
            ring.prep_exists(namespace, keys)
        assert done(ring) == {0: 0}
        assert not first.any()
        ring.prep_exists(namespace, keys)
        assert done(ring) == {0: 0}
    with pytest.raises(ValueError, match="aux area"):
        client.ring(4, aux_size=100)


def test_what_cannot_be_registered_raises(client: Client, path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"x")
    (tmp_path / "elsewhere").write_bytes(b"x")
    with path.open("rb") as opened:
        with pytest.raises(PermissionError):
            client.file(opened.fileno(), "rw")
        assert isinstance(client.file(opened.fileno(), "r"), File)
    for wrong in (
        lambda: client.file(tmp_path / "elsewhere"),
        lambda: client.file(client.mount),
        lambda: client.iov(0),
    ):
        with pytest.raises((OSError, ValueError)):
            wrong()
    with pytest.raises(ValueError):
        client.file(path, "a")
    with pytest.raises(FileNotFoundError):
        client.namespace("absent", create=False)
    for entries in (0, 3, 1 << 20):
        with pytest.raises(ValueError):
            client.ring(entries)


def test_a_closed_ring_is_closed(client: Client) -> None:
    ring = client.ring(4)
    ring.close()
    ring.close()
    for call in (ring.submit, ring.wait, ring.peek):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_there_is_no_mount(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path)


def test_a_client_waits_where_many_wait_to_be_accepted(tmp_path: Path) -> None:
    """As long as its deadline allows: it was told at once that no daemon answers."""
    (tmp_path / ".kvfuse").mkdir()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        listener.bind(str(tmp_path / SOCKET_PATH))
        listener.listen(0)
        other.connect(str(tmp_path / SOCKET_PATH))
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"accepted no connection within 0\.2 s"):
            connect(tmp_path, deadline=0.2)
        assert time.monotonic() - started >= 0.19


def test_a_path_inside_finds_the_mount(shared_mount: KvfuseMount) -> None:
    folder = shared_mount.point / "a" / "b"
    folder.mkdir(parents=True)
    with connect(folder / "absent") as client:
        assert client.mount == str(shared_mount.point)


def test_the_completions_of_a_daemon_that_lies_are_not_taken(client: Client, path: Path) -> None:
    path.write_bytes(b"x")
    ring = client.ring(4)
    ring.attached._cq._words[Word.CQ_TAIL] += 1
    with pytest.raises(Disconnected):
        ring.peek()
    ring.attached._cq._words[Word.CQ_TAIL] -= 1
    ring.attached._sq._words[Word.SQ_HEAD] += 1
    with pytest.raises(Disconnected):
        ring.prep_read(client.iov(10), 0, client.file(path), 0, 1)
