"""Sizes: shrinking, growing, sparse."""

import errno
import os
from pathlib import Path

import pytest
from posix_calls import fails, opened

MIB = 1 << 20
TIB = 1 << 40


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65_536, 99_999, 3 * MIB + 5])
def test_shrinking_keeps_the_head(folder: Path, size: int) -> None:
    content = os.urandom(4 * MIB)
    (folder / "file").write_bytes(content)
    os.truncate(folder / "file", size)
    assert (folder / "file").read_bytes() == content[:size]


def test_growing_adds_zeros(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    os.truncate(folder / "file", 100_000)
    assert (folder / "file").read_bytes() == b"content".ljust(100_000, b"\0")


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000, 5 * MIB])
def test_what_was_cut_off_does_not_come_back(folder: Path, size: int) -> None:
    (folder / "file").write_bytes(b"\xff" * (6 * MIB))
    with opened(folder / "file") as fd:
        os.ftruncate(fd, size)
        os.ftruncate(fd, 6 * MIB)
    content = (folder / "file").read_bytes()
    assert content[:size] == b"\xff" * size
    assert content[size:].count(0) == 6 * MIB - size


def test_ftruncate_is_seen_by_every_descriptor(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as one, opened(folder / "file") as two:
        os.write(one, b"0123456789")
        os.ftruncate(two, 4)
        assert os.fstat(one).st_size == 4
        assert os.pread(one, 100, 0) == b"0123"


def test_ftruncate_between_writes(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"0123456789")
        os.ftruncate(fd, 0)
        os.write(fd, b"abc")  # the position stays at 10
    assert (folder / "file").read_bytes() == b"\0" * 10 + b"abc"


def test_a_tebibyte_costs_nothing(folder: Path) -> None:
    """How an engine preallocates one file per rank."""
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, TIB)
        assert os.fstat(fd).st_size == TIB
        assert os.fstat(fd).st_blocks * 512 < MIB
        assert os.pread(fd, 8192, TIB - 8192) == bytes(8192)
        os.pwrite(fd, b"far away", TIB // 2 + 12_345)
        assert os.pread(fd, 10, TIB // 2 + 12_344) == b"\0far away\0"[:10]
        assert os.fstat(fd).st_blocks * 512 < 64 * MIB


def test_a_write_far_beyond_the_end_leaves_a_hole(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"head")
        os.pwrite(fd, b"tail", 20 * MIB)
        assert os.fstat(fd).st_size == 20 * MIB + 4
        assert os.pread(fd, 8, 2) == b"ad" + bytes(6)
        assert os.pread(fd, 8, 20 * MIB - 4) == bytes(4) + b"tail"
        assert os.pread(fd, MIB, 10 * MIB) == bytes(MIB)


def test_negative_sizes_are_refused(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.EINVAL):
        os.truncate(folder / "file", -1)


def test_a_directory_has_no_size_to_set(folder: Path) -> None:
    with fails(errno.EISDIR):
        os.truncate(folder, 0)


def test_a_missing_file_has_none_either(folder: Path) -> None:
    with fails(errno.ENOENT):
        os.truncate(folder / "absent", 0)


def test_a_read_only_descriptor_cannot_truncate(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    with opened(folder / "file", os.O_RDONLY) as fd, fails(errno.EINVAL):
        os.ftruncate(fd, 0)


def test_space_of_a_truncated_file_comes_back(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(os.urandom(8 * MIB))
    assert path.stat().st_blocks * 512 >= 8 * MIB
    os.truncate(path, 0)
    assert path.stat().st_blocks == 0
