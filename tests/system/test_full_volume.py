"""On a full volume what needs no new space works, and what is given up is there for the next write."""

from __future__ import annotations

import io
import mmap
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from filling import KIB, MIB, anonymous_bytes, block_bytes, check_blocks, fill, free_bytes, total_bytes, write_block
from mounting import KvfuseMount, temporary_mount, wait_until

CAPACITY = 128 * MIB


def small_mount(capacity: int = CAPACITY) -> AbstractContextManager[KvfuseMount]:
    return temporary_mount([f"volume.capacity={capacity}", "volume.segment_size=32MiB"])


@pytest.fixture
def pool() -> Iterator[KvfuseMount]:
    with small_mount() as mount:
        yield mount


@pytest.fixture
def chunked() -> Iterator[KvfuseMount]:
    with temporary_mount(
        [f"volume.capacity={CAPACITY}", "volume.segment_size=32MiB", "volume.chunk_size=1MiB"]
    ) as mount:
        yield mount


# -- capacity ---------------------------------------------------------------------------------------


def test_statfs_counts_down_to_what_is_left(pool: KvfuseMount) -> None:
    promised = free_bytes(pool)
    blocks = fill(pool.point, lambda: MIB)
    left = free_bytes(pool)
    assert left < MIB
    assert promised - left >= sum(blocks.values())
    for path in blocks:
        path.unlink()
    wait_until(lambda: free_bytes(pool) == promised, "all space")


# -- space comes back -------------------------------------------------------------------------------


def test_removed_space_is_there_for_the_next_write(pool: KvfuseMount, rng: random.Random) -> None:
    """No ENOSPC between an unlink and the commit that makes its slots free."""
    blocks = fill(pool.point, lambda: 300 * KIB)
    paths = list(blocks)
    for number in range(300):
        rng.shuffle(paths)
        paths.pop().unlink()
        path = pool.point / f"new.{number}"
        assert write_block(path, block_bytes(path, 300 * KIB)), f"no space after removal {number}"
        paths.append(path)
    check_blocks(dict.fromkeys(paths, 300 * KIB))


def test_overwritten_names_give_their_space_back(pool: KvfuseMount) -> None:
    """Temporary name, write, rename over an old block: there is always room for one more."""
    blocks = fill(pool.point, lambda: MIB)
    paths = list(blocks)
    paths.pop().unlink()
    for number in range(100):
        temporary = pool.point / "tmp"
        target = paths[number % len(paths)]
        assert write_block(temporary, block_bytes(target, MIB)), number
        temporary.rename(target)
    check_blocks(dict.fromkeys(paths, MIB))


@pytest.mark.ring(3)
def test_cycles_of_changing_sizes_leak_nothing(rng: random.Random) -> None:
    """Fill and empty: the same free space each time, and the daemon does not grow."""
    with small_mount(64 * MIB) as pool:
        promised = free_bytes(pool)
        folder = pool.point / "cycle"
        sizes = []
        for cycle in range(25):
            folder.mkdir()
            size = rng.choice([64 * KIB, 300 * KIB, MIB, MIB + 28])
            blocks = fill(folder, lambda size=size: size)
            used = sum(blocks.values())
            assert used >= 0.9 * promised, f"cycle {cycle} of {size}: {used / promised:.1%}"
            for path in blocks:
                path.unlink()
            folder.rmdir()
            wait_until(lambda: free_bytes(pool) == promised, f"all space after cycle {cycle}")
            sizes.append(anonymous_bytes(pool))
        growth = max(sizes[20:]) - max(sizes[5:15])
        print(f"resident: {[size // MIB for size in sizes[::7]]} MiB")
        assert growth < 16 * MIB


# -- a full volume still works ----------------------------------------------------------------------


