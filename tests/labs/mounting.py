"""A real daemon over a temporary volume, as tests use it: mount, unmount, kill, check."""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import trio
from daemon_forks import IS_ON, ForkedDaemon

from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

KVFUSE = [sys.executable, "-m", "kvfuse.cli"]
NO_HOLDER = ("outlive=false",)
"""of mounts whose daemon, once killed, is to be dead; words of a test that come after it win"""
FOREGROUND = (*KVFUSE, "mount", "--foreground")
PATIENCE_S = 300.0 if "KVFUSE_RDMA_VM" in os.environ else 60.0
"""how long an outside process may take for anything; the machine of scripts/rdma-vm is slow"""

OWN_MOUNTS = r"""
awk -v base="$0/" '{ point[$1] = $5 }
    / - fuse[.]kvfuse / && index($5, base) != 1 { parent[$1] = $2 }
    END { for (row in parent) print point[parent[row]], point[row] }' /proc/self/mountinfo |
while read -r parent point; do
    mount --make-private "$parent" && umount -l "$point"
done 2>/dev/null || true
exec "$@"
"""


def in_own_mounts(base: Path, propagation: str, *flags: str) -> list[str]:
    """Words before a command that is to have a mount namespace; ``propagation``: of mounts below ``base``, one itself.

    What other tests have mounted is not mounted there: else it stays so when they unmount it.
    """
    keep = "" if propagation == "private" else f"mount --make-{propagation} $0;"
    return ["unshare", "--mount", "--propagation", "unchanged", *flags, "sh", "-c", keep + OWN_MOUNTS, str(base)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; fail, naming ``what``, when that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: still not after {PATIENCE_S:g} s")
        select.select([], [], [], 0.01)


def _thread_states(pid: int) -> set[str]:
    """The letters of all threads: R runs, S sleeps, T is stopped, D waits in the kernel for one that is."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until it holds: after the signal a thread on another processor still runs for a while."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _thread_states(pid) <= {"T", "D"}, f"process {pid} to stop")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile. It may be killed while it is stopped."""
    try:
        stop_process(pid)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def mount_rows() -> list[str]:
    """What is mounted here, a row each. Names in it may have any bytes but a newline."""
    return os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).strip().split("\n")


