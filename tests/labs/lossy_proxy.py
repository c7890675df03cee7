"""A proxy before one etcd member that loses answers, loses requests, and delivers requests late - to the real member.

What a network may do to a call, chosen by a seeded generator for every transaction that writes: the client always
learns the same, namely nothing.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import trio

READ_SIZE = 1 << 16
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""a frame without any"""
HEAD_SIZE = 9
"""of a frame: 3 bytes of its size, its kind, its flags, 4 bytes of the stream"""
DATA, HEADERS, END_STREAM = 0, 1, 1


class _Broken(Exception):
    """The connection ends here."""


class LossyProxy:
    """Listens on a port of its own. ``loss`` is the probability that a commit meets one of the three fates."""

    def __init__(self, target: str, rng: random.Random, nursery: trio.Nursery) -> None:
        self.endpoint = ""
        self.loss = 0.0
        self.delay = 0.0
        """seconds by which every answer comes later"""
        self.fates = {"answer lost": 0, "request lost": 0, "request late": 0}
        self._target = urlsplit(target)
        self._random = rng
        self._nursery = nursery
        self._late: list[bytes] = []

    async def start(self) -> None:
        listeners = await self._nursery.start(partial(trio.serve_tcp, self._serve, 0, host="127.0.0.1"))
        self.endpoint = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"

    async def deliver_late(self) -> None:
        """Let the member have some of the requests that were held back, whose clients have given up."""
        self._random.shuffle(self._late)
        for _ in range(self._random.randint(0, len(self._late))):
            async with await self._connect() as member:
                await member.send_all(PREFACE + SETTINGS + self._late.pop().removeprefix(PREFACE))
                await _message(member, bytearray())

    async def _connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(self._target.hostname, self._target.port)

    async def _serve(self, client: trio.SocketStream) -> None:
        requests, answers = bytearray(), bytearray()
        try:
            async with client, await self._connect() as member:
                while True:
                    request = await _message(client, requests)
                    fate = self._fate(request)
                    if fate is not None:
                        self.fates[fate] += 1
                    if fate == "request late":
                        self._late.append(request)
                    if fate in ("request late", "request lost"):
                        return
                    await member.send_all(request)
                    answer = await _message(member, answers)
                    if fate == "answer lost":
                        return
                    await trio.sleep(self.delay)
                    await client.send_all(answer)
        except (_Broken, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def _fate(self, request: bytes) -> str | None:
        is_commit = b"/etcdserverpb.KV/Txn" in request and (b"done " in request or b"refused " in request)
        return self._random.choice(list(self.fates)) if is_commit and self._random.random() < self.loss else None


@asynccontextmanager
async def lossy_proxy(target: str, rng: random.Random) -> AsyncIterator[LossyProxy]:
    """One that listens for as long as the block lasts."""
    async with trio.open_nursery() as nursery:
        proxy = LossyProxy(target, rng, nursery)
        await proxy.start()
        yield proxy
        nursery.cancel_scope.cancel()


async def _message(stream: trio.SocketStream, unread: bytearray) -> bytes:
    """Frames of HTTP/2, up to the last one of a request or an answer: a connection has one call at a time."""
    size = 0
    while True:
        while len(unread) < size + HEAD_SIZE:
            await _read(stream, unread)
        if PREFACE.startswith(unread[size : size + HEAD_SIZE]):
            size += len(PREFACE)
            continue
        kind, flags = unread[size + 3], unread[size + 4]
        size += HEAD_SIZE + int.from_bytes(unread[size : size + 3], "big")
        while len(unread) < size:
            await _read(stream, unread)
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            message = bytes(unread[:size])
            del unread[:size]
            return message


async def _read(stream: trio.SocketStream, unread: bytearray) -> None:
    data = await stream.receive_some(READ_SIZE)
    if not data:
        raise _Broken
    unread += data
