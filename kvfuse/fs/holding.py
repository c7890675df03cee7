"""The daemon's side of its holder (`holder`): the keeper of a process that was started by one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import kvfuse
from kvfuse.fs import guard, holder, holder_child
from kvfuse.keeper import Kept, check

PR_SET_PDEATHSIG = 1
"""of prctl(2)"""


class Holding:
    """`Keeper` by the holder that started this process. Made once; `wait` is to return before it is used.

    Messages that the holder is slow to take wait here, and go before the next ones: it does little but take them.
    """

    outlives = True

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._left: dict[str, Kept] = {}
        self._names: dict[str, None] = {}
        """of what was left, taken or not"""
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_sealed = False
        self.is_afresh = False
        """what this process read of mount.conf counts, not what the daemon before it had"""

    @classmethod
    def of_this_process(cls) -> Holding | None:
        """None: no holder started this process. It ends with its holder from here on."""
        descriptor = os.environ.pop(holder_child.VARIABLE, None)
        if descriptor is None:
            return None
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the holder has died")
        return cls(int(descriptor))

    def wait(self, problem: str = "") -> bool:
        """Say that everything is imported, and wait for one's turn. False: a daemon before this one left its mount.

        ``problem``: with mount.conf; no upgrade begins with that.
        """
        self._send(holder_child.HELLO, "", _json({"version": kvfuse.__version__, "problem": problem}))
        while True:
            kind, name, content, descriptors = self._receive()
            if kind == holder_child.START:
                self._socket.setblocking(False)
                self.is_afresh = bool(json.loads(content or b"{}").get("afresh"))
                self._speak_up()
                return holder.CONNECTION not in self._left
            self._left[name] = Kept(content, tuple(descriptors))
            self._names[name] = None

    def _receive(self) -> tuple[int, str, bytes, list[int]]:
        data, descriptors = holder_child.receive(self._socket)
        if not data:
            sys.exit("the holder has died")
        name, _, content = data[1:].partition(b"\0")
        return data[0], name.decode(), content, descriptors

    def _speak_up(self) -> None:
        """What this process says is not for an upgrade's answer any more."""
        errors = os.environ.pop(holder_child.ERRORS_VARIABLE, None)
        if errors is not None:
            sys.stderr.flush()
            os.dup2(int(errors), 2)
            os.close(int(errors))

    # -- Keeper ----------------------------------------------------------------------------------------

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._names if name.startswith(prefix)]

    def take(self, name: str) -> Kept | None:
        return self._left.pop(name, None)

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        check(content, descriptors)
        self._forget(name)
        self._send(holder_child.KEEP, name, content, descriptors)

    def drop(self, name: str) -> None:
        if not self._is_sealed:
            self._forget(name)
            self._send(holder_child.DROP, name)

    def seal(self) -> None:
        self._is_sealed = True

    def _forget(self, name: str) -> None:
        self._names.pop(name, None)
        left = self._left.pop(name, None)
        for descriptor in left.descriptors if left else ():
            os.close(descriptor)

    # -- for the holder itself -------------------------------------------------------------------------

    def ready(self) -> None:
        """The mount answers."""
        self._send(holder_child.READY)

    def end(self, report: object = None) -> None:
        """There is nothing for a next daemon to do; ``report``: why the start failed."""
        self._send(holder_child.END, "", b"" if report is None else _json(report) + b"\n")

    async def asked(self) -> float:
        """Wait until this daemon is to make way for another one; for `leaving`."""
        import trio

        while True:
            await trio.lowlevel.wait_readable(self._socket)
            kind, _, content, descriptors = self._receive()
            for descriptor in descriptors:
                os.close(descriptor)
            if kind == holder_child.LEAVE:
                return float(json.loads(content)["seconds"])

    def stays(self, why: str) -> None:
        """This daemon goes on."""
        self._send(holder_child.STAYS, "", why.encode())

    def left(self) -> None:
        """All is stored and left to the next daemon. This process is killed now."""
        self._socket.setblocking(True)
        self._send(holder_child.LEFT)

    def _send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        message = bytes([kind]) + name.encode() + b"\0" + content
        with self._lock:
            if self._waiting or not self._pass(message, descriptors):
                self._waiting.append((message, tuple(map(os.dup, descriptors))))
            while self._waiting and self._pass(*self._waiting[0]):
                for descriptor in self._waiting.popleft()[1]:
                    os.close(descriptor)

    def _pass(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """False: the holder has to take others first."""
        try:
            socket.send_fds(self._socket, [message], list(descriptors))
        except BlockingIOError:
            return False
        except OSError:  # the holder has died, and this process is about to
            pass
        return True


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def command(config: dict[str, Any]) -> list[str]:
    """How a holder is started; see `holder.Holder` for ``config``."""
    config["guard"] = [sys.executable, "-I", "-S", guard.__file__]
    return [sys.executable, "-I", "-S", holder.__file__, json.dumps(config)]
