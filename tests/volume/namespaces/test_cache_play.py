"""Random work in nested caches that are full, and in files beside them, over slow and failing engines, with crashes."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import suppress

import inside
import pytest
import trio.testing
from cache_play import Blocks, CacheActor, check_books, make_cache, make_namespaces
from namespace_lab import change_namespace
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options, opened
from volume_play import CHUNK, Actor, Editor, Expected, Gardener, Publisher, check_crash, take_snapshots

from kvfuse.errors import EngineError, InvalidArgument
from kvfuse.options.config import Options
from kvfuse.volume.content import writer
from kvfuse.volume.volume import Volume

ROUNDS = range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "2")))


async def change_quotas(volume: Volume, folders: list[int], rng: random.Random) -> None:
    """For ever, to what is allowed."""
    while True:
        await trio.sleep(rng.random())
        with suppress(EngineError, InvalidArgument):
            await change_namespace(volume, rng.choice(folders[1:]), capacity=rng.choice([2, 3, 4, 6]) * MIB)


async def check_cached(disk: Disk, options: Options, blocks: Blocks, seeds: Iterator[random.Random]) -> None:
    """After a crash a name of a cache shows a version that it had, whole, or nothing."""
    async with opened(disk, options) as volume:
        reader = CacheActor(volume, blocks, next(seeds), 99, [])
        for place, written in blocks.names.items():
            written.check(await reader.read_by_name(place), 0)
            reader.forget()
        await trio.sleep(3)
        await check_books(disk, volume)


@pytest.mark.parametrize("faults", [0.0, 0.03], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", ROUNDS)
async def test_full_caches_beside_files(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    faults: float,
    round_number: int,
) -> None:
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 8192)
    rng = random.Random(seed)
    options = lab_options(capacity=48 * MIB, strict=rng.random() < 0.3, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    chaos = Chaos(random.Random(rng.random()), delay=rng.choice([0.1, 0.5]))
    disk, expected, blocks = Disk.format(options), Expected(), Blocks()
    make_cache(disk, rng)
    snapshots: list[tuple[Disk, Expected]] = []
    seeds: Iterator[random.Random] = iter(lambda: random.Random(rng.random()), None)
    async with opened(disk, options, chaos) as volume:
        folders, home = await make_namespaces(disk, volume, rng)
        homes = [(await volume.tree.make_directory(home, name, 0o755, CALLER)).ino for name in (b"x", b"y")]
        await volume.sync()
        chaos.commit_error = chaos.write_error = faults
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as actors:
                writers: list[Actor] = []
                for number in range(2):
                    writers += [publisher := Publisher(volume, expected, next(seeds), number)]
                    writers += [editor := Editor(volume, expected, next(seeds), number)]
                    actors.start_soon(publisher.run, 30, homes)
                    actors.start_soon(editor.run, 30, homes[0])
                actors.start_soon(Gardener(volume, expected, next(seeds), 0, home).run, 8)
                for number in range(4):
                    actors.start_soon(CacheActor(volume, blocks, next(seeds), number, folders).run, 150)
                nursery.start_soon(change_quotas, volume, folders, next(seeds))
                nursery.start_soon(take_snapshots, disk, expected, snapshots, rng, 6)
            nursery.cancel_scope.cancel()
        chaos.commit_error = chaos.write_error = 0.0
        assert not sum([one.refusals for one in writers]), "files are refused room that a cache has"
        await trio.sleep(3)
        await check_books(disk, volume)
        print({number: len(cache.policy) for number, cache in inside.caches(volume).items()}, blocks.refusals)
        snapshots.append((disk.copy(), copy.deepcopy(expected)))
    for history in (*expected.blocks.values(), *expected.edits.values()):
        del history[:-1]
    snapshots.append((disk.copy(), expected))
    for crashed, wanted in snapshots:
        await check_crash(crashed, options, wanted)
        await check_cached(crashed, options, blocks, seeds)
