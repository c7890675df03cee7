"""Blocks that are rows, and a loss of power at any moment: never a wrong byte, nothing synced is lost."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import trio
from namespace_lab import make_namespace
from power_cuts import Medium, opened_on
from volume_lab import MIB, Disk, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.volume import Volume

KEYS = [b"key-%d" % number for number in range(24)]
OPTIONS = lab_options(capacity=24 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)


def engine_of(volume: Volume) -> BlockEngine:
    engine = volume.rows
    assert isinstance(engine, BlockEngine)
    return engine


def value_of(key: bytes, version: int, size: int) -> bytes:
    return random.Random(f"{key!r} {version}").randbytes(size)


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
    async with opened(disk, OPTIONS) as volume:
        engine = engine_of(volume)
        await engine.slabs.loaded.wait()
        found: dict[bytes, bytes | None] = {}
        for key in KEYS:
            block = engine.find(directory, key)
            data = await engine.read(block[0], key) if block is not None else None
            found[key] = bytes(data) if data is not None else None
        return found


async def _walk(rng: random.Random, steps: int, cuts: int, sync_error: float) -> int:
    """Do random things, and cut the power ``cuts`` times after each of ``steps``. Returns how many states were seen."""
    medium = Medium(Disk.format(OPTIONS))
    history, states, version = History(), 0, 0
    async with opened_on(medium, OPTIONS, rng) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        medium.sync_error, history.may_lose = sync_error, sync_error > 0
        engine = engine_of(volume)
        for _ in range(steps):
            action = rng.choice(["put"] * 5 + ["drop", "flush", "wait", "clear"])
            table = engine.table(directory, directory, 0, 0, rng.choice([0o644] * 9 + [0o600]))
            if action == "put":
                for key in rng.sample(KEYS, rng.randint(1, 6)):
                    version += 1
                    data = history.put(key, version, rng.choice([1, 500, 4096, 4097, 20_000, 70_000, 300_000]))
                    engine.drop_others(table, [key])
                    try:
                        await engine.put(table, [key], [memoryview(data)], RowTerms())
                    except EngineError:  # there was no slab, and none can be taken now
                        history.versions[key][-1] = 0
            elif action == "drop":
                keys = rng.sample(KEYS, 3)
                engine.drop(directory, keys)
                for key in keys:
                    history.versions[key].append(0)
            elif action == "flush":
                indices = history.indices()
                try:
                    await engine.writer.flush()
                except EngineError:
                    continue
                history.note_flush(indices)
            elif action == "clear" and rng.random() < 0.3:
                is_stored = False
                with suppress(EngineError):  # it is cleared here at once, and stored by and by
                    await volume.inodes.set_xattr(directory, b"user.kvfuse.clear", b"1")
                    is_stored = True
                for key in KEYS:
                    history.versions[key].append(0)
                if is_stored:
                    history.note_flush(history.indices())
            else:
                await trio.sleep(rng.choice([0, 0.006, 0.1, 6]))
            for _ in range(cuts):
                states += 1
                found = await read_all(medium.cut(rng), directory)
                wrong = {key: why for key, data in found.items() if (why := history.may_be(key, data))}
                assert not wrong, (wrong, action)
        medium.sync_error = 0.0
    report = await check(medium.disk)
    assert report.clean, report.problems
    return states


async def test_a_loss_of_power_leaves_no_wrong_byte(rng: random.Random, autojump_clock: object) -> None:
    assert await _walk(rng, steps=40, cuts=3, sync_error=0.0) == 120


async def test_a_sync_that_fails_promises_nothing(rng: random.Random, autojump_clock: object) -> None:
    assert await _walk(rng, steps=40, cuts=2, sync_error=0.3) > 40
