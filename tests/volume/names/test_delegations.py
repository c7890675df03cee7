"""Strict folders that are delegated to the host that fills them: fewer round trips, and the same answers for all."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress

import inside
import pytest
import trio
import trio.testing
from name_history import History
from shared_lab import LEASE, exists, joined, look, make, names_in, put, quiet, read, until, volumes
from volume_lab import CALLER, Chaos, Delay, Disk, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.slab.layout import FEATURE_DELEGATED, KNOWN_FEATURES
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.names import delegations
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

KEY = schema.delegation_key(ROOT_INODE)
DATA = b"data" * 1000


@pytest.fixture
def chaos() -> list[Chaos]:
    return [Chaos(random.Random(number)) for number in range(2)]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are taken at once, and again soon after they were given back."""
    monkeypatch.setattr(delegations, "LEFT_SECONDS", (0.002, 0.02))
    monkeypatch.setattr(delegations, "CREATES_MIN", 1)


@asynccontextmanager
async def two_hosts(rng: random.Random, chaos: list[Chaos]) -> AsyncIterator[tuple[Disk, Volume, Volume]]:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        yield disk, one, two


async def fill(volume: Volume, disk: Disk, parent: int = ROOT_INODE) -> None:
    """Create files until the folder is delegated to this host."""
    key, client = schema.delegation_key(parent), inside.client(volume)
    for number in range(delegations.CREATES_MIN):
        name = b"filled-%d-%d" % (client, number)
        with suppress(errors.NotFound):
            await volume.tree.unlink(parent, name)
        await put(volume, name, b"", parent)
    await until(lambda: key in disk.records and inside.delegations(volume).holds(parent) > 0)
    assert schema.decode_u64(disk.records[key].value) == client


async def open_new(volume: Volume, name: bytes, parent: int = ROOT_INODE, flags: int = os.O_WRONLY) -> FileHandle:
    handle, _ = await volume.tree.create(parent, name, 0o644, CALLER, flags)
    assert isinstance(handle, FileHandle)
    return handle


async def close(volume: Volume, handle: FileHandle) -> None:
    await volume.files.flush(handle)
    await volume.files.release(handle)


async def store(volume: Volume, name: bytes, temporary: bytes = b"") -> None:
    """As a program stores a file, perhaps by a temporary name."""
    at = temporary or name
    assert not await exists(volume, at)
    handle = await open_new(volume, at)
    await volume.files.write(handle, 0, DATA)
    await close(volume, handle)
    if temporary:
        assert not await exists(volume, name)
        await volume.tree.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)


def is_stored(disk: Disk, name: bytes, parent: int = ROOT_INODE) -> bool:
    return schema.entry_key(parent, name) in disk.records


# -- round trips ----------------------------------------------------------------------------------------


async def trips(volume: Volume, name: bytes, temporary: bytes = b"") -> int:
    """Round trips of a store, the fewest of some: timers of the host run beside them."""
    counters, found = inside.records(volume).counters, list[int]()
    for number in range(5):
        before = counters.round_trips
        await store(volume, b"%b-%d" % (name, number), temporary)
        found.append(counters.round_trips - before)
    return min(found)


