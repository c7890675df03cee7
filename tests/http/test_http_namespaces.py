"""Namespaces and events over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from http_lab import WebClient, WebServer, client_of, connect, web_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with web_server(tmp_path_factory.mktemp("http"), at="socket") as server:
        yield server


@pytest.fixture
def client(server: WebServer) -> Iterator[WebClient]:
    with client_of(server.address) as client:
        yield client


def test_a_namespace_is_made_changed_and_removed(client: WebClient) -> None:
    made = client.ask("PUT", "/v1/namespaces/cache", b'{"kind": "blocks", "capacity": 33554432}')
    assert (made.status, made.json["kind"], made.json["capacity"]) == (201, "blocks", "33554432")
    assert client.ask("PUT", "/v1/namespaces/cache", b"{}").json["errno"] == "EEXIST"
    assert client.ask("PATCH", "/v1/namespaces/cache", b'{"ttl": 60}').json["ttl"] == "60"
    assert "kidn" in client.ask("PATCH", "/v1/namespaces/cache", b'{"kidn": "files"}').json["title"]
    client.put_blocks("cache", [b"one"], [b"x"])
    assert client.ask("POST", "/v1/clear/cache").status == 204
    assert client.get_blocks("cache", [b"one"]) == [None]
    assert client.ask("DELETE", "/v1/namespaces/cache").status == 204
    assert client.ask("GET", "/v1/namespaces/cache").status == 404


def test_wrong_settings_leave_no_folder(client: WebClient) -> None:
    assert client.ask("PUT", "/v1/namespaces/wrong", b'{"kind": "bloks"}').status == 400
    assert client.ask("GET", "/v1/folders/wrong").status == 404
    client.ask("PUT", "/v1/folders/plain")
    assert client.ask("GET", "/v1/namespaces/plain").status == 404
    assert client.ask("PATCH", "/v1/namespaces/plain", b'{"ttl": 1}').status == 404


def test_events_tell_what_is_there_and_each_change(server: WebServer, client: WebClient) -> None:
    client.ask("PUT", "/v1/namespaces/followed", b'{"kind": "blocks"}')
    client.put_blocks("followed", [b"before", b"with/slash"], [b"x", b"y"])
    with connect(server.address) as stream:
        stream.sendall(b"GET /v1/events/followed HTTP/1.1\r\nHost: localhost\r\n\r\n")
        events = read_events(stream.makefile("rb"))
        told = next(events)
        assert (told["event"], sorted(told["keys"])) == ("present", ["before", "with/slash"])
        assert next(events) == {"event": "ready"}
        client.put_blocks("followed", [b"later"], [b"z"])
        assert next(events) == {"event": "stored", "keys": ["later"]}
        client.ask("DELETE", "/v1/blocks/followed/before")
        assert next(events) == {"event": "removed", "keys": ["before"]}
        client.ask("POST", "/v1/clear/followed")
        assert next(events) == {"event": "cleared"}


def read_events(lines: Iterator[bytes]) -> Iterator[dict[str, object]]:
    """Of a chunked answer of JSON lines."""
    return (json.loads(line) for line in lines if line.startswith(b"{"))


def test_server_sent_events(server: WebServer, client: WebClient) -> None:
    client.ask("PUT", "/v1/namespaces/sse", b'{"kind": "blocks"}')
    with connect(server.address) as stream:
        stream.sendall(b"GET /v1/events/sse HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
        lines = stream.makefile("rb")
        head = list(iter(lines.readline, b"\r\n"))
        assert b"Content-Type: text/event-stream\r\n" in head
        assert b"event: ready\n" in (lines.readline(), lines.readline())


def test_files_are_not_followed(client: WebClient) -> None:
    client.ask("PUT", "/v1/folders/files")
    assert client.ask("GET", "/v1/events/files").json["errno"] == "EINVAL"
