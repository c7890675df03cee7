"""The life of a mount: how it begins, and the ways it ends, with nothing lost and nothing left."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from pathlib import Path

import pytest
from mounting import KvfuseMount, mount_rows, wait_until
from posix_calls import fails, opened

from kvfuse.fs.mount_session import build_kernel_options
from kvfuse.holder.guarding import open_switch
from kvfuse.options.options import MountOptions

pytestmark = [
    pytest.mark.ring(1),
    pytest.mark.engines("lmdb+file", "etcd+rados", "etcd+block"),  # it ends in one way, whatever was published when
]

MIB = 1 << 20


def row_of(mount: KvfuseMount) -> list[str]:
    """device, mount options, type and source of the mount, as the kernel tells them."""
    for line in mount_rows():
        before, _, after = line.partition(" - ")
        if before.split(" ")[4] == str(mount.point):
            return [before.split(" ")[2], before.split(" ")[5], *after.split(" ")[:2]]
    raise AssertionError(f"{mount.point} is not mounted")


def test_the_mount_table_names_the_volume(mount: KvfuseMount) -> None:
    device, options, kind, source = row_of(mount)
    assert kind == "fuse.kvfuse"
    assert source == str(mount.source)
    assert "rw" in options.split(",")
    knob = Path(f"/sys/class/bdi/{device}/read_ahead_kb")
    assert int(knob.read_text()) == (1024 if may_write(knob) else 128)
    control = open_switch(os.makedev(*map(int, device.split(":"))), "max_background", os.O_RDONLY)
    assert int(os.read(control, 10)) == 64
    os.close(control)


def may_write(path: Path) -> bool:
    """Opening is the only sure test: a security module may refuse what the permissions allow."""
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return False
    return True


def test_an_unmount_keeps_what_was_written(mount: KvfuseMount) -> None:
    content = os.urandom(5 * MIB)
    (mount.point / "file").write_bytes(content)
    (mount.point / "directory").mkdir()
    mount.unmount()
    assert os.listdir(mount.point) == []
    mount.mount()
    assert (mount.point / "file").read_bytes() == content
    assert sorted(os.listdir(mount.point)) == ["directory", "file"]


def test_sigterm_unmounts_and_keeps_what_was_written(mount: KvfuseMount) -> None:
    content = os.urandom(5 * MIB)
    (mount.point / "file").write_bytes(content)
    mount.terminate()
    mount.mount()
    assert (mount.point / "file").read_bytes() == content


def test_sigterm_under_open_and_mapped_files_keeps_what_was_written(mount: KvfuseMount) -> None:
    """The daemon goes although the mount is in use: written pages reach the volume, later calls fail."""
    path = mount.point / "file"
    with fails(errno.ENOTCONN), opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, MIB)
        with mmap.mmap(fd, MIB) as mapped:
            mapped[5000:5007] = b"written"
            mount.terminate()
        os.fsync(fd)
    mount.mount()
    assert path.read_bytes() == b"written".rjust(5007, b"\0").ljust(MIB, b"\0")


def test_after_a_lazy_unmount_open_files_work_until_they_are_closed(mount: KvfuseMount) -> None:
    daemon = mount.pid
    with opened(mount.point / "file", os.O_CREAT | os.O_RDWR) as fd:
        subprocess.run(["umount", "-l", str(mount.point)], check=True)
        assert os.listdir(mount.point) == []
        os.write(fd, b"late")
        os.fsync(fd)
        assert os.pread(fd, 9, 0) == b"late"
    mount.wait()
    wait_until(lambda: not Path(f"/proc/{daemon}").exists(), "the end of the daemon")
    mount.mount()
    assert (mount.point / "file").read_bytes() == b"late"


def test_a_file_unlinked_while_open_is_gone_after_the_mount_ended(mount: KvfuseMount) -> None:
    before = os.statvfs(mount.point).f_bfree
    with fails(errno.ENOTCONN), opened(mount.point / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, bytes(range(256)) * 65_536)
        os.fsync(fd)
        os.unlink(mount.point / "file")
        mount.terminate()
        os.fsync(fd)
    mount.mount()
    assert os.listdir(mount.point) == []
    wait_until(lambda: os.statvfs(mount.point).f_bfree == before, "the return of its space")


def test_read_only(mount: KvfuseMount) -> None:
    (mount.point / "file").write_bytes(b"content")
    mount.unmount()
    mount.words = (*mount.words, "ro")
    mount.mount()
    assert (mount.point / "file").read_bytes() == b"content"
    with fails(errno.EROFS):
        (mount.point / "new").touch()
    with fails(errno.EROFS):
        os.open(mount.point / "file", os.O_WRONLY)
    with fails(errno.EROFS):
        os.unlink(mount.point / "file")
    with fails(errno.EROFS):
        os.setxattr(mount.point / "file", "user.name", b"value")


@pytest.mark.parametrize(
    ("options", "wanted", "unwanted"),
    [
        (MountOptions(), {"subtype=kvfuse"}, {"ro", "noatime", "allow_other", "default_permissions"}),
        (MountOptions(allow_other=True), {"allow_other", "default_permissions"}, set()),
        (MountOptions(default_permissions=True), {"default_permissions"}, {"allow_other"}),
        (
            MountOptions(read_only=True, atime="noatime", allow_other=True),
            {"ro", "noatime", "allow_other"},
            set(),
        ),
        (MountOptions(default_permissions=False), set(), {"default_permissions"}),
        (MountOptions(flags=("nodev", "nosuid", "noexec")), {"nodev", "nosuid", "noexec"}, {"dev", "suid"}),
        (MountOptions(flags=("nodev", "dev")), {"dev"}, {"nodev"}),
    ],
)
def test_options_become_words_of_the_kernel(options: MountOptions, wanted: set[str], unwanted: set[str]) -> None:
    words = build_kernel_options(options, Path("/volume"))
    assert wanted <= words
    assert not unwanted & words


def test_a_source_with_a_comma_stays_one_word() -> None:
    assert r"fsname=/a\,b\\c?" in build_kernel_options(MountOptions(), Path("/a,b\\cä"))
