"""Programs that do not notice that the daemon of a mount is killed again and again; publishing is relaxed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import PATIENCE_S, KvfuseMount, temporary_mount
from ring_lab import wait_for_rings
from test_outlive import kill_daemon

from kvfuse.usrbio.client import connect

KILLS_MIN = 5


@contextmanager
def killer(mount: KvfuseMount) -> Iterator[list[int]]:
    """Kills each daemon of the mount a moment after it answers; yields the process numbers so far."""
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.3):
            if mount.log.read_text().count("is mounted on") <= len(killed):
                continue  # the next one is not ready
            pid = json.loads((mount.point / ".kvfuse" / "stats").read_text())["pid"]
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(("outlive=true",)) as mounted:
        yield mounted


@pytest.mark.ring(3)
def test_a_database_is_written(mount: KvfuseMount) -> None:
    with killer(mount) as killed:
        database = sqlite3.connect(mount.point / "database", timeout=60)
        database.execute("create table rows (number integer, content blob)")
        number = 0
        while len(killed) < KILLS_MIN or number < 20:
            database.execute("insert into rows values (?, ?)", (number, bytes(number * 100)))
            database.commit()
            number += 1
        assert database.execute("select count(*) from rows").fetchone() == (number,)
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        database.close()


@pytest.mark.ring(3)
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_repository_is_cloned(mount: KvfuseMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    words = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", source]
    subprocess.run(["git", "init", "-q", source], check=True)
    for number in range(300):
        folder = source / f"folder {number % 30}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}").write_bytes(os.urandom(number * 50))
    subprocess.run([*words, "add", "."], check=True)
    subprocess.run([*words, "commit", "-qm", "all"], check=True)
    with killer(mount) as killed:
        number = 0
        while len(killed) < KILLS_MIN:
            number += 1
            clone = mount.point / f"clone {number}"
            subprocess.run(["git", "clone", "-q", "--no-hardlinks", source, clone], check=True)
            subprocess.run(["git", "-C", clone, "fsck", "--strict"], check=True)
            assert not subprocess.run(["git", "-C", clone, "status", "--short"], check=True, capture_output=True).stdout


def test_what_rings_wrote_is_there(rng: random.Random) -> None:
    """Each daemon is killed as soon as the client has the completions."""
    with temporary_mount(("outlive=true", "publish.window=600", "publish.mode=relaxed")) as mount:
        wait_for_rings(mount)
        path, size = mount.point / "file", 3 << 20
        data = bytearray(rng.randbytes(size))
        path.write_bytes(data)
        with (
            connect(mount.point) as client,
            client.iov(1 << 20) as iov,
            client.ring(64) as ring,
            client.file(path, "rw") as file,
        ):
            for number in range(6):
                length = rng.choice([100, 5000, 70_000])
                offsets = [rng.randrange(size // length + 4) * length for _ in range(rng.choice([1, 3]))]
                piece = rng.randbytes(length)
                iov.array[: len(piece)] = memoryview(piece)
                for offset in set(offsets):
                    ring.prep_writes(iov, [0], file, [offset], length)
                    data.extend(bytes(max(0, offset + length - len(data))))
                    data[offset : offset + length] = piece
                ring.submit()
                count = len(set(offsets))
                assert ring.wait(count, PATIENCE_S)["result"].tolist() == [length] * count
                kill_daemon(mount)
                size = len(data)
                assert path.stat().st_size == size, number
                assert path.read_bytes() == data, number
        mount.unmount()
        mount.fsck()
