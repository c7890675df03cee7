"""open() as it makes, finds, truncates and refuses."""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest
from posix_calls import fails, opened, permissions, umask


def test_a_new_file_is_empty_and_ours(folder: Path) -> None:
    path = folder / "new"
    with opened(path, os.O_CREAT | os.O_WRONLY, 0o640):
        status = os.stat(path)
    assert stat.S_ISREG(status.st_mode)
    assert (status.st_size, status.st_blocks, status.st_nlink) == (0, 0, 1)
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())


def test_a_missing_file_is_not_found(folder: Path) -> None:
    with fails(errno.ENOENT):
        os.open(folder / "absent", os.O_RDONLY)


def test_a_name_is_found_right_after_it_was_absent(folder: Path) -> None:
    path = folder / "name"
    assert not path.exists()
    path.write_bytes(b"here")
    assert path.read_bytes() == b"here"
    path.unlink()
    assert not path.exists()


def test_exclusive_creation_makes_a_new_file(folder: Path) -> None:
    with opened(folder / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR) as fd:
        assert os.write(fd, b"x") == 1


def test_exclusive_creation_refuses_a_file(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    with fails(errno.EEXIST):
        os.open(folder / "file", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    assert (folder / "file").read_bytes() == b"content"


def test_exclusive_creation_refuses_a_dangling_symlink(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere")
    with fails(errno.EEXIST):
        os.open(folder / "link", os.O_CREAT | os.O_EXCL | os.O_RDWR)


def test_creation_through_a_dangling_symlink_makes_its_target(folder: Path) -> None:
    (folder / "link").symlink_to("target")
    with opened(folder / "link", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x")
    assert (folder / "target").read_bytes() == b"x"


def test_creation_without_exclusion_opens_what_is_there(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    with opened(folder / "file", os.O_CREAT | os.O_RDONLY) as fd:
        assert os.read(fd, 99) == b"content"


def test_creation_below_a_file_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.ENOTDIR):
        os.open(folder / "file" / "below", os.O_CREAT | os.O_WRONLY)


def test_creation_in_a_missing_directory_is_refused(folder: Path) -> None:
    with fails(errno.ENOENT):
        os.open(folder / "absent" / "below", os.O_CREAT | os.O_WRONLY)


def test_truncation_at_the_open(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a" * 100_000)
    with opened(path, os.O_WRONLY | os.O_TRUNC):
        assert path.stat().st_size == 0
    assert path.read_bytes() == b""


def test_truncation_at_the_open_is_seen_by_who_has_it_open(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a" * 100_000)
    with opened(path, os.O_RDONLY) as reader:
        assert os.pread(reader, 10, 50_000) == b"a" * 10
        with opened(path, os.O_WRONLY | os.O_TRUNC) as writer:
            os.write(writer, b"new")
        assert os.pread(reader, 100, 0) == b"new"


def test_appending_goes_to_the_end_whoever_moved_it(folder: Path) -> None:
    path = folder / "log"
    with (
        opened(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND) as first,
        opened(path, os.O_WRONLY | os.O_APPEND) as second,
    ):
        for number in range(10):
            os.write((first, second)[number % 2], b"%d" % number)
    assert path.read_bytes() == b"0123456789"


def test_appending_ignores_the_position(folder: Path) -> None:
    path = folder / "log"
    path.write_bytes(b"start")
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"+end")
    assert path.read_bytes() == b"start+end"


def test_appending_can_be_switched_off(folder: Path) -> None:
    path = folder / "log"
    with opened(path, os.O_CREAT | os.O_RDWR | os.O_APPEND) as fd:
        os.write(fd, b"start")
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.pwrite(fd, b"S", 0)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        os.write(fd, b"+end")
    assert path.read_bytes() == b"Start+end"


def test_nofollow_refuses_a_symlink(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    with fails(errno.ELOOP):
        os.open(folder / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with opened(folder / "file", os.O_RDONLY | os.O_NOFOLLOW):
        pass


def test_directory_flag_refuses_a_file(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.ENOTDIR):
        os.open(folder / "file", os.O_RDONLY | os.O_DIRECTORY)
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY):
        pass


def test_a_directory_cannot_be_opened_for_writing(folder: Path) -> None:
    with fails(errno.EISDIR):
        os.open(folder, os.O_WRONLY)


def test_a_trailing_slash_means_a_directory(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.ENOTDIR):
        os.stat(f"{folder}/file/")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177])
def test_the_umask_is_taken_off_every_new_node(folder: Path, mask: int) -> None:
    with umask(mask):
        os.close(os.open(folder / "file", os.O_CREAT | os.O_WRONLY, 0o777))
        os.mkdir(folder / "directory", 0o777)
        os.mkfifo(folder / "fifo", 0o777)
    for name in ("file", "directory", "fifo"):
        assert permissions(folder / name) == 0o777 & ~mask, name


def test_a_file_created_read_only_can_be_written_by_its_creator(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR, 0o444) as fd:
        os.write(fd, b"x")
        assert os.pread(fd, 1, 0) == b"x"
    assert permissions(folder / "file") == 0o444


def test_a_descriptor_for_reading_cannot_write(folder: Path) -> None:
    (folder / "file").touch()
    with opened(folder / "file", os.O_RDONLY) as fd, fails(errno.EBADF):
        os.write(fd, b"x")


def test_a_descriptor_for_writing_cannot_read(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_WRONLY) as fd, fails(errno.EBADF):
        os.read(fd, 1)


def test_one_file_open_a_hundred_times(folder: Path) -> None:
    path = folder / "file"
    descriptors = [os.open(path, os.O_CREAT | os.O_RDWR) for _ in range(100)]
    try:
        for number, fd in enumerate(descriptors):
            os.pwrite(fd, b"%02d" % number, number * 2)
        expected = b"".join(b"%02d" % number for number in range(100))
        assert all(os.pread(fd, 1000, 0) == expected for fd in descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)
    assert path.read_bytes() == expected


def test_fifos_sockets_and_devices_keep_their_kind(folder: Path) -> None:
    os.mkfifo(folder / "fifo", 0o600)
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # a socket's path has 108 bytes at the most
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
    assert stat.S_ISFIFO(os.lstat(folder / "fifo").st_mode)
    assert stat.S_ISSOCK(os.lstat(folder / "socket").st_mode)


def test_bytes_go_through_a_fifo(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with opened(folder / "fifo", os.O_RDWR) as fd:
        os.write(fd, b"through")
        assert os.read(fd, 99) == b"through"


def test_mknod_makes_a_regular_file(folder: Path) -> None:
    os.mknod(folder / "file", stat.S_IFREG | 0o640)
    assert stat.S_ISREG(os.lstat(folder / "file").st_mode)
    (folder / "file").write_bytes(b"x")
    assert (folder / "file").read_bytes() == b"x"


@pytest.mark.root
def test_a_device_keeps_its_number(folder: Path) -> None:
    os.mknod(folder / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    status = os.lstat(folder / "null")
    assert stat.S_ISCHR(status.st_mode)
    assert status.st_rdev == os.makedev(1, 3)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, os.mknod, lambda path: os.symlink("x", path)])
def test_making_a_name_that_exists_is_refused(folder: Path, make: object) -> None:
    (folder / "name").touch()
    assert callable(make)
    with fails(errno.EEXIST):
        make(folder / "name")
