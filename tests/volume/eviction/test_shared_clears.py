"""Namespaces of a volume that several hosts have are cleared: at once a miss for all, and their room comes back."""

from __future__ import annotations

import os
import random
from contextlib import suppress

import inside
import pytest
import trio
import trio.testing
from namespace_lab import change_namespace, count_uses, make_namespace, recorded_uses
from shared_lab import check_disk, eventually, exists, get, joined, names_in, open_path, put, quiet, until, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.eviction.shared_sweeping import SharedSweeper
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.namespace_attributes import CLEAR, NAMESPACE
from kvfuse.volume.volume import Volume

NAMES = [b"%d" % number for number in range(60)]
BLOCK = b"x" * 5000
Clock = trio.testing.MockClock


@pytest.fixture(params=[False, True], ids=["relaxed", "strict"])
def options(request: pytest.FixtureRequest) -> Options:
    return lab_options(capacity=32 * MIB, strict=request.param)


def slow(rng: random.Random, count: int) -> list[Chaos]:
    return [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(count)]


async def put_in(volume: Volume, directory: int, name: bytes, data: bytes = BLOCK) -> None:
    await volume.blocks.put(directory, name, memoryview(data), CALLER, 0o644)


async def clear(volume: Volume, ino: int) -> None:
    await volume.inodes.set_xattr(ino, CLEAR, b"now")


def bound_of(volume: Volume, ino: int) -> int:
    return inside.namespaces(volume).cleared.bounds.get(ino, 0)


async def heard(ino: int, by: Volume, *others: Volume) -> None:
    """The others have heard of the last clear by one."""
    await until(lambda: all(bound_of(other, ino) == bound_of(by, ino) for other in others))


async def swept(*all_volumes: Volume) -> None:
    await until(lambda: not any(inside.namespaces(volume).cleared for volume in all_volumes), 90)


async def assert_absent(volume: Volume, directory: int, names: list[bytes]) -> None:
    assert not any(await volume.blocks.exists(directory, names))
    for name in names:
        assert await volume.blocks.bind(directory, name) is None
        with pytest.raises(errors.NotFound):
            await volume.tree.lookup(directory, name)


async def is_empty_of(disk: Disk, ino: int, *all_volumes: Volume) -> None:
    """All room of a namespace is free, as hosts say and as records do."""

    async def has_come() -> bool:
        await quiet(*all_volumes)
        uses = [inside.namespaces(volume).accounts.use_of_hosts(ino) for volume in all_volumes]
        return not any(any(use) for use in uses) and ino not in count_uses(disk)

    await eventually(has_come, seconds=90, pause=1)
    assert recorded_uses(disk) == count_uses(disk)


async def test_what_one_host_clears_is_a_miss_for_all(
    rng: random.Random, autojump_clock: Clock, options: Options
) -> None:
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, slow(rng, 2)) as (one, two):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        other = await make_namespace(one, ROOT_INODE, b"other", kind="cache", admission="all")
        folder = (await one.tree.make_directory(ino, b"folder", 0o755, CALLER)).ino
        for name in NAMES:
            await put_in(one, ino, name)
            await put_in(one, folder, name)
        await put_in(one, other, b"a")
        await quiet(one, two)
        assert all(await two.blocks.exists(ino, NAMES))
        assert sorted(await names_in(two, folder)) == sorted(NAMES)
        binding = await two.blocks.bind(ino, NAMES[1])
        handle = await open_path(two, b"cache", NAMES[2])
        known = (await two.tree.lookup(ino, NAMES[3])).ino
        assert binding is not None
        await clear(one, ino)
        await put_in(one, ino, NAMES[0], b"one")
        await assert_absent(one, ino, NAMES[1:])
        await heard(ino, one, two)
        assert not binding.valid
        await put_in(two, ino, NAMES[1], b"two")
        await assert_absent(two, ino, NAMES[2:])
        await assert_absent(two, folder, NAMES)
        assert await names_in(two, folder) == []
        with suppress(errors.OperationError):  # or it was removed since it was looked up, as if in the same call
            late = await two.files.open(known, os.O_RDONLY, CALLER)
            assert bytes(await two.files.read(late, 0, 9999)) == BLOCK
            await two.files.release(late)
        assert bytes(await two.files.read(handle, 0, 9999)) == BLOCK
        await quiet(one, two)
        await swept(one, two)
        await quiet(one, two)
        for volume in (one, two):
            assert [await get(volume, name, ino) for name in NAMES[:3]] == [b"one", b"two", None]
            await assert_absent(volume, folder, NAMES)
            assert await names_in(volume, ino) == [*NAMES[:2], b"folder"]
            assert await volume.blocks.exists(other, [b"a"]) == [True]
            assert (await volume.blocks.exists(ino, NAMES)) == [True, True] + [False] * (len(NAMES) - 2)
        assert bytes(await two.files.read(handle, 0, 9999)) == BLOCK
        await two.files.release(handle)
        await two.tree.remove_directory(ino, b"folder")
        for name in NAMES[:2]:
            await one.tree.unlink(ino, name)
        await is_empty_of(disk, ino, one, two)
        await one.inodes.remove_xattr(ino, NAMESPACE)


