"""Damaged records of namespaces: what a check says of them, and what its repair makes of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import inside
import msgspec
import pytest
from namespace_lab import Counted, count_uses, make_namespace, recorded_uses
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options, opened

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.check.volume_check import REPAIR_ROUNDS, mend, run_check
from kvfuse.volume.store import schema

BLOCK = 64 << 10
OPTIONS = lab_options(capacity=24 * MIB)


class Made:
    """A volume with a folder in a namespace in a namespace; there is a file of each kind."""

    def __init__(self) -> None:
        self.disk = Disk.format(OPTIONS)
        self.outer = self.inner = self.folder = 0

    async def make(self) -> Made:
        async with opened(self.disk, OPTIONS) as volume:
            self.outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=8 * MIB)
            self.inner = await make_namespace(volume, self.outer, b"inner", blocks=100)
            self.folder = (await volume.tree.make_directory(self.inner, b"folder", 0o755, CALLER)).ino
            for folder in (ROOT_INODE, self.outer, self.inner, self.folder):
                await volume.blocks.put(folder, b"small", memoryview(bytes(BLOCK)), CALLER, 0o644)
                node = await volume.tree.lookup(folder, b"small")
                await volume.tree.link(node.ino, folder, b"link")
            await volume.blocks.put(self.folder, b"inline", memoryview(bytes(BLOCK)), CALLER, 0o644)
            handle, _ = await volume.tree.create(self.folder, b"large", 0o644, CALLER, os.O_WRONLY)
            for index in range(10):
                await volume.files.write(handle, index * MIB, bytes(4096))
            await volume.files.release(handle)
            await volume.tree.make_symlink(self.inner, b"symlink", b"target", CALLER)
        return self

    @property
    def good(self) -> dict[int, Counted]:
        return {self.outer: Counted(BLOCK, 1), self.inner: Counted(3 * BLOCK + 10 * 4096, 4)}

    def change(self, key: bytes, **fields: object) -> None:
        value = self.disk.records[key].value
        inode = schema.decode_entry(value) if key[:1] == b"d" else schema.decode_inode(value)
        assert isinstance(inode, schema.InodeRecord)
        changed = msgspec.structs.replace(inode, **fields)
        encode = schema.encode_entry_inline if key[:1] == b"d" else schema.encode_inode
        self.disk.records[key] = Versioned(encode(changed), 1)

    def put(self, key: bytes, value: bytes) -> None:
        self.disk.records[key] = Versioned(value, 1)

    async def repair(self) -> list[str]:
        """What the first check said."""
        said: list[str] = []
        for _ in range(REPAIR_ROUNDS):
            chaos = Chaos(random.Random(0))
            found = Evidence(self.disk.superblock, MemoryRecords(self.disk, chaos), MemorySegments(self.disk, chaos))
            await run_check(found)
            if found.report.clean:
                return said
            said = said or [problem.text for problem in found.report.problems]
            await mend(found)
        raise AssertionError(found.report.problems)


DAMAGES: dict[str, tuple[Callable[[Made], None], str]] = {
    "a use that was not recorded": (
        lambda made: made.disk.records.pop(schema.use_key(made.inner, 0)) and None,
        "has 4",
    ),
    "a use that is wrong": (
        lambda made: made.put(schema.use_key(made.outer, 0), schema.encode_counts(2, 12345)),
        "but 2 and 12345 are recorded",
    ),
    "a use of a client that is not there": (
        lambda made: made.put(schema.use_key(made.outer, 7), schema.encode_counts(0, 4096)),
        f"but 1 and {BLOCK + 4096} are recorded",
    ),
    "a use of no namespace": (
        lambda made: made.put(schema.use_key(4711, 0), schema.encode_counts(0, 4096)),
        "the use of namespace 4711 is recorded, which is none",
    ),
    "settings of no folder": (
        lambda made: made.put(schema.namespace_key(4711), b"\x80"),
        "namespace 4711 has settings, but no folder",
    ),
    "a file in another namespace": (
        lambda made: made.change(schema.entry_key(made.folder, b"inline"), namespace=made.outer),
        "instead of",
    ),
    "a file in none": (lambda made: made.change(schema.entry_key(made.folder, b"large"), namespace=4711), "instead of"),
    "a folder in another one": (lambda made: made.change(schema.inode_key(made.folder), namespace=0), "instead of"),
    "a namespace's folder in another one": (
        lambda made: made.change(schema.inode_key(made.inner), namespace=made.outer),
        "instead of",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_seen_and_mended(name: str) -> None:
    made = await Made().make()
    assert await made.repair() == []
    assert count_uses(made.disk) == recorded_uses(made.disk) == made.good
    damage, text = DAMAGES[name]
    damage(made)
    said = await made.repair()
    assert any(text in line for line in said), said
    assert count_uses(made.disk) == recorded_uses(made.disk) == made.good


async def test_what_settings_that_are_lost_leave_belongs_to_the_namespace_above() -> None:
    made = await Made().make()
    del made.disk.records[schema.namespace_key(made.inner)]
    said = await made.repair()
    assert any(f"in namespace {made.inner} instead of {made.outer}" in line for line in said)
    uses = recorded_uses(made.disk)
    assert uses == {made.outer: Counted(4 * BLOCK + 10 * 4096, 5)} == count_uses(made.disk)
    async with opened(made.disk, OPTIONS) as volume:
        assert inside.namespaces(volume).accounts.use(made.outer).files == 5
        await volume.tree.rename(made.folder, b"inline", made.outer, b"moved", 0)
    assert (await check(made.disk)).clean


async def test_settings_that_make_no_sense_are_removed() -> None:
    made = await Made().make()
    made.put(schema.namespace_key(made.inner), b"nonsense")
    said = await made.repair()
    assert any("cannot be read" in line for line in said)
    assert count_uses(made.disk) == recorded_uses(made.disk)


async def test_a_removed_file_may_outlive_its_namespace() -> None:
    made = await Made().make()
    async with opened(made.disk, OPTIONS) as volume:
        gone = await make_namespace(volume, made.outer, b"gone")
        await volume.blocks.put(gone, b"a", memoryview(bytes(BLOCK)), CALLER, 0o644)
        await volume.sync()
        node = await volume.tree.lookup(gone, b"a")
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await volume.tree.unlink(gone, b"a")
        await volume.tree.remove_directory(made.outer, b"gone")
        await volume.sync()
        crashed, outer = made.disk.copy(), inside.namespaces(volume).accounts.use(made.outer).size
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)
        await volume.sync()
        assert inside.namespaces(volume).accounts.use(made.outer).size == outer - BLOCK
    made.disk = crashed
    assert await made.repair() == []
    async with opened(made.disk, OPTIONS):
        pass
    assert count_uses(made.disk) == recorded_uses(made.disk) == made.good
    assert (await check(made.disk)).clean
