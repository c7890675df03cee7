"""Blocks that are put on one host of several, over whatever has their names."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import get, quiet, volumes
from volume_lab import CALLER, Disk, lab_options

from kvfuse.volume.api import ROOT_INODE


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("kept", ["the other name", "no name", "a symbolic link"])
async def test_a_put_over_one_of_several_names(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool, kept: str
) -> None:
    """The file stays under its other names, with its bytes; with its last name it goes."""
    options = lab_options(strict=strict)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 2, rng) as (one, two):
        await one.blocks.put(ROOT_INODE, b"first", memoryview(b"old" * 2000), CALLER, 0o644)
        await one.sync()
        old = (await one.tree.lookup(ROOT_INODE, b"first")).ino
        if kept == "a symbolic link":
            old = (await one.tree.make_symlink(ROOT_INODE, b"second", b"t" * 100, CALLER)).ino
        else:
            await one.tree.link(old, ROOT_INODE, b"second")
        if kept == "no name":
            await one.tree.unlink(ROOT_INODE, b"first")
        await quiet(one, two)
        assert await one.blocks.put(ROOT_INODE, b"second", memoryview(b"new"), CALLER, 0o644) == old
        await quiet(one, two)
        assert await get(two, b"second") == b"new"
        await trio.sleep(60)
        assert await get(two, b"first") == (None if kept == "no name" else b"old" * 2000)
