"""How fast this machine moves whole blocks: over the rings of a cache, beside memcpy and the disk below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse.errors import ConfigError
from kvfuse.sizes import MIB
from kvfuse_bench.cachefolder import CacheFolder, namespace_for, namespace_of
from kvfuse_bench.content import block_key
from kvfuse_bench.measures import disk_rates
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.references import memcpy
from kvfuse_bench.simulate import Setup
from kvfuse_bench.timing import time_batches

PROBE_SIZE_MAX, PROBE_SHARE = 128 * MIB, 1 / 16
"""bytes that are put, and got twice: at most so many, and at most this share of the cache"""
BLOCKS_MIN = 4
DISK_SIZE = 256 * MIB
COPY_SECONDS = 0.3


class Speeds(NamedTuple):
    """GB/s; None: it could not be measured."""

    block_size: int
    """bytes of the blocks that were put and got"""
    put: float | None
    get: float | None
    memcpy: float
    disk_write: float | None
    disk_read: float | None


def measure_speeds(target: Path, volume: Path, block_size: int) -> Speeds:
    """In a namespace that is made in ``target`` and removed, with blocks of up to ``block_size`` bytes. Seconds.

    ``volume``: the folder of its disk.
    """
    put, get, size = _ring_rates(target, block_size)
    written, read = _disk_below(volume)
    return Speeds(size, put, get, _memcpy_rate(), written, read)


def _ring_rates(target: Path, block_size: int) -> tuple[float | None, float | None, int]:
    """Put and get in GB/s, and the size of the blocks. None: a namespace cannot be made, or it has no room."""
    room = min(PROBE_SIZE_MAX, int(PROBE_SHARE * namespace_of(target)["capacity"]))
    size = min(block_size, _slab_size(target), max(4096, room // BLOCKS_MIN // 8 * 8))
    keys = [block_key("speeds", 1, size, number) for number in range(max(BLOCKS_MIN, room // size))]
    try:
        with (
            namespace_for(target, Setup("lru", "all", 2 * len(keys))) as folder,
            CacheFolder(folder / "blocks", size) as cache,
        ):
            put, _, got = (cache.ask(keys) for _ in range(3))
    except ConfigError:
        return None, None, size
    return _rate(put.stored * size, put.write_seconds), _rate(got.hits * size, got.read_seconds), size


def _slab_size(target: Path) -> int:
    """What is larger is no block, but a file, which a cache does not evict."""
    return int(json.loads((mount_of(target) / ".kvfuse" / "stats").read_bytes())["slab_size"])


def _rate(size: int, seconds: float) -> float | None:
    return size / seconds / 1e9 if size and seconds else None


def _memcpy_rate() -> float:
    """One thread, 1 MiB a copy."""
    source = np.ones(64 * MIB, np.uint8)
    times = time_batches(memcpy(source, source.copy(), MIB, 1), COPY_SECONDS, 1 << 62)
    return MIB * len(times) / sum(times) / 1e9


def _disk_below(folder: Path) -> tuple[float | None, float | None]:
    """Written and read; None where nothing can be written in that folder."""
    try:
        return disk_rates(folder, DISK_SIZE)
    except OSError:
        return None, None
