"""The command line as a user runs it: commands to their end, and a place for a volume and its mount."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mounting import KVFUSE, PATIENCE_S, wait_until
from places import ROOT

from kvfuse import mounttable
from kvfuse.cli import mounts

CAPACITY = "capacity=64MiB"
NO_HOLDER = ["-o", "outlive=false"]
"""for a mount whose daemon, once killed, is to be dead"""


def kvfuse(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, output and all; it must not hang."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [*KVFUSE, *map(str, arguments)]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


def assert_fails(done: subprocess.CompletedProcess[str], exit_status: int, message: str) -> None:
    """It ended with this status and one line on stderr that has ``message``, a regular expression."""
    assert done.returncode == exit_status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvfuse: ")
    assert re.search(message, lines[0]), done.stderr


class Place:
    """A volume and a mount point, not made or mounted yet."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.volume = base / "volume"
        self.point = base / "mnt"
        self.point.mkdir()

    def mount(self, *arguments: str) -> int:
        """Mount in the background; the daemon's pid."""
        done = kvfuse("mount", self.volume, self.point, "-o", CAPACITY, *arguments)
        assert done.returncode == 0, done.stderr
        return self.pid

    @property
    def pid(self) -> int:
        pid = json.loads(kvfuse("status", self.point, "--json").stdout)[0]["pid"]
        assert isinstance(pid, int)
        return pid

    @property
    def is_mounted(self) -> bool:
        return mounttable.top_mount(self.point) is not None

    def end_sound(self) -> None:
        """Unmount, where it is mounted, and check every byte."""
        if self.is_mounted:
            done = kvfuse("umount", self.point)
            assert done.returncode == 0, done.stderr
        done = kvfuse("fsck", "--verify", self.volume)
        assert done.returncode == 0, done.stdout + done.stderr

    def tree(self) -> dict[str, bytes]:
        """Everything in the volume's folder but the log and the lock, which say who tried."""
        paths = [path for path in self.volume.rglob("*") if path.is_file() and path.name not in ("log", "lock")]
        return {str(path): path.read_bytes() for path in paths if not path.name.endswith("lock.mdb")}


def is_running(pid: int) -> bool:
    """The process exists and is no zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not is_running(pid), "the daemon's end")


def daemons_of(volume: Path) -> list[int]:
    """Processes that have a file below the volume's folder open."""
    return [int(match) for user in mounts.users_of(volume) for match in re.findall(r"\((\d+)\)$", user)]


@contextmanager
def a_place() -> Iterator[Place]:
    """In a folder of its own. No daemon and no mount is left at the end."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as folder:
        place = Place(Path(folder))
        yield place
        for pid in daemons_of(place.volume):
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
        while place.is_mounted:
            mounts.detach(place.point, lazy=True)
