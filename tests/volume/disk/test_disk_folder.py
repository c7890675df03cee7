"""The folder of a disk tier: whose it may be, what it costs, and that nothing else in it is touched."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfuse.errors import VolumeBusy, VolumeError
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.slab.layout import Superblock, pack_superblock
from kvfuse.volume.disk.folder import TIER_FILE, Folder, opened_folder

MIB = 1 << 20
SIZE = 20 * MIB
VOLUME, OTHER_VOLUME = b"v" * 16, b"w" * 16


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def refusal(path: Path, size: int = SIZE, volume_id: bytes = VOLUME) -> str:
    """Why the folder is not opened; nothing in it has changed."""
    before = content(path) if path.is_dir() else {}
    with pytest.raises(VolumeError) as raised:
        async with opened_folder(path, size, volume_id):
            pass
    assert (content(path) if path.is_dir() else {}) == before
    return str(raised.value)


async def marked(folder: Folder) -> bool:
    """The first slab has the bytes that `mark` put there."""
    buffer = bytearray(4)
    await folder.segments.read([Transfer(*folder.geometry.locate(0), buffer)])
    return buffer == b"mark"


async def mark(folder: Folder) -> None:
    await folder.segments.write([Transfer(*folder.geometry.locate(0), b"mark")])


async def test_all_of_its_size_is_taken_at_once_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tier"
    async with opened_folder(path, SIZE, VOLUME) as folder:
        assert folder.is_new
        files = [file.stat() for file in path.iterdir()]
        assert sum(file.st_size for file in files) <= SIZE
        assert folder.geometry.size <= sum(512 * file.st_blocks for file in files) <= SIZE
        assert path.stat().st_mode & 0o077 == 0


async def test_it_is_found_again(tmp_path: Path) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
        await mark(folder)
    async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
        assert not folder.is_new
        assert await marked(folder)


@pytest.mark.parametrize("size", [SIZE // 2 + 7 * MIB, 3 * SIZE])
async def test_with_another_size_it_is_made_anew(tmp_path: Path, size: int) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
        await mark(folder)
    async with opened_folder(tmp_path, size, VOLUME) as folder:
        assert folder.is_new
        assert not await marked(folder)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= size


async def test_it_is_one_daemons(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME):
        with pytest.raises(VolumeBusy, match="in use by another daemon"):
            async with opened_folder(tmp_path, SIZE, VOLUME):
                pass


async def test_who_still_flushes_is_waited_for(tmp_path: Path) -> None:
    leaves = trio.Event()

    async def hold(task_status: trio.TaskStatus[None]) -> None:
        async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
            await mark(folder)
            task_status.started()
            await leaves.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(hold)
        nursery.start_soon(leave_when_all_wait, leaves)
        async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
            assert leaves.is_set()
            assert await marked(folder)


async def leave_when_all_wait(leaves: trio.Event) -> None:
    await trio.testing.wait_all_tasks_blocked()
    leaves.set()


async def test_another_volumes_is_refused(tmp_path: Path) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME):
        pass
    assert f"has copies of volume {VOLUME.hex()}" in await refusal(tmp_path, volume_id=OTHER_VOLUME)


async def test_a_newer_format_and_a_damaged_one_are_refused(tmp_path: Path, rng: random.Random) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME):
        pass
    tier = tmp_path / TIER_FILE
    image = bytearray(tier.read_bytes())
    image[rng.randrange(len(image))] ^= 1
    tier.write_bytes(image)
    assert "superblock" in await refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "00000000.seg", "superblock"])
async def test_a_folder_with_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    assert f"holds {name!r}, which is not a disk tier's" in await refusal(tmp_path)


async def test_the_segments_of_a_volume_are_refused(tmp_path: Path) -> None:
    async with opened_folder(tmp_path / "tier", SIZE, VOLUME) as folder:
        superblock = pack_superblock_of(folder)
    segments = FileSegments.open(tmp_path / "segments")
    await segments.create(0, MIB)
    await segments.write([Transfer(0, 0, superblock)])
    await segments.aclose()
    assert "not a disk tier's" in await refusal(tmp_path / "segments")


def pack_superblock_of(folder: Folder) -> bytes:
    return pack_superblock(Superblock(folder.volume_id, folder.geometry, 1, 0))


async def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"precious")
    assert "is no folder" in await refusal(path)
    assert path.read_bytes() == b"precious"


async def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    figures = os.statvfs(tmp_path)
    size = figures.f_bavail * figures.f_frsize + (1 << 30)
    async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
        await mark(folder)
    assert "make it smaller" in await refusal(tmp_path, size=size)
    async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
        assert await marked(folder)


async def test_a_crash_while_it_is_made_leaves_nothing_that_is_in_the_way(tmp_path: Path) -> None:
    async with opened_folder(tmp_path, SIZE, VOLUME):
        pass
    for name in ("00000000.seg", TIER_FILE):  # before the segments were there, and before anything was
        (tmp_path / name).unlink() if name.endswith("seg") else (tmp_path / name).write_bytes(b"")
        async with opened_folder(tmp_path, SIZE, VOLUME) as folder:
            assert not await marked(folder)
