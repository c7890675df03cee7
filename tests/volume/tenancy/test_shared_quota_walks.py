"""Random work of three hosts in namespaces with quotas that change, while hosts die: use is never above a quota.

After each commit and at each step: use is what all that are alive have in memory, staged bytes included, and what the
records say of the others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from namespace_lab import change_namespace, count_uses, make_namespace, recorded_uses
from shared_lab import joined, quiet, until, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NamespaceUse
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 32 << 10
STEPS = 25
Clock = trio.testing.MockClock


@dataclass
class Quotas:
    """What all hosts have of one namespace, against its quotas."""

    disk: Disk
    hosts: list[Volume]
    number: int
    capacity: int
    blocks: int
    inner: int = 0
    """a namespace in it"""
    last: NamespaceUse = NO_USE
    is_changing: bool = False
    events: Counter[str] = field(default_factory=Counter)

    def use(self) -> NamespaceUse:
        alive = {inside.client(one): inside.namespaces(one).accounts for one in self.hosts}
        alive = {client: of for client, of in alive.items() if schema.member_key(client) in self.disk.records}
        uses = [accounts.use(self.number) for accounts in alive.values()]
        rows = {key: row for key, row in self.disk.records.items() if key[:1] == schema.USE_PREFIX}
        for (number, client), row in [(schema.split_use_key(key), row) for key, row in rows.items()]:
            if number in (self.number, self.inner) and client not in alive:
                files, size = schema.decode_counts(row.value)
                uses.append(NamespaceUse(size or 0, files))
        return NamespaceUse(sum([use.size for use in uses]), sum([use.files for use in uses]))

    def look(self, *_: object) -> None:
        use, last = self.use(), self.last
        if not self.is_changing:
            assert use.size <= max(last.size, self.capacity), (use, last, self.capacity)
            assert use.files <= max(last.files, self.blocks), (use, last, self.blocks)
        self.last = use

    async def change(self, host: Volume, capacity: int, blocks: int) -> None:
        self.is_changing = True
        try:
            await change_namespace(host, self.number, capacity=capacity, blocks=blocks)
            self.capacity, self.blocks = capacity, blocks
        finally:
            self.is_changing = False
            self.last = self.use()


async def store(host: Volume, folder: int, name: bytes, size: int) -> None:
    """As programs do: they close what they could not write."""
    handle, node = await host.tree.create(folder, name, 0o644, CALLER, os.O_RDWR)
    try:
        await host.files.write(handle, 0, bytes(size))
        await host.files.flush(handle)
    finally:
        await host.files.release(handle)
        host.tree.forget(node.ino, 1)


async def work(quotas: Quotas, host: Volume, rng: random.Random) -> None:
    for _ in range(STEPS):
        folder = rng.choice([quotas.number, quotas.inner or quotas.number])
        name = b"%d" % rng.randrange(12)
        try:
            if rng.random() < 0.7:
                await store(host, folder, name, rng.randint(1, 3 * BLOCK))
                quotas.events["put"] += 1
            else:
                await host.tree.unlink(folder, name)
                quotas.events["removed"] += 1
        except errors.QuotaExceeded:
            quotas.events["refused"] += 1
        except (errors.NotFound, errors.Stale, errors.Exists):
            quotas.events["absent"] += 1
        except errors.EngineError:
            quotas.events["failed"] += 1
        quotas.look()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("round_number", range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "1"))))
async def test_use_is_never_above_a_quota(seed: int, autojump_clock: Clock, strict: bool, round_number: int) -> None:
    rng = random.Random(seed + round_number)
    options = lab_options(strict=strict, capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    mortal = Chaos(random.Random(rng.random()), delay=0.5)
    async with volumes(disk, options, 2, rng) as (one, other), joined(disk, options, 7, mortal) as third:
        space = await make_namespace(one, ROOT_INODE, b"space", capacity=8 * BLOCK, blocks=9)
        inner = await make_namespace(one, space, b"inner", blocks=4)
        quotas = Quotas(disk, [one, other, third], space, 8 * BLOCK, 9, inner)
        disk.audit = quotas.look
        async with trio.open_nursery() as nursery:
            for host in quotas.hosts:
                nursery.start_soon(work, quotas, host, random.Random(rng.random()))
            for _ in range(4):
                await trio.sleep(rng.random() * 4)
                await quotas.change(
                    rng.choice([one, other]), rng.choice([6, 8, 12, 20]) * BLOCK, rng.choice([5, 9, 30])
                )
            mortal.stalled = trio.Event()
            client = inside.client(third)
            await until(lambda: schema.member_key(client) not in disk.records)  # its lease ends
            await trio.sleep(rng.random() * 4)
            await quotas.change(one, 10 * BLOCK, 10)
            mortal.stalled.set()
        print(dict(quotas.events))
        assert quotas.events["put"], "some found room"
        await until(lambda: schema.member_key(inside.client(third)) in disk.records)  # it has joined again
        await quiet(one, other)
        await until(lambda: schema.use_key(space, client) not in disk.records)
        disk.audit = lambda *_: None  # a client that leaves has in memory what its records do not say any more
    assert recorded_uses(disk) == count_uses(disk)


async def test_use_is_never_above_a_quota_while_a_client_goes_on(rng: random.Random, autojump_clock: Clock) -> None:
    """Its daemons are killed, or handed over: the next one has what records say of its use."""
    options = lab_options(strict=rng.random() < 0.5, capacity=16 * MIB)
    disk, keeper = Disk.format(options, shared=True), MemoryKeeper()
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", capacity=8 * BLOCK, blocks=9)
        inner = await make_namespace(one, space, b"inner", blocks=4)
        quotas = Quotas(disk, [one, other], space, 8 * BLOCK, 9, inner)
        disk.audit = quotas.look
        async with trio.open_nursery() as nursery:
            for host in (one, other):
                nursery.start_soon(work, quotas, host, random.Random(rng.random()))
            for _ in range(5):
                chaos = Chaos(random.Random(rng.random()), delay=0.5)
                async with joined(disk, options, 7, chaos, keeper) as third, trio.open_nursery() as own:
                    assert inside.client(third) == 7
                    quotas.hosts[2:] = [third]
                    own.start_soon(work, quotas, third, random.Random(rng.random()))
                    await trio.sleep(rng.random() * 4)
                    await quotas.change(one, rng.choice([6, 8, 12, 20]) * BLOCK, rng.choice([5, 9, 30]))
                    await trio.sleep(rng.random() * 4)
                    chaos.killed = rng.random() < 0.7
                    if chaos.killed:
                        quotas.hosts.remove(third)  # from now on its records count
                    own.cancel_scope.cancel()
                    third.hand_over()
                await trio.sleep(rng.random() * 4)
        print(dict(quotas.events))
        assert quotas.events["put"], "some found room"
        await until(lambda: schema.member_key(7) not in disk.records)
        await quiet(one, other)
        await until(lambda: schema.use_key(space, 7) not in disk.records)
        disk.audit = lambda *_: None
    assert recorded_uses(disk) == count_uses(disk)
