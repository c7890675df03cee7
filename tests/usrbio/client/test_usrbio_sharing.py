"""What threads of one process do to each other through one client, and clients through one block or memory."""

from __future__ import annotations

import os
from collections import deque
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mounting import KvfuseMount, wait_until
from ring_calls import PATIENCE_S, done
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore, Client, connect
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.lanes import Lane
from kvfuse.usrbio.client.session import Session

pytestmark = pytest.mark.engines("lmdb+file")


class Raced(deque[int]):
    """Another thread takes one whenever somebody has looked how many there are."""

    def __len__(self) -> int:
        length = super().__len__()
        if length:
            self.pop()
        return length


def test_rings_take_pins_to_give_back_from_each_other(client: Client, shared_mount: KvfuseMount) -> None:
    with client.ring(8) as ring:
        client.session.unpins = Raced([10, 11, 12])
        namespace = client.namespace(shared_mount.point)
        ring.prep_exists(namespace, [b"x"], user_data=5)
        assert done(ring) == {5: 0}


def test_a_ring_that_is_dropped_takes_its_unread_views_along(client: Client, shared_mount: KvfuseMount) -> None:
    with BlockStore(client, "unread") as store, client.ring(8) as other:
        store.put("key", b"x" * 1000)
        with client.ring(8) as ring:
            for _ in range(8):
                ring.prep_get(None, 0, store.namespace, b"key", 0, view=True)
            ring.submit()
            (first,) = ring.wait(8, PATIENCE_S, 1)
            view = ring.view(first)
            assert pin_count(shared_mount) == 8
        assert pin_count(shared_mount) == 1, "of the one that was taken"
        assert view == b"x" * 1000
        view.release()
        other.submit()
        wait_until(lambda: pin_count(shared_mount) == 0, "the last pin")


def pin_count(mount: KvfuseMount) -> int:
    return int(stats(mount)["rings"]["pins"])


def test_who_reconnects_after_another_thread_leaves_its_connection_alone(mount: KvfuseMount) -> None:
    with connect(mount.point) as client, BlockStore(client, "blocks") as store:
        first = client.session
        assert not first.has_ended
        client.reconnect()
        assert client.session is first, "nothing was wrong with it"
        mount.kill()
        assert first.has_ended
        mount.mount()
        client.reconnect()
        second = client.session
        assert second is not first
        with client.ring(8) as ring:
            ring.prep_exists(store.namespace, [b"x"], user_data=5)
            client.reconnect()
            assert done(ring) == {5: 0}
        assert client.session is second


def test_a_reconnection_that_fails_leaves_no_connection_behind(
    mount: KvfuseMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Session] = []

    def refused(iov: Iov, session: Session) -> None:
        made.append(session)
        raise OSError("no room for it")

    with connect(mount.point) as client, client.iov(4096):
        client.session.close()
        with monkeypatch.context() as patch:
            patch.setattr(Iov, "register", refused)
            with pytest.raises(OSError, match="no room for it"):
                client.reconnect()
        assert made[0].has_ended
        client.reconnect()
        assert not client.session.has_ended


def test_a_part_of_shared_memory_ends_where_it_ends(client: Client, path: Path) -> None:
    """Neither a negative offset nor a long read touch what lies beside it, although the daemon could reach that."""
    path.write_bytes(b"x" * 8192)
    memory = SharedMemory(create=True, size=3 * 4096)
    try:
        whole = np.frombuffer(memory.buf, np.uint8)
        with client.wrap(whole[4096:8192]) as iov, client.ring(8) as ring, client.file(path) as file:
            assert iov.in_place
            for offsets in (-1, np.array([-1, 0]), [0, -1]):
                with pytest.raises(ValueError, match="offset -1 in an iov"):
                    ring.prep_reads(iov, offsets, file, 0, 1)
            with pytest.raises(ValueError, match="offset -1 in an iov"):
                ring.prep_read(iov, -1, file, 0, 1)
            with pytest.raises(ValueError, match="offset -1 in an iov"):
                ring.prep_write(iov, -1, file, 0, 1)
            namespace = client.namespace(path.parent)
            with pytest.raises(ValueError, match="offset -1 in an iov"):
                ring.prep_get(iov, -1, namespace, b"key", 1)
            ring.prep_read(iov, 0, file, 0, 4097, user_data=1)
            ring.prep_read(iov, 4095, file, 0, 1, user_data=2)
            assert done(ring, 2) == {1: -14, 2: 1}
        assert whole.tolist() == [0] * 8191 + [ord("x")] + [0] * 4096
        del whole
    finally:
        memory.close()
        memory.unlink()


def test_a_block_that_grows_while_it_is_got_is_there(
    client: Client, shared_mount: KvfuseMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared_mount.point / "growing").mkdir()  # of files: a block of a cache is another one when it has grown
    with BlockStore(client, "growing") as store:
        path = Path(store.namespace.path) / "key"
        path.write_bytes(b"x" * 1000)  # not in shared memory: its size is asked for first
        move, sizes = Lane.move, [5000, 300_000]

        def after_it_grew(lane: Lane, *arguments: Any) -> Any:
            if sizes:
                path.write_bytes(os.urandom(sizes.pop(0)))
            return move(lane, *arguments)

        monkeypatch.setattr(Lane, "move", after_it_grew)
        view = store.get("key")
        assert view is not None
        assert view == path.read_bytes()
        assert len(view) == 300_000
