"""A mount whose holder and daemon live in containers of their own, without an engine for containers.

Each has a mount namespace and a pid namespace; the daemon's has no CAP_SYS_ADMIN, and gets mounts from the host's. The
folder of the test is a shared mount. Whoever is killed is killed with its whole container.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio
from mounting import KVFUSE, PATIENCE_S, in_own_mounts, mount_rows, wait_until

from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck

FORBIDDEN = "-sys_admin,-net_admin,-sys_module,-sys_ptrace,-mknod"
"""capabilities that the container of `kvfuse serve` has not"""


class Container:
    """A command in namespaces of its own: the process that was started ends as soon as the command's does."""

    def __init__(self, words: Sequence[str], log: Path, propagation: str, prefix: Sequence[str] = ()) -> None:
        command = in_own_mounts(log.parent, propagation, "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
        with log.open("ab") as file:
            self._outer = subprocess.Popen(
                [*command, *prefix, *KVFUSE, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.name = words[0]

    @property
    def pid(self) -> int:
        """The first process of the container, as the host numbers it. 0: it is not there yet."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        try:
            return int((children.read_text().split() or ["0"])[0])
        except FileNotFoundError:
            return 0

    @property
    def has_ended(self) -> bool:
        return self._outer.poll() is not None

    def kill(self) -> None:
        """With all its processes, as the engine of containers does it; returns once all of them have ended."""
        if first := self.pid:
            os.kill(first, signal.SIGKILL)  # the other ends with it, and not before all in the container have closed
        else:
            self._outer.kill()
        self._outer.wait(PATIENCE_S)

    def terminate(self) -> int:
        """SIGTERM to its first process; returns the exit status."""
        wait_until(lambda: self.pid != 0, f"the first process of {self.name}")
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self._outer.wait(PATIENCE_S)


class ApartMount:
    """One volume, and its mount point. ``words`` are -o options of both commands."""

    def __init__(self, base: Path, words: Sequence[str] = (), source: Path | None = None) -> None:
        self.base, self.volume, self.point = base, base / "volume", base / "mnt"
        self.source = source or self.volume
        self.log = base / "daemon.log"
        self.socket = base / "hold.sock"
        self.words = tuple(words)
        self.point.mkdir()
        self.log.touch()
        self.started: list[Container] = []

    def _words(self, command: str) -> list[str]:
        said = [argument for word in self.words for argument in ("-o", word)]
        return [command, str(self.source), str(self.point), "--socket", str(self.socket), *said]

    def hold(self, *more: str) -> Container:
        """Start a container that makes the mount, or takes a living one over; returns once it listens."""
        former = self.log.read_text().count(" hold: ")
        container = Container([*self._words("hold"), *more], self.log, "shared")
        self.started.append(container)
        wait_until(lambda: self.log.read_text().count(" hold: ") > former or container.has_ended, "the holder")
        assert not container.has_ended, self.log.read_text()
        return container

    def serve(self) -> Container:
        """Start a container that serves the mount once it is its turn."""
        container = Container(self._words("serve"), self.log, "slave", ["setpriv", "--bounding-set", FORBIDDEN])
        self.started.append(container)
        return container

    @property
    def turns(self) -> int:
        """How many daemons have been ready."""
        return self.log.read_text().count(f" is mounted on {self.point}")

    def wait_until_served(self, turns: int = 1) -> None:
        wait_until(lambda: self.turns >= turns, f"daemon {turns} to be ready")

    def stats(self) -> dict[str, object]:
        found = json.loads((self.point / ".kvfuse" / "stats").read_text())
        assert isinstance(found, dict)
        return found

    def kill_daemon(self) -> None:
        """Kill the daemon alone. Its pid, as its container numbers it, is not the host's."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = os.fsencode(self.socket) in (process / "cmdline").read_bytes()
                if is_ours and (process / "comm").read_text() == "kvfuse-daemon\n":
                    os.kill(int(process.name), signal.SIGKILL)
                    return
            except (FileNotFoundError, ProcessLookupError):
                continue
        raise AssertionError(f"there is no daemon:\n{self.log.read_text()}")

    @property
    def is_mounted(self) -> bool:
        return any(row.split(" ")[4] == str(self.point) for row in mount_rows())

    def unmount(self) -> None:
        """As a user does it; holder and daemon end by themselves, with status 0."""
        done = subprocess.run([*KVFUSE, "umount", self.point], capture_output=True, text=True, timeout=2 * PATIENCE_S)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr + self.log.read_text()
        living = [container for container in self.started if not container.has_ended]
        statuses = {container.name: container.wait() for container in living if container.name == "hold"}
        assert set(statuses.values()) <= {0}, f"{statuses}: {self.log.read_text()}"

    def detach(self) -> None:
        """Take a dead mount away."""
        subprocess.run(["umount", "-i", "-l", str(self.point)], check=True)

    def fsck(self) -> None:
        report = trio.run(functools.partial(fsck, config.load(self.source).options, verify=True))
        assert report.clean, [problem.text for problem in report.problems][:10]

    def remove(self) -> None:
        for container in self.started:
            container.kill()
        while self.is_mounted:
            self.detach()


@contextmanager
def apart_mount(words: Sequence[str] = (), source: Path | None = None) -> Iterator[ApartMount]:
    """An empty folder for a volume and its mount; at the end it is unmounted, and the volume must be clean."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-test-"))
    base.chmod(0o755)
    subprocess.run(["mount", "--bind", base, base], check=True)
    subprocess.run(["mount", "--make-shared", base], check=True)
    mount = ApartMount(base, words, source)
    try:
        yield mount
        if mount.is_mounted:
            mount.unmount()
        mount.fsck()
    finally:
        mount.remove()
        subprocess.run(["umount", "-l", base], check=True)
        shutil.rmtree(base)


def wait_seconds(seconds: float) -> None:
    """Let programs work for so long: what is tested is that nothing happens to them."""
    select.select([], [], [], seconds)
