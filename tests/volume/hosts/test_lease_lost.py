"""A client that loses its lease: it commits nothing more, says so to its callers, and goes on as another client."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

import inside
import pytest
import trio
import trio.testing
from shared_lab import LEASE, eventually, exists, hosts, make, names_in, until, volumes
from shared_lab import put as put_relaxed
from test_coherence import HearingKernel
from volume_lab import CALLER, Chaos, Disk, MemorySegments, lab_options

from kvfuse import errors
from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts import slab_supply
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

FENCE_SECONDS = 5.0
OLD, NEW = b"old " * 5000, b"new " * 7000


@pytest.fixture
def chaos() -> list[Chaos]:
    return [Chaos(random.Random(number)) for number in range(2)]


async def put(volume: Volume, name: bytes, data: bytes) -> int:
    """Write a file, and have it stored; its inode."""
    handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    await volume.files.write(handle, 0, data)
    await volume.files.fsync(handle)
    await volume.files.release(handle)
    return node.ino


async def opened(volume: Volume, name: bytes, flags: int = os.O_RDWR) -> FileHandle:
    return await volume.files.open((await volume.tree.lookup(ROOT_INODE, name)).ino, flags, CALLER)


async def get(volume: Volume, name: bytes) -> bytes:
    handle = await opened(volume, name, os.O_RDONLY)
    try:
        return bytes(await volume.files.read(handle, 0, 1 << 20))
    finally:
        await volume.files.release(handle)


async def is_gone(other: Volume, client: int) -> None:
    """The store has ended the lease of a client, and another one knows."""
    assert inside.leases(other) is not None
    members = inside.leases(other).view.members
    await until(lambda: client not in members)


async def is_another(volume: Volume, client: int) -> None:
    """Joined again."""
    await until(lambda: inside.client(volume) != client)


@asynccontextmanager
async def frozen(own: Chaos, volume: Volume, other: Volume) -> AsyncIterator[None]:
    """The client stops before the body. After it ``other`` has seen it go; it wakes, and is another one."""
    client = inside.client(volume)
    own.stalled = trio.Event()
    yield
    await is_gone(other, client)
    own.stalled.set()
    await is_another(volume, client)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_client_that_wakes_after_its_lease_goes_on_as_another(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos], strict: bool
) -> None:
    async with hosts(rng, 2, chaos, strict=strict) as (one, two):
        for name in (b"kept", b"changed", b"read"):
            await put(one, name, OLD)
        changed, reading = await opened(one, b"changed"), await opened(one, b"read")
        await one.files.write(changed, 0, NEW)
        chaos[0].stalled = trio.Event()
        told: list[BaseException] = []

        async def wait_for_fsync() -> None:
            try:
                await one.files.fsync(changed)
            except EngineError as error:
                told.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_fsync)
            await is_gone(two, 1)
            await put(two, b"meanwhile", NEW)
            view = inside.leases(two).view
            await until(lambda: 1 not in view.held_counts, 5.0)
            chaos[0].stalled.set()
        assert told, "who waited was told"
        await is_another(one, 1)
        for attempt in (one.files.write(changed, 0, b"x"), one.files.fsync(changed), one.files.flush(changed)):
            with pytest.raises(EngineError, match="lost its lease"):
                await attempt
        await one.files.release(changed)
        assert bytes(await one.files.read(reading, 0, 1 << 20)) == OLD
        await one.files.write(reading, 0, NEW)
        await one.files.fsync(reading)
        await one.files.release(reading)
        for volume in (one, two):
            assert [await get(volume, name) for name in (b"kept", b"changed", b"meanwhile")] == [OLD, OLD, NEW]
        await put(one, b"later", NEW)
        await eventually(lambda: exists(two, b"later"))
        assert [await get(two, name) for name in (b"later", b"read")] == [NEW, NEW]
        assert await names_in(one) == await names_in(two)


async def test_a_put_after_the_lease_was_lost_leaves_the_name_as_it_is(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """Until the volume is joined again, names are told as they were known: never a file whose put was refused."""
    async with hosts(rng, 1, chaos) as (one,):
        await put(one, b"block", OLD)
        await put(one, b"other", OLD)
        await inside.parts(one).abandon()
        with pytest.raises(EngineError):
            await one.blocks.put(ROOT_INODE, b"block", memoryview(NEW), CALLER, 0o644)
        with pytest.raises(EngineError):
            await one.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"third", 0)
        with pytest.raises(EngineError):
            await one.tree.unlink(ROOT_INODE, b"other")
        assert (await one.tree.lookup(ROOT_INODE, b"block")).size == len(OLD)
        assert (await one.tree.lookup(ROOT_INODE, b"other")).size == len(OLD)


async def test_names_that_nobody_stored_are_forgotten(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    async with hosts(rng, 2, chaos) as (one, two):
        await put(one, b"stays", OLD)
        async with frozen(chaos[0], one, two):
            handle, _ = await one.tree.create(ROOT_INODE, b"never", 0o644, CALLER, os.O_RDWR)
            await one.files.write(handle, 0, NEW)
            await one.tree.unlink(ROOT_INODE, b"stays")
        assert await names_in(one) == await names_in(two) == [b"stays"]
        with pytest.raises(EngineError):
            await one.files.read(handle, 0, 1)
        await one.files.release(handle)
        assert await get(one, b"stays") == OLD


async def test_an_operation_under_way_ends_in_an_error(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """It began with what the client knew then, and does not bring it into the new membership."""
    async with hosts(rng, 2, chaos, strict=True) as (one, two):
        await put(one, b"file", OLD)
        results: list[str] = []

        async def attempt(name: bytes) -> None:
            try:
                await put(one, name, NEW)
            except errors.KvfuseError as error:
                results.append(type(error).__name__)
            else:
                results.append("stored")

        async with trio.open_nursery() as nursery, frozen(chaos[0], one, two):
            for number in range(5):
                nursery.start_soon(attempt, b"%d" % number)
        assert results == 5 * ["EngineError"]
        assert await names_in(two) == [b"file"]
        await attempt(b"now")
        assert results.pop() == "stored"


async def test_the_lease_is_lost_again_and_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    async with hosts(rng, 2, chaos, strict=True) as (one, two):
        for round_number in range(3):
            client = inside.client(one)
            chaos[0].cut = trio.Event()
            await is_gone(two, client)
            chaos[0].cut.set()
            await is_another(one, client)
            await put(one, b"%d" % round_number, NEW)
        assert await names_in(two) == [b"0", b"1", b"2"]


async def test_what_a_dead_client_removed_is_freed_by_its_heir(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """So are its sequence record and its count of files."""
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        ino = await put(one, b"file", OLD)
        await one.tree.unlink(ROOT_INODE, b"file")
        await one.sync()
        key = schema.orphan_key(ino)
        assert key in disk.records
        assert schema.decode_orphan(disk.records[key].value).remover == 1
        async with frozen(chaos[0], one, two):
            await is_gone(two, 1)
            left = [key, schema.sequence_key(1)]
            await until(lambda: not any(key in disk.records for key in left), 10 * inside.core(two).grace.seconds)
            assert schema.files_key(1) not in disk.records


async def test_nothing_is_left_of_clients_that_left_in_order(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for volume in (one, two):
            await make(volume, b"%d" % inside.client(volume))
    assert not [key for key in disk.records if key[:1] in (b"m", b"k", b"q")]


@pytest.mark.parametrize("fences", [False, True])
async def test_slots_of_a_dead_client_are_used_at_once_where_it_can_be_cut_off(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos], fences: bool
) -> None:
    """Where it cannot, after a grace. It wakes, and is cut off no more with its new lease."""
    options = lab_options()
    disk = Disk.format(options, shared=True)
    disk.fences = fences
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"file", OLD)
        identity = inside.segments(one).identity()
        held = [slab for slab in range(inside.core(two).geometry.slab_count) if inside.slabs(one).holds(slab)]
        async with frozen(chaos[0], one, two):
            await is_gone(two, 1)
            gone = trio.current_time()
            await until(lambda: all(map(inside.slabs(two).holds, held)))
            assert held
            assert disk.fenced == ({identity} if fences else set())
            assert (trio.current_time() - gone < 2.0) == fences
        await put(one, b"again", NEW)
        assert await get(two, b"again") == NEW


async def test_what_cannot_be_cut_off_keeps_nobody_waiting(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that lost their leases together are back at once; what they held as others comes later, by a grace."""
    asked: list[tuple[bytes, bytes]] = []

    async def fence(self: MemorySegments, identity: bytes) -> bool:
        asked.append((self.identity(), identity))
        await trio.sleep(FENCE_SECONDS)
        raise EngineTimeout("injected: no answer of a monitor")

    monkeypatch.setattr(MemorySegments, "fence", fence)
    monkeypatch.setattr(slab_supply, "AHEAD_IDLE", slab_supply.AHEAD_SIZE)
    options = lab_options(capacity=1 << 30)
    disk = Disk.format(options, shared=True)
    disk.fences = True
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        held, in_one_commit = inside.leases(one).view.held_counts, disk.limits.commit_operations_max // 2
        await until(lambda: min(held[1], held[2]) > in_one_commit)
        chaos[0].stalled = chaos[1].stalled = trio.Event()
        await trio.sleep(2 * LEASE)
        chaos[0].stalled.set()
        await until(lambda: {inside.client(one), inside.client(two)}.isdisjoint({1, 2}), 1.0)
        with trio.fail_after(1.0):
            for number, volume in enumerate((one, two)):
                await put(volume, b"%d" % number, NEW)
        held = inside.leases(one).view.held_counts
        await until(lambda: {1, 2}.isdisjoint(held), 2 * FENCE_SECONDS)
    assert len(asked) == len(set(asked)), "nobody is cut off again and again"


