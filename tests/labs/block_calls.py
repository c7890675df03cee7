"""What the tests of block calls share: short forms of the calls, and of the file door's."""

from __future__ import annotations

import os

import inside
import numpy as np
from volume_lab import CALLER, MIB

from kvfuse.errors import NotFound
from kvfuse.volume.api import ROOT_INODE, Binding
from kvfuse.volume.tier.shared_tier import ReadClass, TierBlock
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
READERS = ReadClass(ROOT_INODE, 0, 0, 0o444)


async def put(volume: Volume, name: bytes, data: bytes, directory: int = ROOT_INODE) -> int:
    return await volume.blocks.put(directory, name, memoryview(data), CALLER, 0o644)


async def put_shared(volume: Volume, name: bytes, data: bytes, readers: ReadClass = READERS) -> TierBlock:
    """Put from a block of the tier."""
    block = inside.tier(volume).allocate(len(data), readers)
    assert block is not None
    block.buffer[:] = np.frombuffer(data, np.uint8)
    await volume.blocks.put(readers.directory, name, block, CALLER, 0o644)
    return block


async def get(volume: Volume, name: bytes, directory: int = ROOT_INODE) -> bytes | None:
    """The block as the file door shows it; None: absent."""
    try:
        node = await volume.tree.lookup(directory, name)
    except NotFound:
        return None
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    data = bytes(await volume.files.read(handle, 0, 64 * MIB))
    await volume.files.release(handle)
    volume.tree.forget(node.ino, 1)
    return data


async def bound(volume: Volume, name: bytes, directory: int = ROOT_INODE) -> Binding:
    binding = await volume.blocks.bind(directory, name)
    assert binding is not None
    return binding


async def get_bound(volume: Volume, name: bytes) -> bytes | None:
    """The block as the event loop reads it for a ring."""
    binding = await volume.blocks.bind(ROOT_INODE, name)
    if binding is None:
        return None
    size = binding.map.size
    node = await volume.inodes.attributes(binding.ino)
    target = bytearray(size)
    assert await volume.files.read_into(node, 0, memoryview(target)) == size
    return bytes(target)


async def overwrite(volume: Volume, ino: int, offset: int, data: bytes) -> None:
    handle = await volume.files.open(ino, os.O_WRONLY, CALLER)
    await volume.files.write(handle, offset, data)
    await volume.files.release(handle)


def has_copy_rows(binding: Binding) -> bool:
    return any(row.block is not None for row in binding.map.rows.values())
