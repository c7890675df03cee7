"""Damage below a volume: wrong bytes are an error there and only there; what cannot be mounted says why."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounting import KVFUSE, KvfuseMount

from kvfuse.checksum import GRANULE_SIZE, crc32c
from kvfuse.slab import layout

WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", "volume.chunk_size=1MiB")
LENGTH = 5 * GRANULE_SIZE - 100


class Damaged:
    """A volume with two files, unmounted, and where their bytes lie."""

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.mount = KvfuseMount(base, WORDS)
        self.rng = rng
        self.files = {"first": rng.randbytes(LENGTH), "second": rng.randbytes(LENGTH), "small": rng.randbytes(3000)}
        self.mount.mount()
        self.extents: dict[str, list[dict[str, int]]] = {}
        for name, data in self.files.items():
            with self.path(name).open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        for name in self.files:
            self.extents[name] = json.loads(os.getxattr(self.path(name), "kvfuse.info"))["extents"]
        self.mount.unmount()

    def path(self, name: str) -> Path:
        return self.mount.point / name

    def segment(self, number: int) -> Path:
        return self.mount.volume / "segments" / f"{number:08x}.seg"

    def place(self, name: str, offset: int) -> tuple[Path, int]:
        """(segment file, offset in it) of a byte of a file."""
        start = 0
        for row in self.extents[name]:
            if offset < start + row["length"]:
                return self.segment(row["segment"]), row["offset"] + offset - start
            start += row["length"]
        raise AssertionError(f"{name} has no byte {offset}")

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Over a file's bytes, below the volume."""
        path, place = self.place(name, offset)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data)

    def flip(self, name: str, offset: int) -> None:
        path, place = self.place(name, offset)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    def drop_caches(self) -> None:
        """Of the segments, so that reads go to the engine."""
        for path in (self.mount.volume / "segments").iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def failures(self) -> int:
        return int(json.loads(self.path(".kvfuse").joinpath("stats").read_text())["counters"]["checksum_failures"])

    def intact(self, *names: str) -> None:
        for name in names:
            assert self.path(name).read_bytes() == self.files[name]


@pytest.fixture
def damaged(rng: random.Random) -> Iterator[Damaged]:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-damage-"))
    lab = Damaged(base, rng)
    try:
        yield lab
        if lab.mount.is_mounted:
            lab.mount.check_unexpected_errors()
            lab.mount.unmount()
    finally:
        lab.mount.remove()
        shutil.rmtree(base)


def read_at(path: Path, offset: int, size: int, flags: int = 0) -> bytes:
    """``size`` bytes, by pread into aligned memory."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        buffer = mmap.mmap(-1, size)
        count = os.preadv(descriptor, [buffer], offset)
        return buffer[:count]
    finally:
        os.close(descriptor)


# -- wrong bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "evicted"])
@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_a_flipped_bit_is_an_error_of_its_granule(damaged: Damaged, flags: int, resident: bool) -> None:
    bad = 2 * GRANULE_SIZE + 12_345
    damaged.flip("first", bad)
    if not resident:
        damaged.drop_caches()
    damaged.mount.mount()
    granule = bad // GRANULE_SIZE
    with pytest.raises(OSError) as error:
        read_at(damaged.path("first"), bad & -4096, 4096, flags | os.O_DIRECT)
    assert error.value.errno == errno.EIO
    assert damaged.failures() >= 1
    log = damaged.mount.log.read_text()
    assert "checksum mismatch in segment" in log
    for number in range(5):
        if number != granule:  # read in one piece, so that the kernel's read-ahead does not touch the bad one
            start = number * GRANULE_SIZE
            size = min(GRANULE_SIZE, LENGTH - start)
            found = read_at(damaged.path("first"), start, GRANULE_SIZE, os.O_DIRECT)
            assert found == damaged.files["first"][start : start + size]
    damaged.intact("second", "small")
    with pytest.raises(OSError, match="Input/output error"):
        damaged.path("first").read_bytes()


def test_a_flipped_bit_through_a_mapping(damaged: Damaged) -> None:
    """The page cannot be filled: SIGBUS for who touches it; what lies elsewhere is right."""
    damaged.flip("first", 3 * GRANULE_SIZE + 5)
    damaged.mount.mount()
    code = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
sys.stdout.buffer.write(mapped[:100]); sys.stdout.flush()
mapped[int(sys.argv[2])]
"""
    bad = str(3 * GRANULE_SIZE + 5)
    done = subprocess.run([sys.executable, "-c", code, damaged.path("first"), bad], capture_output=True, check=False)
    assert done.stdout == damaged.files["first"][:100]
    assert done.returncode == -7, done
    damaged.intact("second", "small")


def test_a_zeroed_slot_is_an_error(damaged: Damaged) -> None:
    damaged.write("small", 0, bytes(3000))
    damaged.mount.mount()
    with pytest.raises(OSError, match="Input/output error"):
        damaged.path("small").read_bytes()
    damaged.intact("first", "second")


def test_swapped_slots_are_errors(damaged: Damaged) -> None:
    """Another file's whole and right bytes are wrong here."""
    size = min(damaged.extents["first"][0]["length"], damaged.extents["second"][0]["length"])
    damaged.write("first", 0, damaged.files["second"][:size])
    damaged.write("second", 0, damaged.files["first"][:size])
    damaged.mount.mount()
    for name in ("first", "second"):
        with pytest.raises(OSError, match="Input/output error"):
            damaged.path(name).read_bytes()
    damaged.intact("small")


