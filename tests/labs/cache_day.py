"""A day of caches on one host: hours of random work, between which time passes, and in which the power may fail.

Whoever reads a name knows which version of it that is (`cache_play`). So nobody may be shown one that is older than
the last write in this life, than the last clear that returned, or than its time to live; nor, after a power cut,
than the last sync. Use is compared with quotas at each allocation (`watch_quotas`) and at each commit (`UseAudit`).
"""

from __future__ import annotations

import copy
import random
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import inside
import pytest
import trio
import trio.testing
from cache_play import Blocks, CacheActor, Place, Written, content
from namespace_lab import UseAudit, change_namespace
from volume_lab import CALLER, MIB, Disk

from kvfuse.errors import EngineError, InvalidArgument, NoSpace, NotFound, Stale
from kvfuse.policy import ADMISSIONS, POLICIES
from kvfuse.volume.api import Handle
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.namespaces.accounts import Accounts
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.tenancy.namespace_attributes import CLEAR, NAMESPACE
from kvfuse.volume.views import clock
from kvfuse.volume.volume import Volume

LATE_SECONDS = 10.0
"""after which a block that is beyond its time to live must be gone: eviction looks every second, and engines fail"""
PAUSE_SECONDS = 0.2
"""the longest, between two steps of who works"""
HELD_MAX = 8
"""files that are kept open"""
BLOCK_MAX = 512 << 10
"""bytes of slots that a block takes at most, with what it is the successor of"""


# -- time and use ---------------------------------------------------------------------------------------


def simulate_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inodes be stamped by trio's clock, so that times agree after a restart, too."""
    monkeypatch.setattr(clock, "now", lambda: int((1e9 + trio.current_time()) * 1e9))


def watch_quotas(monkeypatch: pytest.MonkeyPatch, audits: list[UseAudit]) -> None:
    """AssertionError in whatever makes a namespace have more than it may, at that moment.

    The last of ``audits`` hears what namespaces have when their quotas change.
    """
    charge, add_files, put = Accounts.charge, Accounts.add_files, Accounts.put

    had: dict[int, int] = {}
    """bytes before some were given back: a file that is written takes other slots for those that it has, and where
    there are none, these again, also when the quota has become smaller meanwhile"""

    def charge_watched(accounts: Accounts, owner: int, size: int) -> None:
        chain = [accounts.all[one] for one in accounts.chain(owner)]
        before = {account.number: account.size for account in chain}
        charge(accounts, owner, size)
        for account in chain:
            number, allowed = account.number, account.settings.capacity or account.size
            assert 0 <= account.size <= max(allowed, had.get(number, 0), before[number]), account
            # From the first that is given back on, until there is again as much as before, or as may be.
            if size < 0:
                had[number] = max(had.get(number, 0), before[number])
            elif account.size >= had.get(number, 0) or account.size <= allowed:
                had.pop(number, None)

    def add_files_watched(accounts: Accounts, owner: int, count: int) -> None:
        add_files(accounts, owner, count)
        for account in [accounts.all[one] for one in accounts.chain(owner)] if count > 0 else ():
            assert 0 <= account.files <= (account.settings.blocks or account.files), account

    def put_noted(accounts: Accounts, number: int, above: int | None, settings: Settings) -> None:
        size, files = accounts.use(number)
        allowed = audits[-1].allowed.get(number, NamespaceUse(0, 0))
        audits[-1].allowed[number] = NamespaceUse(max(size, allowed.size), max(files, allowed.files))
        put(accounts, number, above, settings)

    monkeypatch.setattr(Accounts, "charge", charge_watched)
    monkeypatch.setattr(Accounts, "add_files", add_files_watched)
    monkeypatch.setattr(Accounts, "put", put_noted)


# -- what is known of names -----------------------------------------------------------------------------


@dataclass
class Dated(Written):
    """A name, with what a power cut and time do to it."""

    kept: int = 0
    """a power cut leaves this version, a later one, or none"""
    stored_at: dict[int, float] = field(default_factory=dict)
    """version -> when it was stored at the latest"""
    is_writing: bool = False
    is_there: bool = False
    """a file that is never evicted was written, and not removed since"""
    stays: bool = False
    """likewise, and a power cut leaves it or a later version"""

    @property
    def settled(self) -> int:
        """The latest version that no call is writing at present."""
        return self.latest - self.is_writing

    def forget_to(self, least: int) -> None:
        """Nothing older is shown any more."""
        self.least = max(self.least, least)
        for version in [version for version in self.stored_at if version < self.least]:
            del self.stored_at[version]

    def lose_power(self) -> None:
        self.least, self.is_absent, self.is_writing, self.is_there = self.kept, False, False, self.stays
        now = trio.current_time()
        self.stored_at = {version: min(at, now) for version, at in self.stored_at.items()}


