"""A Ceph cluster on loopback: one monitor and some OSDs, with cephx (Debian: ceph-mon ceph-osd ceph-common).

Everything stands in one folder - data, logs, pids, keys, ``ceph.conf``, ``ceph.json`` - so another process finds the
cluster with ``load``. Stopping it leaves the folder.

Failures are found within seconds and not, as on a real cluster, within half a minute: a killed OSD at once (its peers
see their connections refused), a stalled one after ``heartbeat_grace``. There is no manager daemon, so nobody counts
the free space (``ceph df`` shows nothing); everything else works without.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfuse.errors import ClusterError
from kvfuse_cluster.process import START_SECONDS, Server, child, free_ports, wait_until

STATE_FILE = "ceph.json"
PROGRAMS = ("ceph-mon", "ceph-osd", "ceph", "rados", "monmaptool")
COMMAND_SECONDS = 20
FOLDER_LENGTH_MAX = 90
"""a socket's path has at most 107 bytes"""

Progress = Callable[[str], None]
"""a function that shows the next step, in a few words"""


@dataclass(frozen=True)
class CephSettings:
    """Options of the cluster at its making."""

    pool: str = "kvfuse"
    replicas: int = 2
    """copies of every object; one of them is enough to go on"""
    placement_groups: int = 16
    osd_size: int = 8 << 30
    """bytes of each OSD: a sparse file"""
    heartbeat_grace: int = 5
    """seconds after which a stalled OSD is taken for down"""


