"""Another host replaces a file between the two steps of an open, the look at its name and the open of its inode.

The kernel walks a path once more where the inode is gone, and no third time: a program must not hear ESTALE.
"""

from __future__ import annotations

import os
import random

import inside
import pytest
import trio
import trio.testing
from shared_lab import hosts, quiet
from volume_lab import CALLER, Chaos

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


async def replace(volume: Volume, data: bytes) -> None:
    """As editors and caches do; stored when this returns."""
    handle, node = await volume.tree.create(ROOT_INODE, b"tmp", 0o644, CALLER, os.O_WRONLY)
    await volume.files.write(handle, 0, data)
    await volume.files.release(handle)
    await volume.tree.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"file", 0)
    await volume.sync()
    volume.tree.forget(node.ino, 1)


@pytest.mark.parametrize("is_strict", [True, False])
async def test_an_open_gets_what_was_there_when_its_name_was_asked_for(
    rng: random.Random, is_strict: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """The bytes stay until it is closed. In a relaxed folder the first walk may go by what was known before."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], strict=is_strict) as (one, other):
        await replace(one, b"first")
        await quiet(other)
        refused = 0
        for number in range(2 - is_strict):
            node = await other.tree.lookup(ROOT_INODE, b"file")
            await replace(one, b"later %d" % number)
            await quiet(other)
            try:
                handle = await other.files.open(node.ino, os.O_RDONLY, CALLER)
                break
            except errors.Stale:
                refused += 1
        assert refused == (not is_strict)
        was = b"first" if is_strict else b"later 0"
        assert bytes(await other.files.read(handle, 0, 100)) == was
        await trio.sleep(5 * inside.core(one).grace.seconds)
        assert bytes(await other.files.read(handle, 0, 100)) == was
        await other.files.release(handle)
        other.tree.forget(node.ino, 1)
        await trio.sleep(5 * inside.core(one).grace.seconds)
        assert await inside.records(one).get([schema.orphan_key(node.ino)]) == [None]


async def test_a_name_that_was_known_before_is_looked_for_anew(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Of a relaxed folder: the kernel may have had the name for long."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)]) as (one, other):
        await replace(one, b"first")
        await quiet(other)
        node = await other.tree.lookup(ROOT_INODE, b"file")
        await replace(one, b"second")
        await quiet(other)
        with pytest.raises(errors.Stale):
            await other.files.open(node.ino, os.O_RDONLY, CALLER)
        found = await other.tree.lookup(ROOT_INODE, b"file")
        handle = await other.files.open(found.ino, os.O_RDONLY, CALLER)
        assert bytes(await other.files.read(handle, 0, 100)) == b"second"
        await other.files.release(handle)
