"""WebDAV: as cadaver uses it, and what its clients may not do."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from http_lab import WebClient, WebServer, client_of, make_users, web_server

NAMES = {"d": "DAV:"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with web_server(tmp_path_factory.mktemp("http"), "http.anonymous=0:0") as server:
        yield server


@pytest.fixture
def client(server: WebServer) -> Iterator[WebClient]:
    with client_of(server.address) as client:
        yield client


def hrefs(client: WebClient, path: str) -> dict[str, str | None]:
    """Path -> size, as a PROPFIND of depth 1 says."""
    answer = client.ask("PROPFIND", path, headers={"Depth": "1"})
    assert answer.status == 207, answer
    rows = ElementTree.fromstring(answer.body).findall("d:response", NAMES)
    return {
        str(row.findtext("d:href", None, NAMES)): row.findtext(".//d:getcontentlength", None, NAMES) for row in rows
    }


def test_a_folder_is_told_with_what_is_in_it(client: WebClient) -> None:
    assert client.ask("MKCOL", "/dav/told").status == 201
    client.ask("PUT", "/dav/told/a%20%3C%26%3E", b"12345")
    client.ask("MKCOL", "/dav/told/inner/")
    assert hrefs(client, "/dav/told") == {"/dav/told/": None, "/dav/told/a%20%3C%26%3E": "5", "/dav/told/inner/": None}
    assert "/dav/told/" in hrefs(client, "/dav/")
    assert client.ask("PROPFIND", "/dav/told").status == 403
    assert client.ask("MKCOL", "/dav/told").status == 405
    assert client.ask("MKCOL", "/dav/none/below").status == 409
    assert client.ask("OPTIONS", "/dav/").headers["DAV"] == "1"


def test_files_are_moved_copied_and_removed(client: WebClient) -> None:
    client.ask("MKCOL", "/dav/moved")
    client.ask("PUT", "/dav/moved/a", b"a")
    client.ask("PUT", "/dav/moved/b", b"b" * 1_000_000)
    url = f"http://localhost:{client.address}/dav/moved"
    assert client.ask("COPY", "/dav/moved/b", headers={"Destination": f"{url}/c"}).status == 201
    assert client.ask("GET", "/dav/moved/c").body == b"b" * 1_000_000
    assert client.ask("MOVE", "/dav/moved/a", headers={"Destination": f"{url}/b", "Overwrite": "F"}).status == 412
    assert client.ask("MOVE", "/dav/moved/a", headers={"Destination": f"{url}/b"}).status == 204
    assert client.ask("GET", "/dav/moved/b").body == b"a"
    assert client.ask("MOVE", "/dav/moved/b", headers={"Destination": "/elsewhere"}).status == 400
    client.ask("MKCOL", "/dav/moved/deep")
    client.ask("PUT", "/dav/moved/deep/x", b"x")
    assert client.ask("DELETE", "/dav/moved").status == 204
    assert client.ask("PROPFIND", "/dav/moved", headers={"Depth": "0"}).status == 404


def test_a_token_is_the_password(tmp_path: Path) -> None:
    file, headers = make_users(tmp_path, reader=(1001, 1001))
    token = headers["reader"]["Authorization"].removeprefix("Bearer ")
    with web_server(tmp_path, f"http.users={file}") as server, client_of(server.address) as client:
        for password, status in {token: 207, token[:-1]: 401, "": 401}.items():
            basic = base64.b64encode(f"anybody:{password}".encode()).decode()
            header = {"Authorization": f"Basic {basic}", "Depth": "0"}
            assert client.ask("PROPFIND", "/dav/", headers=header).status == status
        basic = base64.b64encode(f"anybody:{token}".encode()).decode()
        assert client.ask("MKCOL", "/dav/mine", headers={"Authorization": f"Basic {basic}"}).status == 403


@pytest.mark.skipif(shutil.which("cadaver") is None, reason="cadaver is not installed")
def test_cadaver(server: WebServer, client: WebClient, tmp_path: Path) -> None:
    content = os.urandom(200_000)
    (tmp_path / "up").write_bytes(content)
    commands = [
        "mkcol cadaver",
        "cd cadaver",
        "put up",
        "copy up other",
        "move other renamed",
        "ls",
        "get renamed down",
    ]
    done = subprocess.run(
        ["cadaver", f"http://localhost:{server.address}/dav/"],
        input="\n".join([*commands, "delete up", "ls", "quit"]) + "\n",
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, timeout=60, check=False,
    )  # fmt: skip
    assert (tmp_path / "down").read_bytes() == content, done.stdout
    assert "failed" not in done.stdout, done.stdout
    assert hrefs(client, "/dav/cadaver").keys() == {"/dav/cadaver/", "/dav/cadaver/renamed"}


@pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed")
def test_rclone(server: WebServer, client: WebClient, tmp_path: Path) -> None:
    """A tree goes up and comes down; what it finds changed or gone it mends."""
    up, down = tmp_path / "up", tmp_path / "down"
    for number in range(12):
        file = up / f"folder {number % 3}" / f"file-{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(number * 5000))
    remote = f":webdav,url='http://localhost:{server.address}/dav/',vendor=other:rclone"

    def rclone(*words: str | Path) -> None:
        command = ["rclone", "--config", tmp_path / "none", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    rclone("sync", up, remote)
    (up / "folder 0" / "file-0").unlink()
    (up / "folder 1" / "file-1").write_bytes(b"changed")
    rclone("sync", up, remote)
    rclone("copy", remote, down)
    assert {path.relative_to(up): path.read_bytes() for path in up.rglob("*") if path.is_file()} == {
        path.relative_to(down): path.read_bytes() for path in down.rglob("*") if path.is_file()
    }
    rclone("purge", remote)
    assert "/dav/rclone/" not in hrefs(client, "/dav/")
