"""A full volume: ENOSPC exactly at what was promised, nearly all of it usable, and everything comes back."""

from __future__ import annotations

import errno
import math
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pairs import Engines
from filling import MIB, anonymous_bytes, check_blocks, fill, free_bytes, total_bytes, write_block
from mounting import KvfuseMount, wait_until
from posix_calls import opened

CAPACITY = 128 * MIB
CYCLES = 25


ON_ONE_HOST = pytest.mark.engines("lmdb+file")
SHARED = pytest.mark.engines("etcd+rados", "etcd+rados-relaxed")
ONCE_EACH = pytest.mark.engines("lmdb+file", "etcd+rados")


@pytest.fixture
def small(engines: Engines) -> Iterator[KvfuseMount]:
    with engines.mounted([f"volume.capacity={CAPACITY}"]) as mount:
        yield mount


@ON_ONE_HOST
@pytest.mark.parametrize("size", [64 << 10, 300 << 10, 700 << 10, MIB, MIB + 28, 2 * MIB, 5 * MIB + 12345])
def test_one_block_size_uses_nearly_all(small: KvfuseMount, size: int) -> None:
    files = fill(small.point, lambda: size)
    # The last file that did not fit may have been nearly as large as a block.
    assert sum(files.values()) + size > 0.95 * total_bytes(small)
    check_blocks(files)
    disk = sum(path.stat().st_blocks * 512 for path in (small.volume / "segments").glob("*.seg"))
    assert disk <= CAPACITY + 64 * 1024, "the disk's own map of a file's blocks is all that may come on top"
    assert sum(path.stat().st_size for path in (small.volume / "segments").glob("*.seg")) <= CAPACITY


@SHARED
def test_a_shared_volume_holds_what_was_promised_again_and_again(small: KvfuseMount) -> None:
    """Who is alone has the room of removed files at once, for a write; the figures follow a moment later."""
    capacity = total_bytes(small)
    assert 0.95 * CAPACITY < capacity <= CAPACITY
    for _ in range(2):
        files = fill(small.point, lambda: MIB + 28)
        assert capacity >= sum(files.values()) > 0.95 * capacity - MIB
        assert free_bytes(small) < 0.05 * capacity + MIB
        check_blocks(files)
        for path in files:
            path.unlink()
    wait_until(lambda: free_bytes(small) == capacity, "the room of removed files")
    fill(small.point, lambda: MIB + 28)
    for path in small.point.iterdir():
        path.unlink()
    small.unmount()
    small.mount()
    assert len(fill(small.point, lambda: MIB + 28)) == len(files), "what the last daemon removed has room for as much"


@pytest.mark.ring(3)
@ON_ONE_HOST
@pytest.mark.parametrize("size_max", [256 << 10, MIB, 4 * MIB])
def test_a_wide_mix_uses_most(small: KvfuseMount, rng: random.Random, size_max: int) -> None:
    files = fill(small.point, lambda: int(math.exp(rng.uniform(math.log(4096), math.log(size_max)))))
    assert sum(files.values()) + size_max > 0.85 * total_bytes(small)
    check_blocks(files)


@ON_ONE_HOST
def test_space_comes_back_at_once(small: KvfuseMount) -> None:
    files = fill(small.point, lambda: MIB)
    for path in files:
        path.unlink()
    assert free_bytes(small) == total_bytes(small)
    assert len(fill(small.point, lambda: MIB)) == len(files), "what was just removed has room for as much"


@pytest.mark.ring(3)
@ON_ONE_HOST
def test_filling_and_emptying_leaks_nothing(small: KvfuseMount) -> None:
    count = len(fill(small.point, lambda: MIB))
    resident = 0
    for cycle in range(CYCLES):
        for path in small.point.iterdir():
            path.unlink()
        assert free_bytes(small) == total_bytes(small)
        assert len(fill(small.point, lambda: MIB)) == count
        if cycle == CYCLES // 5:
            resident = anonymous_bytes(small)
    assert anonymous_bytes(small) < 1.2 * resident + 16 * MIB


@ONCE_EACH
def test_a_write_that_partly_fits_is_short(small: KvfuseMount) -> None:
    fill(small.point, lambda: MIB)
    (small.point / "block-0").unlink()
    wait_until(lambda: free_bytes(small) >= MIB, "its room")
    descriptor = os.open(small.point / "large", os.O_WRONLY | os.O_CREAT)
    try:
        written = 0
        with pytest.raises(OSError, match="No space"):
            while True:
                written += os.write(descriptor, bytes(600 << 10))
        assert written, "no byte had room, although the room was shown"
        assert os.fstat(descriptor).st_size == written
    finally:
        os.close(descriptor)
    assert (small.point / "large").read_bytes() == bytes(written)


@ONCE_EACH
def test_what_needs_no_room_works_on_a_full_volume(small: KvfuseMount, engines: Engines) -> None:
    """Where many hosts read, nothing is changed in place: there a change needs room as well, and is refused."""
    files = fill(small.point, lambda: MIB)
    victim = next(iter(files))
    (small.point / "rest").mkdir()
    fill(small.point / "rest", lambda: 4096)
    before, changed = victim.read_bytes()[500_000:500_016], b"changed in place"
    with opened(victim, os.O_WRONLY) as descriptor:
        if engines.is_shared:
            with pytest.raises(OSError, match="No space"):
                os.pwrite(descriptor, changed, 500_000)
        else:
            assert os.pwrite(descriptor, changed, 500_000) == len(changed)
    assert victim.read_bytes()[500_000:500_016] == (before if engines.is_shared else changed)
    os.truncate(victim, 300_001)
    assert victim.stat().st_size == 300_001
    victim.rename(small.point / "renamed")
    os.link(small.point / "renamed", small.point / "second")
    (small.point / "folder").mkdir()
    os.symlink("renamed", small.point / "folder" / "link")
    os.truncate(small.point / "renamed", 0)
    assert (small.point / "second").stat().st_size == 0


@ONCE_EACH
def test_a_full_volume_survives_a_restart(small: KvfuseMount, engines: Engines) -> None:
    size = (700 << 10) if engines.is_shared else 300 << 10  # each file is a commit there
    files = fill(small.point, lambda: size)
    small.unmount()
    small.fsck()
    small.mount()
    check_blocks(files)
    assert not write_block(small.point / "more", bytes(size))


@pytest.mark.root
def test_a_disk_that_is_smaller_than_promised(tmp_path: Path, rng: random.Random) -> None:
    """The disk lost room after the volume was made: writes fail, and nothing that is there does."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(disk)], check=True)
    try:
        base = disk / "base"
        base.mkdir()
        mount = KvfuseMount(base, ["volume.capacity=128MiB", "volume.segment_size=16MiB"])
        mount.mount()
        try:
            (disk / "other").write_bytes(bytes(100 * MIB))
            data = rng.randbytes(3 * MIB)
            paths = [mount.point / f"block-{number}" for number in range(20)]
            failed = 0
            for path in paths:
                try:
                    with path.open("wb") as file:
                        file.write(data)
                        os.fsync(file.fileno())
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EIO):
                        raise
                    failed += 1
            assert 0 < failed < len(paths)
            (disk / "other").unlink()
            assert paths[0].read_bytes() == data
            with (mount.point / "again").open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())
            mount.unmount()
            mount.fsck()
        finally:
            mount.remove()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
