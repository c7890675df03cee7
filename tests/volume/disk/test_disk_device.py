"""A block device as a disk tier: whose it may be, that nothing else on it is touched, and what its copies are for."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio.testing
from disk_lab import engine_reads, filled, tier_of, tier_options, with_tier
from loop_lab import loop_device, resize
from shared_lab import put, read
from volume_lab import MIB, Disk

from kvfuse.errors import ConfigError, VolumeBusy, VolumeError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.layout import PAGE_SIZE, Superblock, pack_superblock
from kvfuse.volume.disk import folder as folder_module
from kvfuse.volume.disk.disk_tier import examined_place, opened_tier
from kvfuse.volume.disk.folder import Folder
from kvfuse.volume.disk.tier_device import opened_device

SIZE = 40 * MIB
VOLUME, OTHER_VOLUME = b"v" * 16, b"w" * 16


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return tmp_path / "image"


@pytest.fixture
def device(image: Path) -> Iterator[Path]:
    with loop_device(image, SIZE) as made:
        yield made


async def refusal(device: Path, size: int | None = None, volume_id: bytes = VOLUME) -> str:
    """Why the device is not opened; nothing on it has changed."""
    before = device.read_bytes()
    with pytest.raises(VolumeError) as raised:
        async with opened_device(device, size, volume_id):
            pass
    assert device.read_bytes() == before
    return str(raised.value)


def run(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


async def marked(folder: Folder) -> bool:
    """The last slab has the bytes that `mark` put there."""
    buffer = bytearray(4)
    await folder.segments.read([Transfer(*folder.geometry.locate(last_slab(folder)), buffer)])
    return buffer == b"mark"


async def mark(folder: Folder) -> None:
    await folder.segments.write([Transfer(*folder.geometry.locate(last_slab(folder)), b"mark")])


def last_slab(folder: Folder) -> int:
    return folder.geometry.data_size - folder.geometry.slab_size


async def test_all_of_it_is_used_and_found_again(device: Path) -> None:
    async with opened_device(device, None, VOLUME) as folder:
        assert folder.is_new
        assert folder.geometry.size > 0.9 * SIZE
        await mark(folder)
    async with opened_device(device, None, VOLUME) as folder:
        assert not folder.is_new
        assert await marked(folder)


async def test_no_more_than_the_size_is_used(device: Path, image: Path) -> None:
    size = SIZE // 2
    async with opened_device(device, size, VOLUME) as folder:
        assert folder.geometry.size < size
        for slab in range(folder.geometry.slab_count):
            place = folder.geometry.locate(slab * folder.geometry.slab_size)
            await folder.segments.write([Transfer(*place, b"\xff" * folder.geometry.slab_size)])
        await folder.segments.sync()
    assert not any(image.read_bytes()[size:])


@pytest.mark.parametrize("size", [SIZE // 2, SIZE - 5 * MIB])
async def test_with_another_size_its_copies_are_dropped(device: Path, size: int) -> None:
    """Heads of before are no more, although the bytes of the device are as they were."""
    async with opened_device(device, None, VOLUME) as folder:
        await folder.segments.write([Transfer(*folder.geometry.locate_head(0), b"head" * 1000)])
    async with opened_device(device, size, VOLUME) as folder:
        assert folder.is_new
        table = bytearray(b"\xff" * folder.geometry.head_size)
        for slab in range(folder.geometry.slab_count):
            await folder.segments.read([Transfer(*folder.geometry.locate_head(slab), table)])
            assert not any(table)


async def test_a_crash_while_it_is_made_leaves_nothing_that_is_in_the_way(device: Path) -> None:
    async with opened_device(device, None, VOLUME) as folder:
        await mark(folder)
    with device.open("r+b") as file:  # as before the segment was made
        file.seek(MIB)
        file.write(bytes(PAGE_SIZE))
    async with opened_device(device, None, VOLUME) as folder:
        table = bytearray(folder.geometry.head_size)
        await folder.segments.read([Transfer(*folder.geometry.locate_head(0), table)])
        assert not any(table)


async def test_a_larger_size_and_too_small_a_device_are_refused(device: Path, tmp_path: Path) -> None:
    assert "has 40MiB: make it smaller" in await refusal(device, SIZE + 1)
    with loop_device(tmp_path / "small", 4 * MIB) as small:
        assert "the minimum is" in await refusal(small)


async def test_another_volumes_is_refused(device: Path) -> None:
    async with opened_device(device, None, VOLUME):
        pass
    assert f"has copies of volume {VOLUME.hex()}" in await refusal(device, volume_id=OTHER_VOLUME)


@pytest.mark.parametrize(("command", "found"), [("mkfs.ext4 -q", "ext4"), ("mkswap", "swap")])
async def test_what_belongs_to_others_is_refused_and_named(device: Path, command: str, found: str) -> None:
    run(f"{command} {device}")
    why = await refusal(device)
    assert f"holds {found}" in why
    assert f"wipefs --all {device} && dd if=/dev/zero of={device} bs=1M count=1" in why
    run(why.partition("for good: ")[2])
    async with opened_device(device, None, VOLUME) as folder:
        assert folder.is_new


async def test_data_of_unknown_kind_is_refused(
    device: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the end, where nothing tells what is there."""

    def put_byte(offset: int, value: int) -> None:
        with device.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([value]))

    offset = rng.randrange(MIB)
    put_byte(offset, 1)
    assert "holds data of a kind that is not known" in await refusal(device)
    put_byte(offset, 0)
    put_byte(SIZE - 1 - rng.randrange(MIB), 1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda *_, **__: None)
        assert "holds data of a kind that is not known" in await refusal(device)
    async with opened_device(device, None, VOLUME) as folder:
        assert folder.is_new


