"""An etcd cluster on this machine: real members (Debian: etcd-server), with TLS and users where wanted.

Everything stands in one folder - data, logs, pids, certificates, ``etcd.json`` - so another process finds the cluster
with ``load``. Stopping it leaves the folder.
"""

from __future__ import annotations

import json
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfuse.errors import ClusterError
from kvfuse_cluster.process import START_SECONDS, Server, free_ports

ANSWER_SECONDS = 2.0
HANDOVER_SECONDS = 1.0
STATE_FILE = "etcd.json"


@dataclass(frozen=True)
class EtcdSettings:
    """Options of the members at their start."""

    operations_max: int = 128
    """operations of a transaction (--max-txn-ops)"""
    request_size_max: int = 1536 << 10
    """bytes of a request (--max-request-bytes)"""
    tls: bool = False
    """clients need a certificate, ``client.pem`` with ``client.key``, of the authority ``ca.pem`` in the folder"""
    root_password: str = ""
    """not empty: users are asked for their passwords, beginning with ``root``"""
    address: str = "127.0.0.1"
    """where the members listen; certificates are good for the default alone"""


@dataclass(frozen=True)
class _Ports:
    client: int
    peer: int


class EtcdServers:
    """The members of one cluster. Made by ``start`` or ``load``."""

    def __init__(self, folder: Path, settings: EtcdSettings, ports: list[_Ports]) -> None:
        self.folder = folder
        self.settings = settings
        self._ports = ports
        self.members = [Server(folder, f"etcd{index}", self._command(index)) for index in range(len(ports))]

    @classmethod
    def start(
        cls,
        folder: Path,
        members: int = 3,
        settings: EtcdSettings | None = None,
        *,
        patience: float = START_SECONDS,
    ) -> EtcdServers:
        """A new cluster in ``folder``, once every member answers, each within ``patience`` seconds.

        ClusterError leaves nothing running.
        """
        if shutil.which("etcd") is None:
            raise ClusterError("etcd is not installed: apt-get install etcd-server")
        folder.mkdir(parents=True, exist_ok=True)
        numbers = free_ports(2 * members)
        ports = [_Ports(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        servers = cls(folder, settings or EtcdSettings(), ports)
        state = {"settings": asdict(servers.settings), "ports": [asdict(pair) for pair in ports]}
        (folder / STATE_FILE).write_text(json.dumps(state))
        try:
            if servers.settings.tls:
                make_certificates(folder)
            for member in servers.members:
                member.launch()
            for index in range(members):
                servers.wait_ready(index, patience)
            if servers.settings.root_password:
                servers._enable_users()
        except BaseException:
            servers.stop()
            raise
        return servers

    @classmethod
    def load(cls, folder: Path) -> EtcdServers:
        """The cluster that some process started in ``folder``. ClusterError where there is none."""
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            settings, ports = EtcdSettings(**state["settings"]), [_Ports(**pair) for pair in state["ports"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"{folder} holds no etcd cluster: {error}") from error
        return cls(folder, settings, ports)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where clients connect, a URL a member."""
        return tuple(self._url(pair.client) for pair in self._ports)

    @property
    def ca_file(self) -> Path | None:
        return self.folder / "ca.pem" if self.settings.tls else None

    @property
    def cert_file(self) -> Path | None:
        return self.folder / "client.pem" if self.settings.tls else None

    @property
    def key_file(self) -> Path | None:
        return self.folder / "client.key" if self.settings.tls else None

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member: SIGKILL, SIGSTOP, SIGCONT."""
        self.members[index].kill(number)

    def restart(self, index: int) -> None:
        """Start a member that ended; it keeps its data. Returns when it answers."""
        self.members[index].launch()
        self.wait_ready(index)

    def wait_ready(self, index: int, patience: float = START_SECONDS) -> None:
        """Wait until a member answers and knows a leader."""
        self.members[index].wait_ready(lambda: self.is_healthy(index), patience)

    def stop(self) -> None:
        """End all members. Idempotent. They are not given long to hand over to each other: etcd survives any end."""
        for member in self.members:
            member.kill(signal.SIGTERM)
        for member in self.members:
            member.stop(HANDOVER_SECONDS)

    def leader(self) -> int | None:
        """The member that the others follow; None when nobody knows one."""
        answers = [self._try_call(index, "maintenance/status") for index in range(len(self.members))]
        best = max((answer for answer in answers if answer), key=lambda answer: int(answer["raftTerm"]), default=None)
        for index, answer in enumerate(answers):
            if best and answer and answer["header"]["member_id"] == best.get("leader"):
                return index
        return None

    def call(self, index: int, method: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        """The answer of a member to a request of etcd's JSON gateway. ClusterError."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        url = f"{self.endpoints[index]}/v3/{method}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with self._open(request) as answer:
                found: dict[str, Any] = json.load(answer)
        except OSError as error:
            raise ClusterError(f"{url}: {error}") from error
        return found

    def _url(self, port: int) -> str:
        return f"{'https' if self.settings.tls else 'http'}://{self.settings.address}:{port}"

    def _command(self, index: int) -> list[str]:
        client, peers = (
            self._url(self._ports[index].client),
            [f"http://{self.settings.address}:{pair.peer}" for pair in self._ports],
        )
        cluster = ",".join(f"etcd{number}={url}" for number, url in enumerate(peers))
        peer = peers[index]
        folder = self.folder
        command = ["etcd", "--name", f"etcd{index}", "--data-dir", str(folder / f"etcd{index}.data")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--initial-cluster-token", str(self._ports[0].peer)]
        command += ["--max-txn-ops", str(self.settings.operations_max)]
        command += ["--max-request-bytes", str(self.settings.request_size_max), "--logger", "zap"]
        command += ["--log-level", "warn", "--bcrypt-cost", "4"]  # logging in is not what is tried here
        if self.settings.tls:
            command += ["--cert-file", str(folder / "server.pem"), "--key-file", str(folder / "server.key")]
            command += ["--client-cert-auth", "--trusted-ca-file", str(folder / "ca.pem")]
        return command

    def _enable_users(self) -> None:
        self.call(0, "auth/user/add", {"name": "root", "password": self.settings.root_password})
        self.call(0, "auth/role/add", {"name": "root"})
        self.call(0, "auth/user/grant", {"user": "root", "role": "root"})
        self.call(0, "auth/enable", {})

    def is_healthy(self, index: int) -> bool:
        """The member answers and knows a leader."""
        try:
            with self._open(urllib.request.Request(f"{self.endpoints[index]}/health")) as answer:
                return bool(json.load(answer)["health"] == "true")
        except OSError:
            return False

    def _try_call(self, index: int, method: str) -> dict[str, Any] | None:
        if not self.members[index].pid:
            return None
        try:
            return self.call(index, method, {})
        except ClusterError:
            return None

    @contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[Any]:
        """Past any proxy of the environment: the members are on this machine."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.settings.tls:
            context = ssl.create_default_context(cafile=self.ca_file)
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # its certificates are as openssl's defaults make them
            context.load_cert_chain(str(self.cert_file), str(self.key_file))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_SECONDS) as answer:
            yield answer


def make_certificates(folder: Path) -> None:
    """An authority, and certificates of it for the members and for clients: name.pem and name.key.

    None but the authority's has a common name: members would take it for the name of a user.
    """
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    issued = ["-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")]
    address = ["-addext", "subjectAltName=IP:127.0.0.1"]
    for name, subject, more in (
        ("ca", "/CN=kvfuse cluster", []),
        ("server", "/O=kvfuse server", issued + address),
        ("client", "/O=kvfuse client", issued + address),
    ):
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        command = ["openssl", "req", "-x509", *curve, "-subj", subject, *files, *more]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", b"").decode(errors="replace")
            raise ClusterError(f"no certificate could be made: {error} {reason}") from error
