"""Receives client descriptors in throw-away threads, so that one whose close blocks cannot block the daemon.

The close of a foreign descriptor may wait: for a TCP peer (SO_LINGER), for a file system of the client's, or, for a
file of our own mount, until this daemon has answered a flush. So a *receiver* takes each message that carries
descriptors: a thread with a table of descriptors of its own. It closes none. It ends, and the kernel closes its table:
a thread that exits does not linger for a TCP peer, and nobody waits for it where a file system does not answer.

A user has few receivers at a time. A stuck one counts until its table is closed, so a user who sticks all of them has
only its own requests refused. The last free threads are for users who have none.

The table of a receiver lacks the descriptor that answers the kernel. So a daemon that is killed while a receiver
flushes a file of its own mount does not wait for itself: the other threads drop that descriptor, the kernel ends the
file system, and with it the wait. Only memory (`DescriptorReceiver.take_memory`) enters the table of the process.
"""

from __future__ import annotations

import array
import ctypes
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import trio

from kvfuse import failing
from kvfuse.errors import InvalidArgument
from kvfuse.usrbio.daemon.client_memory import seal_memory
from kvfuse.usrbio.daemon.registered_things import check_memory
from kvfuse.usrbio.protocol.wire import MESSAGE_SIZE_MAX

T = TypeVar("T")

log = logging.getLogger(__name__)

SECONDS = 10.0
"""how long a request waits for a receiver, and then for what the kernel says of a descriptor"""
SETTLE_SECONDS = 1.0
"""how long a daemon that hands over waits for threads that take messages"""
USER_THREADS_MAX = 4
"""receivers of one user; some perhaps last for ever, for a file system that never answers"""
THREADS_MAX = 64
"""receivers of all users"""
RESERVED_THREADS = 16
"""receivers of all that only users without any get"""
RETRY_SECONDS = 0.1
"""time after which the daemon tries again to start a receiver"""
DESCRIPTORS_MAX = 253
"""most of one message (SCM_MAX_FD): a receiver takes all, or the kernel would close the rest before the thread exits"""
MESSAGES_TURNED_AWAY = 8
"""messages that `try_close` looks at before a receiver does"""
CREDENTIALS_SPACE = socket.CMSG_SPACE(12)
NO_CALL = b"\xff" * 8
SO_PASSRIGHTS = 83
"""off: the kernel refuses senders messages with descriptors"""
CLONE_FILES = 0x400
THREAD_NAME = "kvfuse-receiver"
_libc = ctypes.CDLL(None, use_errno=True)


class NotTaken(TimeoutError):
    """No receiver was free in time: the message and its descriptors stay in the socket."""


@dataclass(eq=False)
class _PassingCall(Generic[T]):
    """One job of a thread. ``job`` gets the thread's descriptors of a client's socket and of the thread's own."""

    job: Callable[[int, int], T]
    results: list[T] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    memory: int | None = None
    """a descriptor that the thread sent to the process"""
    ended: trio.Event = field(default_factory=trio.Event)
    """the thread's descriptors are closed"""


@dataclass(eq=False)
class _UserThreads:
    """The receivers of one user, of all its connections."""

    turns: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(USER_THREADS_MAX))
    count: int = 0
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(USER_THREADS_MAX))
    """threads with the table of the process, for jobs that only this user waits for"""


@asynccontextmanager
async def open_receivers() -> AsyncIterator[DescriptorReceivers]:
    """Run receivers for the body. At the end nobody waits for stuck threads."""
    async with trio.open_nursery() as nursery:
        receivers = DescriptorReceivers(nursery)
        try:
            yield receivers
        finally:
            receivers.close()
            nursery.cancel_scope.cancel()


