"""MNT/.kvfuse/control.sock: who makes it, who reaches it, and that nothing of it keeps the mount from its end."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from door_daemon import DOOR_DAEMON, connected, wait_for_door
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import fails

from kvfuse.errors import MountError, NotPermitted
from kvfuse.fs.control import open_control_socket, wait_until_unmounted
from kvfuse.fs.virtual import FOLDER_INODE, SOCKET_NAME, VirtualFolder
from kvfuse.kept.keeper import NO_KEEPER

WORDS = ("allow_other", "volume.capacity=64MiB", "volume.segment_size=16MiB")
PERMISSION = 1
READ_ONLY = 30

CONNECT = """
import os, socket, sys
if int(sys.argv[2]):
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
client.send(b'["ino", 1, "."]')
assert client.recv(100) == b'{"value": 1}'
"""


def socket_of(mount: KvfuseMount) -> Path:
    return mount.point / ".kvfuse" / "control.sock"


@pytest.fixture
def door(request: pytest.FixtureRequest) -> Iterator[KvfuseMount]:
    """A mount with a door. A parameter is what stands before the daemon's command."""
    with temporary_mount(WORDS, (*getattr(request, "param", ()), *DOOR_DAEMON)) as mount:
        wait_for_door(mount.point)
        yield mount


# -- what it is -------------------------------------------------------------------------------------


def test_it_is_a_socket_of_the_daemons_user_for_everybody(door: KvfuseMount) -> None:
    assert sorted(os.listdir(door.point / ".kvfuse")) == [
        "clients",
        "config",
        "control.sock",
        "profile",
        "stats",
        "version",
    ]
    status = os.stat(socket_of(door))
    assert status.st_mode == stat.S_IFSOCK | 0o666
    assert status.st_uid == os.geteuid()


@pytest.mark.root
def test_nobody_else_makes_or_removes_sockets_there(door: KvfuseMount) -> None:
    folder = door.point / ".kvfuse"
    with fails(PERMISSION):
        os.mknod(folder / "other", stat.S_IFSOCK | 0o666)
    with fails(PERMISSION), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(folder / "other"))
    with fails(PERMISSION):
        os.unlink(socket_of(door))
    with fails(PERMISSION):
        os.chmod(socket_of(door), 0o600)
    with fails(PERMISSION):
        os.link(socket_of(door), door.point / "link")


@pytest.mark.parametrize(
    ("name", "mode"),
    [(SOCKET_NAME, stat.S_IFSOCK), (b"another.sock", stat.S_IFSOCK), (b"once.sock", stat.S_IFREG)],
)
def test_only_who_knows_the_name_makes_only_this_socket(name: bytes, mode: int) -> None:
    folder = VirtualFolder({b"stats": lambda _: b""})
    with pytest.raises(NotPermitted):
        folder.make_socket(b"once.sock", stat.S_IFSOCK)
    folder.binding = b"once.sock"
    with pytest.raises(NotPermitted):
        folder.make_socket(name, mode | 0o666)
    made = folder.make_socket(b"once.sock", stat.S_IFSOCK | 0o600)
    assert folder.lookup(SOCKET_NAME) is made
    assert folder.get_attributes(made.ino) is made
    assert [row.name for row in folder.list_files(0)] == [b"stats", SOCKET_NAME]
    assert made.ino != FOLDER_INODE
    with pytest.raises(NotPermitted):  # admitted for one socket
        folder.make_socket(b"once.sock", stat.S_IFSOCK)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_option_says_whether_there_is_one(enabled: bool) -> None:
    with temporary_mount((*WORDS, f"usrbio.enabled={str(enabled).lower()}")) as mount:
        wait_until(lambda: "is mounted on" in mount.log.read_text(), "the daemon's readiness")
        assert socket_of(mount).exists() == enabled


