"""A volume of blocks in a folder, its heads on the medium, and damage to both."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from namespace_lab import make_namespace
from volume_lab import CALLER, MIB

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.options.options import CacheOptions, MountOptions, Options, VolumeOptions
from kvfuse.slab.layout import Geometry
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.head_tables import name_offset, plan_slab
from kvfuse.volume.check.evidence import CheckReport
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume

SIZES = 1, 700, 4096, 4097, 9000, 40_000, 200_000, MIB


class Spot(NamedTuple):
    """Of one head: its slab, its place among the heads of that (0: the slab's own), and where it lies in a file."""

    slab: int
    index: int
    file: Path
    offset: int


def engine_of(volume: Volume) -> BlockEngine:
    engine = volume.rows
    assert isinstance(engine, BlockEngine)
    return engine


@dataclass
class BlockTree:
    """``blocks``: of the namespace in folder ``kv``, by name."""

    options: Options
    rng: random.Random
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    directory: int = 0

    @property
    def geometry(self) -> Geometry:
        return formatting.read_superblock(self.options.volume_path).geometry

    @property
    def read_only(self) -> Options:
        return replace(self.options, mount=replace(self.options.mount, read_only=True))

    @asynccontextmanager
    async def opened(self, options: Options | None = None) -> AsyncIterator[tuple[Volume, BlockEngine]]:
        """The volume, once all heads were read."""
        async with open_volume(options or self.options) as volume:
            engine = engine_of(volume)
            await engine.slabs.loaded.wait()
            yield volume, engine

    async def begin(self, count: int = 40) -> None:
        """Make the namespace, and blocks of all sizes in it; some replaced, and some removed again."""
        async with self.opened() as (volume, engine):
            self.directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
            for _ in range(2):
                await self.put(engine, {b"key-%d" % number: self.content() for number in range(count)})
                await engine.writer.flush()
            gone = [b"key-%d" % number for number in range(0, count, 7)]
            engine.drop(self.directory, gone)
            for name in gone:
                del self.blocks[name]

    def content(self, size: int | None = None) -> bytes:
        return self.rng.randbytes(size or self.rng.choice(SIZES))

    async def put(self, engine: BlockEngine, blocks: Mapping[bytes, bytes], mode: int = 0o644) -> None:
        table = engine.table(self.directory, self.directory, CALLER.uid, CALLER.gid, mode)
        for name, data in blocks.items():
            await engine.put(table, [name], [memoryview(data)], RowTerms())
        self.blocks.update(blocks)

    async def read(self, engine: BlockEngine, directory: int | None = None) -> dict[bytes, bytes]:
        """All blocks by name."""
        found = {}
        for name in [name for name, _ in await self.listed(engine, directory or self.directory)]:
            at = engine.find(directory or self.directory, name)
            data = await engine.read(at[0], name) if at is not None else None
            if data is not None:
                found[name] = bytes(data)
        return found

    async def listed(self, engine: BlockEngine, directory: int) -> list[tuple[bytes, int]]:
        """(name, length) of each block."""
        found = []
        for table in engine.tables_of(directory):
            after = -1
            while True:
                rows, after = engine.native.list_rows(table.place, directory, after, 100, engine.now(table.namespace))
                for _, _, length, _, name, *place in rows:
                    found.append((name or (await engine.slabs.read_names([tuple(place)]))[0], length))
                if after < 0:
                    break
        return found

    async def check(self, *, verify: bool = True, repair: bool = False) -> CheckReport:
        return await fsck(self.options, verify=verify, repair=repair)

    # -- the medium ------------------------------------------------------------------------------------

    def path_of(self, segment: int) -> Path:
        return self.options.segments_path / f"{segment:08x}.seg"

    def image(self) -> dict[str, bytes]:
        """All files of the volume by name, but for the lock."""
        folder = self.options.volume_path
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in ("lock", "lock.mdb")
        }

    def heads(self) -> list[tuple[Spot, np.void]]:
        """All heads of slabs and blocks that count, as they lie in head tables. Sound ones of a sound slab."""
        found = []
        geometry = self.geometry
        for slab in range(geometry.slab_count):
            segment, start = geometry.locate_head(slab)
            if not self.path_of(segment).exists():
                continue
            with self.path_of(segment).open("rb") as file:
                file.seek(start)
                table = file.read(geometry.head_size)
            rows = np.frombuffer(table, forms.HEAD, len(table) // forms.HEAD.itemsize)
            if rows[0]["magic"] != forms.HEAD_MAGIC or rows[0]["state"] != forms.SLAB_HEAD:
                continue
            for index, row in enumerate(rows[: geometry.slab_size // int(rows[0]["slot_size"]) + 1]):
                is_ours = row["magic"] == forms.HEAD_MAGIC and row["incarnation"] == rows[0]["incarnation"]
                if is_ours and row["state"] != forms.FREE_HEAD:
                    offset = start + index * forms.HEAD.itemsize
                    found.append((Spot(slab, index, self.path_of(segment), offset), row))
        return found

    def block_heads(self) -> list[tuple[Spot, np.void]]:
        """Of blocks; of each name the newest alone."""
        newest: dict[tuple[int, int], tuple[Spot, np.void]] = {}
        for spot, row in self.heads():
            key = int(row["low"]), int(row["high"])
            if spot.index and (key not in newest or newest[key][1]["sequence"] < row["sequence"]):
                newest[key] = spot, row
        return list(newest.values())

    def flip(self, file: Path, offset: int) -> None:
        with file.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 16]))

    def write_head(self, spot: Spot, row: np.void) -> None:
        """With its checksum."""
        image = bytearray(row.tobytes())
        image[-4:] = crc32c(bytes(image[:-4])).to_bytes(4, "little")
        with spot.file.open("r+b") as opened:
            opened.seek(spot.offset)
            opened.write(image)

    def data_of(self, spot: Spot, row: np.void) -> tuple[Path, int]:
        """Where a block's bytes are."""
        _, lead = plan_slab(self.geometry.slab_size, int(row["slot_size"]))
        addr = spot.slab * self.geometry.slab_size + (lead + spot.index - 1) * int(row["slot_size"])
        segment, offset = self.geometry.locate(addr)
        return self.path_of(segment), offset

    def name_place(self, spot: Spot, row: np.void) -> tuple[Path, int]:
        """Where a block's name is, which has to be in the head table."""
        count, _ = plan_slab(self.geometry.slab_size, int(row["slot_size"]))
        offset = name_offset(count, spot.index - 1)
        assert offset + forms.NAME_ROOM <= self.geometry.head_size
        segment, start = self.geometry.locate_head(spot.slab)
        return self.path_of(segment), start + offset


async def make_block_tree(base: Path, rng: random.Random, capacity: int = 96 * MIB) -> BlockTree:
    """An empty volume."""
    options = Options(
        volume=VolumeOptions(path=base / "volume", capacity=capacity, segment_size=16 * MIB),
        cache=CacheOptions(tier_size=16 * MIB, staging_size=16 * MIB),
        mount=MountOptions(),
    )
    await formatting.format_volume(options)
    return BlockTree(options, rng)
