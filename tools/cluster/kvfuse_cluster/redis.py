"""A Redis server on this machine (Debian: redis-server), with TLS and a password where wanted."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from kvfuse.errors import ClusterError
from kvfuse_cluster.etcd import make_certificates
from kvfuse_cluster.process import START_SECONDS, Server, free_ports


class RedisServer(Server):
    """It keeps nothing on disk: one that was restarted is empty."""

    def __init__(self, folder: Path, *, tls: bool = False, password: str = "") -> None:
        (self.port,) = free_ports(1)
        self.folder = folder
        self.password = password
        self.tls = tls
        command = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        command += ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        if tls:
            make_certificates(folder)
            command += ["--tls-cert-file", str(folder / "server.pem"), "--tls-key-file", str(folder / "server.key")]
            command += ["--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "no"]
        if password:
            command += ["--requirepass", password]
        super().__init__(folder, "redis", command)

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start it; returns when it answers. ClusterError."""
        if shutil.which("redis-server") is None:
            raise ClusterError("Redis is not installed: apt-get install redis-server")
        self.start(self._is_listening, START_SECONDS)

    def cli(self, *words: str) -> str:
        """What Redis' own program says."""
        command = ["redis-cli", "-p", str(self.port), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def _is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False
