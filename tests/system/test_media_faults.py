"""A medium that fails below a volume is an error of the bytes that it lost: no daemon and no command dies of it.

Segment files and data.mdb are cut, or have bad sectors (`bad_medium`), while they are mapped and before.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from bad_medium import bad_medium
from mounting import KVFUSE, PATIENCE_S, KvfuseMount
from ring_lab import stats, wait_for_rings

from kvfuse.usrbio.client import BlockStore, connect

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]

WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", "volume.chunk_size=1MiB", "cache.tier_size=32MiB")
SIZE = 1 << 20
PAGE = 4096
COLUMNS = 128
"""reads of one batch"""
LOST = SIZE // 2
"""offset in the file from where on its bytes cannot be read"""


class Lab:
    """A mounted volume with two files in one segment; the later one is about to lose bytes."""

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.mount = KvfuseMount(base, WORDS)
        self.data = {name: rng.randbytes(SIZE) for name in ("one", "two")}

    def prepare(self) -> None:
        self.mount.mount()
        os.mkdir(self.mount.point / "keys")
        places = {}
        for name, data in self.data.items():
            path = self.mount.point / "keys" / name
            with path.open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
            (row,) = json.loads(os.getxattr(path, "kvfuse.info"))["extents"]
            places[name] = (row["segment"], row["offset"])
        assert places["one"][0] == places["two"][0]
        self.good, self.victim = sorted(places, key=lambda name: places[name])
        self.place = places[self.victim][1]
        self.segment = self.mount.volume / "segments" / f"{places['one'][0]:08x}.seg"

    def path(self, name: str) -> Path:
        return self.mount.point / "keys" / name

    def drop_caches(self) -> None:
        """The kernel's pages of the files; those of the segments stay."""
        for name in self.data:
            descriptor = os.open(self.path(name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def check_alive(self) -> None:
        """The daemon answers, counted what happened, and the other file is whole."""
        self.drop_caches()
        assert self.path(self.good).read_bytes() == self.data[self.good]
        assert stats(self.mount)["segments"]["failed_reads"] >= 1
        assert f"{self.segment} at " in self.mount.log.read_text()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*KVFUSE, *arguments], capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
        )


@pytest.fixture
def lab(rng: random.Random) -> Iterator[Lab]:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-media-"))
    made = Lab(base, rng)
    try:
        made.prepare()
        yield made
        if made.mount.is_mounted:
            made.mount.check_unexpected_errors()
    finally:
        made.mount.remove()
        shutil.rmtree(base)


# -- how bytes are read -----------------------------------------------------------------------------


def by_file(lab: Lab, offset: int) -> bytes | int:
    lab.drop_caches()
    descriptor = os.open(lab.path(lab.victim), os.O_RDONLY)
    try:
        return os.pread(descriptor, PAGE, offset)
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(descriptor)


def by_ring(lab: Lab, offset: int, count: int = 1) -> bytes | int:
    """By READs of pages from ``offset`` on; the errno of the last, which is all of theirs."""
    with connect(lab.mount.point) as client:
        iov = client.iov(count * PAGE)
        ring = client.ring(count)
        file = client.file(lab.path(lab.victim))
        for number in range(count):
            ring.prep_read(iov, number * PAGE, file, offset + number * PAGE, PAGE, user_data=number)
        ring.submit()
        results = set(ring.wait(count, PATIENCE_S)["result"].tolist())
        (result,) = results
        return iov.array[:PAGE].tobytes() if result == PAGE else -int(result)


def by_columns(lab: Lab, offset: int) -> bytes | int:
    return by_ring(lab, offset, COLUMNS)


def by_key(lab: Lab, offset: int) -> bytes | int:
    with connect(lab.mount.point) as client, closing(BlockStore(client, "keys")) as store:
        data = store.get(lab.victim.encode())
        return errno.EIO if data is None else bytes(data[offset : offset + PAGE])  # a block that is lost is a miss


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("reader", [by_ring, by_columns, by_key])
def test_a_cut_segment_is_an_error_of_the_lost_bytes(
    lab: Lab, reader: Callable[[Lab, int], bytes | int], verified: bool
) -> None:
    if not verified:
        lab.mount.unmount()
        lab.mount.mount()
    wait_for_rings(lab.mount)
    if verified:
        assert reader(lab, LOST) == by_file(lab, LOST) == lab.data[lab.victim][LOST : LOST + PAGE]
    os.truncate(lab.segment, lab.place + LOST + 100)  # the rest of the page reads as zeros in a map
    assert reader(lab, LOST) == errno.EIO
    assert by_file(lab, LOST) == errno.EIO
    assert by_file(lab, 0) == by_ring(lab, 0) == lab.data[lab.victim][:PAGE]
    lab.check_alive()
    assert reader(lab, LOST) == errno.EIO


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "unverified"])
def test_a_bad_sector_below_a_segment_is_an_error_of_its_bytes(lab: Lab, verified: bool, tmp_path: Path) -> None:
    readers = (by_columns, by_ring, by_file, by_key)
    expected = lab.data[lab.victim][LOST : LOST + PAGE]
    lab.mount.unmount()
    with bad_medium(lab.segment, tmp_path / "medium") as medium:
        lab.mount.mount()
        wait_for_rings(lab.mount)
        try:
            if verified:
                assert {reader(lab, LOST) for reader in readers} == {expected}
            medium.break_bytes(lab.place + LOST, lab.place + SIZE)
            assert {reader(lab, LOST) for reader in readers} == {errno.EIO}
            lab.check_alive()
            medium.mend()
            assert {reader(lab, LOST) for reader in readers} == {expected}
        finally:
            lab.mount.terminate()
    lab.mount.fsck()


