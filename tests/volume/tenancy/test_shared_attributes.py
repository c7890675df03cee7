"""Extended attributes on several hosts: none outlives what it is an attribute of, none is lost while that is there."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import make, quiet, until, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.store import schema

NAME = b"user.name"


def attributes_of(disk: Disk, ino: int) -> set[bytes]:
    return {schema.xattr_name(key) for key in disk.records if key.startswith(schema.xattr_prefix(ino))}


@pytest.fixture
def disk() -> Disk:
    made = Disk.format(lab_options(), shared=True)
    Audit.attach(made)
    return made


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "new"])
async def test_an_attribute_that_comes_shortly_before_the_removal(
    rng: random.Random, autojump_clock: trio.testing.MockClock, disk: Disk, is_stored: bool
) -> None:
    """The record that is stored, and becomes the orphan record, does not say that there are attributes."""
    async with volumes(disk, lab_options(), 1, rng) as (one,):
        ino = await make(one, b"file")
        if is_stored:
            await one.sync()
        await one.inodes.set_xattr(ino, NAME, b"value")
        await one.tree.unlink(ROOT_INODE, b"file")
        await one.sync()
        assert not attributes_of(disk, ino)


@pytest.mark.parametrize("run", range(6))
async def test_an_attribute_whose_commit_is_under_way_at_the_removal(
    rng: random.Random, autojump_clock: trio.testing.MockClock, disk: Disk, run: int
) -> None:
    async with volumes(disk, lab_options(), 1, rng) as (one,):
        ino = await make(one, b"file")
        await one.sync()
        async with trio.open_nursery() as nursery:
            await one.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
            nursery.start_soon(one.sync)
            await trio.sleep(rng.random() * 0.05)
            await one.inodes.set_xattr(ino, NAME, b"value")
            await trio.sleep(rng.random() * 0.05)
            await one.tree.unlink(ROOT_INODE, b"file")
        await one.sync()
        await until(lambda: not attributes_of(disk, ino))


@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "file"])
async def test_an_attribute_of_what_another_host_removes(
    rng: random.Random, autojump_clock: trio.testing.MockClock, disk: Disk, is_directory: bool
) -> None:
    calm = [Chaos(random.Random(0)), Chaos(random.Random(0))]
    async with volumes(disk, lab_options(), 2, rng, calm) as (one, two):
        if is_directory:
            ino = (await one.tree.make_directory(ROOT_INODE, b"name", 0o755, CALLER)).ino
        else:
            ino = await make(one, b"name")
        await quiet(one, two)
        await two.tree.lookup(ROOT_INODE, b"name")
        await two.inodes.set_xattr(ino, NAME, b"value")  # in memory, for a while
        if is_directory:
            await one.tree.remove_directory(ROOT_INODE, b"name")
        else:
            await one.tree.unlink(ROOT_INODE, b"name")
            await one.sync()
        await quiet(two)
        assert not attributes_of(disk, ino)


async def test_attributes_and_settings_of_two_hosts_are_put_together(
    rng: random.Random, autojump_clock: trio.testing.MockClock, disk: Disk
) -> None:
    calm = [Chaos(random.Random(0)), Chaos(random.Random(0))]
    async with volumes(disk, lab_options(), 2, rng, calm) as (one, two):
        ino = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await quiet(one, two)
        await two.tree.lookup(ROOT_INODE, b"folder")
        await two.inodes.set_xattr(ino, b"user.kvfuse.publish", b"relaxed")
        await one.inodes.set_xattr(ino, NAME, b"value")
        await one.sync()
        await quiet(two, one)
        for volume in (one, two):
            assert await volume.inodes.get_xattr(ino, NAME) == b"value"
            assert await volume.inodes.get_xattr(ino, b"user.kvfuse.publish") == b"relaxed"
        await one.tree.remove_directory(ROOT_INODE, b"folder")
        await until(lambda: not attributes_of(disk, ino))