class KvfuseMount:
    """One volume and its mount point. ``words`` are -o options, ``command`` starts a daemon in the foreground.

    ``source`` is the mount.conf of a volume that is in no folder of ours (``shared_conf``); more mounts may have it.
    """

    def __init__(
        self, base: Path, words: Sequence[str] = (), command: Sequence[str] = FOREGROUND, source: Path | None = None
    ) -> None:
        self.volume = base / "volume"
        self.source = source or self.volume
        self.point = base / "mnt"
        self.log = base / "daemon.log"
        self.point.mkdir()
        self.words = tuple(words)
        self.command = tuple(command)
        self._daemon: subprocess.Popen[bytes] | ForkedDaemon | None = None

    @property
    def pid(self) -> int:
        assert self._daemon is not None, "not mounted"
        return self._daemon.pid

    @property
    def is_mounted(self) -> bool:
        """Asks the kernel's table, not the daemon, which may hang."""
        return any(row.split(" ")[4] == str(self.point) for row in mount_rows())

    def mount(self) -> None:
        """Start a daemon in the foreground of a process of its own, and wait until the mount answers."""
        words = [argument for word in (*NO_HOLDER, *self.words) for argument in ("-o", word)]
        command = [*self.command, str(self.source), str(self.point), *words]
        announced = self._announcements()
        with self.log.open("ab") as log:
            self._daemon = self._start(command, log)
        wait_until(lambda: self._announcements() > announced or self.has_ended, "the mount")
        if self.has_ended:
            raise AssertionError(f"the daemon ended:\n{self.log.read_text()}")
        os.stat(self.point)

    def _start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedDaemon:
        if IS_ON and self.command == FOREGROUND:
            return ForkedDaemon(command[len(KVFUSE) :], log.fileno())
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _announcements(self) -> int:
        """How often a daemon said that it is ready: the mount answers, and takes connections."""
        return self.log.read_bytes().count(b"mounted on " + os.fsencode(self.point)) if self.log.exists() else 0

    @property
    def has_ended(self) -> bool:
        """The daemon is no process any more."""
        return self._daemon is None or self._daemon.poll() is not None

    def unmount(self) -> None:
        """As a user does. The daemon must end by itself, with status 0.

        The mount may be busy for a moment: tests beside this one look at all mounts of the machine.
        """
        said: list[str] = []

        def ended() -> bool:
            umount = subprocess.run(["umount", self.point], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
            said[:] = [umount.stderr.strip()]
            return umount.returncode == 0 or "busy" not in umount.stderr

        wait_until(ended, "the end of its users")
        assert said == [""], said
        self.wait(0)

    def terminate(self) -> None:
        """SIGTERM; the daemon must flush, unmount and end with status 0."""
        assert self._daemon is not None, "not mounted"
        self._daemon.terminate()
        self.wait(0)
        assert not self.is_mounted, "the daemon left its mount behind"

    def kill(self) -> None:
        """SIGKILL, and take the dead mount away. Its guard lets go of whoever waits for the daemon, threads of its own
        among them."""
        assert self._daemon is not None, "not mounted"
        self._daemon.kill()
        self.wait(-9)
        subprocess.run(["umount", "-l", str(self.point)], check=True, timeout=PATIENCE_S)

    def wait(self, status: int = 0) -> None:
        """For the daemon to end, with this status."""
        assert self._daemon is not None, "not mounted"
        try:
            ended = self._daemon.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon does not end:\n{self.log.read_text()}") from None
        self._daemon = None
        assert ended == status, f"the daemon ended with {ended}, not {status}:\n{self.log.read_text()}"

    def fsck(self, *, verify: bool = False) -> None:
        """Fail unless the unmounted volume is clean; with ``verify`` every byte of it."""
        report = trio.run(functools.partial(fsck, config.load(self.source).options, verify=verify))
        assert report.clean, [problem.text for problem in report.problems][:10]

    def check_unexpected_errors(self) -> None:
        """Fail if the daemon met an error that nobody foresaw."""
        stats = json.loads((self.point / ".kvfuse" / "stats").read_text())
        count = stats["fs"]["unexpected_error_count"]
        assert count == 0, f"{count} unexpected errors:\n{self.log.read_text()}"

    def remove(self) -> None:
        """End whatever still runs, without judging it: for the end of a test that failed already."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.point)], check=False)


@contextmanager
def temporary_mount(
    words: Sequence[str] = (), command: Sequence[str] = FOREGROUND, source: Path | None = None
) -> Iterator[KvfuseMount]:
    """A mounted, empty volume, of ``source`` where that is given. At the end it is unmounted and must be clean."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-test-"))
    base.chmod(0o755)  # other users' tests go through it
    mount = KvfuseMount(base, words, command, source)
    try:
        mount.mount()
        yield mount
        if mount.is_mounted:
            mount.check_unexpected_errors()
            mount.unmount()
        mount.fsck()
    finally:
        mount.remove()
        shutil.rmtree(base)


def shared_conf(
    folder: Path,
    etcd: EtcdServers,
    ceph: CephServers | None = None,
    name: str = "",
    lines: Sequence[str] = (),
    device: Path | None = None,
) -> Path:
    """The mount.conf of a new volume. Its bytes are in ``ceph``, on ``device``, or in files of ``folder``.

    ``lines`` say who connects; without them anybody and Ceph's administrator.
    """
    segments: dict[str, Any] = {"path": str(folder / "segments")}
    if device is not None:
        segments = {"engine": "block", "devices": [str(device)], "deadline": 3.5, "quarantine": 3.0}
    if ceph is not None:
        segments = {"engine": "rados", "conf_file": str(ceph.conf_file), "pool": ceph.settings.pool}
        segments["deadline"] = 3.5
        segments |= {} if lines else {"keyring": str(ceph.keyring)}
    tables = {
        "volume": {
            "name": name or f"test-{secrets.token_hex(6)}",
            "capacity": "512MiB",
            "segment_size": "64MiB",
        },
        "records": {
            "engine": "etcd",
            "endpoints": list(etcd.endpoints),
            "operations_max": etcd.settings.operations_max,
            "request_size_max": etcd.settings.request_size_max,
        },
        "segments": segments,
        "client": {"lease": 6.0},
    }
    made = [
        f"{table}.{key} = {json.dumps(value)}"  # JSON's texts, numbers and lists are TOML's, too
        for table, values in tables.items()
        for key, value in values.items()
    ]
    conf = folder / "mount.conf"
    conf.write_text("\n".join([*made, *lines]) + "\n")
    return conf


def conf_elsewhere(conf: Path, device: Path, other: Path) -> Path:
    """The mount.conf of another host, which has ``device`` of ``conf`` under another name."""
    theirs = conf.with_name(f"{other.name}.conf")
    theirs.write_text(conf.read_text().replace(f'"{device}"', f'"{other}"'))
    return theirs