def test_overwriting_needs_no_space(pool: KvfuseMount, rng: random.Random) -> None:
    blocks = fill(pool.point, lambda: MIB)
    fill_small(pool)
    path = rng.choice(list(blocks))
    data = bytearray(block_bytes(path, MIB))
    descriptor = os.open(path, os.O_RDWR)
    for offset, size in [(0, 100), (500_000, 300_000), (MIB - 10, 10), (0, MIB)]:
        part = rng.randbytes(size)
        assert os.pwrite(descriptor, part, offset) == size
        data[offset : offset + size] = part
    os.fsync(descriptor)
    os.close(descriptor)
    assert path.read_bytes() == data
    blocks.pop(path)
    check_blocks(blocks)


def fill_small(pool: KvfuseMount) -> None:
    """Also what larger blocks leave over."""
    folder = pool.point / "small"
    folder.mkdir()
    fill(folder, lambda: 4096)


def test_small_files_are_overwritten_on_a_full_volume(pool: KvfuseMount) -> None:
    path = pool.point / "small.0"
    path.write_bytes(bytes(4096))
    fill(pool.point, lambda: MIB)
    fill_small(pool)
    for number in range(50):
        with path.open("r+b") as file:
            file.write(bytes([number]) * 4096)
    assert path.read_bytes() == bytes([49]) * 4096


def test_truncation_and_names_work_on_a_full_volume(pool: KvfuseMount) -> None:
    blocks = fill(pool.point, lambda: MIB)
    fill_small(pool)
    first, second, *_ = blocks
    os.truncate(first, 100_000)
    assert first.read_bytes() == block_bytes(first, MIB)[:100_000]
    os.truncate(first, 200_000)
    assert first.read_bytes() == block_bytes(first, MIB)[:100_000] + bytes(100_000)
    second.rename(pool.point / "renamed")
    (pool.point / "folder").mkdir()
    (pool.point / "empty").touch()
    os.symlink("x", pool.point / "link")
    os.truncate(first, 0)
    (pool.point / "renamed").unlink()
    assert write_block(pool.point / "more", b"x" * 900_000)


def sparse_end_of_a_chunk(pool: KvfuseMount) -> tuple[Path, int]:
    """A file on a volume without room: it has bytes up to a chunk's end, and a hole behind."""
    path = pool.point / "sparse"
    path.write_bytes(bytes([1]) * MIB)
    os.truncate(path, 2 * MIB)
    fill(pool.point, lambda: MIB)
    fill_small(pool)
    return path, MIB


def test_mapped_bytes_that_have_no_room_are_an_error(chunked: KvfuseMount) -> None:
    """The kernel takes a short answer to its writeback for success: the rest would be lost and nobody told."""
    path, end = sparse_end_of_a_chunk(chunked)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[end - 4096 : end + 4096] = bytes([2]) * 8192
        with pytest.raises(OSError, match="No space left"):
            mapped.flush()


@pytest.mark.parametrize("size", [2 * MIB, MIB], ids=["inside", "extending"])
def test_direct_writes_that_have_no_room_say_so(chunked: KvfuseMount, size: int) -> None:
    """A short answer to one the kernel would make EIO."""
    path, end = sparse_end_of_a_chunk(chunked)
    os.truncate(path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 8192) as buffer, pytest.raises(OSError, match="No space left"):
            os.pwrite(descriptor, buffer, end - 4096)
    finally:
        os.close(descriptor)
    assert path.stat().st_size == size


def test_open_with_truncation_makes_room_for_what_follows(pool: KvfuseMount) -> None:
    """``open("wb")`` of an old block on a full volume, and the same number of bytes again."""
    blocks = fill(pool.point, lambda: MIB)
    fill_small(pool)
    for path in list(blocks)[:20]:
        path.write_bytes(bytes(MIB))
        assert path.read_bytes() == bytes(MIB)


def write_for_ever(file: io.FileIO) -> None:
    while True:
        file.write(bytes(MIB))


def test_a_large_file_that_does_not_fit(pool: KvfuseMount) -> None:
    with open(pool.point / "large", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)
    size = (pool.point / "large").stat().st_size
    assert size >= 0.95 * total_bytes(pool)
    assert (pool.point / "large").read_bytes() == bytes(size)
    (pool.point / "large").unlink()
    assert write_block(pool.point / "after", bytes(10 * MIB))
