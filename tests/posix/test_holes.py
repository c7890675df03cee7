"""SEEK_DATA, SEEK_HOLE and st_blocks: copies of sparse files take as long as their data, and lose none of it."""

import errno
import mmap
import os
import random
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from posix_calls import fails, opened

MIB = 1 << 20
TIB = 1 << 40
PAGE = 4096


def runs(fd: int) -> list[tuple[int, int]]:
    """(start, end) of all data of a file."""
    found, end = [], 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            return found
        assert os.lseek(fd, start, os.SEEK_DATA) == start
        end = os.lseek(fd, start, os.SEEK_HOLE)
        assert end > start
        found.append((start, end))


def test_data_lies_between_holes(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, TIB)
        os.pwrite(fd, b"a" * 5000, TIB // 2)
        os.pwrite(fd, b"b" * 5000, 64 * MIB)
        (one, other) = runs(fd)
        assert one[0] <= 64 * MIB
        assert 64 * MIB + 5000 <= one[1] < TIB // 4
        assert TIB // 4 < other[0] <= TIB // 2
        assert TIB // 2 + 5000 <= other[1] < TIB
        assert os.fstat(fd).st_blocks * 512 < 8 * MIB


def test_the_end_is_a_hole(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"data")
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == os.lseek(fd, 3, os.SEEK_HOLE) == 4
        os.ftruncate(fd, 100 * MIB)
        assert os.lseek(fd, 99 * MIB, os.SEEK_HOLE) == 99 * MIB


@pytest.mark.parametrize("whence", [os.SEEK_DATA, os.SEEK_HOLE])
@pytest.mark.parametrize("offset", [0, 4, 5, 100])
def test_nothing_is_found_from_the_end_on(folder: Path, whence: int, offset: int) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        with fails(errno.ENXIO):
            os.lseek(fd, offset, whence)
        os.write(fd, b"data")
        if offset >= 4:
            with fails(errno.ENXIO):
                os.lseek(fd, offset, whence)


def test_there_is_no_data_in_a_file_of_zeros_that_were_never_written(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, TIB)
        with fails(errno.ENXIO):
            os.lseek(fd, 0, os.SEEK_DATA)
        assert os.fstat(fd).st_blocks == 0


def test_what_was_written_by_a_mapping_alone_is_data(folder: Path) -> None:
    """Also pages that the kernel has not written back."""
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, 100 * MIB)
        with mmap.mmap(fd, 100 * MIB) as mapped:
            mapped[50 * MIB : 50 * MIB + 3] = b"abc"
            start = os.lseek(fd, 0, os.SEEK_DATA)
            assert 0 < start <= 50 * MIB < os.lseek(fd, start, os.SEEK_HOLE)
            mapped[70 * MIB] = 1
            assert os.lseek(fd, 60 * MIB, os.SEEK_DATA) <= 70 * MIB


@pytest.mark.parametrize("command", [["cp"], ["cp", "--sparse=always"]])
def test_a_sparse_tebibyte_is_copied_at_once(folder: Path, command: list[str]) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, TIB)
        os.pwrite(fd, b"far away", TIB // 2 + 12_345)
    subprocess.run([*command, folder / "file", folder / "copy"], check=True, timeout=60)
    with opened(folder / "copy", os.O_RDONLY) as fd:
        assert os.fstat(fd).st_size == TIB
        assert os.pread(fd, 10, TIB // 2 + 12_344) == b"\0far away\0"[:10]
        assert os.fstat(fd).st_blocks * 512 < 64 * MIB


def test_no_byte_that_was_written_is_in_a_hole(folder: Path) -> None:
    """At random: writes, cuts and mappings, in a file of many chunks; compared with its content each time."""
    seed = int(os.environ["KVFUSE_TEST_SEED"])
    draw, content = random.Random(seed), bytearray()
    print("seed", seed)
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        for _ in range(60):
            kind, at = draw.choice(("write", "write", "cut", "map")), draw.randrange(80 * MIB)
            if kind == "cut":
                os.ftruncate(fd, at)
                content = content[:at].ljust(at, b"\0")
            elif kind == "write" or not content:
                data = draw.randbytes(draw.choice((10, PAGE, 300_000)))
                os.pwrite(fd, data, at)
                content = content.ljust(at, b"\0")
                content[at : at + len(data)] = data
            else:
                with mmap.mmap(fd, len(content)) as mapped:
                    mapped[at % len(content)] = content[at % len(content)] = 1 + draw.randrange(255)
            if draw.random() < 0.3:
                os.fsync(fd)
            compare(fd, content)
    with opened(folder / "file", os.O_RDONLY) as fd:
        compare(fd, content)


def compare(fd: int, content: bytes | bytearray) -> None:
    found = runs(fd)
    ends = [0, *(end for run in found for end in run), len(content)]
    assert ends == sorted(ends)
    for hole_start, hole_end in list(pairwise(ends))[::2]:
        assert content.count(0, hole_start, hole_end) == hole_end - hole_start, (hole_start, hole_end)