@pytest.mark.ring(2)
def test_commands_tell_of_a_cut_segment(lab: Lab) -> None:
    lab.mount.unmount()
    for left in (lab.place, 100, 0):
        os.truncate(lab.segment, left)
        done = lab.command("fsck", "--verify", str(lab.mount.volume))
        assert done.returncode == 1
        assert f"has {left} bytes instead of" in done.stdout
    done = lab.command("mount", "--foreground", str(lab.mount.volume), str(lab.mount.point))
    assert done.returncode == 3
    assert "has 0 bytes instead of" in done.stderr
    done = lab.command("fsck", "--rebuild", str(lab.mount.volume))
    assert done.returncode in (0, 1)
    assert "the medium lost its slot headers" in done.stdout


# -- records ----------------------------------------------------------------------------------------

NAMES = 1500


def records_file(lab: Lab) -> Path:
    return lab.mount.volume / "records" / "data.mdb"


def add_names(lab: Lab) -> None:
    """So many files that their records fill many pages; the daemon knows none of them."""
    for number in range(NAMES):
        (lab.mount.point / f"name-{number}").touch()
    lab.mount.unmount()


def failing_names(lab: Lab) -> int:
    """How many of the names are an error: EIO. The others are there."""
    failed = 0
    for number in range(0, NAMES, 10):
        try:
            os.stat(lab.mount.point / f"name-{number}")
        except OSError as error:
            assert error.errno == errno.EIO
            failed += 1
    return failed


def test_a_cut_record_file_is_refused_with_a_reason(lab: Lab) -> None:
    add_names(lab)
    path = records_file(lab)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    for command in (
        ["mount", "--foreground", str(lab.mount.volume), str(lab.mount.point)],
        ["fsck", str(lab.mount.volume)],
    ):
        done = lab.command(*command)
        assert done.returncode > 0, done
        assert f"{path} has {size // 2} bytes of the " in done.stderr
        assert "fsck --rebuild" in done.stderr
    for command in "info", "status":
        done = lab.command(command, str(lab.mount.volume))
        assert done.returncode >= 0, done
    rebuilt = lab.command("fsck", "--rebuild", str(lab.mount.volume))
    assert rebuilt.returncode >= 0, rebuilt
    lab.mount.fsck()
    lab.mount.mount()
    for name, data in lab.data.items():
        assert lab.path(name).read_bytes() == data


@contextmanager
def good_file_stays_readable(lab: Lab) -> Iterator[None]:
    """It is open all the time; the daemon is asked for its bytes before and after."""
    with lab.path(lab.good).open("rb", buffering=0) as kept:
        assert kept.read() == lab.data[lab.good]
        yield
        os.posix_fadvise(kept.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        kept.seek(0)
        assert kept.read() == lab.data[lab.good]
        assert str(records_file(lab)) in lab.mount.log.read_text()
        assert stats(lab.mount)["records"]["medium_failures"] >= 1


def test_a_record_file_cut_below_a_mount_is_an_error(lab: Lab) -> None:
    add_names(lab)
    lab.mount.mount()
    with good_file_stays_readable(lab):
        os.truncate(records_file(lab), 2 * PAGE + 100)
        assert failing_names(lab) == NAMES / 10
        with suppress(OSError):  # a commit must not make the file longer
            (lab.mount.point / "more").touch()
            os.sync()
        assert failing_names(lab) == NAMES / 10
        assert records_file(lab).stat().st_size == 2 * PAGE + 100


def test_a_bad_sector_below_the_records_is_an_error(lab: Lab, tmp_path: Path) -> None:
    add_names(lab)
    with bad_medium(records_file(lab), tmp_path / "medium") as medium:
        lab.mount.mount()
        try:
            with good_file_stays_readable(lab):
                medium.break_bytes(2 * PAGE, 1 << 30)
                assert failing_names(lab) == NAMES / 10
        finally:
            lab.mount.remove()
    lab.mount.fsck()


def test_a_cut_lock_file_is_an_error(lab: Lab) -> None:
    add_names(lab)
    lab.mount.mount()
    with good_file_stays_readable(lab):
        os.truncate(records_file(lab).with_name("lock.mdb"), 0)
        assert failing_names(lab) == NAMES / 10
    lab.mount.remove()
    lab.mount.fsck()
