"""Callers that wait for memory have it in a fair order: the line alone, and at a volume."""

from __future__ import annotations

import os
import random
from collections import Counter

import inside
import pytest
import trio
from namespace_lab import make_namespace
from volume_lab import CALLER, MIB, Disk, lab_options, opened

from kvfuse.errors import InvalidArgument
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.measures.fair_line import PASSED_MAX, FairLine, PriorityLine, WaitKind
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.slots.flusher import in_fair_order
from kvfuse.volume.volume import Volume

PIECE = 64 << 10
WRITES = 2000


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=64 * MIB, staging_size=2 * PIECE)


async def test_shares_are_those_of_the_weights_and_nobody_starves(rng: random.Random) -> None:
    weights = {number: rng.choice([0.1, 1, 2, 10]) for number in range(rng.randint(2, 6))}
    line, served, waits = FairLine(), Counter[int](), Counter[int]()
    largest = 1000
    places = {}
    for number in weights:
        for _ in range(rng.randint(1, 50)):  # how many wait makes no difference
            size = rng.randint(1, largest)
            places[line.enter(number, size, weights[number])] = number, size
    for _ in range(20_000):
        first = line.places[0]
        number, size = places.pop(first)
        served[number] += size
        size = rng.randint(1, largest)
        places[line.enter(number, size, weights[number])] = number, size
        line.leave(first)
        waits.update(weights.keys())
        waits[number] = 0
        assert max(waits.values()) < 4 * largest * sum(weights.values()) / min(weights.values())
    for number, weight in weights.items():
        assert served[number] / served.total() == pytest.approx(weight / sum(weights.values()), rel=0.15)


async def test_who_waits_seldom_is_not_behind_all_that_wait() -> None:
    line = FairLine()
    flood = [line.enter(1, 100, 1.0) for _ in range(50)]
    for place in flood[:10]:
        line.leave(place)
    seldom = line.enter(2, 100, 1.0)
    assert line.places.index(seldom) <= 1
    next_one = next(place for place in line.places if place is not seldom)
    next_one.go = trio.Event()
    line.leave(seldom)
    assert line.places[0] is next_one
    assert next_one.go.is_set()
    for place in [*line.places]:
        line.leave(place)
    assert line.places == []


async def write_much(volume: Volume, folder: int, name: bytes, until: trio.Event, passed: Counter[int]) -> None:
    handle, _ = await volume.tree.create(folder, name, 0o644, CALLER, os.O_RDWR)
    number = 0
    while not until.is_set():
        await volume.files.write(handle, number % 4 * PIECE, os.urandom(PIECE))
        number += 1
        passed[folder] += 1
        if passed.total() >= WRITES:
            until.set()
        await trio.lowlevel.checkpoint()
    await volume.files.release(handle)


async def test_writers_of_two_namespaces_share_memory_by_weight(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        light = await make_namespace(volume, ROOT_INODE, b"light", kind="files", weight=4)
        heavy = await make_namespace(volume, ROOT_INODE, b"heavy", kind="files")
        enough, passed = trio.Event(), Counter[int]()
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(write_much, volume, heavy, b"%d" % number, enough, passed)
            for number in range(8):
                nursery.start_soon(write_much, volume, light, b"%d" % number, enough, passed)
        assert passed[light] / passed[heavy] == pytest.approx(4, rel=0.3)
        assert not inside.journal(volume).flusher.line.places


def test_bad_weights_are_refused() -> None:
    for weight in ("0", "-1", "many"):
        with pytest.raises(InvalidArgument, match=r"0\.01 to 100"):
            Settings().changed({"weight": weight})


async def test_bytes_of_several_namespaces_are_written_in_a_fair_order(rng: random.Random) -> None:
    """By weight, in bounded batches; each namespace in the order of its own."""
    size = 256 << 10
    weights = {b"flood": 1, b"light": 1, b"heavy": 3}
    counts = {b"flood": 80, b"light": 6, b"heavy": 18}
    options = lab_options(capacity=256 * MIB)
    async with opened(Disk.format(options), options) as volume:
        folders, names = {}, {}
        for name, weight in weights.items():
            folders[name] = await make_namespace(volume, ROOT_INODE, name, kind="files", weight=weight)
        chunks = []
        for name, count in counts.items():
            for number in range(count):
                handle, _ = await volume.tree.create(folders[name], b"%d" % number, 0o644, CALLER, os.O_RDWR)
                await volume.files.write(handle, 0, rng.randbytes(size))
                names[handle.node] = name
                chunks.append((handle.node, 0))
        order = [names[node] for node, _ in in_fair_order(inside.core(volume), chunks)]
        assert Counter(order[:30]) == {b"flood": 6, b"light": 6, b"heavy": 18}
        of_flood = [node for node, _ in in_fair_order(inside.core(volume), chunks) if names[node] == b"flood"]
        assert of_flood == [node for node in names if names[node] == b"flood"]


def test_reads_precede_writes_and_prefetch_but_nobody_starves(rng: random.Random) -> None:
    line, waiting, waits = PriorityLine(), Counter[WaitKind](), Counter[WaitKind]()
    for _ in range(20_000):
        while waiting.total() < 5 or not waiting[WaitKind.READ]:
            kind = rng.choice(list(WaitKind))
            line.enter(kind, rng.randrange(3), rng.randint(1, 1000), 1.0, kind)
            waiting[kind] += 1
        served = line.take()
        for kind in WaitKind:
            waits[kind] = waits[kind] + 1 if waiting[kind] and kind is not served else 0
        waiting[served] -= 1
        assert waits[WaitKind.READ] <= 2
        assert waits[WaitKind.WRITE] <= PASSED_MAX[WaitKind.WRITE] + 1
        assert waits[WaitKind.PREFETCH] <= PASSED_MAX[WaitKind.PREFETCH]
    line.enter(WaitKind.PREFETCH, 1, 1, 1.0, "last")
    line.drop("last")
    assert [line.take() for _ in range(waiting.total())].count("last") == 0
