"""A host leaves in order, and another one takes its slabs at once: nothing that the first one did hits bytes of it."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from contextlib import suppress

import inside
import pytest
import trio
import trio.testing
from block_hosts import BlockHost, block_hosts
from shared_lab import LEASE, check_disk, eventually, get, joined, put, quiet, until, write_at
from stopped_servers import Servers
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts import slab_leases, slab_supply
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import KEPT, Standing
from kvfuse.volume.store.schema import NOBODY
from kvfuse.volume.volume import Volume

OPTIONS = lab_options(capacity=9 * MIB)
"""8 slabs of 1 MiB"""
SMALL = 4096
"""bytes of files that are in slots of one slab"""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    made.install(monkeypatch)
    return made


@pytest.fixture
def disk() -> Disk:
    made = Disk.format(OPTIONS, shared=True)
    made.fences = True
    return made


def holders(disk: Disk) -> dict[int, int]:
    rows = {key: row.value for key, row in disk.records.items() if key[:1] == b"l"}
    return {schema.key_slab(key): schema.decode_holder(value).client for key, value in rows.items()}


def address(disk: Disk, name: bytes) -> int:
    """Of a file's first slot."""
    for key, row in disk.records.items():
        if key[:1] == b"d" and schema.split_entry_key(key)[2] == name:
            entry = schema.decode_entry(row.value)
            assert isinstance(entry, schema.InodeRecord)
            return entry.chunks[0][0].addr
    raise AssertionError(name)