async def test_a_damaged_superblock_and_a_volumes_are_refused(device: Path, rng: random.Random) -> None:
    async with opened_device(device, None, VOLUME) as folder:
        geometry = folder.geometry
    with device.open("r+b") as file:
        image = bytearray(file.read(PAGE_SIZE))
        image[rng.randrange(8, PAGE_SIZE)] ^= 1
        file.seek(0)
        file.write(image)
    assert "a disk tier that cannot be used: the superblock is damaged" in await refusal(device)
    with device.open("r+b") as file:
        file.write(pack_superblock(Superblock(VOLUME, geometry, 1, segment=0)))
    assert "holds a part of a volume" in await refusal(device)


async def test_it_is_one_daemons(device: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with opened_device(device, None, VOLUME):
        with pytest.raises(VolumeBusy, match="in use by another daemon, or mounted"):
            async with opened_device(device, None, VOLUME):
                pass


async def test_a_mounted_one_is_refused(device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"mkfs.ext4 -q {device}")
    point = tmp_path / "mounted"
    point.mkdir()
    run(f"mount {device} {point}")
    monkeypatch.setattr(folder_module, "LOCK_WAIT", 0.1)
    try:
        with pytest.raises(VolumeBusy, match="or mounted"):
            async with opened_device(device, None, VOLUME):
                pass
    finally:
        run(f"umount {point}")


async def test_an_absent_device_is_not_made_a_folder() -> None:
    path = Path("/dev/kvfuse-no-such-device")
    options = tier_options(path, SIZE).cache
    with pytest.raises(VolumeError, match="cannot be used: No such file or directory"):
        async with opened_tier(options, VOLUME):
            pass
    assert not path.exists()


async def test_a_folder_needs_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_size is not set"):
        async with opened_tier(tier_options(tmp_path / "tier", None).cache, VOLUME):
            pass


async def test_a_second_read_asks_no_engine_also_after_a_restart(device: Path, rng: random.Random) -> None:
    options = tier_options(device, None)
    disk, data = Disk.format(options, shared=True), rng.randbytes(3 * MIB)
    async with with_tier(disk, options) as volume:
        await put(volume, b"block", data)
        assert await read(volume, b"block") == data
        await filled(volume)
    async with with_tier(disk, options) as volume:
        before = engine_reads(volume)
        assert await read(volume, b"block") == data
        assert engine_reads(volume) == before
        assert tier_of(volume).statistics()["hits"] > 0


async def test_a_device_that_vanishes_turns_the_tier_off(
    device: Path, image: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    options = tier_options(device, None)
    disk, data = Disk.format(options, shared=True), rng.randbytes(3 * MIB)
    async with with_tier(disk, options) as volume:
        await put(volume, b"block", data)
        assert await read(volume, b"block") == data
        await filled(volume)
        resize(device, image, 0)
        for _ in range(3):
            assert await read(volume, b"block") == data
        found = tier_of(volume).statistics()
        assert (found["is_on"], found["copies"]) == (0, 0)
        assert found["errors"] >= 1  # all that were under way
    lines = [record.message for record in caplog.records if "the disk tier is off" in record.message]
    assert len(lines) == 1


async def test_it_can_be_examined_before_a_mount(device: Path) -> None:
    options = tier_options(device, None).cache
    assert examined_place(options) == f"{device}, 40MiB, empty"
    async with opened_device(device, None, VOLUME):
        with pytest.raises(OSError, match="busy"):
            examined_place(options)
    assert examined_place(options).endswith(f"copies of volume {VOLUME.hex()}")
    run(f"mkfs.ext4 -q -F {device}")
    with pytest.raises(VolumeError, match="holds ext4"):
        examined_place(options)
