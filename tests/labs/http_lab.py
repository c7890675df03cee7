"""A `kvfuse serve-http` of its own, and clients of the HTTP door."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cli_lab import kvfuse
from mounting import wait_until

from kvfuse.http.block_bodies import CONTENT_TYPE, HEAD, ITEM, build_body
from kvfuse_cluster.process import free_ports

PACKED = {"Content-Type": CONTENT_TYPE}


class Answered(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def statuses(self) -> list[int]:
        """Of the items of a packed body."""
        return self._items()["status"].tolist()  # type: ignore[no-any-return]

    @property
    def blocks(self) -> list[bytes | None]:
        """Of a packed body; None: the status is another than 0."""
        items, start, found = self._items(), HEAD.itemsize + ITEM.itemsize * len(self._items()), list[bytes | None]()
        for size, status, _ in items.tolist():
            found.append(self.body[start : start + size] if not status else None)
            start += size
        assert start == len(self.body)
        return found

    def _items(self) -> Any:
        (head,) = np.frombuffer(self.body, HEAD, 1)
        return np.frombuffer(self.body, ITEM, int(head["count"]), HEAD.itemsize)


class WebClient:
    """One connection to a door, at a port of this machine, or at the path of a socket. Headers go with each request."""

    def __init__(self, address: int | Path, headers: Mapping[str, str] | None = None) -> None:
        self.address = address
        self.headers = dict(headers or {})
        self.connection = http.client.HTTPConnection("localhost", address if isinstance(address, int) else 80, 60)
        if isinstance(address, Path):
            self.connection.sock = connect(address)

    def ask(self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answered:
        self.connection.request(method, target, body, {**self.headers, **(headers or {})})
        answer = self.connection.getresponse()
        return Answered(answer.status, answer.headers, answer.read())  # type: ignore[arg-type]

    def put_blocks(self, folder: str, keys: Sequence[bytes], blocks: Sequence[bytes]) -> list[int]:
        answer = self.ask("POST", f"/v1/batch/put/{folder}", build_body(keys, blocks), PACKED)
        assert answer.status == 200, answer
        return answer.statuses

    def get_blocks(self, folder: str, keys: Sequence[bytes]) -> list[bytes | None]:
        answer = self.ask("POST", f"/v1/batch/get/{folder}", build_body(keys), PACKED)
        assert answer.status == 200, answer
        return answer.blocks

    def close(self) -> None:
        self.connection.close()


def connect(address: int | Path) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), 60)
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(60)
    plain.connect(os.fspath(address))
    return plain


@contextmanager
def client_of(address: int | Path, headers: Mapping[str, str] | None = None) -> Iterator[WebClient]:
    client = WebClient(address, headers)
    try:
        yield client
    finally:
        client.close()


def make_users(folder: Path, **users: tuple[int, int]) -> tuple[Path, dict[str, dict[str, str]]]:
    """A users' file, and the headers of each user: name -> (uid, gid)."""
    from kvfuse.http.http_users import make_token

    file, text, headers = folder / "users.toml", "", {}
    for name, (uid, gid) in users.items():
        token, lines = make_token(name)
        text += lines.replace(f"uid = {os.getuid()}", f"uid = {uid}").replace(f"gid = {os.getgid()}", f"gid = {gid}")
        headers[name] = {"Authorization": f"Bearer {token}"}
    file.write_text(text)
    file.chmod(0o600)
    return file, headers


class WebServer(NamedTuple):
    address: int | Path
    volume: Path
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """As a service manager does. It must end by itself, with status 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()


def serve(folder: Path, *words: str, at: str = "", source: Path | None = None) -> WebServer:
    """Start a server; ``at``: "socket" for a UNIX socket, else it is a free port."""
    address: int | Path = folder / "http.sock" if at == "socket" else free_ports(1)[0]
    listen = f"unix:{address}" if isinstance(address, Path) else f"127.0.0.1:{address}"
    volume, log = source or folder / "volume", folder / "http.log"
    command = [sys.executable, "-m", "kvfuse.cli", "serve-http", str(volume), "--listen", listen]
    command += [part for word in words for part in ("-o", word)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    said = b"HTTP requests are answered at " + listen.encode()
    wait_until(lambda: said in log.read_bytes() or process.poll() is not None, "the HTTP server")
    assert process.poll() is None, log.read_text()
    return WebServer(address, volume, process, log)


@contextmanager
def web_server(folder: Path, *words: str, at: str = "", is_checked: bool = True) -> Iterator[WebServer]:
    """A server of a new volume, which is sound at the end."""
    server = serve(folder, "capacity=256MiB", *words, at=at)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
    if is_checked:
        done = kvfuse("fsck", "--verify", str(server.volume))
        assert done.returncode == 0, done.stdout + done.stderr
