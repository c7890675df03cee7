"""A volume that hosts share gets less capacity while they use it: each gives up its slabs, one moves the files."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress

import inside
import msgspec
import pytest
import trio
import trio.testing
from block_hosts import block_hosts
from shared_lab import LEASE, check_disk, eventually, get, joined, put, quiet, until, volumes, write_at
from test_growth import NAME, Files, grow
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse.errors import InvalidArgument, KvfuseError, NoSpace, NotAdmitted
from kvfuse.options.options import Options
from kvfuse.slab.layout import FEATURE_SHRINKS, KNOWN_FEATURES
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts import shared_drain
from kvfuse.volume.hosts.shared_drain import SharedDrain
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

LARGE, SMALL = 130 * MIB, 60 * MIB


def options_of(*, strict: bool = False) -> Options:
    options = lab_options(capacity=LARGE, strict=strict)
    return msgspec.structs.replace(options, volume=msgspec.structs.replace(options.volume, segment_size=16 * MIB))


def disk_of(options: Options) -> Disk:
    return Disk.format(options, shared=True)


def segments_size(disk: Disk) -> int:
    return sum(map(len, disk.segments.values()))


def drain_of(volume: Volume) -> SharedDrain:
    drain = inside.parts(volume).drain
    assert isinstance(drain, SharedDrain)
    return drain


async def shrunk(disk: Disk, *hosts: Volume, capacity: int = SMALL, seconds: float = 300) -> None:
    """Return when it is done, and all these hosts know that."""

    async def is_done() -> bool:
        ours = [inside.core(volume).superblock for volume in hosts]
        return all(not one.target and one.geometry.capacity == capacity for one in [disk.superblock, *ours])

    await eventually(is_done, seconds=seconds, pause=0.05)
    assert segments_size(disk) <= capacity
    assert all(segment < disk.superblock.geometry.segment_count for segment in disk.segments)


async def joined_again(disk: Disk, *hosts: Volume) -> None:
    await until(lambda: all(schema.member_key(inside.client(volume)) in disk.records for volume in hosts))


async def filled(files: Files, rng: random.Random, hosts: Sequence[Volume], count: int, kept: int) -> None:
    """Files of all hosts, of which so many are left, here and there."""
    for number in range(count):
        name, data = b"file %d" % number, rng.randbytes(MIB - 17 * number)
        await put(hosts[number % len(hosts)], name, data)
        files.contents[name] = data
    await quiet(*hosts)
    for name in rng.sample(sorted(files.contents), count - kept):
        await rng.choice(hosts).tree.unlink(ROOT_INODE, name)
        del files.contents[name]
    await quiet(*hosts)
    size = sum(map(len, files.contents.values()))
    await until(lambda: all(inside.leases(volume).view.files_size() < size + 5 * MIB for volume in hosts))


async def test_hosts_empty_what_goes_and_go_on(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    options = options_of()
    disk, files = disk_of(options), Files()
    async with volumes(disk, options, 3, rng) as hosts:
        await filled(files, rng, hosts, 100, 40)
        handle, _ = await hosts[1].tree.create(ROOT_INODE, b"open", 0o644, CALLER, os.O_RDWR)
        await hosts[1].files.write(handle, 0, b"x" * MIB)
        await hosts[1].files.fsync(handle)
        await grow(hosts[0], SMALL)
        await shrunk(disk, *hosts)
        assert disk.superblock.features & FEATURE_SHRINKS
        await until(lambda: schema.DRAINER not in disk.records)
        await hosts[1].files.write(handle, 100, b"y" * 100)
        await hosts[1].files.fsync(handle)
        assert bytes(await hosts[1].files.read(handle, 0, 300)) == b"x" * 100 + b"y" * 100 + b"x" * 100
        await hosts[1].files.release(handle)
        for volume in hosts:
            await files.verify(volume)
            assert volume.space().size <= SMALL
            assert await volume.inodes.get_xattr(ROOT_INODE, NAME) == b"%d" % SMALL
        for volume in hosts:
            await files.fill(volume, rng, 3)
        assert segments_size(disk) <= SMALL
        await grow(hosts[2], LARGE)
        await until(lambda: all(inside.core(volume).geometry.capacity == LARGE for volume in hosts))
        for volume in hosts:
            await files.fill(volume, rng, 15)
        await quiet(*hosts)
        for volume in hosts:
            await files.verify(volume)


async def test_a_host_that_is_killed_anywhere_is_followed_by_others(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The host that moves files, or another, at many moments: the other ends it, and finds all that was stored."""
    options = options_of()
    for round_number in range(4):
        disk, files = disk_of(options), Files()
        dying, staying = Chaos(random.Random(rng.random()), delay=0.5), Chaos(random.Random(rng.random()), delay=0.5)
        async with joined(disk, options, 1, staying) as volume:
            async with joined(disk, options, 2, dying) as victim:
                hosts = [volume, victim]
                await filled(files, rng, hosts, 90, 35)
                await grow(hosts[round_number % 2], SMALL)
                await trio.sleep(rng.random() * rng.choice([0.1, 1.0, 20.0]))
                dying.killed = True
            await shrunk(disk, volume)
            await files.verify(volume)
            await files.fill(volume, rng, 2)
        await check_disk(disk)


