"""What the index of a shared volume says of blocks (`BlockEngine` of one has it), and what this host tells the index.

A host puts blocks into slabs that it holds. What it writes there it puts into the index (``remote/index``): under a
block's fingerprint what `Core.hear` needs, its head and its slot. Another host asks for the names that it looks for,
and enters what is there as rows of the tables here, flagged `FOREIGN`: all that finds, reads and lists blocks does so
with these, too. Nobody else hears of a block.

An entry, and a row that was made of one, is a hint. Before bytes count that were read by it, the slot's head, read
behind them, has to be the same (`OtherSlabs.are_confirmed`). If it is another one, the block is absent, and the entry
goes.

Of two hosts that put a name, the later one has it: the index keeps the higher sequence. Whoever puts it gets what was
there, and writes a *letter* to the slab's holder (`BlockLetters`), who drops its block. A block that is removed here
while another host has it is *buried*: an expired block of that name takes its place, with a higher sequence, and the
rest is the same. A grave goes when its letters were answered.

What is kept of other hosts' blocks in memory, and is read, is asked for again, once a second.

A block in the bucket (`cold_entries`) has an entry, too. Nobody holds it: who puts a newer block of the name, or
removes it, replaces or drops its entry, and that is all.

A block that has left its slot, though the index never heard of it, may have hidden an older one, in the bucket or in a
slab of another host: so where blocks are gone, older ones go, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core
from kvfuse.remote.index.api import KEY_SIZE, BlockIndex, Entry
from kvfuse.volume.blocks.cold_names import ColdNames
from kvfuse.volume.cold.cold_entries import FLOOR_KEY, ColdEntry, decode, is_cold
from kvfuse.volume.views import clock

log = logging.getLogger(__name__)

ABSENT_SECONDS = 1.0
"""for which a relaxed namespace takes a name to be absent that was"""
ABSENT_MAX = 1 << 16
"""names of which that is known"""
LATE_MAX = 1 << 18
"""entries that wait for an index that does not answer; of more, the oldest are not told"""
AT_ONCE = 4096
"""entries of one call"""
WRITTEN_US = 60_000_000
"""age of a block that is written, most likely"""
NO_SLAB = 0xFFFFFFFF
PAUSE_SECONDS = 1.0
"""after a failure, before the index is asked again"""

Told = npt.NDArray[np.void]
Letters = dict[int, list[bytes]]
"""slab -> what is told to its holder"""


@dataclass
class IndexedBlocks:
    """Event loop only.

    ``is_own``: this host has a slab. ``open_tables``: gets heads before they count. ``write_letters``: sends what
    holders of slabs are to hear. ``drop_older``: drops a block of this host, if it is older than a sequence.
    """

    native: Core
    index: BlockIndex
    is_own: Callable[[int], bool]
    open_tables: Callable[[Sequence[bytes]], Awaitable[None]]
    write_letters: Callable[[Letters], None]
    drop_older: Callable[[bytes, int], None]
    cold: ColdNames = field(default_factory=ColdNames)
    published: int = 0
    """entries that were put"""
    asked: int = 0
    """names"""
    failure: EngineError | None = None
    """why the index does not have all that was written"""
    is_doubtful: trio.Event = field(default_factory=trio.Event)
    """set where it may lack entries of blocks that are here: it was away"""
    _late: dict[bytes, Entry] = field(default_factory=dict)
    """to be put, the oldest first"""
    _gone: list[tuple[bytes, int]] = field(default_factory=list)
    """to be dropped"""
    _doubted: list[tuple[bytes, int]] = field(default_factory=list)
    """likewise, unless the block is in the bucket by now"""
    _untold: int = 0
    """up to which sequence there may have been blocks of which the index is never told"""
    _absent: dict[bytes, float] = field(default_factory=dict)
    """key -> when it was not there"""
    _turn: trio.Lock = field(default_factory=trio.Lock)
    _quiet_until: float = -math.inf
    """the index did not answer just now"""

    # -- telling it ------------------------------------------------------------------------------------

    async def publish(self, told: bytes) -> None:
        """Put blocks that are written, as `Batch.told` has them. What cannot be put now is put later: see `failure`."""
        rows = np.frombuffer(told, forms.TOLD)
        for number, (key, sequence) in enumerate(zip(keys_of(rows), rows["sequence"].tolist(), strict=True)):
            value = told[number * forms.TOLD_SIZE : (number + 1) * forms.TOLD_SIZE]
            self._late.pop(key, None)
            self._late[key] = Entry(key, sequence, value)
            self._absent.pop(key, None)
        if self.failure is None:  # else writes would wait for an index that does not answer: see `keep_up`
            await self.catch_up()
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._late) > LATE_MAX:
            self._untold = max(self._untold, self._late.pop(next(iter(self._late))).sequence)

    def note_gone(self, gone: npt.NDArray[np.void]) -> None:
        """Slots of this host, whose blocks are no more, or have moved: `GONE`."""
        gone = gone[(gone["low"] != 0) | (gone["high"] != 0)]
        pairs = list(zip(keys_of(gone), gone["sequence"].tolist(), strict=True))
        self._drop_later([pair for pair in pairs if self.cold.kept.get(pair[0]) != pair[1]])
        for key, sequence in pairs:
            if self.cold.kept.get(key) == sequence:
                del self.cold.kept[key]

    def _drop_later(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        self._gone += pairs
        if self._gone[:-LATE_MAX]:
            self._untold = max(self._untold, *[sequence for _, sequence in self._gone[:-LATE_MAX]])
            del self._gone[:-LATE_MAX]

    def hide_cold(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        """Blocks in the bucket are dead up to a sequence: here at once, and elsewhere when the index knows it."""
        if self.cold.is_used:
            for key, sequence in pairs:
                self.cold.hide(key, sequence)
            self._drop_later(pairs)

    def forget_entries(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        """Entries with these sequences name nothing."""
        for key, _ in pairs:
            self.cold.forget(key)
        self._drop_later(pairs)

    async def catch_up(self) -> None:
        """Tell the index what it does not know. One after the other: so an entry that is put is dropped after that."""
        async with self._turn:
            try:
                if self._untold and self.cold.is_used:
                    await self.index.put([Entry(FLOOR_KEY, self._untold, b"floor")])
                    self._untold = 0
                while self._late:
                    await self._put(list(self._late.values())[:AT_ONCE])
                while self._gone:
                    await self._drop_gone()
                while self._doubted:
                    some = dict(self._doubted[:AT_ONCE])
                    found = await self.index.find(list(some)) if self.cold.is_used else []
                    in_bucket = {entry.key for entry in found if entry is not None and is_cold(entry)}
                    await self.index.drop([pair for pair in some.items() if pair[0] not in in_bucket])
                    del self._doubted[:AT_ONCE]
                self._came_back(is_back=self.failure is not None)
                self.failure = None
            except EngineError as error:
                if self.failure is None:
                    log.warning("the index of blocks does not answer, other hosts miss what is new here: %s", error)
                self.failure = error

    async def _drop_gone(self) -> None:
        """Drop some entries of blocks that are gone, and of older ones that they hid, untold. EngineError."""
        some: dict[bytes, int] = {}
        for key, sequence in self._gone[:AT_ONCE]:
            if key in some:  # two blocks of a name: the index may have either
                break
            some[key] = sequence
        batch, self._gone = self._gone[: len(some)], self._gone[len(some) :]
        dead, letters = dict(some), Letters()
        try:
            for entry in await self.index.find(list(some)):
                if entry is not None and entry.sequence < some[entry.key]:
                    dead[entry.key] = entry.sequence
                    head = self._head_of(entry)
                    if head is not None and not self.is_own(int(head["slab"])):
                        letters.setdefault(int(head["slab"]), []).append(_newer(head, some[entry.key]))
            await self.index.drop(list(dead.items()))
            if letters:
                self.write_letters(letters)
        except BaseException:
            self._gone[:0] = batch
            raise
        self.cold.told(batch)

    async def _put(self, entries: list[Entry]) -> None:
        former = await self.index.put(entries)
        letters: Letters = {}
        newer = []
        for entry, before in zip(entries, former, strict=True):
            if self._late.get(entry.key) is entry:
                del self._late[entry.key]
            head = self._head_of(before) if before is not None else None
            self.cold.forget(entry.key)
            if before is not None and is_cold(before) and before.sequence > entry.sequence:
                self.drop_older(entry.key, before.sequence)
            if before is None or head is None or self.is_own(int(head["slab"])):
                continue
            if before.sequence > entry.sequence:
                newer.append(before.value)
            else:
                letters.setdefault(int(head["slab"]), []).append(entry.value)
        self.published += len(entries)
        if letters:
            self.write_letters(letters)
        await self.hear(newer)

    def _came_back(self, *, is_back: bool) -> None:
        if is_back:  # it may have been started anew, without its entries
            self._quiet_until = -math.inf
            self.is_doubtful.set()

    async def find_lacking(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Of which of these blocks it has no entry, or an older one. Those that are older here go. EngineError."""
        own = dict(zip(keys_of(rows), rows["sequence"].tolist(), strict=True))
        found = [entry for entry in await self.index.find(list(own)) if entry is not None]
        known = {entry.key: entry.sequence for entry in found}
        newer = [entry for entry in found if entry.sequence > own[entry.key]]
        for entry in newer:
            if is_cold(entry) and entry.key not in self._late:
                self.drop_older(entry.key, entry.sequence)
        heads = [(entry, head) for entry in newer if (head := self._head_of(entry)) is not None]
        await self.hear([entry.value for entry, head in heads if not self.is_own(int(head["slab"]))])
        return np.array([known.get(key, -1) < own[key] for key in keys_of(rows)], np.bool_)

    async def find_replaced(self, tables: Sequence[bytes], loading: Collection[int]) -> dict[bytes, int]:
        """What the index has of blocks that heads describe, but in slabs that are being loaded: key -> sequence.

        EngineError.
        """
        found: dict[bytes, int] = {}
        for table in tables:
            heads = np.frombuffer(table, forms.HEAD, len(table) // forms.HEAD.itemsize)
            heads = heads[(heads["magic"] == forms.HEAD_MAGIC) & (heads["state"] == forms.BLOCK_HEAD)]
            keys = list(dict.fromkeys(keys_of(heads)))
            for start in range(0, len(keys), AT_ONCE):
                for entry in await self.index.find(keys[start : start + AT_ONCE]):
                    head = self._head_of(entry) if entry is not None else None
                    is_elsewhere = is_cold(entry) or (head is not None and int(head["slab"]) not in loading)
                    if entry is not None and is_elsewhere:
                        found[entry.key] = entry.sequence
        return found

    async def keep_up(self) -> None:
        """Tell the index by and by what is gone, and what it missed; for ever."""
        while True:
            await trio.sleep(PAUSE_SECONDS)
            if self._late or self._gone or self._doubted:
                await self.catch_up()

    # -- asking it -------------------------------------------------------------------------------------

    async def ask(self, keys: Sequence[bytes], *, is_strict: bool) -> dict[bytes, int]:
        """Enter what the index has of these fingerprints. key -> sequence, of those that it was asked for; 0: none.

        EngineError where it is strict; a relaxed call goes on with what is known.
        """
        now = trio.current_time()
        wanted = keys if is_strict else [key for key in keys if not self._is_known(key, now)]
        if not wanted or (not is_strict and now < self._quiet_until):
            return {}
        self.asked += len(wanted)
        try:
            found = await self.index.find([*dict.fromkeys(wanted), *self.cold.asked_beside])
            self.cold.take_floor(found)
            self._came_back(is_back=self._quiet_until > -math.inf)
        except EngineError as error:
            self._quiet_until = trio.current_time() + PAUSE_SECONDS
            if is_strict:
                raise
            log.warning("the index of blocks does not answer, so blocks of other hosts are absent: %s", error)
            return {}
        if len(self._absent) > ABSENT_MAX:
            self._absent.clear()
        answers: dict[bytes, int] = {}
        told = []
        for key, entry in zip(dict.fromkeys(wanted), found, strict=True):
            if entry is not None and is_cold(entry):
                answers[key] = 0
                self.cold.learn(entry, now)
                self.drop_older(key, entry.sequence)
                continue
            self.cold.forget(key)
            if entry is not None and (head := self._head_of(entry)) is not None:
                answers[key] = entry.sequence
                if not self.is_own(int(head["slab"])):
                    told.append(entry.value)
            else:
                answers[key] = 0
                self._absent[key] = now
        await self.hear(told)
        return answers

    def _is_known(self, key: bytes, now: float) -> bool:
        """What the index has of a key was known a moment ago: nothing, or a block in the bucket."""
        return self._absent.get(key, -math.inf) > now - ABSENT_SECONDS or self.cold.is_fresh(key, now)

    async def confirm(self, blocks: Sequence[ColdEntry]) -> list[ColdEntry]:
        """Those blocks in the bucket that the index still has as they are. EngineError."""
        keys = [one.key for one in blocks]
        asked, found = trio.current_time(), await self.index.find([*keys, *self.cold.asked_beside])
        self.cold.take_floor(found)
        for key, entry in zip(keys, found, strict=True):
            if entry is not None and is_cold(entry):
                self.cold.learn(entry, asked)
            else:
                self.cold.forget(key)
        return [one for one in blocks if self.cold.find(one.key, asked) == one]

    async def remove_cold(self, keys: Sequence[bytes]) -> list[ColdEntry]:
        """Have no block in the bucket of these keys, for good. Which there were. EngineError: some may be there."""
        removed: list[ColdEntry] = []
        left = list(dict.fromkeys(keys)) if self.cold.is_used else []
        while left:
            found = [entry for entry in await self.index.find(left) if entry is not None and is_cold(entry)]
            for entry in found:
                self.cold.forget(entry.key)
            await self.index.drop([(entry.key, entry.sequence) for entry in found])
            removed += [cold for entry in found if (cold := decode(entry)) is not None]
            left = [entry.key for entry in found]  # until none is there: one may have come meanwhile
        return removed

    async def hear(self, told: Sequence[bytes]) -> None:
        """Enter blocks of other hosts, in the place of older ones of this one."""
        if told:
            await self.open_tables([b"".join([one[: forms.HEAD.itemsize] for one in told])])
            for one in told:
                if not self.native.hear(one):  # its slab may be one of this host by now, and the block gone since
                    head = np.frombuffer(one, forms.HEAD, 1)[0]
                    self.drop_older(key_of(int(head["low"]), int(head["high"])), int(head["sequence"]))

    def distrust(self, rows: npt.NDArray[np.void]) -> None:
        """Heads say something else than rows of other hosts' blocks: entries of these go, but for those of blocks that
        may not be written yet."""
        old = rows[rows["sequence"] < np.uint64(max(0, clock.now() // 1000 - WRITTEN_US))]
        self._doubted += zip(keys_of(old), old["sequence"].tolist(), strict=True)
        del self._doubted[:-LATE_MAX]

    @staticmethod
    def _head_of(entry: Entry) -> np.void | None:
        """What an entry tells. None: that is no block of its key."""
        if len(entry.value) != forms.TOLD_SIZE:
            return None
        head: np.void = np.frombuffer(entry.value, forms.TOLD)[0]
        if crc32c(entry.value[: forms.HEAD.itemsize - 4]) != int(head["crc"]):
            return None
        is_same = key_of(int(head["low"]), int(head["high"])) == entry.key and int(head["sequence"]) == entry.sequence
        return head if is_same else None

    def statistics(self) -> dict[str, int]:
        return {
            "index_published": self.published,
            "index_asked": self.asked,
            "index_waiting": len(self._late) + len(self._gone) + len(self._doubted),
        }


def _newer(head: np.void, sequence: int) -> bytes:
    """What is told to the holder of an older block: there was one with this sequence, which is in no slab."""
    told = np.array([head], forms.TOLD)
    told["sequence"], told["slab"] = sequence, NO_SLAB
    data = bytearray(told.tobytes())
    data[forms.HEAD.itemsize - 4 : forms.HEAD.itemsize] = crc32c(data[: forms.HEAD.itemsize - 4]).to_bytes(4, "little")
    return bytes(data)


def key_of(low: int, high: int) -> bytes:
    """The key of a fingerprint."""
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")


def keys_of(rows: npt.NDArray[np.void]) -> list[bytes]:
    """The keys of rows, heads, or whatever has a fingerprint."""
    return split_keys(np.stack([rows["low"], rows["high"]], axis=1))


def split_keys(halves: npt.NDArray[np.uint64]) -> list[bytes]:
    """The keys of fingerprints, by the halves of each."""
    pairs = halves.astype("<u8").tobytes()
    return [pairs[start : start + KEY_SIZE] for start in range(0, len(pairs), KEY_SIZE)]
