"""Patterns of engines that keep a file for each block."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from kvfuse.errors import KvfuseError
from kvfuse_bench.engines.measuring import Memory, Meter

READS = ("read", "read again")
"""phases: blocks that were just written, and then all of them once more"""
VLLM_THREADS = 16
"""that store, and as many that load"""
NATIVE_THREADS = 4
EXISTS_COUNT = 96
HEADER = struct.Struct("<7I")
"""as long as LMCache's: 28 bytes, so that all data is shifted by these"""


def offers_direct(folder: Path) -> bool:
    """Whether files of a folder can be opened with O_DIRECT: vLLM's probe."""
    path = folder / "probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644))
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return True


def block_names(folder: Path, number: int) -> list[str]:
    """A flat folder, names as long as a hash."""
    return [f"{folder}/{index:064x}" for index in range(number)]


def whole(moved: int, expected: int) -> int:
    """``moved``. KvfuseError where that is only a part."""
    if moved != expected:
        raise KvfuseError(f"a call moved {moved} of {expected} bytes")
    return moved


# -- SGLang's file backend ----------------------------------------------------------------------------


def sglang_file(folder: Path, meter: Meter, memory: Memory) -> None:
    """Stat, temporary name, write, rename, one after the other; all read. 96 names asked for, before and after."""
    paths = block_names(folder, memory.count)

    def store(index: int) -> int:
        path = paths[index]
        if os.path.exists(path):
            raise KvfuseError(f"{path} is there before it was stored")
        size = _write(f"{path}.tmp", memory.stored(index), os.O_TRUNC)
        os.rename(f"{path}.tmp", path)
        return size

    def load(index: int) -> int:
        with open(paths[index], "rb", buffering=0) as file:
            return whole(file.readinto(memory.loaded(index)), memory.block_size)

    _ask(meter, f"{EXISTS_COUNT} absent", block_names(folder, memory.count + EXISTS_COUNT)[memory.count :], 0)
    with meter.phase("write") as phase:
        for index in range(memory.count):
            phase.run(partial(store, index))
    _ask(meter, f"{EXISTS_COUNT} exist", [paths[index % memory.count] for index in range(EXISTS_COUNT)], EXISTS_COUNT)
    for name in READS:
        with meter.phase(name) as phase:
            for index in range(memory.count):
                phase.run(partial(load, index))


def _ask(meter: Meter, name: str, paths: list[str], expected: int) -> None:
    """One call that asks for all; ``expected`` of them are there."""

    def ask() -> int:
        if (found := sum(map(os.path.exists, paths))) != expected:
            raise KvfuseError(f"{found} of {len(paths)} names are there instead of {expected}")
        return 0

    with meter.phase(name) as phase:
        phase.run(ask, len(paths))


def _write(path: str, data: memoryview, flags: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        return whole(os.write(descriptor, data), len(data))
    finally:
        os.close(descriptor)


# -- LMCache's ----------------------------------------------------------------------------------------


def lmcache_fs(folder: Path, meter: Meter, memory: Memory) -> None:
    """28 bytes of header, the data, renamed while open; read back as header and data."""
    paths = block_names(folder, memory.count)
    header = HEADER.pack(memory.block_size, 1, 2, 3, 4, 5, 6)

    def store(index: int) -> int:
        with open(f"{paths[index]}.tmp", "wb", buffering=0) as file:
            file.write(header)
            size = whole(file.write(memory.stored(index)), memory.block_size)
            os.replace(file.name, paths[index])
            return size

    def load(index: int) -> int:
        with open(paths[index], "rb", buffering=0) as file:
            (size, *_) = HEADER.unpack(file.read(HEADER.size))
            return whole(file.readinto(memory.loaded(index)), size)

    with meter.phase("write") as phase:
        for index in range(memory.count):
            phase.run(partial(store, index))
    with meter.phase("read") as phase:
        for index in range(memory.count):
            phase.run(partial(load, index))


def lmcache_native(folder: Path, meter: Meter, memory: Memory, *, direct: bool = False) -> None:
    """The data alone, by four threads: renamed while open, read with pread."""
    paths = block_names(folder, memory.count)
    flag = os.O_DIRECT if direct and offers_direct(folder) else 0

    def store(index: int) -> int:
        descriptor = os.open(f"{paths[index]}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o644)
        try:
            size = whole(os.pwrite(descriptor, memory.stored(index), 0), memory.block_size)
            os.rename(f"{paths[index]}.tmp", paths[index])
            return size
        finally:
            os.close(descriptor)

    def load(index: int) -> int:
        return _read(paths[index], memory.loaded(index), flag)

    with ThreadPoolExecutor(NATIVE_THREADS) as pool:
        _write_and_read(meter, memory.count, pool, pool, store, load)


def _read(path: str, target: memoryview, flag: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        return whole(os.preadv(descriptor, [target], 0), len(target))
    finally:
        os.close(descriptor)


# -- vLLM's fs tier -----------------------------------------------------------------------------------


def vllm_fs(folder: Path, meter: Meter, memory: Memory, *, direct: bool = True) -> None:
    """Folders by hash, O_DIRECT where it is offered, an exclusive temporary name, one write, rename; one readv."""
    flag = os.O_DIRECT if direct and offers_direct(folder) else 0
    paths = [f"{folder}/{index % 16:03x}/{index:02x}/{index:032x}.bin" for index in range(memory.count)]
    numbers = count()

    def store(index: int) -> int:
        temporary = f"{paths[index]}.{next(numbers)}.tmp"
        os.makedirs(os.path.dirname(temporary), exist_ok=True)
        size = _write(temporary, memory.stored(index), os.O_EXCL | flag)
        os.rename(temporary, paths[index])
        return size

    def load(index: int) -> int:
        descriptor = os.open(paths[index], os.O_RDONLY | flag)
        try:
            return whole(os.readv(descriptor, [memory.loaded(index)]), memory.block_size)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(VLLM_THREADS) as storing, ThreadPoolExecutor(VLLM_THREADS) as loading:
        _write_and_read(meter, memory.count, storing, loading, store, load)


def _write_and_read(
    meter: Meter,
    number: int,
    storing: ThreadPoolExecutor,
    loading: ThreadPoolExecutor,
    store: Callable[[int], int],
    load: Callable[[int], int],
) -> None:
    """All blocks by the threads of two pools."""
    with meter.phase("write") as phase:
        phase.spread(storing, [partial(store, index) for index in range(number)])
    for name in READS:
        with meter.phase(name) as phase:
            phase.spread(loading, [partial(load, index) for index in range(number)])
