"""Namespaces through attributes of their folders: made, changed, removed; and what is refused."""

from __future__ import annotations

import os
import random

import inside
import msgspec
import pytest
import trio
import trio.testing
from shared_lab import volumes
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import (
    CrossesNamespaces,
    EngineError,
    InvalidArgument,
    NoAttribute,
    NotEmpty,
    NotPermitted,
    OperationError,
    QuotaExceeded,
    Stale,
)
from kvfuse.options.options import NamespaceOptions, Options
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.namespace_attributes import CLEAR, NAMESPACE, REFUSED, SINGLE
from kvfuse.volume.tenancy.namespaces import USER_NAMESPACES_MAX
from kvfuse.volume.volume import Volume

CAPACITY = NAMESPACE + b".capacity"
TTL = NAMESPACE + b".ttl"


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB)


async def make_folder(volume: Volume, name: bytes, parent: int = ROOT_INODE, caller: Caller = CALLER) -> int:
    return (await volume.tree.make_directory(parent, name, 0o755, caller)).ino


async def make_namespace(
    volume: Volume, name: bytes, settings: bytes = b"kind=blocks", parent: int = ROOT_INODE
) -> int:
    ino = await make_folder(volume, name, parent)
    await volume.inodes.set_xattr(ino, NAMESPACE, settings)
    return ino


async def make_file(volume: Volume, parent: int, name: bytes) -> int:
    handle, node = await volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR)
    await volume.files.release(handle)
    return node.ino


def settings_of(volume: Volume, ino: int) -> Settings:
    """Without the epoch."""
    return msgspec.structs.replace(inside.namespaces(volume).all[ino].settings, epoch=0)


async def refusal(volume: Volume, ino: int, name: bytes, value: bytes, kind: type[OperationError]) -> str:
    """Why an attribute cannot be set, as the folder says it, too."""
    with pytest.raises(kind) as caught:
        await volume.inodes.set_xattr(ino, name, value)
    assert await volume.inodes.get_xattr(ino, REFUSED) == str(caught.value).encode()
    return str(caught.value)


# -- a namespace's life -------------------------------------------------------------------------------