class CephServers:
    """The servers of one cluster. Made by ``start`` or ``load``."""

    def __init__(self, folder: Path, settings: CephSettings, osd_count: int) -> None:
        self.folder = folder
        self.settings = settings
        self.monitor = self._server("ceph-mon", "mon.a")
        self.metadata = self._server("ceph-mds", "mds.a")
        """runs once there is a file system"""
        self.osds = [self._server("ceph-osd", f"osd.{index}") for index in range(osd_count)]

    @classmethod
    def start(
        cls, folder: Path, osds: int = 3, settings: CephSettings | None = None, progress: Progress = lambda step: None
    ) -> CephServers:
        """Start a new cluster in ``folder``; its pool can be used on return. ClusterError leaves nothing running."""
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise ClusterError(f"{', '.join(missing)} not found: apt-get install ceph-mon ceph-osd ceph-common")
        folder = folder.absolute()
        if len(os.fsencode(folder)) > FOLDER_LENGTH_MAX:
            raise ClusterError(f"{folder}: longer than {FOLDER_LENGTH_MAX} bytes, the OSDs' sockets would not fit")
        folder.mkdir(parents=True, exist_ok=True)
        servers = cls(folder, settings or CephSettings(), osds)
        state = {"settings": asdict(servers.settings), "osds": osds}
        (folder / STATE_FILE).write_text(json.dumps(state))
        try:
            servers._start(progress)
        except BaseException:
            servers.stop()
            raise
        return servers

    @classmethod
    def load(cls, folder: Path) -> CephServers:
        """The cluster that some process started in ``folder``. ClusterError where there is none."""
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            return cls(folder.absolute(), CephSettings(**state["settings"]), int(state["osds"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"{folder} holds no Ceph cluster: {error}") from error

    @property
    def conf_file(self) -> Path:
        return self.folder / "ceph.conf"

    @property
    def keyring(self) -> Path:
        """Of ``client.admin``."""
        return self._keyring("client.admin")

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to an OSD: SIGKILL, SIGSTOP, SIGCONT."""
        self.osds[index].kill(number)

    def restart(self, index: int) -> None:
        """Start an OSD that ended; it keeps its data. Returns when the cluster counts it as up, from now on."""
        before = self._osd_row(index)["up_from"]
        self.osds[index].launch()
        self.wait_up(index, after_epoch=before)

    def wait_up(self, index: int, after_epoch: int = -1) -> None:
        """Wait until an OSD is up, since a later epoch of the cluster map than ``after_epoch``."""

        def is_up() -> bool:
            status = _ask_socket(self.folder / f"{self.osds[index].name}.asok", {"prefix": "status"})
            if status is None or status["state"] != "active":  # this costs less than to start a program that asks
                return False
            row = self._osd_row(index)
            return bool(row["up"]) and int(row["up_from"]) > after_epoch

        self.osds[index].wait_ready(is_up)

    def wait_clean(self, patience: float = 2 * START_SECONDS) -> None:
        """Wait until every object is on all its replicas."""

        pool_id = next(
            row["pool"] for row in self.command("osd", "dump")["pools"] if row["pool_name"] == self.settings.pool
        )
        groups = [f"{pool_id}.{number:x}" for number in range(self.settings.placement_groups)]

        def is_clean() -> bool:
            return all(any(self._is_clean(server, group) for server in self.osds) for group in groups)

        if not wait_until(is_clean, patience):
            raise ClusterError(f"{self.folder}: objects are not on all their replicas after {patience:g} s")

    def add_user(self, name: str, **caps: str) -> None:
        """Of the cluster; its key is where ``ceph.conf`` has programs look for it. ``caps``: by service."""
        words = [word for pair in caps.items() for word in pair]
        rows = self.command("auth", "get-or-create", name, *words)
        self._keyring(name).write_text(_keyring_section(name, rows[0]["key"], {}))

    def add_filesystem(self) -> None:
        """A CephFS named ``cephfs`` and its metadata server (Debian: ceph-mds), for ceph-fuse."""
        if shutil.which("ceph-mds") is None:
            raise ClusterError("ceph-mds not found: apt-get install ceph-mds")
        (self.folder / "mds.a").mkdir(exist_ok=True)
        self.add_user("mds.a", mon="profile mds", osd="allow *", mds="allow *")
        for pool in ("cephfs.meta", "cephfs.data"):
            self.command("osd", "pool", "create", pool, str(self.settings.placement_groups), as_json=False)
        self.command("fs", "new", "cephfs", "cephfs.meta", "cephfs.data", as_json=False)
        self.metadata.start(lambda: "up:active" in self.command("mds", "stat", as_json=False))

    def stop(self) -> None:
        """End all servers. Idempotent."""
        servers = [self.metadata, *self.osds, self.monitor]
        for server in servers[:-1]:
            server.kill(signal.SIGTERM)
        for server in servers:
            server.stop()

    def command(self, *words: str, as_json: bool = True) -> Any:
        """Have the ``ceph`` program do something; what it answers. ClusterError."""
        command = ["ceph", "--conf", str(self.conf_file), "--connect-timeout", str(COMMAND_SECONDS), *words]
        answer = run_program([*command, "--format", "json"] if as_json else command)
        try:
            return json.loads(answer) if as_json else answer
        except ValueError as error:
            raise ClusterError(f"{' '.join(command)} answered {answer!r}") from error

    # -- making it ---------------------------------------------------------------------------------------

    def _start(self, progress: Progress) -> None:
        progress("making a monitor")
        self._make_monitor()
        self.monitor.launch()
        progress(f"making {len(self.osds)} OSDs")
        identities = [str(uuid.uuid4()) for _ in self.osds]
        for identity in identities:
            self.command("osd", "create", identity)
        self._make_osds(identities)
        progress("waiting for the OSDs")
        for server in self.osds:
            server.launch()
        for index in range(len(self.osds)):
            self.wait_up(index)
        progress(f"making the pool {self.settings.pool}")
        self.command("osd", "pool", "create", self.settings.pool, str(self.settings.placement_groups), as_json=False)
        self.command("osd", "pool", "application", "enable", self.settings.pool, "kvfuse", as_json=False)
        progress("waiting for the pool")
        self.wait_clean()

    def _server(self, program: str, name: str) -> Server:
        return Server(self.folder, name, [program, "-f", "-c", self.conf_file, "-i", name.partition(".")[2]])

    def _keyring(self, name: str) -> Path:
        return self.folder / f"{name}.keyring"

    def _make_monitor(self) -> None:
        ports = free_ports(2)
        address = f"[v2:127.0.0.1:{ports[0]},v1:127.0.0.1:{ports[1]}]"
        identity = str(uuid.uuid4())
        self.conf_file.write_text(_conf(self.folder, self.settings, identity, address))
        everything = {"mon": "allow *", "osd": "allow *", "mds": "allow *", "mgr": "allow *"}
        osd_caps = {"mon": "allow profile osd", "osd": "allow *"}
        users = {"mon.": {"mon": "allow *"}, "client.admin": everything}
        users |= {server.name: osd_caps for server in self.osds}
        sections = {name: _keyring_section(name, _new_key(), caps) for name, caps in users.items()}
        for name, section in sections.items():
            self._keyring(name.rstrip(".")).write_text(section)
            self._keyring(name.rstrip(".")).chmod(0o600)
        initial = self._keyring("initial")
        initial.write_text("".join(sections.values()))
        initial.chmod(0o600)
        (self.folder / "mon.a").mkdir()
        map_file = str(self.folder / "monmap")
        run_program(
            ["monmaptool", "--create", "--fsid", identity, "--addv", "a", address, "--enable-all-features", map_file]
        )
        make = ["ceph-mon", "-c", str(self.conf_file), "--mkfs", "-i", "a"]
        run_program([*make, "--monmap", map_file, "--keyring", str(initial)])
        initial.unlink()

    def _make_osds(self, identities: Sequence[str]) -> None:
        """All at once: making one mostly waits for its disk. None goes on when this one is interrupted."""
        with ExitStack() as stack:
            makers = []
            for index, (server, identity) in enumerate(zip(self.osds, identities, strict=True)):
                (self.folder / server.name).mkdir()
                command = [
                    "ceph-osd",
                    "-f",
                    "-c",
                    str(self.conf_file),
                    "-i",
                    str(index),
                    "--mkfs",
                    "--osd-uuid",
                    identity,
                ]
                log = stack.enter_context(server.log.open("ab"))
                makers.append(stack.enter_context(child(command, stdout=log, stderr=log)))
            statuses = [maker.wait() for maker in makers]
        for server, status in zip(self.osds, statuses, strict=True):
            if status:
                raise ClusterError(f"{server.name} cannot be made; the end of {server.log}:\n{server.log_tail()}")

    # -- asking it ---------------------------------------------------------------------------------------

    def _osd_row(self, index: int) -> dict[str, Any]:
        rows = self.command("osd", "dump")["osds"]
        return next(row for row in rows if row["osd"] == index)

    def _is_clean(self, server: Server, group: str) -> bool:
        """This OSD answers for the placement group, which has all its replicas."""
        answer = _ask_socket(self.folder / f"{server.name}.asok", {"prefix": "query", "pgid": group})
        return answer is not None and "clean" in str(answer.get("state", ""))


def _conf(folder: Path, settings: CephSettings, identity: str, address: str) -> str:
    """ceph.conf. Options about failures stand in [global], as the monitor reads them too."""
    return f"""\
[global]
fsid = {identity}
mon host = {address}
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/$name.keyring
log file = {folder}/$name.ceph.log
mon cluster log file = {folder}/cluster.log
run dir = {folder}
crash dir = {folder}/crash
osd crush chooseleaf type = 0
osd pool default size = {settings.replicas}
osd pool default min size = 1
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
mon allow pool delete = true
mon warn on insecure global id reclaim = false
mon warn on insecure global id reclaim allowed = false
mon data avail warn = 2
mon data avail crit = 1
osd heartbeat interval = 1
osd heartbeat grace = {settings.heartbeat_grace}
mon osd min down reporters = 1
mon osd reporter subtree level = osd
mon osd adjust heartbeat grace = false
mon osd down out interval = 600
mon osd min in ratio = 0.3
[mon]
mon data = {folder}/$name
[mds]
mds data = {folder}/$name
[osd]
osd data = {folder}/$name
admin socket = {folder}/$name.asok
osd objectstore = bluestore
bluestore block size = {settings.osd_size}
bluestore block create = true
bluestore block db size = 0
bluestore block wal size = 0
bluestore cache autotune = false
bluestore cache size = {256 << 20}
osd op num shards = 2
"""


def _new_key() -> str:
    """A cephx secret: type (AES), when it was made, length, 16 random bytes."""
    return base64.b64encode(struct.pack("<HIIH", 1, int(time.time()), 0, 16) + os.urandom(16)).decode()


def _keyring_section(name: str, key: str, caps: Mapping[str, str]) -> str:
    lines = [f"[{name}]", f"\tkey = {key}", *(f'\tcaps {service} = "{text}"' for service, text in caps.items())]
    return "\n".join(lines) + "\n"


def _ask_socket(path: Path, request: Mapping[str, str]) -> dict[str, Any] | None:
    """The answer of an OSD through its admin socket; None where it does not answer, or does not know."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(COMMAND_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\0")
            with connection.makefile("rb") as answer:
                (size,) = struct.unpack(">I", answer.read(4))
                found: dict[str, Any] = json.loads(answer.read(size))
        except (OSError, ValueError, struct.error):
            return None
        return found


def run_program(command: Sequence[str]) -> str:
    """The output of a program. ClusterError with its message when it fails or takes too long."""
    try:
        with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            output, message = running.communicate(timeout=2 * COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(command)}: {error}") from error
    if running.returncode:
        raise ClusterError(f"{' '.join(command)}: {message.strip()}")
    return str(output)
