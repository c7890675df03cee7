"""rename: every kind over every kind, the flags, and files that are open meanwhile."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from posix_calls import RENAME_EXCHANGE, RENAME_NOREPLACE, fails, opened, renameat2


def make_file(path: Path) -> None:
    path.write_bytes(path.name.encode())


def make_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "child").touch()


KINDS: dict[str, Callable[[Path], None]] = {
    "file": make_file,
    "symlink": lambda path: path.symlink_to("nowhere"),
    "fifo": os.mkfifo,
    "empty directory": os.mkdir,
    "full directory": make_full_directory,
}
DIRECTORIES = ("empty directory", "full directory")


def expected_errno(source: str, target: str) -> int:
    """What rename says for ``source`` over ``target``; 0: done."""
    if source in DIRECTORIES:
        if target not in DIRECTORIES:
            return errno.ENOTDIR
        return errno.ENOTEMPTY if target == "full directory" else 0
    return errno.EISDIR if target in DIRECTORIES else 0


@pytest.mark.parametrize("kind", KINDS)
def test_to_a_new_name(folder: Path, kind: str) -> None:
    KINDS[kind](folder / "source")
    before = os.lstat(folder / "source")
    os.rename(folder / "source", folder / "target")
    after = os.lstat(folder / "target")
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert not os.path.lexists(folder / "source")


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_over_an_existing_name(folder: Path, source: str, target: str) -> None:
    KINDS[source](folder / "source")
    KINDS[target](folder / "target")
    ino = os.lstat(folder / "source").st_ino
    number = expected_errno(source, target)
    if number:
        with fails(number):
            os.rename(folder / "source", folder / "target")
        assert os.lstat(folder / "source").st_ino == ino
    else:
        os.rename(folder / "source", folder / "target")
        assert os.lstat(folder / "target").st_ino == ino
        assert not os.path.lexists(folder / "source")


@pytest.mark.parametrize("kind", KINDS)
def test_into_another_directory(folder: Path, kind: str) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    KINDS[kind](folder / "a" / "name")
    os.rename(folder / "a" / "name", folder / "b" / "name")
    assert os.listdir(folder / "a") == []
    assert os.listdir(folder / "b") == ["name"]


def test_a_moved_directory_has_a_new_parent(folder: Path) -> None:
    (folder / "a" / "moved" / "deep").mkdir(parents=True)
    (folder / "b").mkdir()
    os.rename(folder / "a" / "moved", folder / "b" / "moved")
    assert os.stat(folder / "b" / "moved" / "..").st_ino == os.stat(folder / "b").st_ino
    assert (folder / "b" / "moved" / "deep").is_dir()
    assert os.stat(folder / "a").st_nlink == 2
    assert os.stat(folder / "b").st_nlink == 3


def test_onto_itself_changes_nothing(folder: Path) -> None:
    make_file(folder / "name")
    os.rename(folder / "name", folder / "name")
    assert (folder / "name").read_bytes() == b"name"


def test_onto_another_link_of_the_same_file_changes_nothing(folder: Path) -> None:
    make_file(folder / "one")
    os.link(folder / "one", folder / "two")
    os.rename(folder / "one", folder / "two")
    assert sorted(os.listdir(folder)) == ["one", "two"]
    assert os.stat(folder / "one").st_nlink == 2


@pytest.mark.parametrize("below", ["inner", "inner/deeper"])
def test_a_directory_into_its_own_subtree_is_refused(folder: Path, below: str) -> None:
    (folder / "outer" / "inner").mkdir(parents=True)
    with fails(errno.EINVAL):
        os.rename(folder / "outer", folder / "outer" / below)


def test_over_an_ancestor_is_refused(folder: Path) -> None:
    (folder / "outer" / "inner").mkdir(parents=True)
    with fails(errno.ENOTEMPTY):
        os.rename(folder / "outer" / "inner", folder / "outer")


def test_a_missing_source(folder: Path) -> None:
    with fails(errno.ENOENT):
        os.rename(folder / "absent", folder / "target")


def test_over_a_link_leaves_the_other_link(folder: Path) -> None:
    make_file(folder / "one")
    os.link(folder / "one", folder / "two")
    make_file(folder / "new")
    os.rename(folder / "new", folder / "one")
    assert (folder / "two").read_bytes() == b"one"
    assert os.stat(folder / "two").st_nlink == 1


def test_noreplace_to_a_new_name(folder: Path) -> None:
    make_file(folder / "source")
    renameat2(folder / "source", folder / "target", RENAME_NOREPLACE)
    assert (folder / "target").read_bytes() == b"source"


@pytest.mark.parametrize("target", KINDS)
def test_noreplace_over_an_existing_name_is_refused(folder: Path, target: str) -> None:
    make_file(folder / "source")
    KINDS[target](folder / "target")
    with fails(errno.EEXIST):
        renameat2(folder / "source", folder / "target", RENAME_NOREPLACE)
    assert (folder / "source").read_bytes() == b"source"


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("one", KINDS)
def test_exchange_of_any_two_kinds(folder: Path, one: str, other: str) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    KINDS[one](folder / "a" / "name")
    KINDS[other](folder / "b" / "name")
    before = [os.lstat(folder / parent / "name").st_ino for parent in "ab"]
    renameat2(folder / "a" / "name", folder / "b" / "name", RENAME_EXCHANGE)
    assert [os.lstat(folder / parent / "name").st_ino for parent in "ba"] == before
    assert os.stat(folder / "a").st_nlink == 2 + (other in DIRECTORIES)
    assert os.stat(folder / "b").st_nlink == 2 + (one in DIRECTORIES)


def test_exchange_with_a_missing_name(folder: Path) -> None:
    make_file(folder / "source")
    with fails(errno.ENOENT):
        renameat2(folder / "source", folder / "absent", RENAME_EXCHANGE)


def test_both_flags_together_are_refused(folder: Path) -> None:
    make_file(folder / "a")
    make_file(folder / "b")
    with fails(errno.EINVAL):
        renameat2(folder / "a", folder / "b", RENAME_NOREPLACE | RENAME_EXCHANGE)


def test_exchange_with_an_own_ancestor_is_refused(folder: Path) -> None:
    (folder / "outer" / "inner").mkdir(parents=True)
    with fails(errno.EINVAL):
        renameat2(folder / "outer", folder / "outer" / "inner", RENAME_EXCHANGE)


def test_while_open_then_read_back(folder: Path) -> None:
    """How caches publish a block: temporary name, write, rename before the close, read at once."""
    block = os.urandom(200_000)
    with opened(folder / "block.tmp", os.O_CREAT | os.O_EXCL | os.O_RDWR) as fd:
        os.write(fd, block)
        os.rename(folder / "block.tmp", folder / "block")
        assert (folder / "block").read_bytes() == block
        assert os.pread(fd, 100, 1000) == block[1000:1100]
        os.pwrite(fd, b"late", 5)
    assert (folder / "block").read_bytes() == block[:5] + b"late" + block[9:]


def test_over_an_open_file_leaves_its_reader_the_old_content(folder: Path) -> None:
    (folder / "file").write_bytes(b"old")
    (folder / "new").write_bytes(b"new content")
    with opened(folder / "file", os.O_RDONLY) as fd:
        os.rename(folder / "new", folder / "file")
        assert os.read(fd, 100) == b"old"
        assert os.fstat(fd).st_nlink == 0
    assert (folder / "file").read_bytes() == b"new content"


def test_of_the_working_directory(folder: Path) -> None:
    (folder / "before").mkdir()
    here = os.getcwd()
    os.chdir(folder / "before")
    try:
        os.rename(folder / "before", folder / "after")
        Path("file").touch()
        assert os.getcwd() == str(folder / "after")
    finally:
        os.chdir(here)
    assert (folder / "after" / "file").exists()
