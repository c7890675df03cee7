"""Writes staged bytes to slots: checksums, batched writes.

One batch is written at a time; bytes staged meanwhile join the next. The journal commits a record
only after the bytes that it refers to were written; headers (`heads`) are written with their bytes.

Bytes whose servers are late go to other slots (`elsewhere`).

Bytes whose write failed stay staged, and are written again. But no caller waits longer than one engine deadline:
when a batch times out, every waiter gets EngineTimeout, also those whose bytes were to follow in the next batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.allocator import Slot
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.inodes.chunk import Chunk, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.unstored import Unstored
from kvfuse.volume.measures.demand import Demand
from kvfuse.volume.measures.fair_line import FairLine
from kvfuse.volume.slots.elsewhere import Elsewhere
from kvfuse.volume.slots.heads import Head, HeaderWriter, identity_of, transfers
from kvfuse.volume.slots.items import Item, plan
from kvfuse.volume.slots.packer import Packer
from kvfuse.volume.views.health import WRITE

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
BATCH_CHUNKS = 512
"""Staged bytes, and chunks with staged bytes, in one call to the segment engine."""
PREPARED_BYTES = 2 << 20
PREPARED_CHUNKS = 64
"""Bytes and chunks whose checksums and headers are made before other tasks may run: some 3 ms."""
BATCH_BYTES_SHARED = 8 << 20
"""The same where several namespaces have such bytes, each of which gets its share of every batch."""
BESIDE_READERS = 4
"""Where callers of other namespaces read, so many fewer are made before other tasks may run."""
OVER = "the volume is being unmounted, or lost its lease: nothing is written any more"
WRITES_MAX = 4
"""Times that a batch is written: what is late goes elsewhere, and the last time it is waited for."""
ROOM_SHARE_MAX = 0.875
"""Part of the room for bytes that the next daemon finds; the rest is for writes whose bytes are not there yet."""
PAUSE_MIN = 0.1
PAUSE_MAX = 0.5
"""Seconds before the next attempt after a failed write: after the first failure, and at most."""


class _Turn:
    """One pass over full chunks, for whose end callers wait."""

    __slots__ = ("ended", "error")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: EngineError | None = None

    async def wait(self, demand: Demand) -> None:
        """Return at its end: somebody waits, so work ahead of need gives way."""
        demand.calls += 1
        try:
            await self.ended.wait()
        finally:
            demand.calls -= 1
            if demand.behind:
                demand.ended()

    def end(self, error: EngineError | None = None) -> None:
        self.error = self.error or error
        self.ended.set()


@dataclass
class Flusher:
    """Writes staged chunks and their headers. ``staging_size``: bytes that may be staged before writers wait."""

    core: Core
    headers: HeaderWriter
    staging_size: int
    staged_bytes: int = 0
    dropped_size: int = 0
    """bytes of slots that are being written with bytes dropped meanwhile"""
    _full: dict[tuple[Node, int], None] = field(default_factory=dict)
    """(node, chunk index) of chunks that will hardly change any more"""
    _staged: dict[Node, None] = field(default_factory=dict)
    """inodes with staged bytes"""
    is_behind: bool = False
    """bytes are written long before their commit, which is not near"""

    def __post_init__(self) -> None:
        self._lock = trio.Lock()
        self._work = trio.Event()
        self.packer = Packer(self.core)
        self.elsewhere = Elsewhere(self.core)
        self.line = FairLine()
        """callers that wait for memory"""
        self._turn = _Turn()
        """the next pass"""
        self._failed = trio.Event()
        self._error: EngineError | None = None
        """of the last pass; None: it did not fail"""
        self._late: EngineTimeout | None = None
        """of the last write that timed out"""
        self._is_asked = False
        """also files that nobody writes any more are to be written"""
        self._is_over = False
        self._caller_count = 0

    def give_up(self) -> None:
        """End all waits: staged bytes will never be written."""
        self._is_over = True
        self.line.call_all()
        self._turn.end()

    # -- staging accounts ----------------------------------------------------------------------------

    def stage(self, node: Node, chunk: Chunk, staged: Staged) -> None:
        """Replace the chunk's staged bytes, if any, by ``staged``."""
        if chunk.staged is None:
            node.staged_count += 1
        else:
            self.staged_bytes -= chunk.staged.length
        chunk.staged = staged
        self._staged[node] = None
        self.staged_bytes += staged.length
        if self.is_behind and self.is_half_full:
            self._work.set()

    def unstage(self, node: Node, chunk: Chunk) -> None:
        """Remove the chunk's staged bytes, which were written or dropped. The caller frees their slots."""
        if chunk.staged is not None:
            self.staged_bytes -= chunk.staged.length
            node.staged_count -= 1
            chunk.staged = None
            if not node.staged_count:
                self._staged.pop(node, None)
            if self.line.places:
                self.line.call_first()

    def drop(self, staged: Staged) -> None:
        """Drop bytes that are being written: their slots are freed when the write has ended."""
        if not staged.dropped:
            staged.dropped = True
            self.dropped_size += staged.capacity

    def grew(self, byte_count: int) -> None:
        """Count staged bytes that grew (or, below 0, shrank) in place."""
        self.staged_bytes += byte_count
        if self.is_behind and self.is_half_full:
            self._work.set()

    def chunk_is_full(self, node: Node, index: int) -> None:
        """Write a chunk that will hardly change any more without waiting for a commit."""
        self._full[node, index] = None
        self._work.set()

    def write_behind(self) -> None:
        """Write what is staged of files that nobody writes any more, without waiting for a commit."""
        if self._staged:
            self._is_asked = True
            self._work.set()

    def _add_closed(self) -> None:
        """Chunks of such files are full, as it were."""
        for node in self._staged:
            if not node.writers:
                self._full.update([((node, at), None) for at, one in node.chunks.items() if one.staged is not None])

    @property
    def has_callers(self) -> bool:
        """Callers wait for a file's bytes to be written, and will then wait for its commit."""
        return self._caller_count > 0

    @property
    def is_over_full(self) -> bool:
        """More bytes are staged than may be, or than the next daemon could get: writers wait."""
        return self._fills(1, ROOM_SHARE_MAX)

    @property
    def is_half_full(self) -> bool:
        """More than half of the allowed bytes are staged: write some before the next commit does."""
        return self._fills(2, ROOM_SHARE_MAX / 2)

    def _fills(self, part: int, share: float) -> bool:
        unstored = self.core.unstored
        return self.staged_bytes > self.staging_size // part or (unstored is not None and unstored.used_share > share)

    async def wait_for_memory(self, namespace: int, size: int) -> None:
        """Return when no more bytes are staged than may be, and it is the turn of this caller, who brings ``size``
        bytes for a namespace. All staged bytes are being written meanwhile.

        EngineError: a write failed. The bytes stay staged, and are written again.
        """
        failed = self._failed
        place = self.line.enter(namespace, size, self.core.namespaces.weight(namespace))
        try:
            while self.is_over_full or self.line.places[0] is not place:
                if self._is_over:
                    raise EngineError(OVER)
                if failed.is_set() and self._error is not None:
                    raise self._error
                place.go = trio.Event()
                if self.is_over_full:
                    self._work.set()
                with trio.move_on_after(0.1):
                    await place.go.wait()
        finally:
            self.line.leave(place)

    async def write_out(self, node: Node) -> None:
        """Return when the node's staged bytes were written, or their write failed; other full chunks share the batch.

        EngineTimeout: the engine did not answer within its deadline, so the caller should not wait for it again.
        """
        staged = [index for index, chunk in node.chunks.items() if chunk.staged is not None]
        for index in staged:
            self.chunk_is_full(node, index)
        if staged and not self._is_over:
            turn = self._turn
            self._caller_count += 1
            try:
                await turn.wait(self.core.reads.demand)
            finally:
                self._caller_count -= 1
            if isinstance(turn.error, EngineTimeout):
                raise turn.error

    async def write_whole(self, node: Node, index: int, chunk: Chunk) -> None:
        """Return when the bytes now staged in a full chunk are in its slots, or were dropped; other full chunks share
        the batch.

        EngineError: they are not. They stay staged, and are written again.
        """
        staged, turn = chunk.staged, self._turn
        self.chunk_is_full(node, index)
        if not self._is_over:
            await turn.wait(self.core.reads.demand)
        if chunk.staged is staged and node.chunks.get(index) is chunk:  # an error may be that of other chunks alone
            raise turn.error or EngineError(OVER)

    async def settled(self) -> None:
        """Return when the present write has ended."""
        async with self._lock:
            pass

    async def run(self) -> None:
        """Until cancelled: write full chunks, and all staged bytes where there are more than may be."""
        pause = PAUSE_MIN
        while True:
            await self._work.wait()
            self._work = trio.Event()
            if self._is_asked or (self.is_behind and self.is_half_full):
                self._is_asked = False
                self._add_closed()
            full, self._full = self._full, {}
            turn, self._turn = self._turn, _Turn()
            try:
                await self._flush_chunks(list(full))
                if self.is_over_full:
                    if self.core.unstored is not None:
                        self._free_copies(self.core.unstored)
                    await self.flush(self._staged)
            except EngineError as error:
                if self._error is None:
                    log.error("writing staged bytes failed, they stay in memory and are written again: %s", error)
                self._fail(turn, error)
                await trio.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX)
            else:
                self._error, pause = None, PAUSE_MIN
            finally:
                turn.end()

    def _fail(self, turn: _Turn, error: EngineError) -> None:
        """End a pass with an error; after a timeout also the next one, whose callers have waited for a deadline."""
        self._error = error
        self._failed.set()
        self._failed = trio.Event()
        turn.end(error)
        if isinstance(error, EngineTimeout):
            late, self._turn = self._turn, _Turn()
            late.end(error)

    # -- writing -------------------------------------------------------------------------------------

    async def flush(self, nodes: Iterable[Node]) -> None:
        """Write all bytes now staged in ``nodes`` to slots, and headers that describe the files. EngineError.

        A chunk that changes meanwhile is written in its former state, and stays staged in its new one.
        """
        nodes = list(nodes)
        chunks = [
            (node, index)
            for node in nodes
            if node.staged_count
            for index, chunk in node.chunks.items()
            if chunk.staged is not None
        ]
        if chunks:
            demand, awaited = self.core.reads.demand, len(chunks) if self.core.strict else 0
            demand.calls += awaited
            try:
                await self._flush_chunks(chunks)
            finally:
                demand.calls -= awaited
                if demand.behind:
                    demand.ended()
        await self.headers.describe([node for node in nodes if node.nlink and node.described is not None])

    async def _flush_chunks(self, chunks: Sequence[tuple[Node, int]]) -> None:
        """EngineError. EngineTimeout also if another batch, which this one waited for, timed out."""
        before = self._late
        async with self._lock:
            if self._late is not None and self._late is not before:
                raise self._late
            left, size_max = deque(chunks), BATCH_BYTES
            if len(chunks) > 1 and any(node.namespace != chunks[0][0].namespace for node, _ in chunks):
                left, size_max = deque(in_fair_order(self.core, chunks)), BATCH_BYTES_SHARED
            while left:
                await self._write_batch(left, size_max)
                if self.core.unstored is not None:
                    self._free_copies(self.core.unstored)

    def _free_copies(self, unstored: Unstored) -> None:
        """Have the next daemon know which bytes are in slots by now, so that the room of their copies is free."""
        unstored.seal()
        if self.line.places:
            self.line.call_first()

    async def _write_batch(self, chunks: deque[tuple[Node, int]], size_max: int) -> None:
        """Under the lock: write the first of ``chunks``. At each await staged bytes may be replaced or dropped;
        `_install` checks that.
        """
        items: list[Item] = []
        try:
            await self._take(chunks, items, size_max)
            for left in reversed(range(WRITES_MAX)):
                await self.elsewhere.move(items)
                with self.core.doubt.writing(), self.core.health.trying(WRITE):
                    late = await self._write(items, is_last=not left or self.headers.owes_much) if items else []
                written, items = [item for item in items if item not in late], late
                with trio.CancelScope(shield=True):  # the bytes are written
                    for number, item in enumerate(written):
                        if number and number % PREPARED_CHUNKS == 0:
                            await trio.lowlevel.checkpoint()
                        self._install(item)
                items = self._still_wanted(items)
        except BaseException as error:
            if isinstance(error, EngineTimeout):
                self._late = error
            for item in items:
                self._keep_staged(item)
            raise

    async def _write(self, items: Sequence[Item], *, is_last: bool) -> list[Item]:
        """Write bytes and heads. Returns those whose bytes are late; ``is_last``: EngineTimeout where some are."""
        writes, headers, heads = await self._prepare(items)
        segments = {transfer.segment for transfer in (*writes, *headers)}
        if not segments <= self.core.made_segments:
            await self.core.make_segments(segments)
        if is_last:
            await self.core.segments.write(writes)
            await self.headers.write(heads)
            return []
        late = await self.core.segments.servers.write_some([*writes, *headers])
        self.headers.wrote(heads, [headers[index - len(writes)] for index in late if index >= len(writes)])
        return [item for item in items if not late.isdisjoint(item.transfers)] if late else []

    def _still_wanted(self, late: Sequence[Item]) -> list[Item]:
        """Those of late items that are to be written elsewhere: as they are, and not compressed."""
        for item in late:
            if item.staged.dropped:
                self._keep_staged(item)
            elif item.packed is not None:
                self.elsewhere.rest([extent.slot for extent in item.extents])
                item.packed = None
            else:
                item.staged.unsure = True
        return [item for item in late if not item.staged.dropped]

    async def _take(self, chunks: deque[tuple[Node, int]], items: list[Item], size_max: int) -> None:
        """Begin to write the first of ``chunks``: from here on they do not change. Compresses what is to be."""
        size, spaces, tried = 0, self.core.namespaces.all, list[Item]()
        while chunks and size < size_max and len(items) < BATCH_CHUNKS:
            node, index = chunks.popleft()
            chunk = node.chunks.get(index)
            staged = chunk.staged if chunk is not None else None
            if chunk is not None and staged is not None:
                size += staged.length
                staged.writing = True
                chunk.writing = staged
                items.append(Item(node, index, chunk, staged, []))
                namespace = spaces.get(node.namespace) if spaces else None
                if namespace is not None and namespace.settings.compression != "none":
                    tried.append(items[-1])
        if tried:
            tried = [item for item in tried if self.packer.wants(item.node, item.staged)]
            packed = await self.packer.pack([(item.node.namespace, item.staged) for item in tried])
            for item, found in zip(tried, packed, strict=True):
                item.packed = found

    async def _prepare(self, items: Sequence[Item]) -> tuple[list[Transfer], list[Transfer], list[Head]]:
        """The transfers of the bytes of a batch, those of their heads, and the heads."""
        writes: list[Transfer] = []
        headers: list[Transfer] = []
        heads: list[Head] = []
        folders: dict[int, bytes] = {}
        prepared_size, head_count = 0, 0
        of = self.core.namespaces.measures[items[0].node.namespace]
        part = BESIDE_READERS if len(of.readers) > (of in of.readers) and of.is_beside_readers() else 1
        for item in items:
            if (len(heads) - head_count) * part >= PREPARED_CHUNKS or prepared_size * part >= PREPARED_BYTES:
                headers += transfers(self.core.superblock, heads[head_count:])
                prepared_size, head_count, folders = 0, len(heads), {}
                await trio.lowlevel.checkpoint()
            prepared_size += item.staged.length
            item.identity = identity_of(item.node)
            plan(self.core, item, writes, self.cancel)
            offset = 0
            for extent in item.extents:
                heads.append(self.headers.head(item.node, item.chunk_index, offset, extent, folders))
                offset += extent.length
        return writes, headers + transfers(self.core.superblock, heads[head_count:]), heads

    def _keep_staged(self, item: Item) -> None:
        """Keep bytes staged whose write failed, in a copy of which the failed write has no views.

        The write may still happen. So the slots may only get later bytes of this chunk, which the engine writes after.
        """
        staged = item.staged
        staged.writing = False
        item.chunk.writing = None
        staged.pieces = [b"".join(staged.pieces)]
        if staged.dropped:
            self.dropped_size -= staged.capacity
        staged.unsure = True
        if item.packed is not None:
            self.cancel(staged, [extent.slot for extent in item.extents])
        if item.chunk.staged is not staged:
            self.cancel(staged, staged.slots)

    def cancel(self, staged: Staged, slots: list[Slot]) -> None:
        """Free allocated slots of staged bytes; later, where a failed write may still reach them."""
        if staged.unsure:
            self.elsewhere.rest(slots)
        else:
            self.core.slabs.cancel(slots)

    def _install(self, item: Item) -> None:
        """Replace the chunk's extents by the written ones, unless they were dropped meanwhile."""
        node, chunk, staged = item.node, item.chunk, item.staged
        staged.writing = False
        chunk.writing = None
        if staged.dropped:
            self.dropped_size -= staged.capacity
        if item.packed is not None:
            self.cancel(staged, staged.slots)
        if staged.dropped:
            for extent in item.extents:
                self.core.discard(node, extent)
            return
        if chunk.staged is staged:
            self.unstage(node, chunk)
        for extent in chunk.extents:
            self.core.discard(node, extent)
        # The file's bytes do not change, and no map shows the old extents since bytes were staged over them.
        node.set_extents(item.chunk_index, item.extents)
        node.born.extend(item.extents)
        if item.chunk_index == 0:
            node.described = item.identity
        disk = self.core.disk
        if disk is not None and disk.keeps_stores and self.core.namespaces.may_keep(node.namespace, "disk"):
            _keep_copies(disk, item)


