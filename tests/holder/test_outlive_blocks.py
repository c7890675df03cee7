"""Files of blocks whose daemon is killed: what was closed stays, what is open for reading is readable."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import fails
from test_outlive import kill_daemon

from kvfuse.usrbio.client.block_store import BlockStore


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
        sketch.write(b"lost")
        sketch.flush()
        kill_daemon(mount)
        assert os.pread(there.fileno(), 10, 0) == b"7777777777"
        wait_until(lambda: stats(mount)["open_blocks"] >= 2, "blocks that are open to be found")
        (folder / "8").unlink()
        assert os.pread(gone.fileno(), 10, 0) == b"8888888888"
        with fails(errno.EIO):
            os.write(sketch.fileno(), b"more")
        with fails(errno.EIO):
            os.fsync(sketch.fileno())
        with fails(errno.EIO):
            os.close(os.dup(sketch.fileno()))
        with fails(errno.EIO):
            sketch.close()
    names = sorted(["empty", "put", *[str(number) for number in range(50) if number != 8]])
    assert sorted(os.listdir(folder)) == names
    for number in range(50):
        if number != 8:
            assert (folder / str(number)).read_bytes() == b"%d" % number * 50_000
    (folder / "new").write_bytes(b"again")
    (folder / "new").rename(folder / "7")
    assert (folder / "7").read_bytes() == b"again"
