"""On shared volumes: clients know what is absent only where, and as well as, this host's lookups know it unasked."""

from __future__ import annotations

import random
from dataclasses import dataclass

import inside
import pytest
import trio
import trio.testing
from shared_lab import eventually, exists, quiet, until, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.blockindex import COMPLETE
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.blocks import blocks, own_search
from kvfuse.volume.names.pages import Shelf
from kvfuse.volume.tier.resident_indexes import BlockIndex, Touches
from kvfuse.volume.tier.shared_tier import ReadClass
from kvfuse.volume.volume import Volume

PUBLISH = b"user.kvfuse.publish"
KEYS = [b"%02d" % number for number in range(16)]


@pytest.fixture
def options() -> Options:
    return lab_options(strict=False)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


@dataclass
class Searcher:
    """A client of one host that looks into the index of one folder."""

    volume: Volume
    folder: int = ROOT_INODE
    touches: Touches | None = None

    @property
    def index(self) -> BlockIndex | None:
        touches = self.touches
        return None if touches is None or touches.index._memory.table.has_ended else touches.index

    async def look(self) -> None:
        """As a client that maps an index anew once the one that it has says nothing."""
        readers = ReadClass(self.folder, CALLER.uid, CALLER.gid, 0o444)
        if self.index is None:
            self.touches = self.volume.search.open(readers, (await self.volume.search.ancestors(self.folder))[0])
        await self.volume.search.read_names(readers)

    @property
    def is_complete(self) -> bool:
        return (index := self.index) is not None and bool(index._memory.table.words[COMPLETE])

    def lacks(self, key: bytes) -> bool:
        index = self.index
        return index is not None and bool(index._memory.table.lacks([key])[0])

    async def until_complete(self) -> None:
        async def is_so() -> bool:
            await self.look()
            return self.is_complete

        await eventually(is_so)


async def put(volume: Volume, name: bytes, folder: int = ROOT_INODE) -> None:
    await volume.blocks.put(folder, name, memoryview(b"bytes"), CALLER, 0o644)


