"""Rings serve whoever has the mount, and nobody gets more through them than through system calls."""

from __future__ import annotations

import json
import mmap
import os
import random
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from errno import EACCES, EBADF, ENOENT, EPERM, EROFS, ESTALE
from pathlib import Path

import numpy as np
import pytest
from mounting import PATIENCE_S, KvfuseMount, temporary_mount
from places import LABS
from posix_calls import GROUP, USER, as_user, fallocate, opened
from ring_lab import RawClient, wait_for_rings

from kvfuse.usrbio.client import Client, Iov, Namespace, Ring, connect
from kvfuse.usrbio.protocol.wire import Request

pytestmark = pytest.mark.root

KIB, MIB = 1 << 10, 1 << 20
WORDS = ("allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB", "cache.tier_size=64MiB")
GUEST = LABS / "ring_guest.py"
CONTENT = b"0123456789abcdef" * 4 * KIB
PUNCH = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
REFUSED = (EACCES, EPERM)

IN_CONTAINER = """
mount -t tmpfs none "$2"
mkdir "$2/mnt" "$2/proc"
mount --bind "$1" "$2/mnt"
mount --bind /proc "$2/proc"
umount "$1"
exec "$3" "$4" "$2" /mnt "$5"
"""


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


@pytest.fixture
def folder(mount: KvfuseMount, request: pytest.FixtureRequest) -> Path:
    made = mount.point / request.node.name
    made.mkdir()
    made.chmod(0o755)
    return made


class User:
    """A client of another user, with a folder as its namespace."""

    def __init__(self, folder: Path, uid: int = USER, groups: Sequence[int] = ()) -> None:
        with as_user(uid, groups=groups):
            self.client: Client = connect(folder)
            self.namespace: Namespace = self.client.namespace(folder, create=False)
            self.iov: Iov = self.client.iov(MIB)
            self.ring: Ring = self.client.ring(64)

    def finish(self) -> int:
        self.ring.submit()
        return int(self.ring.wait(1, PATIENCE_S)["result"][0])

    def get(self, key: bytes) -> bytes | int:
        """The block, or a negative errno."""
        self.iov.array[:] = 0
        self.ring.prep_get(self.iov, 0, self.namespace, key, MIB)
        result = self.finish()
        if result < 0:
            assert not self.iov.array.any()
            return result
        return bytes(self.iov.buffer[:result])

    def view(self, key: bytes) -> tuple[int, int]:
        """(result, arena); 0: what there is was copied"""
        self.ring.prep_get(self.iov, 0, self.namespace, key, MIB, view=True)
        self.ring.submit()
        (row,) = self.ring.wait(1, PATIENCE_S)
        return int(row["result"]), int(row["arena"])

    def put(self, key: bytes, data: bytes = b"mine") -> int:
        self.iov.array[: len(data)] = np.frombuffer(data, np.uint8)
        self.ring.prep_put(self.iov, 0, self.namespace, key, len(data))
        return self.finish()

    def ask(self, operation: str, keys: Sequence[bytes]) -> list[bool] | int:
        """EXISTS, DELETE or PREFETCH; a negative errno."""
        found = getattr(self.ring, f"prep_{operation}")(self.namespace, keys)
        result = self.finish()
        return result if result < 0 else list(found.tolist())

    def __enter__(self) -> User:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def block(path: Path, data: bytes = CONTENT, mode: int = 0o644) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


# -- a container ------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [65534, 0])
def test_a_container_that_has_only_the_mount_can_do_everything(mount: KvfuseMount, uid: int) -> None:
    own = mount.point / "own"
    own.mkdir()
    os.chown(own, uid, uid)
    block(mount.point / "secret", mode=0o600)
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as root:
        arguments = [str(mount.point), root, sys.executable, str(GUEST), str(uid)]
        command = ["unshare", "-m", "--propagation", "slave", "-n", "sh", "-e", "-c", IN_CONTAINER, "sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == {
        "root": ["mnt", "proc"], "networks": ["lo"], "written": MIB, "results": [0, MIB], "is_read": True,
        "is_viewed": True, "is_shared": True, "known": [True, False], "gone": True, "owner": uid,
        "secret": EACCES if uid else 0,
    }  # fmt: skip
    subprocess.run(["rm", "-r", str(own)], check=True)


