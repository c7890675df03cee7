"""A client whose daemon ended goes on with the next daemon: other hosts notice nothing, and no late write does harm."""

from __future__ import annotations

import os
import random
from contextlib import suppress

import inside
import pytest
import trio
import trio.testing
from shared_lab import LEASE, check_disk, eventually, get, joined, names_in, put, quiet, until
from volume_lab import CALLER, Chaos, Delay, Disk, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import Kept, MemoryKeeper
from kvfuse.remote.records.api import Change
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import KEPT
from kvfuse.volume.volume import Volume

DATA = b"bytes " * 5000
OPTIONS = lab_options(strict=True)
REST = 10.0
"""seconds: twice the engines' deadline"""


class Witness:
    """What another host sees of the clients."""

    def __init__(self, volume: Volume) -> None:
        self.view = leases_of(volume).view
        self.departed: list[int] = []
        self.adopted: list[int] = []
        """slabs that came from one client to another"""
        self._holders = dict(self.view.holders)
        self._before, self.view.changed = self.view.changed, self._changed

    def _changed(self, change: Change) -> None:
        key, value, _ = change
        if key[:1] == b"m" and value is None:
            self.departed.append(schema.key_client(key))
        elif key[:1] == b"l":
            slab = schema.key_slab(key)
            was, now = self._holders.get(slab), self.view.seen(slab)
            self._holders[slab] = now
            if was is not None and len({schema.NOBODY, was.holder.client, now.holder.client}) == 3:
                self.adopted.append(slab)
        self._before(change)


def leases_of(volume: Volume) -> SlabLeases:
    assert inside.leases(volume) is not None
    return inside.leases(volume)


def client_of(volume: Volume) -> int:
    return inside.client(volume)


def content(number: int) -> tuple[bytes, bytes]:
    """A name, and what its file has."""
    return b"%d" % number, b"%d " % number * 5000


async def fill(volume: Volume, numbers: range) -> None:
    for number in numbers:
        await put(volume, *content(number))


async def check_files(numbers: range, *hosts: Volume) -> None:
    for host in hosts:
        for number in numbers:
            name, data = content(number)
            assert await get(host, name) == data, name


@pytest.fixture
def shared() -> Disk:
    return Disk.format(OPTIONS, shared=True)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "handed over"])
async def test_the_next_daemon_is_the_same_client(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk, is_killed: bool
) -> None:
    keeper = MemoryKeeper()
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        await put(other, b"theirs", DATA)
        witness, chaos = Witness(other), Chaos(rng)
        async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
            client = client_of(volume)
            await fill(volume, range(5))
            held = leases_of(volume).view.held_by(client)
            if not is_killed:
                volume.hand_over()
            chaos.killed = is_killed
        await trio.sleep(LEASE / 2)
        async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
            began = trio.current_time()
            assert client_of(volume) == client
            assert len(await names_in(volume)) == 6
            await fill(volume, range(5, 6))
            await put(other, b"more", DATA)
            assert trio.current_time() < began + 1, "nobody waited until the slabs had rested"
            assert any(map(inside.slabs(volume).holds, held)) is not is_killed
            await trio.sleep(3 * LEASE)
            assert any(map(inside.slabs(volume).holds, held))
            assert (witness.departed, witness.adopted) == ([], [])
            await quiet(volume, other)
            await check_files(range(6), volume, other)
            assert {host.space().files - host.space().files_free for host in (volume, other)} == {9}
        assert not keeper.list_names(KEPT)
    await check_disk(shared)


