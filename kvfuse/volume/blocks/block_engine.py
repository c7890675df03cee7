"""The block store of one membership: blocks that are rows, never inodes (`kind=blocks`).

`BlockTables` has the rows, `BlockArenas` the memory, `BlockSlabs` the slots, `WriteBehind` brings blocks to the medium,
`BlockEviction` removes them where their room is wanted. The core in C does what happens for each block; what is here
decides for many, and waits where they have to wait. Of a volume that is mounted read-only it loads heads and reads
blocks, and writes nothing: what it would tell the medium stays in its queue.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors, failing
from kvfuse.checksum import crc32c
from kvfuse.kept.keeper import Keeper
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.native._blocks import Door, fingerprints
from kvfuse.slab.layout import FEATURE_COLD, FEATURE_LENT, FEATURE_PACKED
from kvfuse.volume.api import DIRECTORIES_MAX, FindAncestors, NameColumns, RowReaders, RowTerms
from kvfuse.volume.blocks.block_arenas import BlockArenas, HeldRow
from kvfuse.volume.blocks.block_eviction import BlockEviction
from kvfuse.volume.blocks.block_news import BlockNews
from kvfuse.volume.blocks.block_packer import BlockPacker
from kvfuse.volume.blocks.block_slabs import STATES, BlockSlabs, SlabStates
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables
from kvfuse.volume.blocks.cold_blocks import ColdBlocks
from kvfuse.volume.blocks.cold_names import ColdNames
from kvfuse.volume.blocks.indexed_blocks import IndexedBlocks, Letters, keys_of, split_keys
from kvfuse.volume.blocks.kernel_answers import KeptRows, KernelAnswers
from kvfuse.volume.blocks.other_slabs import OtherSlabs
from kvfuse.volume.blocks.room_requests import RoomRequests
from kvfuse.volume.blocks.shared_cold_blocks import SharedColdBlocks
from kvfuse.volume.blocks.shown_tables import FileDirectories, ShownTables
from kvfuse.volume.blocks.slot_reads import SlotReads, memory_at, slot_read
from kvfuse.volume.blocks.write_behind import WriteBehind
from kvfuse.volume.cold.cold_index import ColdGroup
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.measures.measures import SegmentsTier
from kvfuse.volume.measures.speeds import Tier, worth_reading
from kvfuse.volume.namespaces.accounts import UNBOUNDED
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.slots.space import RoomSource
from kvfuse.volume.views import clock
from kvfuse.volume.views.neighbours import LandsBlocks, Uses, WantedBlocks

if TYPE_CHECKING:
    from kvfuse.volume.cold.cold_tier import ColdTier
    from kvfuse.volume.cold.hosts_cold_tier import SharedColdTier

log = logging.getLogger(__name__)

DIRTY_SHARE = 0.5
"""of the memory: what may wait for the medium"""
SPARE_SHARE = 0.02
"""of the volume's slabs: those that the store has free, while there are free ones"""
SPARE_SLABS_MIN, SPARE_SLABS_MAX = 4, 64
ACTIVE_SECONDS, IDLE_SECONDS = 0.01, 0.5
"""between looks at spare memory, slabs and water marks, while blocks are put, and otherwise"""
SEQUENCE_LAG_US = 1000
"""by which sequences are behind the clock, so that a burst does not run ahead of it"""
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
"""of where a listing goes on: the place of a table above"""
LOOKS_AHEAD, AHEAD_SECONDS = 3, 1.0
"""how often, and for how long, memory may be made free for blocks that are brought ahead"""
SWEPT_AT_ONCE = 20_000
SHARED_PARTS = 16
"""one slab in so many is the most that the hosts of a shared volume have free ahead of need, together"""
NO_SLABS_SECONDS = 0.2
"""for which nobody is asked for slabs after there were none"""
HEAR_SECONDS = 0.02
"""from the first thing that C answers to when it is heard of, with all that came meanwhile"""
CLEARED_SECONDS = 0.75
"""between two looks whether namespaces were cleared: the watch may be late"""
LOOK_SECONDS, LOOKED_AT = 1.0, 1 << 15
"""between looks at blocks of other hosts that are known; rows that are looked at together"""
LOOKED_BESIDE = 256
"""of those that were not read lately, at one look"""
TOLD_AT_ONCE, TELL_SECONDS = 256, 0.5
"""rows whose entries are looked at together, and seconds in between;"""
TELL_SLOWLY_SECONDS = 8.0
"""where nothing seems to be missing"""
GRAVE_EXPIRES = 1
"""second in which a grave expired"""
ASK_SECONDS, PART_SECONDS = 1.0, 10.0
"""between two requests for a larger part of a quota, where blocks were adopted; and for how long that is tried"""
ROOM_SECONDS = 10.0
"""for which a put waits for room while some is being made"""

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Hosts:
    """What the block store asks of the other hosts of a shared volume."""

    ask: Callable[[int], bool]
    """has those that have more blocks give so many slabs; False: nobody does"""
    wait: RoomSource
    """waits for these slabs"""
    quotas: tuple[RoomSource, RoomSource]
    """what takes more of a quota, and what waits for other hosts"""
    write_letters: Callable[[Letters], None]
    """tells holders of slabs of newer blocks"""
    send_letters: Callable[[], Awaitable[None]]
    """returns when they hear of these even if this host is killed. EngineError"""
    are_letters_answered: Callable[[], bool]
    unanswered_letters: Callable[[], Awaitable[list[bytes]]]
    """what they say, whomever they are to. EngineError"""
    look_for_letters: Callable[[], None]
    """slabs have come"""
    look_at_namespaces: Callable[[], Awaitable[None]]
    """returns when namespaces are known as they are: see `settings_changed`. EngineError"""


