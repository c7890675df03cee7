"""The core of the block store beside a plain model of it: both have to agree on random calls, kills and power cuts."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import HEAD, PAGE, name_columns

Bytes = npt.NDArray[np.uint8]
Key = tuple[int, bytes]
"""table, name"""

SLAB = 64 * PAGE
HEAD_TABLE = 2 * PAGE
TOKEN = 7
SLABS = 24
SIZES = [PAGE * pages for pages in (1, 2, 3, 4, 6, 8, 16, 32, 64)]
MULTIPLIERS = blocks.multipliers_of(b"lab")
SECTOR = 512


def shared(size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def content(key: Key, version: int, size: int) -> bytes:
    """Of one version of a block: another one for each. Every second one can be compressed."""
    rng = random.Random(f"{key} {version}")
    return rng.randbytes(size) if version % 2 else (rng.randbytes(size // 5 + 1) + bytes(size))[:size]


def padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def memory_at(address: int, size: int) -> Bytes:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


# -- calls -------------------------------------------------------------------------------------------


def put(
    core: _blocks.Core,
    table: int,
    directory: int,
    items: Sequence[tuple[bytes, bytes]],
    now_us: int = 1,
    now: int = 0,
    expires: int = 0,
    plain: bool = False,
) -> tuple[list[int], list[int]]:
    """Results and sequences."""
    sources = [np.frombuffer(data, np.uint8) for _, data in items]
    results, sequences = np.zeros(len(items), np.int64), np.zeros(len(items), np.uint64)
    addresses = np.array([source.ctypes.data for source in sources], np.uint64)
    sizes = np.array([len(source) for source in sources], np.int64)
    columns = name_columns([name for name, _ in items])
    core.put(table, directory, *columns, plain, addresses, sizes, now_us, now, expires, 7, results, sequences)
    return results.tolist(), sequences.tolist()


def get(
    core: _blocks.Core, table: int, directory: int, names: Sequence[bytes], rooms: Sequence[int], now: int = 0
) -> tuple[list[int], list[bytes]]:
    """Results, and what was copied."""
    targets = [np.zeros(max(room, 1), np.uint8) for room in rooms]
    addresses = np.array([target.ctypes.data for target in targets], np.uint64)
    rows, results = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    columns = name_columns(names)
    core.get(table, directory, *columns, False, addresses, np.array(rooms, np.int64), now, rows, results)
    return results.tolist(), [t[: max(r, 0)].tobytes() for t, r in zip(targets, results.tolist(), strict=True)]


def find(
    call: Callable[..., None], table: int, directory: int, names: Sequence[bytes], now: int = 0, plain: bool = False
) -> tuple[list[int], list[int]]:
    """``call``: find or drop of a core. Rows and sequences."""
    rows, sequences = np.zeros(len(names), np.int64), np.zeros(len(names), np.uint64)
    call(table, directory, *name_columns(names), plain, now, rows, sequences)
    return rows.tolist(), sequences.tolist()


def read_shared(
    table: Bytes, directory: int, names: Sequence[bytes], arenas: Any, room: int, now: int = 0
) -> tuple[list[int], list[bytes]]:
    """As a client does."""
    targets = np.zeros((len(names), room), np.uint8)
    addresses = np.array([target.ctypes.data for target in targets], np.uint64)
    rows, results = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    rooms = np.full(len(names), room, np.int64)
    columns = name_columns(names)
    _blocks.table_get(table, directory, *columns, now, arenas, addresses, rooms, rows, results, True)
    return results.tolist(), [t[: max(r, 0)].tobytes() for t, r in zip(targets, results.tolist(), strict=True)]


def pack(
    batch: _blocks.Batch, rng: random.Random | None = None, *, tried: float = 1.0, shrinks: float = 1.0
) -> npt.NDArray[Any]:
    """Compress blocks of a batch, or as many as these shares say. `STORED` of those that were tried."""
    found = np.frombuffer(batch.blocks(True), blocks.STORED)
    rng = rng or random.Random(0)
    found = found[[rng.random() < tried for _ in found]]
    packed, buffer = np.zeros(len(found), blocks.PACKED), bytearray()
    for row, one in zip(packed, found, strict=True):
        frame = zlib.compress(memory_at(int(one["data"]), int(one["size"])).tobytes(), 1)
        is_smaller = rng.random() < shrinks
        row["number"], row["offset"], row["size"] = one["number"], len(buffer), len(frame) if is_smaller else 0
        buffer += frame.ljust(padded(len(frame)), b"\0") if is_smaller else b""
    batch.pack(packed, bytes(buffer), np.zeros(len(found), np.int64))
    return found


def copy_in(place: int, size: int, stored: Bytes, packed: int) -> None:
    """Bring what a slot has to where its block belongs: whatever that is, as the core finds out."""
    target = memory_at(place, size)
    if not packed:
        target[:] = stored[:size]
        return
    try:
        data = zlib.decompressobj().decompress(stored[:packed].tobytes(), size)
    except zlib.error:
        data = b""
    target[: len(data)] = np.frombuffer(data, np.uint8)


# -- the medium --------------------------------------------------------------------------------------


class Medium:
    """Slabs behind their head tables. What was written since the last sync may be lost, any sector of it."""

    def __init__(self, slabs: int = SLABS) -> None:
        self.slabs = [shared(HEAD_TABLE + SLAB) for _ in range(slabs)]
        """head table, then slots: the leading ones go on with heads and names"""
        self.durable = [np.zeros(HEAD_TABLE + SLAB, np.uint8) for _ in range(slabs)]
        self.writes: list[tuple[int, int, bytes]] = []

    def write(self, runs: bytes, is_data: bool) -> None:
        for slab, offset, address, length in np.frombuffer(runs, blocks.RUN).tolist():
            start = offset + (HEAD_TABLE if is_data else 0)
            assert offset >= 0
            assert start + length <= HEAD_TABLE + SLAB
            piece = memory_at(address, length).tobytes()
            self.slabs[slab][start : start + length] = np.frombuffer(piece, np.uint8)
            self.writes.append((slab, start, piece))

    def sync(self) -> None:
        for slab, start, piece in self.writes:
            self.durable[slab][start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        self.writes.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Of each sector there is one of the pictures that it had since the sync."""
        keeps = rng.choice([0.0, 0.3, 0.9, 1.0])
        ends: dict[tuple[int, int], int] = {}
        for number, (slab, start, piece) in enumerate(self.writes):
            for sector in range(start // SECTOR, (start + len(piece) - 1) // SECTOR + 1):
                if (slab, sector) not in ends or rng.random() < 0.5:
                    ends[slab, sector] = number if rng.random() < keeps else -1
        for number, (slab, start, piece) in enumerate(self.writes):
            for sector in range(start // SECTOR, (start + len(piece) - 1) // SECTOR + 1):
                if number <= ends[slab, sector]:
                    first, last = max(start, sector * SECTOR), min(start + len(piece), (sector + 1) * SECTOR)
                    self.durable[slab][first:last] = np.frombuffer(piece[first - start : last - start], np.uint8)
        self.writes.clear()
        for slab, durable in zip(self.slabs, self.durable, strict=True):
            slab[:] = durable


# -- the model ---------------------------------------------------------------------------------------


@dataclass
class Block:
    data: bytes
    sequence: int
    slot_size: int
    expires: int


@dataclass
class Past:
    """What a name may be after a power cut."""

    synced: bytes | None = None
    since: list[bytes | None] = field(default_factory=list)
    """puts and drops after that"""


@dataclass
class TableLab:
    place: int
    space: int
    directory: int
    buckets_max: int
    rows_max: int
    serial: int
    memory: Bytes
    is_ended: bool = False
    number: int = field(init=False)
    """by which the core knows it"""
    origin: int = field(init=False)
    """serial that its arenas name"""

    def __post_init__(self) -> None:
        self.number, self.origin = self.place, self.serial

    @property
    def rows(self) -> Any:
        return blocks.rows_of(self.memory, self.buckets_max)

    def live(self) -> Any:
        rows = self.rows
        return rows[rows["version"] & np.uint64(1) == 1]


@dataclass
class Write:
    """A batch on its way."""

    batch: _blocks.Batch
    has_data: bool = False
    has_heads: bool = False


class SizesModel:
    """Which slot a block gets."""

    def __init__(self, more: Iterable[int] = ()) -> None:
        self.sizes = list(SIZES)
        self.seen: dict[int, tuple[int, int]] = {}
        for size in more:
            self.learn(size)

    def learn(self, size: int) -> None:
        self.sizes = sorted({*self.sizes, size})

    def slot_size(self, length: int) -> int:
        size = padded(length)
        fits = next((one for one in self.sizes if one >= size), 0)
        if fits in (0, size):
            return fits
        pages, count = self.seen.get(size // PAGE % 256, (0, 0))
        count = count + 1 if pages == size // PAGE else 1
        self.seen[size // PAGE % 256] = size // PAGE, count
        now, then = SLAB // fits, SLAB // size
        if count < 64 or (then - now) * 64 < now:
            return fits
        self.learn(size)
        return size


LIMITS = {0: (3 << 20, 600), 1: (2 << 20, 500), 2: (600 << 10, 80)}
ABOVE = {0: -1, 1: 0, 2: 1}
"""space -> the one above it"""
PLACES = {0: (2, 5, 16, 150), 1: (1, 6, 64, 2000), 2: (0, 7, 64, 400)}
"""table -> space, directory, buckets, rows"""


class BlocksLab:
    """A daemon's core, its medium, and what both have to have."""

    def __init__(self, seed: int, arenas: int = 7) -> None:
        self.rng = random.Random(seed)
        self.slabs = self.rng.choice([8, 12, SLABS])
        self.medium = Medium(self.slabs)
        self.now, self.now_us, self.versions, self.serials, self.numbers = 10, 1000, 0, 0, 0
        self.epochs = dict.fromkeys(ABOVE, 1)
        self.blocks: dict[Key, Block] = {}
        self.pasts: dict[Key, Past] = {}
        self.dirty_max = 1 << 62
        self.count = dict.fromkeys(
            [
                "kills",
                "cuts",
                "synced",
                "landed",
                "refused",
                "quota",
                "lost",
                "packed",
                "again",
                "unpacked",
                "unpackable",
                "renewed",
                "renamed",
            ],
            0,
        )
        self.arena_sizes = [PAGE * 100] + [PAGE * self.rng.choice([20, 40, 66, 100]) for _ in range(arenas)]
        self.arenas: dict[int, tuple[int, Bytes]] = {}
        """place -> number, memory"""
        self.is_storm = False
        """few names come, and these all the time"""
        self.sealed: dict[int, int] = {}
        """number of an arena to which no block comes -> the last sequence that may be in it"""
        self.begin_memory()
        self.begin_core()
        self.core.add_slabs(np.arange(self.slabs, dtype=np.uint32), TOKEN)

    # -- daemons: the first one, and those that go on

    def begin_memory(self) -> None:
        self.states = shared(blocks.SLAB_STATE_SIZE * self.slabs)
        self.tables = {place: self.new_table(place) for place in PLACES}
        self.arenas = {place: (self.number(), shared(size)) for place, size in enumerate(self.arena_sizes)}

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def new_table(self, place: int) -> TableLab:
        space, directory, buckets_max, rows_max = PLACES[place]
        self.serials += 1
        memory = shared(blocks.table_size(buckets_max, rows_max))
        _blocks.begin_table(
            memory, MULTIPLIERS, buckets_max, rows_max, directory, space + 70, 1, 2, 0o444, self.serials
        )
        return TableLab(place, space, directory, buckets_max, rows_max, self.serials, memory)

    def begin_core(self) -> None:
        self.core = _blocks.Core(self.states.ctypes.data, self.slabs, SLAB, HEAD_TABLE, np.array(SIZES, np.uint32))
        self.core.set_dirty_max(self.dirty_max)
        self.core.follow_gone()
        self.seen: set[tuple[int, int]] = set()
        """address of its slot, and sequence, of each row, also of ended tables, at the last look"""
        self.writes: list[Write] = []
        self.sizes = SizesModel()
        for space, (bytes_max, blocks_max) in LIMITS.items():
            self.core.put_space(space, space + 70, ABOVE[space], self.epochs[space], bytes_max, blocks_max)
            self.core.set_packing(space, space != 2)
        for table in self.tables.values():
            table.number = table.place
            self.core.add_table(table.place, table.space, table.memory.ctypes.data, len(table.memory))
        for place, (number, memory) in self.arenas.items():
            table = self.table_of(memory)
            self.core.add_arena(place, number, memory.ctypes.data, len(memory), table)
            if table < 0:  # it begins anew
                self.sealed.pop(number, None)

    def table_of(self, arena: Bytes) -> int:
        serial = int(arena[-64:].view(np.uint64)[1])
        return next((place for place, table in self.tables.items() if table.origin == serial), -1)

    def abandon(self) -> None:
        """Nothing of a killed daemon may run any more, not even what frees it."""
        for thing in (self.core, *(write.batch for write in self.writes)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def kill(self) -> None:
        """Without a word; the next daemon goes on."""
        self.abandon()
        self.count["kills"] += 1
        for place, table in list(self.tables.items()):
            if table.is_ended:
                self.tables[place] = self.new_table(place)
        self.begin_core()
        self.core.restore()
        self.sizes = SizesModel(size for size in self.slot_sizes() if size)

    def slot_sizes(self) -> list[int]:
        return [int(size) for size in self.states.view(np.uint32).reshape(-1, 4)[:, 0]]

    def lose_power(self) -> None:
        self.abandon()
        self.count["cuts"] += 1
        self.medium.lose_power(self.rng)
        self.begin_memory()
        self.begin_core()
        self.core.set_loading(True)
        known = dict(self.blocks)
        order = list(range(self.slabs))
        self.rng.shuffle(order)
        during: dict[Key, bytes | None] = {}
        for slab in order:
            self.core.load_slab(slab, TOKEN, self.medium.slabs[slab])
            if self.rng.random() < 0.3:
                self.use_while_loading(during)
        self.core.set_loading(False)
        self.sizes = SizesModel(size for size in self.slot_sizes() if size)
        self.blocks.clear()
        for key, data in during.items():
            self.past(key).since.append(data)
        for key, past in self.pasts.items():
            self.look_after_cut(key, past, known.get(key))
            block = self.blocks.get(key)
            assert key not in during or (block and block.data) == during[key], f"{key} is older than what is known"
        for table in self.tables.values():
            assert len(table.live()) == sum(place == table.place for place, _ in self.blocks), "a row of no name"

    def use_while_loading(self, during: dict[Key, bytes | None]) -> None:
        """What is put or dropped now is newer than all that is still to be found, whatever the clock says."""
        table = self.any_table()
        if self.rng.random() < 0.5:
            key = table.place, self.name()
            self.versions += 1
            data = content(key, self.versions, self.rng.randrange(1, PAGE))
            if put(self.core, table.number, table.directory, [(key[1], data)])[0][0] >= 0:
                during[key] = data
        else:
            names = self.names(3)
            find(self.core.drop, table.number, table.directory, names)
            during |= {(table.place, name): None for name in names}

    def look_after_cut(self, key: Key, past: Past, known: Block | None) -> None:
        table = self.tables[key[0]]
        (row,), (sequence,) = find(self.core.find, table.number, table.directory, [key[1]])
        found = None
        if row >= 0:
            length, expires = int(table.rows[row]["length"]), int(table.rows[row]["expires"])
            slot_size = self.slot_sizes()[table.rows[row]["slab"]]
            if table.rows[row]["arena"] or self.land(key, row, sequence):
                result, (data,) = get(self.core, table.number, table.directory, [key[1]], [length])
                assert result == [length]
                found = data
                self.blocks[key] = Block(data, sequence, slot_size, expires)
            else:
                sizes = np.zeros(1, np.int64)
                self.core.drop_rows(table.number, np.array([row]), np.array([sequence], np.uint64), sizes)
                assert sizes[0] == slot_size
                self.count["lost"] += 1
        if past.since:
            assert found is None or found in [past.synced, *past.since], f"{key} is something that it never was"
        else:
            assert found == past.synced, f"{key} was {'lost' if past.synced else 'back'}, and no one touched it"

    def land(self, key: Key, row: int, sequence: int, spoil: bool = False) -> bool:
        """Bring a block into memory. It may take what other blocks have there."""
        for _ in range(3):
            table = self.tables[key[0]]
            places, sizes = np.zeros(1, np.uint64), np.zeros(1, np.int64)
            slabs, offsets, packed = np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
            columns = name_columns([key[1]])
            rows, sequences = np.array([row], np.int64), np.array([sequence], np.uint64)
            landing = self.core.reserve(table.number, *columns, rows, sequences, places, sizes, slabs, offsets, packed)
            if places[0]:
                break
            assert sizes[0] == blocks.NO_MEMORY
            self.flush()
            for other in self.tables.values():
                assert not other.is_ended or not self.core.sweep_table(other.place, 1 << 30)
            for place in self.arenas:  # other tables have them
                assert self.renew_arena(place)
        else:
            raise AssertionError("no memory though all is written")
        size = int(sizes[0])
        start = HEAD_TABLE + int(offsets[0])
        copy_in(int(places[0]), size, self.medium.slabs[int(slabs[0])][start:], int(packed[0]))
        if spoil:
            memory_at(int(places[0]), size)[self.rng.randrange(size)] ^= 0x10
        results = np.zeros(1, np.int64)
        landing.land(np.ones(1, np.uint8), results)
        self.count["landed"] += int(results[0])
        return bool(results[0] == 1)

    # -- steps

    def past(self, key: Key) -> Past:
        return self.pasts.setdefault(key, Past())

    def any_table(self) -> TableLab:
        return self.tables[1] if self.is_storm else self.rng.choice(list(self.tables.values()))

    def names(self, count: int) -> list[bytes]:
        return [self.name() for _ in range(count)]

    def name(self) -> bytes:
        """Some come again and again: the medium has many heads of them then."""
        number = self.rng.randrange(6 if self.is_storm or self.rng.random() < 0.4 else 120)
        length = (1, 3, 8, 40, 64, 200, 255)[number % 7]
        return (b"%d-" % number + b"x" * 255)[: max(length, 4)]

    def data(self, key: Key) -> bytes:
        self.versions += 1
        kind = self.rng.random()
        size = self.rng.randrange(1, 3 * PAGE)
        if kind < 0.3:
            size = self.rng.randrange(4 * PAGE + 1, 5 * PAGE + 1)
        elif kind < 0.4:
            size = self.rng.randrange(1, 18 * PAGE)
        elif kind < 0.41:
            size = SLAB - self.rng.choice([0, 1, PAGE])
        return content(key, self.versions, size)

    def step_put(self) -> None:
        table = self.any_table()
        items = [(name, self.data((table.place, name))) for name in self.names(self.rng.choice([1, 1, 3, 8]))]
        odd = self.rng.choice([b"", b"y" * 256, b"a/b", b"n\0", b".", b"..", b"%41"])
        plain = self.rng.random() < 0.5
        if self.rng.random() < 0.1:
            items.insert(self.rng.randrange(len(items) + 1), (odd, b"1"))
        expires = self.now + self.rng.randrange(1, 4) if self.rng.random() < 0.1 else 0
        self.now_us += self.rng.choice([0, 0, 7])
        results, sequences = put(self.core, table.number, table.directory, items, self.now_us, self.now, expires, plain)
        self.check_put(table, items, results, sequences, expires, plain)

    def check_put(
        self,
        table: TableLab,
        items: list[tuple[bytes, bytes]],
        results: list[int],
        sequences: list[int],
        expires: int,
        plain: bool,
    ) -> None:
        if table.is_ended:
            assert results == [blocks.ENDED] + [blocks.NOT_TRIED] * (len(items) - 1)
            return
        used = {space: self.use(space) for space in ABOVE}
        dirty = self.dirty_bytes_before
        planned = 0
        for (name, data), result in zip(items, results, strict=True):
            is_odd = not name or len(name) > 255
            if plain:
                is_odd |= b"/" in name or b"\0" in name or name in (b".", b"..") or name[:1] == b"%"
            if is_odd:
                assert result == blocks.ODD_NAME
                break
            slot_size = self.sizes.slot_size(len(data))
            spaces, space = [], table.space
            while space >= 0:
                spaces.append(space)
                space = ABOVE[space]
            over = any(used[s][0] + slot_size > LIMITS[s][0] or used[s][1] + 1 > LIMITS[s][1] for s in spaces)
            if over:
                assert result == blocks.NO_QUOTA
                self.count["quota"] += 1
                break
            if dirty >= self.dirty_max:
                assert result == blocks.NO_MEMORY
                break
            if result == blocks.NO_MEMORY:
                self.count["refused"] += 1
                break
            if result == blocks.NO_SLOT and planned == self.planned_of(results):
                self.count["refused"] += 1
                break
            assert result >= 0 or result == blocks.NO_SLOT
            dirty += padded(len(data))
            for one in spaces:
                used[one] = used[one][0] + slot_size, used[one][1] + 1
            self.slot_size_of[name, planned] = slot_size
            planned += 1
        for number, result in enumerate(results[planned + 1 :]):
            assert result == blocks.NOT_TRIED, number
        for number, ((name, data), result, sequence) in enumerate(
            zip(items[:planned], results, sequences, strict=False)
        ):
            key = table.place, name
            if result == blocks.NO_SLOT:  # no row is left
                assert key not in self.blocks
                assert sum(place == table.place for place, _ in self.blocks) >= table.rows_max * 9 // 10
                continue
            self.blocks[key] = Block(data, sequence, self.slot_size_of[name, number], expires)
            self.past(key).since.append(data)

    def planned_of(self, results: list[int]) -> int:
        """How many of a batch had a place: all up to the one behind which none was tried, or the last one."""
        tried = [result for result in results if result != blocks.NOT_TRIED]
        return len(tried) - 1 if len(tried) < len(results) or tried[-1] < 0 else len(tried)

    slot_size_of: dict[tuple[bytes, int], int]

    def use(self, space: int) -> tuple[int, int]:
        below = [s for s in ABOVE if s == space or space in self.above(s)]
        mine = [block for (place, _), block in self.blocks.items() if self.tables[place].space in below]
        return sum(block.slot_size for block in mine), len(mine)

    def above(self, space: int) -> list[int]:
        return [] if ABOVE[space] < 0 else [ABOVE[space], *self.above(ABOVE[space])]

    def block(self, table: TableLab, name: bytes, now: int) -> Block | None:
        found = None if table.is_ended else self.blocks.get((table.place, name))
        return None if found is None or (found.expires and now >= found.expires) else found

    def step_get(self) -> None:
        table = self.any_table()
        names = self.names(self.rng.choice([1, 4, 100]))
        rooms = [self.rng.choice([SLAB, SLAB, 100, -1]) for _ in names]
        results, found = get(self.core, table.number, table.directory, names, rooms, self.now)
        for name, room, result, data in zip(names, rooms, results, found, strict=True):
            block = self.block(table, name, self.now)
            if block is None:
                assert result == blocks.ABSENT
            elif len(block.data) > room:
                assert result == blocks.NO_ROOM
            elif result != blocks.NOT_RESIDENT:
                assert result == len(block.data)
                assert data == block.data

    def step_find(self) -> None:
        table = self.any_table()
        names = [*self.names(100), b"", b"a/b"]
        rows, sequences = find(self.core.find, table.number, table.directory, names, self.now, plain=True)
        for name, row, sequence in zip(names[:-2], rows, sequences, strict=False):
            block = self.block(table, name, self.now)
            assert (row >= 0, sequence) == ((False, 0) if block is None else (True, block.sequence))
        assert rows[-2:] == ([blocks.ABSENT] * 2 if table.is_ended else [blocks.ODD_NAME] * 2)

    def step_drop(self) -> None:
        table = self.any_table()
        names = self.names(self.rng.choice([1, 5, 5, 70]) if self.rng.random() < 0.7 else 1)
        rows, sequences = find(self.core.drop, table.number, table.directory, names, self.now)
        for name, row, sequence in zip(names, rows, sequences, strict=True):
            block = self.block(table, name, self.now)
            assert (row >= 0, sequence) == ((False, 0) if block is None else (True, block.sequence))
            if block is not None:
                self.forget((table.place, name))

    def step_rename(self) -> None:
        """A block goes on under another name, in the place of the one of that."""
        table = self.any_table()
        name, other = self.name(), self.name()
        if keys := [one for place, one in self.blocks if place == table.place]:
            name = self.rng.choice(keys)
        (row,), (sequence,) = find(self.core.find, table.number, table.directory, [name], self.now)
        block = self.block(table, name, self.now)
        if row < 0 or name == other:
            return
        assert block is not None
        if self.rng.random() < 0.1:
            assert self.core.rename_row(table.number, row, sequence + 1, other, self.now_us)[0] == blocks.ABSENT
        made, later = self.core.rename_row(table.number, row, sequence, other, self.now_us)
        if made == blocks.NOT_TRIED:
            return
        slot_size = self.sizes.slot_size(len(block.data))
        self.count["renamed"] += made >= 0
        if made < 0:
            assert made in (blocks.NO_MEMORY, blocks.NO_QUOTA, blocks.NO_SLOT)
            return
        assert later > sequence
        self.forget((table.place, name))
        self.blocks[table.place, other] = Block(block.data, later, slot_size, block.expires)
        self.past((table.place, other)).since.append(block.data)

    def forget(self, key: Key) -> None:
        del self.blocks[key]
        self.past(key).since.append(None)

    def keys_by_row(self, table: TableLab) -> dict[int, Key]:
        keys = [key for key in self.blocks if key[0] == table.place]
        rows, _ = find(self.core.find, table.number, table.directory, [name for _, name in keys])
        return dict(zip(rows, keys, strict=True))

    def step_drop_rows(self) -> None:
        table = self.any_table()
        if table.is_ended:
            return
        live = table.live()
        picked = self.rng.sample(range(len(live)), min(len(live), self.rng.choice([1, 3, 30])))
        rows = np.flatnonzero(table.rows["version"] & np.uint64(1))[picked].astype(np.int64)
        sequences = table.rows["sequence"][rows].copy()
        stale = self.rng.random() < 0.2
        sizes = np.zeros(len(rows), np.int64)
        keys = self.keys_by_row(table)
        self.core.drop_rows(table.number, rows, sequences + np.uint64(stale), sizes)
        for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            key = keys[row]
            assert size == (0 if stale else self.blocks[key].slot_size)
            if not stale:
                self.forget(key)

    def step_list(self) -> None:
        table = self.any_table()
        found, after = {}, -1
        while True:
            limit = self.rng.choice([1, 7, 10000])
            rows, after = self.core.list_rows(table.number, table.directory, after, limit, self.now)
            assert len(rows) <= limit
            for row, sequence, length, _, name, slab, slot, name_length in rows:
                self.core.slot_places(slab, slot)
                assert name is None or len(name) == name_length
                found[row] = sequence, length, name
            if after < 0:
                break
        alive = [key[1] for key in self.blocks if key[0] == table.place and self.block(table, key[1], self.now)]
        rows_of, sequences = find(self.core.find, table.number, table.directory, alive)
        wanted = dict(zip(rows_of, zip(alive, sequences, strict=True), strict=True))
        assert found.keys() == wanted.keys()
        for row, (sequence, length, name) in found.items():
            assert sequence == wanted[row][1]
            assert length == len(self.blocks[table.place, wanted[row][0]].data)
            assert name in (None, wanted[row][0])

    def step_land(self) -> None:
        table = self.any_table()
        if table.is_ended:
            return
        away = [
            int(row) for row in np.flatnonzero((table.rows["version"] & np.uint64(1) == 1) & (table.rows["arena"] == 0))
        ]
        keys = self.keys_by_row(table)
        for row in self.rng.sample(away, min(3, len(away))):
            if table.rows[row]["arena"]:
                continue
            sequence = int(table.rows[row]["sequence"])
            key = keys[row]
            spoil = self.rng.random() < 0.2
            assert self.land(key, row, sequence, spoil) is not spoil

    def step_take(self) -> None:
        batch = self.core.take_dirty(self.rng.choice([1, 40 * PAGE, 1 << 60]), self.rng.choice([1, 5, 1 << 20]))
        if isinstance(batch, int):
            assert batch == self.core.statistics()["queued"] or self.core.statistics()["dirty"]
            return
        if self.rng.random() < 0.7:
            self.pack(batch, tried=0.7)
        self.writes.append(Write(batch))

    def pack(self, batch: _blocks.Batch, *, tried: float = 1.0) -> None:
        """Some were smaller when they were compressed before."""
        keys = {block.sequence: key for key, block in self.blocks.items()}
        for one in pack(batch, self.rng, tried=tried, shrinks=self.rng.choice([1.0, 0.5])):
            key = keys.get(int(one["sequence"]))
            if key is None or self.tables[key[0]].is_ended:
                continue
            block, table = self.blocks[key], self.tables[key[0]]
            (row,), _ = find(self.core.find, table.number, table.directory, [key[1]])
            if row < 0:
                assert one["must_pack"], "it had its slot"
                self.forget(key)
                self.count["unpackable"] += 1
                continue
            slot_size = self.slot_sizes()[table.rows[row]["slab"]]
            assert one["must_pack"] or slot_size <= block.slot_size
            self.count["again"] += bool(one["must_pack"])
            self.count["packed"] += slot_size < block.slot_size
            self.count["unpacked"] += slot_size > block.slot_size
            block.slot_size = slot_size

    def step_write(self) -> None:
        if not self.writes:
            return
        write = self.rng.choice(self.writes)
        if not write.has_data:
            self.medium.write(write.batch.runs()[0], True)
            write.has_data = True
        write = next((one for one in self.writes if not one.has_heads), write)  # in their order
        if not write.has_heads:
            self.medium.write(write.batch.runs()[1], False)
            write.has_heads = True

    def step_end(self) -> None:
        done = [write for write in self.writes if write.has_data and write.has_heads]
        if done:
            write = self.rng.choice(done)
            write.batch.end()
            self.writes.remove(write)

    def step_fail(self) -> None:
        """The medium refuses; another batch has been written meanwhile, or not."""
        if self.writes:
            write = self.writes.pop(self.rng.randrange(len(self.writes)))
            if self.rng.random() < 0.5:
                write.batch.fail()

    def flush(self) -> None:
        while True:
            for write in self.writes:
                if not write.has_data:
                    self.medium.write(write.batch.runs()[0], True)
                if not write.has_heads:
                    self.medium.write(write.batch.runs()[1], False)
                write.batch.end()
            batch = self.core.take_dirty(1 << 60, 1 << 60)
            if isinstance(batch, int):
                break
            self.pack(batch)
            self.writes = [Write(batch)]
        self.writes = []

    def step_sync(self) -> None:
        queued = self.core.statistics()["queued"]
        self.flush()
        assert self.core.take_dirty(1, 1) == self.core.statistics()["queued"] >= queued
        self.medium.sync()
        self.count["synced"] += 1
        for key, past in self.pasts.items():
            block = self.blocks.get(key)
            past.synced, past.since = None if block is None else block.data, []

    def step_arena(self) -> None:
        self.renew_arena(self.rng.choice(list(self.arenas)))

    def renew_arena(self, place: int) -> bool:
        if not self.core.remove_arena(place):
            return False
        number, memory = self.arenas[place] = self.number(), self.arenas[place][1]
        self.core.add_arena(place, number, memory.ctypes.data, len(memory), -1)
        return True

    def step_slabs(self) -> None:
        taken = self.core.take_slabs(self.rng.choice([1, 100]))
        for slab in taken:
            first = self.medium.slabs[slab][: HEAD.itemsize].view(HEAD)[0]
            assert first["state"] == blocks.FREE_HEAD, "another host would find old blocks"
        self.core.add_slabs(np.array(taken, np.uint32), TOKEN)

    def step_clear(self) -> None:
        place = self.rng.choice(list(self.tables))
        table = self.tables[place]
        if not table.is_ended:
            self.core.end_table(place)
            table.is_ended = True
            self.epochs[table.space] += 1
            epoch, (bytes_max, blocks_max) = self.epochs[table.space], LIMITS[table.space]
            self.core.put_space(table.space, table.space + 70, ABOVE[table.space], epoch, bytes_max, blocks_max)
            for key in [key for key in self.blocks if key[0] == place]:
                self.cleared[key] = self.blocks.pop(key)
                self.past(key).since.append(None)
        while self.core.sweep_table(place, self.rng.choice([1, 50, 10000])):
            if self.rng.random() < 0.3:
                return
        self.cleared = {key: block for key, block in self.cleared.items() if key[0] != place}
        for arena in self.arenas:
            if self.core.arena_facts(arena)[1] == place and not self.renew_arena(arena):
                self.flush()  # batches still have blocks in it
                assert self.renew_arena(arena)
        assert self.core.remove_table(place)
        table = self.tables[place] = self.new_table(place)
        self.core.add_table(place, table.space, table.memory.ctypes.data, len(table.memory))

    def step_renew(self) -> None:
        """A table goes on in other memory: who has the former one, and its arenas, sees nothing that comes later."""
        table = self.rng.choice(list(self.tables.values()))
        if table.is_ended:
            return
        former, place = table.memory, table.place
        for arena, (number, _) in self.arenas.items():
            if self.core.arena_facts(arena)[1] == place:
                self.sealed[number] = self.core.statistics()["sequence"]
        fresh = self.new_table(place)
        fresh.origin = table.origin
        fresh.memory[blocks.STATE_OFFSET : blocks.STATE_OFFSET + 8] = 0
        fresh.number = self.core.renew_table(table.number, fresh.memory.ctypes.data, len(fresh.memory))
        self.tables[place] = fresh
        names = self.names(3)
        assert put(self.core, table.number, table.directory, [(name, b"late") for name in names])[0][0] == blocks.ENDED
        assert set(get(self.core, table.number, table.directory, names, [SLAB] * len(names))[0]) == {blocks.ABSENT}
        assert not self.core.list_rows(table.number, table.directory, -1, 10, self.now)[0]
        assert int(former[blocks.STATE_OFFSET : blocks.STATE_OFFSET + 8].view(np.uint64)[0]) == blocks.TABLE_ENDED
        former[PAGE:] = 0
        self.count["renewed"] += 1

    def step_drain(self) -> None:
        """Nothing leaks: without blocks, all slabs are free."""
        for key in list(self.blocks):
            table = self.tables[key[0]]
            find(self.core.drop, table.number, table.directory, [key[1]], 0)
            self.forget(key)
        if any(table.is_ended for table in self.tables.values()):
            return
        self.flush()
        assert self.core.statistics()["free_slabs"] == self.slabs
        assert self.core.statistics()["dirty_bytes"] == 0

    def step_storm(self) -> None:
        """A few names, again and again, until two accidents have a promise between them."""
        self.is_storm = True
        for name in self.rng.choices(["put", "take", "write", "write", "end", "drop"], k=self.rng.randrange(4, 25)):
            self.step(name)
        self.step(self.rng.choice(["kill", "power"]))
        for name in self.rng.choices(["drop", "put"], [3, 1], k=self.rng.randrange(6)):
            self.step(name)
        self.step("sync")
        self.step(self.rng.choice(["kill", "power"]))
        self.is_storm = False

    def step_time(self) -> None:
        self.now += 1

    def step_dirty_max(self) -> None:
        self.dirty_max = self.rng.choice([30 * PAGE, 1 << 62, 1 << 62])
        self.core.set_dirty_max(self.dirty_max)

    STEPS = {
        "put": 40,
        "get": 12,
        "find": 5,
        "drop": 8,
        "rename": 6,
        "drop_rows": 3,
        "list": 2,
        "land": 6,
        "take": 10,
        "write": 14,
        "end": 10,
        "fail": 2,
        "sync": 3,
        "arena": 2,
        "slabs": 1,
        "clear": 1,
        "renew": 1,
        "drain": 0.3,
        "storm": 4,
        "time": 1,
        "dirty_max": 0.5,
        "kill": 2,
        "power": 1.5,
    }

    cleared: dict[Key, Block]

    def run(self, steps: int) -> None:
        self.cleared = {}
        for _ in range(steps):
            self.step(*self.rng.choices(list(self.STEPS), list(self.STEPS.values())))

    def step(self, name: str) -> None:
        self.slot_size_of = {}
        self.dirty_bytes_before = self.core.statistics()["dirty_bytes"]
        if name == "kill":
            self.cleared.clear()
            self.kill()
        elif name == "power":
            self.cleared.clear()
            for place, table in list(self.tables.items()):
                if table.is_ended:
                    self.tables[place] = self.new_table(place)
            self.lose_power()
        else:
            getattr(self, f"step_{name}")()
        self.check()

    # -- what always holds

    def check(self) -> None:
        facts = self.core.statistics()
        slots: set[tuple[int, int]] = set()
        dirty = resident = 0
        pieces = []
        arenas = {number: (place, memory) for place, (number, memory) in self.arenas.items()}
        dirty_of = dict.fromkeys(self.arenas, 0)
        live_of = dict.fromkeys(self.arenas, 0)
        sizes = self.slot_sizes()
        for table in self.tables.values():
            rows = table.live()
            if not table.is_ended:
                mine = [block.sequence for (place, _), block in self.blocks.items() if place == table.place]
                assert sorted(rows["sequence"].tolist()) == sorted(mine)
            for row in rows:
                slot = int(row["slab"]), int(row["slot"])
                assert slot not in slots, "two blocks have a slot"
                slots.add(slot)
                assert (row["packed"] * PAGE or row["length"]) <= sizes[slot[0]]
                assert row["packed"] * PAGE < padded(int(row["length"]))
                is_dirty = bool(row["flags"] & (blocks.DIRTY | blocks.WRITING))
                dirty += is_dirty * padded(int(row["length"]))
                resident += row["arena"] != 0
                if row["arena"]:
                    assert row["sequence"] <= self.sealed.get(int(row["arena"]), 1 << 62)
                    place, memory = arenas[int(row["arena"])]
                    dirty_of[place] += is_dirty
                    live_of[place] += 1
                    start = int(row["page"]) * PAGE
                    pieces.append((place, start, start + padded(int(row["length"]))))
                    assert pieces[-1][2] <= len(memory)
                else:
                    assert not is_dirty, "it is nowhere"
        pieces.sort()
        for one, other in itertools.pairwise(pieces):
            assert one[0] != other[0] or one[2] <= other[1], "two blocks have the same memory"
        for place in self.arenas:
            _, _, pins, dirty_blocks, live, used, _ = self.core.arena_facts(place)
            assert (dirty_blocks, live) == (dirty_of[place], live_of[place])
            assert used <= len(self.arenas[place][1]) - 64
            assert not pins or self.writes
        assert facts["dirty_bytes"] == dirty
        assert facts["resident"] == resident
        assert facts["blocks"] == len(self.blocks)
        self.check_use(slots)
        self.check_gone()
        self.check_readers()

    def check_gone(self) -> None:
        """Whoever has copies hears of each block that is no more, and of no other one; the index of none that moved."""
        gone, ended = set[tuple[int, int]](), set[tuple[int, int, int]]()
        while found := self.core.take_gone(self.rng.choice([1, 50, 10000])):
            rows = np.frombuffer(found, blocks.GONE)
            gone |= {(address, sequence) for address, sequence in rows[["address", "sequence"]].tolist()}
            ended |= {tuple(row) for row in rows[["low", "high", "sequence"]].tolist()}
        seen = {
            (slab * SLAB + self.core.slot_places(slab, slot)[1], sequence)
            for table in self.tables.values()
            for slab, slot, sequence in table.live()[["slab", "slot", "sequence"]].tolist()
        }
        assert not gone & seen
        live = {
            tuple(row) for table in self.tables.values() for row in table.live()[["low", "high", "sequence"]].tolist()
        }
        assert not ended & live
        assert self.seen - seen <= gone
        self.seen = seen

    def check_use(self, slots: set[tuple[int, int]]) -> None:
        owned = set()
        for slab in range(self.slabs):
            found = np.frombuffer(self.core.slab_rows(slab), np.uint64).reshape(-1, 3).tolist()
            for place, number, sequence in found:
                row = self.tables[place].rows[number]
                assert row["sequence"] == sequence
                assert row["slab"] == slab
                owned.add((slab, int(row["slot"])))
        assert owned == slots
        for space in ABOVE:
            below = [s for s in ABOVE if s == space or space in self.above(s)]
            wanted = 0, 0
            for table in self.tables.values():
                if table.space in below:
                    rows = table.live()
                    sizes = self.slot_sizes()
                    wanted = wanted[0] + sum(sizes[slab] for slab in rows["slab"].tolist()), wanted[1] + len(rows)
            assert self.core.space_use(space) == wanted

    def check_readers(self) -> None:
        """Each name yields, to who maps the memory, what it is, or that it is not in memory."""
        mapped = np.array([(n, m.ctypes.data, len(m)) for n, m in self.arenas.values()], blocks.ARENA)
        for table in self.tables.values():
            if table.is_ended:
                continue
            names = sorted({name for place, name in self.pasts if place == table.place})
            picked = self.rng.sample(names, min(len(names), 12))
            results, found = read_shared(table.memory, table.directory, picked, mapped, SLAB, self.now)
            for name, result, data in zip(picked, results, found, strict=True):
                block = self.block(table, name, self.now)
                if block is None:
                    assert result == blocks.ABSENT
                elif result != blocks.NOT_RESIDENT:
                    assert data == block.data


def play(seed: int, steps: int) -> dict[str, int]:
    lab = BlocksLab(seed)
    try:
        lab.run(steps)
    except BaseException:
        print(f"seed {seed}: {lab.count}")
        raise
    finally:
        lab.abandon()
    return lab.count


if __name__ == "__main__":
    import sys

    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        print(number, play(number, int(sys.argv[3])), flush=True)
