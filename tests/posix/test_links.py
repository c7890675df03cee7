"""Hard links, symlinks, link counts and inode numbers."""

import errno
import os
import stat
from pathlib import Path

import pytest
from posix_calls import fails


def test_two_names_of_one_file(folder: Path) -> None:
    (folder / "one").write_bytes(b"content")
    os.link(folder / "one", folder / "two")
    one, two = os.stat(folder / "one"), os.stat(folder / "two")
    assert one.st_ino == two.st_ino
    assert one.st_nlink == two.st_nlink == 2
    (folder / "two").write_bytes(b"changed through two")
    assert (folder / "one").read_bytes() == b"changed through two"


def test_a_file_lives_as_long_as_one_of_its_names(folder: Path) -> None:
    (folder / "one").write_bytes(b"content")
    os.link(folder / "one", folder / "two")
    os.unlink(folder / "one")
    assert (folder / "two").read_bytes() == b"content"
    assert os.stat(folder / "two").st_nlink == 1


def test_links_in_different_directories(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    (folder / "a" / "file").write_bytes(b"x")
    os.link(folder / "a" / "file", folder / "b" / "link")
    os.unlink(folder / "a" / "file")
    os.rmdir(folder / "a")
    assert (folder / "b" / "link").read_bytes() == b"x"


def test_three_hundred_links(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    for number in range(300):
        os.link(folder / "file", folder / f"link{number}")
    assert os.stat(folder / "file").st_nlink == 301
    for number in range(300):
        os.unlink(folder / f"link{number}")
    assert os.stat(folder / "file").st_nlink == 1


def test_a_link_over_an_existing_name_is_refused(folder: Path) -> None:
    (folder / "one").touch()
    (folder / "two").touch()
    with fails(errno.EEXIST):
        os.link(folder / "one", folder / "two")


def test_a_directory_cannot_be_linked(folder: Path) -> None:
    (folder / "directory").mkdir()
    with fails(errno.EPERM):
        os.link(folder / "directory", folder / "link")


def test_a_symlink_can_be_linked(folder: Path) -> None:
    (folder / "symlink").symlink_to("nowhere")
    os.link(folder / "symlink", folder / "link", follow_symlinks=False)
    assert os.readlink(folder / "link") == "nowhere"
    assert os.lstat(folder / "link").st_nlink == 2


def test_a_fifo_can_be_linked(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    os.link(folder / "fifo", folder / "link")
    assert stat.S_ISFIFO(os.lstat(folder / "link").st_mode)


def test_a_directory_counts_its_subdirectories(folder: Path) -> None:
    parent = folder / "parent"
    parent.mkdir()
    assert os.stat(parent).st_nlink == 2
    for number in range(3):
        (parent / f"child{number}").mkdir()
    (parent / "file").touch()
    assert os.stat(parent).st_nlink == 5
    (parent / "child0").rmdir()
    assert os.stat(parent).st_nlink == 4
    os.rename(parent / "child1", folder / "moved")
    assert os.stat(parent).st_nlink == 3


@pytest.mark.parametrize("length", [1, 59, 60, 255, 1000, 4095])
def test_a_symlink_keeps_its_target(folder: Path, length: int) -> None:
    target = ("x" * 99 + "/") * 41
    os.symlink(target[:length], folder / "link")
    assert os.readlink(folder / "link") == target[:length]
    status = os.lstat(folder / "link")
    assert stat.S_ISLNK(status.st_mode)
    assert status.st_size == length


def test_a_symlink_target_may_be_any_bytes(folder: Path) -> None:
    os.symlink(b"\xff\xfe not UTF-8", os.fsencode(folder / "link"))
    assert os.readlink(os.fsencode(folder / "link")) == b"\xff\xfe not UTF-8"


def test_a_symlink_of_4096_bytes_is_refused(folder: Path) -> None:
    with fails(errno.ENAMETOOLONG):
        os.symlink("x" * 4096, folder / "link")


def test_an_empty_symlink_is_refused(folder: Path) -> None:
    with fails(errno.ENOENT):
        os.symlink("", folder / "link")


def test_a_dangling_symlink_is_there_and_not_there(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere")
    os.lstat(folder / "link")
    with fails(errno.ENOENT):
        os.stat(folder / "link")


def test_a_loop_of_symlinks(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    with fails(errno.ELOOP):
        os.stat(folder / "a")


def test_a_path_through_symlinks_to_directories(folder: Path) -> None:
    (folder / "real" / "deep").mkdir(parents=True)
    (folder / "real" / "deep" / "file").write_bytes(b"x")
    (folder / "link").symlink_to("real/deep")
    assert (folder / "link" / "file").read_bytes() == b"x"
    assert (folder / "link" / ".." / "deep" / "file").read_bytes() == b"x"


def test_readlink_of_a_file_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    with fails(errno.EINVAL):
        os.readlink(folder / "file")


def test_an_inode_number_stays(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"x")
    ino = path.stat().st_ino
    os.rename(path, folder / "renamed")
    (folder / "renamed").write_bytes(b"y" * 100_000)
    os.link(folder / "renamed", folder / "link")
    os.unlink(folder / "renamed")
    assert os.stat(folder / "link").st_ino == ino


def test_files_have_different_inode_numbers(folder: Path) -> None:
    numbers = set()
    for name in range(100):
        (folder / str(name)).touch()
        numbers.add(os.stat(folder / str(name)).st_ino)
    assert len(numbers) == 100


def test_dot_and_dot_dot(folder: Path) -> None:
    (folder / "sub").mkdir()
    assert os.stat(folder / "sub" / ".").st_ino == os.stat(folder / "sub").st_ino
    assert os.stat(folder / "sub" / "..").st_ino == os.stat(folder).st_ino
