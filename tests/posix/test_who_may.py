"""Who may do what: permission bits by class, sticky directories, owners, groups and times; what a change takes away.

Each test goes through a table, and compares what was allowed with what should be. What is refused moves no time.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path

import pytest
from posix_calls import GROUP, USER, UTIME_NOW, UTIME_OMIT, as_user, opened, permissions, utimensat

pytestmark = pytest.mark.root

Call = Callable[[Path], object]

OTHER, OTHER_GROUP = USER + 1, GROUP + 1
READ, WRITE, SEARCH = 4, 2, 1

CLASSES: dict[str, tuple[int, tuple[int, int, tuple[int, ...]]]] = {
    "owner": (6, (USER, GROUP, ())),
    "group": (3, (OTHER, GROUP, ())),
    "further group": (3, (OTHER, OTHER_GROUP, (GROUP,))),
    "others": (0, (OTHER, OTHER_GROUP, ())),
}
"""class of users -> by how much its bits are shifted in a mode; uid, gid, further groups of one in it"""


def outcome(call: Callable[[], object], path: Path) -> str:
    """ "done", or the name of the errno: then the times of ``path`` are as they were."""
    before = os.lstat(path)
    try:
        call()
    except OSError as error:
        after = os.lstat(path)
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        return errno.errorcode[error.errno or 0]
    return "done"


def make_file(path: Path, uid: int = USER, gid: int = GROUP, mode: int = 0o644) -> Path:
    """Of somebody, with a few bytes."""
    path.write_bytes(b"content")
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    return path


def make_directory(path: Path, uid: int = USER, mode: int = 0o755) -> Path:
    path.mkdir()
    os.chown(path, uid, GROUP)
    os.chmod(path, mode)
    return path


def open_with(flags: int) -> Call:
    return lambda path: os.close(os.open(path, flags))


def execute(path: Path) -> None:
    if not os.access(path, os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, "not executable")


OF_FILES: dict[str, tuple[int, Call]] = {
    "O_RDONLY": (READ, open_with(os.O_RDONLY)),
    "O_WRONLY": (WRITE, open_with(os.O_WRONLY)),
    "O_RDWR": (READ | WRITE, open_with(os.O_RDWR)),
    "O_WRONLY, O_APPEND": (WRITE, open_with(os.O_WRONLY | os.O_APPEND)),
    "O_RDONLY, O_TRUNC": (READ | WRITE, open_with(os.O_RDONLY | os.O_TRUNC)),
    "O_WRONLY, O_TRUNC": (WRITE, open_with(os.O_WRONLY | os.O_TRUNC)),
    "O_RDWR, O_CREAT": (READ | WRITE, open_with(os.O_RDWR | os.O_CREAT)),
    "truncate": (WRITE, lambda path: os.truncate(path, 3)),
    "listxattr": (0, os.listxattr),
    "stat": (0, os.stat),
    "execute": (SEARCH, execute),
}
OF_DIRECTORIES: dict[str, tuple[int, Call]] = {
    "list": (READ, os.listdir),
    "stat below": (SEARCH, lambda path: os.stat(path / "file")),
    "open below": (SEARCH, lambda path: os.close(os.open(path / "file", os.O_RDONLY))),
    "create and unlink": (WRITE | SEARCH, lambda path: ((path / "new").touch(), os.unlink(path / "new"))),
    "mkdir and rmdir": (WRITE | SEARCH, lambda path: (os.mkdir(path / "new"), os.rmdir(path / "new"))),
    "rename": (
        WRITE | SEARCH,
        lambda path: (os.rename(path / "file", path / "b"), os.rename(path / "b", path / "file")),
    ),
}
"""what is done -> the bits it needs, and how"""


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("make", "calls"), [(make_file, OF_FILES), (make_directory, OF_DIRECTORIES)])
def test_the_bits_of_a_class(folder: Path, name: str, make: Callable[[Path], Path], calls: dict) -> None:
    """Those of the other classes, which allow everything here, do not count."""
    shift, who = CLASSES[name]
    path = make(folder / "it")
    if calls is OF_DIRECTORIES:
        make_file(path / "file", mode=0o666)
    found, expected = {}, {}
    for bits, (call_name, (needed, call)) in product(range(8), calls.items()):
        if permissions(path) != (mode := 0o777 & ~(0o7 << shift) | bits << shift):
            os.chmod(path, mode)
        with as_user(*who):
            found[bits, call_name] = outcome(lambda call=call: call(path), path)
        expected[bits, call_name] = "done" if bits & needed == needed else "EACCES"
    assert found == expected


def remove_over(directory: Path, name: str) -> None:
    """Take a name by renaming what the caller owns over it."""
    mine = directory / "mine"
    (mine.mkdir if (directory / name).is_dir() else mine.touch)()
    try:
        os.rename(mine, directory / name)
    finally:
        if mine.exists():
            (mine.rmdir if mine.is_dir() else mine.unlink)()


REMOVALS: dict[str, Callable[[Path, str], object]] = {
    "remove": lambda directory, name: (os.rmdir if (directory / name).is_dir() else os.unlink)(directory / name),
    "rename": lambda directory, name: os.rename(directory / name, directory / "renamed"),
    "replace": remove_over,
}


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("make", [make_file, make_directory])
def test_sticky_directories(folder: Path, make: Callable[..., Path], removal: str) -> None:
    """The owner of the directory, and of what is in it, may take a name from it; nobody else."""
    found, expected = {}, {}
    for owner, whose in product((0, USER, OTHER), (0, USER, OTHER)):
        directory = make_directory(folder / f"{owner}-{whose}", owner, 0o1777)
        make(directory / "it", whose)
        with as_user():
            found[owner, whose] = outcome(lambda d=directory: REMOVALS[removal](d, "it"), folder)
        expected[owner, whose] = "done" if USER in (owner, whose) else "EPERM"
    assert found == expected


def test_a_directory_moves_only_with_write_permission_on_itself(folder: Path) -> None:
    """Its entry for the parent changes. Another name in the same parent needs none."""
    make_directory(folder / "target", mode=0o777)
    path = make_directory(folder / "directory", mode=0o555)
    with as_user():
        assert outcome(lambda: os.rename(path, folder / "target" / "moved"), path) == "EACCES"
        os.rename(path, folder / "renamed")
        os.chmod(folder / "renamed", 0o755)
        os.rename(folder / "renamed", folder / "target" / "moved")


CHOWNS: list[tuple[int, tuple[int, ...], int, int, str]] = [
    (USER, (), -1, -1, "done"),
    (USER, (), USER, -1, "done"),
    (USER, (), USER, GROUP, "done"),
    (USER, (OTHER_GROUP,), -1, OTHER_GROUP, "done"),
    (USER, (OTHER_GROUP,), USER, OTHER_GROUP, "done"),
    (USER, (), -1, OTHER_GROUP, "EPERM"),
    (USER, (), OTHER, -1, "EPERM"),
    (USER, (OTHER_GROUP,), OTHER, OTHER_GROUP, "EPERM"),
    (USER, (), 0, 0, "EPERM"),
    (OTHER, (), -1, GROUP, "EPERM"),
    (OTHER, (), OTHER, -1, "EPERM"),
    (OTHER, (OTHER_GROUP,), -1, OTHER_GROUP, "EPERM"),
]
"""caller, its further groups, uid and gid to be set on a file of the test user's, what is said"""


