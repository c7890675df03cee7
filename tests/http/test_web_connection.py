"""One connection in process: what it holds while its client takes its time."""

from __future__ import annotations

import socket
import weakref

import h11
import trio

from kvfuse.connection_limit import HttpClient
from kvfuse.http.web_connection import WebConnection
from kvfuse.http.web_message import Lent, RequestBody, WebAnswer

SIZE = 16 << 20


class Holder:
    """Whoever has it keeps memory from changing."""


class LendingAnswerer:
    """Answers each request with lent memory."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.holders: list[weakref.ref[Holder]] = []
        self.done_count = 0

    async def answer(self, head: h11.Request, body: RequestBody) -> WebAnswer:
        holder = Holder()
        self.holders.append(weakref.ref(holder))
        return WebAnswer(200, Lent(memoryview(self._data), holder))

    def done(self) -> None:
        self.done_count += 1


async def test_lent_memory_is_given_back_before_the_client_reads() -> None:
    """What the kernel does not take at once is a copy: the memory may change from then on."""
    ours, theirs = socket.socketpair()
    data = bytearray(b"x" * SIZE)
    answerer = LendingAnswerer(data)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    client = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
    async with trio.open_nursery() as nursery, stream, client:
        connection = WebConnection(stream, HttpClient("here", nursery.cancel_scope.cancel), answerer)
        nursery.start_soon(connection.serve)
        await client.send_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        with trio.fail_after(10):
            while not answerer.holders or answerer.holders[0]() is not None:
                await trio.lowlevel.checkpoint()
        assert answerer.done_count == 0, "the answer is on its way"
        data[:] = b"y" * SIZE
        found = bytearray()
        with trio.fail_after(30):
            while len(found) < SIZE:
                found += await client.receive_some(1 << 20)
        assert found.endswith(b"x" * (SIZE - 1000)), "bytes that came later than the request"
        nursery.cancel_scope.cancel()
