"""A model that is loaded past the page cache leaves its part of the daemon to another namespace, by weight."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount

from kvfuse.usrbio.client import BlockStore

pytestmark = [pytest.mark.alone, pytest.mark.engines("lmdb+file")]

MIB = 1 << 20
SIZE = 64 * MIB
BLOCK, COUNT = 64 << 10, 2048
LIGHT = 0.01
LEAST_SECONDS = 0.8
"""of the light load beside the other namespace: half of what its share of 4 GiB/s takes"""
FACTOR = 3.0
"""so many times as long as a load of weight 1, or alone, in some round: the machine may be busy"""
ROUNDS_MAX = 4
PAUSE = 0.002
"""seconds between two reads of the other namespace"""


@pytest.fixture
def mount(rng_bytes: bytes) -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=1GiB"]) as mount:
        for name, settings in (("models", "kind=files"), ("other", "kind=files"), ("blocks", "kind=blocks")):
            (mount.point / name).mkdir()
            os.setxattr(mount.point / name, "user.kvfuse.namespace", settings.encode())
        (mount.point / "models" / "model").write_bytes(rng_bytes)
        (mount.point / "other" / "file").write_bytes(bytes(BLOCK))
        with BlockStore(mount.point, mount.point / "blocks") as store:
            store.put_many([b"block-%d" % number for number in range(COUNT)], [bytes(BLOCK)] * COUNT)
        yield mount


@pytest.fixture(scope="module")
def rng_bytes() -> bytes:
    return np.random.default_rng(37).bytes(SIZE)


def load(path: Path, expected: bytes) -> float:
    """Seconds of a load past the page cache, by one thread."""
    memory = mmap.mmap(-1, SIZE)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began, done = time.monotonic(), 0
        while done < SIZE:
            done += os.preadv(descriptor, [memoryview(memory)[done : done + 4 * MIB]], done)
        seconds = time.monotonic() - began
    finally:
        os.close(descriptor)
    assert memory[:] == expected
    return seconds


def read_files(point: Path, end: threading.Event, going: threading.Event) -> None:
    """By the kernel, without its cache."""
    descriptor = os.open(point / "other" / "file", os.O_RDONLY)
    while not end.wait(PAUSE):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert len(os.pread(descriptor, BLOCK, 0)) == BLOCK
        going.set()
    os.close(descriptor)


def get_blocks(point: Path, end: threading.Event, going: threading.Event) -> None:
    """That a daemon has on the disk alone, each once."""
    buffer = np.zeros(BLOCK, np.uint8)
    with BlockStore(point, point / "blocks") as store:
        for number in range(COUNT):
            assert store.get_into(b"block-%d" % number, buffer) == BLOCK
            going.set()
            if end.wait(PAUSE):
                return


def beside(mount: KvfuseMount, expected: bytes, weight: float, read: Callable[..., None] | None) -> float:
    """Seconds of a load of this weight, by a daemon that has nothing in memory."""
    mount.unmount()
    mount.mount()
    os.setxattr(mount.point / "models", "user.kvfuse.namespace", f"weight={weight}".encode())
    path, end, going = mount.point / "models" / "model", threading.Event(), threading.Event()
    load(path, expected)  # then the page cache has it
    thread = threading.Thread(target=read, args=(mount.point, end, going)) if read is not None else None
    if thread is not None:
        thread.start()
        assert going.wait(60)
    try:
        return load(path, expected)
    finally:
        end.set()
        if thread is not None:
            thread.join()


@pytest.mark.parametrize("read", [read_files, get_blocks])
def test_a_light_load_leaves_the_daemon_to_others(
    mount: KvfuseMount, rng_bytes: bytes, read: Callable[..., None]
) -> None:
    for _ in range(ROUNDS_MAX):
        light = beside(mount, rng_bytes, LIGHT, read)
        equal, alone = beside(mount, rng_bytes, 1, read), beside(mount, rng_bytes, LIGHT, None)
        print(f"a load takes {light:.2f} s with weight {LIGHT}, {equal:.2f} s with weight 1, {alone:.2f} s alone")
        if light > max(LEAST_SECONDS, FACTOR * equal, FACTOR * alone):
            return
    pytest.fail("the weight made no difference beside the other namespace, or one where there was none")