async def test_an_empty_folder_becomes_a_namespace(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_folder(volume, b"llama")
        with pytest.raises(NoAttribute):
            await volume.inodes.get_xattr(ino, NAMESPACE)
        with pytest.raises(NoAttribute):
            await volume.inodes.set_xattr(ino, CAPACITY, b"1MiB")
        await volume.inodes.set_xattr(ino, NAMESPACE, b"kind=blocks capacity=4MiB ttl=3600 eviction=lru")
        assert schema.namespace_key(ino) in disk.records, "it is stored when the call returns"
        below = await make_folder(volume, b"a", ino)
        file = await make_file(volume, below, b"b")
        assert [inside.nodes(volume).get(one).namespace for one in (below, file)] == [ino, ino]
        await make_file(volume, ROOT_INODE, b"c")
    async with opened(disk, options) as volume:
        text = await volume.inodes.get_xattr(ino, NAMESPACE)
        assert text.startswith(
            b"kind=blocks capacity=4194304 blocks=0 eviction=lru admission=adaptive ttl=3600"
            b" high_water=0.98 low_water=0.96"
        )
        assert await volume.inodes.get_xattr(ino, CAPACITY) == b"4194304"
        assert await volume.inodes.list_xattrs(ino) == [NAMESPACE]
        assert await volume.inodes.list_xattrs(below) == await volume.inodes.list_xattrs(ROOT_INODE) == []
        node = await volume.tree.lookup(below, b"b")
        assert node.namespace == ino
        await volume.inodes.set_xattr(ino, NAMESPACE, text)  # what was read may be set: nothing changes
        assert await volume.inodes.get_xattr(ino, NAMESPACE) == text
    assert (await check(disk)).clean


async def test_settings_change_at_once_and_are_kept(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        await volume.inodes.set_xattr(ino, CAPACITY, b"2MiB")
        await volume.inodes.set_xattr(ino, NAMESPACE, b"ttl=1.5  blocks=7")
        wanted = Settings(kind="blocks", capacity=2 * MIB, ttl=1.5, blocks=7)
        assert settings_of(volume, ino) == wanted
        crashed = disk.copy()
    async with opened(crashed, options) as volume:
        assert settings_of(volume, ino) == wanted
        for name in SINGLE:
            await volume.inodes.set_xattr(ino, name, await volume.inodes.get_xattr(ino, name))
        assert settings_of(volume, ino) == wanted


async def test_an_empty_namespace_becomes_a_folder(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        await make_file(volume, ino, b"a")
        for remove in (volume.inodes.remove_xattr(ino, NAMESPACE), volume.inodes.remove_xattr(ino, TTL)):
            with pytest.raises((NotEmpty, NotPermitted)):
                await remove
        assert settings_of(volume, ino).is_blocks
        await volume.tree.unlink(ino, b"a")
        await volume.inodes.remove_xattr(ino, NAMESPACE)
        assert schema.namespace_key(ino) not in disk.records
        assert inside.namespaces(volume).all.keys() == {ROOT}
        file = await make_file(volume, ino, b"a")
        assert inside.nodes(volume).get(file).namespace == ROOT
        with pytest.raises(NoAttribute):
            await volume.inodes.remove_xattr(ino, NAMESPACE)
        with pytest.raises(NotPermitted, match="always a namespace"):
            await volume.inodes.remove_xattr(ROOT_INODE, NAMESPACE)
    assert (await check(disk)).clean


async def test_a_removed_file_that_is_open_keeps_its_namespace(disk: Disk, options: Options) -> None:
    """Its slots are charged to it, and its removal will be."""
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama", b"kind=files")
        handle, _ = await volume.tree.create(ino, b"a", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"x" * 100_000)
        await volume.files.fsync(handle)
        await volume.tree.unlink(ino, b"a")
        with pytest.raises(NotEmpty, match="still open"):
            await volume.inodes.remove_xattr(ino, NAMESPACE)
        await volume.files.release(handle)
        await volume.inodes.remove_xattr(ino, NAMESPACE)
        assert not disk.records.keys() & {schema.namespace_key(ino), schema.use_key(ino, 0)}
        await volume.inodes.set_xattr(ino, NAMESPACE, b"kind=blocks")
        assert volume.stats()["namespaces"][1]["used"]["files"] == 0
    assert (await check(disk)).clean


@pytest.mark.parametrize("replaced", [False, True], ids=["rmdir", "rename over it"])
async def test_a_namespace_goes_with_its_folder(disk: Disk, options: Options, replaced: bool) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        await volume.sync()
        if replaced:
            await make_folder(volume, b"other")
            await volume.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"llama", 0)
        else:
            await volume.tree.remove_directory(ROOT_INODE, b"llama")
        assert inside.namespaces(volume).all.keys() == {ROOT}
        assert schema.namespace_key(ino) in disk.records, "the record goes with the folder's"
        await volume.sync()
        assert not disk.records.keys() & {schema.namespace_key(ino), schema.inode_key(ino)}
        with pytest.raises((Stale, NoAttribute)):
            await volume.inodes.set_xattr(ino, TTL, b"1")
    assert (await check(disk)).clean


async def test_names_do_not_cross_borders(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        file = await make_file(volume, ino, b"a")
        with pytest.raises(CrossesNamespaces):
            await volume.tree.rename(ino, b"a", ROOT_INODE, b"a", 0)
        with pytest.raises(CrossesNamespaces):
            await volume.tree.link(file, ROOT_INODE, b"a")
        await volume.tree.rename(ROOT_INODE, b"llama", ROOT_INODE, b"renamed", 0)
        assert volume.stats()["namespaces"][1]["path"] == "/renamed"


async def test_paths_are_known_after_a_restart(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        above = await make_folder(volume, b"models")
        for number in range(50):
            await make_file(volume, above, b"%d" % number)
        ino = await make_namespace(volume, b"llama", parent=above)
        await make_namespace(volume, b"in", parent=ino)
    async with opened(disk, lab_options(capacity=16 * MIB, nodes=5)) as volume:
        await trio.testing.wait_all_tasks_blocked(0.01)
        for number in range(50):
            await volume.tree.lookup(above, b"%d" % number)
        assert [row["path"] for row in volume.stats()["namespaces"]] == ["/", "/models/llama", "/models/llama/in"]
        await volume.tree.rename(ROOT_INODE, b"models", ROOT_INODE, b"kept", 0)
        assert volume.stats()["namespaces"][1]["path"] == "/kept/llama"


async def test_a_folder_that_gets_a_file_meanwhile_stays_one(
    rng: random.Random, disk: Disk, options: Options, chaos: Chaos
) -> None:
    """Whoever makes a file and whoever makes a namespace at the same time do not both succeed."""
    chaos.delay = 0.5
    async with opened(disk, options, chaos) as volume:
        for number in range(30):
            ino = await make_folder(volume, b"%d" % number)
            outcomes: list[bool] = []

            async def make_one(ino: int = ino, outcomes: list[bool] = outcomes) -> None:
                try:
                    await volume.inodes.set_xattr(ino, NAMESPACE, b"kind=blocks")
                except NotEmpty:
                    outcomes.append(False)
                else:
                    outcomes.append(True)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(make_one)
                await trio.sleep(rng.random() * 0.02)
                file = await make_file(volume, ino, b"a")
            assert inside.nodes(volume).get(file).namespace == (ino if outcomes == [True] else ROOT)
    assert (await check(disk)).clean


async def test_a_commit_that_fails_is_not_acknowledged(disk: Disk, options: Options, chaos: Chaos) -> None:
    async with opened(disk, options, chaos) as volume:
        ino = await make_namespace(volume, b"llama")
        await volume.sync()
        chaos.commit_error = 2
        with pytest.raises(EngineError):
            await volume.inodes.set_xattr(ino, TTL, b"5")
        chaos.commit_error = 0
        await volume.inodes.set_xattr(ino, CAPACITY, b"1MiB")
    async with opened(disk, options) as volume:
        assert settings_of(volume, ino) == Settings(kind="blocks", ttl=5, capacity=MIB)


@pytest.mark.parametrize("at", range(12))
async def test_a_crash_leaves_a_namespace_or_none(disk: Disk, options: Options, at: int) -> None:
    """Whatever of the commits is stored when the daemon dies: settings and folder agree."""
    images: list[Disk] = []
    disk.audit = lambda puts, deletes: images.append(disk.copy())
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        await volume.inodes.set_xattr(ino, TTL, b"5")
        await volume.inodes.remove_xattr(ino, NAMESPACE)
        await volume.inodes.set_xattr(ino, NAMESPACE, b"kind=blocks")
        await volume.tree.remove_directory(ROOT_INODE, b"llama")
        await volume.sync()
    for image in images[at::12]:
        found = image.records.get(schema.inode_key(ino))
        is_namespace = found is not None and schema.decode_inode(found.value).namespace == ino
        assert (schema.namespace_key(ino) in image.records) == is_namespace
        assert (await check(image)).clean


# -- what is refused ----------------------------------------------------------------------------------

BAD = {
    b"capacity=17MiB": "capacity 17MiB is more than the volume has: at most 16MiB",
    b"capacity=lots": 'capacity is a size such as "64GiB"',
    b"capacity=-1": 'capacity is a size such as "64GiB"',
    b"ttl=-1": "ttl is a number of seconds, 0 or more",
    b"ttl=nan": "ttl is a number of seconds, 0 or more",
    b"eviction=lur": "eviction is one of ",
    b"admission=": "admission is one of ",
    b"kind=cash": "kind is one of files, blocks",
    b"blocks=1.5": "blocks is a number of files",
    b"high_water=1.01": "high_water is a share of the capacity",
    b"low_water=0.99": "low_water 0.99 is above high_water 0.98",
    b"capacty=1": "did you mean 'capacity'?",
    b"cache": "settings are written NAME=VALUE",
    b"kind=\xff": "settings are text in UTF-8",
}


@pytest.mark.parametrize("text", BAD)
async def test_bad_settings_say_what_is_allowed(disk: Disk, options: Options, text: bytes) -> None:
    async with opened(disk, options) as volume:
        ino = await make_folder(volume, b"new")
        assert BAD[text] in await refusal(volume, ino, NAMESPACE, text, InvalidArgument)
        assert inside.namespaces(volume).all.keys() == {ROOT}
        other = await make_namespace(volume, b"other")
        assert BAD[text] in await refusal(volume, other, NAMESPACE, text, InvalidArgument)
        assert settings_of(volume, other) == Settings(kind="blocks")


async def test_only_empty_folders_become_namespaces(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_folder(volume, b"full")
        file = await make_file(volume, ino, b"a")
        assert "not empty" in await refusal(volume, ino, NAMESPACE, b"kind=blocks", NotEmpty)
        with pytest.raises(OperationError, match="no directory"):
            await volume.inodes.set_xattr(file, NAMESPACE, b"kind=blocks")
        assert "no setting" in await refusal(volume, ino, NAMESPACE + b".frobs", b"1", InvalidArgument)
        with pytest.raises(NoAttribute):
            await volume.inodes.set_xattr(ino, CLEAR, b"now")


async def test_limits_hold_inside_each_other(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        outer = await make_namespace(volume, b"outer", b"capacity=8MiB blocks=100")
        middle = await make_namespace(volume, b"middle", b"", parent=await make_folder(volume, b"plain", outer))
        inner = await make_namespace(volume, b"inner", b"capacity=8MiB blocks=100", parent=middle)
        for ino in (middle, inner):
            text = await refusal(volume, ino, CAPACITY, b"9MiB", InvalidArgument)
            assert text == "capacity 9MiB is more than the namespace above has: at most 8MiB"
            text = await refusal(volume, ino, NAMESPACE, b"blocks=101", InvalidArgument)
            assert text == "blocks 101 is more than the namespace above has: at most 100"
        for ino in (middle, outer):
            text = await refusal(volume, ino, CAPACITY, b"7MiB", InvalidArgument)
            assert text == "capacity 7MiB is less than a namespace in it has: at least 8MiB"
        await volume.inodes.set_xattr(inner, CAPACITY, b"1MiB")
        await volume.inodes.set_xattr(middle, CAPACITY, b"2MiB")
        await volume.inodes.set_xattr(outer, CAPACITY, b"2MiB")
        aside = await make_namespace(volume, b"aside", b"capacity=16MiB")
        assert settings_of(volume, aside).capacity == 16 * MIB
        await volume.inodes.set_xattr(outer, CAPACITY, b"0")
        await volume.inodes.set_xattr(middle, CAPACITY, b"16MiB")
        text = await refusal(volume, ROOT_INODE, NAMESPACE, b"blocks=99", InvalidArgument)
        assert text == "blocks 99 is less than a namespace in it has: at least 100"
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"blocks=100")
        text = await refusal(volume, aside, NAMESPACE, b"blocks=101", InvalidArgument)
        assert text == "blocks 101 is more than the volume has: at most 100"


async def test_only_owner_and_root_may(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_folder(volume, b"mine", caller=Caller(5, 5))
        stranger, owner = Caller(6, 6), Caller(5, 5)
        for caller in (stranger, owner, CALLER):
            change = volume.inodes.set_xattr(ino, NAMESPACE, b"kind=blocks", caller)
            if caller == stranger:
                with pytest.raises(NotPermitted, match="only user 5"):
                    await change
            else:
                await change
        with pytest.raises(NotPermitted):
            await volume.inodes.set_xattr(ino, TTL, b"1", stranger)
        with pytest.raises(NotPermitted):
            await volume.inodes.remove_xattr(ino, NAMESPACE, stranger)
        assert await volume.inodes.get_xattr(ino, TTL) == b"0"
        await volume.inodes.remove_xattr(ino, NAMESPACE, owner)


async def test_a_user_may_have_so_many(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        for number in range(USER_NAMESPACES_MAX + 1):
            ino = await make_folder(volume, b"%d" % number, caller=Caller(5, 5))
            if number < USER_NAMESPACES_MAX:
                await volume.inodes.set_xattr(ino, NAMESPACE, b"")
        assert "may have no more" in await refusal(volume, ino, NAMESPACE, b"", QuotaExceeded)
        await make_namespace(volume, b"root's")
    async with opened(disk, options) as volume:
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert "may have no more" in await refusal(volume, ino, NAMESPACE, b"", QuotaExceeded)
        names = [row["path"] for row in volume.stats()["namespaces"]]
        assert sorted(names) == sorted(["/", "/root's", *[f"/{number}" for number in range(USER_NAMESPACES_MAX)]])
        await volume.tree.remove_directory(ROOT_INODE, b"7")
        await volume.inodes.set_xattr(ino, NAMESPACE, b"")


# -- the root -----------------------------------------------------------------------------------------


def with_root(options: Options, **settings: object) -> Options:
    """``settings``: as mount.conf would have them; nobody checks their types here."""
    return msgspec.structs.replace(options, namespace=NamespaceOptions(**settings))  # type: ignore[arg-type]


async def test_the_root_has_settings(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        assert (await volume.inodes.get_xattr(ROOT_INODE, NAMESPACE)).startswith(b"kind=files capacity=0 ")
        assert "mount -o cache'" in await refusal(volume, ROOT_INODE, NAMESPACE, b"kind=blocks", InvalidArgument)
        assert "is the volume's" in await refusal(volume, ROOT_INODE, CAPACITY, b"1MiB", InvalidArgument)
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"blocks=10 ttl=5")
        assert await volume.inodes.list_xattrs(ROOT_INODE) == [NAMESPACE]
        ino = await make_folder(volume, b"new")
        assert "at most 10" in await refusal(volume, ino, NAMESPACE, b"blocks=11", InvalidArgument)
    async with opened(disk, options) as volume:
        assert settings_of(volume, ROOT) == Settings(blocks=10, ttl=5)
    assert (await check(disk)).clean


async def test_a_volume_is_made_a_cache(options: Options) -> None:
    disk = Disk.format(with_root(options, kind="blocks", eviction="lru"))
    async with opened(disk, options) as volume:
        assert settings_of(volume, ROOT) == Settings(kind="blocks", eviction="lru")
    assert schema.namespace_key(ROOT) not in Disk.format(options).records


async def test_the_root_of_a_shared_volume_may_be_a_cache(
    rng: random.Random, options: Options, autojump_clock: trio.testing.MockClock
) -> None:
    made = with_root(options, kind="blocks", eviction="lru")
    async with volumes(Disk.format(made, shared=True), options, 2, rng) as (one, other):
        for volume in (one, other):
            assert settings_of(volume, ROOT) == Settings(kind="blocks", eviction="lru")
    disk = Disk.format(options, shared=True)
    async with volumes(disk, made, 1, rng) as (volume,):
        assert settings_of(volume, ROOT) == Settings(kind="blocks", eviction="lru")
    assert schema.namespace_key(ROOT) not in disk.records, "options of a mount hold for it alone"


async def test_options_of_a_mount_hold_for_it_alone(disk: Disk, options: Options) -> None:
    async with opened(disk, with_root(options, kind="blocks", ttl=9)) as volume:
        assert settings_of(volume, ROOT) == Settings(kind="blocks", ttl=9)
        assert "options of this mount" in await refusal(volume, ROOT_INODE, TTL, b"1", InvalidArgument)
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"eviction=lru")
        assert settings_of(volume, ROOT) == Settings(kind="blocks", ttl=9, eviction="lru")
    async with opened(disk, options) as volume:
        assert settings_of(volume, ROOT) == Settings(eviction="lru")
