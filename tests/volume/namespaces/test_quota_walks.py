"""Random work of several tasks in nested namespaces whose quotas change, with crashes: no quota is ever exceeded.

After each step of a task, and after each commit, the use of every namespace is within its quotas, or not larger than
before. A copy of the disk at any moment is clean, and a volume that opens it counts what its records have.
"""

from __future__ import annotations

import os
import random
import stat
from collections import Counter
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from namespace_lab import UseAudit, change_namespace, count_uses, make_namespace, recorded_uses, with_inner
from scale import scaled
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, InvalidArgument, NotAdmitted, NotEmpty, NotFound, QuotaExceeded, Stale
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE, Attributes, Changes
from kvfuse.volume.namespaces.namespace_registry import Namespace
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
NAMES = [b"%d" % number for number in range(7)]
CAPACITIES = [0, 16384, CHUNK - 1, 3 * CHUNK, 5 * CHUNK + 4096, MIB]
COUNTS = [0, 1, 3, 8, 1000]


@dataclass
class Walk:
    """Tasks at work on one volume."""

    volume: Volume
    audit: UseAudit
    rng: random.Random
    folders: list[int]
    """those of namespaces, and one in the innermost"""
    namespaces: list[int]
    events: Counter[str] = field(default_factory=Counter)
    last: dict[int, NamespaceUse] = field(default_factory=dict)
    places: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """namespace that came later -> (directory, name) of its folder"""
    known: list[int] = field(default_factory=list)
    """inodes that the kernel knows, once for each time"""

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
            self.check()

    async def step(self) -> None:
        rare = [self.link, self.requota, self.begin, self.end]
        actions = [self.put, self.write, self.delete, self.rename, self.cut, self.hold, *rare]
        action = self.rng.choices(actions, [8, 8, 6, 4, 3, 2, 1, 1, 1, 1])[0]
        try:
            await action(self.rng.choice(self.folders))
            self.events[action.__name__] += 1
        except QuotaExceeded as error:
            assert error.namespace
            self.events["refused"] += 1
        except (NotFound, Stale):
            self.events["absent"] += 1
        except (InvalidArgument, NotEmpty, NotAdmitted):
            self.events["not allowed"] += 1
        except EngineError:
            self.events["failed"] += 1
        if self.rng.random() < 0.7:
            self.forget()

    def check(self) -> None:
        namespaces = inside.namespaces(self.volume)
        for number in namespaces.all.keys() - {ROOT}:
            use, settings = namespaces.accounts.use(number), namespaces.all[number].settings
            last = self.last.get(number, NamespaceUse(0, 0))
            assert 0 <= use.size <= max(last.size, settings.capacity or use.size), (number, last, use, settings)
            assert 0 <= use.files <= max(last.files, settings.blocks or use.files), (number, last, use, settings)
            self.last[number] = use

    async def find(self, folder: int, name: bytes) -> Attributes:
        node = await self.volume.tree.lookup(folder, name)
        self.known.append(node.ino)
        return node

    def forget(self) -> None:
        """The kernel does not know any more what this task looked up."""
        while self.known:
            self.volume.tree.forget(self.known.pop(), 1)

    # -- steps -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return int((4 * CHUNK) ** self.rng.random())

    async def put(self, folder: int) -> None:
        data = memoryview(bytes(self.size))
        await self.volume.blocks.put(folder, self.rng.choice(NAMES), data, CALLER, 0o644)

    async def write(self, folder: int) -> None:
        """As engines do: temporary name, write, rename; or in place."""
        tree, files, name = self.volume.tree, self.volume.files, self.rng.choice(NAMES)
        in_place = self.rng.random() < 0.4
        written_to = name if in_place else b"tmp%d" % self.rng.randrange(1 << 30)
        if in_place:
            node = await self.find(folder, name)
            handle = await files.open(node.ino, os.O_RDWR, CALLER)
        else:
            handle, node = await tree.create(folder, written_to, 0o644, CALLER, os.O_RDWR)
            self.known.append(node.ino)
        try:
            for _ in range(self.rng.randint(1, 4)):
                await files.write(handle, self.rng.randrange(2 * CHUNK), bytes(self.size))
                if self.rng.random() < 0.1:
                    await files.fsync(handle)
            if not in_place:
                await tree.rename(folder, written_to, folder, name, 0)
        finally:
            await files.release(handle)

    async def delete(self, folder: int) -> None:
        names = self.rng.sample(NAMES, 3)
        if self.rng.random() < 0.5:
            await self.volume.blocks.delete(folder, names)
        else:
            await self.volume.tree.unlink(folder, names[0])

    async def rename(self, folder: int) -> None:
        flags = self.rng.choice([0, 0, RENAME_EXCHANGE])
        await self.volume.tree.rename(folder, self.rng.choice(NAMES), folder, self.rng.choice(NAMES), flags)

    async def cut(self, folder: int) -> None:
        node = await self.find(folder, self.rng.choice(NAMES))
        size = self.rng.choice([0, self.size, 3 * CHUNK])
        await self.volume.inodes.set_attributes(node.ino, Changes(size=size), CALLER)

    async def hold(self, folder: int) -> None:
        """A file that is open, or only known to the kernel, while it is removed."""
        tree, files, name = self.volume.tree, self.volume.files, self.rng.choice(NAMES)
        node = await self.find(folder, name)
        handle = await files.open(node.ino, os.O_RDWR, CALLER) if self.rng.random() < 0.7 else None
        try:
            await tree.unlink(folder, name)
            await trio.sleep(self.rng.random() * 0.1)
            if handle is not None:
                await files.write(handle, 0, bytes(self.size))
        finally:
            if handle is not None:
                await files.release(handle)

    async def link(self, folder: int) -> None:
        node = await self.find(folder, self.rng.choice(NAMES))
        name = b"link%d" % self.rng.randrange(3)
        try:
            await self.volume.tree.unlink(folder, name)
        except (NotFound, NotAdmitted):
            await self.volume.tree.link(node.ino, folder, name)
            self.known.append(node.ino)

    async def requota(self, folder: int) -> None:
        number = self.rng.choice(self.namespaces)
        await change_namespace(self.volume, number, **self.settings())

    def settings(self) -> dict[str, object]:
        quotas = {"capacity": self.rng.choice(CAPACITIES), "blocks": self.rng.choice(COUNTS)}
        return {"eviction": self.rng.choice(["lru", "fifo", "s3fifo"]), **quotas}

    def allow(self, number: int) -> None:
        """The quotas of a namespace change: it may go on having what it has."""
        if number:
            self.last[number] = self.audit.allowed[number] = inside.namespaces(self.volume).accounts.use(number)

    async def begin(self, folder: int) -> None:
        """A namespace, in any of those that were there from the start."""
        above, name = self.rng.choice(self.namespaces[:4]), b"space%d" % self.rng.randrange(1 << 30)
        number = await make_namespace(self.volume, above, name, **self.settings())
        self.places[number] = above, name
        self.folders.append(number)
        self.namespaces.append(number)

    async def end(self, folder: int) -> None:
        """One of these goes, with its folder or without."""
        if not self.places:
            return
        number, place = self.places.popitem()
        self.namespaces.remove(number)
        await self.empty(number)
        if self.rng.random() < 0.5:
            await self.volume.inodes.remove_xattr(number, NAMESPACE)
        await self.volume.tree.remove_directory(*place)
        self.folders.remove(number)

    async def empty(self, folder: int) -> None:
        for entry in await self.volume.tree.list_directory(folder, 0, 1000):
            if stat.S_ISREG(entry.attributes.mode):
                await self.volume.tree.unlink(folder, entry.name)

    async def clear(self) -> None:
        """Room returns when everything went."""
        self.forget()
        for folder in self.folders:
            await self.empty(folder)
        inside.names(self.volume).nameless.reap_unnamed()  # of a create that failed later, too
        for _ in range(2):  # what was being written, and what was given up meanwhile, goes with the second commit
            await inside.journal(self.volume).flusher.settled()
            await self.volume.sync()
        for number in self.namespaces:
            assert inside.namespaces(self.volume).accounts.use(number) == NamespaceUse(0, 0)