async def test_a_store_takes_one_round_trip(
    rng: random.Random,
    chaos: list[Chaos],
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        with monkeypatch.context() as alone:
            alone.setattr(delegations, "CREATES_MIN", 1000)
            assert await trips(one, b"before") == 3, "look-up, creation, close"
            assert await trips(one, b"before, renamed", b"temporary") == 5
        await fill(one, disk)
        assert await trips(one, b"file") == 1
        assert await trips(one, b"renamed", b"temporary") == 2
        assert KEY in disk.records
        assert await read(two, b"file-0") == await read(two, b"renamed-0") == DATA


async def test_the_superblock_says_so_before_the_first(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """Programs of before refuse the volume."""
    async with two_hosts(rng, chaos) as (disk, one, _two):
        await store(one, b"file")
        assert not disk.superblock.features & FEATURE_DELEGATED
        disk.audit = lambda puts, deletes: check(puts)

        def check(puts: object) -> None:
            assert KEY not in disk.records or disk.superblock.features & FEATURE_DELEGATED

        await fill(one, disk)
        assert disk.superblock.features & FEATURE_DELEGATED


async def test_beside_a_program_of_before_none_is_taken(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """It has had the volume from before the superblock said so, and does not read that again."""
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 1, chaos[0]) as one:
        async with joined(disk, options, 2, chaos[1], features=KNOWN_FEATURES & ~FEATURE_DELEGATED):
            for number in range(10):
                await store(one, b"file-%d" % number)
            await trio.sleep(1)
            assert KEY not in disk.records
            assert not disk.superblock.features & FEATURE_DELEGATED
        await trio.sleep(delegations.LEFT_SECONDS[0])
        await fill(one, disk)


async def test_who_reads_what_there_is_does_not_ask_for_the_folder(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        for number in range(5):
            await store(one, b"file-%d" % number)
            assert await read(two, b"file-%d" % number) == DATA
        assert KEY in disk.records
        await two.tree.unlink(ROOT_INODE, b"file-0")
        assert not await exists(one, b"file-0")
        assert KEY in disk.records
        await store(one, b"file-0")
        assert await read(two, b"file-0") == DATA


# -- another host ---------------------------------------------------------------------------------------


async def test_who_lacks_a_name_sees_what_was_created_in_memory(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        handle = await open_new(one, b"new")
        assert not is_stored(disk, b"new")
        found = await look(two, b"new")
        assert found.ino == handle.node.ino
        assert KEY not in disk.records
        await one.files.write(handle, 0, DATA)
        await close(one, handle)
        assert await read(two, b"new") == DATA


async def test_who_lists_the_folder_sees_it(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        handle = await open_new(one, b"new")
        assert b"new" in await names_in(two)
        await close(one, handle)


@pytest.mark.parametrize("kind", ["create", "link", "rename", "mkdir", "symlink", "exchange"])
async def test_who_adds_a_name_asks_first(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock, kind: str
) -> None:
    """The name exists in memory of the other host. It was known to be absent when its folder was delegated."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        folder = (await two.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        ino = await make(two, b"theirs", folder)
        await fill(one, disk)
        handle = await open_new(one, b"name", flags=os.O_WRONLY | os.O_EXCL)
        tree = two.tree
        with pytest.raises(errors.Exists) if kind in ("create", "link", "mkdir", "symlink") else nullcontext():
            if kind == "create":
                await open_new(two, b"name", flags=os.O_WRONLY | os.O_EXCL)
            elif kind == "link":
                await tree.link(ino, ROOT_INODE, b"name")
            elif kind == "mkdir":
                await tree.make_directory(ROOT_INODE, b"name", 0o755, CALLER)
            elif kind == "symlink":
                await tree.make_symlink(ROOT_INODE, b"name", b"target", CALLER)
            else:
                await tree.rename(folder, b"theirs", ROOT_INODE, b"name", RENAME_EXCHANGE * (kind == "exchange"))
        assert KEY not in disk.records
        await close(one, handle)
        is_theirs = kind in ("rename", "exchange")
        for volume in (one, two):
            assert (await look(volume, b"name")).ino == (ino if is_theirs else handle.node.ino)
        if kind == "exchange":
            assert (await look(one, b"theirs", folder)).ino == handle.node.ino


@pytest.mark.parametrize("is_full", [True, False])
async def test_a_delegated_folder_is_removed_only_if_it_is_empty(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock, is_full: bool
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        folder = (await two.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await fill(one, disk, folder)
        for name in await names_in(one, folder):
            await one.tree.unlink(folder, name)
        assert schema.delegation_key(folder) in disk.records
        handle = await open_new(one, b"new", folder) if is_full else None
        with pytest.raises(errors.NotEmpty) if is_full else nullcontext():
            await two.tree.remove_directory(ROOT_INODE, b"folder")
        assert schema.delegation_key(folder) not in disk.records
        if handle is not None:
            await close(one, handle)
            assert await names_in(two, folder) == [b"new"]
        for volume in (one, two):
            assert await exists(volume, b"folder") == is_full


async def test_the_holder_removes_its_folder(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await fill(one, disk, folder)
        handle = await open_new(one, b"new", folder)
        with pytest.raises(errors.NotEmpty):
            await one.tree.remove_directory(ROOT_INODE, b"folder")
        await close(one, handle)
        for name in await names_in(one, folder):
            await one.tree.unlink(folder, name)
        await one.tree.remove_directory(ROOT_INODE, b"folder")
        assert schema.delegation_key(folder) not in disk.records
        assert not await exists(two, b"folder")


async def test_a_host_that_treats_the_folder_as_relaxed_asks_with_its_commit(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    relaxed = lab_options(strict=False)
    async with joined(disk, options, 1, chaos[0]) as one, joined(disk, relaxed, 2, chaos[1]) as two:
        await fill(one, disk)
        assert not await exists(one, b"theirs")
        await put(two, b"theirs", DATA)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"theirs")).ino, os.O_RDWR, CALLER)
        with trio.fail_after(5):
            await two.files.fsync(handle)
        await two.files.release(handle)
        assert KEY not in disk.records
        assert await read(one, b"theirs") == DATA


async def test_hosts_that_share_a_folder_leave_it_alone_for_a_while(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        seconds = []
        for _ in range(3):
            began = trio.current_time()
            while KEY not in disk.records:
                await put(one, b"file", b"")
                await one.tree.unlink(ROOT_INODE, b"file")
                await trio.sleep(0.1)
            seconds.append(trio.current_time() - began)
            assert not await exists(two, b"absent")
            assert KEY not in disk.records
        assert seconds[0] < 1
        assert delegations.LEFT_SECONDS[0] <= seconds[1] < 2 * delegations.LEFT_SECONDS[0] <= seconds[2]


async def test_a_folder_that_is_not_used_is_given_back(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, _two):
        await fill(one, disk)
        await trio.sleep(delegations.IDLE_SECONDS + delegations.LOOK_SECONDS)
        await until(lambda: KEY not in disk.records)
        await fill(one, disk)


# -- holders that do not answer -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "stalled", "cut", "deaf"])
async def test_a_holder_that_does_not_answer_keeps_others_for_its_lease_at_most(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock, how: str
) -> None:
    """What it closed stays. What it created in memory is there if it can still answer, and else never was."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        await store(one, b"closed")
        handle, client = await open_new(one, b"open"), inside.client(one)
        if how == "killed":
            chaos[0].killed = True
        else:
            setattr(chaos[0], how, trio.Event())
        began = trio.current_time()
        assert await exists(two, b"open") == (how == "deaf")
        assert trio.current_time() - began < (LEASE + 3 if how != "deaf" else 3)
        assert KEY not in disk.records
        assert await read(two, b"closed") == DATA
        if how != "deaf":
            await store(two, b"open")
            await store(two, b"theirs")
        chaos[0].end()
        if how == "killed":
            return
        if how == "stalled":
            assert await exists(one, b"theirs"), "its lease may have ended, which it has not heard"
        with pytest.raises(errors.EngineError) if how != "deaf" else nullcontext():
            await close(one, handle)
        if how == "deaf":
            return
        with suppress(errors.EngineError):  # as long as it has not joined again
            assert await read(one, b"open") == DATA
        await until(lambda: inside.client(one) != client)
        assert await read(one, b"open") == DATA


async def test_a_lease_that_ends_takes_what_was_not_closed(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """Nobody asks for the folder meanwhile."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        await store(one, b"closed")
        synced, handle = await open_new(one, b"synced"), await open_new(one, b"open")
        await one.files.write(synced, 0, DATA)
        await one.files.fsync(synced)
        client = inside.client(one)
        chaos[0].cut = trio.Event()
        await trio.sleep(LEASE)
        await until(lambda: schema.member_key(client) not in disk.records)
        chaos[0].cut.set()
        await until(lambda: inside.client(one) != client)
        with pytest.raises(errors.EngineError):
            await close(one, handle)
        for volume in (one, two):
            assert await read(volume, b"closed") == await read(volume, b"synced") == DATA
            assert not await exists(volume, b"open")
        await store(one, b"open")
        assert await read(two, b"open") == DATA


async def test_a_holder_whose_slots_cannot_be_written_keeps_the_folder(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, so nobody may say that its name is absent: callers get an error, and the name later."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        handle = await open_new(one, b"open")
        await one.files.write(handle, 0, DATA)
        chaos[0].stalled_writes = trio.Event()
        with pytest.raises(errors.EngineTimeout):
            await exists(two, b"open")
        chaos[0].stalled_writes.set()
        assert await exists(two, b"open")
        await close(one, handle)
        assert await read(two, b"open") == DATA


# -- between two awaits ---------------------------------------------------------------------------------


async def test_of_two_creations_one_wins_while_the_folder_is_given_back(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """The holder had asked for the name before that."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        inside.dentries(one).clear()  # it has to ask
        made: list[Volume] = []

        async def create(volume: Volume) -> None:
            with suppress(errors.Exists):
                handle = await open_new(volume, b"new", flags=os.O_WRONLY | os.O_EXCL)
                made.append(volume)
                await close(volume, handle)

        def stall(puts: object, deletes: Collection[bytes]) -> None:
            if KEY in deletes:
                chaos[0].stalled_commits = trio.Event()

        async with trio.open_nursery() as nursery:
            late = chaos[0].late = Delay(schema.entry_key(ROOT_INODE, b"new"))
            nursery.start_soon(create, one)
            await late.given.wait()
            first = chaos[0].stalled_commits = trio.Event()
            nursery.start_soon(create, two)
            await until(lambda: not inside.delegations(one).holds(ROOT_INODE))
            late.arrives.set()
            await trio.sleep(0.1)
            disk.audit = stall
            first.set()
            await until(lambda: bool(made))
            chaos[0].end()
        assert len(made) == 1


async def test_a_name_that_others_see_is_not_absent_for_its_maker(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """The answer to the commit is on its way."""
    async with two_hosts(rng, chaos) as (disk, one, two), trio.open_nursery() as nursery:
        await fill(one, disk)
        key, found = schema.entry_key(ROOT_INODE, b"folder"), list[bool]()

        def stop(puts: Mapping[bytes, bytes], deletes: object) -> None:
            if key in puts:
                chaos[0].stalled = trio.Event()

        disk.audit = stop
        nursery.start_soon(one.tree.make_directory, ROOT_INODE, b"folder", 0o755, CALLER)
        await until(lambda: key in disk.records)
        assert await exists(two, b"folder")

        async def ask() -> None:
            found.append(await exists(one, b"folder"))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        chaos[0].end()
        await until(lambda: bool(found))
        assert found == [True]


async def test_names_that_were_not_heard_of_are_known_to_the_holder(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """It has known all names of the folder from the beginning, and hears no news."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await make(one, b"ours", folder)
        chaos[0].deaf = trio.Event()
        await make(two, b"theirs", folder)
        await fill(one, disk, folder)
        assert await exists(one, b"theirs", folder)


async def test_news_of_a_removal_that_come_late_hide_no_name(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    """The name was given again since, and memory has dropped its entry."""
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        await store(one, b"file")
        await two.tree.unlink(ROOT_INODE, b"file")
        await store(one, b"file")
        inside.dentries(one).hear_stored(ROOT_INODE, b"file", False, 1)
        inside.dentries(one).forget(ROOT_INODE, b"file")
        assert await exists(one, b"file")


async def test_a_file_that_stays_open_is_stored_soon(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, _two):
        await fill(one, disk)
        handle = await open_new(one, b"new")
        assert not is_stored(disk, b"new")
        await trio.sleep(2 * delegations.LOOK_SECONDS)
        await until(lambda: is_stored(disk, b"new"))
        assert KEY in disk.records
        await close(one, handle)


async def test_names_that_memory_forgot_are_read_again(
    rng: random.Random, chaos: list[Chaos], autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, chaos) as (disk, one, two):
        await fill(one, disk)
        inside.dentries(one).clear()
        await trio.sleep(2 * delegations.LOOK_SECONDS)
        await quiet(one, two)
        assert await trips(one, b"file") == 1


# -- answers that are lost ------------------------------------------------------------------------------


class LosesAnswer(Chaos):
    """The outcome of one commit, which puts or deletes a key, is not told, though it happened."""

    is_lost = done = False

    def lose(self, disk: Disk, key: bytes, *, is_put: bool) -> None:
        def look(puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
            if not self.done and key in (puts if is_put else deletes):
                self.is_lost = self.done = True

        disk.audit = look

    def fails(self, probability: float) -> bool:
        is_lost, self.is_lost = self.is_lost, False
        return is_lost


@pytest.mark.parametrize("what", ["taking", "giving back", "asking"])
async def test_a_lost_answer_keeps_nobody_out(
    rng: random.Random, autojump_clock: trio.testing.MockClock, what: str
) -> None:
    chaos = [LosesAnswer(random.Random(number)) for number in range(2)]
    async with two_hosts(rng, [*chaos]) as (disk, one, two):
        if what == "taking":
            chaos[0].lose(disk, KEY, is_put=True)
            for number in range(10):
                await put(one, b"file-%d" % number, b"")
                await trio.sleep(0.01)
        else:
            await fill(one, disk)
        if what == "asking":
            chaos[1].lose(disk, schema.recall_key(inside.client(one), ROOT_INODE), is_put=True)
        elif what == "giving back":
            chaos[0].lose(disk, KEY, is_put=False)
        handle = await open_new(one, b"open")
        with suppress(errors.EngineError):
            await exists(two, b"open")
        assert await exists(two, b"open")
        assert any(host.done for host in chaos)
        await close(one, handle)
        await store(two, b"theirs")
        await store(one, b"ours")
        for volume in (one, two):
            assert await read(volume, b"theirs") == await read(volume, b"ours") == DATA
        await until(lambda: not [key for key in disk.records if key[:1] == b"r"])


async def test_the_next_daemon_gives_back_what_the_one_before_had(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    keeper = MemoryKeeper()
    chaos = [Chaos(random.Random(number)) for number in range(3)]
    async with joined(disk, options, 9, chaos[2]) as other:
        async with joined(disk, options, 1, chaos[0], keeper) as one:
            await fill(one, disk)
            await store(one, b"closed")
            await open_new(one, b"open")
            chaos[0].killed = True
        assert KEY in disk.records
        async with joined(disk, options, 1, chaos[1], keeper) as one:
            assert not await exists(one, b"open")
            assert KEY not in disk.records
            await store(one, b"open")
            for volume in (one, other):
                assert await read(volume, b"closed") == await read(volume, b"open") == DATA


# -- random histories -----------------------------------------------------------------------------------


class Hand:
    """One task of a host, which works on a few names of one folder."""

    def __init__(self, number: int, volume: Volume, history: History, rng: random.Random, folder: int) -> None:
        self.number, self.volume, self.history, self.rng, self.folder = number, volume, history, rng, folder
        self.closed: list[bytes] = []

    async def run(self, steps: int, names: list[bytes]) -> None:
        kinds = ("make",) * 5 + ("look", "look", "unlink", "rename", "list")
        while steps:
            burst = min(steps, self.rng.randrange(1, 7))  # hosts take turns: a folder is delegated in between
            kind = self.rng.choice(kinds)
            for _ in range(burst):
                await self.do(kind if self.rng.random() < 0.7 else self.rng.choice(kinds), names)
                steps -= 1
            await trio.sleep(self.rng.random() * 0.2)

    async def do(self, kind: str, names: list[bytes]) -> None:
        name, to = self.rng.sample(names, 2)
        step = self.history.begin(self.number, kind, name, to if kind == "rename" else b"")
        with suppress(errors.EngineError):
            self.history.end(step, await getattr(self, kind)(name, to))

    async def make(self, name: bytes, to: bytes) -> int | None:
        try:
            handle = await open_new(self.volume, name, self.folder, os.O_WRONLY | os.O_EXCL)
        except errors.Exists:
            return None
        await trio.sleep(self.rng.choice((0.0, 0.0, 0.01)))
        await close(self.volume, handle)
        return handle.node.ino

    async def look(self, name: bytes, to: bytes) -> int | None:
        try:
            return (await look(self.volume, name, self.folder)).ino
        except errors.NotFound:
            return None

    async def unlink(self, name: bytes, to: bytes) -> bool:
        try:
            await self.volume.tree.unlink(self.folder, name)
        except errors.NotFound:
            return False
        return True

    async def rename(self, name: bytes, to: bytes) -> bool:
        try:
            await self.volume.tree.rename(self.folder, name, self.folder, to, 0)
        except errors.NotFound:
            return False
        return True

    async def list(self, name: bytes, to: bytes) -> list[bytes]:
        return await names_in(self.volume, self.folder)


@pytest.mark.parametrize("run", range(20))
async def test_all_that_three_hosts_do_could_be_done_by_one(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    quick(monkeypatch)
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    history = History()
    names = [b"name-%d" % number for number in range(12)]
    async with volumes(disk, options, 3, rng) as all_volumes:
        folder = (await all_volumes[0].tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for volume in all_volumes:
            await volume.tree.lookup(ROOT_INODE, b"folder")
        async with trio.open_nursery() as nursery:
            for number, volume in enumerate(all_volumes * 2):  # each has two tasks
                hand = Hand(number, volume, history, random.Random(rng.random()), folder)
                nursery.start_soon(hand.run, 25, names)
        last = [
            {name: (await look(volume, name, folder)).ino for name in await names_in(volume, folder)}
            for volume in all_volumes
        ]
        counters = [inside.delegations(volume) for volume in all_volumes]
    assert sum(one.taken for one in counters)
    assert sum(one.asked_back for one in counters)
    assert last[0] == last[1] == last[2]
    assert all(step.ended < float("inf") for step in history.steps)
    history.check_listings()
    assert history.is_sound(last[0])


@pytest.mark.parametrize("run", range(20))
async def test_so_it_is_where_one_of_them_is_killed_or_stops(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    quick(monkeypatch)
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    history = History()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(3)]
    names = [b"name-%d" % number for number in range(12)]
    async with volumes(disk, options, 3, rng, chaos) as all_volumes:
        folder = (await all_volumes[0].tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for volume in all_volumes:
            await volume.tree.lookup(ROOT_INODE, b"folder")
        async with trio.open_nursery() as nursery, trio.open_nursery() as lost:
            for number, volume in enumerate(all_volumes):
                hand = Hand(number, volume, history, random.Random(rng.random()), folder)
                (lost if number == 0 else nursery).start_soon(hand.run, 30, names)
            await trio.sleep(rng.random() * 0.5)
            is_killed = run % 2 == 0
            if is_killed:
                chaos[0].killed = True
            else:
                chaos[0].stalled = trio.Event()
            client = inside.client(all_volumes[0])
            await trio.sleep(LEASE)
            await until(lambda: schema.member_key(client) not in disk.records)
            if is_killed:
                lost.cancel_scope.cancel()
            else:
                chaos[0].end()
                await until(lambda: inside.client(all_volumes[0]) != client)
        living = all_volumes[1:] if is_killed else all_volumes
        last = [
            {name: (await look(volume, name, folder)).ino for name in await names_in(volume, folder)}
            for volume in living
        ]
    assert all(found == last[0] for found in last)
    history.check_listings()
    assert history.is_sound(last[0])