async def test_names_that_were_cleared_are_free_at_once(
    rng: random.Random, autojump_clock: Clock, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all kinds of changes, of files of all kinds, and while nobody sweeps."""
    options = lab_options(capacity=32 * MIB, strict=options.publish_mode == "strict", chunk=4096)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, slow(rng, 2)) as (one, two):
        is_turn, sweeps = SharedSweeper._is_turn, trio.Event()
        monkeypatch.setattr(SharedSweeper, "_is_turn", lambda sweeper: sweeps.is_set() and is_turn(sweeper))
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        folder = (await one.tree.make_directory(ino, b"folder", 0o755, CALLER)).ino
        for name in (*NAMES[:9], b"linked"):
            await put_in(one, ino, name)
            await put_in(one, folder, name)
        await put_in(one, ino, b"large", bytes(300_000))
        await quiet(one, two)
        node = await two.tree.lookup(ino, b"linked")
        await two.tree.link(node.ino, ino, b"again")
        await two.inodes.set_xattr(node.ino, b"user.a", b"value")
        await two.tree.make_symlink(ino, b"symlink", b"0", CALLER)
        await quiet(two, one)
        await clear(two, ino)
        await heard(ino, two, one)
        await assert_absent(one, ino, [*NAMES, b"linked", b"again", b"large", b"symlink"])
        for name in (NAMES[0], b"again", b"large"):
            await put_in(one, ino, name, b"new")
        await put(two, NAMES[1], b"made", ino)
        await two.tree.rename(ino, NAMES[1], ino, NAMES[2], 0)
        await one.tree.make_directory(ino, NAMES[3], 0o755, CALLER)
        await put_in(one, ino, b"first", b"first")
        await quiet(one, two)
        node = await two.tree.lookup(ino, b"first")
        await two.tree.link(node.ino, ino, NAMES[4])
        await two.tree.rename(ino, b"first", ino, b"linked", 0)
        for name in (NAMES[5], b"symlink"):
            with pytest.raises(errors.NotFound):
                await one.tree.unlink(ino, name)
            with pytest.raises(errors.NotFound):
                await two.tree.rename(ino, name, ino, b"z", 0)
        await two.tree.remove_directory(ino, b"folder")
        await quiet(one, two)
        expected = sorted([NAMES[0], b"again", b"large", NAMES[2], NAMES[3], NAMES[4], b"linked"])
        for volume in (one, two):
            assert await names_in(volume, ino) == expected
            assert await get(volume, NAMES[2], ino) == b"made"
            assert await get(volume, b"again", ino) == b"new"
            assert await get(volume, b"linked", ino) == b"first"
        sweeps.set()
        for volume in (one, two):
            inside.namespaces(volume).changed.set()
        await swept(one, two)
        await one.tree.remove_directory(ino, NAMES[3])
        for name in expected:
            with suppress(errors.NotFound):
                await one.tree.unlink(ino, name)
        await is_empty_of(disk, ino, one, two)


async def test_a_host_that_did_not_hear_of_a_clear_stores_nothing_from_before(
    rng: random.Random, autojump_clock: Clock, options: Options
) -> None:
    disk, chaos = Disk.format(options, shared=True), slow(rng, 2)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        await put_in(one, ino, b"old")
        await quiet(one, two)
        writing, made = await two.tree.create(ino, b"writing", 0o644, CALLER, os.O_RDWR)
        await two.files.write(writing, 0, b"before")
        chaos[1].deaf = trio.Event()
        chaos[1].stalled_commits = trio.Event()

        async def store() -> None:
            with suppress(errors.OperationError):
                await put_in(two, ino, b"put", b"before")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store)
            await trio.sleep(0.1)
            await clear(one, ino)
            await until(lambda: not inside.namespaces(one).cleared)
            chaos[1].stalled_commits.set()
        with suppress(errors.OperationError):
            await two.tree.rename(ino, b"old", ino, b"renamed", 0)
        await two.files.write(writing, 6, b" and after")
        assert bytes(await two.files.read(writing, 0, 99)) == b"before and after"
        await two.files.release(writing)
        two.tree.forget(made.ino, 1)
        await two.sync()
        assert not [key for key in disk.records if key.startswith(schema.entry_prefix(ino))]
        await put_in(two, ino, b"new", b"new")
        await two.sync()
        chaos[1].deaf.set()
        await swept(one, two)
        await quiet(one, two)
        for volume in (one, two):
            assert await names_in(volume, ino) == [b"new"]
            assert await get(volume, b"new", ino) == b"new"
        await one.tree.unlink(ino, b"new")
        await is_empty_of(disk, ino, one, two)


async def test_a_strict_lookup_asks_whether_it_was_cleared(rng: random.Random, autojump_clock: Clock) -> None:
    """A host that hears of nothing: each look-up that asks the store tells it."""
    options, chaos = lab_options(capacity=32 * MIB, strict=True), slow(rng, 2)
    async with volumes(Disk.format(options, shared=True), options, 2, rng, chaos) as (one, two):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        await until(lambda: ino in inside.caches(two))
        await put_in(one, ino, b"theirs")
        await put_in(two, ino, b"ours")
        await quiet(one, two)
        for name in (b"theirs", b"ours"):
            assert await get(two, name, ino) == BLOCK
        chaos[1].deaf = trio.Event()
        await clear(one, ino)
        for name in (b"ours", b"theirs"):
            assert not await exists(two, name, ino)
        chaos[1].deaf.set()


async def test_the_next_host_goes_on_with_a_sweep(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options(capacity=32 * MIB, strict=False)
    disk, chaos = Disk.format(options, shared=True), slow(rng, 2)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        names = [b"%d" % number for number in range(400)]
        for name in names:
            await put_in(one, ino, name)
        await quiet(one, two)

        def stall(puts: object, deletes: object) -> None:
            left = sum(key.startswith(schema.entry_prefix(ino)) for key in disk.records)
            if chaos[0].stalled is None and left < 300:
                chaos[0].stalled = trio.Event()

        disk.audit = stall
        await clear(one, ino)
        await until(lambda: chaos[0].stalled is not None)
        assert [key for key in disk.records if key.startswith(schema.entry_prefix(ino))]
        disk.audit = None
        await assert_absent(two, ino, names)
        await put_in(two, ino, b"new", b"new")
        await swept(two)
        assert await names_in(two, ino) == [b"new"]
        await two.tree.unlink(ino, b"new")
        await quiet(two)
        assert inside.leases(two) is not None
        view = inside.leases(two).view
        await until(lambda: 1 not in view.members)
        assert chaos[0].stalled is not None
        chaos[0].stalled.set()
        await until(lambda: inside.client(one) > 1000)
        await is_empty_of(disk, ino, one, two)


async def test_a_newer_version_clears_what_other_hosts_stored(
    rng: random.Random, autojump_clock: Clock, options: Options
) -> None:
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, slow(rng, 2)) as (one, two):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        await one.inodes.describe(ino, '{"model": "m", "version": 1}', may_pin=True)
        for name in NAMES:
            await put_in(one, ino, name)
        await quiet(one, two)
        assert all(await two.blocks.exists(ino, NAMES))
        await two.inodes.describe(ino, '{"model": "m", "version": 2}', may_pin=True)
        await assert_absent(two, ino, NAMES)
        await heard(ino, two, one)
        await assert_absent(one, ino, NAMES)
        with pytest.raises(errors.Exists):
            await one.inodes.describe(ino, '{"model": "m", "version": 1}', may_pin=True)
        await change_namespace(one, ino, kind="files")
        with pytest.raises(errors.InvalidArgument):
            await clear(one, ino)
        await swept(one, two)
        await is_empty_of(disk, ino, one, two)


async def test_a_crash_after_a_clear_brings_nothing_back(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options(capacity=32 * MIB, strict=False)
    disk, images = Disk.format(options, shared=True), list[Disk]()
    async with volumes(disk, options, 1, rng) as (one,):
        ino = await make_namespace(one, ROOT_INODE, b"cache", kind="cache", admission="all")
        for name in NAMES:
            await put_in(one, ino, name)
        await quiet(one)
        disk.audit = lambda puts, deletes: images.append(disk.copy())
        await clear(one, ino)
        await put_in(one, ino, NAMES[0], b"new")
        await swept(one)
        disk.audit = None
    for image in images[:: max(1, len(images) // 4)]:
        image.apply({}, [key for key in image.records if key[:1] == b"m"])  # their leases end
        await check_disk(image)
        async with joined(image, options, 7, Chaos(rng)) as one, joined(image, options, 8, Chaos(rng)) as two:
            await assert_absent(two, ino, NAMES[1:])
            await swept(one, two)
            assert set(await names_in(one, ino)) <= {NAMES[0]}
        await check_disk(image)


async def test_clears_among_everything_else(rng: random.Random, autojump_clock: Clock, options: Options) -> None:
    """No name means a file that was there before a clear of which the host has heard, whatever happens beside."""
    disk, chaos = Disk.format(options, shared=True), slow(rng, 2)
    async with volumes(disk, options, 2, rng, chaos) as hosts:
        ino = await make_namespace(hosts[0], ROOT_INODE, b"cache", kind="cache", admission="all")
        await until(lambda: ino in inside.caches(hosts[1]))
        begun, returned = 0, 0
        stored: dict[int, int] = {}
        """content of a file -> clears that had begun when its put returned"""

        async def work(number: int) -> None:
            mine = random.Random(rng.random())
            for _ in range(40):
                with suppress(errors.OperationError):
                    await turn(hosts[number % 2], mine, b"%d" % mine.randrange(25))

        async def turn(volume: Volume, mine: random.Random, name: bytes) -> None:
            choice = mine.randrange(7)
            if choice < 2:
                content = mine.getrandbits(60)
                await put_in(volume, ino, name, b"%d:" % content + bytes(mine.randrange(20_000)))
                stored[content] = begun
            elif choice == 2:
                await volume.tree.unlink(ino, name)
            elif choice == 3:
                await volume.tree.rename(ino, name, ino, b"%d" % mine.randrange(25), 0)
            elif choice == 4:
                node = await volume.tree.lookup(ino, name)
                try:
                    await volume.tree.link(node.ino, ino, b"%d" % mine.randrange(25))
                    volume.tree.forget(node.ino, 1)
                finally:
                    volume.tree.forget(node.ino, 1)
            elif choice == 5:
                await volume.blocks.exists(ino, [name])
                await names_in(volume, ino)
            else:
                await look(volume, name)

        async def look(volume: Volume, name: bytes) -> None:
            before = returned
            node = await volume.blocks.find(ino, name)
            if node is None:
                return
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            content = int(bytes(await volume.files.read(handle, 0, 30)).split(b":")[0])
            await volume.files.release(handle)
            assert stored.get(content, begun) >= before, "it was there before a clear that has returned"

        async def clear_often() -> None:
            nonlocal begun, returned
            for _ in range(8):
                await trio.sleep(rng.random() * 0.3)
                by = rng.choice(hosts)
                chaos[1 - hosts.index(by)].deaf = deaf = trio.Event() if rng.random() < 0.5 else None
                begun += 1
                await clear(by, ino)
                await trio.sleep(rng.random() * 0.2)
                if deaf is not None:
                    deaf.set()
                await heard(ino, by, *hosts)
                returned += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clear_often)
            for number in range(6):
                nursery.start_soon(work, number)
        await quiet(*hosts)
        await clear(hosts[0], ino)
        await heard(ino, *hosts)
        await swept(*hosts)
        await quiet(*hosts)
        for volume in hosts:
            assert await names_in(volume, ino) == []
        await is_empty_of(disk, ino, *hosts)