# -- files ------------------------------------------------------------------------------------------


def test_who_may_not_open_a_file_cannot_register_it(folder: Path) -> None:
    path = block(folder / "file", mode=0o600)
    with as_user(), connect(folder) as client, RawClient(Path(client.mount)) as raw:
        with pytest.raises(PermissionError):
            client.file(path, "r")
        with opened(path, os.O_PATH) as fd:
            for access in (1, 2, 3):
                assert raw.error(Request.ADD_FILE, access, descriptors=[fd]) == EBADF


def test_an_open_descriptor_stays_what_it_is(folder: Path) -> None:
    """As read(2) on it does, whatever becomes of the file's mode."""
    path = block(folder / "file")
    with User(folder) as user:
        with as_user():
            fd = os.open(path, os.O_RDONLY)
        path.chmod(0o600)
        with user.client.file(fd, "r") as file:
            os.close(fd)
            user.ring.prep_read(user.iov, 0, file, 0, MIB)
            assert user.finish() == len(CONTENT)
            assert bytes(user.iov.buffer[: len(CONTENT)]) == CONTENT


@pytest.mark.parametrize(("flags", "mode", "refused"), [(os.O_RDONLY, "r", "w"), (os.O_WRONLY, "w", "r")])
def test_a_descriptor_serves_one_direction(folder: Path, flags: int, mode: str, refused: str) -> None:
    path = block(folder / "file")
    path.chmod(0o666)
    with User(folder) as user, as_user(), opened(path, flags) as fd:
        for other in (refused, "rw"):
            with pytest.raises(PermissionError):
                user.client.file(fd, other)
        with user.client.file(fd, mode) as file:
            user.iov.array[:] = 7
            user.ring.prep_read(user.iov, 0, file, 0, 16)
            assert user.finish() == (16 if mode == "r" else -EBADF)
            user.ring.prep_reads(user.iov, np.arange(32) * 16, file, 0, 16)
            user.ring.submit()
            assert set(user.ring.wait(32, PATIENCE_S)["result"].tolist()) == {16 if mode == "r" else -EBADF}
            user.ring.prep_write(user.iov, 0, file, 0, 16)
            assert user.finish() == (16 if mode == "w" else -EBADF)
    assert (path.read_bytes() == CONTENT) == (mode == "r")


def test_memory_serves_one_direction(folder: Path) -> None:
    """What is open for reading, or sealed, is never written."""
    block(folder / "file")
    memory = os.memfd_create("read-only")
    os.ftruncate(memory, 4096)
    with User(folder) as user, opened(f"/proc/self/fd/{memory}", os.O_RDONLY) as fd:
        iov, file = user.client.wrap(fd), user.client.file(folder / "file", "r")
        user.ring.prep_read(iov, 0, file, 0, 16)
        assert user.finish() == -EACCES
        user.ring.prep_get(iov, 0, user.namespace, b"file", 4096)
        assert user.finish() == -EACCES
    assert os.pread(memory, 4096, 0) == bytes(4096)
    os.close(memory)


def test_handles_are_of_one_connection(folder: Path) -> None:
    path = block(folder / "file")
    with User(folder) as owner, User(folder, USER + 1) as other:
        file = owner.client.file(path, "r")
        other.iov.close()
        other.ring.prep_read(owner.iov, 0, file, 0, 16)
        assert other.finish() == -EBADF
        assert not owner.iov.array.any()


# -- blocks -----------------------------------------------------------------------------------------


def test_a_block_is_read_by_who_may_read_the_file(folder: Path) -> None:
    path = block(folder / "key", mode=0o600)
    with User(folder) as user, User(folder, 0) as root:
        assert root.ask("prefetch", [b"key"]) == [True]
        assert root.get(b"key") == CONTENT
        assert user.get(b"key") == -EACCES
        assert user.view(b"key") == (-EACCES, 0)
        assert user.ask("prefetch", [b"key"]) == [False]
        assert user.ask("exists", [b"key"]) == [True]  # as stat(2) tells, too
        for change in (lambda: path.chmod(0o644), lambda: os.chown(path, USER, 0)):
            change()
            assert user.get(b"key") == CONTENT
            assert user.view(b"key")[0] == len(CONTENT)
            path.chmod(0o600)
            os.chown(path, 0, 0)
            assert user.get(b"key") == -EACCES
            assert user.view(b"key") == (-EACCES, 0)


