"""Writes blocks behind their puts: data, heads and names of many blocks in large sorted writes, and syncs them.

A put does not wait for it. A *position* counts blocks that were put and heads that are to be written, in their order:
`written` and `durable` are positions before which all are on the medium, and survive a loss of power. A batch that the
engine refuses is written again until it accepts it: its memory stays, its slots are given to nobody else, and puts are
refused when too much waits. So a write that was given up, and comes late, finds nothing but its own block.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Batch, Core
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.volume.blocks.block_packer import BlockPacker
from kvfuse.volume.blocks.block_slabs import BlockSlabs
from kvfuse.volume.blocks.slot_reads import SlotReads, memory_at
from kvfuse.volume.inodes.doubt import Doubt

log = logging.getLogger(__name__)

BATCH_BYTES, BATCH_BLOCKS = 32 << 20, 8192
GATHER_SECONDS, GATHER_BYTES = 0.02, 8 << 20
"""for which blocks wait for others, so that they are written together; and bytes of them that do not wait"""
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 2.0


@dataclass
class WriteBehind:
    """Of one membership. Event loop only, but for `note_put`.

    ``interval``: seconds in which what was written is synced. ``doubt``: hears of each sync that fails, of others, too.
    ``sync_records``: makes it durable which slabs are lent. ``reads``: hears of each batch that is written; ``publish``
    likewise of its blocks, as `Batch.told` has them.
    """

    core: Core
    slabs: BlockSlabs
    segments: SegmentStore
    doubt: Doubt
    interval: float
    sync_records: Callable[[], Awaitable[None]]
    packer: BlockPacker
    reads: SlotReads
    publish: Callable[[bytes], Awaitable[None]] | None = None
    before_write: Callable[[], Awaitable[None]] | None = None
    """makes durable what has to be before heads say free"""
    before_take: Callable[[], Awaitable[None]] | None = None
    """returns when it is known of all blocks whether they are to be written"""
    written: int = 0
    durable: int = 0
    failures: int = 0
    _synced_loans: int = -1
    _sync_failures: int = 0
    _marks: deque[tuple[int, int]] = field(default_factory=deque)
    """(position, sequence) of some moments: all blocks up to that sequence are before that position"""
    error: EngineError | None = None
    """why nothing is written at present"""
    is_idle: bool = False
    """nothing waits: who puts a block calls `wake`"""
    _work: trio.Event = field(default_factory=trio.Event)
    _moved: trio.Event = field(default_factory=trio.Event)
    """set, and replaced, when a position moved, or an attempt failed"""
    _sync_wanted: int = 0
    _asked: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.doubt.on_failure = self._note_failed_sync

    def _note_failed_sync(self) -> None:
        self._sync_failures += 1
        self._marks.clear()  # blocks of before have later positions now
        self.core.doubt_unsynced()
        self.wake()

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Write and sync until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sync_by_and_by)
            while True:
                await self._gather()
                self._mark()
                if self.before_take is not None:
                    await self.before_take()
                found = self.core.take_dirty(BATCH_BYTES, BATCH_BLOCKS)
                if isinstance(found, int):
                    self._move(written=found)
                    await self._wait()
                else:
                    await self._write(found)

    async def _wait(self) -> None:
        self._work = trio.Event()
        self.is_idle = True
        if not self._is_work_left():  # put before it was idle
            await self._work.wait()
        self.is_idle = False

    async def _gather(self) -> None:
        """Let more blocks come while few wait, and nobody waits for them: a batch costs about as much as 100 puts."""
        if self.written < self._sync_wanted or self.core.statistics()["dirty_bytes"] >= GATHER_BYTES:
            return
        self._work = trio.Event()
        with trio.move_on_after(GATHER_SECONDS):
            await self._work.wait()

    def _is_work_left(self) -> bool:
        found = self.core.statistics()
        return bool(found["dirty"])

    async def _write(self, batch: Batch) -> None:
        """Write a batch until the engine accepts it; others hear of its blocks meanwhile."""
        await self.packer.pack(batch)
        transfers = self._transfers(batch)
        _, _, position = batch.facts()
        if self.before_write is not None:
            await self.before_write()
        async with trio.open_nursery() as nursery:
            if self.publish is not None:
                nursery.start_soon(self.publish, batch.told())
            await self._write_all(transfers)
        self.error = None
        self.reads.keep_stored(batch)
        batch.end()
        self._move(written=position)

    async def _write_all(self, transfers: list[Transfer]) -> None:
        pause = RETRY_SECONDS_MIN
        while True:
            try:
                return await self.segments.write(transfers)
            except EngineError as error:
                if self.error is None:
                    log.error("blocks cannot be written: %s", error)
                self.error, self.failures = error, self.failures + 1
                self._move()
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _transfers(self, batch: Batch) -> list[Transfer]:
        data, heads = (np.frombuffer(runs, forms.RUN) for runs in batch.runs())
        found = [
            Transfer(segment, offset, memory_at(address, length))
            for (segment, offset), address, length in zip(
                self.slabs.data_places(data), data["address"].tolist(), data["length"].tolist(), strict=True
            )
        ]
        for slab, offset, address, length in heads.tolist():
            for segment, start, part in self.slabs.heads.pieces(slab, offset, length):
                found.append(Transfer(segment, start, memory_at(address, part)))
                address += part
        return found

    def _mark(self) -> int:
        """Note what was put by now. The position."""
        found = self.core.statistics()
        while len(self._marks) > 1 and self._marks[1][0] <= self.written:
            self._marks.popleft()
        self._marks.append((found["queued"], found["sequence"]))
        return found["queued"]

    def _move(self, *, written: int | None = None, durable: int | None = None) -> None:
        self.written = self.written if written is None else written
        self.durable = self.durable if durable is None else durable
        moved, self._moved = self._moved, trio.Event()
        moved.set()

    # -- durable ---------------------------------------------------------------------------------------

    async def _sync_by_and_by(self) -> None:
        while True:
            with trio.move_on_after(self.interval):
                await self._asked.wait()
            self._asked = trio.Event()
            if self.durable < self.written:
                try:
                    await self._sync()
                except EngineError as error:
                    log.error("blocks cannot be synced: %s", error)
                    self.error, self.failures = error, self.failures + 1
                    self._move()
                    await trio.sleep(RETRY_SECONDS_MIN)

    async def _sync(self) -> None:
        """EngineError, after which the bytes of blocks that were written since the last one are in doubt."""
        position, heads = self.written, self.core.statistics()["written_heads"]
        sequence = max([sequence for before, sequence in self._marks if before <= position], default=0)
        loans, failures = self.slabs.loans, self._sync_failures
        with self.doubt.syncing():
            await self.segments.sync()
        if loans != self._synced_loans:
            await self.sync_records()
        if failures != self._sync_failures:
            raise EngineError("another sync failed meanwhile: blocks are written again")
        self.error, self._synced_loans = None, loans
        self.core.note_synced(sequence, heads)
        self._move(durable=position)

    @property
    def queued(self) -> int:
        """The position of all that was put and dropped by now."""
        return self.core.statistics()["queued"]

    async def flush(self) -> None:
        """Return when all that was put and dropped by now is durable. EngineError: it is not."""
        position, failures, sync_failures = self._mark(), self.failures, self._sync_failures
        while self.durable < position:
            self._sync_wanted = max(self._sync_wanted, position)
            self.wake()
            if self.written >= position:
                self._asked.set()
            await self._moved.wait()
            if self.error is not None and self.failures > failures:
                raise EngineError(f"blocks are not stored yet: {self.error}") from self.error
            if sync_failures != self._sync_failures:  # one of a file: blocks in doubt are queued again
                position, sync_failures = self._mark(), self._sync_failures

    async def await_progress(self) -> None:
        """Return when something was written or synced, or could not be."""
        self.wake()
        await self._moved.wait()

    def statistics(self) -> dict[str, Any]:
        return {"written": self.written, "durable": self.durable, "write_failures": self.failures}
