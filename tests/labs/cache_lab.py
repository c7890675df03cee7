"""A volume in memory whose root is a cache, and what tests of eviction do with it."""

from __future__ import annotations

import math
import os
from typing import Any

import inside
from volume_lab import CALLER, MIB, Disk, check, lab_options

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10
OPTIONS = lab_options(capacity=64 * MIB)


def cache_disk(**settings: object) -> Disk:
    """A volume whose root is a cache."""
    disk = Disk.format(OPTIONS)
    record = encode_settings(Settings(kind="cache").changed(settings))
    disk.apply({schema.namespace_key(ROOT): record}, ())
    return disk


def used(volume: Volume) -> int:
    space = volume.space()
    assert 0 <= space.free <= space.size
    return space.size - space.free


async def write_file(volume: Volume, name: bytes, data: bytes) -> None:
    handle, node = await volume.tree.create(ROOT_INODE, b"tmp-" + name, 0o644, CALLER, os.O_WRONLY)
    position = 0
    while position < len(data):
        position += await volume.files.write(handle, position, memoryview(data)[position:])
    await volume.files.flush(handle)
    await volume.files.release(handle)
    await volume.tree.rename(ROOT_INODE, b"tmp-" + name, ROOT_INODE, name, 0)
    volume.tree.forget(node.ino, 1)


async def checked(disk: Disk) -> None:
    report = await check(disk)
    assert report.clean, report


def statistics(volume: Volume) -> dict[str, Any]:
    found: dict[str, Any] = volume.stats()["namespaces"][0]["cache"]
    return found


async def fill(volume: Volume, start: int, count: int) -> list[bytes]:
    names = [b"%08d" % number for number in range(start, start + count)]
    for name in names:
        await volume.blocks.put(ROOT_INODE, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
    return names


async def evict(volume: Volume, size: int = MIB) -> bool:
    (evictor,) = inside.space(volume).evictors
    return await evictor.make_room(math.inf, None)
