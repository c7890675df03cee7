"""Blocks that other hosts find by an index, which may be wrong, late, empty or away."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import inside
import numpy as np
import pytest
import trio
import trio.testing
from block_hosts import BlockHost, block_hosts
from memory_index import Entries, MemoryIndex
from shared_lab import eventually, joined, until, volumes
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Batch
from kvfuse.remote.index.engine import below
from kvfuse.remote.records.api import Change
from kvfuse.volume.blocks import indexed_blocks


@asynccontextmanager
async def hosts(
    rng: random.Random, count: int = 2, *, strict: bool = False
) -> AsyncIterator[tuple[list[BlockHost], Entries]]:
    options = lab_options(capacity=64 * MIB, strict=strict)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, count, rng) as mounted:
        yield await block_hosts(mounted, is_strict=strict), disk.index


async def put_all(host: BlockHost, data: dict[bytes, bytes]) -> None:
    for name, content in data.items():
        await host.put(name, content)
    await host.engine.flush()


def some_blocks(rng: random.Random, count: int = 20) -> dict[bytes, bytes]:
    return {b"%d" % number: rng.randbytes(rng.choice([1, 4096, 50_000])) for number in range(count)}


async def test_no_host_hears_of_blocks_or_reads_heads(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 3) as ((one, two, three), entries):
        data = some_blocks(rng)
        await put_all(one, data)
        assert len(entries.stored) == len(data)
        for name, content in data.items():
            assert await two.get(name) == content
            assert await two.get(b"no" + name) is None
        for host in (one, two, three):
            assert host.engine.statistics()["rounds"] == 0
        assert three.engine.native.statistics()["foreign"] == 0


async def test_entries_go_with_their_blocks(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng) as ((one, _), entries):
        await put_all(one, some_blocks(rng))
        assert one.engine.drop(one.folder, [b"%d" % number for number in range(10)]) == [True] * 10
        await until(lambda: len(entries.stored) == 10)
        await put_all(one, {b"15": b"another"})
        one.engine.drop(one.folder, [b"%d" % number for number in range(20)])
        await until(lambda: not entries.stored)


async def test_an_entry_goes_whose_block_was_replaced_by_one_that_went_unwritten(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng) as ((one, _), entries):
        await put_all(one, {b"name": b"old"})
        await one.put(b"name", b"new")
        one.engine.drop(one.folder, [b"name"])
        await one.engine.flush()
        assert not entries.stored


async def test_blocks_that_go_while_they_are_compressed_get_no_entry(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as mounted:
        one, _ = await block_hosts(mounted, compression="zstd")
        engine, pack = one.engine, one.engine.packer.pack

        async def pack_slowly(batch: Batch) -> None:
            await pack(batch)
            engine.drop(one.folder, [b"gone"])
            await trio.sleep(5)  # what is gone is told by then

        monkeypatch.setattr(engine.packer, "pack", pack_slowly)
        await put_all(one, {b"gone": b"%8d" % 1 * 12_000, b"stays": b"%8d" % 2 * 12_000})
        assert len(disk.index.stored) == 1


async def test_blocks_that_move_to_smaller_slots_stay(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted, compression="zstd")
        data = {b"%d" % number: b"%8d" % number * 12_000 for number in range(10)}
        await put_all(one, data)
        await trio.sleep(3)  # what is gone is told by then
        assert len(disk.index.stored) == len(data)
        for name, content in data.items():
            assert await two.get(name) == content


async def test_whatever_an_entry_says_no_other_bytes_are_read(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Entries of other keys, of slots that are used again, damaged ones, and bytes that mean nothing."""
    async with hosts(rng) as ((one, two), entries):
        history: dict[bytes, set[bytes]] = {}
        kept: list[bytes] = []
        right = 0
        for step in range(200):
            name = b"%d" % rng.randrange(20)
            if rng.random() < 0.6:
                content = rng.randbytes(rng.choice([100, 4096, 9000]))
                history.setdefault(name, set()).add(content)
                await one.put(name, content)
            else:
                one.engine.drop(one.folder, [name])
            await one.engine.flush()
            kept += list(entries.stored.values())[-3:]
            for _ in range(rng.randrange(4)):
                if not entries.stored:
                    break
                key = rng.choice(list(entries.stored))
                match rng.randrange(4):
                    case 0:
                        entries.stored[key] = rng.choice(kept)
                    case 1:
                        entries.stored[key] = rng.choice(list(entries.stored.values()))
                    case 2:
                        damaged = bytearray(entries.stored[key] or b"x")
                        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                        entries.stored[key] = bytes(damaged)
                    case _:
                        entries.stored[key] = rng.randbytes(rng.randrange(200))
            for other in {name, b"%d" % rng.randrange(20)}:
                found = await two.get(other)
                assert found is None or found in history[other], (step, other)
                right += found is not None
            if step % 20 == 0:
                await trio.sleep(2)  # what is known to be absent is asked for again
        assert right > 0


