"""Empties the last segments of a volume that hosts share, while they use it, and removes them.

The superblock's record says how far (`Superblock.target`), and every host follows it. Each does its part, whatever
others do meanwhile, and is killed, or hears late:

* *Every host* puts nothing into slabs that are given up from the step in which it hears of the target
  (`Core.take_superblock`): it takes no free one, and gives back those that it has. Blocks there are dropped by the host
  that has them. Slabs of nobody, and of hosts that are gone, are taken by others as ever, so that what files give up
  there is freed (`SlabSupply.take_going`).
* *One host* moves the files: the one whose record `DRAINER` is there. It goes with that host's lease, and another host
  is next. A file that another one changes meanwhile is put together as ever, and looked at again in the next round.
* *The same host ends it*, once all slabs that are given up are empty, and of nobody: the superblock has the smaller
  capacity, then the segments are removed, then the target.

Why they stay empty until then: whoever takes a slab expects the superblock that it knows, so that who has not heard of
the target takes none; and, of one that is given up, the image that it knows, which has slots (`HeldSlabs`). The host
reads who holds them, then their images, then who holds them again: nobody held one meanwhile, and from the second read
on none has slots that anybody could take it for. Who holds a slab and has not heard still holds it, and is awaited.
A superblock that changed since that read is left as it is.

What each await may interleave with:

* *Reads of records*: everything. Only the superblock is changed by what they said, and only if it is the same one.
* *Moving a file*: changes by callers and other hosts, as of any file that a caller writes.
* *Removing segments*: nobody makes one there, as growth is refused while there is a target, and one host at a time
  does this (`SoleChanger`). Hosts that have not heard read zeros there, which match no checksum, and look again
  (`NotedSegments`); that is why it begins a grace later. A segment whose place is used again is another one to all
  hosts (`SegmentStore.recheck`).
* *A kill* leaves the target, or the smaller capacity with the target: whoever is next goes on there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError, InvalidArgument
from kvfuse.remote.records.api import ABSENT
from kvfuse.slab.layout import FEATURE_SHRINKS, Superblock, parse_superblock
from kvfuse.volume.blocks import draining
from kvfuse.volume.blocks.draining import Drain
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.sole_changer import SoleChanger
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member, describe
from kvfuse.volume.store.schema import NOBODY
from kvfuse.volume.store.sealed import ScanPages

SETTLE_SECONDS = 5.0
"""before files are moved: hosts take slabs meanwhile for those that they gave up, and have room for changes that meet a
move"""


@dataclass(kw_only=True)
class SharedDrain(Drain):
    """One per membership of a shared volume. Event loop only."""

    leases: SlabLeases
    member: Member
    changer: SoleChanger
    _moves_from: float = math.inf
    _elsewhere: str = ""
    """why the host that moves files does not move all"""

    def __post_init__(self) -> None:
        self.core.before_shrinking = self._announce

    @property
    def left(self) -> int:
        """Of all hosts, as far as this one has heard."""
        return len(self.leases.view.going())

    def statistics(self) -> dict[str, object]:
        found = super().statistics()
        return {**found, "failure": self.failure or self._elsewhere}

    # -- before ----------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Say in the superblock that the volume gets smaller. InvalidArgument: a host's program knows nothing of that.

        One that joins later reads the superblock after that. EngineError.
        """
        await self._check_members()
        await self.core.add_feature(FEATURE_SHRINKS)
        await self._check_members()

    async def _check_members(self) -> None:
        async for rows, damaged in ScanPages(self.core.records, schema.MEMBER_PREFIX):
            for said in [schema.decode_member(row.value) for row in rows]:
                if not said.features & FEATURE_SHRINKS:
                    raise InvalidArgument(f"{describe(said)} knows nothing of volumes that get smaller: upgrade it")
            if damaged:
                raise InvalidArgument("the record of a host is damaged: 'kvfuse fsck --repair' mends it")

    # -- one round -------------------------------------------------------------------------------------

    async def _step(self, kept: int) -> bool:
        await self._drop_blocks(kept)
        is_mover = await self._is_mover()
        self._moves_from = min(self._moves_from, trio.current_time() + SETTLE_SECONDS) if is_mover else math.inf
        if is_mover and self._have_files(kept) and trio.current_time() >= self._moves_from:
            await self.rewriter.move_all(kept * self.core.geometry.slab_size)
        await self.journal.sync()
        self.leases.hurry()
        return is_mover and not self.leases.view.going() and await self._finish(kept)

    async def _is_mover(self) -> bool:
        """This host moves the files, from now on if nobody else does. EngineError."""
        records, own = self.core.records, schema.encode_drainer(self.core.client, self.failure)
        (found,) = await records.get([schema.DRAINER])
        client, said = schema.decode_drainer(found.value) if found is not None else (NOBODY, "")
        if found is not None and client != self.core.client:
            self._elsewhere = said
            return False
        self._elsewhere = ""
        if found is not None and found.value == own:
            return True
        expect = {schema.DRAINER: found.version if found is not None else ABSENT}
        return bool(await records.commit({schema.DRAINER: own}, (), expect, lease=self.member.lease))

    def _have_files(self, kept: int) -> bool:
        view = self.leases.view
        return any(slab >= kept and slab not in view.lent for slab in view.uses)

    # -- the end ---------------------------------------------------------------------------------------

    async def _finish(self, kept: int) -> bool:
        """Give the volume its smaller capacity, and remove what it has no more. False: not all is empty."""
        seen = await self._find_empty(kept)
        if seen is None:
            return False

        def emptied(found: Superblock) -> Superblock:
            return found.emptied() if found.resizes == seen.resizes else found

        await self.core.change_superblock_by(emptied)
        async with self.changer.turn():
            await self.core.change_superblock_by(lambda found: found)  # as it is now
            now = self.core.superblock
            if now.target != seen.target or now.kept_slab_count != now.geometry.slab_count:
                return False
            await self.core.reads.passed()
            await trio.sleep(max(draining.GRACE_SECONDS, self.core.grace.seconds))
            await self._remove_segments()
        await self.core.records.commit({}, [schema.DRAINER])
        draining.log.warning("the volume has a capacity of %d bytes now", self.core.geometry.capacity)
        return True

    async def _find_empty(self, kept: int) -> Superblock | None:
        """The superblock with which all slabs from ``kept`` on are empty, and of nobody. EngineError."""
        (found,) = await self.core.records.get([schema.SUPERBLOCK])
        if found is None:
            raise EngineError("the volume has no superblock any more")
        seen = parse_superblock(found.value)
        holders = await self._versions(schema.holder_key, kept, lambda value: schema.decode_holder(value).client)
        if seen.kept_slab_count != kept or holders is None:
            return None
        if await self._versions(schema.slab_key, kept, lambda value: schema.decode_slab(value)[0]) is None:
            return None
        again = await self._versions(schema.holder_key, kept, lambda value: schema.decode_holder(value).client)
        return seen if again == holders else None

    async def _versions(
        self, key_of: Callable[[int], bytes], kept: int, is_used: Callable[[bytes], int]
    ) -> dict[bytes, int] | None:
        """Of records of slabs from ``kept`` on, by key. None: one is in use, or damaged."""
        versions: dict[bytes, int] = {}
        async for rows, damaged in ScanPages(self.core.records, key_of(0)[:1], after=key_of(kept - 1)):
            if damaged or any(is_used(row.value) for row in rows):
                return None
            versions.update([(row.key, row.version) for row in rows])
        return versions
