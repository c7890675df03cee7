"""fsck: clean volumes are clean, each kind of damage is found and mended, blocks come back from segments alone."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from volume_lab import CALLER

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.config import Options, VolumeOptions
from kvfuse.errors import VolumeBusy, VolumeError
from kvfuse.remote.records.api import RecordStore
from kvfuse.volume import format, schema
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.fsck import Report, fsck
from kvfuse.volume.rebuild import rebuild
from kvfuse.volume.volume import Volume, open_volume

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 512 * KIB


class Tree:
    """A volume on disk and what should be in it."""

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.rng = rng
        self.options = Options(
            volume=VolumeOptions(path=base / "volume", capacity=64 * MIB, segment_size=16 * MIB, chunk_size=CHUNK)
        )
        self.files: dict[bytes, bytes] = {}

    async def make(self) -> None:
        await format.format_volume(self.options)
        sizes = {
            b"tiny": 100,
            b"small": 4000,
            b"page": 4096,
            b"a/mid": 70_000,
            b"a/b/granules": 3 * GRANULE_SIZE - 5,
            b"a/b/chunks": 3 * CHUNK + 7,
            b"a/b/c/far": 12 * CHUNK + 4097,  # more chunks than an inode record holds
            b"a/pieces": CHUNK - 60 * KIB,
        }
        async with self.volume() as volume:
            for path, size in sizes.items():
                await self.write(volume, path, self.rng.randbytes(size))
            await self.write(volume, b"gone", self.rng.randbytes(9000))
            await self.write(volume, b"a/gone", self.rng.randbytes(2 * MIB))
            await self.write(volume, b"old", self.rng.randbytes(5000))
            await self.write(volume, b"rewritten", self.rng.randbytes(5000))
            await self.sync_and_change(volume)

    async def sync_and_change(self, volume: Volume) -> None:
        """What happens to files after they were committed once."""
        await volume.sync()
        for path in (b"gone", b"a/gone"):
            await volume.unlink(*await self.place(volume, path))
            del self.files[path]
        await volume.rename(*await self.place(volume, b"old"), *await self.place(volume, b"a/b/new"), 0)
        self.files[b"a/b/new"] = self.files.pop(b"old")
        await self.write(volume, b"rewritten", self.rng.randbytes(8000))
        await self.write(volume, b"tmp", self.rng.randbytes(30_000))
        await volume.rename(*await self.place(volume, b"tmp"), *await self.place(volume, b"tiny"), 0)
        self.files[b"tiny"] = self.files.pop(b"tmp")

    @asynccontextmanager
    async def volume(self) -> AsyncIterator[Volume]:
        async with open_volume(self.options) as volume:
            yield volume

    async def place(self, volume: Volume, path: bytes) -> tuple[int, bytes]:
        """(directory, name); directories are made."""
        folder = ROOT_INODE
        *parts, name = path.split(b"/")
        for part in parts:
            found = [entry for entry in await volume.list_directory(folder, 0, 1000) if entry.name == part]
            if not found:
                folder = (await volume.make_directory(folder, part, 0o755, CALLER)).ino
            else:
                volume.remember(folder, found[0])
                folder = found[0].attributes.ino
        return folder, name

    async def write(self, volume: Volume, path: bytes, data: bytes) -> None:
        folder, name = await self.place(volume, path)
        if path in self.files:
            node = await volume.lookup(folder, name)
            handle = await volume.open(node.ino, os.O_WRONLY | os.O_TRUNC, CALLER)
        else:
            handle, _ = await volume.create(folder, name, 0o640, CALLER, os.O_WRONLY)
        for start in range(0, len(data), 300_000):
            await volume.write(handle, start, data[start : start + 300_000])
        await volume.flush(handle)
        await volume.release(handle)
        self.files[path] = data

    async def read(self) -> dict[bytes, bytes]:
        """Every file of the volume."""
        found: dict[bytes, bytes] = {}
        async with self.volume() as volume:
            await self.read_folder(volume, ROOT_INODE, b"", found)
        return found

    async def read_folder(self, volume: Volume, folder: int, above: bytes, found: dict[bytes, bytes]) -> None:
        for entry in await volume.list_directory(folder, 0, 1000):
            node = await volume.lookup(folder, entry.name)
            if stat.S_ISDIR(node.mode):
                await self.read_folder(volume, node.ino, above + entry.name + b"/", found)
            elif stat.S_ISREG(node.mode):
                handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
                path = above + entry.name
                data = bytes(await volume.read(handle, 0, 64 * MIB))
                if path.startswith(b"lost+found/") and data == self.files.get(b"page"):
                    path = b"page"  # a slot of 4 KiB that is full has no room for a name
                found[path] = data
                await volume.release(handle)

    @asynccontextmanager
    async def records(self) -> AsyncIterator[RecordStore]:
        records = format.open_records(self.options)
        try:
            yield records
        finally:
            await records.aclose()

    async def change(self, damage: Callable[[dict[bytes, bytes]], None]) -> None:
        """Let ``damage`` work on all records, as a dict."""
        async with self.records() as records:
            before = {row.key: row.value for row in await records.scan(b"", limit=100_000)}
            after = dict(before)
            damage(after)
            puts = {key: value for key, value in after.items() if before.get(key) != value}
            await records.commit(puts, before.keys() - after.keys(), durable=True)

    async def check(self, *, repair: bool = False, verify: bool = True) -> Report:
        return await fsck(self.options, repair=repair, verify=verify)


@pytest.fixture
async def tree(tmp_path: Path, rng: random.Random) -> Tree:
    tree = Tree(tmp_path, rng)
    await tree.make()
    return tree


# -- finding things in records ------------------------------------------------------------------------


Records = dict[bytes, bytes]


def entry_of(records: Records, name: bytes) -> bytes:
    """The key of the entry called ``name``."""
    (key,) = [key for key in records if key[:1] == b"d" and schema.split_entry_key(key)[2] == name]
    return key


def inline(records: Records, name: bytes) -> schema.InodeRecord:
    entry = schema.decode_entry(records[entry_of(records, name)])
    assert isinstance(entry, schema.InodeRecord)
    return entry


def directory(records: Records, name: bytes) -> int:
    entry = schema.decode_entry(records[entry_of(records, name)])
    assert isinstance(entry, int)
    return entry


def replace_inline(records: Records, name: bytes, **changes: object) -> None:
    record = msgspec.structs.replace(inline(records, name), **changes)
    records[entry_of(records, name)] = schema.encode_entry_inline(record)


# -- kinds of damage: each works on all records, and may lose the files it returns ------------------------


def missing_inode(records: Records) -> set[bytes]:
    """A directory's own record: what was in it goes to the root, under new names."""
    del records[schema.inode_key(directory(records, b"c"))]
    return {b"a/b/c/far"}


