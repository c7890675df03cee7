"""Blocks are written some time after their puts, many at a time, and at once where somebody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import trio
import trio.testing

from kvfuse.native import blockforms as forms
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.volume.blocks.write_behind import GATHER_BYTES, WriteBehind
from kvfuse.volume.inodes.doubt import Doubt

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
