"""Bytes over a TCP connection, from and into memory that is there already: pieces of memory in one system call.

The socket does not block; a call copies at most `CALL_BYTES`, so that the event loop is not kept.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from errno import EAGAIN
from pathlib import Path

import trio

from kvfuse.native.rowreceiver import ENDED, receive_rows

CALL_BYTES = 1 << 20
"""that one system call copies"""
PIECES_MAX = 256
"""pieces of memory of one system call"""
TOGETHER_BYTES, TOGETHER_SECONDS = 256 << 10, 0.02
"""that are waited for, where more is to come, and for how long"""
ALONE_BYTES = 32 << 10
"""so few are not waited for together"""
BUFFER_SIZE = 4 << 20
"""of the kernel, for each direction, where it allows that"""
SILENCE_SECONDS = 20
"""after which the kernel gives up a side that acknowledges nothing"""
BROKEN = (OSError, trio.ClosedResourceError)
"""what calls raise where a connection has ended"""


_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


class PeerStream:
    """One connection. OSError where it is broken, or the other side has ended it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._low = 1
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
        for option, forced in ((socket.SO_SNDBUF, _SO_SNDBUFFORCE), (socket.SO_RCVBUF, _SO_RCVBUFFORCE)):
            _size_buffer(connection, option, forced)

    def close(self) -> None:
        """Whoever waits for it gets trio.ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def detach(self) -> int:
        """The descriptor, which is somebody else's from now on."""
        return self._socket.detach()

    async def send(self, pieces: Iterable[memoryview]) -> None:
        """All bytes of these, in their order. A cancellation leaves the connection of no use."""
        left = deque(piece for piece in pieces if len(piece))
        while left:
            try:
                self._send_some(left)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                continue
            if left:
                await trio.lowlevel.checkpoint()

    def send_now(self, pieces: Iterable[memoryview]) -> list[memoryview]:
        """As much as one system call takes without waiting; the rest. A failure is told by `send` of the rest."""
        left = deque(piece for piece in pieces if len(piece))
        with suppress(OSError):
            self._send_some(left)
        return list(left)

    def _send_some(self, left: deque[memoryview]) -> None:
        """By one system call; take what was sent. BlockingIOError."""
        batch, size = [], 0
        for piece in left:
            batch.append(piece[: CALL_BYTES - size])
            size += len(batch[-1])
            if size >= CALL_BYTES or len(batch) >= PIECES_MAX:
                break
        count = self._socket.sendmsg(batch)
        while count:
            first = left.popleft()
            if len(first) > count:
                left.appendleft(first[count:])
            count -= min(count, len(first))

    async def readable(self) -> None:
        """Return when something is there, or the connection has ended."""
        self._wake_from(1)
        await trio.lowlevel.wait_readable(self._socket)

    async def receive_more(self, memory: memoryview, have: int, least: int) -> int:
        """Have at least so many bytes at the start of memory that has ``have``, and what else is there; how many."""
        while have < least:
            try:
                count = self._socket.recv_into(memory[have:])
            except BlockingIOError:
                await self.readable()
                continue
            _check_end(count)
            have += count
        return have

    async def receive(self, size: int) -> bytes:
        """So many bytes, of a short message."""
        data = bytearray(size)
        with memoryview(data) as view:
            await self.receive_into(view)
        return bytes(data)

    async def receive_into(self, view: memoryview) -> None:
        await self.receive_more(view, 0, len(view))

    async def land(self, rows: array[int], left: int, received: Callable[[int, int], None]) -> None:
        """Fill rows of `rowreceiver`, ``left`` bytes, whose addresses may change meanwhile.

        ``received``: called with the bytes that came, and with how many rows are full.
        """
        first = 0
        while left:
            first, count, error = receive_rows(self._socket.fileno(), rows, first, CALL_BYTES)
            if count:
                left -= count
                received(count, first)
            if error == ENDED:
                _check_end(0)
            elif error == EAGAIN:
                await self._wait_for(min(left, TOGETHER_BYTES))
            elif error:
                raise OSError(error, os.strerror(error))
            elif left:
                await trio.lowlevel.checkpoint()

    async def _wait_for(self, size: int) -> None:
        """Until so many bytes are there, or some have been for a moment."""
        self._wake_from(size if size > ALONE_BYTES else 1)
        if self._low == 1:
            await trio.lowlevel.wait_readable(self._socket)
            return
        with trio.move_on_after(TOGETHER_SECONDS) as waited:
            await trio.lowlevel.wait_readable(self._socket)
        if waited.cancelled_caught:
            self._wake_from(1)
            await trio.lowlevel.wait_readable(self._socket)

    def _wake_from(self, size: int) -> None:
        """The socket is readable from so many bytes on."""
        if size != self._low:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low = size


def _size_buffer(connection: socket.socket, option: int, forced: int) -> None:
    """More than the kernel's limit where this user may; else the kernel chooses, which grows it as need be."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, forced, BUFFER_SIZE)
    except OSError:
        if connection.getsockopt(socket.SOL_SOCKET, option) < BUFFER_SIZE <= _limit_of(option):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)


def _limit_of(option: int) -> int:
    name = "wmem_max" if option == socket.SO_SNDBUF else "rmem_max"
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):
        return 0


def _check_end(count: int) -> None:
    if not count:
        raise ConnectionResetError("the other side ended the connection")