@pytest.mark.parametrize("make", [make_file, make_directory])
def test_who_may_chown(folder: Path, make: Callable[[Path], Path]) -> None:
    found = []
    for number, (caller, groups, uid, gid, _) in enumerate(CHOWNS):
        path = make(folder / f"{number}")
        with as_user(caller, GROUP, groups):
            found.append(outcome(lambda p=path, u=uid, g=gid: os.chown(p, u, g), path))
        owners = (os.stat(path).st_uid, os.stat(path).st_gid)
        assert owners == (USER, OTHER_GROUP if found[-1] == "done" and gid == OTHER_GROUP else GROUP)
    assert found == [row[-1] for row in CHOWNS]


@pytest.mark.parametrize("make", [make_file, make_directory])
def test_who_may_chmod(folder: Path, make: Callable[[Path], Path]) -> None:
    path = make(folder / "it")
    callers = {USER: "done", OTHER: "EPERM", 0: "done"}
    for caller, expected in callers.items():
        with as_user(caller, GROUP):
            assert outcome(lambda: os.chmod(path, 0o700), path) == expected, caller


NOW, OMITTED, GIVEN = (0, UTIME_NOW), (0, UTIME_OMIT), (5, 6)
TIMES: list[tuple[tuple[int, int], tuple[int, int], str, str]] = [
    (NOW, NOW, "done", "EACCES"),
    (OMITTED, OMITTED, "done", "done"),
    (GIVEN, GIVEN, "EPERM", "EPERM"),
    (GIVEN, NOW, "EPERM", "EPERM"),
    (NOW, OMITTED, "EPERM", "EPERM"),
    (OMITTED, GIVEN, "EPERM", "EPERM"),
]
"""atime, mtime, what is said to somebody who may write, and who may read"""


