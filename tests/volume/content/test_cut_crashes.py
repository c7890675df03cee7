"""What a killed daemon leaves of a file that was cut: copies of the volume's folder, as the engines have it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import inside
import pytest
import trio
from msgspec.structs import replace
from volume_lab import CALLER, MIB

from kvfuse.options.options import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.opening.formatting import format_volume
from kvfuse.volume.running import open_volume

SIZE = 100_000
CUT = 70_000


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        volume=VolumeOptions(path=tmp_path / "volume", capacity=64 * MIB, segment_size=32 * MIB),
        publish=PublishOptions(mode="relaxed", window=1000.0),
        cache=CacheOptions(),
        mount=MountOptions(),
    )


async def left_of(options: Options, name: bytes) -> bytes:
    """The file in a copy of the volume that was made a moment ago, as the next daemon finds it."""
    async with open_volume(options) as volume:
        node = await volume.tree.lookup(ROOT_INODE, name)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        data = bytes(await volume.files.read(handle, 0, SIZE))
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)
        return data


@pytest.mark.parametrize("start", [0, CUT - 1000], ids=["all of it", "some of it"])
async def test_a_commit_between_a_cut_and_the_bytes_that_were_cut(options: Options, start: int) -> None:
    """The record has the checksum of the bytes in the slot, not of those that are staged over them."""
    await format_volume(options)
    before = b"a" * SIZE
    copy = replace(options, volume=replace(options.volume, path=options.volume_path.with_name("copy")))
    async with open_volume(options) as volume:
        handle, node = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, before)
        async with trio.open_nursery() as nursery, inside.journal(volume).committer.turn:
            nursery.start_soon(volume.files.fsync, handle)
            while node.staged_count:
                await trio.lowlevel.checkpoint()
            await volume.files.write(handle, start, b"b" * (SIZE - start))
            await volume.inodes.set_attributes(node.ino, Changes(size=CUT), CALLER)
            assert node.staged_count
        assert node.staged_count, "what was changed waits for the next commit"
        shutil.copytree(options.volume_path, copy.volume_path)
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)
    assert await left_of(copy, b"file") == before[:CUT]
    assert await left_of(options, b"file") == (before[:start] + b"b" * SIZE)[:CUT]
