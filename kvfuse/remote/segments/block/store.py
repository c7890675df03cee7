"""Segments on block devices that all hosts of a volume see: NVMe-oF namespaces, a SAN, DRBD; partitions and files, too.

* Each device begins with a page that says which device of which set it is (`label`); behind it are places, each with a
  page of its own and room for one segment (`places`). Which segment is where is a function of the label alone.
* So hosts need not agree on a creation: each writes the same page. A place without one has zeros where a new segment
  has to have them, since the set was made (`making`), or since its segment was removed.
* All I/O bypasses the page cache, and is durable when it returns. A device promises other hosts to see it then, and
  that single blocks change as a whole; no more. Parts of blocks are read, changed and written, under a lock of this
  host: so bytes that two hosts write must not lie in one block of 4 KiB. (A volume's slots and tables of heads do not.)
* A call ends within the deadline (`set_device`), whatever the device does. A write that was late, or failed, may still
  happen: for as long as ``quarantine`` says the slabs of a host that is gone are not written by another. Where devices
  have persistent reservations (`reservations`), they refuse further writes of that host besides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

import trio

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout, ReadOnly, VolumeError
from kvfuse.remote.segments.api import SegmentInfo, SegmentLimits, SegmentStore, Transfer
from kvfuse.remote.segments.block import finding
from kvfuse.remote.segments.block import reservations as reservations_of
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE
from kvfuse.remote.segments.block.label import DeviceSet, Label
from kvfuse.remote.segments.block.pieces import Located, cut
from kvfuse.remote.segments.block.places import place_size
from kvfuse.remote.segments.block.set_device import SetDevice
from kvfuse.remote.segments.block.table import PageTable
from kvfuse.remote.segments.users import UsedSegment, Users

Batches: TypeAlias = dict[int, list[Located]]
"""number of a device -> transfers there"""


class BlockSegments(SegmentStore):
    """The segments on one set of devices. Made by ``open``; any number of hosts may have it open."""

    def __init__(
        self, devices: Sequence[SetDevice], deadline: float, quarantine: float, *, read_only: bool = False
    ) -> None:
        """``devices``: all of one set, in the order of their labels."""
        self._set: DeviceSet = devices[0].label.set
        super().__init__(
            SegmentLimits(
                mappable=False, durable=True, deadline=deadline, quarantine=quarantine,
                segment_count_max=self._set.segment_count,
            )
        )  # fmt: skip
        self._devices = devices
        self._table = PageTable(devices, self._set)
        self._key = b""
        self._read_only = read_only
        self._segments: dict[int, UsedSegment] = {}
        self._names_lock = trio.Lock()
        self._closed = False
        self._calls = Users()

    @classmethod
    async def open(
        cls,
        paths: Sequence[Path],
        volume_id: bytes | None = None,
        *,
        deadline: float = 5.0,
        quarantine: float = 0.0,
        read_only: bool = False,
        reservations: bool = False,
    ) -> Self:
        """Open all devices of a set, named in any order. ``volume_id``: whose they have to be; None: anybody's.

        ConfigError, VolumeError: they are no such set; EngineError, EngineTimeout: one cannot be read.
        """

        def open_all() -> list[SetDevice]:
            return _open_all(paths, volume_id, deadline, read_only=read_only)

        devices: list[SetDevice] = []
        with trio.move_on_after(deadline):
            devices = await trio.to_thread.run_sync(open_all, abandon_on_cancel=True)
        if not devices:
            raise EngineTimeout(f"segments.devices: {', '.join(map(str, paths))} did not answer within {deadline:g} s")
        store = cls(devices, deadline, quarantine, read_only=read_only)
        if reservations and not read_only:
            try:
                await store._register()
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
                    if segment >= len(self._set.places) or place_size(size) > place_size(self._set.segment_size):
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
                    del self._segments[segment]

    async def list(self) -> list[SegmentInfo]:
        with self._working():
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
            await self._on_devices(located, are_writes=True)

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
                for device in self._devices:
                    await device.run(partial(reservations_of.cut_off, key=self._key, other=identity))
        return False

    async def renew(self) -> None:
        if self._key:
            with self._working(writes=True):
                await self._register()

    async def _register(self) -> None:
        """With a new key. EngineError; without reservations from then on, where a device has none."""
        key = reservations_of.new_key()
        if all([await device.register(key) for device in self._devices]):
            self._key = key

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._calls.idle.wait()
        for device in self._devices:
            device.close()

    @property
    def title(self) -> str:
        """In messages."""
        return ", ".join(str(device.path) for device in self._devices)

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
        # No await from here on: a removal waits for the users of its segment.
        for segment in segments & self._segments.keys():
            in_use.enter_context(self._segments[segment])
        located: Batches = {}
        for segment, offset, buffer in batch:
            view = memoryview(buffer)
            self._check_range(segment, offset, view.nbytes)
            if view.nbytes:
                device, start = self._set.places[segment]
                located.setdefault(device, []).append(Located(start + HEAD_SIZE + offset, view.cast("B")))
        return located

    async def _meet(self, segment: int) -> None:
        """Look up a segment that another host may have made."""
        async with self._names_lock:
            size = await self._stored_size(segment)
            if size is not None:
                self._segments.setdefault(segment, UsedSegment(size))

    async def _stored_size(self, segment: int) -> int | None:
        """None: no such segment."""
        known = self._segments.get(segment)
        if known is not None:
            return known.size
        return await self._table.size(segment)

    def _check_range(self, segment: int, offset: int, length: int) -> None:
        """ValueError where no known segment holds the range."""
        known = self._segments.get(segment)
        if known is None or known.removed:
            raise ValueError(f"{self.title} have no segment {segment}")
        if offset < 0 or length < 0 or offset + length > known.size:
            raise ValueError(f"{length} bytes at {offset} of segment {segment}, which has {known.size}")

    async def _on_devices(self, located: Batches, *, are_writes: bool) -> None:
        """All devices at once. The first error is raised when all of them have ended."""
        errors: list[EngineError] = []

        async def move(index: int, transfers: Sequence[Located]) -> None:
            device = self._devices[index]
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


def _open_all(paths: Sequence[Path], volume_id: bytes | None, deadline: float, *, read_only: bool) -> list[SetDevice]:
    """ConfigError, VolumeError, EngineError; nothing stays open then."""
    with contextlib.ExitStack() as on_failure:
        devices: dict[int, SetDevice] = {}
        for path in paths:
            device = _open_one(path, deadline, read_only=read_only)
            on_failure.callback(device.close)
            _check_member(device, volume_id, devices)
            devices[device.label.device] = device
        rows = next(iter(devices.values())).label.set.rows
        if len(devices) < len(rows):
            missing = ", ".join(str(index + 1) for index in range(len(rows)) if index not in devices)
            raise VolumeError(
                f"segments.devices: the volume has {len(rows)} devices, and number {missing} is not among"
                f" {', '.join(map(str, paths))}: name them all"
            )
        on_failure.pop_all()
    return [devices[index] for index in range(len(rows))]


def _open_one(path: Path, deadline: float, *, read_only: bool) -> SetDevice:
    try:
        fd = finding.open_direct(path, read_only=read_only)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, fd)
            found = finding.read_label(fd)
            on_failure.pop_all()
    except VolumeError as error:
        raise VolumeError(f"segments.devices: {path}: {error}") from None
    except OSError as error:
        raise EngineError(f"segments.devices: {path} cannot be used: {error.strerror}") from error
    return SetDevice(path, fd, found, deadline, read_only=read_only)


def _check_member(device: SetDevice, volume_id: bytes | None, others: dict[int, SetDevice]) -> None:
    """VolumeError unless it is one more of the same set."""
    label: Label = device.label
    if volume_id is not None and label.set.volume_id != volume_id:
        raise VolumeError(f"segments.devices: {device.path} is {label.title}, and this is the volume {volume_id.hex()}")
    twin = others.get(label.device)
    if twin is not None:
        raise ConfigError(f"segments.devices: {twin.path} and {device.path} are one and the same device")
    for other in others.values():
        if other.label.set != label.set:
            raise VolumeError(
                f"segments.devices: {device.path} is {label.title}, and {other.path} is {other.label.title}"
            )
