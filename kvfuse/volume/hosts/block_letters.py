"""Letters between hosts: a block that one stored, or removed, took the name of a block in a slab of another one.

A letter is a record (``b``) of the slab's holder, the slab, the sender and a serial number; it has what `Core.hear`
needs of the newer blocks. A host watches the letters to itself alone. It drops its own blocks, has that written, and
deletes the letter. The sender looks now and then whether it is still there: so it knows. There is one where a name is
put, or removed, that another host has: KV caches, whose names are their content's, have next to none.

A letter is put if the slab's record still names that holder. Whoever takes the slab later reads all letters there are,
so it finds those to a holder that is gone; where the sender is alive, it sends them to the new one itself.
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
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

log = logging.getLogger(__name__)

BLOCKS_MAX = 256
"""of one letter"""
RETRY_SECONDS = 0.5
LOOK_MIN, LOOK_MAX = 0.5, 8.0
"""seconds between two looks at letters that are not answered: more and more"""
LOOKED_AT_ONCE = 256
ATTEMPTS_MAX = 8
"""to send one letter: the slab had another holder each time"""


@dataclass
class _Letter:
    slab: int
    serial: int
    value: bytes
    key: bytes | None = None
    """under which it is in the records, or may be"""
    is_sent: bool = False


@dataclass
class BlockLetters:
    """Of one membership. Event loop only.

    ``is_own``: this host has a slab with blocks. ``hear``: takes what a letter says, and returns when that is durable.
    EngineError.
    """

    records: RecordStore
    client: int
    view: SlabView
    is_own: Callable[[int], bool]
    hear: Callable[[Sequence[bytes]], Awaitable[None]]
    sent: int = 0
    heard: int = 0
    _open: dict[int, _Letter] = field(default_factory=dict)
    """letters of this host that are not answered, by their numbers"""
    _coming: dict[bytes, bytes] = field(default_factory=dict)
    """letters of others"""
    _has_new_slabs: bool = False
    _work: trio.Event = field(default_factory=trio.Event)
    _has_open: trio.Event = field(default_factory=trio.Event)
    _turn: trio.Lock = field(default_factory=trio.Lock)

    def write(self, letters: Mapping[int, Sequence[bytes]]) -> None:
        """Send what holders of slabs are to hear: soon, and until it was sent."""
        for slab, told in letters.items():
            for start in range(0, len(told), BLOCKS_MAX):
                serial = int.from_bytes(os.urandom(8), "little")
                self._open[serial] = _Letter(slab, serial, b"".join(told[start : start + BLOCKS_MAX]))
        self._work.set()
        self._has_open.set()

    @property
    def are_answered(self) -> bool:
        """All letters of this host are."""
        return not self._open

    async def unanswered(self) -> list[bytes]:
        """What all letters say that are in the records, whomever they are to. EngineError."""
        found: list[bytes] = []
        async for rows, _ in ScanPages(self.records, schema.LETTER_PREFIX):
            for row in rows:
                found += [row.value[at : at + forms.TOLD_SIZE] for at in range(0, len(row.value), forms.TOLD_SIZE)]
        return found

    def look_again(self) -> None:
        """Slabs have come: letters to those that had them are for this host."""
        self._has_new_slabs = True
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._look_always)
            while True:
                await self._work.wait()
                self._work = trio.Event()
                try:
                    await self.send()
                    if self._has_new_slabs:
                        self._has_new_slabs = False
                        await self._read(schema.LETTER_PREFIX)
                    await self._answer()
                except EngineError as error:
                    log.info("letters about blocks wait: %s", error)
                    self._has_new_slabs = True
                    await trio.sleep(RETRY_SECONDS)
                    self._work.set()

    # -- sending ---------------------------------------------------------------------------------------

    async def send(self) -> None:
        """Return when what was written is in the records, where it stays until it is answered. EngineError."""
        async with self._turn:
            for letter in [letter for letter in self._open.values() if not letter.is_sent]:
                await self._send(letter)

    async def _send(self, letter: _Letter) -> None:
        """Put a letter to who holds its slab, in the place of one to who held it."""
        slab, holder_key = letter.slab, schema.holder_key(letter.slab)
        for _ in range(ATTEMPTS_MAX):
            seen = self.view.seen(slab)
            key = schema.letter_key(seen.holder.client, slab, self.client, letter.serial)
            former, letter.key = {letter.key or key} - {key}, key
            if await self.records.commit({key: letter.value}, former, {holder_key: seen.version}):
                letter.is_sent = True
                self.sent += 1
                return
            letter.key = next(iter(former), None)
            await self.view.refresh([holder_key])
        raise EngineError(f"who holds slab {slab} is not known: the letter about its blocks waits")

    async def _look_always(self) -> None:
        """Look which letters were answered, and send those anew whose slabs have other holders."""
        pause = LOOK_MIN
        while True:
            await self._has_open.wait()
            await trio.sleep(pause)
            before = len(self._open)
            try:
                await self._look()
            except EngineError as error:
                log.info("whether letters about blocks were answered is asked again: %s", error)
            if not self._open:
                self._has_open = trio.Event()
            pause = LOOK_MIN if len(self._open) < before else min(2 * pause, LOOK_MAX)

    async def _look(self) -> None:
        sent = [(letter, letter.key) for letter in self._open.values() if letter.is_sent and letter.key is not None]
        for start in range(0, len(sent), LOOKED_AT_ONCE):
            some = sent[start : start + LOOKED_AT_ONCE]
            rows = await self.records.get([key for _, key in some])
            for (letter, key), row in zip(some, rows, strict=True):
                if row is not None and not await self._is_lent_now(letter.slab):
                    await self.records.commit({}, [key])
                    row = None
                if row is None:
                    self._open.pop(letter.serial, None)
                elif schema.split_letter_key(key)[0] != self.view.seen(letter.slab).holder.client:
                    letter.is_sent = False
                    self._work.set()

    async def _is_lent_now(self, slab: int) -> bool:
        """What this host has heard of slabs may be older than the letter."""
        if slab in self.view.lent:
            return True
        (found,) = await self.records.get([schema.slab_key(slab)])
        return found is not None and schema.decode_slab(found.value)[0] == LENT

    # -- hearing ---------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """Take letters to this host, and delete those to holders of slabs that have no blocks."""
        done = []
        for key, value in list(self._coming.items()):
            slab = schema.split_letter_key(key)[1]
            if self.is_own(slab):
                await self.hear([value[at : at + forms.TOLD_SIZE] for at in range(0, len(value), forms.TOLD_SIZE)])
                self.heard += 1
                done.append(key)
            elif not await self._is_lent_now(slab):
                done.append(key)
            elif schema.split_letter_key(key)[0] != self.client:
                del self._coming[key]
        for key in done:
            await self.records.commit({}, [key])
            self._coming.pop(key, None)

    async def _follow(self) -> None:
        while True:
            try:
                own = schema.letter_prefix(self.client)
                changes = self.records.watch(own)
                self._coming.clear()
                await self._read(own)
                async for change in changes:
                    if change.value is None:
                        self._coming.pop(change.key, None)
                    else:
                        self._take(change)
            except EngineError as error:
                log.info("the watch of letters about blocks broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    async def _read(self, prefix: bytes) -> None:
        async for rows, _ in ScanPages(self.records, prefix):
            for row in rows:
                self._take(Change(*row))

    def _take(self, change: Change) -> None:
        if change.value is not None:
            self._coming[change.key] = change.value
            self._work.set()

    def statistics(self) -> dict[str, int]:
        return {"letters_sent": self.sent, "letters_heard": self.heard, "letters_unanswered": len(self._open)}