@dataclass
class BlockEngine:
    """Event loop only, but where a docstring says otherwise.

    ``commit``, ``sync``: store what is pending in the records; and make it durable.
    """

    core: Core
    keeper: Keeper
    commit: Callable[[], Awaitable[None]]
    sync: Callable[[], Awaitable[None]]
    interval: float
    staging_size: int
    find_ancestors: FindAncestors
    lent_slabs: Callable[[], Mapping[int, bytes]] | None = None
    """of a volume that hosts share: token of each slab that is lent, as far as records are known"""

    def __post_init__(self) -> None:
        core, geometry = self.core, self.core.geometry
        volume_id = core.superblock.volume_id
        self._states = SlabStates(self.keeper, volume_id, geometry.slab_count)
        sizes = np.array(core.slabs.classes.sizes[: 256 - 64], np.uint32)
        self.native = NativeCore(
            self._states.address, geometry.slab_count, geometry.slab_size, geometry.head_size, sizes, self._states.room
        )
        self.native.hold(self._states.address, self._states.bytes)
        rows_max = geometry.data_size // forms.PAGE
        self.tables = BlockTables(
            self.native, core.tier.supply, self.keeper, volume_id, rows_max,
            when_entered=lambda directory: self.answers.take_back(directory),
        )  # fmt: skip
        self.arenas = BlockArenas(self.native, self.tables, core.tier, self.keeper, volume_id, self.staging_size)
        self.native.set_dirty_max(int(self.arenas.capacity * DIRTY_SHARE))
        announce = partial(core.add_feature, FEATURE_LENT)
        stores = core.make_segments, self.commit, announce
        self.slabs = BlockSlabs(self.native, geometry, core.slabs, core.segments, *stores)
        self.others: OtherSlabs | None = None
        """slabs of other hosts"""
        self.indexed: IndexedBlocks | None = None
        """what the index says of their blocks"""
        if self.lent_slabs is not None:
            self.slabs.more = self._take_more_slabs
            self.others = OtherSlabs(
                self.native, self.slabs.heads, self.lent_slabs, self._states.has, self._open_tables
            )
            core.slabs.lent_granted = self._slab_granted
        if self.others is not None and core.block_index is not None:
            self.indexed = IndexedBlocks(
                self.native, core.block_index, self.has_slab, self._open_tables, self._write_letters, self._drop_older,
                ColdNames(lambda: bool(core.superblock.features & FEATURE_COLD)),
            )  # fmt: skip
        self.reads = SlotReads(core, self.native)
        self.packer = BlockPacker(self.slabs)
        self.writer = WriteBehind(
            self.native, self.slabs, core.segments, core.doubt, self.interval, self.sync, self.packer, self.reads,
            self.indexed.publish if self.indexed is not None else None,
        )  # fmt: skip
        self.news = BlockNews(self.native, self.tables, core.namespaces.news)
        door = Door(self.native, self.tables.multipliers, 0.0, clock.TICK_MAX, 1000 * SEQUENCE_LAG_US)
        self.answers = KernelAnswers(door)
        core.namespaces.news.on_watch = self.answers.take_back
        self.eviction = BlockEviction(
            self.native, self.tables, core, self._states.slot_sizes, self.use, self.news, self.answers
        )
        self.cold: ColdBlocks | None = None
        self.shared_cold: SharedColdBlocks | None = None
        """the same, on a shared volume"""
        self._epochs: dict[int, int] = {}
        self._spaces: dict[int, int] = {}
        """namespace -> its place in the core"""
        self._work = trio.Event()
        self._room_requests = RoomRequests(self.make_room)
        self._above_part: dict[int, tuple[float, float]] = {}
        """namespace with more than this host's part of its quota -> since when, and when others were asked last"""
        self._has_looked = trio.Event()
        self._has_bell = trio.Event()
        self._has_loaded = trio.Event()
        self._more_to_load = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self.shown = ShownTables(self.tables, self.arenas, core.tier.validity, core.dentries, self.eviction)
        self.with_files: set[int] = FileDirectories(self.shown, self.answers)
        self.directories: dict[int, frozenset[bytes]] = {}
        """directory -> names in it that may mean directories; any thread may look"""
        self._replaced: dict[bytes, int] = {}
        """key -> sequence of blocks that are newer than those of slabs that are being loaded"""
        self._is_closing = False
        self._hosts: Hosts | None = None
        self._no_slabs_until = -1.0
        self.has_ended = False
        """its membership is over"""
        self.names_held: Counter[int] = Counter()
        """directory -> names in it of files that become blocks"""
        self._restore()
        core.namespaces.accounts.blocks = self

    def connect_cold(self, tier: ColdTier) -> None:
        """Have blocks go to a cold tier: once, before `run`."""
        self.cold = self.eviction.cold = ColdBlocks(self, tier, self.eviction.drop_leaving)
        self.shown.has_cold = tier.index.has_directory
        self.shown.on_lost = self.cold.bury_directory
        tier.on_directory = self.shown.cold_blocks_come
        self.writer.before_write = tier.sync_graves

    def connect_shared_cold(self, tier: SharedColdTier) -> None:
        """The same, on a volume that hosts share."""
        assert self.indexed is not None
        drop, client = self.eviction.drop_leaving, self.core.client
        self.shared_cold = SharedColdBlocks(self, tier, drop, indexed=self.indexed, client=client)
        self.cold = self.eviction.cold = self.shared_cold
        self.indexed.cold.is_served = True
        self.writer.before_take = self.shared_cold.decided
        for table in self.tables.all.values() if self._states.are_restored else ():
            self._undo_undecided(table, self.indexed.cold)

    def _undo_undecided(self, table: BlockTable, names: ColdNames) -> None:
        """Drop blocks that a killed daemon was about to bring back: their times are older than their sequences."""
        found = table.rows
        is_waiting = (found["version"] & np.uint64(1) == 1) & (found["flags"] & np.uint32(forms.DIRTY) != 0)
        age = found["sequence"].astype(np.int64) // 1_000_000 - found["stored"].astype(np.int64)
        for row in np.flatnonzero(is_waiting & (age > 1)).tolist():
            sequence = int(found["sequence"][row])
            names.kept[keys_of(found[row : row + 1])[0]] = sequence
            self.undo_put(table, row, sequence)

    def undo_put(self, table: BlockTable, row: int, sequence: int) -> None:
        """Drop a block that was put just now, if it is still the one of a row: the name means what it did before."""
        rows, sequences = np.array([row], np.int64), np.array([sequence], np.uint64)
        self.native.drop_rows(table.number, rows, sequences, np.zeros(1, np.int64))
        self.news.gone(table, rows, sequences)
        self.note_put()

    async def settle_gone(self) -> None:
        """Return when slots say, durably, that blocks are gone that left by now. EngineError."""
        await self.reads.drop_gone(self._note_gone)
        await self.writer.flush()

    def _drop_older(self, key: bytes, sequence: int) -> None:
        """Drop the block of a key that this host has, if it is older."""
        while (told := self.native.tell(*np.frombuffer(key, "<u8").tolist())) is not None:
            head = np.frombuffer(told, forms.TOLD)[0]
            found = self.native.row_at(int(head["slab"]), int(head["slot"]), int(head["sequence"]))
            table = self.tables.all.get(found[0]) if found is not None else None
            if head["sequence"] >= sequence or found is None or table is None:
                break
            self.undo_put(table, found[1], int(head["sequence"]))

    def meet(self, hosts: Hosts) -> None:
        """The other hosts of a shared volume: once, before `run`."""
        self._hosts = hosts

    def volume_resized(self) -> None:
        geometry = self.core.geometry
        self.native.set_slab_count(geometry.slab_count)
        self.tables.set_rows_max(geometry.data_size // forms.PAGE)
        self.wake()  # caches are not full any more

    async def keep_to(self, slab_count: int | None) -> None:
        """Put no block into slabs from this one on, drop those that are there, and give back what is empty of them.
        None: use all again. EngineError. Again and again, until the allocator has them all back."""
        self.native.keep_to(slab_count if slab_count is not None else self._states.room)
        if slab_count is None:
            return
        self.eviction.empty_slabs_from(slab_count)
        with trio.move_on_after(LOOK_SECONDS):
            await self.writer.flush()  # heads say free
        self.slabs.give_back(self.core.geometry.slab_count, slab_count)
        await self.commit()

    def has_slab(self, slab: int) -> bool:
        """This host has its blocks."""
        return slab < self.core.geometry.slab_count and self._states.has(slab)

    def _write_letters(self, letters: Letters) -> None:
        if self._hosts is not None:
            self._hosts.write_letters(letters)

    async def _send_letters(self) -> None:
        if self._hosts is not None:
            await self._hosts.send_letters()

    @property
    def _spare_slabs(self) -> int:
        """Slabs that are to be free here. All hosts hear of each that is lent: who has no blocks has one."""
        count = self.core.geometry.slab_count
        wanted = min(max(int(SPARE_SHARE * count), SPARE_SLABS_MIN), SPARE_SLABS_MAX)
        if self.others is None:
            return wanted
        figures, part = self.native.statistics(), count // (SHARED_PARTS * self.core.host_count())
        has_blocks = figures["puts"] or len(self.core.slabs.lent) > figures["free_slabs"]
        return max(1, min(wanted, part)) if has_blocks else 1

    @property
    def knows_all(self) -> bool:
        if self.slabs.to_load or self.shared_cold is not None:  # the index knows what is in the bucket
            return False
        return self.lent_slabs is None or len(self.lent_slabs()) <= len(self.core.slabs.lent)

    @property
    def is_shared(self) -> bool:
        return self.others is not None

    async def renew(self, *, is_strict: bool, directory: int = 0, names: Sequence[bytes] = ()) -> None:
        if self.others is None:
            return
        if names and self.indexed is not None:
            await self._ask_index(self.indexed, directory, names, is_strict=is_strict)
        elif not names:
            await self.others.renew(is_strict=is_strict)

    async def _ask_index(
        self, indexed: IndexedBlocks, directory: int, names: Sequence[bytes], *, is_strict: bool
    ) -> None:
        """Know what the index has of names (relaxed: of those that are not known here)."""
        wanted = names
        if not is_strict:
            here = _any_of(self._find_all(directory, forms.name_columns(names))[1], len(names))
            wanted = list(compress(names, (~here).tolist()))
        if not wanted:
            return
        halves = np.zeros(2 * len(wanted), np.uint64)
        fingerprints(self.tables.multipliers, directory, *forms.name_columns(wanted), halves)
        keys = split_keys(halves)
        answers = await indexed.ask(keys, is_strict=is_strict)
        if is_strict:
            if self.shared_cold is not None:
                await self.shared_cold.decided()
            for table in self.tables.of(directory):
                rows, sequences = table.find(wanted, self.now(table.namespace))
                self._drop_unconfirmed(table, keys, rows, sequences, answers)

    def _drop_unconfirmed(
        self, table: BlockTable, keys: Sequence[bytes], rows: Numbers, sequences: Words, answers: Mapping[bytes, int]
    ) -> None:
        """Drop rows of other hosts' blocks of which the index has no, or another one."""
        for key, row, sequence in zip(keys, rows.tolist(), sequences.tolist(), strict=True):
            is_foreign = row >= 0 and bool(table.rows["flags"][row] & np.uint32(forms.FOREIGN))
            if is_foreign and answers.get(key, sequence) != sequence:
                self.drop_entry(table, row, sequence)

    async def _tell_again(self, indexed: IndexedBlocks) -> None:
        """Tell the index of blocks that it may lack: those of a daemon before this one; all, after it was away.

        Else slowly, for ever: a host that was killed may have put a newer block, and told nobody.
        """
        await self._has_loaded.wait()
        pause = TELL_SECONDS
        while True:
            try:
                await self._tell_all(indexed, pause)
                with trio.move_on_after(TELL_SLOWLY_SECONDS):
                    await indexed.is_doubtful.wait()
            except errors.EngineError:
                await trio.sleep(LOOK_SECONDS)
                continue
            pause = TELL_SECONDS if indexed.is_doubtful.is_set() else TELL_SLOWLY_SECONDS
            indexed.is_doubtful = trio.Event()

    async def _tell_all(self, indexed: IndexedBlocks, pause: float) -> None:
        """Return when all was told, or something is doubtful while it is told slowly. EngineError."""
        for table in list(self.tables.all.values()):
            for start in range(0, 0 if table.has_ended else len(table.rows), TOLD_AT_ONCE):
                some = table.rows[start : start + TOLD_AT_ONCE].copy()
                is_foreign = some["flags"] & np.uint32(forms.FOREIGN) != 0
                some = some[(some["version"] & np.uint64(1) != 0) & ~is_foreign]
                if len(some):
                    lacking = some[await indexed.find_lacking(some)]
                    told = [self.native.tell(*pair) for pair in lacking[["low", "high"]].tolist()]
                    await indexed.publish(b"".join([one for one in told if one is not None]))
                    await trio.sleep(min(pause, TELL_SECONDS))
                    if pause > TELL_SECONDS:
                        with trio.move_on_after(pause):
                            await indexed.is_doubtful.wait()
                            return
                await trio.lowlevel.checkpoint()

    async def _look_again(self, indexed: IndexedBlocks) -> None:
        """Ask again for other hosts' blocks that are in memory and were read lately, by and by for all that are known.
        Settle blocks that shadow no others."""
        since, marks = 0, dict[int, int]()
        """of each table, the row from which on the others are asked for"""
        while True:
            sequence, position = self.native.statistics()["sequence"], self.writer.queued
            await trio.sleep(LOOK_SECONDS)
            is_told = self.writer.written >= position and indexed.failure is None
            hosts = self._hosts
            if is_told and self.native.statistics()["shadows"] and (hosts is None or hosts.are_letters_answered()):
                self.native.settle_shadows(sequence)
            before, since, left = since, int(time.time()) - 1, LOOKED_BESIDE
            tables = list(self.tables.all.values()) if self.native.statistics()["foreign"] else []
            random.shuffle(tables)  # each of them comes first, by and by
            for table in tables:
                for start in range(0, 0 if table.has_ended else len(table.rows), LOOKED_AT):
                    found = table.rows[start : start + LOOKED_AT]
                    is_foreign = (found["flags"] & np.uint32(forms.FOREIGN) != 0) & (
                        found["version"] & np.uint64(1) != 0
                    )
                    is_read = is_foreign & (found["arena"] != 0) & (found["used"] >= before)
                    beside = np.flatnonzero(is_foreign & ~is_read)
                    beside = beside[beside + start >= marks.get(table.number, 0)][:left]
                    left -= len(beside)
                    if len(beside):
                        marks[table.number] = int(beside[-1]) + start + 1
                    rows = np.concatenate([np.flatnonzero(is_read), beside])
                    seen = found[rows].copy()
                    keys = keys_of(seen)
                    answers = await indexed.ask(keys, is_strict=False) if keys else {}
                    self._drop_unconfirmed(table, keys, rows + start, seen["sequence"], answers)
                    await trio.lowlevel.checkpoint()
                if left:
                    marks.pop(table.number, None)

    def lender(self) -> object:
        return self.native.lender(self.arenas.pinned_max)

    async def kept_at(self, addr: int, sequence: int) -> memoryview | None:
        table, row = self._row_at(addr, sequence)
        if table is None:
            return None
        length, packed = (int(table.rows[name][row]) for name in ("length", "packed"))
        target = memoryview(bytearray(length))
        one = slot_read(table.namespace, addr, sequence, target, packed * forms.PAGE)
        return target if await self.reads.read_copy(one) else None

    def take_uses(self) -> Uses:
        return self.eviction.elsewhere.take()

    def hear_uses(self, uses: Uses) -> None:
        rows = defaultdict[int, list[int]](list)
        for slab, slot, sequence in uses.tolist():
            if (found := self.native.row_at(slab, slot, sequence)) is not None:
                rows[found[0]].append(found[1])
        for number, some in rows.items():
            if (table := self.tables.all.get(number)) is not None:
                self.eviction.used_elsewhere(table, np.array(some, np.int64))

    def _row_at(self, addr: int, sequence: int) -> tuple[BlockTable | None, int]:
        """Where the block at an address is known, whoever has the slab."""
        slab, offset = divmod(addr, self.core.geometry.slab_size)
        slot = self._slot_at(slab, offset)
        number, row = (self.native.row_at(slab, slot, sequence) if slot is not None else None) or (-1, 0)
        return self.tables.all.get(number), row

    def _slot_at(self, slab: int, offset: int) -> int | None:
        """The slot that begins there; the block store knows where those of other hosts do, too."""
        if slab >= self.core.geometry.slab_count:
            return None
        with suppress(ValueError):  # the slab has no slots, or just one
            first = self.native.slot_places(slab, 0)[1]
            if offset <= first:
                return 0 if offset == first else None
            number, rest = divmod(offset - first, self.native.slot_places(slab, 1)[1] - first)
            return None if rest else number
        return None

    def _slab_granted(self, slab: int) -> None:
        """A slab came that has blocks: another host held it, or this one went on."""
        if not self._states.has(slab):
            self.slabs.to_load.append(slab)
            self._more_to_load.set()

    async def _take_more_slabs(self) -> bool:
        now = trio.current_time()
        if self.core.more_slabs is None or now < self._no_slabs_until:
            return False
        if await self.core.more_slabs(1):
            return True
        self._no_slabs_until = now + NO_SLABS_SECONDS
        return False

    def tables_of(self, directory: int) -> tuple[BlockTable, ...]:
        return self.tables.of(directory)

    # -- namespaces --------------------------------------------------------------------------------------

    def is_block_namespace(self, number: int) -> bool:
        found = self.core.namespaces.all.get(number)
        return found is not None and found.settings.is_blocks

    def is_valid_group(self, group: ColdGroup) -> bool:
        """Cold blocks of a group may be served: their namespace was not cleared. Any thread."""
        found = self.core.namespaces.all.get(group.namespace)
        return found is not None and found.settings.is_blocks and found.settings.epoch == group.epoch

    def latest_sequence(self) -> int:
        """Of all blocks that were put. Any thread."""
        return self.native.statistics()["sequence"]

    def epoch_of(self, number: int) -> int:
        """Of the blocks that are stored now: it changes with `clear`, and not with the settings before."""
        if number not in self._epochs:
            found = self.core.namespaces.all.get(number)
            self._epochs[number] = found.settings.epoch if found is not None else 0
        return self._epochs[number]

    def _space(self, number: int) -> int:
        """The place of a namespace in the core, made if need be: those above it come first."""
        place = self._spaces.get(number)
        if place is None:
            chain = self.core.namespaces.accounts.chain(number) if number != ROOT else []
            above = self._space(chain[1] if len(chain) > 1 else ROOT) if number != ROOT else -1
            place = self._spaces[number] = len(self._spaces)
            self._put_space(number, place, above)
        return place

    def _put_space(self, number: int, place: int, above: int, files: NamespaceUse | None = None) -> None:
        """The quotas of a namespace, less what files have of them (None: what they have now)."""
        accounts = self.core.namespaces.accounts
        size, count = UNBOUNDED, UNBOUNDED
        account = accounts.all.get(number)
        if account is not None:
            most = account.most
            files = files or NamespaceUse(account.size, account.files)
            size, count = max(0, most.size - files.size), max(0, most.files - files.files)
        elif number == ROOT and accounts.root_blocks > 0:
            files = files or accounts.use_of_all()
            count = max(0, accounts.root_blocks - files.files)
        self.native.put_space(place, number, above, self.epoch_of(number), size, count)
        found = self.core.namespaces.all.get(number)
        packs = found is not None and found.settings.compression != "none"
        self.native.set_packing(place, packs and bool(self.core.superblock.features & FEATURE_PACKED))

    def _above(self, number: int) -> int:
        """The place of the namespace that a namespace is in; -1: it is in none that has one."""
        chain = self.core.namespaces.accounts.chain(number) if number != ROOT else []
        return self._spaces.get(chain[1] if len(chain) > 1 else ROOT, -1) if number != ROOT else -1

    def update_quotas(self) -> None:
        """Quotas, or what files have of them, changed."""
        for number, place in list(self._spaces.items()):
            self._put_space(number, place, self._above(number))
        for table in self.tables.all.values():
            self._tell_clients(table)

    def claim(self, number: int, files: NamespaceUse) -> NamespaceUse:
        """As of `BlockQuotas`."""
        place = self._spaces.get(number)
        if place is None:
            return NO_USE
        self._put_space(number, place, self._above(number), files)
        return NamespaceUse(*self.native.space_use(place))

    def _tell_clients(self, table: BlockTable) -> None:
        number = table.namespace
        table.tell_clients(asks=self._recompute_rate(number) > 0, ahead=self.eviction.ahead.get(number, 0))

    def _recompute_rate(self, number: int) -> int:
        found = self.core.namespaces.all.get(number)
        return found.settings.recompute_rate if found is not None else 0

    def advance(self, number: int, seconds: float) -> None:
        """Move the clock by which a namespace judges its blocks. What clients asked for before counts as before."""
        self.shown.sample()
        self.eviction.advance(number, seconds)
        self.update_quotas()
        self.wake()

    def use(self, number: int) -> tuple[int, int]:
        """(bytes of slots, blocks) of a namespace and those in it."""
        place = self._spaces.get(number)
        return self.native.space_use(place) if place is not None else (0, 0)

    def room(self) -> tuple[int, int]:
        """(blocks, bytes that are free in the slabs that the store has) of the volume."""
        found = self.native.statistics()
        free_slabs = found["free_slabs"] + self.slabs.arriving
        return found["blocks"], free_slabs * self.core.geometry.slab_size + found["free_slots_bytes"]

    @property
    def block_max(self) -> int:
        """Bytes of the largest block."""
        return min(self.arenas.block_max, self.core.geometry.slab_size)

    def note_file(self, directory: int, namespace: int, name: bytes) -> None:
        """A name of a directory is about to mean a file."""
        if self.is_block_namespace(namespace):
            self.with_files.add(directory)
            if self.cold is not None:
                self.cold.kill(directory, forms.name_columns([name]))

    def note_directories(self, directory: int, namespace: int, names: Collection[bytes]) -> None:
        """Names of a directory mean directories, or are about to."""
        if names and self.is_block_namespace(namespace):
            known = self.directories.get(directory, frozenset()) | frozenset(names)
            if len(known) <= DIRECTORIES_MAX:
                self.directories[directory] = known
            else:  # each name is looked up
                self.with_files.add(directory)

    async def has_names(self, directory: int) -> bool:
        """Blocks, or files that become some, are in a directory. EngineTimeout: that is not known yet."""
        await self.renew(is_strict=True)
        with trio.move_on_after(0 if not self.slabs.to_load else ROOM_SECONDS):
            await self._has_loaded.wait()
        if self.slabs.to_load:
            raise errors.EngineTimeout("heads of blocks are being read, and the medium does not answer in time")
        if self.names_held[directory] or self.answers.has_drafts(directory):
            return True
        return any(map(self._has_blocks, self.tables.of(directory)))

    def _has_blocks(self, table: BlockTable) -> bool:
        rows, after = list[Any](), -1
        while not rows:
            rows, after = self.native.list_rows(
                table.number, table.readers.directory, after, 1, self.now(table.namespace)
            )
            if after < 0:
                break
        return bool(rows)

    def directory_removed(self, directory: int) -> None:
        self.directories.pop(directory, None)
        for table in self.tables.of(directory):
            self.tables.end(table)
        if self.cold is not None:
            self.cold.clear(lambda group: group.directory == directory)
        self.core.namespaces.news.lose(directory)

    def clear(self, number: int) -> None:
        """All blocks of a namespace are gone: its epoch has grown, and that is stored."""
        for table in self.tables.of_namespace(number):
            self.eviction.cleared(table)
            self.tables.end(table)
        self.core.namespaces.news.clear(number)
        self._epochs.pop(number, None)
        if self.cold is not None:
            self.cold.clear(lambda group: group.namespace == number)
        self.update_quotas()
        if self.others is not None:
            self.others.distrust()
        self.wake()

    def settings_changed(self, number: int) -> None:
        """The settings of a namespace are others, or it is none any more: so a host said."""
        found = self.core.namespaces.all.get(number)
        is_same = found is not None and found.settings.is_blocks and self._epochs.get(number) == found.settings.epoch
        if number in self._epochs and not is_same:
            self.clear(number)

    def readers_change(self, directories: Sequence[int] | None) -> None:
        """Before other people may use these directories (None: any) than until now: what clients have mapped ends."""
        if self.shown.readers_change(directories):
            self.wake()

    def table(self, directory: int, namespace: int, uid: int, gid: int, mode: int) -> BlockTable:
        """The table for new blocks. NoSpace: there are too many."""
        self.arenas.make_first()
        space, epoch = self._space(namespace), self.epoch_of(namespace)
        readers = RowReaders(directory, uid, gid, mode & 0o777)
        found = (other for other in self.tables.of(directory) if other.readers == readers)
        table = next((other for other in found if other.namespace == namespace), None)
        if table is None:
            table = self.tables.open(namespace, space, epoch, readers)
            self._tell_clients(table)
            self.wake()
        return table

    def now(self, namespace: int) -> int:
        """Seconds since the epoch, by the clock of a namespace."""
        return int(time.time()) + self.eviction.ahead.get(namespace, 0)

    # -- puts ----------------------------------------------------------------------------------------------

    def try_put(
        self, table: BlockTable, names: NameColumns, sources: Words, sizes: Numbers, terms: RowTerms,
        *, plain_only: bool = False,
    ) -> tuple[Numbers, Words]:  # fmt: skip
        count = len(sizes)
        results, sequences = np.full(count, forms.NOT_ADMITTED, np.int64), np.zeros(count, np.uint64)
        admitted = self.eviction.admits(table, names)
        if admitted is not None and not admitted.all():
            chosen = np.flatnonzero(admitted)
            if len(chosen):
                text, offsets, lengths = names
                part = text, np.ascontiguousarray(offsets[chosen]), np.ascontiguousarray(lengths[chosen])
                results[chosen], sequences[chosen] = self._put_some(
                    table, part, sources[chosen], sizes[chosen], terms, plain_only=plain_only
                )
            return results, sequences
        return self._put_some(table, names, sources, sizes, terms, plain_only=plain_only)

    def _put_some(
        self, table: BlockTable, names: NameColumns, sources: Words, sizes: Numbers, terms: RowTerms,
        *, plain_only: bool, only_absent: bool = False,
    ) -> tuple[Numbers, Words]:  # fmt: skip
        results, sequences = np.empty(len(sizes), np.int64), np.zeros(len(sizes), np.uint64)
        now_us, sequence = clock.now() // 1000, clock.fine() // 1000 - SEQUENCE_LAG_US
        now = now_us // 1_000_000 + self.eviction.ahead.get(table.namespace, 0)
        self.native.put(
            table.number, table.readers.directory, *names, plain_only, sources, sizes, sequence, now,
            self.eviction.expiry(table.namespace, now, terms.expires), terms.priority, results, sequences,
            terms.shown_us or now_us, only_absent,
        )  # fmt: skip
        if len(self.tables.of(table.readers.directory)) > 1:
            self._drop_beside(table, names, now, sequences)
        self.eviction.note_put(table, results, sizes)
        if self.news.is_followed(table.readers.directory):
            self.news.stored(table, names, results, sequences)
        self.note_put()
        return results, sequences

    def put_absent(self, table: BlockTable, name: bytes, data: memoryview, terms: RowTerms) -> tuple[int, int]:
        """Store a block, if there is none of its name: (row, or why not; sequence)."""
        source = np.array([np.frombuffer(data, np.uint8).ctypes.data], np.uint64)
        columns, size = forms.name_columns([name]), np.array([len(data)], np.int64)
        if self.has(table.readers.directory, columns).any():
            return forms.PRESENT, 0
        results, sequences = self._put_some(table, columns, source, size, terms, plain_only=False, only_absent=True)
        return int(results[0]), int(sequences[0])

    def note_back(self, table: BlockTable, row: int) -> None:
        self.eviction.note_back(table, row)

    def has(self, directory: int, names: NameColumns) -> Mask:
        """Which blocks are in the volume. Any thread."""
        return _any_of(self._find_all(directory, names)[1], len(names[1]))

    def rename(self, table: BlockTable, row: int, sequence: int, name: bytes) -> int | None:
        """Give a block another name in its directory, where its bytes can stay where they are. Its sequence then.

        None: it has to be stored again under that name, and removed; nothing has changed.
        """
        if self.others is not None or self.news.is_followed(table.readers.directory):
            return None
        self._bury_cold(table, row)
        with self.eviction.becoming(table, name):
            now_us = clock.fine() // 1000 - SEQUENCE_LAG_US
            made, found = self.native.rename_row(table.number, row, sequence, name, now_us)
        if made < 0:
            return None
        columns, sequences = forms.name_columns([name]), np.array([found], np.uint64)
        if len(self.tables.of(table.readers.directory)) > 1:
            self._drop_beside(table, columns, self.now(table.namespace), sequences)
        self.eviction.note_put(table, np.array([made], np.int64), table.room["length"][[made]].astype(np.int64))
        self.note_put()
        return found

    def _drop_beside(self, table: BlockTable, names: NameColumns, now: int, sequences: Words) -> None:
        """Blocks of other readers lose their names to those that were put later. Any thread."""
        for other in self.tables.of(table.readers.directory):
            if other is not table:
                rows, older = np.empty(len(sequences), np.int64), np.empty(len(sequences), np.uint64)
                self.native.find(other.number, other.readers.directory, *names, False, now, rows, older)
                gone = (rows >= 0) & (older < sequences)
                if gone.any():
                    sizes = np.zeros(int(np.count_nonzero(gone)), np.int64)
                    self.native.drop_rows(other.number, rows[gone], older[gone], sizes)

    async def put(
        self, table: BlockTable, names: Sequence[bytes], buffers: Sequence[memoryview], terms: RowTerms,
        *, is_admitted: bool = False,
    ) -> list[int]:  # fmt: skip
        """Store blocks, wait for room where there is none. Sequences. ``is_admitted``: the policy is not asked.

        ReadOnly, NoSpace, QuotaExceeded, FileTooLarge; Stale: the table has ended; EngineError: nothing can be written.
        """
        if self.core.read_only:
            raise errors.ReadOnly("the volume is mounted read-only")
        sources = np.array([np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers], np.uint64)
        sizes = np.array([len(buffer) for buffer in buffers], np.int64)
        start, give_up = 0, trio.current_time() + ROOM_SECONDS
        stored: list[int] = []
        while start < len(names):
            columns = forms.name_columns(names[start:])
            if is_admitted:
                results, found = self._put_some(table, columns, sources[start:], sizes[start:], terms, plain_only=False)
            else:
                results, found = self.try_put(table, columns, sources[start:], sizes[start:], terms)
            failed = results < 0
            done = int(np.argmax(failed)) if failed.any() else len(results)
            stored += found[:done].tolist()
            start += done
            if start < len(names):
                await self.make_room(int(results[done]), table, int(sizes[start]), give_up)
        if terms.is_strict:
            await self.flush()
        return stored

    async def flush(self) -> None:
        """Return when all that was put and dropped is durable, and other hosts find it. EngineError."""
        await self.writer.flush()
        if self.indexed is not None:
            await self.reads.drop_gone(self._note_gone)
            await self.indexed.catch_up()
            if self.indexed.failure is not None:
                raise errors.EngineError(f"other hosts cannot be told of blocks: {self.indexed.failure}")
            await self._send_letters()

    async def hear(self, told: Sequence[bytes]) -> None:
        """Other hosts have newer blocks of names: what is older here is gone when this returns. EngineError."""
        if self.indexed is not None:
            async with self.shared_cold.turn if self.shared_cold is not None else nullcontext():
                await self.indexed.hear(told)
            self.note_put()
            await self.writer.flush()

    async def make_room(self, why: int, table: BlockTable, size: int, give_up: float) -> None:
        """Wait until a put that was refused has a chance again. Raises, as `put`, where it has none."""
        if why == forms.ENDED:
            raise errors.Stale("the blocks of this namespace were cleared meanwhile")
        if why == forms.TOO_LARGE or size > self.arenas.block_max:
            raise errors.FileTooLarge(
                f"a block of {size} bytes is larger than a slab, or than the store's memory allows"
            )
        if why == forms.NOT_ADMITTED:
            raise errors.NotAdmitted("a block is not stored: the namespace is full of blocks that are worth more")
        if why == forms.ODD_NAME:
            raise errors.InvalidArgument("this is no name of a block")
        is_late = trio.current_time() > give_up
        if why == forms.NO_MEMORY:
            if self.writer.error is not None:
                raise errors.EngineError(f"blocks wait for the medium: {self.writer.error}") from self.writer.error
            if is_late:
                raise errors.EngineTimeout("no memory for blocks became free in time")
            self.wake()
            await self._look_soon()
            return
        if why == forms.NO_QUOTA:
            if not is_late and await self._find_quota(0, table.namespace, size, give_up):
                return
            if not is_late and self.eviction.make_room_in(table.namespace, size):
                return
            if is_late or not await self._find_quota(1, table.namespace, size, give_up):
                text = f"namespace {table.namespace}: no room for a block of {size} bytes"
                raise errors.QuotaExceeded(text, table.namespace)
            return
        if await self.slabs.lend(self._spare_slabs) or await self._await_going(size, give_up):
            return
        if self._hosts is not None:  # those that have more blocks give some of their slabs
            self._hosts.ask(self._spare_slabs)
        if not is_late and self.eviction.make_room(size):
            return
        if is_late or not await self._await_hosts(give_up):
            raise errors.NoSpace(f"no slot for a block of {size} bytes, and nothing can be evicted for it")

    async def _await_going(self, size: int, deadline: float) -> bool:
        """Wait until a write ends, if slots of so many bytes are free then: their blocks went while they were written.

        False: there are none. EngineTimeout: the medium is slow, and it would not help to evict what waits for it.
        """
        if self.native.statistics()["going_slots_bytes"] < size:
            return False
        with trio.move_on_at(deadline) as scope:
            await self.writer.await_progress()
        if scope.cancelled_caught:
            raise errors.EngineTimeout("slots of blocks that went are still being written: the medium is slow")
        return True

    async def _await_hosts(self, deadline: float) -> bool:
        """Wait for slabs of other hosts. False: none are to come."""
        return self._hosts is not None and await self._hosts.wait(deadline, None)

    async def _find_quota(self, source: int, namespace: int, size: int, deadline: float) -> bool:
        """Have other hosts of a shared volume leave more of a quota to this one. ``source``: of `Hosts.quotas`."""
        hosts = self._hosts
        for number in self.core.namespaces.accounts.chain(namespace) if hosts is not None else ():
            account = self.core.namespaces.accounts.all[number]
            have, most = self.core.namespaces.accounts.use_here(number), account.most
            slot_size = self.core.slabs.classes.class_for(size) if size else 0
            lack = NamespaceUse(max(0, have.size + slot_size - most.size), max(0, have.files + 1 - most.files))
            if hosts is not None and account.bound is not None and any(lack):
                account.lack = lack
                return await hosts.quotas[source](deadline, number)
        return False

    def evict(self, number: int, size: int) -> None:
        self.eviction.make_room_in(number, size)
        self.wake()

    async def _keep_to_parts(self) -> None:
        """Adopted blocks count towards this host's part of quotas: take more, or evict.

        Who had them may have their part yet, and others more than they need: they are asked for a while before.
        """
        accounts, now = self.core.namespaces.accounts, trio.current_time()
        for number, account in list(accounts.all.items()):
            have = accounts.use_here(number)
            is_over = have.size > account.most.size or have.files > account.most.files
            if account.bound is None or not self.use(number)[0] or not is_over:
                self._above_part.pop(number, None)
                continue
            began, asked = self._above_part.get(number, (now, -math.inf))
            if now < asked + ASK_SECONDS:
                continue
            self._above_part[number] = began, now
            if not await self._find_quota(0, number, 0, now):
                await self._find_quota(1, number, 0, now)
            excess = accounts.use_here(number).size - account.most.size
            is_over = excess > 0 or accounts.use_here(number).files > account.most.files
            if is_over and now >= began + PART_SECONDS:
                self.eviction.make_room_in(number, max(excess, 1))

    def wait_for_room(self, why: int, table: BlockTable, size: int) -> bool:
        return self._room_requests.wait(why, table, size)

    def note_put(self) -> None:
        """Something was put. Any thread."""
        if self.writer.is_idle and self._token is not None:
            self.writer.is_idle = False
            self._token.run_sync_soon(self.wake, idempotent=True)

    def wake(self) -> None:
        self._work.set()
        self.writer.wake()

    async def _look_soon(self) -> bool:
        """Return when `_keep_ready` has looked, or after a moment. Whether it has."""
        with trio.move_on_after(ACTIVE_SECONDS) as scope:
            await self._has_looked.wait()
        return not scope.cancelled_caught

    # -- gets ----------------------------------------------------------------------------------------------

    def find(self, directory: int, name: bytes) -> tuple[BlockTable, int, int] | None:
        """(table, row, sequence) of a block, the newest of its name; None: there is none. Any thread."""
        best: tuple[BlockTable, int, int] | None = None
        for table in self.tables.of(directory):
            rows, sequences = table.find([name], self.now(table.namespace))
            if rows[0] >= 0 and (best is None or sequences[0] > best[2]):
                best = table, int(rows[0]), int(sequences[0])
        return best

    async def fetch(
        self, table: BlockTable, names: Sequence[bytes], rows: Numbers, sequences: Words, *, is_ahead: bool = False
    ) -> Numbers:
        """Bring blocks into memory. 1 for each that is there then; what is damaged is dropped. EngineError.

        ``is_ahead``: nobody reads them now, so it waits for memory, unless they are half of what there is already.
        """
        results, is_short = await self._fetch(table, names, rows, sequences, is_ahead=is_ahead)
        looks, give_up = LOOKS_AHEAD if is_ahead else 0, trio.current_time() + AHEAD_SECONDS
        while is_short.any() and looks and trio.current_time() < give_up:
            if 2 * int(table.rows["length"][rows[results == 1]].sum()) > self.arenas.capacity:
                break
            self.wake()
            looks -= await self._look_soon()
            at = np.flatnonzero(is_short)
            some = [names[number] for number in at.tolist()]
            results[at], is_short[at] = await self._fetch(table, some, rows[at], sequences[at], is_ahead=True)
        return results

    async def _fetch(
        self, table: BlockTable, names: Sequence[bytes], rows: Numbers, sequences: Words, *, is_ahead: bool
    ) -> tuple[Numbers, Mask]:
        """`fetch` without waiting for memory: (results, which lack memory)."""
        count = len(names)
        places, sizes = np.zeros(count, np.uint64), np.zeros(count, np.int64)
        slabs, offsets, packed = np.zeros(count, np.uint32), np.zeros(count, np.uint64), np.zeros(count, np.int64)
        landing = self.native.reserve(
            table.number, *forms.name_columns(names), rows, sequences, places, sizes, slabs, offsets, packed
        )
        wanted = np.flatnonzero(places)
        came, results = np.zeros(count, np.uint8), np.zeros(count, np.int64)
        found = table.rows[rows[wanted]].copy()
        are_right = found["sequence"] == sequences[wanted]
        addresses = slabs[wanted].astype(np.uint64) * np.uint64(self.core.geometry.slab_size) + offsets[wanted]
        nearby = await self._read_nearby(found, addresses, places[wanted], landing, wanted)
        rest, are_copies = np.flatnonzero(~nearby), np.zeros(len(wanted), np.bool_)
        reads = []
        for place, number in zip(rest.tolist(), wanted[rest].tolist(), strict=True):
            target = memory_at(int(places[number]), int(sizes[number]))
            address, sequence = int(addresses[place]), int(sequences[number])
            reads.append(slot_read(table.namespace, address, sequence, target, int(packed[number])))
        are_copies[rest] = await self.reads.read(reads)
        are_right[rest] &= await self._are_confirmed(found[rest])
        came[wanted] = are_right
        copies = self.reads.copies_of(reads, are_copies[rest])  # before the memory may be given away
        landing.land(came, results)
        is_wrong = results[wanted] == 0
        if not is_ahead:
            self.eviction.books[table.namespace].brought(are_copies[~is_wrong])
        self.reads.settle(reads, copies, are_copies[rest], results[wanted][rest])
        if len(damaged := wanted[is_wrong & ~are_copies]):
            self._drop_damaged(table, names, rows[damaged], sequences[damaged])
        if len(again := wanted[is_wrong & are_copies]):  # the segments are asked
            some = [names[number] for number in again.tolist()]
            results[again] = await self.fetch(table, some, rows[again], sequences[again])
        lack_place = places == 0
        results[lack_place] = sizes[lack_place] == 0
        return results, lack_place & (sizes == forms.NO_MEMORY)

    async def _read_nearby(
        self, found: npt.NDArray[np.void], addresses: Words, targets: Words, landing: LandsBlocks | None = None,
        places: Numbers | None = None,
    ) -> Mask:  # fmt: skip
        """Read blocks of other hosts from their memory, to ``targets``. Which came: their bytes are right.

        ``found``: copies of their rows. ``landing``: shows what comes; ``places``: of each of these blocks in it.
        """
        came, neighbours = np.zeros(len(found), np.bool_), self.core.reads.neighbours
        foreign = np.flatnonzero(found["flags"] & np.uint32(forms.FOREIGN))
        if neighbours is None or not len(foreign):
            return came
        own = found[foreign]
        sequences, slabs, lengths, checksums = (
            np.ascontiguousarray(own[name]) for name in ("sequence", "slab", "length", "checksum")
        )
        wanted = WantedBlocks(slabs, addresses[foreign], sequences, lengths, checksums, targets[foreign])
        engine: float = self.core.reads.speeds.remote.expect(int(wanted.lengths.sum()))  # then the segments are asked
        in_landing = places[foreign].astype(np.uint32) if places is not None else None
        came[foreign] = await neighbours.read_blocks(wanted, engine, landing, in_landing)
        return came

    async def _are_confirmed(self, found: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Whether other hosts' heads still say what rows do. ``found``: a copy of these from before bytes were read."""
        answers = np.ones(len(found), np.bool_)
        foreign = np.flatnonzero(found["flags"] & np.uint32(forms.FOREIGN))
        if len(foreign) and self.others is not None:
            answers[foreign], are_gone = await self.others.are_confirmed(found[foreign])
            if are_gone.any() and self.indexed is not None:
                self.indexed.distrust(found[foreign][are_gone])
        return answers

    def _drop_damaged(self, table: BlockTable, names: Sequence[bytes], rows: Numbers, sequences: Words) -> None:
        """Blocks whose bytes were not those of their heads, unless they were replaced, or came otherwise, meanwhile."""
        found = table.rows
        still = (found["sequence"][rows] == sequences) & (found["arena"][rows] == 0)
        foreign = still & (found["flags"][rows] & np.uint32(forms.FOREIGN) != 0)
        if foreign.any() and self.others is not None:  # the other host has replaced or removed them
            self.native.drop_rows(table.number, rows[foreign], sequences[foreign], np.zeros(len(rows), np.int64))
            self.others.distrust()
            still &= ~foreign
        if still.any():
            self.core.counters.checksum_failures += int(np.count_nonzero(still))
            log.warning("%d blocks of directory %d are damaged, and dropped", still.sum(), table.readers.directory)
            sizes = np.zeros(int(np.count_nonzero(still)), np.int64)
            self._bury_cold(table, rows[still])
            self.native.drop_rows(table.number, rows[still], sequences[still], sizes)
            self.news.gone(table, rows[still], sequences[still])

    async def read(self, table: BlockTable, name: bytes) -> bytearray | None:
        """A copy of a block; None: there is none any more. EngineError."""
        for attempt in range(4):
            rows, sequences = table.find([name], self.now(table.namespace))
            if rows[0] < 0 and attempt and self.indexed is not None:  # another host may have stored it again
                await self.renew(is_strict=False, directory=table.readers.directory, names=[name])
                rows, sequences = table.find([name], self.now(table.namespace))
            if rows[0] < 0:
                return None
            length = int(table.rows["length"][rows[0]])
            target = bytearray(length)
            size = self._copy_to(table, name, np.frombuffer(target, np.uint8))
            if size >= 0:
                return target if size == length else target[:size]
            if size == forms.NOT_RESIDENT and (await self.fetch(table, [name], rows, sequences))[0] == 0:
                found = await self._read_beside(table, int(rows[0]), int(sequences[0]))
                if found is not None:
                    data, is_copy = found
                    self.eviction.note_use(table, rows)
                    self.eviction.books[table.namespace].brought(np.array([is_copy]))
                    return data
        return None

    def get_columns(
        self, table: BlockTable, names: NameColumns, targets: Words, rooms: Numbers, *, plain_only: bool = False
    ) -> Numbers:
        rows, results = np.empty(len(rooms), np.int64), np.empty(len(rooms), np.int64)
        self.native.get(
            table.number,
            table.readers.directory,
            *names,
            plain_only,
            targets,
            rooms,
            self.now(table.namespace),
            rows,
            results,
        )
        copied: Mask = results >= 0  # who asks for another one asks again
        self.eviction.note_use(table, rows if copied.all() else rows[copied])
        return results

    def note_chain(self, directory: int, names: NameColumns, *, is_read: bool = False) -> Mask:
        tables, rows = self._find_all(directory, names)
        self.eviction.note_chain(tables, names, rows, is_read=is_read)
        return _any_of(rows, len(names[1]))

    def _find_all(self, directory: int, names: NameColumns) -> tuple[tuple[BlockTable, ...], list[Numbers]]:
        """(tables, row in each of every name; below 0: it has none)."""
        tables, count = self.tables.of(directory), len(names[1])
        rows, sequences = [np.empty(count, np.int64) for _ in tables], np.empty(count, np.uint64)
        for table, own in zip(tables, rows, strict=True):
            self.native.find(table.number, directory, *names, False, self.now(table.namespace), own, sequences)
        return tables, rows

    def look_up(
        self, directory: int, namespace: int, names: NameColumns, *, is_timed: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        tables, rows = self._find_all(directory, names)
        self.eviction.note_chain(tables, names, rows)
        rate, there = self._recompute_rate(namespace), _any_of(rows, len(names[1]))
        cold = self.cold.look_up(directory, names) if self.cold is not None and not there.all() else None
        if cold is not None:
            is_cold, cold_sizes = cold[0] & ~there, cold[1]
            there |= is_cold
        if not (is_timed or (rate and there.any())):
            return there.astype(np.uint8), None
        tiers, sizes = np.zeros(len(there), np.uint8), np.zeros(len(there), np.int64)
        for table, own in zip(tables, rows, strict=True):
            here = np.flatnonzero(own >= 0)
            found = table.room[own[here]]
            tiers[here], sizes[here] = np.where(found["arena"] != 0, Tier.DRAM, Tier.REMOTE), found["length"]
            beside = found["arena"] == 0
            tiers[here[beside][self.reads.on_disk(found[beside])]] = Tier.DISK
        if cold is not None:
            tiers[is_cold], sizes[is_cold] = Tier.COLD, cold_sizes[is_cold]
        seconds = self.core.reads.speeds.arrivals(tiers, sizes)
        if rate:
            count = worth_reading(seconds, sizes, rate)
            self.eviction.count_slow(namespace, int(np.count_nonzero(there[count:])))
            tiers[count:] = Tier.NONE
        return tiers, seconds

    def try_look_up(self, directory: int, namespace: int, names: NameColumns) -> Mask | None:
        if self._recompute_rate(namespace):
            return None
        tables, rows = self._find_all(directory, names)
        found = _any_of(rows, len(names[1]))
        is_own = self.cold is not None and self.shared_cold is None
        if self.cold is not None and is_own and not found.all():
            cold = self.cold.find(directory, names)
            found |= cold >= 0 if cold is not None else False
        if not (self.knows_all or found.all()):
            return None
        self.eviction.note_chain(tables, names, rows)
        return found

    def find_cold(self, directory: int, names: NameColumns) -> Mask | None:
        rows = self.cold.find(directory, names) if self.cold is not None else None
        return rows >= 0 if rows is not None else None

    async def warm(self, directory: int, names: Sequence[bytes]) -> None:
        if self.cold is not None:
            await self.cold.warm(directory, names)

    def copy(self, table: BlockTable, name: bytes, room: int) -> memoryview | int:
        rows, _ = table.find([name], self.now(table.namespace))
        if rows[0] < 0:
            return -1
        length = int(table.rows["length"][rows[0]])
        if length > room:
            return length
        target = np.empty(length, np.uint8)
        size = self._copy_to(table, name, target)
        return target[:size].data if size >= 0 else -1

    def _copy_to(self, table: BlockTable, name: bytes, target: npt.NDArray[np.uint8]) -> int:
        targets, rooms = np.array([target.ctypes.data], np.uint64), np.array([len(target)], np.int64)
        return int(self.get_columns(table, forms.name_columns([name]), targets, rooms)[0])

    def hold(self, directory: int, name: bytes) -> HeldRow | None:
        found = self.find(directory, name)
        return self.hold_row(*found) if found is not None else None

    def hold_row(self, table: BlockTable, row: int, sequence: int) -> HeldRow | None:
        held = self.arenas.hold(table, row, sequence)
        if held is not None:
            self.eviction.note_use(table, np.array([row], np.int64))
        return held

    def drop_others(self, table: BlockTable, names: Sequence[bytes]) -> None:
        """Names that are about to mean blocks of one table mean none of the directory's other tables. Any thread."""
        for other in self.tables.of(table.readers.directory):
            if other is not table:
                rows, sequences = np.empty(len(names), np.int64), np.empty(len(names), np.uint64)
                columns = forms.name_columns(names)
                now = self.now(other.namespace)
                self.native.drop(other.number, other.readers.directory, *columns, False, now, rows, sequences)

    def drop(self, directory: int, names: Sequence[bytes]) -> list[bool]:
        found, columns = np.zeros(len(names), np.bool_), forms.name_columns(names)
        with self.cold.tier.gate if self.cold is not None and self.shared_cold is None else nullcontext():
            if self.cold is not None:
                found |= self.cold.kill(directory, columns)
            for table in self.tables.of(directory):
                rows, sequences = np.empty(len(names), np.int64), np.empty(len(names), np.uint64)
                self.native.drop(table.number, directory, *columns, False, self.now(table.namespace), rows, sequences)
                found |= rows >= 0
        if self.news.is_followed(directory):
            self.news.removed(self.tables.of(directory), list(compress(names, found.tolist())))
        self.note_put()
        answers: list[bool] = found.tolist()
        return answers

    async def remove(self, directory: int, names: Sequence[bytes], *, is_strict: bool = False) -> list[bool]:
        """Remove blocks, those of other hosts, too. Which there were. NoSpace, QuotaExceeded, EngineError."""
        if self.others is not None:
            uses_cold, was_cold = self.indexed is not None and self.indexed.cold.is_used, [False] * len(names)
            if self.indexed is not None and uses_cold:
                was_cold = await self._remove_cold(self.indexed, directory, names)
            await self.renew(is_strict=is_strict or uses_cold, directory=directory, names=names)
            there = [self.find(directory, name) is not None for name in names]
            await self._bury(directory, names)
            dropped = self.drop(directory, names)
            if is_strict:
                await self.flush()
            return [any(one) for one in zip(was_cold, there, dropped, strict=True)]
        return self.drop(directory, names)

    async def _remove_cold(self, indexed: IndexedBlocks, directory: int, names: Sequence[bytes]) -> list[bool]:
        """Have the bucket have no block of these names, whoever put it there. Which there were. EngineError."""
        columns = forms.name_columns(names)
        if self.shared_cold is not None:
            answers: list[bool] = (await self.shared_cold.remove(directory, columns)).tolist()
            return answers
        halves = np.zeros(2 * len(names), np.uint64)
        fingerprints(self.tables.multipliers, directory, *columns, halves)
        await indexed.remove_cold(split_keys(halves))
        return [False] * len(names)

    async def _bury(self, directory: int, names: Sequence[bytes]) -> None:
        """Put graves in the place of blocks that slabs of other hosts have, or have older ones of."""
        for table in self.tables.of(directory):
            rows, _ = table.find(names, self.now(table.namespace))
            there = np.flatnonzero(rows >= 0)
            flags = table.rows["flags"][rows[there]]
            chosen = there[flags & np.uint32(forms.FOREIGN | forms.SHADOWS) != 0].tolist()
            if chosen:
                dead = [memoryview(b"\0")] * len(chosen)
                await self.put(
                    table, [names[number] for number in chosen], dead, RowTerms(GRAVE_EXPIRES), is_admitted=True
                )

    async def list_names(self, directory: int, after: int, limit: int) -> tuple[list[bytes], int]:
        await self._has_loaded.wait()
        place, row = after >> _ROW_BITS, (after & _ROW_MASK) - 1
        tables = sorted(self.tables.of(directory), key=lambda table: table.place)
        table = next((table for table in tables if table.place >= place), None)
        if table is None:
            return [], 0
        row = row if table.place == place else -1
        now = self.now(table.namespace)
        rows, last = self.native.list_rows(table.number, directory, row, limit, now)
        places = [row[5:] for row in rows if row[4] is None]
        others = iter(await self.slabs.read_names(places) if places else [])
        names = [row[4] if row[4] is not None else next(others) for row in rows]
        numbers, sequences = np.array([row[:2] for row in rows], np.uint64).reshape(-1, 2).T
        found, present = table.find(names, now)
        here = (found == numbers.astype(np.int64)) & (present == sequences)  # what went meanwhile has other names
        names = list(compress(names, here.tolist()))
        self.news.learn(table, found[here], present[here], names)
        return names, (table.place + 1) << _ROW_BITS if last < 0 else (table.place << _ROW_BITS) + last + 1

    def drop_entry(self, table: BlockTable, row: int, sequence: int) -> bool:
        """Remove a block, if it is still the one of a row. Whether it was."""
        sizes, rows, sequences = np.zeros(1, np.int64), np.array([row], np.int64), np.array([sequence], np.uint64)
        is_own = not table.rows["flags"][row] & np.uint32(forms.FOREIGN)  # else it may be in the bucket by now
        if is_own and int(table.rows["sequence"][row]) == sequence:
            self._bury_cold(table, row)
        self.native.drop_rows(table.number, rows, sequences, sizes)
        if sizes[0]:
            self.news.gone(table, rows, sequences)
        self.note_put()
        return bool(sizes[0])

    def _bury_cold(self, table: BlockTable, rows: int | Numbers) -> None:
        """Blocks of rows are about to be removed, and do not come back from the cold tier."""
        if self.cold is not None:
            self.cold.bury(np.atleast_1d(table.rows[rows]))

    async def remove_entry(self, table: BlockTable, row: int, sequence: int, name: bytes) -> bool:
        """Remove a block of any host, if it is still the one of a row. Whether it was. The errors of `remove`."""
        flags = int(table.rows["flags"][row])
        if self.others is not None and flags & (forms.FOREIGN | forms.SHADOWS):
            rows, sequences = table.find([name], self.now(table.namespace))
            if (rows[0], sequences[0]) != (row, sequence):
                return False
            await self._bury(table.readers.directory, [name])
            return True
        return self.drop_entry(table, row, sequence)

    async def read_row(self, table: BlockTable, row: int, sequence: int) -> bytearray | None:
        """Read a block of the medium. None: it is none any more, or it was damaged, and is dropped. EngineError."""
        found = await self._read_beside(table, row, sequence)
        data = found[0] if found is not None else None
        is_foreign = bool(table.rows["flags"][row] & np.uint32(forms.FOREIGN))
        if data is None and self.drop_entry(table, row, sequence) and is_foreign and self.others is not None:
            self.others.distrust()
        elif data is None and not is_foreign:
            self.core.counters.checksum_failures += 1
            log.warning("a block of directory %d is damaged, and dropped", table.readers.directory)
        return data

    async def _read_beside(self, table: BlockTable, row: int, sequence: int) -> tuple[bytearray, bool] | None:
        """Read a block past memory that has no room for it: its bytes, and whether they are from the disk tier.

        None: it is none any more, or damaged.
        """
        for _ in range(4):
            found = table.rows[row].copy()
            if int(found["sequence"]) != sequence or not int(found["version"]) & 1:
                return None
            slab, slot, packed = found[["slab", "slot", "packed"]].item()
            try:
                _, offset = self.native.slot_places(slab, slot)
            except ValueError:
                return None  # a thread dropped it just now
            target = bytearray(int(found["length"]))
            address = slab * self.core.geometry.slab_size + offset
            one = slot_read(table.namespace, address, sequence, memoryview(target), packed * forms.PAGE)
            targets = np.array([np.frombuffer(target, np.uint8).ctypes.data], np.uint64)
            if (await self._read_nearby(found[np.newaxis], np.array([address], np.uint64), targets))[0]:
                return (target, False) if int(table.rows["sequence"][row]) == sequence else None
            (is_copy,) = await self.reads.read([one])
            is_right = crc32c(target) == int(found["checksum"])
            self.reads.settle([one], self.reads.copies_of([one], [is_copy]), [is_copy], [is_right])
            if is_right and not (await self._are_confirmed(found[np.newaxis])).all():
                return None
            if is_right:
                return (target, is_copy) if int(table.rows["sequence"][row]) == sequence else None
            has_moved = table.rows[row][["slab", "slot", "packed"]].item() != (slab, slot, packed)
            if not is_copy and not has_moved:
                break
        return None

    # -- tasks ---------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on with what the former daemon left in shared memory; what it did not leave is loaded from heads."""
        lent: Mapping[int, bytes] = self.core.slabs.lent
        count = self.core.geometry.slab_count
        if self.others is not None and self.core.left.is_resumed:  # granted again later: nobody else has taken them
            lent = dict.fromkeys(self._states.known(count), b"")
        self._states.forget_others(lent, count)
        known = self._states.known(count)
        goes_on = self._states.are_restored and known
        self.tables.restore(self._find_space if goes_on else lambda namespace, epoch: None)
        self.arenas.restore()
        if goes_on:
            self.native.restore()
        if self.keeper.outlives:
            self.answers.restore(self.keeper, self.core.superblock.volume_id)
        self.core.tier.others = self.arenas
        self.slabs.to_load = sorted(lent.keys() - known)

    def _find_space(self, namespace: int, epoch: int) -> int | None:
        is_there = self.is_block_namespace(namespace) and self.epoch_of(namespace) == epoch
        return self._space(namespace) if is_there else None

    async def _meet_heads(self, heads: Sequence[bytes]) -> None:
        """Before heads of slabs count that another host had: there may be newer blocks, or have been."""
        await self._open_tables(heads)
        while self.indexed is not None:
            try:
                self._replaced = await self._find_replaced(self.indexed, heads)
                break
            except errors.EngineError as error:
                log.info("whether there are newer blocks than in slabs is not known yet: %s", error)
                if not self.indexed.cold.is_used:
                    break
                await trio.sleep(LOOK_SECONDS)

    async def _find_replaced(self, indexed: IndexedBlocks, heads: Sequence[bytes]) -> dict[bytes, int]:
        """key -> sequence of what the index has of heads' blocks, and of what letters say. EngineError."""
        loading = set(self.slabs.to_load)  # what is newer in these comes by itself
        found = await indexed.find_replaced(heads, loading)
        for one in await self._hosts.unanswered_letters() if self._hosts is not None else ():
            told = np.frombuffer(one, forms.TOLD)
            key, sequence = keys_of(told)[0], int(told["sequence"][0])
            if int(told["slab"][0]) not in loading:
                found[key] = max(found.get(key, 0), sequence)
        return found

    def _drop_replaced(self) -> None:
        for key, sequence in self._replaced.items():
            self._drop_older(key, sequence)

    async def _open_tables(self, heads: Sequence[bytes]) -> None:
        """Open the tables of the blocks that heads describe."""
        for table in heads:
            rows = np.frombuffer(table, forms.HEAD, len(table) // forms.HEAD.itemsize)
            rows = rows[(rows["magic"] == forms.HEAD_MAGIC) & (rows["state"] == forms.BLOCK_HEAD)]
            if len(rows):
                for fields in np.unique(rows[["name_space", "directory", "uid", "gid", "mode", "epoch"]]).tolist():
                    namespace, directory, uid, gid, mode, epoch = fields
                    if self.is_block_namespace(namespace) and self.epoch_of(namespace) == epoch:
                        self.table(directory, namespace, uid, gid, mode)
                    await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Serve until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        self.reads.start()
        async with trio.open_nursery() as nursery:
            if not self.core.read_only:
                nursery.start_soon(failing.vital_task, self.writer.run)
            nursery.start_soon(failing.service, "heads of blocks", self._load)
            nursery.start_soon(
                failing.service, "folders above tables", partial(self.shown.find_ancestors, self.find_ancestors)
            )
            nursery.start_soon(failing.service, "reads of blocks", self.shown.run)
            nursery.start_soon(failing.service, "room for blocks", self._keep_ready)
            nursery.start_soon(failing.service, "what C answered", self._hear_answers)
            nursery.start_soon(failing.service, "room for puts that wait", self._room_requests.run)
            if self.cold is not None:
                nursery.start_soon(self.cold.run)
            if self.others is not None:
                nursery.start_soon(failing.service, "slabs of other hosts", self.others.run)
                nursery.start_soon(failing.service, "cleared namespaces", self._look_at_namespaces)
            if self.indexed is not None:
                nursery.start_soon(failing.service, "index of blocks", self.indexed.keep_up)
                nursery.start_soon(failing.service, "blocks of other hosts", partial(self._look_again, self.indexed))
                if not self.core.read_only:
                    nursery.start_soon(failing.service, "blocks for others", partial(self._tell_again, self.indexed))

    async def _look_at_namespaces(self) -> None:
        """Serve no block of a cleared namespace for longer than a second, as long as the records answer."""
        while True:
            await trio.sleep(CLEARED_SECONDS)
            try:
                if self._hosts is not None and self.tables.all:
                    await self._hosts.look_at_namespaces()
            except errors.EngineError as error:
                log.info("whether namespaces were cleared is not known: %s", error)

    def begin_answers(self, attr_timeout: float, kept: KeptRows, take_handles: Callable[[int], None]) -> object:
        """As `KernelAnswers.begin`. Event loop only, while this runs."""
        way = self.answers.begin(attr_timeout, self.arenas.pinned_max, self.block_max, kept, take_handles)
        self._has_bell.set()
        return way

    async def _hear_answers(self) -> None:
        """Blocks that C stored are written, and what else it did is told, by and by."""
        await self._has_bell.wait()
        while True:
            await trio.lowlevel.wait_readable(self.answers.bell)
            await trio.sleep(HEAR_SECONDS)
            self.answers.hear()
            self.note_put()

    async def _load(self) -> None:
        while True:
            self._more_to_load = trio.Event()
            if self.slabs.to_load:
                began = time.perf_counter()
                await self.slabs.load(self._meet_heads, self._drop_replaced)
                if self.indexed is not None:
                    self.indexed.is_doubtful.set()
                log.info("%d blocks found in %.2f s", self.slabs.loaded_blocks, time.perf_counter() - began)
            self.slabs.loaded.set()
            self._has_loaded.set()
            if self._hosts is not None:
                self._hosts.look_for_letters()
            await self._more_to_load.wait()

    async def _keep_ready(self) -> None:
        """Have memory and slabs at hand before blocks need them, and room in full namespaces."""
        while True:
            before = self.native.statistics()["puts"]
            self.update_quotas()
            is_busy = self.tables.sweep(SWEPT_AT_ONCE, self.arenas.forget)
            await self.reads.drop_gone(self._note_gone)
            can_write = not self.core.read_only
            if can_write and any(found.settings.is_blocks for found in self.core.namespaces.all.values()):
                await self._keep_slabs()
            if self._hosts is not None:
                await self._keep_to_parts()
            if self.tables.all:
                while await self.arenas.keep_spares():
                    is_busy = True
                if can_write:
                    self.eviction.look()
            has_looked, self._has_looked = self._has_looked, trio.Event()
            has_looked.set()
            is_busy |= self.native.statistics()["puts"] != before
            with trio.move_on_after(ACTIVE_SECONDS if is_busy else IDLE_SECONDS):
                if is_busy:
                    await trio.sleep(ACTIVE_SECONDS)
                else:
                    self._work = trio.Event()
                    await self._work.wait()

    def _note_gone(self, gone: npt.NDArray[np.void]) -> None:
        if self.indexed is not None and not self.has_ended:
            self.indexed.note_gone(gone)

    async def _keep_slabs(self) -> None:
        if self._is_closing:
            return
        free, spare = self.native.statistics()["free_slabs"], self._spare_slabs
        try:
            if self.others is not None and free > 4 * spare and self.slabs.give_back(free - 2 * spare):
                await self.commit()  # or others count them as used until something else is stored
            elif free < spare and not self.slabs.are_wanted:
                await self.slabs.lend(2 * spare)
        except errors.EngineError as error:
            log.warning("slabs for blocks are neither taken nor given back: %s", error)

    async def close(self) -> None:
        """Everything that was put is durable. EngineError."""
        self._is_closing = True
        if self.writer.durable < self.writer.queued:
            await self.writer.flush()
        if self.indexed is not None:
            await self.reads.drop_gone(self._note_gone)
            await self.indexed.catch_up()
            await self._send_letters()
        if self.others is not None:
            self.slabs.give_back(self.core.geometry.slab_count)

    def abandon(self) -> None:
        """The membership is over, and its slabs are others': nobody finds a block here any more. `run` has ended."""
        self.has_ended = True
        for table in list(self.tables.all.values()):
            if not table.has_ended:
                self.tables.end(table)
        while self.tables.sweep(SWEPT_AT_ONCE, self.arenas.forget):
            pass
        self.arenas.leave()
        self.keeper.drop(STATES)

    def describe(self, number: int, unread: Mapping[str, int], tier: SegmentsTier) -> dict[str, Any]:
        return self.eviction.describe(number, unread, tier)

    def statistics(self) -> dict[str, Any]:
        return {
            **self.native.statistics(),
            **self.arenas.statistics(),
            **self.writer.statistics(),
            "tables": len(self.tables.all),
            "slabs": len(self.core.slabs.lent),
            "loading_slabs": len(self.slabs.to_load),
            "evicted": self.eviction.statistics(),
            **(self.others.statistics() if self.others is not None else {}),
            **(self.indexed.statistics() if self.indexed is not None else {}),
            "cold": self.cold.statistics() if self.cold is not None else None,
        }


def _any_of(rows: Sequence[Numbers], count: int) -> Mask:
    """Which of so many names are in one of the tables."""
    found = np.zeros(count, np.bool_)
    for own in rows:
        found |= own >= 0
    return found
