"""Blocks are written some time after their puts, many at a time, and at once where somebody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import inside
import numpy as np
import pytest
import trio
import trio.testing
from block_tree import engine_of
from namespace_lab import make_namespace
from volume_lab import MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.options.config import Options
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.blocks.write_behind import GATHER_BYTES, WriteBehind
from kvfuse.volume.inodes.doubt import Doubt
from kvfuse.volume.volume import Volume

BLOCK = 4096


class _Core:
    """As much of the core as `WriteBehind` asks for: blocks of one size, which nobody drops."""

    def __init__(self) -> None:
        self.queued = self.taken = 0
        self.batches: list[int] = []

    def statistics(self) -> dict[str, int]:
        dirty = self.queued - self.taken
        return {
            "dirty": dirty, "dirty_bytes": dirty * BLOCK, "queued": self.queued, "sequence": self.queued,
            "written_heads": 0,
        }  # fmt: skip

    def take_dirty(self, bytes_max: int, rows_max: int) -> Any:
        count = min(self.queued - self.taken, rows_max, bytes_max // BLOCK)
        if not count:
            return self.taken
        self.taken += count
        self.batches.append(count)
        none = np.zeros(0, forms.RUN).tobytes()
        return SimpleNamespace(
            runs=lambda: (none, none), facts=lambda: (count, count * BLOCK, self.taken), end=lambda: None
        )

    def note_synced(self, sequence: int, heads: int) -> None:
        pass


class _Segments:
    async def write(self, batch: Sequence[Transfer]) -> None:
        await trio.lowlevel.checkpoint()

    async def sync(self) -> None:
        await trio.lowlevel.checkpoint()


async def _nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()


def make_writer(core: _Core) -> WriteBehind:
    slabs = cast(Any, SimpleNamespace(loans=0, data_places=lambda runs: [], meta_pieces=lambda *piece: []))
    doubt = cast(Doubt, SimpleNamespace(on_failure=None, syncing=lambda: trio.CancelScope()))
    packer = cast(Any, SimpleNamespace(pack=_nothing))
    reads = cast(Any, SimpleNamespace(keep_stored=lambda batch: None))
    return WriteBehind(cast(Any, core), slabs, cast(SegmentStore, _Segments()), doubt, 5.0, _nothing, packer, reads)


async def test_blocks_that_come_one_by_one_are_written_together(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    core = _Core()
    writer = make_writer(core)
    nursery.start_soon(writer.run)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(1000):
        core.queued += 1
        if writer.is_idle:
            writer.wake()
        await trio.sleep(0.001)
    await writer.flush()
    assert sum(core.batches) == 1000
    assert len(core.batches) < 100, core.batches


async def test_what_somebody_waits_for_is_written_at_once(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    core = _Core()
    writer = make_writer(core)
    nursery.start_soon(writer.run)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(10):
        core.queued += 1
        writer.wake()
        began = trio.current_time()
        await writer.flush()
        assert trio.current_time() == began
    core.queued += 2 * GATHER_BYTES // BLOCK
    writer.wake()
    began = trio.current_time()
    with trio.fail_after(0.001):
        while core.taken < core.queued:
            await trio.lowlevel.checkpoint()
    assert trio.current_time() == began, "so many wait for nobody"


@pytest.mark.parametrize("state", ["synced", "found by heads"])
async def test_a_failed_sync_takes_no_block_of_before(state: str, chaos: Chaos) -> None:
    """What was synced before is not in doubt, though no other copy of it is in memory; nor is what a mount found."""
    options = lab_options(capacity=24 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)
    disk, data = Disk.format(options), memoryview(chaos.random.randbytes(BLOCK))
    async with AsyncExitStack() as stack:
        volume, table = await _opened(stack, disk, options, chaos)
        await engine_of(volume).put(table, [b"before"], [data], RowTerms())
        await engine_of(volume).writer.flush()
        if state == "found by heads":
            await stack.aclose()
            volume, table = await _opened(stack, disk, options, chaos, table.namespace)
        engine = engine_of(volume)
        for place in engine.arenas._known:
            assert engine.arenas._free(place)
        chaos.sync_error = 1.0
        await engine.put(table, [b"in doubt"], [data], RowTerms())
        with pytest.raises(EngineError):
            await engine.writer.flush()
        chaos.sync_error = 0.0
        for name in (b"before", b"in doubt"):
            assert await engine.read(table, name) == data, name
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_flush_waits_for_what_another_sync_left_in_doubt(chaos: Chaos) -> None:
    """That of a file failed meanwhile: blocks that were written before are written again before a flush returns."""
    options = lab_options(capacity=24 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)
    disk = Disk.format(options)
    async with AsyncExitStack() as stack:
        volume, table = await _opened(stack, disk, options, chaos)
        engine = engine_of(volume)
        await engine.put(table, [b"one"], [memoryview(bytes(BLOCK))], RowTerms())
        while engine.writer.written < engine.writer.queued:
            await engine.writer.await_progress()
        chaos.stalled_writes = trio.Event()
        await engine.put(table, [b"two"], [memoryview(bytes(BLOCK))], RowTerms())
        is_flushed = trio.Event()

        async def flush() -> None:
            await engine.writer.flush()
            is_flushed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            while engine.native.statistics()["dirty"]:  # until all that waits is in the batch that stalls
                await trio.lowlevel.checkpoint()
            with pytest.raises(EngineError), inside.core(volume).doubt.syncing():
                raise EngineError("injected")
            assert engine.native.statistics()["dirty"], "the first one waits again"
            chaos.stalled_writes.set()
            await engine.writer.await_progress()  # the second one is written
            chaos.stalled_writes = trio.Event()
            await trio.testing.wait_all_tasks_blocked()
            was_early = is_flushed.is_set()
            chaos.stalled_writes.set()
        assert not was_early
        chaos.stalled_writes = None


async def _opened(
    stack: AsyncExitStack, disk: Disk, options: Options, chaos: Chaos, directory: int = 0
) -> tuple[Volume, BlockTable]:
    volume = await stack.enter_async_context(opened(disk, options, chaos))
    directory = directory or await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
    engine = engine_of(volume)
    await engine.slabs.loaded.wait()
    return volume, engine.table(directory, directory, 0, 0, 0o644)
