"""A volume says in its superblock that slabs are lent, before the first one is: older programs refuse it clearly."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import inside
import pytest
from block_tree import engine_of, make_block_tree
from namespace_lab import make_namespace

from kvfuse.errors import EngineError, VolumeError
from kvfuse.slab import layout
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.opening import formatting
from kvfuse.volume.running import open_volume


async def test_only_volumes_with_lent_slabs_are_refused(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = await make_block_tree(tmp_path, rng)
    path = tree.options.volume_path
    async with open_volume(tree.options):
        pass
    assert formatting.read_superblock(path).features == layout.NEW_FEATURES
    await tree.begin()
    found = formatting.read_superblock(path)
    assert found.features == layout.NEW_FEATURES | layout.FEATURE_LENT
    async with tree.opened() as (_, engine):
        assert await tree.read(engine) == tree.blocks
    monkeypatch.setattr(layout, "KNOWN_FEATURES", layout.NEW_FEATURES)  # as programs of before
    with pytest.raises(VolumeError, match=r"features 0x7, but this program knows .* 0x3: use a newer kvfuse"):
        formatting.read_superblock(path)


async def test_no_slab_is_lent_before_the_superblock_is_stored(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = await make_block_tree(tmp_path, rng)

    def fail(path: Path, superblock: layout.Superblock) -> None:
        raise OSError(5, "injected")

    write = formatting.write_superblock
    monkeypatch.setattr(formatting, "write_superblock", fail)
    async with open_volume(tree.options) as volume:
        engine = engine_of(volume)
        tree.directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        with pytest.raises(EngineError, match="superblock"):
            await tree.put(engine, {b"a": b"bytes"})
        assert not engine.core.slabs.lent
        monkeypatch.setattr(formatting, "write_superblock", write)
        await tree.put(engine, {b"a": b"bytes"})
        assert engine.core.slabs.lent
    assert formatting.read_superblock(tree.options.volume_path).features & layout.FEATURE_LENT


async def test_no_record_says_that_a_slab_is_lent_before_its_segment_is_there(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is committed while the segment is made: the daemon may be killed then."""
    tree = await make_block_tree(tmp_path, rng)
    async with open_volume(tree.options) as volume:
        engine = engine_of(volume)
        tree.directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        made: list[set[int]] = []

        async def fail(segments: set[int]) -> None:
            made.append(segments)
            await engine.commit()
            raise EngineError("injected")

        monkeypatch.setattr(engine.slabs, "make_segments", fail)
        with pytest.raises(EngineError, match="injected"):
            await tree.put(engine, {b"a": b"bytes"})
        lent = await inside.records(volume).scan(b"s")
        assert made
        assert not lent
        monkeypatch.undo()
        await tree.put(engine, {b"a": b"bytes"})
    assert not (await tree.check()).problems


async def test_features_of_a_shared_superblock_add_up(tmp_path: Path) -> None:
    from kvfuse.remote.records.lmdb.store import LmdbRecords
    from kvfuse.volume.store import schema

    records = LmdbRecords.open(tmp_path / "records")
    try:
        geometry = layout.Geometry.choose(64 << 20)
        mine = layout.Superblock(bytes(16), geometry, 1, features=layout.FEATURE_SEALED_RECORDS)
        other = layout.Superblock(bytes(16), geometry, 1, features=layout.FEATURE_PACKED)
        await records.commit({schema.SUPERBLOCK: layout.pack_superblock(other)})
        for _ in range(2):
            await formatting.change_shared_superblock(
                records, lambda found: dataclasses.replace(found, features=found.features | mine.features)
            )
            (found,) = await records.get([schema.SUPERBLOCK])
            assert found is not None
            assert layout.parse_superblock(found.value).features == mine.features | other.features
    finally:
        await records.aclose()
