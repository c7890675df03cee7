"""NFS over a mount, and servers of it: nfs-ganesha, and the kernel's where it has one."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import wait_until
from nfs_calls import NfsCalls

PORT = 20049
PSEUDO = "kv"
"""the export's name in the server's root"""
CONF = """
NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Graceless = {graceless}; Grace_Period = 10; Lease_Lifetime = 10; RecoveryRoot = "{folder}/recovery";
         RecoveryBackend = fs; Minor_Versions = 0, 1, 2; Only_Numeric_Owners = true; }}
EXPORT {{ Export_Id = 77; Path = "{point}"; Pseudo = "/{pseudo}"; Access_Type = RW; Squash = No_Root_Squash;
          SecType = sys; Protocols = 4; Transports = TCP; Filesystem_Id = 77.1; FSAL {{ Name = VFS; fsid_type = Major64; }} }}
LOG {{ Default_Log_Level = EVENT; }}
"""
"""Major64: the device number, which each mount has another of, is in no handle."""
_CLONE_NEWNET = 0x40000000


def require_ganesha() -> None:
    """Skip the test without the server, or without its part that serves what is mounted."""
    if shutil.which("ganesha.nfsd") is None or not list(Path("/usr/lib").glob("*/ganesha/libfsalvfs.so")):
        pytest.skip("nfs-ganesha is not installed (scripts/lib.sh: NFS_PACKAGES)")


class Ganesha:
    """A server in a network namespace of its own, where no other NFS server and no rpcbind is."""

    def __init__(self, point: Path, folder: Path, *, graceless: bool = True, own: bool = True) -> None:
        self._folder, self._own = folder, own
        (folder / "recovery").mkdir(parents=True)
        self._conf, self.log = folder / "ganesha.conf", folder / "ganesha.log"
        conf = CONF.format(port=PORT, folder=folder, point=point, pseudo=PSEUDO, graceless=graceless)
        self._conf.write_text(conf)
        self._server: subprocess.Popen[bytes] | None = None
        command = ["sh", "-c", "ip link set lo up && echo && exec sleep infinity"]
        self._home = subprocess.Popen(["unshare", "--net", *command], stdout=subprocess.PIPE) if own else None
        assert self._home is None or (self._home.stdout is not None and self._home.stdout.readline())

    def inside(self, *command: str) -> list[str]:
        """A command that runs where the server is."""
        return ["nsenter", f"--net=/proc/{self._home.pid}/ns/net", *command] if self._home else list(command)

    def start(self) -> None:
        """Returns when the server answers."""
        words = ["-F", "-L", str(self.log), "-f", str(self._conf), "-p", str(self._folder / "pid")]
        self._server = subprocess.Popen(self.inside("ganesha.nfsd", *words))
        wait_until(self._answers, "the server")

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, self.log.read_text()
        try:
            self.connect().close()
        except ConnectionRefusedError:
            return False
        return True

    def connect(self) -> NfsCalls:
        made: list[socket.socket | OSError] = []

        def make() -> None:  # a thread has a network namespace of its own
            try:
                if self._home is not None:
                    with open(f"/proc/{self._home.pid}/ns/net") as namespace:
                        assert not ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET)
                made.append(socket.create_connection(("127.0.0.1", PORT), 60))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        (connection,) = made
        if isinstance(connection, OSError):
            raise connection
        return NfsCalls(connection)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the server, by this signal, and wait for it."""
        assert self._server is not None
        self._server.send_signal(number)
        try:
            self._server.wait(60)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
            raise AssertionError(f"the server does not end:\n{self.log.read_text()}") from None
        self._server = None

    def close(self) -> None:
        if self._server is not None:
            self.end(signal.SIGKILL)
        if self._home is not None:
            self._home.kill()
            self._home.communicate()
            self._home = None


@contextmanager
def ganesha(point: Path, folder: Path, *, graceless: bool = True, own: bool = True) -> Iterator[Ganesha]:
    """A server that exports what is mounted at ``point``; not yet started."""
    server = Ganesha(point, folder, graceless=graceless, own=own)
    try:
        yield server
    finally:
        server.close()
