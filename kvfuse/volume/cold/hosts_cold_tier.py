"""The cold tier of one host of a shared volume: it stores objects, reads those of all hosts, and deletes the oldest.

Whether a block of an object counts only the index says: see `cold_entries`. So nothing that is lost here, late, or done
twice brings a block back, and every host may delete every object: its blocks are absent then.

*Capacity* is of all hosts together. A host lists the bucket, deletes the oldest objects until all are below `_limit`,
and puts no more than its part of what is above that, before it lists again.
A bucket that does not answer is not asked for a while: its blocks are absent until then.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError
from kvfuse.options.options import ColdBucketOptions
from kvfuse.remote.bucket import ABSENT, Bucket, Changed, NoObject, Range
from kvfuse.remote.index.api import BlockIndex
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_entries import ColdEntry
from kvfuse.volume.cold.cold_index import ColdGroup
from kvfuse.volume.cold.cold_tier import COUNTED, PAUSE_MAX, PAUSE_MIN, Breaker, runs_of
from kvfuse.volume.cold.host_objects import (
    HostObject,
    ObjectPlace,
    forget_blocks,
    list_objects,
    named_blocks,
    read_object_heads,
    remove_object,
)

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""between two objects that are looked at, whether the index names any block of them"""
LIST_SECONDS = 60.0
"""age of what is known of other hosts' objects, at most"""
SPARE_SHARE = 50
"""one part in so many of the capacity is what hosts may put before they list the bucket again, together"""
DELETED_TOGETHER = 8

_T = TypeVar("_T")