def test_groups_count(folder: Path) -> None:
    path = block(folder / "key", mode=0o640)
    os.chown(path, 0, GROUP + 1)
    with User(folder, groups=[GROUP + 1]) as member, User(folder, groups=[GROUP + 2]) as other:
        assert member.get(b"key") == CONTENT
        assert other.get(b"key") == -EACCES


@pytest.mark.parametrize("mode", [0o744, 0o700, 0o766])
def test_a_folder_that_may_not_be_searched_serves_nothing(folder: Path, mode: int) -> None:
    """Also what was served from it a moment ago."""
    block(folder / "key")
    block(folder / "other")
    with User(folder) as user:
        assert user.ask("prefetch", [b"key", b"other"]) == [True, True]
        for key in (b"key", b"other"):
            assert user.get(key) == CONTENT
            assert user.view(key)[1]
        folder.chmod(mode)
        for key in (b"key", b"other", b"absent"):
            assert user.get(key) == -EACCES
            assert user.view(key) == (-EACCES, 0)
        assert user.ask("exists", [b"key"]) == -EACCES
        assert user.ask("prefetch", [b"key"]) == -EACCES
        assert user.ask("delete", [b"key"]) == -EACCES
        assert user.put(b"new") == -EACCES
        folder.chmod(0o755)
        assert user.get(b"key") == CONTENT


def test_a_folder_that_may_not_be_written_is_not_changed(folder: Path) -> None:
    block(folder / "key", mode=0o666)
    with User(folder) as user:
        assert user.put(b"key") == -EACCES
        assert user.put(b"new") == -EACCES
        assert user.ask("delete", [b"key"]) == -EACCES
    assert sorted(os.listdir(folder)) == ["key"]
    assert (folder / "key").read_bytes() == CONTENT


def test_a_sticky_folder_keeps_everybodys_own(folder: Path) -> None:
    folder.chmod(0o1777)
    block(folder / "file")
    os.symlink("elsewhere", folder / "link")
    os.mkfifo(folder / "fifo")
    with User(folder) as user:
        for key in (b"file", b"link", b"fifo"):
            assert -user.put(key) in REFUSED
            answer = user.ask("delete", [key])
            assert isinstance(answer, int)
            assert -answer in REFUSED
        assert user.put(b"own") == 4
        assert user.put(b"own", b"again") == 5
        assert user.ask("delete", [b"own"]) == [True]
    assert (folder / "file").read_bytes() == CONTENT
    assert os.readlink(folder / "link") == "elsewhere"
    assert stat.S_ISFIFO(os.lstat(folder / "fifo").st_mode)
    with User(folder, 0) as root:
        assert root.put(b"file") == 4


def test_a_block_is_its_makers(folder: Path) -> None:
    folder.chmod(0o777)
    with User(folder) as user:
        assert user.put(b"key") == 4
    status = os.stat(folder / "key")
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (USER, GROUP, 0o644)
    folder.chmod(0o2777)
    os.chown(folder, -1, GROUP + 7)
    with User(folder) as user:
        assert user.put(b"other") == 4
    assert os.stat(folder / "other").st_gid == GROUP + 7


def test_the_daemons_own_folder_is_no_block(mount: KvfuseMount) -> None:
    with User(mount.point, 0) as root:
        assert root.put(b".kvfuse") == -EPERM
        answer = root.ask("delete", [b".kvfuse"])
        assert answer in ([False], -EPERM)
        assert root.get(b".kvfuse") == -ENOENT
    assert (mount.point / ".kvfuse" / "version").read_bytes()
    with RawClient(mount.point) as raw:
        for path, request, flags in (
            (".kvfuse", Request.OPEN_NAMESPACE, os.O_RDONLY),
            (".kvfuse/stats", Request.ADD_FILE, os.O_RDONLY),
        ):
            with opened(mount.point / path, flags) as fd:
                assert raw.error(request, 1, descriptors=[fd]) in (EBADF, EPERM, EACCES, ENOENT, ESTALE)


