"""Which blocks the index of a read class shows when it is opened: those whose names mean them now."""

from __future__ import annotations

import inside
from volume_lab import CALLER, Disk, lab_options, opened

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.tier.shared_tier import ReadClass
from kvfuse.volume.volume import Volume

READERS = ReadClass(ROOT_INODE, CALLER.uid, CALLER.gid, 0o444)


async def put(volume: Volume, name: bytes) -> int:
    block = volume.tier.allocate(1000, READERS)
    assert block is not None
    block.buffer[:] = 7
    await volume.blocks.put(ROOT_INODE, name, block, CALLER, 0o644)
    found = await volume.blocks.find(ROOT_INODE, name)
    assert found is not None
    return found.ino


def shown(volume: Volume) -> set[bytes]:
    """By a new index."""
    volume.tier.residents.end()
    touches = volume.search.open(READERS, volume.gates.ancestors.settle(ROOT_INODE, ()))
    assert touches is not None
    return set(touches.index.names.values())


async def test_an_index_that_is_opened_late_shows_what_names_mean_now() -> None:
    options = lab_options()
    async with opened(Disk.format(options), options) as volume:
        names = [b"stays", b"renamed", b"removed", b"linked", b"replaced", b"over"]
        inos = {name: await put(volume, name) for name in names}
        assert shown(volume) == set(names)
        volume.tier.residents.end()  # nobody has an index while the names change
        await volume.tree.rename(ROOT_INODE, b"renamed", ROOT_INODE, b"new", 0)
        await volume.tree.unlink(ROOT_INODE, b"removed")
        await volume.tree.link(inos[b"linked"], ROOT_INODE, b"second")
        inos[b"replaced"] = await put(volume, b"replaced")
        await volume.tree.rename(ROOT_INODE, b"new", ROOT_INODE, b"over", 0)
        await volume.sync()
        for node in list(inside.nodes(volume)):
            if node.is_file:
                inside.nodes(volume).drop(node)  # as an eviction from memory
        assert shown(volume) == {b"stays", b"replaced"}