class SharedColdTier:
    """Event loop only.

    ``members``: clients that are alive. ``heir``: who sees to what a client left that is gone. ``is_valid``: blocks of
    a group may be served.
    """

    def __init__(
        self, options: ColdBucketOptions, volume_id: bytes, client: int, index: BlockIndex,
        is_valid: Callable[[ColdGroup], bool], members: Callable[[], Collection[int]], heir: Callable[[int], int],
    ) -> None:  # fmt: skip
        """``options``: with a prefix of the volume's own. ConfigError."""
        assert options.capacity is not None
        self.options = options
        self.capacity = options.capacity
        self.breaker = Breaker()
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self.is_loaded = False
        self.loaded = trio.Event()
        self.is_valid = is_valid
        self._index = index
        self._reader = Bucket(options, options.deadline, options.in_flight_max)
        self._writer = Bucket(options, options.put_deadline, 4)
        self._volume_id = volume_id
        self._client = client
        self._members = members
        self._heir = heir
        self._objects: dict[ObjectPlace, HostObject] = {}
        self._storing: set[ObjectPlace] = set()
        """that the index does not name yet"""
        self._last = 0
        self._budget = 0
        """bytes that may be put before the bucket is listed again"""
        self._listed_at = -LIST_SECONDS
        self._known_members: frozenset[int] = frozenset()
        self._turn = trio.Lock()

    @property
    def is_usable(self) -> bool:
        return not self.breaker.is_open

    @property
    def used(self) -> int:
        """Bytes of all hosts' objects, as far as they are known here."""
        return sum([one.size for one in self._objects.values()])

    async def _ask(self, call: Awaitable[_T]) -> _T:
        """Of the bucket. NoObject, Changed, EngineError."""
        try:
            answer = await call
        except (NoObject, Changed):
            self.breaker.answered()
            raise
        except EngineError as error:
            self.breaker.failed(error)
            raise
        self.breaker.answered()
        return answer

    # -- which objects there are ---------------------------------------------------------------------------

    async def load(self) -> None:
        """Know all objects; again and again, until the bucket answers."""
        pause = PAUSE_MIN
        while not self.is_loaded:
            try:
                await self._list()
            except EngineError:
                await trio.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX)
                continue
            self.is_loaded = True
            self.loaded.set()

    async def _list(self) -> None:
        began, members = self._next_number(), frozenset(self._members())
        asked = trio.current_time()
        listed = await self._ask(list_objects(self._writer))
        put_since = {place: one for place, one in self._objects.items() if place.number > began}
        known = {place: self._objects.get(place) or HostObject(place, size) for place, size in listed.items()}
        self._objects = {**known, **put_since}
        self._listed_at, self._known_members = asked, members

    def _next_number(self) -> int:
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return self._last

    async def keep_up(self) -> None:
        """Delete objects that the index names no block of, until cancelled."""
        await self.loaded.wait()
        while True:
            await trio.sleep(LOOK_SECONDS)
            try:
                if not self.breaker.is_open:
                    is_old = trio.current_time() > self._listed_at + LIST_SECONDS
                    if is_old or frozenset(self._members()) != self._known_members:
                        await self._list()
                    await self._look_at_next()
            except EngineError as error:
                log.info("cold objects are looked after later: %s", error)

    async def _look_at_next(self) -> None:
        """At the one of this host, or of a host that is gone, that was not looked at for longest."""
        own = [one for one in self._objects.values() if self._is_own(one.place) and one.place not in self._storing]
        if not own:
            return
        one = min(own, key=lambda one: (one.looked_at, one.place))
        one.looked_at = trio.current_time()
        try:
            heads = await self._ask(read_object_heads(self._writer, one.place, one.size, self._volume_id))
        except NoObject:
            self._objects.pop(one.place, None)
            return
        blocks = await named_blocks(self._index, one.place, heads) if heads is not None else []
        if dead := [block for block in blocks if not self.is_valid(block.group)]:
            await forget_blocks(self._index, dead)
        one.blocks = len(blocks) - len(dead)
        one.block_bytes = sum([block.length for block in blocks]) - sum([block.length for block in dead])
        if heads is None:
            log.warning("the cold object %s is damaged, or not of this volume: it is deleted", one.place.name)
        if not one.blocks:
            await self._remove(one)

    def _is_own(self, place: ObjectPlace) -> bool:
        members = self._members()
        return place.client == self._client or (
            place.client not in members and self._heir(place.client) == self._client
        )

    async def _remove(self, one: HostObject) -> None:
        await self._ask(remove_object(self._writer, self._index, one.place, one.size, self._volume_id))
        self._objects.pop(one.place, None)
        self.counters["removed_objects"] += 1

    @property
    def _limit(self) -> tuple[int, int]:
        """(bytes that there are at most after a look, bytes that this host may put until the next one)."""
        hosts = len(self._members()) + 1  # another one may have come
        spare = max(hosts * self.options.object_size, self.capacity // SPARE_SHARE)
        return self.capacity - spare, spare // hosts

    async def _make_room(self, size: int) -> bool:
        """Have room for an object, by the deletion of the oldest ones. False: there never is. EngineError."""
        limit, part = self._limit
        if size > part or limit < size:
            return False
        if self._budget < size:
            self._budget = 0
            await self._list()
            while self.used > limit:
                oldest = sorted(self._objects.values(), key=lambda one: one.place)[:DELETED_TOGETHER]
                for one in oldest:
                    if self.used > limit:
                        await self._remove(one)
            self._budget = part
        self._budget -= size
        return True

    # -- out -----------------------------------------------------------------------------------------------

    async def put(self, heads: npt.NDArray[np.void], data: memoryview) -> HostObject | None:
        """Store an object, of whose blocks the index is to be told then: see `named`. None: it is not stored.

        ``data``: of the whole object; the part before the blocks is filled here.
        """
        if not self.is_loaded or not self.is_usable:
            return None
        one = HostObject(ObjectPlace(self._next_number(), self._client), len(data))
        self._storing.add(one.place)
        try:
            async with self._turn:
                if not await self._make_room(one.size):
                    self._storing.discard(one.place)
                    return None
            layout.write_heads(data, self._volume_id, one.place.number, heads, one.size)
            await self._ask(self._writer.put(one.place.name, data, ABSENT, is_given=True))
        except EngineError as error:  # it may come late: then nothing names it
            self.counters["failed_puts"] += 1
            log.info("blocks are not stored in the bucket: %s", error)
            self._storing.discard(one.place)
            return None
        except BaseException:
            self._storing.discard(one.place)
            raise
        self._objects[one.place] = one
        self.counters["stored_objects"] += 1
        self.counters["stored_bytes"] += one.size
        return one

    @contextmanager
    def naming(self, one: HostObject) -> Iterator[None]:
        """While the index is told of the blocks of an object that was just put."""
        try:
            yield
        finally:
            self._storing.discard(one.place)
            self.counters["stored_blocks"] += one.blocks

    # -- bytes ---------------------------------------------------------------------------------------------

    async def read(self, blocks: Sequence[ColdEntry]) -> tuple[list[memoryview | None], list[ColdEntry]]:
        """(The bytes of blocks, unverified; None: they cannot be read now. Blocks whose object is gone)."""
        places = {(one.number, one.client): at for at, one in enumerate(blocks)}
        columns = [(places[one.number, one.client], one.place, one.length) for one in blocks]
        entries = np.array(columns, [(name, np.int64) for name in ("object", "place", "length")])
        found: list[memoryview | None] = [None] * len(blocks)
        gone: list[ColdEntry] = []
        async with trio.open_nursery() as nursery:
            for run in runs_of(entries):
                nursery.start_soon(self._read_run, [blocks[at] for at in run], run, found, gone)
        return found, gone

    async def _read_run(
        self, blocks: Sequence[ColdEntry], places: Sequence[int], found: list[memoryview | None], gone: list[ColdEntry]
    ) -> None:
        start = blocks[0].place * layout.STEP
        end = max([one.place * layout.STEP + one.length for one in blocks])
        target, place = memoryview(bytearray(end - start)), ObjectPlace(blocks[0].number, blocks[0].client)
        try:
            await self._ask(self._reader.read(place.name, [Range(start, target)]))
        except NoObject:
            gone += blocks
            return
        except EngineError:
            self.counters["failed_reads"] += 1
            return
        for at, one in zip(places, blocks, strict=True):
            offset = one.place * layout.STEP - start
            found[at] = target[offset : offset + one.length]
        self.counters["read_blocks"] += len(blocks)
        self.counters["read_bytes"] += end - start

    async def compare(self) -> list[str]:
        """Know what the bucket has. Nothing is wrong where an object is gone: any host deletes some. EngineError."""
        await self._list()
        return []

    def statistics(self) -> dict[str, Any]:
        own = [one for one in self._objects.values() if self._is_own(one.place)]
        return {
            **self.counters,
            "blocks": sum([one.blocks for one in own]),
            "block_bytes": sum([one.block_bytes for one in own]),
            "objects": len(self._objects),
            "used_bytes": self.used,
            "capacity": self.capacity,
            "is_loaded": self.is_loaded,
            "failure": self.breaker.reason,
        }
