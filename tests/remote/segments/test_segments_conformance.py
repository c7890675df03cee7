"""The contract of ``kvfuse/remote/segments/api.py``, sentence by sentence, for every engine and decorator.

An engine joins in `segment_engines`, which opens its store for a place that is empty, or holds what an earlier store of
the same test left there.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
from segment_engines import DEVICES, ENGINES, IN_MACHINE, MIB, SIZE, Opener, opening

from kvfuse.checksum import granule_checksums
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Fetch, NoSegment, SegmentInfo, SegmentStore, Transfer

STEPS = 100 if IN_MACHINE else 400


@pytest.fixture(params=ENGINES)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again."""
    with opening(request.param, request, tmp_path) as opener:
        yield opener


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[SegmentStore]:
    """With segments 1 and 2 of SIZE bytes."""
    store = await opener()
    await store.create(1, SIZE)
    await store.create(2, SIZE)
    yield store
    await store.aclose()


async def read(store: SegmentStore, offset: int, length: int, segment: int = 1) -> bytes:
    buffer = bytearray(b"\xaa" * length)
    await store.read([Transfer(segment, offset, buffer)])
    return bytes(buffer)


async def write(store: SegmentStore, offset: int, data: bytes, segment: int = 1) -> None:
    await store.write([Transfer(segment, offset, data)])


# -- segments -----------------------------------------------------------------------------------------


async def test_a_fresh_segment_reads_as_zeros(store: SegmentStore) -> None:
    assert await read(store, 0, SIZE) == bytes(SIZE)


async def test_segments_are_listed_by_number_and_outlive_the_store(opener: Opener) -> None:
    store = await opener()
    assert await store.list() == []
    for segment in (7, 0, 0x1A):
        await store.create(segment, MIB * (segment + 1))
    expected = [SegmentInfo(0, MIB), SegmentInfo(7, 8 * MIB), SegmentInfo(0x1A, 27 * MIB)]
    assert await store.list() == expected
    await write(store, 5, b"kept", segment=7)
    await store.aclose()
    store = await opener()
    assert await store.list() == expected
    assert await read(store, 4, 6, segment=7) == b"\0kept\0"
    await store.aclose()


async def test_creating_an_existing_segment_leaves_it_alone(store: SegmentStore) -> None:
    await write(store, 0, b"data")
    await store.create(1, SIZE)
    assert await read(store, 0, 4) == b"data"
    with pytest.raises(ValueError):
        await store.create(1, SIZE * 2)
    assert (await store.list())[0] == SegmentInfo(1, SIZE)


async def test_concurrent_creations_of_one_segment_make_one(store: SegmentStore) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(store.create, 3, MIB)
    assert await store.list() == [SegmentInfo(1, SIZE), SegmentInfo(2, SIZE), SegmentInfo(3, MIB)]


@pytest.mark.parametrize(("segment", "size"), [(-1, MIB), (3, 0), (3, -MIB)])
async def test_impossible_segments_are_refused(store: SegmentStore, segment: int, size: int) -> None:
    with pytest.raises(ValueError):
        await store.create(segment, size)
    assert len(await store.list()) == 2


async def test_a_removed_segment_is_gone_and_comes_back_as_zeros(store: SegmentStore) -> None:
    await write(store, 0, b"old")
    await store.remove(1)
    await store.remove(1)
    assert await store.list() == [SegmentInfo(2, SIZE)]
    with pytest.raises(ValueError):
        await read(store, 0, 1)
    await store.create(1, SIZE)
    assert await read(store, 0, 3) == bytes(3)


@pytest.mark.parametrize("opener", sorted({*ENGINES}.difference(DEVICES)), indirect=True)
async def test_a_segment_that_another_client_made_anew_is_another_one(opener: Opener, store: SegmentStore) -> None:
    other = await opener()
    try:
        await write(other, 0, b"old")
        await store.remove(1)
        other.recheck()
        with pytest.raises(NoSegment):
            await read(other, 0, 1)
        await store.create(1, SIZE)
        assert await read(other, 0, 3) == bytes(3)
        await write(other, SIZE - 3, b"old", 2)
        await store.remove(1)
        await store.create(1, SIZE)
        other.recheck()  # it may not have looked while there was none
        await other.create(1, SIZE)
        await write(other, 0, b"new")
        await other.sync()
        assert await read(store, 0, 3) == b"new"
        assert await store.list() == [SegmentInfo(1, SIZE), SegmentInfo(2, SIZE)]
    finally:
        await other.aclose()


async def test_a_store_that_was_discarded_is_empty(opener: Opener, store: SegmentStore) -> None:
    await write(store, SIZE - 10, b"x" * 10)
    await store.discard()
    await store.discard()
    again = await opener()
    assert await again.list() == []
    await again.create(1, SIZE)
    assert await read(again, 0, SIZE) == bytes(SIZE)
    await again.aclose()


