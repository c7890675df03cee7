"""On a full volume what needs no new space works, and what is given up is there for the next write."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree

import pytest
from mounting import KvfuseMount, wait_until

KIB = 1 << 10
MIB = 1 << 20
CAPACITY = 128 * MIB


@contextlib.contextmanager
def small_mount(capacity: int = CAPACITY, *words: str, base: Path | None = None) -> Iterator[KvfuseMount]:
    """A mounted volume of ``capacity`` bytes; it must be clean at the end."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-full-", dir=base))
    mount = KvfuseMount(base, (f"volume.capacity={capacity}", "volume.segment_size=32MiB", *words))
    try:
        mount.mount()
        yield mount
        if mount.is_mounted:
            mount.check_unexpected_errors()
            mount.unmount()
        mount.fsck()
    finally:
        mount.remove()
        rmtree(base)


@pytest.fixture
def pool() -> Iterator[KvfuseMount]:
    with small_mount() as mount:
        yield mount


def free_bytes(mount: KvfuseMount) -> int:
    status = os.statvfs(mount.point)
    return status.f_bavail * status.f_frsize


def total_bytes(mount: KvfuseMount) -> int:
    status = os.statvfs(mount.point)
    return status.f_blocks * status.f_frsize


def write_block(path: Path, data: bytes) -> bool:
    """The whole block under its name, or nothing and False."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path.unlink()
        return False
    finally:
        os.close(descriptor)
    return True


def fill(folder: Path, next_size: Callable[[], int], *, give_up: int = 1) -> tuple[dict[Path, int], int]:
    """(blocks, bytes) until ``give_up`` writes in a row found no space. A block's bytes follow from its name."""
    blocks: dict[Path, int] = {}
    refused = 0
    while refused < give_up:
        path = folder / str(len(blocks))
        size = next_size()
        if write_block(path, block_bytes(path, size)):
            blocks[path] = size
            refused = 0
        else:
            refused += 1
    return blocks, sum(blocks.values())


def block_bytes(path: Path, size: int) -> bytes:
    return (random.Random(path.name).randbytes(997) * (size // 997 + 1))[:size]


def check_blocks(blocks: dict[Path, int]) -> None:
    for path, size in blocks.items():
        assert path.read_bytes() == block_bytes(path, size), path


# -- capacity ---------------------------------------------------------------------------------------


def test_statfs_counts_down_to_what_is_left(pool: KvfuseMount) -> None:
    promised = free_bytes(pool)
    blocks, used = fill(pool.point, lambda: MIB)
    left = free_bytes(pool)
    assert left < MIB
    assert promised - left >= used
    for path in blocks:
        path.unlink()
    wait_until(lambda: free_bytes(pool) == promised, "all space")


# -- space comes back -------------------------------------------------------------------------------


def test_removed_space_is_there_for_the_next_write(pool: KvfuseMount, rng: random.Random) -> None:
    """No ENOSPC between an unlink and the commit that makes its slots free."""
    blocks, _ = fill(pool.point, lambda: 300 * KIB)
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
    blocks, _ = fill(pool.point, lambda: MIB)
    paths = list(blocks)
    paths.pop().unlink()
    for number in range(100):
        temporary = pool.point / "tmp"
        target = paths[number % len(paths)]
        assert write_block(temporary, block_bytes(target, MIB)), number
        temporary.rename(target)
    check_blocks(dict.fromkeys(paths, MIB))


def test_cycles_of_changing_sizes_leak_nothing(rng: random.Random) -> None:
    """Fill and empty: the same free space each time, and the daemon does not grow."""
    with small_mount(64 * MIB) as pool:
        promised = free_bytes(pool)
        folder = pool.point / "cycle"
        sizes = []
        for cycle in range(25):
            folder.mkdir()
            size = rng.choice([64 * KIB, 300 * KIB, MIB, MIB + 28])
            blocks, used = fill(folder, lambda size=size: size)
            assert used >= 0.9 * promised, f"cycle {cycle} of {size}: {used / promised:.1%}"
            for path in blocks:
                path.unlink()
            folder.rmdir()
            wait_until(lambda: free_bytes(pool) == promised, f"all space after cycle {cycle}")
            sizes.append(resident_bytes(pool.pid))
        growth = max(sizes[20:]) - max(sizes[5:15])
        print(f"resident: {[size // MIB for size in sizes[::7]]} MiB")
        assert growth < 16 * MIB


def resident_bytes(pid: int) -> int:
    """Anonymous memory: mapped segments come and go with the page cache."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("no RssAnon")


# -- a full volume still works ----------------------------------------------------------------------


def test_overwriting_needs_no_space(pool: KvfuseMount, rng: random.Random) -> None:
    blocks, _ = fill(pool.point, lambda: MIB)
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
    blocks, _ = fill(pool.point, lambda: MIB)
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


def test_open_with_truncation_makes_room_for_what_follows(pool: KvfuseMount) -> None:
    """``open("wb")`` of an old block on a full volume, and the same number of bytes again."""
    blocks, _ = fill(pool.point, lambda: MIB)
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