def test_a_damaged_file_can_be_replaced_and_removed(damaged: Damaged) -> None:
    damaged.flip("first", 10)
    damaged.flip("small", 10)
    damaged.mount.mount()
    damaged.path("first").write_bytes(b"new")
    damaged.path("small").unlink()
    assert damaged.path("first").read_bytes() == b"new"
    damaged.mount.unmount()
    damaged.mount.fsck()


def test_verified_once_is_not_verified_again(damaged: Damaged) -> None:
    """Bytes are checked when they come from the engine; after a remount they are checked anew."""
    damaged.mount.mount()
    damaged.intact("first", "second", "small")
    damaged.mount.unmount()
    damaged.flip("second", 0)
    damaged.mount.mount()
    with pytest.raises(OSError, match="Input/output error"):
        damaged.path("second").read_bytes()


# -- what cannot be mounted -------------------------------------------------------------------------


def truncate_segment(damaged: Damaged) -> None:
    path, _ = damaged.place("first", 0)
    os.truncate(path, 8 << 20)


def remove_segment(damaged: Damaged) -> None:
    damaged.place("first", 0)[0].unlink()


def wipe_segment_header(damaged: Damaged) -> None:
    with damaged.place("first", 0)[0].open("r+b") as file:
        file.write(bytes(4096))


def foreign_segment(damaged: Damaged) -> None:
    """The file of another volume."""
    path, _ = damaged.place("first", 0)
    with path.open("r+b") as file:
        header = layout.parse_superblock(file.read(4096))
        file.seek(0)
        file.write(layout.pack_superblock(layout.Superblock(bytes(16), header.geometry, 1, header.segment)))


def flip_superblock(damaged: Damaged) -> None:
    with (damaged.mount.volume / "superblock").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff")


def cut_superblock(damaged: Damaged) -> None:
    os.truncate(damaged.mount.volume / "superblock", 100)


def foreign_superblock(damaged: Damaged) -> None:
    (damaged.mount.volume / "superblock").write_bytes(b"something else".ljust(4096))


def newer_superblock(damaged: Damaged) -> None:
    """Whole, of format version 2."""
    path = damaged.mount.volume / "superblock"
    image = bytearray(path.read_bytes())
    image[8:12] = (2).to_bytes(4, "little")
    image[-4:] = crc32c(image[:-4]).to_bytes(4, "little")
    path.write_bytes(image)


def no_superblock(damaged: Damaged) -> None:
    (damaged.mount.volume / "superblock").unlink()


def garbage_store(damaged: Damaged) -> None:
    (damaged.mount.volume / "records" / "data.mdb").write_bytes(damaged.rng.randbytes(100_000))


def empty_store(damaged: Damaged) -> None:
    shutil.rmtree(damaged.mount.volume / "records")
    (damaged.mount.volume / "records").mkdir()


def bad_records(damaged: Damaged) -> None:
    """The store is right, what is in it is not."""
    code = """
import sys, trio
from pathlib import Path
from kvfuse.remote.records.lmdb.store import LmdbRecords
async def main():
    records = LmdbRecords.open(Path(sys.argv[1]))
    await records.commit({b"ninode": b"?", b"s\\0\\0\\0\\1": b"?"}, durable=True)
    await records.aclose()
trio.run(main)
"""
    subprocess.run([sys.executable, "-c", code, damaged.mount.volume / "records"], check=True)


CASES: list[tuple[Callable[[Damaged], None], str]] = [
    (truncate_segment, "segment 0 has 8388608 bytes"),
    (remove_segment, "segment 0 is missing"),
    (wipe_segment_header, "segment 0"),
    (foreign_segment, "another"),
    (flip_superblock, "superblock is damaged"),
    (cut_superblock, "superblock is damaged"),
    (foreign_superblock, "no kvfuse volume"),
    (newer_superblock, "use a newer kvfuse"),
    (no_superblock, "no kvfuse volume"),
    (garbage_store, "fsck --rebuild"),
    (empty_store, "the records are lost"),
    (bad_records, "record store is damaged"),
]


@pytest.mark.ring(3)
@pytest.mark.parametrize(("damage", "message"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_damaged_volume_is_refused(damaged: Damaged, damage: Callable[[Damaged], None], message: str) -> None:
    """One line that says what is wrong, exit status 3, no mount left behind, and not a byte changed."""
    damage(damaged)
    before = image(damaged.mount.volume)
    for flags in ([], ["--foreground"]):
        command = [*KVFUSE, "mount", *flags, str(damaged.mount.volume), str(damaged.mount.point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 3, done
        complaints = [line for line in done.stderr.splitlines() if line.startswith("kvfuse: ")]
        assert len(complaints) == 1, done.stderr
        assert message in complaints[0]
        assert not damaged.mount.is_mounted
    assert image(damaged.mount.volume) == before


def image(folder: Path) -> dict[str, bytes]:
    """Everything that matters of a volume: a lock, its holder and a log may come and go."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "lock.mdb", "log")
    }