async def test_removing_a_segment_under_a_call_harms_no_other(store: SegmentStore) -> None:
    data = b"2" * SIZE
    await write(store, 0, data, segment=2)

    async def use(segment: int) -> None:
        try:
            for _ in range(5):
                await write(store, 0, b"1" * MIB, segment)
                await read(store, 0, SIZE, segment)
        except (ValueError, EngineError):
            assert segment == 1, "the segment that was left alone failed"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, 1)
        nursery.start_soon(use, 1)
        await trio.lowlevel.checkpoint()
        await store.remove(1)
        await store.create(3, SIZE)
    assert await read(store, 0, SIZE, segment=2) == data
    assert await read(store, 0, SIZE, segment=3) == bytes(SIZE)


@pytest.mark.parametrize("checkpoints", range(4))
async def test_a_cancelled_creation_is_whole_or_absent(store: SegmentStore, checkpoints: int) -> None:
    scope = trio.CancelScope()

    async def create() -> None:
        with scope:
            await store.create(3, MIB)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(create)
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    if SegmentInfo(3, MIB) not in await store.list():
        await store.create(3, MIB)
    assert await read(store, 0, MIB, segment=3) == bytes(MIB)


# -- reads and writes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4097, MIB - 1])
@pytest.mark.parametrize("length", [0, 1, 511, 4096, 4097, 2 * MIB + 3])
async def test_what_was_written_is_read_and_its_neighbours_stay(
    store: SegmentStore, rng: random.Random, offset: int, length: int
) -> None:
    before, data = rng.randbytes(SIZE), rng.randbytes(length)
    await write(store, 0, before)
    await write(store, offset, data)
    assert await read(store, offset, length) == data
    assert await read(store, 0, SIZE) == before[:offset] + data + before[offset + length :]


async def test_a_batch_reaches_over_segments_in_any_order(store: SegmentStore, rng: random.Random) -> None:
    """Neighbouring, scattered, tiny and large transfers, aligned or not, more than one system call can take."""
    places = [(segment, index) for segment in (1, 2) for index in range(1500)]
    rng.shuffle(places)
    data = {place: rng.randbytes(700) for place in places}
    await store.write([Transfer(segment, index * 700, data[segment, index]) for segment, index in places])
    rng.shuffle(places)
    buffers = {place: bytearray(700) for place in places}
    await store.read([Transfer(segment, index * 700, buffers[segment, index]) for segment, index in places])
    assert buffers == data


async def test_every_kind_of_buffer_is_taken(store: SegmentStore) -> None:
    array = np.arange(3 * 2000, dtype=np.float32).reshape(3, 2000)
    aligned = mmap.mmap(-1, 8192)
    aligned[:] = b"m" * 8192
    await store.write(
        [
            Transfer(1, 0, memoryview(array)),
            Transfer(1, 40_000, b"bytes"),
            Transfer(1, 50_000, bytearray(b"bytearray")),
            Transfer(1, 61_440, memoryview(aligned)),
            Transfer(1, 80_000, b""),
        ]
    )
    back, mapped = np.empty_like(array), mmap.mmap(-1, 8192)
    await store.read([Transfer(1, 61_440, memoryview(mapped)), Transfer(1, 0, memoryview(back))])
    assert (back == array).all()
    assert mapped[:] == aligned[:]
    assert await read(store, 40_000, 5) == b"bytes"
    assert await read(store, 50_000, 9) == b"bytearray"
    await store.read([])
    await store.write([])


@pytest.mark.parametrize(("segment", "offset", "length"), [(1, -1, 1), (1, SIZE, 1), (1, SIZE - 1, 2), (9, 0, 1)])
async def test_a_range_outside_touches_nothing(store: SegmentStore, segment: int, offset: int, length: int) -> None:
    good = bytearray(b"kept")
    with pytest.raises(ValueError):
        await store.read([Transfer(1, 0, good), Transfer(segment, offset, bytearray(length))])
    with pytest.raises(ValueError):
        await store.write([Transfer(1, 0, b"lost"), Transfer(segment, offset, bytes(length))])
    if store.limits.mappable:
        with pytest.raises(ValueError):
            store.view(segment, offset, length)
    else:
        assert store.view(1, 0, 1) is None
    assert good == b"kept"
    assert await read(store, 0, 4) == bytes(4)


async def test_the_last_byte_belongs_to_the_segment(store: SegmentStore) -> None:
    await write(store, SIZE - 1, b"z")
    await write(store, SIZE, b"")
    assert await read(store, SIZE - 2, 2) == b"\0z"


