"""The index of copies beside a plain model, over any order of calls and restarts from the heads alone."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.slab.allocator import Slot
from kvfuse.slab.layout import HEADER_SIZE, STATE_COPY, Geometry, pack_header
from kvfuse.volume.disk.copies import COPY_ROW, Granule, GranuleRun, newest, pack_head, parse_heads
from kvfuse.volume.disk.index import Index

MIB = 1 << 20
GEOMETRY = Geometry.choose(12 * MIB)
VOLUME = b"v" * 16
LENGTHS = 1, 4096, 4097, 20_000, 65_536, 140_000, GRANULE_SIZE


class Heads:
    """The head tables of a tier, as the filler leaves them on the disk."""

    def __init__(self) -> None:
        self.tables = [bytearray(GEOMETRY.head_size) for _ in range(GEOMETRY.slab_count)]
        self.sizes: dict[int, int] = {}

    def write(self, granule: Granule, slot: Slot, time: int) -> None:
        slab, offset = divmod(slot.addr, GEOMETRY.slab_size)
        if self.sizes.get(slab, slot.size) != slot.size:
            self.tables[slab] = bytearray(GEOMETRY.head_size)
        self.sizes[slab] = slot.size
        start = offset // slot.size * GEOMETRY.header_stride(slot.size)
        self.tables[slab][start : start + HEADER_SIZE] = pack_head(granule, granule.length, slot.size, VOLUME, time)

    def index(self, now: float) -> Index:
        """As after a restart."""
        rows = [parse_heads(table, slab, GEOMETRY, VOLUME) for slab, table in enumerate(self.tables)]
        found = newest(np.concatenate([np.empty(0, COPY_ROW), *rows]))
        index = Index(GEOMETRY)
        index.restore(found)
        index.restore_copies(found, now)
        return index


def check(index: Index) -> None:
    """Every copy has a slot of its own, and nothing else is taken."""
    slots = sorted((copy.place, index.slabs.slot_size(copy.place)) for copy in index.copies.values())
    assert all(place + size <= following for (place, size), (following, _) in pairwise(slots))
    assert all(index.slabs.is_durable(place) for place, _ in slots)
    assert index.slabs.used_bytes == sum(size for _, size in slots) <= GEOMETRY.data_size
    assert index.kept_bytes == sum(copy.length for copy in index.copies.values())
    assert len(index.policy) == len(index.copies)
    assert index.policy.size == index.slabs.used_bytes
    keys = {key - 1 for of_slab in index._keys.values() for key in of_slab if key}
    assert keys == index.copies.keys()


@pytest.mark.parametrize("number", range(5))
def test_any_order_of_calls(rng: random.Random, number: int) -> None:
    index, heads = Index(GEOMETRY), Heads()
    evicted = 0
    model: dict[int, Granule] = {}
    """key -> what was added last: a copy of anything else is wrong"""
    for now in range(1, 1500):
        key = rng.randrange(300) * GRANULE_SIZE
        granule = model.get(key)
        if granule is None or rng.random() < 0.3:
            granule = Granule(key, rng.randrange(1 << 40), rng.choice(LENGTHS), rng.randrange(1 << 32))
        action = rng.random()
        if action < 0.7:
            index.used([granule], now)
            slot = index.take(granule.length, now)
            assert slot is not None
            if rng.random() < 0.1:
                index.cancel(slot)
            else:
                index.add(granule, granule.length, slot, now)
                heads.write(granule, slot, now)
                model[key] = granule
        elif action < 0.85:
            found = index.find(granule)
            assert found is None or (found.generation, found.length, found.checksum) == granule[1:]
            assert found is None or granule == model[key]
        elif action < 0.99:
            index.drop(key)
        else:
            before, evicted = set(index.copies), evicted + index.evicted
            index = heads.index(now)
            assert before <= index.copies.keys(), "a copy was lost"
        check(index)
    assert evicted + index.evicted


def test_of_two_heads_of_one_granule_the_later_counts() -> None:
    heads, index = Heads(), Index(GEOMETRY)
    granule = Granule(0, 9, 4096, 1)
    for time, generation in ((5, 9), (7, 3), (6, 8)):
        slot = index.take(4096, 0)
        assert slot is not None
        heads.write(granule._replace(generation=generation), slot, time)
    (copy,) = heads.index(0).copies.values()
    assert copy.generation == 3


def test_heads_of_another_volume_or_state_are_none() -> None:
    granule = Granule(4096, 9, 5000, 1)
    slot = Index(GEOMETRY).take(5000, 0)
    assert slot is not None
    for volume_id in (VOLUME, b"w" * 16):
        table = bytearray(GEOMETRY.head_size)
        table[:HEADER_SIZE] = pack_head(granule, granule.length, slot.size, volume_id, 1)
        assert len(parse_heads(table, 0, GEOMETRY, VOLUME)) == (volume_id == VOLUME)


@pytest.mark.parametrize("number", range(20))
def test_whatever_heads_there_are_the_index_is_sound(rng: random.Random, number: int) -> None:
    """Intact heads in any place, with any figures: as of another program, or of whoever can write the folder."""
    tables = [bytearray(GEOMETRY.head_size) for _ in range(GEOMETRY.slab_count)]
    for table in tables:
        for _ in range(rng.randrange(60)):
            slot_size = 4096 * rng.choice((1, 1, 3, 16, 64, 200, 256, 300, rng.randrange(1 << 16)))
            header = pack_header(
                state=rng.choice((STATE_COPY, STATE_COPY, STATE_COPY, STATE_COPY, 1)),
                slot_size=slot_size,
                length=rng.choice((0, 1, 4096, slot_size % (1 << 32), rng.randrange(1 << 32))),
                generation=rng.randrange(1 << 64),
                inode=rng.choice((rng.randrange(1 << 64), 4096 * rng.randrange(1 << 52), 4096 * rng.randrange(50))),
                chunk=rng.choice((0, 0, 1, GRANULE_SIZE, rng.randrange(1 << 32))),
                piece_offset=rng.randrange(1 << 32),
                checksum=rng.randrange(1 << 32),
                time=rng.randrange(1 << 32),
                fingerprint=VOLUME,
                descriptor_place=rng.randrange(4),
                descriptor_length=rng.randrange(1 << 16),
            )
            start = HEADER_SIZE * rng.randrange(GEOMETRY.head_size // HEADER_SIZE)
            table[start : start + HEADER_SIZE] = header
    heads = Heads()
    heads.tables = tables
    index = heads.index(0)
    check(index)
    for now in range(200):
        granule = Granule(4096 * rng.randrange(50), now, rng.choice(LENGTHS), 1)
        slot = index.take(granule.length, now)
        assert slot is not None
        index.add(granule, granule.length, slot, now)
        check(index)


def test_a_part_of_an_extent_is_whole_granules() -> None:
    length = 2 * GRANULE_SIZE + 100
    whole = GranuleRun(8192, 5, length, bytes(range(12)), 0, length)
    first, second, last = whole.granules()
    assert (first.key, second.key, last.key) == (8192, 8192 + GRANULE_SIZE, 8192 + 2 * GRANULE_SIZE)
    assert (first.length, last.length) == (GRANULE_SIZE, 100)
    assert first.checksum == 0x03020100
    part = GranuleRun.around(whole, GRANULE_SIZE + 5, 2 * GRANULE_SIZE + 1)
    assert part.granules() == [second, last]
    assert (part.low, part.high) == (GRANULE_SIZE, length)
