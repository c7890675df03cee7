"""Names and attributes have a budget where many hosts have the volume: each counts what its commits change."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import inside
import pytest
import trio
import trio.testing
from msgspec.structs import replace
from records_audit import Audit
from shared_lab import LEASE, check_disk, exists, joined, make, quiet, until, volumes
from volume_lab import CALLER, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.check.volume_check import mend, run_check
from kvfuse.volume.inodes import metadata_budget
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

LIMIT = 64 << 10
ATTRIBUTE = b"user.name"

Step = Callable[[], Awaitable[object]]
"""makes one more"""


def options_of(*, strict: bool = False) -> Options:
    made = lab_options(strict=strict)
    return replace(made, volume=replace(made.volume, metadata_size=LIMIT))


def weight_of(disk: Disk) -> int:
    """What is there."""
    return sum(weigh(key, row.value)[0] for key, row in disk.records.items())


def bytes_of(volume: Volume) -> int:
    """What a client takes for that."""
    size = inside.core(volume).metadata.size
    assert size is not None
    return size


def name(kind: str, number: int) -> bytes:
    return f"{kind}-{number:0200d}".encode()


async def rename(volume: Volume, number: int) -> None:
    await make(volume, b"%d" % number)
    try:
        await volume.tree.rename(ROOT_INODE, b"%d" % number, ROOT_INODE, name("renamed", number), 0)
    except errors.NoSpace:
        await volume.tree.unlink(ROOT_INODE, b"%d" % number)
        raise


def making(volume: Volume, kind: str, first: int = 0) -> Step:
    """The next of its kind. Files and links alternate where it is about links, as one has a limited number."""
    number = first
    target = 0

    async def step() -> object:
        nonlocal number, target
        number += 1
        here = name(kind, number)
        if kind == "directory":
            return await volume.tree.make_directory(ROOT_INODE, here, 0o755, CALLER)
        if kind == "symlink":
            return await volume.tree.make_symlink(ROOT_INODE, here, b"t" * 1000, CALLER)
        if kind == "put":
            return await volume.blocks.put(ROOT_INODE, here, memoryview(b""), CALLER, 0o644)
        if kind == "rename":
            return await rename(volume, number)
        target = target or await make(volume, b"target-%d" % first)
        if kind == "link":
            return await volume.tree.link(target, ROOT_INODE, here)
        if kind == "attribute":
            return await volume.inodes.set_xattr(target, b"user.%d" % number, bytes(number * 37 % 900))
        return await make(volume, here)

    return step


async def fill(step: Step) -> int:
    """How many were made until the budget refused one."""
    made = 0
    with suppress(errors.NoSpace):
        while True:
            await step()
            made += 1
    return made


KINDS = ("file", "directory", "symlink", "put", "rename", "link", "attribute")


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_one_host_fills_the_budget_to_its_end(
    rng: random.Random, autojump_clock: trio.testing.MockClock, kind: str, strict: bool
) -> None:
    """No call that was acknowledged is refused later; what is removed leaves room."""
    options = options_of(strict=strict)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 1, rng) as (one,):
        step = making(one, kind)
        assert await fill(step) > 10
        await one.sync()
        assert LIMIT - 1400 < weight_of(disk) == bytes_of(one) <= LIMIT
        assert one.space().files_free <= 1400 // metadata_budget.INODE_SIZE
        with pytest.raises(errors.NoSpace, match="names and attributes"):
            await one.tree.make_symlink(ROOT_INODE, b"one more", b"t" * 4000, CALLER)
        before = weight_of(disk)
        if kind == "attribute":
            ino = (await one.tree.lookup(ROOT_INODE, b"target-0")).ino
            for attribute in (await one.inodes.list_xattrs(ino))[::2]:
                await one.inodes.remove_xattr(ino, attribute)
        elif kind == "directory":
            for number in range(1, 41):
                await one.tree.remove_directory(ROOT_INODE, name(kind, number))
        else:
            gone = "renamed" if kind == "rename" else kind
            for number in range(1, 11):
                await one.tree.unlink(ROOT_INODE, name(gone, number))
        assert await fill(step) >= 9, "what was removed leaves room at once"
        await one.sync()
        assert before - 1400 < weight_of(disk) == bytes_of(one) <= LIMIT


async def test_two_hosts_share_what_is_left(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """Neither knows what the other has not stored yet: both keep to their parts of the room that they know of."""
    options = options_of()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 2, rng) as (one, two):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, making(one, "file", 1000))
            nursery.start_soon(fill, making(two, "attribute", 2000))
        await quiet(one, two)
        beyond = weight_of(disk) - LIMIT  # what one committed before news of the other's commits arrived
        assert -4 * 1400 < beyond <= LIMIT // 4
        assert bytes_of(one) == bytes_of(two) == weight_of(disk)
        for number in range(1001, 1061):
            await two.tree.unlink(ROOT_INODE, name("file", number))
        await two.sync()
        await quiet(one, two)
        assert await fill(making(one, "file", 3000)), "what one removes is room for the other"


async def test_a_host_that_is_gone_leaves_its_count(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    options = options_of()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        chaos[1].commit_error_after = 0.3
        for number in range(20):
            with suppress(errors.EngineError):
                await two.inodes.set_xattr(await make(two, b"file-%d" % number), ATTRIBUTE, bytes(rng.randrange(500)))
                await two.sync()
        before = schema.files_key(2)
        assert before in disk.records
        chaos[1].stalled = trio.Event()
        await until(lambda: before not in disk.records)
        await trio.sleep(1)
        assert bytes_of(one) == weight_of(disk)
        chaos[1].commit_error_after = 0
        chaos[1].stalled.set()
        await trio.sleep(LEASE)
        await make(two, b"again")
        await quiet(one, two)
        assert bytes_of(one) == bytes_of(two) == weight_of(disk)


@pytest.mark.parametrize("run", range(3))
async def test_an_attribute_that_two_hosts_replace_is_counted_once(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int
) -> None:
    """Each replaces what it has seen, and is refused where the other was faster: the audit looks at every commit."""
    options = options_of()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 2, rng) as both:
        ino = await make(both[0], b"file")
        await quiet(*both)

        async def change(volume: Volume) -> None:
            await volume.tree.lookup(ROOT_INODE, b"file")
            for _ in range(25):
                with suppress(errors.NoAttribute):
                    if rng.random() < 0.3:
                        await volume.inodes.remove_xattr(ino, ATTRIBUTE)
                    else:
                        await volume.inodes.set_xattr(ino, ATTRIBUTE, bytes(rng.randrange(3000)))
                if rng.random() < 0.3:
                    await volume.sync()

        async with trio.open_nursery() as nursery:
            for volume in both:
                nursery.start_soon(change, volume)
        await quiet(*both)
        assert bytes_of(both[0]) == bytes_of(both[1]) == weight_of(disk)


def of_an_older_program(disk: Disk) -> None:
    """It counted inodes alone."""
    counts = schema.decode_counts(disk.records[schema.COUNTER_FILES].value)
    disk.apply({schema.COUNTER_FILES: schema.encode_counts(counts.inodes, None)}, ())


async def repair(disk: Disk) -> list[str]:
    """What was mended."""
    chaos = Chaos(random.Random(0))
    found = Evidence(disk.superblock, MemoryRecords(disk, chaos), MemorySegments(disk, chaos))
    await run_check(found)
    await mend(found)
    return [problem.text for problem in found.report.problems]


async def test_a_volume_that_never_counted_bytes(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """It is bounded by nothing, as before, until a check has counted them."""
    options = options_of()
    disk = Disk.format(options, shared=True)
    of_an_older_program(disk)
    async with joined(disk, options, 1, Chaos(rng)) as one:
        step = making(one, "file")
        for _ in range(2 * LIMIT // 400):
            await step()
        await one.sync()
        assert inside.core(one).metadata.size is None
        assert one.stats()["metadata"] == {"bytes": None, "limit": LIMIT}
        assert one.space().files - one.space().files_free == 2 * LIMIT // 400 + 2
    assert weight_of(disk) > LIMIT
    (text,) = await repair(disk)
    assert (
        f"names and attributes were never counted, as an older program made the volume: they take {weight_of(disk)}"
        in text
    )
    await check_disk(disk)
    async with joined(disk, options, 1, Chaos(rng)) as one:
        assert one.stats()["metadata"] == {"bytes": weight_of(disk), "limit": LIMIT}
        with pytest.raises(errors.NoSpace):
            await make(one, b"one more")
        await one.tree.unlink(ROOT_INODE, name("file", 1))
        await one.sync()
        assert not await exists(one, name("file", 1))


async def test_a_wrong_count_of_bytes_is_found_and_mended(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = options_of()
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 1, Chaos(rng)) as one:
        await make(one, b"file")
    weight = weight_of(disk)
    disk.apply({schema.files_key(9): schema.encode_counts(0, 77)}, ())
    report = await check(disk)
    assert [problem.text for problem in report.problems] == [
        f"names and attributes are counted as {weight + 77} bytes, but they take {weight}"
    ]
    await repair(disk)
    await check_disk(disk)