def dangling_entry(records: Records) -> set[bytes]:
    records[schema.entry_key(ROOT_INODE, b"dangling")] = schema.encode_entry_reference(999_999)
    return set()


def wrong_file_links(records: Records) -> set[bytes]:
    replace_inline(records, b"small", nlink=3)
    return set()


def wrong_directory_links(records: Records) -> set[bytes]:
    key = schema.inode_key(directory(records, b"a"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), nlink=9))
    return set()


def wrong_parent(records: Records) -> set[bytes]:
    key = schema.inode_key(directory(records, b"b"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), parent=77))
    return set()


def leaked_slot(records: Records) -> set[bytes]:
    key = next(key for key in records if key[:1] == b"s")
    slot_size, bitmap = schema.decode_slab(records[key])
    bitmap = bytes(byte | (1 if not byte & 1 else 2 if not byte & 2 else 4) for byte in bitmap[:1]) + bitmap[1:]
    records[key] = schema.encode_slab(slot_size, bitmap)
    return set()


def lost_slot(records: Records) -> set[bytes]:
    """A slab's allocation is gone: its files cannot be trusted."""
    slab_size = MIB
    slab = inline(records, b"granules").chunks[0][0].addr // slab_size
    del records[schema.slab_key(slab)]
    return files_in(records, slab * slab_size, slab_size)


