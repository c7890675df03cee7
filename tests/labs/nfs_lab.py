"""NFS over a mount, and servers of it: nfs-ganesha, and the kernel's where it has one."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import in_own_mounts, wait_until
from nfs_calls import NfsCalls

PORT, MOUNT_PORT, BINDER_PORT = 20049, 20048, 111
PSEUDO = "kv"
"""the export's name in the server's root"""
CONF = """
NFS_CORE_PARAM {{ NFS_Port = {port}; MNT_Port = {mount_port}; Protocols = {protocols};
                  Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Graceless = {graceless}; Grace_Period = 10; Lease_Lifetime = 10; RecoveryRoot = "{folder}/recovery";
         RecoveryBackend = fs; Minor_Versions = 0, 1, 2; Only_Numeric_Owners = true; }}
EXPORT {{ Export_Id = 77; Path = "{point}"; Pseudo = "/{pseudo}"; Access_Type = RW; Squash = No_Root_Squash;
          SecType = sys; Protocols = {protocols}; Transports = TCP; Filesystem_Id = 77.1; Attr_Expiration_Time = 0;
          FSAL {{ Name = VFS; fsid_type = Major64; }} }}
LOG {{ Default_Log_Level = EVENT; }}
"""
"""Major64: the device number, which each mount has another of, is in no handle. No expiration: changes on the mount
itself are seen at once."""
_CLONE_NEWNET = 0x40000000


def require_ganesha() -> None:
    """Skip the test without the server, or without its part that serves what is mounted."""
    if shutil.which("ganesha.nfsd") is None or not list(Path("/usr/lib").glob("*/ganesha/libfsalvfs.so")):
        pytest.skip("nfs-ganesha is not installed (scripts/lib.sh: NFS_PACKAGES)")


HOME = "mount -t tmpfs run /run && ip link set lo up && echo && exec rpcbind -f -i"
"""rpcbind has its files in a /run of its own, so servers register by TCP; without it there is no NFS 3."""


class Ganesha:
    """A server in a network namespace of its own, where no other NFS server is.

    ``own``: False: where the caller is, and NFS 4 alone. ``graceless``: clients cannot reclaim what they had open from
    the server before.
    """

    def __init__(self, point: Path, folder: Path, *, graceless: bool = True, own: bool = True) -> None:
        self._folder, self._own = folder, own
        (folder / "recovery").mkdir(parents=True)
        self._conf, self.log = folder / "ganesha.conf", folder / "ganesha.log"
        places = {"folder": folder, "point": point, "pseudo": PSEUDO, "port": PORT, "mount_port": MOUNT_PORT}
        self._conf.write_text(CONF.format(**places, graceless=graceless, protocols="3, 4" if own else "4"))
        self.url = f"nfs://127.0.0.1{point}?version=3&nfsport={PORT}&mountport={MOUNT_PORT}"
        """for libnfs, whose NFS 4 is of little use"""
        self._server: subprocess.Popen[bytes] | None = None
        command = [*in_own_mounts(folder, "private", "--net"), "sh", "-c", HOME]
        self._home = subprocess.Popen(command, stdout=subprocess.PIPE) if own else None
        if self._home is not None:
            assert self._home.stdout is not None
            assert self._home.stdout.readline(), "no namespaces"
            wait_until(lambda: self._answers(BINDER_PORT), "rpcbind")

    def inside(self, *command: str) -> list[str]:
        """A command that runs where the server is."""
        return ["nsenter", "--target", str(self._home.pid), "--net", *command] if self._home else list(command)

    def start(self) -> None:
        """Returns when the server answers."""
        words = ["-F", "-L", str(self.log), "-f", str(self._conf), "-p", str(self._folder / "pid")]
        self._server = subprocess.Popen(self.inside("ganesha.nfsd", *words))
        wait_until(lambda: self._answers(PORT), "the server")

    def _answers(self, port: int) -> bool:
        assert self._server is None or self._server.poll() is None, self.log.read_text()
        try:
            self._connect(port).close()
        except ConnectionRefusedError:
            return False
        return True

    def connect(self) -> NfsCalls:
        return NfsCalls(self._connect(PORT))

    def _connect(self, port: int) -> socket.socket:
        made: list[socket.socket | OSError] = []

        def make() -> None:  # a thread has a network namespace of its own
            try:
                if self._home is not None:
                    with open(f"/proc/{self._home.pid}/ns/net") as namespace:
                        assert not ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET)
                made.append(socket.create_connection(("127.0.0.1", port), 60))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        (connection,) = made
        if isinstance(connection, OSError):
            raise connection
        return connection

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


# -- the kernel's parts, in the machine of scripts/rdma-vm -----------------------------------------------


def load_modules() -> None:
    """Of the client, and of the kernel's server."""
    folder = Path(os.environ["KVFUSE_VM_MODULES"], "nfs")
    for file in (folder / "order").read_text().split():
        if not Path("/sys/module", file.removesuffix(".ko").replace("-", "_")).exists():
            subprocess.run(["insmod", str(folder / file)], check=True)


class KernelServer:
    """nfsd, of which each kernel has one. It exports ``point``."""

    def __init__(self, point: Path) -> None:
        self._point = point
        if not os.path.ismount("/proc/fs/nfsd"):
            subprocess.run(["mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd"], check=True)
            Path("/var/lib/nfs/v4recovery").mkdir(parents=True, exist_ok=True)
            Path("/var/lib/nfs/etab").touch()
            subprocess.run(["rpc.mountd", "-N", "2", "-N", "3", "-u"], check=True)

    def start(self) -> None:
        """Exports have a fsid: by default a handle has the device number, which each mount has another of."""
        words = ["rw,no_root_squash,no_subtree_check,insecure,fsid=0", f"127.0.0.1:{self._point}"]
        subprocess.run(["exportfs", "-o", *words], check=True)
        command = ["rpc.nfsd", "-N", "3", "-p", str(PORT), "-G", "10", "-L", "10", "2"]
        subprocess.run(command, check=True)

    def end(self, number: int = signal.SIGTERM) -> None:
        """No program is there that could be killed: both signals are the same."""
        subprocess.run(["rpc.nfsd", "0"], check=True)
        subprocess.run(["exportfs", "-ua"], check=True)
        subprocess.run(["exportfs", "-f"], check=True)

    def close(self) -> None:
        self.end()


@contextmanager
def client(name: str, point: Path, version: str = "4.2") -> Iterator[Path]:
    """The kernel's client of the export called ``name``, mounted at ``point``."""
    words = f"vers={version},port={PORT},sec=sys,hard"
    subprocess.run(["mount", "-t", "nfs4", "-o", words, f"127.0.0.1:/{name}", str(point)], check=True, timeout=120)
    try:
        yield point
        subprocess.run(["umount", str(point)], check=True, timeout=120)
    finally:
        if os.path.ismount(point):
            subprocess.run(["umount", "-f", "-l", str(point)], check=False)
