"""Following a directory of blocks: what is there, each change, whatever removes a block, and what nobody can tell."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from followed import Followed
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats

from kvfuse.errors import Disconnected
from kvfuse.native.blockforms import name_columns
from kvfuse.usrbio.client import BlockStore, Follower, PutHints
from kvfuse.usrbio.protocol.wire import NEWS_NAMES_MAX, unpack_keys
from kvfuse.volume.blocks.block_news import _RowNames, copy_names
from kvfuse.volume.views.news import PART_MAX, Watch

MIB = 1 << 20


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["tier_size=64MiB,capacity=400MiB"]) as mounted:
        yield mounted


@pytest.fixture
def folder(mount: KvfuseMount, tmp_path: Path) -> Path:
    path = mount.point / tmp_path.name
    path.mkdir()
    os.setxattr(path, "user.kvfuse.namespace", b"kind=blocks eviction=lru admission=all capacity=64MiB")
    return path


def listed(folder: Path) -> set[bytes]:
    return {os.fsencode(name) for name in os.listdir(folder)}


def test_what_is_there_is_told_first_and_then_each_change(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        (folder / "file").write_bytes(b"by a file")
        store.put_many(["block", "other", "a/b", "x" * 255], [b"x"] * 4)
        with Followed(folder) as followed:
            assert followed.names == listed(folder)
            (folder / "new.part").write_bytes(b"renamed when it is whole")
            (folder / "new.part").rename(folder / "new")
            store.put("more", b"x")
            store.put("more", b"another one")
            store.delete_many(["block", "absent"])
            (folder / "file").unlink()
            wait_until(lambda: followed.names == listed(folder), "all changes")
            assert {b"new", b"more", b"other"} < followed.names
            assert b"absent" not in followed.removed
            store.put("short", b"x", hints=PutHints(ttl=60))
            wait_until(lambda: b"short" in followed.names, "a put")
            os.setxattr(folder, "user.kvfuse.namespace.advance", b"100")
            wait_until(lambda: b"short" not in followed.names, "its end")
            os.setxattr(folder, "user.kvfuse.clear", b"1")
            wait_until(lambda: not followed.names, "the news")
            store.put("after", b"x")
            wait_until(lambda: followed.names == {b"after"}, "what came after")


def test_evicted_blocks_are_told_also_if_they_are_not_in_memory(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        assert store.put_many([f"before {number}" for number in range(500)], [b"x" * 60_000] * 500).all()
        mount.unmount()
        mount.mount()
    with BlockStore(mount.point, folder.name) as store, Followed(folder) as followed:
        assert len(followed.names) == 500
        for start in range(0, 3000, 100):
            store.put_many([f"key {start + number}" for number in range(100)], [b"x" * 60_000] * 100)
        wait_until(lambda: followed.names == listed(folder), "the same on both sides")
        assert sum(name.startswith(b"before") for name in followed.removed) == 500
        assert len(followed.removed) == len(set(followed.removed))


def test_many_threads_that_change_the_same_names(mount: KvfuseMount, folder: Path, rng: random.Random) -> None:
    stop = threading.Event()

    def change(seed: int) -> None:
        own = random.Random(seed)
        with BlockStore(mount.point, folder.name) as store:
            while not stop.is_set():
                keys = [f"key {own.randrange(200)}" for _ in range(own.randrange(1, 30))]
                if own.random() < 0.6:
                    store.put_many(keys, [b"x" * own.choice([1, 5000])] * len(keys))
                else:
                    store.delete_many(keys)

    threads = [threading.Thread(target=change, args=(rng.randrange(1 << 30),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with Followed(folder) as followed:
            before = stats(mount)["store"]["puts"]
            wait_until(lambda: stats(mount)["store"]["puts"] > before + 5000, "some puts")
            stop.set()
            for thread in threads:
                thread.join()
            wait_until(lambda: followed.names == listed(folder), "the same on both sides")
            assert followed.error is None
    finally:
        stop.set()


def test_who_is_too_slow_is_told_that_news_were_lost(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store, Follower(folder) as follower:
        for turn in range(2 * Watch.PACKED_MAX // 2000):
            store.put_many([f"{turn} {number:0200}" for number in range(2000)], [b"x"] * 2000)
        with pytest.raises(Disconnected):
            for _ in follower:
                pass


def test_a_folder_for_others_ends_what_is_followed(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        store.put("key", b"x")
        assert store.get_into("key", bytearray(1)) == 1
        with Followed(folder) as followed:
            folder.chmod(0o700 if folder.stat().st_mode & 0o077 else 0o755)
            if not store.exists(["key"]).any():
                wait_until(lambda: followed.error is not None, "the end")


def test_names_of_rows(rng: random.Random) -> None:
    """Beside a dictionary."""
    known, model = _RowNames(), dict[int, tuple[int, bytes]]()
    for sequence in range(1, 300):
        rows = np.array(rng.sample(range(5000 if sequence > 100 else 500), rng.randrange(1, 40)), np.int64)
        if rng.random() < 0.6:
            names = [rng.randbytes(rng.choice([1, 30, 64, 255 if sequence > 50 else 65])) for _ in rows]
            text, offsets, lengths = name_columns(names)
            copied = copy_names((text, offsets, lengths), np.arange(len(names)))
            gone = known.put(rows, np.full(len(rows), sequence, np.uint64), copied)
            assert unpack_keys(gone.pack(), len(gone.lengths)) == [
                model[row][1] for row in rows.tolist() if row in model
            ]
            model.update({row: (sequence, name) for row, name in zip(rows.tolist(), names, strict=True)})
        else:
            wanted = np.array([model.get(row, (7, b""))[0] + rng.choice([0, 0, 1]) for row in rows.tolist()], np.uint64)
            found = known.take(rows, wanted)
            same = [
                row for row, one in zip(rows.tolist(), wanted.tolist(), strict=True) if model.get(row, (0,))[0] == one
            ]
            assert unpack_keys(found.pack(), len(found.lengths)) == [model.pop(row)[1] for row in same]


def test_parts_fit_a_message() -> None:
    assert PART_MAX <= NEWS_NAMES_MAX
