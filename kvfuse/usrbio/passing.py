"""Descriptors that clients pass, taken where they can do no harm.

A client passes descriptors of files of our own mount. To close one, or to end with one open, is to wait until the
kernel has flushed the file, for which it asks this daemon: a daemon that is killed in that moment would wait for
itself for ever, and the mount with it. So threads take them that have a table of descriptors of their own, without the
one that answers the kernel. When the daemon is killed, the other threads let go of that, the kernel ends the
file system, and with it the wait. Only memory of clients (`Usher.memory`) ever comes into the table of the process.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import Self, TypeVar

import trio

from kvfuse.errors import InvalidArgument
from kvfuse.usrbio.registry import check_memory
from kvfuse.usrbio.wire import DESCRIPTORS_MAX, MESSAGE_SIZE_MAX

T = TypeVar("T")

SECONDS = 10.0
"""how long the kernel may take to tell about a descriptor, and to close it"""
THREADS_MAX = 64
"""that may wait for the kernel at once; some perhaps for ever, for a file system that never answers"""
CLONE_FILES = 0x400
THREAD_NAME = "kvfuse-usher"


class NotTaken(TimeoutError):
    """Too much is waited for already: the message and its descriptor are where they were."""


class Usher:
    """A thread with a table of its own, and threads of it, which have the same. Used from the event loop.

    It is told by a socket which client to attend to: the number of a call, with the client's descriptor.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls: dict[int, Callable[[list[int]], None]] = {}
        self._free = threading.Semaphore(THREADS_MAX)
        self._waiters = trio.CapacityLimiter(THREADS_MAX)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        """Waits for the thread, for a moment."""
        self._thread.start()
        self._ready.wait()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()

    async def inspect(self, stream: trio.socket.SocketType, check: Callable[[int], T]) -> T:
        """What ``check`` says of the one descriptor that comes with the next message of a socket, which is taken.

        The descriptor is closed on return. InvalidArgument where none came, or several; NotTaken, TimeoutError; what
        ``check`` raises.
        """
        return await self._call([stream.fileno()], lambda own: _inspect(own[0], check))

    async def memory(self, stream: trio.socket.SocketType) -> int:
        """The descriptor of shared memory that comes with the next message. As `inspect`; OSError EINVAL for others."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            descriptors = [stream.fileno(), theirs.fileno()]
            await self._call(descriptors, lambda own: _inspect(own[0], functools.partial(_pass_on, own[1])))
            _, received, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_DONTWAIT)
            return received[0]

    async def _call(self, descriptors: list[int], call: Callable[[list[int]], T]) -> T:
        """``call`` in a thread with the other table, with its copies of ``descriptors``. After a timeout it goes on."""
        if not self._free.acquire(blocking=False):
            raise NotTaken(errno.ETIMEDOUT, f"{THREADS_MAX} descriptors are waited for already")
        done = threading.Event()
        results: list[T] = []
        failures: list[Exception] = []

        def run(own: list[int]) -> None:
            try:
                if not own:
                    raise NotTaken(errno.ETIMEDOUT, "there is no thread to look at the descriptor")
                results.append(call(own))
            except Exception as error:  # whatever it is, it is raised where it is waited for
                failures.append(error)
            finally:
                _close_all(own)
                self._free.release()
                done.set()

        number = id(run)
        self._calls[number] = run
        socket.send_fds(self._ours, [number.to_bytes(8, "little")], descriptors)
        # Another thread waits: the usher's have not the descriptor that wakes the event loop.
        await trio.to_thread.run_sync(done.wait, SECONDS, limiter=self._waiters)
        if failures:
            raise failures.pop()  # which keeps no list that keeps it
        if not results:
            raise TimeoutError(errno.ETIMEDOUT, "the descriptor's file system does not answer")
        return results[0]

    def _run(self) -> None:
        channel = self._theirs.fileno()
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_FILES) == 0:
            os.closerange(0, channel)
            os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
            for _ in range(3):  # whoever started the daemon waits until nobody has its output any more
                os.open(os.devnull, os.O_RDWR)
        else:  # forbidden: then it is the table of all, and what this guards against may happen
            channel = os.dup(channel)
        self._ready.set()
        with socket.socket(fileno=channel) as commands:
            while True:
                data, descriptors, _, _ = socket.recv_fds(commands, 8, 2)
                if not data:
                    return
                run = self._calls.pop(int.from_bytes(data, "little"))
                try:
                    threading.Thread(target=run, args=(descriptors,), name=THREAD_NAME, daemon=True).start()
                except RuntimeError:  # the machine has none for us
                    _close_all(descriptors)
                    run([])


def _pass_on(channel: int, descriptor: int) -> None:
    check_memory(descriptor)
    with socket.socket(fileno=os.dup(channel)) as sender:
        socket.send_fds(sender, [b"m"], [descriptor])


def _inspect(stream: int, check: Callable[[int], T]) -> T:
    with socket.socket(fileno=os.dup(stream)) as own:
        _, ancillary, _, _ = own.recvmsg(
            MESSAGE_SIZE_MAX, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        if len(descriptors) != 1:
            raise InvalidArgument(f"one descriptor belongs to this request, not {len(descriptors)}")
        return check(descriptors[0])
    finally:
        _close_all(list(descriptors))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
