"""Quality of service: what a client of one namespace waits for its reads while another one is flooded with writes.

A reader in this process asks for one block after the other, with a pause; `flood` is a process of its own. Beside the
volume alone and the flood, a process that only computes shows what the machine's processors alone cost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.sizes import MIB
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.cache import write_and_rename
from kvfuse_bench.daemons import kvfuse_mount
from kvfuse_bench.flood import BLOCK_SIZE, FLOODS
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.ringwork import connect_when_open
from kvfuse_bench.rounds import Conditions, Figure, Measured, RowsSide, alternate_rows

SECONDS = 3.0
"""of one reader in one round"""
COUNT = 256
"""blocks that it reads again and again"""
PAUSE = 0.0005
"""seconds between two reads: one that reads without a pause would be a flood itself"""
LIMIT = 20 * MIB
RATIO_MAX = 2.0
"""of the 99th percentile, beside the same alone"""
NAMESPACE = "user.kvfuse.namespace"
Reader = Callable[[Path, float], list[float]]
"""Reads blocks of a folder for so many seconds. Seconds that each took."""


def _get_blocks(folder: Path, seconds: float) -> list[float]:
    """By key, over a ring."""
    times: list[float] = []
    with connect_when_open(mount_of(folder)) as client, BlockStore(client, folder, deadline=30) as store:
        buffer = client.iov(BLOCK_SIZE).array

        def get(number: int) -> float:
            began = time.perf_counter()
            if store.get_into(f"block{number}", buffer) != BLOCK_SIZE:
                raise KvfuseError(f"{folder} lost a block")
            return time.perf_counter() - began

        for number in range(COUNT):  # the first one of each block has to look up its name
            get(number)
        _repeat(get, times, seconds)
    return times


def _read_files(folder: Path, seconds: float) -> list[float]:
    """Opened, read and closed, without the kernel's cache."""
    times: list[float] = []

    def read(number: int) -> float:
        path = f"{folder}/block{number}"
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        began = time.perf_counter()
        descriptor = os.open(path, os.O_RDONLY)
        size = len(os.pread(descriptor, BLOCK_SIZE, 0))
        os.close(descriptor)
        if size != BLOCK_SIZE:
            raise KvfuseError(f"{path} has {size} bytes")
        return time.perf_counter() - began

    _repeat(read, times, seconds)
    return times


READERS: dict[str, Reader] = {"ring": _get_blocks, "files": _read_files}


def _repeat(read: Callable[[int], float], times: list[float], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(read(len(times) % COUNT))
        time.sleep(PAUSE)


@contextlib.contextmanager
def _process(*command: str, speaks: bool) -> Iterator[None]:
    """A neighbour; ``speaks``: it says when it is at work."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            if speaks and not process.stdout.readline():
                raise KvfuseError(f"the flood ended with status {process.wait()}")
            yield
        finally:
            process.kill()


def _beside(neighbour: str, folder: Path, limit: int) -> contextlib.AbstractContextManager[None]:
    """A neighbour at work: a flood of ``folder``, "a busy process", or "" for nobody."""
    if not neighbour:
        return contextlib.nullcontext()
    if neighbour not in FLOODS:
        return _process("-c", "while True: pass", speaks=False)
    os.setxattr(folder, NAMESPACE, f"bandwidth={limit}".encode())
    return _process("-m", "kvfuse_bench.flood", neighbour, str(folder), speaks=True)


def _side(read: Reader, root: Path, neighbour: str, limit: int, seconds: float) -> RowsSide:
    def side(_round: int) -> Mapping[str, float]:
        with _beside(neighbour, root / "flooded", limit):
            times = np.array(read(root / "reader", seconds)) * 1e3
        return {f"p{part}": float(np.percentile(times, part)) for part in (50, 99)}

    return side


def bench_qos(setting: Conditions) -> list[Figure]:
    """Reads of one namespace, alone and while another one is flooded with writes, with and without a limit."""
    folder = setting.volumes / "qos"
    figures: list[Figure] = []
    try:
        with kvfuse_mount(folder / "volume", folder / "mnt", "capacity=4GiB") as daemon:
            _prepare(daemon.mountpoint)
            for door, read in READERS.items():
                setting.progress(f"reads by {door}")
                side = partial(_side, read, daemon.mountpoint, seconds=max(0.2, SECONDS * setting.scale))
                sides = {"alone": side("", 0), "a busy process": side("a busy process", 0)}
                for flood in FLOODS:
                    sides[f"flood of {flood}"] = side(flood, 0)
                    sides[f"{flood} at {LIMIT // MIB} MiB/s"] = side(flood, LIMIT)
                figures += _figures(door, alternate_rows(sides, setting.round_count))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def _prepare(root: Path) -> None:
    """A namespace to read, and one to flood, which evicts."""
    for name, settings in {"reader": "kind=files", "flooded": f"kind=cache capacity={512 * MIB} admission=all"}.items():
        (root / name).mkdir()
        os.setxattr(root / name, NAMESPACE, settings.encode())
    for number in range(COUNT):
        path = f"{root}/reader/block{number}"
        write_and_rename(path + ".part", path, os.urandom(BLOCK_SIZE))


def _figures(door: str, rows: Mapping[str, list[Measured]]) -> Iterator[Figure]:
    for row, (alone, busy, *floods) in rows.items():
        for flood in floods:
            name = f"{row} of a 64 KiB read by {door} beside {flood.name}"
            target = RATIO_MAX if row == "p99" else None
            yield Figure(name, "ms", flood, alone, ratio_target=target, less_is_better=True, others=(busy,))
