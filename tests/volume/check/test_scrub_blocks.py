"""Scrub of blocks: one pass finds what rotted on the medium, and drops it; traffic beside it finds no errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import inside
import msgspec
import pytest
import trio
from block_tree import BlockTree, make_block_tree

from kvfuse.checksum import crc32c
from kvfuse.options.options import ScrubOptions
from kvfuse.volume.check import scrub
from kvfuse.volume.volume import Volume


@pytest.fixture
async def blocks(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> BlockTree:
    """Its scrub begins a pass when the one before has ended."""
    monkeypatch.setattr(scrub, "PASS_SECONDS_MIN", 0.0)
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    tree.options = msgspec.structs.replace(tree.options, scrub=ScrubOptions(rate=1 << 40))
    return tree


def said(volume: Volume) -> dict[str, int]:
    found = volume.sections["scrub"]()
    assert isinstance(found, dict)
    return found


async def until(volume: Volume, is_enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    with trio.fail_after(60):
        while not is_enough(said(volume)):  # noqa: ASYNC110 - no event tells of it
            await trio.sleep(0.01)
    return said(volume)


async def passed(volume: Volume) -> dict[str, int]:
    """What scrub says after a whole pass from now on."""
    wanted = said(volume)["passes"] + 2
    return await until(volume, lambda found: found["passes"] >= wanted)


async def test_sound_blocks_are_read(blocks: BlockTree) -> None:
    async with blocks.opened() as (volume, engine):
        found = await passed(volume)
        assert (found["errors"], found["last_pass_errors"]) == (0, 0)
        assert found["blocks"] >= 2 * len(blocks.blocks)
        assert found["bytes"] >= 2 * sum(map(len, blocks.blocks.values()))
        assert await blocks.read(engine) == blocks.blocks
    assert (await blocks.check()).clean


async def test_what_rotted_is_dropped_and_counted(blocks: BlockTree) -> None:
    """Bytes at the end and the start of blocks, and heads, while the volume is mounted and nobody reads."""
    async with blocks.opened() as (volume, engine):
        await passed(volume)
        spots = blocks.rng.sample(blocks.block_heads(), 4)
        for number, (spot, row) in enumerate(spots):
            file, offset = blocks.data_of(spot, row)
            blocks.flip(*[(file, offset), (file, offset + int(row["length"]) - 1), spot[2:], spot[2:]][number])
        sums = {int(row["checksum"]) for _, row in spots}
        assert (await passed(volume))["errors"] == 4
        assert inside.core(volume).counters.checksum_failures == 4
        left = {name: data for name, data in blocks.blocks.items() if crc32c(data) not in sums}
        assert await blocks.read(engine) == left
        assert (await passed(volume))["last_pass_errors"] == 0
        gone = next(name for name in blocks.blocks if name not in left)
        await blocks.put(engine, {gone: blocks.blocks[gone]})
        left[gone] = blocks.blocks[gone]
        assert await blocks.read(engine) == left
    report = await blocks.check()
    assert report.clean, [problem.text for problem in report.problems]
    assert report.blocks == len(left)


async def test_traffic_is_no_error(blocks: BlockTree) -> None:
    """Blocks are put, replaced, removed and cleared, and slabs get other slot sizes, while all is read again."""
    rng = blocks.rng
    async with blocks.opened() as (volume, engine):
        first = said(volume)["passes"]
        with trio.fail_after(120):
            for step in range(1000):
                passes = said(volume)["passes"]
                if step > 60 and passes > first + 4:
                    break
                names = [b"key-%d" % rng.randrange(60) for _ in range(rng.randrange(1, 12))]
                action = rng.choice(["put", "put", "put", "drop", "flush", "clear"])
                if action == "put":
                    await blocks.put(engine, {name: blocks.content() for name in names})
                elif action == "drop":
                    engine.drop(blocks.directory, names)
                    blocks.blocks = {name: data for name, data in blocks.blocks.items() if name not in names}
                elif action == "flush":
                    await engine.writer.flush()
                elif rng.random() < 0.2:
                    await volume.inodes.set_xattr(blocks.directory, b"user.kvfuse.clear", b"1")
                    blocks.blocks = {}
                await trio.sleep(0.01 * rng.random())
        found = said(volume)
        assert (found["errors"], found["last_pass_errors"]) == (0, 0), found
        assert found["blocks"]
        assert await blocks.read(engine) == blocks.blocks
    assert (await blocks.check()).clean


async def test_the_rate_is_kept(blocks: BlockTree) -> None:
    """It is no faster, to one batch."""
    rate = 1 << 20
    blocks.options = msgspec.structs.replace(blocks.options, scrub=ScrubOptions(rate=rate))
    async with blocks.opened() as (volume, _):
        began = trio.current_time()
        await until(volume, lambda found: found["bytes"] > 0)
        await trio.sleep(1.0)
        found = said(volume)
        assert 0 < found["bytes"] < rate * (trio.current_time() - began) + (3 << 20)
        assert found["passes"] == 0