async def make_walk(volume: Volume, audit: UseAudit, rng: random.Random) -> Walk:
    outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=MIB, blocks=20)
    middle = await make_namespace(volume, outer, b"middle", capacity=8 * CHUNK)
    inner = await make_namespace(volume, middle, b"inner", blocks=6)
    beside = await make_namespace(volume, outer, b"beside", capacity=4 * CHUNK, blocks=4)
    folder = (await volume.tree.make_directory(inner, b"folder", 0o755, CALLER)).ino
    await volume.sync()
    walk = Walk(volume, audit, rng, [outer, middle, inner, beside, folder], [outer, middle, inner, beside])
    namespaces, put = inside.namespaces(volume), inside.namespaces(volume).put

    # The walk has to know of a new quota at the very change, between two looks of the audit.
    def put_noted(number: int, stored: Settings, above: int | None = None) -> Namespace:
        walk.allow(number)
        return put(number, stored, above)

    namespaces.put = put_noted  # type: ignore[method-assign]
    return walk


async def snap(disk: Disk, rng: random.Random, copies: list[Disk]) -> None:
    while True:
        await trio.sleep(rng.random() * 0.3)
        copies.append(disk.copy())


async def check_crash(disk: Disk, nodes: int) -> None:
    report = await check(disk, verify=False)  # a head may be torn that was being rewritten
    assert report.clean, [problem.text for problem in report.problems]
    UseAudit.attach(disk)
    options = lab_options(capacity=24 * MIB, chunk=CHUNK, nodes=nodes)
    async with opened(disk, options) as volume:
        await volume.sync()
        assert recorded_uses(disk) == count_uses(disk)
        accounts = inside.namespaces(volume).accounts
        whole = with_inner(disk, count_uses(disk))
        for number in [number for number in inside.namespaces(volume).all if number]:
            assert accounts.use(number) == NamespaceUse(whole[number].size, whole[number].files)
    assert (await check(disk, verify=False)).clean