# -- who reaches it ---------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("user", [0, 65534])
def test_a_container_with_the_mount_bound_into_it_connects(door: KvfuseMount, user: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as inside:
        os.chmod(inside, 0o755)
        script = 'mount --bind "$1" "$2"; umount "$1"; exec "$3" -I -S -c "$4" "$2/.kvfuse/control.sock" "$5"'
        arguments = [str(door.point), inside, sys.executable, CONNECT, str(user)]
        command = ["unshare", "-m", "--propagation", "slave", "-n", "sh", "-e", "-c", script, "sh", *arguments]
        subprocess.run(command, check=True, timeout=30)


def test_a_mount_point_may_have_a_long_path() -> None:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as base:
        deep = Path(base) / ("d" * 200)
        deep.mkdir()
        mount = KvfuseMount(deep, WORDS, DOOR_DAEMON)
        try:
            mount.mount()
            wait_for_door(mount.point)
            mount.unmount()
            mount.fsck()
        finally:
            mount.remove()


@pytest.mark.root
@pytest.mark.parametrize("door", [("unshare", "--pid", "--fork")], indirect=True)
def test_a_daemon_in_a_process_namespace_of_its_own_has_it(door: KvfuseMount) -> None:
    with connected(door.point) as client:
        assert client.ino(1, ".") == 1


@pytest.mark.root
def test_a_read_only_mount_has_it(door: KvfuseMount) -> None:
    door.unmount()
    door.words = (*WORDS, "ro", "nodev", "noatime")
    door.mount()
    wait_for_door(door.point)
    wait_until(lambda: bool(os.statvfs(door.point).f_flag & os.ST_RDONLY), "the kernel's knowing of it")
    assert os.statvfs(door.point).f_flag & (os.ST_NODEV | os.ST_NOATIME) == os.ST_NODEV | os.ST_NOATIME
    with fails(READ_ONLY):
        os.mkdir(door.point / "directory")


# -- the end ----------------------------------------------------------------------------------------


def test_an_unmount_succeeds_while_clients_are_connected_and_ends_their_connections(door: KvfuseMount) -> None:
    (door.point / "file").write_bytes(b"content")
    with connected(door.point) as client:
        assert client.ino(1, "file")
        door.unmount()
        assert client.socket.recv(1) == b""
    door.mount()
    assert (door.point / "file").read_bytes() == b"content"


@pytest.mark.root
def test_fusermount_unmounts_too(door: KvfuseMount) -> None:
    with connected(door.point):
        subprocess.run(["fusermount3", "-u", str(door.point)], check=True, timeout=30)
        door.wait(0)


def test_sigterm_ends_connections(door: KvfuseMount) -> None:
    with connected(door.point) as client:
        door.terminate()
        assert client.socket.recv(1) == b""


def test_an_unmount_right_after_the_mount_meets_the_binding(door: KvfuseMount) -> None:
    """At whatever moment it comes, the mount is not busy and the daemon ends."""
    for _ in range(5):
        door.unmount()
        door.mount()


@pytest.mark.root
def test_while_another_mount_of_it_remains_the_doors_stay_open(door: KvfuseMount) -> None:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as other, connected(door.point) as client:
        subprocess.run(["mount", "--bind", str(door.point), other], check=True)
        subprocess.run(["umount", str(door.point)], check=True)
        assert client.ino(1, ".") == 1
        subprocess.run(["umount", other], check=True)
        door.wait(0)


def test_a_door_that_fails_is_closed_and_the_mount_goes_on(door: KvfuseMount) -> None:
    with connected(door.point) as client:
        client.send("fail")
        assert client.socket.recv(1) == b""
    wait_until(lambda: refuses(door.point), "the end of the listener")
    (door.point / "file").write_bytes(b"content")
    assert "ZeroDivisionError: the door fails" in door.log.read_text()


def refuses(point: Path) -> bool:
    try:
        with connected(point):
            return False
    except ConnectionRefusedError:
        return True


async def test_where_no_socket_can_be_bound_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(MountError, match="No such file"):
        async with open_control_socket(tmp_path, lambda name: None, NO_KEEPER):
            raise AssertionError("it was bound")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "kvfuse-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-q", str(tmp_path)], check=False)


@pytest.mark.root
async def test_the_end_of_a_mount_is_noticed_and_the_wait_can_be_given_up(tmpfs: Path) -> None:
    device = os.stat(tmpfs).st_dev
    with trio.move_on_after(0.1) as scope:
        await wait_until_unmounted(device)
    assert scope.cancelled_caught
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_until_unmounted, device)
            await trio.testing.wait_all_tasks_blocked()
            await trio.run_process(["umount", str(tmpfs)])


FOLLOW_IN_SMALL_ROOT = """
import ctypes, os, subprocess, sys, trio
from kvfuse.fs.control import wait_until_unmounted

libc = ctypes.CDLL(None)
for name in ("proc", "first", "second"):
    os.mkdir(f"{sys.argv[1]}/{name}")
    kind = name if name == "proc" else "tmpfs"
    subprocess.run(["mount", "-t", kind, name, f"{sys.argv[1]}/{name}"], check=True)
os.chroot(sys.argv[1])  # what is not below it is not in the table
os.chdir("/")
with open("/proc/self/mountinfo", "rb") as table:
    rows = table.read().splitlines()
    assert sum(map(len, rows)) < 512, rows
first = os.fsdecode(next(row.split()[4] for row in rows if b"first" in row or b"second" in row))

async def main():
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_until_unmounted, os.stat(first).st_dev)
            await trio.sleep(0.3)  # by then the thread has read the table, most likely
            assert libc.umount2(first.encode(), 0) == 0

trio.run(main)
"""


@pytest.mark.root
def test_the_end_of_a_mount_is_noticed_where_the_table_is_small(tmp_path: Path) -> None:
    """As in a container: a file's buffer holds all of it, with the rows of other mounts behind its own."""
    subprocess.run(["mount", "-t", "tmpfs", "kvfuse-test", str(tmp_path)], check=True)
    try:
        command = ["unshare", "-m", "--propagation", "slave", sys.executable, "-c", FOLLOW_IN_SMALL_ROOT, tmp_path]
        subprocess.run(command, check=True, timeout=60)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
