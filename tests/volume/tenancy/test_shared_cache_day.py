"""24 hours of nested caches that hosts share: quotas, times to live and clears change, and hosts come and go."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import shared_lab
import trio
import trio.testing
from cache_day import simulate_clock
from cache_play import Place
from namespace_lab import count_uses, make_namespace, recorded_uses
from shared_cache_day import NAME_COUNT, Host, Model, QuotaWatch
from shared_lab import check_disk, eventually, names_in, quiet
from volume_lab import MIB, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.eviction import evictor
from kvfuse.volume.hosts import reports, slab_leases

pytestmark = pytest.mark.ring(3)

HOURS = 24
ROUNDS = range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "1")))
STEPS = 4
"""of each program, in an hour"""
IDLE_SECONDS = 3550.0
"""of an hour in which nobody works"""
IDLE_PAUSE_SECONDS = 60.0
"""between two looks of those who look all the time, meanwhile"""
LEASE_SECONDS = 30.0
WORK_SECONDS = 3000.0
"""in which the work of an hour ends"""
RETURN_SECONDS = 120.0
"""after which the room of cleared or expired files is free"""
SLOT_MAX = 512 << 10
"""bytes of slots of a file"""


@contextmanager
def slower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody works: who looks for work does it seldom."""
    with monkeypatch.context() as patch:
        for module, name in ((slab_leases, "TICK"), (evictor, "LOOK"), (reports, "REPORT")):
            patch.setattr(module, f"{name}_SECONDS", IDLE_PAUSE_SECONDS)
        yield


