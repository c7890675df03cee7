"""Devices join and leave a volume, and segments move between them: each change is one map, which the superblock names.

A step of a change is one of three: devices get the next map, the superblock names it, this host uses it. Who is killed
in between leaves the map that the superblock names; the next one that has the volume alone takes back what was not
named. What a killed program sent may still reach the records: so each change first has the superblock be another one,
which a late commit does not expect.

On a shared volume one client at a time changes the devices (`SoleChanger`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import trio

from kvfuse.errors import EngineError, InvalidArgument, VolumeError
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import DeviceControl, Plan, SegmentStore
from kvfuse.remote.segments.block.segment_map import MapName, SegmentMap
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.inodes.core import invalid_if_impossible
from kvfuse.volume.inodes.sole_changer import SoleChanger
from kvfuse.volume.store.member import Member

RETRY_SECONDS = 0.5
Change = Callable[[Superblock], Superblock]

log = logging.getLogger(__name__)


class DeviceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command asks for: one of the first three."""

    add: str = ""
    """path of a device that was labelled to join"""
    remove: str = ""
    """identity of a device, in hexadecimal digits"""
    keep: str = ""
    """that was to leave"""
    weight: int = 0
    """of one to be added; 0: as it has room"""
    domain: str = ""
    capacity: int | None = None
    """bytes that the volume is to have then; None: more, by its places"""


class DeviceFacts(msgspec.Struct, frozen=True):
    """A device, for commands."""

    device: str
    path: str
    domain: str
    weight: int
    places: int
    segments: int
    leaving: bool


class SetFacts(msgspec.Struct, frozen=True):
    """The devices of a volume, for commands."""

    volume: str
    segment_size: int
    head_size: int
    devices: tuple[DeviceFacts, ...]


class ResizedVolume(Protocol):
    """What changes of devices need of a volume: the `Core` of one that is open, or less."""

    @property
    def superblock(self) -> Superblock: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def records(self) -> RecordStore: ...

    @property
    def segments(self) -> SegmentStore: ...

    @property
    def resized(self) -> trio.Event: ...

    async def change_superblock_by(self, change: Change) -> None: ...

    def resized_superblock(
        self, found: Superblock, capacity: int, freeing: int, room: int | None = None
    ) -> Superblock: ...

    async def rebound(self) -> None: ...


