"""What becomes of bytes that were kept, and cannot be had any more: whoever wrote them hears so, and nothing leaks."""

from __future__ import annotations

import errno
import os
from typing import Any, NoReturn

import inside
import pyfuse3
import pytest
import trio
from handover_lab import ROOT, WHO, Daemon, Mount
from volume_lab import MIB, lab_options

from kvfuse import failing
from kvfuse.kept import log as kept_log
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.names.restorer import FAILED, NAME, Restorer

pytestmark = pytest.mark.ring(1)

KIB = 1024


async def errors_of(daemon: Daemon, kind: str, *args: Any) -> int:
    """The errno; 0: none."""
    try:
        await daemon.ask(kind, *args)
    except pyfuse3.FUSEError as error:
        return int(error.errno)
    return 0


async def hears_of_losses(daemon: Daemon, fh: int) -> bool:
    """Whether the handle hears that bytes are lost; then it has heard."""
    number = await errors_of(daemon, "fsync", fh, False)
    assert number in (0, errno.EIO)
    assert not await errors_of(daemon, "fsync", fh, False)
    return number == errno.EIO


async def fill(daemon: Daemon) -> None:
    """Leave no slot free."""
    fh, ino = await daemon.create(b"large")
    position = 0
    for size in (MIB, 64 * KIB, 4 * KIB):
        while not await errors_of(daemon, "write", fh, position, os.urandom(size)):
            position += size
            assert not await errors_of(daemon, "fsync", fh, False)
    await daemon.ask("release", fh)
    await daemon.ask("forget", [(ino, 1)])


@pytest.mark.parametrize("size", [100 * KIB, MIB])
async def test_where_there_is_no_room_any_more_writers_hear_so(size: int, autojump_clock: trio.abc.Clock) -> None:
    """Of bytes that no slot had, and of those in slots that are taken by now."""
    mount = Mount(lab_options(capacity=8 * MIB, chunk=MIB))
    async with mount.daemon() as daemon:
        old, _ = await daemon.create(b"old")
        await daemon.ask("write", old, 0, b"stored")
        await daemon.volume.sync()
        await daemon.ask("write", old, 6, b"!" * size)
        new, _ = await daemon.create(b"new")
        await daemon.ask("write", new, 0, os.urandom(size))
        mount.kill()
    kept, mount.keeper = mount.keeper, MemoryKeeper()
    async with mount.daemon() as daemon:
        await fill(daemon)
    mount.keeper = kept
    async with mount.daemon() as daemon:
        assert await daemon.lookup(b"old")
        assert bytes(await daemon.ask("read", old, 0, 2 * MIB)) == b"stored"
        assert await hears_of_losses(daemon, old)
        assert not await daemon.lookup(b"new")
        assert await errors_of(daemon, "write", new, 0, b"x") == errno.EIO
        for fh in (old, new):
            await daemon.ask("release", fh)
    await mount.check()


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("damage", ["form", "tail", "frame"])
async def test_what_cannot_be_read_is_missed_unless_it_was_stored(
    damage: str, is_left: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"stored")
        await daemon.volume.sync()
        reader = await daemon.open(ino, os.O_RDONLY)
        await daemon.ask("write", fh, 6, b" and not stored")
        gone, _ = await daemon.create(b"gone")
        await daemon.ask("write", gone, 0, b"bytes")
        await daemon.ask("unlink", ROOT, b"gone", WHO)
        if is_left:
            daemon.volume.hand_over()
        else:
            mount.kill()
    kept = mount.keeper.take(NAME)
    assert kept is not None
    offset, data = {
        "form": (0, b"\xff"),
        "tail": (8 * kept_log.TAILS_AT, b"\xff" * 16),
        "frame": (kept_log.HEAD_SIZE, b"\xff" * 4),
    }[damage]
    os.pwrite(kept.descriptors[0], data, offset)
    for descriptor in kept.descriptors:
        os.close(descriptor)
    found = b"stored and not stored" if is_left else b"stored"
    for is_lost in (not is_left, False):
        async with mount.daemon() as daemon:
            assert await hears_of_losses(daemon, fh) == is_lost
            assert not await hears_of_losses(daemon, reader)
            assert bytes(await daemon.ask("read", fh, 0, 100)) == found
            assert await errors_of(daemon, "write", gone, 0, b"x") == errno.EIO
            mount.kill()
        await mount.check()


