"""Bytes in, bytes out: positions, vectors, sizes and alignments, O_DIRECT."""

import errno
import fcntl
import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from posix_calls import fails, opened

KIB, MIB = 1 << 10, 1 << 20
HEADER_SIZE = 28
"""bytes that one cache puts before a block, so that its large writes are never aligned"""


@contextmanager
def aligned(content: bytes) -> Iterator[mmap.mmap]:
    """A page-aligned buffer with ``content``, as O_DIRECT may ask for."""
    with mmap.mmap(-1, max(len(content), 1)) as buffer:
        buffer[: len(content)] = content
        yield buffer


def drop_cache(fd: int) -> None:
    """Let the next read come from the file system."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 65_536, 262_143, MIB, MIB + 1, 4 * MIB, 9 * MIB + 3])
def test_what_is_written_is_read(folder: Path, rng: random.Random, size: int) -> None:
    content = rng.randbytes(size)
    path = folder / "file"
    path.write_bytes(content)
    assert path.stat().st_size == size
    with opened(path, os.O_RDONLY) as fd:
        drop_cache(fd)
        assert os.read(fd, size + 1) == content


def test_pwrite_and_pread_leave_the_position(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"abcdef")
        os.pwrite(fd, b"XY", 2)
        assert os.pread(fd, 3, 1) == b"bXY"
        assert os.lseek(fd, 0, os.SEEK_CUR) == 6
        os.write(fd, b"g")
    assert (folder / "file").read_bytes() == b"abXYefg"


def test_reading_at_and_beyond_the_end(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    with opened(folder / "file", os.O_RDONLY) as fd:
        assert os.pread(fd, 100, 5) == b"nt"
        assert os.pread(fd, 100, 7) == b""
        assert os.pread(fd, 100, 1 << 40) == b""


def test_writing_nothing_changes_nothing(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        assert os.write(fd, b"") == 0
        assert os.pwrite(fd, b"", 1000) == 0
        assert os.fstat(fd).st_size == 0


def test_random_writes_and_reads_agree_with_a_bytearray(folder: Path, rng: random.Random) -> None:
    model = bytearray()
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        for _ in range(300):
            offset = rng.randrange(6 * MIB)
            if rng.random() < 0.6:
                block = rng.randbytes(rng.choice([1, 100, 4096, 5000, 70_000, 400_000]))
                assert os.pwrite(fd, block, offset) == len(block)
                model.extend(bytes(max(0, offset - len(model))))
                model[offset : offset + len(block)] = block
            elif rng.random() < 0.1:
                drop_cache(fd)
            elif rng.random() < 0.1:
                os.ftruncate(fd, offset)
                model[offset:] = bytes(max(0, offset - len(model)))
            size = rng.randrange(500_000)
            assert os.pread(fd, size, offset) == model[offset : offset + size]
        drop_cache(fd)
    assert (folder / "file").read_bytes() == model


def test_random_writes_across_closes_agree_with_a_bytearray(folder: Path, rng: random.Random) -> None:
    """Each open finds a file whose content is settled, and changes some of it."""
    size = 5 * MIB + 77
    model = bytearray(rng.randbytes(size))
    path = folder / "file"
    path.write_bytes(model)
    for _ in range(20):
        with opened(path) as fd:
            for _ in range(rng.randrange(1, 6)):
                block = rng.randbytes(rng.choice([1, 4096, 100_000]))
                offset = rng.randrange(size - len(block))
                os.pwrite(fd, block, offset)
                model[offset : offset + len(block)] = block
            drop_cache(fd)
        assert path.read_bytes() == model


def test_eighty_vectors_at_once(folder: Path, rng: random.Random) -> None:
    parts = [rng.randbytes(rng.randrange(1, 60_000)) for _ in range(80)]
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        assert os.pwritev(fd, parts, HEADER_SIZE) == sum(map(len, parts))
        drop_cache(fd)
        buffers = [bytearray(len(part)) for part in parts]
        assert os.preadv(fd, buffers, HEADER_SIZE) == sum(map(len, parts))
    assert buffers == parts


@pytest.mark.parametrize("size", [10 * MIB, 16 * MIB + 1])
def test_a_header_and_a_large_block(folder: Path, rng: random.Random, size: int) -> None:
    header, block = rng.randbytes(HEADER_SIZE), rng.randbytes(size)
    path = folder / "block"
    with opened(folder / "block.tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.write(fd, header)
        assert os.write(fd, block) == size
    os.rename(folder / "block.tmp", path)
    with opened(path, os.O_RDONLY) as fd:
        drop_cache(fd)
        assert os.read(fd, HEADER_SIZE) == header
        assert os.read(fd, size + 1) == block


def test_interleaved_writers_of_one_file(folder: Path, rng: random.Random) -> None:
    path = folder / "file"
    blocks = [rng.randbytes(64 * KIB) for _ in range(64)]
    order = list(enumerate(blocks))
    rng.shuffle(order)
    with opened(path, os.O_CREAT | os.O_RDWR) as one, opened(path) as two:
        for number, (index, block) in enumerate(order):
            os.pwrite((one, two)[number % 2], block, index * 64 * KIB)
    assert path.read_bytes() == b"".join(blocks)


def test_direct_io_from_the_open_on(folder: Path, rng: random.Random) -> None:
    content = rng.randbytes(2 * MIB)
    path = folder / "file"
    with aligned(content) as buffer:
        with opened(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
            assert os.pwrite(fd, buffer, 0) == len(content)
            assert os.pwrite(fd, buffer, len(content)) == len(content)
        with opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
            buffer[:] = bytes(len(content))
            assert os.preadv(fd, [buffer], 4096) == len(content)
            assert buffer[:] == content[4096:] + content[:4096]
    assert path.read_bytes() == content * 2


def test_direct_io_set_later(folder: Path, rng: random.Random) -> None:
    content = rng.randbytes(MIB)
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd, aligned(content) as buffer:
        os.pwrite(fd, b"buffered first", 0)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        assert os.pwrite(fd, buffer, 0) == MIB
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        assert os.pread(fd, MIB, 0) == content


def test_direct_and_buffered_descriptors_see_each_other(folder: Path, rng: random.Random) -> None:
    path = folder / "file"
    first, second = rng.randbytes(MIB), rng.randbytes(MIB)
    with (
        opened(path, os.O_CREAT | os.O_RDWR) as buffered,
        opened(path, os.O_RDWR | os.O_DIRECT) as direct,
        aligned(second) as buffer,
    ):
        os.pwrite(buffered, first, 0)
        assert os.pread(buffered, MIB, 0) == first
        os.pwrite(direct, buffer, 0)
        assert os.pread(buffered, MIB, 0) == second
        os.pwrite(buffered, first[:4096], 4096)
        os.preadv(direct, [buffer], 0)
        assert buffer[:] == second[:4096] + first[:4096] + second[8192:]


def test_a_direct_read_ends_at_the_end_of_the_file(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * 5000)
    with opened(folder / "file", os.O_RDONLY | os.O_DIRECT) as fd, aligned(bytes(8192)) as buffer:
        assert os.preadv(fd, [buffer], 0) == 5000
        assert buffer[:] == b"x" * 5000 + bytes(3192)


def test_fsync_and_fdatasync(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        os.fsync(fd)
        os.write(fd, b" more")
        os.fdatasync(fd)
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
    assert (folder / "file").read_bytes() == b"content more"


@pytest.mark.parametrize("flag", [os.O_SYNC, os.O_DSYNC])
def test_synchronous_descriptors(folder: Path, flag: int) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_WRONLY | flag) as fd:
        for _ in range(5):
            os.write(fd, b"line\n")
    assert (folder / "file").read_bytes() == b"line\n" * 5


@pytest.mark.kvfuse_only
def test_an_offset_beyond_what_a_file_may_have_is_refused(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        with fails(errno.EFBIG):
            os.pwrite(fd, b"x", (1 << 63) - 4096)
        assert os.fstat(fd).st_size == 0


def test_a_directory_is_not_read_as_a_file(folder: Path) -> None:
    with opened(folder, os.O_RDONLY) as fd, fails(errno.EISDIR):
        os.read(fd, 1)
