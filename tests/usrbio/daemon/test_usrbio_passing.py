"""A daemon that is killed while it has descriptors of its own mount does not wait for itself."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import KvfuseMount, wait_until
from ring_lab import wait_for_rings

from kvfuse.usrbio.client import Disconnected, connect

pytestmark = pytest.mark.engines("lmdb+file")  # about memory that is shared with clients: below it one pair is enough

ROUNDS = 6

REGISTERING = """
import sys
from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import connect
with connect(sys.argv[1]) as client, open(sys.argv[2], "rb+") as file:
    print("ready", flush=True)
    try:
        while True:
            client.file(file.fileno(), "rw").close()
            print("again", flush=True)
    except (KvfuseError, OSError):
        pass
"""


def test_a_daemon_killed_while_files_are_passed_ends(mount: KvfuseMount, rng: random.Random) -> None:
    path = mount.point / "file"
    for number in range(ROUNDS):
        wait_for_rings(mount)
        path.write_bytes(b"content")
        commands = [sys.executable, "-c", REGISTERING, str(mount.point), str(path)]
        clients = [subprocess.Popen(commands, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)]
        for client in clients:
            assert client.stdout is not None
            for _ in range(rng.randrange(1, 20)):  # somewhere in the loop
                client.stdout.readline()
        mount.kill()  # waits for the process, which must not be stuck
        for client in clients:
            assert client.wait(20) is not None, f"round {number}: a client hangs"
            assert client.stdout is not None
            client.stdout.close()
        mount.mount()


def test_what_is_passed_never_comes_into_the_daemons_table(mount: KvfuseMount) -> None:
    wait_for_rings(mount)
    paths = [mount.point / f"{number}" for number in range(20)]
    with connect(mount.point) as client:
        files = []
        for path in paths:
            path.write_bytes(b"x")
            files.append(client.file(path, "r"))
        table = Path(f"/proc/{mount.pid}/fd")
        assert not [link for link in table.iterdir() if str(mount.point) in os.readlink(link)]
        for thread in Path(f"/proc/{mount.pid}/task").iterdir():
            assert not [link for link in (thread / "fd").iterdir() if _target(link).startswith(str(mount.point))]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError as error:
        assert error.errno == errno.ENOENT
        return ""


def test_a_client_notices_that_the_daemon_is_gone(mount: KvfuseMount) -> None:
    """No thread keeps a client's socket open."""
    wait_for_rings(mount)
    (mount.point / "file").write_bytes(b"x")
    with connect(mount.point) as client:
        client.file(mount.point / "file", "r")
        ring = client.ring(8)
        mount.kill()

        def is_told() -> bool:
            try:
                ring.peek()
            except Disconnected:
                return True
            return False

        wait_until(is_told, "the disconnection")
    mount.mount()
