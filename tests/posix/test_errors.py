"""Which error each call gives for which path. What fails changes nothing: no name, no attribute, no time."""

import errno
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from posix_calls import UTIME_NOW, as_user, fails, opened, utimensat

pytestmark = pytest.mark.root

Call = Callable[[str], object]


@pytest.fixture(scope="module")
def land(top: Path) -> Iterator[Path]:
    """Something of every kind, which no call of this module may change."""
    land = Path(tempfile.mkdtemp(dir=top))
    land.chmod(0o777)
    for name in ("directory", "full", "full/child", "closed", "read-only", "read-only/directory"):
        (land / name).mkdir()
    for name in ("file", "read-only/file"):
        (land / name).write_bytes(b"content")
        (land / name).chmod(0o666)
    for name, target in (("dangling", "absent"), ("loop", "loop"), ("to-directory", "directory"), ("to-file", "file")):
        (land / name).symlink_to(target)
    os.mkfifo(land / "fifo")
    with socket.socket(socket.AF_UNIX) as server, opened(land, os.O_RDONLY) as fd:
        server.bind(f"/proc/self/fd/{fd}/socket")  # a socket's path has 108 bytes at the most
    (land / "closed").chmod(0o600)
    (land / "read-only").chmod(0o555)
    yield land
    shutil.rmtree(land)


@pytest.fixture(scope="module")
def before(land: Path) -> dict[str, tuple[int, ...]]:
    return shown(land)


@pytest.fixture(autouse=True)
def nothing_changes(land: Path, before: dict[str, tuple[int, ...]]) -> Iterator[None]:
    yield
    assert shown(land) == before