def test_a_mount_that_is_bound_read_only_changes_nothing(mount: KvfuseMount, folder: Path) -> None:
    block(folder / "key")
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as bound:
        subprocess.run(["mount", "--bind", "-o", "ro", str(mount.point), bound], check=True)
        try:
            with User(Path(bound, folder.name), 0) as root:
                assert root.get(b"key") == CONTENT
                assert root.put(b"key") == -EROFS
                assert root.ask("delete", [b"key"]) == -EROFS
        finally:
            subprocess.run(["umount", bound], check=True)
    assert (folder / "key").read_bytes() == CONTENT


# -- shared memory ----------------------------------------------------------------------------------


def arena_of(user: User, key: bytes) -> int:
    assert user.ask("prefetch", [key]) == [True]
    result, arena = user.view(key)
    assert result == len(CONTENT)
    assert arena
    return arena


def test_an_arena_is_mapped_by_who_was_given_a_view_of_it(folder: Path) -> None:
    block(folder / "key", mode=0o600)
    with User(folder, 0) as root, RawClient(folder.parent) as other:
        arena = arena_of(root, b"key")
        for number in [*range(64), arena, 1 << 31, (1 << 64) - 1]:
            assert other.error(Request.MAP_ARENA, number) == EACCES
        with User(folder) as user:
            assert user.get(b"key") == -EACCES


def test_nobody_writes_to_an_arena(folder: Path) -> None:
    """Not even root, who may open everything."""
    block(folder / "key")
    with User(folder, 0) as root:
        arena = arena_of(root, b"key")
        reply, (descriptor,) = root.client.session.request(Request.MAP_ARENA, arena)
        size = reply.values[0]
        for attempt in (
            lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR),
            lambda: os.chmod(f"/proc/self/fd/{descriptor}", 0o666),
            lambda: mmap.mmap(descriptor, size),
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, size // 2),
            lambda: os.ftruncate(descriptor, 2 * size),
            lambda: fallocate(descriptor, PUNCH, 0, 4096),
        ):
            with pytest.raises(OSError):
                attempt()
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        assert CONTENT in mapped[:]
        mapped.close()
        os.close(descriptor)
        assert root.get(b"key") == CONTENT


def test_an_arena_shows_nothing_that_its_user_may_not_find(folder: Path) -> None:
    """Who may search a folder, but not list it, reads those blocks whose names he knows: a view would show more."""
    folder.chmod(0o755)
    with User(folder, 0) as root:
        names = [b"known", b"unknown"]
        for name in names:
            assert root.put(name, name * 1000) == 1000 * len(name)
        folder.chmod(0o711)
        assert root.ask("prefetch", names) == [True, True]
        with User(folder.parent) as user:
            with as_user(), opened(folder, os.O_PATH) as fd:
                handle = user.client.session.request(Request.OPEN_NAMESPACE, 0o644, descriptors=[fd])[0].values[0]
            user.namespace.handle = handle
            result, arena = user.view(b"known")
            assert (result, arena) == (5000, 0)
            assert bytes(user.iov.buffer[:5000]) == b"known" * 1000


def test_bytes_of_others_never_come_with_an_arena(folder: Path, rng: random.Random) -> None:
    """Slots are used again: not for other readers, while somebody may have them mapped."""
    folder.chmod(0o777)
    secret = rng.randbytes(64)
    with User(folder) as user, User(folder, USER + 1) as other:
        for number in range(40):
            path = folder / f"s{number}"
            assert user.put(path.name.encode(), secret * 512) == 64 * 512
            path.chmod(0o600)
            assert other.put(b"o%d" % number, bytes(64 * 512)) == 64 * 512
            user.ask("delete", [path.name.encode()])
        arenas = {arena for number in range(40) if (arena := other.view(b"o%d" % number)[1])}
        assert arenas
        for arena in arenas:
            reply, (descriptor,) = other.client.session.request(Request.MAP_ARENA, arena)
            assert secret not in os.pread(descriptor, reply.values[0], 0)
            os.close(descriptor)
