"""Files that are open when a daemon is killed go on in the next one."""

from __future__ import annotations

import errno
import os
import stat
from types import SimpleNamespace
from typing import Any

import inside
import pyfuse3
import pytest
import trio
from handover_lab import ROOT, WHO, Daemon, Mount

from kvfuse.fs.handles import ROW_SIZE, HandleTable
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.kept.rows import COUNT_MIN
from kvfuse.volume.api import Caller
from kvfuse.volume.names import open_before

pytestmark = pytest.mark.ring(1)

SHARED = pytest.mark.parametrize("shared", [False, True])


async def stored(daemon: Daemon) -> None:
    await daemon.volume.sync()


async def freed(mount: Mount) -> None:
    """Return when there are no removed files. Those of shared volumes go a grace later."""
    for _ in range(600):
        if b"o" not in {key[:1] for key in mount.disk.records}:
            return
        await trio.sleep(1)
    raise AssertionError("a removed file is still there")


async def fails(number: int, daemon: Daemon, kind: str, *args: Any) -> None:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await daemon.ask(kind, *args)
    assert errno.errorcode[caught.value.errno] == errno.errorcode[number]
    assert daemon.operations.unexpected_error_count == 0


def size_fields(size: int) -> tuple[Any, Any]:
    fields = SimpleNamespace(
        update_mode=False, update_uid=False, update_gid=False, update_size=True,
        update_atime=False, update_mtime=False, update_ctime=False,
    )  # fmt: skip
    return SimpleNamespace(st_size=size), fields