async def test_a_read_needs_a_writable_buffer(store: SegmentStore) -> None:
    with pytest.raises(ValueError):
        await store.read([Transfer(1, 0, b"read-only")])


async def test_concurrent_writers_of_neighbouring_bytes_lose_nothing(store: SegmentStore, rng: random.Random) -> None:
    """Pieces of any size and alignment, many in one block, all in flight together."""
    data = rng.randbytes(100_000)
    cuts = [0, *sorted(rng.sample(range(1, len(data)), 300)), len(data)]
    pieces = list(itertools.pairwise(cuts))
    rng.shuffle(pieces)
    async with trio.open_nursery() as nursery:
        for start, stop in pieces:
            nursery.start_soon(write, store, start, data[start:stop])
    assert await read(store, 0, len(data)) == data


@pytest.mark.parametrize("checkpoints", range(4))
async def test_buffers_are_left_alone_after_a_cancelled_call(store: SegmentStore, checkpoints: int) -> None:
    """Each buffer is scribbled over after the call; a thread that still used it would show either way."""
    await write(store, 0, b"d" * SIZE)
    source, target = bytearray(b"w" * SIZE), bytearray(SIZE)
    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            await store.read([Transfer(1, 0, target)])
            await store.write([Transfer(2, 0, source)])
        source[:] = target[:] = b"x" * SIZE

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    await store.sync()
    assert set(await read(store, 0, SIZE, segment=2)) <= {0, ord("w")}
    assert target == b"x" * SIZE


# -- sync, view ---------------------------------------------------------------------------------------


async def test_sync_may_be_called_at_any_time(store: SegmentStore) -> None:
    await store.sync()
    async with trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(write, store, index * 100, b"x" * 100)
            nursery.start_soon(store.sync)
    await store.remove(1)
    await store.sync()
    assert store.counters.syncs == 6


async def test_a_view_shows_the_bytes_and_later_writes(store: SegmentStore, rng: random.Random) -> None:
    data = rng.randbytes(10_000)
    await write(store, 4_000, data)
    view = store.view(1, 4_001, 9_000)
    if not store.limits.mappable:
        assert view is None
        return
    assert view is not None, "just written, yet not resident"
    assert view == data[1:9_001]
    assert view.readonly
    await write(store, 5_000, b"new")
    assert view[999:1002] == b"new"
    assert store.counters.view_bytes == 9_000


async def test_warm_bytes_are_viewed_and_summed(store: SegmentStore, rng: random.Random) -> None:
    data = rng.randbytes(300_000)
    await write(store, 4_000, data)
    sums = await store.warm(1, 4_000, len(data), trio.CapacityLimiter(1))
    if not store.limits.mappable:
        assert sums == b""
        return
    assert sums == granule_checksums(data)
    assert store.view(1, 4_000, len(data)) == data
    with pytest.raises(ValueError, match="segment"):
        await store.warm(9, 0, 1, trio.CapacityLimiter(1))


async def test_fetched_bytes_are_in_memory_and_summed(store: SegmentStore, rng: random.Random) -> None:
    data = rng.randbytes(300_000)
    await write(store, 8_192, data)
    targets = [memoryview(mmap.mmap(-1, 303_104)) for _ in range(2)]
    batch = [Fetch(1, 8_192, len(data), targets[0]), Fetch(1, 12_288, 5, targets[1])]
    sums = await store.fetch(batch, trio.CapacityLimiter(1))
    if not store.limits.mappable:
        assert sums == []
        return
    assert sums == [granule_checksums(data), granule_checksums(data[4_096:4_101])]
    assert targets[0][: len(data)] == data
    assert targets[1][:5] == data[4_096:4_101]
    assert await store.fetch([], trio.CapacityLimiter(1)) == []
    with pytest.raises(ValueError, match="segment"):
        await store.fetch([Fetch(9, 0, 1, targets[0])], trio.CapacityLimiter(1))


async def test_a_source_shows_the_whole_segment_and_outlives_it(store: SegmentStore, rng: random.Random) -> None:
    data = rng.randbytes(10_000)
    await write(store, SIZE - 10_000, data)
    source = store.source(1)
    if not store.limits.mappable:
        assert source is None
        return
    with pytest.raises(ValueError):
        store.source(9)
    assert source is not None
    fd, shown, guard = source
    del source
    assert shown.nbytes == SIZE
    assert shown[-10_000:].tobytes() == os.pread(fd, SIZE, SIZE - 10_000) == data
    assert not shown.flags.writeable
    await write(store, 5_000, b"new")
    assert shown[4_999:5_004].tobytes() == b"\0new\0"
    await store.remove(1)
    await store.aclose()
    assert shown[-10_000:].tobytes() == os.pread(fd, SIZE, SIZE - 10_000) == data
    assert guard is None or guard.is_intact()
    identity = os.fstat(fd)
    del shown, guard
    with contextlib.suppress(OSError):  # the number may be another file's by now
        assert not os.path.samestat(os.fstat(fd), identity), "nobody closed the descriptor"


