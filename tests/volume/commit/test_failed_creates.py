"""A creation whose commit fails leaves neither a handle nor a reference of the kernel behind."""

from __future__ import annotations

import os
import random

import inside
import pytest
from volume_lab import CALLER, Chaos, Disk, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.volume.api import ROOT_INODE


async def test_a_creation_that_fails_gives_nothing_away() -> None:
    options = lab_options(strict=True)
    disk, chaos = Disk.format(options), Chaos(random.Random(0))
    async with opened(disk, options, chaos) as volume:
        chaos.commit_error = 2.0
        with pytest.raises(EngineError):
            await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        with pytest.raises(EngineError):
            await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        chaos.commit_error = 0.0
        assert not len(inside.core(volume).places)
        file = await volume.tree.lookup(ROOT_INODE, b"file")
        node = inside.nodes(volume).get(file.ino)
        assert node is not None
        assert (node.handles, node.writers) == (0, 0)
