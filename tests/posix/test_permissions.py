"""Modes and owners: who may do what, and which bits a change takes away."""

import errno
import os
from pathlib import Path

import pytest
from posix_calls import GROUP, USER, as_user, fails, opened, permissions

pytestmark = pytest.mark.root


def owned(path: Path, mode: int = 0o644, content: bytes = b"content") -> Path:
    """A file of the test user's."""
    path.write_bytes(content)
    os.chown(path, USER, GROUP)
    os.chmod(path, mode)
    return path


@pytest.mark.parametrize("mode", [0o000, 0o644, 0o755, 0o1777, 0o2755, 0o4755, 0o7777])
def test_chmod_sets_every_bit(folder: Path, mode: int) -> None:
    (folder / "file").touch()
    os.chmod(folder / "file", mode)
    assert permissions(folder / "file") == mode


def test_fchmod_of_an_unlinked_file(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.unlink(folder / "file")
        os.fchmod(fd, 0o600)
        assert os.fstat(fd).st_mode & 0o7777 == 0o600


def test_chown_sets_owner_and_group_apart(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    os.chown(path, USER, -1)
    assert (path.stat().st_uid, path.stat().st_gid) == (USER, os.getegid())
    os.chown(path, -1, GROUP)
    assert (path.stat().st_uid, path.stat().st_gid) == (USER, GROUP)


def test_chown_of_a_symlink_leaves_its_target(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    os.lchown(folder / "link", USER, GROUP)
    assert os.lstat(folder / "link").st_uid == USER
    assert os.stat(folder / "file").st_uid == os.geteuid()


def test_chown_takes_setuid_and_setgid_away(folder: Path) -> None:
    path = owned(folder / "program", 0o6755)
    os.chown(path, USER + 1, GROUP)
    assert permissions(path) == 0o755


def test_chown_by_the_owner_takes_setuid_and_setgid_away(folder: Path) -> None:
    path = owned(folder / "program", 0o6755)
    with as_user(groups=[GROUP + 1]):
        os.chown(path, -1, GROUP + 1)
    assert permissions(path) == 0o755


def test_chown_of_a_directory_keeps_setgid(folder: Path) -> None:
    os.mkdir(folder / "directory")
    os.chmod(folder / "directory", 0o2755)
    os.chown(folder / "directory", USER, GROUP)
    assert permissions(folder / "directory") == 0o2755


def test_a_write_by_a_user_takes_setuid_and_setgid_away(folder: Path) -> None:
    path = owned(folder / "program", 0o6777)
    with as_user(USER + 1), opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"other")
    assert permissions(path) == 0o777


def test_a_truncation_by_a_user_takes_setuid_and_setgid_away(folder: Path) -> None:
    path = owned(folder / "program", 0o6777)
    with as_user(USER + 1):
        os.truncate(path, 3)
    assert permissions(path) == 0o777


def test_chmod_by_someone_outside_the_group_loses_setgid(folder: Path) -> None:
    path = owned(folder / "file")
    os.chown(path, USER, GROUP + 1)
    with as_user():
        os.chmod(path, 0o2755)
    assert permissions(path) == 0o755


def test_a_setgid_directory_gives_its_group_to_what_is_made_in_it(folder: Path) -> None:
    parent = folder / "parent"
    parent.mkdir()
    os.chown(parent, 0, GROUP)
    os.chmod(parent, 0o2777)
    with as_user(USER, GROUP + 1):
        (parent / "file").touch()
        (parent / "directory").mkdir(0o755)
        (parent / "link").symlink_to("file")
        os.mkfifo(parent / "fifo")
    for name in ("file", "directory", "link", "fifo"):
        assert os.lstat(parent / name).st_gid == GROUP, name
    assert permissions(parent / "directory") & 0o2000
    assert not permissions(parent / "file") & 0o2000


def test_an_ordinary_directory_does_not(folder: Path) -> None:
    with as_user():
        (folder / "file").touch()
    status = os.stat(folder / "file")
    assert (status.st_uid, status.st_gid) == (USER, GROUP)


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "groups", "readable"),
    [
        (0o400, USER, GROUP, [], True),
        (0o044, USER, GROUP, [], False),  # the owner's bits count for the owner, whatever the others say
        (0o040, USER + 1, GROUP, [], True),
        (0o404, USER + 1, GROUP, [], False),
        (0o004, USER + 1, GROUP + 1, [], True),
        (0o440, USER + 1, GROUP + 1, [], False),
        (0o040, USER + 1, GROUP + 1, [GROUP + 2, GROUP], True),
    ],
)
def test_who_may_read(folder: Path, mode: int, uid: int, gid: int, groups: list[int], readable: bool) -> None:
    path = owned(folder / "file", mode)
    with as_user(uid, gid, groups):
        if readable:
            assert path.read_bytes() == b"content"
        else:
            with fails(errno.EACCES):
                path.read_bytes()


def test_access_answers_for_the_real_user(folder: Path) -> None:
    path = owned(folder / "file", 0o600)
    assert os.access(path, os.R_OK | os.W_OK)
    assert not os.access(path, os.X_OK)
    with as_user(USER + 1):
        assert not os.access(path, os.R_OK, effective_ids=True)


def test_a_directory_without_search_hides_what_is_in_it(folder: Path) -> None:
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    os.chmod(folder / "closed", 0o644)
    with as_user(), fails(errno.EACCES):
        os.stat(folder / "closed" / "file")


def test_a_directory_without_write_takes_no_names(folder: Path) -> None:
    (folder / "closed").mkdir(0o755)
    with as_user(), fails(errno.EACCES):
        (folder / "closed" / "file").touch()


def test_only_the_owner_may_chmod_and_set_times(folder: Path) -> None:
    path = owned(folder / "file", 0o666)
    with as_user(USER + 1):
        with fails(errno.EPERM):
            os.chmod(path, 0o777)
        with fails(errno.EPERM):
            os.utime(path, (1, 1))
        os.utime(path)  # to now: whoever may write


def test_only_root_may_give_a_file_away(folder: Path) -> None:
    path = owned(folder / "file")
    with as_user(), fails(errno.EPERM):
        os.chown(path, USER + 1, -1)


def test_in_a_sticky_directory_only_owners_remove_and_rename(folder: Path) -> None:
    os.chmod(folder, 0o1777)
    owned(folder / "file", 0o666)
    with as_user(USER + 1):
        with fails(errno.EPERM):
            os.unlink(folder / "file")
        with fails(errno.EPERM):
            os.rename(folder / "file", folder / "other")
    with as_user():
        os.unlink(folder / "file")


def test_a_sticky_directory_protects_what_a_rename_would_replace(folder: Path) -> None:
    os.chmod(folder, 0o1777)
    owned(folder / "file", 0o666)
    with as_user(USER + 1):
        (folder / "mine").touch()
        with fails(errno.EPERM):
            os.rename(folder / "mine", folder / "file")
