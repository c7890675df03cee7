"""Blocks as an engine publishes them: a temporary name, the bytes, a rename."""

from __future__ import annotations

import os

from volume_lab import CALLER, MIB, Disk, opened

from kvfuse.options.options import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume

PIECE = 64 << 10
"""bytes of one write"""


async def write_file(volume: Volume, parent: int, name: bytes, data: bytes) -> int:
    """A new file, closed, that the kernel forgets: its inode."""
    handle, node = await volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR)
    for offset in range(0, len(data), PIECE):
        await volume.files.write(handle, offset, data[offset : offset + PIECE])
    await volume.files.flush(handle)
    await volume.files.release(handle)
    volume.tree.forget(node.ino, 1)
    return node.ino


async def read_file(volume: Volume, parent: int, name: bytes) -> bytes:
    node = await volume.tree.lookup(parent, name)
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    data = bytes(await volume.files.read(handle, 0, 64 * MIB))
    await volume.files.release(handle)
    volume.tree.forget(node.ino, 1)
    return data


async def publish(volume: Volume, name: bytes, data: bytes) -> None:
    """A block as engines write it: temporary name, write, close, rename."""
    temporary = b"tmp." + name
    await write_file(volume, ROOT_INODE, temporary, data)
    await volume.tree.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)


async def content(volume: Volume, name: bytes) -> bytes:
    """Of a file in the root directory."""
    return await read_file(volume, ROOT_INODE, name)


async def names(disk: Disk, options: Options) -> set[bytes]:
    """What a crash now would show in the root directory."""
    async with opened(disk.copy(), options) as volume:
        return {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 10_000)}