async def test_a_volume_that_could_not_be_joined_at_once_is_as_before(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """What one attempt took over of the memory that is shared with clients of rings, the next one has."""
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        before = inside.tier(one)
        failures = [EngineError("injected: nobody knows what became of this commit")]

        def fail(puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
            if failures and schema.sequence_key(1001) in puts:
                raise failures.pop()

        async with frozen(chaos[0], one, two):
            disk.audit = fail
        assert not failures
        assert inside.client(one) == 2001
        assert before.capacity
        assert inside.tier(one) is before
        await is_gone(two, 1001)
        await put(one, b"again", NEW)


@pytest.mark.parametrize("fences", [False, True])
async def test_random_work_of_clients_that_are_frozen_now_and_then(
    rng: random.Random, autojump_clock: trio.testing.MockClock, fences: bool
) -> None:
    """What was acknowledged is there, unless another client changed it; nothing else ever is; and the rest is clean."""
    options = lab_options(strict=True, capacity=16 << 20)
    disk = Disk.format(options, shared=True)
    disk.fences = fences
    chaos = [Chaos(random.Random(rng.random()), delay=0.3) for _ in range(3)]
    async with volumes(disk, options, 3, rng, chaos) as all_volumes:
        stored: dict[bytes, bytes] = {}
        attempted: dict[bytes, set[bytes | None]] = {}

        async def work(number: int) -> None:
            volume, own = all_volumes[number], random.Random(rng.random())
            for step in range(25):
                name = b"%d-%d" % (number, own.randrange(4))
                data = b"%d %d," % (number, step) * own.randrange(1, 30_000)
                attempted.setdefault(name, {None}).add(data)
                try:
                    await put(volume, b"tmp-%d-%d" % (number, step), data)
                    await volume.tree.rename(ROOT_INODE, b"tmp-%d-%d" % (number, step), ROOT_INODE, name, 0)
                except errors.KvfuseError:
                    stored.pop(name, None)  # unknown: it may be the old content, or the new
                    await trio.sleep(own.random())
                else:
                    stored[name] = data
                    attempted[name] = {data}
                await trio.sleep(own.random())

        async def freeze() -> None:
            while True:
                await trio.sleep(rng.random() * 10)
                frozen = rng.choice(chaos)
                frozen.stalled = trio.Event()
                await trio.sleep(rng.random() * 2 * LEASE)
                frozen.stalled.set()

        async with trio.open_nursery() as background:
            background.start_soon(freeze)
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(work, number)
            background.cancel_scope.cancel()
        for own in chaos:
            if own.stalled is not None:
                own.stalled.set()
        await trio.sleep(3 * LEASE)
        for volume in all_volumes:
            found = {name: await get(volume, name) for name in await names_in(volume) if not name.startswith(b"tmp")}
            for name, data in stored.items():
                assert found.get(name) == data, name
            for name, data in found.items():
                assert data in attempted[name], name


async def test_a_volume_is_closed_while_it_cannot_be_joined_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    chaos[0].delay = 1.0  # so that joining takes a while
    async with hosts(rng, 1, chaos[:1]) as (one,):
        await put(one, b"file", OLD)
        former = inside.parts(one)
        chaos[0].stalled = trio.Event()
        await trio.sleep(2 * LEASE)
        chaos[0].stalled.set()
        await until(lambda: former.life.is_over)
        chaos[0].cut = trio.Event()
        await trio.sleep(LEASE)
        assert inside.parts(one) is former
        with pytest.raises(EngineError):
            await make(one, b"meanwhile")


async def test_what_fails_when_a_volume_is_closed_is_tried_again_a_moment_later(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """Relaxed: nobody but the end of the mount waits for it to be stored."""
    options = lab_options(strict=False)
    disk = Disk.format(options, shared=True)
    async with trio.open_nursery() as nursery, volumes(disk, options, 1, rng, chaos[:1]) as (one,):
        chaos[0].write_error = 1.0
        await put_relaxed(one, b"file", NEW)

        @nursery.start_soon
        async def mend() -> None:
            await trio.sleep(1.5)
            chaos[0].write_error = 0.0

    async with volumes(disk, options, 1, rng) as (one,):
        assert await get(one, b"file") == NEW


async def test_what_the_kernel_cached_is_dropped(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    async with hosts(rng, 2, chaos) as (one, two):
        await put(one, b"file", OLD)
        kernel = HearingKernel()
        one.connect_kernel(kernel)
        (entry,) = await one.tree.list_directory(ROOT_INODE, 0, 1)
        ino = entry.attributes.ino
        while one.is_known_to_kernel(ino):
            one.tree.forget(ino, 1)
        one.tree.remember(ROOT_INODE, entry)
        async with frozen(chaos[0], one, two):
            pass
        await until(lambda: ino in kernel.contents and (ROOT_INODE, b"file") in kernel.names)
        assert (await one.inodes.attributes(ino)).size == len(OLD)
        one.tree.forget(ino, 1)
        assert not one.is_known_to_kernel(ino)
