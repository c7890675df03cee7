"""Quotas of namespaces of a volume that several hosts have: use is never above them, and hosts give to each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import inside
import pytest
import trio
import trio.testing
from block_hosts import BlockHost, block_hosts
from msgspec.structs import replace
from namespace_lab import UseAudit, change_namespace, make_namespace
from shared_lab import hosts, joined, make, names_in, put, quiet, until, volumes
from volume_lab import MIB, Chaos, Disk, MemoryRecords, check, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.grants import Grants, decode_grants, encode_grants
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10


Clock = trio.testing.MockClock


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def use_in_memory(number: int, *hosts: Volume) -> NamespaceUse:
    """Of all these hosts, which were there from the beginning, what is staged included."""
    uses = [inside.namespaces(volume).accounts.use(number) for volume in hosts]
    return NamespaceUse(sum([use.size for use in uses]), sum([use.files for use in uses]))


def grants_of(volume: Volume, number: int) -> Grants | None:
    return inside.coherence(volume).namespaces.grants.heard.get(number)


async def fill(volume: Volume, folder: int, prefix: bytes, count: int) -> int:
    """Store blocks until there is no quota; how many were stored."""
    for number in range(count):
        try:
            await put(volume, b"%s%d" % (prefix, number), bytes(BLOCK), folder)
        except errors.QuotaExceeded as error:
            assert error.namespace == folder
            return number
    return count


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_hosts_share_a_quota_to_the_last_block(rng: random.Random, autojump_clock: Clock, strict: bool) -> None:
    async with hosts(rng, 2, strict=strict, capacity=16 * MIB) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", capacity=10 * BLOCK)
        assert await fill(one, space, b"one", 6) == 6
        assert await fill(other, space, b"other", 6) == 4
        assert use_in_memory(space, one, other).size == 10 * BLOCK
        with pytest.raises(errors.QuotaExceeded, match=f"{10 * BLOCK} of {10 * BLOCK} bytes are used"):
            await put(one, b"more", bytes(BLOCK), space)
        await one.tree.unlink(space, b"one0")
        await one.sync()
        await put(other, b"last", bytes(BLOCK), space)  # what one host removed is room for the other
        assert use_in_memory(space, one, other).size <= 10 * BLOCK


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_hosts_share_a_number_of_files(rng: random.Random, autojump_clock: Clock, strict: bool) -> None:
    async with hosts(rng, 2, strict=strict) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", blocks=7)
        made = 0
        for number in range(10):
            try:
                await make((one, other)[number % 2], b"%d" % number, space)
                made += 1
            except errors.QuotaExceeded as error:
                assert "may have 7 files" in str(error)
        assert made == use_in_memory(space, one, other).files == 7
        await quiet(one, other)
        assert len(await names_in(one, space)) == 7


async def test_a_first_quota_holds_from_when_it_is_there(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space")
        audit = UseAudit.attach(disk)
        audit.allowed[space] = NamespaceUse(
            disk.superblock.geometry.capacity, 100
        )  # what is staged when the change begins
        async with trio.open_nursery() as nursery:
            for volume, name in ((one, b"one"), (other, b"other")):
                nursery.start_soon(fill, volume, space, name, 20)
            await until(lambda: use_in_memory(space, one, other).size >= 6 * BLOCK)
            await change_namespace(one, space, capacity=12 * BLOCK)
            audit.allowed[space] = use_in_memory(space, one, other)
        assert use_in_memory(space, one, other).size <= max(12 * BLOCK, audit.allowed[space].size)
        await change_namespace(other, space, capacity=4 * BLOCK)
        with pytest.raises(errors.QuotaExceeded):
            await put(one, b"more", bytes(BLOCK), space)
        await change_namespace(one, space, capacity=0)
        await until(lambda: grants_of(other, space) is None)
        await put(other, b"more", bytes(BLOCK), space)


async def test_a_cache_at_its_quota_evicts_its_own_on_all_hosts(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        await put(one, b"kept", bytes(BLOCK))
        cache = await make_namespace(one, ROOT_INODE, b"cache", kind="blocks", admission="all", capacity=10 * BLOCK)
        UseAudit.attach(disk)
        assert await fill(one, cache, b"one", 10) == 10
        assert await fill(other, cache, b"other", 20) == 20
        assert use_in_memory(cache, one, other).size <= 10 * BLOCK
        assert await fill(one, cache, b"again", 10) == 10
        await quiet(one, other)
        assert await names_in(one) == [b"cache", b"kept"]
        assert {name[:2] for name in await names_in(other, cache)} >= {b"ag"}


class Attempts:
    """Counts commits of records of grants, also those that are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        commit = MemoryRecords.commit

        async def counting(records: MemoryRecords, puts: Any, *rest: Any, **words: Any) -> int:
            self.count += any(key[:1] == schema.GRANTS_PREFIX for key in puts)
            return await commit(records, puts, *rest, **words)

        monkeypatch.setattr(MemoryRecords, "commit", counting)


