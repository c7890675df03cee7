"""Programs whose mapped files fail under their hands: ``faulty_pages.py KIND [ARGUMENT]`` ends with 0 where it lives.

``threads``: copies of every kind meet a cut file, beside threads that keep the interpreter busy.
``records SEED FOLDER``: some pages of a record store cannot be read. ``tree FOLDER``: each page in turn, and each
level, of one whose trees are deep. ``foreign``: a fault in a map that nobody guards.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import numpy as np
import trio

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.records.api import Meter
from kvfuse.remote.records.lmdb import datafile
from kvfuse.remote.records.lmdb.medium import DATA_FILE
from kvfuse.remote.records.lmdb.residency import mapped_address
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.volume.views.content_map import Bytes

SIZE = 4 << 20
PAGE = mmap.PAGESIZE
LOSSES = 40
LOST = "cannot be read any more"


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
    count = (folder / DATA_FILE).stat().st_size // PAGE
    make_unreadable(folder, rng.sample(range(2, count), min(count - 2, rng.choice([1, 10, 100, count]))))
    await answer_or_fail(records, use(records, rng, 200))


def make_unreadable(folder: Path, pages: Collection[int]) -> None:
    """Whoever touches these pages of the map of the store there gets a SIGBUS."""
    address = mapped_address(folder / DATA_FILE)
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        for page in pages:
            place = address + page * PAGE
            assert libc.mmap(place, PAGE, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, file.fileno(), 0) == place
        file.truncate(0)  # now those pages are behind the end of their file


async def answer_or_fail(records: LmdbRecords, using: Awaitable[object]) -> bool:
    """Whether the use failed: then with EngineError, and so does every use after it."""
    try:
        await using
    except EngineError as error:
        assert records._medium.failed
        assert LOST in str(error)
        for call in (records.get([b"k000001"]), records.scan(b"k"), records.commit({b"k1": b""}), records.get([b"x"])):
            try:
                await call
            except EngineError as again:
                assert LOST in str(again)
                continue
            raise AssertionError("pages that failed are used again") from None
    await records.aclose()
    return records._medium.failed


TREE_KEYS = [b"k%04d" % number + b"." * 500 for number in range(0, 1600, 4)]
"""so long that few of them fit a page"""
VALUE = bytes(200)


async def plant(folder: Path) -> None:
    """A store whose records, and whose free list, are trees of several levels, with data on pages of their own."""
    records = LmdbRecords.open(folder, map_size=64 << 20)
    big = {b"b%04d" % number: bytes(9000) for number in range(90)}
    await records.commit(dict.fromkeys(TREE_KEYS, VALUE))
    await records.commit(big)
    with records._environment.begin():  # nothing is taken from the free list meanwhile
        await records.commit({}, list(big)[3:])
        for key in TREE_KEYS[::3]:
            await records.commit({key: VALUE})
    await records.aclose()


def levels(folder: Path) -> dict[str, list[int]]:
    """The numbers of the pages of each level of both trees, and of those with data."""
    data = (folder / DATA_FILE).read_bytes()
    found: dict[str, list[int]] = {}

    def visit(name: str, number: int, depth: int) -> None:
        found.setdefault(f"{name} {depth}", []).append(number)
        page = data[number * PAGE :][:PAGE]
        _, _, flags, lower, _ = datafile._HEADER.unpack_from(page)
        for place in struct.unpack_from(f"<{(lower - 16) // 2}H", page, 16):
            low, high, node_flags, key_size = datafile._NODE.unpack_from(page, place)
            if flags & datafile._BRANCH:
                visit(name, low | high << 16, depth + 1)
            elif node_flags & datafile._BIG_DATA:
                (first,) = struct.unpack_from("<Q", page, place + 8 + key_size)
                found.setdefault(f"{name} data", []).extend(range(first, first - (-(low | high << 16) - 16) // PAGE))

    metas = (datafile._Meta._make(datafile._META.unpack_from(data, place + 16)) for place in (0, PAGE))
    meta = max(metas, key=attrgetter("transaction"))
    visit("free", meta.free_root, 0)
    visit("records", meta.records_root, 0)
    return found


async def scan_all(records: LmdbRecords) -> None:
    await records.scan(b"", limit=1 << 20)


async def get_all(records: LmdbRecords) -> None:
    await records.get(TREE_KEYS)


async def delete_upwards(records: LmdbRecords) -> None:
    await records.commit({}, TREE_KEYS)


async def delete_downwards(records: LmdbRecords) -> None:
    """A page is merged with its neighbour on the left before that one is searched."""
    await records.commit({}, TREE_KEYS[::-1])


async def put_between(records: LmdbRecords) -> None:
    await records.commit({key[:4] + b"5" + key[5:]: VALUE for key in TREE_KEYS})


async def put_big(records: LmdbRecords) -> None:
    """It takes the whole free list to find so many pages in one piece."""
    await records.commit({b"b0000": bytes(3 << 20), b"b0001": b"small"}, [b"b0002"])
    await records.commit({b"c": bytes(9000)})


USES = [scan_all, get_all, delete_upwards, delete_downwards, put_between, put_big]


def lose_while_opened(folder: Path, pages: Collection[int], count: int) -> bool:
    """The pages are lost when ``count`` of the records have been weighed. Whether that was an error."""
    weighed = itertools.count(1)

    def weigh(key: bytes, value: bytes) -> tuple[int, int]:
        if next(weighed) == count:
            make_unreadable(folder, pages)
        return len(key) + len(value), 1

    try:
        LmdbRecords.open(folder, map_size=64 << 20, meter=Meter(b"usage", weigh))
    except EngineError as error:
        assert LOST in str(error)
        return True
    return False


async def lose_each_page(folder: Path) -> None:
    await plant(folder / "whole")
    tree = levels(folder / "whole")
    assert {"free 1", "free data", "records 3", "records data"} <= tree.keys(), tree.keys()
    alone = {f"{name}: {page}": [page] for name, pages in tree.items() for page in pages}
    met = set()
    for name, pages in {**tree, **alone, "metas": [0, 1]}.items():
        for use_it in USES:
            shutil.copytree(folder / "whole", folder / "copy")
            records = LmdbRecords.open(folder / "copy", map_size=64 << 20)
            make_unreadable(folder / "copy", pages)
            print(name, use_it.__name__, file=sys.stderr, flush=True)
            if await answer_or_fail(records, use_it(records)):
                met.add(name)
            shutil.rmtree(folder / "copy")
    for name, pages in tree.items():
        for count in range(1, len(TREE_KEYS), 10):
            print(name, "while opened", count, file=sys.stderr, flush=True)
            if lose_while_opened(folder / "whole", pages, count):
                met.add(f"{name} while opened")
    assert met >= {f"{name} while opened" for name in tree if name.startswith("records")}
    assert met >= tree.keys(), tree.keys() - met


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
    elif sys.argv[1] == "tree":
        trio.run(lose_each_page, Path(sys.argv[2]))
    else:
        {"threads": threads, "foreign": foreign}[sys.argv[1]]()
