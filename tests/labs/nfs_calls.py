"""Calls of NFS 4.0 with handles in the hand, which no client of the kernel lets anybody have (RFC 7530)."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

PROGRAM, VERSION, COMPOUND = 100003, 4, 1
GETATTR, GETFH, LOOKUP, PUTFH, PUTROOTFH, READ = 9, 10, 15, 22, 24, 25
ABSENT, STALE = 2, 70
"""NFS4ERR_NOENT, NFS4ERR_STALE"""
ANYBODY = bytes(16)
"""the state of a read of a file that nobody has opened"""
_SIZE, _FILEID = 4, 20
"""attributes"""


class NfsError(Exception):
    """The server's answer is an error. ``status``: its number, of nfsstat4."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NFS error {status}")
        self.status = status


class Facts(NamedTuple):
    size: int
    fileid: int


def _opaque(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content + bytes(-len(content) % 4)


class _Reply:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(">" + form, self.content, self.at)
        self.at += struct.calcsize(">" + form)
        return values

    def take_opaque(self) -> bytes:
        (size,) = self.take("I")
        start, self.at = self.at, self.at + size + -size % 4
        return self.content[start : start + size]


class NfsCalls:
    """One connection, as root. ``connection``: to a server of NFS 4."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()

    def find(self, path: Sequence[str]) -> bytes:
        """The handle of a path from the server's root. NfsError."""
        names = [struct.pack(">I", LOOKUP) + _opaque(name.encode()) for name in path]
        reply = self._call(struct.pack(">I", PUTROOTFH), *names, struct.pack(">I", GETFH))
        for _ in range(1 + len(names)):
            reply.take("II")
        reply.take("II")
        return reply.take_opaque()

    def facts(self, handle: bytes) -> Facts:
        """NfsError."""
        wanted = struct.pack(">III", GETATTR, 1, 1 << _SIZE | 1 << _FILEID)
        reply = self._call(struct.pack(">I", PUTFH) + _opaque(handle), wanted)
        reply.take("IIII")
        reply.take(f"{reply.take('I')[0]}I")
        reply.take("I")
        return Facts(*reply.take("QQ"))

    def read(self, handle: bytes, size: int) -> bytes:
        """As many bytes of the file, from its first one on. NfsError."""
        wanted = struct.pack(">I", READ) + ANYBODY + struct.pack(">QI", 0, size)
        reply = self._call(struct.pack(">I", PUTFH) + _opaque(handle), wanted)
        reply.take("IIIII")
        return reply.take_opaque()

    def _call(self, *operations: bytes) -> _Reply:
        """The results of the operations, if all succeed. NfsError."""
        owner = struct.pack(">I", 0) + _opaque(b"test") + struct.pack(">III", 0, 0, 0)
        head = struct.pack(">IIIIII", next(self._numbers), 0, 2, PROGRAM, VERSION, COMPOUND)
        message = head + struct.pack(">I", 1) + _opaque(owner) + struct.pack(">II", 0, 0)
        message += _opaque(b"") + struct.pack(">II", 0, len(operations)) + b"".join(operations)
        self._connection.sendall(struct.pack(">I", 1 << 31 | len(message)) + message)
        reply = _Reply(self._receive())
        assert reply.take("III")[1:] == (1, 0), "the call was not accepted"
        reply.take("I")
        reply.take_opaque()
        assert reply.take("I") == (0,), "the call was not carried out"
        (status,) = reply.take("I")
        reply.take_opaque()
        reply.take("I")
        if status:
            raise NfsError(status)
        return reply

    def _receive(self) -> bytes:
        parts, is_last = [], False
        while not is_last:
            (head,) = struct.unpack(">I", self._stream.read(4))
            is_last = bool(head >> 31)
            parts.append(self._stream.read(head & (1 << 31) - 1))
        return b"".join(parts)