@dataclass
class Day(Blocks):
    """All that is known, in one life of the daemon after the other."""

    volume: Volume | None = None
    changed_at: dict[int, float] = field(default_factory=dict)
    """namespace -> when its settings changed, or the volume was mounted"""
    opened_at: dict[Place, float] = field(default_factory=dict)
    """names -> when somebody had their file open: it is not evicted then, nor soon after"""
    refused: int = 0

    def at(self, place: Place) -> Dated:
        found = self.names.get(place)
        if found is None:
            found = self.names[place] = Dated(place)
        assert isinstance(found, Dated)
        return found

    @property
    def all(self) -> list[Dated]:
        return [self.at(place) for place in list(self.names)]

    def check_age(self, place: Place, version: int) -> None:
        """A version that somebody was shown just now is not beyond its time to live."""
        assert self.volume is not None
        namespaces, now = inside.namespaces(self.volume), trio.current_time()
        found, stored = namespaces.all.get(place[0]), self.at(place).stored_at.get(version, now)
        if found is not None and found.settings.is_cache and found.settings.ttl:
            ends = max(stored + found.settings.ttl, self.changed_at.get(place[0], 0), self.opened_at.get(place, 0))
            assert now <= ends + LATE_SECONDS, f"{place}: {now - stored} s old, of at most {found.settings.ttl}"

    def lose_power(self) -> Day:
        """What is known of names after a power cut at this moment."""
        after = Day(copy.deepcopy(self.names), self.refusals, refused=self.refused)
        for one in after.all:
            one.lose_power()
        return after


# -- who works ------------------------------------------------------------------------------------------


class DayActor(CacheActor):
    """Keeps to quotas that may be too small for a block, and to times."""

    blocks: Day
    name_count = 40

    async def write_version(self, written: Written, write: Callable[[bytes], Awaitable[object]]) -> None:
        assert isinstance(written, Dated)
        version = written.latest + 1
        written.is_writing = True
        written.stored_at[version] = float("inf")

        async def write_if_it_fits(data: bytes) -> None:
            try:
                await write(data)
            except NoSpace:
                self.refused(written.place)
                raise EngineError("no room for one block") from None

        try:
            await super().write_version(written, write_if_it_fits)
        finally:
            if version in written.stored_at:
                written.stored_at[version] = trio.current_time()
            written.is_writing = False
        written.forget_to(written.least)

    def refused(self, place: Place) -> None:
        """Only a quota that is too small for a block, beside those of files that are open, is a reason."""
        accounts = inside.namespaces(self.volume).accounts
        chain = [accounts.all[number] for number in accounts.chain(place[0])]
        self.blocks.refused += 1
        is_tight = [
            0 < one.settings.capacity < (HELD_MAX + 6) * BLOCK_MAX or 0 < one.settings.blocks < HELD_MAX + 12
            for one in chain
        ]
        assert any(is_tight), f"a cache refuses what fits: {chain}"

    async def create(self, parent: int, name: bytes) -> tuple[Handle, int]:
        try:
            return await super().create(parent, name)
        except NotFound:  # an engine failed while room was made for it
            raise EngineError("it was not created") from None

    async def cut(self, written: Written) -> None:
        with suppress(NoSpace):
            await super().cut(written)

    async def read_by_name(self, place: Place) -> bytes | None:
        found = await super().read_by_name(place)
        self.check_age(place, found)
        return found

    async def read_by_map(self, place: Place) -> bytes | None:
        found = await super().read_by_map(place)
        self.check_age(place, found)
        return found

    def check_age(self, place: Place, found: bytes | None) -> None:
        if found:
            self.blocks.check_age(place, version_of(found))

    async def hold(self, written: Written) -> None:
        opened = trio.current_time()
        await super().hold(written)
        self.blocks.opened_at[written.place] = trio.current_time()
        assert trio.current_time() - opened < LATE_SECONDS


def version_of(data: bytes) -> int:
    return int(data.split(b"\n", 1)[0].rsplit(b"/", 1)[1])


