"""Bytes over a TCP connection, from and into memory that is there already: pieces of memory in one system call.

The socket does not block; a call copies at most `CALL_BYTES`, so that the event loop is not kept.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import trio

CALL_BYTES = 1 << 20
"""that one system call copies"""
PIECES_MAX = 256
"""pieces of memory of one system call"""
BUFFER_SIZE = 4 << 20
"""of the kernel, for each direction; it may give less"""
SILENCE_SECONDS = 20
"""after which the kernel gives up a side that acknowledges nothing"""
BROKEN = (OSError, trio.ClosedResourceError)
"""what calls raise where a connection has ended"""


class Landing(Protocol):
    """Where bytes go that come one after the other. The place may change between two system calls."""

    def room(self) -> memoryview:
        """For what comes next; empty: it has all."""

    def came(self, count: int) -> None:
        """So many bytes were written there."""


class Stream:
    """One connection. OSError where it is broken, or the other side has ended it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)

    def close(self) -> None:
        """Whoever waits for it gets trio.ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    async def send(self, pieces: Iterable[memoryview]) -> None:
        """All bytes of these, in their order. A cancellation leaves the connection of no use."""
        left = deque(piece for piece in pieces if len(piece))
        while left:
            batch, size = [], 0
            for piece in left:
                batch.append(piece[: CALL_BYTES - size])
                size += len(batch[-1])
                if size >= CALL_BYTES or len(batch) >= PIECES_MAX:
                    break
            try:
                count = self._socket.sendmsg(batch)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                continue
            while count:
                first = left.popleft()
                if len(first) > count:
                    left.appendleft(first[count:])
                count -= min(count, len(first))
            if left:
                await trio.lowlevel.checkpoint()

    async def receive(self, size: int) -> bytes:
        """So many bytes, of a short message."""
        data = bytearray(size)
        with memoryview(data) as view:
            await self.receive_into(view)
        return bytes(data)

    async def receive_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            _check_end(count)
            done += count

    async def land(self, landings: Iterable[Landing]) -> None:
        """Fill landings, one after the other. Their rooms are asked for right before each system call."""
        left = deque(landings)
        while left:
            rooms, size = [], 0
            for landing in left:
                if len(room := landing.room()):
                    rooms.append(room[: CALL_BYTES - size])
                    size += len(rooms[-1])
                if size >= CALL_BYTES or len(rooms) >= PIECES_MAX:
                    break
            if not rooms:
                return
            try:
                count = self._socket.recvmsg_into(rooms)[0]
            except BlockingIOError:
                del rooms
                await trio.lowlevel.wait_readable(self._socket)
                continue
            _check_end(count)
            while left and (count or not len(left[0].room())):
                part = min(count, len(left[0].room()))
                left[0].came(part)
                count -= part
                if not len(left[0].room()):
                    left.popleft()
            await trio.lowlevel.checkpoint()


def _check_end(count: int) -> None:
    if not count:
        raise ConnectionResetError("the other side ended the connection")
