"""A day of caches that several hosts have: who works there, what each host may be shown, and what may be used.

A name is written by one host at a time, which changes when all is stored and heard of. Its bytes tell their version
(`cache_play.content`). No look shows one that is older than what its host has put, removed, seen or cleared, or than a
clear of which it has heard.

Use is compared with quotas whenever anything is added, and after each commit: what hosts have in memory, staged
bytes included, and what the records say of the others. Files count by the records alone: one that replaces another
counts twice in memory.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import inside
import pytest
import trio
from cache_play import Place, content
from namespace_lab import change_namespace, count_uses, recorded_uses
from shared_lab import as_by_path, joined
from volume_lab import CALLER, MIB, Chaos, Disk

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.namespaces.accounts import Accounts
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import decode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.namespace_attributes import CLEAR
from kvfuse.volume.volume import Volume

NAME_COUNT = 12
"""in each namespace"""
PROGRAM_COUNT = 2
"""on each host"""
PAUSE_SECONDS = 0.3
"""the longest, between two steps of who works"""
HELD_MAX = 3
"""files that a host keeps open"""
AUDITED_SHARE = 0.05
"""of the commits: after these all records are read"""


# -- what is known --------------------------------------------------------------------------------------


@dataclass
class Written:
    """Versions of a name."""

    latest: int = 0
    is_writing: bool = False
    kept: int = 0
    """the store has this version, a later one, or none"""
    least: Counter[int] = field(default_factory=Counter)
    """host -> it is shown this version, a later one, or none"""

    @property
    def settled(self) -> int:
        return self.latest - self.is_writing


@dataclass
class Clear:
    """One that has returned. ``least``: what names may show since."""

    number: int
    bound: int
    least: dict[Place, int]


class Model:
    """All names, as each host may see them. Hosts are numbers here."""

    def __init__(self, host_count: int) -> None:
        self.hosts = range(host_count)
        self.names: dict[Place, Written] = {}
        self.clears: dict[int, list[Clear]] = {host: [] for host in self.hosts}
        """host -> those of others of which it may not have heard"""
        self.events: Counter[str] = Counter()

    def at(self, place: Place) -> Written:
        return self.names.setdefault(place, Written())

    def raise_least(self, host: int, place: Place, version: int) -> None:
        least = self.at(place).least
        least[host] = max(least[host], version)

    def least(self, host: int, place: Place, bound: int) -> int:
        """What a look that begins now may show. ``bound``: that of the last clear of which the host has heard."""
        for clear in [one for one in self.clears[host] if one.number == place[0] and one.bound <= bound]:
            for cleared, version in clear.least.items():
                self.raise_least(host, cleared, version)
            self.clears[host].remove(clear)
        return self.at(place).least[host]

    def check(self, place: Place, data: bytes, least: int) -> int:
        """AssertionError, or which version it is."""
        version = int(data.split(b"\n", 1)[0].rsplit(b"/", 1)[1])
        assert data == content(place, version), f"{place} has the bytes of another file, or a part of them"
        latest = self.at(place).latest
        assert least <= version <= latest, f"{place} has version {version}, not {least}..{latest}"
        return version

    def settled_in(self, number: int) -> dict[Place, int]:
        return {place: one.settled for place, one in self.names.items() if place[0] == number}

    def cleared(self, host: int, number: int, before: Mapping[Place, int], bound: int) -> None:
        """A clear has returned, which began when names had these versions."""
        least = {place: version + 1 for place, version in before.items()}
        for place, version in least.items():
            self.raise_least(host, place, version)
            self.at(place).kept = max(self.at(place).kept, version)
        for other in self.hosts:
            if other != host:
                self.clears[other].append(Clear(number, bound, least))

    def all_heard(self) -> None:
        """Everything is stored, and every host has heard of it."""
        for one in self.names.values():
            one.kept = max(one.kept, *one.least.values(), 0)
            one.least = Counter(dict.fromkeys(self.hosts, one.kept))
        for clears in self.clears.values():
            clears.clear()


@dataclass
class QuotaWatch:
    """Compares use with quotas. ``inner``: namespace -> it, and those in it."""

    disk: Disk
    inner: dict[int, list[int]]
    rng: random.Random
    hosts: list[Host] = field(default_factory=list)
    clients: set[int] = field(default_factory=lambda: {schema.NOBODY})
    last: dict[int, NamespaceUse] = field(default_factory=dict)
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)
    """namespace -> version of its settings, and files that hosts had in memory when they were put"""
    is_on: bool = True

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Look whenever a host adds anything, and after each commit."""
        charge, add_files = Accounts.charge, Accounts.add_files

        def charge_watched(accounts: Accounts, owner: int, size: int) -> None:
            charge(accounts, owner, size)
            if size > 0:
                self.look()

        def add_files_watched(accounts: Accounts, owner: int, count: int) -> None:
            add_files(accounts, owner, count)
            if count > 0:
                self.look()

        monkeypatch.setattr(Accounts, "charge", charge_watched)
        monkeypatch.setattr(Accounts, "add_files", add_files_watched)
        self.disk.audit = self.look_at_commit

    def look(self) -> None:
        """AssertionError where a namespace has more than it may, and more than it had."""
        if not self.is_on:
            return
        alive = self._accounts()
        for number, inner in self.inner.items():
            row = self.disk.records.get(schema.namespace_key(number))
            if row is None:
                continue
            settings, last = decode_settings(row.value), self.last.get(number, NamespaceUse(0, 0))
            use = self._use(number, inner, alive)
            if self.begun.get(number, (0, 0))[0] != row.version:
                self.begun[number] = row.version, sum([accounts.use(number).files for accounts in alive.values()])
            if settings.capacity:
                assert use.size <= max(last.size, settings.capacity), (number, use, last, settings.capacity)
            if settings.blocks:
                assert use.files <= max(last.files, self.begun[number][1], settings.blocks), (
                    number,
                    use,
                    last,
                    settings.blocks,
                )
            self.last[number] = use

    def look_at_commit(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        self.look()
        if self.is_on and self.rng.random() < AUDITED_SHARE:
            counted = count_uses(self.disk)
            assert counted == recorded_uses(self.disk), (sorted(puts), sorted(deletes))
            assert sum([use.size for use in counted.values()]) <= self.disk.superblock.geometry.capacity

    def _accounts(self) -> dict[int, Accounts]:
        """Client -> what it has in memory. One that leaves gives its use to nobody, so its records count."""
        cores = [inside.core(host.volume) for host in self.hosts if host.volume is not None and not host.is_leaving]
        alive = {core.client: core.namespaces.accounts for core in cores}
        self.clients |= alive.keys()
        return {client: of for client, of in alive.items() if schema.member_key(client) in self.disk.records}

    def _use(self, number: int, inner: list[int], alive: Mapping[int, Accounts]) -> NamespaceUse:
        size, files = sum([accounts.use(number).size for accounts in alive.values()]), 0
        for key, client in [(schema.use_key(one, client), client) for one in inner for client in self.clients]:
            row = self.disk.records.get(key)
            if row is not None:
                file_count, stored_size = schema.decode_counts(row.value)
                files += file_count
                size += 0 if client in alive else stored_size or 0
        return NamespaceUse(size, files)


# -- who works ------------------------------------------------------------------------------------------


@dataclass
class Held:
    """A file that is open. It stays what it was, whatever becomes of its name."""

    place: Place
    version: int
    handle: FileHandle


class Host:
    """A host that has the volume, leaves, and joins again; with the programs on it."""

    def __init__(self, number: int, disk: Disk, options: Options, model: Model, rng: random.Random) -> None:
        self.number, self.disk, self.options, self.model, self.rng = number, disk, options, model, rng
        self.chaos = Chaos(random.Random(rng.random()), delay=0.3)
        self.volume: Volume | None = None
        self.is_leaving = False
        self.held: list[Held] = []
        self.handles: list[FileHandle] = []
        """all that are open, for however short"""
        self.programs = trio.CancelScope()
        self._goes = trio.Event()
        self._ended = trio.Event()
        self._lives = 0
        self._temporary = 0

    @property
    def here(self) -> Volume:
        assert self.volume is not None
        return self.volume

    @property
    def client(self) -> int:
        return inside.client(self.here)

    # -- lives ---------------------------------------------------------------------------------------

    async def live(self, task_status: trio.TaskStatus[None]) -> None:
        """Join; return when `leave` says so."""
        self._lives += 1
        self._goes, self._ended = trio.Event(), trio.Event()
        client = 1 + self.number + 10 * self._lives
        try:
            async with joined(self.disk, self.options, client, self.chaos) as volume:
                self.volume = volume
                task_status.started()
                await self._goes.wait()
        finally:
            self.volume, self.is_leaving = None, False
            self._ended.set()

    async def leave(self) -> None:
        await self.release_all()
        await self.here.sync()
        self.is_leaving = True
        self._goes.set()
        await self._ended.wait()

    # -- work ----------------------------------------------------------------------------------------

    async def work(self, places: list[Place], own: list[Place], steps: int) -> None:
        """Run programs until each has done so many steps. ``own``: names that this host writes at present."""
        self.programs = trio.CancelScope()
        try:
            with self.programs:
                async with trio.open_nursery() as nursery:
                    for _ in range(PROGRAM_COUNT):
                        nursery.start_soon(self._run, places, own, steps)
        except* errors.EngineError:  # it is about to leave
            if not self.programs.cancel_called:
                raise

    async def _run(self, places: list[Place], own: list[Place], steps: int) -> None:
        actions: list[Callable[[Place], Awaitable[None]]] = [self.publish, self.put, self.remove]
        for _ in range(steps):
            place = self.rng.choice(own)
            if not self.model.at(place).is_writing:
                await self.rng.choices(actions, [5, 3, 1])[0](place)
            await self.get(self.rng.choice(places))
            if self.rng.random() < 0.3:
                await self.hold(self.rng.choice(places))
            await trio.sleep(self.rng.random() * PAUSE_SECONDS)

    async def publish(self, place: Place) -> None:
        """Write a temporary file, and give it its name."""
        self._temporary += 1
        folder, name = place
        temporary = b"tmp%d.%d" % (self.number, self._temporary)

        async def write(data: bytes) -> None:
            handle, node = await self.here.tree.create(folder, temporary, 0o644, CALLER, os.O_WRONLY)
            assert isinstance(handle, FileHandle)
            self.handles.append(handle)
            try:
                position = 0
                while position < len(data):
                    position += await self.here.files.write(handle, position, data[position:])
                await self.here.files.flush(handle)
            finally:
                await self.close(handle)
                self.here.tree.forget(node.ino, 1)
            await self.here.tree.rename(folder, temporary, folder, name, 0)

        await self._write(place, write)

    async def put(self, place: Place) -> None:
        async def write(data: bytes) -> None:
            await self.here.blocks.put(*place, memoryview(data), CALLER, 0o644)

        await self._write(place, write)

    async def _write(self, place: Place, write: Callable[[bytes], Awaitable[None]]) -> None:
        one = self.model.at(place)
        one.latest, one.is_writing = one.latest + 1, True
        try:
            await write(content(place, one.latest))
        except (errors.NoSpace, errors.EngineTimeout):
            self.model.events["refused"] += 1
        except (errors.NotAdmitted, errors.NotFound, errors.Stale):
            self.model.events["evicted or cleared on its way"] += 1
        else:
            self.model.raise_least(self.number, place, one.latest)
            self.model.events["put"] += 1
        finally:
            one.is_writing = False

    async def remove(self, place: Place) -> None:
        one = self.model.at(place)
        one.is_writing = True
        try:
            with suppress(errors.NotFound):
                await as_by_path(lambda: self.here.tree.unlink(*place))
            self.model.raise_least(self.number, place, one.latest + 1)
            self.model.events["removed"] += 1
        finally:
            one.is_writing = False

    async def get(self, place: Place) -> None:
        """As programs read a file."""
        found = await self._open(place)
        if found is not None:
            await self.close(found.handle)
        self.model.events["miss" if found is None else "hit"] += 1

    async def hold(self, place: Place) -> None:
        """Keep a file open. One of those that were is closed, if they are many."""
        await self.check_held()
        if len(self.held) >= HELD_MAX:
            await self.close(self.held.pop(self.rng.randrange(len(self.held))).handle)
        found = await self._open(place)
        if found is not None:
            self.held.append(found)

    async def _open(self, place: Place) -> Held | None:
        """A file whose bytes were looked at; None: absent."""
        least = self.model.least(self.number, place, self.bound_of(place[0]))
        try:
            handle = await as_by_path(lambda: self._walk(place))
        except (errors.NotFound, errors.Stale):
            return None
        self.handles.append(handle)
        data = bytes(await self.here.files.read(handle, 0, MIB))
        version = self.model.check(place, data, least)
        return Held(place, version, handle)

    async def _walk(self, place: Place) -> FileHandle:
        ino = (await self.here.tree.lookup(*place)).ino
        try:
            handle = await self.here.files.open(ino, os.O_RDONLY, CALLER)
            assert isinstance(handle, FileHandle)
            return handle
        finally:
            self.here.tree.forget(ino, 1)

    async def check_held(self) -> None:
        for one in list(self.held):
            data = bytes(await self.here.files.read(one.handle, 0, MIB))
            if one in self.held:  # nobody closes it meanwhile
                assert data == content(one.place, one.version), f"{one.place} changed while it was open"
            self.model.events["held"] += 1

    async def close(self, handle: FileHandle) -> None:
        await self.here.files.release(handle)
        self.handles.remove(handle)

    async def release_all(self) -> None:
        while self.held:
            await self.close(self.held.pop().handle)

    # -- operators -----------------------------------------------------------------------------------

    def bound_of(self, number: int) -> int:
        return inside.namespaces(self.here).cleared.bounds.get(number, 0)

    async def clear(self, number: int) -> None:
        before = self.model.settled_in(number)
        await self.here.inodes.set_xattr(number, CLEAR, b"now")
        self.model.cleared(self.number, number, before, self.bound_of(number))
        self.model.events["clear"] += 1

    async def change(self, number: int, **settings: object) -> None:
        try:
            await change_namespace(self.here, number, **settings)
            self.model.events[" ".join(settings)] += 1
        except (errors.InvalidArgument, errors.EngineError):  # more than what it is in has; or a host does not answer
            self.model.events["not changed"] += 1