async def test_damaged_entries_open_no_tables(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"%d" % number: b"content" for number in range(10)})
        for number, (key, stored) in enumerate(list(entries.stored.items())):
            told = np.frombuffer(stored[9:], forms.TOLD).copy()
            told["uid"] = 1000 + number
            entries.stored[key] = stored[:9] + told.tobytes()
        assert [await two.get(b"%d" % number) for number in range(10)] == [None] * 10
        assert not two.engine.tables.of(two.folder)


async def test_the_index_is_away(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """Puts and gets of a host go on, others' blocks are absent at once, and nothing is missing afterwards."""
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"before": b"before"})
        entries.is_down = True
        await one.put(b"meanwhile", b"1")
        await one.written()
        assert await one.get(b"meanwhile") == b"1"
        began = trio.current_time()
        assert await two.get(b"before") is None
        assert trio.current_time() - began < 1
        with pytest.raises(errors.EngineError, match="cannot be told"):
            await one.engine.flush()
        with pytest.raises(errors.EngineError):
            await two.engine.renew(is_strict=True, directory=two.folder, names=[b"before"])
        entries.is_down = False
        await two.until(b"meanwhile", b"1")
        await two.until(b"before", b"before")
        await one.engine.flush()


async def test_writes_do_not_wait_for_an_index_that_does_not_answer(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Each of its calls takes as long as it may."""
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"before": b"before"})
        wait = MemoryIndex._wait

        async def wait_long(index: MemoryIndex) -> None:
            if entries.is_down:
                await trio.sleep(5)
            await wait(index)

        monkeypatch.setattr(MemoryIndex, "_wait", wait_long)
        entries.is_down = True
        await one.put(b"first", b"first")
        await one.written()
        began = trio.current_time()
        for number in range(10):
            await one.put(b"%d" % number, b"%d" % number)
            await one.written()
        assert trio.current_time() - began < 2
        entries.is_down = False
        await two.until(b"9", b"9")


async def test_an_index_that_lost_all_is_a_miss(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng) as ((one, two), entries):
        data = some_blocks(rng)
        await put_all(one, data)
        entries.lose()
        for name, content in data.items():
            assert await two.get(name) is None
            assert await one.get(name) == content
        await put_all(one, data)
        await trio.sleep(indexed_blocks.ABSENT_SECONDS)
        for name, content in data.items():
            assert await two.get(name) == content


async def test_an_index_that_came_back_empty_is_filled_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """As Redis does that was started anew. Nobody puts anything meanwhile."""
    async with hosts(rng) as ((one, two), entries):
        data = some_blocks(rng)
        await put_all(one, data)
        entries.is_down = True
        assert await one.get(b"none") is None
        entries.lose()
        entries.is_down = False

        async def are_found() -> bool:
            assert await one.get(b"none") is None
            return [await two.get(name) for name in data] == list(data.values())

        await eventually(are_found, seconds=300, pause=0.1)


async def test_a_host_that_was_not_told_learns_of_newer_blocks_when_the_index_is_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The answer to the other host's put was lost, so that one wrote no letter."""
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"name": b"old"})
        (key,) = entries.stored
        former = entries.stored.pop(key)
        await put_all(two, {b"name": b"new"})
        assert entries.stored[key] != former
        entries.is_down = True
        assert await one.get(b"none") is None
        entries.is_down = False

        async def has_learned() -> bool:
            await one.get(b"none")
            return await one.get(b"name") == b"new"

        await eventually(has_learned, seconds=300, pause=0.1)