class DescriptorReceivers:
    """The receivers of all users. Only the event loop calls it.

    A thread with a nearly empty table starts them, so that each begins with a copy of that one. Calls travel through a
    socket, with the client's socket; ``_wanted`` counts those that have no thread yet.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        """Start the thread that starts receivers, and wait until it has tried to get a table of its own."""
        self.background = nursery
        self._users: WeakValueDictionary[Hashable, _UserThreads] = WeakValueDictionary()
        self._count = 0
        self._freed = trio.lowlevel.ParkingLot()
        self._calls: dict[int, _PassingCall[Any]] = {}
        """the thread that does one, or the caller that gives it up, takes it out, and has it alone"""
        self._numbers = 0
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._wanted = threading.Semaphore(0)
        self._closed = False
        self.is_apart = False
        """threads have tables of their own"""
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), name=THREAD_NAME, daemon=True).start()
        ready.wait()
        if self.is_apart:
            self._theirs.close()

    def make_receiver(self, user: Hashable, stream: trio.socket.SocketType) -> DescriptorReceiver:
        """Make the receiver of one connection of ``user``, whose socket is ``stream``."""
        return DescriptorReceiver(self, self._users.setdefault(user, _UserThreads()), stream)

    def close(self) -> None:
        self._closed = True
        self._wanted.release()
        self._ours.close()
        self._theirs.close()

    # -- calls ---------------------------------------------------------------------------------------

    async def take_turn(self, user: _UserThreads) -> None:
        """Wait until the user may have one more thread."""
        await user.turns.acquire()
        try:
            while self._count >= THREADS_MAX - (RESERVED_THREADS if user.count else 0):
                await self._freed.park()
        except BaseException:
            user.turns.release()
            raise
        user.count += 1
        self._count += 1

    def _end_turn(self, user: _UserThreads) -> None:
        user.count -= 1
        self._count -= 1
        user.turns.release()
        self._freed.unpark_all()

    async def run_call(self, user: _UserThreads, stream: trio.socket.SocketType, call: _PassingCall[Any]) -> None:
        """Have a thread do a call; return when the thread's table is closed. The user's turn ends with that.

        NotTaken where no thread began in time; TimeoutError where it did not end: it continues.
        """
        number = self._start(user, stream, call)
        with trio.move_on_after(SECONDS):
            await call.ended.wait()
        if self._calls.pop(number, None) is not None:
            raise NotTaken(errno.ETIMEDOUT, "the daemon cannot start a thread to receive the descriptor")
        if not call.ended.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "the descriptor's file system does not answer")

    def _start(self, user: _UserThreads, stream: trio.socket.SocketType, call: _PassingCall[Any]) -> int:
        """Queue a call for a thread; returns its number. The turn ends with an OSError: where the kernel does not pass
        the client's socket, or the daemon has no descriptor left."""
        number, self._numbers = self._numbers, self._numbers + 1
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except BaseException:
            self._end_turn(user)
            raise
        self._calls[number] = call
        try:
            with theirs:
                socket.send_fds(self._ours, [number.to_bytes(8, "little")], [stream.fileno(), theirs.fileno()])
        except BaseException:
            del self._calls[number]
            ours.close()
            self._end_turn(user)
            raise
        self._wanted.release()
        self.background.start_soon(failing.vital_task, self._follow, call, ours, user)
        return number

    def abandon(self, stream: trio.socket.SocketType) -> None:
        """Have a thread close a socket and all that it carries, at the end of all connections: it counts for nobody."""
        try:
            socket.send_fds(self._ours, [NO_CALL], [stream.fileno()])
            self._wanted.release()
        except OSError:
            os.dup(stream.fileno())  # the process keeps it until its exit, which closes it without a wait

    async def _follow(self, call: _PassingCall[Any], ours: socket.socket, user: _UserThreads) -> None:
        """Wait until the thread's exit, after it flushed every file, closed its end of a socket; then end the turn."""
        try:
            ours.setblocking(False)
            with trio.socket.from_stdlib_socket(ours) as end:
                while True:
                    data, ancillary, _, _ = await end.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        break
                    call.memory = next(iter(_descriptors_in(ancillary)), None)  # None: the process has none left
        finally:
            self._end_turn(user)
            call.ended.set()

    # -- threads -------------------------------------------------------------------------------------

    def _run(self, ready: threading.Event) -> None:
        channel = self._theirs.fileno()
        if _libc.unshare(CLONE_FILES) == 0:
            self.is_apart = True
            os.closerange(0, channel)
            os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
            for _ in range(3):  # the daemon's starter waits until no thread has its output open
                os.open(os.devnull, os.O_RDWR)
        ready.set()
        while self._wanted.acquire() and not self._closed:
            while not _start_thread(self._do_call, channel):
                time.sleep(RETRY_SECONDS)  # this thread only starts others, and there is no event for a free one

    def _do_call(self, channel: int) -> None:
        """Do one call. With a table of its own the thread closes nothing by itself: see the module."""
        while self.is_apart and _libc.unshare(CLONE_FILES) != 0:  # the machine has no memory now
            time.sleep(RETRY_SECONDS)  # its user alone waits for this thread
        with socket.socket(fileno=os.dup(channel)) as commands:
            data, own, _, _ = socket.recv_fds(commands, 8, 2)
        call = self._calls.pop(int.from_bytes(data, "little"), None) if data else None
        if call is not None:
            try:
                call.results.append(call.job(own[0], own[1]))
            except Exception as error:  # the caller raises it, of any kind
                call.failures.append(error)
        del call  # its failure may refer to it
        if not self.is_apart:
            close_all(own)


