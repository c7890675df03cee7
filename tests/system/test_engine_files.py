"""Calls that engines' file backends make, in a folder of blocks and in one of the kernel's file systems: same results.

Of SGLang's file and hf3fs backends, LMCache's fs, fs_native, local disk and hf3fs, vLLM's shared storage and fs
offload, and NIXL's POSIX plugin. What they store whole is a block then; their huge files are ordinary ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from mounting import KvfuseMount

pytestmark = [pytest.mark.ring(2), pytest.mark.engines("lmdb+file")]

SIZES = [1, 4095, 4096, 70_001, 300_000, 2 << 20]
ALIGNMENT = 4096
Backend = Callable[[Path, random.Random], Iterator[object]]
"""``(folder, chance)``: makes calls, and yields what they returned"""


def told(function: Callable[..., object], *arguments: object) -> object:
    """What a call returns, as text; or its errno."""
    try:
        found = function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return hashlib.sha256(found).hexdigest() if isinstance(found, bytes) else found


def shape(path: Path) -> object:
    """What a stat says that does not depend on the file system."""

    def ask() -> object:
        found = path.stat()
        return oct(found.st_mode), found.st_size, found.st_nlink, found.st_uid, found.st_gid

    return told(ask)


def in_pieces(file: int, data: bytes, chance: random.Random) -> None:
    start = 0
    while start < len(data):
        start += os.write(file, data[start : start + chance.choice([1000, 65536, 1 << 20])])


def aligned(size: int) -> mmap.mmap:
    return mmap.mmap(-1, max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT))


def read_direct(path: Path, size: int) -> bytes:
    with aligned(size) as buffer:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            count = os.preadv(file, [buffer], 0)
        finally:
            os.close(file)
        return buffer[:count]


# -- backends ----------------------------------------------------------------------------------------


def sglang_file(folder: Path, chance: random.Random) -> Iterator[object]:
    """Whole files by their final names, if they do not exist; read into a buffer of the right size."""
    for number in range(40):
        path = folder / f"{number % 25:064x}_model_0_1.bin"
        if os.path.exists(path):
            buffer = bytearray(path.stat().st_size)
            with open(path, "rb", buffering=0) as file:
                yield file.readinto(buffer), bytes(buffer) and told(bytes, buffer)
        else:
            with open(path, "wb") as file:
                file.write(chance.randbytes(chance.choice(SIZES)))
    yield sorted(os.listdir(folder))
    for name in os.listdir(folder):
        if name.endswith("_model_0_1.bin"):
            os.remove(folder / name)
    yield os.listdir(folder)


def huge_file(folder: Path, chance: random.Random) -> Iterator[object]:
    """SGLang's hf3fs: one file as large as the cache, of which pages are written and read in place."""
    path, page = folder / "data.0.bin", 65_536
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 1500 * page)
    yield shape(path)
    pages = {}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            batch = {number: chance.randbytes(page) for number in chance.sample(range(1500), 8)}
            pages |= batch
            yield list(pool.map(lambda item: os.pwrite(file, item[1], item[0] * page), batch.items()))
            wanted = chance.sample(sorted(pages), 8)
            yield [told(os.pread, file, page, number * page) for number in wanted]
            assert os.pread(file, page, wanted[0] * page) == pages[wanted[0]]
    os.fsync(file)
    os.close(file)
    with path.open("r+b") as again:
        yield told(os.pread, again.fileno(), page, min(pages) * page)
    os.unlink(path)


def lmcache_fs(folder: Path, chance: random.Random) -> Iterator[object]:
    """A temporary name, pieces, and replace; listed by suffix, peeked at, removed."""
    for number in range(40):
        key = f"model@1@0@{number % 25:x}@half"
        path, temporary = folder / f"{key}.data", folder / f"{key}.{number}.tmp"
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        in_pieces(file, chance.randbytes(chance.choice(SIZES)), chance)
        if number % 3 == 0:
            os.fsync(file)
        os.close(file)
        yield told(os.open, temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY), shape(temporary)
        os.replace(temporary, path)
        yield told(path.read_bytes), shape(path), told(temporary.stat)
    yield sorted(path.name for path in folder.glob("*.data"))
    for number in range(0, 30, 2):
        yield told(os.unlink, folder / f"model@1@0@{number:x}@half.data")
    yield sorted(os.listdir(folder))


