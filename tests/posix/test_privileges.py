"""Setuid, setgid and capabilities of files: what each change takes away, compared with a file system of the kernel's.

`CHANGES` are made by `CALLERS` to files of `MODES`, here and in tmpfs, which must agree. Mapped writes are not in it:
the kernel's file systems leave these bits then, and kvfuse takes them from a user.
"""

import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path

import pytest
from engine_pairs import BLOCKS
from posix_calls import GROUP, USER, as_user, fails, opened, permissions

pytestmark = [pytest.mark.root, pytest.mark.engines("lmdb+file", BLOCKS)]

Call = Callable[[Path], object]

CAPABILITY = "security.capability"
MAY_BIND_PORTS = struct.pack("<5I", 0x0200_0001, 1 << 10, 0, 0, 0)
"""``struct vfs_cap_data``, effective: CAP_NET_BIND_SERVICE"""
OTHER, OTHER_GROUP = USER + 1, GROUP + 1

CALLERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "root": nullcontext,
    "owner": as_user,
    "owner of another group": lambda: as_user(USER, OTHER_GROUP),
    "group member": lambda: as_user(OTHER, OTHER_GROUP, (GROUP,)),
    "stranger": lambda: as_user(OTHER, OTHER_GROUP),
}
MODES = (0o6777, 0o6767, 0o4666, 0o2777, 0o2767, 0o2666, 0o777)


@pytest.fixture
def reference() -> Iterator[Path]:
    """An empty folder of tmpfs, writable by everybody."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def make(path: Path, mode: int, *, capability: bool = False) -> Path:
    """A program of the test user's, and what beside its mode gives it privileges."""
    path.write_bytes(b"content")
    os.chown(path, USER, GROUP)
    os.chmod(path, mode)
    os.setxattr(path, "user.name", b"value")
    if capability:
        os.setxattr(path, CAPABILITY, MAY_BIND_PORTS)
    return path


def state(path: Path) -> tuple[str, list[str]]:
    """Mode and names of attributes, whatever the call did to the path."""
    path = path if path.exists() else path.with_name("renamed")
    names = [name for name in os.listxattr(path) if name in ("user.name", CAPABILITY)]
    return oct(permissions(path)), sorted(names)


def with_descriptor(flags: int, call: Callable[[int], object]) -> Call:
    def change(path: Path) -> None:
        with opened(path, flags) as fd:
            call(fd)

    return change


def copy_into(path: Path) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.copy_file_range(fd, fd, 3, 0, 4)


def send_into(path: Path) -> None:
    with opened(Path(__file__), os.O_RDONLY) as source, opened(path, os.O_WRONLY) as target:
        os.sendfile(target, source, 0, 10)


CHANGES: dict[str, Call] = {
    "write": with_descriptor(os.O_WRONLY, lambda fd: os.write(fd, b"x")),
    "append": with_descriptor(os.O_WRONLY | os.O_APPEND, lambda fd: os.writev(fd, [b"x", b"y"])),
    "write of nothing": with_descriptor(os.O_WRONLY, lambda fd: os.write(fd, b"")),
    "open for writing": with_descriptor(os.O_RDWR, lambda fd: os.read(fd, 1)),
    "truncate": lambda path: os.truncate(path, 3),
    "truncate to the same size": lambda path: os.truncate(path, 7),
    "ftruncate": with_descriptor(os.O_WRONLY, lambda fd: os.ftruncate(fd, 100)),
    "open with O_TRUNC": with_descriptor(os.O_WRONLY | os.O_TRUNC, lambda fd: None),
    "copy_file_range": copy_into,
    "sendfile": send_into,
    "chown to nobody else": lambda path: os.chown(path, -1, -1),
    "chown of the owner": lambda path: os.chown(path, USER, -1),
    "chown of the group": lambda path: os.chown(path, -1, OTHER_GROUP),
    "chmod to 6777": lambda path: os.chmod(path, 0o6777),
    "chmod to 2767": lambda path: os.chmod(path, 0o2767),
    "touch": os.utime,
    "link": lambda path: os.link(path, path.with_name("link")),
    "rename": lambda path: os.rename(path, path.with_name("renamed")),
    "setxattr": lambda path: os.setxattr(path, "user.name", b"other"),
}