def _start_thread(target: Callable[..., None], *arguments: object) -> bool:
    """Start a daemon thread. False where the machine cannot start one more."""
    try:
        threading.Thread(target=target, args=arguments, name=THREAD_NAME, daemon=True).start()
    except RuntimeError:
        return False
    return True


class DescriptorReceiver:
    """The receivers of a user, for one of its connections: they take messages with descriptors of ``stream``."""

    def __init__(self, receivers: DescriptorReceivers, user: _UserThreads, stream: trio.socket.SocketType) -> None:
        self._receivers = receivers
        self._user = user
        self._stream = stream
        self.has_descriptors = False
        """the peeked message has some"""
        self._is_taken = False
        """the peeked message was taken out"""
        self._last: _PassingCall[Any] | None = None
        """the last call that takes a message"""

    async def peek_message(self) -> bytes:
        """Peek at the next message, which stays in the socket; empty where the client is gone."""
        data, _, flags, _ = await self._stream.recvmsg(MESSAGE_SIZE_MAX + 1, 0, socket.MSG_PEEK)
        self.has_descriptors, self._is_taken = bool(flags & socket.MSG_CTRUNC), False
        return data

    async def take_message(self) -> None:
        """Take the message that `peek_message` returned out of the socket, unless it was taken with its descriptor."""
        if self._is_taken:
            return
        if self.has_descriptors:
            await self.drop_message()
        else:
            await self._stream.recv(1)

    async def inspect(self, check: Callable[[int], T]) -> T:
        """Take the next message: the result of ``check`` of its one descriptor.

        The descriptor is closed on return. InvalidArgument where there is none, or several; NotTaken, TimeoutError;
        what ``check`` raises.
        """
        call: _PassingCall[T] = _PassingCall(lambda own, _: self._inspect(own, check))
        await self._do_in_time(call)
        return _answer(call)

    async def take_memory(self, check: Callable[[int], None] | None = None) -> int:
        """Take the next message: the descriptor of memory in it, after ``check``. As `inspect`.

        ``check`` None: it must be shared memory, OSError EINVAL for others, whose size the daemon seals, where it can.
        """
        call: _PassingCall[None] = _PassingCall(
            lambda own, end: self._inspect(own, partial(_send_memory, end, check or _check_shared))
        )
        try:
            await self._do_in_time(call)
            _answer(call)
            if call.memory is None:
                raise OSError(errno.EMFILE, "the daemon has no descriptor left for the memory")
        except BaseException:
            self._receivers.background.start_soon(failing.vital_task, self._close_memory, call)
            raise
        return call.memory

    async def empty_socket(self) -> None:
        """Shut the socket down and drop all that it received, so that its close does not wait. `drop_message` may.

        After a cancellation a receiver has the rest, with the socket itself.
        """
        with suppress(OSError):  # the client did that
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # tells an empty message from the end
        try:
            while True:
                try:
                    _, ancillary, flags, _ = await self._stream.recvmsg(1, CREDENTIALS_SPACE, socket.MSG_PEEK)
                except ConnectionResetError:  # the kernel says so once, before what it received
                    continue
                if not ancillary:
                    return
                if flags & socket.MSG_CTRUNC:  # there are descriptors, too
                    await self.drop_message()
                else:
                    await self._stream.recv(1)
        except trio.Cancelled:
            self._receivers.abandon(self._stream)
            raise

    async def _close_memory(self, call: _PassingCall[None]) -> None:
        """Close the descriptor that a thread may still send, although nobody waits for it."""
        await call.ended.wait()
        if call.memory is not None:
            await self.run(os.close, call.memory)

    async def wait_for_thread(self) -> None:
        """Return when no thread is about to take a message: the next daemon must find what is in the socket."""
        if self._last is not None:
            with trio.move_on_after(SETTLE_SECONDS):
                await self._last.ended.wait()

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Run a long job in a thread with the table of the process: ``USER_THREADS_MAX`` of a user at a time."""
        return await trio.to_thread.run_sync(job, *arguments, limiter=self._user.threads)

    async def drop_message(self) -> None:
        """Take the next message, and close all that it carries. Waits for a receiver of the user."""
        while True:
            await self._receivers.take_turn(self._user)
            try:
                await self._receivers.run_call(
                    self._user, self._stream, _PassingCall(lambda own, _: self._close_taken(_take_descriptors(own)))
                )
            except NotTaken:
                continue
            except TimeoutError:  # the message is taken
                pass
            except OSError as error:  # the kernel passes on no socket that holds sockets that hold ... (before 6.10)
                log.warning("a client's descriptors cannot be dropped yet: %s", error)
                await trio.sleep(SECONDS)
                continue
            return

    async def _do_in_time(self, call: _PassingCall[Any]) -> None:
        try:
            with trio.fail_after(SECONDS):
                await self._receivers.take_turn(self._user)
        except trio.TooSlowError:
            call.ended.set()
            raise NotTaken(
                errno.ETIMEDOUT, f"{USER_THREADS_MAX} descriptors of this user are waited for already"
            ) from None
        self._is_taken = True
        self._last = call
        try:
            await self._receivers.run_call(self._user, self._stream, call)
        except NotTaken:
            self._is_taken = False
            raise

    def _inspect(self, stream: int, check: Callable[[int], T]) -> T:
        descriptors = _take_descriptors(stream)
        try:
            if len(descriptors) != 1:
                raise InvalidArgument(f"one descriptor belongs to this request, not {len(descriptors)}")
            return check(descriptors[0])
        finally:
            self._close_taken(descriptors)

    def _close_taken(self, descriptors: list[int]) -> None:
        if not self._receivers.is_apart:
            close_all(descriptors)


def try_close(client: socket.socket) -> bool:
    """Close a socket at once. False, and it is only shut down, where it may carry descriptors: see
    `DescriptorReceiver.empty_socket`."""
    with suppress(OSError):  # the client did that
        client.shutdown(socket.SHUT_RDWR)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    for _ in range(MESSAGES_TURNED_AWAY):
        try:
            _, ancillary, flags, _ = client.recvmsg(1, CREDENTIALS_SPACE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionResetError:  # the kernel says so once, before what it received
            continue
        except BlockingIOError:
            return False
        if not ancillary:
            client.close()
            return True
        if flags & socket.MSG_CTRUNC:
            return False
        client.recv(1, socket.MSG_DONTWAIT)
    return False


def _check_shared(descriptor: int) -> None:
    check_memory(descriptor)
    seal_memory(descriptor)


def _send_memory(end: int, check: Callable[[int], None], descriptor: int) -> None:
    check(descriptor)
    with socket.socket(fileno=os.dup(end)) as sender:
        socket.send_fds(sender, [b"m"], [descriptor])


def _answer(call: _PassingCall[T]) -> T:
    if call.failures:
        raise call.failures.pop()  # else the list and the error would keep each other
    return call.results[0]


def _take_descriptors(stream: int) -> list[int]:
    """Take the next message of a socket: its descriptors."""
    with socket.socket(fileno=os.dup(stream)) as own:
        _, ancillary, _, _ = own.recvmsg(
            MESSAGE_SIZE_MAX,
            socket.CMSG_SPACE(4 * DESCRIPTORS_MAX),
            socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
        )
    return _descriptors_in(ancillary)


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
