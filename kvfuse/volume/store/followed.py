"""The records of a shared volume that this host follows: of names and inodes only those that it has read.

A *topic* is what is followed together: the names in one directory, or an inode that has a record of its own, with a
directory's times. Memory has nothing of a topic that is not followed. So a topic is followed before the question is
sent whose answer memory keeps: no change is missed in between, however late its answer is. A read holds its topics
until it is answered. Only the answer may tell that an inode has a record of its own: then the question is asked again.

A topic goes out (`hosts.unfollowing`) when memory has nothing of it any more.

While the following is broken topics are added all the same. The next one has all of them from its beginning, and then
everything in memory is read anew (`hosts.coherence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from kvfuse.remote.records.api import Following, RecordStore, Versioned
from kvfuse.volume.store import schema

TOPIC_SIZE = 9
"""bytes of the key of a topic: a letter and an inode"""
NAMES, INODE = ord("d"), ord("i")


class Topic:
    """One that is followed."""

    __slots__ = ("pins", "read_until", "used_at")

    def __init__(self) -> None:
        self.pins = 0
        """reads of it under way"""
        self.used_at = 0.0
        """trio's time"""
        self.read_until = 0
        """changes up to this version may be older than an answer about the topic"""

    def use(self) -> None:
        self.used_at = trio.current_time()

    def pin(self) -> None:
        self.pins += 1

    def unpin(self, newest: int) -> None:
        """``newest``: version that answers have told of by now."""
        self.pins -= 1
        self.read_until = newest


class Followed:
    """Which topics are followed; one membership's reads own it. Nothing waits, but for `catch_up`. Event loop only."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._always: list[bytes] = []
        self.topics: dict[bytes, Topic] = {}
        """by the key that they begin with"""
        self.following: Following | None = None
        self._is_read = False
        """somebody has begun to read what the following hands over"""

    def always(self, prefixes: Iterable[bytes]) -> None:
        """Follow these for good."""
        for prefix in prefixes:
            self._always.append(prefix)
            self._open().add(prefix)

    def begin(self) -> Following:
        """For the reader: a following of all topics. Each but the first one lacks the changes before it."""
        if self._is_read:
            self.following = None
        self._is_read = True
        return self._open()

    def _open(self) -> Following:
        if self.following is None:
            self.following = self._records.follow()
            for prefix in [*self._always, *[prefix for key in self.topics for prefix in _prefixes(key)]]:
                self.following.add(prefix)
        return self.following

    @property
    def is_catching_up_dear(self) -> bool:
        return self._open().is_catching_up_dear

    async def catch_up(self) -> bool:
        """Return when the reader has taken all changes of what is followed that were committed before this call.

        False: it broke meanwhile. EngineError.
        """
        following = self._open()
        await following.catch_up()
        return following is self.following

    # -- topics ---------------------------------------------------------------------------------------

    def follow_names(self, directory: int) -> Topic:
        return self._follow(schema.entry_prefix(directory))

    def follow_inode(self, ino: int) -> Topic:
        """It has a record of its own, or is about to get one."""
        return self._follow(schema.inode_key(ino))

    def _follow(self, key: bytes) -> Topic:
        topic = self.topics.get(key)
        if topic is None:
            topic = self.topics[key] = Topic()
            for prefix in _prefixes(key):
                self._open().add(prefix)
        topic.use()
        return topic

    def leave(self, key: bytes) -> None:
        """Memory has nothing of the topic."""
        del self.topics[key]
        for prefix in _prefixes(key):
            self._open().remove(prefix)

    def is_new(self, key: bytes, version: int) -> bool:
        """A change of this record is newer than each answer about its topic so far."""
        topic = self.topics.get(key[:TOPIC_SIZE])
        return topic is not None and version > topic.read_until

    # -- reads ---------------------------------------------------------------------------------------

    def pin(self, keys: Iterable[bytes]) -> list[Topic]:
        """A read of these records is about to be sent. Returns the topics that it holds until `unpin`."""
        pinned = []
        for key in keys:
            if len(key) < TOPIC_SIZE:
                continue
            if key[0] == NAMES:
                topic = self._follow(key[:TOPIC_SIZE])
            elif key[0] == INODE and key in self.topics:
                topic = self._follow(key)
            else:
                continue
            topic.pin()
            pinned.append(topic)
        return pinned

    def pin_found(self, keys: Sequence[bytes], rows: Sequence[Versioned | None], pinned: list[Topic]) -> bool:
        """Follow inodes whose own records were found. True: some were not followed: the answer may be out of date."""
        found = [key for key, row in zip(keys, rows, strict=True) if row is not None and key[0] == INODE]
        missed = [key for key in found if key not in self.topics]
        for key in missed:
            topic = self._follow(key)
            topic.pin()
            pinned.append(topic)
        return bool(missed)

    def unpin(self, pinned: Iterable[Topic]) -> None:
        """The read was answered, or failed."""
        newest = self.following.newest() if self.following is not None else 0
        for topic in pinned:
            topic.unpin(newest)


def _prefixes(key: bytes) -> tuple[bytes, ...]:
    """What is followed of a topic. The times of a file are none."""
    return (key,) if key[0] == NAMES else (key, b"t" + key[1:])