def outcome(folder: Path, change: Call, caller: str, mode: int, capability: bool) -> tuple[str, object]:
    """What the call said, and how the file is then."""
    path = make(folder / "program", mode, capability=capability)
    said = "done"
    with CALLERS[caller]():
        try:
            change(path)
        except OSError as error:
            said = errno.errorcode[error.errno or 0]
    found = said, state(path)
    for left in folder.iterdir():
        left.unlink()
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_what_the_kernel_takes(folder: Path, reference: Path, name: str) -> None:
    rows = [*product(CALLERS, MODES, [False]), *product(CALLERS, [0o6767, 0o777], [True])]
    wrong = []
    for row in rows:
        expected, found = (outcome(place, CHANGES[name], *row) for place in (reference, folder))
        if found != expected:
            wrong.append(f"{row}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


MADE: dict[str, Callable[[Path, int], object]] = {
    "file": lambda path, mode: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, mode)),
    "fifo": os.mkfifo,
    "mknod": lambda path, mode: os.mknod(path, 0o100000 | mode),
    "directory": os.mkdir,
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_has_the_mode_that_the_kernel_gives(folder: Path, reference: Path, kind: str) -> None:
    wrong = []
    for caller, parent_mode, mode in product(CALLERS, (0o777, 0o2777), (0o6777, 0o2777, 0o2767, 0o4755, 0o644)):
        found = []
        for place in (reference, folder):
            parent = place / "parent"
            parent.mkdir()
            os.chown(parent, USER, GROUP)
            os.chmod(parent, parent_mode)
            with CALLERS[caller]():
                MADE[kind](parent / "made", mode)
            found.append((oct(permissions(parent / "made")), os.lstat(parent / "made").st_gid))
            shutil.rmtree(parent)
        if found[0] != found[1]:
            wrong.append(f"{caller}, {parent_mode:o}, {mode:o}: {found[1]}, not {found[0]}")
    assert not wrong, "\n".join(wrong)


EXECUTED_BY = {"nobody": 0o664, "the user": 0o764, "the group": 0o674, "user and group": 0o774}


@pytest.mark.parametrize("who", EXECUTED_BY)
@pytest.mark.parametrize("change", ["chown", "truncate", "write", "open with O_TRUNC"])
def test_set_id_bits_after_a_change_by_the_owner(folder: Path, change: str, who: str) -> None:
    """The cases of xfstests generic/193, and those of a write."""
    plain = EXECUTED_BY[who]
    path = make(folder / "file", 0o6000 | plain)
    calls: dict[str, Call] = {**CHANGES, "chown": lambda path: os.chown(path, -1, GROUP)}
    with as_user():
        calls[change](path)
    kept = 0 if plain & 0o010 else 0o2000
    assert permissions(path) == plain | kept


@pytest.mark.parametrize("who", EXECUTED_BY)
def test_set_id_bits_after_a_change_by_root(folder: Path, who: str) -> None:
    """As there: a chown by root takes setuid all the same, a truncation takes nothing."""
    plain = EXECUTED_BY[who]
    path = make(folder / "file", 0o6000 | plain)
    os.truncate(path, 1)
    assert permissions(path) == 0o6000 | plain
    os.chown(path, OTHER, OTHER_GROUP)
    assert permissions(path) == plain | (0 if plain & 0o010 else 0o2000)


def test_chmod_by_the_owner_gives_no_group_away(folder: Path) -> None:
    """As there: the owner sets any bit but the setgid bit of a group that it is not in."""
    path = make(folder / "file", 0o644)
    with as_user():
        os.chmod(path, 0o6777)
    assert permissions(path) == 0o6777
    with as_user(USER, OTHER_GROUP):
        os.chmod(path, 0o6777)
    assert permissions(path) == 0o4777


def test_a_directory_keeps_its_setgid_bit(folder: Path) -> None:
    (folder / "directory").mkdir()
    os.chown(folder / "directory", USER, GROUP)
    os.chmod(folder / "directory", 0o2777)
    with as_user(USER, GROUP, (OTHER_GROUP,)):
        os.chown(folder / "directory", -1, OTHER_GROUP)
    with as_user(OTHER, OTHER_GROUP):
        (folder / "directory" / "file").touch()
    assert permissions(folder / "directory") == 0o2777


def test_attributes_that_give_privileges_are_for_root_to_set(folder: Path) -> None:
    path = make(folder / "file", 0o777)
    with as_user():
        for name in (CAPABILITY, "security.other", "trusted.name"):
            with fails(errno.EPERM):
                os.setxattr(path, name, MAY_BIND_PORTS)
    with fails(errno.EINVAL):
        os.setxattr(path, CAPABILITY, b"no capability")


def test_attributes_of_a_sticky_directory_are_its_owners(folder: Path) -> None:
    os.chmod(folder, 0o1777)
    with as_user(), fails(errno.EPERM):
        os.setxattr(folder, "user.name", b"value")
    os.chmod(folder, 0o777)
    with as_user():
        os.setxattr(folder, "user.name", b"value")


def test_capabilities_stay_through_rename_link_and_reading(folder: Path) -> None:
    path = make(folder / "file", 0o755, capability=True)
    os.rename(path, folder / "renamed")
    os.link(folder / "renamed", folder / "link")
    os.chmod(folder / "link", 0o700)
    (folder / "link").read_bytes()
    assert os.getxattr(folder / "renamed", CAPABILITY) == MAY_BIND_PORTS
