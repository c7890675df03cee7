"""Two daemons, two mount points, one volume: names in etcd, bytes in files of one folder, in RADOS, or on a device."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from cluster_lab import BYTES_OF_HOSTS, MEMORY
from loop_lab import loop_devices
from mounting import KvfuseMount, conf_elsewhere, shared_conf, wait_until

from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

SETTINGS = "user.kvfuse.namespace"
DEVICE_SIZE = 640 << 20
NAMES = 500
"""made by both mounts in one folder"""


@pytest.fixture(scope="module", params=BYTES_OF_HOSTS)
def mounts(request: pytest.FixtureRequest, etcd: EtcdServers) -> Iterator[tuple[KvfuseMount, KvfuseMount]]:
    """The volume as two hosts have it mounted. At the end both are unmounted, and it must be clean."""
    ceph = request.getfixturevalue("ceph") if request.param == "rados" else None
    with tempfile.TemporaryDirectory(prefix="kvfuse-two-") as base:
        made = []
        stack = ExitStack()
        try:
            if request.param == "block":
                memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
                devices = stack.enter_context(loop_devices(Path(memory) / "image", DEVICE_SIZE, 2))
                conf = shared_conf(Path(base), etcd, device=devices[0])
                confs = [conf, conf_elsewhere(conf, *devices)]
            else:
                confs = [shared_conf(Path(base), etcd, ceph)] * 2
            for name, conf in zip(("one", "two"), confs, strict=True):
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
            stack.close()


@pytest.fixture
def folders(mounts: tuple[KvfuseMount, KvfuseMount], request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A folder of the test's own, as both mounts have it."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (mounts[0].point / name).mkdir()
    return mounts[0].point / name, mounts[1].point / name


@pytest.fixture
def names_alone(request: pytest.FixtureRequest) -> None:
    """The test asks nothing of bytes, and is long: two engines for them are enough."""
    if "[block]" in request.node.name:
        pytest.skip("about names alone")


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


def test_what_one_renames_or_replaces_the_other_sees_at_once(folders: tuple[Path, Path]) -> None:
    """Also of names that a mount changed itself, which it answers for without a question."""
    for number in range(20):
        one, two = folders if number % 2 else folders[::-1]
        put(one, "name", b"of one")
        put(two, "name", b"of two, which is longer")
        assert (one / "name").stat().st_size == 23, number
        assert (one / "name").read_bytes() == b"of two, which is longer"
        put(one, "name", b"of one")
        (two / "name").rename(two / "moved")
        assert not (one / "name").exists()
        assert (one / "moved").read_bytes() == b"of one"
        (one / "moved").unlink()
        with pytest.raises(FileNotFoundError):
            (two / "moved").read_bytes()


def test_every_change_is_seen_by_the_other_at_once(folders: tuple[Path, Path]) -> None:
    """Looks follow changes within milliseconds, often enough to meet what may still be believed."""
    for number in range(10):
        here, there = folders if number % 2 else folders[::-1]
        (here / "folder").mkdir()
        assert (there / "folder").is_dir()
        assert [path.name for path in there.iterdir()] == ["folder"]
        (here / "folder").chmod(0o711)
        assert (there / "folder").stat().st_mode & 0o777 == 0o711
        (here / "folder" / "file").write_bytes(b"one")
        (there / "folder" / "file").chmod(0o600)
        assert (here / "folder" / "file").stat().st_mode & 0o777 == 0o600
        os.truncate(here / "folder" / "file", 2)
        assert (there / "folder" / "file").read_bytes() == b"on"
        os.link(there / "folder" / "file", there / "folder" / "link")
        assert (here / "folder" / "file").stat().st_nlink == 2
        (here / "folder" / "file").unlink()
        assert not (there / "folder" / "file").exists()
        (there / "folder").rename(there / "moved")
        assert not (here / "folder").exists()
        assert not (here / "folder" / "link").exists()
        assert (here / "moved" / "link").read_bytes() == b"on"
        with pytest.raises(FileNotFoundError):
            (here / "folder" / "new").write_bytes(b"lost")
        (here / "folder").mkdir()
        assert os.listdir(there / "folder") == []
        (here / "folder").rmdir()
        assert not (there / "folder").exists()
        (there / "moved" / "link").unlink()
        (there / "moved").rmdir()
        assert not (here / "moved").exists()


@pytest.mark.usefixtures("names_alone")
def test_a_path_leads_where_the_other_mount_let_it_lead(folders: tuple[Path, Path]) -> None:
    for number in range(20):
        one, two = folders if number % 2 else folders[::-1]
        (one / "above" / "folder").mkdir(parents=True)
        (one / "above" / "folder" / "file").write_bytes(b"before")
        assert (two / "above" / "folder" / "file").read_bytes() == b"before"
        (one / "above").rename(one / "away")
        with pytest.raises(FileNotFoundError):
            (two / "above" / "folder" / "file").read_bytes()
        (one / "above" / "folder").mkdir(parents=True)
        (one / "above" / "folder" / "file").write_bytes(b"after")
        assert (two / "above" / "folder" / "file").read_bytes() == b"after", number
        assert (two / "away" / "folder" / "file").read_bytes() == b"before"
        (two / "above" / "folder" / "file").unlink()
        assert os.listdir(one / "above" / "folder") == []
        shutil.rmtree(one / "above")
        with pytest.raises(FileNotFoundError):
            os.listdir(two / "above")
        shutil.rmtree(two / "away")


def test_descriptors_go_with_what_they_opened(folders: tuple[Path, Path]) -> None:
    """Whatever its names are elsewhere by now: no call by descriptor is told that it is stale."""
    one, two = folders
    (one / "folder").mkdir()
    put(one / "folder", "file", b"bytes")
    directory = os.open(one / "folder", os.O_DIRECTORY | os.O_RDONLY)
    with (one / "folder" / "file").open("r+b") as file:
        for number in range(20):
            here, there = ("folder", "away")[:: 1 - 2 * (number % 2)]
            (two / here).rename(two / there)
            assert os.fstat(directory).st_ino == (one / there).stat().st_ino, number
            assert os.fstat(file.fileno()).st_size == 5
            with open("other", "xb", opener=partial(os.open, dir_fd=directory)) as other:
                other.write(b"%d" % number)
            assert sorted(os.listdir(directory)) == ["file", "other"]
            assert (two / there / "other").read_bytes() == b"%d" % number
            os.unlink("other", dir_fd=directory)
        put(two / there, "file", b"of two")
        file.write(b"x")
        file.flush()
        assert os.fstat(file.fileno()).st_size == 5
        assert (one / there / "file").read_bytes() == b"of two"
    os.close(directory)


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


@pytest.mark.usefixtures("names_alone")
def test_namespaces_are_the_same_on_both(folders: tuple[Path, Path], mounts: tuple[KvfuseMount, KvfuseMount]) -> None:
    one, two = [folder / "space" for folder in folders]
    one.mkdir()
    os.setxattr(one, SETTINGS, b"kind=blocks admission=all ttl=3600")
    os.setxattr(one, "user.kvfuse.publish", b"strict")
    wait_until(lambda: b"ttl=3600" in _settings(two), "the other mount hears of the namespace")
    os.setxattr(two, f"{SETTINGS}.ttl", b"60")
    wait_until(lambda: b"ttl=60" in _settings(one), "the first one hears of the change")
    for folder in folders:
        (folder / "outside").write_bytes(b"x")
        with pytest.raises(OSError, match="cross-device") as refused:
            (folder / "outside").rename(folder / "space" / "inside")
        assert refused.value.errno == errno.EXDEV
    for number in range(20):
        put((one, two)[number % 2], f"block{number}", bytes(50_000))
    with pytest.raises(OSError, match="not empty"):
        os.removexattr(two, SETTINGS)

    def count() -> int:
        """Of blocks: each mount counts those that it evicts."""
        number = one.stat().st_ino
        rows = [
            row
            for mount in mounts
            for row in json.loads((mount.point / ".kvfuse" / "stats").read_bytes())["namespaces"]
            if row["number"] == number
        ]
        return sum(row["used"]["blocks"] for row in rows)

    assert count() == 20
    assert sorted(os.listdir(one)) == sorted(os.listdir(two)) == sorted(f"block{number}" for number in range(20))
    for number in range(20):
        ((one, two)[number % 3 % 2] / f"block{number}").unlink()
    for folder in (one, two):
        wait_until(lambda folder=folder: not os.listdir(folder), "each mount hears of the other's removals")
    os.removexattr(two, SETTINGS)
    wait_until(lambda: not _settings(one), "the first one hears of the end")


def _settings(folder: Path) -> bytes:
    try:
        return os.getxattr(folder, SETTINGS)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return b""