class Holder(CacheActor):
    """Keeps files open for hours: each stays what it was, whatever becomes of its name."""

    blocks: Day

    def __init__(self, volume: Volume, blocks: Blocks, rng: random.Random, number: int, folders: list[int]) -> None:
        super().__init__(volume, blocks, rng, number, folders)
        self.held: list[tuple[Place, int, FileHandle]] = []

    async def run(self, steps: int, pause: float = 0.0) -> None:
        for _ in range(steps):
            await trio.sleep(self.rng.random() * pause)
            await self.open_one()
            await self.check_all()
            if len(self.held) == HELD_MAX or (self.held and self.rng.random() < 0.1):
                await self.release(self.rng.randrange(len(self.held)))
            self.forget()

    async def open_one(self) -> None:
        if not self.blocks.names or len(self.held) == HELD_MAX:
            return
        place = self.rng.choice(sorted(self.blocks.names))
        try:
            ino = await self.find(*place)
            if ino is None:
                return
            handle = await self.volume.files.open(ino, 0, CALLER)
        except (Stale, EngineError):
            return
        assert isinstance(handle, FileHandle)
        try:
            data = bytes(await self.volume.files.read(handle, 0, 1 << 20))
            if data:
                self.blocks.at(place).check(data, 0)
                self.held.append((place, version_of(data), handle))
                return
        except EngineError:
            pass
        await self.volume.files.release(handle)

    async def check_all(self) -> None:
        for place, version, handle in self.held:
            self.blocks.opened_at[place] = trio.current_time()
            with suppress(EngineError):
                data = bytes(await self.volume.files.read(handle, 0, 1 << 20))
                assert data == content(place, version), f"{place} changed while it was open"

    async def release(self, index: int) -> None:
        place, _, handle = self.held.pop(index)
        await self.volume.files.release(handle)
        self.blocks.opened_at[place] = trio.current_time()

    async def release_all(self) -> None:
        while self.held:
            await self.release(0)


class Filer(DayActor):
    """Writes files that are never evicted, and that are there after a power cut if they were synced."""

    blocks: Day

    async def run(self, steps: int, pause: float = 0.0) -> None:
        for _ in range(steps):
            written = self.blocks.at((self.rng.choice(self.folders), b"f%d.%d" % (self.number, self.rng.randrange(8))))
            await self.rng.choices([self.publish, self.give_up], [4, 1])[0](written)
            await self.compare(self.blocks.at(self.rng.choice(self.own())))
            self.forget()
            await trio.sleep(self.rng.random() * pause)

    def own(self) -> list[Place]:
        return [place for place in sorted(self.blocks.names) if place[1].startswith(b"f%d." % self.number)]

    async def write_version(self, written: Written, write: Callable[[bytes], Awaitable[object]]) -> None:
        await super().write_version(written, write)
        assert isinstance(written, Dated)
        written.is_there = written.is_there or written.least == written.latest

    async def give_up(self, written: Written) -> None:
        assert isinstance(written, Dated)
        written.is_there = written.stays = False
        await self.remove(written)

    async def compare(self, written: Dated) -> None:
        try:
            found = await self.read_by_name(written.place)
        except EngineError:
            return
        written.check(found, written.least)
        assert found or not written.is_there, f"{written.place} is gone"


