"""Files of blocks whose daemon is killed: what was closed stays, and what is open goes on."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from scale import scaled
from test_outlive import kill_daemon

from kvfuse.usrbio.client.block_store import BlockStore

KILLS = 8


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(("outlive=true",)) as mounted:
        yield mounted


@pytest.fixture
def folder(mount: KvfuseMount) -> Path:
    folder = mount.point / "kv"
    folder.mkdir()
    os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
    return folder


def stats(mount: KvfuseMount) -> dict[str, int]:
    found = json.loads((mount.point / ".kvfuse" / "stats").read_text())["block_files"]
    return dict(found)


def test_files_of_blocks_outlive_the_daemon(mount: KvfuseMount, folder: Path) -> None:
    for number in range(50):
        (folder / f"tmp-{number}").write_bytes(b"%d" % number * 50_000)
        (folder / f"tmp-{number}").rename(folder / str(number))
    with BlockStore(mount.point, "kv") as store:
        store.put(b"put", b"put")
    (folder / "empty").touch()
    with (folder / "7").open("rb") as there, (folder / "8").open("rb") as gone, (folder / "new").open("wb") as sketch:
        sketch.write(b"begun, ")
        sketch.flush()
        kill_daemon(mount)
        assert os.pread(there.fileno(), 10, 0) == b"7777777777"
        wait_until(lambda: stats(mount)["open_blocks"] >= 2, "blocks that are open to be found")
        (folder / "8").unlink()
        assert os.pread(gone.fileno(), 10, 0) == b"8888888888"
        sketch.write(b"and ended")
        sketch.flush()
        os.fsync(sketch.fileno())
        os.close(os.dup(sketch.fileno()))
    assert (folder / "new").read_bytes() == b"begun, and ended"
    names = sorted(["empty", "new", "put", *[str(number) for number in range(50) if number != 8]])
    assert sorted(os.listdir(folder)) == names
    for number in range(50):
        if number != 8:
            assert (folder / str(number)).read_bytes() == b"%d" % number * 50_000
    (folder / "new").write_bytes(b"again")
    (folder / "new").rename(folder / "7")
    assert (folder / "7").read_bytes() == b"again"


def test_stores_beside_kills(mount: KvfuseMount, folder: Path, rng: random.Random) -> None:
    """A file is written, closed and renamed once, whatever comes, and is found under its name."""
    for number in range(20):  # C makes files where there are blocks
        (folder / f"first-{number}").write_bytes(b"first")
    stored, is_over = dict[str, bytes](), threading.Event()

    def store() -> None:
        while not is_over.is_set():
            name, data = f"block-{rng.randrange(200)}", rng.randbytes(rng.choice([1, 5000, 65_536, 1 << 21]))
            temporary = folder / f"{name}.tmp"
            with temporary.open("wb", buffering=0) as file:
                for start in range(0, len(data), 1 << 20):
                    file.write(data[start : start + (1 << 20)])
            temporary.rename(folder / name)
            stored[name] = data
            assert (folder / name).read_bytes() == data

    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(store)
        for _ in range(scaled(KILLS)):
            before = len(stored)
            wait_until(lambda before=before: storing.done() or len(stored) > before, "a store")
            kill_daemon(mount)
        is_over.set()
        storing.result()
    print(f"{len(stored)} names stored")
    assert {name: (folder / name).read_bytes() for name in stored} == stored
    assert stats(mount)["sketches"] == 0


def test_files_are_made_in_c(mount: KvfuseMount, folder: Path) -> None:
    (folder / "first").write_bytes(b"first")
    for number in range(50):
        (folder / "tmp").write_bytes(b"%d" % number)
        (folder / "tmp").rename(folder / str(number))
    said = json.loads((mount.point / ".kvfuse" / "stats").read_text())["fs"]["answered_in_c"]
    # Python answers the first ones, and one a second.
    assert all(said[kind] >= 25 for kind in ("create", "write", "flush", "release", "rename", "lookup")), said
