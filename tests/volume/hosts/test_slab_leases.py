"""Slabs of a shared volume: taken ahead, given back, adopted; slots freed by others; numbers and counts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing
from lease_lab import LEASE, REUSE, Client, World, pieces_of
from shared_lab import until
from volume_lab import MIB, Disk, lab_options

from kvfuse.errors import EngineError, NoSpace
from kvfuse.remote.records.api import Change
from kvfuse.volume.hosts import held_slabs, slab_leases, slab_supply
from kvfuse.volume.store import schema
from kvfuse.volume.store.numbers import SharedNumberRange
from kvfuse.volume.store.schema import NOBODY, SlabHolder


def world(rng: random.Random, slabs: int = 16) -> World:
    """Of about as many slabs of 1 MiB."""
    return World(Disk.format(lab_options(capacity=slabs * MIB + MIB), shared=True), rng)


@asynccontextmanager
async def joined(world: World, *numbers: int) -> AsyncIterator[list[Client]]:
    clients = [Client(world, number) for number in numbers]
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client.joined())
        yield clients


def holders(world: World) -> dict[int, SlabHolder]:
    rows = {key: row.value for key, row in world.disk.records.items() if key[:1] == b"l"}
    return {schema.key_slab(key): schema.decode_holder(value) for key, value in rows.items()}


def held_by(world: World, client: int) -> set[int]:
    return {slab for slab, holder in holders(world).items() if holder.client == client}


async def fill(client: Client, nursery: trio.Nursery, count: int = 1000) -> list[bytes]:
    """Pieces of a whole slab each, until there is no room."""
    keys = []
    for _ in range(count):
        try:
            keys.append(await client.make(nursery, MIB))
        except NoSpace:
            break
    return keys


async def test_a_client_has_slabs_before_anybody_asks(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng, 64), 1, 2) as (one, two):
        for client in (one, two):
            assert 1 <= client.core.slabs.free_slab_count <= 64 // slab_supply.AHEAD_SHARE
            assert held_by(one.world, client.number) == set(client.core.slabs.free_slabs())
        assert held_by(one.world, 1).isdisjoint(held_by(one.world, 2))
        one.world.check()


async def test_one_who_writes_steadily_does_not_wait_for_slabs(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng, 200), 1) as (client,), trio.open_nursery() as nursery:
        asked = []
        more = client.leases.take_unheld_slabs

        async def counted() -> bool:
            asked.append(True)
            return await more()

        client.leases.take_unheld_slabs = counted
        for _ in range(80):
            await client.make(nursery, 300 << 10)
        assert not asked


async def test_slabs_are_taken_many_at_once(autojump_clock: trio.testing.MockClock, rng: random.Random) -> None:
    async with joined(world(rng, 600), 1) as (client,), trio.open_nursery() as nursery:
        counters = client.core.records.counters
        before = counters.gets + counters.scans
        assert len(await fill(client, nursery, 200)) == 200
        assert len(held_by(client.world, 1)) >= 200
        assert counters.gets + counters.scans - before <= 30


async def test_slabs_that_an_attempt_of_before_gave_back_are_not_given_again(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    """An attempt whose outcome was unknown may succeed while the next one is under way."""
    async with joined(world(rng, 600), 1) as (client,):
        held = client.leases.held
        async with client.leases._turn:
            slabs = list(client.leases.view.unheld())[:100]
            assert await held.take(slabs) == 100
            async with trio.open_nursery() as nursery:
                nursery.start_soon(held.give_back, slabs[-1:])
                await trio.testing.wait_all_tasks_blocked()
                await held.give_back(slabs)
            assert held.slabs.keys().isdisjoint(slabs)
            held._coming.clear()


async def test_a_volume_can_be_filled_by_any_of_its_clients(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1, 2) as (one, two), trio.open_nursery() as nursery:
        slab_count = one.core.geometry.slab_count
        await trio.sleep(3 * slab_supply.IDLE_SECONDS)
        mine = await fill(one, nursery)
        assert len(mine) >= slab_count - 1, "the other one keeps no more than one free slab"
        await trio.sleep(3 * slab_supply.IDLE_SECONDS)
        assert len(mine) + len(await fill(one, nursery)) == slab_count, "where nobody has any left, nor that one"
        assert one.leases.space()[0] == two.leases.space()[0] == 0
        with pytest.raises(NoSpace):
            await two.make(nursery, 4096)
        one.world.check()


async def test_slabs_that_stay_free_are_given_back(autojump_clock: trio.testing.MockClock, rng: random.Random) -> None:
    async with joined(world(rng, 64), 1) as (client,), trio.open_nursery() as nursery:
        keys = await fill(client, nursery, 30)
        for key in keys:
            assert await client.remove(key)
        assert len(held_by(client.world, 1)) >= 30
        await trio.sleep(REUSE + 3 * slab_supply.IDLE_SECONDS)
        assert len(held_by(client.world, 1)) <= 64 // slab_supply.AHEAD_SHARE
        assert holders(client.world)[0].epoch >= 1, "who comes next goes on counting"
        assert client.leases.space()[0] == client.core.geometry.data_size


async def test_a_slot_freed_by_another_client_is_used_again(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1, 2) as (one, two), trio.open_nursery() as nursery:
        keys = [await one.make(nursery, 300 << 10) for _ in range(20)]
        (piece, *_) = [pieces_of(one.world.disk)[key] for key in keys]
        assert not two.holds(piece.addr)
        for key in keys:
            assert await two.remove(key)
        assert one.core.slabs.used_bytes
        await trio.sleep(1)
        assert not any(key[:1] == b"f" for key in one.world.disk.records)
        assert not one.core.slabs.is_durable(piece.addr)
        assert one.core.slabs.pending_bytes == one.core.slabs.used_bytes > 0, "not before the grace has passed"
        await trio.sleep(REUSE)
        assert one.core.slabs.used_bytes == 0


async def test_two_clients_remove_one_piece(autojump_clock: trio.testing.MockClock, rng: random.Random) -> None:
    """Holder and stranger at once: one of them does it, and the slot is freed once."""
    async with joined(world(rng), 1, 2) as (one, two), trio.open_nursery() as nursery:
        for _ in range(30):
            key = await one.make(nursery, 300 << 10)
            async with trio.open_nursery() as racing:
                racing.start_soon(one.remove, key)
                racing.start_soon(two.remove, key)
        await trio.sleep(REUSE + 1)
        assert not pieces_of(one.world.disk)
        assert one.core.slabs.used_bytes == 0
        assert not any(key[:1] in b"fs" for key in one.world.disk.records)


async def test_what_a_dead_client_held_is_used_again_in_time(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng, 100), 1, 2) as (one, two), trio.open_nursery() as nursery:
        dead = Client(one.world, 3)
        async with dead.joined():
            keys = [await dead.make(nursery, 300 << 10) for _ in range(150)]
            held = held_by(one.world, 3)
        assert len(held) > 30
        died = trio.current_time()
        assert held_by(one.world, 3) == held
        await trio.sleep(LEASE / 2)
        assert held_by(one.world, 3) == held, "as long as its lease lasts it may come back"
        await until(lambda: all(one.core.slabs.holds(slab) or two.core.slabs.holds(slab) for slab in held))
        assert trio.current_time() < died + LEASE + 5
        taken = [held & held_by(one.world, number) for number in (1, 2)]
        assert min(map(len, taken)) > len(held) // 4, "they share it"
        assert all(holder.epoch >= 2 for slab, holder in holders(one.world).items() if slab in held)
        for key in keys:
            assert await one.remove(key)
        await trio.sleep(REUSE + 1)
        assert one.core.slabs.used_bytes == two.core.slabs.used_bytes == 0


async def test_an_adopted_slab_is_not_written_at_once(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1) as (one,), trio.open_nursery() as nursery:
        dead = Client(one.world, 3)
        async with dead.joined():
            await dead.make(nursery, 4096)
            held = held_by(one.world, 3)
        await until(lambda: schema.member_key(3) not in one.world.disk.records)
        gone = trio.current_time()
        await until(lambda: held <= held_by(one.world, 1))
        assert trio.current_time() < gone + slab_leases.SPREAD_SECONDS
        assert not any(one.core.slabs.holds(slab) for slab in held)
        await until(lambda: all(one.core.slabs.holds(slab) for slab in held))
        assert trio.current_time() > gone + min(REUSE, held_slabs.ADOPTION_GRACE_MAX) - 0.05


async def test_an_adopted_slab_rests_as_long_as_a_write_may_be_under_way(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    made = world(rng)
    made.disk.quarantine = 100.0
    async with joined(made, 1) as (one,), trio.open_nursery() as nursery:
        dead = Client(one.world, 3)
        async with dead.joined():
            await dead.make(nursery, 4096)
            held = held_by(one.world, 3)
        await until(lambda: schema.member_key(3) not in one.world.disk.records)
        await until(lambda: held <= held_by(one.world, 1))
        await trio.sleep(99)
        assert not any(one.core.slabs.holds(slab) for slab in held)
        await trio.sleep(3)
        assert held
        assert all(one.core.slabs.holds(slab) for slab in held)


async def test_one_who_leaves_in_order_is_waited_for_by_nobody(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1) as (one,), trio.open_nursery() as nursery:
        leaver = Client(one.world, 3)
        async with leaver.joined():
            key = await leaver.make(nursery, 300 << 10)
            addr = pieces_of(one.world.disk)[key].addr
            leaver.core.file_count = 5
            leaver.journal.put(schema.files_key(3), schema.encode_counts(5, 500))
            await trio.sleep(1)
            files = one.leases.space()[1]
            await leaver.leases.close()
            assert not held_by(one.world, 3)
            assert schema.files_key(3) not in one.world.disk.records
        await trio.sleep(0.1)
        assert one.leases.space()[1] == files == 6, "the root directory, and five"
        assert await one.remove(key), "a slab of nobody: the f record waits for whoever takes it"
        assert [schema.split_freed_key(key).addr for key in one.world.disk.records if key[:1] == b"f"] == [addr]
        await fill(one, nursery)
        await trio.sleep(REUSE + 1)
        assert not any(key[:1] == b"f" for key in one.world.disk.records)
        one.world.check()


async def test_files_of_a_client_that_is_gone_are_counted_once(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1, 2) as (one, two):
        before = schema.decode_counts(one.world.disk.records[schema.COUNTER_FILES].value)
        dead = Client(one.world, 3)
        async with dead.joined():
            dead.journal.put(schema.files_key(3), schema.encode_counts(7, 700))
            await trio.sleep(1)
        assert one.leases.space()[1] == two.leases.space()[1] == 8
        await trio.sleep(LEASE + 5)
        assert schema.files_key(3) not in one.world.disk.records
        counts = schema.decode_counts(one.world.disk.records[schema.COUNTER_FILES].value)
        assert counts == (8, (before.size or 0) + 700)
        assert one.leases.space()[1] == two.leases.space()[1] == 8


async def test_a_stale_f_record_does_not_free_what_came_after(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    """One of a free slot, in a slab of nobody: whoever takes the slab drops it before anybody may get the slot."""
    first = world(rng)
    for slab in range(first.disk.superblock.geometry.slab_count):
        first.disk.apply({schema.freed_key(slab, slab * MIB, 1): b""}, ())
    async with joined(first, 1) as (one,), trio.open_nursery() as nursery:
        keys = await fill(one, nursery)
        await trio.sleep(2 * REUSE)
        assert len(pieces_of(first.disk)) == len(keys) == first.disk.superblock.geometry.slab_count
        assert all(one.core.slabs.is_durable(piece.addr) for piece in pieces_of(first.disk).values())
        assert not any(key[:1] == b"f" for key in first.disk.records)


async def test_broken_watches_are_made_up_for(autojump_clock: trio.testing.MockClock, rng: random.Random) -> None:
    async with joined(world(rng, 60), 1, 2) as (one, two), trio.open_nursery() as nursery:
        keys = [await one.make(nursery, 300 << 10) for _ in range(20)]
        for watch in list(one.world.disk.watches):
            watch.break_off()
        for key in keys:
            assert await two.remove(key)
        await trio.sleep(2 * REUSE)
        assert one.core.slabs.used_bytes == 0
        assert one.leases.view.holders.keys() == two.leases.view.holders.keys()
        assert one.leases.space()[0] == two.leases.space()[0] == one.core.geometry.data_size


async def test_a_damaged_slab_is_left_alone(
    autojump_clock: trio.testing.MockClock, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    first = world(rng)
    first.disk.apply({schema.slab_key(0): schema.encode_slab(4096, b"\1")}, ())
    async with joined(first, 1) as (one,), trio.open_nursery() as nursery:
        keys = await fill(one, nursery)
        assert len(keys) == first.disk.superblock.geometry.slab_count - 1
        assert not one.core.slabs.holds(0)
    assert "slab 0 is not used" in caplog.text


async def test_a_client_that_lost_its_lease_takes_nothing(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1) as (one,):
        frozen = Client(one.world, 2)
        with trio.CancelScope() as scope:
            async with frozen.joined():
                frozen.chaos.stalled = trio.Event()
                await trio.sleep(LEASE + 5)
                commits = frozen.chaos.commits
                assert not held_by(one.world, 2)
                frozen.chaos.stalled.set()
                with pytest.raises(NoSpace):
                    for _ in range(frozen.core.slabs.free_slab_count + 1):
                        frozen.core.slabs.allocate(MIB)
                with pytest.raises(EngineError):
                    await frozen.leases.take_unheld_slabs()
                await trio.sleep(1)
                assert frozen.chaos.commits == commits
                scope.cancel()


async def test_a_client_that_only_seems_to_be_gone_loses_nothing(
    autojump_clock: trio.testing.MockClock, rng: random.Random
) -> None:
    async with joined(world(rng), 1, 2) as (one, two):
        held = held_by(one.world, 2)
        key = schema.member_key(2)
        one.leases.view.apply(Change(key, None, one.world.disk.records[key].version))
        await trio.sleep(3)
        assert held_by(one.world, 2) == held
        assert all(two.core.slabs.holds(slab) for slab in held)
        assert 2 in one.leases.view.members, "it looked again"


async def test_numbers_are_given_once(
    autojump_clock: trio.testing.MockClock, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "COUNTER_RANGE", 50)
    async with joined(world(rng), 1, 2, 3) as clients:
        given: list[int] = []
        for _ in range(20):
            for client in clients:
                given += [client.core.inodes.next() for _ in range(40)]
            await trio.sleep(0.2)
        assert len(set(given)) == len(given)
        commits = sum(client.chaos.commits for client in clients)
        assert commits < len(given) / 10


async def test_numbers_run_out_where_the_store_does_not_answer(
    autojump_clock: trio.testing.MockClock, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "COUNTER_RANGE", 50)
    async with joined(world(rng), 1) as (one,):
        one.chaos.cut = trio.Event()
        assert isinstance(one.core.inodes, SharedNumberRange)
        with pytest.raises(EngineError, match="no number is left for inode"):
            for _ in range(101):
                one.core.inodes.next()
        one.chaos.cut.set()
        await trio.sleep(4)
        one.core.inodes.next()


async def test_nobody_is_a_client_of_no_slab(autojump_clock: trio.testing.MockClock, rng: random.Random) -> None:
    async with joined(world(rng, 64), 1) as (one,):
        view = one.leases.view
        assert view.unheld_count == one.core.geometry.slab_count - len(held_by(one.world, 1))
        assert NOBODY not in view.held_counts
        assert list(view.unheld()) == sorted(set(range(one.core.geometry.slab_count)) - held_by(one.world, 1))
