"""Scrub reads everything again in the background: one pass finds what rotted, and traffic beside it finds no errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from fsck_tree import Tree
from mounting import KVFUSE, KvfuseMount, wait_until
from volume_lab import CALLER

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.options.options import Options, ScrubOptions, VolumeOptions
from kvfuse.slab import layout
from kvfuse.volume.api import Changes
from kvfuse.volume.check import scrub
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.volume import Volume

WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", "volume.chunk_size=1MiB")
RATE = ("scrub.rate=200MiB",)


class Cold:
    """A volume with some files, unmounted and out of the page cache."""

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.mount = KvfuseMount(base, WORDS)
        self.files = {f"file-{number}": rng.randbytes(size) for number, size in enumerate((3000, 70_000, 1_300_000))}
        self.mount.mount()
        for name, data in self.files.items():
            with (self.mount.point / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self.extents = {
            name: json.loads(os.getxattr(self.mount.point / name, "kvfuse.info"))["extents"] for name in self.files
        }
        self.mount.unmount()
        self.mount.words = WORDS + RATE

    def flip(self, segment: int, offset: int) -> None:
        with (self.mount.volume / "segments" / f"{segment:08x}.seg").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads((self.mount.point / ".kvfuse" / "stats").read_text())["scrub"]
        return stats

    def one_pass(self) -> dict[str, Any]:
        self.mount.mount()
        wait_until(lambda: self.stats()["passes"] >= 1, "a pass")
        return self.stats()


@pytest.fixture
def cold(rng: random.Random) -> Iterator[Cold]:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-scrub-"))
    lab = Cold(base, rng)
    try:
        yield lab
        lab.mount.check_unexpected_errors()
        lab.mount.unmount()
    finally:
        lab.mount.remove()
        shutil.rmtree(base)


def test_a_sound_volume_has_no_errors(cold: Cold) -> None:
    stats = cold.one_pass()
    assert (stats["errors"], stats["last_pass_errors"]) == (0, 0)
    assert stats["extents"] == sum(map(len, cold.extents.values()))
    assert stats["bytes"] == sum(map(len, cold.files.values())) + 64 * stats["extents"]
    assert stats["last_pass_time"] > 0
    shown = subprocess.run([*KVFUSE, "stats", cold.mount.point], capture_output=True, text=True, check=True).stdout
    assert "last_pass_errors" in shown


def test_one_pass_finds_a_flipped_bit_a_wrong_head_and_a_damaged_record(cold: Cold) -> None:
    """In blocks that nobody reads; each is logged once, with file, segment and offset."""
    row = cold.extents["file-2"][0]
    place = row["offset"] + min(row["length"], 300_000) - 1
    cold.flip(row["segment"], place)
    small = cold.extents["file-1"][0]
    geometry = formatting.read_superblock(cold.mount.volume).geometry
    slot_size = heads_of(cold, small)
    addr = next(
        slab * geometry.slab_size + start
        for slab in geometry.slabs_of(small["segment"])
        for start in range(0, geometry.slab_size, slot_size)
        if geometry.locate(slab * geometry.slab_size + start) == (small["segment"], small["offset"])
    )
    head = geometry.locate_header(addr, slot_size)
    cold.flip(head[0], head[1] + 20)
    trio.run(damage_record, cold, b"file-0")
    stats = cold.one_pass()
    assert (stats["errors"], stats["last_pass_errors"]) == (3, 3)
    lines = [line for line in cold.mount.log.read_text().splitlines() if "scrub: " in line]
    assert len(lines) == 3, lines
    granule = row["offset"] + (place - row["offset"]) // (256 << 10) * (256 << 10)
    for text in (
        f"the name b'file-2' in directory 1 (inode {inode_of(cold, 'file-2')}): its bytes in segment "
        f"{row['segment']} at {granule} do not match",
        f"the head of its slot in segment {head[0]} at {head[1]} is wrong (it is damaged)",
        "the record of the name b'file-0' in directory 1 does not match its checksum",
    ):
        assert any(text in line for line in lines), (text, lines)
    assert "Traceback" not in cold.mount.log.read_text()


def heads_of(cold: Cold, row: dict[str, int]) -> int:
    """The slot size of the extent, as the heads of its segment say."""
    geometry = formatting.read_superblock(cold.mount.volume).geometry
    image = (cold.mount.volume / "segments" / f"{row['segment']:08x}.seg").read_bytes()
    for slab in geometry.slabs_of(row["segment"]):
        _, start = geometry.locate_head(slab)
        rows, offsets = layout.find_headers(bytearray(image[start : start + geometry.head_size]), geometry)
        for found, offset in zip(rows, offsets.tolist(), strict=True):
            if geometry.locate(slab * geometry.slab_size + offset) == (row["segment"], row["offset"]):
                return int(found["slot_pages"]) * layout.PAGE_SIZE
    raise AssertionError("no head speaks for the slot")


def inode_of(cold: Cold, name: str) -> int:
    return (cold.mount.point / name).stat().st_ino


async def damage_record(cold: Cold, name: bytes) -> None:
    async with engines.open_records(Options(volume=VolumeOptions(path=cold.mount.volume))) as records:
        (row,) = [row for row in await records.scan(b"d") if row.key.endswith(name)]
        await records.commit({row.key: row.value[:-1] + bytes([row.value[-1] ^ 1])}, durable=True)


async def test_traffic_is_no_error(tree: Tree, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, cut, changed in place, renamed and removed while everything is read again and again."""
    monkeypatch.setattr(scrub, "PASS_SECONDS_MIN", 0.0)
    monkeypatch.setattr(scrub, "RECORD_COST", 1)
    tree.options = msgspec.structs.replace(tree.options, scrub=ScrubOptions(rate=1 << 40))
    async with tree.volume() as volume:
        statistics = volume.sections["scrub"]
        deadline = trio.current_time() + 2.0
        patience = deadline + 60.0
        while trio.current_time() < deadline or statistics()["passes"] <= 2:
            assert trio.current_time() < patience, "nothing was read"
            path = b"file-%d" % rng.randrange(8)
            action = rng.choice(["write", "cut", "change", "rename", "unlink"])
            folder, name = await tree.place(volume, path)
            if path not in tree.files or action == "write":
                await tree.write(volume, path, rng.randbytes(rng.randrange(1, 400_000)))
            elif action == "unlink":
                await volume.tree.unlink(folder, name)
                del tree.files[path]
            elif action == "rename":
                await volume.tree.rename(folder, name, folder, b"file-8", 0)
                tree.files[b"file-8"] = tree.files.pop(path)
            else:
                await change(tree, volume, path, rng, cut=action == "cut")
            if rng.random() < 0.2:
                await volume.sync()
        found = statistics()
        assert isinstance(found, dict)
        assert (found["errors"], found["last_pass_errors"]) == (0, 0), found
    assert await tree.read() == tree.files
    assert (await tree.check()).clean