def test_who_may_set_times(folder: Path) -> None:
    for mode, column in ((0o666, 2), (0o644, 3)):
        path = make_file(folder / f"{mode}", mode=mode)
        with as_user(OTHER):
            found = [outcome(lambda r=row, p=path: utimensat(p, r[0], r[1]), path) for row in TIMES]
        assert found == [row[column] for row in TIMES]
        with as_user():
            assert {outcome(lambda r=row, p=path: utimensat(p, r[0], r[1]), path) for row in TIMES} == {"done"}


def write_some(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"other")


TAKES_AWAY: dict[str, tuple[Call, bool]] = {
    "write": (write_some, False),
    "truncate": (lambda path: os.truncate(path, 3), False),
    "O_TRUNC": (open_with(os.O_WRONLY | os.O_TRUNC), False),
    "chown": (lambda path: os.chown(path, -1, GROUP), True),
}
"""what takes setuid and setgid away -> how, and whether from root's hands, too"""


@pytest.mark.parametrize("caller", [USER, 0])
@pytest.mark.parametrize("name", TAKES_AWAY)
def test_what_takes_setuid_and_setgid_away(folder: Path, name: str, caller: int) -> None:
    call, always = TAKES_AWAY[name]
    path = make_file(folder / "program", mode=0o6777)
    who: AbstractContextManager[None] = as_user() if caller else nullcontext()
    with who:
        call(path)
    assert permissions(path) == (0o777 if caller or always else 0o6777)


@pytest.mark.parametrize("mode", [0o2666, 0o6766, 0o2767])
@pytest.mark.parametrize("name", [name for name, (_, always) in TAKES_AWAY.items() if not always])
def test_others_take_setgid_away_that_the_group_cannot_execute(folder: Path, name: str, mode: int) -> None:
    path = make_file(folder / "file", mode=mode)
    with as_user(OTHER, OTHER_GROUP):
        TAKES_AWAY[name][0](path)
    assert permissions(path) == mode & 0o777


@pytest.mark.parametrize("caller", [USER, 0])
def test_a_new_group_and_setgid_that_the_group_cannot_execute(folder: Path, caller: int) -> None:
    """Root's hand leaves it; anybody else's takes it from who is not of the group."""
    path = make_file(folder / "file", gid=OTHER_GROUP, mode=0o2666)
    with as_user() if caller else nullcontext():
        os.chown(path, -1, GROUP)
    assert permissions(path) == (0o666 if caller else 0o2666)


@pytest.mark.parametrize("groups", [(), (OTHER_GROUP,)])
def test_setgid_needs_the_group(folder: Path, groups: Sequence[int]) -> None:
    path = make_file(folder / "file", gid=OTHER_GROUP)
    with as_user(groups=groups):
        os.chmod(path, 0o2755)
    assert permissions(path) == (0o2755 if groups else 0o755)