class Operator:
    """Changes settings, clears, and syncs."""

    def __init__(self, volume: Volume, day: Day, rng: random.Random, folders: list[int], audit: UseAudit) -> None:
        self.volume, self.day, self.rng, self.folders, self.audit = volume, day, rng, folders, audit
        self.done: list[str] = []

    async def run(self) -> None:
        """For ever."""
        actions = [self.change_quota, self.change_policy, self.change_ttl, self.clear, self.sync]
        while True:
            await trio.sleep(self.rng.random() * PAUSE_SECONDS)
            await self.rng.choices(actions, [4, 1, 2, 1, 4])[0](self.rng.choice(self.folders[1:]))

    async def change(self, number: int, **settings: object) -> None:
        self.day.changed_at[number] = float("inf")
        try:
            await change_namespace(self.volume, number, **settings)
            self.done.append(" ".join(settings))
        except (EngineError, InvalidArgument):
            pass
        finally:
            self.day.changed_at[number] = trio.current_time()

    async def change_quota(self, number: int) -> None:
        if self.rng.random() < 0.3:
            return await self.change(number, blocks=self.rng.choice([0, 3, 10, 30, 100]))
        sizes = [0, MIB // 8, MIB // 2, MIB, 2 * MIB, 3 * MIB, 4 * MIB, 6 * MIB]
        return await self.change(number, capacity=self.rng.choice(sizes))

    async def change_policy(self, number: int) -> None:
        policy, admission = self.rng.choice(list(POLICIES)), self.rng.choice(list(ADMISSIONS))
        await self.change(number, eviction=policy, admission=admission)

    async def change_ttl(self, number: int) -> None:
        await self.change(number, ttl=self.rng.choice([0, 20, 600, 7200, 20_000]))

    async def clear(self, number: int) -> None:
        before = {one.place: one.settled for one in self.day.all if one.place[0] == number}
        is_stored = False
        with suppress(EngineError):
            await self.volume.inodes.set_xattr(number, CLEAR, b"now")
            is_stored = True
        self.done.append("clear")
        for place, version in before.items():
            one = self.day.at(place)
            one.forget_to(version + 1)
            if is_stored:
                one.kept = max(one.kept, version + 1)

    async def sync(self, number: int) -> None:
        before = [(one, one.least, one.is_there) for one in self.day.all]
        with suppress(EngineError):
            await self.volume.sync()
            for one, least, was_there in before:
                one.kept = max(one.kept, least)
                one.stays = one.stays or (was_there and one.is_there)


# -- an hour --------------------------------------------------------------------------------------------


@dataclass
class Crew:
    """All who work on a volume in one life."""

    day: Day
    rng: random.Random
    actors: list[CacheActor]
    holder: Holder
    operator: Operator

    @classmethod
    def on(cls, volume: Volume, day: Day, rng: random.Random, folders: list[int], home: int, audit: UseAudit) -> Crew:
        seeds: Iterator[random.Random] = iter(lambda: random.Random(rng.random()), None)
        day.volume = volume
        day.changed_at = dict.fromkeys(folders, trio.current_time())
        actors: list[CacheActor] = [DayActor(volume, day, next(seeds), number, folders) for number in range(3)]
        actors.append(Filer(volume, day, next(seeds), 0, [home]))
        for actor in actors:
            actor.steps = int(trio.current_time()) * 1000  # names of temporary files are used once
        holder = Holder(volume, day, next(seeds), 9, folders)
        return cls(day, rng, actors, holder, Operator(volume, day, next(seeds), folders, audit))

    async def work(self, steps: int) -> None:
        """Return when all have done so many steps."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.operator.run)
            async with trio.open_nursery() as workers:
                for actor in [*self.actors, self.holder]:
                    workers.start_soon(actor.run, steps, PAUSE_SECONDS)
            nursery.cancel_scope.cancel()
        for number in self.operator.folders:  # a change may have been cancelled on its way
            self.day.changed_at[number] = trio.current_time()

    async def work_until_power_fails(self, steps: int, disk: Disk) -> tuple[Disk, Day]:
        """(the disk, and what is known of it), as they are at some moment of the work."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.work, steps)
            await trio.sleep(self.rng.random() * self.rng.choice([0.1, 0.5, 2.0]))
            image = disk.copy(), self.day.lose_power()
            nursery.cancel_scope.cancel()
        return image

    async def look(self, count: int) -> None:
        """So many names show what they may, or nothing."""
        await self.holder.check_all()
        for one in self.rng.sample(self.day.all, min(count, len(self.day.all))):
            actor = self.actors[-1] if one.place[1].startswith(b"f") else self.actors[0]
            if isinstance(actor, Filer):
                await actor.compare(one)
            else:
                one.check(await actor.read_by_name(one.place), one.least)
            actor.forget()


async def pass_time(time: trio.testing.MockClock, seconds: float) -> None:
    """Return when so much time is over, and all have heard the bell."""
    time.jump(seconds)
    await trio.sleep(LATE_SECONDS)


async def remove_all(volume: Volume, folder: int, namespaces: list[int]) -> None:
    """Remove whatever is in a folder, and let its folders be ``namespaces`` no more."""
    for row in await volume.tree.list_directory(folder, 0, 10_000):
        ino = row.attributes.ino
        with suppress(NotFound):
            if stat.S_ISREG(row.attributes.mode):
                await volume.tree.unlink(folder, row.name)
            else:
                await remove_all(volume, ino, namespaces)
                if ino in namespaces:
                    await volume.inodes.remove_xattr(ino, NAMESPACE)
                await volume.tree.remove_directory(folder, row.name)
