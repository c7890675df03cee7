"""Namespaces of a volume that several hosts have: what one host does to them holds on all, and all count together."""

from __future__ import annotations

import os
import random

import inside
import pytest
import trio
import trio.testing
from namespace_lab import change_namespace, count_uses, make_namespace, recorded_uses
from shared_lab import eventually, hosts, joined, make, put, quiet, until, volumes
from shared_walk import OF_HANDLES, OF_NAMES, OF_NAMESPACES, walk_at_random
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

Clock = trio.testing.MockClock  # tests name it themselves: only then their time jumps


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def settings_of(volume: Volume, number: int) -> Settings | None:
    namespace = inside.namespaces(volume).all.get(number)
    return namespace.settings if namespace is not None else None


async def test_what_one_host_does_to_namespaces_the_others_hear(rng: random.Random, autojump_clock: Clock) -> None:
    async with hosts(rng, 2) as (one, other):
        outer = await make_namespace(one, ROOT_INODE, b"outer", eviction="lru")
        await until(lambda: settings_of(other, outer) == Settings(eviction="lru"))
        inner = await make_namespace(other, outer, b"inner", ttl=5)
        await until(lambda: settings_of(one, inner) == Settings(ttl=5))
        assert inside.namespaces(one).accounts.is_within(inner, outer)
        await change_namespace(other, outer, ttl=9)
        await until(lambda: settings_of(one, outer) == Settings(eviction="lru", ttl=9))
        assert b"ttl=9" in await one.inodes.get_xattr(outer, NAMESPACE)
        await one.inodes.remove_xattr(inner, NAMESPACE)
        await until(lambda: settings_of(other, inner) is None)
        await other.tree.remove_directory(outer, b"inner")
        await other.tree.remove_directory(ROOT_INODE, b"outer")
        await until(lambda: settings_of(one, outer) is None)


async def test_names_do_not_cross_borders_of_other_hosts(rng: random.Random, autojump_clock: Clock) -> None:
    async with hosts(rng, 2) as (one, other):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await put(other, b"outside", b"x")
        await other.tree.lookup(ROOT_INODE, b"folder")
        await change_namespace(one, folder)
        await put(other, b"inside", b"y", folder)  # made with what the other host knows, or hears of by then
        await quiet(other)
        if not (await other.blocks.exists(folder, [b"inside"]))[0]:  # it was on its way: dropped, see docs/cache.md
            await put(other, b"inside", b"y", folder)
        for volume in (one, other):
            await quiet(other)
            assert (await volume.tree.lookup(folder, b"inside")).namespace == folder
            with pytest.raises(errors.CrossesNamespaces):
                await volume.tree.rename(ROOT_INODE, b"outside", folder, b"outside", 0)
            with pytest.raises(errors.CrossesNamespaces):
                await volume.tree.rename(folder, b"inside", ROOT_INODE, b"inside", 0)


async def test_only_an_empty_folder_begins_or_ends(rng: random.Random, autojump_clock: Clock) -> None:
    async with hosts(rng, 2) as (one, other):
        full = (await one.tree.make_directory(ROOT_INODE, b"full", 0o755, CALLER)).ino
        await make(other, b"file", full)
        await quiet(other)
        with pytest.raises(errors.NotEmpty):
            await change_namespace(one, full)
        space = await make_namespace(one, ROOT_INODE, b"space")
        await make(other, b"file", space)
        await quiet(other)
        with pytest.raises(errors.NotEmpty):
            await one.inodes.remove_xattr(space, NAMESPACE)
        await one.tree.unlink(space, b"file")
        await one.inodes.remove_xattr(space, NAMESPACE)
        await until(lambda: settings_of(other, space) is None)


async def test_a_namespace_that_many_hosts_used_can_be_ended(rng: random.Random, autojump_clock: Clock) -> None:
    """More than one commit has operations: each has a record of its use, and together they have nothing."""
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", capacity=4 * MIB)
        await put(other, b"file", bytes(50_000), space)
        await other.tree.unlink(space, b"file")
        await quiet(one, other)
        uses = {1000 + number: schema.encode_counts((-1) ** number, (-1) ** number * 4096) for number in range(150)}
        disk.apply({schema.use_key(space, client): value for client, value in uses.items()}, ())
        await until(lambda: len(inside.namespaces(one).accounts.elsewhere.of(space)) >= 150)
        await one.inodes.remove_xattr(space, NAMESPACE)
        await until(lambda: settings_of(other, space) is None)
        await quiet(one, other)
        await until(lambda: not any(key.startswith(schema.use_prefix(space)) for key in disk.records))
        await one.tree.remove_directory(ROOT_INODE, b"space")
    assert (await check(disk)).clean