@SHARED
async def test_open_files_are_read_and_written_on(shared: bool, autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(shared=shared)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        reader = await daemon.open(ino, os.O_RDONLY)
        await daemon.ask("write", fh, 0, b"before")
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.ask("read", reader, 0, 100) == b"before"
        assert await daemon.ask("write", fh, 6, b" and after") == 10
        assert await daemon.ask("read", reader, 0, 100) == b"before and after"
        node = inside.nodes(daemon.volume).get(ino)
        assert node is not None
        assert (node.handles, node.writers) == (2, 1)
        await daemon.ask("release", fh)
        await daemon.ask("release", reader)
        assert (node.handles, node.writers) == (0, 0)
        assert len(daemon.operations._open) == 0
    await mount.check()
    async with mount.daemon() as daemon:
        await fails(errno.EBADF, daemon, "read", reader, 0, 1)


@SHARED
async def test_files_count_as_open_before_anybody_asks_for_a_handle(
    shared: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount(shared=shared)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"bytes")
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        await daemon.ask("unlink", ROOT, b"file", WHO)
        await stored(daemon)
        assert await daemon.ask("read", fh, 0, 100) == b"bytes"
        assert b"o" in {key[:1] for key in mount.disk.records}
        await daemon.ask("release", fh)
        await daemon.ask("forget", [(ino, 1)])
        await stored(daemon)
        await freed(mount)
    await mount.check()


@SHARED
async def test_a_file_that_was_deleted_while_open_goes_with_its_last_handle(
    shared: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount(shared=shared)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"bytes")
        await stored(daemon)
        await daemon.ask("unlink", ROOT, b"file", WHO)
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.ask("read", fh, 0, 100) == b"bytes"
        mount.kill()  # once more
    async with mount.daemon() as daemon:
        assert (await daemon.ask("getattr", ino, WHO)).st_nlink == 0
        assert await daemon.ask("read", fh, 0, 100) == b"bytes"
        assert await daemon.ask("write", fh, 5, b" more") == 5
        assert await daemon.ask("read", fh, 0, 100) == b"bytes more"
        await daemon.ask("release", fh)
        await daemon.ask("forget", [(ino, 1)])
        await stored(daemon)
        await freed(mount)
        await fails(errno.ESTALE, daemon, "getattr", ino, WHO)
    await mount.check()


@SHARED
async def test_a_deleted_file_is_freed_when_its_handle_is_released_unused(
    shared: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount(shared=shared)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, bytes(100_000))
        await stored(daemon)
        await daemon.ask("unlink", ROOT, b"file", WHO)
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        await daemon.ask("release", fh)
        await daemon.ask("forget", [(ino, 1)])
        await stored(daemon)
        await freed(mount)
    await mount.check()


@SHARED
async def test_descriptors_of_a_file_that_was_never_stored_say_eio(
    shared: bool, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost, and nobody reads all names of the volume to find that. The inode alone is stale: who came to it by a
    path looks again."""
    monkeypatch.delattr(open_before, "search_names")
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        mount.kill()
    async with mount.daemon() as daemon:
        assert daemon.handover.still_open[ino].is_new
        for kind, *args in (("read", fh, 0, 1), ("write", fh, 0, b"x"), ("flush", fh), ("fsync", fh, False)):
            await fails(errno.EIO, daemon, str(kind), *args)
        await fails(errno.ESTALE, daemon, "getattr", ino, WHO)
        await fails(errno.ENOENT, daemon, "rename", ROOT, b"file", ROOT, b"other", 0, WHO)
        await daemon.ask("release", fh)
        assert len(daemon.operations._open) == 0
        assert not daemon.handover.still_open
    await mount.check()


@SHARED
async def test_a_file_that_was_stored_since_it_was_opened_is_searched_for(
    shared: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        _, ino = await daemon.create(b"file")
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        assert not daemon.handover.still_open[ino].is_new
    await mount.check()


@pytest.mark.parametrize("is_stored", [True, False])
@SHARED
async def test_a_file_that_was_renamed_while_open_is_found(
    shared: bool, is_stored: bool, autojump_clock: trio.abc.Clock
) -> None:
    """By its new name, or by the former one, if that is how it is still stored."""
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"bytes")
        await stored(daemon)
        folder = (await daemon.ask("mkdir", ROOT, b"folder", 0o755, WHO)).st_ino
        await stored(daemon)
        await daemon.ask("rename", ROOT, b"file", folder, b"n" * 255, 0, WHO)
        if is_stored:
            await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.ask("read", fh, 0, 100) == b"bytes"
        assert (await daemon.ask("getattr", ino, WHO)).st_ino == ino
        assert (await daemon.lookup(b"n" * 255, folder) == ino) is (is_stored or shared)
        await daemon.ask("release", fh)
    await mount.check()


@SHARED
async def test_bytes_that_were_not_stored_are_missed_once_by_each_writer(
    shared: bool, autojump_clock: trio.abc.Clock
) -> None:
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        first, ino = await daemon.create(b"file")
        await daemon.ask("write", first, 0, b"stored")
        await stored(daemon)
        second, reader = await daemon.open(ino), await daemon.open(ino, os.O_RDONLY)
        other, _ = await daemon.create(b"other")
        await daemon.ask("write", other, 0, b"stored, too")
        await stored(daemon)
        await daemon.ask("write", first, 6, b" and lost")
        mount.kill()
    async with mount.daemon() as daemon:
        assert daemon.handover.lost == {ino}
        assert await daemon.ask("read", reader, 0, 100) == b"stored"
        await daemon.ask("flush", reader)
        await fails(errno.EIO, daemon, "write", first, 15, b"x")
        mount.kill()
    async with mount.daemon() as daemon:
        await fails(errno.EIO, daemon, "fsync", second, False)
        await fails(errno.EIO, daemon, "fsync", first, False)
        assert await daemon.ask("write", first, 6, b" anew") == 5
        await daemon.ask("fsync", first, False)
        await daemon.ask("fsync", second, False)
        await daemon.ask("write", other, 0, b"S")
        assert await daemon.ask("read", reader, 0, 100) == b"stored anew"
        for fh in (first, second, reader, other):
            await daemon.ask("flush", fh)
            await daemon.ask("release", fh)
    await mount.check()


@SHARED
async def test_a_size_that_was_not_stored_is_missed(shared: bool, autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"stored")
        await stored(daemon)
        await daemon.ask("setattr", ino, *size_fields(2), fh, WHO)
        mount.kill()
    async with mount.daemon() as daemon:
        for _ in range(3):  # as by descriptors that a process has when it ends, which hears nothing
            await fails(errno.EIO, daemon, "flush", fh)
        await fails(errno.EIO, daemon, "fsync", fh, False)
        await daemon.ask("flush", fh)
        assert await daemon.ask("read", fh, 0, 100) == b"stored"
        await daemon.ask("release", fh)
    await mount.check()


async def test_a_caller_hears_of_lost_bytes_though_its_write_was_cut_in_two(autojump_clock: trio.abc.Clock) -> None:
    """The error of a later part of a write is no error for its caller, who is told that the first part was written."""
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        await daemon.ask("write", fh, 0, b"stored")
        await daemon.ask("fsync", fh, False)
        await daemon.ask("write", fh, 6, b"first part")
        mount.kill()
    async with mount.daemon() as daemon:
        await fails(errno.EIO, daemon, "write", fh, 16, b"second part")
        mount.kill()
    async with mount.daemon() as daemon:
        await fails(errno.EIO, daemon, "write", fh, 16, b"second part")
        assert await daemon.ask("write", fh, 16, b" anew") == 5
        mount.kill()
    async with mount.daemon() as daemon:  # which may be lost, too
        await fails(errno.EIO, daemon, "write", fh, 21, b"x")
        await fails(errno.EIO, daemon, "fsync", fh, False)
        assert await daemon.ask("write", fh, 21, b" anew") == 5
        await daemon.ask("fsync", fh, False)
        assert await daemon.ask("read", fh, 0, 100) == b"stored anew"
        await daemon.ask("flush", fh)
        await daemon.ask("release", fh)
    await mount.check()


async def test_an_fsync_says_what_was_lost_whatever_writes_said(autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await stored(daemon)
        await daemon.ask("write", fh, 0, b"lost")
        mount.kill()
    async with mount.daemon() as daemon:
        for _ in range(2):
            await fails(errno.EIO, daemon, "write", fh, 0, b"anew")
        assert await daemon.ask("write", fh, 0, b"anew") == 4
        mount.kill()
    async with mount.daemon() as daemon:
        for kind, *args in (("write", fh, 0, b"anew"), ("flush", fh), ("fsync", fh, False)):
            await fails(errno.EIO, daemon, kind, *args)
        assert await daemon.ask("write", fh, 0, b"anew") == 4
        await daemon.ask("fsync", fh, False)
        await daemon.ask("flush", fh)
        await daemon.ask("release", fh)
    await mount.check()


async def test_an_fsync_that_is_sent_again_says_once_more_what_was_lost(autojump_clock: trio.abc.Clock) -> None:
    """The daemon was killed when it had noted that its caller knows, and before that was so."""
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await stored(daemon)
        await daemon.ask("write", fh, 0, b"lost")
        mount.kill()
    async with mount.daemon() as daemon:
        await fails(errno.EIO, daemon, "fsync", fh, False)
        number = mount.unique
        mount.kill()
    async with mount.daemon() as daemon:
        with pytest.raises(pyfuse3.FUSEError):
            await daemon.ask("fsync", fh, False, again=number)
        await daemon.ask("fsync", fh, False)
        await daemon.ask("write", fh, 0, b"lost")
        mount.kill()
    async with mount.daemon() as daemon:
        await daemon.ask("flush", await daemon.open(await daemon.lookup(b"file")))
        await fails(errno.EIO, daemon, "fsync", fh, False)
        await daemon.ask("fsync", fh, False)
        await daemon.ask("release", fh)
    await mount.check()


async def test_bytes_of_a_deleted_file_are_missed_too() -> None:
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"stored")
        await stored(daemon)
        await daemon.ask("unlink", ROOT, b"file", WHO)
        await daemon.ask("write", fh, 6, b" and lost")
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        await fails(errno.EIO, daemon, "write", fh, 15, b"x")
        assert await daemon.ask("read", fh, 0, 100) == b"stored"
        await daemon.ask("release", fh)
    await mount.check()


async def test_nothing_is_missed_after_a_clean_end() -> None:
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, _ = await daemon.create(b"file")
        await daemon.ask("write", fh, 0, b"bytes")
        gone, _ = await daemon.create(b"gone")
        await daemon.ask("write", gone, 0, b"bytes")
        await daemon.ask("unlink", ROOT, b"gone", WHO)
        await daemon.ask("release", gone)
        await daemon.ask("forget", [(inside.core(daemon.volume).inodes.next() - 1, 1)])
    async with mount.daemon() as daemon:
        assert not daemon.handover.lost
        assert await daemon.ask("write", fh, 5, b"!") == 1
        assert await daemon.ask("read", fh, 0, 100) == b"bytes!"
        await daemon.ask("release", fh)
    await mount.check()


@SHARED
async def test_an_open_that_is_sent_again_leaves_no_handle_behind(shared: bool, autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(shared=shared)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await stored(daemon)
        await daemon.open(ino)
        number = mount.unique  # the kernel never hears of it
        mount.kill()
    async with mount.daemon() as daemon:
        again = await daemon.open(ino, again=number)
        assert again != fh
        assert len(daemon.operations._open) == 2
        node = inside.nodes(daemon.volume).get(ino)
        assert node is not None
        assert (node.handles, node.writers) == (2, 2)
        for one in (fh, again):
            await daemon.ask("release", one)
        assert (node.handles, node.writers) == (0, 0)
    await mount.check()


async def test_virtual_files_go_on() -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        folder = await daemon.lookup(b".kvfuse")
        ino = await daemon.lookup(b"stats", folder)
        fh = await daemon.open(ino, os.O_RDONLY)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.ask("read", fh, 0, 100) == b"stats for 1000\n"
        assert await daemon.ask("read", fh, 6, 3) == b"for"
        assert await daemon.open(ino, os.O_RDONLY) != fh
        await daemon.ask("flush", fh)
        await daemon.ask("release", fh)
        assert not await daemon.lookup(b"control.sock", folder)
        daemon.operations.add_socket()
        socket = await daemon.lookup(b"control.sock", folder)
        assert stat.S_ISSOCK((await daemon.ask("getattr", socket, WHO)).st_mode)


async def test_what_the_kernel_forgets_may_be_unknown() -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await stored(daemon)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.lookup(b"file") == ino
        await daemon.ask("forget", [(ino, 3), (ino + 7, 5)])
        assert not inside.core(daemon.volume).places.known(ino)
        assert (await daemon.ask("getattr", ino, WHO)).st_ino == ino  # it is open
        await daemon.ask("release", fh)


async def test_many_open_files_are_taken_over_in_no_time_each() -> None:
    """The table grows, and its handles are made when they are asked for."""
    mount, count = Mount(), 2 * COUNT_MIN + 5
    async with mount.daemon() as daemon:
        _, ino = await daemon.create(b"file")
        await stored(daemon)
        handles = [await daemon.open(ino, os.O_RDONLY) for _ in range(count)]
        assert len(set(handles)) == count
        mount.kill()
    async with mount.daemon() as daemon:
        assert len(daemon.operations._open) == count + 1
        await daemon.ask("read", handles[count // 2], 0, 1)
        with trio.fail_after(60):
            for fh in handles:
                await daemon.ask("release", fh)
        assert len(daemon.operations._open) == 1


@pytest.mark.parametrize("damage", [bytes(ROW_SIZE), b"\xff" * ROW_SIZE, b"\x01" + bytes(ROW_SIZE - 1)])
def test_rows_that_make_no_sense_are_free(damage: bytes) -> None:
    keeper = MemoryKeeper()
    table = HandleTable(keeper)
    fh = table.add(2000, os.O_RDWR, Caller(1, 2, 3), (1, b"name"), 100)
    other = table.add(2001, os.O_RDWR | os.O_APPEND, Caller(4, 5, 6), (1, b"other"), 102)
    offset = (fh & 0xFFFFFF) * ROW_SIZE
    table._rows.memory[offset : offset + ROW_SIZE] = damage
    table.close()
    table = HandleTable(keeper)
    assert list(table.before) == [other]
    row = table.before[other]
    assert (row.ino, row.caller, row.places) == (2001, Caller(4, 5, 6), [(1, b"other")])
    assert row.flags == os.O_RDWR | os.O_APPEND
    table.close()


@SHARED
async def test_requests_for_inodes_that_are_gone_are_answered(shared: bool, autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(shared=shared, keeps=False)
    async with mount.daemon() as daemon:
        _, ino = await daemon.create(b"file")
        folder = (await daemon.ask("mkdir", ROOT, b"folder", 0o755, WHO)).st_ino
        if not shared:
            mount.kill()
        else:
            await daemon.ask("rmdir", ROOT, b"folder", WHO)
            await stored(daemon)
            mount.kill()
    async with mount.daemon() as daemon:
        requests = [
            ("getattr", ino + 50, WHO), ("setattr", ino + 50, *size_fields(1), None, WHO),
            ("access", folder, os.R_OK, WHO), ("open", ino + 50, os.O_RDWR, WHO), ("readlink", ino + 50, WHO),
            ("create", folder, b"x", 0o644, os.O_RDWR, WHO), ("mkdir", folder, b"x", 0o755, WHO),
            ("symlink", folder, b"x", b"y", WHO), ("link", ino + 50, ROOT, b"x", WHO), ("unlink", folder, b"x", WHO),
            ("rmdir", folder, b"x", WHO), ("rename", folder, b"x", ROOT, b"y", 0, WHO), ("opendir", folder, WHO),
            ("fsyncdir", folder, False), ("getxattr", ino + 50, b"user.x", WHO), ("listxattr", ino + 50, WHO),
            ("setxattr", ino + 50, b"user.x", b"1", WHO), ("removexattr", ino + 50, b"user.x", WHO),
            ("readdir", folder, 3, None),
        ]  # fmt: skip
        for kind, *args in requests:
            print(kind)
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await daemon.ask(str(kind), *args)
            assert caught.value.errno in (errno.ESTALE, errno.ENOENT), (kind, caught.value)
        assert daemon.operations.unexpected_error_count == 0


async def test_the_kernel_may_know_what_this_daemon_never_told_it() -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        _, ino = await daemon.create(b"file")
        await stored(daemon)
        assert not daemon.volume.is_known_to_kernel(ino + 1)
        mount.kill()
    async with mount.daemon() as daemon:
        assert daemon.volume.is_known_to_kernel(ino)
        assert daemon.operations.names.may_be_cached(ROOT)
        assert daemon.operations.absences.may_be_cached(12345)
        _, made = await daemon.create(b"other")
        assert daemon.volume.is_known_to_kernel(made)
        assert not daemon.volume.is_known_to_kernel(made + 1)


async def test_what_is_lost_is_known_until_the_kernel_was_told(autojump_clock: trio.abc.Clock) -> None:
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        fh, ino = await daemon.create(b"file")
        await stored(daemon)
        await daemon.ask("write", fh, 0, b"lost")
        mount.kill()
    for _ in range(2):
        async with mount.daemon() as daemon:
            assert daemon.handover.lost == {ino}
            mount.kill()
    async with mount.daemon() as daemon:
        daemon.handover.end_losses()
        mount.kill()
    async with mount.daemon() as daemon:
        assert not daemon.handover.lost
        await fails(errno.EIO, daemon, "fsync", fh, False)  # for the first crash
        await daemon.ask("fsync", fh, False)