async def test_all_hosts_are_killed_and_the_next_one_goes_on(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    for _ in range(4):
        disk, files = disk_of(options), Files()
        chaos = Chaos(random.Random(rng.random()), delay=0.5)
        async with joined(disk, options, 1, chaos) as volume:
            await filled(files, rng, [volume], 90, 35)
            await grow(volume, SMALL)
            await trio.sleep(rng.random() * rng.choice([0.1, 1.0, 20.0]))
            chaos.killed = True
        left = disk.copy()
        left.records = {key: row for key, row in left.records.items() if key[:1] not in (b"m", b"w", b"a", b"v", b"r")}
        left.records.pop(schema.DRAINER, None)  # as its lease has ended
        await check_disk(left)
        async with joined(left, options, 2, Chaos(random.Random(rng.random()), delay=0.5)) as volume:
            await files.verify(volume)
            await shrunk(left, volume)
            await files.verify(volume)
        await check_disk(left)


async def test_a_host_of_before_refuses_it(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """It would take slabs that are given up. One that is not there yet refuses the superblock."""
    options = options_of()
    disk, calm = disk_of(options), [Chaos(random.Random(1)), Chaos(random.Random(2))]
    async with joined(disk, options, 1, calm[0]) as volume:
        async with joined(disk, options, 2, calm[1], features=KNOWN_FEATURES & ~FEATURE_SHRINKS):
            before = disk.superblock
            with pytest.raises(InvalidArgument, match="on lab knows nothing of volumes that get smaller: upgrade it"):
                await grow(volume, SMALL)
            assert disk.superblock == before
        await grow(volume, SMALL)
        await shrunk(disk, volume)
        assert disk.superblock.features & FEATURE_SHRINKS
    await check_disk(disk)


async def test_the_superblock_says_so_before_it_has_a_target(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    disk = disk_of(options)

    def check(puts: Mapping[bytes, bytes], _: object) -> None:
        assert not disk.superblock.target or disk.superblock.features & FEATURE_SHRINKS

    async with volumes(disk, options, 2, rng) as hosts:
        disk.audit = check
        await grow(hosts[0], SMALL)
        await shrunk(disk, *hosts)


async def test_what_does_not_fit_is_refused_and_the_former_capacity_ends_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Files that came since do not fit either: each host says so."""
    options = options_of()
    disk, files = disk_of(options), Files()
    async with volumes(disk, options, 2, rng) as hosts:
        await filled(files, rng, hosts, 90, 80)
        with pytest.raises(InvalidArgument, match=r"files have \d+ bytes in slots, and \d+ slabs of \d+ stay"):
            await grow(hosts[0], SMALL)
        for name in sorted(files.contents)[36:]:
            await hosts[0].tree.unlink(ROOT_INODE, name)
            del files.contents[name]
        await until(lambda: all(inside.leases(volume).view.files_size() < 44 * MIB for volume in hosts))
        held = [await hosts[1].tree.lookup(ROOT_INODE, name) for name in files.contents]
        handles = [await hosts[1].files.open(node.ino, os.O_RDONLY, CALLER) for node in held]
        before = drain_of(hosts[0]).left
        for name in list(files.contents):
            await hosts[0].tree.unlink(ROOT_INODE, name)  # removed, and open: they move no more
        assert not before
        with suppress(InvalidArgument):
            await grow(hosts[0], SMALL)
        await trio.sleep(60)
        assert inside.core(hosts[1]).superblock.target == SMALL
        assert drain_of(hosts[0]).left
        await grow(hosts[1], LARGE)
        await until(lambda: not any(inside.core(volume).superblock.target for volume in hosts))
        for handle in handles:
            await hosts[1].files.release(handle)
        await Files().fill(hosts[0], rng, 90)
        await quiet(*hosts)
        assert disk.superblock.geometry.capacity == LARGE


async def test_a_host_that_hears_late_is_awaited(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """It stores where it has slabs; and it takes none that is given up."""
    options = options_of()
    disk, files = disk_of(options), Files()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, deaf):
        await filled(files, rng, [one, deaf], 100, 30)
        chaos[1].deaf = trio.Event()
        await grow(one, SMALL)
        for number in range(12):
            name, data = b"late %d" % number, rng.randbytes(MIB)
            with suppress(NoSpace):
                await put(deaf, name, data)
                files.contents[name] = data
            await trio.sleep(2)
        await deaf.sync()
        held = {slab for slab in inside.leases(deaf).held.slabs if slab >= 45}
        if held and not inside.core(deaf).superblock.target:
            assert disk.superblock.geometry.capacity == LARGE, "it was not awaited"
        chaos[1].deaf.set()
        await shrunk(disk, one, deaf)
        for volume in (one, deaf):
            await files.verify(volume)


async def test_files_that_change_meanwhile_are_what_their_writers_say(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host writes to its own files while they move. As they move at once, hosts have no free slab at first: a
    write may find no room then, but what was taken waits for room where it meets a move."""
    monkeypatch.setattr(shared_drain, "SETTLE_SECONDS", 0.0)
    options = options_of(strict=rng.random() < 0.5)
    disk, files = disk_of(options), Files()
    async with volumes(disk, options, 3, rng) as hosts:
        await filled(files, rng, hosts, 90, 34)
        names = sorted(files.contents)
        own = [names[number::3] for number in range(3)]

        async def change(number: int, volume: Volume) -> None:
            random_of = random.Random(rng.random())
            while disk.superblock.target or not has_begun.is_set():
                name = random_of.choice(own[number])
                offset, data = random_of.randrange(len(files.contents[name]) - 1000), random_of.randbytes(1000)
                with suppress(NoSpace):
                    await write_at(volume, name, offset, data)
                    before = files.contents[name]
                    files.contents[name] = before[:offset] + data + before[offset + len(data) :]
                await trio.sleep(random_of.random())

        has_begun = trio.Event()
        async with trio.open_nursery() as nursery:
            for number, volume in enumerate(hosts):
                nursery.start_soon(change, number, volume)
            await grow(rng.choice(hosts), SMALL)
            has_begun.set()
        await shrunk(disk, *hosts)
        await quiet(*hosts)
        for volume in hosts:
            await files.verify(volume)


async def test_commits_that_fail_and_answers_that_are_lost_change_nothing(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    disk, files = disk_of(options), Files()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(3)]
    async with volumes(disk, options, 3, rng, chaos) as hosts:
        await filled(files, rng, hosts, 90, 34)
        for one in chaos:
            one.commit_error, one.write_error, one.read_error = 0.1, 0.02, 0.02
        for _ in range(20):
            with suppress(KvfuseError):
                await grow(hosts[0], SMALL)
                break
        await shrunk(disk, *hosts, seconds=3000)
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = 0.0
        for volume in hosts:
            await files.verify(volume)


async def test_blocks_of_what_goes_are_dropped_by_all_hosts(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    disk = disk_of(options)
    async with volumes(disk, options, 2, rng) as mounted:
        hosts = await block_hosts(mounted)
        data = {b"block-%d" % number: rng.randbytes(MIB // 3) for number in range(200)}
        for number, (name, content) in enumerate(data.items()):
            with suppress(NotAdmitted):
                await hosts[number % 2].put(name, content)
        for host in hosts:
            await host.written()
        await put(mounted[0], b"a file", bytes(MIB))
        await grow(mounted[1], SMALL)
        await shrunk(disk, *mounted)
        left = 0
        for name, content in data.items():
            for host in hosts:
                found = await host.get(name)
                assert found in (None, content)
                left += found is not None
        assert left > 0
        assert segments_size(disk) <= SMALL
        for number in range(40):
            with suppress(NotAdmitted):
                await hosts[number % 2].put(b"later-%d" % number, rng.randbytes(MIB // 3))
        for host in hosts:
            await host.written()
        assert await get(mounted[1], b"a file") == bytes(MIB)
        assert segments_size(disk) <= SMALL


async def test_who_has_not_heard_takes_no_slab_that_went(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """It holds none that goes, so nobody waits for it; it hears by the first slab that it wants."""
    options = options_of()
    disk, files = disk_of(options), Files()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, deaf):
        await files.fill(one, rng, 25)
        await quiet(one, deaf)
        chaos[1].deaf = trio.Event()
        await grow(one, SMALL)
        await shrunk(disk, one)
        assert inside.core(deaf).geometry.capacity == LARGE
        leases = inside.leases(deaf)
        never_held = max(set(range(inside.core(deaf).geometry.slab_count)) - leases.view.holders.keys())
        assert not await leases.held.take([never_held])
        for number in range(14):
            name, data = b"late %d" % number, rng.randbytes(MIB)
            await put(deaf, name, data)
            files.contents[name] = data
        await deaf.sync()
        assert inside.core(deaf).geometry.capacity == SMALL
        assert segments_size(disk) <= SMALL
        chaos[1].deaf.set()
        for volume in (one, deaf):
            await files.verify(volume)


async def test_a_host_that_loses_its_lease_goes_on_as_another_client(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    for _ in range(3):
        disk, files = disk_of(options), Files()
        chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
        async with volumes(disk, options, 2, rng, chaos) as hosts:
            await filled(files, rng, hosts, 80, 30)
            await grow(hosts[0], SMALL)
            await trio.sleep(rng.random() * rng.choice([0.1, 1.0, 20.0]))
            victim = rng.choice(chaos)
            victim.cut = trio.Event()
            await trio.sleep(3 * LEASE)
            victim.cut.set()
            await joined_again(disk, *hosts)
            await shrunk(disk, *hosts)
            await grow(hosts[1], LARGE)
            await until(lambda: all(inside.core(volume).geometry.capacity == LARGE for volume in hosts))
            for volume in hosts:
                await files.verify(volume)
                await files.fill(volume, rng, 15)
            await quiet(*hosts)
            for volume in hosts:
                await files.verify(volume)


async def test_who_has_not_heard_reads_what_moved(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """It looks for bytes in segments that are gone, and then in the records."""
    options = options_of()
    disk, files = disk_of(options), Files()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, deaf):
        await filled(files, rng, [one], 80, 30)
        known = {name: await deaf.tree.lookup(ROOT_INODE, name) for name in files.contents}
        chaos[1].deaf = trio.Event()
        await grow(one, SMALL)
        await shrunk(disk, one)
        failures = inside.core(deaf).counters.checksum_failures
        for name, node in known.items():
            handle = await deaf.files.open(node.ino, os.O_RDONLY, CALLER)
            assert bytes(await deaf.files.read(handle, 0, 2 * MIB)) == files.contents[name]
            await deaf.files.release(handle)
        assert inside.core(deaf).counters.checksum_failures > failures, "no byte had moved"
        chaos[1].deaf.set()
        await shrunk(disk, deaf)


async def test_a_host_gives_what_it_has_too_much_to_one_that_has_no_room_meanwhile(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """What goes is no room: the host that has much free in its slabs has more than its part of what stays."""
    size, options = 150_000, options_of()
    disk, files = disk_of(options), Files()
    async with volumes(disk, options, 2, rng) as (rich, poor):
        for number in range(240):
            await put(rich, b"small-%d" % number, rng.randbytes(size))
        await quiet(rich, poor)
        for number in range(240):
            if number % 3:
                await rich.tree.unlink(ROOT_INODE, b"small-%d" % number)
        await quiet(rich, poor)
        await grow(rich, SMALL)
        view = inside.leases(poor).view
        await until(lambda: view.kept_end < 60)
        kept = view.kept_end * MIB
        with pytest.raises(NoSpace):
            for number in range(kept // size):
                data = rng.randbytes(size)
                await put(poor, b"more-%d" % number, data)
                await poor.sync()
                files.contents[b"more-%d" % number] = data
        used = (80 + len(files.contents)) * size
        assert used > 0.8 * kept
        assert inside.core(rich).slabs.free_bytes < 0.1 * kept
        await files.verify(rich)
        for name in files.contents:
            await rich.tree.unlink(ROOT_INODE, name)
        await shrunk(disk, rich, poor)