class Stored:
    """Files that were acknowledged."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.files: dict[bytes, bytes] = {}

    async def store(self, volume: Volume, name: bytes, data: bytes) -> int:
        """The address of its first slot."""
        await put(volume, name, data)
        await volume.sync()
        self.files[name] = data
        return address(self.disk, name)

    async def write(self, volume: Volume, name: bytes, data: bytes) -> None:
        """Over what it has."""
        await write_at(volume, name, 0, data)
        self.files[name] = data

    async def remove(self, volume: Volume, *names: bytes) -> None:
        for name in names:
            await volume.tree.unlink(ROOT_INODE, name)
            del self.files[name]

    async def fill(self, volume: Volume, mark: bytes, size: int = SMALL) -> set[int]:
        """Files of a size, until there is no room; their addresses."""
        found = set[int]()
        while True:
            name = b"%s-%d-%d" % (mark, size, len(found))
            try:
                found.add(await self.store(volume, name, name.ljust(size, b".")))
            except errors.NoSpace:
                return found

    async def check(self, volume: Volume) -> None:
        for name, data in self.files.items():
            assert await get(volume, name) == data, name


async def check_all(disk: Disk, stored: Stored, rng: random.Random) -> None:
    """As a host finds it that never saw it before; and a check."""
    async with joined(disk, OPTIONS, 99, Chaos(rng)) as volume:
        await stored.check(volume)
    await check_disk(disk)


async def test_a_late_write_of_bytes_does_not_hit_what_others_store(
    disk: Disk, servers: Servers, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    stored = Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as stays:
        async with joined(disk, OPTIONS, 2, Chaos(rng)) as leaver:
            core = inside.core(leaver)
            first = await stored.store(leaver, b"first", b"1" * SMALL)
            stopped = core.locate(first)[1] // MIB
            servers.is_stopped = lambda _, part: part == stopped
            second = await stored.store(leaver, b"second", b"2" * SMALL)
            assert servers.late
            assert core.locate(second)[1] // MIB != stopped, "it went elsewhere"
            late_at = {at for _, at, data in servers.late if data == b"2" * SMALL}
        servers.answer()
        assert not {key for key in disk.records if key[:1] == b"m"} - {schema.member_key(inside.client(stays))}
        await trio.sleep(3 * LEASE)
        await stored.fill(stays, b"whole", MIB)
        found = await stored.fill(stays, b"small")
        assert late_at & {core.locate(addr)[1] for addr in found}, "the slot is in use again"
        servers.go_on()
        await stored.check(stays)
    await check_all(disk, stored, rng)


async def test_a_late_write_of_heads_does_not_hit_what_others_store(
    disk: Disk, servers: Servers, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """What was removed is to be marked as free, and that is late."""
    stored = Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as stays:
        async with joined(disk, OPTIONS, 2, Chaos(rng)) as leaver:
            names = [b"%d" % number for number in range(4)]
            for name in names:
                await stored.store(leaver, name, name * SMALL)
            servers.is_stopped = lambda _, part: part == 0
            await stored.remove(leaver, *names)
            await until(lambda: owes(leaver))
        servers.answer()
        assert servers.late
        await trio.sleep(3 * LEASE)
        await stored.fill(stays, b"whole", MIB)
        await stored.fill(stays, b"small")
        servers.go_on()
        await stored.check(stays)
    await check_all(disk, stored, rng)


def owes(volume: Volume) -> bool:
    """Heads are late."""
    return bool(volume.stats()["segments"]["owed_heads"])


async def test_a_slab_stays_as_long_as_heads_in_it_are_owed(
    disk: Disk, servers: Servers, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Nobody leaves: a slab that is free would go back to all."""
    stored = Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as other, joined(disk, OPTIONS, 2, Chaos(rng)) as volume:
        client, grace = inside.client(volume), inside.core(volume).grace.seconds
        slabs = {await stored.store(volume, b"%d" % number, b"1" * MIB) // MIB for number in range(4)}
        await quiet(volume, other)
        servers.is_stopped = lambda _, part: part == 0
        await stored.remove(volume, *list(stored.files))
        await until(lambda: owes(volume))
        await trio.sleep(5 * slab_supply.IDLE_SECONDS + 2 * grace)
        assert not any(inside.slabs(volume).slot_size(slab * MIB) for slab in slabs), "they are free"
        assert {holders(disk)[slab] for slab in slabs} == {client}
        servers.go_on()
        await trio.sleep(5 * slab_supply.IDLE_SECONDS + 2 * grace)
        assert not owes(volume)
        assert sum(holder == client for holder in holders(disk).values()) < 3
    await check_disk(disk)


async def test_slots_that_were_freed_lately_rest_before_others_get_them(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    stored = Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as stays:
        async with joined(disk, OPTIONS, 2, Chaos(rng)) as leaver:
            grace = inside.core(leaver).grace.seconds
            slab = await stored.store(leaver, b"kept", b"0" * SMALL) // MIB
            assert await stored.store(leaver, b"name", b"1" * SMALL) // MIB == slab
            await trio.sleep(1)
            await stored.write(leaver, b"name", b"2" * SMALL)
            freed_at = trio.current_time()
        assert not disk.fenced, "nothing was under way"
        assert trio.current_time() < freed_at + 1, "nobody waits for that who leaves"
        await trio.sleep(2)
        assert not inside.slabs(stays).holds(slab)
        assert holders(disk)[slab] != NOBODY
        await until(lambda: inside.slabs(stays).holds(slab), 2 * grace)
        assert freed_at + grace - 1 <= trio.current_time() < freed_at + grace + 3
        assert not disk.fenced
        await stored.check(stays)
    await check_all(disk, stored, rng)


async def test_a_slab_that_rests_is_not_given_back(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Its last holder but one was not cut off, and may still write."""
    disk.fences, disk.quarantine = False, 4 * LEASE
    chaos = Chaos(rng)
    async with joined(disk, OPTIONS, 1, chaos) as dead:
        slab = await Stored(disk).store(dead, b"name", b"1" * SMALL) // MIB
        died_as = inside.client(dead)
        chaos.killed = True
    async with joined(disk, OPTIONS, 2, Chaos(rng)) as heir:
        client = inside.client(heir)
        await until(lambda: holders(disk)[slab] == client)
        adopted_at = trio.current_time()
        assert died_as != client
    async with joined(disk, OPTIONS, 3, Chaos(rng)) as next_heir:
        await until(lambda: inside.slabs(next_heir).holds(slab), 10 * LEASE)
        assert trio.current_time() >= adopted_at + disk.quarantine
        assert await get(next_heir, b"name") == b"1" * SMALL
    await check_disk(disk)


async def test_who_gave_its_slabs_back_takes_none(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Nor one that it adopted, and that has rested by then."""
    disk.fences, disk.quarantine = False, LEASE
    chaos, leaver_chaos = Chaos(rng), Chaos(rng)
    async with joined(disk, OPTIONS, 1, chaos) as dead:
        slab = await Stored(disk).store(dead, b"name", b"1" * SMALL) // MIB
        chaos.killed = True
    async with joined(disk, OPTIONS, 2, leaver_chaos) as leaver:
        client, leases = inside.client(leaver), inside.leases(leaver)
        await until(lambda: holders(disk)[slab] == client)
        await leases.close()
        commits, left = leaver_chaos.commits, {slab for slab, holder in holders(disk).items() if holder == client}
        assert slab in left
        assert not await leases.take_unheld_slabs()
        await trio.sleep(3 * LEASE)
        assert leaver_chaos.commits == commits
        assert not any(map(inside.slabs(leaver).holds, left))
    await check_disk(disk)


class Images:
    """What clients commit of a slab, in order: who gives it back, and whose commits have its image."""

    def __init__(self, disk: Disk, slab: int) -> None:
        self.slab = slab
        self.events: list[str] = []
        disk.audit = self._look

    def _look(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        clients = [schema.key_client(key) for key in puts if key[:1] == b"k"]
        value = puts.get(schema.holder_key(self.slab))
        if schema.slab_key(self.slab) in {*puts, *deletes}:
            self.events += [f"image of {client}" for client in clients]
        if value is not None and schema.decode_holder(value).client == NOBODY:
            self.events += [f"given by {client}" for client in clients]


async def test_who_gave_its_slabs_back_commits_no_image_of_them(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Another host removes a file, which the holder of its slab sees to: who leaves is just about to."""
    stored = Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as stays, joined(disk, OPTIONS, 2, Chaos(rng)) as leaver:
        slab = await stored.store(leaver, b"name", b"1" * SMALL) // MIB
        assert await stored.store(leaver, b"kept", b"0" * SMALL) // MIB == slab
        await quiet(leaver, stays)
        await trio.sleep(slab_leases.TICK_SECONDS / 2)  # nobody else wants a turn just now
        images, leases = Images(disk, slab), inside.leases(leaver)
        async with trio.open_nursery() as nursery, leases._turn:
            nursery.start_soon(leases.close)
            await trio.testing.wait_all_tasks_blocked()
            await stored.remove(stays, b"name")
            await until(lambda: leases.freed.is_behind)
        await trio.sleep(1)
        assert images.events == [f"given by {inside.client(leaver)}"]
        await stored.fill(stays, b"whole", MIB)
        await stored.fill(stays, b"small")
        assert inside.slabs(stays).holds(slab)
    await check_all(disk, stored, rng)


async def test_a_slab_whose_image_is_on_its_way_is_not_given_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The block store gave it back, and no commit says so yet: it would come after those of the next holder."""
    options = lab_options(capacity=64 * MIB)
    disk, chaos = Disk.format(options, shared=True), Chaos(rng)
    async with joined(disk, options, 1, Chaos(rng)) as other, joined(disk, options, 2, chaos) as volume:
        host, _ = await block_hosts([volume, other])
        await host.put(b"name", b"x")
        await host.written()
        await quiet(volume, other)
        await host.engine.remove(host.folder, [b"name"])
        await host.written()
        (slab,) = host.engine.slabs.give_back(1)
        images = Images(disk, slab)
        chaos.commit_error = 2.0
        with pytest.raises(errors.EngineError):
            await host.engine.commit()

        async def is_given() -> bool:
            with suppress(errors.EngineError):
                await inside.leases(volume).give([slab])
            chaos.commit_error = 0.0
            return holders(disk)[slab] == NOBODY

        await eventually(is_given, pause=0.1)
        assert images.events == [f"{what} {inside.client(volume)}" for what in ("image of", "given by")]
    await check_disk(disk)


async def test_a_block_write_under_way_at_the_end_does_not_hit_what_others_store(
    servers: Servers, rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A head that is to say free, after the block store had written all."""
    options = lab_options(capacity=64 * MIB)
    disk = Disk.format(options, shared=True)
    disk.fences = True
    async with joined(disk, options, 1, Chaos(rng)) as stays:
        async with joined(disk, options, 2, Chaos(rng)) as leaver:
            host, other = await block_hosts([leaver, stays])
            await host.put(b"name", b"first")
            await host.put(b"kept", b"stays")
            await host.written()
            slab = block_slab(host, b"name")
            close, client = host.engine.close, inside.client(leaver)

            async def close_and_remove() -> None:
                await close()
                servers.is_stopped = lambda segment, part: True
                host.engine.drop(host.folder, [b"name"])
                host.engine.wake()
                await until(lambda: bool(servers.late))

            monkeypatch.setattr(host.engine, "close", close_and_remove)
        assert holders(disk)[slab] == client, "as the slab of one who died"
        servers.answer()
        await until(lambda: holders(disk)[slab] == inside.client(stays), 3 * LEASE)
        assert disk.fenced
        servers.go_on()
        await other.until(b"kept", b"stays")
        await other.put(b"name", b"second")
        await other.written()
    await check_disk(disk)


def block_slab(host: BlockHost, name: bytes) -> int:
    found = host.engine.find(host.folder, name)
    assert found is not None
    table, row, _ = found
    return int(table.rows[row]["slab"])


async def test_the_next_daemon_does_not_go_on_as_a_client_that_gave_its_slabs_back(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Not if this one is killed before its lease has ended: it had what it knows of slabs that are others' by then."""
    keeper, kept = MemoryKeeper(), list[bool]()

    def look(puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        for key, value in puts.items():
            if key[:1] == b"l" and schema.decode_holder(value).client == NOBODY:
                kept.append(bool(keeper.list_names(KEPT)))

    async with joined(disk, OPTIONS, 1, Chaos(rng), keeper) as volume:
        await Stored(disk).store(volume, b"name", b"1" * SMALL)
        assert keeper.list_names(KEPT)
        disk.audit = look
    assert kept
    assert not any(kept)


async def test_a_slab_with_late_writes_rests_for_the_next_daemon(
    disk: Disk, servers: Servers, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """That one has the former cut off, and does not write there before."""
    keeper, stored = MemoryKeeper(), Stored(disk)
    async with joined(disk, OPTIONS, 1, Chaos(rng), keeper) as volume:
        await stored.store(volume, b"before", b"0" * SMALL)
        servers.is_stopped = lambda _, part: part == 0
        slab = await stored.store(volume, b"late", b"1" * SMALL) // MIB
        assert owes(volume)
        client = inside.client(volume)
        volume.hand_over()
    standing = Standing.take(keeper)
    assert standing is not None
    assert slab in (standing.resting or ())
    standing.keep(keeper)
    servers.answer()
    async with joined(disk, OPTIONS, 1, Chaos(rng), keeper) as volume:
        assert inside.client(volume) == client
        assert disk.fenced
        await stored.remove(volume, b"late")
        await stored.fill(volume, b"small")
        servers.go_on()
    await check_all(disk, stored, rng)
