"""Mounts of one shared volume in the virtual machine of scripts/rdma-vm, where programs take long to begin.

Names are in one etcd member, bytes in files in memory or on devices, all in the machine. Python imports this project
once there: each daemon is a fork of the test's process, which has the modules already.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from cluster_lab import MEMORY, running
from mounting import KvfuseMount, conf_elsewhere, shared_conf

from kvfuse.cli import cli
from kvfuse.cluster.etcd import EtcdServers

MODULES = ("kvfuse.cli.mount", "kvfuse.fs.mount", "kvfuse.usrbio.daemon.listener", "kvfuse.peer.service")
"""that a daemon imports when it begins"""
PATIENT = ("records.deadline=20", "client.lease=60")
"""seconds: nothing that is only slow is a fault there"""


class Fork:
    """A child of this process that runs a command of kvfuse. It has what users of `subprocess.Popen` need here."""

    def __init__(self, words: Sequence[str], log: IO[bytes]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(words, log)

    def _run(self, words: Sequence[str], log: IO[bytes]) -> None:
        status = 70
        try:
            os.setsid()
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            cli(list(words), prog_name="kvfuse")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, ended = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """TimeoutExpired."""
        if self.returncode is None and timeout is not None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if not select.select([descriptor], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("kvfuse", timeout)
            finally:
                os.close(descriptor)
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedMount(KvfuseMount):
    """A mount whose daemon is a fork of this process, which has no threads then."""

    def _start(self, command: Sequence[str], log: IO[bytes]) -> Any:
        for name in MODULES:
            importlib.import_module(name)
        return Fork(command[command.index("mount") :], log)


@contextmanager
def vm_etcd() -> Iterator[EtcdServers]:
    """One member. Its data is in memory."""
    with running(lambda folder: EtcdServers.start(folder, 1), "kvfuse-etcd-", MEMORY) as etcd:
        yield etcd


@contextmanager
def vm_mounts(
    etcd: EtcdServers, words: Sequence[Sequence[str]], lines: Sequence[str] = (), devices: Sequence[Path] = ()
) -> Iterator[list[KvfuseMount]]:
    """Mounts of a new volume, each with ``words`` of its own, as ``-o`` takes them. At the end those that still are
    mounted must end well, and the volume must be clean.

    ``lines``: of mount.conf. ``devices``: the one device of the volume, as each mount has it; without them bytes are
    in files in memory.
    """
    with tempfile.TemporaryDirectory(prefix="kvfuse-vm-", dir=MEMORY) as folder, ExitStack() as stack:
        conf = shared_conf(Path(folder), etcd, lines=lines, device=devices[0] if devices else None)
        patient = ("segments.deadline=20",) if devices else ()
        mounts = []
        for number, own in enumerate(words):
            base = Path(folder, f"host-{number}")
            base.mkdir()
            source = conf_elsewhere(conf, devices[0], devices[number]) if number and devices else conf
            mount = ForkedMount(base, (*PATIENT, *patient, *own), source=source)
            stack.callback(mount.remove)
            mount.mount()
            mounts.append(mount)
        yield mounts
        for mount in mounts:
            if mount.is_mounted:
                mount.check_unexpected_errors()
                mount.unmount()
        mounts[-1].fsck()