async def test_a_block_that_was_stored_again_elsewhere_is_found_by_one_call(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Although what is known of it here is wrong by then."""
    async with hosts(rng, 3) as ((one, two, three), _):
        await put_all(one, {b"name": b"old"})
        await three.engine.renew(is_strict=True, directory=three.folder, names=[b"name"])
        await put_all(two, {b"name": b"new"})
        await until(lambda: _letters(two)["letters_unanswered"] == 0)
        assert await three.get(b"name") == b"new"


async def test_a_daemon_tells_what_the_one_before_it_could_not(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 1, Chaos(random.Random(1))) as volume:
        (one,) = await block_hosts([volume])
        disk.index.is_down = True
        await one.put(b"name", b"content")
        await one.written()
    assert not disk.index.stored
    disk.index.is_down = False
    async with volumes(disk, options, 2, rng) as mounted:
        two = BlockHost(mounted[1], one.folder)

        async def is_found() -> bool:
            return await two.get(b"name") == b"content"

        await eventually(is_found, seconds=120, pause=0.1)


async def test_what_is_not_known_waits_within_bounds(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Blocks that others were not told of are missed by them, and found here; the newest are told first to last."""
    monkeypatch.setattr(indexed_blocks, "LATE_MAX", 8)
    async with hosts(rng) as ((one, two), entries):
        entries.is_down = True
        data = {b"%d" % number: b"%d" % number for number in range(20)}
        for name, content in data.items():
            await one.put(name, content)
            await one.written()
        entries.is_down = False
        await one.engine.flush()
        assert len(entries.stored) == 8
        assert [name for name in data if await two.get(name) is not None] == list(data)[-8:]
        for name, content in data.items():
            assert await one.get(name) == content


async def test_a_put_over_another_hosts_block_ends_it_there(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Although neither host asked for the other's: a letter says it."""
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"name": b"old", b"other": b"other"})
        await put_all(two, {b"name": b"new"})
        await one.until(b"name", b"new")
        assert await one.get(b"other") == b"other"
        await until(lambda: _letters(two)["letters_unanswered"] == 0)
        assert _letters(two)["letters_sent"] == _letters(one)["letters_heard"] == 1
        row = one.engine.find(one.folder, b"name")
        assert row is not None
        assert int(row[0].rows["flags"][row[1]]) & forms.FOREIGN
        assert len(entries.stored) == 2


async def test_nothing_is_removed_from_a_table_without_rows(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng) as ((one, _), _):
        number = await one.volume.blocks.block_namespace(one.folder)
        assert number is not None
        one.engine.table(one.folder, number, 0, 0, 0o644)
        assert await one.engine.remove(one.folder, [b"name"]) == [False]


async def test_letters_wait_for_the_holder_and_no_other_host_reads_them(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 3) as ((one, two, three), _):
        await put_all(one, {b"name": b"old"})
        taken = list[Change]()
        monkeypatch.setattr(inside.parts(three.volume).letters, "_take", taken.append)
        own = inside.parts(one.volume).letters
        assert own is not None
        monkeypatch.setattr(own, "is_own", lambda slab: False)  # it is busy
        await put_all(two, {b"name": b"new"})
        await trio.sleep(10)
        assert _letters(two)["letters_unanswered"] == 1
        monkeypatch.setattr(own, "is_own", one.engine.has_slab)
        own.look_again()
        await one.until(b"name", b"new")
        await until(lambda: _letters(two)["letters_unanswered"] == 0)
        assert not taken


