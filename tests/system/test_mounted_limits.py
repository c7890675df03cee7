"""A limit of bytes a second holds at all doors of a real mount together, within 5 %."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount

from kvfuse.usrbio.client import BlockStore, connect

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
SECONDS = 4.0


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["volume.capacity=128MiB"]) as mount:
        yield mount


def write_files(folder: Path, moved: Callable[[int], None], end: float) -> None:
    number = 0
    while time.monotonic() < end:
        number += 1
        with open(folder / f"file{number % 8}", "wb", buffering=0) as file:
            moved(file.write(bytes(BLOCK)))


def read_files(folder: Path, moved: Callable[[int], None], end: float) -> None:
    """Without the kernel's cache."""
    (folder / "read").write_bytes(bytes(BLOCK))
    descriptor = os.open(folder / "read", os.O_RDONLY)
    while time.monotonic() < end:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        moved(len(os.pread(descriptor, BLOCK, 0)))
    os.close(descriptor)


def use_blocks(folder: Path, moved: Callable[[int], None], end: float) -> None:
    buffer = np.zeros(BLOCK, np.uint8)
    with BlockStore(str(folder), folder, deadline=30) as store:
        store.put("block", bytes(BLOCK))
        while time.monotonic() < end:
            size = store.get_into("block", buffer)
            assert size == BLOCK
            moved(size)


def read_through_a_ring(folder: Path, moved: Callable[[int], None], end: float) -> None:
    (folder / "ring").write_bytes(bytes(BLOCK))
    with connect(folder) as client, client.iov(4 * BLOCK) as iov, client.ring(8) as ring:
        file = client.file(folder / "ring", "r")
        while time.monotonic() < end:
            ring.prep_reads(iov, np.arange(4) * BLOCK, file, 0, BLOCK)
            ring.submit()
            moved(int(ring.wait(4)["result"].sum()))


DOORS = {
    "writes of files": [write_files],
    "reads of files": [read_files],
    "blocks": [use_blocks],
    "rings": [read_through_a_ring],
    "all": [write_files, read_files, use_blocks, read_through_a_ring],
}


@pytest.mark.parametrize("door", DOORS)
def test_a_limit_holds(mount: KvfuseMount, door: str) -> None:
    rate = 2 * MIB  # slow and busy machines have to get there, too
    folder = mount.point / "limited"
    folder.mkdir()
    total, lock, failures = [0], threading.Lock(), list[BaseException]()
    began = time.monotonic()

    def moved(size: int) -> None:
        if time.monotonic() <= began + SECONDS:
            with lock:
                total[0] += size

    def work(door: Callable[[Path, Callable[[int], None], float], None]) -> None:
        try:
            door(folder, moved, began + SECONDS)
        except BaseException as error:
            failures.append(error)

    os.setxattr(folder, "user.kvfuse.namespace", f"bandwidth={rate}".encode())
    threads = [threading.Thread(target=work, args=[one]) for one in DOORS[door]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    print(f"{total[0] / rate / SECONDS:.3f} of the limit")
    assert 0.8 < total[0] / rate / SECONDS < 1.05
    mount.unmount()
    mount.fsck()