@dataclass
class SharedDay:
    """Drives hosts through the hours."""

    rng: random.Random
    monkeypatch: pytest.MonkeyPatch
    disk: Disk
    hosts: list[Host]
    model: Model
    nursery: trio.Nursery
    watch: QuotaWatch | None = None
    spaces: list[int] = field(default_factory=list)
    """namespaces; the second one is in the first"""
    epoch: int = 0

    async def set_up(self) -> None:
        for host in self.hosts:
            await self.nursery.start(host.live)
        volume = self.hosts[0].here
        outer = await make_namespace(
            volume, ROOT_INODE, b"outer", kind="cache", admission="all", capacity=2 * MIB, blocks=60
        )
        inner = await make_namespace(volume, outer, b"inner", kind="cache", admission="all", capacity=MIB)
        other = await make_namespace(volume, ROOT_INODE, b"other", kind="cache", admission="all")
        self.spaces = [outer, inner, other]
        await quiet(*[host.here for host in self.hosts])
        self.watch = QuotaWatch(self.disk, {outer: [outer, inner], inner: [inner], other: [other]}, self.rng)
        self.watch.hosts = self.hosts
        self.watch.attach(self.monkeypatch)

    @property
    def places(self) -> list[Place]:
        return [(number, b"%d" % name) for number in self.spaces for name in range(NAME_COUNT)]

    def own(self, host: Host) -> list[Place]:
        """Names that a host writes in this hour."""
        turn = host.number + self.epoch
        return [place for place in self.places if (int(place[1]) + turn) % len(self.hosts) == 0]

    # -- an hour -------------------------------------------------------------------------------------

    async def hour(self) -> None:
        self.epoch += 1
        event = self.rng.choice([self.nothing, self.nothing, self.leave])
        victim = self.rng.choice(self.hosts)
        with trio.fail_after(WORK_SECONDS):
            async with trio.open_nursery() as nursery:
                for host in self.hosts:
                    nursery.start_soon(host.work, self.places, self.own(host), STEPS)
                nursery.start_soon(event, victim)
                operator = self.rng.choice([host for host in self.hosts if host is not victim])
                nursery.start_soon(self.operate, operator)
        await self.settle()
        await self.rng.choices([self.nothing, self.clear_all, self.expire_all], [6, 1, 1])[0](victim)
        with slower(self.monkeypatch):
            await trio.sleep(IDLE_SECONDS)
        await trio.sleep(IDLE_PAUSE_SECONDS)
        await self.look()

    async def settle(self) -> None:
        """All is stored and heard of."""
        for host in self.hosts:
            if host.volume is None:
                await self.nursery.start(host.live)
        await quiet(*[host.here for host in self.hosts])
        self.model.all_heard()

    async def look(self) -> None:
        for host in self.hosts:
            await host.check_held()
            for place in self.rng.sample(self.places, 10):
                await host.get(place)

    async def operate(self, host: Host) -> None:
        for _ in range(3):
            await trio.sleep(self.rng.random())
            number = self.rng.choice(self.spaces)
            choice = self.rng.randrange(4)
            if choice == 0:
                await host.clear(number)
            elif choice == 1:
                await host.change(number, blocks=self.rng.choice([0, 20, 30, 60]))
            elif choice == 2:
                await host.change(number, ttl=self.rng.choice([0, 600, 7200]))
            else:
                sizes = [0, MIB // 2, MIB, 2 * MIB, 3 * MIB]
                await host.change(number, capacity=self.rng.choice(sizes))

    # -- what becomes of hosts -----------------------------------------------------------------------

    async def nothing(self, host: Host) -> None:
        pass

    async def leave(self, host: Host) -> None:
        await trio.sleep(self.rng.random() * 1.5)
        host.programs.cancel()
        await trio.sleep(0.1)
        for handle in [handle for handle in host.handles if handle not in [one.handle for one in host.held]]:
            await host.close(handle)
        await host.leave()

    # -- room ----------------------------------------------------------------------------------------

    async def clear_all(self, _: Host) -> None:
        for number in self.spaces:
            await self.rng.choice(self.hosts).clear(number)
        await self.room_returns(self.spaces, files_too=True)

    async def expire_all(self, _: Host) -> None:
        for number in self.spaces:
            await self.rng.choice(self.hosts).change(number, ttl=600)
        with slower(self.monkeypatch):
            await trio.sleep(700)
        await self.room_returns(self.spaces)
        for number in self.spaces:
            await self.hosts[0].change(number, ttl=0)

    async def room_returns(self, numbers: list[int], *, files_too: bool = False) -> None:
        """There is nothing any more but files that are open, and (not ``files_too``) those without bytes."""

        async def is_free() -> bool:
            await quiet(*[host.here for host in self.hosts])
            uses = count_uses(self.disk)
            for number in numbers:
                held = [one for host in self.hosts for one in host.held if one.place[0] == number]
                if number in uses and uses[number].size > len(held) * SLOT_MAX:
                    return False
                if number in uses and files_too and uses[number].files > 0:
                    return False
            return True

        try:
            await eventually(is_free, seconds=RETURN_SECONDS, pause=2)
        except trio.TooSlowError:
            raise AssertionError(f"room does not return: {dict(count_uses(self.disk))}") from None

    async def remove_everything(self) -> None:
        for host in self.hosts:
            await host.release_all()
            assert not host.handles
        for number in self.spaces:
            await self.hosts[0].change(number, ttl=0)
            for name in await names_in(self.hosts[0].here, number):
                if name != b"inner":
                    with suppress(errors.NotFound):
                        await self.hosts[-1].here.tree.unlink(number, name)
        await self.room_returns(self.spaces, files_too=True)
        assert count_uses(self.disk) == recorded_uses(self.disk) == {}


@pytest.mark.parametrize("round_number", ROUNDS)
async def test_a_day_of_hosts_that_share_caches(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    round_number: int,
) -> None:
    """Use is never above a quota, room returns, no look finds what is no more, and open files stay."""
    simulate_clock(monkeypatch)
    monkeypatch.setattr(shared_lab, "LEASE", LEASE_SECONDS)
    rng = random.Random(seed)
    options = lab_options(strict=rng.random() < 0.5, capacity=16 * MIB)
    disk, model = Disk.format(options, shared=True), Model(2)
    hosts = [Host(number, disk, options, model, random.Random(rng.random())) for number in model.hosts]
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        day = SharedDay(rng, monkeypatch, disk, hosts, model, nursery)
        try:
            await day.set_up()
            for _ in range(HOURS):
                await day.hour()
            await day.remove_everything()
        finally:
            if day.watch is not None:
                day.watch.is_on = False
        for host in hosts:
            await host.leave()
    await check_disk(disk)
    print(dict(model.events))
    assert model.events["hit"] > 50
    assert trio.current_time() - began >= HOURS * 3600
