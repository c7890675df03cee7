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
from kvfuse.fs import guard, holder
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

    @classmethod
    def of_this_process(cls) -> Holding | None:
        """None: no holder started this process. It ends with its holder from here on."""
        descriptor = os.environ.pop(holder.VARIABLE, None)
        if descriptor is None:
            return None
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the holder has died")
        return cls(int(descriptor))

    def wait(self) -> bool:
        """Say that everything is imported, and wait for one's turn. False: a daemon before this one left its mount."""
        self._socket.send(bytes([holder.HELLO]) + kvfuse.__version__.encode() + b"\0")
        while True:
            data, descriptors = holder.receive(self._socket)
            if not data:
                sys.exit("the holder has died")
            if data[0] == holder.START:
                self._socket.setblocking(False)
                return holder.CONNECTION not in self._left
            name, _, content = data[1:].partition(b"\0")
            self._left[name.decode()] = Kept(content, tuple(descriptors))
            self._names[name.decode()] = None

    # -- Keeper ----------------------------------------------------------------------------------------

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._names if name.startswith(prefix)]

    def take(self, name: str) -> Kept | None:
        return self._left.pop(name, None)

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        check(content, descriptors)
        self._forget(name)
        self._send(holder.KEEP, name, content, descriptors)

    def drop(self, name: str) -> None:
        self._forget(name)
        self._send(holder.DROP, name)

    def _forget(self, name: str) -> None:
        self._names.pop(name, None)
        left = self._left.pop(name, None)
        for descriptor in left.descriptors if left else ():
            os.close(descriptor)

    # -- for the holder itself -------------------------------------------------------------------------

    def ready(self) -> None:
        """The mount answers."""
        self._send(holder.READY)

    def end(self, report: object = None) -> None:
        """There is nothing for a next daemon to do; ``report``: why the start failed."""
        self._send(holder.END, "", b"" if report is None else json.dumps(report).encode() + b"\n")

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


def command(config: dict[str, Any]) -> list[str]:
    """How a holder is started; see `holder.Holder` for ``config``."""
    config["guard"] = [sys.executable, "-I", "-S", guard.__file__]
    return [sys.executable, "-I", "-S", holder.__file__, json.dumps(config)]