def in_fair_order(core: Core, chunks: Sequence[tuple[Node, int]]) -> list[tuple[Node, int]]:
    """By shares of the weights of their namespaces; those of one namespace keep their order."""
    ends: dict[int, float] = {}
    starts = []
    for node, index in chunks:
        start = ends.get(node.namespace, 0.0)
        chunk = node.chunks.get(index)
        size = chunk.staged.length if chunk is not None and chunk.staged is not None else 0
        ends[node.namespace] = start + size / core.namespaces.weight(node.namespace)
        starts.append(start)
    return [chunks[number] for number in sorted(range(len(chunks)), key=starts.__getitem__)]


def _keep_copies(disk: DiskTier, item: Item) -> None:
    """Have the disk tier keep what was stored. A bytearray may change: of that, a copy."""
    pieces = [item.packed.data] if item.packed is not None else item.staged.pieces
    if len(item.extents) > 1 or any(len(piece) % GRANULE_SIZE for piece in pieces[:-1]):
        pieces = [b"".join(pieces)]
    views = [memoryview(bytes(piece) if isinstance(piece, bytearray) else piece) for piece in pieces]
    start = 0
    for extent in item.extents:
        low = 0
        for part in [views[0][start : start + extent.length]] if len(views) == 1 else views:
            disk.keep(GranuleRun.around(extent, low, low + len(part)), part)
            low += len(part)
        start += extent.length