async def change(tree: Tree, volume: Volume, path: bytes, rng: random.Random, *, cut: bool) -> None:
    node = await volume.tree.lookup(*await tree.place(volume, path))
    before = tree.files[path]
    if cut:
        size = rng.randrange(len(before) + 1)
        await volume.inodes.set_attributes(node.ino, Changes(size=size), CALLER)
        tree.files[path] = before[:size]
        return
    handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
    offset, data = rng.randrange(len(before) + 1), rng.randbytes(rng.randrange(1, 5000))
    await volume.files.write(handle, offset, data)
    await volume.files.flush(handle)
    await volume.files.release(handle)
    tree.files[path] = before[:offset] + data + before[offset + len(data) :]


async def test_the_rate_is_kept(tree: Tree) -> None:
    """It is no faster, to a granule or two."""
    rate = 2 << 20
    tree.options = msgspec.structs.replace(tree.options, scrub=ScrubOptions(rate=rate))
    async with tree.volume() as volume:
        began = trio.current_time()
        await trio.sleep(1.0)
        found = volume.sections["scrub"]()
        assert isinstance(found, dict)
        read = found["bytes"] + scrub.RECORD_COST * found["records"]
        assert 0 < read < rate * (trio.current_time() - began) + 2 * GRANULE_SIZE
        assert found["passes"] == 0
