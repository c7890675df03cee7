"""A client that loses its lease: it commits nothing more, says so to its callers, and goes on as another client."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import trio
import trio.testing
from shared_lab import LEASE, eventually, exists, make, names_in, volumes
from test_coherence import HearingKernel
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.errors import EngineError
from kvfuse.volume import schema
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import FileHandle, Volume

OLD, NEW = b"old " * 5000, b"new " * 7000


@pytest.fixture
def chaos() -> list[Chaos]:
    return [Chaos(random.Random(number)) for number in range(2)]


async def put(volume: Volume, name: bytes, data: bytes) -> int:
    """Write a file, and have it stored; its inode."""
    handle, node = await volume.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    await volume.write(handle, 0, data)
    await volume.fsync(handle)
    await volume.release(handle)
    return node.ino


async def opened(volume: Volume, name: bytes, flags: int = os.O_RDWR) -> FileHandle:
    return await volume.open((await volume.lookup(ROOT_INODE, name)).ino, flags, CALLER)


async def get(volume: Volume, name: bytes) -> bytes:
    handle = await opened(volume, name, os.O_RDONLY)
    try:
        return bytes(await volume.read(handle, 0, 1 << 20))
    finally:
        await volume.release(handle)


async def until(is_so: Callable[[], bool], seconds: float = 3 * LEASE) -> None:
    """Wait, by a clock that jumps, for what clients do by and by."""
    with trio.fail_after(seconds):
        while True:
            if is_so():
                return
            await trio.sleep(0.001)


async def is_gone(other: Volume, client: int) -> None:
    """The store has ended the lease of a client, and another one knows."""
    assert other.leases is not None
    members = other.leases.view.members
    await until(lambda: client not in members)


async def is_another(volume: Volume, client: int) -> None:
    """Joined again."""
    await until(lambda: volume.core.client != client)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_client_that_wakes_after_its_lease_goes_on_as_another(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos], strict: bool
) -> None:
    options = lab_options(strict=strict)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for name in (b"kept", b"changed", b"read"):
            await put(one, name, OLD)
        changed, reading = await opened(one, b"changed"), await opened(one, b"read")
        await one.write(changed, 0, NEW)
        chaos[0].stalled = trio.Event()
        told: list[BaseException] = []

        async def wait_for_fsync() -> None:
            try:
                await one.fsync(changed)
            except EngineError as error:
                told.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_fsync)
            await is_gone(two, 1)
            await put(two, b"meanwhile", NEW)
            view = two.leases.view
            await until(lambda: 1 not in view.held_counts, 5.0)
            chaos[0].stalled.set()
        assert told, "who waited was told"
        await is_another(one, 1)
        for attempt in (one.write(changed, 0, b"x"), one.fsync(changed), one.flush(changed)):
            with pytest.raises(EngineError, match="lost its lease"):
                await attempt
        await one.release(changed)
        assert bytes(await one.read(reading, 0, 1 << 20)) == OLD
        await one.write(reading, 0, NEW)
        await one.fsync(reading)
        await one.release(reading)
        for volume in (one, two):
            assert [await get(volume, name) for name in (b"kept", b"changed", b"meanwhile")] == [OLD, OLD, NEW]
        await put(one, b"later", NEW)
        await eventually(lambda: exists(two, b"later"))
        assert [await get(two, name) for name in (b"later", b"read")] == [NEW, NEW]
        assert await names_in(one) == await names_in(two)


async def test_names_that_nobody_stored_are_forgotten(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"stays", OLD)
        chaos[0].stalled = trio.Event()
        handle, _ = await one.create(ROOT_INODE, b"never", 0o644, CALLER, os.O_RDWR)
        await one.write(handle, 0, NEW)
        await one.unlink(ROOT_INODE, b"stays")
        await is_gone(two, 1)
        chaos[0].stalled.set()
        await is_another(one, 1)
        assert await names_in(one) == await names_in(two) == [b"stays"]
        with pytest.raises(EngineError):
            await one.read(handle, 0, 1)
        await one.release(handle)
        assert await get(one, b"stays") == OLD


async def test_an_operation_under_way_ends_in_an_error(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    """It began with what the client knew then, and does not bring it into the new membership."""
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"file", OLD)
        results: list[str] = []

        async def attempt(name: bytes) -> None:
            try:
                await put(one, name, NEW)
            except errors.KvfuseError as error:
                results.append(type(error).__name__)
            else:
                results.append("stored")

        chaos[0].stalled = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(attempt, b"%d" % number)
            await is_gone(two, 1)
            chaos[0].stalled.set()
            await is_another(one, 1)
        assert results == 5 * ["EngineError"]
        assert await names_in(two) == [b"file"]
        await attempt(b"now")
        assert results.pop() == "stored"


async def test_the_lease_is_lost_again_and_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for round_number in range(3):
            client = one.core.client
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
        await one.unlink(ROOT_INODE, b"file")
        await one.sync()
        key = schema.orphan_key(ino)
        assert key in disk.records
        assert schema.decode_orphan(disk.records[key].value).remover == 1
        chaos[0].stalled = trio.Event()
        await is_gone(two, 1)
        left = [key, schema.sequence_key(1)]
        await until(lambda: not any(key in disk.records for key in left), 10 * two.core.grace.seconds)
        assert schema.files_key(1) not in disk.records
        chaos[0].stalled.set()
        await is_another(one, 1)


async def test_nothing_is_left_of_clients_that_left_in_order(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for volume in (one, two):
            await make(volume, b"%d" % volume.core.client)
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
        identity = one.core.segments.identity()
        held = [slab for slab in range(two.core.geometry.slab_count) if one.core.slabs.holds(slab)]
        chaos[0].stalled = trio.Event()
        await is_gone(two, 1)
        gone = trio.current_time()
        await until(lambda: all(map(two.core.slabs.holds, held)))
        assert held
        assert disk.fenced == ({identity} if fences else set())
        assert (trio.current_time() - gone < 2.0) == fences
        chaos[0].stalled.set()
        await is_another(one, 1)
        await put(one, b"again", NEW)
        assert await get(two, b"again") == NEW


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
                    await volume.rename(ROOT_INODE, b"tmp-%d-%d" % (number, step), ROOT_INODE, name, 0)
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
    options = lab_options()
    disk = Disk.format(options, shared=True)
    chaos[0].delay = 1.0  # so that joining takes a while
    async with volumes(disk, options, 1, rng, chaos[:1]) as (one,):
        await put(one, b"file", OLD)
        former = one.parts
        chaos[0].stalled = trio.Event()
        await trio.sleep(2 * LEASE)
        chaos[0].stalled.set()
        await until(lambda: former.is_over)
        chaos[0].cut = trio.Event()
        await trio.sleep(LEASE)
        assert one.parts is former
        with pytest.raises(EngineError):
            await make(one, b"meanwhile")


async def test_what_the_kernel_cached_is_dropped(
    rng: random.Random, autojump_clock: trio.testing.MockClock, chaos: list[Chaos]
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"file", OLD)
        kernel = HearingKernel()
        one.tell(kernel)
        (entry,) = await one.list_directory(ROOT_INODE, 0, 1)
        ino = entry.attributes.ino
        while one.kernel_knows(ino):
            one.forget(ino, 1)
        one.remember(ROOT_INODE, entry)
        chaos[0].stalled = trio.Event()
        await is_gone(two, 1)
        chaos[0].stalled.set()
        await is_another(one, 1)
        await until(lambda: ino in kernel.contents and (ROOT_INODE, b"file") in kernel.names)
        assert (await one.attributes(ino)).size == len(OLD)
        one.forget(ino, 1)
        assert not one.kernel_knows(ino)