def direct(folder: Path, chance: random.Random) -> Iterator[object]:
    """LMCache's local disk and fs_native: O_DIRECT from aligned memory, cut to the size afterwards."""
    for number in range(30):
        path, size = folder / f"{number % 20}.pt", chance.choice(SIZES)
        data = chance.randbytes(size)
        with aligned(size) as buffer:
            buffer[:size] = data
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o600)
            half = len(buffer) // 2 // ALIGNMENT * ALIGNMENT
            view = memoryview(buffer)
            yield os.pwritev(file, [view[:half]], 0) if half else 0, os.pwritev(file, [view[half:]], half)
            view.release()
        os.ftruncate(file, size)
        os.close(file)
        assert read_direct(path, size) == data
        yield shape(path), told(path.read_bytes), told(read_direct, path, size // 2 + 1)
        yield told(os.link, path, folder / "0.pt") if number == 5 else None


def preallocated(folder: Path, chance: random.Random) -> Iterator[object]:
    """NIXL's POSIX plugin: room first, then pieces at their places, by several threads, through one descriptor."""
    for number in range(20):
        path, size = folder / f"obj_{number}", chance.choice(SIZES)
        data = chance.randbytes(size)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o744)
        if number % 2:
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
        yield shape(path), told(os.pread, file, 100, 0)
        step = chance.choice([4096, 100_000])
        places = list(range(0, size, step))
        chance.shuffle(places)
        with ThreadPoolExecutor(4) as pool:
            yield sum(pool.map(partial(os.pwrite, file), [data[at : at + step] for at in places], places))
        yield told(os.pread, file, size + 10, 0), os.fstat(file).st_size
        os.close(file)
        assert path.read_bytes() == data
        yield shape(path)


def safetensors(folder: Path, chance: random.Random) -> Iterator[object]:
    """vLLM's shared storage: folders of hashes, files written whole and read through a mapping."""
    for number in range(20):
        place = folder / f"{number % 5:032x}"
        os.makedirs(place, exist_ok=True)
        path, data = place / f"layer.{number}.safetensors", chance.randbytes(chance.choice(SIZES))
        with path.open("wb", buffering=8192) as file:
            file.write(len(data).to_bytes(8, "little"))
            file.write(data)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            yield told(bytes, memory[:8]), told(bytes, memory[8:])
            os.replace(path, path.with_suffix(".old"))
            yield told(bytes, memory[:])
        yield sorted(os.listdir(place)), os.path.isdir(place), os.path.exists(path)
    yield sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def offloaded(folder: Path, chance: random.Random) -> Iterator[object]:
    """vLLM's fs offload: many threads, folders by the first bytes, times as an order of eviction."""

    def store(number: int) -> object:
        data = random.Random(number).randbytes(SIZES[number % len(SIZES)])
        place = folder / f"{number % 7:02x}" / f"{number % 3:02x}"
        place.mkdir(parents=True, exist_ok=True)
        temporary = place / f"{number}.bin.tmp"
        temporary.write_bytes(data)
        os.rename(temporary, place / f"{number}.bin")
        os.utime(place / f"{number}.bin", (1_000_000 + number, 1_000_000 + number))
        return told((place / f"{number}.bin").read_bytes)

    with ThreadPoolExecutor(8) as pool:
        yield list(pool.map(store, range(60)))
    paths = sorted((path for path in folder.rglob("*.bin")), key=lambda path: path.stat().st_mtime)
    yield [path.relative_to(folder).as_posix() for path in paths]
    for path in paths[:20]:
        path.unlink()
    yield sorted(path.name for path in folder.rglob("*.bin")), sum(path.stat().st_size for path in paths[20:])


BACKENDS: dict[str, tuple[Backend, bool]] = {
    "sglang file": (sglang_file, True),
    "sglang hf3fs": (huge_file, False),
    "lmcache fs": (lmcache_fs, True),
    "lmcache direct": (direct, False),
    "nixl posix": (preallocated, True),
    "vllm shared storage": (safetensors, True),
    "vllm fs": (offloaded, True),
}
"""what stores -> (its calls, whether all of its files are blocks at the end)"""


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_of_a_backend(shared_mount: KvfuseMount, tmp_path: Path, name: str, seed: int) -> None:
    backend, are_blocks = BACKENDS[name]
    folder = shared_mount.point / name.replace(" ", "-")
    folder.mkdir()
    os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
    rounds = 0
    for mine, theirs in zip(backend(folder, random.Random(seed)), backend(tmp_path, random.Random(seed)), strict=True):
        rounds += 1
        assert mine == theirs, f"step {rounds}"
    assert rounds
    if are_blocks:
        for path in folder.rglob("*.*"):
            if path.stat().st_size <= SIZES[-1]:  # a slab
                assert json.loads(os.getxattr(path, "kvfuse.info")).get("kind") == "block", path
