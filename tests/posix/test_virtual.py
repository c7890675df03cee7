"""MNT/.kvfuse, and what the daemon tells of a file."""

import errno
import json
import os
from pathlib import Path

import pytest
from engine_pairs import EVERYWHERE
from posix_calls import fails, opened, permissions

import kvfuse

pytestmark = [pytest.mark.kvfuse_only, pytest.mark.engines(*EVERYWHERE)]

FILES = ["clients", "config", "profile", "stats", "version"]
SOCKET = "control.sock"


def test_the_folder_is_found_but_not_listed(top: Path) -> None:
    assert ".kvfuse" not in os.listdir(top)
    assert (top / ".kvfuse").is_dir()
    assert permissions(top / ".kvfuse") == 0o755, "its owner is the daemon's user, who makes the socket in it"


def test_the_folder_lists_its_files(top: Path) -> None:
    assert sorted(os.listdir(top / ".kvfuse")) == sorted([*FILES, SOCKET])
    with os.scandir(top / ".kvfuse") as entries:
        assert {entry.name for entry in entries if entry.is_file()} == set(FILES)
    assert os.stat(top / ".kvfuse" / "..").st_ino == os.stat(top).st_ino


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_only(top: Path, name: str) -> None:
    path = top / ".kvfuse" / name
    assert permissions(path) == 0o444
    with fails(errno.EACCES):
        os.open(path, os.O_WRONLY)
    with fails(errno.EPERM):
        os.chmod(path, 0o666)
    with fails(errno.EPERM):
        os.unlink(path)
    with fails(errno.EPERM):
        os.link(path, top / "link")


def test_the_folder_takes_no_names(top: Path) -> None:
    with fails(errno.EPERM):
        (top / ".kvfuse" / "new").touch()
    with fails(errno.EPERM):
        (top / ".kvfuse" / "new").mkdir()
    with fails(errno.EPERM):
        os.rmdir(top / ".kvfuse")
    with fails(errno.EPERM):
        os.rename(top / ".kvfuse", top / "other")
    with fails(errno.ENOENT):
        os.stat(top / ".kvfuse" / "absent")


def test_the_name_is_taken(top: Path) -> None:
    with fails(errno.EEXIST):
        os.mkdir(top / ".kvfuse")
    with fails(errno.EISDIR):
        os.open(top / ".kvfuse", os.O_CREAT | os.O_WRONLY)


def test_the_name_is_free_elsewhere(folder: Path) -> None:
    (folder / ".kvfuse").write_bytes(b"mine")
    assert os.listdir(folder) == [".kvfuse"]
    assert (folder / ".kvfuse").read_bytes() == b"mine"


def test_the_version(top: Path) -> None:
    assert (top / ".kvfuse" / "version").read_text() == kvfuse.__version__ + "\n"


def test_the_statistics_are_those_of_the_open(top: Path, folder: Path) -> None:
    with opened(top / ".kvfuse" / "stats", os.O_RDONLY) as fd:
        (folder / "file").write_bytes(b"x" * 100_000)
        first = os.read(fd, 1 << 20)
        assert os.pread(fd, 1 << 20, 0) == first
        assert os.pread(fd, 10, 5) == first[5:15]
    content = json.loads(first)
    assert content["pid"] > 0
    assert content["space"]["size"] == os.statvfs(top).f_blocks * 4096
    assert content["fs"]["unexpected_error_count"] == 0


def test_the_configuration(top: Path) -> None:
    content = json.loads((top / ".kvfuse" / "config").read_text())
    assert content["mount"]["attr_timeout"] == 1


def test_every_inode_tells_where_it_lies(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * 100_000)
    assert isinstance(json.loads(os.getxattr(folder / "file", "kvfuse.info")), dict)
    assert isinstance(json.loads(os.getxattr(folder, "kvfuse.info")), dict)
    assert "kvfuse.info" not in os.listxattr(folder / "file")
    with fails(errno.EPERM):
        os.setxattr(folder / "file", "kvfuse.info", b"x")