def files_in(records: Records, start: int, length: int) -> set[bytes]:
    """Names of files with bytes there, by their last component."""
    found = set()
    for key, value in records.items():
        if key[:1] == b"d" and isinstance(entry := schema.decode_entry(value), schema.InodeRecord):
            extents = [extent for chunk in entry.chunks for extent in chunk]
            for other, row in records.items():
                if other[:1] == b"c" and schema.key_inode(other) == entry.ino:
                    extents += schema.decode_chunk(row)
            if any(start <= extent.addr < start + length for extent in extents):
                found.add(schema.split_entry_key(key)[2])
    return found


def doubly_owned_slot(records: Records) -> set[bytes]:
    """Whose bytes they are only one record can be right about; the other file goes."""
    replace_inline(records, b"small", chunks=inline(records, b"page").chunks)
    return {b"small"}


def no_times(records: Records) -> set[bytes]:
    del records[schema.times_key(directory(records, b"a"))]
    return set()


def bad_times(records: Records) -> set[bytes]:
    records[schema.times_key(directory(records, b"a"))] = b"short"
    return set()


def stray_chunk(records: Records) -> set[bytes]:
    records[schema.chunk_key(555_555, 9)] = schema.encode_chunk(())
    return set()


def stray_attribute(records: Records) -> set[bytes]:
    records[schema.xattr_key(555_555, b"user.x")] = b"1"
    return set()


def stray_times(records: Records) -> set[bytes]:
    records[schema.times_key(555_555)] = schema.encode_times(1, 2, 3)
    return set()


def old_counters(records: Records) -> set[bytes]:
    records[schema.COUNTER_INODE] = schema.encode_u64(2)
    records[schema.COUNTER_GENERATION] = schema.encode_u64(1)
    return set()


def no_counters(records: Records) -> set[bytes]:
    for key in (schema.COUNTER_INODE, schema.COUNTER_GENERATION, schema.COUNTER_FILES):
        del records[key]
    return set()


def bad_counter(records: Records) -> set[bytes]:
    records[schema.COUNTER_INODE] = b"\1"
    return set()


def wrong_place(records: Records) -> set[bytes]:
    key = entry_of(records, b"small")
    records[key[:9] + bytes(8) + key[17:]] = records.pop(key)
    return {b"small"}


def garbage_values(records: Records) -> set[bytes]:
    records[entry_of(records, b"small")] = b"garbage"
    records[schema.inode_key(123_456)] = b"\xc1\xc1"
    return {b"small"}


def short_reference(records: Records) -> set[bytes]:
    records[entry_of(records, b"small")] = b"R\0"
    return {b"small"}


def bad_slab(records: Records) -> set[bytes]:
    records[schema.slab_key(60)] = b"\0"
    records[schema.slab_key(7_000_000)] = schema.encode_slab(4096, b"\1" * 32)
    return set()


def odd_keys(records: Records) -> set[bytes]:
    for key in (b"d", b"d\0\0", b"i1", b"t", b"c123", b"x", b"s", b"s12345", b"o1", b"n"):
        records[key] = b"?"
    return set()


def impossible_extent(records: Records) -> set[bytes]:
    (extent,) = inline(records, b"page").chunks[0]
    replace_inline(records, b"page", chunks=((msgspec.structs.replace(extent, length=1 << 30),),))
    return {b"page"}


def extent_out_of_the_volume(records: Records) -> set[bytes]:
    (extent,) = inline(records, b"page").chunks[0]
    replace_inline(records, b"page", chunks=((msgspec.structs.replace(extent, addr=1 << 50),),))
    return {b"page"}


def loop_of_directories(records: Records) -> set[bytes]:
    """b, which is in a, is moved into its own child c: nobody can reach them."""
    child = directory(records, b"c")
    key = entry_of(records, b"b")
    value = records.pop(key)
    records[schema.entry_key(child, b"b")] = value
    key = schema.inode_key(directory(records, b"b"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), parent=child))
    return {b"granules", b"chunks", b"far", b"new"}


