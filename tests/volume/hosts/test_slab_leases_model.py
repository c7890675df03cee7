"""Clients that share a disk, freeze, are cut off, die and may go on at random; by a simulated clock.

What must hold is checked all the time (`World`): no slab belongs to two clients that may write, no slot is
written while it is a file's or another write's, no bytes of a piece are lost. And at the end nothing has leaked.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from lease_lab import LEASE, REUSE, Client, World, pieces_of
from scale import scaled
from volume_lab import MIB, Disk, lab_options

from kvfuse.errors import EngineError, NoSpace
from kvfuse.volume.store import schema

SECONDS = float(os.environ.get("KVFUSE_SIMULATED_SECONDS", scaled(120)))
"""simulated; an hour takes minutes"""
ADOPTED_AFTER = LEASE + 5
LATE = 2.5
"""seconds in which a write that timed out may still happen"""


@dataclass
class Run:
    """Three places at which clients live, one after the other."""

    world: World
    rng: random.Random
    writes: trio.Nursery
    numbers: int = 100
    events: Counter[str] = field(default_factory=Counter)
    stop: trio.Event = field(default_factory=trio.Event)

    async def place(self) -> None:
        former: Client | None = None
        while not self.stop.is_set():
            self.numbers += 1
            client = Client(self.world, self.numbers)
            if former is not None:
                await trio.sleep(self.rng.choice((0.0, 1.0, LEASE + 1)) * self.rng.random())
            former = await self.life(client, former)

    async def life(self, client: Client, former: Client | None) -> Client | None:
        """Until it dies, loses its lease, or all is over. Returns who died and is to go on."""
        async with client.joined(former):
            if former is not None:
                self.events["went on" if client.number == former.number else "did not go on"] += 1
            if former is not None and client.number != former.number:
                self.writes.start_soon(self.expect_adoption, former.number, former.held)
            client.chaos.commit_error = self.rng.choice((0.0, 0.02))
            with trio.CancelScope() as alive:
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(self.work, client)
                    nursery.start_soon(self.misfortune, client, alive)
                    nursery.start_soon(self.until_lost, client, alive)
                    await self.stop.wait()
                    nursery.cancel_scope.cancel()
            if self.stop.is_set():
                client.chaos.commit_error = 0.0
                await trio.sleep(2)  # its last batch
                await client.leases.close()
                self.events["left in order"] += 1
                return None
            has_died = not client.member.lost.is_set()
            self.events["died" if has_died else "lost its lease"] += 1
            client.held = {slab for slab in range(client.core.geometry.slab_count) if client.core.slabs.holds(slab)}
        client.well_since = float("inf")
        if has_died and self.rng.random() < 0.5:
            return client
        self.writes.start_soon(self.expect_adoption, client.number, client.held)
        return None

    async def expect_adoption(self, dead: int, slabs: set[int]) -> None:
        """What a dead client held can be used, or is nobody's, in time; if somebody was well in those last seconds."""
        await trio.sleep(ADOPTED_AFTER)
        since = trio.current_time() - 5
        well = {client.number: client for client in self.world.clients if client.well_since < since}
        if self.stop.is_set() or not well:
            return
        self.events["adopted"] += 1
        for slab in slabs:
            row = self.world.disk.records[schema.holder_key(slab)]
            holder = schema.decode_holder(row.value).client
            assert holder != dead, f"slab {slab} is still held by {dead}"
            if holder in well:
                self.events["in use again"] += well[holder].core.slabs.holds(slab)

    async def misfortune(self, client: Client, alive: trio.CancelScope) -> None:
        """A client is well for a while; then it freezes, or is cut off, or dies."""
        while True:
            await trio.sleep(self.rng.expovariate(1 / 20))
            kind = self.rng.choice(("die", "stall", "stall", "cut", "cut"))
            self.events[kind] += 1
            if kind == "die":
                alive.cancel()
                return
            event = trio.Event()
            setattr(client.chaos, "stalled" if kind == "stall" else kind, event)
            client.well_since = float("inf")
            try:
                await trio.sleep(self.rng.expovariate(1 / 6))
            finally:
                gone = schema.member_key(client.number) not in self.world.disk.records
                commits = client.chaos.commits
                event.set()
                client.chaos.stalled = client.chaos.cut = None
                client.well_since = trio.current_time()
            if gone:
                self.events["woke too late"] += 1
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                assert client.chaos.commits == commits, "a client without a lease has committed something"

    async def until_lost(self, client: Client, alive: trio.CancelScope) -> None:
        await client.member.lost.wait()
        await trio.sleep(2)  # in which it commits nothing
        alive.cancel()

    async def work(self, client: Client) -> None:
        while True:
            await trio.sleep(self.rng.expovariate(10))
            try:
                if self.rng.random() < 0.55:
                    await client.make(self.writes, self.rng.choice((64 << 10, 300 << 10, MIB)))
                    self.events["made"] += 1
                elif pieces := list(pieces_of(self.world.disk)):
                    self.events["removed"] += await client.remove(self.rng.choice(pieces))
            except NoSpace:
                self.events["no space"] += 1
            except EngineError:
                self.events["failed"] += 1

    async def watchman(self) -> None:
        while True:
            await trio.sleep(0.05)
            self.world.check()


