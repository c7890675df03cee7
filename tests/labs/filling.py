"""Filling a mounted volume with blocks whose bytes follow from their names, as the tests of full volumes do."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from mounting import KvfuseMount

KIB = 1 << 10
MIB = 1 << 20


def free_bytes(mount: KvfuseMount) -> int:
    status = os.statvfs(mount.point)
    assert status.f_bavail == status.f_bfree, "nothing is set aside for root"
    return status.f_bavail * status.f_frsize


def total_bytes(mount: KvfuseMount) -> int:
    status = os.statvfs(mount.point)
    return status.f_blocks * status.f_frsize


def anonymous_bytes(mount: KvfuseMount) -> int:
    """The daemon's own memory: mapped segments come and go with the page cache."""
    for line in Path(f"/proc/{mount.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("no RssAnon")


def block_bytes(path: Path, size: int) -> bytes:
    return (random.Random(path.name).randbytes(997) * (size // 997 + 1))[:size]


def write_block(path: Path, data: bytes) -> bool:
    """The whole block under its name, or nothing and False where there is no room."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path.unlink()
        return False
    finally:
        os.close(descriptor)
    return True


def fill(folder: Path, next_size: Callable[[], int]) -> dict[Path, int]:
    """Blocks ``block-0``, ``block-1``... until there is no room: path -> size."""
    blocks: dict[Path, int] = {}
    while True:
        path = folder / f"block-{len(blocks)}"
        size = next_size()
        if not write_block(path, block_bytes(path, size)):
            return blocks
        blocks[path] = size


def check_blocks(blocks: dict[Path, int]) -> None:
    for path, size in blocks.items():
        assert path.read_bytes() == block_bytes(path, size), path