async def test_a_full_namespace_of_blocks_writes_no_records(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    """Blocks come and go on all hosts, each evicts its own; a host that comes later gets its part."""
    options = lab_options(capacity=64 * MIB, strict=False)
    quota, data = 8 * MIB, rng.randbytes(20_000)
    async with volumes(Disk.format(options, shared=True), options, 3, rng, [Chaos(rng) for _ in range(3)]) as mounted:
        hosts = await block_hosts(mounted, capacity=str(quota), admission="all")
        attempts, count = Attempts(monkeypatch), 0

        async def put_blocks(chosen: Sequence[BlockHost], rounds: int) -> None:
            nonlocal count
            for _ in range(rounds):
                for host in chosen:
                    count += 1
                    await host.put(b"%d" % count, data)
                await trio.sleep(0.05)

        await put_blocks(hosts[:2], 400)
        before = attempts.count
        assert before < 40
        await put_blocks(hosts[:2], 600)
        assert attempts.count == before
        await put_blocks(hosts, 400)
        uses = [host.engine.use(host.folder)[0] for host in hosts]
        assert min(uses) >= quota // 3 // 2
        assert sum(uses) <= quota
        before = attempts.count
        await put_blocks(hosts, 600)
        assert attempts.count == before


async def test_hosts_that_grow_together_seldom_get_in_each_others_way(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    count = 8
    options = lab_options(capacity=64 * MIB, strict=False)
    chaos = [Chaos(rng) for _ in range(count)]
    async with volumes(Disk.format(options, shared=True), options, count, rng, chaos) as mounted:
        hosts = await block_hosts(mounted, capacity=str(8 * MIB), admission="all")
        attempts, data = Attempts(monkeypatch), rng.randbytes(20_000)

        async def put_blocks(number: int) -> None:
            for block in range(100):
                await hosts[number].put(b"%d-%d" % (number, block), data)
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(put_blocks, number)
        assert attempts.count < 20 * count


async def test_what_a_dead_host_had_not_used_is_room_again(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng) as (one,):
        stalled = Chaos(random.Random(0), delay=0.5)
        async with joined(disk, options, 7, stalled) as dying:
            space = await make_namespace(dying, ROOT_INODE, b"space", capacity=10 * BLOCK)
            await put(dying, b"file", bytes(BLOCK), space)
            await quiet(dying)
            assert grants_of(dying, space).part(7).size > BLOCK
            disk.apply({}, [key for key in disk.records if key[:1] == b"m" and schema.key_client(key) == 7])
            assert await fill(one, space, b"one", 12) == 9
            stalled.stalled = trio.Event()
            stalled.stalled.set()


def parts_of(disk: Disk, number: int) -> Grants:
    return decode_grants(disk.records[schema.grants_key(number)].value)


def lack(disk: Disk, number: int, client: int, use: NamespaceUse) -> None:
    """A client says that it lacks so much, and takes nothing."""
    key = schema.grants_key(number)
    disk.apply({key: encode_grants(parts_of(disk, number).with_lack(client, use))}, ())


async def test_a_host_that_leaves_keeps_what_it_has(rng: random.Random, autojump_clock: Clock) -> None:
    """Its use moves record by record, while another host lacks files."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng) as (one,):
        space = await make_namespace(one, ROOT_INODE, b"space", blocks=20)
        inner = await make_namespace(one, space, b"inner")
        for number in range(4):
            await make(one, b"%d" % number, space)
        await quiet(one)
        async with joined(disk, options, 7, Chaos(random.Random(0), delay=0.5)) as other:
            for number in range(4):
                await other.tree.unlink(space, b"%d" % number)
            await quiet(other)
            for number in range(6):
                await make(other, b"%d" % number, inner)
            await quiet(other)
            rows = [schema.use_key(number, 7) for number in (space, inner)]
            assert [schema.decode_counts(disk.records[key].value).inodes for key in rows] == [-4, 6]
            lack(disk, space, 1, NamespaceUse(0, 30))
        assert parts_of(disk, space).part(7).files >= 0, "others have taken what is its files'"


async def test_a_quota_that_ended_is_not_served(rng: random.Random, autojump_clock: Clock) -> None:
    """As when it ends while the one before it is served."""
    async with hosts(rng, 2) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", blocks=20)
        await until(lambda: grants_of(other, space) is not None)
        await change_namespace(one, space, blocks=0)
        await until(lambda: grants_of(other, space) is None)
        assert inside.coherence(other) is not None
        assert not await inside.coherence(other).granting._serve(space)
        await make(other, b"file", space)


async def test_wrong_parts_of_quotas_are_seen_and_mended(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", capacity=10 * BLOCK)
        inner = await make_namespace(one, space, b"inner", blocks=5)
        for number in range(4):
            await put((one, other)[number % 2], b"%d" % number, bytes(BLOCK), (space, inner)[number // 2])
        await quiet(one, other)
    key = schema.grants_key(space)
    good = decode_grants(disk.records[key].value)
    for damaged, said in (
        (None, "of which no client has a part"),
        (replace(good, parts={}), "which may have 0"),
        (replace(good, parts={**good.parts, 77: NamespaceUse(9 * BLOCK, 0)}), None),
        (replace(good, capacity=20 * BLOCK), "has other quotas"),
        (replace(good, capacity=8 * BLOCK), None),
    ):
        mended = disk.copy()
        mended.apply({key: encode_grants(damaged)} if damaged is not None else {}, [] if damaged is not None else [key])
        problems = (await check(mended)).problems
        assert [said in problem.text for problem in problems if said] == ([True] if said else []), problems
        for problem in problems:
            mended.apply(problem.puts, problem.deletes)
        assert (await check(mended)).clean