DAMAGE = [
    missing_inode,
    dangling_entry,
    wrong_file_links,
    wrong_directory_links,
    wrong_parent,
    leaked_slot,
    lost_slot,
    doubly_owned_slot,
    no_times,
    bad_times,
    stray_chunk,
    stray_attribute,
    stray_times,
    old_counters,
    no_counters,
    bad_counter,
    wrong_place,
    garbage_values,
    short_reference,
    bad_slab,
    odd_keys,
    impossible_extent,
    extent_out_of_the_volume,
    loop_of_directories,
]


async def test_a_clean_volume_is_clean(tree: Tree) -> None:
    report = await tree.check()
    assert report.clean
    assert not report.notes
    assert report.files == len(tree.files)
    assert report.used_bytes == sum(map(len, tree.files.values()))
    assert report.verified_bytes == report.used_bytes
    assert await tree.read() == tree.files


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
async def test_damaged_records(tree: Tree, damage: Callable[[Records], set[bytes]]) -> None:
    """Found, named, mended; what was not damaged keeps every byte, and the volume can be used."""
    lost: set[bytes] = set()
    await tree.change(lambda records: lost.update(damage(records)))
    report = await tree.check()
    assert report.problems, "not found"
    assert (await tree.check()).problems, "a check alone changes nothing"
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    assert report.repaired > 0
    found = await tree.read()
    for path, data in tree.files.items():
        if path in found:
            assert found[path] == data, path
        else:
            assert path in lost or path.rpartition(b"/")[2] in lost, f"{path!r} went too"
    await can_be_used(tree)


async def can_be_used(tree: Tree) -> None:
    async with tree.volume() as volume:
        await tree.write(volume, b"fresh/after", tree.rng.randbytes(100_000))
        tree.files.pop(b"fresh/after")
    report = await tree.check()
    assert report.clean, [problem.text for problem in report.problems]


async def test_files_of_a_lost_directory_keep_their_bytes(tree: Tree) -> None:
    await tree.change(lambda records: records.pop(schema.inode_key(directory(records, b"c"))))
    await tree.check(repair=True)
    assert tree.files[b"a/b/c/far"] in (await tree.read()).values()


@pytest.mark.parametrize("round_number", range(10))
async def test_random_damage(tree: Tree, rng: random.Random, round_number: int) -> None:
    """Bytes flipped, records dropped and invented, anywhere: the check ends, repair makes the volume clean."""

    def damage(records: Records) -> None:
        keys = sorted(records)
        for key in rng.sample(keys, rng.randint(1, 6)):
            value = bytearray(records[key])
            action = rng.choice(["flip", "drop", "cut", "invent", "move"])
            if action == "flip" and value:
                value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
                records[key] = bytes(value)
            elif action == "drop":
                del records[key]
            elif action == "cut":
                records[key] = bytes(value[: rng.randrange(len(value) + 1)])
            elif action == "invent":
                records[key[:1] + rng.randbytes(rng.randrange(30))] = rng.randbytes(rng.randrange(60))
            elif action == "move":
                records[rng.choice(keys)] = bytes(value)

    await tree.change(damage)
    report = await tree.check(repair=True)
    if schema.inode_key(ROOT_INODE) in await keys_of(tree):
        assert report.clean, [problem.text for problem in report.problems]
        found = await tree.read()
        wrong = [path for path, data in tree.files.items() if path in found and found[path] != data]
        assert len(wrong) <= 6, wrong  # a flipped bit in a size or an owner is no damage that anybody can see
        await can_be_used(tree)


async def keys_of(tree: Tree) -> set[bytes]:
    async with tree.records() as records:
        return {row.key for row in await records.scan(b"", limit=100_000)}


# -- data -------------------------------------------------------------------------------------------


