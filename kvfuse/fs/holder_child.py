"""A daemon, as its holder has it, and the messages between the two; see `holder`. Standard library only."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import time
from collections.abc import Sequence

MESSAGE_SIZE_MAX = 1 << 17
DESCRIPTORS_MAX = 64
HELLO, KEPT, START, KEEP, DROP, READY, END, LEAVE, LEFT, STAYS = b"HKSPDREVLY"
VARIABLE = "KVFUSE_HOLDER"
"""of the daemon's environment: the descriptor of its end"""
ERRORS_VARIABLE = "KVFUSE_HOLDER_ERRORS"
"""and of what is to be its standard error when it serves"""
SAID_SIZE_MAX = 2000
"""bytes of the last words of a daemon that could not begin"""


class Child:
    """A daemon, or one that stands by to be the next."""

    def __init__(self, command: list[str], folder: str, *, heard: bool = False) -> None:
        """``heard``: what it says on standard error before it serves is for `last_words`."""
        self.said = os.memfd_create("kvfuse-errors") if heard else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_SIZE_MAX)
        self.socket = ours
        self.begun = time.monotonic()
        self.has_said_hello = self.is_ready = self.has_ended = self.has_left = self.is_silent = False
        self.version = self.problem = ""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.set_inheritable(theirs.fileno(), True)
                os.environ[VARIABLE] = str(theirs.fileno())
                if self.said is not None:
                    errors = os.dup(2)
                    os.set_inheritable(errors, True)
                    os.environ[ERRORS_VARIABLE] = str(errors)
                    os.dup2(self.said, 2)
                os.chdir(folder if os.path.isdir(folder) else "/")
                os.execv(command[0], command)
            except BaseException as error:
                os.write(2, f"kvfuse: {command[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """OSError where it is gone."""
        socket.send_fds(self.socket, [bytes([kind]), name.encode(), b"\0", content], list(descriptors))

    def receive(self) -> tuple[int, str, bytes, list[int]] | None:
        """Its next message; None: it says nothing any more."""
        try:
            data, descriptors = receive(self.socket)
        except ConnectionResetError:
            return None
        if not data:
            return None
        name, _, content = data[1:].partition(b"\0")
        return data[0], name.decode(), content, descriptors

    def said_hello(self, content: bytes) -> None:
        said = json.loads(content)
        self.version, self.problem = str(said["version"]), str(said["problem"] or "")
        self.has_said_hello = True

    def last_words(self) -> str:
        """What it said when it could not begin, if that is known."""
        if self.said is None:
            return ""
        begin = max(0, os.fstat(self.said).st_size - SAID_SIZE_MAX)
        return os.pread(self.said, SAID_SIZE_MAX, begin).decode("utf-8", "replace").strip()

    def dismissed(self) -> int:
        """It is not needed: kill it. Its pid, to be waited for."""
        os.kill(self.pid, signal.SIGKILL)
        self.close()
        return self.pid

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)
        if self.said is not None:
            os.close(self.said)
            self.said = None


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """The next datagram and its descriptors, which no child gets (`socket.recv_fds` of Python 3.11 takes no flags)."""
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(DESCRIPTORS_MAX * descriptors.itemsize)
    data, ancillary, _, _ = end.recvmsg(MESSAGE_SIZE_MAX, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, descriptors.tolist()


def is_dead(pid: int) -> bool:
    """The first thread of a process of ours has ended, or a core file is written of it.

    As `guard` has it, which imports nothing of ours. But what is not in the table is dead here: the holder is the one
    who takes its children out.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return True
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    return fields.get(b"State", b"")[:1] in (b"Z", b"X") or fields.get(b"CoreDumping") == b"1"
