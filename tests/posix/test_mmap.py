"""Mapped files: shared and writable, private, and beside read and write."""

import mmap
import os
from pathlib import Path

from posix_calls import opened

SIZE = 1 << 20


def test_a_shared_mapping_is_written_to_the_file(folder: Path) -> None:
    path = folder / "file"
    content = os.urandom(SIZE)
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, SIZE)
        with mmap.mmap(fd, SIZE) as mapped:
            mapped[:] = content
    assert path.read_bytes() == content


def test_a_mapping_beside_a_descriptor_for_appends_is_written_in_place(folder: Path) -> None:
    """The kernel writes pages back through any descriptor that may write."""
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR | os.O_APPEND) as fd:
        os.write(fd, bytes(8192))
        with mmap.mmap(fd, 8192) as mapped:
            mapped[5:8] = b"abc"
            mapped.flush()
        os.write(fd, b"end")
        assert os.fstat(fd).st_size == 8195
    assert path.read_bytes() == b"abc".rjust(8, b"\0").ljust(8192, b"\0") + b"end"


def test_msync_makes_it_visible_to_direct_reads(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(SIZE))
    with opened(path) as fd, mmap.mmap(fd, SIZE) as mapped, mmap.mmap(-1, 4096) as page:
        mapped[5000:5005] = b"hello"
        mapped.flush()
        with opened(path, os.O_RDONLY | os.O_DIRECT) as direct:
            assert os.preadv(direct, [page], 4096) == 4096
        assert page[5000 - 4096 : 5005 - 4096] == b"hello"


def test_a_mapping_is_seen_by_read_without_msync(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(SIZE))
    with opened(path) as fd, mmap.mmap(fd, SIZE) as mapped:
        mapped[100:103] = b"abc"
        assert os.pread(fd, 3, 100) == b"abc"
        os.pwrite(fd, b"XYZ", 200)
        assert mapped[200:203] == b"XYZ"


def test_a_mapping_outlives_its_descriptor(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(SIZE))
    with opened(path) as fd:
        mapped = mmap.mmap(fd, SIZE)
    mapped[SIZE - 3 :] = b"end"
    mapped.close()
    assert path.read_bytes()[-3:] == b"end"


def test_a_private_mapping_changes_nothing(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a" * SIZE)
    with opened(path) as fd, mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[:5] = b"bbbbb"
        assert mapped[:6] == b"bbbbba"
    assert path.read_bytes() == b"a" * SIZE


def test_two_mappings_of_one_file_are_one(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(SIZE))
    with opened(path) as one, opened(path) as two, mmap.mmap(one, SIZE) as first, mmap.mmap(two, SIZE) as second:
        first[1000:1004] = b"same"
        assert second[1000:1004] == b"same"


def test_a_mapped_read_of_a_hole_is_zeros(folder: Path) -> None:
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, 8 * SIZE)
        os.pwrite(fd, b"island", 4 * SIZE)
        with mmap.mmap(fd, 8 * SIZE, prot=mmap.PROT_READ) as mapped:
            assert mapped[: 4 * SIZE].count(0) == 4 * SIZE
            assert mapped[4 * SIZE : 4 * SIZE + 6] == b"island"


def test_a_mapping_of_an_unlinked_file(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a" * SIZE)
    with opened(path) as fd, mmap.mmap(fd, SIZE) as mapped:
        os.unlink(path)
        mapped[:3] = b"new"
        mapped.flush()
        assert os.pread(fd, 4, 0) == b"newa"