async def test_letters_reach_whoever_has_the_slab(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """The holder was killed, and its slab adopted, before it read that its block was removed."""
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with joined(disk, options, 1, chaos[0]) as first:
        async with joined(disk, options, 2, chaos[1]) as second:
            one, two = await block_hosts([first, second])
            await put_all(two, {b"name": b"old", b"stays": b"stays"})
            chaos[1].killed = True
        assert await one.engine.remove(one.folder, [b"name"]) == [True]
        await one.engine.flush()

        async def has_adopted() -> bool:
            return not one.engine.slabs.to_load and one.engine.native.statistics()["foreign"] == 0

        await eventually(has_adopted, seconds=120)
        await until(lambda: _letters(one)["letters_unanswered"] == 0)
        assert await one.get(b"name") is None
        assert await one.get(b"stays") == b"stays"
        assert await one.names() == [b"stays"]


async def test_a_letter_follows_its_slab(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Who is told is gone, and whoever has its slab hears of it."""
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random())) for _ in range(3)]
    async with joined(disk, options, 1, chaos[0]) as first, joined(disk, options, 2, chaos[1]) as second:
        async with joined(disk, options, 3, chaos[2]) as third:
            one, two, three = await block_hosts([first, second, third])
            await put_all(three, {b"name": b"old"})
            own = inside.parts(three.volume).letters
            assert own is not None
            monkeypatch.setattr(own, "is_own", lambda slab: False)  # it is busy
            await put_all(two, {b"name": b"new"})
            chaos[2].killed = True
        await until(lambda: _letters(two)["letters_unanswered"] == 0, seconds=120)
        for host in (one, two):
            await host.until(b"name", b"new")
        assert not any(key[:1] == b"b" for key in disk.records)


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_letter_that_was_never_sent_is_made_up_for(
    rng: random.Random, is_killed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """A host is killed when the index has its block, before it tells the holder of the older one; or the answer of the
    index was lost."""
    options = lab_options(capacity=64 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with joined(disk, options, 1, chaos[0]) as first:
        async with joined(disk, options, 2, chaos[1]) as second:
            one, two = await block_hosts([first, second])
            await put_all(one, {b"name": b"old"})
            await trio.sleep(60)
            assert two.engine.indexed is not None
            two.engine.indexed.write_letters = lambda letters: None
            await put_all(two, {b"name": b"new"})
            chaos[1].killed = is_killed
            if not is_killed:
                await one.until(b"name", b"new")
        await one.until(b"name", b"new")


async def test_what_was_removed_stays_so_although_who_removed_it_is_killed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """When a flush returns, the holder of the older block hears of it, whoever is killed then."""
    options = lab_options(capacity=64 * MIB, strict=True)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with joined(disk, options, 1, chaos[0]) as first:
        async with joined(disk, options, 2, chaos[1]) as second:
            one, two = await block_hosts([first, second], is_strict=True)
            names = [b"%d" % number for number in range(8)]
            await put_all(one, dict.fromkeys(names, b"old"))
            await put_all(two, {b"own": b"own"})
            chaos[0].deaf = trio.Event()  # nobody hears of letters yet
            chaos[1].stalled_commits = trio.Event()
            with trio.move_on_after(5) as scope:
                await two.engine.remove(two.folder, names, is_strict=True)
            chaos[1].stalled_commits.set()
            assert scope.cancelled_caught, "only this host knew whom to tell"
            await two.engine.flush()
            chaos[1].killed = True
            chaos[0].deaf.set()

        async def has_adopted() -> bool:
            return not one.engine.slabs.to_load and one.engine.native.statistics()["foreign"] == 0

        await eventually(has_adopted, seconds=120)
        assert await one.names() == [b"own"]
        assert [await one.get(name) for name in names] == [None] * 8


async def test_what_memory_has_of_other_hosts_is_asked_for_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 3) as ((one, two, three), _):
        await put_all(one, {b"name": b"old"})
        assert await three.get(b"name") == b"old"
        await put_all(two, {b"name": b"new"})

        async def has_changed() -> bool:
            return await three.get(b"name") == b"new"

        await eventually(has_changed, seconds=300, pause=0.1)
        await two.engine.remove(two.folder, [b"name"])

        async def is_gone() -> bool:
            return await three.get(b"name") is None

        await eventually(is_gone, seconds=300, pause=0.1)


async def test_what_nobody_reads_is_asked_for_again_too(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """So a look-up does not go on to find what another host has removed."""
    async with hosts(rng) as ((one, two), _):
        data = some_blocks(rng, 600)
        await put_all(one, data)
        await two.engine.renew(is_strict=False, directory=two.folder, names=list(data))
        assert all(two.engine.find(two.folder, name) is not None for name in data)
        await trio.sleep(5)
        assert one.engine.drop(one.folder, list(data)[:500]) == [True] * 500

        async def has_heard() -> bool:
            return sum(two.engine.find(two.folder, name) is not None for name in data) == 100

        await eventually(has_heard, seconds=300, pause=0.1)


async def test_a_stale_entry_goes_when_somebody_meets_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """But for one of a block that may not be written yet."""
    async with hosts(rng) as ((one, two), entries):
        await put_all(one, {b"name": b"old"})
        stale = dict(entries.stored)
        one.engine.drop(one.folder, [b"name"])
        await until(lambda: not entries.stored)
        await one.engine.flush()
        (key,) = stale
        entries.stored.update(stale)
        assert await two.get(b"name") is None
        await trio.sleep(3)
        assert key in entries.stored, "it is new"
        told = np.frombuffer(stale[key][9:], forms.TOLD).copy()
        assert entries.stored[key][:8] == below(int(told["sequence"][0]))


def _letters(host: BlockHost) -> dict[str, int]:
    letters = inside.parts(host.volume).letters
    assert letters is not None
    return letters.statistics()
