"""What hosts tell each other: uses of blocks, and that they lack room; nobody else hears of it."""

from __future__ import annotations

import random

import inside
import pytest
import trio.testing
from block_hosts import BlockHost, block_hosts
from shared_lab import eventually, until, volumes
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse.volume.hosts import reports
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.store import schema

BLOCK = b"x" * 60_000


def reports_of(host: BlockHost) -> Reports:
    coherence = inside.parts(host.volume).coherence
    assert coherence is not None
    return coherence.giving.reports


def prompt(rng: random.Random, count: int) -> list[Chaos]:
    return [Chaos(random.Random(rng.random())) for _ in range(count)]


async def test_blocks_that_another_host_reads_stay(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """The holder evicts the least recently used; it has used none of them, the other host some."""
    options = lab_options(capacity=64 * MIB, strict=False)
    async with volumes(Disk.format(options, shared=True), options, 3, rng, prompt(rng, 3)) as mounted:
        one, two, three = await block_hosts(mounted, eviction="lru", admission="all")
        names = [b"%03d" % number for number in range(120)]
        for name in names:
            await one.put(name, BLOCK)
        await one.engine.flush()
        used = names[:40]
        for name in used:
            assert await two.get(name) == BLOCK
        two.engine.eviction.look()
        await until(lambda: reports_of(one).counters.uses_heard >= len(used))
        one.engine.eviction.look()
        one.engine.evict(one.folder, 60 * len(BLOCK))
        there = {name for name in names if one.engine.find(one.folder, name) is not None}
        assert 20 <= len(there) < 90, "some were evicted"
        assert set(used) <= there
        assert not reports_of(three).counters.heard


async def test_what_is_told_of_uses_is_bounded(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(reports, "USES_MAX", 10)
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, prompt(rng, 2)) as mounted:
        one, two = await block_hosts(mounted)
        names = [b"%03d" % number for number in range(100)]
        for name in names:
            await one.put(name, name)
        await one.engine.flush()
        for name in [*names, *names[:10]]:
            assert await two.get(name) == name
        two.engine.eviction.look()
        heard = list[int]()
        monkeypatch.setattr(one.engine, "hear_uses", lambda uses: heard.extend(uses["sequence"].tolist()))
        await until(lambda: len(heard) == 10)
        found = [two.engine.find(two.folder, name) for name in names[:10]]
        assert sorted(heard) == sorted([one[2] for one in found if one is not None]), "the most used ones"
        await until(lambda: not any(key[:1] == b"a" for key in disk.records), seconds=10)
        before = reports_of(two).counters.sent
        await trio.sleep(30)
        assert reports_of(two).counters.sent == before, "nobody read anything"


async def test_any_bytes_may_come_as_a_report(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options(capacity=64 * MIB, strict=False)
    async with volumes(Disk.format(options, shared=True), options, 2, rng, prompt(rng, 2)) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"name", b"block")
        await one.engine.flush()
        key = schema.report_key(reports_of(one).member.client, reports_of(two).member.client)
        values = [rng.randbytes(20), b"", schema.encode_report(schema.HostReport(-1, b"odd"))]
        values += [schema.encode_report(schema.HostReport(1 << 40, rng.randbytes(16 * 64))) for _ in range(8)]
        for value in values:
            await inside.records(two.volume).commit({key: value})

        async def has_heard() -> bool:
            return reports_of(one).counters.uses_heard >= 8 * 64

        await eventually(has_heard)
        await one.put(b"another", b"block")  # the other one may have gone with a slab that was asked for
        await two.until(b"another", b"block")


async def test_one_host_alone_is_asked_for_room(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """It holds the most slabs with blocks."""
    options = lab_options(capacity=32 * MIB, strict=False)
    async with volumes(Disk.format(options, shared=True), options, 3, rng, prompt(rng, 3)) as mounted:
        one, two, three = await block_hosts(mounted, admission="all", eviction="fifo")
        for number in range(32 * MIB // 60_000 + 100):
            await one.put(b"%d" % number, BLOCK)
        for number in range(150):
            await two.put(b"two-%d" % number, BLOCK)
        assert reports_of(two).counters.asked
        await until(lambda: reports_of(one).counters.given_slabs > 0)
        assert not reports_of(three).counters.heard


async def test_another_host_is_asked_where_the_first_one_gives_nothing(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=48 * MIB, strict=False)
    async with volumes(Disk.format(options, shared=True), options, 3, rng, prompt(rng, 3)) as mounted:
        hosts = await block_hosts(mounted, admission="all", eviction="fifo")
        for number in range(48 * MIB // 60_000):
            await hosts[number % 2].put(b"%d" % number, BLOCK)
        asked = list[int]()
        for number, host in enumerate(hosts[:2]):

            async def give(client: int, wanted: int, number: int = number) -> None:
                asked.append(number)

            monkeypatch.setattr(inside.parts(host.volume).coherence.giving, "_give", give)
        three = reports_of(hosts[2])

        async def are_asked() -> bool:
            three.ask(4)
            return {0, 1} <= set(asked)

        await eventually(are_asked, pause=0.1)
        assert len(asked) < 10