class Ended(BaseException):
    """The daemon's process has ended."""


@pytest.mark.parametrize("mistakes", [1, 2])
async def test_after_a_mistake_the_next_daemon_tries_again_once(
    mistakes: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    mount, restore = Mount(), Restorer.restore
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await daemon.volume.sync()
        await daemon.ask("write", fh, 0, b"not stored")
        mount.kill()
    left = mistakes

    async def fails(self: Restorer) -> set[int]:
        nonlocal left
        left -= 1
        if left < 0:
            return await restore(self)
        raise RuntimeError("a mistake")

    def end(_: BaseException) -> NoReturn:
        mount.kill()
        raise Ended

    monkeypatch.setattr(Restorer, "restore", fails)
    failing.end_by(end)
    try:
        for _ in range(mistakes):
            with pytest.RaisesGroup(Ended, flatten_subgroups=True):
                async with mount.daemon():
                    pytest.fail("it serves")
    finally:
        failing.end_by(None)
    async with mount.daemon() as daemon:
        is_lost = mistakes > 1
        assert await hears_of_losses(daemon, fh) == is_lost
        assert bytes(await daemon.ask("read", fh, 0, 100)) == (b"" if is_lost else b"not stored")
        assert not mount.keeper.list_names(FAILED)
    await mount.check()


async def test_bytes_that_the_log_lacks_are_missed(autojump_clock: trio.abc.Clock) -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await daemon.volume.sync()
        await daemon.ask("write", fh, 0, bytes(10_000))
        other, _ = await daemon.create(b"other")
        mount.kill()
    kept = mount.keeper.take(NAME)
    assert kept is not None
    os.ftruncate(kept.descriptors[1], 8192)
    for descriptor in kept.descriptors:
        os.close(descriptor)
    async with mount.daemon() as daemon:
        assert await hears_of_losses(daemon, fh)
        assert not await hears_of_losses(daemon, other)
        assert not await daemon.ask("read", fh, 0, 10)
        for one in (fh, other):
            await daemon.ask("release", one)
    await mount.check()


async def test_slots_of_files_that_nobody_has_are_free() -> None:
    """Of files without names whose handles are closed by the time."""
    mount = Mount(lab_options(capacity=16 * MIB, chunk=64 * KIB))
    async with mount.daemon() as daemon:
        before = inside.slabs(daemon.volume).used_bytes
        fh, _ = await daemon.create(b"file")
        for number in range(20):
            await daemon.ask("write", fh, number * 64 * KIB, os.urandom(64 * KIB))
        await inside.journal(daemon.volume).flusher.settled()
        await daemon.ask("unlink", ROOT, b"file", WHO)
        mount.kill()
    mount.keeper.drop("fuse/handles")
    async with mount.daemon() as daemon:
        assert inside.slabs(daemon.volume).used_bytes == before
    await mount.check()


@pytest.mark.parametrize("is_stored", [False, True])
async def test_attributes_of_files_without_names_are_kept(is_stored: bool) -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("setxattr", ino, b"user.stored", b"0", WHO)
        if is_stored:
            await daemon.volume.sync()
        await daemon.ask("setxattr", ino, b"user.before", b"1", WHO)
        await daemon.ask("setxattr", ino, b"user.gone", b"1", WHO)
        await daemon.ask("unlink", ROOT, b"file", WHO)
        await daemon.ask("setxattr", ino, b"user.after", b"2", WHO)
        await daemon.ask("removexattr", ino, b"user.gone", WHO)
        mount.kill()
    for _ in range(2):
        async with mount.daemon() as daemon:
            assert not await daemon.ask("read", fh, 0, 10)
            found = {name: await daemon.ask("getxattr", ino, name, WHO) for name in await listed(daemon, ino)}
            assert found == {b"user.stored": b"0", b"user.before": b"1", b"user.after": b"2"}
            mount.kill()
        await mount.check()
    async with mount.daemon() as daemon:
        await daemon.ask("release", fh)
        await daemon.ask("forget", [(ino, 1)])
        await daemon.volume.sync()
    await mount.check()
    assert not any(key.startswith(b"x") for key in mount.disk.records)


async def listed(daemon: Daemon, ino: int) -> list[bytes]:
    return [name for name in await daemon.ask("listxattr", ino, WHO) if name.startswith(b"user.")]
