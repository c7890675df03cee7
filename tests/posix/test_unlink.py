"""unlink and rmdir, also of what is still in use."""

import errno
import os
from pathlib import Path

import pytest
from mounting import KvfuseMount, wait_until
from posix_calls import fails, opened


def test_an_unlinked_name_is_gone(folder: Path) -> None:
    (folder / "file").touch()
    os.unlink(folder / "file")
    with fails(errno.ENOENT):
        os.stat(folder / "file")
    with fails(errno.ENOENT):
        os.unlink(folder / "file")


def test_unlink_refuses_a_directory(folder: Path) -> None:
    (folder / "directory").mkdir()
    with fails(errno.EISDIR):
        os.unlink(folder / "directory")


def test_rmdir_refuses_a_file(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.ENOTDIR):
        os.rmdir(folder / "file")


def test_rmdir_refuses_a_directory_with_entries(folder: Path) -> None:
    (folder / "directory" / "child").mkdir(parents=True)
    with fails(errno.ENOTEMPTY):
        os.rmdir(folder / "directory")
    os.rmdir(folder / "directory" / "child")
    os.rmdir(folder / "directory")


def test_rmdir_of_dot_is_refused(folder: Path) -> None:
    (folder / "directory").mkdir()
    with fails(errno.EINVAL):
        os.rmdir(f"{folder}/directory/.")


def test_io_to_an_unlinked_open_file(folder: Path) -> None:
    """How engines keep a disk tier: create, unlink, go on reading and writing."""
    block = os.urandom(300_000)
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"before")
        os.unlink(folder / "file")
        assert os.fstat(fd).st_nlink == 0
        os.pwrite(fd, block, 1 << 20)
        os.fsync(fd)
        assert os.pread(fd, 6, 0) == b"before"
        assert os.pread(fd, len(block), 1 << 20) == block
        os.ftruncate(fd, 3)
        assert os.pread(fd, 100, 0) == b"bef"
        assert os.fstat(fd).st_size == 3
    assert os.listdir(folder) == []


def test_an_unlinked_name_can_be_made_again_while_the_old_file_is_open(folder: Path) -> None:
    with opened(folder / "name", os.O_CREAT | os.O_RDWR) as old:
        os.write(old, b"old")
        os.unlink(folder / "name")
        (folder / "name").write_bytes(b"new")
        assert os.pread(old, 9, 0) == b"old"
        assert os.fstat(old).st_ino != os.stat(folder / "name").st_ino
    assert (folder / "name").read_bytes() == b"new"


def test_a_removed_working_directory(folder: Path) -> None:
    (folder / "directory").mkdir()
    here = os.getcwd()
    os.chdir(folder / "directory")
    try:
        os.rmdir(folder / "directory")
        with fails(errno.ENOENT):
            Path("file").touch()
        assert os.listdir(".") == []
        assert os.stat(".").st_nlink == 0
    finally:
        os.chdir(here)


def test_a_removed_open_directory_lists_nothing(folder: Path) -> None:
    (folder / "directory").mkdir()
    with opened(folder / "directory", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rmdir(folder / "directory")
        assert os.listdir(fd) == []
        with fails(errno.ENOENT):
            os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)


def test_a_file_replaced_by_a_directory_and_back(folder: Path) -> None:
    for _ in range(5):
        (folder / "name").touch()
        assert (folder / "name").is_file()
        os.unlink(folder / "name")
        (folder / "name").mkdir()
        assert (folder / "name").is_dir()
        os.rmdir(folder / "name")


@pytest.mark.kvfuse_only
def test_a_file_changed_in_place_and_removed_at_once_gives_its_space_back(shared_mount: KvfuseMount) -> None:
    """A journal as databases write it: synced, its head overwritten, closed, removed while it is being sealed."""
    path = shared_mount.point / "journal"
    free = os.statvfs(shared_mount.point).f_bfree
    for _ in range(20):
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            os.pwrite(fd, bytes(300_000), 0)
            os.fdatasync(fd)
            os.pwrite(fd, b"head", 0)
            os.fdatasync(fd)
        path.unlink()
    wait_until(lambda: os.statvfs(shared_mount.point).f_bfree >= free, "the space of removed files")
