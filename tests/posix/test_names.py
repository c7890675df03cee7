"""What may be a name or a path, and what statfs says of both and of space."""

import errno
import os
from pathlib import Path

import pytest
from engine_pairs import Engines
from posix_calls import fails, opened

NAMES = [
    b"x",
    b"n" * 255,
    "ä".encode() * 127,
    b"\xff\xfe\x80 not UTF-8",
    b" ",
    b"line\nbreak",
    b"back\\slash",
    b"\x01",
    b"...",
    b".hidden",
    b"-rf",
    b"*?[a]",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_any_bytes_are_a_name(folder: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(folder), name)
    with opened(Path(os.fsdecode(path)), os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, name)
    assert os.listdir(os.fsencode(folder)) == [name]
    os.rename(path, os.path.join(os.fsencode(folder), b"other"))
    assert (folder / "other").read_bytes() == name


@pytest.mark.parametrize("size", [256, 1000])
def test_a_name_over_255_bytes_is_refused(folder: Path, size: int) -> None:
    path = folder / ("n" * size)
    with fails(errno.ENAMETOOLONG):
        path.touch()
    with fails(errno.ENAMETOOLONG):
        path.mkdir()
    with fails(errno.ENAMETOOLONG):
        os.stat(path)
    (folder / "file").touch()
    with fails(errno.ENAMETOOLONG):
        os.rename(folder / "file", path)


def test_case_matters(folder: Path) -> None:
    (folder / "name").write_bytes(b"lower")
    (folder / "NAME").write_bytes(b"upper")
    assert (folder / "name").read_bytes() == b"lower"


def test_a_hundred_levels(folder: Path) -> None:
    """Deeper than a path may be long, reached by steps."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(100):
            os.mkdir("d" * 60)
            os.chdir("d" * 60)
        Path("bottom").write_bytes(b"deep")
        assert Path("bottom").read_bytes() == b"deep"
        for _ in range(100):
            os.chdir("..")
        assert os.listdir(".") == ["d" * 60]
    finally:
        os.chdir(here)


def test_a_path_of_4096_bytes_is_refused(folder: Path) -> None:
    with fails(errno.ENAMETOOLONG):
        os.stat(f"{folder}/{'./' * 2048}x")


def test_statfs_tells_sizes_and_limits(folder: Path) -> None:
    figures = os.statvfs(folder)
    assert figures.f_bsize == figures.f_frsize == 4096
    assert figures.f_namemax == 255
    assert 0 < figures.f_bavail <= figures.f_bfree <= figures.f_blocks
    assert 0 < figures.f_favail <= figures.f_ffree <= figures.f_files


def test_statfs_counts_what_is_used_and_freed(folder: Path, engines: Engines) -> None:
    size = 32 << 20
    with opened(folder, os.O_RDONLY) as fd:
        os.fsync(fd)  # what earlier tests removed is counted as free from now on
    slack = 64 * 4096 if engines.is_shared else 0  # others may read it still: it becomes free a while later, or now
    before = os.statvfs(folder)
    with opened(folder / "file", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, os.urandom(size))
        os.fsync(fd)
    used = os.statvfs(folder)
    assert (before.f_bfree - used.f_bfree) * 4096 >= size - slack
    assert before.f_ffree - used.f_ffree >= 1


@pytest.mark.kvfuse_only
def test_statfs_shows_the_promised_capacity(folder: Path) -> None:
    """Less what the volume needs for its own tables."""
    figures = os.statvfs(folder)
    assert 0.95 * (2 << 30) < figures.f_blocks * figures.f_frsize <= 2 << 30
