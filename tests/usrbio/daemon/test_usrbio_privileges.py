"""Setuid, setgid and capabilities of files that rings change: gone as after a write(2) to a kernel's file system."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount
from posix_calls import GROUP, USER, as_user, opened, permissions
from ring_calls import done
from ring_lab import wait_for_rings

from kvfuse.usrbio.client import Client, connect

pytestmark = pytest.mark.root

CAPABILITY = "security.capability"
MAY_BIND_PORTS = struct.pack("<5I", 0x0200_0001, 1 << 10, 0, 0, 0)
CALLERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "root": nullcontext,
    "owner": as_user,
    "owner of another group": lambda: as_user(USER, GROUP + 1),
    "group member": lambda: as_user(USER + 1, GROUP + 1, (GROUP,)),
    "stranger": lambda: as_user(USER + 1, GROUP + 1),
}
MODES = (0o6777, 0o6767, 0o4666, 0o2777, 0o2767, 0o2666)


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(("allow_other", "volume.capacity=1GiB", "volume.segment_size=64MiB")) as mount:
        wait_for_rings(mount)
        yield mount


@pytest.fixture
def reference() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def make(path: Path, mode: int, *, capability: bool, size: int = 7) -> Path:
    path.write_bytes(b"c" * size)
    os.chown(path, USER, GROUP)
    os.chmod(path, mode)
    os.setxattr(path, "user.name", b"value")
    if capability:
        os.setxattr(path, CAPABILITY, MAY_BIND_PORTS)
    return path


def state(path: Path) -> tuple[str, list[str]]:
    return oct(permissions(path)), sorted(name for name in os.listxattr(path) if name in ("user.name", CAPABILITY))


def written_by_ring(client: Client, path: Path, count: int) -> None:
    """``count`` bytes, each by an entry of its own; all in one submission."""
    iov, ring = client.iov(4096), client.ring(64)
    with client.file(path, "w") as file:
        for number in range(count):
            ring.prep_write(iov, number, file, number, 1, user_data=number)
        assert set(done(ring, count).values()) == {1}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("count", [1, 5])
def test_a_write_takes_what_the_kernel_takes(mount: KvfuseMount, reference: Path, caller: str, count: int) -> None:
    wrong = []
    for mode, capability in product(MODES, (False, True)):
        expected = make(reference / "file", mode, capability=capability)
        found = make(mount.point / "file", mode, capability=capability)
        with CALLERS[caller]():
            with opened(expected, os.O_WRONLY) as fd:
                os.write(fd, b"x")
            with connect(mount.point) as client:
                written_by_ring(client, found, count)
        if state(found) != state(expected):
            wrong.append(f"{mode:o}, {capability}: {state(found)}, not {state(expected)}")
        found.unlink()
        expected.unlink()
    assert not wrong, "\n".join(wrong)


def test_a_write_in_place_takes_them_too(mount: KvfuseMount) -> None:
    """Small writes into slots that are not sealed, all in one call of the engine; twice, and set between."""
    path = make(mount.point / "large", 0o6777, capability=True, size=2 << 20)
    with opened(path, os.O_RDWR) as fd:
        os.fsync(fd)
    with as_user(USER + 1, GROUP + 1):
        client = connect(mount.point)
    with client:
        for _ in range(3):
            with as_user(USER + 1, GROUP + 1):
                written_by_ring(client, path, 5)
            assert state(path) == ("0o777", ["user.name"])
            os.chmod(path, 0o6777)
            os.setxattr(path, CAPABILITY, MAY_BIND_PORTS)


def test_what_a_write_took_stays_away(mount: KvfuseMount) -> None:
    path = make(mount.point / "kept", 0o6777, capability=True)
    with as_user(USER + 1, GROUP + 1), connect(mount.point) as client:
        written_by_ring(client, path, 1)
    mount.unmount()
    mount.mount()
    wait_for_rings(mount)
    assert state(path) == ("0o777", ["user.name"])


def test_a_put_makes_a_file_without_privileges(mount: KvfuseMount) -> None:
    folder = mount.point / "blocks"
    folder.mkdir()
    folder.chmod(0o777)
    with connect(folder) as client:
        namespace = client.namespace(folder)
        iov, ring = client.iov(4096), client.ring(8)
        ring.prep_put(iov, 0, namespace, b"key", 100)
        assert list(done(ring).values()) == [100]
        (path,) = (path for path in folder.rglob("*") if path.is_file())
        make(path, 0o6777, capability=True)
        ring.prep_put(iov, 0, namespace, b"key", 100)
        assert list(done(ring).values()) == [100]
        assert state(path)[1] == []
        assert permissions(path) & 0o7000 == 0


WRITER = """
import os, sys
from pathlib import Path
from kvfuse.usrbio.client import connect
from ring_calls import done
place, reference = map(Path, sys.argv[1:])
fd = os.open(reference, os.O_WRONLY)
os.write(fd, b"x")
with connect(place.parent) as client, client.file(place, "w") as file:
    iov, ring = client.iov(4096), client.ring(8)
    ring.prep_write(iov, 0, file, 0, 1)
    assert list(done(ring).values()) == [1]
"""


@pytest.mark.parametrize("bounding", ["-all", "-all,+fsetid"])
def test_uid_0_without_capabilities_takes_what_a_stranger_takes(
    mount: KvfuseMount, reference: Path, bounding: str
) -> None:
    for mode in MODES:
        expected = make(reference / "file", mode, capability=True)
        found = make(mount.point / "file", mode, capability=True)
        command = ["setpriv", f"--bounding-set={bounding}", "--inh-caps=-all", "--clear-groups", sys.executable]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*command, "-c", WRITER, str(found), str(expected)], env=environment, check=True, timeout=30)
        assert state(found) == state(expected), oct(mode)
        found.unlink()
        expected.unlink()
