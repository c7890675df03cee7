"""Letters between hosts: a block that one stored, or removed, took the name of a block in a slab of another one.

A letter is a record (``b``) of the slab's number, the sender and a serial number; it has what `Core.hear` needs of the
newer blocks. The holder of the slab drops its own, has that written, and deletes the letter; so who has sent it knows.
A slab that nobody holds has its letters read when it is adopted. There is one where a name is put, or removed, that
another host has: KV caches, whose names are their content's, have next to none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.slab.image import LENT
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

log = logging.getLogger(__name__)

BLOCKS_MAX = 256
"""of one letter"""
RETRY_SECONDS = 0.5


@dataclass
class BlockLetters:
    """Of one membership. Event loop only.

    ``is_own``, ``is_lent``: this host has a slab with blocks; some host has. ``hear``: takes what a letter says, and
    returns when that is durable. EngineError.
    """

    records: RecordStore
    client: int
    is_own: Callable[[int], bool]
    is_lent: Callable[[int], bool]
    hear: Callable[[Sequence[bytes]], Awaitable[None]]
    sent: int = 0
    heard: int = 0
    _unsent: dict[bytes, bytes] = field(default_factory=dict)
    _unanswered: set[bytes] = field(default_factory=set)
    """keys of letters of this host"""
    _coming: dict[bytes, bytes] = field(default_factory=dict)
    """letters of others"""
    _work: trio.Event = field(default_factory=trio.Event)
    _turn: trio.Lock = field(default_factory=trio.Lock)

    def write(self, letters: Mapping[int, Sequence[bytes]]) -> None:
        """Send what holders of slabs are to hear: soon, and until it was sent."""
        for slab, told in letters.items():
            for start in range(0, len(told), BLOCKS_MAX):
                key = schema.letter_key(slab, self.client, int.from_bytes(os.urandom(8), "little"))
                self._unsent[key] = b"".join(told[start : start + BLOCKS_MAX])
        self._work.set()

    @property
    def are_answered(self) -> bool:
        """All letters of this host are."""
        return not (self._unsent or self._unanswered)

    def look_again(self) -> None:
        """Slabs have come: letters to their holders are for this host."""
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            while True:
                await self._work.wait()
                self._work = trio.Event()
                try:
                    await self.send()
                    await self._answer()
                except EngineError as error:
                    log.info("letters about blocks wait: %s", error)
                    await trio.sleep(RETRY_SECONDS)
                    self._work.set()

    async def send(self) -> None:
        """Return when what was written is in the records, where it stays until it is answered. EngineError."""
        async with self._turn:
            while self._unsent:
                key, value = next(iter(self._unsent.items()))
                self._unanswered.add(key)
                await self.records.commit({key: value})
                del self._unsent[key]
                self.sent += 1

    async def _answer(self) -> None:
        """Take letters to this host, and delete those to holders of slabs that have no blocks."""
        done = []
        for key, value in list(self._coming.items()):
            slab = schema.key_slab(key)
            if self.is_own(slab):
                await self.hear([value[at : at + forms.TOLD_SIZE] for at in range(0, len(value), forms.TOLD_SIZE)])
                self.heard += 1
                done.append(key)
            elif not self.is_lent(slab) and not await self._is_lent_now(slab):
                done.append(key)
        for key in done:
            await self.records.commit({}, [key])
            self._coming.pop(key, None)

    async def _is_lent_now(self, slab: int) -> bool:
        """What this host has heard of slabs may be older than the letter."""
        (found,) = await self.records.get([schema.slab_key(slab)])
        return found is not None and schema.decode_slab(found.value)[0] == LENT

    async def _follow(self) -> None:
        while True:
            try:
                changes = self.records.watch(schema.LETTER_PREFIX)
                self._coming.clear()
                seen, sent = set(), self._unanswered - self._unsent.keys()
                async for rows, _ in ScanPages(self.records, schema.LETTER_PREFIX):
                    for row in rows:
                        seen.add(row.key)
                        self._take(Change(*row))
                self._unanswered -= sent - seen
                async for change in changes:
                    self._take(change)
            except EngineError as error:
                log.info("the watch of letters about blocks broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    def _take(self, change: Change) -> None:
        if change.value is None:
            self._coming.pop(change.key, None)
            self._unanswered.discard(change.key)
        else:
            self._coming[change.key] = change.value
            self._work.set()

    def statistics(self) -> dict[str, int]:
        return {"letters_sent": self.sent, "letters_heard": self.heard, "letters_unanswered": len(self._unanswered)}
