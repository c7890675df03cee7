"""Quotas of namespaces at all doors of a real mount, and after its daemon was killed."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from errno import EDQUOT
from pathlib import Path
from typing import Any

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_calls import done

from kvfuse.usrbio.client import BlockStore, connect

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
CAPACITY = 4 * MIB


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["volume.capacity=128MiB", "volume.segment_size=32MiB"]) as mount:
        yield mount


def make_namespace(path: Path, **settings: Any) -> Path:
    path.mkdir()
    text = " ".join([f"{name}={value}" for name, value in settings.items()])
    os.setxattr(path, "user.kvfuse.namespace", text.encode())
    return path


def used(mount: KvfuseMount, folder: Path) -> tuple[int, int]:
    """(bytes, files)"""
    stats = json.loads((mount.point / ".kvfuse" / "stats").read_text())
    (row,) = [row for row in stats["namespaces"] if row["number"] == folder.stat().st_ino]
    assert row["capacity"] == CAPACITY
    return row["used"]["bytes"], row["used"]["files"]


def fill(folder: Path) -> int:
    """Blocks that went in until EDQUOT."""
    for number in range(2 * CAPACITY // BLOCK):
        try:
            (folder / f"{number}").write_bytes(os.urandom(BLOCK))
        except OSError as error:
            assert error.errno == EDQUOT
            (folder / f"{number}").unlink()
            return number
    raise AssertionError("no quota")


def test_files_are_refused_and_room_returns(mount: KvfuseMount) -> None:
    folder = make_namespace(mount.point / "n", capacity=CAPACITY)
    for _ in range(3):
        assert fill(folder) == CAPACITY // BLOCK
        assert used(mount, folder) == (CAPACITY, CAPACITY // BLOCK)
        (mount.point / "beside").write_bytes(bytes(8 * MIB))
        for path in folder.iterdir():
            path.unlink()
        wait_until(lambda: used(mount, folder) == (0, 0), "all room")


def test_blocks_and_ring_writes_are_refused(mount: KvfuseMount) -> None:
    folder = make_namespace(mount.point / "n", capacity=CAPACITY)
    with BlockStore(mount.point, "n") as store:
        count = 0
        with pytest.raises(OSError) as caught:
            for count in range(2 * CAPACITY // BLOCK):
                store.put(b"%d" % count, os.urandom(BLOCK))
        assert caught.value.errno == EDQUOT
        assert count == CAPACITY // BLOCK
        assert store.delete(b"0")
        store.put(b"again", os.urandom(BLOCK))
        assert store.delete(b"again")
    path = folder / "file"
    path.touch()
    with connect(mount.point) as client, client.iov(BLOCK) as iov, client.file(path, "rw") as file:
        ring = client.ring(8)
        ring.prep_write(iov, 0, file, 0, BLOCK, user_data=1)
        assert done(ring) == {1: BLOCK}
        ring.prep_write(iov, 0, file, 8 * MIB, BLOCK, user_data=2)
        assert done(ring) == {2: -EDQUOT}
        ring.close()
    assert used(mount, folder) == (CAPACITY, CAPACITY // BLOCK)


def test_mapped_pages_are_refused_when_they_are_written_back(mount: KvfuseMount) -> None:
    folder = make_namespace(mount.point / "n", capacity=CAPACITY)
    path = folder / "file"
    with path.open("w+b") as file:
        file.truncate(2 * CAPACITY)
        with mmap.mmap(file.fileno(), 2 * CAPACITY) as pages:
            pages[:] = os.urandom(2 * CAPACITY)
            with suppress(OSError):
                pages.flush()
        with suppress(OSError):
            os.fsync(file.fileno())
        assert used(mount, folder)[0] <= CAPACITY
    path.unlink()
    wait_until(lambda: used(mount, folder) == (0, 0), "all room")


def test_what_a_killed_daemon_leaves_is_what_is_counted(mount: KvfuseMount) -> None:
    folder = make_namespace(mount.point / "n", capacity=CAPACITY)
    ended = threading.Event()
    number = 0

    def write() -> None:
        nonlocal number
        while not ended.is_set():
            number += 1
            with suppress(OSError):
                (folder / "tmp").write_bytes(os.urandom(BLOCK))
                (folder / "tmp").rename(folder / f"{number % 50}")
                (folder / f"{(number * 7) % 50}").unlink()

    for _ in range(3):
        ended.clear()
        writer = threading.Thread(target=write)
        writer.start()
        enough = number + 200
        wait_until(lambda enough=enough: number > enough, "some writes")
        mount.kill()
        ended.set()
        writer.join()
        mount.fsck()
        mount.mount()
        size = sum([-(-path.stat().st_size // BLOCK) * BLOCK for path in folder.iterdir()])
        files = len(os.listdir(folder))
        assert used(mount, folder) == (size, files)
