"""A client's connection to the daemon: the control socket inside the mount, and what lives as long as it does.

The connection is the lifetime of everything registered through it: when it ends, whichever way, the daemon takes back
files, iovs, rings and pins. Requests are answered in order; each has a deadline.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from errno import EAGAIN, EINTR, EINVAL, ENOENT, EOPNOTSUPP, ETIMEDOUT
from functools import partial
from itertools import count
from mmap import PROT_READ, mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvfuse.errors import Disconnected
from kvfuse.usrbio.protocol.queues import daemon_of
from kvfuse.usrbio.protocol.wire import (
    DESCRIPTORS_MAX,
    MESSAGE_SIZE_MAX,
    PAGE,
    SOCKET_PATH,
    VERSION,
    Ability,
    DaemonId,
    Message,
    Request,
    pid_namespace,
)

Bytes = npt.NDArray[np.uint8]
_TIMEVAL = struct.Struct("ll")
_DROPS = {
    Request.ADD_FILE: Request.DROP_FILE,
    Request.ADD_IOV: Request.DROP_IOV,
    Request.ADD_DMABUF: Request.DROP_IOV,
    Request.ADD_RING: Request.DROP_RING,
    Request.OPEN_NAMESPACE: Request.CLOSE_NAMESPACE,
}
"""by what a request registers something: how that is let go of"""


def find_mount(path: str | os.PathLike[str]) -> Path:
    """The root of the mount that ``path`` lies in. FileNotFoundError where it is in none with rings; Disconnected."""
    start = Path(os.path.abspath(path))
    for folder in (start, *start.parents):
        try:
            found = os.stat(folder / SOCKET_PATH)
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # a folder may need a token
            continue
        except OSError as error:
            raise Disconnected(f"{folder}: the mount does not answer: {error.strerror}") from error
        if stat.S_ISSOCK(found.st_mode):
            return folder
    raise FileNotFoundError(ENOENT, f"{start} is not inside a kvfuse mount that offers rings ({SOCKET_PATH} is absent)")


class _Arena(mmap):
    """A mapped arena. Every view of it keeps the session, and with it the pins, alive."""

    session: Session


class Session:
    """One connection. Safe to use from any thread. ``deadline``: seconds that a request may take."""

    def __init__(self, mount: Path, deadline: float, tokens: Sequence[str] = ()) -> None:
        """``tokens``: of namespaces, which the daemon asks for."""
        self.unpins: deque[int] = deque()
        """pins of views that died: the next submission of any ring gives them back"""
        self._deadline = deadline
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._arenas: dict[int, Bytes] = {}
        self._views: dict[int, weakref.ref[Bytes]] = {}
        self._closing = False
        self.has_tokens = False
        """it has shown some"""
        self._unanswered: set[int] = set()
        """numbers of requests that were given up"""
        self._rings: list[weakref.ref[memoryview]] = []
        """words of rings"""
        self._socket = _connect(mount, deadline)
        try:
            try:
                reply, _ = self.request(Request.HELLO, VERSION)
            except Disconnected:  # a daemon that is killed as it accepts a client has not kept it for the next one
                self._socket, self._closing = _connect(mount, deadline), False
                reply, _ = self.request(Request.HELLO, VERSION)
            if reply.values[0] != VERSION:
                raise Disconnected(f"the daemon speaks version {reply.values[0]} of the ring protocol, not {VERSION}")
            for token in tokens:
                self.show_token(token)
        except BaseException:
            self._socket.close()
            raise
        _sessions.add(self)

    def show_token(self, token: str) -> None:
        """For all that is registered from here on. ValueError: it is none; Disconnected."""
        try:
            self.request(Request.SHOW_TOKEN, text=token)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            raise ValueError(f"the daemon does not take the token: {error.strerror}") from None
        self.has_tokens = True

    @property
    def lacks_adapter(self) -> str:
        """Why the daemon can register no memory of a GPU; "" where it may be able to. Disconnected.

        It is asked each time: the next daemon may be another version, or live on with other devices.
        """
        descriptor = os.memfd_create("kvfuse-probe", os.MFD_CLOEXEC)
        try:
            reply, _ = self.request(Request.HELLO, VERSION)
            if Ability.DMABUF in Ability(reply.values[3]):
                return ""
            self.request(Request.ADD_DMABUF, 0, PAGE, descriptors=[descriptor])
        except OSError as error:
            if error.errno == EOPNOTSUPP or isinstance(error, TimeoutError):
                return error.strerror or str(error)
        finally:
            os.close(descriptor)
        return "the daemon is of an older version, which registers no memory of GPUs"

    def request(
        self, request: Request, *values: int, descriptors: Sequence[int] = (), text: str = ""
    ) -> tuple[Message, list[int]]:
        """(reply, descriptors that came with it). OSError as the daemon answered, TimeoutError, Disconnected."""
        if self._closing:
            raise Disconnected("the connection is closed")
        reply = Message(request, 0, -EINTR)
        with self._lock:
            try:
                while reply.status == -EINTR:  # the daemon before the present one had taken it
                    message = Message(request, next(self._numbers), values=values, text=text)
                    self._socket.settimeout(self._deadline)
                    socket.send_fds(self._socket, [message.pack()], list(descriptors))
                    self._unanswered.add(message.number)
                    reply, received = self._reply_to(message.number)
                    self._unanswered.discard(message.number)
            except TimeoutError:
                text = f"the daemon did not answer {request.name} within {self._deadline:g} s"
                raise TimeoutError(ETIMEDOUT, text) from None
            except (OSError, ValueError) as error:
                self.close()
                raise Disconnected(f"the daemon is gone: {error}") from error
        if reply.status < 0:
            close_all(received)
            raise OSError(-reply.status, reply.text or os.strerror(-reply.status))
        return reply, received

    def drop(self, request: Request, handle: int) -> None:
        """Have the daemon let go of something. If the connection has ended, it has already. TimeoutError."""
        with suppress(Disconnected):
            self.request(request, handle)

    def _reply_to(self, number: int) -> tuple[Message, list[int]]:
        """The reply with that number. What a reply that came too late registered is let go of: nobody knows it."""
        give_up = time.monotonic() + self._deadline
        while True:
            self._socket.settimeout(max(give_up - time.monotonic(), 1e-6))
            data, received, _, _ = socket.recv_fds(
                self._socket, MESSAGE_SIZE_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise ConnectionResetError("the connection was closed")
            reply = Message.unpack(data)
            if reply.number == number:
                return reply, list(received)
            close_all(received)
            if reply.number in self._unanswered:  # else the next daemon answered once more
                self._unanswered.discard(reply.number)
                if reply.status == 0 and (drop := _DROPS.get(Request(reply.request))) is not None:
                    self._socket.send(Message(drop, next(self._numbers), values=reply.values[:1]).pack())

    def next_message(self, size: int) -> bytes:
        """The next message, of a daemon that sends them unasked. Waits without a limit. Disconnected."""
        try:
            self._socket.settimeout(None)
            data = self._socket.recv(size)
        except OSError as error:
            raise Disconnected(f"the connection ended: {error}") from error
        if not data:
            self.close()
            raise Disconnected("the daemon closed the connection")
        return data

    def hangup_descriptor(self) -> int:
        """A new descriptor that reports a hangup when the connection ends. Disconnected."""
        try:
            return os.dup(self._socket.fileno())
        except OSError:
            raise Disconnected("the connection is closed") from None

    # -- who serves it -------------------------------------------------------------------------------

    def heed(self, words: memoryview) -> None:
        """A ring of the connection says from here on which daemon serves it, as long as somebody has its words."""
        self._rings = [ring for ring in self._rings if ring() is not None] + [weakref.ref(words)]

    @property
    def daemon(self) -> DaemonId:
        """That serves the connection now, or did last: another one after it was killed, or upgraded.

        As a ring says, without a call; where there is none the daemon is asked: TimeoutError, Disconnected.
        """
        found = [daemon_of(words) for ring in self._rings if (words := ring()) is not None]
        if found:
            return max(found)
        reply, _ = self.request(Request.HELLO, VERSION)
        return DaemonId(reply.values[4], reply.values[1], reply.values[5])

    @property
    def daemon_pid(self) -> int:
        """The number of that process; 0 where it says none, or lives in another pid namespace, or the connection ended.

        Not whether it lives: which processes may write into memory, `BlockStore.is_silent` knows.
        """
        try:
            daemon = self.daemon
        except (OSError, Disconnected):
            return 0
        return daemon.pid if daemon.namespace and daemon.namespace == pid_namespace() else 0

    # -- pinned views --------------------------------------------------------------------------------

    def view(self, arena: int, offset: int, size: int, pin: int) -> memoryview:
        """Read-only bytes of an arena. ``pin`` goes to `unpins` when the last reference to them is gone."""
        try:
            bytes_ = self.arena(arena)
        except BaseException:
            self.unpins.append(pin)
            raise
        if offset + size > len(bytes_):
            raise self.broken(f"a view of {size} bytes at {offset} of an arena of {len(bytes_)}")
        exporter = bytes_[offset : offset + size]
        self._views[pin] = weakref.ref(exporter, partial(self._unpin, pin))
        return exporter.data

    def arena(self, number: int) -> Bytes:
        """All memory of an arena in which this client has a view, or of an index that it has.

        It stays mapped as long as somebody has it, or the session is open. OSError, Disconnected.
        """
        bytes_ = self._arenas.get(number)
        if bytes_ is None:
            bytes_ = self._arenas.setdefault(number, self._map_arena(number))  # another thread may have been faster
        return bytes_

    def _map_arena(self, arena: int) -> Bytes:
        reply, (descriptor,) = self.request(Request.MAP_ARENA, arena)
        try:
            mapping = _Arena(descriptor, reply.values[0], prot=PROT_READ)
        finally:
            os.close(descriptor)
        mapping.session = self
        return np.frombuffer(mapping, np.uint8)

    def _unpin(self, pin: int, _: object) -> None:
        """May run in any thread and at any instruction: takes no lock."""
        self._views.pop(pin, None)
        self.unpins.append(pin)
        if self._closing and not self._views:
            self._hang_up()

    # -- the end -------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """It is closed, or the daemon has hung up."""
        try:
            poll = select.poll()
            poll.register(self._socket, 0)  # a hangup is reported whatever one asks for
            return self._closing or bool(poll.poll(0))
        except ValueError:  # the socket is closed
            return True

    def broken(self, what: str) -> Disconnected:
        """The error to raise where the daemon does what the protocol does not allow: nothing more is asked of it."""
        self.close()
        return Disconnected(f"the daemon does not keep to the protocol: {what}")

    def close(self) -> None:
        """End the connection; while views are alive it stays, so that nothing else takes the place of their bytes."""
        self._closing = True
        if not self._views:
            self._hang_up()

    def _hang_up(self) -> None:
        """Tell the daemon and the rings that wait; shutdown reaches them, which a close alone would not."""
        with suppress(OSError):  # it is closed, or the daemon is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._arenas.clear()  # they have this session, and arrays are no part of the cycles that Python finds


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In the child of a fork: the connections are the parent's and end when it ends. Here they are closed."""
    for session in list(_sessions):
        session._closing = True
        session._socket.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _connect(mount: Path, deadline: float) -> socket.socket:
    """Through a descriptor of the folder: the name of a socket may be 107 bytes long, that of a mount 4095."""
    folder_name, socket_name = os.path.split(SOCKET_PATH)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        folder = os.open(mount / folder_name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With a timeout of Python's, connect() would fail at once where many wait to be accepted.
            seconds, microseconds = divmod(int(deadline * 1e6), 10**6)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, microseconds))
            connection.connect(f"/proc/self/fd/{folder}/{socket_name}")
        finally:
            os.close(folder)
    except OSError as error:
        connection.close()
        if error.errno == EAGAIN:  # many wait to be accepted
            raise TimeoutError(ETIMEDOUT, f"{mount}: the daemon accepted no connection within {deadline:g} s") from None
        raise Disconnected(f"{mount}: no daemon answers: {error.strerror or error}") from error
    return connection


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
