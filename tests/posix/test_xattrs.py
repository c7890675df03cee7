"""Extended attributes."""

import errno
import os
from pathlib import Path

import pytest
from posix_calls import USER, as_user, fails, opened


@pytest.fixture
def path(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


@pytest.mark.parametrize("value", [b"", b"value", b"\0\xff\n", b"x" * 3000])
def test_a_value_is_kept(path: Path, value: bytes) -> None:
    os.setxattr(path, "user.name", value)
    assert os.getxattr(path, "user.name") == value


def test_a_new_value_replaces_the_old(path: Path) -> None:
    os.setxattr(path, "user.name", b"a long old value")
    os.setxattr(path, "user.name", b"new")
    assert os.getxattr(path, "user.name") == b"new"


def test_a_missing_attribute(path: Path) -> None:
    with fails(errno.ENODATA):
        os.getxattr(path, "user.absent")
    with fails(errno.ENODATA):
        os.removexattr(path, "user.absent")


def test_create_refuses_one_that_exists(path: Path) -> None:
    os.setxattr(path, "user.name", b"first", os.XATTR_CREATE)
    with fails(errno.EEXIST):
        os.setxattr(path, "user.name", b"second", os.XATTR_CREATE)
    assert os.getxattr(path, "user.name") == b"first"


def test_replace_refuses_one_that_does_not_exist(path: Path) -> None:
    with fails(errno.ENODATA):
        os.setxattr(path, "user.name", b"value", os.XATTR_REPLACE)
    os.setxattr(path, "user.name", b"first")
    os.setxattr(path, "user.name", b"second", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.name") == b"second"


def test_all_are_listed(path: Path) -> None:
    names = {f"user.name{number}" for number in range(50)}
    for name in names:
        os.setxattr(path, name, name.encode())
    assert set(os.listxattr(path)) & {*names, "user.absent"} == names
    os.removexattr(path, "user.name7")
    assert set(os.listxattr(path)) & names == names - {"user.name7"}


def test_no_attributes_list_as_nothing(path: Path) -> None:
    assert [name for name in os.listxattr(path) if name.startswith("user.")] == []


def test_a_removed_attribute_is_gone(path: Path) -> None:
    os.setxattr(path, "user.name", b"value")
    os.removexattr(path, "user.name")
    with fails(errno.ENODATA):
        os.getxattr(path, "user.name")


def test_names_of_255_bytes_and_no_more(path: Path) -> None:
    longest = "user." + "n" * 250
    os.setxattr(path, longest, b"value")
    assert os.getxattr(path, longest) == b"value"
    with fails(errno.ERANGE):
        os.setxattr(path, longest + "n", b"value")


@pytest.mark.kvfuse_only
def test_values_of_64_kib_and_no_more(path: Path) -> None:
    os.setxattr(path, "user.name", b"v" * 65_536)
    assert os.getxattr(path, "user.name") == b"v" * 65_536
    with fails(errno.E2BIG):
        os.setxattr(path, "user.name", b"v" * 65_537)


def test_attributes_of_directories_and_descriptors(folder: Path) -> None:
    os.setxattr(folder, "user.name", b"value")
    with opened(folder, os.O_RDONLY) as fd:
        assert os.getxattr(fd, "user.name") == b"value"


def test_an_open_file_without_names_has_attributes(path: Path) -> None:
    os.setxattr(path, "user.before", b"1")
    os.setxattr(path, "user.other", b"2")
    with opened(path, os.O_RDWR) as fd:
        os.unlink(path)
        os.setxattr(fd, "user.after", b"3", os.XATTR_CREATE)
        os.setxattr(fd, "user.before", b"4", os.XATTR_REPLACE)
        os.removexattr(fd, "user.other")
        assert {name for name in os.listxattr(fd) if name.startswith("user.")} == {"user.before", "user.after"}
        assert (os.getxattr(fd, "user.before"), os.getxattr(fd, "user.after")) == (b"4", b"3")
        for call in (os.getxattr, os.removexattr):
            with fails(errno.ENODATA):
                call(fd, "user.other")


@pytest.mark.kvfuse_only
def test_an_open_file_without_names_has_a_mebibyte_of_attributes(path: Path) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.unlink(path)
        for number in range(15):
            os.setxattr(fd, f"user.{number}", b"v" * 65_536)
        with fails(errno.ENOSPC):
            os.setxattr(fd, "user.more", b"v" * 65_536)
        os.removexattr(fd, "user.0")
        os.setxattr(fd, "user.more", b"v" * 65_536)


def test_user_attributes_of_symlinks_and_fifos_are_refused(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    for name in ("link", "fifo"):
        with fails(errno.EPERM):
            os.setxattr(folder / name, "user.name", b"value", follow_symlinks=False)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("other.name", errno.EOPNOTSUPP),
        ("user", errno.EOPNOTSUPP),
        ("users.name", errno.EOPNOTSUPP),
        ("user.", errno.EINVAL),
        ("security.", errno.EINVAL),
    ],
)
def test_names_outside_the_namespaces_are_refused(path: Path, name: str, number: int) -> None:
    before = os.listxattr(path)
    for flags in (0, os.XATTR_CREATE, os.XATTR_REPLACE):
        with fails(number):
            os.setxattr(path, name, b"value", flags)
    for call in (os.getxattr, os.removexattr):
        with fails(number):
            call(path, name)
    assert os.listxattr(path) == before


@pytest.mark.root
def test_trusted_attributes_are_for_root(path: Path) -> None:
    os.setxattr(path, "trusted.name", b"value")
    assert os.getxattr(path, "trusted.name") == b"value"
    os.chmod(path, 0o666)
    with as_user():
        with fails(errno.ENODATA):
            os.getxattr(path, "trusted.name")
        with fails(errno.EPERM):
            os.setxattr(path, "trusted.name", b"other")
        assert "trusted.name" not in os.listxattr(path)
    assert "trusted.name" in os.listxattr(path)


@pytest.mark.root
def test_user_attributes_follow_the_mode(path: Path) -> None:
    os.setxattr(path, "user.name", b"value")
    os.chown(path, USER, -1)
    os.chmod(path, 0o600)
    with as_user(USER + 1), fails(errno.EACCES):
        os.getxattr(path, "user.name")
    with as_user():
        os.setxattr(path, "user.name", b"mine")
    assert os.getxattr(path, "user.name") == b"mine"


def test_attributes_stay_through_rename_and_link(folder: Path, path: Path) -> None:
    os.setxattr(path, "user.name", b"value")
    os.rename(path, folder / "renamed")
    os.link(folder / "renamed", folder / "link")
    os.unlink(folder / "renamed")
    assert os.getxattr(folder / "link", "user.name") == b"value"


@pytest.mark.kvfuse_only
def test_access_control_lists_are_not_offered(path: Path) -> None:
    with fails(errno.EOPNOTSUPP):
        os.setxattr(
            path, "system.posix_acl_access", bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")
        )