@pytest.mark.parametrize("faults", [0.0, 0.03], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", scaled(2)))))
async def test_no_quota_is_exceeded_and_room_returns(
    seed: int,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    faults: float,
    round_number: int,
) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([1000, 8])
    options = lab_options(capacity=24 * MIB, chunk=CHUNK, nodes=nodes, strict=rng.random() < 0.3)
    disk, chaos = Disk.format(options), Chaos(random.Random(rng.random()), delay=rng.choice([0.1, 0.5]))
    audit = UseAudit.attach(disk)
    copies: list[Disk] = []
    async with opened(disk, options, chaos) as volume:
        walk = await make_walk(volume, audit, rng)
        chaos.commit_error = chaos.write_error = faults
        async with trio.open_nursery() as nursery:
            nursery.start_soon(snap, disk, rng, copies)
            async with trio.open_nursery() as workers:
                for _ in range(rng.choice([1, 4])):
                    workers.start_soon(walk.run, 120)
            nursery.cancel_scope.cancel()
        chaos.commit_error = chaos.write_error = 0.0
        copies.append(disk.copy())
        await walk.clear()
    print(dict(walk.events), dict(audit.most))
    assert not [record for record in caplog.records if "marked free" in record.message]
    for crashed in rng.sample(copies, min(6, len(copies))):
        await check_crash(crashed, nodes)
    assert recorded_uses(disk) == count_uses(disk) == {}
    assert (await check(disk)).clean