@dataclass
class DeviceChanges:
    """One per membership of a volume on devices. Event loop only.

    ``member``: this client, on a shared volume; ``is_alone``: no other client has the volume, or comes to have it.
    """

    core: ResizedVolume
    devices: DeviceControl
    member: Member | None
    is_alone: bool
    _is_settled: bool = False
    """the outcome of every change of this client is known, and nobody else makes any"""

    def __post_init__(self) -> None:
        def quarantine() -> float:
            return self.core.segments.limits.quarantine

        member = None if self.is_alone else self.member
        self.changer = SoleChanger(lambda: self.core.records, quarantine, member)

    def describe(self) -> bytes:
        """`SetFacts` in JSON."""
        made = self.devices.map
        counts = Counter(place >> 24 for place in made.places)
        rows = [
            DeviceFacts(
                row.device_id.hex(), row.path, row.domain, row.weight, row.places, counts[index], row.is_leaving
            )
            for index, row in enumerate(made.rows)
        ]
        return msgspec.json.encode(SetFacts(made.volume_id.hex(), made.segment_size, made.head_size, tuple(rows)))

    # -- what is asked for -----------------------------------------------------------------------------

    async def change(self, request: bytes, freeing: int = 0) -> None:
        """What a command asks for. InvalidArgument, with the reason; EngineError, VolumeError."""
        try:
            wanted = msgspec.json.decode(request, type=DeviceRequest)
            device_id = bytes.fromhex(wanted.remove or wanted.keep)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidArgument(f"{request!r} is no change of devices: {error}") from None
        if wanted.add:
            await self.add(Path(wanted.add), wanted.weight, wanted.domain, wanted.capacity, freeing)
        elif wanted.remove:
            await self.remove(device_id, freeing)
        else:
            await self.keep(device_id)

    async def resize(self, capacity: int, freeing: int = 0) -> None:
        """As `Core.resize`."""
        await self._grow(capacity, freeing)

    async def add(self, path: Path, weight: int, domain: str, capacity: int | None, freeing: int = 0) -> None:
        """Have a device more, that was labelled to join, and use its places; ``capacity``: as `Core.resize`.

        InvalidArgument, with the reason; EngineError.
        """
        try:
            row = await self.devices.examine(path, weight, domain)
        except VolumeError as error:
            raise InvalidArgument(str(error)) from None
        await self._grow(capacity, freeing, lambda made: made.joined(row), row.places)

    async def keep(self, device_id: bytes) -> None:
        """Have a device stay that was about to leave. InvalidArgument, EngineError."""
        with invalid_if_impossible():
            await self._change(
                lambda made: made.leaving(device_id, is_leaving=False),
                lambda found: found.resized(found.geometry.capacity),
            )

    async def remove(self, device_id: bytes, freeing: int = 0) -> None:
        """Have a device leave: `move_off` brings its segments to others. Where these have no places for all, the volume
        gets smaller first. InvalidArgument, with the reason; EngineError."""
        if not self.is_alone:
            raise InvalidArgument("devices leave a volume that hosts share while nobody has it mounted")

        def plan(made: SegmentMap) -> SegmentMap:
            return made.cut(self.core.geometry.segment_count).leaving(device_id)

        def change(found: Superblock) -> Superblock:
            room = plan(self.devices.map).room
            if found.kept_segment_count <= room:
                return found
            return self.core.resized_superblock(found, found.geometry.size_of(room), freeing)

        with invalid_if_impossible():
            await self._change(plan, change)

    async def _grow(
        self, capacity: int | None, freeing: int, join: Plan = lambda made: made, more: int = 0
    ) -> None:  # fmt: skip
        """``more``: places that join adds, all of which are used where no capacity is given."""

        def resized(found: Superblock) -> Superblock:
            room = join(self.devices.map).room
            count = min(more, room - found.geometry.segment_count)
            wanted = capacity if capacity is not None else found.geometry.size + max(count, 0) * found.geometry.step
            if capacity is None and count <= 0:
                return found
            return self.core.resized_superblock(found, wanted, freeing, room)

        def plan(made: SegmentMap) -> SegmentMap:
            made, count = join(made), resized(self.core.superblock).geometry.segment_count
            return made.extended(count) if count > len(made.places) else made

        with invalid_if_impossible():
            await self._change(plan, resized)
        await self.core.rebound()

    # -- one change ------------------------------------------------------------------------------------

    async def _change(self, plan: Plan, change: Change = lambda found: found) -> None:
        """ValueError of plan and change; EngineError: what will be is not known before the next change."""
        async with self.changer.turn():
            plan(self.devices.map)
            change(self.core.superblock)  # what cannot be is refused before anything is written
            await self._settle()
            change(self.core.superblock)
            former = self.devices.map.name
            name = await self.devices.prepare(plan, self._check)
            self._is_settled = False
            await self.core.change_superblock_by(partial(_named, name, former, change))
            await self.devices.adopt(name)
            self._is_settled = self.is_alone
            self.core.resized.set()  # who looked when the superblock changed did not see the new map yet

    def _check(self) -> None:
        """EngineError: this client's lease may end before a write that begins now."""
        if self.member is not None:
            self.member.check(self.core.segments.limits.deadline)

    async def _settle(self) -> None:
        """From now on no commit of before happens, and the map that the superblock names is in use. EngineError."""
        if not self._is_settled:
            await self.core.change_superblock_by(lambda found: found.mapped(found.segment_map))
            await self.devices.follow()
            self._is_settled = self.is_alone

    # -- moving ----------------------------------------------------------------------------------------

    @property
    def leaving_count(self) -> int:
        """Devices that are to leave."""
        return sum(row.is_leaving for row in self.devices.map.rows)

    @property
    def left_count(self) -> int:
        """Segments on devices that leave."""
        made = self.devices.map
        return sum(len(made.segments_of(index)) for index, row in enumerate(made.rows) if row.is_leaving)

    async def move_off(self) -> bool:
        """Move one segment from a device that leaves, or let go one that has none. False: no device leaves any more.

        EngineError; InvalidArgument: others have no places.
        """
        made = self.devices.map
        leaving = [(index, row) for index, row in enumerate(made.rows) if row.is_leaving]
        if not leaving:
            return False
        if len(made.places) > self.core.geometry.segment_count:
            await self._change(lambda made: made.cut(self.core.geometry.segment_count))
            return True
        index, row = leaving[0]
        segments = made.segments_of(index)
        with invalid_if_impossible():
            if segments:
                await self._move(segments[0])
            else:
                await self._change(lambda made: made.without(row.device_id))
                log.warning("%s has left the volume", row.title)
        return True

    async def _move(self, segment: int) -> None:
        async with self.changer.lock:
            await self._settle()
            former = self.devices.map.name

            async def commit(name: MapName) -> None:
                self._is_settled = False
                await self._commit_move(name, former)
                self._is_settled = True

            await self.devices.move(segment, self._check, commit)

    async def _commit_move(self, name: MapName, former: MapName) -> None:
        """Calls that use the segment wait meanwhile: nobody knows where it is before the outcome is known.

        EngineError: it is where it was.
        """
        is_stored, again = False, False

        def change(found: Superblock) -> Superblock:
            named = _named(name, former, lambda found: found, found)
            return found.mapped(name) if again and named is found else named  # what is there may not be durable

        while not is_stored:
            try:
                await self.core.change_superblock_by(change)
                is_stored = True
            except EngineError as error:
                log.warning("the superblock is not stored, calls of a segment wait: %s", error)
                if await self._is_refused(former):
                    raise
                self._check()
                again = True
                await trio.sleep(RETRY_SECONDS)

    async def _is_refused(self, former: MapName) -> bool:
        """The superblock in a folder names the former map, so what failed did not happen. A record may come late."""
        if self.member is not None:
            return False
        try:
            await self.core.change_superblock_by(lambda found: found)
        except (EngineError, VolumeError):
            return False
        return self.core.superblock.segment_map == former


def _named(name: MapName, former: MapName, change: Change, found: Superblock) -> Superblock:
    """The superblock that names a map, in the place of the former one. VolumeError: it has another one by now."""
    if found.segment_map == name:
        return change(found)
    if found.segment_map != former:
        raise VolumeError("the volume's devices were changed by another host meanwhile")
    return change(found).mapped(name)
