"""One host reads a large file's slot from the segments for all that load the file at the same time.

Which one that is follows from the slot's address and the hosts that answer, so each of them knows it without asking
(rendezvous hashing), and each reads an equal share. A host that is asked for bytes that it does not have yet reads
them, and keeps them for a moment: for hosts that ask meanwhile, and for its own readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import trio

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.inodes.core import Core

MEMORY_MAX = 128 << 20
"""Bytes that are kept for others, or under way."""
KEPT_SECONDS = 10.0
"""A slot may be written in place meanwhile; what others got then does not match, and they read it themselves."""

Key = tuple[int, int, int, int]
"""address and generation of a slot, where the bytes begin and end in it"""


@dataclass(eq=False)
class _Feed:
    """Bytes of a slot."""

    data: memoryview
    until: float
    done: trio.Event = field(default_factory=trio.Event)
    error: EngineError | None = None


class Feeding:
    """Of one membership. Event loop only."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.size = 0
        """bytes that are kept, or under way"""
        self.under_way = 0
        """bytes, of these"""
        self.given = 0
        """bytes that were read once and given again"""
        self._feeds: dict[Key, _Feed] = {}
        """the oldest first"""

    def may_read(self, key: Key) -> bool:
        """For another host: the bytes are here, or there is room for them."""
        return key in self._feeds or self.under_way + key[3] - key[2] <= MEMORY_MAX

    def has(self, key: Key) -> bool:
        """The bytes are here, or under way: to get them takes no read."""
        feed = self._feeds.get(key)
        return feed is not None and trio.current_time() < feed.until

    async def read(self, key: Key) -> memoryview:
        """Bytes of a slot as the segments have them, verified by nobody. EngineError; ValueError: no such segment."""
        feed = self._feeds.get(key)
        if feed is not None and trio.current_time() < feed.until:
            await feed.done.wait()
            if feed.error is not None:
                raise feed.error
            self.given += len(feed.data)
            return feed.data
        return await self._read(key)

    async def _read(self, key: Key) -> memoryview:
        addr, _, low, high = key
        self._drop(key)
        feed = self._feeds[key] = _Feed(np.empty(high - low, np.uint8).data, trio.current_time() + KEPT_SECONDS)
        self.size += high - low
        self.under_way += high - low
        self.make_room()
        try:
            with trio.CancelScope(shield=True):  # others may wait for it; the engine has a deadline
                reads = self.core.reads
                with reads.reading(), reads.speeds.remote.reading(high - low):
                    await self.core.segments.read([Transfer(*self.core.locate(addr + low), feed.data)])
        except Exception as error:
            feed.error = error if isinstance(error, EngineError) else EngineError(str(error))
            raise
        finally:
            self.under_way -= high - low
            feed.done.set()
            if feed.error is not None and self._feeds.get(key) is feed:
                self._drop(key)
        return feed.data

    def make_room(self) -> None:
        """Give up the oldest, and those whose time is over. What is under way stays."""
        now = trio.current_time()
        for key, feed in list(self._feeds.items()):
            if self.size <= MEMORY_MAX and now < feed.until:
                break
            if feed.done.is_set():
                self._drop(key)

    def _drop(self, key: Key) -> None:
        if (feed := self._feeds.pop(key, None)) is not None:
            self.size -= len(feed.data)


def feeder_of(addr: int, clients: Iterable[int]) -> int:
    """Which of the hosts reads a slot for all; the same one everywhere, whatever the order. There is one at least."""
    return max(clients, key=lambda client: (_mixed(addr, client), client))


def _mixed(addr: int, client: int) -> int:
    """A number of 64 bits that looks random (splitmix64's steps)."""
    value = (addr * 0x9E3779B97F4A7C15 ^ client * 0xD1B54A32D192ED03) & (1 << 64) - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return value ^ value >> 31