async def test_a_lease_that_ended_meanwhile_makes_another_client(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    keeper, chaos = MemoryKeeper(), Chaos(rng)
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        witness = Witness(other)
        async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
            await fill(volume, range(5))
            chaos.killed = True
        await until(lambda: bool(witness.departed))
        async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
            assert client_of(volume) == 1001
            await fill(volume, range(5, 10))
            await check_files(range(10), volume)
            assert witness.departed == [1]
    await check_disk(shared)


async def test_a_daemon_may_be_killed_again_and_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """At any moment of its start, too: the next one still goes on as the same client."""
    keeper, clients, stored = MemoryKeeper(), set[int](), set[int]()
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        witness = Witness(other)
        for number in range(40):
            chaos = Chaos(rng, delay=1.0)
            with trio.CancelScope() as life:
                async with trio.open_nursery() as nursery:

                    async def end(seconds: float, chaos: Chaos = chaos, life: trio.CancelScope = life) -> None:
                        await trio.sleep(seconds)
                        chaos.killed = True
                        life.cancel()

                    nursery.start_soon(end, rng.random() * (0.1 if number % 2 else 3.0))
                    async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
                        clients.add(client_of(volume))
                        await fill(volume, range(number, number + 1))
                        stored.add(number)
                        await trio.sleep_forever()
        assert len(clients) == 1
        assert not clients & {*witness.departed}
        async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
            assert {client_of(volume)} == clients
            found = {int(name) for name in await names_in(volume)}
            assert found >= stored
            assert stored
            for number in found:
                assert await get(volume, b"%d" % number) in (content(number)[1], b"")
    await check_disk(shared)


# -- what the daemon before it sent ---------------------------------------------------------------------


async def kill_in_writes(disk: Disk, rng: random.Random, keeper: MemoryKeeper) -> Chaos:
    """A daemon is killed while it writes to slots that no record names yet: the volume has files 0 to 2."""
    chaos = Chaos(rng)
    chaos.late_writes = trio.Event()
    async with joined(disk, OPTIONS, 1, chaos, keeper) as volume, trio.open_nursery() as nursery:
        await fill(volume, range(3))
        chaos.stalled_writes = trio.Event()
        writes = chaos.events.count("write")
        for number in range(1000, 1004):
            nursery.start_soon(fill, volume, range(number, number + 1))
        await until(lambda: chaos.events.count("write") > writes)
        chaos.killed = True
        nursery.cancel_scope.cancel()
    return chaos


@pytest.mark.parametrize("fences", [False, True], ids=["grace", "cut off"])
async def test_a_late_write_never_changes_a_block(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk, fences: bool
) -> None:
    """The same client fills the volume to the last slot. Where writes are cut off, they may come ever so late."""
    shared.fences = fences
    keeper = MemoryKeeper()
    dead = await kill_in_writes(shared, rng, keeper)
    assert dead.late_writes is not None
    chaos = Chaos(rng)
    async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
        assert client_of(volume) == 1

        async def arrive() -> None:
            await trio.sleep(3 * REST if fences else REST - 1)
            dead.late_writes.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrive)
            number = 3
            with pytest.raises(errors.NoSpace):
                while True:
                    await fill(volume, range(number, number + 1))
                    number += 1
            await dead.late_writes.wait()
        assert ("late write" in dead.events) is not fences
        await trio.sleep(REST)
        assert number > 100, "what the dead daemon had was used again"
        inside.tier(volume).retire(None)
        await check_files(range(number), volume)
    await check_disk(shared)