async def flip(tree: Tree, path: bytes, offset: int) -> None:
    """One bit of a file, on the disk below."""
    async with tree.volume() as volume:
        folder, name = await tree.place(volume, path)
        node = await volume.lookup(folder, name)
        for row in (await volume.info(node.ino))["extents"]:
            start = row["chunk"] * CHUNK
            if start <= offset < start + row["length"]:
                segment, place = row["segment"], row["offset"] + offset - start
                break
        else:
            raise AssertionError("no such byte")
    with open(tree.options.segments_path / f"{segment:08x}.seg", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("path", [b"page", b"a/b/granules", b"a/b/c/far"])
async def test_verify_finds_a_flipped_bit(tree: Tree, path: bytes) -> None:
    await flip(tree, path, len(tree.files[path]) - 3)
    assert (await tree.check(verify=False)).clean, "the records are right"
    report = await tree.check()
    assert len(report.problems) == 1
    assert "wrong" in report.problems[0].text
    report = await tree.check(repair=True)
    assert report.clean
    found = await tree.read()
    assert {name: data for name, data in tree.files.items() if name != path} == found
    await can_be_used(tree)


async def test_a_mounted_volume_is_refused(tree: Tree) -> None:
    async with tree.volume():
        with pytest.raises(VolumeBusy):
            await tree.check()
        with pytest.raises(VolumeBusy):
            await rebuild(tree.options)


# -- rebuild ----------------------------------------------------------------------------------------


def drop_records(tree: Tree) -> None:
    shutil.rmtree(tree.options.records_path)


def drop_superblock_too(tree: Tree) -> None:
    drop_records(tree)
    (tree.options.volume_path / "superblock").unlink()


def garbage_records(tree: Tree) -> None:
    (tree.options.records_path / "data.mdb").write_bytes(tree.rng.randbytes(300_000))


@pytest.mark.parametrize("loss", [drop_records, drop_superblock_too, garbage_records])
async def test_rebuild_recovers_every_block(tree: Tree, loss: Callable[[Tree], None]) -> None:
    """Renamed, rewritten, nested, of many chunks, and small ones; what was removed stays away."""
    loss(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert report.files == len(tree.files)
    assert report.nameless == 1, "the file that fills its slot of 4 KiB"
    assert await tree.read() == tree.files
    checked = await tree.check()
    assert checked.clean, [problem.text for problem in checked.problems]
    assert not checked.notes
    await can_be_used(tree)


async def test_rebuild_keeps_the_old_records(tree: Tree) -> None:
    report = await rebuild(tree.options)
    assert Path(report.records_kept, "data.mdb").exists()
    assert await tree.read() == tree.files


async def test_rebuild_twice_is_the_same(tree: Tree) -> None:
    await rebuild(tree.options)
    await can_be_used(tree)
    report = await rebuild(tree.options)
    found = await tree.read()
    found.pop(b"fresh/after")
    assert not report.dropped
    assert found == tree.files


async def test_rebuild_keeps_mode_owner_and_time(tree: Tree) -> None:
    async with tree.volume() as volume:
        node = await volume.lookup(*await tree.place(volume, b"small"))
        changes = Changes(mode=0o604, uid=12, gid=34, mtime=1_600_000_000_123_456_789)
        await volume.set_attributes(node.ino, changes, CALLER)
    drop_records(tree)
    await rebuild(tree.options)
    async with tree.volume() as volume:
        node = await volume.lookup(*await tree.place(volume, b"small"))
        assert (stat.S_IMODE(node.mode), node.uid, node.gid) == (0o604, 12, 34)
        assert node.size == 4000


async def test_rebuild_after_growth_cuts_and_changes_in_place(tree: Tree) -> None:
    """Files that changed after their first commit: appended to, shortened, overwritten."""
    async with tree.volume() as volume:
        for path, offset, data in [
            (b"a/mid", 70_000, b"+" * 10_000),
            (b"a/b/granules", 100_000, b"=" * 50_000),
            (b"a/b/chunks", 3 * CHUNK + 7, b"#" * CHUNK),
            (b"page", 10, b"!" * 10),
        ]:
            node = await volume.lookup(*await tree.place(volume, path))
            handle = await volume.open(node.ino, os.O_RDWR, CALLER)
            await volume.write(handle, offset, data)
            await volume.release(handle)
            before = tree.files[path]
            tree.files[path] = before[:offset] + data + before[offset + len(data) :]
        node = await volume.lookup(*await tree.place(volume, b"a/b/c/far"))
        await volume.set_attributes(node.ino, Changes(size=2 * CHUNK + 5), CALLER)
        tree.files[b"a/b/c/far"] = tree.files[b"a/b/c/far"][: 2 * CHUNK + 5]
    assert await tree.read() == tree.files
    drop_records(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert await tree.read() == tree.files


async def test_rebuild_of_directories_that_were_renamed(tree: Tree) -> None:
    """A description holds a path: files below a renamed directory come back with their bytes, wherever."""
    async with tree.volume() as volume:
        await volume.rename(*await tree.place(volume, b"a"), *await tree.place(volume, b"z"), 0)
    drop_records(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert sorted((await tree.read()).values()) == sorted(tree.files.values())


@pytest.mark.parametrize("path", [b"small", b"a/b/granules", b"a/b/c/far"])
async def test_rebuild_drops_damaged_blocks(tree: Tree, path: bytes) -> None:
    """Wrong bytes do not come back; the report names the file, all others are there."""
    await flip(tree, path, len(tree.files[path]) // 2)
    drop_records(tree)
    report = await rebuild(tree.options)
    assert len(report.dropped) == 1
    assert path.decode() in report.dropped[0]
    expected = {name: data for name, data in tree.files.items() if name != path}
    assert await tree.read() == expected
    assert (await tree.check()).clean


async def test_rebuild_drops_damaged_headers(tree: Tree, rng: random.Random) -> None:
    """A head table with flipped bits: what comes back is right, and the rest is absent."""
    segment = tree.options.segments_path / "00000000.seg"
    geometry = format.read_superblock(tree.options.volume_path).geometry
    with open(segment, "r+b") as file:
        for _ in range(40):
            _, start = geometry.locate_head(0)
            place = start + rng.randrange(geometry.head_size)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    drop_records(tree)
    await rebuild(tree.options)
    found = await tree.read()
    for path, data in found.items():
        if not path.startswith(b"lost+found/"):
            assert tree.files[path] == data, path
    assert (await tree.check()).clean


async def test_rebuild_without_any_copy_of_the_superblock(tree: Tree) -> None:
    shutil.rmtree(tree.options.records_path)
    (tree.options.volume_path / "superblock").unlink()
    for segment in tree.options.segments_path.iterdir():
        with segment.open("r+b") as file:
            file.write(bytes(4096))
    with pytest.raises(VolumeError, match="no segment has a copy"):
        await rebuild(tree.options)


async def test_blocks_of_a_killed_daemon_do_not_mix_with_later_ones(tree: Tree) -> None:
    """What was written but never committed does not take the place of what was committed afterwards."""
    folder = tree.options.volume_path
    copy = folder.with_name("copy")
    async with tree.volume() as volume:  # bytes and headers are written, the commit never comes
        await tree.write(volume, b"uncommitted", tree.rng.randbytes(5000))
        node = await volume.lookup(ROOT_INODE, b"uncommitted")
        await volume.flusher.flush([volume.core.nodes.get(node.ino)])
        shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)
    data = tree.files.pop(b"uncommitted")
    async with tree.volume() as volume:
        await tree.write(volume, b"committed", tree.rng.randbytes(150_000))
    drop_records(tree)
    await rebuild(tree.options)
    found = await tree.read()
    assert found.pop(b"uncommitted", data) == data
    assert found == tree.files


async def test_removed_before_its_commit_stays_removed(tree: Tree) -> None:
    """A file that reached its slots and was removed before any commit is not recovered."""
    async with tree.volume() as volume:
        await tree.write(volume, b"short-lived", tree.rng.randbytes(5000))
        node = await volume.lookup(ROOT_INODE, b"short-lived")
        await volume.flusher.flush([volume.core.nodes.get(node.ino)])
        await volume.unlink(ROOT_INODE, b"short-lived")
        tree.files.pop(b"short-lived")
    drop_records(tree)
    await rebuild(tree.options)
    assert await tree.read() == tree.files