def shown(land: Path) -> dict[str, tuple[int, ...]]:
    """Everything there is below, and what is known of it but for times of access."""
    paths = [land, *sorted(land.rglob("*"))]
    statuses = {str(path.relative_to(land)): os.lstat(path) for path in paths}
    return {
        name: (status.st_ino, status.st_mode, status.st_nlink, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in statuses.items()
    }


def number_of(call: Callable[[], object]) -> str:
    """The name of the errno that ``call`` fails with."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "none"


def open_with(flags: int) -> Call:
    return lambda path: os.close(os.open(path, flags | os.O_NONBLOCK, 0o644))  # or a fifo would be waited for


def calls(land: Path) -> dict[str, Call]:
    """Every call that takes a path."""
    file, fresh = str(land / "file"), str(land / "fresh")
    return {
        "stat": os.stat,
        "lstat": os.lstat,
        "statvfs": os.statvfs,
        "open": open_with(os.O_RDONLY),
        "open to write": open_with(os.O_WRONLY),
        "open or create": open_with(os.O_WRONLY | os.O_CREAT),
        "open without following": open_with(os.O_RDONLY | os.O_NOFOLLOW),
        "create": open_with(os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        "truncate": lambda path: os.truncate(path, 3),
        "chmod": lambda path: os.chmod(path, 0o600),
        "chown": lambda path: os.chown(path, 1, 1),
        "lchown": lambda path: os.lchown(path, 1, 1),
        "utimensat": lambda path: utimensat(path, (1, 1), (1, 1)),
        "mkdir": os.mkdir,
        "mkfifo": os.mkfifo,
        "mknod": lambda path: os.mknod(path, stat.S_IFREG | 0o644),
        "symlink": lambda path: os.symlink("target", path),
        "readlink": os.readlink,
        "link from": lambda path: os.link(path, fresh, follow_symlinks=False),
        "link to": lambda path: os.link(file, path),
        "rename from": lambda path: os.rename(path, fresh),
        "rename to": lambda path: os.rename(file, path),
        "unlink": os.unlink,
        "rmdir": os.rmdir,
        "list": os.listdir,
        "chdir": os.chdir,
        "getxattr": lambda path: os.getxattr(path, "user.name"),
        "setxattr": lambda path: os.setxattr(path, "user.name", b"value"),
        "listxattr": os.listxattr,
        "removexattr": lambda path: os.removexattr(path, "user.name"),
    }


NAMES = list(calls(Path()))

WAYS = {
    "absent/below": "ENOENT",
    "dangling/below": "ENOENT",
    "file/below": "ENOTDIR",
    "to-file/below": "ENOTDIR",
    "fifo/below": "ENOTDIR",
    "loop/below": "ELOOP",
    "n" * 256: "ENAMETOOLONG",
    "n" * 256 + "/below": "ENAMETOOLONG",
    "directory/" + "n" * 256: "ENAMETOOLONG",
    "./" * 2048 + "below": "ENAMETOOLONG",
}
"""a path below the land -> what every call says to it"""


@pytest.mark.parametrize("name", NAMES)
def test_the_way_to_a_name(land: Path, name: str) -> None:
    call = calls(land)[name]
    found = {way: number_of(lambda way=way: call(f"{land}/{way}")) for way in WAYS}
    assert found == WAYS
    assert number_of(lambda: call("")) == "ENOENT"
    with as_user():
        assert number_of(lambda: call(f"{land}/closed/below")) == "EACCES"


def test_a_chain_of_symlinks_may_have_forty(land: Path, folder: Path) -> None:
    (folder / "0").write_bytes(b"end")
    for number in range(41):
        (folder / f"{number + 1}").symlink_to(f"{number}")
    assert (folder / "40").read_bytes() == b"end"
    with fails(errno.ELOOP):
        os.stat(folder / "41")


MAKING = dict.fromkeys(("create", "mkdir", "mkfifo", "mknod", "symlink", "link to"), "EEXIST")
NO_LINK = {"readlink": "EINVAL"}
NO_DIRECTORY = dict.fromkeys(("rmdir", "list", "chdir"), "ENOTDIR")
FOLLOWING = ("stat", "statvfs", "open", "open to write", "truncate", "chmod", "chown", "utimensat", "list", "chdir")
XATTRS = ("getxattr", "setxattr", "listxattr", "removexattr")
THE_NAME_ITSELF = ("lstat", "lchown", "readlink", "link from", "rename from", "unlink", "rmdir")

REFUSED: dict[str, dict[str, str]] = {
    "file": MAKING | NO_LINK | NO_DIRECTORY,
    "fifo": MAKING | NO_LINK | NO_DIRECTORY | {"open to write": "ENXIO", "truncate": "EINVAL"},
    "socket": MAKING
    | NO_LINK
    | NO_DIRECTORY
    | dict.fromkeys(("open", "open to write", "open or create", "open without following"), "ENXIO")
    | {"truncate": "EINVAL"},
    "full": MAKING
    | NO_LINK
    | dict.fromkeys(("open to write", "open or create", "truncate", "unlink", "rename to"), "EISDIR")
    | {"link from": "EPERM", "rmdir": "ENOTEMPTY"},
    "to-directory": MAKING
    | dict.fromkeys(("open to write", "open or create", "truncate"), "EISDIR")
    | {"open without following": "ELOOP", "rmdir": "ENOTDIR"},
    "loop": MAKING
    | dict.fromkeys((*FOLLOWING, *XATTRS, "open or create", "open without following"), "ELOOP")
    | {"rmdir": "ENOTDIR"},
    "absent": dict.fromkeys((*FOLLOWING, *XATTRS, "open without following", *THE_NAME_ITSELF), "ENOENT"),
    "file/": dict.fromkeys(
        ("stat", "lstat", "open", "truncate", "chmod", "unlink", "rmdir", "rename from", "link from", "list"), "ENOTDIR"
    )
    | {"mkdir": "EEXIST", "open or create": "EISDIR"},
    "to-directory/": {"rmdir": "ENOTDIR", "unlink": "ENOTDIR", "mkdir": "EEXIST", "readlink": "EINVAL"},
    "directory/.": MAKING | {"rmdir": "EINVAL", "unlink": "EISDIR", "rename from": "EBUSY", "rename to": "EBUSY"},
    "full/child/..": MAKING | {"rmdir": "ENOTEMPTY", "unlink": "EISDIR", "rename from": "EBUSY", "rename to": "EBUSY"},
}
"""a name -> the calls that it refuses; those not named here may do something to it"""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_name_refuses(land: Path, name: str) -> None:
    found = {call: number_of(lambda call=call: calls(land)[call](f"{land}/{name}")) for call in REFUSED[name]}
    assert found == REFUSED[name]


def test_a_directory_without_write_permission(land: Path) -> None:
    expected = dict.fromkeys(("create", "mkdir", "mkfifo", "mknod", "symlink", "link to", "rename to"), "new")
    expected |= dict.fromkeys(("unlink", "rename from"), "file") | {"rmdir": "directory"}
    with as_user():
        found = {
            name: number_of(lambda call=call, path=f"{land}/read-only/{expected[name]}": call(path))
            for name, call in calls(land).items()
            if name in expected
        }
    assert found == dict.fromkeys(expected, "EACCES")


def test_another_file_system(land: Path, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    other = tmp_path if tmp_path.stat().st_dev != land.stat().st_dev else Path(tempfile.mkdtemp(dir=shm))
    try:
        (other / "file").touch()
        for call in (os.rename, os.link):
            with fails(errno.EXDEV):
                call(land / "file", other / "new")
            with fails(errno.EXDEV):
                call(other / "file", land / "new")
    finally:
        shutil.rmtree(other)


@pytest.mark.parametrize("nanoseconds", [-1, 10**9, UTIME_NOW + 1])
def test_nanoseconds_that_are_none(land: Path, nanoseconds: int) -> None:
    with fails(errno.EINVAL):
        utimensat(land / "file", (1, 0), (1, nanoseconds))


def test_a_directory_takes_no_descriptor_for_creation(land: Path) -> None:
    for flags in (os.O_CREAT | os.O_RDONLY, os.O_TRUNC | os.O_RDONLY, os.O_RDWR):
        with fails(errno.EISDIR):
            os.open(land / "directory", flags)


def test_what_only_root_may_make(land: Path) -> None:
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        with as_user(), fails(errno.EPERM):
            os.mknod(land / "new", kind | 0o666, os.makedev(1, 3))


def test_a_program_that_runs_is_not_written(land: Path, folder: Path) -> None:
    program = folder / "program"
    shutil.copy(shutil.which("cat") or "", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as running:
        with fails(errno.ETXTBSY):
            os.open(program, os.O_WRONLY)
        with fails(errno.ETXTBSY):
            os.truncate(program, 0)
        running.communicate(timeout=30)
    os.truncate(program, 0)