async def test_what_others_put_rename_and_link_is_not_absent(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(one, b"before")
        await quiet(one, two)
        searcher = Searcher(two)
        await searcher.until_complete()
        assert [searcher.lacks(name) for name in (b"before", b"put", b"renamed", b"link", b"never")] == [False] + [
            True
        ] * 4
        await put(one, b"put")
        await put(two, b"own")
        assert not searcher.lacks(b"own")
        await quiet(one, two)
        ino = (await one.tree.lookup(ROOT_INODE, b"put")).ino
        await one.tree.link(ino, ROOT_INODE, b"link")
        await one.tree.rename(ROOT_INODE, b"before", ROOT_INODE, b"renamed", 0)
        await quiet(one, two)
        assert searcher.is_complete
        assert [searcher.lacks(name) for name in (b"put", b"renamed", b"link", b"never")] == [False] * 3 + [True]


@pytest.mark.parametrize("page", ["of some names", "of all names"])
async def test_what_an_answer_of_the_store_has_before_the_watch_told_is_not_absent(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch, page: str,
) -> None:  # fmt: skip
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    if page == "of some names":
        monkeypatch.setattr(blocks, "LEARN_ROWS", 1)
        monkeypatch.setattr(Shelf, "is_worth_reading", lambda shelf, directory: False)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for number in range(8):
            await put(one, b"%d" % number)
        await quiet(one, two)
        searcher = Searcher(two)
        await searcher.until_complete()
        chaos[1].deaf = trio.Event()
        for name in (b"asked", b"looked", b"z"):
            await put(one, name)
        await one.sync()
        assert searcher.lacks(b"asked")  # as far as this host has heard
        assert await two.blocks.exists(ROOT_INODE, [b"asked"]) == [True]
        assert not searcher.lacks(b"asked")
        assert searcher.lacks(b"z") == (page == "of some names")
        assert await exists(two, b"looked")
        assert not searcher.lacks(b"looked")
        chaos[1].deaf.set()


async def test_what_is_known_until_the_watch_tells_of_its_end_is_not_absent(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Although the names were read after it was removed."""
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"block")
        await quiet(one)
        assert await exists(two, b"block")
        chaos[1].deaf = trio.Event()
        await one.tree.unlink(ROOT_INODE, b"block")
        await one.sync()
        searcher = Searcher(two)
        await searcher.until_complete()
        assert await exists(two, b"block")
        assert not searcher.lacks(b"block")
        chaos[1].deaf.set()


@pytest.mark.parametrize("setter", ["this host", "another host"])
async def test_no_absent_name_is_known_in_a_strict_folder(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock, setter: str
) -> None:
    async with volumes(disk, options, 2, rng) as both:
        one, two = both
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await put(one, b"block", folder)
        await quiet(one, two)
        searcher = Searcher(two, folder)
        await two.tree.lookup(ROOT_INODE, b"folder")
        await searcher.until_complete()
        other = both[setter == "this host"]
        await other.inodes.set_xattr(folder, PUBLISH, b"strict")
        await other.sync()
        await until(lambda: inside.lookups(two).must_ask(folder))
        assert searcher.index is None
        await searcher.look()
        assert searcher.index is not None
        assert not searcher.is_complete
        await other.inodes.set_xattr(folder, PUBLISH, b"relaxed")
        await quiet(other)
        await searcher.until_complete()
        assert searcher.lacks(b"never")
        assert not searcher.lacks(b"block")


async def test_a_folder_that_is_changed_here_is_made_strict_by_another_host(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await quiet(one)
        await two.tree.lookup(ROOT_INODE, b"folder")
        searcher = Searcher(two, folder)
        await searcher.until_complete()
        chaos[1].stalled_commits = trio.Event()
        await two.inodes.set_xattr(folder, b"user.kvfuse.chunk_size", b"65536")
        await one.inodes.set_xattr(folder, PUBLISH, b"strict")
        await quiet(one)
        assert not inside.lookups(two).must_ask(folder)
        chaos[1].stalled_commits.set()
        await quiet(two)
        assert inside.lookups(two).must_ask(folder)
        assert searcher.index is None


async def test_a_folder_of_which_nothing_is_used_is_heard_to_be_strict(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Its inode would have left memory."""
    options = lab_options(strict=False, nodes=8)
    async with volumes(disk, options, 2, rng) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for number in range(40):
            await put(one, b"%d" % number)
        await quiet(one)
        two.tree.forget((await two.tree.lookup(ROOT_INODE, b"folder")).ino, 1)
        searcher = Searcher(two, folder)
        await searcher.until_complete()
        for number in range(40):
            two.tree.forget((await two.tree.lookup(ROOT_INODE, b"%d" % number)).ino, 1)
        assert inside.nodes(two).peek(folder) is None
        await one.inodes.set_xattr(folder, PUBLISH, b"strict")
        await quiet(one)
        assert searcher.index is None


async def test_while_the_watch_is_broken_no_absent_name_is_known(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        searcher = Searcher(two)
        await searcher.until_complete()
        chaos[1].cut = trio.Event()  # so that it cannot be read anew
        for watch in list(disk.watches):
            watch.break_off()
        await until(lambda: inside.lookups(two).must_ask(ROOT_INODE))
        assert not searcher.is_complete
        await searcher.look()
        assert not searcher.is_complete
        await put(one, b"meanwhile")
        await one.sync()
        chaos[1].cut.set()
        await searcher.until_complete()
        assert not searcher.lacks(b"meanwhile")
        assert searcher.lacks(b"never")


async def test_names_are_not_all_read_while_the_watch_breaks(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read before it broke may be old by the end."""
    monkeypatch.setattr(own_search, "PAGE_ROWS", 2)
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        for number in range(8):
            await put(one, b"%d" % number)
        await quiet(one, two)
        searcher = Searcher(two)
        scans = inside.records(two).counters.scans
        async with trio.open_nursery() as nursery:
            nursery.start_soon(searcher.look)
            await until(lambda: inside.records(two).counters.scans > scans + 1)
            chaos[1].stalled = trio.Event()
            for watch in list(disk.watches):
                watch.break_off()
            await until(lambda: inside.lookups(two).must_ask(ROOT_INODE))
            await put(one, b"!")  # before the pages that were read
            await one.sync()
            chaos[1].stalled.set()
        assert not searcher.lacks(b"!")
        await searcher.until_complete()
        assert not searcher.lacks(b"!")


async def test_what_a_lookup_finds_is_never_absent(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts put, rename and remove; watches lag behind, and break; the folder is made strict, and relaxed again."""
    monkeypatch.setattr(own_search, "PAGE_ROWS", 3)
    options = lab_options(strict=False, nodes=12)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as both:
        folder = (await both[0].tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await quiet(*both)
        searchers = [Searcher(volume, folder) for volume in both]
        known = [0, 0]
        is_over = trio.Event()

        async def change(volume: Volume) -> None:
            for _ in range(150):
                await trio.sleep(rng.random() * 0.02)
                first, second = rng.sample(KEYS, 2)
                kind = rng.random()
                try:
                    if kind < 0.4:
                        await put(volume, first, folder)
                    elif kind < 0.7:
                        await volume.tree.rename(folder, first, folder, second, 0)
                    else:
                        await volume.tree.unlink(folder, first)
                except errors.OperationError:
                    pass

        async def disturb() -> None:
            while not is_over.is_set():
                await trio.sleep(rng.random() * 0.2)
                kind, one = rng.randrange(4), rng.choice(chaos)
                if kind == 0:
                    rng.choice(list(disk.watches)).break_off()
                elif kind == 1:
                    one.deaf = trio.Event()
                    await trio.sleep(rng.random() * 0.1)
                    one.deaf.set()
                elif kind == 2:
                    await rng.choice(both).inodes.set_xattr(folder, PUBLISH, b"strict")
                    await trio.sleep(rng.random() * 0.1)
                    await rng.choice(both).inodes.set_xattr(folder, PUBLISH, b"relaxed")
                else:
                    for searcher in searchers:
                        searcher.volume.tier.residents.end()

        async def search(number: int) -> None:
            searcher, volume = searchers[number], both[number]
            while not is_over.is_set():
                await trio.sleep(rng.random() * 0.003)
                key = rng.choice(KEYS)
                assert not (searcher.is_complete and inside.lookups(volume).must_ask(folder))
                found = inside.lookups(volume).find_known(folder, key)
                assert found is None or found.node is None or not searcher.lacks(key)
                known[number] += searcher.lacks(key)
                if rng.random() < 0.2:
                    there = await volume.blocks.find(folder, key) is not None
                    assert not (there and searcher.lacks(key))
                elif rng.random() < 0.2:
                    (there,) = await volume.blocks.exists(folder, [key])
                    assert not (there and searcher.lacks(key))

        async def keep(searcher: Searcher) -> None:
            while not is_over.is_set():
                await trio.sleep(rng.random() * 0.02)
                await searcher.look()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            for number in range(2):
                nursery.start_soon(search, number)
                nursery.start_soon(keep, searchers[number])
            async with trio.open_nursery() as changing:
                for volume in both:
                    changing.start_soon(change, volume)
            is_over.set()
        assert min(known), "nothing was known to be absent"
        await both[0].inodes.set_xattr(folder, PUBLISH, b"relaxed")
        await quiet(*both)
        for searcher in searchers:
            await searcher.until_complete()
            for key in KEYS:
                there = await exists(searcher.volume, key, folder)
                assert not (there and searcher.lacks(key))
            assert searcher.lacks(b"never")


async def test_a_folder_with_too_many_names_is_read_once(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_search, "NAMES_MAX", 5)
    async with volumes(disk, options, 2, rng) as (one, two):
        for number in range(6):
            await put(one, b"%d" % number)
        await quiet(one, two)
        searcher, counters = Searcher(two), inside.records(two).counters
        await searcher.look()
        scans = counters.scans
        await searcher.look()
        assert not searcher.is_complete
        assert counters.scans == scans
