"""Hosts of one volume, each with its doors to a folder of blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import inside
from namespace_lab import make_namespace
from shared_lab import eventually

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Caller, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.volume import Volume

KERNEL = Caller(0, 0)


class BlockHost:
    """One host's doors to a folder of blocks."""

    def __init__(self, volume: Volume, folder: int, *, is_strict: bool = False) -> None:
        self.volume, self.folder, self.is_strict = volume, folder, is_strict

    @property
    def engine(self) -> BlockEngine:
        engine = inside.parts(self.volume).engine
        assert engine is not None
        return engine

    async def put(self, name: bytes, data: bytes) -> None:
        """By a ring."""
        number = await self.volume.blocks.block_namespace(self.folder)
        assert number is not None
        table = self.engine.table(self.folder, number, 0, 0, 0o644)
        await self.engine.put(table, [name], [memoryview(data)], RowTerms(is_strict=self.is_strict))

    async def written(self) -> None:
        await self.engine.writer.flush()

    async def get(self, name: bytes) -> bytes | None:
        """As a ring does that finds nothing in memory."""
        if self.is_strict or self.engine.find(self.folder, name) is None:
            await self.engine.renew(is_strict=self.is_strict, directory=self.folder, names=[name])
        found = self.engine.find(self.folder, name)
        data = await self.engine.read(found[0], name) if found is not None else None
        return bytes(data) if data is not None else None

    async def read(self, name: bytes) -> bytes | None:
        """By the file door."""
        try:
            found = await self.volume.tree.lookup(self.folder, name)
            handle = await self.volume.files.open(found.ino, os.O_RDONLY, KERNEL)
        except (errors.NotFound, errors.Stale):
            return None
        self.volume.tree.forget(found.ino, 1)
        try:
            return bytes(await self.volume.files.read(handle, 0, 1 << 30))
        finally:
            await self.volume.files.release(handle)

    async def names(self, reader: int = 0) -> list[bytes]:
        """``reader``: an open directory, which remembers what it was shown."""
        found, after = list[bytes](), 0
        while entries := await self.volume.tree.list_directory(self.folder, after, 5, reader):
            found += [entry.name for entry in entries]
            after = entries[-1].cookie
        return sorted(found)

    async def until(self, name: bytes, data: bytes | None) -> None:
        async def has_come() -> bool:
            return await self.get(name) == data

        await eventually(has_come, seconds=60, pause=0.01)


async def block_hosts(volumes: Sequence[Volume], *, is_strict: bool = False, **settings: str) -> list[BlockHost]:
    folder = await make_namespace(volumes[0], ROOT_INODE, b"blocks", kind="blocks", **settings)
    for volume in volumes[1:]:

        async def has_heard(volume: Volume = volume) -> bool:
            found = inside.names(volume).core.namespaces.all.get(folder)
            return found is not None and found.settings.is_blocks

        await eventually(has_heard)
    return [BlockHost(volume, folder, is_strict=is_strict) for volume in volumes]
