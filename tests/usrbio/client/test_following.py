"""Following the blocks of a folder: what is there, each change, and who may."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_lab import assert_fails, kvfuse
from followed import Followed
from mounting import KVFUSE, KvfuseMount, temporary_mount, wait_until
from posix_calls import as_user, fails, opened

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import BlockStore, Follower, NewsKind
from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.protocol.wire import Request
from kvfuse.volume.views.news import Watch

BLOCK = 64 << 10


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=64MiB,kind=blocks,admission=all,allow_other"]) as mount:
        yield mount


@pytest.fixture
def folder(mount: KvfuseMount, tmp_path: Path) -> Path:
    """A new one, in the cache."""
    path = mount.point / tmp_path.name
    path.mkdir()
    return path


def test_what_is_there_is_told_first_and_then_each_change(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        (folder / "file").write_bytes(b"by a file")
        (folder / "inner").mkdir()
        store.put("block", bytes(BLOCK))
        with Followed(folder) as followed:
            assert followed.names == {b"file", b"block"}
            (folder / "new.part").write_bytes(b"renamed when it is whole")
            (folder / "new.part").rename(folder / "new")
            store.put("more", bytes(BLOCK))
            store.delete("block")
            (folder / "file").unlink()
            wait_until(lambda: followed.names == {b"new", b"more"}, "all changes")


def test_evicted_blocks_are_told(mount: KvfuseMount, folder: Path) -> None:
    keys = [f"{number}" for number in range(2 * (64 << 20) // BLOCK)]
    with BlockStore(mount.point, folder.name) as store, Followed(folder) as followed:
        for start in range(0, len(keys), 64):
            store.put_many(keys[start : start + 64], [bytes(BLOCK)] * 64)
        assert len(os.listdir(folder)) < len(keys) // 2
        wait_until(
            lambda: {os.fsencode(name) for name in os.listdir(folder)} == followed.names, "the same on both sides"
        )
        assert followed.removed, "what was stored and evicted at once need not be told; all the rest is"


def test_a_cleared_namespace_is_told_at_once(mount: KvfuseMount) -> None:
    path = mount.point / "cleared"
    assert kvfuse("namespace", "create", path, "--kind", "blocks", "--admission", "all").returncode == 0
    with BlockStore(mount.point, path.name) as store:
        store.put_many([f"{number}" for number in range(300)], [b"x"] * 300)
        with Followed(path) as followed:
            assert len(followed.names) > 200  # what other tests left may have had some evicted
            assert kvfuse("namespace", "clear", path).returncode == 0
            wait_until(lambda: not followed.names, "the news")
            store.put("after", b"x")
            wait_until(lambda: followed.names == {b"after"}, "what came after")
            assert len(followed.removed) < 100


def test_changes_while_what_is_there_is_told(mount: KvfuseMount, folder: Path) -> None:
    """Of many blocks, some of which come and go meanwhile."""
    with BlockStore(mount.point, folder.name) as store:
        store.put_many([f"first{number}" for number in range(500)], [b"x"] * 500)
        stop = threading.Event()

        def change() -> None:
            number = 0
            while not stop.is_set():
                store.put(f"later{number % 50}", b"x")
                store.delete(f"later{(number + 25) % 50}")
                store.delete(f"first{number % 500}")
                number += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            with Followed(folder) as followed:
                stop.set()
                thread.join()
                wait_until(lambda: {os.fsencode(name) for name in os.listdir(folder)} == followed.names, "the same")
        finally:
            stop.set()
            thread.join()


def test_who_is_too_slow_is_told_that_news_were_lost(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store, Follower(folder) as follower:
        for turn in range(2 * Watch.PACKED_MAX // 1000):
            store.put_many([f"{turn} {number:0200}" for number in range(1000)], [b"x"] * 1000)
        with pytest.raises(Disconnected):
            for _ in follower:
                pass


@pytest.mark.root
def test_who_may_not_list_a_folder_may_not_follow_it(mount: KvfuseMount, folder: Path) -> None:
    """Also with a descriptor that root gave it."""
    folder.chmod(0o711)
    with as_user(1234, 1234), fails(errno.EACCES):
        Follower(folder)
    with opened(folder, os.O_RDONLY) as descriptor, as_user(1234, 1234):
        session = Session(mount.point, 5.0)
        handle = session.request(Request.OPEN_NAMESPACE, 0, descriptors=[descriptor])[0].values[0]
        with fails(errno.EACCES):
            session.request(Request.FOLLOW, handle)
        with fails(errno.EBADF):
            session.request(Request.FOLLOW, handle + 1)
        session.close()


@pytest.mark.root
def test_a_user_has_so_many_followers(folder: Path) -> None:
    with as_user(1234, 1234), ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(Follower(folder))
        with fails(errno.EDQUOT):
            Follower(folder)


@pytest.mark.root
def test_who_may_no_longer_hears_no_more(folder: Path) -> None:
    folder.chmod(0o755)
    with as_user(1234, 1234):
        follower = Follower(folder)
    with follower:
        news = iter(follower)
        assert next(news).kind is NewsKind.READY
        folder.chmod(0o700)
        (folder / "secret").write_bytes(b"x")
        with pytest.raises(Disconnected):
            next(news)


def test_what_is_no_cache_is_not_followed() -> None:
    with temporary_mount(["capacity=64MiB"]) as plain, fails(errno.EINVAL):
        Follower(plain.point)


def test_a_follower_ends_with_its_daemon() -> None:
    with temporary_mount(["capacity=64MiB,kind=blocks"]) as other:
        followed = Followed(other.point)
        with followed:
            other.unmount()
            wait_until(lambda: followed.error is not None, "the end")


def test_the_command_prints_a_line_for_each(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    done = kvfuse("events", folder, "--once")
    assert (done.returncode, done.stdout) == (0, "present file\nready\n")
    with subprocess.Popen([*KVFUSE, "events", folder, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        read = process.stdout.readline
        assert [json.loads(read()), json.loads(read())] == [{"event": "present", "name": "file"}, {"event": "ready"}]
        (folder / "file").unlink()
        assert json.loads(read()) == {"event": "removed", "name": "file"}
        process.terminate()


def test_the_command_says_what_is_wrong(tmp_path: Path, folder: Path) -> None:
    assert_fails(kvfuse("events", tmp_path), 1, "not inside a kvfuse mount")
    assert_fails(kvfuse("events", folder / "absent"), 1, "No such file")