async def test_stores_wait_in_a_full_volume_until_slabs_have_rested(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """No longer, and none fails for it."""
    keeper, chaos = MemoryKeeper(), Chaos(rng)
    number = 0
    async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
        with pytest.raises(errors.NoSpace):
            while True:
                await fill(volume, range(number, number + 1))
                number += 1
        with suppress(errors.NotFound):
            await volume.tree.unlink(ROOT_INODE, content(number)[0])
        for gone in range(3):
            await volume.tree.unlink(ROOT_INODE, content(gone)[0])
        await trio.sleep(3 * REST)
        await fill(volume, range(1))
        chaos.killed = True
    async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
        began = trio.current_time()
        await fill(volume, range(1, 3))
        assert REST / 2 < trio.current_time() - began < REST + 1
        await check_files(range(number), volume)
    await check_disk(shared)


async def test_a_late_commit_is_refused(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """Also one that comes when the next daemon has read what is its own, and committed nothing yet."""
    keeper, chaos = MemoryKeeper(), Chaos(rng)
    chaos.late_commits = trio.Event()
    async with joined(shared, OPTIONS, 1, chaos, keeper) as volume, trio.open_nursery() as nursery:
        await fill(volume, range(3))
        await trio.sleep(1)
        chaos.stalled_commits = trio.Event()
        nursery.start_soon(fill, volume, range(3, 4))
        await trio.sleep(1)
        chaos.killed = True
        nursery.cancel_scope.cancel()
    late = Delay(schema.USE_PREFIX)

    async def arrive(when: trio.Event) -> None:
        await late.given.wait()
        when.set()
        await trio.sleep(1)
        late.arrives.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(arrive, chaos.late_commits)
        async with joined(shared, OPTIONS, 1, Chaos(rng, late=late), keeper) as volume:
            assert chaos.events[-1] == "late commit"
            assert len(await names_in(volume)) == 3
            await fill(volume, range(3, 10))
            await check_files(range(10), volume)
    await check_disk(shared)


async def test_a_volume_is_left_before_its_slabs_have_rested(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """Nobody gets them before the lease has run out."""
    keeper = MemoryKeeper()
    dead = await kill_in_writes(shared, rng, keeper)
    assert dead.late_writes is not None
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        witness = Witness(other)
        held = witness.view.held_by(1)
        async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
            await fill(volume, range(3, 4))
        assert not keeper.list_names(KEPT)
        assert set(witness.view.held_by(1)) == set(held)
        left = trio.current_time()
        await until(lambda: bool(witness.departed))
        assert trio.current_time() > left + LEASE / 2
        dead.late_writes.set()
        await until(lambda: not witness.view.held_by(1))
        await check_files(range(4), other)
    await check_disk(shared)


async def test_a_daemon_that_cannot_be_cut_off_makes_another_client(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """The slabs are taken over when the lease has run out, by whoever cuts off that daemon."""
    shared.fences = True
    keeper = MemoryKeeper()
    dead = await kill_in_writes(shared, rng, keeper)
    assert dead.late_writes is not None
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        witness = Witness(other)
        killed = trio.current_time()
        async with joined(shared, OPTIONS, 1, Chaos(rng, fence_error=1.0), keeper) as volume:
            assert client_of(volume) == 1001
            await fill(volume, range(3, 6))
            await until(lambda: bool(witness.departed))
            assert trio.current_time() > killed + LEASE / 2
            await until(lambda: not witness.view.held_by(1))
            assert shared.fenced
            dead.late_writes.set()
            await trio.sleep(1)
            assert "late write" not in dead.events
            await check_files(range(6), volume, other)
    await check_disk(shared)


# -- what else is its own --------------------------------------------------------------------------------


async def test_removed_files_are_freed_by_the_next_daemon(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    """Those that were open here: by itself, and by another host."""
    keeper, chaos = MemoryKeeper(), Chaos(rng)
    async with joined(shared, OPTIONS, 2, Chaos(rng)) as other:
        witness = Witness(other)
        async with joined(shared, OPTIONS, 1, chaos, keeper) as volume:
            await fill(volume, range(4))
            for number in range(2):
                node = await volume.tree.lookup(ROOT_INODE, content(number)[0])
                await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            await volume.tree.unlink(ROOT_INODE, content(0)[0])
            await other.tree.unlink(ROOT_INODE, content(1)[0])
            await volume.tree.unlink(ROOT_INODE, content(2)[0])

            async def is_held() -> bool:
                return {key[:1] for key in shared.records} >= {b"h", b"o"}

            await eventually(is_held)
            chaos.killed = True
        async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
            await until(lambda: not {key[:1] for key in shared.records} & {b"h", b"o"}, 6 * REST)
            await until(lambda: not {key[:1] for key in shared.records} & {b"f"}, 6 * REST)
            assert not witness.departed
            assert await names_in(volume) == [content(3)[0]]
    await check_disk(shared)


async def test_what_was_kept_makes_no_sense(
    rng: random.Random, autojump_clock: trio.testing.MockClock, shared: Disk
) -> None:
    keeper = MemoryKeeper()
    keeper.keep(KEPT, b"\xc1")
    async with joined(shared, OPTIONS, 1, Chaos(rng), keeper) as volume:
        await fill(volume, range(1))
        assert keeper.take(KEPT) not in (None, Kept(b"\xc1", ()))
    await check_disk(shared)
