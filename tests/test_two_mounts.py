"""Two daemons, two mount points, one volume: names in etcd, bytes in files of one folder, or in RADOS."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from mounting import KvfuseMount, shared_conf, wait_until

from kvfuse.cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

NAMES = 1_000
"""made by both mounts in one folder"""


@pytest.fixture(scope="module", params=["file", "rados"])
def mounts(request: pytest.FixtureRequest, etcd: EtcdServers) -> Iterator[tuple[KvfuseMount, KvfuseMount]]:
    """The volume as two hosts have it mounted. At the end both are unmounted, and it must be clean."""
    ceph = request.getfixturevalue("ceph") if request.param == "rados" else None
    with tempfile.TemporaryDirectory(prefix="kvfuse-two-") as base:
        conf = shared_conf(Path(base), etcd, ceph)
        made = []
        try:
            for name in ("one", "two"):
                (Path(base) / name).mkdir()
                mount = KvfuseMount(Path(base) / name, source=conf)
                made.append(mount)
                mount.mount()
            yield made[0], made[1]
            for mount in made:
                mount.check_unexpected_errors()
                mount.unmount()
            made[0].fsck()
        finally:
            for mount in made:
                mount.remove()


@pytest.fixture
def folders(mounts: tuple[KvfuseMount, KvfuseMount], request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A folder of the test's own, as both mounts have it."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (mounts[0].point / name).mkdir()
    return mounts[0].point / name, mounts[1].point / name


def together(*works: Callable[[], object]) -> list[object]:
    """Run these at the same time; their results."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def put(folder: Path, name: str, data: bytes) -> None:
    """As engines do: a temporary name, then the rename."""
    temporary = folder / f"{name}.tmp-{folder.parent.parent.name}"
    temporary.write_bytes(data)
    temporary.rename(folder / name)


def test_what_one_closes_the_other_opens(folders: tuple[Path, Path], rng: random.Random) -> None:
    for number in range(20):
        writer, reader = rng.sample(folders, 2)
        data = rng.randbytes(rng.randrange(300_000))
        (writer / "name").write_bytes(data)
        assert (reader / "name").read_bytes() == data, number
        assert (reader / "name").stat().st_size == len(data)
        put(writer, f"put-{number}", data)
        assert hashlib.sha256((reader / f"put-{number}").read_bytes()).digest() == hashlib.sha256(data).digest()


def test_names_are_agreed_upon(folders: tuple[Path, Path]) -> None:
    one, two = folders
    (one / "folder").mkdir()
    (two / "folder" / "file").write_text("x")
    with pytest.raises(OSError) as caught:
        (one / "folder").rmdir()
    assert caught.value.errno == errno.ENOTEMPTY
    (one / "folder" / "file").rename(one / "moved")
    assert not (two / "folder" / "file").exists()
    assert (two / "moved").read_text() == "x"
    os.link(two / "moved", two / "linked")
    assert (one / "linked").stat().st_nlink == 2
    (one / "moved").unlink()
    assert (two / "linked").stat().st_nlink == 1
    (two / "folder").rmdir()
    assert sorted(os.listdir(one)) == ["linked"]


def test_an_exclusive_create_is_won_by_one(folders: tuple[Path, Path]) -> None:
    def create(folder: Path, name: str) -> bool:
        try:
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    for number in range(50):
        won = together(*[partial(create, folder, f"name-{number}") for folder in folders for _ in range(2)])
        assert sum(map(bool, won)) == 1, number


def test_many_names_in_one_folder_none_lost_none_doubled(folders: tuple[Path, Path]) -> None:
    def fill(folder: Path, first: int) -> None:
        for number in range(first, NAMES, 4):
            (folder / f"name-{number}").touch()

    together(*[lambda first=first: fill(folders[first % 2], first) for first in range(4)])
    expected = sorted(f"name-{number}" for number in range(NAMES))
    assert sorted(os.listdir(folders[0])) == expected
    assert sorted(os.listdir(folders[1])) == expected
    assert len({entry.inode() for entry in os.scandir(folders[0])}) == NAMES


def test_renames_over_one_name(folders: tuple[Path, Path]) -> None:
    written = {b"%d" % number * 5000 for number in range(60)}

    def replace(folder: Path, first: int) -> None:
        for number in range(first, 60, 2):
            (folder / f"temporary-{number}").write_bytes(b"%d" % number * 5000)
            (folder / f"temporary-{number}").rename(folder / "final")
            assert (folder / "final").read_bytes() in written

    together(lambda: replace(folders[0], 0), lambda: replace(folders[1], 1))
    assert os.listdir(folders[0]) == os.listdir(folders[1]) == ["final"]
    assert (folders[0] / "final").read_bytes() == (folders[1] / "final").read_bytes()


def test_appends_of_both_survive(folders: tuple[Path, Path]) -> None:
    (folders[0] / "log").touch()

    def append(folder: Path, mark: bytes) -> None:
        for number in range(40):
            with (folder / "log").open("ab") as log:
                log.write(b"%s %d\n" % (mark, number))

    together(lambda: append(folders[0], b"one"), lambda: append(folders[1], b"two"))
    lines = (folders[0] / "log").read_bytes().splitlines()
    assert sorted(lines) == sorted(b"%s %d" % (mark, number) for mark in (b"one", b"two") for number in range(40))


def test_writes_of_both_to_parts_of_a_file_survive(folders: tuple[Path, Path]) -> None:
    size, part = 256 << 10, 4096
    (folders[0] / "file").write_bytes(bytes(size))

    def write(folder: Path, first: int) -> None:
        with (folder / "file").open("r+b", buffering=0) as file:
            for offset in range(first * part, size, 2 * part):
                file.seek(offset)
                file.write(bytes([1 + first]) * part)

    together(lambda: write(folders[0], 0), lambda: write(folders[1], 1))
    expected = (b"\1" * part + b"\2" * part) * (size // part // 2)
    assert (folders[0] / "file").read_bytes() == (folders[1] / "file").read_bytes() == expected


def test_a_removed_file_is_readable_where_it_is_open(folders: tuple[Path, Path], rng: random.Random) -> None:
    data = rng.randbytes(200_000)
    (folders[0] / "file").write_bytes(data)
    with (folders[1] / "file").open("rb") as file:
        (folders[0] / "file").unlink()
        assert not (folders[1] / "file").exists()
        for number in range(20):
            (folders[0] / f"other-{number}").write_bytes(rng.randbytes(200_000))
        assert file.read() == data


def has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def test_what_is_cached_of_a_relaxed_folder_is_corrected(folders: tuple[Path, Path]) -> None:
    one, two = folders
    os.setxattr(one, "user.kvfuse.publish", b"relaxed")
    wait_until(lambda: "user.kvfuse.publish" in os.listxattr(two), "the setting on the other mount")
    for number in range(10):
        (one / "name").write_text(f"{number}")
        wait_until(partial(has, two / "name", f"{number}"), "the content")
        (two / "name").unlink()
        wait_until(lambda: not (one / "name").exists(), "the removal")
