"""A namespace is cleared: at once nobody finds its files, and their room comes back."""

from __future__ import annotations

import os
import random
from contextlib import suppress

import inside
import msgspec
import pytest
import trio
import trio.testing
from block_calls import put
from namespace_lab import UseAudit
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import NotFound, NotPermitted, OperationError, ReadOnly, Stale
from kvfuse.options.options import MountOptions, NamespaceOptions, Options
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.eviction.sweeping import Sweeper
from kvfuse.volume.tenancy.namespace_attributes import CLEAR, NAMESPACE
from kvfuse.volume.volume import Volume


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB)


async def make_namespace(
    volume: Volume, name: bytes, settings: bytes = b"kind=evicted-files", parent: int = ROOT_INODE
) -> int:
    ino = (await volume.tree.make_directory(parent, name, 0o755, CALLER)).ino
    await volume.inodes.set_xattr(ino, NAMESPACE, settings)
    return ino


async def put_in(volume: Volume, directory: int, name: bytes, data: bytes = b"x" * 5000) -> None:
    await volume.blocks.put(directory, name, memoryview(data), CALLER, 0o644)


async def clear(volume: Volume, ino: int) -> None:
    await volume.inodes.set_xattr(ino, CLEAR, b"now")


async def names_in(volume: Volume, directory: int) -> list[bytes]:
    return sorted([entry.name for entry in await volume.tree.list_directory(directory, 0, 10_000)])


async def assert_absent(volume: Volume, directory: int, names: list[bytes]) -> None:
    assert not any(await volume.blocks.exists(directory, names))
    for name in names:
        assert await volume.blocks.bind(directory, name) is None
        with pytest.raises(NotFound):
            await volume.tree.lookup(directory, name)


async def swept(volume: Volume) -> None:
    namespaces = inside.namespaces(volume)
    while namespaces.cleared:
        await namespaces.cleared.swept.wait()
    await volume.sync()


def used(volume: Volume, ino: int) -> dict[str, int]:
    found: dict[str, int] = next(row["used"] for row in volume.stats()["namespaces"] if row["number"] == ino)
    return found


NAMES = [b"%d" % number for number in range(60)]


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "pending"])
async def test_nobody_finds_what_was_cleared(disk: Disk, options: Options, is_stored: bool) -> None:
    UseAudit.attach(disk)
    async with opened(disk, options) as volume:
        ino, other = await make_namespace(volume, b"llama"), await make_namespace(volume, b"other")
        inner = await make_namespace(volume, b"inner", parent=ino)
        folder = (await volume.tree.make_directory(ino, b"folder", 0o755, CALLER)).ino
        for directory in (ino, folder, inner, other):
            for name in NAMES:
                await put_in(volume, directory, name)
        await volume.tree.lookup(ino, NAMES[0])
        if is_stored:
            await volume.sync()
        binding = await volume.blocks.bind(ino, NAMES[1])
        assert binding is not None
        await clear(volume, ino)
        assert not binding.valid
        assert await names_in(volume, ino) == [b"folder", b"inner"]
        assert await names_in(volume, folder) == []
        await put_in(volume, folder, NAMES[5], b"new")
        await assert_absent(volume, ino, NAMES)
        assert (await volume.blocks.exists(folder, NAMES)).index(True) == 5
        assert all(await volume.blocks.exists(inner, NAMES))
        await swept(volume)
        assert used(volume, ino)["files"] == len(NAMES) + 1, "those of the namespace in it, and the new one"
        assert used(volume, other)["files"] == len(NAMES)
        await assert_absent(volume, ino, NAMES)
        assert await names_in(volume, folder) == [NAMES[5]]
        await volume.tree.unlink(folder, NAMES[5])
        await volume.tree.remove_directory(ino, b"folder")
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_crash_after_a_clear_brings_nothing_back(disk: Disk, options: Options, chaos: Chaos) -> None:
    async with opened(disk, options, chaos) as volume:
        ino = await make_namespace(volume, b"llama")
        for name in NAMES:
            await put_in(volume, ino, name)
        await volume.sync()
        images: list[Disk] = []
        disk.audit = lambda puts, deletes: images.append(disk.copy())
        await clear(volume, ino)
        await put_in(volume, ino, NAMES[0], b"new")
        await swept(volume)
    for image in images:
        async with opened(image, options) as volume:
            await assert_absent(volume, ino, NAMES[1:])
            await swept(volume)
            assert used(volume, ino)["files"] <= 1
        report = await check(image)
        assert report.clean, report.problems


