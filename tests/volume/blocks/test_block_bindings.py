"""What a name means, for threads that ask again and again: one binding, which ends before that changes."""

from __future__ import annotations

import threading

import inside
import numpy as np
import pytest
import trio
import trio.testing
from block_calls import CHUNK, bound, get_bound, put, put_shared
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options, opened

from kvfuse.options.config import Options
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE, Binding, Changes
from kvfuse.volume.inodes import core
from kvfuse.volume.views.content_map import SIZE_UNKNOWN


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB, chunk=CHUNK)


async def test_a_name_has_one_binding(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """Who asks at the same time leaves the binding alone that another one was just given."""
    async with opened(disk, options) as volume:
        await put(volume, b"a", b"1")
        await volume.sync()
    async with opened(disk, options, chaos) as volume:
        found: list[Binding] = []

        async def bind() -> None:
            found.append(await bound(volume, b"a"))

        chaos.delay = 1.0
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(bind)
        assert {id(binding) for binding in found} == {id(inside.dentries(volume).get(ROOT_INODE, b"a").binding)}
        assert found[0].valid


async def test_a_binding_ends_when_its_name_means_something_else(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for name in (b"a", b"b", b"c", b"d", b"e"):
            await put(volume, name, name)
        bindings = {name: await bound(volume, name) for name in (b"a", b"b", b"c", b"d", b"e")}

        await volume.tree.unlink(ROOT_INODE, b"a")
        assert not bindings[b"a"].valid
        assert await volume.blocks.bind(ROOT_INODE, b"a") is None
        await put(volume, b"a", b"again")
        assert await get_bound(volume, b"a") == b"again"

        await volume.tree.rename(ROOT_INODE, b"b", ROOT_INODE, b"c", 0)
        assert not bindings[b"b"].valid
        assert not bindings[b"c"].valid
        assert (await get_bound(volume, b"b"), await get_bound(volume, b"c")) == (None, b"b")

        await volume.tree.rename(ROOT_INODE, b"d", ROOT_INODE, b"e", RENAME_EXCHANGE)
        assert not bindings[b"d"].valid
        assert not bindings[b"e"].valid
        assert (await get_bound(volume, b"d"), await get_bound(volume, b"e")) == (b"e", b"d")

        binding = await bound(volume, b"d")
        await volume.inodes.set_attributes(binding.ino, Changes(mode=0o600), CALLER)
        assert not binding.valid
        binding = await bound(volume, b"d")
        assert binding.mode == 0o100600
        await volume.inodes.set_attributes(binding.ino, Changes(uid=5), CALLER)
        assert not binding.valid

        await volume.tree.rename(ROOT_INODE, b"d", folder, b"d", 0)
        assert await volume.blocks.bind(ROOT_INODE, b"d") is None
        assert (await bound(volume, b"d", folder)).uid == 5


async def test_both_names_of_a_file_are_bound_on_their_own(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        await put(volume, b"a", b"data")
        ino = (await bound(volume, b"a")).ino
        await volume.tree.link(ino, ROOT_INODE, b"b")
        volume.tree.forget(ino, 1)
        first, second = await bound(volume, b"a"), await bound(volume, b"b")
        assert first.map is second.map
        await volume.tree.unlink(ROOT_INODE, b"a")
        assert (first.valid, second.valid) == (False, True)
        assert await get_bound(volume, b"b") == b"data"
        await volume.inodes.set_attributes(ino, Changes(gid=9), CALLER)
        assert not second.valid


async def test_bindings_are_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "NAMES_MAX", 50)
    options = lab_options(capacity=16 * MIB, chunk=CHUNK, nodes=50)
    async with opened(disk, options) as volume:
        names = [b"%d" % number for number in range(200)]
        for name in names:
            await put(volume, name, name)
            await volume.sync()  # names that wait for a commit are not forgotten
        bindings = [await bound(volume, name) for name in names]
        assert sum(binding.valid for binding in bindings) <= 50
        for name in names:
            assert await get_bound(volume, name) == name


async def test_a_binding_outlives_no_inode(disk: Disk) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK, nodes=50)
    async with opened(disk, options) as volume:
        await put(volume, b"0", b"0")
        binding = await bound(volume, b"0")
        for name in [b"%d" % number for number in range(1000)]:
            await put(volume, b"other-" + name, name)
            await volume.sync()
            if binding.map.size == SIZE_UNKNOWN:
                break
        assert (binding.valid, binding.map.size) == (True, SIZE_UNKNOWN), "the inode left memory"
        await put(volume, b"other", b"other")
        again = await bound(volume, b"0")
        assert (binding.valid, again.map.size) == (False, 1)
        assert await get_bound(volume, b"0") == b"0"


async def test_readers_beside_a_writer_see_whole_blocks_and_never_older_ones(disk: Disk, options: Options) -> None:
    """A thread reads by itself, through bindings and maps, while the block is replaced again and again."""
    size = 3 * CHUNK
    async with opened(disk, options) as volume:
        dentries = inside.dentries(volume)
        stop = threading.Event()
        published = [0]
        failures: list[str] = []
        seen: set[int] = set()

        def read() -> None:
            while not stop.is_set():
                least = published[0]
                binding = dentries.get(ROOT_INODE, b"block").binding
                if binding is None:
                    continue
                version, length = binding.map.version, binding.map.size
                rows = [binding.map.rows.get(index) for index in range(3)]
                if length != size or None in rows:
                    continue
                parts = [row.source.bytes[row.start : row.start + row.length].copy() for row in rows if row]
                if binding.map.version != version or not binding.valid:
                    continue
                values = {int(value) for part in parts for value in np.unique(part)}
                if len(values) != 1 or sum(map(len, parts)) != size:
                    failures.append(f"torn: {values}")
                elif (value := values.pop()) < least:
                    failures.append(f"{value} after {least}")
                else:
                    seen.add(value)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for number in range(1, 251):
                data = bytes([number]) * size
                await (put_shared(volume, b"block", data) if number % 2 else put(volume, b"block", data))
                published[0] = number
                if number % 3 == 0:
                    await volume.sync()
                binding = await bound(volume, b"block")
                await volume.files.show(await volume.inodes.attributes(binding.ino), 0, 2)
                await trio.to_thread.run_sync(lambda: None)  # lets the reader run
        finally:
            stop.set()
            thread.join()
        assert failures == []
        assert len(seen) > 1
