"""Clients that mean no good, over raw sockets: smuggled requests, slow ones, floods, and many at once."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_lab import WebServer, client_of, connect, web_server
from mounting import wait_until

from kvfuse.http.web_connection import HEAD_SECONDS, HEAD_SIZE_MAX
from kvfuse.http.web_pace import STALL_SECONDS

HOST = b"Host: localhost\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    folder = tmp_path_factory.mktemp("http")
    with web_server(folder, "kind=blocks", "http.anonymous=0:0", "http.clients=40") as server:
        with client_of(server.address) as client:
            client.put_blocks("", [b"large"], [bytes(40 << 20)])
        yield server
        assert server.process.poll() is None
        log = server.log.read_text()
        assert "Traceback" not in log, log


def say(server: WebServer, *parts: bytes, ends: bool = False) -> bytes:
    """Everything that the server answers to some bytes, until it closes the connection; or for a moment."""
    with connect(server.address) as plain:
        for part in parts:
            plain.sendall(part)
        if ends:
            plain.shutdown(socket.SHUT_WR)
        plain.settimeout(3)
        answer = b""
        try:
            while data := plain.recv(65536):
                answer += data
        except (TimeoutError, ConnectionResetError):
            pass
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]


SMUGGLED = b"GET /v1/files/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
PUT = b"PUT /v1/files/x HTTP/1.1\r\n" + HOST


@pytest.mark.parametrize(
    "request_head",
    [
        PUT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        PUT + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        PUT + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        PUT + b"Content-Length: 5, 6\r\n\r\nhello",
        PUT + b"Content-Length: +5\r\n\r\nhello",
        PUT + b"Content-Length: 0x5\r\n\r\nhello",
        PUT + b"Content-Length: -1\r\n\r\n",
        PUT + b"Content-Length : 5\r\n\r\nhello",
        PUT + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        PUT + b"X: a\r\n Content-Length: 5\r\n\r\nhello",
        PUT + b"X: a\r\n\tfolded\r\nContent-Length: 0\r\n\r\n",
        PUT + b"X: a\nContent-Length: 0\r\n\r\n",
        PUT + b"Content-Length: 0\n\n",
        b"PUT /v1/files/x HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /v1/files/x HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"PUT /v1/files/x HTTP/1.1\r\n" + HOST + HOST + b"Content-Length: 0\r\n\r\n",
        b"PUT /v1/files/x\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=range(22),
)
def test_requests_that_others_may_read_otherwise_are_refused(server: WebServer, request_head: bytes) -> None:
    """What follows them on the connection is not served."""
    answer = say(server, request_head + SMUGGLED)
    assert [status // 100 for status in statuses(answer)] in ([4], [5]), answer
    assert b"Connection: close" in answer or b"smuggled" not in answer


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"fffffffffffffffff\r\nx",
        b"5;" + b"x" * 70000,
        b"-1\r\n\r\n",
    ],
)
def test_chunks_that_are_none(server: WebServer, body: bytes) -> None:
    answer = say(server, PUT + b"Transfer-Encoding: chunked\r\n\r\n" + body, ends=True)
    assert statuses(answer) in ([400], []), answer
    with client_of(server.address) as client:
        assert client.ask("GET", "/v1/files/x").status == 404
        assert [row["name"] for row in client.ask("GET", "/v1/folders/").json["entries"]] == ["large"]


def test_heads_are_bounded(server: WebServer) -> None:
    start = b"GET /healthz HTTP/1.1\r\n" + HOST
    assert statuses(say(server, start + b"X: " + b"x" * HEAD_SIZE_MAX + b"\r\n\r\n")) == [431]
    assert statuses(say(server, start + b"".join(b"X%d: x\r\n" % number for number in range(70)) + b"\r\n")) == [431]
    assert statuses(say(server, b"GET /" + b"x" * 70_000)) == [431]
    assert statuses(say(server, b"\r\n" * 40_000)) in ([400], [431])
    query = b"&".join(b"a%d" % number for number in range(1000))
    assert statuses(say(server, b"GET /v1/files/x?" + query + b" HTTP/1.1\r\n" + HOST + b"\r\n")) == [400]


def test_pipelined_requests_are_answered_in_order(server: WebServer) -> None:
    one = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    put = PUT.replace(b"/x ", b"/piped ") + b"Content-Length: 5\r\n\r\nhello"
    get = b"GET /v1/files/piped HTTP/1.1\r\n" + HOST + b"\r\n"
    gone = b"DELETE /v1/files/piped HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    answer = say(server, one + put + get + gone + SMUGGLED)
    assert statuses(answer) == [200, 201, 200, 204]


def test_a_cut_put_leaves_nothing(server: WebServer) -> None:
    for sent in (b"", b"part of it"):
        say(server, PUT + b"Content-Length: 100\r\n\r\n" + sent, ends=True)
    with client_of(server.address) as client:
        wait_until(
            lambda: [row["name"] for row in client.ask("GET", "/v1/folders/").json["entries"]] == ["large"],
            "the end of what was cut",
        )


def test_slow_heads_are_cut_off(server: WebServer) -> None:
    """A byte now and then does not keep a place."""
    began = time.monotonic()
    with connect(server.address) as plain:
        plain.settimeout(1)
        answer = b""
        for byte in b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100:
            try:
                plain.send(bytes([byte]))
                answer += plain.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer.endswith(b"}\n") or time.monotonic() - began > 2 * HEAD_SECONDS:
                break
    assert statuses(answer) == [408]
    assert time.monotonic() - began < HEAD_SECONDS + 5


def test_who_takes_no_answer_holds_nothing_for_long(server: WebServer) -> None:
    with connect(server.address) as plain, client_of(server.address) as client:
        plain.sendall(b"GET /v1/blocks/large HTTP/1.1\r\n" + HOST + b"\r\n")
        plain.recv(1000)
        began = time.monotonic()
        assert client.ask("GET", "/v1/blocks/large").status == 200
        plain.settimeout(2 * STALL_SECONDS)
        wait_until(lambda: is_cut(plain), "the end of who takes nothing")
        assert STALL_SECONDS - 2 < time.monotonic() - began < STALL_SECONDS + 10


def is_cut(plain: socket.socket) -> bool:
    """The server has closed the connection: the kernel says so without that anything is read."""
    state = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != 1  # TCP_ESTABLISHED


def test_idle_connections_make_room_for_others(server: WebServer) -> None:
    idle = [connect(server.address) for _ in range(100)]
    try:
        with client_of(server.address) as client:
            assert client.ask("GET", "/healthz").status == 200
    finally:
        for one in idle:
            one.close()


def test_bodies_take_no_more_memory_than_there_is(server: WebServer) -> None:
    """A client beyond that is told to come again."""
    opened = []
    try:
        for number in range(4):  # each announces 64 MiB of the 256 MiB that there are
            plain = connect(server.address)
            opened.append(plain)
            plain.sendall(b"PUT /v1/blocks/b%d HTTP/1.1\r\n" % number + HOST + b"Content-Length: 67108864\r\n\r\nx")
        with client_of(server.address) as client:

            def is_refused() -> bool:
                answer = client.ask("PUT", "/v1/blocks/another", b"x" * (60 << 20))
                return answer.status in (429, 503) and answer.headers["Retry-After"] == "1"

            wait_until(is_refused, "the refusal")
            assert client.ask("GET", "/v1/files/none").status == 404
    finally:
        for plain in opened:
            plain.close()
    with client_of(server.address) as client:
        wait_until(lambda: client.ask("PUT", "/v1/blocks/another", b"x" * 1000).status == 204, "the memory")
        client.ask("DELETE", "/v1/blocks/another")


def test_a_user_has_so_many_requests_and_streams(tmp_path: Path) -> None:
    """Beyond that it is told to come again; whoever needs no user is answered."""
    words = ("http.anonymous=0:0", "kind=blocks", "http.user_requests=4", "http.followers=2")
    with web_server(tmp_path, *words) as server, ExitStack() as stack:
        streams = [stack.enter_context(connect(server.address)) for _ in range(2)]
        for stream in streams:
            stream.sendall(b"GET /v1/events/ HTTP/1.1\r\n" + HOST + b"\r\n")
            assert stream.recv(4096).startswith(b"HTTP/1.1 200 ")
        with client_of(server.address) as client:
            assert client.ask("GET", "/v1/events/").status == 429
            puts = [stack.enter_context(connect(server.address)) for _ in range(2)]
            for number, plain in enumerate(puts):
                plain.sendall(b"PUT /v1/files/f%d HTTP/1.1\r\n" % number + HOST + b"Content-Length: 10\r\n\r\nx")
            wait_until(lambda: client.ask("GET", "/v1/files/none").status == 429, "the limit")
            assert client.ask("GET", "/healthz").status == 200
            for plain in puts:
                plain.sendall(b"y" * 9)
                assert plain.recv(4096).startswith(b"HTTP/1.1 201 ")
            wait_until(lambda: client.ask("GET", "/v1/files/none").status == 404, "their end")
            streams[0].close()
            client.ask("PUT", "/v1/blocks/key", b"x")  # the server finds that nobody reads, when it tells of that
            client.ask("DELETE", "/v1/blocks/key")
            wait_until(lambda: is_followed(server), "the end of a stream")


def is_followed(server: WebServer) -> bool:
    with connect(server.address) as stream:
        stream.sendall(b"GET /v1/events/ HTTP/1.1\r\n" + HOST + b"\r\n")
        return stream.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_random_bytes_end_nothing(server: WebServer) -> None:
    seed = int(os.environ.get("KVFUSE_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    chosen = random.Random(seed)
    request = PUT + b"Content-Length: 20\r\n\r\n" + b"x" * 20
    for _ in range(300):
        data = bytearray(request)
        for _ in range(chosen.randint(1, 6)):
            place = chosen.randrange(len(data))
            data[place : place + chosen.randint(0, 3)] = chosen.randbytes(chosen.randint(0, 3))
        with connect(server.address) as plain:
            plain.sendall(bytes(data))
            plain.shutdown(socket.SHUT_WR)
            plain.settimeout(10)
            try:
                while plain.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    with client_of(server.address) as client:
        client.ask("DELETE", "/v1/files/x")
        assert client.ask("GET", "/healthz").status == 200


def test_a_flood_of_requests_leaves_time_for_others(server: WebServer) -> None:
    """20 clients ask as fast as they can: another one is answered within a second."""
    stop = threading.Event()

    def flood() -> None:
        with client_of(server.address) as client:
            while not stop.is_set():
                client.ask("GET", "/v1/files/none")

    threads = [threading.Thread(target=flood) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        with client_of(server.address) as client:
            client.ask("GET", "/healthz")
            began = time.monotonic()
            for _ in range(20):
                assert client.ask("GET", "/healthz").status == 200
            assert time.monotonic() - began < 20
    finally:
        stop.set()
        for thread in threads:
            thread.join()
