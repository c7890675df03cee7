"""An attacker's kit: a ring client written from docs/usrbio.md alone, which sends whatever it is told to.

It imports nothing of the project, so what it does any program of any user could do. An attack is a program
``attack_*.py`` beside this file: `hostile_lab.attacker` starts it as root, it imports what it needs, and calls
`become` before it touches the mount.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

HELLO, ADD_FILE, DROP_FILE, ADD_IOV, DROP_IOV, ADD_RING, DROP_RING, OPEN_NAMESPACE, CLOSE_NAMESPACE, MAP_ARENA = range(
    1, 11
)
SHOW_TOKEN = 12
READ, WRITE, FSYNC, GET, PUT, EXISTS, DELETE, PREFETCH, CANCEL, RELEASE = range(1, 11)
VIEW, PREFIX = 1, 2
MESSAGE = struct.Struct("<IIq6Q")
SQE = struct.Struct("<BBHIIIQQQQQII")
CQE = struct.Struct("<QqQII")
SQ_HEAD, SQ_TAIL, DAEMON_SLEEPS, CQ_HEAD, CQ_TAIL, CLIENT_SLEEPS = 64, 128, 192, 256, 320, 384
"""offsets of words in a ring's memory"""


def become(uid: int, gid: int | None = None) -> None:
    """Be another user from now on, in no group but its own."""
    os.setgroups([])
    os.setresgid(*[uid if gid is None else gid] * 3)
    os.setresuid(uid, uid, uid)


def say(**facts: object) -> None:
    """A line of JSON for whoever started this attack."""
    print(json.dumps(facts), flush=True)


def wait_for_word() -> str:
    """The next line of whoever started this attack; "" when it went."""
    return sys.stdin.readline().strip()


def memfd(size: int, name: str = "attack", flags: int = os.MFD_ALLOW_SEALING) -> int:
    descriptor = os.memfd_create(name, flags)
    os.ftruncate(descriptor, size)
    return descriptor


class Attacker:
    """One connection. ``hello``: say it at once."""

    def __init__(self, mount: str | Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(os.path.join(mount, ".kvfuse"), os.O_PATH)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/control.sock")
        finally:
            os.close(folder)
        self._number = 0
        if hello:
            self.ask(HELLO, 1)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Any bytes with any descriptors."""
        rights = array.array("i", descriptors).tobytes()
        self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else [])

    def request(self, kind: int, *values: int, descriptors: Sequence[int] = ()) -> None:
        """Send a request, without waiting for its answer."""
        self._number += 1
        self.send(MESSAGE.pack(kind, self._number, 0, *values, *[0] * (6 - len(values))), descriptors)

    def answer(self) -> tuple[int, tuple[int, ...], list[int]]:
        """(0 or errno, values, descriptors) of the next reply. ConnectionResetError when the daemon hung up."""
        return self._next_answer()[1:]

    def last_answer(self) -> tuple[int, tuple[int, ...], list[int]]:
        """The same, to the last request: a daemon after one that was killed may answer those before it once more."""
        while True:
            number, error, values, received = self._next_answer()
            if number == self._number:
                return error, values, received
            for descriptor in received:
                os.close(descriptor)

    def _next_answer(self) -> tuple[int, int, tuple[int, ...], list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 3)
        if len(data) < MESSAGE.size:
            raise ConnectionResetError("the daemon hung up")
        _, number, status, *values = MESSAGE.unpack_from(data)
        return number, -status, tuple(values), list(descriptors)

    def show(self, token: str) -> None:
        """Show the token of a namespace. OSError."""
        self._number += 1
        self.send(MESSAGE.pack(SHOW_TOKEN, self._number, *[0] * 7) + token.encode())
        self._values_of_answer()

    def ask(self, kind: int, *values: int, descriptors: Sequence[int] = ()) -> tuple[int, ...]:
        """The values of the answer; descriptors that came with it are closed. OSError."""
        self.request(kind, *values, descriptors=descriptors)
        return self._values_of_answer()

    def _values_of_answer(self) -> tuple[int, ...]:
        error, answered, received = self.answer()
        for descriptor in received:
            os.close(descriptor)
        if error:
            raise OSError(error, os.strerror(error))
        return answered

    def iov(self, descriptor: int, size: int) -> int:
        return self.ask(ADD_IOV, size, descriptors=[descriptor])[0]

    def file(self, path: str | Path, flags: int = os.O_RDWR) -> int:
        """Register a file for what ``flags`` open it for."""
        descriptor = os.open(path, flags)
        try:
            return self.ask(ADD_FILE, (flags & os.O_ACCMODE) + 1, descriptors=[descriptor])[0]
        finally:
            os.close(descriptor)

    def namespace(self, folder: str | Path, mode: int = 0o600) -> int:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.ask(OPEN_NAMESPACE, mode, descriptors=[descriptor])[0]
        finally:
            os.close(descriptor)

    def ring(self, entries: int = 64, aux_size: int = 4096) -> Ring:
        self.request(ADD_RING, entries, aux_size, 0)
        error, values, descriptors = self.answer()
        if error:
            raise OSError(error, os.strerror(error))
        return Ring(values[0], entries, values[1], *descriptors)

    def close(self) -> None:
        self.socket.close()


class Ring:
    """Queues in shared memory. One thread."""

    def __init__(self, handle: int, entries: int, size: int, memory: int, daemon_bell: int, client_bell: int) -> None:
        self.handle = handle
        self.entries = entries
        self.map = mmap.mmap(memory, size)
        self.words = memoryview(self.map).cast("Q")
        self.aux = 4096 + -(-96 * entries // 4096) * 4096
        """where the aux area begins"""
        self.daemon_bell, self.client_bell = daemon_bell, client_bell
        os.close(memory)

    def push(self, *entries: bytes) -> None:
        """Publish packed SQEs and wake the daemon, whether or not it sleeps. No check of room."""
        tail = self.words[SQ_TAIL // 8]
        for number, entry in enumerate(entries, tail):
            place = 4096 + 64 * (number % self.entries)
            self.map[place : place + 64] = entry
        self.words[SQ_TAIL // 8] = tail + len(entries)
        os.eventfd_write(self.daemon_bell, 1)

    def reap(self) -> list[tuple[int, ...]]:
        """All completions that are there: (user_data, result, offset, arena, pin) each."""
        head, tail = self.words[CQ_HEAD // 8], self.words[CQ_TAIL // 8]
        start = 4096 + 64 * self.entries
        found = [CQE.unpack_from(self.map, start + 32 * (number % self.entries)) for number in range(head, tail)]
        self.words[CQ_HEAD // 8] = tail
        return found

    def wait(self, count: int = 1) -> list[tuple[int, ...]]:
        """At least ``count`` completions; looks for them without a rest."""
        found = self.reap()
        while len(found) < count:
            os.sched_yield()
            found += self.reap()
        return found


def sqe(
    op: int, *, handle: int = 0, iov: int = 0, offset: int = 0, iov_offset: int = 0, length: int = 0,
    key_offset: int = 0, key_length: int = 0, user_data: int = 0, flags: int = 0, priority: int = 0,
    timeout_us: int = 0, reserved: int = 0,
) -> bytes:  # fmt: skip
    """A packed submission."""
    return SQE.pack(
        op, priority, flags, handle, iov, key_length, offset, iov_offset, length, key_offset, user_data, timeout_us,
        reserved,
    )  # fmt: skip