async def test_three_clients_and_misfortune(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    world = World(Disk.format(lab_options(capacity=41 * MIB), shared=True), rng, LATE)
    async with trio.open_nursery() as nursery, trio.open_nursery() as writes:
        run = Run(world, rng, writes)
        nursery.start_soon(run.watchman)
        async with trio.open_nursery() as places:
            for _ in range(3):
                places.start_soon(run.place)
            await trio.sleep(SECONDS)
            run.stop.set()
        await trio.sleep(LEASE + 5)
        nursery.cancel_scope.cancel()
    print(dict(run.events))
    await nothing_has_leaked(world)
    assert min(run.events[name] for name in ("made", "removed", "left in order")) > 0
    assert run.events["adopted"] + run.events["went on"] > 0


async def nothing_has_leaked(world: World) -> None:
    """A last client finds all slots free that no piece has: it fills the volume, to the last slab."""
    world.clients.clear()
    world.late = 0.0
    last = Client(world, 99)
    async with last.joined(), trio.open_nursery() as nursery:
        await trio.sleep(LEASE)
        for _ in range(3):  # first what others left; then with f records that are found by who takes their slabs
            with suppress(NoSpace):
                while True:
                    await last.make(nursery, MIB)
            made = len(pieces_of(world.disk))
            for key in list(pieces_of(world.disk)):
                await last.remove(key)
            await trio.sleep(2 * REUSE)
        assert made == world.disk.superblock.geometry.slab_count
        kinds = {key[:1] for key in world.disk.records if key[:1] in b"sfc"}
        assert not kinds, f"records of kinds {kinds} are left over"
        assert last.core.slabs.used_bytes == 0
        world.check()


@pytest.mark.parametrize("stalled", [True, False], ids=["frozen", "cut off"])
async def test_who_wakes_after_its_lease_was_taken_commits_nothing(
    rng: random.Random, autojump_clock: trio.testing.MockClock, stalled: bool
) -> None:
    world = World(Disk.format(lab_options(capacity=41 * MIB), shared=True), rng)
    with trio.CancelScope() as over:
        async with Client(world, 1).joined(), trio.open_nursery() as nursery:
            sleeper = Client(world, 2)
            async with sleeper.joined():
                await sleeper.make(nursery, MIB)
                held = {slab for slab in range(40) if sleeper.core.slabs.holds(slab)}
                event = trio.Event()
                setattr(sleeper.chaos, "stalled" if stalled else "cut", event)
                sleeper.journal.put(schema.files_key(2), schema.encode_counts(1, 100))
                await trio.sleep(LEASE + 5)
                assert not sleeper.may_write
                assert all(world.clients[0].core.slabs.holds(slab) for slab in held)
                commits = sleeper.chaos.commits
                event.set()
                with pytest.raises(EngineError):
                    await sleeper.make(nursery, MIB)
                await trio.sleep(5)
                assert sleeper.chaos.commits == commits
                assert schema.files_key(2) not in world.disk.records
                over.cancel()
