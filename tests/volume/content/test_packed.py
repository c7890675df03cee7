"""Chunks that are compressed in their slots are as all others at every door; only their slots are smaller."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import inside
import numpy as np
import pytest
from cache_lab import checked
from fsck_tree import Tree
from namespace_lab import change_namespace
from packing_lab import compressible, pack_everything
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import Corrupt, InvalidArgument
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.extents import cut, find_frames, is_sound, length_of, make_packing
from kvfuse.volume.volume import Volume

OPTIONS = lab_options(capacity=64 * MIB)


def packing_disk() -> Disk:
    """A volume whose root has compression."""
    disk = Disk.format(OPTIONS)
    disk.apply({schema.namespace_key(ROOT): encode_settings(Settings(compression="zstd"))}, ())
    return disk


async def read(volume: Volume, name: bytes, offset: int = 0, size: int = 1 << 30) -> bytes:
    node = await volume.blocks.find(ROOT_INODE, name)
    assert node is not None
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    try:
        data = b""
        while part := await volume.files.read(handle, offset + len(data), size - len(data)):
            data += bytes(part)
        return data
    finally:
        await volume.files.release(handle)


@pytest.mark.parametrize("size", [5000, 20_000, GRANULE_SIZE, GRANULE_SIZE + 1, 3 * GRANULE_SIZE - 1, 2 * MIB])
async def test_a_block_takes_a_smaller_slot_and_comes_back_whole(size: int, rng: random.Random) -> None:
    disk, data = packing_disk(), {b"packed": compressible(rng, size), b"random": rng.randbytes(size)}
    async with opened(disk, OPTIONS) as volume:
        for name, block in data.items():
            before = inside.slabs(volume).used_bytes
            await volume.blocks.put(ROOT_INODE, name, memoryview(block), CALLER, 0o644)
            await volume.sync()
            used = inside.slabs(volume).used_bytes - before
            assert used < size if name == b"packed" else used >= size
            assert await read(volume, name) == block
    async with opened(disk, OPTIONS) as volume:
        for name, block in data.items():
            assert await read(volume, name) == block
            for _ in range(20):
                start = rng.randrange(size)
                end = rng.randrange(start, size) + 1
                assert await read(volume, name, start, end - start) == block[start:end]
    await checked(disk)


async def test_what_changes_is_stored_anew(rng: random.Random) -> None:
    """Written into, cut, extended and appended to: at the granules' edges, and elsewhere."""
    disk, size = packing_disk(), MIB
    data = bytearray(compressible(rng, size))
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"file", memoryview(bytes(data)), CALLER, 0o644)
        node = await volume.tree.lookup(ROOT_INODE, b"file")
        edges = [GRANULE_SIZE * number + by for number in range(1, 4) for by in (-1, 0, 1)]
        for _ in range(30):
            await volume.sync()
            place = rng.choice([*edges, rng.randrange(len(data) + 1)])
            if rng.random() < 0.5:
                written = compressible(rng, rng.choice((1, 1000, 300_000)))
                handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
                await volume.files.write(handle, place, written)
                await volume.files.release(handle)
                data = data.ljust(place, b"\0")
                data[place : place + len(written)] = written
            else:
                await volume.inodes.set_attributes(node.ino, Changes(size=place), CALLER)
                data = data[:place].ljust(place, b"\0")
            assert await read(volume, b"file") == data
    async with opened(disk, OPTIONS) as volume:
        assert await read(volume, b"file") == data
    await checked(disk)


async def test_damaged_bytes_are_none(rng: random.Random) -> None:
    """Whatever they are: the checksum is that of the slot's bytes. And frames that hold something else are no hit."""
    disk = packing_disk()
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"a", memoryview(compressible(rng, MIB)), CALLER, 0o644)
        await volume.sync()
        node = await volume.tree.lookup(ROOT_INODE, b"a")
        (extent,) = node.chunks[0].extents
        assert extent.packing
        segment, offset = inside.core(volume).locate(extent.addr)
    disk.segments[segment][offset + rng.randrange(extent.length)] ^= 1 << rng.randrange(8)
    async with opened(disk, OPTIONS) as volume:
        with pytest.raises(Corrupt):
            await read(volume, b"a")
    report = await check(disk, verify=True)
    assert not report.clean


@pytest.mark.parametrize("lie", ["too much", "too little", "no frames"])
async def test_what_a_record_says_is_not_trusted(lie: str, rng: random.Random) -> None:
    disk = packing_disk()
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"a", memoryview(compressible(rng, MIB)), CALLER, 0o644)
        await volume.sync()
        (extent,) = (await volume.tree.lookup(ROOT_INODE, b"a")).chunks[0].extents
        numbers = np.frombuffer(extent.packing, "<u4").tolist()
        if lie == "too much":
            numbers[1:] = [numbers[1] - 7, numbers[2] + 7, *numbers[3:]]
        elif lie == "too little":
            numbers = [numbers[0], sum(numbers[1:]) - 3, 1, 1, 1]
        extent.packing = b"" if lie == "no frames" else np.array(numbers, "<u4").tobytes()
        if lie != "no frames":
            assert is_sound(extent.packing, extent.length)
            with pytest.raises(Corrupt):
                await read(volume, b"a")


def test_packings() -> None:
    packing = make_packing(2 * GRANULE_SIZE + 10, [100, 200, 5])
    assert is_sound(packing, 305)
    assert find_frames(packing, 0, 1) == (0, [(0, 100)], 0)
    assert find_frames(packing, GRANULE_SIZE - 1, GRANULE_SIZE + 1) == (0, [(0, 100), (100, 300)], GRANULE_SIZE - 1)
    assert find_frames(packing, 2 * GRANULE_SIZE + 3, 2 * GRANULE_SIZE + 10) == (300, [(0, 5)], 3)
    assert length_of(cut(packing, 7)) == 7
    assert length_of(cut(packing, 1 << 30)) == 2 * GRANULE_SIZE + 10
    for bad in (b"", packing[:5], packing[:4], make_packing(0, [305]), make_packing(5 * GRANULE_SIZE, [300, 5])):
        assert not is_sound(bad, 305)
    assert not is_sound(packing, 306)


async def test_a_rebuild_finds_them(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    tree = Tree(tmp_path, rng, compressible)
    await tree.make()
    assert (await tree.check(verify=True)).clean
    shutil.rmtree(tree.options.records_path)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert await tree.read() == tree.files
    assert (await tree.check(verify=True)).clean


async def test_a_volume_of_before_stays_as_it_is(rng: random.Random) -> None:
    """An older program, which may still use it, would take compressed bytes for the file's."""
    disk = packing_disk()
    disk.superblock = replace(disk.superblock, features=0)
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"a", memoryview(compressible(rng, MIB)), CALLER, 0o644)
        await volume.sync()
        assert not (await volume.tree.lookup(ROOT_INODE, b"a")).chunks[0].extents[0].packing
        with pytest.raises(InvalidArgument, match="compression needs"):
            await change_namespace(volume, ROOT_INODE, compression="zstd")
    await checked(disk)


async def test_random_blocks_are_hardly_tried(rng: random.Random) -> None:
    disk = packing_disk()
    async with opened(disk, OPTIONS) as volume:
        for number in range(400):
            await volume.blocks.put(ROOT_INODE, b"%d" % number, memoryview(rng.randbytes(20_000)), CALLER, 0o644)
            if number % 20 == 0:
                await volume.sync()
        found = volume.stats()["namespaces"][0]["compression"]
        assert found["saved_bytes"] == found["smaller"] == 0
        assert found["tried"] < 300
    await checked(disk)
