"""Handles that nfs-ganesha gave to clients, over restarts of the daemon, of the server and of both."""

from __future__ import annotations

import ctypes.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from nfs_calls import ABSENT, STALE, NfsCalls, NfsError
from nfs_lab import PSEUDO, Ganesha, ganesha, require_ganesha
from outlive_guest import daemon_of
from places import LABS
from rings import require_lab

pytestmark = [pytest.mark.root, pytest.mark.needs("ganesha")]


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(("outlive", "export", "capacity=256MiB")) as made:
        yield made


@pytest.fixture
def server(mount: KvfuseMount, tmp_path: Path) -> Iterator[Ganesha]:
    require_lab("ganesha")
    require_ganesha()
    with ganesha(mount.point, tmp_path / "ganesha") as made:
        made.start()
        yield made
        if mount.is_mounted:
            made.close()  # or the mount is busy


def kill_daemon(mount: KvfuseMount) -> None:
    former = daemon_of(mount.point)
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: daemon_of(mount.point) != former, "the next daemon")


def content(calls: NfsCalls, handle: bytes) -> bytes | None:
    """None: it is stale."""
    try:
        return calls.read(handle, 1 << 16)
    except NfsError as error:
        assert error.status == STALE
    return None


def test_no_call_of_a_client_fails_while_daemons_are_killed(
    mount: KvfuseMount, server: Ganesha, rng: random.Random
) -> None:
    if ctypes.util.find_library("nfs") is None:
        pytest.skip("libnfs is not installed (scripts/lib.sh: NFS_PACKAGES)")
    command = server.inside(sys.executable, str(LABS / "nfs_load.py"), server.url, str(rng.randrange(1 << 30)))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None
        assert load.stdout is not None
        for _ in range(6):
            for _ in range(rng.randrange(5, 40)):
                assert load.stdout.readline() == "round\n", "a call failed: its message is above"
            kill_daemon(mount)
        load.stdin.close()
        assert load.stdout.read().endswith("done\n")
    assert load.returncode == 0


def test_changes_on_the_mount_are_seen_by_clients_at_once(mount: KvfuseMount, server: Ganesha) -> None:
    calls = server.connect()
    folder = mount.point / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"first")
    handle = calls.find([PSEUDO, "folder", "file"])
    assert calls.read(handle, 100) == b"first"
    assert fails(lambda: calls.find([PSEUDO, "folder", "other"])) == ABSENT
    (folder / "file").write_bytes(b"second")
    os.rename(folder / "file", folder / "other")
    assert calls.facts(handle).size == 6
    assert calls.read(handle, 100) == b"second"
    assert calls.find([PSEUDO, "folder", "other"]) == handle
    assert fails(lambda: calls.find([PSEUDO, "folder", "file"])) == ABSENT
    calls.close()


def fails(call: Callable[[], object]) -> int:
    """Number of the error."""
    with pytest.raises(NfsError) as caught:
        call()
    return caught.value.status


@contextmanager
def other_mount(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_handles_live_over_restarts(mount: KvfuseMount, server: Ganesha, tmp_path: Path) -> None:
    point = mount.point
    (point / "folder").mkdir()
    names = ["kept", "folder/deep", "renamed", "removed", "replaced"]
    for name in names:
        (point / name).write_bytes(name.encode())
    calls = server.connect()
    handles = {name: calls.find([PSEUDO, *name.split("/")]) for name in names}
    numbers = {name: calls.facts(handle).fileid for name, handle in handles.items()}
    assert numbers == {name: os.stat(point / name).st_ino for name in names}
    os.rename(point / "renamed", point / "folder" / "other")
    os.unlink(point / "removed")
    os.rename(point / "folder" / "deep", point / "replaced")
    expected = {
        "kept": b"kept",
        "folder/deep": b"folder/deep",
        "renamed": b"renamed",
        "removed": None,
        "replaced": None,
    }

    def check(what: str) -> None:
        found = {name: content(calls, handle) for name, handle in handles.items()}
        assert found == expected, what

    kill_daemon(mount)
    check("the daemon was killed")
    calls.close()
    server.end(signal.SIGKILL)
    server.start()
    calls = server.connect()
    check("the server was killed")
    calls.close()
    server.end(signal.SIGKILL)
    kill_daemon(mount)
    server.start()
    calls = server.connect()
    check("both were killed")
    calls.close()
    server.end()
    device = os.stat(point).st_dev
    mount.unmount()
    with other_mount(tmp_path / "ganesha" / "recovery"):  # it takes the device number
        mount.mount()
    assert os.stat(point).st_dev != device
    (point / "removed").write_bytes(b"another file")
    server.start()
    calls = server.connect()
    check("the volume was unmounted")
    calls.close()
