"""Segments on block devices that all hosts of a volume see: NVMe-oF namespaces, a SAN, DRBD; partitions and files, too.

* Each device begins with a page that says whose it is (`label`), and a map of all segments (`segment_map`); behind are
  places, each with a page of its own and room for one segment (`places`). Which segment is where the map alone says.
* So hosts need not agree on a creation: each writes the same page. A place without one has zeros where a new segment
  has to have them, since the map has it (`making`, `changing`), or since its segment was removed.
* All I/O bypasses the page cache, and is durable when it returns. A device promises other hosts to see it then, and
  that single blocks change as a whole; no more. Parts of blocks are read, changed and written, under a lock of this
  host: so bytes that two hosts write must not lie in one block of 4 KiB. (A volume's slots and tables of heads do not.)
* A call ends within the deadline (`set_device`), whatever the device does. A write that was late, or failed, may still
  happen: for as long as ``quarantine`` says the slabs of a host that is gone are not written by another. Where devices
  have persistent reservations (`reservations`), they refuse further writes of that host besides.
* Devices join and leave while the store is open (`changing`, `moving`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

import trio

from kvfuse.errors import EngineError, EngineFull, EngineTimeout, ReadOnly
from kvfuse.remote.segments.api import NoSegment, SegmentInfo, SegmentLimits, SegmentStore, Transfer
from kvfuse.remote.segments.block import opening
from kvfuse.remote.segments.block import reservations as reservations_of
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, place_size
from kvfuse.remote.segments.block.changing import SetChanges
from kvfuse.remote.segments.block.moving import CHUNK_SIZE
from kvfuse.remote.segments.block.pieces import Located, cut
from kvfuse.remote.segments.block.segment_map import MapName
from kvfuse.remote.segments.block.set_device import SetDevice
from kvfuse.remote.segments.block.table import DeviceSet, PageTable
from kvfuse.remote.segments.users import UsedSegment, Users

Batches: TypeAlias = dict[SetDevice, list[Located]]
"""device -> transfers there"""


class BlockSegments(SegmentStore):
    """The segments on one set of devices. Made by ``open``; any number of hosts may have it open."""

    def __init__(self, members: DeviceSet, deadline: float, quarantine: float, *, read_only: bool = False) -> None:
        super().__init__(SegmentLimits(mappable=False, durable=True, deadline=deadline, quarantine=quarantine))
        self._set = members
        self._table = PageTable(members)
        self._key = b""
        self._read_only = read_only
        self._segments: dict[int, UsedSegment] = {}
        self._names_lock = trio.Lock()
        self._changes = SetChanges(
            members, deadline, self._names_lock, self._find, self._register_one, read_only=read_only
        )
        self.devices = self._changes
        self._closed = False
        self._calls = Users()

    @classmethod
    async def open(
        cls,
        paths: Sequence[Path],
        volume_id: bytes | None = None,
        wanted: MapName | None = None,
        *,
        alone: bool = False,
        deadline: float = 5.0,
        quarantine: float = 0.0,
        read_only: bool = False,
        reservations: bool = False,
    ) -> Self:
        """Open all devices of a set, some of which are named, in any order.

        ``volume_id``: whose they have to be; None: anybody's. ``wanted``: the map that the superblock names; None: the
        newest. ``alone``: nobody else changes the set, so a change that was not named is taken back.
        ConfigError, VolumeError: they are no such set; EngineError, EngineTimeout: one cannot be read.
        """

        def open_all() -> DeviceSet:
            return opening.open_set(paths, volume_id, wanted, deadline, read_only=read_only)

        members: DeviceSet | None = None
        with trio.move_on_after(deadline):
            members = await trio.to_thread.run_sync(open_all, abandon_on_cancel=True)
        if members is None:
            raise EngineTimeout(f"segments.devices: {', '.join(map(str, paths))} did not answer within {deadline:g} s")
        store = cls(members, deadline, quarantine, read_only=read_only)
        try:
            if reservations and not read_only:
                await store._register()
            if alone and not read_only:
                await store._changes.take_back()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def create(self, segment: int, size: int) -> None:
        if segment < 0 or size <= 0 or size % PAGE_SIZE:
            raise ValueError(f"segment {segment} of {size} bytes, in units of {PAGE_SIZE}")
        with self._working(writes=True):
            async with self._names_lock:
                existing = await self._stored_size(segment)
                if existing not in (None, size):
                    raise ValueError(f"segment {segment} exists with {existing} bytes, not {size}")
                if existing is None:
                    made = self._set.map
                    if segment >= len(made.places) or place_size(size) > place_size(made.segment_size):
                        raise EngineFull(f"{self.title} have no room for segment {segment} of {size} bytes")
                    await self._table.add(segment, size)
                self._segments.setdefault(segment, UsedSegment(size))

    async def remove(self, segment: int) -> None:
        """One that failed is still listed: remove it again. No other host may know the segment."""
        with self._working(writes=True):
            async with self._names_lock:
                size = await self._stored_size(segment)
                if size is None:
                    return
                known = self._segments.setdefault(segment, UsedSegment(size))
                known.removed = True
                try:
                    await known.idle.wait()
                    await self._table.drop(segment, size)
                finally:
                    self._segments.pop(segment, None)

    def recheck(self) -> None:
        """Those in the middle of a removal or a move are this client's to know."""
        self._segments = {
            segment: known
            for segment, known in self._segments.items()
            if known.removed or known.gate is not None or known.changed is not None
        }

    async def list(self) -> list[SegmentInfo]:
        with self._working():
            await self._changes.follow()
            sizes = await self._table.sizes()
            return [SegmentInfo(segment, sizes[segment]) for segment in sorted(sizes)]

    async def read(self, batch: Sequence[Transfer]) -> None:
        for segment, offset, buffer in batch:
            if memoryview(buffer).readonly:
                raise ValueError(f"a buffer to read into is not writable (segment {segment}, offset {offset})")
        with self._working(), contextlib.ExitStack() as in_use:
            located = await self._use(batch, in_use)
            self.counters.reads += len(batch)
            self.counters.read_bytes += _byte_count(located)
            await self._on_devices(located, are_writes=False)

    async def write(self, batch: Sequence[Transfer]) -> None:
        with self._working(writes=True), contextlib.ExitStack() as in_use:
            located = await self._use(batch, in_use)
            self.counters.writes += len(batch)
            self.counters.written_bytes += _byte_count(located)
            try:
                await self._on_devices(located, are_writes=True)
            finally:
                self._note_changed(batch)

    async def sync(self) -> None:
        """Nothing to wait for: a write that returned is durable."""
        with self._working():
            self.counters.syncs += 1
            await trio.lowlevel.checkpoint()

    def identity(self) -> bytes:
        """The key that it registered with all devices; b"" where there are no reservations."""
        return self._key

    async def fence(self, identity: bytes) -> bool:
        """Have the devices refuse further writes of that client.

        It never vouches for those that are inside a device by then: they happen, at any time.
        """
        if identity and self._key:
            with self._working(writes=True):
                for device in self._set.in_order():
                    await device.run(partial(reservations_of.cut_off, key=self._key, other=identity))
        return False

    async def renew(self) -> None:
        if self._key:
            with self._working(writes=True):
                await self._register()

    async def _register(self) -> None:
        """With a new key. EngineError; without reservations from then on, where a device has none."""
        key = reservations_of.new_key()
        if all([await device.register(key) for device in self._set.in_order()]):
            self._key = key

    async def _register_one(self, device: SetDevice) -> None:
        """A device that joined. EngineError."""
        if self._key:
            await device.register(self._key)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._calls.idle.wait()
        self._changes.close()

    @property
    def title(self) -> str:
        """In messages."""
        return ", ".join(str(device.path) for device in self._set.in_order())

    @contextlib.contextmanager
    def _working(self, *, writes: bool = False) -> Iterator[None]:
        """A call on an open store; closing waits for it. ReadOnly, where it writes and may not."""
        if writes and self._read_only:
            raise ReadOnly(f"{self.title} are open for reading only")
        if self._closed:
            raise EngineError(f"{self.title} are closed")
        with self._calls:
            yield

    # -- where segments are ------------------------------------------------------------------------------

    async def _use(self, batch: Sequence[Transfer], in_use: contextlib.ExitStack) -> Batches:
        """The transfers of a batch, by device; their segments stay while ``in_use``. ValueError: one is not there."""
        segments = {transfer.segment for transfer in batch}
        for segment in segments - self._segments.keys():
            await self._meet(segment)
        await self._pass_gates(segments)
        # No await from here on: a removal, and a move, wait for the users of their segment.
        for segment in segments & self._segments.keys():
            in_use.enter_context(self._segments[segment])
        located: Batches = {}
        for segment, offset, buffer in batch:
            view = memoryview(buffer)
            self._check_range(segment, offset, view.nbytes)
            if view.nbytes:
                device, start = self._set.at(segment)
                located.setdefault(device, []).append(Located(start + HEAD_SIZE + offset, view.cast("B")))
        return located

    async def _pass_gates(self, segments: set[int]) -> None:
        """Return when none of the segments is in the last step of a move. EngineTimeout."""
        with trio.move_on_after(self.limits.deadline) as scope:
            while gates := [self._segments[segment].gate for segment in segments & self._segments.keys()]:
                closed = next((gate for gate in gates if gate is not None), None)
                if closed is None:
                    return
                await closed.wait()
        if scope.cancelled_caught:
            raise EngineTimeout(f"{self.title}: a segment moves to another device, and that did not end")

    def _note_changed(self, batch: Sequence[Transfer]) -> None:
        """A write has ended, whether it happened or not."""
        for segment, offset, buffer in batch:
            known = self._segments.get(segment)
            if known is not None and known.changed is not None:
                end = offset + memoryview(buffer).nbytes
                known.changed.update(range(offset // CHUNK_SIZE, -(-end // CHUNK_SIZE)))

    async def _meet(self, segment: int) -> None:
        """Look up a segment that another host may have made."""
        async with self._names_lock:
            await self._find(segment)

    async def _find(self, segment: int) -> UsedSegment | None:
        """The caller has the lock of names. None: there is no such segment."""
        size = await self._stored_size(segment)
        return None if size is None else self._segments.setdefault(segment, UsedSegment(size))

    async def _stored_size(self, segment: int) -> int | None:
        """None: no such segment."""
        known = self._segments.get(segment)
        if known is not None:
            return known.size
        if segment >= len(self._set.map.places):
            await self._changes.follow()
        return await self._table.size(segment)

    def _check_range(self, segment: int, offset: int, length: int) -> None:
        """ValueError where no known segment holds the range."""
        known = self._segments.get(segment)
        if known is None or known.removed:
            raise NoSegment(f"{self.title} have no segment {segment}", segment)
        if offset < 0 or length < 0 or offset + length > known.size:
            raise ValueError(f"{length} bytes at {offset} of segment {segment}, which has {known.size}")

    async def _on_devices(self, located: Batches, *, are_writes: bool) -> None:
        """All devices at once. The first error is raised when all of them have ended."""
        errors: list[EngineError] = []

        async def move(device: SetDevice, transfers: Sequence[Located]) -> None:
            try:
                await (device.write if are_writes else device.read)(cut(transfers))
            except EngineError as error:
                errors.append(error)

        if len(located) == 1:
            await move(*next(iter(located.items())))
        else:
            async with trio.open_nursery() as nursery:
                for item in located.items():
                    nursery.start_soon(move, *item)
        if errors:
            if not are_writes:
                self.counters.failed_reads += 1
            raise errors[0]


def _byte_count(located: Batches) -> int:
    return sum(view.nbytes for transfers in located.values() for _, view in transfers)