@pytest.mark.parametrize("removes", [False, True], ids=["ended", "removed"])
async def test_nothing_is_left_of_a_namespace_with_quotas(
    rng: random.Random, autojump_clock: Clock, removes: bool
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space", kind="blocks", capacity=4 * MIB, blocks=10)
        await put(other, b"file", bytes(50_000), space)
        await other.tree.unlink(space, b"file")
        await quiet(one, other)
        if removes:
            await one.tree.remove_directory(ROOT_INODE, b"space")
        else:
            await one.inodes.remove_xattr(space, NAMESPACE)
        await until(lambda: settings_of(other, space) is None)
        await quiet(one, other)
    assert not [key for key in disk.records if key[:1] in b"peug" and schema.key_inode(key) == space]


async def test_hosts_count_together(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        space = await make_namespace(one, ROOT_INODE, b"space")
        for number in range(8):
            await put((one, other)[number % 2], b"%d" % number, bytes(50_000), space)
        await quiet(one, other)
        for number in range(0, 8, 4):
            await other.tree.unlink(space, b"%d" % number)
        accounts = [inside.namespaces(volume).accounts for volume in (one, other)]
        await quiet(one, other)
        await until(lambda: all(one.use_of_hosts(space).files == 6 for one in accounts))
        await quiet(one, other)
        await until(lambda: recorded_uses(disk) == count_uses(disk))
        assert {account.use_of_hosts(space) for account in accounts} == {NamespaceUse(count_uses(disk)[space].size, 6)}
    assert recorded_uses(disk) == count_uses(disk)


async def test_the_use_of_a_host_that_died_stays(rng: random.Random, autojump_clock: Clock) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    frozen = Chaos(random.Random(0), delay=0.5)
    async with volumes(disk, options, 1, rng) as (one,):
        async with joined(disk, options, 7, frozen) as dying:
            space = await make_namespace(dying, ROOT_INODE, b"space")
            await put(dying, b"file", bytes(50_000), space)
            await quiet(dying)
            crashed = disk.copy()
            crashed.apply({}, [key for key in crashed.records if key[:1] == b"m"])  # their leases end
        assert (await check(crashed)).clean
        await until(lambda: inside.namespaces(one).accounts.use_of_hosts(space).files == 1)
    async with joined(crashed, options, 9, Chaos(random.Random(0), delay=0.5)) as heir:
        accounts = inside.namespaces(heir).accounts

        async def is_taken_over() -> bool:
            return not accounts.elsewhere.clients() and accounts.use_of_hosts(space).files == 1

        await eventually(is_taken_over)
        assert recorded_uses(crashed) == count_uses(crashed)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.02], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "1"))))
async def test_random_work_in_namespaces_is_counted_at_each_commit(
    rng: random.Random, autojump_clock: Clock, strict: bool, faults: float, round_number: int
) -> None:
    kinds = (*OF_NAMES, *OF_NAMESPACES, *OF_HANDLES, "write", "write", "forget")
    await walk_at_random(rng, kinds, strict=strict, faults=faults, data_max=40_000, capacity=64 * MIB)


@pytest.mark.parametrize("turn", range(8))
async def test_one_of_two_hosts_pins_what_the_blocks_are(rng: random.Random, autojump_clock: Clock, turn: int) -> None:
    """They say so at the same time: one is refused with the words of the other."""
    chaos = [Chaos(random.Random(rng.random()), delay=1.0) for number in range(2)]
    async with hosts(rng, 2, chaos) as volumes:
        ino = await make_namespace(volumes[0], ROOT_INODE, b"cache", kind="blocks")
        await until(lambda: settings_of(volumes[1], ino) is not None)
        answers: list[str] = []

        async def pin(number: int) -> None:
            await trio.sleep(rng.random() * 0.02)
            try:
                await volumes[number].inodes.describe(ino, f'{{"model": "m{number}"}}', may_pin=True)
                answers.append(f"m{number}")
            except errors.Exists as error:
                assert f"'m{1 - number}', not 'm{number}'" in str(error)

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(pin, number)
        (winner,) = answers
        await until(lambda: all(f'"{winner}"' in str(settings_of(volume, ino)) for volume in volumes))


async def test_a_token_closes_a_namespace_on_every_host(rng: random.Random, autojump_clock: Clock) -> None:
    async with hosts(rng, 2) as (one, other):
        folder = await make_namespace(one, ROOT_INODE, b"secret", kind="blocks")
        await until(lambda: settings_of(other, folder) is not None)
        epoch = inside.namespaces(other).gates.epoch
        await change_namespace(one, folder, token="0123456789abcdef", bandwidth="1MiB")
        assert (await one.inodes.attributes(folder)).mode & 0o777 == 0o700
        await until(lambda: folder in inside.namespaces(other).gates.all)
        assert inside.namespaces(other).gates.epoch > epoch, "what was found earlier holds no more"
        await until(lambda: inside.nodes(other).get(folder).mode & 0o777 == 0o700)
        assert other.inodes.measures(folder).limiters
        with pytest.raises(errors.NotPermitted):
            await other.inodes.set_attributes(folder, Changes(mode=0o755), CALLER)
        await change_namespace(other, folder, token="", bandwidth=0)
        await until(lambda: folder not in inside.namespaces(one).gates.all)
        assert not one.inodes.measures(folder).limiters
        await one.inodes.remove_xattr(folder, NAMESPACE)
