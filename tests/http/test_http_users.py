"""Who may do what over HTTP: tokens of users, users of a socket, modes of folders, tokens of namespaces."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import kvfuse
from http_lab import PACKED, WebClient, WebServer, client_of, make_users, web_server
from mounting import wait_until

from kvfuse.http.block_bodies import build_body
from kvfuse.http.web_connection import HEAD_SECONDS

Clients = dict[str, WebClient]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WebServer, Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("http")
    file, headers = make_users(folder, admin=(0, 0), alice=(1001, 1001), bob=(1002, 1002))
    with web_server(folder, f"http.users={file}", "kind=blocks") as server:
        yield server, file, headers


@pytest.fixture
def clients(users: tuple[WebServer, Path, dict[str, Any]]) -> Iterator[Clients]:
    server, _, headers = users
    made = {name: WebClient(server.address, header) for name, header in headers.items()}
    yield made
    for client in made.values():
        client.close()


def test_who_shows_no_token_is_nobody(users: tuple[WebServer, Path, dict[str, Any]]) -> None:
    server, _, headers = users
    good = headers["alice"]["Authorization"]
    for header in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer alice.wrong"},
        {"Authorization": good[:-1]},
        {"Authorization": good.replace("alice", "admin")},
        {"Authorization": good.replace("Bearer", "Basic")},
        {"Authorization": "Bearer \xff\xfe"},
    ):
        with client_of(server.address, header) as client:
            answer = client.ask("GET", "/v1/folders/")
            assert (answer.status, "WWW-Authenticate" in answer.headers) == (401, True), header
            assert client.ask("GET", "/healthz").status == 200


def test_modes_decide_as_in_the_kernel(clients: Clients) -> None:
    admin, alice, bob = clients["admin"], clients["alice"], clients["bob"]
    assert admin.ask("PUT", "/v1/folders/home?mode=0755").status == 201
    assert admin.ask("PUT", "/v1/folders/home/alice?mode=0700").status == 201
    assert alice.ask("PUT", "/v1/files/home/alice/x", b"x").status == 403
    assert admin.ask("PATCH", "/v1/attributes/home/alice", b'{"uid": 1001, "gid": 1001}').status == 200
    assert alice.ask("PUT", "/v1/files/home/alice/secret", b"secret").status == 201
    assert alice.ask("GET", "/v1/attributes/home/alice/secret").json["uid"] == 1001
    for method, target in {
        "GET": "/v1/files/home/alice/secret",
        "HEAD": "/v1/files/home/alice/secret",
        "DELETE": "/v1/files/home/alice/secret",
        "PATCH": "/v1/files/home/alice/secret?offset=0",
    }.items():
        assert bob.ask(method, target, b"x" if method == "PATCH" else None).status == 403, method
    for target in ("/v1/folders/home/alice", "/v1/attributes/home/alice/secret", "/v1/xattrs/home/alice/secret"):
        assert bob.ask("GET", target).status == 403
    assert bob.ask("PUT", "/v1/files/home/bob", b"x").status == 403
    assert bob.ask("POST", "/v1/rename/home/alice?to=/home/taken").status == 403
    assert bob.ask("PATCH", "/v1/attributes/home/alice", b'{"mode": 511}').json["errno"] == "EPERM"
    assert alice.ask("PATCH", "/v1/attributes/home/alice", b'{"uid": 1002}').json["errno"] == "EPERM"
    assert alice.ask("PATCH", "/v1/attributes/home/alice", b'{"gid": 1002}').json["errno"] == "EPERM"
    assert alice.ask("PATCH", "/v1/attributes/home/alice", b'{"mode": 493}').status == 200
    assert bob.ask("GET", "/v1/files/home/alice/secret").body == b"secret"
    assert bob.ask("PATCH", "/v1/files/home/alice/secret?offset=0", b"x").status == 403
    assert alice.ask("PATCH", "/v1/attributes/home/alice/secret", b'{"mode": 384}').status == 200
    assert bob.ask("GET", "/v1/files/home/alice/secret").status == 403
    assert admin.ask("GET", "/v1/files/home/alice/secret").body == b"secret"


def test_the_sticky_bit(clients: Clients) -> None:
    admin, alice, bob = clients["admin"], clients["alice"], clients["bob"]
    admin.ask("PUT", "/v1/folders/tmp?mode=0777")
    assert admin.ask("PATCH", "/v1/attributes/tmp", b'{"mode": 1023}').status == 200
    assert alice.ask("PUT", "/v1/files/tmp/a?mode=0666", b"a").status == 201
    assert bob.ask("DELETE", "/v1/files/tmp/a").status == 403
    assert bob.ask("PUT", "/v1/files/tmp/a", b"b").status == 403
    assert bob.ask("POST", "/v1/rename/tmp/a?to=/tmp/b").status == 403
    assert bob.ask("PATCH", "/v1/files/tmp/a?offset=0", b"b").status == 204
    assert alice.ask("DELETE", "/v1/files/tmp/a").status == 204


def test_blocks_of_others(clients: Clients) -> None:
    admin, alice, bob = clients["admin"], clients["alice"], clients["bob"]
    admin.ask("PUT", "/v1/namespaces/blocks?mode=0777", b'{"kind": "blocks"}')
    assert alice.ask("PUT", "/v1/blocks/blocks/private?mode=0600", b"private").status == 204
    assert alice.ask("PUT", "/v1/blocks/blocks/public?mode=0644", b"public").status == 204
    assert bob.ask("GET", "/v1/blocks/blocks/public").body == b"public"
    assert bob.ask("GET", "/v1/blocks/blocks/private").status == 403
    assert bob.get_blocks("blocks", [b"public", b"private"]) == [b"public", None]
    assert admin.ask("PATCH", "/v1/attributes/blocks", b'{"mode": 448}').status == 200
    for client in (alice, bob):  # rights that a connection remembers end, too
        assert client.ask("GET", "/v1/blocks/blocks/public").status == 403
        assert client.ask("POST", "/v1/batch/exists/blocks", build_body([b"public"]), PACKED).status == 403
    assert admin.ask("GET", "/v1/blocks/blocks/public").body == b"public"


def test_a_token_of_a_namespace_lets_in(clients: Clients) -> None:
    admin, bob = clients["admin"], clients["bob"]
    admin.ask("PUT", "/v1/namespaces/tenant?mode=0700", b'{"kind": "blocks", "token": "a-token-of-this-tenant"}')
    token, other = {"Kvfuse-Token": "a-token-of-this-tenant"}, {"Kvfuse-Token": "a-token-of-another-one"}
    assert bob.ask("PUT", "/v1/blocks/tenant/key", b"block", token).status == 204
    assert bob.ask("GET", "/v1/blocks/tenant/key", headers=token).body == b"block"
    assert bob.ask("GET", "/v1/files/tenant/key", headers=token).body == b"block"
    for header in ({}, other):
        assert bob.ask("GET", "/v1/blocks/tenant/key", headers=header).status in (403, 404)
        assert bob.ask("GET", "/v1/files/tenant/key", headers=header).status == 403
        assert bob.ask("GET", "/v1/events/tenant", headers=header).status in (403, 404)
    assert admin.ask("PATCH", "/v1/namespaces/tenant", b'{"token": "another-token-of-this-tenant"}').status == 200
    assert bob.ask("GET", "/v1/blocks/tenant/key", headers=token).status in (403, 404)


def test_a_user_that_is_removed_is_nobody(users: tuple[WebServer, Path, dict[str, Any]], clients: Clients) -> None:
    _, file, _ = users
    text = file.read_text()
    assert clients["bob"].ask("GET", "/v1/folders/").status == 200
    file.write_text(text.partition("[users.bob]")[0])
    wait_until(lambda: clients["bob"].ask("GET", "/v1/folders/").status == 401, "the new file")
    assert clients["alice"].ask("GET", "/v1/folders/").status == 200
    file.chmod(0o644)
    wait_until(lambda: clients["alice"].ask("GET", "/v1/folders/").status == 401, "the look at the mode")
    file.chmod(0o600)
    file.write_text(text)
    wait_until(lambda: clients["bob"].ask("GET", "/v1/folders/").status == 200, "the old file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http.listen=127.0.0.1:1"], "http.users"),
        (["http.listen=0.0.0.0:8080", "http.anonymous=0:0"], "loopback"),
        (["http.listen=unix:/tmp/x", "http.anonymous=0:0"], "socket"),
        (["http.listen=127.0.0.1:1", "http.anonymous=0:0", "http.key=/x"], "http.certificate"),
        (["http.listen=nowhere"], "HOST:PORT"),
        (["http.listen=127.0.0.1:1", "http.usrs=/x"], "http.users"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, words: list[str], said: str) -> None:
    done = kvfuse("serve-http", tmp_path / "volume", *[part for word in words for part in ("-o", word)])
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ('[users.a]\nuid = 1\ngid = 1\ntoken = "secret"\n', 0o600, "no hash"),
        ("[users.a]\nuid = 1\n", 0o600, "`gid`"),
        ("[users.a]\nuid = 1\ngid = 1\ntoken = 'x'\ngrops = []", 0o600, "grops"),
        ("[users", 0o600, "users.toml"),
        ("", 0o604, "chmod"),
    ],
)
def test_users_files_that_cannot_be_used(tmp_path: Path, text: str, mode: int, said: str) -> None:
    file = tmp_path / "users.toml"
    file.write_text(text)
    file.chmod(mode)
    words = [part for word in (f"http.users={file}", "capacity=64MiB") for part in ("-o", word)]
    done = kvfuse("serve-http", tmp_path / "volume", *words, "--listen", "127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@needs_root
def test_the_kernel_says_who_comes_through_a_socket(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    with web_server(tmp_path, at="socket") as server, client_of(server.address) as root:
        root.ask("PUT", "/v1/folders/open?mode=0777")
        root.ask("PUT", "/v1/files/open/private?mode=0600", b"x")
        script = (
            "import http.client, socket, sys\n"
            "plain = socket.socket(socket.AF_UNIX); plain.connect(sys.argv[1])\n"
            "def ask(*words):\n"
            "    one = http.client.HTTPConnection('localhost'); one.sock = plain\n"
            "    one.request(*words); found = one.getresponse(); found.read(); return found.status\n"
            "print(ask('PUT', '/v1/files/open/mine', b'x'), ask('GET', '/v1/files/open/private'))\n"
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-c", script, str(server.address)],
            capture_output=True, text=True, user=1003, group=1003, extra_groups=[], check=False,
        )  # fmt: skip
        assert done.stdout == "201 403\n", done.stderr
        assert root.ask("GET", "/v1/attributes/open/mine").json["uid"] == 1003


def test_browsers_of_other_pages_are_refused(tmp_path: Path) -> None:
    """Who may come without a token is whoever a page in a browser of this machine can reach."""
    with web_server(tmp_path, "http.anonymous=0:0") as server, client_of(server.address) as client:
        assert client.ask("GET", "/v1/folders/").status == 200
        assert client.ask("GET", "/v1/folders/", headers={"Origin": "http://elsewhere.example"}).status == 403
        assert isinstance(server.address, int)
        with socket.create_connection(("127.0.0.1", server.address)) as plain:
            plain.sendall(b"GET /v1/folders/ HTTP/1.1\r\nHost: rebound.example\r\n\r\n")
            assert plain.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_a_new_token_is_printed_with_its_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvfuse.cli", "serve-http", "--new-token", "router"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    token, table = done.stdout.splitlines()[:2]
    assert (done.returncode, table) == (0, "[users.router]")
    assert token.startswith("router.")
    assert token not in done.stdout.partition("\n")[2]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of localhost, where others may be already."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


def test_a_renewed_certificate_is_used(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    file, _ = make_users(tmp_path, admin=(0, 0))
    words = (f"http.users={file}", f"http.certificate={certificate}", f"http.key={key}")
    with web_server(tmp_path, *words) as server:
        assert isinstance(server.address, int)
        former = shown_certificate(server.address)
        assert former == certificate.read_text()
        (tmp_path / "new").mkdir()
        renewed, new_key = make_certificate(tmp_path / "new")
        renewed.replace(certificate)  # the former key does not fit
        wait_until(lambda: b"the former certificate is still used" in server.log.read_bytes(), "a look at the file")
        assert shown_certificate(server.address) == former
        new_key.replace(key)
        wait_until(lambda: shown_certificate(server.address) == certificate.read_text(), "the new certificate")


def shown_certificate(port: int) -> str:
    return ssl.get_server_certificate(("localhost", port))


def test_https(tmp_path: Path) -> None:
    """With a certificate nobody reads a token on the wire, and plain HTTP gets nothing."""
    certificate, key = make_certificate(tmp_path)
    file, headers = make_users(tmp_path, admin=(0, 0))
    words = (f"http.users={file}", f"http.certificate={certificate}", f"http.key={key}", "kind=blocks")
    with web_server(tmp_path, *words) as server:
        assert isinstance(server.address, int)
        context = ssl.create_default_context(cafile=certificate)
        block = os.urandom(3 << 20)
        connection = http.client.HTTPSConnection("localhost", server.address, context=context, timeout=30)
        for method, target, body, status in (
            ("PUT", "/v1/blocks/key", block, 204),
            ("GET", "/v1/blocks/key", None, 200),
            ("PUT", "/v1/files/file", block, 201),
            ("GET", "/v1/files/file", None, 200),
        ):
            connection.request(method, target, body, headers["admin"])
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == status, content
            assert method == "PUT" or content == block
        connection.close()
        with socket.create_connection(("127.0.0.1", server.address)) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(4096)
        with socket.create_connection(("127.0.0.1", server.address)) as silent:
            silent.settimeout(2 * HEAD_SECONDS)
            began = time.monotonic()
            assert silent.recv(1) == b"", "who says nothing is cut off"
            assert HEAD_SECONDS - 1 < time.monotonic() - began < HEAD_SECONDS + 5
    key.chmod(0o644)
    done = kvfuse("serve-http", tmp_path / "volume", *[part for word in words for part in ("-o", word)])
    assert (done.returncode, "chmod" in done.stderr) == (2, True)
