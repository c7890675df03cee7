"""Changes of a set of devices: maps are stored on all of them, and used once the superblock names them.

One client at a time does so (`DeviceControl`). Killed at any write, it leaves the map that the superblock names as it
was, in its area of each device: the next one is in the other area. A place that a map has and the one before had not is
made as of a new device first: so a segment that is made there later begins with zeros.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import trio

from kvfuse.errors import EngineError, EngineTimeout, VolumeError
from kvfuse.remote.segments.api import DeviceControl, Plan
from kvfuse.remote.segments.block import finding, opening
from kvfuse.remote.segments.block.label import Label, pack_label
from kvfuse.remote.segments.block.making import describe, place_count
from kvfuse.remote.segments.block.moving import SegmentMove
from kvfuse.remote.segments.block.pieces import write_bytes, write_page
from kvfuse.remote.segments.block.segment_map import DeviceRow, MapName, SegmentMap, area_of
from kvfuse.remote.segments.block.set_device import SetDevice
from kvfuse.remote.segments.block.table import DeviceSet, clear_place
from kvfuse.remote.segments.users import UsedSegment

_T = TypeVar("_T")
FOLLOW_SECONDS = 1.0
"""after which a device that joined, and was not found, is looked for again"""
Commit: TypeAlias = Callable[[MapName], Awaitable[None]]
log = logging.getLogger(__name__)


class SetChanges(DeviceControl):
    """Of one store, whose ``members`` it changes.

    ``find``: looks up a segment, under ``names_lock``; ``register``: a device that joined. A task that has both locks
    took that of names first.
    """

    def __init__(
        self,
        members: DeviceSet,
        deadline: float,
        names_lock: trio.Lock,
        find: Callable[[int], Awaitable[UsedSegment | None]],
        register: Callable[[SetDevice], Awaitable[None]],
        *,
        read_only: bool,
    ) -> None:
        self._set = members
        self._deadline = deadline
        self._names_lock, self._find = names_lock, find
        self._register = register
        self._read_only = read_only
        self._expected = members.map.name
        self._prepared = members
        self._turn = trio.Lock()
        self._follow_at = -math.inf

    @property
    def map(self) -> SegmentMap:
        return self._set.map

    def expect(self, name: MapName) -> None:
        if name.number > self._expected.number:
            self._expected = name

    # -- following others ------------------------------------------------------------------------------

    async def follow(self) -> None:
        if self._expected.number <= self.map.number:
            return
        async with self._turn:
            if self._expected.number <= self.map.number:
                return
            if trio.current_time() < self._follow_at:
                raise EngineError("a device that joined the volume is not there: it is looked for again and again")
            if self._expected == self._prepared.map.name:  # by this client, to whom nobody said that it counts
                await self._adopt(self._expected)
                return
            try:
                made = await self._read_map(self._expected)
                self._use(DeviceSet(made, await self._opened(made)))
            except EngineError as error:
                log.warning("what was added to the volume cannot be used yet: %s", error)
                self._follow_at = trio.current_time() + FOLLOW_SECONDS
                raise

    async def _read_map(self, name: MapName) -> SegmentMap:
        """EngineError: no device has it."""
        for device in self._set.in_order():
            with suppress(EngineError, VolumeError):
                maps = await device.run(lambda fd: finding.read_maps(fd, finding.read_label(fd)))
                if name in maps:
                    return maps[name]
        raise EngineError(f"no device has map {name.number} of the volume's segments")

    async def _opened(self, made: SegmentMap) -> dict[bytes, SetDevice]:
        """All devices of a map; those that the set has not yet are opened. EngineError."""
        known = {**self._prepared.devices, **self._set.devices}
        devices: dict[bytes, SetDevice] = {}
        with ExitStack() as on_failure:
            for index, row in enumerate(made.rows):
                if row.device_id not in known:
                    known[row.device_id] = await self._open(made, index)
                    on_failure.callback(known[row.device_id].close)
                devices[row.device_id] = known[row.device_id]
            on_failure.pop_all()
        return devices

    async def _open(self, made: SegmentMap, index: int) -> SetDevice:
        call = partial(opening.open_member, made, index, None, self._deadline, read_only=self._read_only)
        device: SetDevice | None = None
        try:
            with trio.move_on_after(self._deadline):
                device = await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except VolumeError as error:
            raise EngineError(str(error)) from None
        if device is None:
            raise EngineTimeout(f"{made.rows[index].title} did not answer within {self._deadline:g} s")
        await self._register(device)
        log.warning("%s has joined the volume", made.rows[index].title)
        return device

    def _use(self, members: DeviceSet) -> None:
        """No await: from here on each call finds its segments by the new map."""
        for device_id in self._set.devices.keys() - members.devices.keys():
            self._set.devices[device_id].close()
        self._set.map, self._set.devices = members.map, members.devices

    def _close(self, unused: set[bytes]) -> None:
        """Devices of a change that did not come to be."""
        for device_id in unused:
            self._prepared.devices[device_id].close()

    def close(self) -> None:
        """No call may be waited for any more."""
        self._close({*self._prepared.devices})
        for device in self._set.in_order():
            device.close()

    # -- changes -----------------------------------------------------------------------------------------

    async def examine(self, path: Path, weight: int, domain: str) -> DeviceRow:
        size, _ = await self._in_thread(partial(describe, path))
        label = await self._in_thread(partial(finding.label_at, path))
        if label.volume_id != self.map.volume_id or label.has_left or label.first_map is not None:
            raise VolumeError(f"{path} is not labelled to join this volume")
        if self.map.index_of(label.device_id) is not None:
            raise VolumeError(f"{path} is a device of this volume already")
        places = place_count(size, self.map.segment_size)
        part = sum(row.weight for row in self.map.rows) / sum(row.places for row in self.map.rows)
        return DeviceRow(label.device_id, places, weight or max(round(part * places), 1), domain, str(path))

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        with trio.move_on_after(self._deadline):
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        raise EngineTimeout(f"a device did not answer within {self._deadline:g} s")

    async def prepare(self, plan: Plan, check: Callable[[], None]) -> MapName:
        async with self._turn:
            return await self._prepare(plan(self.map), check)

    async def _prepare(self, wanted: SegmentMap, check: Callable[[], None], *, is_copied: bool = False) -> MapName:
        """``is_copied``: the places that it has more are written already. A plan of several steps is one change."""
        former, wanted = self.map, replace(wanted, number=self.map.number + 1)
        image = wanted.image
        devices = await self._opened(wanted)
        self._close(self._prepared.devices.keys() - devices.keys() - self._set.devices.keys())
        self._prepared = DeviceSet(wanted, devices)
        self._check_settled(self._set.devices.keys() - devices.keys())
        if not is_copied:
            await self._clear_new_places(former, wanted, devices, check)
        for device in devices.values():
            check()
            await device.run(partial(write_bytes, offset=area_of(wanted.number), image=image))
        return wanted.name

    def _check_settled(self, device_ids: Iterable[bytes]) -> None:
        """EngineTimeout: a write of which nobody knows whether it happened may still come, and hit what follows it."""
        for device in map(self._set.devices.__getitem__, device_ids):
            if device.has_late_writes:
                raise EngineTimeout(f"{device.path}: an earlier write is still under way")

    async def _clear_new_places(
        self, former: SegmentMap, wanted: SegmentMap, devices: dict[bytes, SetDevice], check: Callable[[], None]
    ) -> None:
        """Those of devices that just join were cleared when these were labelled."""
        known = {(former.rows[place >> 24].device_id, place & 0xFFFFFF) for place in former.places}
        for segment, place in enumerate(wanted.places):
            device_id = wanted.rows[place >> 24].device_id
            if former.index_of(device_id) is not None and (device_id, place & 0xFFFFFF) not in known:
                check()
                self._check_settled([device_id])
                await clear_place(devices[device_id], wanted.place(segment).offset, wanted.head_size)

    async def adopt(self, name: MapName) -> None:
        async with self._turn:
            await self._adopt(name)

    async def _adopt(self, name: MapName) -> None:
        assert self._prepared.map.name == name
        left = [device for device_id, device in self._set.devices.items() if device_id not in self._prepared.devices]
        self.expect(name)
        await self._relabel(left, self._prepared.in_order() if self.map.number == 0 else [])
        self._use(self._prepared)

    async def _relabel(self, left: list[SetDevice], others: list[SetDevice]) -> None:
        """Say on devices that they have left, and on others that there is a map. One that does not answer stays as it
        is: nothing depends on it but messages, and programs of before."""
        for device in [*left, *others]:
            expected = device.expected
            page = pack_label(Label(expected.volume_id, expected.device_id, has_left=device in left))
            try:
                await device.run(partial(write_page, offset=0, image=page))
            except EngineError as error:
                log.warning("the label of %s stays as it was: %s", expected.title, error)

    async def take_back(self) -> None:
        """Drop a map that is newer than the one that counts: who stored it was killed before it was named."""
        for device in self._set.in_order():
            maps = await device.run(lambda fd: finding.read_maps(fd, finding.read_label(fd)))
            for name in maps:
                if name.number > self.map.number:
                    log.warning("%s: a change of the volume's devices that did not end is taken back", device.path)
                    await device.run(partial(write_page, offset=area_of(name.number), image=b""))

    async def move(self, segment: int, check: Callable[[], None], commit: Commit) -> None:
        async with self._names_lock:  # nobody makes the segment meanwhile
            known = await self._find(segment)
            if known is None:
                with trio.CancelScope(shield=True):  # else it might be made at the former place after all
                    async with self._turn:
                        await self._conclude(await self._prepare(self.map.moved(segment), check), commit)
                return
        async with self._turn:
            wanted = self.map.moved(segment)
            place = wanted.place(segment)
            target = self._set.devices[wanted.rows[place.device].device_id]
            move = SegmentMove(known, self._set.at(segment), (target, place.offset), check)
            await move.copy()
            async with move.stopped(wanted.volume_id, segment):
                await self._conclude(await self._prepare(wanted, check, is_copied=True), commit)

    async def _conclude(self, name: MapName, commit: Commit) -> None:
        await commit(name)
        await self._adopt(name)
