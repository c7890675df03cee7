"""Records that were changed below the volume: never believed, named, mended; older volumes have no checksums."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
from fsck_damage import entry_of, inline
from fsck_tree import Records, Tree, can_be_used
from mounting import KVFUSE, KvfuseMount
from places import GOLDEN
from volume_lab import CALLER

from kvfuse.errors import Corrupt, NotFound, VolumeError
from kvfuse.options.options import Options, VolumeOptions
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.slab import layout
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import DamagedRecords, ScanPages, SealedRecords, all_keys, describe, seal


async def stored(options: Options) -> Records:
    """All records as the engine has them, checksums and all."""
    async with engines.open_records(options) as records:
        return {row.key: row.value for row in await records.scan(b"", limit=100_000)}


async def overwrite(options: Options, puts: Records) -> None:
    """Below the volume, so without a checksum that fits."""
    async with engines.open_records(options) as records:
        await records.commit(puts, durable=True)


def flipped(value: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(value)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


# -- the decorator -----------------------------------------------------------------------------------


async def test_values_come_back_and_carry_a_checksum(tmp_path: Path) -> None:
    inner = LmdbRecords.open(tmp_path / "records")
    records = SealedRecords(inner)
    values = {b"d-key": b"value", b"empty": b"", schema.SUPERBLOCK: b"plain", schema.member_key(7): b"plain"}
    watch = records.watch(b"d")
    assert await records.commit(values)
    rows = await records.get([*values, b"absent"])
    assert [row and row.value for row in rows] == [*values.values(), None]
    assert {row.key: row.value for row in await records.scan(b"")} == values
    assert (await anext(watch)).value == b"value"
    kept = {row.key: row.value for row in await inner.scan(b"")}
    assert kept == seal(values)
    assert [len(kept[key]) - len(values[key]) for key in values] == [4, 4, 0, 0]
    await records.aclose()


async def test_every_flipped_bit_and_every_moved_value_is_found(tmp_path: Path, rng: random.Random) -> None:
    inner = LmdbRecords.open(tmp_path / "records")
    records = SealedRecords(inner)
    await records.commit({b"a": b"first", b"b": b"other", b"c": b"third"})
    sound = {row.key: row.value for row in await inner.scan(b"")}
    bad = [bytes([*sound[b"b"]][:cut]) for cut in range(len(sound[b"b"]))] + [sound[b"a"]]
    for bit in range(8 * len(sound[b"b"])):
        value = bytearray(sound[b"b"])
        value[bit >> 3] ^= 1 << (bit & 7)
        bad.append(bytes(value))
    for value in bad:
        await inner.commit({b"b": value})
        with pytest.raises(DamagedRecords) as error:
            await records.get([b"a", b"b", b"absent"])
        assert [row and row.value for row in error.value.rows] == [b"first", None, None]
        with pytest.raises(DamagedRecords) as error:
            await records.scan(b"")
        assert (list(error.value.versions), [row.key for row in error.value.records]) == ([b"b"], [b"a", b"c"])
    pages = [page async for page in ScanPages(records, b"", 1)]
    assert [([row.key for row in rows], damaged) for rows, damaged in pages] == [
        ([b"a"], []),
        ([], [b"b"]),
        ([b"c"], []),
    ]
    assert sorted(await all_keys(records, b"")) == [b"a", b"b", b"c"]
    await records.aclose()


async def test_a_watch_ends_at_a_damaged_change(tmp_path: Path) -> None:
    inner = LmdbRecords.open(tmp_path / "records")
    watch = SealedRecords(inner).watch(b"")
    await inner.commit({b"key": b"without a checksum"})
    with pytest.raises(DamagedRecords, match="b'key'"):
        await anext(watch)
    await inner.aclose()


def test_records_have_names_for_people() -> None:
    assert describe(schema.entry_key(1, b"x")) == "the name b'x' in directory 1"
    assert describe(schema.chunk_key(9, 12)) == "chunk 12 of inode 9"
    assert describe(schema.slab_key(3)) == "slab 3"
    assert describe(schema.COUNTER_FILES) == "the counter 'files'"
    assert describe(b"s") == "key b's'"


# -- a volume ----------------------------------------------------------------------------------------


async def damage_file(tree: Tree, change: Callable[[schema.InodeRecord], dict[str, object]]) -> None:
    """What an attacker with an editor for data.mdb does to the record of the file "small"."""
    async with tree.records() as records:
        sound = {row.key: row.value for row in await records.scan(b"d")}
    entry = inline(sound, b"small")
    changed = schema.encode_entry_inline(msgspec.structs.replace(entry, **change(entry)))
    raw = await stored(tree.options)
    key = entry_of(sound, b"small")
    await overwrite(tree.options, {key: changed + raw[key][-4:]})


CHANGES: dict[str, Callable[[schema.InodeRecord], dict[str, object]]] = {
    "owner": lambda entry: {"uid": 4711},
    "mode": lambda entry: {"mode": stat.S_IFREG | 0o777},
    "size": lambda entry: {"size": 100},
    "extents": lambda entry: {"chunks": ((msgspec.structs.replace(entry.chunks[0][0], addr=1 << 20),),)},
}


@pytest.mark.parametrize("what", CHANGES)
async def test_a_changed_record_is_an_error_of_its_file_alone(tree: Tree, what: str) -> None:
    await damage_file(tree, CHANGES[what])
    async with tree.volume() as volume:
        with pytest.raises(Corrupt, match=r"the name b'small' in directory 1 does not match"):
            await volume.tree.lookup(ROOT_INODE, b"small")
        with pytest.raises(NotFound):
            await volume.tree.lookup(ROOT_INODE, b"absent")
        await tree.write(volume, b"beside", b"can be made beside it")
    found = await tree.read()
    assert found == {path: data for path, data in tree.files.items() if path != b"small"}
    report = await tree.check(verify=False)
    assert "the record of the name b'small' in directory 1 does not match its checksum" in report.problems[0].text
    assert (await tree.check(repair=True)).clean
    tree.files.pop(b"small")
    assert await tree.read() == tree.files
    await can_be_used(tree)


async def damaged_key(tree: Tree, kind: bytes) -> bytes:
    raw = await stored(tree.options)
    keys = sorted(key for key in raw if key.startswith(kind) and key != schema.USAGE)  # which would be counted anew
    return tree.rng.choice(keys)


@pytest.mark.parametrize("kind", [b"s", b"n", schema.inode_key(ROOT_INODE)], ids=["slab", "counter", "root"])
async def test_what_a_mount_needs_is_refused_with_its_name_and_mended(tree: Tree, kind: bytes) -> None:
    key = await damaged_key(tree, kind)
    raw = await stored(tree.options)
    await overwrite(tree.options, {key: flipped(raw[key], tree.rng)})
    with pytest.raises(VolumeError, match=r"record store is damaged: the record of .* does not match its checksum"):
        async with tree.volume():
            pass
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    assert await tree.read() == tree.files, "nothing is lost"
    await can_be_used(tree)


@pytest.mark.parametrize("round_number", range(8))
async def test_random_damage_of_records(tree: Tree, rng: random.Random, round_number: int) -> None:
    """Whatever is damaged: no error but Corrupt, no wrong byte, no wrong attribute; the check names every record."""
    raw = await stored(tree.options)
    attributes = await listed(tree)
    keys = rng.sample(sorted(key for key in raw if key[:1] in b"diotcx"), rng.randint(1, 5))
    await overwrite(tree.options, {key: flipped(raw[key], rng) for key in keys})
    for path, found in (await listed(tree)).items():
        assert found == attributes[path], path
    report = await tree.check(verify=False)
    texts = "\n".join(problem.text for problem in report.problems)
    for key in keys:
        assert f"the record of {describe(key)} does not match its checksum" in texts
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    found_files = await tree.read()
    assert all(tree.files[path] == data for path, data in found_files.items() if path in tree.files)
    await can_be_used(tree)


async def listed(tree: Tree) -> dict[bytes, tuple[int, ...]]:
    """What can be read of the attributes and bytes of all that can be listed."""
    found: dict[bytes, tuple[int, ...]] = {}

    async def walk(folder: int, above: bytes) -> None:
        try:
            entries = await volume.tree.list_directory(folder, 0, 1000)
        except Corrupt:
            return
        for entry in entries:
            try:
                node = await volume.tree.lookup(folder, entry.name)
            except Corrupt:
                continue
            path = above + entry.name
            found[path] = (node.ino, node.mode, node.uid, node.gid, node.size, node.nlink, node.mtime)
            if stat.S_ISDIR(node.mode):
                await walk(node.ino, path + b"/")

    with suppress(VolumeError):  # without its root directory a volume is not mounted
        async with tree.volume() as volume:
            await walk(ROOT_INODE, b"")
    return found


# -- through a mount ---------------------------------------------------------------------------------


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-sealed-"))
    mount = KvfuseMount(base, ("volume.capacity=64MiB", "volume.segment_size=16MiB"))
    try:
        yield mount
    finally:
        mount.remove()
        shutil.rmtree(base)


def test_a_changed_owner_in_the_store_is_eio_at_the_mount(mount: KvfuseMount) -> None:
    mount.mount()
    for name in ("victim", "neighbour"):
        (mount.point / name).write_bytes(name.encode() * 100)
    mount.unmount()
    options = Options(volume=VolumeOptions(path=mount.volume))
    raw = trio.run(stored, options)
    (key,) = [key for key in raw if key.endswith(b"victim")]
    entry = schema.decode_entry(raw[key][:-4])
    assert isinstance(entry, schema.InodeRecord)
    forged = schema.encode_entry_inline(msgspec.structs.replace(entry, uid=1000, mode=entry.mode | stat.S_ISUID))
    trio.run(overwrite, options, {key: forged + raw[key][-4:]})

    mount.mount()
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(mount.point / "victim")
    assert os.listdir(mount.point) == ["neighbour"]
    assert (mount.point / "neighbour").read_bytes() == b"neighbour" * 100
    mount.check_unexpected_errors()
    log = mount.log.read_text()
    assert "the record of the name b'victim' in directory 1 does not match its checksum" in log
    assert "Traceback" not in log
    mount.unmount()
    check = subprocess.run([*KVFUSE, "fsck", str(mount.volume)], capture_output=True, text=True, check=False)
    assert check.returncode == 1
    assert "the record of the name b'victim' in directory 1 does not match its checksum" in check.stdout
    subprocess.run([*KVFUSE, "fsck", "--repair", str(mount.volume)], check=True, stdout=subprocess.DEVNULL)
    mount.mount()
    assert os.listdir(mount.point) == ["neighbour"]
    mount.unmount()
    mount.fsck()


# -- older volumes -----------------------------------------------------------------------------------


async def test_a_volume_without_the_flag_is_read_and_written_as_before(tree: Tree) -> None:
    """Its records have no checksums, and get none."""
    raw = await stored(tree.options)
    path = tree.options.volume_path
    superblock = formatting.read_superblock(path)
    assert superblock.features == layout.NEW_FEATURES
    async with tree.records() as records:
        plain = {row.key: row.value for row in await records.scan(b"", limit=100_000)}
    assert seal(plain).items() <= raw.items()
    await overwrite(tree.options, plain)
    formatting.write_superblock(path, replace(superblock, features=0))
    assert await tree.read() == tree.files
    async with tree.volume() as volume:
        await tree.write(volume, b"fresh", b"bytes")
    assert await tree.read() == tree.files
    after = await stored(tree.options)
    assert schema.decode_entry(after[entry_of(after, b"fresh")])
    assert (await tree.check()).clean


async def test_a_volume_of_the_program_before_there_were_checksums(tmp_path: Path) -> None:
    """Made by that program; it refuses volumes with the flag by itself, as it does with every flag."""
    with tarfile.open(GOLDEN / "plain_volume_v1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    options = Options(volume=VolumeOptions(path=tmp_path / "volume"))
    before = await stored(options)
    assert formatting.read_superblock(tmp_path / "volume").features == 0
    report = await fsck(options, verify=True)
    assert (report.clean, report.files, report.directories) == (True, 2, 2)
    async with open_volume(options) as volume:
        folder = await volume.tree.lookup(ROOT_INODE, b"folder")
        large = await volume.tree.lookup(folder.ino, b"large")
        handle = await volume.files.open(large.ino, os.O_RDONLY, CALLER)
        assert bytes(await volume.files.read(handle, 0, 400_000)) == b"0123456789abcdef" * 20_000
        await volume.files.release(handle)
        small = await volume.tree.lookup(ROOT_INODE, b"small")
        assert await volume.inodes.get_xattr(small.ino, b"user.color") == b"red"
        await volume.tree.rename(ROOT_INODE, b"small", folder.ino, b"moved", 0)
    after = await stored(options)
    moved = schema.decode_entry(after[schema.entry_key(folder.ino, b"moved")])
    assert isinstance(moved, schema.InodeRecord)
    assert moved.ino == small.ino
    assert after.keys() ^ before.keys() == {
        schema.entry_key(ROOT_INODE, b"small"),
        schema.entry_key(folder.ino, b"moved"),
        schema.USAGE,
    }
    assert (await fsck(options, verify=True)).clean
