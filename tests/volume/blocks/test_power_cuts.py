"""Blocks that are rows, and a loss of power at any moment: never a wrong byte, nothing synced is lost."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from block_tree import make_block_tree
from namespace_lab import make_namespace
from packing_lab import compressible
from power_cuts import MODES, Instant, Medium, opened_on
from volume_lab import MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.check.rebuild import collect
from kvfuse.volume.opening.formatting import first_records
from kvfuse.volume.volume import Volume

KEYS = [b"key-%d" % number for number in range(24)]
OPTIONS = lab_options(capacity=16 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)


def engine_of(volume: Volume) -> BlockEngine:
    engine = volume.rows
    assert isinstance(engine, BlockEngine)
    return engine


def value_of(key: bytes, version: int, size: int) -> bytes:
    """Every second one can be compressed."""
    rng = random.Random(f"{key!r} {version}")
    return compressible(rng, size) if version % 2 else rng.randbytes(size)


@dataclass
class History:
    """What was done to the names. A version 0 is no block."""

    sizes: dict[tuple[bytes, int], int] = field(default_factory=dict)
    versions: dict[bytes, list[int]] = field(default_factory=lambda: {key: [0] for key in KEYS})
    """all that a name ever meant, in order"""
    synced: dict[bytes, int] = field(default_factory=lambda: dict.fromkeys(KEYS, 0))
    """index of what it meant when a flush that returned began"""
    may_lose: bool = False
    """a sync failed: what it was to vouch for may be dropped"""

    def put(self, key: bytes, version: int, size: int) -> bytes:
        self.sizes[key, version] = size
        self.versions[key].append(version)
        return value_of(key, version, size)

    def note_flush(self, indices: dict[bytes, int]) -> None:
        self.synced = {key: max(index, self.synced[key]) for key, index in indices.items()}

    def indices(self) -> dict[bytes, int]:
        return {key: len(found) - 1 for key, found in self.versions.items()}

    def freeze(self) -> History:
        """As it is now, of which later steps change nothing."""
        versions = {key: list(found) for key, found in self.versions.items()}
        return History(self.sizes, versions, self.synced, self.may_lose)

    def may_be(self, key: bytes, found: bytes | None) -> str | None:
        """Why a name cannot have these bytes after a loss of power; None: it can."""
        allowed = self.versions[key][self.synced[key] :]
        if found is None:
            return (
                None
                if len(allowed) > 1 or allowed == [0] or self.may_lose
                else f"version {allowed} was synced, and is lost"
            )
        values = [value_of(key, version, self.sizes[key, version]) for version in allowed if version]
        if found in values:
            return None
        older = [v for v in self.versions[key] if v and value_of(key, v, self.sizes[key, v]) == found]
        return f"has {'version ' + str(older) if older else 'bytes of no version'}, not one of {allowed}"


async def read_all(disk: Disk, directory: int) -> dict[bytes, bytes | None]:
    """What a mount shows; fsck has found no more and no fewer blocks."""
    report = await check(disk, verify=False)
    assert report.clean, [problem.text for problem in report.problems]
    async with opened(disk, OPTIONS) as volume:
        engine = engine_of(volume)
        await engine.slabs.loaded.wait()
        blocks = {key: engine.find(directory, key) for key in KEYS}
        assert report.blocks == sum(block is not None for block in blocks.values())
        found: dict[bytes, bytes | None] = {}
        for key, block in blocks.items():
            data = await engine.read(block[0], key) if block is not None else None
            found[key] = bytes(data) if data is not None else None
        return found


@dataclass
class Walk:
    """Random things done to a volume of blocks, on a medium that knows what a loss of power leaves."""

    rng: random.Random
    sync_error: float = 0.0
    compression: str = "none"
    history: History = field(default_factory=History)
    directory: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.medium = Medium(Disk.format(OPTIONS))

    async def run(self, steps: int, after_step: Callable[[str], Awaitable[None]]) -> None:
        medium, history = self.medium, self.history
        async with opened_on(medium, OPTIONS, self.rng) as volume:
            self.directory = await make_namespace(
                volume, ROOT_INODE, b"kv", kind="blocks", compression=self.compression
            )
            medium.sync_error, history.may_lose = self.sync_error, self.sync_error > 0
            for _ in range(steps):
                action = self.rng.choice(["put"] * 5 + ["drop", "flush", "wait", "clear"])
                await self._step(volume, action)
                await after_step(action)
            medium.sync_error = 0.0
        report = await check(medium.disk)
        assert report.clean, report.problems

    async def _step(self, volume: Volume, action: str) -> None:
        rng, history, engine = self.rng, self.history, engine_of(volume)
        table = engine.table(self.directory, self.directory, 0, 0, rng.choice([0o644] * 9 + [0o600]))
        if action == "put":
            for key in rng.sample(KEYS, rng.randint(1, 6)):
                self.version += 1
                data = history.put(key, self.version, rng.choice([1, 500, 4096, 4097, 20_000, 70_000, 300_000]))
                engine.drop_others(table, [key])
                try:
                    await engine.put(table, [key], [memoryview(data)], RowTerms())
                except EngineError:  # there was no slab, and none can be taken now
                    history.versions[key][-1] = 0
        elif action == "drop":
            keys = rng.sample(KEYS, 3)
            engine.drop(self.directory, keys)
            for key in keys:
                history.versions[key].append(0)
        elif action == "flush":
            indices = history.indices()
            with suppress(EngineError):
                await engine.writer.flush()
                history.note_flush(indices)
        elif action == "clear" and rng.random() < 0.3:
            for key in KEYS:
                history.versions[key].append(0)
            with suppress(EngineError):  # it is cleared here at once, and stored by and by
                await volume.inodes.set_xattr(self.directory, b"user.kvfuse.clear", b"1")
                history.note_flush(history.indices())
        else:
            await trio.sleep(rng.choice([0, 0.006, 0.1, 6]))


async def judge(disk: Disk, directory: int, history: History) -> None:
    found = await read_all(disk, directory)
    wrong = {key: why for key, data in found.items() if (why := history.may_be(key, data))}
    assert not wrong, wrong


async def _walk(rng: random.Random, steps: int, cuts: int, sync_error: float, compression: str = "none") -> int:
    """Do random things, and cut the power ``cuts`` times after each of ``steps``. Returns how many states were seen."""
    walk, states = Walk(rng, sync_error, compression), 0

    async def cut(action: str) -> None:
        nonlocal states
        for _ in range(cuts):
            states += 1
            await judge(walk.medium.cut(rng), walk.directory, walk.history)

    await walk.run(steps, cut)
    return states


async def _walk_each_prefix(rng: random.Random, states_wanted: int) -> int:
    """Cut the power after each write, commit and sync of parts of walks: what is unsynced is there, or not, or torn."""
    states = 0
    while states < states_wanted:
        walk = Walk(rng, compression=rng.choice(["none", "zstd"]))
        states += await _cut_each(walk, rng.randrange(60), rng, states_wanted - states)
    return states


async def _cut_each(walk: Walk, begin: int, rng: random.Random, states_wanted: int) -> int:
    """From step ``begin`` on. The number of states."""
    states = steps = 0
    instants = list[tuple[Instant, History]]()

    def freeze() -> None:
        if walk.directory and steps >= begin:
            instants.append((walk.medium.freeze(), walk.history.freeze()))

    async def cut(action: str) -> None:
        nonlocal states, steps
        steps += 1
        for instant, history in instants:
            if states < states_wanted:
                disk = instant.cut(rng, MODES[states % len(MODES)])
                if states % 8 == 7:
                    await judge_rebuilt(disk.copy(), walk.directory, history)
                await judge(disk, walk.directory, history)
                states += 1
        instants.clear()

    walk.medium.on_event = freeze
    await walk.run(begin + 8, cut)
    return states


async def judge_rebuilt(disk: Disk, directory: int, history: History) -> None:
    """Of a volume whose records are lost, too, nothing synced is lost, and no byte is wrong.

    Heads do not tell of removals before these are written, nor of a clear before anything was stored after it: so any
    version may be there.
    """
    records, segments = MemoryRecords(disk, Chaos(random.Random(0))), MemorySegments(disk, Chaos(random.Random(0)))
    work = await collect(disk.superblock, segments)
    disk.records.clear()
    await records.commit(first_records(OPTIONS))
    await work.write(records)
    for key, data in (await read_all(disk, directory)).items():
        values = [value_of(key, one, history.sizes[key, one]) for one in history.versions[key] if one]
        assert data in [None, *values], f"{key!r} has bytes of no version"
        assert data is not None or not history.may_be(key, data), f"{key!r} is lost"


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_a_loss_of_power_leaves_no_wrong_byte(
    rng: random.Random, autojump_clock: object, compression: str
) -> None:
    assert await _walk(rng, steps=40, cuts=3, sync_error=0.0, compression=compression) == 120


async def test_a_sync_that_fails_promises_nothing(rng: random.Random, autojump_clock: object) -> None:
    assert await _walk(rng, steps=40, cuts=2, sync_error=0.3) > 40


async def test_a_flush_waits_for_the_removal_of_what_is_being_written(tmp_path: Path, rng: random.Random) -> None:
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin(5)
    async with tree.opened() as (_, engine):
        await tree.put(engine, {b"gone": b"bytes"})
        batch = engine.native.take_dirty(1 << 30, 1000)
        assert not isinstance(batch, int)
        before = engine.writer.queued
        engine.drop(tree.directory, [b"gone"])
        assert engine.writer.queued > before
        batch.fail()
        await engine.writer.flush()
        assert engine.find(tree.directory, b"gone") is None
    assert (await tree.check()).clean


@pytest.mark.ring(3)
@pytest.mark.parametrize("part", range(100))
async def test_every_prefix_of_the_log_of_writes(part: int, rng: random.Random, autojump_clock: object) -> None:
    """10,000 states of volumes in all."""
    assert await _walk_each_prefix(rng, 100) == 100
