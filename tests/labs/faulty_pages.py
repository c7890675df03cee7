"""Programs whose mapped files fail under their hands: ``faulty_pages.py KIND [ARGUMENT]`` ends with 0 where it lives.

``threads``: copies of every kind meet a cut file, beside threads that keep the interpreter busy.
``records SEED FOLDER``: some pages of a record store cannot be read. ``foreign``: a fault in a map that nobody guards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import trio

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.volume.views.content_map import Bytes

SIZE = 4 << 20
PAGE = mmap.PAGESIZE
LOSSES = 40


def guarded(path: Path) -> tuple[GuardedMap, Bytes]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(descriptor, SIZE)
    memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
    data = np.frombuffer(memory, np.uint8)
    return GuardedMap(path, descriptor, data.ctypes.data, SIZE, memory), data


COPIES: list[Callable[[Bytes], object]] = [
    lambda data: bytes(data.data[SIZE - PAGE :]),
    lambda data: np.take(data.reshape(-1, PAGE), np.arange(60, SIZE // PAGE), axis=0, mode="clip"),
    lambda data: crc32c(data.data),
    lambda data: np.copyto(np.empty(SIZE, np.uint8), data),
]


def lose(folder: Path, name: str) -> None:
    for number in range(LOSSES):
        guard, data = guarded(folder / name)
        assert guard.is_intact()
        os.ftruncate(guard.descriptor, PAGE * (number % 50) + number)
        COPIES[number % len(COPIES)](data)
        assert guard.failed
        assert not guard.is_intact()
        os.close(guard.descriptor)


def threads() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: lose(Path(folder), name), "abc"))
    finally:
        stop.set()
        spinner.join()


async def use(records: LmdbRecords, rng: random.Random, count: int) -> None:
    def key() -> bytes:
        return b"k%06d" % rng.randrange(3000)

    def value() -> bytes:
        return rng.randbytes(rng.choice([10, 50, 300, 1500, 9000]))

    for _ in range(count):
        action = rng.randrange(4)
        if action == 0:
            await records.get([key() for _ in range(20)])
        elif action == 1:
            await records.scan(b"k", key())
        else:
            puts = {key(): value() for _ in range(rng.choice([1, 50, 300]))}
            await records.commit(puts, {key() for _ in range(100)} - puts.keys())


async def lose_pages(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    records = LmdbRecords.open(folder, map_size=1 << 30)
    await use(records, rng, 60)
    descriptor = os.open(folder / "empty", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, PAGE)
    count = (folder / "data.mdb").stat().st_size // PAGE
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    for page in rng.sample(range(2, count), min(count - 2, rng.choice([1, 10, 100, count]))):
        place = records._medium._data.address + page * PAGE
        assert libc.mmap(place, PAGE, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, descriptor, 0) == place
    os.ftruncate(descriptor, 0)  # now those pages are behind the end of their file
    try:
        await use(records, rng, 200)
    except EngineError:
        assert records._medium.failed
        for call in (records.get([b"k000001"]), records.scan(b"k"), records.commit({b"k1": b""}), records.get([b"x"])):
            try:
                await call
            except EngineError:
                continue
            raise AssertionError("pages that failed are used again") from None
    await records.aclose()


def foreign() -> None:
    with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as other:
        guard, _ = guarded(Path(other.name))
        file.truncate(PAGE)
        memory = mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ)
        file.truncate(0)
        print(memory[0], guard)


if __name__ == "__main__":
    if sys.argv[1] == "records":
        trio.run(lose_pages, int(sys.argv[2]), Path(sys.argv[3]))
    else:
        {"threads": threads, "foreign": foreign}[sys.argv[1]]()