async def test_open_files_stay_readable(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        read, node = await volume.tree.create(ino, b"read", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(read, 0, b"content")
        written, _ = await volume.tree.create(ino, b"written", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(written, 0, b"first")
        await clear(volume, ino)
        assert bytes(await volume.files.read(read, 0, 100)) == b"content"
        with pytest.raises(Stale):
            await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await volume.files.write(written, 5, b"second")
        with pytest.raises(NotFound):
            await volume.tree.rename(ino, b"written", ino, b"final", 0)
        for handle in (read, written):
            await volume.files.release(handle)
        await swept(volume)
        await assert_absent(volume, ino, [b"read", b"written", b"final"])
        for number in (read.node.ino, written.node.ino):
            volume.tree.forget(number, 1)
        await volume.sync()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert used(volume, ino) == {"bytes": 0, "files": 0}
        await volume.inodes.remove_xattr(ino, NAMESPACE)
    assert (await check(disk)).clean


async def test_files_of_all_kinds_go(disk: Disk, options: Options) -> None:
    """With two names, attributes, many chunks, and as the target or source of a rename."""
    async with opened(disk, lab_options(capacity=16 * MIB, chunk=4096)) as volume:
        ino = await make_namespace(volume, b"llama")
        await put_in(volume, ino, b"one")
        node = await volume.tree.lookup(ino, b"one")
        await volume.tree.link(node.ino, ino, b"two")
        await volume.inodes.set_xattr(node.ino, b"user.a", b"value")
        await put_in(volume, ino, b"large", bytes(300_000))
        await volume.tree.make_symlink(ino, b"link", b"one", CALLER)
        await volume.sync()
        await clear(volume, ino)
        await put_in(volume, ino, b"new", b"new")
        await volume.tree.rename(ino, b"new", ino, b"two", 0)
        assert await names_in(volume, ino) == [b"two"]
        for name in (b"one", b"large"):
            handle, _ = await volume.tree.create(ino, name, 0o644, CALLER, os.O_RDWR | os.O_EXCL)
            await volume.files.release(handle)
        await swept(volume)
        volume.tree.forget(node.ino, 2)  # or its slots are kept until somebody needs them
        await volume.sync()
        assert used(volume, ino) == {"files": 3, "bytes": 4096}
        assert await names_in(volume, ino) == [b"large", b"one", b"two"]
    report = await check(disk)
    assert report.clean, report.problems


async def test_a_full_namespace_has_room_after_a_clear(disk: Disk, options: Options) -> None:
    """Whoever finds no room waits for what is given back; of files, too, that no eviction may take."""
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama", b"kind=evicted-files capacity=2MiB admission=all")
        for turn in range(4):
            for number in range(30):
                await put_in(volume, ino, b"%d-%d" % (turn, number), bytes(65536))
            await volume.sync()
            await clear(volume, ino)
        await swept(volume)
        assert used(volume, ino) == {"bytes": 0, "files": 0}
    assert (await check(disk)).clean


async def test_the_root_is_cleared_alone(disk: Disk, options: Options) -> None:
    options = msgspec.structs.replace(options, namespace=NamespaceOptions(kind="cache"))
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        for directory in (ROOT_INODE, ino):
            await put_in(volume, directory, b"a")
        await clear(volume, ROOT_INODE)
        await assert_absent(volume, ROOT_INODE, [b"a"])
        assert await volume.blocks.exists(ino, [b"a"]) == [True]
        with pytest.raises(NotPermitted):
            await volume.inodes.set_xattr(ino, CLEAR, b"now", Caller(5, 5))
        await put(volume, b"a", b"new")
        await swept(volume)
        assert await volume.blocks.exists(ROOT_INODE, [b"a"]) == [True]


async def test_others_do_not_wait_for_a_sweep(disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sweep(sweeper: Sweeper, number: int) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Sweeper, "sweep", sweep)
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        for parent in (ROOT_INODE, ino):
            await volume.tree.make_directory(parent, b"empty", 0o755, CALLER)
        inside.namespaces(volume).cleared[ino] = 1  # as long as a sweep takes
        with trio.fail_after(1):
            await volume.tree.remove_directory(ROOT_INODE, b"empty")
            await make_namespace(volume, b"other")
        with trio.move_on_after(0.05) as scope:
            await volume.tree.remove_directory(ino, b"empty")
        assert scope.cancelled_caught
        inside.namespaces(volume).cleared.has_swept(ino)
        await volume.tree.remove_directory(ino, b"empty")


async def test_a_mount_that_may_not_write_does_not_show_it(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        ino = await make_namespace(volume, b"llama")
        await put_in(volume, ino, b"a")
        await volume.sync()
        await clear(volume, ino)
        image = disk.copy()
    async with opened(image, msgspec.structs.replace(options, mount=MountOptions(read_only=True))) as volume:
        await assert_absent(volume, ino, [b"a"])
        assert await names_in(volume, ino) == []
        with pytest.raises(ReadOnly):
            await clear(volume, ino)


async def test_clears_among_everything_else(rng: random.Random, disk: Disk, options: Options, chaos: Chaos) -> None:
    """No name means a file that was there before a clear which returned, whatever happens beside."""
    chaos.delay = 0.2
    audit = UseAudit.attach(disk)
    async with opened(disk, options, chaos) as volume:
        ino = await make_namespace(volume, b"llama", b"kind=evicted-files capacity=4MiB blocks=200")
        begun, returned = 0, 0
        stored: dict[int, int] = {}
        """content of a file -> clears that had begun when its put returned"""

        async def work(number: int) -> None:
            mine = random.Random(rng.random())
            for _ in range(60):
                with suppress(OperationError):
                    await turn(mine, b"%d" % mine.randrange(25))

        async def turn(mine: random.Random, name: bytes) -> None:
            choice = mine.randrange(6)
            if choice < 2:
                content = mine.getrandbits(60)
                await put_in(volume, ino, name, b"%d:" % content + bytes(mine.randrange(20_000)))
                stored[content] = begun
            elif choice == 2:
                await volume.tree.unlink(ino, name)
            elif choice == 3:
                await volume.tree.rename(ino, name, ino, b"%d" % mine.randrange(25), 0)
            elif choice == 4:
                await volume.blocks.exists(ino, [name])
                await names_in(volume, ino)
            else:
                await look(name)

        async def look(name: bytes) -> None:
            before = returned
            node = await volume.blocks.find(ino, name)
            if node is None:
                return
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            content = int(bytes(await volume.files.read(handle, 0, 30)).split(b":")[0])
            await volume.files.release(handle)
            assert stored.get(content, begun) >= before, "it was there before a clear that has returned"

        async def clear_often() -> None:
            nonlocal begun, returned
            for _ in range(12):
                await trio.sleep(rng.random() * 0.05)
                begun += 1
                await clear(volume, ino)
                returned += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clear_often)
            for number in range(6):
                nursery.start_soon(work, number)
        chaos.delay = 0
        await clear(volume, ino)
        await swept(volume)
        assert await names_in(volume, ino) == []
        await trio.testing.wait_all_tasks_blocked(0.01)
        await volume.sync()
        assert used(volume, ino) == {"bytes": 0, "files": 0}
    assert audit.most
    report = await check(disk)
    assert report.clean, report.problems
