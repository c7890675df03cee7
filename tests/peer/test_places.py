"""Places of bytes in other hosts' memory, as they are sent and checked, and the READs that are made of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from mmap import PROT_READ, mmap

import numpy as np
import pytest
from link_lab import KIB, LinkedPair, linked
from soft_rdma import SoftNetwork

from kvfuse.peer import neighbour as neighbour_module
from kvfuse.peer import service as service_module
from kvfuse.peer.peer_wire import ANSWER, Rows, WireError
from kvfuse.peer.queue_pair import join
from kvfuse.peer.rdma import span_of
from kvfuse.peer.read_link import ReadLink
from kvfuse.peer.read_plans import PLACE, PLACES_MAX, Places, check_counts, places_of, plan, split_places
from kvfuse.peer.verbs import PIECE, MemoryPart
from kvfuse.volume.tier.arenas import ReadClass
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.views.neighbours import Answer


def cut(rng: random.Random, start: int, size: int) -> list[MemoryPart]:
    """A range, in up to 5 parts with a key each."""
    edges = sorted({0, size, *(rng.randrange(1, size) for _ in range(rng.randrange(5)) if size > 1)})
    return [
        MemoryPart(start + low, high - low, rng.getrandbits(32), rng.getrandbits(32)) for low, high in pairwise(edges)
    ]


def test_reads_of_places_cover_each_byte_once_in_its_order(rng: random.Random) -> None:
    for _ in range(200):
        pairs, expected = [], []
        for _ in range(rng.randint(1, 5)):
            size = rng.choice((1, 2, 10, 4096, 1 << 22))
            remote, local = rng.getrandbits(48), rng.getrandbits(48)
            far, near = cut(rng, remote, size), cut(rng, local, size)
            pairs.append((places_of(far), near))
            expected.append((remote, local, size, {part.rkey for part in far}, {part.lkey for part in near}))
        planned, start = plan(pairs), 0
        for end, (remote, local, size, rkeys, lkeys) in zip(planned.ends, expected, strict=True):
            for row in planned.reads[start:end].tolist():
                assert row[:2] == (remote, local)
                assert row[3] in rkeys
                assert row[4] in lkeys
                remote, local, size = remote + row[2], local + row[2], size - row[2]
            assert size == 0
            start = end
        assert start == len(planned.reads)


def test_what_is_in_one_piece_on_both_sides_is_one_read() -> None:
    planned = plan([(places_of([MemoryPart(1000, 4096, 1, 2)]), [MemoryPart(5000, 4096, 3, 4)])])
    assert planned.reads.tolist() == [(1000, 5000, 4096, 2, 3)]


def answer(*rows: tuple[Answer, int]) -> Rows:
    made = np.zeros(len(rows), ANSWER)
    for place, row in enumerate(rows):
        made["answer"][place], made["places"][place] = row
    return made


@pytest.mark.parametrize(
    ("rows", "are_welcome"),
    [
        ([(Answer.HERE, 1)], False),
        ([(Answer.HERE, PLACES_MAX + 1)], True),
        ([(Answer.HERE, 0xFFFFFFFF)], True),
        ([(Answer.HERE, 1), (Answer.ABSENT, 1)], True),
    ],
)
def test_places_that_no_answer_may_have(rows: list[tuple[Answer, int]], are_welcome: bool) -> None:
    with pytest.raises(WireError, match="places"):
        check_counts(answer(*rows), are_welcome=are_welcome)


@pytest.mark.parametrize("lengths", [[4095], [4097], [4096, 0], [0xFFFFFFFF, 4097], [2048, 2047]])
def test_places_of_another_size_than_was_asked_for(lengths: list[int]) -> None:
    places = np.array([(1 << 40, length, 7) for length in lengths], PLACE)
    with pytest.raises(WireError, match="another size"):
        split_places(places, [len(lengths)], [4096])


# -- a host that sends any ----------------------------------------------------------------------------


def altered(rng: random.Random, places: Places) -> Places:
    """Of any bytes, with a field of any value, or too many."""
    places = places.copy()
    match rng.randrange(6):
        case 0:
            return np.frombuffer(rng.randbytes(places.nbytes), PLACE)
        case 1:
            return np.concatenate([places] * rng.randint(2, 40))
        case 2:
            return places
    name = rng.choice(list(PLACE.names or ()))
    value = rng.choice((0, 1, 0xFFFFFFFF, rng.getrandbits(32)))
    places[name][rng.randrange(len(places))] = value
    return places


async def test_places_of_any_bytes_cost_time_and_never_a_byte(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has right bytes, or none, and reads by RDMA again from the host when that is honest."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)
    monkeypatch.setattr(neighbour_module, "LINK_PAUSE_MAX", 0.5)
    monkeypatch.setattr(neighbour_module, "RETRY_MAX", 0.1)
    monkeypatch.setattr(neighbour_module, "RETRY_MIN", 0.01)
    lies = Counter[str]()
    async with linked(SoftNetwork(), connections=2) as pair:
        inos = pair.put([rng.choice((1, 4096, 64 * KIB)) for _ in range(8)])
        await pair.until_by_rdma(inos)
        honest = ReadLink.places_of

        def places_of(self: ReadLink, view: memoryview) -> Places | None:
            places = honest(self, view)
            return altered(rng, places) if places is not None and rng.random() < 0.3 else places

        monkeypatch.setattr(ReadLink, "places_of", places_of)
        for _ in range(40):
            await pair.reader.until_ready(1)
            lies.update(await read_guarded(pair, inos, rng))
        monkeypatch.setattr(ReadLink, "places_of", honest)
        await pair.reader.until_ready(1)
        await pair.until_by_rdma(inos)
    assert min(lies["lost"], lies["right"]) > 20, lies


async def read_guarded(pair: LinkedPair, inos: list[int], rng: random.Random) -> list[str]:
    """Memory around the targets stays as it was."""
    wanted, targets = [pair.writer.wanted(ino) for ino in inos], []
    pair.memory[:] = 0x5A
    outside, start = np.ones(len(pair.memory), bool), 0
    for one in wanted:
        start += rng.randrange(5000)
        outside[start : start + one.high] = False
        targets.append(pair.memory[start : start + one.high].data)
        start += one.high
    found, data = await pair.reader.read(*wanted, targets=targets)
    assert (pair.memory[outside] == 0x5A).all()
    for ino, is_right, block in zip(inos, found, data, strict=True):
        assert not is_right or block == pair.writer.neighbourhood.blocks[ino]
    return ["right" if is_right else "lost" for is_right in found]


# -- where bytes lie ----------------------------------------------------------------------------------


def test_where_views_lie() -> None:
    mapped = np.frombuffer(mmap(-1, 1 << 20), np.uint8)
    span = span_of(mapped[5000:9000].data[10:20])
    assert span is not None
    assert (span.memory is mapped, span.start, span.size) == (True, 5010, 10)
    for gone_soon in (np.zeros(100, np.uint8).data, memoryview(bytearray(100)), memoryview(b"abc"), mapped[:0].data):
        assert span_of(gone_soon) is None
    read_only = np.frombuffer(mmap(-1, 1 << 20, prot=PROT_READ), np.uint8)
    assert span_of(read_only[5000:9000].data) is None, "a device cannot have what this process cannot write"


def test_blocks_of_the_tier_lie_in_their_arena() -> None:
    tier = SharedTier(64 << 20)
    blocks = [tier.allocate(5000, ReadClass(1, 0, 0, 0o400)) for _ in range(3)]
    spans = []
    for block in blocks:
        assert block is not None
        spans.append(span_of(block.buffer[100:4000].data))
        assert spans[-1] is not None
        assert spans[-1].memory is block.home.memory.bytes
        assert spans[-1].memory.ctypes.data + spans[-1].start == block.address + 100
        assert spans[-1].size == 3900
    assert PIECE % 4096 == 0


def test_ranges_are_cut_where_either_side_is() -> None:
    remote = [(100, 10, 1), (110, 5, 2)]
    local = [(500, 4, 7), (504, 8, 8), (512, 3, 9)]
    assert join(remote, local) == [
        (100, 500, 4, 1, 7), (104, 504, 6, 1, 8), (110, 510, 2, 2, 8), (112, 512, 3, 2, 9),
    ]  # fmt: skip
