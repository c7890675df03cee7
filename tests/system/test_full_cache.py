"""A mounted cache that gets three times what it has room for, through each door and in all sizes, goes on."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from filling import KIB, MIB, block_bytes, free_bytes, total_bytes
from hf3fs_lab import iovec_of, registered, rings, run
from mounting import KvfuseMount, temporary_mount, wait_until

from kvfuse.usrbio.client import BlockStore

CAPACITY = 256 * MIB
SIZES = 4 * KIB, 64 * KIB, 300 * KIB, MIB
"""up to that of a slab, which is the largest that a block has"""
WRITERS = 4
Writer = Callable[[KvfuseMount, list[Path], int], None]


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    words = ["cache", f"volume.capacity={CAPACITY}", "volume.segment_size=64MiB"]
    with temporary_mount(words) as mounted:
        yield mounted
        assert " ERROR " not in mounted.log.read_text()


def copy_files(mount: KvfuseMount, paths: list[Path], size: int) -> None:
    """As `cp` does."""
    source = mount.point.parent / f"source-{threading.get_ident()}"
    for path in paths:
        source.write_bytes(block_bytes(path, size))
        subprocess.run(["cp", source, path], check=True)


def publish_files(mount: KvfuseMount, paths: list[Path], size: int) -> None:
    """As SGLang's file backend does: another name, all bytes, and the block's name."""
    for path in paths:
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(block_bytes(path, size))
        os.replace(temporary, path)


def write_by_ring(mount: KvfuseMount, paths: list[Path], size: int) -> None:
    """By the file calls of 3FS."""
    iov = iovec_of(mount, size)
    _, writes = rings(mount)
    for path in paths:
        iov[:] = block_bytes(path, size)
        temporary = path.with_name(f"{path.name}.ring")
        with registered(temporary) as fd:
            writes.prepare(iov[:size], False, fd, 0)
            assert run(writes, 1) == [size]
        os.replace(temporary, path)


def put_blocks(mount: KvfuseMount, paths: list[Path], size: int) -> None:
    with BlockStore(mount.point, paths[0].parent) as store:
        for path in paths:
            store.put(path.name, np.frombuffer(block_bytes(path, size), np.uint8))


@pytest.mark.ring(3)
@pytest.mark.parametrize(
    "write",
    [copy_files, publish_files, put_blocks],
)
def test_three_times_the_capacity_goes_in(mount: KvfuseMount, write: Writer) -> None:
    """In turns of one size, so that the slabs of one class have to go to another, and by many threads."""
    blocks: dict[Path, int] = {}
    written, capacity = 0, total_bytes(mount)
    sizes = cycle(SIZES)
    with ThreadPoolExecutor(WRITERS) as pool:
        while written < 3 * capacity:
            size = next(sizes)
            count = max(WRITERS, min(60, 20 * MIB // size))
            paths = [mount.point / f"{size}-{len(blocks) + number}" for number in range(count)]
            parts = [paths[number::WRITERS] for number in range(WRITERS)]
            list(pool.map(lambda part, size=size: write(mount, part, size), parts))
            blocks |= dict.fromkeys(paths, size)
            written += count * size
            assert 0 <= free_bytes(mount) <= capacity
            check_found(list(islice(reversed(blocks.items()), 300)))
    found = check_found(list(blocks.items()))
    assert found > 0.5 * capacity, f"only {found >> 20} MiB of {capacity >> 20} are there"
    wait_until(lambda: not list(mount.point.glob("*.tmp")), "no temporary name")


def test_files_of_rings_stay_and_blocks_make_room_for_them(mount: KvfuseMount) -> None:
    blocks = {mount.point / f"block-{number}": MIB for number in range(CAPACITY // MIB)}
    publish_files(mount, list(blocks), MIB)
    files = {mount.point / f"file-{number}": 2 * MIB for number in range(CAPACITY // MIB // 4)}
    write_by_ring(mount, list(files), 2 * MIB)
    assert check_found(list(files.items())) == CAPACITY // 2
    assert 0 < check_found(list(blocks.items())) < CAPACITY // 2


def check_found(blocks: list[tuple[Path, int]]) -> int:
    """Bytes of the files that are there: each is whole."""
    found = 0
    for path, size in blocks:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        assert data == block_bytes(path, size), path
        found += size
    return found


def test_the_kernel_does_not_keep_what_was_evicted(mount: KvfuseMount) -> None:
    """Neither names, attributes nor pages, nor a listing; what is open or mapped stays readable."""
    paths = [mount.point / f"old-{number}" for number in range(50)]
    publish_files(mount, paths, MIB)
    assert check_found([(path, MIB) for path in paths]) == 50 * MIB
    held, mapped = paths[0].open("rb"), paths[1].open("rb")
    view = mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ)
    mapped.close()
    assert {path.name for path in paths} <= set(os.listdir(mount.point))
    with held, view, BlockStore(mount.point, mount.point) as store:
        publish_files(mount, [mount.point / f"new-{number}" for number in range(600)], MIB)
        there = dict(zip(paths, store.exists([path.name for path in paths]), strict=True))
        gone = [path for path in paths if not there[path]]
        assert len(gone) > 40
        wait_until(lambda: not any(map(os.path.exists, gone)), "names of evicted files")
        for path in gone:
            with pytest.raises(FileNotFoundError):
                path.read_bytes()
        assert store.get(gone[0].name) is None
        wait_until(lambda: not {path.name for path in gone} & set(os.listdir(mount.point)), "a listing without them")
        assert held.read() == block_bytes(paths[0], MIB)
        assert bytes(view) == block_bytes(paths[1], MIB)
        gone[0].write_bytes(b"again")
        assert gone[0].read_bytes() == b"again"
        assert bytes(store.get(gone[0].name)) == b"again"