async def test_counters_count_transfers_and_bytes(store: SegmentStore) -> None:
    await store.write([Transfer(1, 0, b"abc"), Transfer(1, 3, b"de")])
    await store.read([Transfer(1, 0, bytearray(5))])
    counters = store.counters
    assert (counters.writes, counters.written_bytes, counters.reads, counters.read_bytes) == (2, 5, 1, 5)


# -- close --------------------------------------------------------------------------------------------


async def test_a_fenced_client_writes_nothing_until_it_is_another(opener: Opener, store: SegmentStore) -> None:
    """Where the engine can; and what the one who fenced it writes stays."""
    other = await opener()
    try:
        assert not await other.fence(b"")
        identity = store.identity()
        if not identity:
            assert not await other.fence(b"anybody")
            await store.renew()
            return
        assert identity != other.identity()
        await write(store, 0, b"before")
        for _ in range(2):
            assert await other.fence(identity)
        await write(other, 0, b"after!")
        with pytest.raises(EngineError, match="blocklist"):
            await write(store, 0, b"late!!")
        await store.renew()
        assert store.identity() not in (identity, other.identity())
        assert await read(store, 0, 6) == b"after!"
        await write(store, 0, b"again!")
        assert await read(other, 0, 6) == b"again!"
    finally:
        await other.aclose()


async def test_close_finishes_what_is_in_flight(opener: Opener) -> None:
    store = await opener()
    await store.create(1, SIZE)

    async def begin(index: int, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()  # and the call begins before anybody else runs
        await write(store, index * MIB, b"%d" % index * MIB)

    async with trio.open_nursery() as nursery:
        for index in range(4):
            await nursery.start(begin, index)
        await store.aclose()
        await store.aclose()
    with pytest.raises((ValueError, EngineError)):
        await write(store, 0, b"late")
    with pytest.raises(EngineError):
        await store.create(2, MIB)
    again = await opener()
    assert await read(again, 0, SIZE) == b"".join(b"%d" % index * MIB for index in range(4))
    await again.aclose()


# -- against a plain model ----------------------------------------------------------------------------


async def test_the_store_equals_bytearrays_after_every_step(opener: Opener, rng: random.Random) -> None:
    size = 256 * 1024
    store = await opener()
    model: dict[int, bytearray] = {}

    def place() -> tuple[int, int, int]:
        """Segment, offset and length: often aligned, sometimes empty."""
        unit = rng.choice([1, 512, 4096])
        offset = rng.randrange(size // unit) * unit
        length = min(rng.choice([0, 1, 100, 4096, 8192, 50_000, size]) // unit * unit, size - offset)
        return rng.choice(list(model)), offset, length

    for _ in range(STEPS):
        step = rng.choice(["create", "remove", "sync", "reopen", *["write"] * 8, *["read"] * 8])
        if step == "create" or not model:
            segment = rng.randrange(4)
            await store.create(segment, size)
            model.setdefault(segment, bytearray(size))
        elif step == "remove":
            segment = rng.randrange(4)
            await store.remove(segment)
            model.pop(segment, None)
        elif step == "sync":
            await store.sync()
        elif step == "reopen":
            await store.aclose()
            store = await opener()
        elif step == "write":
            batch = [Transfer(segment, offset, rng.randbytes(length)) for segment, offset, length in [place()]]
            segment, offset, length = place()
            half = Transfer(segment, offset, rng.randbytes(length // 2))
            rest = Transfer(segment, offset + length // 2, rng.randbytes(length - length // 2))
            for transfers in (batch, rng.sample([half, rest], 2)):
                await store.write(transfers)
                for target, start, data in transfers:
                    model[target][start : start + len(data)] = data
        else:
            places = [place() for _ in range(rng.randint(1, 5))]
            buffers = [bytearray(length) for _, _, length in places]
            await store.read([Transfer(*where[:2], buffer) for where, buffer in zip(places, buffers, strict=True)])
            for (segment, offset, length), buffer in zip(places, buffers, strict=True):
                assert buffer == model[segment][offset : offset + length]
                view = store.view(segment, offset, length)
                assert view is None or view == buffer
                del view
        assert await store.list() == [SegmentInfo(segment, size) for segment in sorted(model)]
    for segment, content in model.items():
        assert await read(store, 0, size, segment) == content
    await store.aclose()
